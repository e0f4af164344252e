"""Operands that are quantized already: kernels that are held so."""

from __future__ import annotations

from typing import Any

import jax

from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX
from diptych.jax.layers.options import Options
from diptych.jax.tensors.copies import Q, as_bytes, only

Array = jax.Array


def high_precision(kernel: Any, dtype: Any) -> Array:
    """A kernel as an array, in `dtype` if it is held quantized."""
    return kernel if isinstance(kernel, jax.Array) else kernel.dequantize(dtype)


def held_copies(kernel: Q, options: Options, copies: Any) -> tuple[Q | None, Q | None]:
    """Both copies of a kernel that is quantized, as far as it has them. **Raises** ValueError for those of another
    format, rotation or kind of amax."""
    op, held, plan = options.op, kernel.quantizer, options.plan.weight
    if copies is not None:
        raise ValueError(f"{op}: kernel is quantized already, and copies of one were given too")
    for quantizer, copy, counts in (
        (plan.rowwise, kernel.rowwise_data, ROW_AMAX),
        (plan.columnwise, kernel.columnwise_data, RHT | RHT_SIGNS),
    ):
        if quantizer is None:
            continue
        other = quantizer.format is not held.format
        if other or (copy is not None and (held.spec.flags ^ quantizer.spec.flags) & counts):
            is_held, asked = (held.format.name, quantizer.format.name) if other else (held, quantizer)
            raise ValueError(
                f"{op}: the kernel is held as {is_held}, and {type(options.recipe).__name__} asks for {asked}: run it "
                "by the recipe that it was quantized with"
            )
    kernel = as_bytes(kernel)
    rowwise = None if kernel.rowwise_data is None else only(kernel, False, op)
    return rowwise, None if kernel.columnwise_data is None else only(kernel, True, op)
