"""Stochastic rounding as a distribution: unbiased over each gap of the grid, fresh noise for each offset and copy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cases
import oracle
from core import runner

GRID = cases.GRIDS["e2m1"]
SEED = 0x5EED_0123_4567_89AB  # fixed: a test of a distribution may not fail one time in a thousand


def quantize(be, x: np.ndarray, offset: int, **usage: bool) -> dict[str, np.ndarray]:
    """`x` holds a 6 in each block and meets a tensor amax of 2688, so that elements are rounded as they are."""
    given = {"amax": 2688.0} if usage.get("rowwise", True) else {}
    given |= {"columnwise_amax": 2688.0} if usage.get("columnwise", True) else {}
    m, k = x.shape
    like = oracle.Quantized(
        oracle.FORMATS["nvfp4"],
        *((np.empty((m, k // 2), np.uint8), np.empty((m, k // 16), np.uint8)) if "amax" in given else (None, None)),
        *((np.empty((k, m // 2), np.uint8), np.empty((k, m // 16), np.uint8))
          if "columnwise_amax" in given else (None, None)),
        *(np.full(1, 2688, np.float32) if name in given else None for name in ("amax", "columnwise_amax")),
    )  # fmt: skip
    got = runner.quantize(be, x, like, "nvfp4", rng=oracle.rng_words(SEED, offset), **given)
    assert all((got[name] == 0x38).all() for name in got if name.endswith("scale_inv")), "elements were scaled"
    return got


def values(x: np.ndarray) -> np.ndarray:
    """One 6 in each 16 x 16 diagonal, so that blocks of either copy hold one."""
    rows, cols = np.indices(x.shape, sparse=True)
    return np.where((rows + cols) % 16 == 0, np.float32(6), x)


@pytest.mark.parametrize("columnwise", [False, True])
def test_unbiased_over_each_gap(device, columnwise):
    """The mean error of 10 million draws, x uniform over a gap, lies within four standard errors of 0, either sign."""
    be, rng = runner.backend(device), np.random.default_rng(20)
    shape, per_gap = (1024, 1488), {}
    for sign, (low, high) in itertools.product((1, -1), itertools.pairwise(GRID)):
        x = rng.uniform(low, high, shape).astype(np.float32) * np.float32(sign)
        got = quantize(be, values(x), len(per_gap) * 2, rowwise=not columnwise, columnwise=columnwise)
        codes = oracle.unpack(got["columnwise_data" if columnwise else "rowwise_data"])
        rounded = oracle.decode(codes.T if columnwise else codes, "e2m1")
        free = values(x) == x
        assert ((np.abs(rounded) == low) | (np.abs(rounded) == high))[free].all(), "outside of the gap"
        error = (rounded.astype(np.float64) - x)[free] / (high - low)
        # Rounded up with probability f where f is the distance walked: variance f (1 - f), 1/6 on the mean.
        bound = 4 * np.sqrt(1 / 6 / error.size)
        per_gap[sign, low] = error.mean()
        assert abs(error.mean()) < bound, f"gap {low}..{high} sign {sign}: bias {error.mean():.2e}, allowed {bound:.2e}"
        assert abs(error.var() * 6 - 1) < 0.02
    everything = np.mean(list(per_gap.values()))
    assert abs(everything) < 4 * np.sqrt(1 / 6 / (len(per_gap) * 1.4e6)), f"{per_gap}"


def test_noise_is_fresh(device):
    """Other offsets, seeds and copies round otherwise; the same ones round the same."""
    be = runner.backend(device)
    x = values(np.full((64, 64), 2.5, np.float32))
    first = quantize(be, x, 10)
    rows, columns = oracle.unpack(first["rowwise_data"]), oracle.unpack(first["columnwise_data"])
    for name, again in quantize(be, x, 10).items():
        runner.same_bits(again, first[name], f"{name} again")
    free = x == 2.5
    assert 0.45 < (rows == 5)[free].mean() < 0.55
    for offset in (11, 12, 10 + 2**32, 2**63):
        others = oracle.unpack(quantize(be, x, offset)["rowwise_data"])
        assert 0.4 < (others != rows)[free].mean() < 0.6, f"offset {offset} repeats"
    assert 0.4 < (rows != columns.T)[free].mean() < 0.6, "the copies share their noise"
    # A call uses two offsets: the columnwise copy has the next one, over its own elements.
    turned = quantize(be, np.ascontiguousarray(x.T), 11, columnwise=False)
    runner.same_bits(first["columnwise_data"], turned["rowwise_data"], "the columnwise copy's offset is the next")
    last = quantize(be, x, 2**64 - 1)
    wrapped = quantize(be, np.ascontiguousarray(x.T), 0, columnwise=False)
    runner.same_bits(last["columnwise_data"], wrapped["rowwise_data"], "offsets wrap at 2^64")


def test_blocks_of_noise_are_independent(device):
    """No lag along a row repeats: the correlation of roundings at any distance up to 64 is noise."""
    be = runner.backend(device)
    x = values(np.full((256, 4096), 0.75, np.float32))
    up = oracle.unpack(quantize(be, x, 4, columnwise=False)["rowwise_data"]) == 2
    y = np.where(x == 0.75, up - 0.5, 0.0).ravel()
    for lag in (*range(1, 65), 4096):
        correlation = 4 * (y[lag:] * y[:-lag]).mean()
        assert abs(correlation) < 6 / np.sqrt(y.size), f"lag {lag}: {correlation:.2e}"


def test_bits_depend_on_nothing_else():
    """Large and small calls, instruction sets and thread counts: the noise of an element is its index's."""
    x = cases.draw("stochastic-bits", "normal", (528, 400), "bfloat16")
    rng = oracle.rng_words(SEED, 2**32 - 1)
    for variant in (set(), {"rht", "rht_signs"}, {"row_amax"}):
        options = {"rng": rng, **dict.fromkeys(variant, True)}
        want = oracle.quantize(x, "nvfp4", **options)
        for isa, threads in itertools.product(runner.isas(), (1, 2, 5)):
            with runner.setting(isa, threads):
                got = runner.quantize(runner.Numpy(), x, want, "nvfp4", **options)
            runner.same_quantized(got, want, f"{variant} isa={isa} threads={threads} {cases.report_header()}")
