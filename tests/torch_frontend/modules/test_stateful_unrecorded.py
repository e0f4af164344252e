"""Calls that do not record leave scales, histories and random offsets as they are, whatever their recipe; eager and
compiled calls give the same results."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import DelayedScaling, Float8CurrentScaling, Format, NVFP4BlockScaling
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED, SEED
from torch_frontend.tools import same

WIDE = DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3)
TRAINED: dict[str, Any] = {"fp8-delayed": layers.DELAYED, "nvfp4": NAMED["nvfp4"], "E4M3": WIDE}
OTHERS: dict[str, Any] = {**NAMED, "E4M3": WIDE, "longer": DelayedScaling(amax_history_len=9)}


def _probe(model: Any, how: str, x: torch.Tensor, run: Any) -> torch.Tensor:
    if how == "no_grad":
        with torch.no_grad():
            return run(x)
    if how == "dry run":
        with dt.dry_run():
            return run(x)
    model.eval()
    try:
        y = run(x.clone().requires_grad_())
        y.float().sum().backward()  # an evaluation's gradients record nothing either
        return y.detach()
    finally:
        model.train()


def _step(model: Any, recipe: Any, x: torch.Tensor) -> None:
    with dt.autocast(recipe=recipe):
        y = model(x)
    (y.float().square().mean() * 1e-3).backward()


def _trained(recipe: Any) -> Any:
    torch.manual_seed(0)
    model = dt.prepare(torch.nn.Sequential(dt.Linear(64, 64), dt.LayerNormMLP(64, 64)).bfloat16(), recipe)
    dt.seed_rng(model, SEED)
    for i in range(3):
        _step(model, recipe, (torch.randn(32, 64) * (i + 1)).bfloat16())
    model.zero_grad()
    return model


CELLS = list(itertools.product(TRAINED, OTHERS, ("no_grad", "dry run", "eval")))


@pytest.mark.parametrize(("name", "other", "how"), [c if i % 3 == 0 else layers.slow(*c) for i, c in enumerate(CELLS)])
def test_states_stay(name, other, how):
    model, x = _trained(TRAINED[name]), torch.randn(32, 64).bfloat16()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with dt.autocast(recipe=OTHERS[other]):
        got = _probe(model, how, x, model)
        same(_probe(model, how, x, model), got)  # the same random bits each time
    after = {k: t for k, t in model.state_dict().items() if k in before}
    for key, t in before.items():
        same(after[key], t, key)


@pytest.mark.parametrize("other", (*map(layers.slow, ("fp8-current", "nvfp4", "longer")), "E4M3"))
def test_graphs_leave_states_too(other):
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, x = _trained(layers.DELAYED), torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        dt.seed_rng(model, SEED)
        before = {k: t.clone() for k, t in model.state_dict().items()}
        with dt.autocast(recipe=OTHERS[other]):
            out = [_probe(model, how, x, run) for how in ("no_grad", "eval")]
        after = model.state_dict()
        for key, t in before.items():
            same(after[key], t, key)
        _step(model, layers.DELAYED, x)
        found.append([*out, *[p.grad for p in model.parameters()]])
    for a, b in zip(*found, strict=True):
        same(a, b)


def test_weights_alone_keep_the_seed():
    model = dt.prepare(dt.Linear(64, 64, dtype=torch.bfloat16), NVFP4BlockScaling())
    dt.seed_rng(model, 1234)
    want = model.rng_state.clone()
    model.load_state_dict(dt.Linear(64, 64, dtype=torch.bfloat16).state_dict())
    same(model.rng_state, want)


# --- recipes of a module's own ----------------------------------------------------------------------------------------

OWN = [("eager", n) for n in NAMED]  # of compiled ones, a recipe with states runs with the tests, and one without
OWN += [("compiled", n) if n in ("fp8-delayed", "mxfp8") else layers.slow("compiled", n) for n in NAMED]


@pytest.mark.parametrize(("how", "name"), OWN)
def test_an_own_recipe_needs_no_region(name, how):
    """Four steps outside of regions have the bits of four regions; a disabled region is in high precision."""
    recipe, found = NAMED[name], []
    for outside in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = dt.LayerNormMLP(64, 64, recipe=recipe).bfloat16()
        dt.seed_rng(model, SEED)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if outside and how == "compiled" else model
        out = []
        for i in range(4):
            x = (torch.randn(32, 64) * (i + 1)).bfloat16()
            if outside:
                y = run(x)
            else:
                with dt.autocast(recipe=Float8CurrentScaling()):
                    y = run(x)
            y.float().square().mean().backward()
            out.append(y.detach())
        with dt.autocast(enabled=False):
            out.append(run(x).detach())
        found.append([*out, *[p.grad for p in model.parameters()], *model.state_dict().values()])
    for a, b in zip(*found, strict=True):
        same(a, b)
    assert not torch.equal(found[0][3], found[0][4])


@pytest.mark.parametrize("name", NAMED)
def test_an_own_recipe_is_exported_without_a_region(name):
    """The program has the bits of an evaluation, which quantizes too."""
    torch._dynamo.reset()
    model = dt.prepare(dt.LayerNormMLP(64, 64, recipe=NAMED[name]).bfloat16().eval(), NAMED[name])
    dt.seed_rng(model, SEED)
    x = torch.randn(32, 64).bfloat16()
    with torch.no_grad():
        want = model(x)
        got = torch.export.export(model, (x,)).module()(x)
        with dt.autocast(enabled=False):
            high = model(x)
    same(got, want)
    assert not torch.equal(got, high)


def test_training_without_any_region_warns_once(monkeypatch):
    from diptych.common import HighPrecisionWarning
    from diptych.torch.state import autocast

    monkeypatch.setattr(autocast._Process, "entered", False)
    layer, x = dt.Linear(64, 64), torch.randn(4, 64)
    with pytest.warns(HighPrecisionWarning, match=r"Linear runs in high precision: enter diptych\.torch\.autocast"):
        layer(x)
    with pytest.warns() as said:
        layer(x)
        dt.Linear(64, 64)(x)
        warnings.warn("the only one", stacklevel=1)
    assert len(said) == 1
