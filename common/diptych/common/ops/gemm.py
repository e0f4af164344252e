"""Rules of products and of the bias gradient: the checks of their operands."""

from __future__ import annotations

import math

from diptych.common.gemm_options import GemmOptions, check_gemm_options
from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, require_high_precision, require_result_dtype, vector
from diptych.common.ops.quantize import CopyOperands, copy
from diptych.common.ops.shapes import GemmShape


def require_factors(op: str, **factors: float) -> None:
    """**Raises** ValueError for a factor that is not finite."""
    for name, value in factors.items():
        if not math.isfinite(value):
            raise ValueError(f"{op}: {name} must be finite, got {value}")


def gemm(a: CopyOperands, b: CopyOperands, bias: Operand | None, dtype: str, options: GemmOptions) -> GemmShape:
    """Returns the extents of op(a) @ op(b) in `dtype`, and constraints on the operands' sizes."""
    op = "gemm"
    constraints = copy(op, "a", a) + copy(op, "b", b)
    size = shapes.gemm_shape(a.format, a.columnwise, a.data.shape, b.format, b.columnwise, b.data.shape)
    require_result_dtype(op, dtype)
    if bias is not None:
        constraints += vector(op, bias, size.n)
    check_gemm_options(op, options, a.format, b.format)
    return size._replace(constraints=(*constraints, *size.constraints))


def bias_grad(dy: Operand) -> None:
    """**Raises** DTypeError, or ShapeError for a scalar."""
    require_high_precision("bias_grad", dy)
    shapes.rows_cols(dy.shape)
