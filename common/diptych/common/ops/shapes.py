"""One shape rule per op. torch fake implementations, JAX abstract evaluation and the eager allocators all call these.

Rules use only `+`, `*` and `//` on sizes, so that they also work for symbolic sizes, and never branch on a size. They
return conditions on sizes as `Constraint` data, which each panel enforces in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from diptych.common.errors import ShapeError
from diptych.common.formats import FormatRow
from diptych.common.quantizers import ROW_AMAX, SQUARE, Quantizer

Size = Any  # int, torch.SymInt or a JAX symbolic dimension
Shape = tuple[Size, ...]

HIGH_PRECISION = ("float32", "bfloat16", "float16")


class Buffer(NamedTuple):
    """An output to allocate. `name`: the attribute of the quantized tensor that will hold it."""

    name: str
    shape: Shape
    dtype: str


class Constraint(NamedTuple):
    """A condition `lhs == rhs` or `lhs <= rhs`; if it is false, `error` is raised with `message`.

    If `message` is a function, it is called only in that case. A "<=" counts as true for sizes that a traced program
    knows only when it runs, so limits make no guards.
    """

    lhs: Size
    rhs: Size
    message: str | Callable[[], str]
    relation: Literal["==", "<="] = "=="
    error: type[Exception] = ShapeError

    def words(self) -> str:
        return self.message if isinstance(self.message, str) else self.message()


class GemmShape(NamedTuple):
    m: Size
    n: Size
    k: Size
    constraints: tuple[Constraint, ...]


def ceil_div(a: Size, b: int) -> Size:
    return (a + b - 1) // b


def block_count(extent: Size, block: int) -> Size:
    """Returns the number of blocks along an extent; a block of the whole extent (0) exists even if that is empty."""
    return ceil_div(extent, block) if block else 1


def rows_cols(shape: Shape) -> tuple[Size, Size]:
    """Returns (rows, columns), with leading dimensions folded into rows. **Raises** ShapeError for a scalar."""
    if len(shape) == 0:
        raise ShapeError("a quantized tensor has at least one dimension; got a scalar, reshape it to [1]")
    return math.prod(shape[:-1]), shape[-1]


def scale_shape(fmt: FormatRow, columnwise: bool, m: Size, k: Size) -> Shape:
    """Shape of one copy's scales for an [m, k] tensor, in the orientation of that copy's data; one scale: (1,)."""
    if fmt.one_scale:
        return (1,)
    rows, cols = fmt.block(columnwise)
    down, across = block_count(m, rows), block_count(k, cols)
    return (across, down) if columnwise and fmt.columnwise == "transposed" else (down, across)


def data_shape(fmt: FormatRow, columnwise: bool, shape: Shape) -> Shape:
    """Shape of one copy's data: the tensor's own, or (K, M) for a transposed columnwise copy; packed: in bytes."""
    if columnwise and fmt.columnwise == "transposed":
        m, k = rows_cols(shape)
        return (k, m // fmt.pack)
    return (*shape[:-1], shape[-1] // fmt.pack)


def copy_extents(fmt: FormatRow, columnwise: bool, data: Shape) -> tuple[Size, Size]:
    """(M, K) of the tensor that one copy's data stands for."""
    rows, cols = rows_cols(data)
    cols = cols * fmt.pack
    return (cols, rows) if columnwise and fmt.columnwise == "transposed" else (rows, cols)


def tensor_shape(fmt: FormatRow, columnwise: bool, data: Shape) -> Shape:
    """Shape of the tensor that one copy's data stands for: [M, K] from a transposed copy."""
    if columnwise and fmt.columnwise == "transposed":
        return copy_extents(fmt, columnwise, data)
    return (*data[:-1], data[-1] * fmt.pack)


