"""Rows between token order and expert order: permute, unpermute and sort chunks, for mixtures of experts (NUMERICS 8).

    permuted, row_id_map = moe_permute(x, mask)                  [T, H] -> [rows, H], experts in ascending order
    y = moe_unpermute(f(permuted), row_id_map, probs)            [rows, H] -> [T, H], each token's rows summed

Names are TransformerEngine's; docs/moe.md lists the differences. Invariants:

- Shapes are static and nothing waits for the device: a result has `num_out_tokens` rows, by default as many as any
  routing needs. Absent rows are zeros, in a quantized tensor quantized zeros. Rows past the result's end are dropped,
  and `moe_unpermute` treats them as absent.
- Tokens and probabilities have first derivatives in reverse mode; maps and quantized tensors have none.
- A `RowMap` may be passed in place of a routing map or a row_id_map: `moe_map` makes it once for all functions. So no
  two arguments can contradict each other.
- Inside shard_map all arguments and results are those of one shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.errors import ArgumentError, DTypeError
from diptych.common.ops import permute as rules
from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, of_shape, require_dtype
from diptych.jax.functional.permute_op import as_int32, padded_offsets, padding_before, permute, shifted, unpermute
from diptych.jax.primitives import permute as permute_ops
from diptych.jax.primitives.checks import check_copy, check_native, check_row_map, check_rows, enforce, operand
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array
Rows = Any  # Array or QuantizedArray
MapType = Literal["mask", "index"]
Integers = Any  # an array of int32 or int64, or a sequence of ints


class RowMap(NamedTuple):
    """The rows of each token, and the token of each row, as int32 arrays; made by `moe_map`.

    `row_id_map`: [T, slots], the row of each slot, or -1; a slot is an expert of a mask, or a choice of an index map.
    `tokens_per_expert`: [E], number of existing rows. `expert_offsets`: [E + 1], the first row of each expert's region,
    and the end of the last one. `row_source`: [rows], t * slots + slot of each row, -1 if the row is absent.
    """

    row_id_map: Array
    tokens_per_expert: Array
    expert_offsets: Array
    row_source: Array


# --- checks of arguments ---


def _array(op: str, arg: str, x: Any) -> Any:
    if isinstance(x, QuantizedArray) or not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentError(f"{op}: {arg} must be a JAX or NumPy array, got {type(x).__name__}")
    check_native(op, arg, x)
    return x


def _kept(op: str, arg: str, x: Any) -> Array:
    """Returns x as a JAX array. NumPy's 64-bit dtypes are refused, because JAX would round them."""
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise DTypeError(f"{op}: {arg} is {x.dtype.name}, which JAX would round: set jax_enable_x64, or cast it first")
    return jnp.asarray(x)


def _integer(op: str, arg: str, value: Any, least: int) -> int:
    rules.require_int(op, arg, value, least, (int, np.integer), ": sizes are static in JAX")
    return int(value)


def _integers(op: str, arg: str, given: Integers, form: str = "[C]") -> Any:
    """Checks a list [C]: an int32 or int64 array of JAX or NumPy, or a sequence of ints that are not below 0."""
    if isinstance(given, (list, tuple)):
        return np.array([_integer(op, f"each of {arg}", n, 0) for n in given], np.int64)
    x = _array(op, arg, given)
    rules.require_integers(op, operand(arg, x), form)
    return x


def slot_probs(op: str, arg: str, probs: Any, map_shape: tuple[Any, ...], wide: bool = True) -> Array:
    enforce(rules.per_slot(op, operand(arg, _array(op, arg, probs)), map_shape, wide))
    return _kept(op, arg, probs)


def _token_rows(op: str, x: Any, tokens: Any = None) -> Rows:
    """Returns `inp` as rows to permute: [T, H] with leading dimensions folded, or a quantized tensor."""
    quantized = isinstance(x, QuantizedArray)
    if quantized:
        _check_rows_alone(op, x)
        named = Operand("inp", x.format.name, x.shape)
    else:
        named = operand("inp", _array(op, "inp", x))
        require_dtype(op, named, *permute_ops.MOVED)
    rows, width = shapes.rows_cols(x.shape) if x.ndim else (0, 0)
    enforce(rules.tokens_of(op, named, rows if tokens is None else tokens, "routing_map's tokens"))
    return x if quantized else _kept(op, "inp", x).reshape(rows, width)


