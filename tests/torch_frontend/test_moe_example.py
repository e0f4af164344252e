"""The mixture of experts of examples/torch_moe.py: what it computes, that it trains, that routing is on the device."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import others_slow
from torch.nn import functional as F

import diptych.torch as dt
from diptych.common import RECIPES, CustomRecipe, Recipe
from diptych.common.layers.groups import row_align
from torch_frontend.layer_cases import NAMED
from torch_frontend.tools import RECIPE_NAMES, normal, same

pytestmark = pytest.mark.sampled

_spec = importlib.util.spec_from_file_location("moe_example", Path(__file__).parents[2] / "examples/torch_moe.py")
assert _spec is not None and _spec.loader is not None
moe: Any = importlib.util.module_from_spec(_spec)
sys.modules["moe_example"] = moe  # a dataclass looks its module up
_spec.loader.exec_module(moe)


def layer(recipe: Recipe | None, device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"dtype": torch.float32} if recipe is None else {"align": row_align(recipe)}
    made = moe.MoE(moe.Config(**(given | options))).to(device)
    dt.seed_rng(made, 5)
    return made


def step(fn: Any, model: Any, x: torch.Tensor, recipe: Recipe | None) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with dt.autocast(enabled=recipe is not None, recipe=recipe):
        y, balance = fn(x)
    (y.float().square().mean() + balance).backward()
    return {"y": y.detach(), "balance": balance.detach(), "dx": x.grad} | {
        n: p.grad for n, p in model.named_parameters()
    }


def dense(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same layer with every expert for every token, weighted by 0 where the token does not go."""
    config = model.config
    experts, probs, balance = model.router(x)
    weight = torch.zeros(len(x), config.experts).scatter(1, experts, probs)
    each = [
        F.linear(moe.swiglu(F.linear(x, a)), b) for a, b in zip(model.gate_up.weight, model.down.weight, strict=True)
    ]
    shared = F.linear(moe.swiglu(F.linear(x, model.shared_gate_up.weight)), model.shared_down.weight)
    return shared + (torch.stack(each, 1) * weight[..., None]).sum(1), balance


def test_rows_end_up_where_they_came_from():
    x = normal("x", (70, 64))
    for align in (1, 16, 128):
        model = layer(None, align=align, top_k=3)
        got, want = step(model, model, x, None), step(lambda v, m=model: dense(m, v), model, x, None)
        for key, t in want.items():
            torch.testing.assert_close(got[key], t, rtol=1e-4, atol=1e-5, msg=key)


def test_the_load_balancing_loss():
    router = layer(None).router
    with torch.no_grad():
        router.gate.weight.zero_()
        uniform = router(torch.randn(6, 64))[2].item()
        router.gate.weight[:2] = 1.0
        router.gate.weight[2:] = -1.0
        biased = router(torch.ones(6, 64))[2].item()
    assert uniform == 1 and biased == pytest.approx(2)  # of four experts two get all


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_is_near_high_precision(name):
    model, x = layer(RECIPES[name]), normal("x", (96, 64))
    for _ in range(2):  # the first step of delayed scaling has no scales yet
        got = step(model, model, x, RECIPES[name])
    model.config.dtype = torch.float32
    want = step(model, model, x, None)
    for key in ("y", "gate_up.weight", "down.weight", "dx"):
        error = (got[key].float() - want[key].float()).norm() / want[key].norm()
        assert 1e-3 < error < (0.5 if name == "nvfp4" else 0.15), (key, error)


@pytest.mark.parametrize("name", others_slow(RECIPE_NAMES, ("fp8-delayed",)))
def test_one_graph_serves_every_routing(name):
    eager, model, recipe = layer(NAMED[name]), layer(NAMED[name]), NAMED[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for i in range(3):
        x = normal(f"x{i}", (64, 64))
        got, want = step(compiled, model, x, recipe), step(eager, eager, x, recipe)
        for key, t in want.items():
            torch.testing.assert_close(got[key], t, rtol=2e-2, atol=1e-5, msg=key)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("backend", (None, pytest.param("aot_eager", marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", others_slow(RECIPE_NAMES, ("mxfp8",)))
def test_it_learns(name, backend):
    config = moe.Config(width=32, hidden=32, seq=32, align=row_align(RECIPES[name]))
    losses = moe.train(RECIPES[name], 12, batch=2, config=config, backend=backend)
    assert losses[-1] < losses[0] - 0.5


def _none(role: Any) -> None:
    return None


def test_what_groups_should_begin_at_multiples_of():
    found = {name: row_align(recipe) for name, recipe in RECIPES.items()}
    want = {"fp8-delayed": 32, "fp8-current": 32, "fp8-block": 128, "mxfp8": 32, "mxfp8-2d": 32, "nvfp4": 16}
    assert found == want and row_align(CustomRecipe(_none)) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("name", (None, *RECIPE_NAMES))
def test_a_cuda_graph_serves_every_routing(name, cuda):
    """Forward and backward in one graph; replays with other routings have eager's bits."""
    recipe = None if name is None else NAMED[name]
    given: dict[str, Any] = {"width": 128, "hidden": 256, "experts": 8, "dtype": torch.bfloat16}
    model = layer(recipe, cuda, **given)
    if recipe is None:
        model = model.bfloat16()
    x = torch.zeros(192, 128, device=cuda, requires_grad=True)

    def run(of: Any) -> tuple[torch.Tensor, ...]:
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y, balance = of(x)
        (y.float().square().mean() + balance).backward()
        return y, balance

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        x.copy_(normal("warm", (192, 128), device=cuda))
    with torch.cuda.stream(side):
        for _ in range(2):
            run(model)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    eager = copy.deepcopy(model)  # with the states of now; capturing runs nothing
    with torch.cuda.graph(graph):
        made = run(model)
    in_graph = [*made, x.grad, *[p.grad for p in model.parameters()]]
    routings = []
    for i in range(3):
        with torch.no_grad():
            x.copy_(normal(f"x{i}", (192, 128), device=cuda))
        with dt.autocast(enabled=recipe is not None, recipe=recipe):  # a step
            graph.replay()
        got = [t.clone() for t in in_graph]
        x.grad = None
        eager.zero_grad(set_to_none=True)
        want = run(eager)
        for j, (a, b) in enumerate(zip(got, [*want, x.grad, *[p.grad for p in eager.parameters()]], strict=True)):
            same(a.detach(), b.detach(), f"{name} step {i}, result {j}")
        routings.append(model.router(x)[0].detach())
    assert not torch.equal(routings[0], routings[1])


@pytest.mark.cuda
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_step_waits_for_nothing(name, cuda):
    recipe = NAMED[name]
    model = layer(recipe, cuda)
    xs = [normal(f"x{i}", (128, 64), device=cuda) for i in range(3)]
    step(model, model, xs[0], recipe)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in xs:
            step(model, model, x, recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")
