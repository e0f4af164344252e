"""gemm on GPUs that decode MXFP8 and NVFP4 to bfloat16: products that are cut into pieces."""

from __future__ import annotations

import pytest
import torch

import diptych.torch as dt
from diptych.common import MXFP8Quantizer, NVFP4Quantizer

pytestmark = pytest.mark.cuda


def operand(rows: int, k: int, quantizer) -> dt.QuantizedTensor:
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    return dt.quantize(x, quantizer.with_usage(columnwise=False))


def part(q: dt.QuantizedTensor, first: int, end: int) -> dt.QuantizedTensor:
    buffers = {"rowwise_data": q.rowwise_data[first:end], "rowwise_scale_inv": q.rowwise_scale_inv[first:end]}
    if q.amax is not None:
        buffers["amax"] = q.amax
    return dt.QuantizedTensor(q.quantizer, (end - first, q.shape[1]), q.dtype, **buffers)


def bounds(extent: int) -> list[tuple[int, int]]:
    return [(first, min(first + 1536, extent)) for first in range(0, extent, 1536)]


@pytest.mark.parametrize("quantizer", [MXFP8Quantizer(), NVFP4Quantizer()], ids=lambda q: type(q).__name__)
def test_pieces_have_the_bits_of_the_whole(quantizer, cuda):
    """2^16 k of 12408 rows and columns are more than 1.5 GiB when decoded; those of the smaller products are not."""
    m, n, k = 6200, 6208, 1 << 16
    a, b = operand(m, k, quantizer), operand(n, k, quantizer)
    bias = torch.randn(n, dtype=torch.bfloat16, device="cuda")
    whole = dt.gemm(a, b, bias=bias)
    for rows in bounds(m):
        for columns in bounds(n):
            piece = dt.gemm(part(a, *rows), part(b, *columns), bias=bias[slice(*columns)].contiguous())
            assert torch.equal(whole[slice(*rows), slice(*columns)], piece), (rows, columns)
