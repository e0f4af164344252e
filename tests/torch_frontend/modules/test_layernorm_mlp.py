"""LayerNormMLP: the bits of its parts apart, what backward keeps, and what the module stands for."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    DTypeError,
    Float8Quantizer,
    MXFP8BlockScaling,
    Quantizer,
    UnsupportedError,
)
from diptych.common.ops.activation import ACTIVATIONS
from diptych.core import reset_calls
from torch_frontend import composed
from torch_frontend import layer_cases as layers
from torch_frontend.composed import mlp, steps
from torch_frontend.layer_cases import NAMED, STATELESS, same_step
from torch_frontend.modules.test_layernorm_linear import OTHERS
from torch_frontend.primitives.test_norm_activation import _act, _torch_norm
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MX = MXFP8BlockScaling()


@pytest.mark.parametrize("options", composed.MLP, ids=lambda o: o.get("activation", "gelu"))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_bits_of_the_composition(name, options, device):
    """Norm, activation and its gradient are not rounded in float32, so that fused and composed agree, bias sums too."""
    recipe, module = composed.unrounded(name), mlp(device=device, **options)
    x = normal("x", (2, 16, 64), device=device)
    got, want = steps(module, recipe, x), steps(composed.composed(module).to(device), recipe, x)
    if x.is_cuda and "fc1_bias" in want:  # the fused bias sum adds in another order than bias_grad there
        torch.testing.assert_close(got.pop("fc1_bias"), want.pop("fc1_bias"), rtol=1e-4, atol=1e-3)
    same_step(got, want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    module, x = mlp(activation=activation), normal("x", (16, 64))
    assert module.fc1_weight.shape[0] == 96 * (1 + ACTIVATIONS[activation].gated)
    same_step(steps(module, MX, x, 1), steps(composed.composed(module), MX, x, 1))


def _by_product(role):
    """Delayed scaling with a state for each product."""
    return Float8Quantizer(fp8_dtype="float8_e5m2" if role.gemm == "wgrad" else "float8_e4m3fn", amax_history_len=3)


@pytest.mark.parametrize("recipe", [*OTHERS, CustomRecipe(_by_product)], ids=lambda r: type(r).__name__)
def test_bits_of_the_composition_under_other_recipes(recipe):
    composed.require_same(mlp(activation="geglu"), normal("x", (2, 16, 64)), recipe)


def _float64(module, x, dy):
    p = {n: t.detach().double().requires_grad_() for n, t in module.named_parameters()}
    v = x.detach().double().requires_grad_()
    z = _torch_norm(v, p["layer_norm_weight"], p.get("layer_norm_bias"), module.norm)
    a = _act(module.activation, z @ p["fc1_weight"].t() + p["fc1_bias"])
    y = a @ p["fc2_weight"].t() + p["fc2_bias"]
    y.backward(dy.double())
    return {"y": y.detach(), "dx": v.grad, **{n: t.grad for n, t in p.items()}}


@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_against_float64(name, activation, device):
    """One product adds the error of its operands (`test_layernorm_linear`); each result is behind one to four."""
    recipe, module = RECIPES[name], mlp(128, 256, activation=activation, device=device)
    shape, dtype = (64, 128), layers.dtype_of(recipe)
    x, dy = composed.input_for(recipe, shape, device), normal("dy", shape, dtype, device)
    want = _float64(module, x, dy)
    if isinstance(recipe, DelayedScaling):  # the gradient of y is far from a scale of 1; the second step has its own
        layers.run(module, module, x, recipe, dy)
    got = layers.run(module, module, x, recipe, dy)
    f, d, w = (tuple(q.format.tolerance for q in recipe.operands(g)) for g in ("fprop", "dgrad", "wgrad"))

    def bound(*pairs):
        total = 1.0
        for a, b in pairs:
            total *= (1 + a) * (1 + 2 * b) + 2 * a
        return total - 1

    bounds = {
        "y": bound(f, f), "fc2_weight": bound(f, w), "fc2_bias": 2.0**-7, "fc1_bias": bound(f, d),
        "fc1_weight": bound(f, d, w), "dx": bound(f, d, d), "layer_norm_weight": bound(f, d, d),
        "layer_norm_bias": bound(f, d, d),
    }  # fmt: skip
    assert bounds.keys() == want.keys()
    for key, allowed in bounds.items():
        error = (got[key].double() - want[key]).norm() / want[key].norm()
        assert error < allowed, (key, float(error), allowed)
        assert key == "fc2_bias" or error > 2.0**-12, (key, float(error))


class _Plain(torch.nn.Module):
    """The same layers of torch."""

    def __init__(self, k, f, activation):
        super().__init__()
        self.norm = torch.nn.LayerNorm(k)
        self.fc1 = torch.nn.Linear(k, f * (1 + ACTIVATIONS[activation].gated))
        self.fc2 = torch.nn.Linear(f, k)
        self.activation = activation

    def forward(self, x):
        return self.fc2(_act(self.activation, self.fc1(self.norm(x))))


def _saved_bytes(module, x, recipe=None):
    """Returns the bytes of the storages that backward keeps, except parameters, each counted once."""
    kept, owned = {}, {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return t

    region = dt.autocast(recipe=recipe, enabled=recipe is not None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), region:
        module(x)
    return sum(n for n, _ in kept.values())


@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_saved_activations(name, activation):
    """At most 0.6 of what the layers of torch keep in bfloat16, the copies of weights counted against us."""
    k, f = 64, 256 if activation == "gelu" else 176
    x = normal("x", (2048, k), "bfloat16").requires_grad_()
    plain = _saved_bytes(_Plain(k, f, activation).bfloat16(), x)
    ours = _saved_bytes(mlp(k, f, activation=activation, dtype=torch.bfloat16), x, NAMED[name])
    assert ours <= 0.6 * plain, (ours, plain, ours / plain)


@pytest.mark.parametrize("options", composed.MLP, ids=lambda o: o.get("activation", "gelu"))
def test_outside_of_regions(options, device):
    module, x = mlp(device=device, **options), normal("x", (2, 16, 64), device=device)
    got = steps(module, None, x, 1)
    reset_calls()
    with dt.autocast(enabled=False):
        same(module(x), got["0 y0"])
    assert not calls("quantize")
    z = _torch_norm(x, module.layer_norm_weight, module.layer_norm_bias, module.norm)
    h = _act(module.activation, torch.nn.functional.linear(z, module.fc1_weight, module.fc1_bias))
    want = torch.nn.functional.linear(h, module.fc2_weight, module.fc2_bias)
    torch.testing.assert_close(got["0 y0"], want, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled  # test_compiled_matrix.py has each module with each recipe
@pytest.mark.parametrize("name", STATELESS)
def test_compiled_is_eager(name, device):
    module = mlp(device=device, activation="swiglu")
    x = composed.input_for(RECIPES[name], (2, 16, 64), device)
    want = steps(module, RECIPES[name], x)
    torch._dynamo.reset()
    backend = "inductor" if name == "mxfp8" else "aot_eager"
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    same_step(steps(module, RECIPES[name], x, fn=compiled), want)


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4", "mxfp8"))
def test_checkpoint(name):
    recipe, x = NAMED[name], composed.input_for(NAMED[name], (2, 16, 64))
    module = torch.nn.Sequential(mlp(activation="swiglu"), mlp())
    want = steps(copy.deepcopy(module), recipe, x)
    same_step(steps(module, recipe, x, fn=lambda v: dt.checkpoint(module, v)), want)


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4", "mxfp8"))
def test_state_dict_round_trip(name):
    recipe, x = NAMED[name], composed.input_for(NAMED[name], (2, 16, 64))
    module = mlp(activation="swiglu")
    names = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert list(module.state_dict()) == names
    assert list(mlp(normalization="RMSNorm", bias=False).state_dict()) == [names[0], names[2], names[4]]
    steps(module, recipe, x)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = dt.LayerNormMLP(64, 96, activation="swiglu")
    other.load_state_dict(torch.load(file, weights_only=True))
    module.zero_grad(set_to_none=True)
    for m in (other, copy.deepcopy(module)):
        with dt.autocast(recipe=recipe):
            same(m(x), copy.deepcopy(module)(x))
    if name == "fp8-delayed":
        assert "scale_states.fc2.grad_output.scale" in module.state_dict()


FROZEN = ("x layer_norm", "fc1_weight", "fc2", "fc1", "x layer_norm fc1", "x layer_norm fc1_weight fc2")


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts(frozen):
    module, x = mlp(), normal("x", (16, 64))
    whole = layers.run(module, module, x, MX)
    module.zero_grad(set_to_none=True)
    for key, p in module.named_parameters():
        p.requires_grad_(not any(key.startswith(part) for part in frozen.split()))
    v = x.clone().requires_grad_("x" not in frozen.split())
    with dt.autocast(recipe=MX):
        module(v).sum().backward()
    for key, t in (("dx", v), *module.named_parameters()):
        assert (t.grad is not None) == t.requires_grad
        if t.requires_grad:
            same(t.grad, whole[key], key)


def test_roles_carry_the_layers_names():
    seen = set()

    def factory(role) -> Quantizer | None:
        seen.add((role.module, role.name))
        return MX.quantizer(role)

    module = mlp(name="block.mlp")
    with dt.autocast(recipe=CustomRecipe(factory)):
        module(normal("x", (16, 64)))
    assert {("layernorm_mlp", "block.mlp.fc1"), ("layernorm_mlp", "block.mlp.fc2")} <= seen


def test_empty_meta_amp_and_microbatches():
    for recipe in RECIPES.values():
        module, x = mlp(), composed.input_for(recipe, (2, 0, 64))
        out = layers.run(module, module, x, recipe)
        assert out["y"].shape == (2, 0, 64) and not out["fc1_weight"].any()
    module = dt.LayerNormMLP(64, 96, device="meta", activation="swiglu")
    with dt.autocast(recipe=MX):
        module(torch.zeros(2, 3, 64, device="meta", requires_grad=True)).sum().backward()
    assert module.fc1_weight.grad.shape == (192, 64)
    module, x = mlp(), normal("x", (16, 64))
    with torch.amp.autocast("cpu", torch.bfloat16):
        got = layers.run(module, module, x, MX)
    same_step(got | {"dx": got["dx"].bfloat16()}, layers.run(module, module, x.bfloat16(), MX))
    with dt.autocast(recipe=MX):
        want = module(x)
        same(module(x, is_first_microbatch=True), want)
        with torch.no_grad():
            module.fc2_weight.zero_()
        same(module(x, is_first_microbatch=False), want)


def test_weights_held_quantized():
    with dt.quantized_model_init(recipe=MX):
        held = dt.LayerNormMLP(64, 96)
    assert isinstance(held.fc1_weight, dt.QuantizedParameter) and isinstance(held.fc2_weight, dt.QuantizedParameter)
    assert layers.run(held, held, normal("x", (16, 64)), MX)["fc1_weight"].shape == (96, 64)


def test_bad_input():
    for wrong, error in (
        ({"activation": "tanh"}, ValueError),
        ({"normalization": "batchnorm"}, ValueError),
        ({"eps": float("inf")}, ValueError),
        ({"recipe": "mxfp8"}, TypeError),
    ):
        with pytest.raises(error, match="LayerNormMLP"):
            dt.LayerNormMLP(8, 8, **wrong)
    with pytest.raises(ValueError, match="ffn_hidden_size must be >= 1"):
        dt.LayerNormMLP(8, 0)
    module = mlp()
    for region in (MX, None):
        with dt.autocast(recipe=region, enabled=region is not None):
            with pytest.raises(DTypeError, match="input must be"):
                module(torch.zeros(4, 64, dtype=torch.float64))
            with pytest.raises(ValueError, match=r"input must be \[\.\.\., 64\]"):
                module(torch.zeros(4, 65))
    with dt.autocast(recipe=MX):
        y = module(normal("x", (4, 64)))
    with pytest.raises(UnsupportedError, match="layernorm_mlp has no second derivative"):
        torch.autograd.grad(y.sum(), module.fc1_weight, create_graph=True)
