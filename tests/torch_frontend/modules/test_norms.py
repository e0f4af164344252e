"""`LayerNorm` and `RMSNorm`: against float64, and bit by bit against the norm inside of `LayerNormLinear`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import diptych.torch as dt
from diptych.common import MXFP8BlockScaling
from diptych.common.errors import DTypeError, ShapeError, UnsupportedError
from torch_frontend.tools import normal, same

NORMS = {"LayerNorm": dt.LayerNorm, "RMSNorm": dt.RMSNorm}
DTYPES = ("float32", "bfloat16", "float16")
# What a result rounded once to a dtype, from float32 arithmetic, may be off by.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def drawn(name: str, shape: Any = 96, **options: Any) -> Any:
    module = NORMS[name](shape, **options)
    for i, p in enumerate(module.parameters()):
        with torch.no_grad():
            p.copy_(normal(f"parameter {i}", tuple(p.shape)).to(p.dtype))
    return module


def in_float64(module: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    p = {n: t.detach().double().requires_grad_() for n, t in module.named_parameters()}
    v = x.detach().double().requires_grad_()
    gamma = p["weight"] + module.zero_centered_gamma
    shape, eps = module.normalized_shape, module.eps
    y = F.rms_norm(v, shape, gamma, eps) if "bias" not in p else F.layer_norm(v, shape, gamma, p["bias"], eps)
    y.backward(dy.double())
    return {"y": y.detach(), "x": v.grad, **{n: t.grad for n, t in p.items()}}


def results(module: Any, x: torch.Tensor, dy: torch.Tensor, call: Any = None) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = (module if call is None else call)(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{n: p.grad.clone() for n, p in module.named_parameters()}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"zero_centered_gamma": True, "eps": 0.5}, {"eps": 0.0}], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_against_float64(name, options, dtype, device):
    module = drawn(name, dtype=getattr(torch, dtype), device=device, **options)
    x, dy = normal("x", (4, 33, 96), dtype, device) + 1, normal("dy", (4, 33, 96), dtype, device)
    got, want = results(module, x, dy), in_float64(module, x, dy)
    assert got.keys() == want.keys()
    for key, exact in want.items():
        assert got[key].dtype is getattr(torch, dtype) and got[key].shape == exact.shape
        error = (got[key].double() - exact).norm() / exact.norm()
        assert error < TOLERANCES[dtype], (key, float(error))


@pytest.mark.parametrize("name", NORMS)
def test_bits_of_the_norm_inside_of_a_layer(name, device):
    layer = dt.LayerNormLinear(96, 32, normalization=name, return_layernorm_output=True, device=device)
    module = drawn(name, device=device)
    layer.load_state_dict(layer.state_dict() | {f"layer_norm_{n}": p for n, p in module.state_dict().items()})
    x = normal("x", (32, 96), device=device)
    for region in (True, False):
        with dt.autocast(enabled=region, recipe=MXFP8BlockScaling()):
            same(module(x), layer(x)[1])


@pytest.mark.parametrize("name", NORMS)
def test_several_axes_are_one(name):
    flat, module = drawn(name), drawn(name, (8, 12))
    module.load_state_dict({n: p.view(8, 12) for n, p in flat.state_dict().items()})
    x, dy = normal("x", (5, 3, 8, 12)), normal("dy", (5, 3, 8, 12))
    got, want = results(module, x, dy), results(flat, x.view(5, 3, 96), dy.view(5, 3, 96))
    for key, t in got.items():
        same(t, want[key].view(t.shape))


@pytest.mark.parametrize("name", NORMS)
def test_compiled_is_eager(name):
    module = drawn(name)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, dy = normal("x", (33, 96)), normal("dy", (33, 96))
    got, want = results(module, x, dy, compiled), results(module, x, dy)
    for key, t in got.items():
        same(t, want[key])


def test_state_dicts_are_those_of_torch():
    assert drawn("LayerNorm").state_dict().keys() == torch.nn.LayerNorm(96).state_dict().keys()
    assert drawn("RMSNorm").state_dict().keys() == torch.nn.RMSNorm(96).state_dict().keys()
    module = drawn("LayerNorm", zero_centered_gamma=True, dtype=torch.bfloat16)
    copied = copy.deepcopy(module)
    assert repr(copied) == repr(module) == "LayerNorm(96, eps=1e-05, zero-centered)"
    copied.reset_parameters()
    assert not copied.weight.any() and not copied.bias.any() and (dt.RMSNorm(96).weight == 1).all()


def test_amp_casts_the_input():
    module, x = drawn("RMSNorm"), normal("x", (8, 96))
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        same(module(x), module(x.bfloat16()))


def test_bad_input():
    for wrong, error in (
        ({"eps": -1.0}, ValueError),
        ({"zero_centered_gamma": 1}, TypeError),
        ({"sm_margin": 4}, UnsupportedError),
        ({"elementwise_affine": False}, TypeError),
        ({"dtype": torch.float16, "params_dtype": torch.float32}, ValueError),
    ):
        with pytest.raises(error, match="LayerNorm"):
            dt.LayerNorm(8, **wrong)
    for shape in ((), 0, (8, True), "8"):
        with pytest.raises(TypeError, match="RMSNorm: normalized_shape must be"):
            dt.RMSNorm(shape)
    module = dt.LayerNorm((4, 8), sequence_parallel=None, sm_margin=0)
    with pytest.raises(ShapeError, match=r"LayerNorm: input must be \[\.\.\., 4, 8\], as normalized_shape says"):
        module(torch.zeros(3, 4, 9))
    with pytest.raises(DTypeError, match="input must be"):
        module(torch.zeros(3, 4, 8, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"input must be a torch\.Tensor"):
        module("x")
    y = module(torch.randn(3, 4, 8, requires_grad=True))
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(y.sum(), module.weight, create_graph=True)
