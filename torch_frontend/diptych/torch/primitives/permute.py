"""The ops that move rows between token order and expert order, on raw buffers (NUMERICS 8), beside `primitives`.

No op waits for a count: sizes of results are the caller's, and counts stay on the device. Whatever stands in a map,
nothing is read or written out of bounds. The ops are pure and have no derivative; `permutation` says what theirs is.
Checks stand in the fake implementations and in `permutation`; a plain eager call has those of the core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import DTypeError
from diptych.common.ops import permute as rules
from diptych.common.ops import shapes
from diptych.common.ops.operand import of_shape, one_of, require_dtype
from diptych.common.ops.shapes import HIGH_PRECISION
from diptych.core import _core
from diptych.torch.primitives.checks import enforce, operand, require_device
from diptych.torch.primitives.register import define, direct, workspace

_KINDS = _core.moe_table()["routing_map"]
MOVED = tuple(sorted(set(_core.dtype_table()) - {"float4_e2m1fn"}))
"""Names of the dtypes of rows that are moved."""

# --- checks ----------------------------------------------------------------------------------------------------------


def known(comparison: Any) -> bool:
    """Whether a comparison of numbers holds; False if a traced program can decide it only when it runs."""
    if isinstance(comparison, torch.SymBool) or torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # importing it takes a while

        return guard_or_false(comparison)
    return bool(comparison)


def require_summed(op: str, arg: str, t: Tensor) -> None:
    """Checks rows that are summed, or whose gradient is a sum; float64 is allowed on the CPU only."""
    x = operand(arg, t)
    rules.require_floats(op, x)
    if x.dtype == "float64" and t.device.type == "cuda":
        raise DTypeError(f"{op}: {arg} must be {one_of(HIGH_PRECISION)}; float64 rows are summed on the CPU alone: {x}")


def require_map(op: str, row_id_map: Tensor) -> None:
    enforce(rules.row_map(op, operand("row_id_map", row_id_map)))


def check_probs(op: str, arg: str, probs: Tensor, first: Tensor, row_id_map: Tensor, wide: bool = True) -> None:
    """Checks a probability for each slot. `wide`: float64 is allowed too."""
    enforce(rules.per_slot(op, operand(arg, probs), row_id_map.shape, wide))
    require_device(op, first, probs, arg)


# --- maps ------------------------------------------------------------------------------------------------------------


def _permute_map(
    routing: Tensor, mask: bool, experts: int, rows: int, align: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, slots = routing.shape
    if mask:
        byte = routing.dtype in (torch.bool, torch.uint8, torch.int8)
        routing = (routing if byte else routing.ne(0)).contiguous().view(torch.uint8)
    new = torch.empty(0, dtype=torch.int32, device=routing.device).new_empty
    row_id_map, tokens_per_expert, expert_offsets, row_source = made = tuple(
        [new(b.shape) for b in rules.map_buffers(tokens, slots, experts, rows)]
    )
    kind, items = _KINDS["mask" if mask else "index"], tokens if mask else tokens * slots
    scratch = None
    if routing.is_cuda:
        scratch = workspace(_core.permute_map_workspace_bytes(kind, items, experts), routing.device)
    _core.permute_map(
        routing.contiguous(), kind, align, row_id_map, tokens_per_expert, expert_offsets, row_source, scratch
    )
    return made  # type: ignore[return-value]


def _permute_map_fake(
    routing: Tensor, mask: bool, experts: int, rows: int, align: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    enforce(rules.routing("permute_map", operand("routing", routing), mask, experts, rows, align))
    buffers = rules.map_buffers(routing.shape[0], routing.shape[1], experts, rows)
    return tuple([routing.new_empty(b.shape, dtype=torch.int32) for b in buffers])  # type: ignore[return-value]


def _chunk_map(split_sizes: Tensor, sorted_index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    row_id_map, row_source = split_sizes.new_empty((tokens, 1)), split_sizes.new_empty(tokens)
    _core.chunk_map(split_sizes.contiguous(), sorted_index.contiguous(), row_id_map, row_source)
    return row_id_map, row_source


def _chunk_map_fake(split_sizes: Tensor, sorted_index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    for arg, t in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        require_dtype("chunk_map", operand(arg, t), "int32")
        rules.require_rank("chunk_map", operand(arg, t), 1, "[C]")
        require_device("chunk_map", split_sizes, t, arg)
    named = operand("split_sizes", split_sizes), operand("sorted_index", sorted_index)
    enforce(rules.chunks("chunk_map", *named, tokens))
    return split_sizes.new_empty((tokens, 1)), split_sizes.new_empty(tokens)


def _invert_map_fake(row_id_map: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    require_map("invert_map", row_id_map)
    enforce((rules.counted("invert_map", "rows", rows),))
    return row_id_map.new_empty(row_id_map.shape), row_id_map.new_empty(rows)


def _invert_map(row_id_map: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    row_id_map = row_id_map.contiguous()
    kept, row_source = torch.empty_like(row_id_map), row_id_map.new_empty(rows)
    _core.invert_map(row_id_map, row_source, kept)
    return kept, row_source


# --- rows ------------------------------------------------------------------------------------------------------------


def check_maps(op: str, first: Tensor, row_id_map: Tensor, row_source: Tensor) -> None:
    require_map(op, row_id_map)
    enforce(rules.row_source(op, operand("row_source", row_source)))
    require_device(op, first, row_id_map, "row_id_map")
    require_device(op, first, row_source, "row_source")


def _moved(t: Tensor, rows: Any) -> Tensor:
    return t.new_empty((rows, t.shape[-1]) if t.dim() > 1 else (rows,))


def _permute_fake(
    planes: list[Tensor], fills: list[int], row_id_map: Tensor, row_source: Tensor, probs: Tensor | None, padding: bool
) -> list[Tensor]:
    """Checks the operands and makes empty results. `padding`: `zero_prob_is_padding` of `permute`."""
    op, tokens, rows = "permute", row_id_map.shape[0], row_source.shape[0]
    check_maps(op, planes[0], row_id_map, row_source)
    made = []
    for t in planes:
        require_dtype(op, operand("inp", t), *MOVED)
        require_device(op, row_id_map, t, "inp")
        enforce(rules.plane(op, operand("inp", t), tokens))
        made.append(_moved(t, rows))
    if probs is None:
        if padding:
            raise ValueError(f"{op}: zero_prob_is_padding without probs")
        return made
    check_probs(op, "probs", probs, row_id_map, row_id_map)
    return [*made, probs.new_empty(rows)]


def _permute(
    planes: list[Tensor], fills: list[int], row_id_map: Tensor, row_source: Tensor, probs: Tensor | None, padding: bool
) -> list[Tensor]:
    rows = row_source.shape[0]
    made = [_moved(t, rows) for t in planes]
    moved = [(t.contiguous(), out, fill) for t, out, fill in zip(planes, made, fills, strict=True)]
    permuted = None
    if probs is not None:
        probs, permuted = probs.contiguous(), probs.new_empty(rows)
        made.append(permuted)
    _core.permute(moved, row_id_map.contiguous(), row_source.contiguous(), probs, permuted, padding)
    return made


def _permute_columns_fake(x: Tensor, row_source: Tensor, slots: int) -> Tensor:
    rules.require_rank("permute_columns", operand("inp", x), 2, "[H, T]")
    require_device("permute_columns", x, row_source, "row_source")
    return x.new_empty((x.shape[0], row_source.shape[0]))


def _permute_columns(x: Tensor, row_source: Tensor, slots: int) -> Tensor:
    out = x.new_empty((x.shape[0], row_source.shape[0]))
    _core.permute_columns(x.contiguous(), out, row_source.contiguous(), slots)
    return out


def _unpermute_fake(
    x: Tensor, row_id_map: Tensor, probs: Tensor | None, permuted_dprobs: Tensor | None
) -> list[Tensor]:
    op = "unpermute"
    require_summed(op, "inp", x)
    require_map(op, row_id_map)
    require_device(op, x, row_id_map, "row_id_map")
    rows, cols = shapes.rows_cols(x.shape)
    enforce((rules.counted(op, "rows", rows),))
    if probs is not None:
        check_probs(op, "merging_probs", probs, x, row_id_map, x.dtype == torch.float64)
    made = [x.new_empty((row_id_map.shape[0], cols))]
    if permuted_dprobs is not None:
        grads = operand("permuted_dprobs", permuted_dprobs)
        rules.require_floats(op, grads)
        require_device(op, x, permuted_dprobs, "permuted_dprobs")
        enforce(of_shape(op, grads, rows))
        made.append(permuted_dprobs.new_empty(row_id_map.shape))
    return made


def _unpermute(x: Tensor, row_id_map: Tensor, probs: Tensor | None, permuted_dprobs: Tensor | None) -> list[Tensor]:
    probs = None if probs is None else probs.contiguous()
    y = x.new_empty((row_id_map.shape[0], x.shape[-1]))
    dprobs = None
    if permuted_dprobs is not None:
        permuted_dprobs, dprobs = permuted_dprobs.contiguous(), permuted_dprobs.new_empty(row_id_map.shape)
    _core.unpermute(x.contiguous(), row_id_map.contiguous(), probs, y, permuted_dprobs, dprobs)
    return [y] if dprobs is None else [y, dprobs]


def _unpermute_grad_fake(
    dy: Tensor, row_id_map: Tensor, row_source: Tensor, probs: Tensor, x: Tensor | None
) -> list[Tensor]:
    op = "unpermute_grad"
    require_summed(op, "dy", dy)
    check_maps(op, dy, row_id_map, row_source)
    enforce(rules.tokens_of(op, operand("dy", dy), row_id_map.shape[0], "the map's tokens"))
    check_probs(op, "merging_probs", probs, dy, row_id_map, dy.dtype == torch.float64)
    dx = dy.new_empty((row_source.shape[0], dy.shape[-1]))
    return [dx] if x is None else [dx, probs.new_empty(probs.shape)]


def _unpermute_grad(
    dy: Tensor, row_id_map: Tensor, row_source: Tensor, probs: Tensor, x: Tensor | None
) -> list[Tensor]:
    maps, probs = (row_id_map.contiguous(), row_source.contiguous()), probs.contiguous()
    dx, dprobs = dy.new_empty((row_source.shape[0], dy.shape[-1])), None
    if x is not None:
        x, dprobs = x.contiguous(), torch.empty_like(probs)
    _core.unpermute_grad(dy.contiguous(), *maps, probs, dx, x, dprobs)
    return [dx] if dprobs is None else [dx, dprobs]


# --- registration ----------------------------------------------------------------------------------------------------

_permute_map_op = define(
    "permute_map",
    "(Tensor routing, bool mask, SymInt experts, SymInt rows, int align) -> (Tensor, Tensor, Tensor, Tensor)",
    _permute_map,
    _permute_map_fake,
)
_chunk_map_op = define(
    "chunk_map",
    "(Tensor split_sizes, Tensor sorted_index, SymInt tokens) -> (Tensor, Tensor)",
    _chunk_map,
    _chunk_map_fake,
)
_invert_map_op = define(
    "invert_map", "(Tensor row_id_map, SymInt rows) -> (Tensor, Tensor)", _invert_map, _invert_map_fake
)
_permute_op = define(
    "permute",
    "(Tensor[] planes, int[] fills, Tensor row_id_map, Tensor row_source, Tensor? probs, bool zero_prob_is_padding)"
    " -> Tensor[]",
    _permute,
    _permute_fake,
)
_permute_columns_op = define(
    "permute_columns", "(Tensor x, Tensor row_source, SymInt slots) -> Tensor", _permute_columns, _permute_columns_fake
)
_unpermute_op = define(
    "unpermute",
    "(Tensor x, Tensor row_id_map, Tensor? probs, Tensor? permuted_dprobs) -> Tensor[]",
    _unpermute,
    _unpermute_fake,
)
_unpermute_grad_op = define(
    "unpermute_grad",
    "(Tensor dy, Tensor row_id_map, Tensor row_source, Tensor probs, Tensor? x) -> Tensor[]",
    _unpermute_grad,
    _unpermute_grad_fake,
)


# --- the ops as `permutation` calls them -----------------------------------------------------------------------------


def permute_map(
    routing: Tensor, mask: bool, experts: int, rows: int, align: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The buffers of `rules.map_buffers` in its order; `routing`: [T, E] with `mask`, else ids [T, k]."""
    return (_permute_map if direct(routing) else _permute_map_op)(routing, mask, experts, rows, align)


