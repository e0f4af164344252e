"""`ScaleState`, the state of delayed scaling, which training steps pass on as a pytree.

    init_state      the states of one module under a recipe, {state name: ScaleState}
    dense           reads the scales, and puts max(history[0], amax) into the histories that it returns
    update_state    once a step: the next scales from the amaxes so far (NUMERICS 2, "Delayed")

`carry.py` defines how amaxes reach the next step's state. Invariants:

- Amaxes of several uses combine by max, but JAX combines gradients by sum. Each state has a `count` of 1, which detects
  sums and gradients that nothing contributed to; its `check` detects averages (`amax_check.py`). Such states are
  refused. Under jit, where values are unknown, the scale becomes NaN instead, and updates keep a NaN.
- A state serves the quantizer that it was made for. `switch_state` converts states from one recipe to another.
- Amaxes are compared as integers: they are never negative, and XLA would flush subnormal floats.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from diptych.common.errors import ArgumentError, CheckpointError, DTypeError, RecipeSwitchWarning, ShapeError
from diptych.common.layers.plan import LinearPlan, linear_plan
from diptych.common.quantizers import Float8Quantizer
from diptych.common.recipes import Recipe
from diptych.jax.functional.amax_group import max_over
from diptych.jax.primitives.checks import dtype_of
from diptych.jax.state.amax_check import check_of, checked, following, is_valid, marked_by, where

Array = jax.Array
Tree = TypeVar("Tree")

BUFFERS = ("scale", "amax_history", "fp8_max")  # of one state in a state dict


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("scale", "amax_history", "count", "check"),
    meta_fields=("quantizer",),
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaleState:
    """The delayed-scaling state of one tensor.

    `scale`: float32 [1], the next quantize's factor. `amax_history`: float32 [L], the pending amax and then earlier
    ones, the newest last. `count`: float32 [1], 1; in a gradient, the number of states that were summed. `check`:
    float32 [8], computed from the amaxes if not given; an average of states makes it invalid. `count` and `check` are
    None in states of references (`state_refs`). `quantizer`: the one that the state serves, with both copies.
    `checked`: this object was made by `amax_check.checked` under jit, which need not check it again; it is no part of
    the pytree, so that states made of its arrays are checked.
    """

    quantizer: Float8Quantizer
    scale: Any
    amax_history: Any
    count: Any = None
    check: Any = None
    checked: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        arrays = (jax.Array, np.ndarray)
        if self.check is None and isinstance(self.count, arrays) and isinstance(self.amax_history, arrays):
            object.__setattr__(self, "check", check_of(self.amax_history))

    def __repr__(self) -> str:
        return f"ScaleState({self.quantizer.fp8_dtype}, history of {self.quantizer.amax_history_len})"


States = Mapping[str, ScaleState]  # of one module, by the names of `LinearPlan.states`


def is_state(x: Any) -> bool:
    return isinstance(x, ScaleState)


def map_states(f: Any, tree: Tree, *rest: Any) -> Tree:
    """`jax.tree.map` over the ScaleStates of trees; other leaves are those of the first tree."""
    return jax.tree.map(lambda x, *xs: f(x, *xs) if is_state(x) else x, tree, *rest, is_leaf=is_state)


def fp8_max(quantizer: Float8Quantizer) -> float:
    """Largest finite value of a quantizer's element."""
    return float(jnp.finfo(dtype_of(quantizer.fp8_dtype)).max)


def new_state(quantizer: Float8Quantizer) -> ScaleState:
    """Returns an initial state: scale 1, history 0."""
    one = np.ones(1, np.float32)
    history = jnp.zeros(quantizer.amax_history_len, jnp.float32)
    return ScaleState(quantizer, jnp.asarray(one), history, jnp.asarray(one))


