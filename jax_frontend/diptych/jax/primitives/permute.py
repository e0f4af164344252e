"""The ops that move rows between token order and expert order, on raw buffers (NUMERICS 8), as JAX primitives.

No op waits for a count: the caller sets the sizes of results, and counts stay on the device. For any values in a map,
nothing is read or written out of bounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from diptych.common.errors import DTypeError, UnsupportedError
from diptych.common.ops import permute as rules
from diptych.common.ops import shapes
from diptych.common.ops.operand import of_shape, require_dtype
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import (
    Aval,
    check_buffer,
    check_row_map,
    check_rows,
    check_shape,
    enforce,
    operand,
    own_shape,
)
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.register import batch_shape, primitive, result, workspace_bytes

Array = jax.Array

MOVED = tuple(sorted(set(_core.dtype_table()) - {"float4_e2m1fn"}))
"""Names of the dtypes of rows that are moved."""
_FIRST_ALONE = (
    "moe_permute, moe_unpermute and their neighbours define first derivatives in reverse mode alone, of tensors that "
    "are not quantized. Wrap what is not to be differentiated in jax.lax.stop_gradient"
)


# --- checks ---


def _check_per_slot(op: str, arg: str, aval: Aval, mask: int, map_shape: shapes.Shape, wide: bool) -> None:
    enforce(rules.per_slot(op, operand(arg, aval, mask), map_shape, wide))


def _refuse_wide(op: str, ctx: Any, platform: str) -> None:
    if platform == "cuda" and ctx.avals_in[0].dtype.name == "float64":
        raise UnsupportedError(f"{op}: float64 rows are summed on the CPU alone; cast them to float32")


# --- maps ---


def _permute_map_abstract(routing: Aval, *, batch: Batch, kind: str, experts: Any, rows: Any, align: int) -> Any:
    x = operand("routing", routing, batch.axes[0])
    if kind == "mask":  # of other integers, who calls this makes bools
        require_dtype("permute_map", x, "bool", "uint8")
    enforce(rules.routing("permute_map", x, kind == "mask", experts, rows, align))
    tokens, slots = x.shape
    front = batch_shape((routing,), batch)
    buffers = rules.map_buffers(tokens, slots, experts, rows)
    return [result((routing,), (*front, *b.shape), b.dtype) for b in buffers]


def _permute_map_finish(ctx: Any, platform: str, batch: Batch, kind: str, experts: Any, **_: Any) -> Any:
    tokens, slots = own_shape(ctx.avals_in[0], batch.axes[0])
    sizes = (tokens if kind == "mask" else tokens * slots, experts)
    rule = partial(_core.permute_map_workspace_bytes, ffi.MOE["routing_map"][kind])
    return {}, workspace_bytes("permute_map", platform, sizes, rule)


permute_map_p = primitive(
    "permute_map",
    _permute_map_abstract,
    lambda _, batch, kind, align, **__: ffi.permute_map_attributes(batch, kind, align),
    _permute_map_finish,
    no_derivative=_FIRST_ALONE,
)


def permute_map(routing: Array, kind: str, experts: Any, rows: Any, align: int) -> dict[str, Array]:
    """The buffers of `rules.map_buffers` by name; `routing` [T, E] bool or uint8 (`kind` "mask"), else [T, k] ids."""
    outs = permute_map_p.bind(routing, batch=Batch.none(1), kind=kind, experts=experts, rows=rows, align=align)
    return dict(zip(("row_id_map", "tokens_per_expert", "expert_offsets", "row_source"), outs, strict=True))


def _chunk_map_abstract(sizes: Aval, order: Aval, *, batch: Batch, tokens: Any) -> Any:
    op = "chunk_map"
    named = operand("split_sizes", sizes, batch.axes[0]), operand("sorted_index", order, batch.axes[1])
    for x in named:
        require_dtype(op, x, "int32")
        rules.require_rank(op, x, 1, "[C]")
    enforce(rules.chunks(op, *named, tokens))
    operands = (sizes, order)
    front = batch_shape(operands, batch)
    return [result(operands, (*front, *shape), "int32") for shape in ((tokens, 1), (tokens,))]


chunk_map_p = primitive(
    "chunk_map",
    _chunk_map_abstract,
    lambda _, batch, **__: ffi.row_map_attributes(batch),
    no_derivative=_FIRST_ALONE,
)


def chunk_map(sizes: Array, order: Array, tokens: Any) -> tuple[Array, Array]:
    """Returns (row_id_map [tokens, 1], row_source [tokens]) of the order in which chunk `order[j]` comes j-th.

    The sizes and `order` are int32 [C].
    """
    row_id_map, row_source = chunk_map_p.bind(sizes, order, batch=Batch.none(2), tokens=tokens)
    return row_id_map, row_source


def _invert_map_abstract(row_id_map: Aval, *, batch: Batch, rows: Any) -> Any:
    shape = check_row_map("invert_map", row_id_map, batch.axes[0])
    enforce((rules.counted("invert_map", "rows", rows),))
    front = batch_shape((row_id_map,), batch)
    return [result((row_id_map,), (*front, *own), "int32") for own in ((rows,), shape)]


invert_map_p = primitive(
    "invert_map",
    _invert_map_abstract,
    lambda _, batch, **__: ffi.row_map_attributes(batch),
    no_derivative=_FIRST_ALONE,
)


def invert_map(row_id_map: Array, rows: Any) -> tuple[Array, Array]:
    """Returns (row_id_map, row_source). Entries outside of 0..rows-1 become -1, and so do all but the last that name a
    row."""
    row_source, kept = invert_map_p.bind(row_id_map, batch=Batch.none(1), rows=rows)
    return kept, row_source


# --- permute ---


def _permute_abstract(
    *avals: Aval, batch: Batch, fills: tuple[int, ...], has_probs: bool, zero_prob_is_padding: bool
) -> Any:
    op = "permute"
    map_shape = check_row_map(op, avals[0], batch.axes[0])
    rows = check_rows(op, avals[1], batch.axes[1])
    if not 1 <= len(fills) <= ffi.MOE["max_planes"]:
        raise ValueError(f"{op}: one call moves 1 to {ffi.MOE['max_planes']} tensors, got {len(fills)}")
    front = batch_shape(avals, batch)
    outs = []
    for i, aval in enumerate(avals[2 : 2 + len(fills)]):
        own = own_shape(aval, batch.axes[2 + i])
        require_dtype(op, operand("inp", aval, batch.axes[2 + i]), *MOVED)
        enforce(rules.plane(op, operand("inp", aval, batch.axes[2 + i]), map_shape[0]))
        columns = own[-1:] if len(own) > 1 else ()
        outs.append(result(avals, (*front, rows, *columns), aval.dtype.name))
    if has_probs:
        _check_per_slot(op, "probs", avals[-1], batch.axes[-1], map_shape, True)
        outs.append(result(avals, (*front, rows), avals[-1].dtype.name))
    elif zero_prob_is_padding:
        raise ValueError(f"{op}: zero_prob_is_padding without probs")
    return outs


permute_p = primitive(
    "permute",
    _permute_abstract,
    lambda _, batch, **params: ffi.permute_attributes(batch, **params),
    no_derivative=_FIRST_ALONE,
)


def permute(
    planes: tuple[Array, ...],
    row_id_map: Array,
    row_source: Array,
    probs: Array | None = None,
    fills: tuple[int, ...] | None = None,
    zero_prob_is_padding: bool = False,
) -> tuple[tuple[Array, ...], Array | None]:
    """Returns each plane ([..., K] with T rows, or [T]) with its rows permuted, and probs [rows] if they are given.

    `fills`: the four bytes that absent rows of each plane repeat; by default 0.
    """
    operands = [row_id_map, row_source, *planes, *([] if probs is None else [probs])]
    outs = permute_p.bind(
        *operands,
        batch=Batch.none(len(operands)),
        fills=(0,) * len(planes) if fills is None else fills,
        has_probs=probs is not None,
        zero_prob_is_padding=zero_prob_is_padding,
    )
    return tuple(outs[: len(planes)]), None if probs is None else outs[-1]


def _permute_columns_abstract(x: Aval, row_source: Aval, *, batch: Batch, slots: int) -> Any:
    op, own = "permute_columns", own_shape(x, batch.axes[0])
    rules.require_rank(op, operand("in", x, batch.axes[0]), 2, "[H, T]")
    if x.dtype.itemsize != 1:
        raise DTypeError(f"{op}: in must have elements of one byte, got {x.dtype.name}{list(own)}")
    rows = check_rows(op, row_source, batch.axes[1])
    enforce((rules.counted(op, "tokens", own[1]), rules.few(op, "slots of a token", slots)))
    operands = (x, row_source)
    return [result(operands, (*batch_shape(operands, batch), own[0], rows), x.dtype.name)]


permute_columns_p = primitive(
    "permute_columns",
    _permute_columns_abstract,
    lambda _, batch, slots: ffi.permute_columns_attributes(batch, slots),
    no_derivative=_FIRST_ALONE,
)


def permute_columns(x: Array, row_source: Array, slots: int) -> Array:
    """Returns the columns of `x` [H, T], one byte an element, that `row_source` names: [H, rows], absent ones 0."""
    return permute_columns_p.bind(x, row_source, batch=Batch.none(2), slots=slots)[0]


# --- unpermute ---


def _unpermute_abstract(*avals: Aval, batch: Batch, has_probs: bool, has_permuted_dprobs: bool) -> Any:
    op, x = "unpermute", avals[0]
    own = own_shape(x, batch.axes[0])
    rules.require_floats(op, operand("x", x, batch.axes[0]))
    rules.require_rank(op, operand("x", x, batch.axes[0]), 2, "[rows, H]")
    map_shape = check_row_map(op, avals[1], batch.axes[1])
    front = batch_shape(avals, batch)
    outs = [result(avals, (*front, map_shape[0], own[1]), x.dtype.name)]
    if has_probs:
        _check_per_slot(op, "probs", avals[2], batch.axes[2], map_shape, x.dtype.name == "float64")
    if has_permuted_dprobs:
        grads = operand("permuted_dprobs", avals[-1], batch.axes[-1])
        rules.require_floats(op, grads)
        enforce(of_shape(op, grads, own[0]))
        outs.append(result(avals, (*front, *map_shape), avals[-1].dtype.name))
    return outs


def _unpermute_finish(ctx: Any, platform: str, batch: Batch, **_: Any) -> Any:
    _refuse_wide("unpermute", ctx, platform)
    return {}, None


unpermute_p = primitive(
    "unpermute",
    _unpermute_abstract,
    lambda _, batch, **params: ffi.unpermute_attributes(batch, **params),
    _unpermute_finish,
    no_derivative=_FIRST_ALONE,
)


def unpermute(
    x: Array, row_id_map: Array, probs: Array | None = None, permuted_dprobs: Array | None = None
) -> tuple[Array, Array | None]:
    """Returns each token's sum of its rows of `x` [rows, H], [T, H]; and `permuted_dprobs` [rows] as [T, slots]."""
    operands = [x, row_id_map, *(p for p in (probs, permuted_dprobs) if p is not None)]
    outs = unpermute_p.bind(
        *operands,
        batch=Batch.none(len(operands)),
        has_probs=probs is not None,
        has_permuted_dprobs=permuted_dprobs is not None,
    )
    return outs[0], None if permuted_dprobs is None else outs[1]


