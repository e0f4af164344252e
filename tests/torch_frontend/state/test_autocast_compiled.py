"""Regions outside and inside of compiled code: the bits of eager's, one graph for equal recipes, no growing table."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    Quantizer,
    QuantizerRole,
)
from diptych.torch.layers import options
from diptych.torch.state.autocast import STATE
from torch_frontend import layer_cases as layers
from torch_frontend.tools import normal, same

pytestmark = pytest.mark.sampled

CURRENT, BLOCK, MX = Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()


@dataclasses.dataclass(frozen=True)
class Factory:
    weights: str

    def __call__(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor == "weight":
            return Float8CurrentScalingQuantizer(fp8_dtype=self.weights)
        return None if role.tensor == "grad_output" else MXFP8Quantizer()


def factory(role: QuantizerRole) -> Quantizer | None:
    return Float8CurrentScalingQuantizer(force_pow_2_scales=True)


LAMBDA = CustomRecipe(lambda role: MXFP8Quantizer())
MIXED = CustomRecipe(Factory("float8_e5m2"))
NAMED = CustomRecipe(factory)


def once(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with dt.autocast(recipe=BLOCK):
        return layer(x)


def default(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with dt.autocast():
        return layer(x)


def off(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with dt.autocast(enabled=False):
        return layer(x)


def nested(layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    with dt.autocast(recipe=CURRENT):
        y = y + layer(x)
        with dt.autocast(enabled=False):
            y = y + layer(x)
            with dt.autocast(recipe=MX):
                y = y + layer(x)
        with dt.autocast(recipe=MIXED):
            y = y + layer(x)
            with dt.autocast(recipe=LAMBDA):
                y = y + layer(x)
        with dt.autocast(recipe=NAMED):
            y = y * layer(x)
        y = y + layer(x)
    return y + layer(x)


def raising(layer: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        with dt.autocast(recipe=CURRENT):
            y = layer(x)
            raise KeyError("left in the middle")
    except KeyError:
        y = y + layer(x)
    with dt.autocast(recipe=MX):
        return y + layer(x)


@dt.autocast(recipe=MX)
def decorated(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


FUNCTIONS = (once, default, off, nested, raising, decorated)


def outcome(fn: Any, layer: Any) -> list[torch.Tensor]:
    layer.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(8, 32, requires_grad=True)
    y = fn(layer, x)
    y.pow(2).sum().backward()
    return [y.detach(), x.grad, layer.weight.grad]


AROUND = {"bare": None, "in a region": BLOCK, "in a lambda's": LAMBDA}


def _cells() -> list[Any]:
    """(function, what is around, backend). In a lambda's region all run, and bare those that call outside of their own.

    The others wait for a long sweep.
    """
    cells = []
    for fn, around, backend in itertools.product(FUNCTIONS, AROUND, ("aot_eager", "inductor")):
        runs = backend == "aot_eager" and (around == "in a lambda's" or (around == "bare" and fn in (nested, raising)))
        marks = () if runs else pytest.mark.slow
        cells.append(pytest.param(fn, AROUND[around], backend, id=f"{around}-{fn.__name__}-{backend}", marks=marks))
    return cells


@pytest.mark.parametrize(("fn", "around", "backend"), _cells())
def test_the_bits_of_eager(fn, around, backend):
    if backend == "inductor" and (around is BLOCK or fn in (once, default, off, decorated)):
        pytest.skip("aot_eager ran it; Inductor's graphs would be the same")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = dt.Linear(32, 32)
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    for _ in range(2):
        with dt.autocast(enabled=around is not None, recipe=around):
            want, got = outcome(fn, layer), outcome(compiled, layer)
            assert dt.get_autocast_recipe() is around
        # Inductor may add up in another order what it fuses
        near = functools.partial(torch.allclose, rtol=1e-4, atol=1e-4)
        same = torch.equal if backend == "aot_eager" else near
        assert all(same(a, b) for a, b in zip(want, got, strict=True))
    assert not dt.is_autocast_enabled() and STATE.depth == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


RECIPES = {
    "current": lambda: Float8CurrentScaling(),
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "custom": lambda: CustomRecipe(Factory("float8_e4m3fn")),
}


@pytest.mark.parametrize("inside", [False, True], ids=["region around", "region inside"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_recipes_are_one(recipe, inside):
    """A hundred steps with a new recipe each: one graph, and no table that grows."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = dt.Linear(32, 32)

    def run(x: torch.Tensor, recipe: Any) -> torch.Tensor:
        with dt.autocast(recipe=recipe):
            return layer(x)

    compiled = torch.compile(run if inside else layer, fullgraph=True, backend="aot_eager")
    sizes = []
    for i in range(100):
        fresh = RECIPES[recipe]()
        x = torch.randn(8, 32)
        if inside:
            compiled(x, fresh).sum().backward()
        else:
            with dt.autocast(recipe=fresh):
                compiled(x).sum().backward()
                layer(x)
        from diptych.common import value

        tables = (options._schedules, value._MADE, value._HELD, STATE.steps)
        sizes.append([len(t) for t in tables])
        assert len(options._recent) <= 1024 and i < 100
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert sizes[2] == sizes[-1]


def test_the_state_keeps_its_identity():
    before = STATE
    with dt.autocast(recipe=MX):
        pass
    from diptych.torch.state import autocast as module

    assert module is not None and STATE is before


SCRIPT = """
import torch, diptych.torch as dt
from diptych.common import Float8CurrentScaling
if torch.__version__ < "2.13":  # under -O it fails to find the bytecode of an assert
    torch._dynamo.config.rewrite_assert_with_torch_assert = False
layer = dt.Linear(32, 32)
for bad in (dict(recipe=3), dict(recipe="fp8")):
    try:
        dt.autocast(**bad)
    except TypeError as error:
        print(error)
try:
    torch.compile(lambda x: dt.quantize(x, 7), backend="eager")(torch.ones(4, 4))
except Exception as error:
    print("quantizer" in str(error))
with dt.autocast(recipe=Float8CurrentScaling()):
    print(torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(4, 32)).shape)
"""


@pytest.mark.slow
def test_errors_are_no_asserts():
    run = subprocess.run([sys.executable, "-O", "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert len(lines) == 4 and lines[0].startswith("autocast: recipe must be"), run.stderr
    assert lines[2:] == ["True", "torch.Size([4, 32])"], run.stdout


@pytest.mark.parametrize("kind", ["break", "delayed gradients"])
def test_a_graph_that_breaks_inside_of_a_region(kind):
    """Steps are counted, and the region is left, as in eager code; scales go on to follow amaxes."""
    eager = layers.layer(delay_wgrad_compute=kind != "break")
    recipe, found = DelayedScaling(amax_history_len=2), []

    def fn(x: torch.Tensor, layer: Any) -> torch.Tensor:
        with dt.autocast(recipe=recipe):
            y = layer(x)
            if kind == "break":
                torch._dynamo.graph_break()
            return y * 2

    for run in (fn, torch.compile(fn, backend="aot_eager")):
        layer = copy.deepcopy(eager)
        for i in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dt.EagerWarning)
                run(normal(f"x{i}", (16, 96)) * (i + 1), layer).sum().backward()
            assert (STATE.depth, STATE.inside, STATE.recipe) == (0, False, None)
        found.append({name: t for name, t in layer.state_dict().items() if "seen" not in name})
    assert found[0]["scale_states.input.scale"].item() != 1
    for name, t in found[0].items():
        same(found[1][name], t, name)
