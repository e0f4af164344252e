"""Parts of the permutation verbs: arithmetic on maps, and permute and unpermute with their derivatives.

Residuals are the map and, for `unpermute`, the probabilities, and its input only if these are differentiated. None of
them is quantized, so that no remat policy rounds one (see the verb `quantize`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from diptych.common.errors import UnsupportedError
from diptych.common.ops.permute import SUMMED
from diptych.core._permute import moved_parts
from diptych.jax.primitives import permute as permute_ops
from diptych.jax.primitives.checks import same_axes
from diptych.jax.primitives.register import defvjp
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array
_INT32 = np.iinfo(np.int32)


# --- maps ---


def as_int32(x: Any) -> Array:
    """Converts integers of any width to int32, clamped to its range."""
    if x.dtype == np.int32:
        return jnp.asarray(x)
    xp = np if isinstance(x, np.ndarray) else jnp  # before JAX would wrap NumPy's int64
    return jnp.asarray(xp.clip(x, _INT32.min, _INT32.max).astype(np.int32))


def shifted(row_id_map: Array, pad_offsets: Array, rows: Any) -> Array:
    """Returns rows plus their expert's offset; -1 for an absent row, or if the sum is outside of 0..rows-1."""
    there = (row_id_map >= 0) & (pad_offsets >= -row_id_map) & (pad_offsets < rows - row_id_map)
    return jnp.where(there, row_id_map + jnp.where(there, pad_offsets, 0), -1)


def _padding(counts: Any, align: int) -> Array:
    """Returns the padding that rounds each count, an integer of any width, up to a multiple of `align`."""
    return as_int32(-(counts % align) % align)


def padding_before(counts: Any, align: int) -> Array:
    """Returns the padding before each expert's region where each count is rounded up to `align`: int32 [E]."""
    pad = _padding(counts, align)
    return jnp.cumsum(pad, dtype=jnp.int32) - pad


def padded_offsets(counts: Any, align: int, rows: Any) -> Array:
    """Returns the starts of regions whose counts are rounded up to `align`, and the end of the last one, int32 [E + 1];
    each is at most `rows`."""
    whole = jnp.clip(as_int32(counts), 0, rows)
    sizes = whole + jnp.minimum(_padding(counts, align), rows - whole)

    def add(a: Array, b: Array) -> Array:  # stops at `rows`, where a sum could leave int32
        return jnp.where(a > rows - b, rows, a + b)

    ends = jax.lax.associative_scan(add, sizes)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends])


# --- permute ---


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("row_id_map", "row_source", "probs", "x"),
    meta_fields=("rows", "dx", "dprobs"),
)
@dataclasses.dataclass(frozen=True)
class _Saved:
    """The residuals of a backward pass, and which gradients are wanted."""

    row_id_map: Array
    row_source: Array | None
    probs: Array | None
    x: Array | None
    rows: Any
    dx: bool
    dprobs: bool


def _value(leaf: Any) -> Any:
    return None if leaf is None else leaf.value


def _perturbed(leaf: Any) -> bool:
    return leaf is not None and leaf.perturbed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _permute(
    fills: tuple[int, ...],
    zero_prob_is_padding: bool,
    planes: tuple[Array, ...],
    row_id_map: Array,
    row_source: Array,
    probs: Array | None,
) -> tuple[tuple[Array, ...], Array | None]:
    return permute_ops.permute(planes, row_id_map, row_source, probs, fills, zero_prob_is_padding)


def _permute_forward(
    fills: tuple[int, ...], zero_prob_is_padding: bool, planes: Any, row_id_map: Any, row_source: Any, probs: Any
) -> tuple[Any, _Saved]:
    values = tuple(p.value for p in planes)
    dx = any(p.perturbed for p in planes)
    if dx and values[0].dtype.name not in SUMMED:
        raise UnsupportedError(
            f"moe_permute: rows of {values[0].dtype.name} have no gradient, nor has a quantized tensor. Permute before "
            "it is quantized, or wrap it in jax.lax.stop_gradient"
        )
    maps, held = (row_id_map.value, row_source.value), _value(probs)
    outs = permute_ops.permute(values, *maps, held, fills, zero_prob_is_padding)
    kept = held if zero_prob_is_padding and dx else None
    return outs, _Saved(maps[0], None, kept, None, maps[1].shape[0], dx, _perturbed(probs))


