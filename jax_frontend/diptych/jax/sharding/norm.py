"""Partitioning rules of norms: a mesh may cut rows."""

from __future__ import annotations

from typing import Any

from diptych.common.ops import shapes
from diptych.jax.primitives.ffi import Batch
from diptych.jax.sharding.quantize import ROWS, VECTOR, Shapes
from diptych.jax.sharding.rule import Rule, row_factors


def norm(operands: Shapes, batch: Batch, which: str, dtype: str, **_: Any) -> Rule:
    """[..., K] and parameters [K] -> statistics [M] and, with a dtype, [..., K]."""
    x = (*row_factors(operands[0][:-1], ROWS), None)
    statistics = 1 + (which == "layernorm")
    extents = {ROWS: (shapes.rows_cols(operands[0])[0], 1)}
    return Rule((x, *[VECTOR] * (len(operands) - 1)), (*[(ROWS,)] * statistics, *[x] * bool(dtype)), extents)


def norm_grad(operands: Shapes, batch: Batch, has_dbeta: bool, **_: Any) -> Rule:
    """dy, x [..., K], gamma [K], statistics [M] -> dx, and dgamma and dbeta [K], which are summed over cut rows."""
    x = (*row_factors(operands[1][:-1], ROWS), None)
    extents, parameters = {ROWS: (shapes.rows_cols(operands[1])[0], 1)}, 1 + has_dbeta
    statistics = [(ROWS,)] * (len(operands) - 3)
    return Rule((x, x, VECTOR, *statistics), (x, *[VECTOR] * parameters), extents, ("", *["sum"] * parameters))
