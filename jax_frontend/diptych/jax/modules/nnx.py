"""Modules for flax's nnx over `dense` and `layernorm_mlp`.

    layer = dj.nnx.Linear(256, 128, recipe=recipe, rngs=rngs)     # instead of nnx.Linear(256, 128, rngs=rngs)

Parameters are `nnx.Param`s with flax's names and layout: kernels are [in, out]. The recipe is a static attribute, so
that modules of equal recipes share compiled code. What a recipe keeps between calls are variables:

- `ScaleStates` holds the states of delayed scaling. The gradient with respect to a state is the next state, so a step
  differentiates with respect to both, and `update_states` writes the new states:

      wrt = nnx.DiffState(0, dj.nnx.DIFFERENTIATED)
      loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, x)
      optimizer.update(model, grads)             # nnx.Optimizer(model, tx, wrt=nnx.Param)
      dj.nnx.update_states(model, grads)

- `RandomState` holds the random bits of stochastic rounding, and each call moves it on.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.layers.plan import linear_plan
from diptych.common.ops.activation import activation_options
from diptych.common.ops.norm import norm_options
from diptych.common.recipes import Recipe
from diptych.jax.functional.quantize import rng_state
from diptych.jax.layers.layernorm_mlp import MLP_OFFSETS, PARTS, init_layernorm_mlp_state, layernorm_mlp, part_name
from diptych.jax.layers.linear import dense
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.state.scales import ScaleState, init_state, map_states, overwrite_states
from diptych.jax.state.update import update_state
from diptych.jax.tensors.quantized import QuantizedCopies

Array = jax.Array
_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()


class ScaleStates(nnx.Variable[Any]):
    """The states of delayed scaling of one module, as `init_state` makes them."""


class RandomState(nnx.Variable[Any]):
    """The random bits of stochastic rounding of one module, int32 [4] as `rng_state` makes them."""


DIFFERENTIATED = nnx.Any(nnx.Param, ScaleStates)
"""Filter of what a training step differentiates with respect to: parameters, and states of delayed scaling."""


def update_states(model: nnx.Module, grads: Any, axis_name: Any = None) -> None:
    """Writes the states for the next step into a model's `ScaleStates`; see `diptych.jax.update_state`.

    **Arguments:** `grads`: the gradients of a step, with respect to `DIFFERENTIATED`. `axis_name`: mesh axes over which
    amaxes are reduced first, inside shard_map. Modules may be stacks, as `nnx.vmap` makes them for `nnx.scan`.

    **Raises:** TypeError if the gradients lack states of the model; ValueError for states that were summed, as those of
    a module that is called twice are, or averaged. Under jit their scales become NaN.
    """
    old, new = nnx.state(model, ScaleStates), nnx.state(grads, ScaleStates)
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ArgumentError(
            "update_states: the gradients lack states of the model; differentiate with respect to "
            "nnx.DiffState(0, diptych.jax.nnx.DIFFERENTIATED)"
        )

    def update(state: ScaleState) -> ScaleState:
        f = functools.partial(update_state, axis_name=axis_name)
        for _ in state.amax_history.shape[1:]:  # layers that were stacked by nnx.vmap
            f = jax.vmap(f)
        return f(state)

    nnx.update(model, map_states(update, overwrite_states(old, new)))


class _Module(nnx.Module):
    """Base of the nnx modules: holds the recipe, and as variables what the recipe keeps between calls."""

    module: str
    dtype: Any

    def _keep(self, op: str, recipe: Recipe | None, names: tuple[str, ...], make: Any, name: str, rngs: Any) -> None:
        """Sets the recipe and its variables. `names`: of the roles of each linear layer; `make`: makes the states."""
        require_recipe(op, recipe)
        self.recipe = recipe
        plans = [] if recipe is None else [linear_plan(recipe, self.module, name) for name in names]
        states = make(recipe, module=self.module, name=name) if any(p.states for p in plans) else None
        self.states = nnx.data(None if states is None else ScaleStates(states))
        self.random = nnx.data(RandomState(rng_state(rngs.params())) if any(p.needs_rng for p in plans) else None)

    def _kept(self, offsets: int) -> dict[str, Any]:
        """Returns the states and random bits of one call, which uses this number of offsets."""
        out: dict[str, Any] = {}
        if self.states is not None:
            out["state"] = self.states.get_value()
        if self.random is not None:
            out["rng"] = self.random.get_value()
            self.random.set_value(rng_at(out["rng"], offsets))
        return out

    def _input(self, x: Any) -> Any:
        return x if self.dtype is None else jnp.asarray(x, self.dtype)


def _param(init: Any, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> nnx.Param[Any]:
    return nnx.Param(init(rngs.params(), shape, dtype))


def _optional(wanted: bool, init: Any, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> Any:
    return nnx.data(_param(init, rngs, shape, dtype) if wanted else None)


def _transposed(kernel: Any) -> Array:
    """Returns a kernel [in, out] as [out, in]."""
    value = kernel.get_value()
    if isinstance(value, QuantizedCopies):
        raise UnsupportedError("nnx modules hold kernels in high precision; call diptych.jax.dense for quantized ones")
    return jnp.swapaxes(value, 0, 1)


class Linear(_Module):
    """A linear layer whose three products run in the low precision of `recipe`; otherwise as `nnx.Linear`.

    **Arguments:** `in_features`, `out_features`, `use_bias`, `param_dtype`, `kernel_init`, `bias_init`, `rngs`: as in
    `nnx.Linear`. `dtype`: the input is cast to it; None keeps the input's dtype, which is the result's. The kernel is
    quantized from its own dtype. `recipe`: None gives the plain product. `module`, `name`: of the roles by which the
    recipe chooses quantizers.

    Parameters: `kernel` [in, out], `bias` [out] or None. Variables: `states` and `random`, None unless needed.

    **Raises:** TypeError if `recipe` is no recipe; a call raises as `diptych.jax.dense`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _KERNEL_INIT,
        bias_init: Any = _BIAS_INIT,
        module: str = "linear",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.module, self.name = module, name
        self.kernel = _param(kernel_init, rngs, (in_features, out_features), param_dtype)
        self.bias = _optional(use_bias, bias_init, rngs, (out_features,), param_dtype)
        self._keep("Linear", recipe, (name,), init_state, name, rngs)

    def __call__(self, x: Any) -> Array:
        """[..., in] to [..., out]."""
        return dense(
            self._input(x), _transposed(self.kernel), self.bias, recipe=self.recipe, module=self.module, name=self.name,
            **self._kept(OFFSETS),
        )  # fmt: skip