def _unpermute_grad_abstract(
    dy: Aval, row_id_map: Aval, row_source: Aval, probs: Aval, *x: Aval, batch: Batch, has_dprobs: bool
) -> Any:
    op, own = "unpermute_grad", own_shape(dy, batch.axes[0])
    rules.require_floats(op, operand("dy", dy, batch.axes[0]))
    rules.require_rank(op, operand("dy", dy, batch.axes[0]), 2, "[T, H]")
    map_shape = check_row_map(op, row_id_map, batch.axes[1])
    check_shape(op, "dy", dy, batch.axes[0], (map_shape[0], own[1]))
    rows = check_rows(op, row_source, batch.axes[2])
    _check_per_slot(op, "probs", probs, batch.axes[3], map_shape, dy.dtype.name == "float64")
    operands = (dy, row_id_map, row_source, probs, *x)
    front = batch_shape(operands, batch)
    outs = [result(operands, (*front, rows, own[1]), dy.dtype.name)]
    if has_dprobs:
        check_buffer(op, "x", x[0], batch.axes[4], dy.dtype.name, (rows, own[1]))
        outs.append(result(operands, (*front, *map_shape), probs.dtype.name))
    return outs


def _unpermute_grad_finish(ctx: Any, platform: str, batch: Batch, **_: Any) -> Any:
    _refuse_wide("unpermute_grad", ctx, platform)
    return {}, None


unpermute_grad_p = primitive(
    "unpermute_grad",
    _unpermute_grad_abstract,
    lambda _, batch, has_dprobs: ffi.unpermute_grad_attributes(batch, has_dprobs),
    _unpermute_grad_finish,
    no_derivative=_FIRST_ALONE,
)


def unpermute_grad(
    dy: Array, row_id_map: Array, row_source: Array, probs: Array, x: Array | None = None
) -> tuple[Array, Array | None]:
    """Returns dx [rows, H] = p * dy [T, H], and with `x` [rows, H] also dprobs [T, slots], the products of x and dy."""
    operands = [dy, row_id_map, row_source, probs, *([] if x is None else [x])]
    outs = unpermute_grad_p.bind(*operands, batch=Batch.none(len(operands)), has_dprobs=x is not None)
    return outs[0], None if x is None else outs[1]
