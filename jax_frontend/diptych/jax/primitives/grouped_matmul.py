"""Products of groups of rows in high precision: for layers without a recipe, and operands that are not quantized.

A loop runs over tiles; each tile has the next rows of one group. The number of tiles suffices for any offsets, so it is
static and nothing waits for the device. The work is that of one product of all rows plus one tile per group. With
XLA's expansion of jax.lax.ragged_dot every group multiplies all rows, and an inf in one group's weights becomes NaN in
the rows of the others.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from diptych.common.errors import ShapeError
from diptych.jax.primitives.checks import same_axes

Array = jax.Array
TILE = 128  # rows


def _tiles(offsets: Array, rows: Any) -> tuple[Array, Array, Array]:
    """Returns each tile's group, first row and number of rows, which is 0 or less once all groups are through."""
    at = lax.cummax(jnp.clip(offsets, 0, rows))
    counts = (at[1:] - at[:-1] + TILE - 1) // TILE
    ends, groups = jnp.cumsum(counts, dtype=jnp.int32), counts.shape[0]
    t = jnp.arange(rows // TILE + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, t, side="right"), groups - 1)
    first = at[group] + (t - (ends[group] - counts[group])) * TILE
    return group, first, at[group + 1] - first


@functools.partial(jax.jit, static_argnames=("depth", "trans_b"))
def grouped_matmul(
    a: Array, b: Array, offsets: Array, bias: Array | None = None, *, depth: bool = False, trans_b: bool = True
) -> Array:
    """Grouped products of arrays of one dtype: a [R, K] @ b [G, N, K].T (or [G, K, N]) + bias [G, N]; `depth`:
    a [R, M].T @ b [R, N], [G, M, N]. Rows in no group and products over none are 0.

    It accumulates in float32. Group g has the rows offsets[g] <= r < offsets[g + 1]; each offset is clamped to between
    the one before it and R. **Raises** ShapeError for shapes that do not fit. For gradients use `grouped_dense`.
    """
    groups, rows = offsets.shape[0] - 1, a.shape[0]
    wide = b.shape[1 if depth or trans_b else 2]
    if depth:
        fits = a.ndim == b.ndim == 2 and b.shape[0] == rows
    else:
        fits = a.ndim == 2 and b.ndim == 3 and b.shape[0] == groups and b.shape[2 if trans_b else 1] == a.shape[1]
    if not fits:
        raise ShapeError(f"grouped_matmul: {list(a.shape)} and {list(b.shape)} do not fit, in {groups} groups")
    shape: Any = (groups, a.shape[1], wide) if depth else (rows, wide)
    if groups == 0:
        return jnp.zeros(shape, a.dtype)

    def product(x: Array, y: Array, over: tuple[int, int]) -> Array:
        return lax.dot_general(x, y, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)

    def part(x: Array, first: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, first, TILE)

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, TILE), (0, 0)))  # a tile may begin at the last row

    def of_rows(y: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, first, count = tile
        made = product(part(left, first), b[group], (1, 1 if trans_b else 0))
        if bias is not None:
            made = made + jnp.broadcast_to(bias[group].astype(jnp.float32), made.shape)
        made = jnp.where(row < count, made.astype(y.dtype), part(y, first))
        return lax.dynamic_update_slice_in_dim(y, made, first, 0), None

    def over_rows(out: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, first, count = tile
        x, y = (jnp.where(row < count, part(v, first), 0) for v in (left, right))
        return out.at[group].add(product(x, y, (0, 0))), None

    row, left = jnp.arange(TILE, dtype=jnp.int32)[:, None], padded(a)
    if depth:
        right, step, out = padded(b), over_rows, jnp.zeros(shape, jnp.float32)
    else:
        step, out = of_rows, padded(jnp.zeros(shape, a.dtype))
    out = same_axes(out, a, b, offsets, bias)[0]  # a loop's carry keeps its type
    out, _ = lax.scan(step, out, _tiles(offsets, rows))
    return out.astype(a.dtype) if depth else out[:rows]
