"""The planted faults: each changes the model, and hooks find it first at the site that it names, in float64."""

import functools

import jax
import jax.numpy as jnp
import pytest
import torch

from .faults import FAULTS, GIVEN, IMPOSSIBLE, LAYOUTS
from .models import canonical, draw
from .sites import first, flax_sites, relative, torch_sites
from .wide import wide


@functools.cache
def right(model, framework):
    pair = draw(model, 0, **GIVEN[model])
    with jax.enable_x64(True), wide():
        if framework == "torch":
            return pair, torch_sites(pair, pair.torch(torch.float64))
        return pair, flax_sites(pair, *pair.flax(jnp.float64))


def wrong(fault):
    pair = draw(fault.model, 0, **GIVEN[fault.model])
    with jax.enable_x64(True), wide():
        if fault.framework == "torch":
            model = pair.torch(torch.float64)
            with fault.plant(model):
                return torch_sites(pair, model, fault.reduction)
        model, params = pair.flax(jnp.float64)
        with fault.plant(None):
            return flax_sites(pair, model, fault.changed(params), fault.reduction, backward="grad" in fault.kind)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_first_difference_is_at_the_named_site(fault):
    """Between the faulty model and the other framework's right one."""
    other = "jax" if fault.framework == "torch" else "torch"
    pair, (loss, values, grads, by_parameter) = right(fault.model, other)
    found_loss, found_values, found_grads, found_by_parameter = wrong(fault)
    change = abs(found_loss - loss) / loss
    changes = {n: relative(g, found_by_parameter[n]) for n, g in by_parameter.items() if n in found_by_parameter}
    changes = {n: x for n, x in changes.items() if n not in pair.vanishing}
    change = max(change, *changes.values(), 0)
    assert change > 1e-9, "the fault changes nothing"
    sites = {canonical(site) for site in fault.sites}
    where = first(found_values, values)
    if fault.kind == "activation":
        assert where in sites
    elif fault.kind == "parameter":
        owner = fault.sites[0].rpartition("/" if fault.framework == "jax" else ".")[0]
        assert where == canonical(owner)
    elif fault.kind == "activation_grad":
        assert where is None and first(found_grads, grads, backward=True) in sites
    else:
        name = fault.sites[0] if fault.framework == "jax" else pair.places[fault.sites[0]][0]
        differing = [n for n, x in changes.items() if x > 1e-10]
        assert where is None and differing == [name]


def test_every_kind_is_planted_wherever_a_model_can_have_it():
    kinds = {
        "epsilon", "scale", "transposed", "gelu", "rotary", "mask", "bias", "doubled parameter", "reduction", "stale",
        "heads",
    }  # fmt: skip
    planted = {(f.name, f.model, f.framework) for f in FAULTS}
    assert len(planted) == len(FAULTS) >= 40
    for kind in kinds:
        for model in LAYOUTS:
            for framework in ("torch", "jax"):
                assert ((kind, model, framework) in planted) != ((kind, model) in IMPOSSIBLE)


def test_a_rotation_of_queries_and_keys_by_one_position_is_no_fault():
    pair, (loss, *_) = right("llama", "torch")
    with wide(), torch.no_grad():
        model = pair.torch(torch.float64)
        forward = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids + 1)
        assert abs(pair.torch_loss(model).item() - loss) < 1e-12
