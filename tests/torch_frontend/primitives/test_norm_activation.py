"""The norm and activation ops under torch.ops.diptych: fake against real, against torch, derivatives, bad operands."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cases
from diptych.common import DTypeError, Float8Quantizer, ShapeError, UnsupportedError
from diptych.common.ops.activation import ACTIVATIONS, activation_options
from diptych.common.ops.norm import NormOptions, norm_options
from diptych.common.quantizers import RHT
from diptych.torch.functional import activation as activation_verbs
from diptych.torch.functional import norm as norm_verbs
from diptych.torch.functional import source as sources
from diptych.torch.primitives import activation as activation_ops
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives import norm as norm_ops
from diptych.torch.primitives import quantize as quantize_ops
from torch_frontend import tools
from torch_frontend.tools import ALL, delayed, named, normal, same

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LN, RMS = NormOptions("layernorm", 1e-5, False), NormOptions("rmsnorm", 1e-5, True)
TORCH = {
    "gelu": lambda a: torch.nn.functional.gelu(a, approximate="tanh"),
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "srelu": lambda a: torch.relu(a).square(),
    "qgelu": lambda a: a * torch.sigmoid(1.702 * a),
}


def _act(name, x):
    which, gated = ACTIVATIONS[name]
    if not gated:
        return TORCH[which](x)
    a, b = x.chunk(2, -1)
    return TORCH[which](a) * b


def _torch_norm(x, gamma, beta, options):
    g = gamma + 1 if options.zero_centered_gamma else gamma
    if options.which == "layernorm":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], g, beta, options.eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], g, options.eps)


def _sources(x, device, m=32, k=64):
    """A FusedInput of each kind, whose encoded tensor is [m, k]; x [m, k], and [m, 2k] where gated."""
    gamma, beta = normal("g", (k,), "float32", device), normal("b", (k,), "bfloat16", device)
    wide = torch.cat([x, x.flip(0)], -1)
    dy = normal("dy", (*x.shape[:-1], k // 2), "float16", device)
    for options, b in ((LN, beta), (LN, None), (RMS, None)):
        mu, rsigma, _ = norm_ops.norm(x, None, None, options)
        yield sources.normalized(x, gamma, b, mu, rsigma, options), norm_ops.norm(x.float(), gamma, b, options)[2]
    for name in ("gelu", "swiglu"):
        act, v = ACTIVATIONS[name], wide if ACTIVATIONS[name].gated else x
        yield sources.activated(v, act), activation_ops.activation(v.float(), act)
        d = dy if act.gated else normal("dy2", (*x.shape[:-1], k), "bfloat16", device)
        yield sources.activated_grad(d, x, act), activation_ops.activation_grad(d, x, act, torch.float32)


@pytest.mark.parametrize("options", (LN, RMS, NormOptions("layernorm", 0.5, True)))
def test_norms_against_torch(options, device):
    for dtype in FLOATS:
        x = normal("x", (3, 16, 80), "float32", device).to(dtype).requires_grad_()
        gamma = normal("g", (80,), "float32", device).requires_grad_()
        beta = normal("b", (80,), "float32", device).requires_grad_() if options.which == "layernorm" else None
        leaves = [t for t in (x, gamma, beta) if t is not None]
        y = norm_verbs.layernorm(x, gamma, beta, options)
        assert y.dtype == dtype
        double = [t.detach().double().requires_grad_() for t in leaves]
        want = _torch_norm(double[0], double[1], double[2] if beta is not None else None, options)
        dy = normal("dy", (3, 16, 80), "float32", device).to(dtype)
        got = [y, *torch.autograd.grad(y, leaves, dy)]
        exact = [want, *torch.autograd.grad(want, double, dy.double())]
        for g, w in zip(got, exact, strict=True):
            assert (g.double() - w).norm() < 2 * torch.finfo(g.dtype).eps * w.norm()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_against_torch(name, device):
    act = activation_options("test", name)
    for dtype in FLOATS:
        x = normal("x", (3, 16, 80), "float32", device).to(dtype).requires_grad_()
        y = activation_verbs.activate(x, act)
        double = x.detach().double().requires_grad_()
        want = _act(name, double)
        dy = normal("dy", tuple(want.shape), "float32", device).to(dtype)
        assert y.dtype == dtype and y.shape == want.shape
        (dx,), (exact,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(want, double, dy.double())
        for g, w in ((y, want), (dx, exact)):
            assert (g.double() - w).norm() < 2 * torch.finfo(dtype).eps * w.norm()


def same_sum(got, values):
    """A source's column sum; on CUDA bias_grad adds in another order, which can round to the next number."""
    if values.is_cuda:
        total = gemm_ops.bias_grad(values, torch.float32)
        rtol = max(1e-5, torch.finfo(got.dtype).eps / 2)
        torch.testing.assert_close(got.float(), total, rtol=rtol, atol=1e-4)
    else:
        same(got, gemm_ops.bias_grad(values, got.dtype))