def _check_rows_alone(op: str, q: QuantizedArray) -> None:
    """Checks that rows of a quantized tensor can be permuted, because no block spans several rows."""
    fmt = q.format
    rules.require_movable(op, fmt, q.rowwise_data is not None, q.columnwise_data is not None)
    operands = q.copy_of(False, f"{op}: inp").operands(op)
    check_copy(op, "inp", operands, (0,) * len(operands), fmt.name, False)


# --- maps ---


def require_row_map(op: str, x: Any, row_map: Any, arg: str = "inp") -> tuple[Array, Array]:
    """Returns row_id_map and row_source of a `RowMap` whose tokens are the rows of `x`.

    **Raises:** TypeError, ValueError.
    """
    if not isinstance(row_map, RowMap):
        raise ArgumentError(f"{op}: row_map must be a RowMap, got {type(row_map).__name__}; moe_map() makes one")
    row_id_map, row_source = (_array(op, part, getattr(row_map, part)) for part in ("row_id_map", "row_source"))
    tokens, _ = check_row_map(op, row_id_map, 0)
    check_rows(op, row_source, 0)
    enforce(rules.tokens_of(op, operand(arg, x), tokens, "row_map's tokens"))
    return jnp.asarray(row_id_map), jnp.asarray(row_source)


def _made_map(
    op: str, routing_map: Any, num_experts: Any, map_type: str, num_out_tokens: Any, align: Any = 1
) -> RowMap:
    rules.require_kind(op, map_type)
    align = _integer(op, "align_size", align, 1)
    mask, x = map_type == "mask", _array(op, "routing_map", routing_map)
    rules.require_rank(op, operand("routing_map", x), 2, "[T, E]" if mask else "[T, k]")
    tokens, slots = x.shape
    if num_experts is None:
        num_experts = slots if mask else rules.MAX_SLOTS
    else:
        num_experts = _integer(op, "num_experts", num_experts, 1)
    rows = rules.padded_rows(tokens * slots, num_experts, align)
    if num_out_tokens is not None and _integer(op, "num_out_tokens", num_out_tokens, -1) > 0:
        rows = int(num_out_tokens)
    enforce(rules.routing(op, operand("routing_map", x), mask, num_experts, rows, align))
    if mask:
        routing = jnp.asarray(x if x.dtype.name in ("bool", "uint8") else x != 0)
    else:
        routing = x if isinstance(x, jax.Array) else as_int32(x)
    return RowMap(**permute_ops.permute_map(routing, map_type, num_experts, rows, align))


def _map_of(
    op: str, routing_map: Any, num_out_tokens: Any = None, num_experts: Any = None, map_type: str = "mask"
) -> RowMap:
    """Returns the map that was passed, or makes one from a routing map."""
    if not isinstance(routing_map, RowMap):
        return _made_map(op, routing_map, num_experts, map_type, num_out_tokens)
    rules.refuse_beside_map(op, num_out_tokens, num_experts, map_type)
    return routing_map


def moe_map(
    routing_map: Array,
    num_experts: int | None = None,
    *,
    map_type: MapType = "mask",
    num_out_tokens: int | None = None,
    align_size: int = 1,
) -> RowMap:
    """Returns the map of tokens to experts for a routing. Rows are ordered by expert, within an expert by token.

    **Arguments:** `routing_map`: a mask [T, E], bool or integers, where a token goes to every expert whose entry is not
    0; or with map_type "index" expert ids [T, k], int32 or int64; ids outside of 0..num_experts-1 name no expert.
    `num_experts`: E, with ids. `num_out_tokens`: rows of the result, padding included; later rows are dropped, unused
    ones are absent. None, -1 and 0: as many as any routing needs. `align_size`: each expert's region starts at a
    multiple of this.

    **Returns:** a `RowMap`, for the functions below in place of a routing map or row_id_map, and for grouped products.

    **Raises:** TypeError for other dtypes; ValueError for other shapes, an unknown map_type, ids without `num_experts`,
    or more rows than int32 can number; NotImplementedError for more than 2048 experts.
    """
    op = "moe_map"
    rules.require_kind(op, map_type)
    rules.require_experts(op, map_type, num_experts)
    return _made_map(op, routing_map, num_experts, map_type, num_out_tokens, align_size)


