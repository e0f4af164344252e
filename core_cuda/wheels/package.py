"""Low-precision training with the same kernels and bits in PyTorch (`diptych.torch`) and JAX (`diptych.jax`)."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # takes 20 ms, which few processes need

    return version(__name__)