def init_state(recipe: Recipe, *, module: str = "linear", name: str = "") -> dict[str, ScaleState]:
    """Makes the states that one module needs under a recipe.

    **Arguments:** `module`, `name`: the same as in the call of `dense`.

    **Returns:** {state name: ScaleState}; for `DelayedScaling` the names are "input", "weight" and "grad_output". It is
    empty if no tensor of the module has delayed scales.
    """
    return {slot.name: new_state(slot.quantizer) for slot in linear_plan(recipe, module, name).states}


def require_states(op: str, states: Any) -> None:
    """**Raises** ArgumentError unless `states` is a mapping of state names to `ScaleState`."""
    if not isinstance(states, Mapping) or not all(is_state(s) for s in states.values()):
        raise ArgumentError(f"{op}: state must be a mapping of state names to ScaleState, as init_state makes it")


def check_states(op: str, states: Any, plan: LinearPlan, recipe: Recipe) -> dict[str, ScaleState]:
    """Returns a call's states if they are those of its recipe. **Raises** TypeError or ValueError otherwise."""
    if states is None:
        states = {}
    require_states(op, states)
    kind, wanted = type(recipe).__name__, {s.name: s.quantizer for s in plan.states}
    if wanted and not states:
        raise ArgumentError(f"{op}: {kind} scales by earlier steps' amaxes and needs state=, which init_state makes")
    if states.keys() != wanted.keys():
        raise ValueError(
            f"{op}: the state is of {sorted(states)}, {kind} needs {sorted(wanted)}: another recipe's; "
            "switch_state keeps what fits"
        )
    for name, quantizer in wanted.items():
        if states[name].quantizer != quantizer:
            raise ValueError(
                f"{op}: the state of {name!r} was made for {states[name].quantizer}, {kind} asks for {quantizer}; "
                "switch_state keeps what fits"
            )
        dtypes = {str(states[name].scale.dtype), str(states[name].amax_history.dtype)}
        if dtypes != {"float32"}:
            raise DTypeError(f"{op}: the state of {name!r} was cast to {', '.join(sorted(dtypes))}; states are float32")
        if len(states[name].amax_history.shape) != 1:
            raise ShapeError(
                f"{op}: the state of {name!r} is a stack of states, {list(states[name].amax_history.shape)}; map or "
                "scan over it"
            )
    return dict(states)


# --- amaxes ---


def larger(*amaxes: Array) -> Array:
    """Returns the elementwise maximum of amaxes, without flushing subnormals."""
    bits = [jax.lax.bitcast_convert_type(a, jnp.int32) for a in amaxes]
    return jax.lax.bitcast_convert_type(functools.reduce(jnp.maximum, bits), jnp.float32)


def varying(x: Any) -> frozenset[Any]:
    """The manual mesh axes that an array or reference varies over."""
    aval = jax.typeof(x)
    return getattr(aval, "inner_aval", aval).manual_axis_type.varying


def _fitted(amax: Array, axes: frozenset[Any]) -> Array:
    """Returns an amax that varies over `axes` only, as the maximum over other axes, so that a state keeps its type."""
    over = tuple(sorted(varying(amax) - axes, key=str))
    return max_over(amax, over) if over else amax


def record(state: ScaleState, *amaxes: Array) -> ScaleState:
    """The state with history[0] = max(history[0], amaxes)."""
    own = varying(state.amax_history)
    history, check = _recorded(state.amax_history, state.check, [_fitted(a, own) for a in amaxes])
    return dataclasses.replace(state, amax_history=history, check=check)


@functools.partial(jax.jit, inline=True)
def _recorded(history: Array, check: Array, amaxes: list[Array]) -> tuple[Array, Array]:
    pending, earlier = jax.lax.split(history, (1, history.shape[0] - 1))
    history = jax.lax.concatenate([larger(pending, *amaxes), earlier], 0)
    return history, following(check, history)