def chunk_map(split_sizes: Tensor, sorted_index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns (row_id_map [tokens, 1], row_source [tokens]) for chunk `sorted_index[j]` coming j-th; arguments int32
    [C]."""
    return (_chunk_map if direct(split_sizes, sorted_index) else _chunk_map_op)(split_sizes, sorted_index, tokens)


def invert_map(row_id_map: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(row_id_map with -1 for what lies outside of 0..rows-1 and for all but the last that name a row, row_source)."""
    return (_invert_map if direct(row_id_map) else _invert_map_op)(row_id_map, rows)


def permute_probs(probs: Tensor, row_id_map: Tensor, row_source: Tensor) -> Tensor:
    """Returns each row's own probability, [rows]; absent rows have 0."""
    carried = row_id_map.new_empty(row_id_map.shape[0], dtype=torch.uint8)  # permute must move a plane too
    return permute([carried], [0], row_id_map, row_source, probs)[1]


def permute(
    planes: list[Tensor],
    fills: list[int],
    row_id_map: Tensor,
    row_source: Tensor,
    probs: Tensor | None = None,
    zero_prob_is_padding: bool = False,
) -> list[Tensor]:
    """Returns the rows of each plane ([..., K] with T rows, or [T]) in the map's order, and with `probs` those of rows.

    `fills`: the four bytes that absent rows of each plane repeat.
    """
    call = _permute if direct(*planes, row_id_map, row_source, probs) else _permute_op
    return call(planes, fills, row_id_map, row_source, probs, zero_prob_is_padding)


def permute_columns(x: Tensor, row_source: Tensor, slots: int) -> Tensor:
    """Returns the columns of `x` [H, T], one byte an element, in the order of `row_source`: [H, rows], absent ones
    0."""
    return (_permute_columns if direct(x, row_source) else _permute_columns_op)(x, row_source, slots)


def unpermute(
    x: Tensor, row_id_map: Tensor, probs: Tensor | None = None, permuted_dprobs: Tensor | None = None
) -> list[Tensor]:
    """Returns the sum of each token's rows of `x` [rows, H], [T, H], and permuted_dprobs [rows], if given, as [T,
    slots]."""
    call = _unpermute if direct(x, row_id_map, probs, permuted_dprobs) else _unpermute_op
    return call(x, row_id_map, probs, permuted_dprobs)


def unpermute_grad(
    dy: Tensor, row_id_map: Tensor, row_source: Tensor, probs: Tensor, x: Tensor | None = None
) -> list[Tensor]:
    """dx [rows, H] = p * dy [T, H], and with `x` [rows, H] also dprobs [T, slots], the products of both."""
    call = _unpermute_grad if direct(dy, row_id_map, row_source, probs, x) else _unpermute_grad_op
    return call(dy, row_id_map, row_source, probs, x)
