"""Modules for flax's nnx over `dense`, general products, fused layers and experts. Importing this module imports flax.

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

The ops of a module have its `name`, or else its class's, as their scope in profiles and compiled code.
"""

from diptych.jax.modules.nnx import DotGeneral, Einsum, Linear, LinearGeneral
from diptych.jax.modules.nnx_base import (
    DIFFERENTIATED,
    HeldKernel,
    RandomState,
    ScaleStates,
    hold_kernels,
    update_states,
)
from diptych.jax.modules.nnx_blocks import GroupedLinear, LayerNormLinear, LayerNormMLP, MoE

__all__ = [
    "DIFFERENTIATED",
    "DotGeneral",
    "Einsum",
    "GroupedLinear",
    "HeldKernel",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearGeneral",
    "MoE",
    "RandomState",
    "ScaleStates",
    "hold_kernels",
    "update_states",
]
