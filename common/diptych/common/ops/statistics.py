"""Rules of `statistics`: the dtypes whose elements it counts and adds, and what it returns."""

from __future__ import annotations

from diptych.common.errors import DTypeError
from diptych.common.ops.operand import Operand, holds, require_high_precision
from diptych.common.ops.shapes import Constraint, Shape

NUMBERS = {
    name: i
    for i, name in enumerate((
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    ))
}  # fmt: skip
"""The core's numbers of dtypes."""
NUMBERS["bool"] = NUMBERS["uint8"]

NAMES = ("amax", "mean", "rms", "zero", "nan", "inf", "subnormal")
"""The names of the seven numbers that `statistics` returns, in order."""
OF_ERRORS = (*NAMES, "clipped", "flushed")
"""The names of the nine numbers that `statistics` returns of errors of rounding, in order."""


def statistics(x: Operand) -> tuple[Shape, int]:
    """Returns the shape of the statistics of x, and the core's number of its dtype.

    **Raises** DTypeError for a dtype that `statistics` does not take.
    """
    if x.dtype not in NUMBERS:
        raise DTypeError(f"statistics: x must be one of {', '.join(NUMBERS)}, got {x}")
    return (len(NAMES),), NUMBERS[x.dtype]


def errors(x: Operand, result: Operand, largest: Operand) -> tuple[Shape, int, tuple[Constraint, ...]]:
    """Returns the shape of the statistics of the errors of x, the core's number of its dtype, and what the sizes must
    be. **Raises** DTypeError unless x is float32, bfloat16 or float16, and the others are float32."""
    require_high_precision("statistics", x)
    sizes = [holds("statistics", other, "float32", x.numel) for other in (result, largest)]
    return (len(OF_ERRORS),), NUMBERS[x.dtype], (*sizes[0], *sizes[1])
