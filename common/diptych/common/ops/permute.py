"""Rules of the ops that move rows between token and expert order: the checks of operands, and the shapes of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from diptych.common.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from diptych.common.formats import FormatRow
from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, of_shape, one_of, require_dtype
from diptych.common.ops.shapes import HIGH_PRECISION, Buffer, Constraint, Shape, Size

MAX_SLOTS = 2048
"""The largest number of slots of a token, of experts or of chunks that the kernels take."""
_MAX_COUNT = 2**31 - 1  # the largest number of rows or tokens * slots of a map
MASK_DTYPES = ("bool", *[f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")])
ID_DTYPES = ("int32", "int64")
SUMMED = (*HIGH_PRECISION, "float64")
"""Dtypes of rows that unpermute sums; float64 on the CPU only."""


def padded_rows(entries: Size, experts: Size, align: int) -> Size:
    """Returns a number of rows that suffices for `entries` (token, expert) pairs under any routing, with each expert's
    region rounded up to a multiple of `align`.

    An index map [T, k] has at most T * k entries; for a mask the caller knows how many experts a token chooses.
    """
    return (entries + experts * (align - 1)) // align * align


def counted_rows(counts: Sequence[Size], align: int) -> Size:
    """Returns the total rows of regions with these counts, each rounded up to a multiple of `align`."""
    rows: Size = 0
    for n in counts:
        rows += (n + align - 1) // align * align
    return rows


def overflow(counts: Sequence[int], found: Sequence[int], align: int) -> int:
    """Returns by how many rows regions overrun their space if they are placed by `counts` and hold `found` rows."""
    before = end = pad = 0
    for n, there in zip(counts, found, strict=True):
        before += there
        end = max(end, before + pad if there else 0)
        pad += -n % align
    return end - counted_rows(counts, align)


def map_buffers(tokens: Size, slots: Size, experts: Size, rows: Size) -> tuple[Buffer, ...]:
    """The buffers that `permute_map` fills."""
    return (
        Buffer("row_id_map", (tokens, slots), "int32"),
        Buffer("tokens_per_expert", (experts,), "int32"),
        Buffer("expert_offsets", (experts + 1,), "int32"),
        Buffer("row_source", (rows,), "int32"),
    )


# --- numbers ---


def require_int(
    op: str,
    arg: str,
    value: Any,
    least: int,
    kinds: tuple[type, ...],
    remedy: str = "",
    known: Callable[[Any], bool] = bool,
) -> None:
    """**Raises** ArgumentError unless `value` is an integer of one of these types, ValueError if it is below `least`.

    `remedy`: the end of the first message. `known`: returns whether a comparison is known to be true; a traced program
    may not know it yet.
    """
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ArgumentError(f"{op}: {arg} must be an int, got {type(value).__name__}{remedy}")
    if known(value < least):
        raise ValueError(f"{op}: {arg} must be at least {least}, got {value}")


def few(op: str, what: str, n: Size) -> Constraint:
    """Demands that n slots, experts or chunks are not more than the kernels take."""
    return Constraint(
        n, MAX_SLOTS, lambda: f"{op}: {n} {what}, and the kernels take at most {MAX_SLOTS}", "<=", UnsupportedError
    )


def counted(op: str, what: str, n: Size) -> Constraint:
    """Demands that n fits int32."""

    def message() -> str:
        return f"{op}: {what} are {n}, and a map numbers at most {_MAX_COUNT}; permute fewer tokens at a time"

    return Constraint(n, _MAX_COUNT, message, "<=")


def require_integers(op: str, x: Operand, form: str) -> None:
    """**Raises** DTypeError or ShapeError unless x is 1-D and int32 or int64; `form`: the shape for the message."""
    require_dtype(op, x, *ID_DTYPES)
    require_rank(op, x, 1, form)


def require_rank(op: str, x: Operand, rank: int, form: str) -> None:
    """**Raises** ShapeError unless x has this rank; `form` describes the shape in the message."""
    if len(x.shape) != rank:
        raise ShapeError(f"{op}: {x.name} must be {form}, got {x}")


# --- maps ---


def require_kind(op: str, map_type: Any) -> None:
    """**Raises** ValueError for an unknown map_type."""
    if map_type not in ("mask", "index"):
        raise ValueError(f"{op}: map_type must be 'mask' or 'index', got {map_type!r}")


def require_experts(op: str, map_type: str, num_experts: Any) -> None:
    """**Raises** ValueError for expert ids without the number of experts."""
    if map_type == "index" and num_experts is None:
        raise ValueError(f"{op}: expert ids need num_experts, how many there are")


def refuse_beside_map(op: str, num_out_tokens: Any, num_experts: Any, map_type: Any) -> None:
    """**Raises** ValueError if an argument is given together with a `RowMap` that already determines it."""
    given = ("num_out_tokens", num_out_tokens, None), ("num_experts", num_experts, None), ("map_type", map_type, "mask")
    for arg, value, default in given:
        if value != default:
            raise ValueError(f"{op}: {arg} was given beside a RowMap, which says it already; pass it to moe_map")


def routing(op: str, x: Operand, mask: bool, experts: Size, rows: Size, align: int) -> tuple[Constraint, ...]:
    """Demands a mask [T, E] or expert ids [T, k], and that the rows of the map made from it fit int32."""
    kind = "a mask" if mask else "expert ids"
    require_rank(op, x, 2, "[T, E]" if mask else "[T, k]")
    require_dtype(op, x._replace(name=f"{x.name} ({kind})"), *(MASK_DTYPES if mask else ID_DTYPES))
    tokens, slots = x.shape
    constraints = []
    if mask:
        constraints.append(Constraint(slots, experts, lambda: f"{op}: {x.name} {x} has {slots} experts, not {experts}"))
    return (
        *constraints,
        Constraint(1, experts, lambda: f"{op}: there must be at least one expert, got {experts}", "<="),
        few(op, "slots of a token", slots),
        few(op, "experts", experts),
        counted(op, "rows", rows),
        counted(op, "rows with the alignment's padding", tokens * slots + experts * (align - 1)),
    )


def row_map(op: str, x: Operand) -> tuple[Constraint, ...]:
    """Demands a row_id_map: int32 [T, slots]."""
    require_dtype(op, x, "int32")
    require_rank(op, x, 2, "[T, slots]")
    return few(op, "slots of a token", x.shape[1]), counted(op, "tokens * slots", x.shape[0] * x.shape[1])


def row_source(op: str, x: Operand) -> tuple[Constraint, ...]:
    """Demands a row_source: int32 [rows]."""
    require_dtype(op, x, "int32")
    require_rank(op, x, 1, "[rows]")
    return (counted(op, "rows", x.shape[0]),)


def chunks(op: str, split_sizes: Operand, sorted_index: Operand, tokens: Size) -> tuple[Constraint, ...]:
    """Demands as many sizes as indices [C], and no more chunks and tokens than a map can hold."""
    (sizes,), (named,) = split_sizes.shape, sorted_index.shape
    differ = Constraint(named, sizes, lambda: f"{op}: split_sizes has {sizes} chunks, and sorted_index names {named}")
    return differ, few(op, "chunks", sizes), counted(op, "tokens", tokens)


def chunk_numbers(
    op: str, sizes: Sequence[int] | None, order: Sequence[int] | None, tokens: Size
) -> tuple[Constraint, ...]:
    """Demands that `sizes`, if known on the host, add up to `tokens`.

    **Raises** ValueError if `order`, if known on the host, does not name each chunk once.
    """
    if order is not None and sorted(order) != list(range(len(order))):
        raise ValueError(f"{op}: sorted_index must name each of {len(order)} chunks once, got {list(order)}")
    if sizes is None:
        return ()
    total = sum(sizes)
    return (Constraint(total, tokens, lambda: f"{op}: split_sizes add up to {total}, and inp has {tokens} rows"),)


# --- rows ---


def require_movable(op: str, fmt: FormatRow, rowwise: bool, columnwise: bool) -> None:
    """**Raises** ValueError unless rows of a quantized tensor with these copies can move without its other rows."""
    if not rowwise:
        raise ValueError(
            f"{op}: rows are what moves, and inp has no rowwise copy; quantize it with_usage(rowwise=True)"
        )
    if fmt.one_scale:
        return
    if fmt.block_rows != 1:
        rows = fmt.block_rows or "all"
        raise ValueError(f"{op}: blocks of inp's {fmt.name} span {rows} rows, which part when rows move")
    if columnwise:
        raise ValueError(
            f"{op}: blocks of inp's columnwise copy ({fmt.name}) run along {fmt.block_cols or 'all'} tokens, which "
            "part when rows move; quantize it with_usage(columnwise=False)"
        )


def require_floats(op: str, x: Operand, wide: bool = True) -> None:
    """**Raises** DTypeError unless x is in high precision or, where `wide`, float64."""
    if x.dtype in HIGH_PRECISION or (wide and x.dtype == "float64"):
        return
    allowed = one_of(SUMMED) if wide else f"{one_of(HIGH_PRECISION)} unless the rows are float64"
    raise DTypeError(f"{op}: {x.name} must be {allowed}, got {x}")


def per_slot(op: str, x: Operand, map_shape: Shape, wide: bool) -> tuple[Constraint, ...]:
    """Demands a probability for each slot of a row_id_map."""
    require_floats(op, x, wide)
    return of_shape(op, x, *map_shape)


def tokens_of(op: str, x: Operand, tokens: Size, of: str) -> tuple[Constraint, ...]:
    """Demands that x [..., H] has a row for each token; `of` names the tokens in the message."""
    if len(x.shape) < 2:
        raise ShapeError(f"{op}: {x.name} must be [..., H], got {x}")
    rows = shapes.rows_cols(x.shape)[0]
    return (Constraint(rows, tokens, lambda: f"{op}: {x.name} must have a row for each of {of}, {tokens}, got {x}"),)


def plane(op: str, x: Operand, tokens: Size) -> tuple[Constraint, ...]:
    """Demands that a tensor to permute, [..., K] or [T], has a row for each token of the map."""
    if len(x.shape) == 0:
        raise ShapeError(f"{op}: {x.name} must have at least one dimension, got a scalar")
    count = math.prod(x.shape[:-1] if len(x.shape) > 1 else x.shape)
    return (
        Constraint(
            count, tokens, lambda: f"{op}: {x.name} must have a row for each of the map's {tokens} tokens, got {x}"
        ),
    )


def row_probs(op: str, x: Operand, tokens: Size) -> tuple[Constraint, ...]:
    """Demands that x has a probability for each row of the chunks, [T] or [T, 1]."""
    require_floats(op, x)

    def message() -> str:
        return f"{op}: {x.name} must be [T] or [T, 1] with T = {tokens}, got {x}"

    if len(x.shape) not in (1, 2) or (len(x.shape) == 2 and x.shape[1] != 1):
        raise ShapeError(message())
    return (Constraint(x.shape[0], tokens, message),)


def require_rows(op: str, x: Operand) -> None:
    """**Raises** ShapeError unless x is rows [rows, H]."""
    if len(x.shape) < 2:
        raise ShapeError(f"{op}: {x.name} must be [rows, H], got {x}")


def merging_probs(op: str, merging: Any, deprecated: Any) -> Any:
    """Returns the probabilities given under either of two names. **Raises** ValueError if both are given."""
    if deprecated is None:
        return merging
    if merging is not None:
        raise ValueError(f"{op}: merging_probs and probs, its deprecated name, were both given")
    return deprecated


def refuse_pad_offsets(op: str, map_type: str) -> None:
    """**Raises** ValueError if pad_offsets are given with an index map, whose row_id_map does not name experts."""
    if map_type == "index":
        raise ValueError(f"{op}: pad_offsets belong to experts, and an index map's row_id_map does not name them")


def restored(op: str, tokens: Size, cols: Size, shape: Sequence[Size]) -> tuple[Constraint, ...]:
    """Demands that `shape` is [..., cols] with as many rows as `tokens`."""
    wanted = list(shape)
    if len(wanted) < 2:
        raise ShapeError(f"{op}: restore_shape must be [..., H], got {wanted}")
    message = f"{op}: restore_shape {wanted} does not hold the {[tokens, cols]} of the map and inp"
    return Constraint(math.prod(wanted[:-1]), tokens, message), Constraint(wanted[-1], cols, message)
