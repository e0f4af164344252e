"""The ops that move rows between token order and expert order, on raw buffers (NUMERICS 8), beside `primitives`.

No op waits for a count: sizes of results are the caller's, and counts stay on the device. Whatever stands in a map,
nothing is read or written out of bounds. The ops are pure and have no derivative; `permutation` says what theirs is.
Checks stand in the fake implementations and in `permutation`; a plain eager call has those of the core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import DTypeError, ShapeError, UnsupportedError
from diptych.common.ops import permute as moe
from diptych.common.ops import shapes
from diptych.core import _core
from diptych.torch.primitives.checks import HIGH_PRECISION, describe, require_device, require_size
from diptych.torch.primitives.register import define, direct, workspace

_TABLE = _core.moe_table()
MAX_SLOTS = _TABLE["max_slots"]
_KINDS = _TABLE["routing_map"]
_MAX_COUNT = 2**31 - 1  # of anything that a map numbers
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ID_DTYPES = (torch.int32, torch.int64)
MOVED_DTYPES = frozenset(getattr(torch, name) for name in _core.dtype_table() if name != "float4_e2m1fn")
"""What rows that are moved may be of."""

# --- checks ----------------------------------------------------------------------------------------------------------


def known(comparison: Any) -> bool:
    """Whether a comparison of numbers holds; no, where a traced program will know it only when it runs."""
    if isinstance(comparison, torch.SymBool) or torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # importing it takes a while

        return guard_or_false(comparison)
    return bool(comparison)


def _certain(comparison: Any) -> bool:
    """Whether it holds whatever the sizes are that a traced program is for: a limit makes no guard."""
    if isinstance(comparison, torch.SymBool) or torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(comparison)
    return bool(comparison)


def names_of(dtypes: Any) -> str:
    names = sorted([str(d).removeprefix("torch.") for d in dtypes])
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def require_dtype(op: str, arg: str, t: Tensor, dtypes: Any) -> None:
    if t.dtype not in dtypes:
        raise DTypeError(f"{op}: {arg} must be {names_of(dtypes)}, got {describe(t)}")


def require_rank(op: str, arg: str, t: Tensor, rank: int, form: str) -> None:
    if t.dim() != rank:
        raise ShapeError(f"{op}: {arg} must be {form}, got {describe(t)}")


def require_few(op: str, what: str, n: Any) -> None:
    """Refuses more slots, experts or chunks than the kernels take."""
    if _certain(n > MAX_SLOTS):
        raise UnsupportedError(f"{op}: {n} {what}, and the kernels take at most {MAX_SLOTS}")


def require_counted(op: str, what: str, n: Any) -> None:
    """Refuses more than an int32 numbers."""
    if _certain(n > _MAX_COUNT):
        raise ShapeError(
            f"{op}: {what} are {n}, and a map numbers at most {_MAX_COUNT}; permute fewer tokens at a time"
        )


def require_floats(op: str, arg: str, t: Tensor, beside: Tensor | None) -> None:
    """High precision; beside float64 rows, or where there are none to sum, also float64."""
    wide = beside is None or beside.dtype == torch.float64
    if t.dtype not in HIGH_PRECISION and not (wide and t.dtype == torch.float64):
        allowed = "float32, bfloat16, float16 or float64" if wide else "float32, bfloat16 or float16 beside such rows"
        raise DTypeError(f"{op}: {arg} must be {allowed}, got {describe(t)}")


def require_rows(op: str, arg: str, t: Tensor) -> None:
    """Rows that are summed, or have a gradient, which is a sum."""
    if t.dtype in HIGH_PRECISION or (t.dtype == torch.float64 and t.device.type != "cuda"):
        return
    where = ", got " if t.dtype != torch.float64 else "; float64 rows are summed on the CPU alone: "
    raise DTypeError(f"{op}: {arg} must be float32, bfloat16 or float16 to be summed{where}{describe(t)}")


def require_map(op: str, row_id_map: Tensor) -> None:
    require_dtype(op, "row_id_map", row_id_map, (torch.int32,))
    require_rank(op, "row_id_map", row_id_map, 2, "[T, slots]")
    require_few(op, "slots of a token", row_id_map.shape[1])
    require_counted(op, "tokens * slots", row_id_map.shape[0] * row_id_map.shape[1])


def require_per_slot(op: str, arg: str, t: Tensor, row_id_map: Tensor) -> None:
    shape = row_id_map.shape
    require_rank(op, arg, t, 2, "[T, slots] as row_id_map is")
    for found, wanted in zip(t.shape, shape, strict=True):
        require_size(found, wanted, lambda: f"{op}: {arg} must be {list(shape)} as row_id_map is, got {describe(t)}")


def require_tokens(op: str, arg: str, t: Tensor, tokens: Any, of: str) -> None:
    if t.dim() < 2:
        raise ShapeError(f"{op}: {arg} must be [..., H], got {describe(t)}")
    rows = shapes.rows_cols(t.shape)[0]
    require_size(rows, tokens, lambda: f"{op}: {arg} must have a row for each of {of}, {tokens}, got {describe(t)}")


# --- maps ------------------------------------------------------------------------------------------------------------


def check_routing(op: str, routing: Tensor, mask: bool, experts: Any, rows: Any, align: int) -> None:
    kind = "a mask" if mask else "expert ids"
    require_rank(op, "routing_map", routing, 2, "[T, E]" if mask else "[T, k]")
    if routing.dtype not in (MASK_DTYPES if mask else ID_DTYPES):
        dtypes = names_of(MASK_DTYPES if mask else ID_DTYPES)
        raise DTypeError(f"{op}: routing_map ({kind}) must be {dtypes}, got {describe(routing)}")
    tokens, slots = routing.shape
    if mask:
        require_size(slots, experts, lambda: f"{op}: a mask {describe(routing)} has {slots} experts, not {experts}")
    if _certain(experts < 1):
        raise ShapeError(f"{op}: there must be at least one expert, got {experts}")
    require_few(op, "slots of a token", slots)
    require_few(op, "experts", experts)
    require_counted(op, "rows", rows)
    require_counted(op, "rows with the alignment's padding", tokens * slots + experts * (align - 1))


def _permute_map(
    routing: Tensor, mask: bool, experts: int, rows: int, align: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, slots = routing.shape
    if mask:
        byte = routing.dtype in (torch.bool, torch.uint8, torch.int8)
        routing = (routing if byte else routing.ne(0)).contiguous().view(torch.uint8)
    new = torch.empty(0, dtype=torch.int32, device=routing.device).new_empty
    row_id_map, tokens_per_expert, expert_offsets, row_source = made = tuple(
        [new(b.shape) for b in moe.map_buffers(tokens, slots, experts, rows)]
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
    check_routing("permute_map", routing, mask, experts, rows, align)
    buffers = moe.map_buffers(routing.shape[0], routing.shape[1], experts, rows)
    return tuple([routing.new_empty(b.shape, dtype=torch.int32) for b in buffers])  # type: ignore[return-value]


def check_chunks(op: str, chunks: Any, named: Any, tokens: Any) -> None:
    """`chunks`, `named`: how many sizes and how many indices there are."""
    require_size(named, chunks, lambda: f"{op}: split_sizes has {chunks} chunks, and sorted_index names {named}")
    require_few(op, "chunks", chunks)
    require_counted(op, "tokens", tokens)


def _chunk_map(split_sizes: Tensor, sorted_index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    row_id_map, row_source = split_sizes.new_empty((tokens, 1)), split_sizes.new_empty(tokens)
    _core.chunk_map(split_sizes.contiguous(), sorted_index.contiguous(), row_id_map, row_source)
    return row_id_map, row_source


def _chunk_map_fake(split_sizes: Tensor, sorted_index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    for arg, t in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        require_dtype("chunk_map", arg, t, (torch.int32,))
        require_rank("chunk_map", arg, t, 1, "[C]")
        require_device("chunk_map", split_sizes, t, arg)
    check_chunks("chunk_map", split_sizes.shape[0], sorted_index.shape[0], tokens)
    return split_sizes.new_empty((tokens, 1)), split_sizes.new_empty(tokens)


def _invert_map_fake(row_id_map: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    require_map("invert_map", row_id_map)
    require_counted("invert_map", "rows", rows)
    return row_id_map.new_empty(row_id_map.shape), row_id_map.new_empty(rows)


def _invert_map(row_id_map: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    row_id_map = row_id_map.contiguous()
    kept, row_source = torch.empty_like(row_id_map), row_id_map.new_empty(rows)
    _core.invert_map(row_id_map, row_source, kept)
    return kept, row_source


# --- rows ------------------------------------------------------------------------------------------------------------


def check_maps(op: str, first: Tensor, row_id_map: Tensor, row_source: Tensor) -> None:
    require_map(op, row_id_map)
    require_dtype(op, "row_source", row_source, (torch.int32,))
    require_rank(op, "row_source", row_source, 1, "[rows]")
    require_device(op, first, row_id_map, "row_id_map")
    require_device(op, first, row_source, "row_source")


def _moved(t: Tensor, rows: Any) -> Tensor:
    return t.new_empty((rows, t.shape[-1]) if t.dim() > 1 else (rows,))


def _permute_fake(
    planes: list[Tensor], fills: list[int], row_id_map: Tensor, row_source: Tensor, probs: Tensor | None, padding: bool
) -> list[Tensor]:
    """`padding`: zero_prob_is_padding."""
    op, tokens, rows = "permute", row_id_map.shape[0], row_source.shape[0]
    check_maps(op, planes[0], row_id_map, row_source)
    made = []
    for t in planes:
        require_dtype(op, "inp", t, MOVED_DTYPES)
        require_device(op, row_id_map, t, "inp")
        found = shapes.rows_cols(t.shape)[0] if t.dim() > 1 else t.shape[0]
        require_size(
            found, tokens, lambda t=t: f"{op}: inp {describe(t)} must have a row for each of the map's {tokens} tokens"
        )
        made.append(_moved(t, rows))
    if probs is None:
        if padding:
            raise ValueError(f"{op}: zero_prob_is_padding without probs")
        return made
    require_floats(op, "probs", probs, None)
    require_device(op, row_id_map, probs, "probs")
    require_per_slot(op, "probs", probs, row_id_map)
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
    require_rank("permute_columns", "inp", x, 2, "[H, T]")
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
    require_rows(op, "inp", x)
    require_map(op, row_id_map)
    require_device(op, x, row_id_map, "row_id_map")
    rows, cols = shapes.rows_cols(x.shape)
    require_counted(op, "rows", rows)
    if probs is not None:
        require_floats(op, "merging_probs", probs, x)
        require_device(op, x, probs, "merging_probs")
        require_per_slot(op, "merging_probs", probs, row_id_map)
    made = [x.new_empty((row_id_map.shape[0], cols))]
    if permuted_dprobs is not None:
        require_floats(op, "permuted_dprobs", permuted_dprobs, None)
        require_device(op, x, permuted_dprobs, "permuted_dprobs")
        require_size(
            permuted_dprobs.numel(), rows, lambda: f"{op}: permuted_dprobs must be [{rows}], got {describe(x)}"
        )
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
    require_rows(op, "dy", dy)
    check_maps(op, dy, row_id_map, row_source)
    require_tokens(op, "dy", dy, row_id_map.shape[0], "the map's tokens")
    require_floats(op, "merging_probs", probs, dy)
    require_per_slot(op, "merging_probs", probs, row_id_map)
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
    """The buffers of `moe.map_buffers` in its order; `routing`: [T, E] with `mask`, else ids [T, k]."""
    return (_permute_map if direct(routing) else _permute_map_op)(routing, mask, experts, rows, align)


def chunk_map(split_sizes: Tensor, sorted_index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(row_id_map [tokens, 1], row_source [tokens]) of chunk `sorted_index[j]` coming j-th; both int32 [C]."""
    return (_chunk_map if direct(split_sizes, sorted_index) else _chunk_map_op)(split_sizes, sorted_index, tokens)


