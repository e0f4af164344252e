"""Statistics of tensors that are so large that sums in float32 need care."""

import pytest
import torch

from diptych.torch.lab import statistics


@pytest.mark.parametrize("size", [3_000_000, pytest.param(40_000_000, marks=pytest.mark.slow)])
def test_rms_of_a_large_tensor(size):
    x = torch.full((size,), 2e-4)
    x[:64] = 1  # each small square is lost if it is added to a large one
    want = x.double().square().mean().sqrt().item()
    assert statistics.measured(x)[2].item() == pytest.approx(want, rel=1e-5)
