"""Linear under recipes that mix: unquantized roles, quantizers by product, overrides, results, own modules."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockQuantizer,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
)
from diptych.core import reset_calls
from torch_frontend import layer_cases as layers
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MX = MXFP8BlockScaling()
OPERANDS = ("input", "weight", "grad_output")


def _plain(role):
    return Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2" if role.tensor == "grad_output" else "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Without:
    """MXFP8, but for the named roles, "tensor" or "tensor.gemm"."""

    roles: tuple[str, ...]

    def __call__(self, role):
        return None if {role.tensor, f"{role.tensor}.{role.gemm}"} & set(self.roles) else MXFP8Quantizer()


def _rounded(x, quantizer=None, columnwise=False):
    """Returns the values that one copy of a tensor stands for, in float64."""
    q = (quantizer or MXFP8Quantizer()).with_usage(rowwise=not columnwise, columnwise=columnwise)
    return dt.quantize(x.detach(), q).dequantize(torch.float32).double()


def _expected(layer, x, dy, quantizers):
    """The three products in float64 on exactly the copies that `quantizers`, a function of roles, names."""

    def value(tensor, gemm):
        t = {"input": x, "weight": layer.weight.detach(), "grad_output": dy}[tensor]
        q = quantizers(QuantizerRole("linear", tensor, gemm))
        columnwise = (tensor, gemm) in (("input", "wgrad"), ("weight", "dgrad"), ("grad_output", "wgrad"))
        return t.double() if q is None else _rounded(t, q, columnwise)

    return {
        "y": value("input", "fprop") @ value("weight", "fprop").t() + layer.bias.detach().double(),
        "dx": value("grad_output", "dgrad") @ value("weight", "dgrad"),
        "weight": value("grad_output", "wgrad").t() @ value("input", "wgrad"),
        "bias": dy.double().sum(0),
    }


def _close(got, want):
    """Float32 products of the same operands: only accumulation may differ."""
    for key, w in want.items():
        error = (got[key].double() - w).abs().max() / w.abs().max()
        assert error < 96 * 2.0**-22, (key, float(error))


@pytest.mark.parametrize("roles", [c for n in range(4) for c in itertools.combinations(OPERANDS, n)], ids="-".join)
def test_unquantized_roles(roles):
    layer, x, dy = layers.layer(), normal("x", (32, 96)), normal("dy", (32, 64))
    reset_calls()
    got = layers.run(layer, layer, x, CustomRecipe(Without(roles)), dy)
    left = set(OPERANDS) - set(roles)
    assert calls("quantize") == len(left)
    assert calls("gemm") == sum(left >= set(p) for p in itertools.combinations(OPERANDS, 2))
    _close(got, _expected(layer, x, dy, Without(roles)))


@pytest.mark.parametrize("role", [f"{t}.{g}" for g, (a, b, _) in QuantizerRole.GEMMS.items() for t in (a, b)])
def test_one_unquantized_operand_of_one_product(role):
    layer, x, dy = layers.layer(), normal("x", (32, 96)), normal("dy", (32, 64))
    _close(layers.run(layer, layer, x, CustomRecipe(Without((role,))), dy), _expected(layer, x, dy, Without((role,))))


def test_all_unquantized_is_nn_linear():
    layer, x = layers.layer(), normal("x", (4, 96))
    layers.same_step(
        layers.run(layer, layer, x, CustomRecipe(Without(OPERANDS))),
        layers.run(layer, layer, x, None),
    )


def _mixture(role):
    """Every role by another quantizer."""
    return {
        ("input", "fprop"): Float8BlockQuantizer(),
        ("weight", "fprop"): Float8BlockQuantizer(block_scaling_dim=2),
        ("grad_output", "dgrad"): MXFP8Quantizer(fp8_dtype="float8_e5m2"),
        ("weight", "dgrad"): Float8CurrentScalingQuantizer(),
        ("grad_output", "wgrad"): NVFP4Quantizer(),
        ("input", "wgrad"): MXFP8Quantizer(),
    }[role.tensor, role.gemm]


def test_every_role_by_its_own_quantizer():
    layer, x, dy = layers.layer(), normal("x", (32, 96)), normal("dy", (32, 64))
    reset_calls()
    got = layers.run(layer, layer, x, CustomRecipe(_mixture), dy)
    assert (calls("quantize"), calls("gemm")) == (6, 3)
    _close(got, _expected(layer, x, dy, _mixture))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    layers.same_step(layers.run(compiled, layer, x, CustomRecipe(_mixture), dy), got)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_gradients_against_float64(name):
    """Each operand is off by at most half an ulp of its element, its format's tolerance; a product by both."""
    recipe = RECIPES[name]
    layer, x = layers.layer(256, 128), layers.x_for(recipe, 64, 256)
    dy = normal("dy", (64, 128), layers.dtype_of(recipe))
    got = layers.run(layer, layer, x, recipe, dy)
    x64, w64, dy64 = x.double(), layer.weight.detach().double(), dy.double()
    want = {"y": x64 @ w64.t() + layer.bias.detach().double(), "dx": dy64 @ w64, "weight": dy64.t() @ x64}
    magnitude = {"y": x64.norm() * w64.norm(), "dx": dy64.norm() * w64.norm(), "weight": dy64.norm() * x64.norm()}
    for key, gemm in (("y", "fprop"), ("dx", "dgrad"), ("weight", "wgrad")):
        a, b = (q.format.tolerance for q in recipe.operands(gemm))
        # Random signs: the error of the product is (a + b) of its norm; stochastic rounding is off by a whole ulp.
        bound = (1 + a) * (1 + 2 * b) - 1 + 2 * a
        error = (got[key].double() - want[key]).norm() / want[key].norm()
        assert 2.0**-12 < error < bound, (key, float(error), bound)
        assert magnitude[key] > want[key].norm()


