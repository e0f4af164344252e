"""Weights kept across microbatches, where calls are recomputed: what was kept or used in a forward serves its
recomputation, which keeps nothing; a backward finds the copies that it needs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import UnsupportedError
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED
from torch_frontend.state.test_checkpoint_adopted import KINDS
from torch_frontend.tools import normal, same

MODULES: dict[str, Any] = {
    "linear": lambda dtype: dt.Linear(96, 96, dtype=dtype),
    "layernorm_linear": lambda dtype: dt.LayerNormLinear(96, 96, dtype=dtype),
    "layernorm_mlp": lambda dtype: dt.LayerNormMLP(96, 64, dtype=dtype),
}


def made(kind: str, name: str) -> Any:
    torch.manual_seed(0)
    module = MODULES[kind](getattr(torch, layers.dtype_of(NAMED[name])))
    dt.prepare(module, NAMED[name])
    dt.seed_rng(module, layers.SEED)
    return module


def written(module: Any, factor: float) -> None:
    """Multiplies the parameters, as an average of weights that is swapped in does."""
    for p in module.parameters():
        p.data.mul_(factor)


def microbatches(module: Any, name: str, run: Any) -> list[torch.Tensor]:
    """A step of two microbatches, an evaluation that keeps another weight before their backward, and a later one."""
    out: list[torch.Tensor] = []
    region = functools.partial(dt.autocast, recipe=NAMED[name])
    xs = [normal(f"x{i}", (16, 96), layers.dtype_of(NAMED[name])).requires_grad_() for i in range(3)]
    with region():
        ys = [run(functools.partial(module, is_first_microbatch=i == 0), x) for i, x in enumerate(xs[:2])]
    written(module, 2)
    with region(), torch.no_grad():
        out.append(module(xs[2], is_first_microbatch=True))
    written(module, 0.5)
    for y in ys:
        y.square().sum().backward()
    with region():
        out.append(module(xs[2], is_first_microbatch=False).detach())
    return [*out, *[y.detach() for y in ys], *[x.grad for x in xs[:2]], *[p.grad for p in module.parameters()]]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputation_uses_its_forwards_weight_and_keeps_none(kind):
    for i, (module, name) in enumerate((m, n) for m in MODULES for n in NAMED):
        if (i + len(kind)) % 3 == 0:
            got = microbatches(made(module, name), name, KINDS[kind])
            want = microbatches(made(module, name), name, lambda fn, x: fn(x))
            for j, (a, b) in enumerate(zip(got, want, strict=True)):
                same(a, b, (module, name, j))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("module", MODULES)
def test_copies_that_a_backward_in_evaluation_needs(module, name):
    """In evaluation with grad mode, a norm's parameters get gradients though x needs none; the reentrant kind, whose
    forward runs without grad mode, uses the weight that was kept."""
    found = []
    for run in (lambda fn, x: fn(x), functools.partial(checkpoint, use_reentrant=True)):
        layer, x = made(module, name), normal("x", (16, 96), layers.dtype_of(NAMED[name]))
        with dt.autocast(recipe=NAMED[name]):
            layer.eval()(x, is_first_microbatch=True).square().sum().backward()
            grads = [p.grad.clone() for p in layer.parameters()]
            plain = made(module, name)
            plain.eval()(x).square().sum().backward()
            for p, grad in zip(plain.parameters(), grads, strict=True):
                same(grad, p.grad)
            written(layer, 1.5)
            x.requires_grad_()
            y = run(functools.partial(layer, is_first_microbatch=False), x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *[p.grad for p in layer.parameters()]])
    for a, b in zip(*found, strict=True):
        same(a, b)


def test_a_kept_weight_that_was_overwritten_is_refused():
    """Skipping on the device writes in place: where the forward's copies are gone a recomputation raises, as a
    backward without one does."""
    keep, write = torch.ones(1), torch.zeros(1)
    for run, error in ((lambda fn, x: fn(x), RuntimeError), (KINDS["non-reentrant"], UnsupportedError)):
        layer, x = made("linear", "mxfp8"), normal("x", (16, 96)).requires_grad_()
        with dt.autocast(recipe=NAMED["mxfp8"]):
            layer(x, skip_weight_update=write)
            y = run(functools.partial(layer, skip_weight_update=keep), x)
            layer(x, skip_weight_update=write)
        with pytest.raises(error, match=r"modified by an inplace operation|has overwritten it"):
            y.sum().backward()
