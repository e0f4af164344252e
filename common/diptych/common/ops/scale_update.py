"""Rules of the update of delayed scales: the checks of its operands."""

from __future__ import annotations

import math

from diptych.common.errors import ShapeError
from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, holds, require_dtype
from diptych.common.ops.shapes import Constraint

_MAX_MARGIN = 126  # 2^-margin is a normal float32


def scale_update(
    history: Operand,
    scale: Operand,
    reduced: Operand | None,
    amax: Operand | None,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> tuple[Constraint, ...]:
    """Demands a history [n, L], and n elements in `scale` and in each optional operand that is given."""
    op = "scale_update"
    require_dtype(op, history, "float32")
    message = f"{op}: history must be [n, L] with L >= 1, got {history}"
    if not history.shape:
        raise ShapeError(message)
    n, length = shapes.rows_cols(history.shape)
    constraints = [Constraint(1, length, message, "<=")]
    for x in (scale, reduced, amax):
        if x is not None:
            constraints += holds(op, x, "float32", n)
    if not (math.isfinite(fp8_max) and fp8_max > 0):
        raise ValueError(f"{op}: fp8_max must be finite and > 0, got {fp8_max}")
    if not -_MAX_MARGIN <= margin <= _MAX_MARGIN:
        raise ValueError(f"{op}: margin must lie in -{_MAX_MARGIN}..{_MAX_MARGIN}, got {margin}")
    if most_recent and amax is not None:
        raise ValueError(f"{op}: amax was given; most_recent does not apply")
    return tuple(constraints)
