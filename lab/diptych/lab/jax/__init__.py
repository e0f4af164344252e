"""The lab for JAX: `capture` records what a function computes; also the demo model's adapter."""

from diptych.lab.jax.capture import Capture, capture

__all__ = ["Capture", "capture"]
