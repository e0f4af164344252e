"""Steps with state beside the torch panel's: the same bits, and checkpoints that either reads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych.common import CustomRecipe, DelayedScaling, NVFP4BlockScaling
from diptych.jax.layers.linear import dense
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.state import carry as tr
from diptych.jax.state import scales as st
from diptych.jax.state import update
from jax_frontend import layer_cases as layers
from jax_frontend import tools

torch = pytest.importorskip("torch")
dt = pytest.importorskip("diptych.torch")


def per_product(role):
    return DelayedScaling(margin=1 if role.gemm == "wgrad" else 0, amax_history_len=3).quantizer(role)


RECIPES = {
    "delayed": DelayedScaling(amax_history_len=3),
    "most recent": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
    "states for each product": CustomRecipe(per_product),
    "fp4": NVFP4BlockScaling(),
}


def to_torch(x):
    x = np.asarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def same(got, want, label):
    """A JAX array and a torch tensor."""
    want = want.detach()
    want = want.view(torch.int16).numpy() if want.dtype == torch.bfloat16 else want.numpy()
    np.testing.assert_array_equal(tools.bits(got), tools.bits(want), err_msg=label)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("original", [False, True], ids=["", "original input"])
def test_steps_and_checkpoints(name, original):
    recipe = RECIPES[name]
    x, kernel, bias, dy = layers.operands((2, 16, 64), 32, "bfloat16" if name == "fp4" else "float32")
    module = dt.Linear(64, 32, save_original_input=original, dtype=to_torch(kernel).dtype)
    module.load_state_dict({"weight": to_torch(kernel), "bias": to_torch(bias)})
    states, rng = st.init_state(recipe), dj.rng_state(5, (1 << 32) - 20)
    if name == "fp4":
        module.seed_rng(5, (1 << 32) - 20)

    def loss(params, states, x, dy, rng):
        call = {"recipe": recipe, "rng": rng, "save_original_input": original}
        return (dense(x, *params, state=states, **call).astype(jnp.float32) * dy.astype(jnp.float32)).sum()

    step = jax.jit(tr.value_and_grad_with_state(lambda p, s, *a: loss(p[1:], s, p[0], *a)))
    for i in range(5):
        states = update.update_state(states, recipe)
        for scale in (0.5**i, 3.0):  # two microbatches
            a = (x * scale).astype(x.dtype)
            _, grads, states = step((a, kernel, bias), states, dy, rng)
            rng = rng_at(rng, OFFSETS)
            if scale != 3.0:
                first = a
        inputs = [to_torch(v).requires_grad_() for v in (first, (x * 3.0).astype(x.dtype))]
        with dt.autocast(recipe=recipe):
            for t in inputs:
                module.zero_grad()
                module(t).backward(to_torch(dy))
        for got, want, label in zip(grads, (inputs[1].grad, module.weight.grad, module.bias.grad), "xkb", strict=True):
            same(got, want, f"{label} of step {i}")
        held = {k: v for k, v in module.state_dict().items() if k not in ("weight", "bias")}
        flat = st.state_dict(states, rng=rng if name == "fp4" else None)
        assert flat.keys() == held.keys()
        for key, value in held.items():
            same(flat[key], value, f"{key} of step {i}")
    # Either reads the other's.
    got, got_rng = st.load_state_dict({k: v.numpy() for k, v in held.items()}, st.init_state(recipe))
    tools.same_tree(got, states)
    assert (got_rng is None) == (name != "fp4")
    other = dt.Linear(64, 32, dtype=module.weight.dtype)
    changed = st.map_states(lambda s: dataclasses.replace(s, scale=s.scale * 2), states)
    changed = st.state_dict(changed, rng=None if got_rng is None else rng_at(got_rng, 4))
    plain = {k: v for k, v in module.state_dict().items() if k in ("weight", "bias")}
    other.load_state_dict(plain | {k: to_torch(v) for k, v in changed.items()})
    for key, value in other.state_dict().items():
        if key not in plain:
            same(changed[key], value, key)
