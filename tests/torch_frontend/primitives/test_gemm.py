"""gemm on GPUs that decode MXFP8 and NVFP4 to bfloat16: products that are cut into pieces."""

from __future__ import annotations

import pytest
import torch

import diptych.torch as dt
from diptych.common import MXFP8Quantizer, NVFP4Quantizer
from diptych.core import _core

pytestmark = pytest.mark.cuda
MOST = 1 << 30  # bytes of decoded operands


def operand(rows: int, k: int, quantizer) -> dt.QuantizedTensor:
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    return dt.quantize(x, quantizer.with_usage(columnwise=False))


def part(q: dt.QuantizedTensor, first: int, end: int) -> dt.QuantizedTensor:
    buffers = {"rowwise_data": q.rowwise_data[first:end], "rowwise_scale_inv": q.rowwise_scale_inv[first:end]}
    if q.amax is not None:
        buffers["amax"] = q.amax
    return dt.QuantizedTensor(q.quantizer, (end - first, q.shape[1]), q.dtype, **buffers)


def bounds(extent: int) -> list[tuple[int, int]]:
    return [(first, min(first + 256, extent)) for first in range(0, extent, 256)]


@pytest.mark.parametrize("quantizer", [MXFP8Quantizer(), NVFP4Quantizer()], ids=lambda q: type(q).__name__)
def test_pieces_have_the_bits_of_the_whole(quantizer, cuda):
    """2^20 k of 784 rows and columns need 1.6 GB when decoded; the pieces have 256 of each, or what is left."""
    m, n, k = 384, 400, 1 << 20
    a, b = operand(m, k, quantizer), operand(n, k, quantizer)
    bias = torch.randn(n, dtype=torch.bfloat16, device="cuda")
    whole = dt.gemm(a, b, bias=bias)
    for rows in bounds(m):
        for columns in bounds(n):
            piece = dt.gemm(part(a, *rows), part(b, *columns), bias=bias[slice(*columns)].contiguous())
            assert torch.equal(whole[slice(*rows), slice(*columns)], piece), (rows, columns)


def test_the_workspace_is_bounded(cuda):
    fmt = MXFP8Quantizer().spec.format_id
    small = _core.gemm_workspace_bytes(fmt, fmt, 4096, 4096, 4096, False)
    assert small >= 2 * 8192 * 4096
    flags = 1 << 24
    for m, n, k in ((1 << 20, 1 << 17, 8192), (16384, 128256, 4096), (1 << 20, 256, 8192), (300, 1 << 22, 512)):
        assert _core.gemm_workspace_bytes(fmt, fmt, m, n, k, False) <= MOST + flags, (m, n, k)
