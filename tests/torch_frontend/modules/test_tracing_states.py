"""States under torch.compile: made while tracing, updated once in each region, equal to eager's to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import RECIPES, DelayedScaling, Float8CurrentScaling
from diptych.torch.state.autocast import STATE
from torch_frontend import layer_cases as layers

pytestmark = pytest.mark.sampled

STEPS = 20


def largest(history: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return torch.maximum(history.amax(-1), last)


DELAYED = {
    "default": RECIPES["fp8-delayed"],
    "short history": DelayedScaling(amax_history_len=3, margin=1),
    "most recent": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    "own function": DelayedScaling(amax_history_len=4, amax_compute_algo=largest),
}
MODULES = {
    "Linear": lambda: dt.Linear(32, 48),
    "LayerNormLinear": lambda: dt.LayerNormLinear(32, 48),
    "LayerNormMLP": lambda: dt.LayerNormMLP(32, 48),
    "two of a kind": lambda: torch.nn.Sequential(dt.Linear(32, 48), torch.nn.GELU(), dt.Linear(48, 32)),
}


def train(
    model: Any, fn: Any, recipe: Any, inside: bool, dtype: torch.dtype, steps: int, microbatches: int
) -> list[Any]:
    """Outputs and input gradients of all steps; each recipe object is a new one, equal to the last."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for i in range(steps):
        torch.manual_seed(i)
        with dt.autocast(enabled=not inside, recipe=copy.deepcopy(recipe)):
            for _ in range(microbatches):
                x = (torch.randn(16, 32) * (1 + i % 5)).to(dtype).requires_grad_()
                y = fn(x)
                y.float().pow(2).mean().backward()
                seen += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def both(
    make: Any,
    recipe: Any,
    backend: str,
    inside: bool = False,
    dtype: Any = torch.float32,
    microbatches: int = 2,
    **kw: Any,
) -> tuple[Any, Any]:
    """An eager and a compiled model after the same training. They ran, and hold, the same bits."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    eager = make().to(dtype)
    compiled = copy.deepcopy(eager)
    given = (recipe, inside, dtype, STEPS if backend == "aot_eager" else 4, microbatches)

    def entering(model: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with dt.autocast(recipe=recipe):
                return model(x)

        return run if inside else model

    def seeded(model: Any) -> Any:
        dt.seed_rng(model, 1)
        return model

    want = train(seeded(eager), entering(eager), *given)
    fn = torch.compile(entering(seeded(compiled)), fullgraph=True, backend=backend, **kw)
    got = train(compiled, fn, *given)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    a, b = eager.state_dict(), compiled.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    return eager, compiled


INSIDE = {"region around": False, "region inside": True}
CELLS = [(m, where) for m in MODULES for where in INSIDE]
# Each module runs in one way; the other waits for a long sweep.
CELLS = [cell if i % 4 in (0, 3) else layers.slow(*cell) for i, cell in enumerate(CELLS)]


@pytest.mark.parametrize(("module", "where"), CELLS)
def test_delayed_scaling_is_eager_s(module, where):
    _, compiled = both(MODULES[module], DELAYED["default"], "aot_eager", INSIDE[where])
    scales = [b for name, b in compiled.named_buffers() if name.endswith(".scale")]
    assert scales and all(s.item() != 1 for s in scales)


@pytest.mark.parametrize("module", [layers.slow("Linear"), "LayerNormMLP"])
def test_delayed_scaling_through_inductor(module):
    both(MODULES[module], DELAYED["default"], "inductor")


@pytest.mark.parametrize("recipe", list(DELAYED)[1:])
def test_fields_of_the_recipe(recipe):
    both(MODULES["Linear"], DELAYED[recipe], "aot_eager")


def test_dynamic_shapes():
    both(MODULES["Linear"], DELAYED["default"], "aot_eager", dynamic=True)


def test_random_states_are_made_while_tracing():
    layer = MODULES["Linear"]().bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    with dt.autocast(recipe=RECIPES["nvfp4"]):
        torch.manual_seed(3)
        first = compiled(x)
        assert layer.rng_state.tolist()[2:] == [18, 0]
        other = copy.deepcopy(layer)
        del other._buffers["rng_state"]
        torch.manual_seed(3)
        assert torch.equal(other(x), first)


@pytest.mark.parametrize("name", [n for n in RECIPES if layers.packed(n)])
def test_stochastic_rounding_is_eager_s(name):
    both(MODULES["Linear"], RECIPES[name], "aot_eager", dtype=torch.bfloat16)


def test_evaluation_leaves_states_alone():
    _, compiled = both(MODULES["Linear"], DELAYED["short history"], "aot_eager")
    compiled.eval()
    before = {k: v.clone() for k, v in compiled.state_dict().items()}
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), dt.autocast(recipe=DELAYED["short history"]):
        run(torch.full((16, 32), 1e4))
    assert all(torch.equal(v, before[k]) for k, v in compiled.state_dict().items())


def test_eager_and_compiled_calls_take_turns():
    """Whoever comes first in a region updates the scales."""
    recipe = DELAYED["short history"]
    torch.manual_seed(0)
    eager = dt.Linear(32, 48)
    mixed = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    for i in range(6):
        x = torch.randn(16, 32) * (i + 1)
        with dt.autocast(recipe=recipe):
            for k in range(2):
                a, b = eager(x * (k + 1)), (mixed if (i + k) % 2 else compiled)(x * (k + 1))
                assert torch.equal(a, b)
                a.sum().backward(), b.sum().backward()
    for (k, a), b in zip(eager.state_dict().items(), mixed.state_dict().values(), strict=True):
        assert torch.equal(a, b), k


def test_switching_the_recipe_binds_anew():
    layer = dt.Linear(32, 48)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    for recipe in (DELAYED["default"], Float8CurrentScaling(), DELAYED["short history"], DELAYED["default"]):
        with dt.autocast(recipe=recipe):
            compiled(x).sum().backward()
        slots = layer.scale_states.slots() if "scale_states" in layer._modules else {}
        lengths = {s.amax_history.numel() for s in slots.values()}
        assert lengths == ({recipe.amax_history_len} if isinstance(recipe, DelayedScaling) else set())


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_forwards_run_ahead_of_backwards(backend):
    """As in a pipeline: later microbatches and later regions enter before the first backward, which quantizes by the
    scales of its forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = dt.Linear(32, 48)
    compiled = copy.deepcopy(eager)
    results = []
    for layer, fn in ((eager, eager), (compiled, torch.compile(compiled, fullgraph=True, backend=backend))):
        rng, seen, waiting = torch.Generator().manual_seed(1), [], []
        for step in range(4):
            with dt.autocast(recipe=DELAYED["short history"]):
                for i in range(3):
                    x = (torch.randn(16, 32, generator=rng) * (1 + 3 * step + i)).requires_grad_()
                    waiting.append((x, fn(x)))
                    if len(waiting) > 2:
                        x, y = waiting.pop(0)
                        y.square().sum().backward()
                        seen += [y.detach(), x.grad]
            seen += [v.clone() for k, v in layer.state_dict().items() if "scale_states" in k]
        results.append([*seen, layer.weight.grad])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert torch.equal(a, b), i


def test_more_backwards_than_the_log_holds():
    layer = dt.Linear(32, 48)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    recipe = DELAYED["default"]
    with dt.autocast(recipe=recipe):
        compiled(torch.randn(16, 32)).sum().backward()
    states = layer.scale_states
    states.written += states.log.shape[1]
    with dt.autocast(recipe=recipe), pytest.raises(RuntimeError, match=r"1025 amaxes were logged.*holds 1024"):
        compiled(torch.randn(16, 32))


def test_regions_are_counted_where_graphs_look():
    both(MODULES["Linear"], DELAYED["default"], "aot_eager")
    before = STATE.steps["cpu"].item()
    with dt.autocast(recipe=DELAYED["default"]), dt.autocast(recipe=Float8CurrentScaling()):
        pass
    with dt.autocast(enabled=False):
        pass
    assert STATE.steps["cpu"].item() == before + 1
