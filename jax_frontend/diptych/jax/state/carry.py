"""Transports of delayed scaling's amaxes from forward and backward, where they are computed, to the next step's state.

There are three transports, which may be mixed. In all of them several uses of a state combine by max.

1. Returned: `y, state = dense(..., state=state, return_state=True)`; the returned state goes to the next use, for
   example through a scan's carry. It holds forward amaxes. The gradient with respect to the first state,
   `jax.grad(..., argnums=...)`, is the complete new state, with the amaxes of gradients, which pass back through the
   same chain of uses.
2. Overwrite with gradient: the gradient with respect to a state *is* the new state, for flax's collection
   `_overwrite_with_gradient` and for `overwrite_states`. JAX sums the gradients of several uses, so a state that is
   used more than once must go through `share_states` first. `update_state` refuses a state that was summed or averaged,
   or under jit marks it by a scale of NaN that stays.
3. References: `refs = state_refs(states)` are mutated by `dense`, forward and backward, under jit, scan and remat.

`value_and_grad_with_state` implements 2. JAX cannot differentiate references in a branch or a shard_map from outside of
it; `lend_states` makes arrays of them for one use there. Under `vmap` a state that is not mapped is used once for each
example, and `share_states` and references raise; map the state, and combine the results by
`jax.tree.map(lambda x: x.max(0), states)`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from diptych.common.errors import UnsupportedError
from diptych.jax.private.lowering import REFERENCELESS
from diptych.jax.state.amax_check import check_of, checked, following, is_valid, marked_by
from diptych.jax.state.scales import ScaleState, is_state, larger, map_states, overwrite_states, read_ref

Array = jax.Array
Tree = TypeVar("Tree")


# --- references ---

_RULE_KINDS = ("linearize", "jvp", "partial_eval", "transpose")


def refuse_differentiated(what: str, instead: str) -> None:
    """Refuses to differentiate a call that holds a reference; its forward rule calls this function.

    **Raises** UnsupportedError if a branch, a while loop or a shard_map around the call is being differentiated.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        for where, prefix, name in REFERENCELESS:
            if module == where and function.startswith(prefix) and any(k in function for k in _RULE_KINDS):
                raise UnsupportedError(f"{what} cannot be differentiated from outside of {name}: {instead}")
        frame = frame.f_back  # type: ignore[assignment]


def _refuse_states() -> None:
    refuse_differentiated(
        "references to states (state_refs, share_states, value_and_grad_with_state)",
        "take arrays from them in front of it, by lend_states, and use each once inside; hand states on by "
        "return_state; or call jax.grad inside of it",
    )


def state_refs(states: Tree) -> Tree:
    """States in mutable references (`jax.new_ref`), which `dense` and `update_state` change in place."""

    def ref(state: ScaleState) -> ScaleState:
        state = checked("state_refs", state)
        return ScaleState(state.quantizer, jax.new_ref(state.scale), jax.new_ref(state.amax_history))

    return map_states(ref, states)


def read_states(refs: Tree) -> Tree:
    """Returns the current values of states in references, as arrays."""
    return map_states(lambda s: read_ref(s) if has_ref(s) else s, refs)


def has_ref(state: ScaleState) -> bool:
    return isinstance(state.amax_history, jax.Ref)


def _record(ref: Any, history: Array) -> None:
    ref[:1] = larger(ref[:1], history[:1])


# A write directly in a scan's body breaks the scan's transpose (jax 0.10.2); inside of a custom_vjp it works.
@jax.custom_vjp
def _commit(ref: Any, history: Array) -> None:
    _record(ref, history)


_commit.defvjp(lambda ref, history: (_commit(ref, history), None), lambda _, grad: (None, None))


# A reference cannot enter dense's own custom_vjp, since JAX (0.10.2) does not support it with symbolic zeros. So it is
# read here first, and the gradient of the array that was read is the new state. The operands are arguments only so that
# the result is differentiated whenever they are.
@jax.custom_vjp
def _view(history: Any, count: Array | None, operands: Any) -> tuple[Array, Array, Array]:
    read = history[...]
    return read, jnp.ones_like(read[:1]), check_of(read)


def _view_forward(history: Any, count: Array | None, operands: Any) -> Any:
    _refuse_states()
    return _view(history, count, operands), (history, count)


def _view_backward(saved: Any, grads: Any) -> Any:
    history, count = saved
    amaxes, uses, check = grads
    # Only a single use returns a gradient that is a state. A sum or average of several is marked; no use gives zeros.
    sound = (uses == 0) | ((uses == 1) & is_valid(check))
    _record(history, jnp.where(sound, amaxes[:1], jnp.nan))
    return None, None if count is None else jnp.zeros_like(count), None


_view.defvjp(_view_forward, _view_backward)


def viewed(states: dict[str, ScaleState], operands: Any) -> dict[str, ScaleState]:
    """Returns states as arrays: references are read, and record the amaxes that come back as gradients."""

    def view(state: ScaleState) -> ScaleState:
        if not has_ref(state):
            return state
        history, count, check = _view(state.amax_history, state.count, operands)
        scale = state.scale[...] if isinstance(state.scale, jax.Ref) else state.scale
        return ScaleState(state.quantizer, scale, history, count, check)

    return {name: view(state) for name, state in states.items()}


