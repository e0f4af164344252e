"""The verbs `quantize`, `dequantize`, `amax` and `rng_state`.

They are pure functions with the names, keywords and bits of the torch panel. Bad arguments raise ValueError or
TypeError while tracing. None of them is differentiable; `diptych.jax.dense` is.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.errors import ArgumentError
from diptych.common.ops import shapes
from diptych.common.ops.quantize import require_quantizer
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.jax.functional.amax_group import group_amaxes
from diptych.jax.primitives import quantize as quantize_ops
from diptych.jax.primitives.checks import small_operand, to_array
from diptych.jax.tensors.quantized import QuantizedArray, from_buffers, require_quantized

Array = jax.Array


@overload
def amax(x: Array, *, per_row: bool = False) -> Array: ...
@overload
def amax(x: Array, *, per_row: bool = False, rht: Literal[True], random_signs: bool = False) -> tuple[Array, Array]: ...


def amax(
    x: Array, *, per_row: bool = False, rht: bool = False, random_signs: bool = False
) -> Array | tuple[Array, Array]:
    """Returns the largest finite magnitude in `x`, or 0 if there is none.

    **Arguments:** `x`: any shape, float32, bfloat16 or float16. `per_row`: one amax per row of [..., K]. `rht`: also
    the amax of the Hadamard-rotated tensor (bfloat16 only, rows in multiples of 16), with `random_signs` or without.

    **Returns:** float32 [1], or [M] with `per_row`. With `rht` a pair, whose second is the rotated tensor's amax [1].
    Inside shard_map the amax is that of one shard; for one scale over a mesh axis see `amax_group` of `quantize`.

    **Raises:** TypeError for other dtypes, ValueError if the number of rows is no multiple of 16 with `rht`, or for
    random signs without `rht`.
    """
    flags = ROW_AMAX * bool(per_row) + RHT * bool(rht) + RHT_SIGNS * bool(random_signs)
    x = to_array("amax", "x", x)
    return quantize_ops.amax(x, flags, columnwise=True) if rht else quantize_ops.amax(x, flags)


def quantize(
    x: Array,
    quantizer: Quantizer,
    *,
    amax: Array | None = None,
    columnwise_amax: Array | None = None,
    scale: Array | None = None,
    rng: Array | None = None,
    amax_group: Any = None,
    as_bytes: bool = False,
) -> QuantizedArray:
    """Quantizes `x` by `quantizer` (NUMERICS 2-5). Infinite and NaN elements become NaN.

    **Arguments:** `x`: [..., K] float32, bfloat16 or float16; leading dimensions fold into rows. `quantizer`: the
    format, its options, and the copies to make; a custom quantizer's `quantize_impl` is called.
    `amax`, `columnwise_amax`: float32 [1] or a number, used instead of the tensor's own: `amax` of per-tensor formats;
    of NVFP4 one for each copy that is made, [M] for an amax per row. `scale`: float32 [1] or a number, the scale of a
    per-tensor format (delayed scaling); the result's `amax` is still the tensor's own. `rng`: int32 [4] from
    `rng_state` (stochastic rounding). A call uses two offsets; pass an `rng` with later ones to the next call. As with
    `jax.random`, an `rng` that a `vmap` does not map gives each example the same random bits: map it too. A part of a
    tensor, such as a shard inside shard_map, has the whole tensor's random bits if its place follows, int32 [8]: row
    and column of its first element in the whole tensor, and the whole tensor's rows and columns, multiples of 16.
    `amax_group`: the name of a mesh axis, or several, over which amaxes of the tensor are reduced before quantizing
    (inside shard_map, or a `vmap` with an axis name); amaxes per row are not reduced. `as_bytes`: payloads and one-byte
    scales are returned as uint8 (JAX only). Residuals of your own functions under `jax.checkpoint` need it: JAX applies
    `lax.reduce_precision` to saved floats, which turns large E4M3 values and all E8M0 scales into NaN.

    **Returns:** a `QuantizedArray`.

    **Raises:** TypeError for other dtypes, or a missing `scale` or `rng`; ValueError for a scalar `x`, extents that the
    format does not take, or an argument that it does not read.
    """
    require_quantizer("quantize", quantizer)
    if quantizer.custom:
        options = {
            "amax": amax,
            "columnwise_amax": columnwise_amax,
            "scale": scale,
            "rng": rng,
            "amax_group": amax_group,
            "as_bytes": as_bytes or None,
        }
        made = quantizer.quantize_impl(
            x, functools.partial(quantize, **{k: v for k, v in options.items() if v is not None})
        )
        if not isinstance(made, QuantizedArray):
            kind = type(quantizer).__name__
            raise ArgumentError(
                f"quantize: {kind}.quantize_impl must return a QuantizedArray, got {type(made).__name__}"
            )
        return made
    x = to_array("quantize", "x", x)
    shapes.rows_cols(x.shape)  # raises for a scalar
    given = {"amax": amax, "columnwise_amax": columnwise_amax}
    if amax_group is not None:
        if amax is not None or columnwise_amax is not None or scale is not None:
            raise ValueError("quantize: amax_group reduces x's own amax, and an amax or a scale was given too")
        given |= group_amaxes(x, quantizer, amax_group)
    given |= {"scale": scale, "rng": rng}
    operands: Any = {name: small_operand("quantize", name, value) for name, value in given.items()}
    buffers = quantize_ops.quantize(x, quantizer, **operands, as_bytes=bool(as_bytes))
    return from_buffers(buffers, quantizer, x.shape, x.dtype)


def _words(value: int) -> np.ndarray[Any, Any]:
    """Returns the low and the high word of a number of 64 bits."""
    return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)


def rng_state(seed: Any, offset: Any = 0) -> Array:
    """Returns the random state of stochastic rounding: a seed and an offset in its stream.

    **Arguments:** `seed`: a Python integer in 0..2^64-1, or a JAX PRNG key, of which 64 bits are drawn (split it before
    if it serves elsewhere). `offset`: a Python integer in 0..2^64-1, or an integer scalar array such as a step counter
    (the bits of a 32-bit one are the low word). A call of `quantize` uses two offsets.

    **Returns:** int32 [4]: low and high words of seed and offset. Use a different one for each tensor, layer, step and
    device, so that rounding errors are independent.

    **Raises:** ValueError for a number outside of that range, TypeError for anything else.
    """
    words = []
    for arg, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            if not 0 <= value < 1 << 64:
                raise ValueError(f"rng_state: {arg} must lie in 0..2^64-1, got {value}")
            words.append(jnp.asarray(_words(int(value))))
        elif arg == "seed" and isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            words.append(jax.random.bits(value, (2,), "uint32"))
        elif arg == "offset" and isinstance(value, jax.Array) and value.ndim == 0 and value.dtype.kind in "iu":
            high = value >> 32 if value.dtype.itemsize == 8 else jnp.zeros_like(value)
            words.append(jnp.stack([value.astype(jnp.uint32), high.astype(jnp.uint32)]))
        else:
            what = "a Python integer or a JAX PRNG key" if arg == "seed" else "an integer or an integer scalar array"
            raise ArgumentError(f"rng_state: {arg} must be {what}, got {value!r}")
    return jax.lax.bitcast_convert_type(jnp.concatenate(words), jnp.int32)


def dequantize(q: QuantizedArray, dtype: Any = None) -> Array:
    """The values of `q`, from its rowwise copy if it has one, else from its columnwise copy.

    A columnwise copy after a Hadamard transform gives the rotated tensor.

    **Arguments:** `dtype`: float32, bfloat16 or float16; by default that of the tensor that was quantized.

    **Returns:** [..., K] of `dtype`.
    """
    return require_quantized("dequantize", "q", q).dequantize(dtype)