# --- permute ---


def moe_permute(
    inp: Rows,
    routing_map: Array | RowMap,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: MapType = "mask",
    *,
    num_experts: int | None = None,
) -> tuple[Rows, Array]:
    """Copies each token's row to each of its experts. Rows are ordered by expert, within an expert by token.

    **Arguments:** `inp`: [..., H] with T rows, or a `QuantizedArray`, whose data and scales move together.
    `routing_map`, `num_out_tokens`, `map_type`, `num_experts`: as `moe_map`; ids without `num_experts` may name 2048
    experts. `routing_map` may be a `RowMap`, which determines the others. `max_token_num`: no effect;
    TransformerEngine sizes a workspace by it.

    **Returns:** (permuted [rows, H], row_id_map int32 [T, slots]). The gradient of inp, an array of float32, bfloat16,
    float16 or (on the CPU, with x64) float64, is each token's sum over its rows.

    **Raises:** as `moe_map`; TypeError for dtypes that cannot be moved; ValueError for unequal numbers of tokens or a
    quantized inp whose blocks span tokens; NotImplementedError for a gradient in another dtype, or a second derivative.
    """
    op = "moe_permute"
    _integer(op, "max_token_num", max_token_num, -1)
    row_map = _map_of(op, routing_map, num_out_tokens, num_experts, map_type)
    x = _token_rows(op, inp, row_map.row_id_map.shape[0])
    return permute(x, row_map.row_id_map, row_map.row_source)[0], row_map.row_id_map


def _with_probs(op: str, inp: Any, probs: Any, row_map: RowMap, zero_prob_is_padding: bool) -> tuple[Rows, Any]:
    x = _token_rows(op, inp, row_map.row_id_map.shape[0])
    probs = slot_probs(op, "probs", probs, row_map.row_id_map.shape)
    return permute(x, row_map.row_id_map, row_map.row_source, probs, bool(zero_prob_is_padding))


def moe_permute_with_probs(
    inp: Rows,
    probs: Array,
    routing_map: Array | RowMap,
    num_out_tokens: int | None = None,
    *,
    zero_prob_is_padding: bool = False,
) -> tuple[Rows, Array, Array]:
    """`moe_permute` by a mask, together with each row's probability.

    **Arguments:** `probs`: float32, bfloat16, float16 or float64, [T, E], or [T, slots] of a `RowMap`.
    `zero_prob_is_padding`: a row with a probability of exactly 0 becomes zeros, as in TransformerEngine; by default
    it holds its token.

    **Returns:** (permuted [rows, H], permuted_probs [rows], row_id_map [T, slots]); absent rows' probability is 0.

    **Raises:** as `moe_permute`, TypeError and ValueError also for probs of another dtype or shape.
    """
    op = "moe_permute_with_probs"
    row_map = _map_of(op, routing_map, num_out_tokens)
    return *_with_probs(op, inp, probs, row_map, zero_prob_is_padding), row_map.row_id_map


