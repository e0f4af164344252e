"""Ops that move rows between token order and expert order (NUMERICS 8), on NumPy arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, overload

import numpy as np

from diptych.common.byte_order import check_byte_order
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.ops import permute as moe
from diptych.common.ops import shapes
from diptych.common.quantizers import ROW_AMAX, Quantizer
from diptych.core import _core
from diptych.core._arrays import (
    Array,
    QuantizedArray,
    _empty,
    _given_values,
    _high_precision,
    _Operand,
    _operand,
    _quantized,
    quantize,
)

_KINDS: dict[str, int] = _core.moe_table()["routing_map"]
_NAMES = frozenset(_core.dtype_table())
_PERMUTED: int = _core.fused_table()["source"]["permuted"]


@dataclasses.dataclass(frozen=True, eq=False)
class RowMap:
    """Where each token's row goes, and where each destination row comes from.

    `row_id_map`: int32 [T, slots], the destination row of each slot, or -1. `row_source`: int32 [rows], t * slots +
    slot of each row, or -1 for an absent row. A map to experts also has `tokens_per_expert`: int32 [E], the rows of
    each expert without padding, and `expert_offsets`: int32 [E + 1], where each region starts and the last one ends.
    """

    row_id_map: Array
    row_source: Array
    tokens_per_expert: Array | None = None
    expert_offsets: Array | None = None

    @property
    def tokens(self) -> int:
        return self.row_id_map.shape[0]

    @property
    def slots(self) -> int:
        return self.row_id_map.shape[1]

    @property
    def rows(self) -> int:
        return self.row_source.shape[0]


def _array(op: str, arg: str, x: Any, dtypes: frozenset[str] | tuple[str, ...] = _NAMES) -> Array:
    wanted = f"{op}: {arg} must be a NumPy array of {' or '.join(sorted(dtypes))}, got "
    if not isinstance(x, np.ndarray):
        raise ArgumentError(wanted + type(x).__name__)
    if x.dtype.name not in dtypes:
        raise DTypeError(wanted + x.dtype.name)
    check_byte_order(op, arg, x.dtype)
    return np.ascontiguousarray(x).reshape(x.shape)


def _given(x: Array) -> _Operand:
    return _operand(x, x.dtype.name)


def _like(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns uninitialized memory of x's dtype."""
    return _empty(shape, x.dtype.name).view(x.dtype)


def _int32(x: Array) -> _Operand:
    return _operand(x, "int32")


def permute_map(routing: Array, *, experts: int | None = None, rows: int | None = None, align: int = 1) -> RowMap:
    """Returns the map of tokens to experts for a routing: rows ordered by expert, within an expert by token.

    **Arguments:** `routing`: bool or uint8 [T, E], where a token goes to every expert whose entry is not 0; or int32 or
    int64 [T, k] expert ids, where ids outside of 0..E-1 are ignored. `experts`: E, needed with ids. `rows`: how many
    rows the destination has, later rows are dropped; needed with a mask, with ids by default as many as any routing
    needs. `align`: each expert's region starts at a multiple of it.

    **Returns:** a `RowMap`.

    **Raises:** TypeError for other dtypes, ValueError for other shapes or a mask without `rows`, NotImplementedError
    for more than 2048 experts.
    """
    op = "permute_map"
    routing = _array(op, "routing", routing, ("bool", "uint8", "int32", "int64"))
    if routing.ndim != 2:
        raise ShapeError(f"{op}: routing must have two dimensions, got {list(routing.shape)}")
    tokens, slots = routing.shape
    mask = routing.dtype.name in ("bool", "uint8")
    if mask and experts not in (None, slots):
        raise ShapeError(f"{op}: a mask of {list(routing.shape)} has {slots} experts, not {experts}")
    if not mask and experts is None:
        raise ValueError(f"{op}: expert ids need experts=, how many there are")
    if mask and rows is None:
        raise ValueError(f"{op}: a mask needs rows=, how many rows the destination has (choices of a token times T)")
    count = slots if experts is None else experts
    if rows is None:
        rows = moe.padded_rows(tokens * slots, count, align)
    out = {b.name: np.empty(b.shape, b.dtype) for b in moe.map_buffers(tokens, slots, count, rows)}
    given = _given(routing.view(np.uint8) if mask else routing)
    _core.permute_map(
        given,
        kind=_KINDS["mask" if mask else "index"],
        align=align,
        **{name: _int32(buffer) for name, buffer in out.items()},
        workspace=None,
    )
    order = ("row_id_map", "row_source", "tokens_per_expert", "expert_offsets")
    return RowMap(*(out[name] for name in order))


