"""LayerNormLinear: the bits of norm and linear layer apart, what backward keeps, and what the module stands for."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    RECIPES,
    CustomRecipe,
    DTypeError,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    UnsupportedError,
)
from diptych.core import reset_calls
from torch_frontend import composed
from torch_frontend import layer_cases as layers
from torch_frontend.composed import linear, steps
from torch_frontend.layer_cases import NAMED, STATELESS, same_step
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MX = MXFP8BlockScaling()


@pytest.mark.parametrize("options", composed.LINEAR)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_bits_of_the_composition(name, options, device):
    """A float32 norm is not rounded, so that fused and composed agree: three steps, states and gradients."""
    recipe, module = composed.unrounded(name), linear(device=device, **options)
    x = normal("x", (2, 16, 96), device=device)
    same_step(steps(module, recipe, x), steps(composed.composed(module).to(device), recipe, x))


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_bfloat16_inputs_are_not_rounded_between(name, device):
    recipe, module = NAMED[name], linear(device=device)
    x = normal("x", (2, 16, 96), "bfloat16", device)
    with dt.autocast(recipe=recipe), torch.no_grad():
        got, want = module(x), composed.composed(module).to(device)(x.float())
    same(got, want.to(torch.bfloat16))


@dataclasses.dataclass(frozen=True)
class Without:
    """MXFP8, but for one role."""

    tensor: str
    gemm: str

    def __call__(self, role):
        return None if (role.tensor, role.gemm) == (self.tensor, self.gemm) else MXFP8Quantizer()


class Twice(Float8CurrentScalingQuantizer):
    """A quantizer of a user's own."""

    def quantize_impl(self, x, quantize):
        inner = Float8CurrentScalingQuantizer(rowwise=self.rowwise, columnwise=self.columnwise)
        return quantize(x * 2, inner)


def _custom(role):
    return Twice() if role.tensor == "input" else Float8CurrentScalingQuantizer()


def _results(role):
    return MXFP8Quantizer()


OTHERS = [
    *[CustomRecipe(Without(t, g)) for g, pair in (("fprop", ("input", "weight")), ("dgrad", ("grad_output", "weight")),
                                                  ("wgrad", ("grad_output", "input"))) for t in pair],
    *[RECIPES[n].replace(backward_override=o)
      for n, o in itertools.product(("mxfp8", "fp8-delayed"), ("high_precision", "dequantized"))],
    CustomRecipe(_custom),
    CustomRecipe(_results, quantize_results=True),
]  # fmt: skip


@pytest.mark.parametrize("recipe", OTHERS, ids=lambda r: f"{type(r).__name__}{OTHERS.index(r)}")
def test_bits_of_the_composition_under_other_recipes(recipe):
    composed.require_same(linear(), normal("x", (2, 16, 96)), recipe)


def _float64(module, x, dy):
    """y and the gradients of the module in float64, and what each product's operands are."""
    p = {n: t.detach().double().requires_grad_() for n, t in module.named_parameters()}
    v = x.detach().double().requires_grad_()
    z = torch.nn.functional.layer_norm(v, (v.size(-1),), p["layer_norm_weight"], p["layer_norm_bias"], 1e-5)
    y = z @ p["weight"].t() + p["bias"]
    y.backward(dy.double())
    return {"y": y.detach(), "dx": v.grad, **{n: t.grad for n, t in p.items()}}


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_against_float64(name, device):
    """Each operand is off by its format's tolerance, stochastically rounded ones by twice that; a product by both."""
    recipe, module = RECIPES[name], linear(256, 128, device=device)
    x, dy = composed.input_for(recipe, (64, 256), device), normal("dy", (64, 128), layers.dtype_of(recipe), device)
    want = _float64(module, x, dy)
    got = layers.run(module, module, x, recipe, dy)
    f, d, w = (tuple(q.format.tolerance for q in recipe.operands(g)) for g in ("fprop", "dgrad", "wgrad"))
    bounds = {"y": f, "dx": d, "layer_norm_weight": d, "layer_norm_bias": d, "weight": w, "bias": (0.0, 0.0)}
    assert bounds.keys() == want.keys()
    for key, (a, b) in bounds.items():
        error = (got[key].double() - want[key]).norm() / want[key].norm()
        assert error < (1 + a) * (1 + 2 * b) - 1 + 2 * a + 2.0**-7 * (a == 0), (key, float(error))
        assert a == 0 or error > 2.0**-12, (key, float(error))