FUSED = {
    "LayerNormLinear": lambda: dt.LayerNormLinear(64, 64, dtype=torch.bfloat16),
    "LayerNormMLP": lambda: dt.LayerNormMLP(64, 64, activation="swiglu", dtype=torch.bfloat16),
    "GroupedLinear": lambda: dt.GroupedLinear(2, 64, 64, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_backward_override_leaves_forward_as_it_is(name, kind):
    """Also where backward reads in high precision what forward quantizes unrounded; its gradients are those of bf16."""
    torch.manual_seed(2)
    layer, x = FUSED[kind](), torch.randn(64, 64).bfloat16()
    groups = ([32, 32],) if kind == "GroupedLinear" else ()
    made = {}
    for override in ("", "high_precision", "dequantized", None):
        m, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
        dt.seed_rng(m, 1)
        recipe = RECIPES[name].replace(backward_override=override or "")
        with dt.autocast(override is not None, recipe=recipe):
            y = m(leaf, *groups, **({"align": 32} if groups else {}))
        y.backward(torch.ones_like(y))
        made[override] = y.detach(), leaf.grad, *[p.grad for p in m.parameters() if p.dim() > 1]
    assert torch.equal(made["high_precision"][0], made[""][0]) and torch.equal(made["dequantized"][0], made[""][0])

    def distance(override):
        pairs = zip(made[override][1:], made[None][1:], strict=True)
        return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)

    bound = 0.12 if kind == "LayerNormMLP" else 0.008  # the hidden values are those of the quantized forward
    assert distance("high_precision") < (1 if name == "nvfp4" else bound), distance("high_precision")
    assert distance("high_precision") < distance("dequantized")


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_backward_override(name):
    recipe = RECIPES[name]
    x, dy = layers.x_for(recipe, 16), normal("dy", (16, 64), layers.dtype_of(recipe))
    layer = layers.layer()
    plain = layers.run(layer, layer, x, recipe, dy)
    for override in ("high_precision", "dequantized"):
        layer = layers.layer()
        got = layers.run(layer, layer, x, recipe.replace(backward_override=override), dy)
        same(got["y"], plain["y"])
        w = layer.weight.detach()
        if override == "high_precision":
            xv, wv = x, w.to(x.dtype)
        else:
            x_q, w_q = (q.with_usage(columnwise=False) for q in recipe.operands("fprop"))
            given = {"scale": torch.ones(1)} if x_q.needs_scale else {}
            xv = dt.quantize(x, x_q, **given).dequantize()
            wv = dt.quantize(w, w_q, **given).dequantize(x.dtype)
        same(got["dx"], dy @ wv)
        same(got["weight"], (dy.t() @ xv).to(w.dtype))
        same(got["bias"], plain["bias"])


def test_backward_override_saves_what_it_reads():
    x, layer = normal("x", (16, 96)).requires_grad_(), layers.layer()

    def saved(override):
        seen = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t, lambda t: t)
        with hooks, dt.autocast(recipe=MXFP8BlockScaling(backward_override=override)):
            layer(x)
        return set(seen)

    assert saved("high_precision") == {torch.float32}
    assert saved("dequantized") == {torch.float8_e4m3fn, torch.float8_e8m0fnu}


