"""Rules of stacks and of products of groups: the checks of operands, and the shapes of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.formats import FormatRow
from diptych.common.gemm_options import GemmOptions, check_gemm_options
from diptych.common.ops import shapes
from diptych.common.ops.operand import (
    Operand,
    of_shape,
    one_of,
    require_dtype,
    require_high_precision,
    require_result_dtype,
)
from diptych.common.ops.quantize import CopyOperands, copy, require_quantizer
from diptych.common.ops.shapes import Buffer, Constraint, Shape, Size
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer

ALIGNS = (1, 16, 32, 128)  # what offsets may be promised to be multiples of


class GroupedShape(NamedTuple):
    kind: Literal["rows", "depth"]
    out: Shape  # rows: [R, N]; depth: [G, M, N]
    n: Size
    k: Size  # reduced; depth: R
    constraints: tuple[Constraint, ...]


def stack_shape(shape: Shape) -> Shape:
    """Returns the shape of each tensor of a stack. **Raises** ShapeError for fewer than two dimensions."""
    if len(shape) < 2:
        raise ShapeError(f"a stack of tensors has at least two dimensions [G, ..., K]; got {list(shape)}")
    return shape[1:]


def stack_buffers(shape: Shape, quantizer: Quantizer) -> tuple[Buffer, ...]:
    """Returns the buffers that `quantize_stack` fills for [G, ..., K]: those of `quantize`, each with a leading G.

    Scales and amaxes of a whole tensor, [1] in `quantize`, are [G].
    """
    each_row = quantizer.spec.flags & ROW_AMAX

    def whole(name: str) -> bool:
        if name.endswith("scale_inv"):
            return quantizer.format.one_scale
        return name == "columnwise_amax" or (name == "amax" and not each_row)

    each = shapes.quantize_buffers(stack_shape(shape), quantizer)
    return tuple(b._replace(shape=(shape[0], *(() if whole(b.name) else b.shape))) for b in each)


def grouped_shape(
    groups: Size,
    a_format: FormatRow,
    a_columnwise: bool,
    a_data: Shape,
    b_format: FormatRow,
    b_columnwise: bool,
    b_data: Shape,
) -> GroupedShape:
    """Returns the shape of a product of groups of two copies. It reduces over each group's rows if A's copy is
    columnwise; otherwise it keeps A's rows.

    **Arguments:** `groups`: G. `a_data`, `b_data`: shapes of payloads. If A's rows are kept, B is a stack and the shape
    of its payload begins with G.

    **Raises** ShapeError if B must be a stack and is not, or if A's rows are reduced and B's are not.
    """
    op = "grouped_gemm"
    m, k = shapes.operand_extents(a_format, a_columnwise, a_data)
    if a_columnwise and not b_columnwise:
        raise ShapeError(f"{op}: the rows of a are reduced and those of b are not; pass trans_b=False")
    stack = not a_columnwise
    if stack and len(b_data) != 3:
        raise ShapeError(f"{op}: b must be a stack of matrices, one for each group; its data is {list(b_data)}")
    n, k_b = shapes.operand_extents(b_format, b_columnwise, b_data[stack:])
    names = f"a ({a_format.name}) reduces over {k} elements, b ({b_format.name}) over {k_b}"
    constraints = [Constraint(k, k_b, f"{op}: {names}")]
    if stack:
        message = f"{op}: b is a stack of {b_data[0]} tensors, and offsets are those of {groups} groups"
        constraints.append(Constraint(groups, b_data[0], message))
    out = (m, n) if stack else (groups, m, n)
    return GroupedShape("rows" if stack else "depth", out, n, k, tuple(constraints))


def offsets_of(op: str, offsets: Operand) -> tuple[Size, tuple[Constraint, ...]]:
    """Returns the number of groups of the offsets, int32 [groups + 1], and constraints on their number."""
    require_dtype(op, offsets, "int32")
    message = f"{op}: offsets must be [groups + 1], got {offsets}"
    if len(offsets.shape) != 1:
        raise ShapeError(message)
    return offsets.shape[0] - 1, (Constraint(1, offsets.shape[0], message, "<="),)


def grouped_gemm(
    a: CopyOperands,
    b: CopyOperands,
    offsets: Operand,
    bias: Operand | None,
    dtype: str,
    align: int,
    rotated: bool,
    options: GemmOptions,
) -> GroupedShape:
    """Returns the shape of a product of groups in `dtype`, and constraints on sizes. The core checks the values of
    offsets. `align`: a common divisor of the offsets. `rotated`: both copies are Hadamard-rotated."""
    op, pair = "grouped_gemm", f"{a.format.name} x {b.format.name}"
    require_result_dtype(op, dtype)
    groups, constraints = offsets_of(op, offsets)
    constraints += copy(op, "a", a)
    data = a.data.shape, b.data.shape
    shape = grouped_shape(groups, a.format, a.columnwise, data[0], b.format, b.columnwise, data[1])
    constraints += shape.constraints
    depth = shape.kind == "depth"
    constraints += copy(op, "b", b) if depth else _stack(op, b, groups)
    if bias is not None:
        if depth:
            raise ValueError(f"{op}: bias was given and is not read: weights' gradients have none")
        require_high_precision(op, bias)
        constraints += of_shape(op, bias, groups, shape.n)
    if align not in ALIGNS:
        raise ValueError(f"{op}: align must be {one_of(map(str, ALIGNS))}, got {align}")
    if rotated and (not depth or align % 16):
        raise ValueError(
            f"{op}: Hadamard-rotated copies mix 16 rows, so that groups must begin at multiples of 16; align must be "
            f"16, 32 or 128, got {align} ({pair})"
        )
    check_gemm_options(op, options, a.format, b.format)
    return shape._replace(constraints=constraints)


def _stack(op: str, b: CopyOperands, groups: Size) -> tuple[Constraint, ...]:
    """Demands that a copy's arrays are those of a stack of `groups` tensors; [1] of one tensor is [groups] here."""
    constraints: tuple[Constraint, ...] = ()
    each = {}
    for name in ("data", "scale_inv", "amax"):
        x: Operand | None = getattr(b, name)
        if x is None:
            each[name] = None
            continue
        message = f"{op}: b {name} ({b.format.name}) must begin with the number of groups, {groups}, got {x}"
        if not x.shape:
            raise ShapeError(message)
        constraints += (Constraint(x.shape[0], groups, message),)
        each[name] = x._replace(shape=x.shape[1:] or (1,))
    return constraints + copy(op, "b", b._replace(**each))


