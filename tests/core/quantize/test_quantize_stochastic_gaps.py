"""Stochastic rounding over 10 million draws in each gap of the grid."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.quantize.test_quantize_stochastic import quantize, values

SHAPE = (3360, 3200)  # 10.08 million free elements, one in 16 apart


@pytest.mark.parametrize("gap", tuple(itertools.pairwise(cases.GRIDS["e2m1"])), ids=str)
def test_unbiased_over_ten_million_draws(device, gap):
    """x uniform over a gap, both signs: the mean error lies within four standard errors of 0."""
    low, high = gap
    rng = np.random.default_rng(round(2 * low))
    sign = np.where(rng.integers(0, 2, SHAPE, np.uint8), np.float32(-1), np.float32(1))
    plain = sign * np.maximum(np.float32(low), rng.random(SHAPE, np.float32) * np.float32(high - low) + np.float32(low))
    x = values(plain)
    free = x == plain
    assert free.sum() >= 10_000_000
    got = quantize(runner.backend(device), x, round(4 * low), columnwise=False)
    codes = oracle.unpack(got["rowwise_data"])
    up = (codes & 7) == oracle.encode(np.array([high], np.float32), "e2m1")[0]
    f = (np.abs(x) - np.float32(low)) / (high - low)
    # Up with probability f, the distance walked: variance f (1 - f), 1/6 on the mean.
    error = (up[free].astype(np.float64) - f[free]).mean()
    bound = 4 * np.sqrt(1 / 6 / free.sum())
    assert abs(error) < bound, f"bias {error:.2e} of the gap, allowed {bound:.2e}"