def chunk_map(split_sizes: Array, order: Array, tokens: int) -> RowMap:
    """Returns the map that reorders whole chunks of rows: chunk `order[j]` comes j-th.

    **Arguments:** `split_sizes`, `order`: int32 [C]. `tokens`: rows of the source and of the destination.

    **Returns:** a `RowMap` of one slot. Rows of chunks that `order` does not list, and rows past the sum of the sizes,
    have no destination; if `order` lists a chunk twice, the first place counts.

    **Raises:** TypeError for other dtypes, ValueError for unequal lengths.
    """
    op = "chunk_map"
    sizes, order = _array(op, "split_sizes", split_sizes, ("int32",)), _array(op, "order", order, ("int32",))
    out = np.empty((tokens, 1), np.int32), np.empty(tokens, np.int32)
    _core.chunk_map(*map(_int32, (sizes, order, *out)))
    return RowMap(*out)


def invert_map(row_id_map: Array, rows: int) -> RowMap:
    """Returns the `RowMap` of a row_id_map [T, slots] int32 whose row_source is not known.

    Entries outside of 0..rows-1 become -1. If several entries hold the same row, all but the last become -1.

    **Raises:** TypeError for another dtype, ValueError for another shape or more than 2^31 - 1 entries.
    """
    row_id_map = _array("invert_map", "row_id_map", row_id_map, ("int32",))
    row_source, kept = np.empty(rows, np.int32), np.empty(row_id_map.shape, np.int32)
    _core.invert_map(*map(_int32, (row_id_map, row_source, kept)))
    return RowMap(kept, row_source)


@functools.lru_cache
def absent_scale(quantizer: Quantizer) -> int:
    """Returns, as an integer, the first four bytes of the block scales that `quantizer` gives a row of zeros."""
    fmt = quantizer.format
    rows = max(fmt.block_cols, 1)
    zeros = np.zeros((rows, 4 * rows), np.float32)
    plain = quantizer.with_usage(rowwise=True, columnwise=False)
    rng = {"rng": np.zeros(4, np.int32)} if quantizer.needs_rng else {}
    made = quantize(zeros, plain, **rng).rowwise_scale_inv
    assert made is not None
    return int.from_bytes(made.tobytes()[:4], "little")


def moved_parts(quantizer: Quantizer) -> dict[str, int]:
    """Returns the parts of a quantized tensor that move with its rows, and the four bytes that absent rows repeat.

    **Raises** ValueError if a block spans several rows, or `quantizer` makes no rowwise copy.
    """
    fmt = quantizer.format
    if not quantizer.rowwise:
        raise ValueError(f"permute: {quantizer} makes no rowwise copy, which is what moves")
    if fmt.block_rows != 1 and not fmt.one_scale:
        rows = fmt.block_rows or "all"
        raise ValueError(f"permute: blocks of {fmt.name} span {rows} rows, which part when rows move")
    parts = {"rowwise_data": 0}
    if not fmt.one_scale:
        parts["rowwise_scale_inv"] = absent_scale(quantizer)
    if quantizer.spec.flags & ROW_AMAX:
        parts["amax"] = 0
    return parts


