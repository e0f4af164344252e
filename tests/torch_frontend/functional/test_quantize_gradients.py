"""`quantize`, `dequantize` and `gemm` are straight-through, eagerly and compiled; what has no derivative says so."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
import diptych.torch as dt
from diptych.common import Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer, UnsupportedError
from diptych.torch.primitives import quantize as quantize_ops
from torch_frontend import tools
from torch_frontend.tools import normal, quantizer, same

pytestmark = pytest.mark.sampled

E4M3 = quantizer("fp8_e4m3_tensor")
slow = pytest.mark.slow
SOME = ("fp8_e4m3_tensor", "fp8_e4m3_1x128", "mxfp8_e5m2", "nvfp4")


def leaf(name: str, shape: tuple[int, ...], dtype: str = "float32", device: str = "cpu") -> Tensor:
    return normal(name, shape, dtype, device).requires_grad_()


def same_bits(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        assert g is None or (g.dtype == w.dtype and torch.equal(g, w))


# --- against autograd ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_quantize_and_dequantize_pass_the_gradient_on(fmt, device):
    for usage, dtype, out in itertools.product(tools.USAGES, ("float32", "bfloat16"), (None, torch.float16)):
        quant = quantizer(fmt, rowwise=usage[0], columnwise=usage[1])
        x = leaf(f"ste-{fmt}", (2, 24, 96), dtype, device)
        q = dt.quantize(x, quant)
        assert q.requires_grad and type(q) is dt.QuantizedTensor
        plain = dt.quantize(x.detach(), quant)
        assert not plain.requires_grad and torch.equal(q.detach(), plain)
        y = dt.dequantize(q, out) if out is not None else q.dequantize()
        dy = torch.randn_like(y)
        y.backward(dy)
        assert type(x.grad) is Tensor
        same_bits([y.detach(), x.grad], [dt.dequantize(plain, out), dy.to(x.dtype)])


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_gemm_is_the_derivative_of_the_copies_product(fmt, device):
    for trans_a, trans_b, dtype in itertools.product((False, True), (False, True), ("float32", "bfloat16")):
        m, n, k = 32, 48, 64
        a = leaf("a", (k, m) if trans_a else (2, m // 2, k), dtype, device)
        b = leaf("b", (n, k) if trans_b else (k, n), "float32", device)
        bias = leaf("bias", (n,), "float32", device)
        quant = quantizer(fmt)
        qa, qb = dt.quantize(a, quant), dt.quantize(b, quant)
        y = dt.gemm(qa, qb, trans_a=trans_a, trans_b=trans_b, bias=bias, alpha=0.5, out_dtype=torch.float32)
        dy = torch.randn_like(y)
        got = torch.autograd.grad(y, (a, b, bias), dy)
        copies = (qa.copy_of(trans_a), qb.copy_of(not trans_b))
        va, vb = [quantize_ops.dequantize(c, torch.float32).double().requires_grad_() for c in copies]
        vbias = bias.detach().double().requires_grad_()
        op_a, op_b = va.reshape(-1, va.shape[-1]), vb
        exact = 0.5 * (op_a.t() if trans_a else op_a) @ (op_b.t() if trans_b else op_b) + vbias
        want = torch.autograd.grad(exact, (va, vb, vbias), dy.double().view(exact.shape))
        for g, w, t in zip(got, want, (a, b, bias), strict=True):
            assert g.dtype == t.dtype and g.shape == t.shape
            tolerance = 1e-2 if t.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(g.double(), w.view(t.shape), rtol=tolerance, atol=tolerance)


def test_forward_and_bias_are_those_of_linear():
    from diptych.common import CustomRecipe

    x, w, bias = leaf("x", (32, 64)), leaf("w", (48, 64)), leaf("bias", (48,))
    y = dt.gemm(dt.quantize(x, E4M3), dt.quantize(w, E4M3), bias=bias)
    theirs = dt.linear(x, w, bias, CustomRecipe(lambda role: E4M3))
    dy = torch.randn_like(y)
    same_bits([y, *torch.autograd.grad(y, bias, dy)], [theirs, *torch.autograd.grad(theirs, bias, dy)])


def test_only_what_is_asked_for():
    """No product and no saved copy that no gradient asks for."""
    for needs in itertools.product((False, True), repeat=3):
        x, w, bias = normal("x", (32, 64)), normal("w", (48, 64)), normal("bias", (48,))
        for t, need in zip((x, w, bias), needs, strict=True):
            t.requires_grad_(need)
        saved: list[Tensor] = []
        qx, qw = dt.quantize(x, E4M3), dt.quantize(w, E4M3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=saved: into.append(t) or t, lambda t: t):
            y = dt.gemm(qx, qw, bias=bias)
        want = (qx.copy_of(False)[:2] if needs[1] else ()) + (qw.copy_of(False)[:2] if needs[0] else ())
        assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in want]
        assert y.requires_grad == any(needs)
        if any(needs):
            y.sum().backward()
        assert tuple(t.grad is not None for t in (x, w, bias)) == needs


def test_modes():
    x = leaf("x", (16, 64))
    with torch.no_grad():
        assert not dt.quantize(x, E4M3).requires_grad
    q = dt.quantize(x, E4M3)
    with torch.no_grad():
        assert not q.dequantize().requires_grad and not dt.gemm(q, q).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = dt.gemm(q, q)
        assert y.dtype == torch.float32
        (dx,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(dt.gemm(q, q).sum(), x)
    same_bits([dx], [want])


def test_what_moves_a_quantized_tensor_passes_the_gradient_on():
    x = leaf("x", (16, 64))
    for move in (lambda q: q.clone(), lambda q: q.to(q.device, copy=True), lambda q: q.contiguous()):
        q = move(dt.quantize(x, E4M3))
        assert q.requires_grad
        (dx,) = torch.autograd.grad(q.dequantize(), x, torch.ones(16, 64))
        assert torch.equal(dx, torch.ones(16, 64))
    assert not dt.quantize(x, E4M3).detach().requires_grad


def test_given_scale_amax_and_rng():
    x = leaf("x", (16, 64), "bfloat16")
    noisy = NVFP4Quantizer(stochastic_rounding=True)
    for q in (
        dt.quantize(x, Float8Quantizer(), scale=torch.ones(1)),
        dt.quantize(x, E4M3, amax=torch.ones(1)),
        dt.quantize(x, noisy, rng=dt.rng_state(1)),
    ):
        (dx,) = torch.autograd.grad(q.dequantize().sum(), x)
        assert torch.equal(dx, torch.ones_like(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(MXFP8Quantizer):
    def quantize_impl(self, x: Any, quantize: Any) -> Any:
        return quantize(x.clip(-1, 1), MXFP8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise))


def test_a_quantizer_of_one_s_own_is_differentiated_as_it_is_written():
    x = leaf("x", (16, 64))
    (dx,) = torch.autograd.grad(dt.quantize(x, Clipped()).dequantize().sum(), x)
    assert torch.equal(dx, (x.abs() <= 1).float()) and not dx.all()


@pytest.mark.parametrize("signs", (False, True))
def test_rotated_columns(signs):
    """Both operands of a wgrad are rotated: its derivative is in terms of the rowwise copies."""
    quant = NVFP4Quantizer(with_rht=True, with_random_sign_mask=signs)
    dy, x = leaf("dy", (32, 48), "bfloat16"), leaf("x", (32, 64), "bfloat16")
    kw = {"trans_a": True, "trans_b": False, "out_dtype": torch.float32}
    qdy, qx = dt.quantize(dy, quant), dt.quantize(x, quant)
    got = torch.autograd.grad(dt.gemm(qdy, qx, **kw).sum(), (dy, x))
    ones = torch.ones(48, 64)
    want = (qx.dequantize(torch.float32) @ ones.t(), qdy.dequantize(torch.float32) @ ones)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.float(), w, rtol=1e-2, atol=1e-2)
    columns = [dt.quantize(t, quant.with_usage(rowwise=False)) for t in (dy, x)]
    with pytest.raises(UnsupportedError, match="rowwise copy of a, whose columns are rotated"):
        dt.gemm(*columns, **kw)
    with pytest.raises(UnsupportedError, match="rotated values have no derivative"):
        columns[0].dequantize()
    with torch.no_grad():
        dt.gemm(*columns, **kw), columns[0].dequantize()


# --- compiled --------------------------------------------------------------------------------------------------------


def layer(x: Tensor, w: Tensor, bias: Tensor | None, quant: Quantizer) -> Tensor:
    return dt.gemm(dt.quantize(x, quant), dt.quantize(w, quant), bias=bias)


def two_uses(x: Tensor, w: Tensor, bias: Tensor | None, quant: Quantizer) -> Tensor:
    """Gradients of a quantized tensor add up; one goes through a clone."""
    q, qw = dt.quantize(x * 2, quant), dt.quantize(w, quant)
    y = dt.gemm(q, qw, bias=bias, alpha=0.25)
    back = dt.gemm(dt.quantize(y, quant), qw, trans_b=False)
    return back * dt.dequantize(q.clone(), torch.float32)


def run(fn: Any, m: int, quant: Quantizer, needs: tuple[bool, ...] = (True, True, True)) -> list[Any]:
    x, w, bias = normal("x", (2, m, 160), "bfloat16"), normal("w", (64, 160)), normal("bias", (64,))
    for t, need in zip((x, w, bias), needs, strict=True):
        t.requires_grad_(need)
    y = fn(x, w, bias, quant)
    if any(needs):
        y.float().pow(2).sum().backward()
    return [y.detach(), x.grad, w.grad, bias.grad]


CELLS = itertools.product(enumerate(SOME), enumerate((layer, two_uses)), ("aot_eager", "inductor"))


@pytest.mark.parametrize(
    ("fmt", "fn", "backend"),
    [  # with the tests, each format in one function
        pytest.param(fmt, fn, backend, marks=() if backend == "aot_eager" and (i + j) % 2 == 0 else slow)
        for (i, fmt), (j, fn), backend in CELLS
    ],
)
def test_compiled_is_eager(fmt, fn, backend):
    quant = quantizer(fmt)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(fn, fullgraph=True, backend=backend, dynamic=True)
    for m in (80, 72, 136):
        got, want = run(compiled, m, quant), run(fn, m, quant)
        if fn is layer or backend == "aot_eager":
            same_bits(got, want)
        else:  # Inductor keeps the float32 between products that eager rounds to bfloat16
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g.float(), w.float(), rtol=0.05, atol=0.02 * w.abs().max().item())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_gradients_that_are_asked_for():
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for needs in itertools.product((False, True), repeat=3):
        same_bits(run(compiled, 16, E4M3, needs), run(layer, 16, E4M3, needs))


def test_a_quantized_tensor_that_needs_grad_enters_a_compiled_region():
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: dt.gemm(a, b) * 2 + b.dequantize().sum(), fullgraph=True, backend="aot_eager")
    grads = []
    for fn in (compiled, lambda a, b: dt.gemm(a, b) * 2 + b.dequantize().sum()):
        x, w = leaf("x", (16, 64)), leaf("w", (32, 64))
        grads.append(torch.autograd.grad(fn(dt.quantize(x, E4M3), dt.quantize(w, E4M3)).sum(), (x, w)))
    same_bits(*grads)


LEAVES = {  # of (quantized, detached, plain): what the backward begins at
    "quantized": lambda q, _, y: q.dequantize().pow(2).sum(),
    "strided gradient": lambda q, _, y: (q.dequantize() * normal("w", (64, 16)).t()).sum(),
    "plain": lambda q, _, y: y.pow(2).sum(),
    "both": lambda q, _, y: dt.gemm(q, dt.quantize(normal("w", (32, 64)), E4M3)).sum() + y.sum(),
}


@pytest.mark.parametrize(
    ("dynamic", "backend"),
    [
        (None, "aot_eager"),
        (True, "inductor"),
        pytest.param(True, "aot_eager", marks=slow),
        pytest.param(None, "inductor", marks=slow),
    ],
)
def test_a_quantized_tensor_that_needs_grad_leaves_a_compiled_region(backend, dynamic):
    """Its gradient is a plain tensor there too."""
    torch._dynamo.reset()

    def fn(x):
        q = dt.quantize(x * 2, E4M3)
        return q, q.detach(), q.dequantize() * x

    compiled = torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)
    for loss in LEAVES.values():
        grads = []
        for f in (compiled, fn):
            x = leaf("x", (16, 64))
            q, detached, y = f(x)
            assert isinstance(q, dt.QuantizedTensor) and q.requires_grad and not detached.requires_grad
            assert torch.equal(q.detach(), detached)
            loss(q, detached, y).backward()
            assert type(x.grad) is torch.Tensor
            grads.append(x.grad)
        same(grads[0], grads[1])
    with pytest.raises(Exception, match="QuantizedTensor"):
        compiled(x)[0].backward(detached)


def test_a_quantized_tensor_straight_out_of_a_compiled_region():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, q: (dt.quantize(x, E4M3), q, q.clone()), fullgraph=True, backend="aot_eager")
    x, g = leaf("x", (16, 64)), normal("g", (16, 64))
    for q in compiled(x, dt.quantize(x, E4M3)):
        x.grad = None
        q.backward(g, retain_graph=True)
        same(x.grad, g)


# --- what has no derivative ------------------------------------------------------------------------------------------

REFUSED = {
    "amax": lambda x: dt.amax(x),
    "bias_grad": lambda x: dt.bias_grad(x),
    "scale_update": lambda x: dt.scale_update(torch.zeros(3), torch.ones(1), reduced=x[0, :1]),
    "quantize": lambda x: dt.quantize(x, E4M3, amax=x[0, :1]),
    "gemm_into": lambda x: dt.gemm_into(torch.zeros(16, 16), dt.quantize(x, E4M3), dt.quantize(x.detach(), E4M3)),
}


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_derivative_is_an_error(name, compiled):
    x = leaf("x", (16, 64))
    torch._dynamo.reset()
    fn = torch.compile(REFUSED[name], fullgraph=True, backend="aot_eager") if compiled else REFUSED[name]
    with pytest.raises(Exception, match=f"{name}.* has no derivative, and an argument requires grad") as error:
        fn(x)
    assert compiled or isinstance(error.value, UnsupportedError)
    with torch.no_grad():
        REFUSED[name](x)


def test_no_second_derivative_of_gemm():
    x = leaf("x", (16, 64))
    y = dt.gemm(dt.quantize(x, E4M3), dt.quantize(x, E4M3))
    with pytest.raises(UnsupportedError, match="gemm has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
