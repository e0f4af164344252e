"""Functions that the modules for nnx, linen and equinox call: which states and random bits a recipe needs, the states
for the next step, and TransformerEngine's names of norms and activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    """The states and random bits that a module keeps from call to call.

    `states`: makes the initial states; None if the recipe has none. `rng`: whether the recipe needs random bits.
    """

    states: Callable[[], Any] | None
    rng: bool


def kept(op: str, recipe: Recipe | None, module: str, name: str, batch: tuple[int, ...] = ()) -> Kept:
    """Returns what a module with these roles keeps; states have the axes `batch` in front.

    **Raises** TypeError if `recipe` is no recipe.
    """
    require_recipe(op, recipe)
    if recipe is None:
        return Kept(None, False)
    if module == "layernorm_mlp":
        names, make = [part_name(name, part) for part in PARTS], init_layernorm_mlp_state
    else:
        names, make = [name], functools.partial(init_dense_general_state, batch=batch)
    plans = [linear_plan(recipe, module, name) for name in names]
    states = functools.partial(make, recipe, module=module, name=name) if any(p.states for p in plans) else None
    return Kept(states, any(p.needs_rng for p in plans))


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
            f"{op}: parameters are held in high precision, kernels as [in, out]; diptych.jax.linen.hold_kernels moves "
            "kernels into a collection of quantized ones, [out, in]"
        )


def activation_name(op: str, activations: str | Sequence[str]) -> str:
    """Returns an activation's name in `layernorm_mlp`: from that name, or from TransformerEngine's sequence of names,
    such as ("gelu",) or ("silu", "linear"), where "linear", first or second, stands for a gate.

    **Raises:** ValueError for any other.
    """
    names = (activations,) if isinstance(activations, str) else tuple(str(name).lower() for name in activations)
    if len(names) == 2 and names[0] == "linear":
        names = names[::-1]
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
    """Returns a norm's name in `layernorm_dense` from TransformerEngine's, which has no fixed case, hyphens or
    underscores. **Raises** ValueError for any other."""
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    plain = layernorm_type.lower().strip().replace("-", "").replace("_", "")
    if plain not in names:
        raise ValueError(f"{op}: layernorm_type must be one of {', '.join(names)}, got {layernorm_type!r}")
    return names[plain]


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