def _permute(
    planes: list[tuple[_Operand, _Operand, int]], row_map: RowMap, probs: Array | None, zero_prob_is_padding: bool
) -> Array | None:
    permuted = None if probs is None else _like(probs, (row_map.rows,))
    given, made = (None if p is None else _given(p) for p in (probs, permuted))
    _core.permute(planes, _int32(row_map.row_id_map), _int32(row_map.row_source), given, made, zero_prob_is_padding)
    return permuted


def _moved_shape(x: Array, row_map: RowMap) -> tuple[int, ...]:
    return (row_map.rows, *x.shape[-1:]) if x.ndim > 1 else (row_map.rows,)


def _moved(q: QuantizedArray, row_map: RowMap) -> tuple[QuantizedArray, list[tuple[_Operand, _Operand, int]]]:
    fmt, columns = q.quantizer.format, q.quantizer.columnwise and q.quantizer.format.one_scale
    dtypes = {"rowwise_data": fmt.data, "rowwise_scale_inv": fmt.scale, "amax": "float32"}
    made: dict[str, Any] = {"amax": q.amax, "rowwise_scale_inv": q.rowwise_scale_inv}
    planes = []
    for name, fill in moved_parts(q.quantizer).items():
        old = getattr(q, name)
        made[name] = _empty(_moved_shape(old, row_map), dtypes[name])
        planes.append((_operand(old, dtypes[name]), _operand(made[name], dtypes[name]), fill))
    if columns:
        data, made["columnwise_scale_inv"] = q.copy_of(True)
        made["columnwise_data"] = _empty((data.shape[0], row_map.rows), fmt.data)
        out = _operand(made["columnwise_data"], fmt.data)
        _core.permute_columns(_operand(data, fmt.data), out, _int32(row_map.row_source), max(1, row_map.slots))
    quantizer = q.quantizer.with_usage(columnwise=columns)
    return QuantizedArray(quantizer, (row_map.rows, q.shape[-1]), **made), planes


@overload
def permute(x: Array, row_map: RowMap) -> Array: ...
@overload
def permute(x: QuantizedArray, row_map: RowMap) -> QuantizedArray: ...
@overload
def permute(x: Array, row_map: RowMap, *, probs: Array, zero_prob_is_padding: bool = False) -> tuple[Array, Array]: ...
@overload
def permute(
    x: QuantizedArray, row_map: RowMap, *, probs: Array, zero_prob_is_padding: bool = False
) -> tuple[QuantizedArray, Array]: ...


def permute(
    x: Array | QuantizedArray, row_map: RowMap, *, probs: Array | None = None, zero_prob_is_padding: bool = False
) -> Any:
    """Moves the rows of `x` to where `row_map` sends them; absent rows are zeros.

    **Arguments:** `x`: [..., K] with T rows, or [T], of any dtype of the core; or a quantized tensor, whose rowwise
    copy moves as bytes, with its scales (for per-tensor formats the columnwise copy too). `probs`: [T, slots] float32,
    bfloat16, float16 or float64. `zero_prob_is_padding`: a probability of exactly 0 makes its row absent.

    **Returns:** [rows, K], or [rows]; with `probs` a pair of that and each row's probability, [rows].

    **Raises:** TypeError for dtypes, ValueError for shapes, a format whose blocks span rows, or
    `zero_prob_is_padding` without `probs`.
    """
    if probs is not None:
        probs = _array("permute", "probs", probs)
    if isinstance(x, QuantizedArray):
        out, planes = _moved(x, row_map)
    else:
        x = _array("permute", "x", x)
        out = _like(x, _moved_shape(x, row_map))
        planes = [(_given(x), _given(out), 0)]
    permuted = _permute(planes, row_map, probs, zero_prob_is_padding)
    return out if permuted is None else (out, permuted)


