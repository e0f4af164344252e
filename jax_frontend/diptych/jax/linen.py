"""Modules for flax's linen: the public face of `modules/linen.py` and `modules/linen_blocks.py`. Importing this module
imports flax."""

from diptych.jax.modules.linen import RNG, STATES, Dense, DenseGeneral, DotGeneral, Einsum, EinsumOp, update_states
from diptych.jax.modules.linen_blocks import GroupedLinear, LayerNormDenseGeneral, LayerNormMLP, MoE

__all__ = [
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
    "update_states",
]