def _permute_backward(fills: tuple[int, ...], zero_prob_is_padding: bool, saved: _Saved, grads: Any) -> Any:
    dout, dpermuted = (None if isinstance(g, SymbolicZero) else g for g in (grads[0][0], grads[1]))
    dout, dpermuted = dout if saved.dx else None, dpermuted if saved.dprobs else None
    dx = dprobs = None
    if dout is not None and zero_prob_is_padding:  # such rows are zeros, whatever x is
        dx, _ = permute_ops.unpermute(dout, jnp.where(saved.probs == 0, -1, saved.row_id_map))
    elif dout is not None:
        dx, dprobs = permute_ops.unpermute(dout, saved.row_id_map, None, dpermuted)
    if dpermuted is not None and dprobs is None:  # rows without columns: nothing is summed
        _, dprobs = permute_ops.unpermute(jnp.zeros((saved.rows, 0), jnp.float32), saved.row_id_map, None, dpermuted)
    return (dx, *[None] * (len(fills) - 1)), None, None, dprobs


defvjp(_permute, _permute_forward, _permute_backward)


def permute(
    x: Array | QuantizedArray,
    row_id_map: Array,
    row_source: Array,
    probs: Array | None = None,
    zero_prob_is_padding: bool = False,
) -> tuple[Any, Array | None]:
    """Permutes x, [T, H] or quantized, by the map; also returns each row's probability of probs [T, slots]."""
    if not isinstance(x, QuantizedArray):
        x, *maps, probs = same_axes(x, row_id_map, row_source, probs)
        moved: Any = _permute((0,), zero_prob_is_padding, (x,), *maps, probs)
        return moved[0][0], moved[1]
    parts = moved_parts(x.quantizer.with_usage(rowwise=True))  # rowwise planes, which one call moves
    *planes, row_id_map, row_source, probs = same_axes(
        *(getattr(x, name) for name in parts), row_id_map, row_source, probs
    )
    fills = tuple(parts.values())
    moved = _permute(fills, zero_prob_is_padding, tuple(planes), row_id_map, row_source, probs)
    outs, permuted = jax.lax.stop_gradient(moved[0]), moved[1]  # else those of probs would seem to lead through planes
    fields: dict[str, Any] = {"rowwise_scale_inv": x.rowwise_scale_inv, "amax": x.amax} | dict(
        zip(parts, outs, strict=True)
    )
    columnwise = x.columnwise_data is not None
    if columnwise:
        columns, row_source = same_axes(x.columnwise_data, row_source)
        fields["columnwise_data"] = permute_ops.permute_columns(columns, row_source, max(1, row_id_map.shape[1]))
        fields["columnwise_scale_inv"] = x.columnwise_scale_inv
    quantizer = x.quantizer.with_usage(rowwise=True, columnwise=columnwise)
    return QuantizedArray(quantizer, (row_source.shape[0],), x.dtype, **fields), permuted


def permute_probs(probs: Array, row_id_map: Array, row_source: Array) -> Array:
    """Returns each row's probability of probs [T, slots], 0 for an absent row: [rows]."""
    carried = jnp.zeros(row_id_map.shape[:1], jnp.uint8)  # a call moves something besides
    carried, *maps, probs = same_axes(carried, row_id_map, row_source, probs)
    moved: Any = _permute((0,), False, (carried,), *maps, probs)
    return moved[1]


# --- unpermute ---


@jax.custom_vjp
def _unpermute(x: Array, row_id_map: Array, row_source: Array | None, probs: Array | None) -> Array:
    return permute_ops.unpermute(x, row_id_map, probs)[0]


def _unpermute_forward(x: Any, row_id_map: Any, row_source: Any, probs: Any) -> tuple[Array, _Saved]:
    y = permute_ops.unpermute(x.value, row_id_map.value, _value(probs))[0]
    held = x.value if _perturbed(probs) else None
    rows = x.value.shape[0]
    return y, _Saved(row_id_map.value, _value(row_source), _value(probs), held, rows, x.perturbed, _perturbed(probs))


def _unpermute_backward(saved: _Saved, dy: Any) -> tuple[Any, ...]:
    if isinstance(dy, SymbolicZero):
        return None, None, None, None
    row_id_map, row_source = saved.row_id_map, saved.row_source
    if row_source is None:
        row_id_map, row_source = permute_ops.invert_map(row_id_map, saved.rows)
    if saved.probs is None:
        (dx,), _ = permute_ops.permute((dy,), row_id_map, row_source)
        return dx, None, None, None
    dx, dprobs = permute_ops.unpermute_grad(dy, row_id_map, row_source, saved.probs, saved.x)
    return (dx if saved.dx else None), None, None, dprobs


defvjp(_unpermute, _unpermute_forward, _unpermute_backward)


def unpermute(x: Array, row_id_map: Array, row_source: Array | None, probs: Array | None) -> Array:
    """Returns the sum of each token's rows of `x` [rows, H], [T, H]. `row_source`: of the map, or None if unknown."""
    return _unpermute(*same_axes(x, row_id_map, row_source, probs))
