"""How tensors were quantized, from what the core computes."""

import numpy as np
import pytest
import torch

import oracle
from diptych.lab import capture
from diptych.lab.traces import Quantization
from diptych.torch.primitives.statistics import errors, statistics
from lab import quantized_cases


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_how_a_tensor_was_quantized(fmt, device):
    for case in quantized_cases.cases(fmt):
        x, result, largest = (torch.from_numpy(np.asarray(v, np.float32)).to(device) for v in case[:3])
        x = x.to(getattr(torch, case.x.dtype.name))
        row = torch.cat([statistics(x), errors(x, result, largest, case.beyond)]).tolist()
        quantized_cases.same(capture.quantization(row, x.numel()), case.want)


def test_how_nothing_was_quantized():
    x = torch.zeros(0, 4)
    row = torch.cat([statistics(x), errors(x, x, x, 1.1)]).tolist()
    assert capture.quantization(row, 0) == Quantization(0, 0, None)
