"""Rules of quantize, dequantize and amax: the checks of their operands."""

from __future__ import annotations

from typing import NamedTuple

from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.formats import FormatRow
from diptych.common.ops import shapes
from diptych.common.ops.operand import (
    Operand,
    holds,
    of_shape,
    require_dtype,
    require_high_precision,
)
from diptych.common.ops.shapes import Constraint, Shape
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, STOCHASTIC, Quantizer

_HADAMARD = 16  # rows that one transform mixes
_RNG, _PART_RNG = 4, 8  # words of a random state, and of one with the place of a part in the whole tensor


def _rotatable(op: str, x: Operand, encoded: Shape) -> tuple[Constraint, ...]:
    if x.dtype != "bfloat16":
        raise DTypeError(
            f"{op}: the Hadamard transform takes bfloat16 alone, got {x}; disable_rht=True of a recipe leaves it out"
        )
    m, k = shapes.rows_cols(encoded)
    message = f"{op}: the Hadamard transform takes rows in multiples of {_HADAMARD}, got {[m, k]}"
    return (Constraint(m // _HADAMARD * _HADAMARD, m, message),)


def amax(x: Operand, flags: int, columnwise: bool, encoded: Shape | None = None) -> tuple[Constraint, ...]:
    """Checks the operand of amax. `columnwise`: the amax of a columnwise copy is requested too. `encoded`: the shape of
    the source's output if amax reads a source computed from x."""
    op = "amax"
    require_high_precision(op, x)
    if flags & RHT_SIGNS and not flags & RHT:
        raise ValueError(f"{op}: random signs belong to the Hadamard transform, which was not asked for")
    if flags & ~(ROW_AMAX | RHT | RHT_SIGNS):
        raise ValueError(f"{op}: flags {flags} hold an unknown option")
    if not flags & RHT:
        return ()
    if not columnwise:
        raise ValueError(f"{op}: the Hadamard transform is for the columnwise amax, which was not asked for")
    return _rotatable(op, x, x.shape if encoded is None else encoded)


def require_quantizer(op: str, quantizer: object) -> None:
    """**Raises** ArgumentError unless `quantizer` is a quantizer."""
    if not isinstance(quantizer, Quantizer):
        raise ArgumentError(
            f"{op}: quantizer must be a diptych.common.Quantizer, got {type(quantizer).__name__}; "
            "recipe.quantizer(QuantizerRole(...)) makes one"
        )


def require_state(op: str, quantizer: Quantizer, scale: object, rng: object) -> None:
    """**Raises** ArgumentError if the quantizer reads a scale or an rng and the call passes none."""
    if scale is None and quantizer.needs_scale:
        raise ArgumentError(f"{op}: {type(quantizer).__name__} takes its scale from the caller; pass scale=")
    if rng is None and quantizer.spec.flags & STOCHASTIC:
        raise ArgumentError(f"{op}: {type(quantizer).__name__} rounds stochastically; pass rng=, see rng_state()")


def quantize(
    op: str,
    x: Operand,
    quantizer: Quantizer,
    amax: Operand | None = None,
    columnwise_amax: Operand | None = None,
    scale: Operand | None = None,
    rng: Operand | None = None,
    encoded: Shape | None = None,
) -> tuple[Constraint, ...]:
    """Checks the operands of quantizing x, or one tensor of a stack.

    `op`: "quantize" or "quantize_stack". `encoded`: the shape of the source's output if a source computed from x is
    quantized.
    """
    fmt, flags = quantizer.format, quantizer.spec.flags
    shape = x.shape if encoded is None else encoded
    require_high_precision(op, x)
    require_state(op, quantizer, scale, rng)
    constraints: tuple[Constraint, ...] = ()
    if flags & RHT:
        constraints += _rotatable(f"{op} ({fmt.name})", x, shape)
    constraints += shapes.quantize_constraints(shape, quantizer)
    if scale is not None:
        if not fmt.one_scale:
            raise ValueError(f"{op} ({fmt.name}): a scale is for per-tensor formats")
        if flags or quantizer.spec.eps:
            raise ValueError(f"{op} ({fmt.name}): scale was given; pow2 and eps do not apply")
        if amax is not None or columnwise_amax is not None:
            raise ValueError(f"{op} ({fmt.name}): scale and amax were both given; the scale alone decides")
        constraints += holds(op, _of(fmt, scale), "float32", 1)
    if rng is not None:
        if not flags & STOCHASTIC:
            raise ValueError(f"{op} ({fmt.name}): rng is for stochastic rounding, which was not asked for")
        constraints += holds(op, _of(fmt, rng), "int32", _PART_RNG if tuple(rng.shape) == (_PART_RNG,) else _RNG)
    amaxes = [a for a in (amax, columnwise_amax) if a is not None]
    require_amaxes(op, quantizer, *[a.name for a in amaxes])
    for a in amaxes:
        each_row = a.name == "amax" and flags & ROW_AMAX
        constraints += holds(op, _of(fmt, a), "float32", shapes.rows_cols(shape)[0] if each_row else 1)
    return constraints


def _of(fmt: FormatRow, x: Operand) -> Operand:
    return x._replace(name=f"{x.name} ({fmt.name})")


def require_amaxes(op: str, quantizer: Quantizer, *given: str) -> None:
    """**Raises** ValueError unless `given` names no amax, or exactly the amaxes that the quantizer reads."""
    fmt = quantizer.format
    if not given:
        return
    if not fmt.tensor_amax:
        raise ValueError(f"{op}: amax is for per-tensor and two-level formats; {fmt.name} takes one per block")
    read = ["amax"] if fmt.one_scale or quantizer.rowwise else []
    read += ["columnwise_amax"] if fmt.two_level and quantizer.columnwise else []
    for name in given:
        if name not in read:
            raise ValueError(
                f"{op}: {name} ({fmt.name}) is not read: {quantizer.described()} reads {' and '.join(read)}"
            )
    if missing := [name for name in read if name not in given]:
        raise ValueError(f"{op}: {missing[0]} ({fmt.name}) is missing: each copy that is made reads its own")


def quantize_delayed(
    x: Operand, quantizer: Quantizer, scale: Operand, history: Operand, encoded: Shape | None = None
) -> tuple[Constraint, ...]:
    """Makes the checks of quantize, and demands a history [L], whose first entry records the amax."""
    op = "quantize_delayed"
    constraints = quantize("quantize", x, quantizer, scale=scale, encoded=encoded)
    require_dtype(op, history, "float32")
    message = f"{op}: history must be [L] with L >= 1, got {history}"
    if len(history.shape) != 1:
        raise ShapeError(message)
    return (*constraints, Constraint(1, history.shape[0], message, "<="))


class CopyOperands(NamedTuple):
    """The operands of one copy of a quantized tensor or stack."""

    format: FormatRow
    columnwise: bool
    data: Operand
    scale_inv: Operand
    amax: Operand | None


def copy(op: str, arg: str, q: CopyOperands) -> tuple[Constraint, ...]:
    """Demands that a copy of `arg` fits its format; the tensor's extents are computed from the copy's data."""
    fmt, columnwise = q.format, q.columnwise
    data, scale_inv = (x._replace(name=f"{arg} {x.name} ({fmt.name})") for x in (q.data, q.scale_inv))
    require_dtype(op, data, fmt.data)
    if not data.shape:
        raise ShapeError(f"{op}: {data.name} must have at least one dimension, got a scalar")
    m, k = shapes.copy_extents(fmt, columnwise, data.shape)
    require_dtype(op, scale_inv, fmt.scale)
    constraints = of_shape(op, scale_inv, *shapes.scale_shape(fmt, columnwise, m, k))
    name = f"{arg} amax ({fmt.name})"
    if not fmt.two_level:
        if q.amax is not None:
            raise ValueError(f"{op}: {name} is not read by this format")
        return constraints
    if q.amax is None:
        raise ArgumentError(f"{op}: {name} is missing")
    n = q.amax.numel
    one = columnwise or (isinstance(n, int) and n == 1)  # else one for each row
    return constraints + holds(op, q.amax._replace(name=name), "float32", 1 if one else m)