def _stochastic(role):
    """Every operand rounded stochastically: the weight's two copies by one call, the others' by two."""
    parted = role.gemm == "wgrad" and role.tensor != "weight"
    return NVFP4Quantizer(stochastic_rounding=True, with_random_sign_mask=not parted)  # unequal, and alike in effect


def test_each_call_has_its_own_place_in_the_random_stream():
    layer, x, dy = layers.layer(bias=False), normal("x", (32, 96)), normal("dy", (32, 64))
    layer.seed_rng(layers.SEED, 5)
    xx = x.clone().requires_grad_()
    with dt.autocast(recipe=CustomRecipe(_stochastic)):
        y = layer(xx)
    y.backward(dy)

    def q(t, number, **usage):
        made = NVFP4Quantizer(stochastic_rounding=True).with_usage(**usage)
        return dt.quantize(t.detach(), made, rng=dt.rng_state(layers.SEED, 5 + 2 * number))

    rows, columns = {"columnwise": False}, {"rowwise": False}
    w = q(layer.weight, 2)
    same(y, dt.gemm(q(x, 0, **rows), w))
    same(xx.grad, dt.gemm(q(dy, 4, **rows), w, trans_b=False))
    same(layer.weight.grad, dt.gemm(q(dy, 5, **columns), q(x, 1, **columns), trans_a=True, trans_b=False))
    assert layer.rng_state.tolist()[2:] == [23, 0]


# --- results ---


def _with_results(role):
    return Float8BlockQuantizer() if role.tensor in role.RESULTS else MXFP8Quantizer()


def test_quantized_results():
    layer, x, dy = layers.layer(), normal("x", (32, 96)), normal("dy", (32, 64))
    plain = layers.run(layer, layer, x, MX, dy)
    recipe = CustomRecipe(_with_results, quantize_results=True)
    got = layers.run(layer, layer, x, recipe, dy)
    for key in ("y", "dx", "weight"):
        same(got[key], dt.quantize(plain[key], Float8BlockQuantizer()).dequantize(), key)
        assert not torch.equal(got[key], plain[key])
    for grad in (True, False):
        with torch.set_grad_enabled(grad), dt.autocast(recipe=recipe):
            q = layer(x)
        assert isinstance(q, dt.QuantizedTensor) and q.columnwise_data is not None and q.requires_grad == grad
        same(q.dequantize(), got["y"])
    layer = layers.layer(fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.ones(64, 96)
    layers.run(layer, layer, x, recipe, dy)
    same(layer.weight.main_grad, got["weight"] + 1)


# --- quantizers and modules of the user's own ---


class Halving(MXFP8Quantizer):
    """Quantizes half of what it is given."""

    def quantize_impl(self, x, quantize):
        return quantize(x * 0.5, MXFP8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise))


class Wrong(MXFP8Quantizer):
    def quantize_impl(self, x, quantize):
        return x


class OneSided(MXFP8Quantizer):
    def quantize_impl(self, x, quantize):
        return quantize(x, MXFP8Quantizer(columnwise=False))


