"""Code that cannot be compiled raises an error that names it under fullgraph; else it warns once and runs eagerly."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import DelayedScaling, MXFP8BlockScaling
from diptych.torch.graph import eager_only

MODULES = {
    "Linear": lambda **kw: dt.Linear(32, 64, **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(32, 64, **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(32, 64, **kw),
}
each_module = pytest.mark.parametrize("kind", MODULES)


@pytest.fixture(autouse=True)
def unwarned():
    torch._dynamo.reset()
    for part in (eager_only.DELAYED_WGRAD, eager_only.CALIBRATING):
        part.warned = False


def weights(module: Any) -> list[torch.Tensor]:
    return [p for p in module.parameters() if p.dim() == 2]


def pair(kind: str, **options: Any) -> list[Any]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(MODULES[kind](**options))
    return made


@each_module
def test_delayed_wgrad(kind):
    x = torch.randn(16, 32)
    eager, module = pair(kind, delay_wgrad_compute=True)
    with dt.autocast(recipe=MXFP8BlockScaling()):
        with pytest.raises(Exception, match=r"delay_wgrad_compute(.|\n)*torch\.compiler\.disable"):
            torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        fn = torch.compile(lambda x: module(x * 2) + 1, backend="aot_eager")
        with pytest.warns(eager_only.EagerWarning, match="delay_wgrad_compute.*runs eagerly"):
            y = fn(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", eager_only.EagerWarning)
            again = fn(x)
        want = eager(x * 2) + 1
    assert torch.equal(y, want) and torch.equal(again, want)
    for t in (y, want):
        t.square().sum().backward()
    assert all(w.grad is None for w in weights(module))
    for m in (eager, module):
        m.backward_dw()
    for a, b in zip(eager.parameters(), module.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@each_module
def test_calibration(kind):
    x = torch.randn(16, 32)
    eager, module = pair(kind)
    with dt.autocast(enabled=False, recipe=DelayedScaling(), calibrating=True):
        with pytest.raises(Exception, match="calibrate eagerly"):
            torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        with pytest.warns(eager_only.EagerWarning, match="calibrating"):
            y = torch.compile(module, backend="aot_eager")(x)
        assert torch.equal(y, eager(x))
    states = [{k: v for k, v in m.state_dict().items() if "scale_states" in k} for m in (eager, module)]
    assert states[0] and states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@each_module
def test_a_recomputation_outside_of_its_region(kind):
    """torch's reentrant checkpoint around compiled code, backward after the region: it runs by the forward's recipe."""
    module, found = MODULES[kind](), []
    fn = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    for run in (module, lambda a: torch.utils.checkpoint.checkpoint(fn, a, use_reentrant=True)):
        a = x.clone().requires_grad_()
        module.zero_grad()
        with dt.autocast(recipe=MXFP8BlockScaling()):
            y = run(a)
        y.sum().backward()
        found.append([y, a.grad, *[p.grad for p in module.parameters()]])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("what", ("delay_wgrad_compute", "calibrating=True", "transforms of torch.func"))
def test_export_without_dynamo(what, compiled):
    """No graph is left there, whether Dynamo has left one before or not: an error with the same words."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = dt.Linear(32, 64, delay_wgrad_compute=what == "delay_wgrad_compute")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calibrating = what == "calibrating=True"
            with dt.autocast(enabled=not calibrating, recipe=DelayedScaling(), calibrating=calibrating):
                return torch.func.vmap(self.layer)(x) if what.startswith("transforms") else self.layer(x)

    x = torch.randn(2, 16, 32)
    if compiled:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eager_only.EagerWarning)
            torch.compile(Model(), backend="eager")(x)
    with pytest.raises(NotImplementedError, match=what):
        torch.export.export(Model(), (x,), strict=False)
