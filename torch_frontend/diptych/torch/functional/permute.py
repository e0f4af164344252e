"""Rows from token order into expert order and back (NUMERICS 8), under TransformerEngine's names.

Each function is differentiable once, eagerly and as one node of a graph forward and one backward, and never waits for
the device: sizes of results follow from the shapes and from `num_out_tokens`. docs/moe.md lists the differences from
TransformerEngine.

A `RowMap`, which `moe_map` makes once, can replace a routing map and a row_id_map. It carries all properties of the
map, so that no two arguments can contradict each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.common.formats import FORMATS
from diptych.common.ops import permute as rules
from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, of_shape, require_dtype
from diptych.torch.functional.permute_op import (
    Permute,
    SortChunks,
    Unpermute,
    as_int32,
    host_numbers,
    permute,
    shifted,
    sort_chunks,
    unpermute,
)
from diptych.torch.primitives import permute as permute_ops
from diptych.torch.primitives.checks import enforce, once, operand, require_device, require_local, require_tensor
from diptych.torch.primitives.permute import check_maps, check_probs, known, require_map, require_summed
from diptych.torch.private.dispatch import check
from diptych.torch.tensors.quantized import QuantizedTensor


class RowMap(NamedTuple):
    """Where each token's row goes, and where each destination row comes from; made by `moe_map`, all int32.

    `row_id_map`: [T, slots], the row that a slot has among the destination's, or -1; a slot is an expert of a mask, a
    choice of an index map. `tokens_per_expert`: [E], rows that exist. `expert_offsets`: [E + 1], where each expert's
    region starts, and where the last one ends. `row_source`: [rows], t * slots + slot of each row, -1 where it is
    absent.
    """

    row_id_map: Tensor
    tokens_per_expert: Tensor
    expert_offsets: Tensor
    row_source: Tensor


# --- checks of arguments ---------------------------------------------------------------------------------------------


def _require_inp(op: str, inp: Any, tokens: Any, of: str) -> None:
    """Checks that inp has a row for each token, which can be moved, and summed where inp requires grad."""
    require_tensor(op, "inp", inp)
    enforce(rules.tokens_of(op, operand("inp", inp), tokens, of))
    if not isinstance(inp, QuantizedTensor):
        require_dtype(op, operand("inp", inp), *permute_ops.MOVED)
        if inp.requires_grad and torch.is_grad_enabled():
            require_summed(op, "inp, which requires grad,", inp)
        return
    fmt = FORMATS[inp.quantizer.spec.format_id]
    rules.require_movable(op, fmt, inp.rowwise_data is not None, inp.columnwise_data is not None)


def require_probs(op: str, arg: str, probs: Any, inp: Tensor, row_id_map: Tensor, beside: Tensor | None) -> None:
    """Checks a probability for each slot. `beside`: rows that they multiply; float64 probabilities need float64
    rows."""
    require_tensor(op, arg, probs)
    check_probs(op, arg, probs, inp, row_id_map, beside is None or beside.dtype == torch.float64)


def _integers(
    op: str, arg: str, given: Any, device: torch.device | None, form: str = "[C]"
) -> Tensor | tuple[int, ...]:
    """Returns integers as a tensor on `device` (None leaves a tensor where it is), or as a tuple of numbers."""
    if isinstance(given, Tensor):
        require_local(op, arg, given)
        rules.require_integers(op, operand(arg, given), form)
        return given if device is None or given.device == device else given.to(device, non_blocking=True)
    if not isinstance(given, (list, tuple)):
        raise ArgumentError(f"{op}: {arg} must be a tensor or a sequence of ints, got {type(given).__name__}")
    for n in given:
        if type(n) is not int or n < 0:  # the argument's name is formatted on failure only
            _require_int(op, f"each of {arg}", n, 0)
    return tuple(given)


def _per_expert(op: str, arg: str, given: Any, device: torch.device, experts: Any) -> Tensor:
    numbers = _integers(op, arg, given, device, "[E]")
    t = as_int32(numbers, device) if isinstance(numbers, tuple) else numbers
    enforce(of_shape(op, operand(arg, t), experts))
    return t


def _require_int(op: str, arg: str, value: Any, least: int) -> None:
    remedy = "; a count on the device would have to be waited for" if isinstance(value, Tensor) else ""
    rules.require_int(op, arg, value, least, (int, torch.SymInt), remedy, known)


def _row_count(op: str, num_out_tokens: Any, entries: Any, experts: Any, align: int) -> Any:
    """Returns the number of rows of the destination."""
    if num_out_tokens is not None:
        _require_int(op, "num_out_tokens", num_out_tokens, -1)
        if not known(num_out_tokens < 1):
            if torch.compiler.is_compiling():  # a count whose value only the running program has must be above 0
                check(num_out_tokens > 0)
            return num_out_tokens
    return rules.padded_rows(entries, experts, align)


def _made_map(op: str, routing_map: Any, num_experts: Any, map_type: str, num_out_tokens: Any, align: int) -> RowMap:
    require_tensor(op, "routing_map", routing_map)
    rules.require_kind(op, map_type)
    _require_int(op, "align_size", align, 1)
    mask = map_type == "mask"
    if routing_map.dim() != 2:
        rules.require_rank(op, operand("routing_map", routing_map), 2, "[T, E]" if mask else "[T, k]")
    tokens, slots = routing_map.shape
    if num_experts is None:
        num_experts = slots if mask else rules.MAX_SLOTS
    else:
        _require_int(op, "num_experts", num_experts, 1)
    rows = _row_count(op, num_out_tokens, tokens * slots, num_experts, align)
    numbers = mask, num_experts, rows, align
    once(lambda: enforce(rules.routing(op, operand("routing_map", routing_map), *numbers)), op, routing_map, *numbers)
    return RowMap(*permute_ops.permute_map(routing_map, mask, num_experts, rows, align))


def _map_of(
    op: str, routing_map: Any, num_experts: Any = None, map_type: str = "mask", num_out_tokens: Any = None
) -> RowMap:
    """Returns the `RowMap` that was given, or makes one from a routing map."""
    if not isinstance(routing_map, RowMap):
        return _made_map(op, routing_map, num_experts, map_type, num_out_tokens, 1)
    rules.refuse_beside_map(op, num_out_tokens, num_experts, map_type)
    return routing_map


def _permuted(op: str, inp: Any, probs: Tensor | None, row_map: RowMap, zero_prob_is_padding: bool) -> Any:
    row_id_map, row_source = row_map.row_id_map, row_map.row_source

    def check() -> None:
        require_map(op, row_id_map)
        _require_inp(op, inp, row_id_map.shape[0], "routing_map's tokens")
        require_device(op, inp, row_id_map, "routing_map")
        if probs is not None:
            require_probs(op, "probs", probs, inp, row_id_map, None)

    for arg, t in (("inp", inp), ("row_id_map", row_id_map)):
        require_tensor(op, arg, t)
    once(check, op, inp, probs, row_id_map)
    return permute(Permute(inp, probs, row_id_map, row_source, zero_prob_is_padding))


def require_row_map(op: str, inp: Tensor, row_map: Any, arg: str = "inp") -> None:
    """Checks that `row_map` is a `RowMap` whose form fits the rows of `inp`; its values are not read."""
    if not isinstance(row_map, RowMap):
        raise ArgumentError(f"{op}: row_map must be a RowMap, got {type(row_map).__name__}; moe_map() makes one")
    check_maps(op, inp, row_map.row_id_map, row_map.row_source)
    enforce(rules.tokens_of(op, operand(arg, inp), row_map.row_id_map.shape[0], "row_map's tokens"))


# --- the functions ---------------------------------------------------------------------------------------------------


def moe_map(
    routing_map: Tensor,
    num_experts: int | None = None,
    *,
    map_type: str = "mask",
    num_out_tokens: int | None = None,
    align_size: int = 1,
) -> RowMap:
    """Makes the map of tokens to experts from a routing: expert-major, in token order inside of an expert.

    **Arguments:** `routing_map`: a mask [T, E], bool or integers, where a token goes to every expert whose entry is not
    0; or with map_type "index" expert ids [T, k], int32 or int64, of which those outside of 0..num_experts-1 name none.
    `num_experts`: E, with ids. `num_out_tokens`: rows of the destination, padding included; rows beyond them are
    dropped, and unfilled ones are absent. None, -1 and 0: as many as any routing needs. `align_size`: each expert's
    region starts at a multiple of this.

    **Returns:** a `RowMap`, for the functions below in place of a routing map or row_id_map, and for grouped products.

    **Raises:** TypeError for other dtypes, ValueError for other shapes, a map_type of another name, ids without
    `num_experts` or more than int32 numbers, NotImplementedError for more than 2048 experts.
    """
    op = "moe_map"
    rules.require_kind(op, map_type)
    rules.require_experts(op, map_type, num_experts)
    return _made_map(op, routing_map, num_experts, map_type, num_out_tokens, align_size)


def moe_permute(
    inp: Tensor,
    routing_map: Tensor | RowMap,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
    *,
    num_experts: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Copies each token's row to each of its experts: expert-major, in token order inside of an expert.

    **Arguments:** `inp`: [T, H] (or [..., H]), or a QuantizedTensor, whose data and scales move together.
    `routing_map`, `num_out_tokens`, `map_type`, `num_experts`: as `moe_map`; ids without `num_experts` may name 2048
    experts. Or a `RowMap`, which replaces these arguments. `max_token_num`: has no effect; TransformerEngine sizes a
    workspace by it.

    **Returns:** (permuted [rows, H], row_id_map [T, slots] int32). Absent rows are zeros; in a quantized tensor,
    quantized zeros. The gradient of inp, a plain tensor, is each token's sum over its rows.

    **Raises:** as `moe_map`; TypeError for rows that cannot be moved or, where inp requires grad, summed, ValueError
    for unequal tokens, mixed devices, or a quantized inp whose blocks span tokens, NotImplementedError for a second
    derivative.
    """
    op = "moe_permute"
    _require_int(op, "max_token_num", max_token_num, -1)
    row_map = _map_of(op, routing_map, num_experts, map_type, num_out_tokens)
    return _permuted(op, inp, None, row_map, False)[0], row_map.row_id_map


