"""Check numbers of a state, which detect that states were averaged, or changed by an optimizer.

    check = [p0, p1, p2, p3, p0^2, p1^2, p2^2, p3^2]      float32, integers

The parts p are the bytes of a word made of the amaxes, each plus 2. Invariants:

- Different amaxes have different parts, and an average of different numbers' squares is larger than the square of their
  average: an average of states with different amaxes has invalid check numbers. An average of equal states is valid.
- Sums of up to 254 check numbers are exact in float32, so that rounding hides no difference.
- A square grows with its root: an elementwise maximum of states, as by `jax.lax.pmax` or over a stack, stays valid.
- 0 and 1, which are their own squares, are not used as parts: gradients that were zeroed, clipped to 1 or replaced by
  their sign are invalid.

Sums and multiples of states are detected by their `count` instead.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array
State = TypeVar("State", bound=Any)  # state.ScaleState

_LEAST = 2.0
_ODD = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)  # a product with an odd number loses no bit of the other
_SHIFTS = np.arange(0, 32, 8, dtype=np.uint32)


@functools.partial(jax.jit, inline=True)
def check_of(history: Array) -> Array:
    """Returns the check numbers [..., 8] of a history [..., L], from its pending and its newest amax."""
    bits = jax.lax.bitcast_convert_type(history, jnp.uint32)
    word = bits[..., :1] * _ODD[0]
    if history.shape[-1] > 1:
        word = word + bits[..., -1:] * _ODD[1]
    shifts = jnp.asarray(_SHIFTS).reshape((1,) * (word.ndim - 1) + (4,))
    shape = (*word.shape[:-1], 4)
    parts = jnp.broadcast_to(word, shape) >> jnp.broadcast_to(shifts, shape) & np.uint32(0xFF)
    parts = parts.astype(jnp.float32) + np.float32(_LEAST)
    return jnp.concatenate([parts, parts * parts], axis=-1)


@functools.partial(jax.jit, inline=True)
def is_valid(check: Array) -> Array:
    """Returns whether numbers [..., 8] are the check numbers of any history, bool [..., 1]."""
    parts, squares = check[..., :4], check[..., 4:]
    whole = (parts == jnp.floor(parts)) & (parts >= _LEAST) & (parts <= _LEAST + 255)
    return (whole & (squares == parts * parts)).all(-1, keepdims=True)


@functools.partial(jax.jit, inline=True)
def following(check: Array, history: Array) -> Array:
    """Returns the check numbers of a state's next history; invalid numbers stay invalid."""
    return jnp.where(jnp.broadcast_to(is_valid(check), check.shape), check_of(history), check)


# --- invalid states: marked or refused ---


@functools.partial(jax.jit, inline=True)
def is_sound(state: Any) -> Array:
    """Returns whether a state is valid, neither a sum or average of several nor marked: bool [1]."""
    return (state.count == 1) & is_valid(state.check) & ~jnp.isnan(state.scale)


@functools.partial(jax.jit, inline=True)
def marked(state: State, sound: Array) -> State:
    """Returns the state, with a scale of NaN if it is not sound."""
    return dataclasses.replace(state, scale=jnp.where(sound, state.scale, jnp.nan))


_WAYS = (
    "; amaxes combine by max: hand on what one use returned to the next, differentiate through share_states, or merge "
    "microbatches and devices by merge_states or amax_group"
)


def checked(op: str, state: State, unused: bool = False) -> State:
    """Returns a valid state with a count of 1. For an invalid one it raises ValueError, or under jit sets the scale to
    NaN, which makes all results NaN. `unused`: also accept a gradient that nothing contributed to."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
        sound = is_sound(state)
        sound = sound | (state.count == 0) if unused else sound
        return dataclasses.replace(marked(state, sound), count=jnp.ones_like(state.count))
    with jax.ensure_compile_time_eval():  # states of known values may be constants of a function that is being traced
        sound = is_sound(state)
    counts = np.asarray(state.count)
    if (np.asarray(sound) | (unused & (counts == 0))).all():
        return state
    if (counts == 0).any() and not unused:
        raise ValueError(
            f"{op}: a state is a gradient that nothing contributed to; overwrite_states keeps the old one there"
        )
    if (counts > 1).any():
        raise ValueError(f"{op}: a state was made by adding {counts.max():g} states up{_WAYS}")
    if not np.isin(counts, (0, 1)).all():
        raise ValueError(f"{op}: a state was scaled, its count is {counts.min():g} and must be 1{_WAYS}")
    if np.isnan(np.asarray(state.scale)).any():
        raise ValueError(
            f"{op}: a scale is NaN, which is how a state is marked under jit that was made by adding states up, "
            f"averaging or scaling them{_WAYS}"
        )
    raise ValueError(f"{op}: a state was made by averaging states, rounding one or an optimizer's step{_WAYS}")


def marked_by(history: Array, scale: Array) -> Array:
    """Returns the scale, or NaN if the pending amax is NaN, which marks an invalid reference (it has no count)."""
    return jnp.where(jnp.isnan(history[:1]), jnp.nan, scale)
