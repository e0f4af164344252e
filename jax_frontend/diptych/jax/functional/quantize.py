"""The verbs on JAX arrays: `quantize`, `dequantize`, `gemm`, `gemm_into`, `amax`, `scale_update`, `bias_grad`.

Pure functions with the names and keywords of the torch panel and its bits. Bad arguments raise ValueError or TypeError
while tracing. None of them is differentiable; `diptych.jax.dense` is.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common import shapes
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.jax.primitives import quantize as primitives
from diptych.jax.primitives.arrays import dtype_name, factor, small_operand, to_array
from diptych.jax.primitives.checks import check_native, enforce
from diptych.jax.primitives.ffi import Source
from diptych.jax.tensors.quantized import QuantizedArray, from_buffers

Array = jax.Array


def _quantized(op: str, arg: str, q: Any) -> QuantizedArray:
    if not isinstance(q, QuantizedArray):
        raise ArgumentError(f"{op}: {arg} must be a QuantizedArray, got {type(q).__name__}; quantize it first")
    return q


@overload
def amax(x: Array, *, per_row: bool = False) -> Array: ...
@overload
def amax(x: Array, *, per_row: bool = False, rht: Literal[True], random_signs: bool = False) -> tuple[Array, Array]: ...


def amax(
    x: Array, *, per_row: bool = False, rht: bool = False, random_signs: bool = False
) -> Array | tuple[Array, Array]:
    """Largest finite magnitude in `x`; 0 where there is none.

    **Arguments:** `x`: any shape, float32, bfloat16 or float16. `per_row`: one per row of [..., K]. `rht`: also that of
    the Hadamard-rotated tensor (bfloat16 only, rows in multiples of 16), with `random_signs` or without.

    **Returns:** float32 [1], or [M] `per_row`; 0 where there is none. With `rht` a pair, whose second is the rotated
    tensor's [1]. Inside shard_map they are this shard's: see `amax_group` of `quantize` for one scale over a mesh axis.

    **Raises:** TypeError for other dtypes, ValueError for rows that the transform does not divide, or random signs
    without it.
    """
    flags = ROW_AMAX * bool(per_row) + RHT * bool(rht) + RHT_SIGNS * bool(random_signs)
    x = to_array("amax", "x", x)
    return primitives.amax(x, flags, columnwise=True) if rht else primitives.amax(x, flags)


def group_amaxes(
    x: Array, quantizer: Quantizer, group: Any, source: Source | None = None, operands: tuple[Array, ...] = ()
) -> dict[str, Array]:
    """The amaxes that quantizing `x`, or what `source` makes of it, needs: the largest over the mesh axes `group`."""
    spec, fmt = quantizer.spec, quantizer.format
    if quantizer.needs_scale:
        raise ValueError(
            "quantize: amax_group does not apply to delayed scaling, whose scale is given; reduce the amax of the "
            "history and pass it to scale_update(reduced=)"
        )
    if not (fmt.per_tensor or fmt.two_level):
        raise ValueError(f"quantize: amax_group is for formats with an amax of the tensor; {fmt.name} has none")
    flags = spec.flags & (ROW_AMAX | RHT | RHT_SIGNS)
    amax, of_columns = primitives.amax(x, flags, source, operands, columnwise=True)
    if spec.flags & (ROW_AMAX | RHT):
        amax = amax if spec.flags & ROW_AMAX else max_over(amax, group)  # a row's amax is its own
        of_columns = max_over(of_columns, group)
    else:  # one number serves both copies
        amax = of_columns = max_over(of_columns, group)
    named = {"amax": amax} if fmt.per_tensor or quantizer.rowwise else {}
    return named | ({"columnwise_amax": of_columns} if fmt.two_level and quantizer.columnwise else {})


def max_over(amax: Array, group: Any) -> Array:
    """The largest over mesh axes.

    As integers: amaxes are never negative or NaN, so their bits are ordered as they are, and XLA flushes no subnormal.
    """
    reduced = jax.lax.pmax(jax.lax.bitcast_convert_type(amax, jnp.int32), group)
    return jax.lax.bitcast_convert_type(reduced, jnp.float32)


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
    """Quantizes `x` as `quantizer` says (NUMERICS 2-5). An infinite element becomes NaN, as one that is NaN.

    **Arguments:** `x`: [..., K] float32, bfloat16 or float16; leading dimensions fold into rows. `quantizer`: which
    format, with which options, and which copies; one of your own is asked through its `quantize_impl`.
    `amax`, `columnwise_amax`: float32 [1] or a number, used instead of the tensor's own: `amax` of per-tensor formats;
    of NVFP4 one for each copy that is made, [M] for an amax per row. `scale`: float32 [1] or a number, the scale of a
    per-tensor format (delayed scaling); the result's `amax` is still the tensor's own. `rng`: int32 [4] from
    `rng_state` (stochastic rounding). A call uses two of its offsets, and you pass other ones to the next call. As with
    `jax.random`, an `rng` that a `vmap` does not map gives each example the same random bits: map it too.
    `amax_group`: the name of a mesh axis, or several, over which amaxes of the tensor are reduced before quantizing
    (inside shard_map, or a `vmap` with an axis name); those per row stay. `as_bytes`: payloads and one-byte scales come
    as uint8 (JAX only). Residuals of a function of your own under `jax.checkpoint` need it: what JAX saves there and
    also uses, it rounds with `lax.reduce_precision`, which turns large E4M3 values and all E8M0 scales into NaN.

    **Returns:** a `QuantizedArray`.

    **Raises:** TypeError for other dtypes, or a missing `scale` or `rng`; ValueError for a scalar `x`, extents that the
    format does not take, or an argument that it does not read.
    """
    if not isinstance(quantizer, Quantizer):
        raise ArgumentError(f"quantize: quantizer must be a diptych Quantizer, got {type(quantizer).__name__}")
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
    x = to_array(f"quantize ({quantizer.format.name})", "x", x)
    shapes.rows_cols(x.shape)  # raises for a scalar
    given = {"amax": amax, "columnwise_amax": columnwise_amax}
    if amax_group is not None:
        if amax is not None or columnwise_amax is not None or scale is not None:
            raise ValueError("quantize: amax_group reduces x's own amax, and an amax or a scale was given too")
        given |= group_amaxes(x, quantizer, amax_group)
    given |= {"scale": scale, "rng": rng}
    operands: Any = {name: small_operand("quantize", name, value) for name, value in given.items()}
    buffers = primitives.quantize(x, quantizer, **operands, as_bytes=bool(as_bytes))
    return from_buffers(buffers, quantizer, x.shape, x.dtype)


def _words(value: int) -> np.ndarray[Any, Any]:
    """Low and high word."""
    return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)


def rng_state(seed: Any, offset: Any = 0) -> Array:
    """What stochastic rounding draws from: a seed and a position behind it.

    **Arguments:** `seed`: a Python integer in 0..2^64-1, or a JAX PRNG key, of which 64 bits are drawn (split it before
    if it serves elsewhere). `offset`: a Python integer in 0..2^64-1, or an integer scalar array such as a step counter
    (the bits of a 32-bit one are the low word). A call of `quantize` uses two offsets.

    **Returns:** int32 [4]: low and high words of seed and offset. With other ones for each tensor, layer, step and
    device, their errors are independent.

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


