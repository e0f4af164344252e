"""Statistics of tensors that are so large that sums in float32 need care."""

import numpy as np
import pytest
import torch
from lab import quantized_cases

import oracle
from diptych.lab.traces import Quantization
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
