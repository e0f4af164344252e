"""Modules for equinox: the public face of `modules/equinox.py`. Importing this module imports equinox."""

from diptych.jax.modules.equinox import MLP, Linear, parameters, update_states

__all__ = ["MLP", "Linear", "parameters", "update_states"]
