"""The ops under torch.ops.diptych: schema, fake against real, one implementation behind both ways in, no derivative."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cases
from diptych.common import Float8Quantizer
from diptych.common.gemm_options import DEFAULTS
from diptych.common.ops import shapes
from diptych.common.quantizers import RHT, ROW_AMAX
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives import register
from diptych.torch.primitives import scale_update as scale_update_ops
from torch_frontend import tools
from torch_frontend.tools import ALL, delayed, named, normal, poisoned, quantizer, same

ops = torch.ops.diptych
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _copies(name: str, device: str = "cpu", m: int = 6, n: int = 5, k: int = 48):
    """Raw operands of gemm(a [m, k], b [n, k]): their rowwise copies."""
    if name.startswith(cases.PACKED_FORMATS):
        k = -(-k // cases.PACKED_BLOCK) * cases.PACKED_BLOCK
    m, n = (16, 16) if name == "nvfp4 square" else (m, n)  # square blocks take whole ones of rows too
    out = []
    for operand, shape in (("a", (m, k)), ("b", (n, k))):
        quant = named(name, columnwise=False)
        x = normal(f"{operand}-{name}", shape, "bfloat16", device)
        buffers = quantize_ops.quantize(x, quant, rng=tools.rng_for(quant, device))
        out.append(quantize_ops.copies(quant, buffers)[0])
    return out


def _layout(tensors):
    return [(tuple(t.shape), t.dtype, t.stride(), t.device.type) for t in tensors]


def _fake(mode, copy):
    return tuple(mode.from_tensor(part) if isinstance(part, torch.Tensor) else part for part in copy)


@pytest.mark.parametrize("name", ALL)
def test_fake_is_real(name, device):
    """Every format and option x usage x dtype: fake and meta results have the layout of the real ones, whatever shape
    x has; shapes in turn."""
    fmt = name.split()[0]
    for turn, ((rowwise, columnwise), dtype) in enumerate(itertools.product(tools.USAGES, FLOATS)):
        quant = named(name, rowwise=rowwise, columnwise=columnwise)
        rng, side = tools.rng_for(quant, device), int(not rowwise)
        if quant.spec.flags & RHT and dtype != torch.bfloat16:
            continue
        for shape in cases.shapes_of(fmt, columnwise or "square" in name)[turn % 2 :: 2]:
            x = torch.zeros(shape, dtype=dtype, device=device)
            real = quantize_ops.quantize(x, quant, rng=rng)
            back = quantize_ops.dequantize(quantize_ops.copies(quant, real)[side], dtype)
            with FakeTensorMode() as mode:
                fake_x, fake_rng = mode.from_tensor(x), None if rng is None else mode.from_tensor(rng)
                fake = quantize_ops.quantize(fake_x, quant, rng=fake_rng)
                fake_back = quantize_ops.dequantize(quantize_ops.copies(quant, fake)[side], dtype)
            assert _layout(real) == _layout(fake), (name, shape)
            assert _layout([back]) == _layout([fake_back])
            meta = quantize_ops.quantize(x.to("meta"), quant, rng=None if rng is None else rng.to("meta"))
            assert [entry[:3] for entry in _layout(meta)] == [entry[:3] for entry in _layout(real)]


def test_other_fakes_are_real(device):
    for shape, dtype in itertools.product(cases.SHAPES, FLOATS):
        x = torch.zeros(shape, dtype=dtype, device=device)
        scale, history = delayed(device)
        quant, real = Float8Quantizer(), []
        with FakeTensorMode() as mode:
            fake_x, fake_scale, fake_history = map(mode.from_tensor, (x, scale, history))
        for mode_or_not, t, s, h in ((None, x, scale, history), (mode, fake_x, fake_scale, fake_history)):
            with mode_or_not or torch.no_grad():
                scale_update_ops.scale_update(h, s, None, None, 448.0, 0, False)
                rows = ops.amax(t, ROW_AMAX, True)
                out = [*quantize_ops.quantize_delayed(t, quant, s, h), *rows, quantize_ops.amax(t)]
                real.append(_layout([*out, gemm_ops.bias_grad(t, torch.float32)]))
        assert real[0] == real[1], shape


@pytest.mark.parametrize("pair", (*((f, f) for f in ALL[::2]), *cases.MIXED_PAIRS[::9]), ids="-".join)
def test_fake_gemm_is_real(pair, device):
    for m, n, k in cases.GEMM_SHAPES[::2]:
        k = -(-k // cases.PACKED_BLOCK) * cases.PACKED_BLOCK if {*pair} & {*cases.PACKED_FORMATS} else k
        a, b = _copies(pair[0], device, m, n, k)[0], _copies(pair[1], device, m, n, k)[1]
        real = gemm_ops.gemm(a, b, None, 1.0, torch.bfloat16, DEFAULTS)
        with FakeTensorMode() as mode:
            fake = gemm_ops.gemm(_fake(mode, a), _fake(mode, b), None, 1.0, torch.bfloat16, DEFAULTS)
        assert _layout([real]) == _layout([fake])


@pytest.mark.parametrize("name", ALL)
def test_copies_are_the_buffers(name):
    """`copies` finds each buffer where `shapes.quantize_buffers` puts it."""
    for rowwise, columnwise in tools.USAGES:
        quant = named(name, rowwise=rowwise, columnwise=columnwise)
        names = [b.name for b in shapes.quantize_buffers((32, 64), quant)]
        for side, copy in zip(("rowwise", "columnwise"), quantize_ops.copies(quant, names), strict=True):
            assert (copy is None) == (f"{side}_data" not in names)
            if copy is not None:
                amax = {"rowwise": "amax", "columnwise": "columnwise_amax"}[side] if quant.format.two_level else None
                columnwise = side == "columnwise"
                want = (f"{side}_data", f"{side}_scale_inv", amax, quant.copy_format(columnwise).id, columnwise)
                assert copy == want


def test_opcheck(device):
    x = normal("opcheck", (16, 64), "bfloat16", device)
    a, b = _copies("fp8_e4m3_tensor", device)
    scale, history = delayed(device)
    bias, one = torch.zeros(5, device=device), torch.ones(1, device=device)
    plain, packed = quantizer("fp8_e4m3_tensor"), quantizer("nvfp4", rht=True, stochastic=True)
    rng = tools.rng_for(packed, device)
    samples = [
        (ops.amax, (x,)),
        (ops.amax, (x, RHT, True)),
        (ops.quantize, (x, plain)),
        (ops.quantize, (x, quantizer("mxfp8_e5m2", rowwise=False))),
        (ops.quantize, (x, quantizer("fp8_e5m2_tensor"), one)),
        (ops.quantize, (x, Float8Quantizer(), None, None, scale)),
        (ops.quantize, (x, packed, one, one, None, rng)),
        (ops.quantize_delayed, (x, Float8Quantizer(), scale, history)),
        (ops.scale_update, (history.clone(), scale.clone(), one, None, 448.0, 1, True)),
        (ops.dequantize, (*a, torch.float32)),
        (ops.gemm, (*a, *b, bias, 1.5, torch.bfloat16, False)),
        (ops.gemm_into, (torch.zeros(6, 5, device=device), *a, *b, None, 1.0, 1.0, False)),
        (ops.bias_grad, (x, torch.float16)),
    ]
    every = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic", "test_schema")
    for op, args in samples:
        # The schema check compares inputs by arithmetic, which torch lacks for FP8 on the CPU; see the next test.
        takes_fp8 = op in (ops.dequantize, ops.gemm, ops.gemm_into)
        torch.library.opcheck(op.default, args, test_utils=every[:3] if takes_fp8 else every)


def _keeps(inputs, call):
    """Runs a call that must leave these tensors as they are, and may not hand out their memory."""
    before = [t.clone() for t in inputs]
    out = call()
    for old, new in zip(before, inputs, strict=True):
        same(new, old)
        assert all(new.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in out or ())


def test_nothing_else_is_written(device):
    x = normal("written", (16, 64), "bfloat16", device)
    a, b = _copies("nvfp4", device)
    bias, acc = normal("bias", (5,), device=device), poisoned((6, 5), device=device)
    scale, history = delayed(device)
    one = torch.ones(1, device=device)
    packed = quantizer("nvfp4", stochastic=True)
    rng = tools.rng_for(packed, device)
    operands = (*a[:3], *b[:3], bias)
    _keeps(operands, lambda: ops.gemm_into(acc, *a, *b, bias, 1.0, 1.0, False))
    _keeps(operands, lambda: [ops.gemm(*a, *b, bias, 1.0, torch.float32, False), ops.dequantize(*a, torch.float32)])
    _keeps((x, one, rng), lambda: ops.quantize(x, packed, one, one, None, rng))
    _keeps((x, scale), lambda: ops.quantize(x, Float8Quantizer(), None, None, scale))
    _keeps((x, scale, history[1:]), lambda: ops.quantize_delayed(x, Float8Quantizer(), scale, history))
    _keeps((one,), lambda: ops.scale_update(history, scale, one, None, 448.0, 0, False))
    assert not (acc == -123).any()


@pytest.mark.parametrize("name", ALL)
def test_both_ways_in_are_one(name, device):
    """The direct call and the dispatcher reach the same implementation."""
    x = normal(f"ways-{name}", (32, 64), "bfloat16", device)
    quant = named(name)
    rng = tools.rng_for(quant, device)
    assert register.direct(x)
    dispatched = ops.quantize(x, quant, rng=rng)
    for got, want in zip(quantize_ops.quantize(x, quant, rng=rng), dispatched, strict=True):
        same(got, want)
    for copy in quantize_ops.copies(quant, dispatched):
        same(quantize_ops.dequantize(copy, torch.float32), ops.dequantize(*copy, torch.float32))
    a, b = _copies(name, device)
    d = ops.gemm(*a, *b, None, 1.0, torch.float16, False)
    same(gemm_ops.gemm(a, b, None, 1.0, torch.float16, DEFAULTS), d)
    acc, acc2 = poisoned(d.shape, device=device), poisoned(d.shape, device=device)
    gemm_ops.gemm_into(acc, a, b, None, 2.0, 0.5, DEFAULTS)
    ops.gemm_into(acc2, *a, *b, None, 2.0, 0.5, False)
    same(acc, acc2)


def test_both_ways_in_are_one_with_state(device):
    x = normal("ways", (33, 65), device=device)
    (scale, history), (scale2, history2) = delayed(device), delayed(device)
    direct = quantize_ops.quantize_delayed(x, Float8Quantizer(), scale, history)
    for got, want in zip(direct, ops.quantize_delayed(x, Float8Quantizer(), scale2, history2), strict=True):
        same(got, want)
    scale_update_ops.scale_update(history, scale, None, None, 448.0, 0, False)
    ops.scale_update(history2, scale2, None, None, 448.0, 0, False)
    same(history, history2)
    same(scale, scale2)


def test_what_is_not_direct():
    x = torch.zeros(4, 4)
    assert register.direct(x, None, torch.nn.Parameter(x))
    assert not register.direct(x.to("meta"))
    assert not register.direct(torch._neg_view(x))
    with FakeTensorMode():
        assert not register.direct(x)
    torch.func.grad(lambda v: (_not_direct(v), v.sum())[1])(x)


def _not_direct(v: torch.Tensor) -> None:
    assert not register.direct(v)


def test_lazily_negated_tensors_count_as_negated():
    x = normal("neg", (8, 64))
    quant = quantizer("fp8_e4m3_1x128")
    same(quantize_ops.quantize(torch._neg_view(x), quant)[0], quantize_ops.quantize(-x, quant)[0])


def test_a_missing_derivative_is_an_error():
    x = torch.zeros(4, 64, requires_grad=True)
    a, b = _copies("fp8_e4m3_tensor")
    scale, history = delayed()
    quant = quantizer("fp8_e4m3_tensor")
    for call in (
        lambda: quantize_ops.quantize(x, quant),
        lambda: ops.quantize(x, quant),
        lambda: quantize_ops.quantize_delayed(x, Float8Quantizer(), scale, history),
        lambda: ops.quantize_delayed(x, Float8Quantizer(), scale, history),
        lambda: scale_update_ops.scale_update(history, scale.clone().requires_grad_(), None, None, 448.0, 0, False),
        lambda: quantize_ops.amax(x),
        lambda: ops.bias_grad(x, torch.float32),
        lambda: gemm_ops.gemm(a, b, torch.zeros(5, requires_grad=True), 1.0, torch.float32, DEFAULTS),
        lambda: gemm_ops.gemm_into(torch.zeros(6, 5, requires_grad=True), a, b, None, 1.0, 1.0, DEFAULTS),
    ):
        with pytest.raises(NotImplementedError, match="has no derivative, and an argument requires grad"):
            call()
        with torch.no_grad():
            call()
    with pytest.raises(Exception, match="has no derivative"):
        torch.compile(lambda v: ops.quantize(v, quant)[0], fullgraph=True, backend="aot_eager")(x)


def test_writes_count():
    """Autograd sees that a tensor was written, which it may have saved; inference tensors count nothing."""
    a, b = _copies("mxfp8_e4m3")
    x, quant = torch.ones(4, 64), Float8Quantizer()
    for into in (gemm_ops.gemm_into, lambda acc, a, b, *rest: ops.gemm_into(acc, *a, *b, *rest[:-1], *rest[-1])):
        acc = torch.zeros(6, 5)
        before = acc._version
        into(acc, a, b, None, 1.0, 1.0, DEFAULTS)
        assert acc._version > before
    for quantizing, updating in ((quantize_ops, scale_update_ops), (ops, ops)):
        scale, history = delayed()
        quantizing.quantize_delayed(x, quant, scale, history)
        assert history._version == 1 and scale._version == 0
        updating.scale_update(history, scale, None, None, 448.0, 0, False)
        assert history._version == 2 and scale._version == 1
    with torch.inference_mode():
        into(torch.zeros(6, 5), a, b, None, 1.0, 1.0, DEFAULTS)
        scale, history = delayed()
        quantize_ops.quantize_delayed(x, quant, scale, history)


def _bad_calls():
    x = torch.zeros(4, 64)
    scale, history = delayed()
    quant, mx, fp4 = quantizer("fp8_e4m3_tensor"), quantizer("mxfp8_e4m3"), quantizer("nvfp4")
    noisy, rotated = quantizer("nvfp4", columnwise=False, stochastic=True), quantizer("nvfp4", rht=True)
    a, b = _copies("fp8_e4m3_tensor")
    (d4, s4, amax4, id4, _), _ = _copies("nvfp4")
    blocks = _copies("fp8_e4m3_1x128", m=6, n=5, k=300)[0]
    rng = torch.zeros(4, dtype=torch.int32)

    def gemm(d, s, *options, b=b):
        return ops.gemm(d, s, None, 0, False, *b, *options)

    return {
        "dtype": (lambda t: ops.quantize(t, quant)[0], (x.double(),), "float64"),
        "scalar": (lambda t: ops.quantize(t, quant)[0], (x[0, 0],), "at least one dimension"),
        "amax": (lambda t: ops.quantize(t, mx, t)[0], (x,), "takes one per block"),
        "one amax": (
            lambda t, s: ops.quantize(t, fp4, s)[0],
            (x.repeat(4, 1), scale),
            "columnwise_amax .* is missing",
        ),
        "no such amax": (lambda t, s: ops.quantize(t, quant, s, s)[0], (x, scale), "columnwise_amax .* is not read"),
        "amax of rows": (
            lambda t, s: ops.quantize(t, quantizer("nvfp4", columnwise=False, row_amax=True), s)[0],
            (x, scale),
            r"amax .* must be \[4\]",
        ),
        "columns": (lambda t: ops.quantize(t, fp4)[0], (x[:, :40].contiguous(),), "multiple of 16"),
        "rows": (lambda t: ops.quantize(t, fp4)[0], (x,), "number of rows"),
        "no rng": (lambda t: ops.quantize(t, noisy)[0], (x,), "pass rng="),
        "rng": (lambda t, r: ops.quantize(t, quant, rng=r)[0], (x, rng), "rng is for stochastic rounding"),
        "rng dtype": (lambda t, r: ops.quantize(t, noisy, rng=r)[0], (x, rng.long()), "rng .* must be int32"),
        "rng length": (lambda t, r: ops.quantize(t, noisy, rng=r)[0], (x, rng[:2].clone()), r"rng .* must be \[4\]"),
        "rotation": (lambda t: ops.quantize(t, rotated)[0], (x.repeat(4, 1),), "takes bfloat16 alone"),
        "no scale": (lambda t: ops.quantize(t, Float8Quantizer())[0], (x,), "pass scale="),
        "scale of blocks": (lambda t, s: ops.quantize(t, mx, scale=s)[0], (x, scale), "scale is for per-tensor"),
        "scale and amax": (lambda t, s: ops.quantize(t, quant, s, scale=s)[0], (x, scale), "the scale alone decides"),
        "scale and pow2": (
            lambda t, s: ops.quantize(t, quantizer("fp8_e4m3_tensor", pow2=True), scale=s)[0],
            (x, scale),
            "do not apply",
        ),
        "history": (
            lambda t, s: ops.quantize_delayed(t, Float8Quantizer(), s, s.double())[0],
            (x, scale),
            "history must be float32",
        ),
        "update": (
            lambda h, s: ops.scale_update(h, s, None, None, 448.0, 0, False),
            (history, scale.repeat(2)),
            r"scale must be \[1\]",
        ),
        "update amax": (
            lambda h, s: ops.scale_update(h, s, None, s.clone(), 448.0, 0, True),
            (history, scale),
            "most_recent does not apply",
        ),
        "margin": (
            lambda h, s: ops.scale_update(h, s, None, None, 448.0, 127, False),
            (history, scale),
            "margin must lie in -126..126",
        ),
        "amax flags": (lambda t: ops.amax(t, 1, False)[0], (x,), "an unknown option"),
        "amax rotation": (lambda t: ops.amax(t, RHT, False)[0], (x.bfloat16().repeat(4, 1),), "was not asked for"),
        "format id": (lambda d, s: ops.dequantize(d, s, None, 99, False, torch.float32), a[:2], "format id 99"),
        "payload": (lambda d, s: ops.dequantize(d, s, None, 1, False, torch.float32), a[:2], "float8_e5m2"),
        "scales": (
            lambda d, s: ops.dequantize(d[:2], s, None, 2, False, torch.float32),
            blocks[:2],
            r"must be \[2, 3\]",
        ),
        "amax missing": (lambda d, s: ops.dequantize(d, s, None, id4, False, torch.float32), (d4, s4), "is missing"),
        "amax unread": (lambda d, s, t: ops.dequantize(d, s, t, 0, False, torch.float32), (*a[:2], amax4), "not read"),
        "amax length": (
            lambda d, s, t: ops.dequantize(d, s, t.repeat(2), id4, False, torch.float32),
            (d4, s4, amax4),
            r"amax .* must be \[6\]",
        ),
        "reduced": (
            lambda d, s: gemm(d[:, :8], s, None, 1.0, torch.float32, False),
            a[:2],
            "reduces over 8 elements",
        ),
        "bias": (
            lambda d, s: gemm(d, s, d[0].float(), 1.0, torch.float32, False),
            a[:2],
            r"bias must be \[5\]",
        ),
        "fast": (
            lambda d, s: ops.gemm(d, s, None, 2, False, d, s, None, 2, False, None, 1.0, torch.float32, True),
            blocks[:2],
            "fast_accum exists for per-tensor FP8 only",
        ),
        "out dtype": (lambda t: ops.bias_grad(t, torch.int32), (x,), "not int32"),
    }


@pytest.mark.parametrize("name", _bad_calls())
def test_bad_calls_fail_at_trace_time_too(name):
    call, args, message = _bad_calls()[name]
    with pytest.raises((ValueError, TypeError)):
        call(*args)
    meta = [t.to("meta") for t in args]
    if name not in ("reduced", "bias"):  # they hold the other operand
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
        lambda acc, d, s: ops.gemm_into(acc, d, s, None, 0, False, *b, None, 1.0, 1.0, False),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match=r"acc must be \[6, 5\]"):
        step(acc, a[0], a[1])
    assert (acc == -123).all()
