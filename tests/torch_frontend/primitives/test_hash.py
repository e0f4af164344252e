"""hash: the oracle's bits for any dtype and layout, fake tensors, graphs, and no derivative."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import diptych.torch as dt
from diptych.common import ArgumentError, DTypeError, UnsupportedError
from diptych.common.quantizers import MXFP8Quantizer
from oracle.hash import hash_bits

DTYPES = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)  # fmt: skip


def drawn(shape, dtype, device="cpu"):
    size = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(len(shape))
    made = torch.randint(0, high, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return made.to(device).view(dtype)


def same(got, x):
    assert got.dtype == torch.int32 and got.shape == (4,) and got.device == x.device
    bits = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    assert np.array_equal(got.cpu().numpy(), hash_bits(bits)), f"{x.dtype}{list(x.shape)}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_shape(dtype, device):
    for shape in ((1,), (0,), (5, 7), (2, 0, 3), (1, 2, 1, 2, 1, 2, 1, 2, 3), (40, 130)):
        x = drawn(shape, dtype, device)
        same(dt.hash(x), x)
        same(torch.ops.diptych.hash(x), x)
    same(dt.hash(x[3, 5]), x[3, 5])
    same(dt.hash(x.view(-1)[::5200]), x.view(-1)[:1])  # dense, with a stride of 5200
    same(dt.hash(torch.empty_strided((0,), (0,), dtype=dtype, device=device)), x.view(-1)[:0])
    same(dt.hash(x.view(-1)[1:]), x.view(-1)[1:])  # the start is not aligned
    if dtype not in (torch.complex32, torch.float4_e2m1fn_x2):  # torch does not copy these
        same(dt.hash(x.t()), x.t())
        same(dt.hash(x[::2, 1:3]), x[::2, 1:3])


def test_lazy_bits_are_resolved(device):
    x = drawn((6, 4), torch.complex64, device)
    for v in (x.conj(), torch._neg_view(x), x.conj().imag):
        assert v.is_conj() or v.is_neg()
        same(dt.hash(v), v.clone().resolve_conj().resolve_neg())


def test_fake_tensors():
    with FakeTensorMode() as mode:
        made = dt.hash(mode.from_tensor(torch.ones(3, 5)))
        with pytest.raises(DTypeError, match="hash: x must hold"):
            torch.ops.diptych.hash(mode.from_tensor(torch.ones(3).to(torch.bfloat16)).view(torch.bits16))
    assert made.shape == (4,) and made.dtype == torch.int32
    assert torch.ops.diptych.hash(torch.ones(3, 5, device="meta")).shape == (4,)


def test_traced():
    fn = torch.compile(lambda x: dt.hash(x * 2), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 7):
        x = torch.arange(n, dtype=torch.float32)
        same(fn(x), x * 2)


@pytest.mark.slow
def test_compiled():
    fn = torch.compile(lambda x: (dt.hash((x + 1).t()), x.sin()), fullgraph=True)
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    same(fn(x)[0], (x + 1).t())


def test_torchs_own_check():
    torch.library.opcheck(torch.ops.diptych.hash.default, (torch.arange(12.0).reshape(3, 4),))


def check_graph(call, x, same):
    """Captures a call in a CUDA graph, and compares what it gives with what x holds as the graph runs."""
    call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    for turn in range(3):
        x.fill_(turn)
        graph.replay()
        same(out, x)


@pytest.mark.cuda
def test_a_captured_graph_hashes_what_is_there(cuda):
    for n in (1000, 100_000):
        x = drawn((n,), torch.float32, "cuda")
        check_graph(dt.hash, x, same)


def test_no_derivative():
    x = torch.ones(3, requires_grad=True)
    for call in (dt.hash, torch.ops.diptych.hash):
        with pytest.raises(UnsupportedError, match=r"diptych::hash has no derivative.*detach"):
            call(x)
    with torch.no_grad():
        same(dt.hash(x), x)
    same(dt.hash(x.detach()), x.detach())


def test_errors():
    with pytest.raises(ArgumentError, match=r"hash: x must be a torch\.Tensor, got list"):
        dt.hash([1.0])
    with pytest.raises(ArgumentError, match=r"hash: x is a QuantizedTensor.*rowwise_data"):
        dt.hash(dt.quantize(torch.ones(4, 32), MXFP8Quantizer()))
    with pytest.raises(NotImplementedError, match=r"diptych::hash.*Sparse"):
        dt.hash(torch.eye(3).to_sparse())