def moe_permute_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor | RowMap,
    num_out_tokens: int | None = None,
    *,
    zero_prob_is_padding: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `moe_permute` by a mask, and also returns each row's own probability.

    **Arguments:** `probs`: float32, bfloat16, float16 or float64, [T, E], or [T, slots] of a `RowMap`.
    `zero_prob_is_padding`: a probability of exactly 0 makes its row one of zeros, as TransformerEngine does; by default
    a routed token moves whatever its probability.

    **Returns:** (permuted [rows, H], permuted_probs [rows], row_id_map [T, slots]); absent rows' probability is 0.

    **Raises:** as `moe_permute`, TypeError and ValueError also for probs of another dtype or shape.
    """
    op = "moe_permute_with_probs"
    row_map = _map_of(op, routing_map, num_out_tokens=num_out_tokens)
    require_tensor(op, "probs", probs)
    permuted, permuted_probs = _permuted(op, inp, probs, row_map, zero_prob_is_padding)
    return permuted, permuted_probs, row_map.row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor | Sequence[int] | None = None,
    align_size: int = 16,
    *,
    num_out_tokens: int | None = None,
    zero_prob_is_padding: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """`moe_permute_with_probs`, each expert's region padded to a multiple of `align_size`.

    **Arguments:** `tokens_per_expert`: integers [E]; the regions are as large as these counts, padded. None, which is
    faster, counts the routing. `num_out_tokens`: rows of the destination, padding included; as `moe_map`, except that
    without it counts on the host (a list, a tuple, a CPU tensor outside of compiled code) give exactly their padded
    sum.

    **Returns:** (permuted, permuted_probs, row_id_map, pad_offsets, target_tokens_per_expert [E] int64). The row_id_map
    holds padded rows, so that pad_offsets is None: there is nothing left to add, and `moe_unpermute` takes it as it is.
    The target counts are the sizes of the padded regions, on the device.

    **Raises:** as `moe_permute_with_probs`; ValueError on the CPU for counts that leave no room for a token. On a GPU,
    where the host does not wait for the counts, such a token is dropped.
    """
    op = "moe_permute_and_pad_with_probs"
    require_tensor(op, "routing_map", routing_map)  # moe_map aligns a RowMap
    require_tensor(op, "probs", probs)
    if tokens_per_expert is None:
        row_map = _made_map(op, routing_map, None, "mask", num_out_tokens, align_size)
    else:
        row_map = _placed_by(op, routing_map, tokens_per_expert, num_out_tokens, align_size)
    permuted, permuted_probs = _permuted(op, inp, probs, row_map, zero_prob_is_padding)
    target = row_map.expert_offsets.diff().to(torch.int64)
    return permuted, permuted_probs, row_map.row_id_map, None, target


def _placed_by(op: str, routing_map: Tensor, tokens_per_expert: Any, num_out_tokens: Any, align: int) -> RowMap:
    """Returns the map whose regions are placed by these counts, padded: row + pad_offsets[expert]."""
    plain = _made_map(op, routing_map, None, "mask", None, 1)
    _require_int(op, "align_size", align, 1)
    experts = routing_map.shape[1]
    rows = _row_count(op, num_out_tokens, routing_map.numel(), experts, align)
    sizes = host_numbers(_integers(op, "tokens_per_expert", tokens_per_expert, None, "[E]"))
    if sizes is not None and (num_out_tokens is None or known(num_out_tokens < 1)):
        rows = rules.counted_rows(sizes, align)
        _require_room(op, sizes, plain.tokens_per_expert, align)
    enforce((rules.counted(op, "rows", rows),))
    counts = _per_expert(op, "tokens_per_expert", tokens_per_expert, routing_map.device, experts).to(torch.int64)
    pad = (-counts).remainder(align)
    row_id_map, row_source = permute_ops.invert_map(shifted(plain.row_id_map, pad.cumsum(0) - pad, rows), rows)
    ends = (counts.clamp(0, rows) + pad).cumsum(0).clamp(max=rows)
    return RowMap(row_id_map, plain.tokens_per_expert, torch.nn.functional.pad(ends, (1, 0)), row_source)


def _require_room(op: str, sizes: tuple[int, ...], found: Tensor, align: int) -> None:
    """Checks that regions of these sizes have room for every routed token; counts on a device are not waited for."""
    there = host_numbers(found)
    if there is not None and len(there) == len(sizes) and rules.overflow(sizes, there, align) > 0:
        raise ValueError(
            f"{op}: tokens_per_expert {list(sizes)} leaves no room for tokens of the routing_map, which names experts "
            f"{list(there)} times; give its own counts, None for which this counts itself, or num_out_tokens"
        )


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor | RowMap,
    merging_probs: Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The sum of each token's rows, in ascending order, in float32 (float64 rows: float64), rounded once.

    **Arguments:** `inp`: [rows, H] float32, bfloat16, float16 or, on the CPU, float64. `row_id_map`: of a permute,
    int32 [T, slots], or a `RowMap`, which saves work in backward. Entries outside of 0..rows-1 are absent. A row has
    one slot: where more than one names it, the gradients come from the last. `merging_probs`: [T, slots], each row's
    factor. `restore_shape`: of the result; None is [T, H]. `map_type`: what the map was made of. `probs`: the old name
    of merging_probs. `pad_offsets`: integers [E], added to the rows of each expert of a mask's map first; None, as
    `moe_permute_and_pad_with_probs` returns, where the map holds padded rows.

    **Returns:** [T, H] of inp's dtype, in `restore_shape`.

    **Raises:** TypeError for other dtypes or a quantized inp, ValueError for other shapes, mixed devices, a map_type of
    another name, pad_offsets with an index map or both names of the probabilities, NotImplementedError for a second
    derivative.
    """
    op = "moe_unpermute"
    rules.require_kind(op, map_type)
    merging_probs = rules.merging_probs(op, merging_probs, probs)
    if probs is not None:
        _warn_of_probs()
    row_source = None
    if isinstance(row_id_map, RowMap):
        row_source, row_id_map = row_id_map.row_source, row_id_map.row_id_map

    for arg, t in (("inp", inp), ("row_id_map", row_id_map)):
        require_tensor(op, arg, t)

    def check() -> None:
        if isinstance(inp, QuantizedTensor):
            raise ArgumentError(f"{op}: inp is quantized, and its rows are summed; dequantize() it first")
        require_map(op, row_id_map)
        require_device(op, inp, row_id_map, "row_id_map")
        rules.require_rows(op, operand("inp", inp))
        require_summed(op, "inp", inp)
        if row_source is not None:
            enforce(rules.tokens_of(op, operand("inp", inp), row_source.shape[0], "the map's rows"))
        if merging_probs is not None:
            require_probs(op, "merging_probs", merging_probs, inp, row_id_map, inp)

    if merging_probs is not None:
        require_tensor(op, "merging_probs", merging_probs)
    once(check, op, inp, row_id_map, row_source, merging_probs)
    if pad_offsets is not None:
        rules.refuse_pad_offsets(op, map_type)
        pad_offsets = _per_expert(op, "pad_offsets", pad_offsets, inp.device, row_id_map.shape[1])
    wanted = None if restore_shape is None else tuple(restore_shape)
    if wanted is not None:
        enforce(rules.restored(op, row_id_map.shape[0], inp.shape[-1], wanted))
    y = unpermute(Unpermute(inp, merging_probs, row_id_map, row_source, pad_offsets))
    return y if wanted is None else y.view(wanted)


