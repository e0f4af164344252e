"""Modules for flax's linen: the public face of `modules/linen.py` and `modules/linen_blocks.py`. Importing this module
imports flax."""

from diptych.jax.modules.linen import (
    HELD,
    RNG,
    STATES,
    Dense,
    DenseGeneral,
    DotGeneral,
    Einsum,
    EinsumOp,
    hold_kernels,
    update_states,
)
from diptych.jax.modules.linen_blocks import GroupedLinear, LayerNormDenseGeneral, LayerNormMLP, MoE

__all__ = [
    "HELD",
    "RNG",
    "STATES",
    "Dense",
    "DenseGeneral",
    "DotGeneral",
    "Einsum",
    "EinsumOp",
    "GroupedLinear",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MoE",
    "hold_kernels",
    "update_states",
]