def scale_update(
    history: Array,
    scale: Array,
    *,
    reduced: Array | None = None,
    amax: Array | None = None,
    fp8_max: float = 448.0,
    margin: int = 0,
    most_recent: bool = False,
) -> tuple[Array, Array]:
    """Delayed scaling's update (NUMERICS 2) of n tensors that share an element.

    **Arguments:** `history`: float32 [n, L], or [L] where n is 1; L >= 1. Entry 0 holds the amax since the last update.
    `scale`: float32 [n]. `reduced`: [n] amaxes after a reduction over a group, used instead of entry 0 where not 0.
    `amax`: [n] chosen by an algorithm of the caller's own, used where there was an amax at all. `fp8_max`: the
    element's largest value. `margin`: the scale is divided by 2^margin. `most_recent`: take the latest amax, not the
    largest of the history.

    **Returns:** (history, scale), new arrays, in the memory of the old ones where they are donated. A history of one
    entry holds 0 after each update.

    **Raises:** TypeError for other dtypes, ValueError for other shapes, an `fp8_max` or `margin` out of range, or
    `most_recent` with `amax`.
    """
    arrays = {"history": history, "scale": scale, "reduced": reduced, "amax": amax}
    for name, x in arrays.items():
        optional = name in ("reduced", "amax")
        if not isinstance(x, (jax.Array, np.ndarray)) and not (optional and x is None):
            raise ArgumentError(f"scale_update: {name} must be a JAX or NumPy array, got {type(x).__name__}")
        check_native("scale_update", name, x)
        if x is not None and x.dtype != np.float32:  # before JAX would round float64
            raise DTypeError(f"scale_update: {name} must be float32, got {x.dtype}{list(x.shape)}")
    if isinstance(margin, bool) or not isinstance(margin, (int, np.integer)):
        raise ArgumentError(f"scale_update: margin must be a Python integer, got {type(margin).__name__}")
    if not -126 <= margin <= 126:  # 2^-margin is a normal float32
        raise ValueError(f"scale_update: margin must lie in -126..126, got {margin}")
    fp8_max = factor("scale_update", "fp8_max", fp8_max)
    if fp8_max <= 0:
        raise ValueError(f"scale_update: fp8_max must be > 0, got {fp8_max}")
    operands: Any = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
    return primitives.scale_update(**operands, fp8_max=fp8_max, margin=int(margin), most_recent=bool(most_recent))