def gradient(state: ScaleState, amaxes: list[Array], later: ScaleState | None) -> ScaleState:
    """Returns the gradient of a state for one use: the state with all amaxes, including those of later uses.

    `later`: the gradient of the state that the use returned, if any; its arrays may be symbolic zeros. The result is
    invalid if the state or `later` was summed or averaged.
    """
    arrays = [] if later is None else [later.amax_history, later.count, later.check]
    known = [isinstance(a, jax.Array) for a in arrays]
    if later is not None and any(known):
        # What is zero as a whole is no array.
        first, *rest = (a if k else jnp.zeros(a.shape, a.dtype) for a, k in zip(arrays, known, strict=True))
        out = _combined(record(state, *amaxes, first[:1]), *rest)
    else:
        out = record(state, *amaxes)
    return dataclasses.replace(out, count=_depending(out.count, out.amax_history))


@functools.partial(jax.jit, inline=True)
def _depending(count: Array, history: Array) -> Array:
    """Returns the count. Under vmap JAX sums only gradients that differ between examples, so it depends on the amax."""
    pending = jax.lax.slice_in_dim(history, 0, 1)
    return jax.lax.select(pending == pending, count, count)


@functools.partial(jax.jit, inline=True)
def _combined(state: ScaleState, count: Array, check: Array) -> ScaleState:
    """Returns a gradient combined with the count and check of a later one; it is invalid if either is."""
    used = jnp.where(count == 0, state.count, jnp.where(state.count == 1, count, state.count))
    wrong = jnp.broadcast_to((count != 0) & ~is_valid(check), state.check.shape)
    return dataclasses.replace(state, count=used, check=jnp.where(wrong, jnp.nan, state.check))


# --- between steps ---


def update_axes(recipe: Recipe | None, axis_name: Any) -> tuple[Any, ...]:
    named = group_axes(recipe) if recipe is not None else ()
    if axis_name is None:
        return named
    given = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if named and set(named) != set(given):
        raise ValueError(f"update_state: axis_name {given} is not the recipe's amax_group {named}")
    return given


def group_axes(recipe: Recipe) -> tuple[str, ...]:
    """The mesh axes that a recipe's `amax_group` names."""
    return tuple(name for name in recipe.amax_group.replace(" ", "").split(",") if name)


def read_ref(state: ScaleState) -> ScaleState:
    """Returns a state in references as a state of arrays."""
    scale, history = state.scale[...], state.amax_history[...]
    return ScaleState(state.quantizer, marked_by(history, scale), history, jnp.ones_like(scale))


def merge_states(first: Tree, *others: Tree) -> Tree:
    """Combines several trees of states of one step, such as those of microbatches, by the maximum of amaxes.

    **Arguments:** pytrees of one structure with `ScaleState`s; other leaves are those of the first tree. States may be
    gradients; gradients that nothing contributed to are ignored.

    **Raises:** ValueError for different quantizers, states that were summed, averaged or scaled, or scales that differ,
    which belong to different steps. Under jit, where values are unknown, the scale becomes NaN instead.
    """

    def merge(state: ScaleState, *rest: ScaleState) -> ScaleState:
        for other in rest:
            if not is_state(other) or other.quantizer != state.quantizer:
                raise ValueError(f"merge_states: {state!r} and {other!r} are no states of one quantizer")
        parts = (state, *rest)
        used = [p.count != 0 for p in parts]
        parts = tuple(checked("merge_states", p, unused=True) for p in parts)
        scale = functools.reduce(jnp.maximum, [jnp.where(u, p.scale, 0) for p, u in zip(parts, used, strict=True)])
        equal = functools.reduce(jnp.logical_and, [~u | (p.scale == scale) for p, u in zip(parts, used, strict=True)])
        if not isinstance(equal, Tracer) and not np.asarray(equal).all():
            raise ValueError("merge_states: the scales differ, so that these are states of different steps")
        history, any_used = larger(*(p.amax_history for p in parts)), functools.reduce(jnp.logical_or, used)
        merged = ScaleState(state.quantizer, jnp.where(equal, scale, jnp.nan), history, any_used.astype(jnp.float32))
        return dataclasses.replace(merged, check=jnp.where(any_used, merged.check, 0))

    return map_states(merge, first, *others)