def grouped_bias_grad(dy: Operand, offsets: Operand) -> tuple[Size, tuple[Constraint, ...]]:
    """Returns the number of groups, and constraints on sizes."""
    op = "grouped_bias_grad"
    require_high_precision(op, dy)
    if not dy.shape:
        raise ShapeError(f"{op}: dy must have at least one dimension, got a scalar")
    return offsets_of(op, offsets)


def require_stackable(op: str, quantizer: Any) -> None:
    """**Raises** ArgumentError unless `quantizer` is a quantizer without its own `quantize_impl`."""
    require_quantizer(op, quantizer)
    if quantizer.implementation() is not None:
        raise ArgumentError(f"{op}: {type(quantizer).__name__} quantizes on its own; call quantize for each tensor")


def rotated_alike(op: str, a: Quantizer, b: Quantizer, reduces_rows: bool) -> bool:
    """Returns whether the copies that a product over rows reads are Hadamard-rotated. **Raises** ValueError where one
    is and the other is not."""
    of_a, of_b = (q.spec.flags & (RHT | RHT_SIGNS) if reduces_rows else 0 for q in (a, b))
    if of_a != of_b:
        raise ValueError(f"{op}: {a} and {b} do not rotate alike")
    return of_a != 0


def align_of(numbers: Sequence[Size]) -> int:
    """Returns the largest of `ALIGNS` that divides all of these sizes or offsets."""
    for align in reversed(ALIGNS):
        if all([n % align == 0 for n in numbers]):
            return align
    return 1


def kernel_align(align: int) -> int:
    """Returns the largest of `ALIGNS` that divides the promised `align`. **Raises** ValueError if it is below 1."""
    if align < 1:
        raise ValueError(f"align must be at least 1, got {align}")
    held = 1
    for known in ALIGNS:
        held = known if align % known == 0 else held
    return held