def moe_permute_and_pad_with_probs(
    inp: Rows,
    probs: Array,
    routing_map: Array,
    tokens_per_expert: Integers | None = None,
    align_size: int = 16,
    *,
    num_out_tokens: int | None = None,
    zero_prob_is_padding: bool = False,
) -> tuple[Rows, Array, Array, None, Array]:
    """`moe_permute_with_probs`, each expert's region padded to a multiple of `align_size`.

    **Arguments:** `tokens_per_expert`: integers [E], whose padded counts place the regions. None, which is faster: the
    routing's own counts. `num_out_tokens`: as `moe_map`, padding included. If `tokens_per_expert` is on the host (a
    list, a tuple, a NumPy array), the result has exactly the rows of its padded counts; tokens that do not fit are
    dropped.

    **Returns:** (permuted, permuted_probs, row_id_map, pad_offsets, target_tokens_per_expert int32 [E]). The row_id_map
    refers to padded rows, so pad_offsets is None; pass both to `moe_unpermute`. target_tokens_per_expert is the size of
    each padded region within the result.

    **Raises:** as `moe_permute_with_probs`.
    """
    op = "moe_permute_and_pad_with_probs"
    row_map = _made_map(op, routing_map, None, "mask", num_out_tokens, align_size)  # moe_map aligns a RowMap
    if tokens_per_expert is not None:
        row_map = _placed_by(op, row_map, routing_map, tokens_per_expert, int(align_size), num_out_tokens)
    out, permuted = _with_probs(op, inp, probs, row_map, zero_prob_is_padding)
    return out, permuted, row_map.row_id_map, None, jnp.diff(row_map.expert_offsets)


def _placed_by(
    op: str, row_map: RowMap, routing_map: Any, tokens_per_expert: Any, align: int, num_out_tokens: int | None
) -> RowMap:
    """Returns the map with regions placed by these padded counts. Counts on the host also set its number of rows."""
    rows, shape = row_map.row_source.shape[0], row_map.tokens_per_expert.shape
    counts = _integers(op, "tokens_per_expert", tokens_per_expert, "[E]")
    enforce(of_shape(op, operand("tokens_per_expert", counts), *shape))
    if isinstance(counts, np.ndarray) and (num_out_tokens is None or num_out_tokens < 1):
        rows = rules.counted_rows(counts.tolist(), align)
        enforce((rules.counted(op, "rows", rows),))
    plain = _made_map(op, routing_map, None, "mask", None)
    row_id_map = shifted(plain.row_id_map, padding_before(counts, align), rows)
    row_id_map, row_source = permute_ops.invert_map(row_id_map, rows)
    return RowMap(row_id_map, plain.tokens_per_expert, padded_offsets(counts, align, rows), row_source)


# --- unpermute ---


def moe_unpermute(
    inp: Array,
    row_id_map: Array | RowMap,
    merging_probs: Array | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: MapType = "mask",
    probs: Array | None = None,
    pad_offsets: Integers | None = None,
) -> Array:
    """The sum of each token's rows, in ascending order, in float32 (float64 rows: float64), rounded once.

    **Arguments:** `inp`: [rows, H] float32, bfloat16, float16 or, on the CPU with x64, float64. `row_id_map`: of a
    permute, int32 [T, slots], or a `RowMap`, which saves work in backward. Entries outside of 0..rows-1 are absent. If
    several slots name a row, its gradient comes from the last. `merging_probs`: [T, slots], each row's factor.
    `restore_shape`: of the result; None is [T, H]. `map_type`: the kind of routing that the map was made from. `probs`:
    the deprecated name of merging_probs. `pad_offsets`: integers [E], first added to the rows of each expert of a
    mask's map; None if the map refers to padded rows, as that of `moe_permute_and_pad_with_probs` does.

    **Returns:** [T, H] of inp's dtype, in `restore_shape`.

    **Raises:** TypeError for other dtypes or a quantized inp; ValueError for other shapes, an unknown map_type,
    pad_offsets with an index map, or both names of the probabilities; NotImplementedError for a second derivative.
    """
    op = "moe_unpermute"
    rules.require_kind(op, map_type)
    merging_probs = rules.merging_probs(op, merging_probs, probs)
    if probs is not None:
        warnings.warn(f"{op}: probs is deprecated, use merging_probs", stacklevel=2)
    if isinstance(inp, QuantizedArray):
        raise ArgumentError(f"{op}: inp is quantized, and its rows are summed; dequantize() it first")
    named = operand("inp", _array(op, "inp", inp))
    rules.require_rows(op, named)
    rules.require_floats(op, named)
    x = _kept(op, "inp", inp)
    x = x.reshape(shapes.rows_cols(x.shape))
    row_id_map, row_source = _map_beside(op, row_id_map, x.shape[0])
    whole = row_id_map.shape[0], x.shape[1]
    wanted = whole if restore_shape is None else tuple(restore_shape)
    enforce(rules.restored(op, *whole, wanted))
    if merging_probs is not None:
        wide = x.dtype.name == "float64"
        merging_probs = slot_probs(op, "merging_probs", merging_probs, row_id_map.shape, wide)
    if pad_offsets is not None:
        rules.refuse_pad_offsets(op, map_type)
        offsets = _integers(op, "pad_offsets", pad_offsets, "[E]")
        enforce(of_shape(op, operand("pad_offsets", offsets), *row_id_map.shape[1:]))
        row_id_map, row_source = shifted(row_id_map, as_int32(offsets), x.shape[0]), None
    return unpermute(x, row_id_map, row_source, merging_probs).reshape(wanted)


