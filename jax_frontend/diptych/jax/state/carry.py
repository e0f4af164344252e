"""How delayed scaling's amaxes travel: from where they arise, in forward and backward, to the next step's state.

Three ways, which may be mixed. In all of them several uses of a state combine by max.

1. Returned: `y, state = dense(..., state=state, return_state=True)`, and the returned state goes to the next use,
   through a scan's carry for instance. It holds forward amaxes. The gradient with respect to the first state,
   `jax.grad(..., argnums=...)`, is the complete new state, with the amaxes of gradients: uses hand it back along the
   same chain.
2. Overwrite with gradient: the gradient with respect to a state *is* the new state, for flax's collection
   `_overwrite_with_gradient` and for `overwrite_states`. JAX adds gradients of several uses up; a state that is used
   more than once goes through `share_states` first. What was added up all the same, or averaged, is refused by
   `update_state`, or under jit marked by a scale of NaN that stays.
3. References: `refs = state_refs(states)` are mutated by `dense`, forward and backward, under jit, scan and remat.

`value_and_grad_with_state` is 2 made ready. JAX cannot differentiate references in a branch or a shard_map from outside
of it; `lend_states` makes arrays of them for one use there. Under `vmap` a state that is not mapped is used once for
each example: `share_states` and references raise there; map the state, and take
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
from diptych.jax.state.amax_check import check_of, checked, following, is_valid, marked_by
from diptych.jax.state.scales import ScaleState, is_state, larger, map_states, overwrite_states, read_ref

Array = jax.Array
Tree = TypeVar("Tree")


# --- references ---

# JAX differentiates what it has traced of these by rules that know no references, and fails with errors of its own
# (jax 0.10.2): where the rules are, what their functions are called, and what users call it.
_RULES = (
    ("jax._src.lax.control_flow.conditionals", "_cond_", "a branch of jax.lax.cond or switch"),
    ("jax._src.lax.control_flow.loops", "_while_", "jax.lax.while_loop, which has no reverse mode"),
    ("jax._src.shard_map", "_shard_map_", "shard_map"),
)
_RULE_KINDS = ("linearize", "jvp", "partial_eval", "transpose")


def refuse_differentiated(what: str, instead: str) -> None:
    """Called by the forward rule of something that holds a reference. **Raises** UnsupportedError where a branch, a
    while loop or a shard_map around it is being differentiated."""
    frame = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        for where, prefix, name in _RULES:
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
    """The states that references hold now, as arrays."""
    return map_states(lambda s: read_ref(s) if has_ref(s) else s, refs)


def has_ref(state: ScaleState) -> bool:
    return isinstance(state.amax_history, jax.Ref)


def _record(ref: Any, history: Array) -> None:
    ref[:1] = larger(ref[:1], history[:1])


# A write that stands bare in a scan's body breaks the scan's transpose (jax 0.10.2); inside of a custom_vjp it works.
@jax.custom_vjp
def _commit(ref: Any, history: Array) -> None:
    _record(ref, history)


_commit.defvjp(lambda ref, history: (_commit(ref, history), None), lambda _, grad: (None, None))


# A reference cannot enter dense's own custom_vjp, whose symbolic zeros do not go together with references (jax 0.10.2).
# It is read here, before, and the gradient of what was read is the new state. The operands' presence alone matters: it
# makes the result one that is differentiated where they are.
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
    # One use alone hands back a gradient that is a state. A sum or an average of several is marked, and none is zero.
    sound = (uses == 0) | ((uses == 1) & is_valid(check))
    _record(history, jnp.where(sound, amaxes[:1], jnp.nan))
    return None, None if count is None else jnp.zeros_like(count), None


_view.defvjp(_view_forward, _view_backward)


def viewed(states: dict[str, ScaleState], operands: Any) -> dict[str, ScaleState]:
    """States as arrays: those of references are read, and record what their gradients bring."""

    def view(state: ScaleState) -> ScaleState:
        if not has_ref(state):
            return state
        history, count, check = _view(state.amax_history, state.count, operands)
        scale = state.scale[...] if isinstance(state.scale, jax.Ref) else state.scale
        return ScaleState(state.quantizer, scale, history, count, check)

    return {name: view(state) for name, state in states.items()}


def lend_states(states: Tree, like: Any = None) -> Tree:
    """States of references as arrays for **one** use each, such as inside of a branch or a shard_map.

    JAX cannot differentiate references in `jax.lax.cond`, `switch` or `shard_map`. Call this in front of them and use
    what it returns inside; amaxes come back as the gradient of the arrays, and the reference takes them in:

        lent = lend_states(states)
        y = jax.lax.cond(p, lambda x: dense(x, kernel, recipe=recipe, state=lent), lambda x: x, x)

    **Arguments:** `states`: any pytree with `ScaleState`s; those of arrays and other leaves stay. `like`: for the
    references of `state_refs`, any arrays that are differentiated, such as the parameters.

    An array that is used more than once brings a sum of amaxes back, which marks the state by a scale of NaN; so does a
    shard_map with `check_vma=False`, which adds up what its devices bring.
    """
    return map_states(lambda s: viewed({"": s}, like)[""], states)


def returned(states: dict[str, ScaleState], news: dict[str, ScaleState]) -> dict[str, ScaleState]:
    """The states after a call: references record what it returned, and stay references."""
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
    # All uses have recorded: they come after this in forward, and before it in backward.
    history = saved.amax_history[...]
    scale, check = marked_by(history, saved.scale), following(saved.check, history)
    return ScaleState(saved.quantizer, scale, history, saved.count, check), None


_link.defvjp(_link_forward, _link_backward)


def share_states(states: Tree) -> Tree:
    """States that may be used any number of times, and whose gradients combine by max.

    Call it inside of what is differentiated and outside of `jax.jit`, `jax.checkpoint` and loops in there. A state that
    a scan slices, one for each layer, needs none of this: each slice is used once. For `jax.lax.cond`, `switch` and
    `shard_map` in there, take arrays by `lend_states`.

    **Arguments:** `states`: any pytree with `ScaleState`s; other leaves stay.
    """

    def share(state: ScaleState) -> ScaleState:
        if has_ref(state):
            return state
        history = jax.new_ref(jax.lax.stop_gradient(state.amax_history))
        scale = jax.lax.stop_gradient(state.scale)  # the link alone hands the state back
        return ScaleState(state.quantizer, scale, history, _link(state, history))

    return map_states(share, states)


def value_and_grad_with_state(f: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """`jax.value_and_grad` of `f(params, states, ...)` with respect to params, and the states after it.

    **Returns:** a function of the same arguments: (value, gradients, new states); scales are the old ones, histories
    hold the amaxes of forward and backward. `update_state` makes those of the next step. Microbatches: pass the states
    on, or combine them by `merge_states`. `has_aux`: value is (value, aux), as in JAX.

    **Raises:** NotImplementedError where `f` uses states in a branch or a shard_map without `lend_states`.
    """

    def run(params: Any, states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        def shared(params: Any, states: Any) -> Any:
            return f(params, share_states(states), *args, **kwargs)

        value, (grads, news) = jax.value_and_grad(shared, (0, 1), has_aux=has_aux)(params, states)
        return value, grads, overwrite_states(states, news)

    return run


# --- beside an optimizer ---


def partition_states(tree: Tree) -> tuple[Tree, Tree]:
    """A tree of parameters and states, or of their gradients, as two: one for the optimizer, one of states.

    Each has None in place of the other's leaves. With optax:

        params, states = partition_states(tree)
        grads, news = partition_states(jax.grad(loss)(tree))
        updates, opt = optimizer.update(grads, opt, params)
        tree = combine_states(optax.apply_updates(params, updates), update_state(overwrite_states(states, news)))
    """
    rest = jax.tree.map(lambda x: None if is_state(x) else x, tree, is_leaf=is_state)
    return rest, jax.tree.map(lambda x: x if is_state(x) else None, tree, is_leaf=is_state)


def combine_states(rest: Tree, states: Tree) -> Tree:
    """The one tree that `partition_states` took apart. **Raises** ValueError where both have a leaf."""

    def pick(a: Any, b: Any) -> Any:
        if a is not None and b is not None:
            raise ValueError(f"combine_states: a leaf must be in one of both trees, got {a!r} and {b!r}")
        return b if a is None else a

    return jax.tree.map(pick, rest, states, is_leaf=lambda x: x is None or is_state(x))