def invert_map(row_id_map: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(row_id_map with -1 for what lies outside of 0..rows-1 and for all but the last that name a row, row_source)."""
    return (_invert_map if direct(row_id_map) else _invert_map_op)(row_id_map, rows)


def permute_probs(probs: Tensor, row_id_map: Tensor, row_source: Tensor) -> Tensor:
    """Each row's own probability, [rows]; that of absent rows is 0."""
    carried = row_id_map.new_empty(row_id_map.shape[0], dtype=torch.uint8)  # a call moves something besides
    return permute([carried], [0], row_id_map, row_source, probs)[1]


def permute(
    planes: list[Tensor],
    fills: list[int],
    row_id_map: Tensor,
    row_source: Tensor,
    probs: Tensor | None = None,
    zero_prob_is_padding: bool = False,
) -> list[Tensor]:
    """Rows of each plane ([..., K] with T rows, or [T]) where the map sends them, and where given probs [rows].

    `fills`: the four bytes that absent rows of each plane repeat.
    """
    call = _permute if direct(*planes, row_id_map, row_source, probs) else _permute_op
    return call(planes, fills, row_id_map, row_source, probs, zero_prob_is_padding)


def permute_columns(x: Tensor, row_source: Tensor, slots: int) -> Tensor:
    """Columns of `x` [H, T], one byte an element, where `row_source` finds them: [H, rows], absent ones 0."""
    return (_permute_columns if direct(x, row_source) else _permute_columns_op)(x, row_source, slots)


def unpermute(
    x: Tensor, row_id_map: Tensor, probs: Tensor | None = None, permuted_dprobs: Tensor | None = None
) -> list[Tensor]:
    """The sum of each token's rows of `x` [rows, H], [T, H], and where given permuted_dprobs [rows] as [T, slots]."""
    call = _unpermute if direct(x, row_id_map, probs, permuted_dprobs) else _unpermute_op
    return call(x, row_id_map, probs, permuted_dprobs)


def unpermute_grad(
    dy: Tensor, row_id_map: Tensor, row_source: Tensor, probs: Tensor, x: Tensor | None = None
) -> list[Tensor]:
    """dx [rows, H] = p * dy [T, H], and with `x` [rows, H] also dprobs [T, slots], the products of both."""
    call = _unpermute_grad if direct(dy, row_id_map, row_source, probs, x) else _unpermute_grad_op
    return call(dy, row_id_map, row_source, probs, x)
