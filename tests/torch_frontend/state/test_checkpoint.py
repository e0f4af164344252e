"""Activation checkpointing: what is recomputed has the forward's scales and random bits, however it is nested."""

from __future__ import annotations

import pytest
import torch

import diptych.torch as dt
from diptych.core import reset_calls
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import DELAYED, NAMED
from torch_frontend.layer_cases import all_same as _all_same
from torch_frontend.layer_cases import gelu_model as _model
from torch_frontend.layer_cases import train as _train
from torch_frontend.tools import RECIPE_NAMES, calls, normal


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_checkpoint(name, reentrant):
    model, plain = _model(), _model()
    want = _train(plain, NAMED[name])
    reset_calls()
    got = _train(model, NAMED[name], fn=lambda x: dt.checkpoint(model, x, use_reentrant=reentrant))
    _all_same(got, want)
    assert calls("gemm") == 3 * (2 * 2 + 4)


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4"))
@pytest.mark.parametrize("how", ("context_fn", "nested", "region inside", "twice"))
def test_checkpoint_in_other_ways(name, how):
    recipe = NAMED[name]
    model, plain = _model(), _model()

    def inside(x):
        with dt.autocast(recipe=recipe):
            return model(x)

    def nested(x):
        return dt.checkpoint(lambda v: model[2](dt.checkpoint(lambda u: model[1](model[0](u)), v)), x)

    def fn(x):
        if how == "context_fn":
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False, context_fn=dt.checkpoint_contexts)
        return {
            "nested": nested,
            "region inside": lambda v: dt.checkpoint(inside, v),
            "twice": lambda v: dt.checkpoint(lambda u: model(model(u)), v),  # shared weights
        }[how](x)

    want = _train(plain, recipe, fn=(lambda v: plain(plain(v))) if how == "twice" else None)
    _all_same(_train(model, recipe, fn=fn), want)


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4"))
def test_recomputing_after_later_steps(name):
    """Two forwards in two regions, then their backwards: the older recomputation finds the older scales and bits."""
    recipe = NAMED[name]
    results = []
    for wrap in (False, True):
        model = _model()
        dt.seed_rng(model, layers.SEED)
        xs, ys = [], []
        for i in range(3):
            x = (normal(f"x{i}", (16, 96), layers.dtype_of(recipe)) * 2**i).requires_grad_()
            with dt.autocast(recipe=recipe):
                ys.append(dt.checkpoint(model, x) if wrap else model(x))
            xs.append(x)
        for y in ys:
            y.square().sum().backward()
        states = [t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k]
        results.append(
            [*(y.detach() for y in ys), *(x.grad for x in xs), *(p.grad for p in model.parameters()), *states]
        )
    _all_same(results[1], results[0])


def test_a_recomputation_that_runs_something_else():
    model, once = _model(), []

    def fn(x):
        once.append(1)
        return model(x) if len(once) == 1 else model[2](model[1](model[2](x)))

    with dt.autocast(recipe=DELAYED):
        y = dt.checkpoint(fn, normal("x", (16, 96)).requires_grad_())
    with pytest.raises(NotImplementedError, match="both must run the same"):
        y.sum().backward()
