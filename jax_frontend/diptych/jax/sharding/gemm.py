"""Partitioning rules of gemm and bias_grad: what a mesh may cut, and how partial products are added."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.formats import format_by_name
from diptych.common.ops import shapes
from diptych.jax.primitives.checks import copy_length
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.gemm import gemm_p
from diptych.jax.sharding.quantize import COLUMNS, ROWS, Shapes, amax_factors
from diptych.jax.sharding.rule import Cuts, Factors, Rule, Run, block_of, copy_factors, row_factors

Array = jax.Array


def gemm(
    operands: Shapes,
    batch: Batch,
    a: tuple[str, bool],
    b: tuple[str, bool],
    has_bias: bool,
    has_c: bool,
    alpha: str,
    beta: str,
    out_dtype: str,
    **options: Any,
) -> Rule:
    """Copies [M, K] and [N, K], bias [N], c [M, N] -> [M, N].

    Over a cut K each shard rounds its product to the result's dtype. The parts are added in float32, then the bias,
    then beta * c, and rounded once.
    """
    at = copy_length(a[0])
    end = at + copy_length(b[0])
    factors: list[Factors] = []
    for (name, columnwise), kept, first, last in ((a, "M", 0, at), (b, "N", at, end)):
        factors += copy_factors(format_by_name(name), columnwise, operands[first], kept, "K")
        factors += [amax_factors(amax, kept) for amax in operands[first + 2 : last]]
    a_fmt, b_fmt = format_by_name(a[0]), format_by_name(b[0])
    m, n, k, _ = shapes.gemm_shape(a_fmt, a[1], operands[0], b_fmt, b[1], operands[at])
    a_block, b_block = block_of(a_fmt), block_of(b_fmt)
    extents = {
        "M": (m, a_block[0]),
        "N": (n, b_block[0]),
        "K": (k, math.lcm(a_block[1], b_block[1])),
    }

    def local(run: Run, cuts: Cuts, shard: Sequence[Array]) -> list[Array]:
        if jax.lax.axis_size(cuts.get("K", ())) == 1:
            return run(*shard)
        given = dict(a=a, b=b, alpha=alpha, beta=(0.0).hex(), out_dtype=out_dtype, **options)

        def finish(total: Array, mine: Callable[[Array], Array]) -> Array:
            if has_bias:
                total = total + mine(aligned(shard[end][..., None, :], batch.axes[end], batch.rank, 2)).astype(
                    "float32"
                )
            if has_c:
                c = mine(aligned(shard[-1], batch.axes[-1], batch.rank, 2))
                total = total + float.fromhex(beta) * c.astype("float32")
            return total.astype(out_dtype)

        return [summed(product(gemm_p, shard[:end], batch, given), cuts, finish)]

    return Rule(
        (*factors, *[("N",)] * has_bias, *[("M", "N")] * has_c),
        (("M", "N"),),
        extents,
        ("sum",),
        local,
        summed="K",
        shares=("M", "N"),
        before=end,
    )


def product(prim: Any, operands: Sequence[Array], batch: Batch, params: dict[str, Any]) -> Array:
    """Returns this device's part of a product over a cut K, with all batch axes, without what enters after the sum.

    `operands`: those of the product alone, with the first masks of `batch`.
    """
    masks = batch.axes[: len(operands)]
    axes = [bit for bit in range(batch.rank) if any(mask >> bit & 1 for mask in masks)]
    narrow = tuple(sum((mask >> bit & 1) << i for i, bit in enumerate(axes)) for mask in masks)
    (part,) = prim.bind(*operands, batch=Batch(len(axes), narrow), has_bias=False, has_c=False, **params)
    return aligned(part, sum(1 << bit for bit in axes), batch.rank, 2)


def summed(part: Array, cuts: Cuts, finish: Callable[[Array, Callable[[Array], Array]], Array]) -> Array:
    """Returns the sum of parts [..., M, N] over the axes that cut K, or a share of it where they cut M or N too.

    Parts travel in their own dtype, and are added in float32. Each device adds up an equal share, in the order of the
    devices, and finished shares are gathered over those axes that do not cut the result: of parts of two bytes half the
    bytes of an all-reduce in float32. A whole sum of float32 parts, and parts that have no equal shares, are added by
    XLA's all-reduce.

    `finish`: takes a sum in float32, and a function that cuts this sum's share out of [..., M, N] or a bias
    [..., 1, N] as the device has it, to the result.
    """
    axes, ranks = cuts["K"], jax.lax.axis_size(cuts["K"])
    dimensions = (("M", part.ndim - 2), ("N", part.ndim - 1))
    shares = [(d, cuts[factor]) for factor, d in dimensions if set(cuts.get(factor, ())) & set(axes)]
    shares += [(d, ()) for _, d in dimensions if part.shape[d] % ranks == 0]
    dimension, own = shares[0] if shares else (part.ndim - 1, ())
    rest = tuple(axis for axis in axes if axis not in own)
    if part.shape[dimension] % ranks or (part.dtype == "float32" and not own):
        total = jax.lax.psum(part.astype("float32"), axes)
        return finish(_cut(total, own, dimension), lambda x: x)
    done = finish(_share(part, axes, own + rest, dimension), lambda x: _cut(x, rest, dimension))
    gather = functools.partial(jax.lax.all_gather, axis_name=rest, axis=dimension, tiled=True)
    return _as_integers(gather, done) if rest else done


def _cut(x: Array, axes: tuple[Any, ...], dimension: int) -> Array:
    """Returns this device's share of x over the axes. A dimension of length 1 is broadcast, and not cut."""
    if not axes or x.shape[dimension] == 1:
        return x
    length = x.shape[dimension] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * length, length, dimension)


def _share(part: Array, axes: tuple[Any, ...], places: tuple[Any, ...], dimension: int) -> Array:
    """Returns this device's share along a dimension of the sum over the axes' devices, in float32.

    `places`: the axes in the order in which they cut the sum into shares.
    """
    if part.dtype == "float32" and places == axes:
        return jax.lax.psum_scatter(part, axes, scatter_dimension=dimension, tiled=True)
    swap = functools.partial(jax.lax.all_to_all, axis_name=places, split_axis=dimension + 1, concat_axis=0, tiled=True)
    parts = _as_integers(swap, part[None])
    numbers = np.arange(len(parts)).reshape([jax.lax.axis_size(axis) for axis in places])
    order = numbers.transpose([places.index(axis) for axis in axes]).ravel()
    return functools.reduce(jnp.add, [parts[i].astype("float32") for i in order])


def _as_integers(exchange: Callable[[Array], Array], x: Array) -> Array:
    """Exchanges the bits of x. XLA:CPU would send bfloat16 as float32."""
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(exchange(bits), x.dtype)


def aligned(x: Array, mask: int, rank: int, own: int) -> Array:
    """Returns x with an axis of length 1 for each of the `rank` batch axes that it lacks. `own`: its own dimensions."""
    missing = [rank - 1 - bit for bit in range(rank) if not mask >> bit & 1]
    assert x.ndim == rank - len(missing) + own
    return jax.lax.expand_dims(x, missing)


def bias_grad(operands: Shapes, batch: Batch, dtype: str) -> Rule:
    """[..., N] -> [N]."""
    m, n = shapes.rows_cols(operands[0])
    x = (*row_factors(operands[0][:-1], ROWS), COLUMNS)
    return Rule((x,), ((COLUMNS,),), {ROWS: (m, 1), COLUMNS: (n, 1)}, ("sum",))
