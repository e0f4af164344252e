"""`Operand`, the properties of an argument that are known before anything runs, and checks that several ops share.

A rule of an op raises at once for errors that are known while a program is traced (dtypes, ranks, options that exclude
each other). It returns conditions on sizes as `Constraint` data, which each panel enforces in its own way. In an eager
call the core makes the same checks with the same messages (`core_cuda/src/contracts`); `tests/cases/misuse.py` compares
both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from diptych.common.errors import DTypeError, ShapeError
from diptych.common.ops import shapes
from diptych.common.ops.shapes import HIGH_PRECISION, Constraint, Shape, Size


class Operand(NamedTuple):
    """An argument of an op: its dtype's name and its shape without batch axes.

    `place`: the argument's device, for messages; None if the frontend does not know it. `raw`: a uint8 array may hold
    the bytes of any dtype of one byte.
    """

    name: str
    dtype: str
    shape: Shape
    place: Any = None
    raw: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + ("" if self.place is None else f" on {self.place}")

    @property
    def numel(self) -> Size:
        return math.prod(self.shape)


def require_dtype(op: str, x: Operand, *dtypes: str) -> None:
    """**Raises** DTypeError unless x has one of the dtypes."""
    if x.dtype in dtypes or (x.raw and x.dtype == "uint8" and dtypes[0].startswith(("float8", "float4"))):
        return
    raise DTypeError(f"{op}: {x.name} must be {one_of(dtypes)}, got {x}")


def one_of(names: Iterable[str]) -> str:
    """Returns names joined as in a sentence: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def require_high_precision(op: str, x: Operand) -> None:
    """**Raises** DTypeError unless x is float32, bfloat16 or float16."""
    require_dtype(op, x, *HIGH_PRECISION)


def require_result_dtype(op: str, dtype: str) -> None:
    """**Raises** DTypeError if the dtype of a result is not of high precision."""
    if dtype not in HIGH_PRECISION:
        raise DTypeError(f"{op}: the result can be float32, bfloat16 or float16, not {dtype}")


def of_shape(op: str, x: Operand, *wanted: Size) -> tuple[Constraint, ...]:
    """Demands that x has this shape. **Raises** ShapeError for another rank."""

    def message() -> str:
        return f"{op}: {x.name} must be {list(wanted)}, got {x}"

    if len(x.shape) != len(wanted):
        raise ShapeError(message())
    return tuple([Constraint(n, want, message) for n, want in zip(x.shape, wanted, strict=True)])


def folded(op: str, x: Operand, rows: Size, cols: Size) -> tuple[Constraint, ...]:
    """Demands that x is [rows, cols] once its leading dimensions are folded. **Raises** ShapeError for a scalar."""

    def message() -> str:
        return f"{op}: {x.name} must be {[rows, cols]}, got {x}"

    if not x.shape:
        raise ShapeError(message())
    m, k = shapes.rows_cols(x.shape)
    return Constraint(m, rows, message), Constraint(k, cols, message)


def holds(op: str, x: Operand, dtype: str, n: Size) -> tuple[Constraint, ...]:
    """Demands that x holds n elements of a dtype, in any shape. **Raises** DTypeError."""
    require_dtype(op, x, dtype)
    return _of_numel(op, x, n)


def vector(op: str, x: Operand, n: Size) -> tuple[Constraint, ...]:
    """Demands that x holds n elements in high precision, in any shape. **Raises** DTypeError."""
    require_high_precision(op, x)
    return _of_numel(op, x, n)


def _of_numel(op: str, x: Operand, n: Size) -> tuple[Constraint, ...]:
    return (Constraint(x.numel, n, lambda: f"{op}: {x.name} must be [{n}], got {x}"),)