def lend_states(states: Tree, like: Any = None) -> Tree:
    """States of references as arrays for **one** use each, such as inside of a branch or a shard_map.

    JAX cannot differentiate references in `jax.lax.cond`, `switch` or `shard_map`. Call this function before them and
    use its results inside; amaxes come back as the gradient of these arrays and are recorded in the reference:

        lent = lend_states(states)
        y = jax.lax.cond(p, lambda x: dense(x, kernel, recipe=recipe, state=lent), lambda x: x, x)

    **Arguments:** `states`: any pytree with `ScaleState`s; states of arrays and other leaves are returned unchanged.
    `like`: for the references of `state_refs`, any arrays that are differentiated, such as the parameters.

    An array that is used more than once returns a sum of amaxes, which marks the state by a scale of NaN; so does a
    shard_map with `check_vma=False`, which sums over its devices.
    """
    return map_states(lambda s: viewed({"": s}, like)[""], states)


def returned(states: dict[str, ScaleState], news: dict[str, ScaleState]) -> dict[str, ScaleState]:
    """Returns the states after a call; references record the returned amaxes and stay references."""
    for name, state in states.items():
        if has_ref(state):
            _commit(state.amax_history, news[name].amax_history)
    return {name: state if has_ref(state) else news[name] for name, state in states.items()}


# --- overwrite with gradient ---


@jax.custom_vjp
def _link(state: ScaleState, history: Any) -> Array:
    return jnp.ones_like(state.count)


def _link_forward(state: ScaleState, history: Any) -> Any:
    _refuse_states()
    return _link(state, history), dataclasses.replace(state, amax_history=history)


def _link_backward(saved: ScaleState, _: Array) -> Any:
    # All uses have recorded by now: they come after this point in forward, and so before it in backward.
    history = saved.amax_history[...]
    scale, check = marked_by(history, saved.scale), following(saved.check, history)
    return ScaleState(saved.quantizer, scale, history, saved.count, check), None


_link.defvjp(_link_forward, _link_backward)


def share_states(states: Tree) -> Tree:
    """Returns states that may be used any number of times, and whose gradients combine by max.

    Call it inside the differentiated function, but outside of `jax.jit`, `jax.checkpoint` and loops in it. A state that
    a scan slices, one for each layer, does not need it: each slice is used once. For `jax.lax.cond`, `switch` and
    `shard_map`, pass the results through `lend_states`.

    **Arguments:** `states`: any pytree with `ScaleState`s; other leaves are returned unchanged.
    """

    def share(state: ScaleState) -> ScaleState:
        if has_ref(state):
            return state
        history = jax.new_ref(jax.lax.stop_gradient(state.amax_history))
        scale = jax.lax.stop_gradient(state.scale)  # only _link returns the state's gradient
        return ScaleState(state.quantizer, scale, history, _link(state, history))

    return map_states(share, states)


def value_and_grad_with_state(f: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """`jax.value_and_grad` of `f(params, states, ...)` with respect to params, and the states after it.

    **Returns:** a function of the same arguments that returns (value, gradients, new states). The new states have the
    old scales, and histories with the amaxes of forward and backward; `update_state` makes the next step's states.
    Microbatches: pass the states on, or combine them by `merge_states`. `has_aux`: value is (value, aux), as in JAX.

    **Raises:** NotImplementedError if `f` uses states in a branch or a shard_map without `lend_states`; JAX's own
    AssertionError for a shard_map that is given them and runs outside of `jax.jit`.
    """

    def run(params: Any, states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        def shared(params: Any, states: Any) -> Any:
            return f(params, share_states(states), *args, **kwargs)

        value, (grads, news) = jax.value_and_grad(shared, (0, 1), has_aux=has_aux)(params, states)
        return value, grads, overwrite_states(states, news)

    return run


# --- separating states from an optimizer's parameters ---


def partition_states(tree: Tree) -> tuple[Tree, Tree]:
    """Splits a tree of parameters and states, or of their gradients, into one for the optimizer and one of states.

    Each has None in place of the other's leaves. With optax:

        params, states = partition_states(tree)
        grads, news = partition_states(jax.grad(loss)(tree))
        updates, opt = optimizer.update(grads, opt, params)
        tree = combine_states(optax.apply_updates(params, updates), update_state(overwrite_states(states, news)))
    """
    rest = jax.tree.map(lambda x: None if is_state(x) else x, tree, is_leaf=is_state)
    return rest, jax.tree.map(lambda x: x if is_state(x) else None, tree, is_leaf=is_state)


def combine_states(rest: Tree, states: Tree) -> Tree:
    """Joins the two trees of `partition_states`. **Raises** ValueError if both have a leaf at one place."""

    def pick(a: Any, b: Any) -> Any:
        if a is not None and b is not None:
            raise ValueError(f"combine_states: a leaf must be in one of both trees, got {a!r} and {b!r}")
        return b if a is None else a

    return jax.tree.map(pick, rest, states, is_leaf=lambda x: x is None or is_state(x))
