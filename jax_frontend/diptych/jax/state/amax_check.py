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

_LEAST = np.float32(2)
_ODD = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)  # a product with an odd number loses no bit of the other
_SHIFTS = np.arange(0, 32, 8, dtype=np.uint32)

# A model has hundreds of states, and XLA's time to compile a step grows with the number of operations, so these
# functions are made of few. A constant of full shape needs no broadcast, and `lax`, unlike `jnp.where` and `jnp.all`,
# adds no call of a function.


def _over(x: Array, values: Any) -> Any:
    """Returns one value, or one for each entry of x's last axis, as a constant [1, ..., n] for an x [..., n]."""
    return np.broadcast_to(values, (1,) * (x.ndim - 1) + x.shape[-1:])


@functools.partial(jax.jit, inline=True)
def check_of(history: Array) -> Array:
    """Returns the check numbers [..., 8] of a history [..., L], from its pending and its newest amax."""
    axis, last = history.ndim - 1, history.shape[-1] - 1
    ends = [jax.lax.slice_in_dim(history, i, i + 1, axis=axis) for i in sorted({0, last})]
    bits = [jax.lax.bitcast_convert_type(end, jnp.uint32) for end in ends]
    word = functools.reduce(jnp.add, [b * _over(b, odd) for b, odd in zip(bits, _ODD, strict=False)])
    word = jnp.broadcast_to(word, (*word.shape[:-1], 4))
    parts = (word >> _over(word, _SHIFTS) & _over(word, np.uint32(0xFF))).astype(jnp.float32)
    parts = parts + _over(parts, _LEAST)
    return jax.lax.concatenate([parts, parts * parts], parts.ndim - 1)


def _equal(check: Array) -> Array:
    """Returns which of the numbers [..., 8] equal check numbers near them, bool [..., 8]: all if they are valid."""
    axis = check.ndim - 1
    parts = jax.lax.floor(jax.lax.slice_in_dim(check, 0, 4, axis=axis))
    parts = jnp.minimum(jnp.maximum(parts, _over(parts, _LEAST)), _over(parts, _LEAST + 255))
    return jax.lax.concatenate([parts, parts * parts], axis) == check


@functools.partial(jax.jit, inline=True)
def is_valid(check: Array) -> Array:
    """Returns whether numbers [..., 8] are the check numbers of any history, bool [..., 1]."""
    axis = check.ndim - 1
    return jax.lax.expand_dims(jax.lax.reduce_and(_equal(check), (axis,)), (axis,))


@functools.partial(jax.jit, inline=True)
def following(check: Array, history: Array) -> Array:
    """Returns the check numbers of a state's next history, with NaN where those before were invalid."""
    nan = np.full(check.shape, np.nan, check.dtype)
    return jax.lax.select(_equal(check), check_of(history), nan)


@functools.partial(jax.jit, inline=True)
def where(condition: Array, x: Array, y: Array) -> Array:
    """Returns `jnp.where(condition, x, y)` of an x of y's shape."""
    return jax.lax.select(jnp.broadcast_to(condition, x.shape), x, y)


# --- invalid states: marked or refused ---


@functools.partial(jax.jit, inline=True)
def is_sound(state: Any) -> Array:
    """Returns whether a state is neither a sum nor an average of several: bool [1]. Its scale may be a mark, NaN."""
    return (state.count == _over(state.count, np.float32(1))) & is_valid(state.check)


@functools.partial(jax.jit, inline=True)
def marked(state: State, sound: Array) -> State:
    """Returns the state, with a scale of NaN if it is not sound."""
    nan = np.full(state.scale.shape, np.nan, state.scale.dtype)
    return dataclasses.replace(state, scale=where(sound, state.scale, nan))


_WAYS = (
    "; amaxes combine by max: hand on what one use returned to the next, differentiate through share_states, or merge "
    "microbatches and devices by merge_states or amax_group"
)


def checked(op: str, state: State, unused: bool = False) -> State:
    """Returns a valid state with a count of 1. For an invalid one it raises ValueError, or under jit sets the scale to
    NaN, which makes all results NaN. `unused`: also accept a gradient that nothing contributed to."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
        if state.checked:
            return state
        sound = is_sound(state)
        sound = sound | (state.count == 0) if unused else sound
        state = dataclasses.replace(marked(state, sound), count=jnp.ones_like(state.count))
        object.__setattr__(state, "checked", True)
        return state
    with jax.ensure_compile_time_eval():  # states of known values may be constants of a function that is being traced
        sound = is_sound(state)
    counts = np.asarray(state.count)
    sound = np.asarray(sound) & ~np.isnan(np.asarray(state.scale))
    if (sound | (unused & (counts == 0))).all():
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
