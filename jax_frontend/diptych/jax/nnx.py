"""Modules for flax's nnx: the public face of `modules/nnx.py`. Importing this module imports flax."""

from diptych.jax.modules.nnx import DIFFERENTIATED, LayerNormMLP, Linear, RandomState, ScaleStates, update_states

__all__ = ["DIFFERENTIATED", "LayerNormMLP", "Linear", "RandomState", "ScaleStates", "update_states"]