@pytest.mark.parametrize("name", ALL)
def test_a_source_gives_the_bytes_of_its_values(name, device):
    """And the fakes have the real ones' layout; so the amax, and the column sum."""
    for (rowwise, columnwise), dtype in itertools.product(tools.USAGES, ("float32", "bfloat16")):
        quant = named(name, rowwise=rowwise, columnwise=columnwise)
        if quant.spec.flags & RHT and dtype != "bfloat16":
            continue
        rng = tools.rng_for(quant, device)
        x = normal("x", (2, 16, 64), dtype, device)
        for f, values in _sources(x, device):
            values = values.to(torch.bfloat16) if quant.spec.flags & RHT else values
            got = sources.quantize(f, quant, rng=rng, sum_dtype=torch.float32)
            want = quantize_ops.quantize(values, quant, rng=rng)
            for g, w in zip(got[:-1], want, strict=True):
                if quant.spec.flags & RHT:  # the rowwise copy is of unrounded values
                    assert g.shape == w.shape and g.dtype == w.dtype
                else:
                    same(g, w, name)
            if not quant.spec.flags & RHT:
                assert got[-1].dtype == torch.float32
                same_sum(got[-1], values)
                same(sources.amax(f), quantize_ops.amax(values))
            with FakeTensorMode() as mode:
                g = sources.FusedInput(*[mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in f])
                fake_rng = None if rng is None else mode.from_tensor(rng)
                fake = sources.quantize(g, quant, rng=fake_rng, sum_dtype=torch.float32)
            for a, b in zip(fake, got, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_delayed_scaling_with_a_source(device):
    x = normal("x", (2, 16, 64), "float32", device)
    for rowwise, columnwise in tools.USAGES:
        quant = Float8Quantizer(rowwise=rowwise, columnwise=columnwise)
        for f, values in _sources(x, device):
            (scale, history), (_, expected) = delayed(device), delayed(device)
            got = sources.quantize_delayed(f, quant, scale, history, torch.bfloat16)
            want = quantize_ops.quantize_delayed(values, quant, scale, expected)
            for g, w in zip(got[:-1], want, strict=True):
                same(g, w)
            assert got[-1].dtype == torch.bfloat16
            same_sum(got[-1], values)
            same(history, expected)


def test_ops_pass_opcheck():
    x, gamma = normal("x", (16, 64)), normal("g", (64,))
    mu, rsigma, y = norm_ops.norm(x, gamma, None, LN)
    ops = torch.ops.diptych
    for op, args in (
        (ops.norm, (x, gamma, None, 0, 1e-5, False)),
        (ops.norm, (x, None, None, 1, 1e-5, False)),
        (ops.norm_grad, (y, x, gamma, mu, rsigma, False, True)),
        (ops.activation, (x, 0, True)),
        (ops.activation_grad, (y, x, 2, False, torch.bfloat16)),
        (ops.amax_fused, (*sources.activated(x, ACTIVATIONS["gelu"]), 0, True)),
    ):
        torch.library.opcheck(op.default, args)


def test_bad_operands():
    x, gamma = normal("x", (16, 64)), normal("g", (64,))
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(DTypeError):
            norm_ops.norm(x.to(dtype), gamma, None, LN)
        with pytest.raises(DTypeError):
            activation_ops.activation(x.to(dtype), ACTIVATIONS["gelu"])
    fake = torch.device("meta")
    for device in (x.device, fake):
        v, g = x.to(device), gamma.to(device)
        with pytest.raises(ValueError, match="gamma"):
            norm_ops.norm(v, g[:32], None, LN)
        with pytest.raises(ValueError, match="halves the last dimension"):
            activation_ops.activation(v[:, :63], ACTIVATIONS["swiglu"])
        with pytest.raises(ValueError, match="dy"):
            activation_ops.activation_grad(v, v, ACTIVATIONS["swiglu"])
        with pytest.raises(ValueError, match="beta"):
            norm_ops.norm(v, g, g, RMS)
    with pytest.raises(ShapeError):
        activation_ops.activation(torch.tensor(1.0), ACTIVATIONS["gelu"])
    with pytest.raises(UnsupportedError, match="requires grad"):
        sources.quantize(sources.activated(x.requires_grad_(), ACTIVATIONS["gelu"]), named(cases.FORMATS[0]))
    for bad, error in (
        (("Layernorm", 1e-5, False), ValueError),
        (("LayerNorm", -1.0, False), ValueError),
        (("LayerNorm", float("nan"), False), ValueError),
        (("LayerNorm", "small", False), TypeError),
        (("LayerNorm", 1e-5, 1), TypeError),
    ):
        with pytest.raises(error, match="test: "):
            norm_options("test", *bad)
    with pytest.raises(ValueError, match="activation must be one of gelu"):
        activation_options("test", "tanh")


def test_no_second_derivative():
    x = normal("x", (4, 8)).requires_grad_()
    for y in (norm_verbs.layernorm(x, torch.ones(8), None, LN), activation_verbs.activate(x, ACTIVATIONS["gelu"])):
        with pytest.raises(UnsupportedError, match="second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