def quantize_constraints(shape: Shape, quantizer: Quantizer) -> tuple[Constraint, ...]:
    """Returns constraints on a tensor's extents: packed formats take whole blocks only."""
    fmt = quantizer.format
    m, k = rows_cols(shape)
    if fmt.pack == 1:
        return ()
    block = fmt.block_cols or fmt.pack
    say = f"quantize ({fmt.name}): {{}} of a {list(shape)} tensor must be a multiple of {block}"
    out = [Constraint(k // block * block, k, say.format("the last extent"))]
    if quantizer.columnwise or quantizer.spec.flags & SQUARE:
        out.append(Constraint(m // block * block, m, say.format("the number of rows")))
    return tuple(out)


def quantize_buffers(shape: Shape, quantizer: Quantizer) -> tuple[Buffer, ...]:
    """Returns the buffers that `quantize` fills for a tensor of `shape`, in this order: copies, then amaxes.

    Per-tensor formats have `amax` [1]; two-level formats have `amax` ([1], or one per row) with a rowwise copy and
    `columnwise_amax` [1] with a columnwise copy.
    """
    fmt = quantizer.format
    m, k = rows_cols(shape)
    buffers = []
    for columnwise, wanted, prefix in (
        (False, quantizer.rowwise, "rowwise"),
        (True, quantizer.columnwise, "columnwise"),
    ):
        if wanted:
            of = quantizer.copy_format(columnwise)
            buffers.append(Buffer(f"{prefix}_data", data_shape(of, columnwise, shape), of.data))
            buffers.append(Buffer(f"{prefix}_scale_inv", scale_shape(of, columnwise, m, k), of.scale))
    if fmt.one_scale or (fmt.two_level and quantizer.rowwise):
        buffers.append(Buffer("amax", (m if quantizer.spec.flags & ROW_AMAX else 1,), "float32"))
    if fmt.two_level and quantizer.columnwise:
        buffers.append(Buffer("columnwise_amax", (1,), "float32"))
    return tuple(buffers)


def activation_shape(op: str, shape: Shape, gated: bool) -> tuple[Shape, tuple[Constraint, ...]]:
    """Returns the shape of an activation's result, whose last dimension is halved if gated, and constraints on it."""
    rows_cols(shape)  # raises for a scalar
    if not gated:
        return shape, ()
    half = shape[-1] // 2
    message = f"{op}: a gated activation halves the last dimension of x, got {list(shape)}"
    return (*shape[:-1], half), (Constraint(2 * half, shape[-1], message),)


def operand_extents(fmt: FormatRow, columnwise: bool, data: Shape) -> tuple[Size, Size]:
    """(kept, reduced) extents of a gemm operand, given the data of one of its copies."""
    rows, cols = rows_cols(data)
    cols = cols * fmt.pack
    return (cols, rows) if columnwise and fmt.columnwise == "row_major" else (rows, cols)


def gemm_copies(trans_a: bool, trans_b: bool) -> tuple[bool, bool]:
    """Returns whether op(a) @ op(b) reads the columnwise copy of a, and of b; it does if it reduces that one's rows."""
    return trans_a, not trans_b


def gemm_shape(
    a_format: FormatRow, a_columnwise: bool, a_data: Shape, b_format: FormatRow, b_columnwise: bool, b_data: Shape
) -> GemmShape:
    """Returns the extents of the product of two copies, with the constraint that both reduce over the same length."""
    m, k = operand_extents(a_format, a_columnwise, a_data)
    n, k_b = operand_extents(b_format, b_columnwise, b_data)
    same = Constraint(k, k_b, f"gemm: a ({a_format.name}) reduces over {k} elements, b ({b_format.name}) over {k_b}")
    return GemmShape(m, n, k, (same,))


def gemm_out_shape(a_shape: Shape, m: Size, n: Size, trans_a: bool) -> Shape:
    """Returns the shape of the product; it keeps a's leading dimensions unless a's rows are reduced."""
    return (m, n) if trans_a else (*a_shape[:-1], n)


def check(constraints: tuple[Constraint, ...]) -> None:
    """Enforces constraints on concrete sizes. **Raises** each one's error."""
    for c in constraints:
        if c.lhs > c.rhs or (c.lhs < c.rhs and c.relation == "=="):
            raise c.error(c.words())
