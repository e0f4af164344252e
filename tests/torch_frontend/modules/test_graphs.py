"""Modules captured in CUDA graphs: every replay is the eager step, states and all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import RECIPES, UnsupportedError
from torch_frontend import layer_cases as layers

MODULES = {
    "Linear": lambda **kw: dt.Linear(64, 64, **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(64, 64, **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(64, 96, activation="swiglu", **kw),
}


def pair(kind: str, recipe: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = MODULES[kind](device="cuda", dtype=getattr(torch, layers.dtype_of(recipe)), **options)
    graphed = copy.deepcopy(eager)
    for m in (eager, graphed):
        dt.seed_rng(m, 1)
    return eager, graphed


def inputs(recipe: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(32, 64, generator=generator) * (i + 1) for i in range(6)]
    return [x.to("cuda", getattr(torch, layers.dtype_of(recipe))).requires_grad_() for x in made]


def steps(module: Any, fn: Any, recipe: str) -> list[torch.Tensor]:
    """Three steps of two microbatches."""
    xs, seen = inputs(recipe), []
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    for i in range(3):
        with dt.autocast(recipe=RECIPES[recipe]):
            for x in xs[2 * i : 2 * i + 2]:
                y = fn(x)
                y.float().square().mean().backward()
                seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in module.parameters()]]
    return [*seen, *[t.clone() for name, t in module.state_dict().items() if "state" in name]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_graphed_callables(kind, recipe, cuda):
    eager, module = pair(kind, recipe)
    want = steps(eager, eager, recipe)
    sample = (torch.ones_like(inputs(recipe)[0]).requires_grad_(),)
    graphed = dt.make_graphed_callables(module, sample, recipe=RECIPES[recipe])
    same(steps(module, graphed, recipe), want)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_a_recipe_of_its_own_needs_no_region(kind, recipe, cuda):
    """Each call is a step of delayed scaling: before the capture, in each replay and after them."""

    def step(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y.float().square().mean(), [x, *module.parameters()])]

    eager, module = pair(kind, recipe)
    eager.recipe = module.recipe = RECIPES[recipe]
    xs = inputs(recipe)
    want = [t for x in xs for t in step(eager, x)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = [*step(module, xs[0]), *step(module, xs[1])]
    torch.cuda.current_stream().wait_stream(stream)
    graph, x = torch.cuda.CUDAGraph(), xs[0].detach().clone().requires_grad_()
    with torch.cuda.graph(graph):
        out = step(module, x)
    for value in xs[2:5]:
        with torch.no_grad():
            x.copy_(value)
        graph.replay()
        got += [t.clone() for t in out]
    same([*got, *step(module, xs[5])], want)
    states = module.state_dict()
    same([states[k] for k in states if "state" in k], [v for k, v in eager.state_dict().items() if "state" in k])


@pytest.mark.cuda
def test_warming_up_leaves_nothing(cuda):
    eager, module = pair("LayerNormMLP", "fp8-delayed", fuse_wgrad_accumulation=True)
    for m in (eager, module):
        for p in m.parameters():
            p.main_grad = torch.ones(p.shape, device="cuda")
        with dt.autocast(recipe=RECIPES["fp8-delayed"]):
            m(inputs("fp8-delayed")[1]).sum().backward()
    dt.make_graphed_callables(module, (inputs("fp8-delayed")[0],), recipe=RECIPES["fp8-delayed"])
    a, b = eager.state_dict(), module.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    same([p.main_grad for p in eager.parameters()], [p.main_grad for p in module.parameters()])


@pytest.mark.cuda
def test_a_first_call_cannot_be_captured(cuda):
    module = pair("Linear", "fp8-delayed")[1]
    x = inputs("fp8-delayed")[0].detach()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with dt.autocast(recipe=RECIPES["fp8-delayed"]), torch.cuda.stream(stream), torch.no_grad():
        graph.capture_begin()
        with pytest.raises(NotImplementedError, match="run the module once before capturing"):
            module(x)
        graph.capture_end()
    assert not module.state_dict().keys() & {"scale_states.input.scale"}


def test_delayed_wgrad_is_refused():
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute"):
        dt.make_graphed_callables(dt.Linear(16, 16, delay_wgrad_compute=True), (torch.ones(16, 16),))


def test_arguments_of_transformer_engine():
    make, layer, x = dt.make_graphed_callables, dt.Linear(16, 16), (torch.ones(16, 16),)
    for refused, words in (
        ({"sample_kwargs": {"a": 1}}, "sample_kwargs must be None"),
        ({"_order": [1, -1]}, "_order must be None"),
        ({"fp8_calibrating": True}, "a calibrating region is not captured"),
        ({"cache_quantized_params": True}, "cache_quantized_params must be False: .*skip_weight_update"),
        ({"clone_param_grads_on_return": False}, "clone_param_grads_on_return must be True"),
    ):
        with pytest.raises(UnsupportedError, match=f"make_graphed_callables: {words}"):
            make(layer, x, **refused)
    with pytest.raises(ValueError, match="enabled=True and fp8_enabled=False name the same thing"):
        make(layer, x, enabled=True, fp8_enabled=False)
    with pytest.raises(UnsupportedError, match="sample_kwargs must be None, got 'pool'"):
        make(layer, x, 3, False, "pool")
    with pytest.raises(TypeError, match="positional"):
        make(layer, x, 3, False, None, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        make(layer, x, no_such=1)


@pytest.mark.cuda
def test_earlier_names_of_arguments(cuda):
    eager, module = pair("Linear", "mxfp8")
    own = {"fp8_enabled": True, "fp8_recipe": RECIPES["mxfp8"], "sample_kwargs": None, "_order": None}
    x = inputs("mxfp8")[0]
    graphed = dt.make_graphed_callables(module, (x,), **own)
    with dt.autocast(recipe=RECIPES["mxfp8"]):
        same([graphed(x)], [eager(x)])


def test_it_needs_a_gpu_and_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Exception, match=r"(?i)cuda|graph"):
        dt.make_graphed_callables(dt.Linear(16, 16), (torch.ones(16, 16),), recipe=RECIPES["mxfp8"])
