"""The ops under torch.ops.diptych: schema, fake against real, one implementation behind both ways in, no derivative."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cases
from diptych.torch import primitives
from torch_frontend import tools
from torch_frontend.tools import normal, poisoned, quantizer, same

ops = torch.ops.diptych
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _copies(fmt: str, device: str = "cpu", m: int = 6, n: int = 5, k: int = 40):
    """Raw operands of gemm(a [m, k], b [n, k]): their rowwise copies."""
    out = []
    for name, shape in (("a", (m, k)), ("b", (n, k))):
        quant = quantizer(fmt, columnwise=False)
        buffers = primitives.quantize(normal(f"{name}-{fmt}", shape, device=device), quant)
        out.append((buffers[0], buffers[1], quant.spec[0], False))
    return out


def _layout(tensors):
    return [(tuple(t.shape), t.dtype, t.stride(), t.device.type) for t in tensors]


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_fake_is_real(fmt, device):
    """Every format x usage x shape x dtype: fake and meta results have the layout of the real ones."""
    for (rowwise, columnwise), shape, dtype in itertools.product(tools.USAGES, cases.SHAPES, FLOATS):
        quant = quantizer(fmt, rowwise=rowwise, columnwise=columnwise)
        x = torch.zeros(shape, dtype=dtype, device=device)
        real = primitives.quantize(x, quant)
        side = not rowwise
        copy = (real[0], real[1], quant.spec[0], side)
        back = primitives.dequantize(copy, dtype)
        grad = primitives.bias_grad(x, torch.float32)
        with FakeTensorMode() as mode:
            fake_x = mode.from_tensor(x)
            fake = primitives.quantize(fake_x, quant)
            fake_back = primitives.dequantize((fake[0], fake[1], quant.spec[0], side), dtype)
            fake_grad = primitives.bias_grad(fake_x, torch.float32)
            fake_amax = primitives.amax(fake_x)
        assert _layout(real) == _layout(fake), (fmt, shape)
        assert _layout([back, grad]) == _layout([fake_back, fake_grad])
        assert _layout([fake_amax]) == _layout([primitives.amax(x)])
        meta = primitives.quantize(x.to("meta"), quant)
        assert [entry[:3] for entry in _layout(meta)] == [entry[:3] for entry in _layout(real)]


@pytest.mark.parametrize("fmt", ("fp8_e4m3_tensor", "fp8_e5m2_128x128", "mxfp8_e4m3"))
def test_fake_gemm_is_real(fmt, device):
    for m, n, k in cases.GEMM_SHAPES:
        a, b = _copies(fmt, device, m, n, k)
        real = primitives.gemm(a, b, None, 1.0, torch.bfloat16, False)
        with FakeTensorMode() as mode:
            fake_a, fake_b = ((mode.from_tensor(q[0]), mode.from_tensor(q[1]), *q[2:]) for q in (a, b))
            fake = primitives.gemm(fake_a, fake_b, None, 1.0, torch.bfloat16, False)
        assert _layout([real]) == _layout([fake])


def test_opcheck(device):
    x = normal("opcheck", (6, 40), device=device)
    a, b = _copies("fp8_e4m3_tensor", device)
    bias = torch.zeros(5, device=device)
    samples = {
        ops.amax: (x,),
        ops.quantize: (x, quantizer("fp8_e4m3_tensor"), None),
        ops.dequantize: (*a, torch.float32),
        ops.gemm: (*a, *b, bias, 1.5, torch.bfloat16, False),
        ops.gemm_into: (torch.zeros(6, 5, device=device), *a, *b, None, 1.0, 1.0, False),
        ops.bias_grad: (x, torch.float16),
    }
    every = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic", "test_schema")
    for op, args in samples.items():
        # The schema check compares inputs by arithmetic, which torch lacks for FP8 on the CPU; see the next test.
        takes_fp8 = op in (ops.dequantize, ops.gemm, ops.gemm_into)
        torch.library.opcheck(op.default, args, test_utils=every[:3] if takes_fp8 else every)
    torch.library.opcheck(ops.quantize.default, (x, quantizer("mxfp8_e5m2", rowwise=False), None))
    torch.library.opcheck(ops.quantize.default, (x, quantizer("fp8_e5m2_tensor"), torch.ones(1, device=device)))


def test_nothing_but_the_accumulator_is_written(device):
    a, b = _copies("fp8_e5m2_128x128", device)
    bias, acc = normal("bias", (5,), device=device), poisoned((6, 5), device=device)
    before = [t.clone() for t in (*a[:2], *b[:2], bias)]
    ops.gemm_into(acc, *a, *b, bias, 1.0, 1.0, False)
    d = ops.gemm(*a, *b, bias, 1.0, torch.float32, False)
    y = ops.dequantize(*a, torch.float32)
    for old, new in zip(before, (*a[:2], *b[:2], bias), strict=True):
        same(new, old)
        assert all(new.untyped_storage().data_ptr() != out.untyped_storage().data_ptr() for out in (d, y))
    assert not (acc == -123).any()


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_both_ways_in_are_one(fmt, device):
    """The direct call and the dispatcher reach the same implementation."""
    x = normal(f"ways-{fmt}", (33, 65), "bfloat16", device)
    quant = quantizer(fmt)
    assert primitives._direct(x)
    for direct, dispatched in zip(primitives.quantize(x, quant), ops.quantize(x, quant, None), strict=True):
        same(direct, dispatched)
    a, b = _copies(fmt, device)
    acc, acc2 = poisoned((6, 5), device=device), poisoned((6, 5), device=device)
    same(primitives.gemm(a, b, None, 1.0, torch.float16, False), ops.gemm(*a, *b, None, 1.0, torch.float16, False))
    primitives.gemm_into(acc, a, b, None, 2.0, 0.5, False)
    ops.gemm_into(acc2, *a, *b, None, 2.0, 0.5, False)
    same(acc, acc2)


def test_what_is_not_direct():
    x = torch.zeros(4, 4)
    assert primitives._direct(x, None, torch.nn.Parameter(x))
    assert not primitives._direct(x.to("meta"))
    assert not primitives._direct(torch._neg_view(x))
    with FakeTensorMode():
        assert not primitives._direct(x)
    torch.func.grad(lambda v: (_not_direct(v), v.sum())[1])(x)


def _not_direct(v: torch.Tensor) -> None:
    assert not primitives._direct(v)


def test_lazily_negated_tensors_count_as_negated():
    x = normal("neg", (8, 64))
    quant = quantizer("fp8_e4m3_1x128")
    same(primitives.quantize(torch._neg_view(x), quant)[0], primitives.quantize(-x, quant)[0])


def test_a_missing_derivative_is_an_error():
    x = torch.zeros(4, 64, requires_grad=True)
    a, b = _copies("fp8_e4m3_tensor")
    quant = quantizer("fp8_e4m3_tensor")
    for call in (
        lambda: primitives.quantize(x, quant),
        lambda: ops.quantize(x, quant, None),
        lambda: primitives.amax(x),
        lambda: ops.bias_grad(x, torch.float32),
        lambda: primitives.gemm(a, b, torch.zeros(5, requires_grad=True), 1.0, torch.float32, False),
        lambda: primitives.gemm_into(torch.zeros(6, 5, requires_grad=True), a, b, None, 1.0, 1.0, False),
    ):
        with pytest.raises(NotImplementedError, match="has no derivative, and an argument requires grad"):
            call()
        with torch.no_grad():
            call()
    with pytest.raises(Exception, match="has no derivative"):
        torch.compile(lambda v: ops.quantize(v, quant, None)[0], fullgraph=True, backend="aot_eager")(x)


def test_gemm_into_counts_as_a_write():
    a, b = _copies("mxfp8_e4m3")
    for into in (primitives.gemm_into, lambda acc, a, b, *rest: ops.gemm_into(acc, *a, *b, *rest)):
        acc = torch.zeros(6, 5)
        before = acc._version
        into(acc, a, b, None, 1.0, 1.0, False)
        assert acc._version > before
    with torch.inference_mode():
        into(torch.zeros(6, 5), a, b, None, 1.0, 1.0, False)


def _bad_calls():
    x = torch.zeros(4, 64)
    quant = quantizer("fp8_e4m3_tensor")
    a, b = _copies("fp8_e4m3_tensor")
    blocks, _ = _copies("fp8_e4m3_1x128", m=6, n=5, k=300)
    return {
        "dtype": (lambda t: ops.quantize(t, quant, None)[0], (x.double(),), "float64"),
        "scalar": (lambda t: ops.quantize(t, quant, None)[0], (x[0, 0],), "at least one dimension"),
        "amax": (lambda t: ops.quantize(t, quantizer("mxfp8_e4m3"), t)[0], (x,), "takes one per block"),
        "format id": (lambda d, s: ops.dequantize(d, s, 99, False, torch.float32), a[:2], "unknown format id 99"),
        "payload": (lambda d, s: ops.dequantize(d, s, 1, False, torch.float32), a[:2], "float8_e5m2"),
        "scales": (lambda d, s: ops.dequantize(d[:2], s, 2, False, torch.float32), blocks[:2], r"\[2, 3\]"),
        "reduced": (
            lambda d, s: ops.gemm(d[:, :8], s, 0, False, b[0], b[1], 0, False, None, 1.0, torch.float32, False),
            a[:2],
            "reduces over 8 elements",
        ),
        "bias": (
            lambda d, s: ops.gemm(d, s, 0, False, b[0], b[1], 0, False, d[0].float(), 1.0, torch.float32, False),
            a[:2],
            "bias must hold 5 elements",
        ),
        "fast": (
            lambda d, s: ops.gemm(d, s, 2, False, d, s, 2, False, None, 1.0, torch.float32, True),
            blocks[:2],
            "fast_accum exists for per-tensor FP8 only",
        ),
        "out dtype": (lambda t: ops.bias_grad(t, torch.int32), (x,), "not torch.int32"),
    }


@pytest.mark.parametrize("name", _bad_calls())
def test_bad_calls_fail_at_trace_time_too(name):
    call, args, message = _bad_calls()[name]
    with pytest.raises((ValueError, TypeError)):
        call(*args)
    meta = [t.to("meta") for t in args]
    if "b[0]" not in message and name not in ("reduced", "bias"):
        with pytest.raises((ValueError, TypeError), match=message):
            call(*meta)
    seen = []

    def backend(graph, inputs):  # reached only if tracing saw nothing wrong
        seen.append(graph)
        return graph

    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(call, fullgraph=True, backend=backend)(*args)
    assert not seen


def test_a_bad_trace_leaves_the_accumulator():
    a, b = _copies("fp8_e4m3_tensor")
    acc = poisoned((6, 4))
    torch._dynamo.reset()
    step = torch.compile(
        lambda acc, d, s: ops.gemm_into(acc, d, s, 0, False, b[0], b[1], 0, False, None, 1.0, 1.0, False),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match=r"acc must be \[6, 5\]"):
        step(acc, a[0], a[1])
    assert (acc == -123).all()


def test_ops_compile_with_dynamic_shapes():
    """One graph for all sizes, bit-equal to eager.

    Torch tells sizes of 1 from others, so a number of blocks that becomes 1 is a second graph: rows stay above 128.
    """
    quant = quantizer("fp8_e4m3_1x128")

    def step(x, w, acc):
        a, b = primitives.quantize(x, quant), primitives.quantize(w, quant)
        qa, qb = (a[0], a[1], quant.spec[0], False), (b[0], b[1], quant.spec[0], False)
        acc = acc.clone()
        primitives.gemm_into(acc, qa, qb, None, 1.0, 1.0, False)
        return primitives.gemm(qa, qb, None, 1.0, x.dtype, False), acc, primitives.dequantize(qa, torch.float32)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for m, n, k in ((160, 136, 256), (133, 165, 137), (135, 133, 300)):
        args = normal("dx", (m, k)), normal("dw", (n, k)), normal("dacc", (m, n))
        for got, want in zip(compiled(*args), step(*args), strict=True):
            same(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
