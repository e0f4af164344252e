"""Loops of optax and orbax in nnx, linen and equinox: compiled steps, a checkpoint by orbax, resuming bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import diptych.jax as dj
import diptych.jax.equinox as dx
import diptych.jax.linen as dl
import diptych.jax.nnx as dnnx
from diptych.common import RECIPES

NAMES = ("fp8-delayed", "mxfp8", "nvfp4")


def batch(i: int) -> jax.Array:
    return jax.random.normal(jax.random.key(i), (32, 32), jnp.bfloat16)


def save(folder: Path, step: int, tree: Any) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(tree))


def restore(folder: Path, tree: Any) -> Any:
    with ocp.CheckpointManager(folder) as manager:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))


def same(got: Any, want: Any) -> None:
    """Asserts that two pytrees have the same leaves in bits."""
    ours, theirs = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        one, other = (
            jax.random.key_data(t) if jnp.issubdtype(t.dtype, jax.dtypes.prng_key) else t for t in (one, other)
        )
        assert one.dtype == other.dtype and np.array_equal(one, other), path


# --- nnx: a model of flax's own layers, converted --------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(32, 64, rngs=rngs, param_dtype=jnp.bfloat16)
        self.down = nnx.Linear(64, 32, rngs=rngs, param_dtype=jnp.bfloat16)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


@nnx.jit
def nnx_step(model: Any, optimizer: Any, x: jax.Array) -> None:
    wrt = nnx.DiffState(0, dnnx.DIFFERENTIATED)
    grads = nnx.grad(lambda m: jnp.square(m(x).astype(jnp.float32) - 1).mean(), argnums=wrt)(model)
    optimizer.update(model, grads)
    dnnx.update_states(model, grads)


def nnx_loop(name: str, folder: Path, resume: bool = False) -> Any:
    """Returns all variables of model and optimizer; the resumed model is made of other seeds."""
    seed = 1 if resume else 0
    model = dj.convert(Net(seed), RECIPES[name], rngs=nnx.Rngs(seed), verbose=False)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    both = {"model": model, "optimizer": optimizer}
    if resume:
        nnx.update(both, restore(folder, nnx.state(both)))
    for i in range(2 * resume, 4):
        nnx_step(model, optimizer, batch(i))
        if i == 1 and not resume:
            save(folder, 2, nnx.state(both))
    return nnx.state(both)


# --- linen: a module with layers of diptych --------------------------------------------------------------------------


class Mlp(nn.Module):
    recipe: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.gelu(dl.DenseGeneral(64, recipe=self.recipe, param_dtype=jnp.bfloat16)(x))
        return dl.DenseGeneral(32, recipe=self.recipe, param_dtype=jnp.bfloat16)(x)


@jax.jit
def linen_step(state: Any, x: jax.Array, key: jax.Array) -> Any:
    def loss(variables: Any) -> jax.Array:
        return jnp.square(
            state.apply_fn(variables, x, rngs={"stochastic_rounding": key}).astype(jnp.float32) - 1
        ).mean()

    grads = jax.grad(loss)(state.params)
    news = dl.update_states(state.params, grads)
    if dl.STATES not in state.params:
        return state.apply_gradients(grads=grads)
    return state.apply_gradients(grads={**grads, dl.STATES: news[dl.STATES]})


def linen_loop(name: str, folder: Path, resume: bool = False) -> Any:
    model = Mlp(RECIPES[name])
    variables = model.init(jax.random.key(resume), batch(0))
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))
    if resume:
        state = restore(folder, state)
    for i in range(2 * resume, 4):
        state = linen_step(state, batch(i), jax.random.key(i))
        if i == 1 and not resume:
            save(folder, 2, state)
    return state


# --- equinox ---------------------------------------------------------------------------------------------------------


OPTIMIZER = optax.adam(1e-2)


@eqx.filter_jit
def equinox_step(model: Any, opt_state: Any, x: jax.Array, key: jax.Array) -> Any:
    grads = eqx.filter_grad(lambda m: jnp.square(m(x, key=key).astype(jnp.float32) - 1).mean())(model)
    updates, opt_state = OPTIMIZER.update(dx.parameters(grads), opt_state, dx.parameters(model))
    return dx.update_states(eqx.apply_updates(model, updates), grads), opt_state


def equinox_loop(name: str, folder: Path, resume: bool = False) -> Any:
    model = dx.MLP(32, 32, width_size=64, depth=1, recipe=RECIPES[name], dtype=jnp.bfloat16, key=jax.random.key(resume))
    opt_state = OPTIMIZER.init(dx.parameters(model))
    if resume:
        arrays, static = eqx.partition((model, opt_state), eqx.is_array)
        model, opt_state = eqx.combine(restore(folder, arrays), static)
    for i in range(2 * resume, 4):
        model, opt_state = equinox_step(model, opt_state, batch(i), jax.random.key(i))
        if i == 1 and not resume:
            save(folder, 2, eqx.filter((model, opt_state), eqx.is_array))
    return eqx.filter((model, opt_state), eqx.is_array)


LOOPS = {"nnx": nnx_loop, "linen": linen_loop, "equinox": equinox_loop}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loop", LOOPS)
def test_resume(tmp_path, loop, name):
    """Other initial values of the resumed run are replaced; each run has states of delayed scaling where it should."""
    whole = LOOPS[loop](name, tmp_path)
    same(LOOPS[loop](name, tmp_path, resume=True), whole)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(whole)]
    assert any("amax_history" in path for path in paths) == (name == "fp8-delayed"), paths
