"""The lab's public names for JAX: `capture` records what a function computes."""

from diptych.lab.jax import Capture, capture

__all__ = ["Capture", "capture"]
