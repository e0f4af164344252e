"""What the modules of all frameworks share: states and random bits that a recipe needs, names, and the next states."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.layers.plan import linear_plan
from diptych.common.ops.activation import ACTIVATIONS, activation_options
from diptych.common.recipes import Recipe
from diptych.jax.functional.quantize import rng_state
from diptych.jax.layers.general import init_dense_general_state
from diptych.jax.layers.layernorm_mlp import PARTS, init_layernorm_mlp_state, part_name
from diptych.jax.state.scales import ScaleState, map_states, overwrite_states
from diptych.jax.state.update import update_state
from diptych.jax.tensors.quantized import QuantizedCopies

Array = jax.Array
Tree = TypeVar("Tree")

# TransformerEngine's names of activations that have another name here.
_ALIASES = {"squared_relu": "srelu", "quick_gelu": "qgelu"}


class Kept(NamedTuple):
    """What a module keeps between calls. `states`: its initial states, or None. `rng`: whether it needs random bits."""

    states: Any
    rng: bool


def kept(op: str, recipe: Recipe | None, module: str, name: str, batch: tuple[int, ...] = ()) -> Kept:
    """Returns what a module with these roles keeps; states have the axes `batch` in front.

    **Raises** TypeError if `recipe` is no recipe.
    """
    require_recipe(op, recipe)
    if recipe is None:
        return Kept(None, False)
    if module == "layernorm_mlp":
        names = [part_name(name, part) for part in PARTS]
        states: Any = init_layernorm_mlp_state(recipe, module=module, name=name)
    else:
        names, states = [name], init_dense_general_state(recipe, batch, module=module, name=name)
    plans = [linear_plan(recipe, module, name) for name in names]
    return Kept(states if any(p.states for p in plans) else None, any(p.needs_rng for p in plans))


def random_bits(key: Array) -> Array:
    """Returns the random state of a JAX PRNG key, which may be of the untyped kind; see `rng_state`."""
    return rng_state(key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_random_bits(remedy: str, y: Tree) -> Tree:
    """Returns y, whose gradient **raises** TypeError: its recipe rounds it stochastically and has no random bits."""
    return y


def _no_random_bits(remedy: str, *_: Any) -> Any:
    raise ArgumentError(f"the recipe rounds gradients stochastically and needs random bits: {remedy}")


without_random_bits.defvjp(lambda remedy, y: (y, None), _no_random_bits)


def refuse_quantized(op: str, parameter: Any) -> None:
    """**Raises** NotImplementedError for a parameter, which may be in a box, that is held quantized."""
    found = jax.tree.leaves(parameter, is_leaf=lambda x: isinstance(x, QuantizedCopies))
    if any(isinstance(x, QuantizedCopies) for x in found):
        raise UnsupportedError(
            f"{op}: kernels are held in high precision, as [in, out]; call diptych.jax.dense for quantized ones, "
            "[out, in]"
        )


def activation_name(op: str, activations: str | Sequence[str]) -> str:
    """Returns an activation's name in `layernorm_mlp`: from that name, or from TransformerEngine's sequence of names,
    such as ("gelu",) or ("silu", "linear"), of which the second stands for a gate.

    **Raises:** ValueError for any other.
    """
    names = (activations,) if isinstance(activations, str) else tuple(activations)
    first = _ALIASES.get(names[0], names[0]) if names else ""
    if len(names) == 1:
        activation_options(op, first)
        return first
    gated = [name for name, options in ACTIVATIONS.items() if options.gated and options.which == first]
    if names[1:] != ("linear",) or not gated:
        raise ValueError(f'{op}: activations must be one name, or a plain one and "linear"; got {activations!r}')
    return gated[0]


def fc1_parts(activation: str) -> int:
    """Returns the number of halves of fc1's output: 2 for a gated activation, whose first half is activated, else 1."""
    return 2 if ACTIVATIONS[activation].gated else 1


def norm_name(op: str, layernorm_type: str) -> str:
    """Returns a norm's name in `layernorm_dense` from TransformerEngine's. **Raises** ValueError for any other."""
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    if layernorm_type not in names:
        raise ValueError(f"{op}: layernorm_type must be one of {', '.join(names)}, got {layernorm_type!r}")
    return names[layernorm_type]


def route(logits: Array, top_k: int) -> tuple[Array, Array, Array]:
    """Returns each token's experts [T, k], their probabilities [T, k], which add up to 1, and the load-balancing loss:
    1 where all experts are used alike, more where few are. `logits`: float32 [T, E]."""
    probs = jax.nn.softmax(logits)
    top, experts = jax.lax.top_k(probs, top_k)
    used = (experts[..., None] == jnp.arange(logits.shape[-1])).mean((0, 1))
    balance = logits.shape[-1] * (used * probs.mean(0)).sum()
    return experts, top / top.sum(-1, keepdims=True), balance


def next_states(op: str, old: Tree, grads: Tree, axis_name: Any, remedy: str) -> Tree:
    """Returns the states for the next step from gradients with respect to states; see `diptych.jax.update_state`.

    States may be stacked along any number of leading axes, as for a scan over layers.

    **Raises:** TypeError with the `remedy` if the gradients lack states of the model; ValueError for states that were
    summed or averaged. Under jit their scales become NaN.
    """
    if jax.tree.structure(old) != jax.tree.structure(grads):
        raise ArgumentError(f"{op}: the gradients lack states of the model; {remedy}")

    def update(state: ScaleState) -> ScaleState:
        f = functools.partial(update_state, axis_name=axis_name)
        for _ in state.amax_history.shape[1:]:
            f = jax.vmap(f)
        return f(state)

    return map_states(update, overwrite_states(old, grads))
