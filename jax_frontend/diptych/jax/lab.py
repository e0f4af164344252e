"""The lab's public names for JAX: `capture` records what a function computes."""

from diptych.lab.jax.capture import Capture, capture

__all__ = ["Capture", "capture"]