def dequantize(q: QuantizedArray, dtype: Any = None) -> Array:
    """The values of `q`, from its rowwise copy if it has one, else from its columnwise copy.

    A columnwise copy after a Hadamard transform gives the rotated tensor.

    **Arguments:** `dtype`: float32, bfloat16 or float16; by default that of the tensor that was quantized.

    **Returns:** [..., K] of `dtype`.
    """
    return _quantized("dequantize", "q", q).dequantize(dtype)


def _gemm(
    op: str,
    acc: Array | None,
    a: QuantizedArray,
    b: QuantizedArray,
    trans_a: bool,
    trans_b: bool,
    bias: Array | None,
    alpha: Any,
    beta: Any,
    out_dtype: str | None,
    fast_accum: bool,
) -> Array:
    a, b = _quantized(op, "a", a), _quantized(op, "b", b)
    a_side, b_side = shapes.gemm_copies(bool(trans_a), bool(trans_b))
    a_copy, b_copy = a.copy_of(a_side, f"{op}: a"), b.copy_of(b_side, f"{op}: b")
    size = shapes.gemm_shape(a.format, a_side, a_copy.data.shape, b.format, b_side, b_copy.data.shape)
    enforce(size.constraints)
    shape = shapes.gemm_out_shape(a.shape, size.m, size.n, bool(trans_a))
    if acc is not None and acc.shape != shape:
        raise ShapeError(f"{op}: acc must have shape {list(shape)}, got {list(acc.shape)}")
    return primitives.gemm(
        a_copy,
        b_copy,
        None if bias is None else to_array(op, "bias", bias),
        None if acc is None else acc.reshape(size.m, size.n),
        alpha=factor(op, "alpha", alpha),
        beta=factor(op, "beta", beta),
        out_dtype=a.dtype if out_dtype is None else out_dtype,
        fast_accum=bool(fast_accum),
    ).reshape(shape)


def gemm(
    a: QuantizedArray,
    b: QuantizedArray,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Array | None = None,
    alpha: float = 1.0,
    out_dtype: Any = None,
    fast_accum: bool = False,
) -> Array:
    """alpha * op(a) @ op(b) + bias with float32 accumulation (NUMERICS 7).

    **Arguments:** `a`, `b`: quantized tensors; op transposes their [rows, columns] form. An operand whose rows are
    reduced is read from its columnwise copy: fprop `gemm(x, w)`, dgrad `gemm(dy, w, trans_b=False)`, wgrad `gemm(dy, x,
    trans_a=True, trans_b=False)`. `bias`: [N]. `alpha`: a Python number. `out_dtype`: float32, bfloat16 or float16; by
    default the dtype that `a` was quantized from. `fast_accum`: Hopper's reduced accumulation (per-tensor formats).

    **Returns:** [..., N] with a's leading dimensions, or [M, N] with `trans_a`.

    **Raises:** ValueError for missing copies or unequal reduced lengths, TypeError for other dtypes,
    NotImplementedError for a pair of formats without a kernel.
    """
    name = dtype_name("gemm", out_dtype, getattr(a, "dtype", "float32"))
    return _gemm("gemm", None, a, b, trans_a, trans_b, bias, alpha, 0.0, name, fast_accum)


def gemm_into(
    acc: Array,
    a: QuantizedArray,
    b: QuantizedArray,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Array | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    fast_accum: bool = False,
) -> Array:
    """alpha * op(a) @ op(b) + bias + beta * acc, in the memory of `acc` where XLA may reuse it (a donated argument).

    **Arguments:** as `gemm`; `acc`: [..., N], its dtype is the result's. JAX arrays do not change: use the result.

    **Returns:** the new `acc`.
    """
    acc = to_array("gemm_into", "acc", acc)
    return _gemm("gemm_into", acc, a, b, trans_a, trans_b, bias, alpha, beta, acc.dtype.name, fast_accum)


def bias_grad(dy: Array, dtype: Any = None) -> Array:
    """Sum of `dy` over its leading dimensions, accumulated in float32 in an order that the shape fixes.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `dtype`: of the result, by default dy's.

    **Returns:** [N].
    """
    dy = to_array("bias_grad", "dy", dy)
    shapes.rows_cols(dy.shape)  # raises for a scalar
    return primitives.bias_grad(dy, dtype_name("bias_grad", dtype, dy.dtype.name))
