"""Copies that backward makes again from originals (`save_original_input`, `save_original_weight`): no bit changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
)
from diptych.common.layers.plan import linear_plan
from diptych.core import reset_calls
from torch_frontend import composed, grouped
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import DELAYED, NAMED, all_same, train
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MODULES: dict[str, Callable[..., Any]] = {
    "linear": lambda **kw: layers.layer(96, 64, **kw),
    "layernorm_linear": lambda **kw: composed.linear(96, 64, **kw),
    "layernorm_linear output": lambda **kw: composed.linear(96, 64, return_layernorm_output=True, **kw),
    "layernorm_mlp": lambda **kw: composed.mlp(96, 64, **kw),
    "layernorm_mlp swiglu": lambda **kw: composed.mlp(
        96, 64, activation="swiglu", normalization="RMSNorm", bias=False, **kw
    ),
}
OPTIONS = ("save_original_weight", "save_original_input")
BOTH = dict.fromkeys(OPTIONS, True)


def _of_the_product(role: QuantizerRole) -> Float8Quantizer:
    """Each product has a state of its own."""
    return Float8Quantizer(fp8_dtype="float8_e5m2" if role.gemm == "dgrad" else "float8_e4m3fn", amax_history_len=3)


def _amax_of_fprop(role: QuantizerRole) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2" if role.gemm != "fprop" else "float8_e4m3fn")


RECIPES = {
    **NAMED,
    "delayed by product": CustomRecipe(_of_the_product),
    "current by product": CustomRecipe(_amax_of_fprop),
    "dequantized": NAMED["fp8-current"].replace(backward_override="dequantized"),
    "high precision": NAMED["mxfp8"].replace(backward_override="high_precision"),
}


def _first(result: Any) -> torch.Tensor:
    """A call's result and, weighted, the norm's output beside it."""
    return result[0] + result[1].sum() if isinstance(result, tuple) else result


def _steps(kind: str, recipe: Any, call: Callable[..., Any] | None = None, **options: bool) -> list[torch.Tensor]:
    model = MODULES[kind](**(dict.fromkeys(OPTIONS, False) | options))
    dt.prepare(model, recipe)
    fn = model if call is None else call(model)
    return train(model, recipe, steps=4, fn=lambda x: _first(fn(x)))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPES)
def test_options_change_no_bit(name, kind):
    """Results, gradients and states of steps, of which the later ones run as programs."""
    recipe = RECIPES[name]
    want = _steps(kind, recipe)
    for given in ({OPTIONS[0]: True}, {OPTIONS[1]: True}, BOTH):
        all_same(_steps(kind, recipe, **given), want)


def _cells() -> list[Any]:
    """(module, recipe): recipes of each kind with each module; the long sweep runs the others."""
    cells = []
    for i, kind in enumerate(MODULES):
        for p in layers.one_of_each_kind(i):
            cells.append((kind, p) if isinstance(p, str) else pytest.param(kind, *p.values, marks=p.marks))
    return cells


@pytest.mark.sampled  # test_compiled_matrix.py has each module with each recipe
@pytest.mark.parametrize(("kind", "name"), _cells())
def test_graphs(kind, name):
    """Nodes of graphs make the same bits as eager calls."""
    torch._dynamo.reset()
    recipe = RECIPES[name]

    def compiled(model):
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    all_same(_steps(kind, recipe, compiled, **BOTH), _steps(kind, recipe))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_checkpoints(name, kind):
    def recomputed(model):
        return lambda x: dt.checkpoint(model, x)

    all_same(_steps(kind, RECIPES[name], recomputed, **BOTH), _steps(kind, RECIPES[name]))


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp"])
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_microbatches_share_the_kept_copies(name, kind):
    """Copies kept from the first microbatch serve backward: nothing is made from the weight again."""
    found = [
        _microbatches(MODULES[kind](**given), RECIPES[name])
        for given in ({"save_original_weight": flag} for flag in (False, True))
    ]
    all_same(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


def _microbatches(model: Any, recipe: Any) -> tuple[list[torch.Tensor], int]:
    """The results of a step of three microbatches, and the number of its quantize calls."""
    turn = itertools.count()
    reset_calls()
    got = train(model, recipe, steps=3, fn=lambda x: model(x, is_first_microbatch=next(turn) == 0))
    return got, calls("quantize")


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_experts(name):
    x, dy = grouped.input_for(name, 96), normal("grouped-dy", (96, grouped.N), layers.dtype_of(name))
    rows = {"offsets": grouped.offsets_of((0, 32, 32, 64, 96)), "align": 32}
    steps = []
    for options in ({}, BOTH):
        model = grouped.layer(**options)
        steps.append([grouped.run(model, model, x * (i + 1), RECIPES[name], dy, **rows) for i in range(2)])
        steps[-1].append(model.state_dict())
    for got, want in zip(steps[1], steps[0], strict=True):
        assert got.keys() == want.keys()
        for key in want:
            same(got[key], want[key], key)


def test_user_held_states_may_be_updated_before_backward():
    """Backward makes its copies by the scales of its forward."""
    x, w, dy = normal("x", (16, 96)), normal("w", (64, 96)), normal("dy", (16, 64))
    found = []
    for options in ({}, BOTH):
        states = dt.ScaleStates(linear_plan(DELAYED))
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = dt.linear(*leaves, None, DELAYED, state=states, **options)
        held = [t.clone() for t in states.state_dict().values()]
        states.update()
        (y * 3).backward(dy)
        found.append([y.detach(), *[t.grad for t in leaves], *held])
    all_same(found[1], found[0])


def test_a_weight_that_changes_before_backward_is_refused():
    model, x = layers.layer(save_original_weight=True), normal("x", (16, 96)).requires_grad_()
    with dt.autocast(recipe=NAMED["fp8-current"]):
        y = model(x)
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_held_weights_have_no_original(name):
    """A parameter that is quantized already is read as it is."""
    with dt.quantized_model_init(recipe=NAMED[name]):
        model, plain = dt.Linear(96, 64, save_original_weight=True), dt.Linear(96, 64)
    plain.load_state_dict(model.state_dict())
    x = layers.x_for(NAMED[name], 16)
    layers.same_step(layers.run(model, model, x, NAMED[name]), layers.run(plain, plain, x, NAMED[name]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nvfp4_says_what_to_do_about_rows_and_dtypes(compiled):
    """The message names the layer. Inference quantizes along rows alone, and takes any number of them."""
    cases = (
        (True, (2, 9, 32), ValueError, r"linear '0': .* rows of a \[2, 9, 32\] tensor must be a multiple of 16: pad"),
        (False, (2, 16, 32), TypeError, r"linear '0': .* bfloat16 alone, got float32\[2, 16, 32\]: train in"),
    )
    for plain, shape, error, message in cases:
        recipe = NVFP4BlockScaling(disable_rht=plain)
        net = dt.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), recipe, verbose=False)
        run = torch.compile(net, backend="aot_eager", dynamic=False) if compiled else net
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError if compiled else error, match=message):
            run(torch.ones(shape))
        if plain:
            with torch.no_grad():
                assert run(torch.ones(shape)).shape == shape
