"""The choice of the elements of a tensor that a trace keeps, which depends on the shape and the options alone.

Tensors of one size have the same places in all traces, and a smaller sample is a part of every larger one, so that two
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
"""The number of elements of a sample. Tensors with at most so many elements are kept whole."""

_SEED = 0x9E3779B97F4A7C15
_ROUNDS = 4


@functools.lru_cache(maxsize=256)
def places(size: int, count: int) -> np.ndarray:
    """Returns `count` different positions in a flat tensor of `size` elements, int64 [count], in increasing order.

    They are the images of 0, 1, ... under a permutation of the positions, which depends on `size` alone. The array is
    read-only. **Raises** ValueError if there are fewer elements than places.
    """
    if not 0 <= count <= size:
        raise ValueError(f"there are no {count} places in {size} elements; count must be from 0 to size")
    half = max((size - 1).bit_length() + 1, 2) // 2
    found = _permuted(np.arange(count, dtype=np.uint64), half)
    while (outside := found >= size).any():  # a permutation of 4^half positions leads back into the first `size`
        found[outside] = _permuted(found[outside], half)
    result = np.sort(found.astype(np.int64))
    result.flags.writeable = False
    return result


def _permuted(x: np.ndarray, half: int) -> np.ndarray:
    """Returns a Feistel permutation of the numbers with 2 * half bits, applied to each element of x."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> width, x & mask
    for round_ in range(_ROUNDS):
        mixed = (right + np.uint64(round_ + 1)) * np.uint64(_SEED)  # wraps around at 2^64
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << width) | right


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The values of a site that a step keeps: `count` elements, "whole", "sampled" or "none". `cut`: see `Record`."""

    values: Kept
    count: int
    cut: bool


class Budget:
    """The bytes that one rank may still spend on values, and how a step shares them among its sites.

    A step first takes the samples of all sites, in order, then replaces samples by whole tensors, in order, as long as
    they fit. Whole tensors take at most half of the budget, so that later steps have samples too.
    """

    def __init__(self, options: Options, ranks: int) -> None:
        self.options = options
        self.left = options.budget // ranks
        self._whole_left = self.left // 2

    def plan(self, sites: Sequence[Site]) -> list[Plan]:
        """Returns the plan of each site for a step with these sites in this order. It takes nothing from the budget."""
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
        """Takes the bytes that these plans keep from the budget."""
        for site, plan in zip(sites, plans, strict=True):
            self.left -= plan.count * _nbytes(site)
            if plan.values == "whole":
                self._whole_left -= max(site.size - SAMPLES, 0) * _nbytes(site)


def _nbytes(site: Site) -> int:
    return DTYPES[site.dtype].nbytes
