"""Shape rules of stacks and of products of groups, beside those of `shapes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from diptych.common.errors import ShapeError
from diptych.common.formats import FormatRow
from diptych.common.ops import shapes
from diptych.common.ops.shapes import Buffer, Constraint, Shape, Size
from diptych.common.quantizers import ROW_AMAX, Quantizer

ALIGNS = (1, 16, 32, 128)  # what offsets may be promised to be multiples of


class GroupedShape(NamedTuple):
    kind: Literal["rows", "depth"]
    out: Shape  # rows: [R, N]; depth: [G, M, N]
    n: Size
    k: Size  # reduced; depth: R
    constraints: tuple[Constraint, ...]


def stack_shape(shape: Shape) -> Shape:
    """Shape of each tensor of a stack. **Raises** ShapeError for what has no tensors of a dimension or more."""
    if len(shape) < 2:
        raise ShapeError(f"a stack of tensors has at least two dimensions [G, ..., K]; got {list(shape)}")
    return shape[1:]


def stack_buffers(shape: Shape, quantizer: Quantizer) -> tuple[Buffer, ...]:
    """What `quantize_stack` fills for [G, ..., K]: what `quantize` fills for each tensor, behind a leading G.

    Scales and amaxes of a whole tensor, [1] there, are [G].
    """
    each_row = quantizer.spec.flags & ROW_AMAX

    def whole(name: str) -> bool:
        if name.endswith("scale_inv"):
            return quantizer.format.per_tensor
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
    """The product of groups that two copies make: over rows where A's is columnwise, else for each row.

    **Arguments:** `groups`: G. `a_data`, `b_data`: shapes of payloads; that of B begins with G where there is a product
    for each row.

    **Raises** ShapeError for a B that is no stack then, or an A whose rows are reduced where B's are not.
    """
    m, k = shapes.operand_extents(a_format, a_columnwise, a_data)
    if a_columnwise and not b_columnwise:
        raise ShapeError("grouped_gemm: the rows of a are reduced and those of b are not; pass trans_b=False")
    stack = not a_columnwise
    if stack and len(b_data) != 3:
        raise ShapeError(f"grouped_gemm: b must be a stack of matrices, one for each group; its data is {list(b_data)}")
    n, k_b = shapes.operand_extents(b_format, b_columnwise, b_data[stack:])
    names = f"a ({a_format.name}) reduces over {k} elements, b ({b_format.name}) over {k_b}"
    constraints = [Constraint(k, k_b, f"grouped_gemm: {names}")]
    if stack:
        message = f"grouped_gemm: offsets are those of {groups} groups, and b is a stack of {b_data[0]} tensors"
        constraints.append(Constraint(groups, b_data[0], message))
    out = (m, n) if stack else (groups, m, n)
    return GroupedShape("rows" if stack else "depth", out, n, k, tuple(constraints))


def align_of(numbers: Sequence[Size]) -> int:
    """The largest of `ALIGNS` that all of these sizes, or offsets, are multiples of."""
    for align in reversed(ALIGNS):
        if all([n % align == 0 for n in numbers]):
            return align
    return 1


def kernel_align(align: int) -> int:
    """The largest of `ALIGNS` that a promise holds for. **Raises** ValueError for one below 1."""
    if align < 1:
        raise ValueError(f"align must be at least 1, got {align}")
    held = 1
    for known in ALIGNS:
        held = known if align % known == 0 else held
    return held
