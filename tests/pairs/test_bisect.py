"""Bisection of the real pairs in float32: right ports make no difference, and a fault is found where it was planted."""

import functools

import jax.numpy as jnp
import pytest
import torch

from diptych.lab import frontend
from diptych.lab.bisect.forward import Inputs
from diptych.lab.bisect.search import Side, search

from .faults import FAULTS, GIVEN
from .models import NAMES, canonical, draw

FORWARD = [fault for fault in FAULTS if fault.kind in ("activation", "parameter")]


def side(name, framework, model, pair, folder):
    feeder = frontend.require(framework, "cpu").feeder(model, "cpu")
    return Side(name, f"pairs:{framework}", framework, feeder, Inputs((pair._given()[1],), {}), folder / name)


def flax_model(pair, change=dict):
    model, params = pair.flax(jnp.float32)
    return functools.partial(_logits, model, change(params))


def _logits(model, params, x):
    return model(x, params=params).logits


def of(framework, pair):
    return pair.torch(torch.float32) if framework == "torch" else flax_model(pair)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frameworks", [("torch", "jax"), ("jax", "torch")], ids="-".join)
def test_right_ports_make_no_difference(name, frameworks, tmp_path):
    pair = draw(name, 0, **GIVEN[name])
    a, b = (side(n, f, of(f, pair), pair, tmp_path) for n, f in zip("AB", frameworks, strict=True))
    outcome = search(a, b, None)
    assert outcome.found is None and not outcome.ambiguous
    assert len(outcome.sites) > 25 and max(s.local / s.limit for s in outcome.sites) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("fault", FORWARD, ids=str)
def test_faults_are_found_alone(fault, tmp_path):
    pair = draw(fault.model, 0, **GIVEN[fault.model])
    other = "jax" if fault.framework == "torch" else "torch"
    wrong = of("torch", pair) if fault.framework == "torch" else flax_model(pair, fault.changed)
    a, b = side("A", other, of(other, pair), pair, tmp_path), side("B", fault.framework, wrong, pair, tmp_path)
    with fault.plant(wrong if fault.framework == "torch" else None):
        outcome = search(a, b, None)
    sites = {canonical(site) for site in fault.sites}
    if fault.kind == "parameter":  # seen in what its module computes
        sites = {site.rpartition("/")[0] for site in sites}
    assert [canonical(s.pair.b.name) in sites for s in outcome.sites if s.differs] == [True]
    assert outcome.found is not None and outcome.found.itself is not None