@pytest.mark.parametrize("options", composed.LINEAR)
def test_outside_of_regions_it_is_a_norm_and_a_linear_layer(options, device):
    module, x = linear(device=device, **options), normal("x", (2, 16, 96), device=device)
    got = steps(module, None, x, 1)
    reset_calls()
    with dt.autocast(enabled=False):
        same(module(x), got["0 y0"])
    assert not calls("quantize")
    g = module.layer_norm_weight + module.norm.zero_centered_gamma
    f = torch.nn.functional
    z = f.rms_norm(x, (96,), g, 1e-5) if "bias" in options else f.layer_norm(x, (96,), g, module.layer_norm_bias)
    torch.testing.assert_close(got["0 y0"], f.linear(z, module.weight, module.bias), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", (*RECIPE_NAMES, None))
def test_the_norms_output_too(name):
    recipe = None if name is None else composed.unrounded(name)
    module, x = linear(return_layernorm_output=True), normal("x", (2, 16, 96))
    same_step(steps(module, recipe, x), steps(composed.composed(module), recipe, x))
    with torch.no_grad(), dt.autocast(recipe=recipe, enabled=recipe is not None):
        y, z = module(x)
    same(z, composed.composed(module).norm(x))
    assert y.shape == (2, 16, 64)


@pytest.mark.parametrize("originals", [True, False])
def test_backward_keeps_x_and_originals_or_quantized_copies(originals):
    module = linear(save_original_input=originals, save_original_weight=originals)
    x, saved = normal("x", (2, 16, 96)).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), dt.autocast(recipe=MX):
        module(x)
    floats = sum(t.numel() for t in saved if t.dtype == torch.float32)
    payloads = sum(t.numel() for t in saved if t.dtype == torch.float8_e4m3fn)
    parameters, copies = module.weight.numel(), x.numel() + module.weight.numel()
    norm = x.numel() + 96 + 2 * 32  # x, gamma, mu, rsigma
    assert (floats, payloads) == ((norm + 96 + parameters, 0) if originals else (norm, copies))  # 96: beta


@pytest.mark.sampled  # test_compiled_matrix.py has each module with each recipe
@pytest.mark.parametrize("name", STATELESS)
def test_compiled_is_eager(name, device):
    module = linear(device=device, normalization="RMSNorm")
    x = composed.input_for(RECIPES[name], device=device)
    want = steps(module, RECIPES[name], x)
    torch._dynamo.reset()
    backend = "inductor" if name == "mxfp8" else "aot_eager"
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    same_step(steps(module, RECIPES[name], x, fn=compiled), want)