def overwrite_states(states: Tree, grads: Tree) -> Tree:
    """Returns the new states from gradients: the gradient itself, or the old state if nothing contributed to it.

    **Raises:** ValueError for gradients that were summed, averaged or scaled; under jit the scale becomes NaN.
    """

    def pick(old: ScaleState, new: ScaleState) -> ScaleState:
        return checked("overwrite_states", _taken(new, dataclasses.replace(old, quantizer=new.quantizer)))

    return map_states(pick, states, grads)


@functools.partial(jax.jit, inline=True)
def _taken(new: ScaleState, old: ScaleState) -> ScaleState:
    """Returns a gradient, or the old state if nothing contributed to the gradient."""
    used = new.count != np.zeros((1,) * new.count.ndim, np.float32)
    return jax.tree.map(lambda n, o: where(used, n, o), new, old)


# --- another recipe ---

_warned: set[Any] = set()


def resize_history(history: Array, length: int) -> Array:
    """Returns a history with another length: the pending amax first and the newest amaxes last, with zeros between."""
    held = history.shape[0]
    if held == length:
        return history
    kept = min(length, held) - 1
    return jnp.concatenate([history[:1], jnp.zeros(length - 1 - kept, jnp.float32), history[held - kept :]])


def switch_state(states: States, recipe: Recipe, *, module: str = "linear", name: str = "") -> dict[str, ScaleState]:
    """Returns the states for another recipe: scales of the same element are kept, and histories as far as they fit.

    Other states are new, with a RecipeSwitchWarning, once for each kind of switch.
    """
    plan = linear_plan(recipe, module, name)
    out, lost = {}, sorted(states.keys() - {s.name for s in plan.states})
    for slot in plan.states:
        held = states.get(slot.name)
        if held is not None and held.quantizer.fp8_dtype == slot.quantizer.fp8_dtype:
            history = resize_history(held.amax_history, slot.quantizer.amax_history_len)
            out[slot.name] = dataclasses.replace(held, quantizer=slot.quantizer, amax_history=history)
            continue
        out[slot.name] = new_state(slot.quantizer)
        lost += [slot.name] * (held is not None)
    key = (tuple((n, states[n].quantizer) for n in sorted(states)), plan.states)
    if lost and key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"switching to {type(recipe).__name__}: the delayed scales of {', '.join(sorted(lost))} were another "
            "recipe's and are dropped; later switches of this kind are not reported",
            RecipeSwitchWarning,
            stacklevel=2,
        )
    return out


# --- checkpoints ---


def key_of(name: str) -> str:
    """Returns a state name's key in a state dict: "input.fprop" becomes "input_fprop"."""
    return name.replace(".", "_")


def _by_key(states: Mapping[str, Any], prefix: str) -> dict[str, ScaleState]:
    out: dict[str, ScaleState] = {}
    for name, held in states.items():
        if is_state(held):
            out[f"{prefix}{key_of(name)}"] = held
        else:
            out |= _by_key(held, f"{prefix}{name}.")
    return out


def state_dict(states: Mapping[str, Any], prefix: str = "", rng: Array | None = None) -> dict[str, Array]:
    """Returns states as a flat dictionary of arrays, as safetensors takes, with the keys of the torch panel's modules.

        <prefix>scale_states.<state>.scale | amax_history | fp8_max        <prefix>rng_state

    **Arguments:** `states`: of one module, {state name: ScaleState}, or {layer: {state name: ...}} for a module of
    several linear layers. `prefix`: the module's name and a dot. `rng`: int32 [4] if the module rounds stochastically.
    """
    out = {}
    for name, state in _by_key(states, f"{prefix}scale_states.").items():
        held = read_ref(state) if state.count is None else checked("state_dict", state)
        out[f"{name}.scale"], out[f"{name}.amax_history"] = held.scale, held.amax_history
        out[f"{name}.fp8_max"] = jnp.full(1, fp8_max(state.quantizer), jnp.float32)
    return out if rng is None else out | {f"{prefix}rng_state": rng}


