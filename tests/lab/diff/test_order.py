"""The unique longest common subsequence against all alignments of short sequences."""

import itertools

import pytest
from trace_tools import rng

from diptych.lab.diff import order


def by_enumeration(a: str, b: str) -> list[tuple[int, int]] | None:
    for length in range(min(len(a), len(b)), -1, -1):
        found = [
            list(zip(i, j, strict=True))
            for i in itertools.combinations(range(len(a)), length)
            for j in itertools.combinations(range(len(b)), length)
            if all(a[x] == b[y] for x, y in zip(i, j, strict=True))
        ]
        if found:
            return found[0] if len(found) == 1 else None
    raise AssertionError


def test_against_all_alignments():
    gen = rng("order")
    unique = 0
    for _ in range(400):
        a, b = ("".join(gen.choice(list("abcd"), gen.integers(0, 7))) for _ in range(2))
        want = by_enumeration(a, b)
        assert order.unique_alignment(a, b) == want, (a, b)
        unique += want is not None
    assert 50 < unique < 350


@pytest.mark.parametrize(("a", "b"), [("aa", "a"), ("ab", "ba"), ("a" * 50, "a" * 49)])
def test_several_alignments(a, b):
    assert order.unique_alignment(a, b) is None


def test_long_sequences():
    a = list(range(1500))
    assert order.unique_alignment(a, a[1:]) == [(i + 1, i) for i in range(1499)]
    assert order.unique_alignment(range(3000), range(3000)) is None  # more than it looks at
