"""The pairs: torch's and Flax's model are the same by definition, and what must be changed in them to see it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from .models import NAMES, draw
from .sites import common, first, flax_sites, relative, torch_sites
from .wide import PATCHES, wide

SEEDS = range(2)
EXACT = 1e-10


def losses_and_gradients(pair, dtype):
    """Returns the loss and the gradients of both frameworks, computed without the lab. Gradients are named as in
    Flax."""
    model = pair.torch(getattr(torch, dtype))
    loss = pair.torch_loss(model)
    loss.backward()
    ours = {
        pair.places[n][0]: p.grad.to(torch.float64).numpy().transpose(pair.places[n][1])
        for n, p in model.named_parameters()
    }
    module, params = pair.flax(jnp.dtype(dtype))
    theirs, grads = jax.jit(jax.value_and_grad(pair.flax_loss(module)))(params)
    flat = jax.tree_util.tree_flatten_with_path(grads)[0]
    by_name = {"/".join(k.key for k in path): np.asarray(g, np.float64) for path, g in flat}
    return loss.item(), ours, float(theirs), by_name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_both_are_the_same_function(name, seed):
    pair = draw(name, seed)
    with jax.enable_x64(True), wide():
        loss, values, grads, by_parameter = torch_sites(pair, pair.torch(torch.float64))
        other_loss, other_values, other_grads, other_by_parameter = flax_sites(pair, *pair.flax(jnp.float64))
    assert abs(loss - other_loss) < EXACT * loss
    assert first(values, other_values, EXACT) is None
    assert first(grads, other_grads, EXACT, backward=True) is None
    assert by_parameter.keys() == other_by_parameter.keys()
    for parameter, g in by_parameter.items():
        other = other_by_parameter[parameter]
        if parameter in pair.vanishing:
            assert max(np.abs(g).max(), np.abs(other).max()) < 1e-15, parameter
        else:
            assert relative(g, other) < EXACT, parameter
    # Most of the modules have a counterpart: per layer torch alone has the activation and its probabilities.
    assert len(common(values, other_values)) > 0.75 * len(values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 0.15)])
def test_they_agree_to_rounding(name, dtype, bound):
    """Gradients that are sums which cancel have few digits, so all of them are compared at once."""
    loss, ours, other_loss, theirs = losses_and_gradients(draw(name, 0), dtype)
    assert abs(loss - other_loss) < bound * loss
    ours, theirs = (np.concatenate([grads[n].ravel() for n in ours]) for grads in (ours, theirs))
    assert 0 < relative(ours, theirs) < bound


@pytest.mark.parametrize("patch", PATCHES)
def test_each_cast_to_float32_shows_in_float64(patch):
    """Without any one of the patches a float64 model is one of float32 in part."""
    pair = draw("vit" if "vit" in patch else "llama", 0)
    with jax.enable_x64(True):
        results = []
        for without in ("", patch):
            with wide(without=without):
                if "flax" in patch:
                    results.append(flax_sites(pair, *pair.flax(jnp.float64), backward=False)[1])
                else:
                    results.append(torch_sites(pair, pair.torch(torch.float64))[1])
    worst = max(relative(results[0][n], results[1][n]) for n in results[0])
    assert 1e-10 < worst < 1e-5
