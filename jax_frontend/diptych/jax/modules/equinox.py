"""Modules for equinox over `dense`.

    layer = dx.Linear(256, 128, recipe=recipe, key=key)       # instead of eqx.nn.Linear(256, 128, key=key)

Parameters have equinox's names, layout and initial values. The recipe is a static field. What it keeps between calls:

- States of delayed scaling are leaves in the field `states`, and the gradient with respect to a state is the next
  state. An optimizer must not step them, so it gets `parameters` alone:

      opt_state = optimizer.init(dx.parameters(model))
      grads = eqx.filter_grad(loss)(model, x)
      updates, opt_state = optimizer.update(dx.parameters(grads), opt_state, dx.parameters(model))
      model = dx.update_states(eqx.apply_updates(model, updates), grads)

- Random bits of stochastic rounding are drawn from the argument `key` of a call.

**Calls take whole batches**, [..., in]. Under `jax.vmap(layer)` each example is a tensor of its own: it has its own
scales, its one row has no whole blocks along a batch, and states are added up, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from diptych.common.errors import ShapeError
from diptych.common.recipes import Recipe
from diptych.jax.layers.linear import dense
from diptych.jax.modules.shared import kept, next_states, random_bits, without_random_bits
from diptych.jax.state.carry import combine_states, partition_states
from diptych.jax.state.scales import ScaleState
from diptych.jax.tensors.quantized import QuantizedCopies

Array = jax.Array
Tree = TypeVar("Tree")


def parameters(tree: Tree) -> Tree:
    """Returns what an optimizer steps: the inexact arrays of a model, or of its gradients, that belong neither to
    states nor to quantized weights. All else is None."""

    def pick(x: Any) -> Any:
        return x if eqx.is_inexact_array(x) else None

    return jax.tree.map(pick, tree, is_leaf=lambda x: isinstance(x, ScaleState | QuantizedCopies))


def update_states(model: Tree, grads: Any, axis_name: Any = None) -> Tree:
    """Returns a model with the states for the next step; see `diptych.jax.update_state`.

    **Arguments:** `grads`: the gradients of a step, as `eqx.filter_grad` makes them. `axis_name`: mesh axes over which
    amaxes are reduced first, inside shard_map. Layers may be stacks, for `jax.lax.scan`.

    **Raises:** TypeError if the gradients lack states of the model; ValueError for states that were summed, as those of
    a module that is called twice or under `jax.vmap` are, or averaged. Under jit their scales become NaN.
    """
    rest, old = partition_states(model)
    remedy = "differentiate with respect to the whole model, as eqx.filter_grad does"
    return combine_states(rest, next_states("update_states", old, partition_states(grads)[1], axis_name, remedy))


class Linear(eqx.Module):
    """A linear layer whose three products run in the low precision of `recipe`; otherwise as `eqx.nn.Linear`.

    **Arguments:** `in_features`, `out_features`, `use_bias`, `dtype`, `key`: as in `eqx.nn.Linear`, but features are
    numbers. `recipe`: None gives the plain product. `name`: of the roles by which the recipe chooses quantizers.

    Fields: `weight` [out, in], `bias` [out] or None; `states`, None unless a tensor has delayed scales. A weight may be
    a `QuantizedArray`, as `quantize_params` makes it, for inference.

    **Raises:** TypeError if `recipe` is no recipe; ValueError for features that are no numbers above 0; a call raises
    as `diptych.jax.dense`.
    """

    weight: Any
    bias: Array | None
    states: Any
    recipe: Recipe | None = eqx.field(static=True)
    name: str = eqx.field(static=True)
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        recipe: Recipe | None,
        name: str = "",
        key: Array,
    ) -> None:
        if not all(type(n) is int and n > 0 for n in (in_features, out_features)):
            raise ShapeError(f"Linear: features must be numbers above 0, got {in_features!r} and {out_features!r}")
        plain = eqx.nn.Linear(in_features, out_features, use_bias, dtype, key=key)
        self.weight, self.bias = plain.weight, plain.bias
        self.states = kept("Linear", recipe, "linear", name).states
        self.recipe, self.name = recipe, name
        self.in_features, self.out_features, self.use_bias = in_features, out_features, use_bias

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        """[..., in] to [..., out], of x's dtype. `key`: a JAX PRNG key, read if the recipe rounds stochastically; pass
        another one in each call and step."""
        needs_rng = kept("Linear", self.recipe, "linear", self.name).rng
        rng = random_bits(key) if needs_rng and key is not None else None
        y = dense(x, self.weight, self.bias, recipe=self.recipe, name=self.name, state=self.states, rng=rng)
        return without_random_bits("pass key=", y) if needs_rng and rng is None else y


def _identity(x: Any) -> Any:
    return x


class MLP(eqx.Module):
    """A perceptron of `Linear`s; otherwise as `eqx.nn.MLP`.

    **Arguments:** `in_size`, `out_size`, `width_size`, `depth`, `activation`, `final_activation`, `use_bias`,
    `use_final_bias`, `dtype`, `key`: as in `eqx.nn.MLP`, but sizes are numbers, and activations are functions without
    parameters, of arrays of any shape. `recipe`: of all layers. `name`: of the roles, with ".0", ".1", ... behind it.

    Fields: `layers`, depth + 1 `Linear`s.

    **Raises:** as `Linear`.
    """

    layers: tuple[Linear, ...]
    activation: Callable[..., Any] = eqx.field(static=True)
    final_activation: Callable[..., Any] = eqx.field(static=True)
    in_size: int = eqx.field(static=True)
    out_size: int = eqx.field(static=True)
    width_size: int = eqx.field(static=True)
    depth: int = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        out_size: int,
        width_size: int,
        depth: int,
        activation: Callable[..., Any] = jax.nn.relu,
        final_activation: Callable[..., Any] = _identity,
        use_bias: bool = True,
        use_final_bias: bool = True,
        dtype: Any = None,
        *,
        recipe: Recipe | None,
        name: str = "",
        key: Array,
    ) -> None:
        sizes = [in_size, *[width_size] * depth, out_size]
        biases = [*[use_bias] * depth, use_final_bias]
        keys = jax.random.split(key, depth + 1)
        self.layers = tuple(
            Linear(sizes[i], sizes[i + 1], biases[i], dtype, recipe=recipe, name=f"{name}.{i}".strip("."), key=keys[i])
            for i in range(depth + 1)
        )
        self.activation, self.final_activation = activation, final_activation
        self.in_size, self.out_size, self.width_size, self.depth = in_size, out_size, width_size, depth

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        """[..., in] to [..., out]. `key`: as in `Linear`; it is split for the layers."""
        keys = [None] * len(self.layers) if key is None else jax.random.split(key, len(self.layers))
        for i, layer in enumerate(self.layers):
            x = layer(x, key=keys[i])
            x = (self.activation if i < self.depth else self.final_activation)(x)
        return x