def test_compiled_with_dynamic_shapes():
    module = linear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (130, 257, 200):
        x = normal("x", (rows, 96))
        same_step(steps(module, MX, x, 1, fn=compiled), steps(module, MX, x, 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4", "mxfp8"))
def test_checkpoint(name):
    recipe, x = NAMED[name], composed.input_for(NAMED[name])
    module = torch.nn.Sequential(linear(96, 96), torch.nn.GELU(), linear(96, 96))
    want = steps(copy.deepcopy(module), recipe, x)
    same_step(steps(module, recipe, x, fn=lambda v: dt.checkpoint(module, v)), want)


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4", "mxfp8"))
def test_state_dict_round_trip(name):
    recipe, x = NAMED[name], composed.input_for(NAMED[name])
    module = linear()
    assert list(module.state_dict()) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    steps(module, recipe, x)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = dt.LayerNormLinear(96, 64)
    other.load_state_dict(torch.load(file, weights_only=True))
    module.zero_grad(set_to_none=True)
    for m in (other, copy.deepcopy(module)):
        with dt.autocast(recipe=recipe):
            same(m(x), copy.deepcopy(module)(x))
    assert "scale_states" not in repr(linear()) and ", LayerNorm, " in repr(module)


@pytest.mark.parametrize("frozen", ("x", "weight", "norm", "x norm", "x norm weight", "bias"))
def test_frozen_parts(frozen):
    module, x = linear(), normal("x", (16, 96))
    whole = layers.run(module, module, x, MX)
    module.zero_grad(set_to_none=True)
    for key, p in module.named_parameters():
        p.requires_grad_(not (key in frozen.split() or ("norm" in frozen and "norm" in key)))
    v = x.clone().requires_grad_("x" not in frozen)
    reset_calls()
    with dt.autocast(recipe=MX):
        module(v).sum().backward()
    need_dz, need_dw = frozen not in ("x norm", "x norm weight"), "weight" not in frozen
    assert calls("gemm") == 1 + need_dz + need_dw
    for key, got in (("dx", v.grad), *[(n, p.grad) for n, p in module.named_parameters()]):
        if got is not None:
            same(got, whole[key], key)


def test_amp_casts_the_input():
    module, x = linear(), normal("x", (16, 96))
    with torch.amp.autocast("cpu", torch.bfloat16):
        got = layers.run(module, module, x, MX)
    want = layers.run(module, module, x.bfloat16(), MX)
    assert got["y"].dtype == torch.bfloat16 and got["dx"].dtype == torch.float32
    same_step(got | {"dx": got["dx"].bfloat16()}, want)


def test_empty_meta_and_microbatches():
    for shape in ((0, 96), (2, 0, 96)):
        for recipe in RECIPES.values():
            module, x = linear(), composed.input_for(recipe, shape)
            out = layers.run(module, module, x, recipe)
            assert out["y"].shape == (*shape[:-1], 64) and not out["weight"].any()
    module = dt.LayerNormLinear(96, 64, device="meta")
    with dt.autocast(recipe=MX):
        module(torch.zeros(2, 3, 96, device="meta", requires_grad=True)).sum().backward()
    assert module.weight.grad.shape == (64, 96)
    module, x = linear(), normal("x", (16, 96))
    with dt.autocast(recipe=MX):
        want = module(x)
        same(module(x, is_first_microbatch=True), want)
        with torch.no_grad():
            module.weight.zero_()
        same(module(x, is_first_microbatch=False), want)


def test_weights_held_quantized():
    with dt.quantized_model_init(recipe=MX):
        held = dt.LayerNormLinear(96, 64)
    assert isinstance(held.weight, dt.QuantizedParameter)
    x = normal("x", (16, 96))
    out = layers.run(held, held, x, MX)
    assert out["weight"].shape == (64, 96)


def test_calibration_collects_amaxes():
    recipe = NAMED["fp8-delayed"]
    module, other, x = linear(), linear(), normal("x", (16, 96))
    with dt.autocast(enabled=False, recipe=recipe, calibrating=True):
        module(x).sum().backward()
    with dt.autocast(recipe=recipe):
        other(x).sum().backward()
    for key in ("input", "weight", "grad_output"):
        name = f"scale_states.{key}.amax_history"
        same(module.state_dict()[name], other.state_dict()[name], name)


def test_a_group_of_one_changes_nothing(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for name in ("fp8-current", "fp8-delayed", "nvfp4"):
            recipe, x = NAMED[name], composed.input_for(NAMED[name], (16, 64))
            for make in (lambda: linear(64), composed.mlp):
                want = steps(make(), recipe, x)
                with dt.autocast(enabled=False, amax_groups={"ranks": dist.group.WORLD}):
                    same_step(steps(make(), recipe.replace(amax_group="ranks"), x), want)
    finally:
        dist.destroy_process_group()


def test_bad_input():
    for wrong, error in (
        ({"eps": -1.0}, ValueError),
        ({"normalization": "batchnorm"}, ValueError),
        ({"recipe": "mxfp8"}, TypeError),
        ({"zero_centered_gamma": "yes"}, TypeError),
    ):
        with pytest.raises(error, match="LayerNormLinear"):
            dt.LayerNormLinear(8, 8, **wrong)
    for sizes, error in (((0, 8), ValueError), ((8, 2.0), TypeError)):
        with pytest.raises(error, match="LayerNormLinear"):
            dt.LayerNormLinear(*sizes)
    module = linear()
    for region in (MX, None):
        with dt.autocast(recipe=region, enabled=region is not None):
            with pytest.raises(DTypeError, match="input must be"):
                module(torch.zeros(4, 96, dtype=torch.int32))
            with pytest.raises(ValueError, match=r"input must be \[\.\.\., 96\]"):
                module(torch.zeros(4, 95))
            with pytest.raises(ValueError, match="input is on meta"):
                module(torch.zeros(4, 96, device="meta"))
    with dt.autocast(recipe=MX):
        y = module(normal("x", (4, 96)).requires_grad_())
    with pytest.raises(UnsupportedError, match="layernorm_linear has no second derivative"):
        torch.autograd.grad(y.sum(), module.weight, create_graph=True)
    with dt.autocast(recipe=Float8CurrentScaling()), pytest.raises(TypeError):
        module("x")