class LayerNormMLP(_Module):
    """A norm and a two-layer perceptron in the low precision of `recipe`; see `diptych.jax.layernorm_mlp`.

    **Arguments:** `in_features`: of input and output. `hidden_features`: of the activation's output. `activation`,
    `eps`, `normalization`, `zero_centered_gamma`: as in `layernorm_mlp`. Others: as in `Linear`; `use_bias`: of both
    linear layers.

    Parameters, with TransformerEngine's names: `scale` [in]; `ln_bias` [in], None for RMSNorm; `wi_kernel`
    [in, hidden], or [in, 2 hidden] for a gated activation, whose first half is activated; `wi_bias`; `wo_kernel`
    [hidden, in]; `wo_bias`.

    **Raises:** as `Linear`, and ValueError for an unknown norm or activation.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        recipe: Recipe | None,
        activation: str = "gelu",
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _KERNEL_INIT,
        bias_init: Any = _BIAS_INIT,
        module: str = "layernorm_mlp",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        op = "LayerNormMLP"
        norm_options(op, normalization, eps, zero_centered_gamma)
        width = hidden_features * (2 if activation_options(op, activation).gated else 1)
        self.in_features, self.hidden_features, self.dtype = in_features, hidden_features, dtype
        self.activation, self.eps, self.normalization = activation, eps, normalization
        self.zero_centered_gamma, self.module, self.name = zero_centered_gamma, module, name
        ones = nnx.initializers.zeros_init() if zero_centered_gamma else nnx.initializers.ones_init()
        self.scale = _param(ones, rngs, (in_features,), param_dtype)
        has_beta = normalization == "LayerNorm"
        self.ln_bias = _optional(has_beta, nnx.initializers.zeros_init(), rngs, (in_features,), param_dtype)
        self.wi_kernel = _param(kernel_init, rngs, (in_features, width), param_dtype)
        self.wi_bias = _optional(use_bias, bias_init, rngs, (width,), param_dtype)
        self.wo_kernel = _param(kernel_init, rngs, (hidden_features, in_features), param_dtype)
        self.wo_bias = _optional(use_bias, bias_init, rngs, (in_features,), param_dtype)
        names = tuple(part_name(name, part) for part in PARTS)
        self._keep(op, recipe, names, init_layernorm_mlp_state, name, rngs)

    def __call__(self, x: Any) -> Array:
        """[..., in] to [..., in]."""
        return layernorm_mlp(
            self._input(x), self.scale.get_value(), self.ln_bias, _transposed(self.wi_kernel), self.wi_bias,
            _transposed(self.wo_kernel), self.wo_bias, recipe=self.recipe, activation=self.activation, eps=self.eps,
            normalization=self.normalization, zero_centered_gamma=self.zero_centered_gamma, module=self.module,
            name=self.name, **self._kept(MLP_OFFSETS),
        )  # fmt: skip
