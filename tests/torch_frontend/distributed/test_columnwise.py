"""Columnwise copies made of rowwise ones, against those that quantize makes."""

from __future__ import annotations

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.torch.distributed.columnwise import byte_transposed, transposed
from diptych.torch.primitives.quantize import transpose
from torch_frontend.tools import normal

SQUARE = [
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2"),
    Float8BlockQuantizer(block_scaling_dim=2),
    MXFP8Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(with_2d_quantization=True),
]


@pytest.mark.parametrize("quantizer", SQUARE, ids=repr)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (32, 160), (0, 64), (64, 0)])
def test_same_bytes_as_quantizing_makes(quantizer, shape):
    x = normal(f"columnwise {shape}", shape)
    if x.numel():
        x.view(-1)[:4] = torch.tensor([0.0, 1e-40, 448.0, -3e4])
    q = dt.quantize(x, quantizer)
    assert quantizer.copies_agree()
    for name, t in zip(("columnwise_data", "columnwise_scale_inv"), made(q), strict=True):
        want = getattr(q, name)
        assert t.shape == want.shape and t.dtype == want.dtype
        assert torch.equal(t.clone(memory_format=torch.contiguous_format).view(torch.uint8), want.view(torch.uint8)), (
            name
        )


@pytest.mark.parametrize("quantizer", SQUARE[:4], ids=repr)
def test_blocks_that_reach_beyond_the_columns(quantizer):
    q = dt.quantize(normal("ragged columns", (256, 140)), quantizer)
    for name, t in zip(("columnwise_data", "columnwise_scale_inv"), made(q), strict=True):
        assert torch.equal(t.contiguous().view(torch.uint8), getattr(q, name).view(torch.uint8)), name


def made(q):
    data, scale_inv = transposed(q.quantizer, q.rowwise_data, q.rowwise_scale_inv)
    return transpose(data) if byte_transposed(q.quantizer) else data, scale_inv


@pytest.mark.parametrize(
    "quantizer", [Float8BlockQuantizer(block_scaling_dim=1), MXFP8Quantizer(), NVFP4Quantizer()], ids=repr
)
def test_one_dimensional_blocks_are_not_transposable(quantizer):
    assert not quantizer.copies_agree()