def _map_beside(op: str, given: Any, rows: Any) -> tuple[Array, Array | None]:
    """Returns a map's row_id_map, and its row_source if it is a RowMap."""
    row_id_map, row_source = (given.row_id_map, given.row_source) if isinstance(given, RowMap) else (given, None)
    enforce(rules.row_map(op, operand("row_id_map", _array(op, "row_id_map", row_id_map))))
    if row_source is not None:
        message = f"{op}: inp must have a row for each of the map's rows, {row_source.shape[0]}, got {rows}"
        enforce([shapes.Constraint(rows, row_source.shape[0], message)])
    return jnp.asarray(row_id_map), row_source


# --- chunks ---


def moe_sort_chunks_by_index(inp: Rows, split_sizes: Integers, sorted_index: Integers) -> Rows:
    """Reorders chunks of consecutive rows: chunk `sorted_index[j]` comes j-th.

    **Arguments:** `inp`: [..., H] with T rows, or a `QuantizedArray`, as `moe_permute`. `split_sizes`, `sorted_index`:
    int32 or int64 arrays [C], or sequences of ints. A sequence of sizes must add up to T, a sequence of indices must
    name each chunk once. Values of arrays are not checked: rows of a chunk that is not named are dropped, and the first
    mention of a chunk counts.

    **Returns:** [T, H], quantized if inp is; absent rows are zeros.

    **Raises:** as `moe_permute`; NotImplementedError for more than 2048 chunks.
    """
    return _sorted("moe_sort_chunks_by_index", inp, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: Rows, probs: Array, split_sizes: Integers, sorted_index: Integers
) -> tuple[Rows, Array]:
    """`moe_sort_chunks_by_index`, together with each row's probability.

    **Arguments:** `probs`: [T] or [T, 1] float32, bfloat16, float16 or float64.

    **Returns:** (out, permuted_probs [T]).

    **Raises:** as `moe_sort_chunks_by_index`.
    """
    op = "moe_sort_chunks_by_index_with_probs"
    return _sorted(op, inp, split_sizes, sorted_index, _array(op, "probs", probs))


def _sorted(op: str, inp: Any, split_sizes: Any, sorted_index: Any, probs: Any = None) -> tuple[Rows, Any]:
    x = _token_rows(op, inp)
    tokens, _ = shapes.rows_cols(x.shape)
    sizes, order = _integers(op, "split_sizes", split_sizes), _integers(op, "sorted_index", sorted_index)
    named = operand("split_sizes", sizes), operand("sorted_index", order)
    enforce(rules.chunks(op, *named, tokens))
    numbers = [given if isinstance(given, (list, tuple)) else None for given in (split_sizes, sorted_index)]
    enforce(rules.chunk_numbers(op, numbers[0], numbers[1], tokens))
    if probs is not None:
        enforce(rules.row_probs(op, operand("probs", probs), tokens))
        probs = _kept(op, "probs", probs).reshape(tokens, 1)
    return permute(x, *permute_ops.chunk_map(as_int32(sizes), as_int32(order), tokens), probs)