def load_state_dict(flat: Mapping[str, Any], like: Tree, prefix: str = "") -> tuple[Tree, Array | None]:
    """Reads states from a dictionary as `state_dict` makes it, written by either framework.

    **Arguments:** `flat`: NumPy or JAX arrays; keys without the prefix are ignored. `like`: the recipe's states, from
    `init_state`; their values do not matter. Histories of another length are resized.

    **Returns:** (states, rng_state or None).

    **Raises:** CheckpointError with the key of an array that is missing, has another shape or is of another recipe.
    """
    below, wanted = f"{prefix}scale_states.", _by_key(like, f"{prefix}scale_states.")  # type: ignore[arg-type]
    found = {key.rpartition(".")[0] for key in flat if key.startswith(below)}
    if found != wanted.keys():
        raise CheckpointError(
            f"{below}* are states of {sorted(n[len(below) :] for n in found)}, the recipe's are of "
            f"{sorted(n[len(below) :] for n in wanted)}: another recipe"
        )
    loaded = {name: _load_state(flat, name, state.quantizer) for name, state in wanted.items()}
    rng = flat.get(f"{prefix}rng_state")
    if rng is not None and (np.dtype(rng.dtype).name, tuple(rng.shape)) != ("int32", (4,)):
        raise CheckpointError(f"{prefix}rng_state must be int32 [4], got {rng.dtype}{list(rng.shape)}")
    names = iter(wanted)
    return _rebuilt(like, loaded, names), None if rng is None else jnp.asarray(rng)


def _rebuilt(like: Any, loaded: dict[str, ScaleState], names: Any) -> Any:
    return {k: loaded[next(names)] if is_state(v) else _rebuilt(v, loaded, names) for k, v in like.items()}


def _load_state(flat: Mapping[str, Any], name: str, quantizer: Float8Quantizer) -> ScaleState:
    keys = {k.rpartition(".")[2] for k in flat if k.rpartition(".")[0] == name}
    if keys != set(BUFFERS):
        raise CheckpointError(f"the scale state {name} holds {sorted(keys)}, must hold {sorted(BUFFERS)}")
    for buffer in BUFFERS:
        x = flat[f"{name}.{buffer}"]
        dtype, shape = np.dtype(x.dtype).name, tuple(x.shape)
        single = buffer != "amax_history"
        if dtype != "float32" or len(shape) != 1 or math.prod(shape) == 0 or (single and shape != (1,)):
            want = "[1]" if single else "[L], L >= 1"
            raise CheckpointError(f"{name}.{buffer} must be float32 {want}, got {dtype}{list(shape)}")
    scale, history = (np.asarray(flat[f"{name}.{k}"]) for k in BUFFERS[:2])
    if not 0 < scale[0] < math.inf:
        raise CheckpointError(f"{name}.scale must be finite and greater than 0, got {scale[0]:g}")
    wrong = history[~((history >= 0) & np.isfinite(history))]
    if wrong.size:
        raise CheckpointError(f"{name}.amax_history must hold finite amaxes of 0 or more, got {wrong[0]:g}")
    largest, own = float(np.asarray(flat[f"{name}.fp8_max"])[0]), fp8_max(quantizer)
    if not math.isclose(largest, own, rel_tol=1e-4):  # averages are rounded
        raise CheckpointError(
            f"{name} is the state of elements up to {largest:g}, and the recipe's {quantizer.fp8_dtype} go to {own:g}: "
            "another recipe"
        )
    held = resize_history(jnp.asarray(history), quantizer.amax_history_len)
    return ScaleState(quantizer, jnp.asarray(scale), held, jnp.ones(1, jnp.float32))
