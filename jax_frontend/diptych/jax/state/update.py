"""The update of delayed scales at the end of a step."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.recipes import Recipe
from diptych.jax.functional import scale_update as scale_update_verbs
from diptych.jax.functional.amax_group import max_over
from diptych.jax.state.amax_check import checked, where
from diptych.jax.state.scales import ScaleState, fp8_max, map_states, read_ref, update_axes, varying

Array = jax.Array
Tree = TypeVar("Tree")


def update_state(states: Tree, recipe: Recipe | None = None, axis_name: Any = None) -> Tree:
    """Returns the states for the next step: scales from the recorded amaxes, histories rolled (NUMERICS 2, "Delayed").

    Call it once per step, before the forward or after the backward pass. Margin, length and algorithm are those of each
    state's quantizer.

    **Arguments:** `states`: any pytree with `ScaleState`s; other leaves are returned unchanged. `recipe`: its
    `amax_group` names the mesh axes over which pending amaxes are reduced first (inside shard_map); `axis_name` does so
    too.

    **Returns:** the new states. References are changed in place and returned.

    **Raises:** ValueError for a state that was summed, averaged or scaled, or a gradient that nothing contributed to;
    under jit its scale becomes NaN and stays NaN in later updates. TypeError or ValueError if `amax_compute_algo`
    returns anything but float32 [1].
    """
    require_recipe("update_state", recipe)
    axes = update_axes(recipe, axis_name)

    def update(state: ScaleState) -> ScaleState:
        if state.count is None:
            fresh = _updated(checked("update_state", read_ref(state)), axes)
            state.scale[...], state.amax_history[...] = fresh.scale, fresh.amax_history
            return state
        return _updated(checked("update_state", state), axes)

    return map_states(update, states)


def _updated(state: ScaleState, axes: tuple[Any, ...]) -> ScaleState:
    history, scale, quantizer = state.amax_history, state.scale, state.quantizer
    if len(history.shape) != 1:
        raise ShapeError(f"update_state: {list(history.shape)} is a stack of states; call it under jax.vmap")
    reduced, algo, chosen = None, quantizer.amax_compute_algo, None
    if axes:
        over = tuple(sorted(varying(history) & set(axes), key=str))
        if over:  # earlier entries are equal on all devices; the maximum makes their type say so
            history, scale = max_over(history, over), max_over(scale, over)
        reduced = history[:1] if over else max_over(history[:1], axes)
    if callable(algo):
        last = history[:1] if reduced is None else jnp.where(reduced != 0, reduced, history[:1])
        chosen = _chosen(algo, history, last)
    history, fresh = scale_update_verbs.scale_update(
        history,
        scale,
        reduced=reduced,
        amax=chosen,
        fp8_max=fp8_max(quantizer),
        margin=quantizer.margin,
        most_recent=algo == "most_recent",
    )
    # The new scale follows from the amaxes alone, so the mark of an invalid state, a NaN, is kept explicitly.
    scale = where(jnp.isnan(scale), scale, fresh)
    return ScaleState(quantizer, scale, history, jnp.ones_like(scale))


def _chosen(algo: Any, history: Array, last: Array) -> Array:
    amax = algo(history[None], last)
    if not isinstance(amax, jax.Array):
        raise ArgumentError(
            f"amax_compute_algo returned {type(amax).__name__}; it must return a JAX array, the amax of each of the 1 "
            "tensors whose histories it was given"
        )
    if amax.dtype != jnp.float32 or amax.shape != (1,):
        raise ValueError(f"amax_compute_algo must return float32[1], got {amax.dtype}{list(amax.shape)}")
    return amax
