"""Matching by order: the longest common subsequence of two sequences, if there is only one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

LARGEST = 4_000_000
"""The largest number of pairs of elements that is searched; longer sequences count as ambiguous."""


def unique_alignment(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]] | None:
    """Returns the pairs of positions of the longest common subsequence, None if several alignments are that long."""
    if len(a) * len(b) > LARGEST:
        return None
    codes = {token: i for i, token in enumerate(dict.fromkeys([*a, *b]))}
    x, y = [codes[t] for t in a], [codes[t] for t in b]
    longest = np.zeros((len(x) + 1, len(y) + 1), np.int32)
    count = [1] * (len(y) + 1)  # the number of longest alignments of the prefixes, capped at 2
    for i, token in enumerate(x, 1):
        above, row = longest[i - 1].tolist(), [0]
        old, count = count, [1]
        for j, other in enumerate(y, 1):
            best = max(above[j], row[j - 1], above[j - 1] + (token == other))
            ways = old[j - 1] if token == other and above[j - 1] + 1 == best else 0
            ways += old[j] * (above[j] == best) + count[j - 1] * (row[j - 1] == best)
            ways -= old[j - 1] * (above[j - 1] == best)
            row.append(best)
            count.append(min(ways, 2))
        longest[i] = row
    if count[-1] != 1:
        return None
    pairs, i, j = [], len(x), len(y)
    while i and j:
        if longest[i - 1, j] == longest[i, j]:
            i -= 1
        elif longest[i, j - 1] == longest[i, j]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]
