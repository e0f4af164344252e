"""`activate`: the core's activations in high precision, differentiable."""

from __future__ import annotations

import functools

import jax

from diptych.jax.primitives.activation import activation, activation_grad

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def activate(which: str, gated: bool, x: Array) -> Array:
    """An activation in x's dtype; its gradient is that of `activation_grad`."""
    return activation(x, which, gated)


activate.defvjp(
    lambda which, gated, x: (activation(x, which, gated), x),
    lambda which, gated, x, dy: (activation_grad(dy, x, which, gated),),
)
