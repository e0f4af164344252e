"""Linear, LayerNormLinear and LayerNormMLP in graphs: one node forward and one backward, with eager's bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import RECIPES, CustomRecipe, Float8Quantizer, MXFP8BlockScaling
from torch_frontend import composed
from torch_frontend import layer_cases as layers
from torch_frontend.composed import steps
from torch_frontend.graph.test_custom_op import nodes
from torch_frontend.layer_cases import NAMED, same_step
from torch_frontend.modules.test_layernorm_linear import OTHERS
from torch_frontend.tools import RECIPE_NAMES, normal, same

pytestmark = pytest.mark.sampled

MX = MXFP8BlockScaling()
MODULES = {
    "linear": lambda **kw: layers.layer(96, 96, **kw),
    "layernorm_linear": lambda **kw: composed.linear(96, 96, **kw),
    "layernorm_mlp": lambda **kw: composed.mlp(96, 64, activation="swiglu", **kw),
}
each_module = pytest.mark.parametrize("kind", MODULES)
SOME = [NAMED[name] for name in ("fp8-delayed", "nvfp4", "mxfp8")]
AROUND = {"update_scales", "rng_take"}  # on states, not on operands


def kind_of(recipe: Any) -> str:
    return type(recipe).__name__


def compiled(fn: Any, **kw: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **kw)


def by_product(role: Any) -> Any:
    """Delayed scaling with a state for each product."""
    return Float8Quantizer(fp8_dtype="float8_e5m2" if role.gemm == "wgrad" else "float8_e4m3fn", amax_history_len=3)


def _cells(recipes: Any, every: int = 1, each: int = 3) -> Any:
    """(recipe, module): every so many-th recipe, with each so many-th module in turn; a long sweep runs the others."""
    cells = []
    for (row, recipe), (column, kind) in itertools.product(enumerate(recipes), enumerate(MODULES)):
        runs = row % every == 0 and (row // every + column) % each == 0
        label = recipe if isinstance(recipe, str) else type(recipe).__name__
        cells.append(pytest.param(recipe, kind, id=f"{label}-{kind}", marks=() if runs else pytest.mark.slow))
    return pytest.mark.parametrize(("recipe", "kind"), cells)


@_cells(RECIPE_NAMES, each=2)
def test_forward_and_backward_are_one_node_each(recipe, kind):
    x = composed.input_for(RECIPES[recipe]).requires_grad_()
    with dt.autocast(recipe=RECIPES[recipe]):
        graphs = nodes(MODULES[kind](), x)
    forward, backward = [[op.removeprefix("diptych.").partition(".")[0] for op in graph] for graph in graphs]
    assert [op for op in forward if op not in AROUND] == [kind]
    assert [op.rstrip("_") for op in backward] == [f"{kind}_backward"]


@_cells([CustomRecipe(by_product), *OTHERS], every=2)
def test_other_recipes(recipe, kind):
    """Operands in high precision, results that are quantized, states by product."""
    module, x = MODULES[kind](), normal("x", (2, 16, 96))
    want = steps(module, recipe, x)
    module.reset_scale_states()
    same_step(steps(module, recipe, x, fn=compiled(module)), want)
    with dt.autocast(recipe=recipe), torch.no_grad():
        a, b = compiled(module)(x), module(x)
    assert type(a) is type(b)
    if isinstance(a, dt.QuantizedTensor):
        a, b = a.dequantize(), b.dequantize()
    same(a, b)


@each_module
def test_main_grad_of_a_frozen_weight_is_not_asked_for(kind):
    module = MODULES[kind](fuse_wgrad_accumulation=True)
    *_, last = [p for p in module.parameters() if p.dim() == 2]
    last.requires_grad_(False)
    for p in module.parameters():
        if p.dim() == 2 and p is not last:
            p.main_grad = torch.zeros(p.shape)
    x = normal("x", (16, 96))
    want = steps(module, MX, x, 1)
    same_step(steps(module, MX, x, 1, fn=compiled(module)), want)
    with torch.no_grad(), dt.autocast(recipe=MX):
        same(compiled(module)(x), module(x))


@_cells([*SOME, MX.replace(backward_override="high_precision")])
def test_kept_weights(recipe, kind):
    module, x = MODULES[kind](), composed.input_for(recipe)

    def microbatches(fn: Any) -> list[Any]:
        module.zero_grad(set_to_none=True)
        module.reset_scale_states()
        module.seed_rng(1)
        made = []
        with dt.autocast(recipe=recipe):
            for first in (True, False, False):
                v = x.clone().requires_grad_()
                y = fn(v, is_first_microbatch=first)
                y.square().sum().backward()
                made += [y.detach(), v.grad]
        return made + [p.grad for p in module.parameters()]

    want = microbatches(module)
    for a, b in zip(microbatches(compiled(module)), want, strict=True):
        same(a, b)


@_cells(("fp8-delayed", "mxfp8"), each=2)
def test_weights_held_quantized(recipe, kind):
    with dt.quantized_model_init(recipe=NAMED[recipe]):
        make = {"linear": dt.Linear, "layernorm_linear": dt.LayerNormLinear, "layernorm_mlp": dt.LayerNormMLP}[kind]
        module = make(96, 96)
    x = composed.input_for(NAMED[recipe])
    want = steps(module, NAMED[recipe], x)
    module.reset_scale_states()
    same_step(steps(module, NAMED[recipe], x, fn=compiled(module)), want)


PARTS = ("x", "layer_norm_weight", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "weight", "bias")


@pytest.mark.slow
@each_module
@pytest.mark.parametrize("trained", PARTS)
def test_one_part_is_trained(trained, kind):
    module, x, recipe = MODULES[kind](), normal("x", (16, 96)), SOME[0]
    if trained != "x" and trained not in dict(module.named_parameters()):
        return
    for key, p in module.named_parameters():
        p.requires_grad_(key == trained)

    def step(fn: Any) -> dict[str, Any]:
        module.zero_grad(set_to_none=True)
        module.reset_scale_states()
        v = x.clone().requires_grad_(trained == "x")
        with dt.autocast(recipe=recipe):
            y = fn(v)
        y.square().sum().backward()
        grads = {"dx": v.grad, **{n: p.grad for n, p in module.named_parameters()}}
        found = {n: g for n, g in grads.items() if g is not None}
        assert len(found) == 1
        return found | {"y": y.detach()} | {n: b.clone() for n, b in module.state_dict().items() if "amax" in n}

    want = step(module)
    same_step(step(compiled(module)), want)


@pytest.mark.parametrize("used", ("y", "z", "yz"))
@pytest.mark.parametrize("recipe", [SOME[0], OTHERS[5]], ids=kind_of)  # OTHERS[5]: wgrad reads the norm's output itself
def test_the_norms_output_too(recipe, used):
    module, x = composed.linear(96, 96, return_layernorm_output=True), normal("x", (16, 96))

    def of(fn: Any) -> Any:
        def run(v: torch.Tensor) -> Any:
            made = dict(zip("yz", fn(v), strict=True))
            return tuple([made[k] for k in used])

        return run

    want = steps(module, recipe, x, fn=of(module))
    module.reset_scale_states()
    same_step(steps(module, recipe, x, fn=compiled(of(module))), want)


@each_module
def test_dynamic_shapes(kind):
    module = MODULES[kind]()
    torch._dynamo.utils.counters.clear()
    fn = compiled(module, dynamic=True)
    for rows in (130, 257, 200):
        x = normal("x", (rows, 96))
        same_step(steps(module, MX, x, 1, fn=fn), steps(module, MX, x, 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
