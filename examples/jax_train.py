"""The same training step in JAX: `python examples/jax_train.py`."""

import functools

import jax
import jax.numpy as jnp
import optax

import diptych.jax as dj
from diptych.common import Float8BlockScaling, Recipe


def init(key: jax.Array) -> dict[str, jax.Array]:
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (512, 256)) / 16, "down": jax.random.normal(b, (256, 512)) / 23}


def loss_fn(params: dict[str, jax.Array], x: jax.Array, target: jax.Array, recipe: Recipe) -> jax.Array:
    hidden = jax.nn.gelu(dj.dense(x, params["up"], recipe=recipe))
    return jnp.mean((dj.dense(hidden, params["down"], recipe=recipe) - target) ** 2)


optimizer = optax.adamw(1e-3)


@functools.partial(jax.jit, static_argnames=("recipe",))
def train_step(params, state, x, target, *, recipe: Recipe):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, target, recipe)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = init(jax.random.key(0))
state = optimizer.init(params)
x = jax.random.normal(jax.random.key(1), (128, 256))
for step in range(20):
    params, state, loss = train_step(params, state, x, jnp.roll(x, 1, axis=1), recipe=Float8BlockScaling())
    if step % 5 == 0:
        print(f"step {step}: loss {loss:.4f}")
