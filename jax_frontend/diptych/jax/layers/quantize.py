"""Functions that quantize a layer's input, kernel and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.layers.checks import missing_rng, require_quantizable
from diptych.common.layers.schedule import OFFSETS as OFFSETS
from diptych.common.layers.schedule import Call
from diptych.jax.functional import quantize as quantize_verbs
from diptych.jax.functional.grouped import largest, quantize_each
from diptych.jax.functional.source import FusedInput
from diptych.jax.layers.options import Amaxes, CallState, Options
from diptych.jax.tensors.copies import Copies, only

Array = jax.Array


def rng_at(rng: Array, offset: int) -> Array:
    """Returns the random state `offset` offsets later: int32 [4], added in 64 bits."""
    words = jax.lax.bitcast_convert_type(rng, jnp.uint32)
    low = words[2] + jnp.uint32(offset & 0xFFFFFFFF)
    high = words[3] + jnp.uint32(offset >> 32 & 0xFFFFFFFF) + (low < words[2]).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.stack([words[0], words[1], low, high]), jnp.int32)


def quantize_calls(
    x: Array | FusedInput,
    calls: tuple[Call, ...],
    options: Options,
    state: CallState,
    quantize: Callable[..., Any] = quantize_verbs.quantize,
) -> tuple[Copies, Amaxes]:
    """Returns the copies of one tensor, and the amaxes for its delayed-scaling states. `quantize`: the verb."""
    return quantize_operand(x, calls, options, state, "", quantize)[:2]


def quantize_weight(
    kernel: Array, calls: tuple[Call, ...], options: Options, state: CallState
) -> tuple[Copies, Amaxes]:
    """`quantize_calls` for a kernel [N, K], or for a stack [G, N, K], whose states record the amax over all kernels."""
    copies, amaxes = quantize_calls(kernel, calls, options.of_kernels, state, verb_of(kernel))
    return copies, {name: [a if kernel.ndim == 2 else largest(a) for a in found] for name, found in amaxes.items()}


def verb_of(kernel: Array) -> Callable[..., Any]:
    """Returns the verb that quantizes a kernel, or a stack of kernels."""
    return quantize_verbs.quantize if kernel.ndim == 2 else quantize_each


def quantize_operand(
    x: Array | FusedInput,
    calls: tuple[Call, ...],
    options: Options,
    state: CallState,
    dtype: str,
    quantize: Callable[..., Any] = quantize_verbs.quantize,
) -> tuple[Copies, Amaxes, Array | None]:
    """`quantize_calls`, and for a FusedInput the sum over rows in `dtype`, if one is given; None for an array."""
    states, rng = state
    rowwise = columnwise = total = None
    amaxes: Amaxes = {}
    for call in calls:
        given: dict[str, Any] = {}
        if call.state:
            given["scale"] = states[call.state].scale
        if call.needs_rng:
            if rng is None:
                raise missing_rng(options.op, call.quantizer)
            given["rng"] = rng_at(rng, 2 * call.number) if call.number else rng
        if options.group and call.reducible:
            given["amax_group"] = options.group
        if isinstance(x, FusedInput):
            q, summed = x.quantize(call.quantizer, as_bytes=True, column_sum=dtype if total is None else "", **given)
            total = summed if total is None else total
        else:
            if call.quantizer.format.pack > 1 and quantize is quantize_verbs.quantize:
                require_quantizable(options.op, options.name, x.shape, x.dtype.name, call.quantizer)
            q = quantize(x, call.quantizer, as_bytes=True, **given)
        if call.state and q.amax is not None:
            amaxes.setdefault(call.state, []).append(q.amax)
        rowwise = only(q, False) if call.quantizer.rowwise else rowwise
        columnwise = only(q, True) if call.quantizer.columnwise else columnwise
    return (rowwise, columnwise), amaxes, total


def requantized_result(
    x: Array,
    call: Call | None,
    options: Options,
    state: CallState,
    quantize: Callable[..., Any] = quantize_verbs.quantize,
) -> Array:
    """Returns a result quantized and dequantized again."""
    if call is None:
        return x
    single = call._replace(quantizer=call.quantizer.with_usage(rowwise=True, columnwise=False))
    (copy, _), _ = quantize_calls(x, (single,), options, state, quantize)
    assert copy is not None
    return copy.dequantize(x.dtype)