def _warn_of_probs(*_: Any) -> None:
    if torch.compiler.is_dynamo_compiling():  # once, while tracing
        from diptych.torch.private.dynamo import comptime  # importing it takes a second

        comptime(_warn_of_probs)
    else:
        warnings.warn("moe_unpermute: probs is deprecated, use merging_probs", stacklevel=3)


def moe_sort_chunks_by_index(
    inp: Tensor, split_sizes: Tensor | Sequence[int], sorted_index: Tensor | Sequence[int]
) -> Tensor:
    """Reorders chunks of consecutive rows: chunk `sorted_index[j]` comes j-th.

    **Arguments:** `inp`: [T, H] (or [..., H]), or a QuantizedTensor, as `moe_permute`. `split_sizes`, `sorted_index`:
    integers [C], on any device, or sequences of ints. A sequence must add up to T, or name each chunk once. Values in a
    tensor are not checked: rows of chunks that it does not name are dropped, and the first mention of a chunk counts.

    **Returns:** [T, H], quantized where inp is; unfilled rows are zeros.

    **Raises:** as `moe_permute`; NotImplementedError for more than 2048 chunks.
    """
    return _sorted("moe_sort_chunks_by_index", inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor | Sequence[int], sorted_index: Tensor | Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Runs `moe_sort_chunks_by_index`, and also returns each row's probability.

    **Arguments:** `probs`: [T] or [T, 1] float32, bfloat16, float16 or float64.

    **Returns:** (out, permuted_probs [T]).

    **Raises:** as `moe_sort_chunks_by_index`.
    """
    op = "moe_sort_chunks_by_index_with_probs"
    require_tensor(op, "probs", probs)
    out, permuted = _sorted(op, inp, probs, split_sizes, sorted_index)
    return out, permuted


def _sorted(op: str, inp: Any, probs: Tensor | None, split_sizes: Any, sorted_index: Any) -> tuple[Tensor, ...]:
    require_tensor(op, "inp", inp)
    tokens = shapes.rows_cols(inp.shape)[0] if inp.dim() > 0 else 0
    given = [
        _integers(op, arg, v, inp.device) for arg, v in (("split_sizes", split_sizes), ("sorted_index", sorted_index))
    ]
    numbers: list[tuple[Any, ...]] = [() if isinstance(v, Tensor) else v for v in given]
    tensors = [v if isinstance(v, Tensor) else None for v in given]

    def check() -> None:
        _require_inp(op, inp, tokens, "its own")
        named = [
            operand(arg, v) if isinstance(v, Tensor) else Operand(arg, "int32", (len(v),))
            for arg, v in zip(("split_sizes", "sorted_index"), given, strict=True)
        ]
        enforce(rules.chunks(op, named[0], named[1], tokens))
        if probs is not None:
            require_device(op, inp, probs, "probs")
            enforce(rules.row_probs(op, operand("probs", probs), tokens))

    once(check, op, inp, probs, *[v if isinstance(v, Tensor) else len(v) for v in given])
    sizes, order = [None if isinstance(v, Tensor) else v for v in given]
    enforce(rules.chunk_numbers(op, sizes, order, tokens))
    return sort_chunks(SortChunks(inp, probs, tensors[0], tensors[1], numbers[0], numbers[1]))