def permute_quantize(
    x: Array,
    row_map: RowMap,
    quantizer: Quantizer,
    *,
    amax: Array | None = None,
    columnwise_amax: Array | None = None,
    scale: Array | None = None,
    rng: Array | None = None,
) -> QuantizedArray:
    """Returns `quantize(permute(x, row_map), quantizer)`, computed in one pass that never stores the permuted tensor.

    **Arguments:** `x`: [..., K] with T rows, float32, bfloat16 (ml_dtypes) or float16. `row_map`: a map whose
    `row_id_map` and `row_source` agree. The other arguments are those of `quantize`.

    **Returns:** a `QuantizedArray` of shape [rows, K]. Each copy encodes the permuted rows: blocks of the columnwise
    copy run along permuted rows, and absent rows are quantized zeros.

    **Raises:** the errors of `quantize`, and ValueError if `x` does not have T rows.
    """
    state = _given_values(amax, columnwise_amax, scale, rng)
    if quantizer.custom:
        return quantize(permute(x, row_map), quantizer, **state)
    op = "permute_quantize"
    x = _high_precision(op, "x", x)
    shape = (row_map.rows, shapes.rows_cols(x.shape)[1])
    shapes.check(shapes.quantize_constraints(shape, quantizer))
    source = (_PERMUTED, _int32(row_map.row_id_map), _int32(row_map.row_source))
    buffers = shapes.quantize_buffers(shape, quantizer)
    made = _quantized(op, x, quantizer, buffers, state, source=source, shape=shape)
    return QuantizedArray(quantizer, shape, **made)


@overload
def unpermute(x: Array, row_map: RowMap, *, probs: Array | None = None) -> Array: ...
@overload
def unpermute(
    x: Array, row_map: RowMap, *, probs: Array | None = None, permuted_dprobs: Array
) -> tuple[Array, Array]: ...


def unpermute(
    x: Array, row_map: RowMap, *, probs: Array | None = None, permuted_dprobs: Array | None = None
) -> Array | tuple[Array, Array]:
    """Sums each token's rows in ascending order, in float32 (float64 for float64 rows), and rounds once.

    **Arguments:** `x`: [rows, H] float32, bfloat16, float16 or float64. `probs`: [T, slots], the factor of each row;
    float64 only if `x` is. `permuted_dprobs`: [rows], the gradient of the probabilities that `permute` returned.

    **Returns:** [T, H] of x's dtype; with `permuted_dprobs` a pair of that and the gradient of `permute`'s `probs`,
    [T, slots], which is 0 for slots without a row.

    **Raises:** TypeError for other dtypes, ValueError for other shapes.
    """
    op = "unpermute"
    x = _array(op, "x", x)
    out = _like(x, (row_map.tokens, *x.shape[-1:]))
    given = None if probs is None else _given(_array(op, "probs", probs))
    operands = _given(x), _int32(row_map.row_id_map), given, _given(out)
    if permuted_dprobs is None:
        _core.unpermute(*operands)
        return out
    permuted_dprobs = _array(op, "permuted_dprobs", permuted_dprobs)
    dprobs = _like(permuted_dprobs, row_map.row_id_map.shape)
    _core.unpermute(*operands, _given(permuted_dprobs), _given(dprobs))
    return out, dprobs


def unpermute_grad(dy: Array, row_map: RowMap, probs: Array, x: Array) -> tuple[Array, Array]:
    """Returns the gradients of `unpermute` with probabilities: p * dy for its rows, dot(x, dy) for its probabilities.

    **Arguments:** `dy`: [T, H]. `probs`: [T, slots]. `x`: [rows, H] of dy's dtype, the input of `unpermute`.

    **Returns:** (dx [rows, H], dprobs [T, slots]); dx is 0 for absent rows, dprobs for slots without a row.

    **Raises:** TypeError for other dtypes, ValueError for other shapes.
    """
    dy, probs, x = (_array("unpermute_grad", n, t) for n, t in (("dy", dy), ("probs", probs), ("x", x)))
    dx, dprobs = _like(x, (row_map.rows, *dy.shape[-1:])), _like(probs, row_map.row_id_map.shape)
    maps = _int32(row_map.row_id_map), _int32(row_map.row_source)
    _core.unpermute_grad(_given(dy), *maps, _given(probs), _given(dx), _given(x), _given(dprobs))
    return dx, dprobs
