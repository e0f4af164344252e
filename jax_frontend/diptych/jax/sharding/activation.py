"""Partitioning rule of activations: a mesh may cut all dimensions but the last of a gated one (two halves)."""

from __future__ import annotations

from diptych.jax.primitives.ffi import Batch
from diptych.jax.sharding.quantize import Shapes
from diptych.jax.sharding.rule import Rule


def activation(operands: Shapes, batch: Batch, which: str, gated: bool) -> Rule:
    """[..., F] -> [..., F], or gated [..., 2F] -> [..., F]; activation_grad of dy and x -> dx likewise."""
    rank = len(operands[0])
    factors = tuple(None if gated and i == rank - 1 else f"dimension{i}" for i in range(rank))
    extents = {f: (n, 1) for f, n in zip(factors, operands[0], strict=True) if f}
    return Rule((factors,) * len(operands), (factors,), extents)
