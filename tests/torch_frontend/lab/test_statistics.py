"""Statistics of tensors that are so large that sums in float32 need care."""

import numpy as np
import pytest
import torch
from lab import quantized_cases

import oracle
from diptych.lab.traces import Quantization, statistics_of
from diptych.torch.lab import statistics


@pytest.mark.parametrize("size", [3_000_000, pytest.param(40_000_000, marks=pytest.mark.slow)])
def test_rms_of_a_large_tensor(size):
    x = torch.full((size,), 2e-4)
    x[:64] = 1  # each small square is lost if it is added to a large one
    want = x.double().square().mean().sqrt().item()
    assert statistics.measured(x)[2].item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_how_a_tensor_was_quantized(fmt):
    for case in quantized_cases.cases(fmt):
        x, result, largest = (torch.from_numpy(np.asarray(v, np.float32)) for v in case[:3])
        x = x.to(getattr(torch, case.x.dtype.name))
        row = statistics.quantized(x, result, largest, case.beyond)
        quantized_cases.same(statistics.quantization(row.tolist(), x.numel()), case.want)


def test_how_nothing_was_quantized():
    x = torch.zeros(0, 4)
    row = statistics.quantized(x, x, x, 1.1).tolist()
    assert statistics.quantization(row, 0) == Quantization(0, 0, None)


PART = 1 << 16
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float64", "int32", "bool")
SIZES = (0, 1, PART - 1, PART, 2 * PART + 3)
FILLS = {
    "usual": lambda x: x.abs() + 1e-2,
    "large": lambda x: x * torch.finfo(torch.bfloat16).max / 16,
    "zeros": lambda x: x * (x > 0),
    "nothing but zeros": lambda x: 0 * x,
    "one part of zeros": lambda x: torch.cat([0 * x[:PART], x[PART:]]),
    "subnormals": lambda x: torch.where(x > 1, x * 1e-40, x),
    "infinite": lambda x: torch.where(x > 2, torch.inf, x),
    "nan": lambda x: torch.where(x > 2, torch.nan, x),
    "nothing finite": lambda x: x * torch.nan,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", FILLS)
def test_statistics_of_values_of_every_kind(dtype, fill):
    """Statistics are those that NumPy computes in float64, in whichever part of a tensor which values are."""
    for size in SIZES:
        drawn = torch.from_numpy(np.random.default_rng(size).standard_normal(size)).float()
        kind = getattr(torch, dtype)
        x = FILLS[fill](drawn)
        x = x.nan_to_num(0.0, 1.0, -1.0).clamp(-9, 9).to(kind) if not kind.is_floating_point else x.to(kind)
        bits = statistics.to_numpy(x.view(torch.uint8) if dtype == "bool" else x)
        want = statistics_of(bits, dtype)
        got = statistics.measured(x).tolist()
        assert got[3:] == [round(n * max(size, 1)) for n in (want.zero, want.nan, want.inf, want.subnormal)], size
        for have, number in zip(got[:3], (want.amax, want.mean, want.rms), strict=True):
            assert have == pytest.approx(number or 0.0, rel=1e-5, abs=1e-6 * (want.amax or 0.0)), size
