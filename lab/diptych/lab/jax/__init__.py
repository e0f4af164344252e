"""The lab for JAX: `capture`, which records the arrays of a function, and the adapter that trains the demo model."""

from diptych.lab.jax.capture import Capture, capture

__all__ = ["Capture", "capture"]