@pytest.mark.parametrize("compiled", (False, True))
def test_a_quantizer_of_the_users_own(compiled):
    layer, x, dy = layers.layer(bias=False), normal("x", (32, 96)), normal("dy", (32, 64))
    recipe = CustomRecipe(_halving)
    torch._dynamo.reset()
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    got, plain = layers.run(fn, layer, x, recipe, dy), layers.run(layer, layer, x, MX, dy)
    same(got["y"], plain["y"] * 0.5)
    same(got["weight"], plain["weight"] * 0.5)
    same(got["dx"], plain["dx"])


def _halving(role):
    return Halving() if role.tensor == "input" else MXFP8Quantizer()


@pytest.mark.parametrize("kind", (Wrong, OneSided))
def test_a_quantizer_that_returns_the_wrong_thing(kind):
    layer = layers.layer()
    recipe = CustomRecipe(lambda role: kind() if role.tensor == "input" else MXFP8Quantizer())
    with dt.autocast(recipe=recipe), pytest.raises(TypeError, match="quantize_impl"):
        layer(normal("x", (32, 96)))


class Block(dt.QuantizedModule):
    """Two linears in one module, with states and roles of their own."""

    module_kind = "block"

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(normal("a", (96, 96)))
        self.b = torch.nn.Parameter(normal("b", (64, 96)))
        self.name = "net"

    def forward(self, x):
        return self.quantized_linear(self.quantized_linear(x, self.a, None, "fc1").relu(), self.b, None, "fc2")


def _as_linears():
    a, b = layers.layer(96, 96, bias=False), layers.layer(96, 64, bias=False)
    a.weight.data.copy_(normal("a", (96, 96)))
    b.weight.data.copy_(normal("b", (64, 96)))
    return torch.nn.Sequential(a, torch.nn.ReLU(), b)


@pytest.mark.parametrize("recipe", (MX, DelayedScaling(amax_history_len=4), Float8CurrentScaling()), ids=repr)
def test_a_module_of_the_users_own(recipe):
    block, model, x = Block(), _as_linears(), normal("x", (32, 96))
    for i in range(3):
        got, want = (layers.run(m, m, x * (i + 1), recipe) for m in (block, model))
        for one, other in (("y", "y"), ("dx", "dx"), ("a", "0.weight"), ("b", "2.weight")):
            same(got[one], want[other], one)
    states = {k for k in block.state_dict() if "scale_states" in k}
    if isinstance(recipe, DelayedScaling):
        assert "scale_states.fc2.grad_output.amax_history" in states and len(states) == 18
        other = Block()
        other.load_state_dict(block.state_dict())
        layers.same_step(layers.run(other, other, x, recipe), layers.run(block, block, x, recipe))
        layers.same_step(
            layers.run(lambda v: dt.checkpoint(block, v), block, x, recipe), layers.run(other, other, x, recipe)
        )
    else:
        assert not states


def test_roles_carry_kind_and_name():
    asked = []

    def factory(role: QuantizerRole) -> Quantizer | None:
        asked.append((role.module, role.name))
        return MXFP8Quantizer() if role.name != "net.fc2" else None

    block, x = Block(), normal("x", (32, 96))
    reset_calls()
    layers.run(block, block, x, CustomRecipe(factory))
    assert {n for m, n in asked if m == "block"} == {"net.fc1", "net.fc2"}
    assert calls("gemm") == 3
    named = layers.layer(name="layer")
    named.name = "head"
    layers.run(named, named, x, CustomRecipe(factory))
    assert ("linear", "head") in asked
    assert dt.Linear(4, 4, name="proj").name == "proj"


def test_the_function_follows_the_module():
    x, dy = normal("x", (16, 96), "bfloat16"), normal("dy", (16, 64), "bfloat16")
    layer, recipe = layers.layer(), NVFP4BlockScaling()
    want = layers.run(layer, layer, x, recipe, dy)
    xx, w, b = (t.detach().clone().requires_grad_() for t in (x, layer.weight, layer.bias))
    y = dt.linear(xx, w, b, recipe, rng=dt.rng_state(layers.SEED))
    y.backward(dy)
    layers.same_step({"y": y.detach(), "dx": xx.grad, "weight": w.grad, "bias": b.grad}, want)
