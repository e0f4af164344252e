"""Which elements of a tensor are kept, by its shape and the options alone.

All traces have the same places for tensors of the same size, and fewer places are the first of more, so that two
samples of different sizes have elements in common.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from diptych.lab.traces.dtypes import DTYPES
from diptych.lab.traces.schema import Kept, Options, Site

SAMPLES = 1024
"""Elements of a sample. Tensors that have no more are kept whole."""

_SEED = 0x9E3779B97F4A7C15
_ROUNDS = 4


@functools.lru_cache(maxsize=256)
def places(size: int, count: int) -> np.ndarray:
    """Returns `count` different positions in a flat tensor of `size` elements, int64 [count], in increasing order.

    They are the images of 0, 1, ... under a permutation of the positions, which depends on `size` alone. The array is
    read-only. **Raises** ValueError if there are fewer elements than places.
    """
    if not 0 <= count <= size:
        raise ValueError(f"there are no {count} places in {size} elements")
    half = max((size - 1).bit_length() + 1, 2) // 2
    found = _permuted(np.arange(count, dtype=np.uint64), half)
    while (outside := found >= size).any():  # a permutation of 4^half positions leads back into the first `size`
        found[outside] = _permuted(found[outside], half)
    result = np.sort(found.astype(np.int64))
    result.flags.writeable = False
    return result


def _permuted(x: np.ndarray, half: int) -> np.ndarray:
    """A Feistel permutation of the numbers of 2 * half bits."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> width, x & mask
    for round_ in range(_ROUNDS):
        mixed = (right + np.uint64(round_ + 1)) * np.uint64(_SEED)  # wraps
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << width) | right


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a step keeps of a site: `count` elements, "whole", "sampled" or "none"; `cut` as in `Record`."""

    values: Kept
    count: int
    cut: bool


class Budget:
    """The bytes of values that are left to one rank, and what each step may take of them.

    A step's samples come first, in order, then whole tensors in their place, in order, as far as there is room. Whole
    tensors take at most half of the budget, so that later steps have samples too.
    """

    def __init__(self, options: Options, ranks: int) -> None:
        self.options = options
        self.left = options.budget // ranks
        self._whole_left = self.left // 2

    def plan(self, sites: Sequence[Site]) -> list[Plan]:
        """Returns what a step with these sites, in this order, may keep of each. Nothing is taken yet."""
        if self.options.values == "hash":
            return [Plan("none", 0, False)] * len(sites)
        left, whole_left, plans = self.left, self._whole_left, []
        for site in sites:
            count = min(SAMPLES, site.size)
            fits = count * _nbytes(site) <= left
            left -= count * _nbytes(site) if fits else 0
            values: Kept = "none" if not fits else "whole" if count == site.size else "sampled"
            plans.append(Plan(values, count if fits else 0, not fits or self.options.values == "full"))
        for i, (site, plan) in enumerate(zip(sites, plans, strict=True)):
            more = (site.size - plan.count) * _nbytes(site)
            if plan.values == "whole":
                plans[i] = Plan("whole", plan.count, False)
            elif self.options.values == "full" and more <= min(left, whole_left):
                plans[i] = Plan("whole", site.size, False)
                left, whole_left = left - more, whole_left - more
        return plans

    def take(self, sites: Sequence[Site], plans: Sequence[Plan]) -> None:
        """Takes what these plans keep."""
        for site, plan in zip(sites, plans, strict=True):
            self.left -= plan.count * _nbytes(site)
            if plan.values == "whole":
                self._whole_left -= max(site.size - SAMPLES, 0) * _nbytes(site)


def _nbytes(site: Site) -> int:
    return DTYPES[site.dtype].nbytes
