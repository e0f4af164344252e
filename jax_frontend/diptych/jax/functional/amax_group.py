"""Amaxes that are reduced by max over mesh axes, as the argument `amax_group` of verbs asks for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.jax.primitives import quantize as quantize_ops
from diptych.jax.primitives.ffi import Source

Array = jax.Array


def group_amaxes(
    x: Array, quantizer: Quantizer, group: Any, source: Source | None = None, operands: tuple[Array, ...] = ()
) -> dict[str, Array]:
    """Returns the amaxes for quantizing `x`, or a source computed from it, as maxima over the mesh axes `group`."""
    spec, fmt = quantizer.spec, quantizer.format
    if quantizer.needs_scale:
        raise ValueError(
            "quantize: amax_group does not apply to delayed scaling, whose scale is given; reduce the amax of the "
            "history and pass it to scale_update(reduced=)"
        )
    if not fmt.tensor_amax:
        raise ValueError(f"quantize: amax_group is for formats with an amax of the tensor; {fmt.name} has none")
    flags = spec.flags & (ROW_AMAX | RHT | RHT_SIGNS)
    amax, of_columns = quantize_ops.amax(x, flags, source, operands, columnwise=True)
    return largest_amaxes(quantizer, amax, of_columns, group)


def largest_amaxes(
    quantizer: Quantizer, amax: Array, of_columns: Array, group: Any, group_of_rows: Any = ()
) -> dict[str, Array]:
    """Returns the amaxes that `quantizer` reads, by name, as maxima over mesh axes.

    `amax`, `of_columns`: of this shard, as the primitive returns them. `group`: the axes that cut the tensor.
    `group_of_rows`: those that cut its rows into pieces, over which amaxes per row are reduced.
    """
    fmt, by_row = quantizer.format, quantizer.spec.flags & ROW_AMAX
    if quantizer.spec.flags & (ROW_AMAX | RHT):
        amax = max_over(amax, group_of_rows if by_row else group)
        of_columns = max_over(of_columns, group)
    else:  # one number serves both copies
        amax = of_columns = max_over(of_columns, group)
    named = {"amax": amax} if fmt.one_scale or quantizer.rowwise else {}
    return named | ({"columnwise_amax": of_columns} if fmt.two_level and quantizer.columnwise else {})


def max_over(amax: Array, group: Any) -> Array:
    """Returns the maximum over mesh axes, or `amax` itself if there are none.

    It compares bits as integers: amaxes are never negative or NaN, so their bits have the same order, and XLA flushes
    no subnormal.
    """
    if group == ():
        return amax
    reduced = jax.lax.pmax(jax.lax.bitcast_convert_type(amax, jnp.int32), group)
    return jax.lax.bitcast_convert_type(reduced, jnp.float32)
