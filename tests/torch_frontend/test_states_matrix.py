"""Modules × recipes × where their states come from: eager and compiled training go on from there with the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import CustomRecipe
from torch_frontend.layer_cases import NAMED, SEED, slow
from torch_frontend.modules.test_tracing import Own
from torch_frontend.state.test_scales import _mixed

pytestmark = pytest.mark.sampled

RECIPES: dict[str, Any] = {**NAMED, "mixed": CustomRecipe(_mixed)}
KINDS: dict[str, Any] = {
    "Linear": lambda: dt.Linear(64, 64),
    "LayerNormLinear": lambda: dt.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: dt.LayerNormMLP(64, 64),
    "own": Own,
    "weight_norm": lambda: torch.nn.utils.parametrizations.weight_norm(dt.Linear(64, 64)),
    "two": lambda: torch.nn.Sequential(dt.Linear(64, 64), torch.nn.GELU(), dt.LayerNormLinear(64, 64)),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return KINDS[kind]().bfloat16()


def step(model: Any, recipe: Any, run: Any = None) -> list[torch.Tensor]:
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with dt.autocast(recipe=recipe):
        y = (model if run is None else run)(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]  # type: ignore[list-item]


def first_compiled(kind: str, recipe: Any) -> Any:
    return made(kind)


def inference(kind: str, recipe: Any) -> Any:
    model = made(kind).eval()
    with torch.inference_mode(), dt.autocast(recipe=recipe):
        model(torch.randn(32, 64).bfloat16())
    return model.train()


def loaded(kind: str, recipe: Any) -> Any:
    trained, model = made(kind), made(kind)
    step(trained, recipe)
    model.load_state_dict(trained.state_dict())
    return model


def copied(kind: str, recipe: Any) -> Any:
    trained = dt.prepare(made(kind), recipe)
    step(trained, recipe)
    trained.zero_grad()
    return copy.deepcopy(trained)


def materialised(kind: str, recipe: Any) -> Any:
    with torch.device("meta"):
        model = KINDS[kind]().bfloat16()
    model = dt.prepare(model, recipe).to_empty(device="cpu")
    weights = {k: v for k, v in made(kind).state_dict().items() if "state" not in k}
    missing = model.load_state_dict({**{k: v for k, v in model.state_dict().items() if "state" in k}, **weights})
    assert not missing.missing_keys
    return model


WAYS: dict[str, Any] = {
    "first call compiled": first_compiled,
    "under inference_mode": inference,
    "after load": loaded,
    "after deepcopy": copied,
    "on meta, then materialised": materialised,
}
DEFAULT = {
    ("own", "fp8-delayed", "under inference_mode"),
    ("Linear", "mixed", "after load"),
    ("LayerNormMLP", "fp8-delayed", "after deepcopy"),
    ("Linear", "nvfp4", "on meta, then materialised"),
    ("weight_norm", "fp8-current", "first call compiled"),
}
CELLS = [(k, n, w) for k in KINDS for n in RECIPES for w in WAYS]


@pytest.mark.parametrize(("kind", "name", "way"), [c if c in DEFAULT else slow(*c) for c in CELLS])
def test_training_goes_on(kind, name, way):
    recipe = RECIPES[name]
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(2)
        model = WAYS[way](kind, recipe)
        dt.seed_rng(model, SEED)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else None
        torch.manual_seed(3)
        results = [t.clone() for _ in range(2) for t in step(model, recipe, run)]
        states = model.state_dict()
        assert not any(t.is_inference() for t in (*states.values(), *model.buffers()))
        found.append(dict(enumerate(results)) | states)
    eager, graph = found
    assert eager.keys() == graph.keys()
    for key in eager:
        assert torch.equal(eager[key], graph[key]), key
