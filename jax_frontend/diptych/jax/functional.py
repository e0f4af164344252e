"""The verbs on JAX arrays: `quantize`, `dequantize`, `gemm`, `gemm_into`, `amax`, `bias_grad`.

Pure functions with the names and keywords of the torch panel and its bits. Bad arguments raise ValueError or TypeError
while tracing. None of them is differentiable; `diptych.jax.dense` is.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common import shapes
from diptych.common.errors import DTypeError, ShapeError
from diptych.common.quantizers import Quantizer
from diptych.jax import primitives
from diptych.jax.quantized import QuantizedArray, from_buffers

Array = jax.Array


def _array(op: str, arg: str, x: Any) -> Array:
    """A JAX array of a high-precision dtype. NumPy's float64 is refused before JAX would round it to float32."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise DTypeError(f"{op}: {arg} must be a JAX or NumPy array, got {type(x).__name__}")
    primitives.check_high_precision(op, arg, x.dtype, x.shape)
    return jnp.asarray(x)


def _quantized(op: str, arg: str, q: Any) -> QuantizedArray:
    if not isinstance(q, QuantizedArray):
        raise DTypeError(f"{op}: {arg} must be a QuantizedArray, got {type(q).__name__}; quantize it first")
    return q


def _dtype_name(op: str, dtype: Any, default: str) -> str:
    if dtype is None:
        return default
    try:
        name = np.dtype(jnp.dtype(dtype)).name
    except TypeError:
        raise DTypeError(f"{op}: {dtype!r} is no dtype; choose float32, bfloat16 or float16") from None
    if name not in shapes.HIGH_PRECISION:
        raise DTypeError(f"{op}: the result can be float32, bfloat16 or float16, not {name}")
    return name


def _factor(op: str, arg: str, value: Any) -> float:
    """A Python number rounded to float32. Arrays are refused: factors are attributes of the compiled call."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise DTypeError(f"{op}: {arg} must be a Python number, got {type(value).__name__}; scale the result instead")
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if not math.isfinite(value):
        raise ValueError(f"{op}: {arg} must be finite in float32, got {value}")
    return value


def amax(x: Array) -> Array:
    """Largest magnitude in `x`, NaN ignored.

    **Arguments:** `x`: any shape, float32, bfloat16 or float16.

    **Returns:** float32 [1]; 0 where there is none. Inside shard_map it is this shard's: reduce it with
    `jax.lax.pmax` and pass it to `quantize(amax=...)` for one scale over the mesh axis.
    """
    return primitives.amax(_array("amax", "x", x))


def quantize(x: Array, quantizer: Quantizer, *, amax: Array | None = None, as_bytes: bool = False) -> QuantizedArray:
    """Quantizes `x` as `quantizer` says (NUMERICS 2-4).

    **Arguments:** `x`: [..., K] float32, bfloat16 or float16; leading dimensions fold into rows. `quantizer`: which
    format, with which options, and which copies. `amax`: float32 [1] or a scalar, used instead of the tensor's own
    (per-tensor formats), for instance one that is reduced over a mesh axis. `as_bytes`: payloads and E8M0 scales come
    as uint8 (JAX only). Residuals of a function of your own under `jax.checkpoint` need it: what JAX saves there and
    also uses, it rounds with `lax.reduce_precision`, which turns large E4M3 values and all E8M0 scales into NaN.

    **Returns:** a `QuantizedArray`.

    **Raises:** TypeError for other dtypes; ValueError for a scalar `x`, or an `amax` that the format does not take.
    """
    if not isinstance(quantizer, Quantizer):
        raise DTypeError(f"quantize: quantizer must be a diptych Quantizer, got {type(quantizer).__name__}")
    x = _array(f"quantize ({quantizer.format.name})", "x", x)
    shapes.rows_cols(x.shape)  # raises for a scalar
    if amax is not None:
        if not quantizer.format.per_tensor:
            raise ValueError(f"quantize: amax is for per-tensor formats; {quantizer.format.name} takes one per block")
        amax = jnp.asarray(amax, jnp.float32) if isinstance(amax, (int, float)) else jnp.asarray(amax)
        if amax.ndim == 0:
            amax = amax.reshape(1)
    return from_buffers(primitives.quantize(x, amax, quantizer, as_bytes), quantizer, x.shape, x.dtype)


def dequantize(q: QuantizedArray, dtype: Any = None) -> Array:
    """The values of `q`, from its rowwise copy if it has one, else from its columnwise copy.

    **Arguments:** `dtype`: float32, bfloat16 or float16; by default that of the tensor that was quantized.

    **Returns:** [..., K] of `dtype`.
    """
    q = _quantized("dequantize", "q", q)
    columnwise = q.rowwise_data is None
    data, scale = q.copy_of(columnwise, "dequantize")
    name = _dtype_name("dequantize", dtype, q.dtype)
    return primitives.dequantize(data, scale, q.format.name, columnwise, name).reshape(q.shape)


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
    size = shapes.gemm_shape(a.format, a_side, a_copy[0].shape, b.format, b_side, b_copy[0].shape)
    shapes.check(size.constraints)
    shape = shapes.gemm_out_shape(a.shape, size.m, size.n, bool(trans_a))
    if acc is not None and acc.shape != shape:
        raise ShapeError(f"{op}: acc must have shape {list(shape)}, got {list(acc.shape)}")
    return primitives.gemm(
        a_copy,
        b_copy,
        None if bias is None else _array(op, "bias", bias),
        None if acc is None else acc.reshape(size.m, size.n),
        a_copy=(a.format.name, a_side),
        b_copy=(b.format.name, b_side),
        alpha=_factor(op, "alpha", alpha),
        beta=_factor(op, "beta", beta),
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
    name = _dtype_name("gemm", out_dtype, getattr(a, "dtype", "float32"))
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
    acc = _array("gemm_into", "acc", acc)
    return _gemm("gemm_into", acc, a, b, trans_a, trans_b, bias, alpha, beta, acc.dtype.name, fast_accum)


def bias_grad(dy: Array, dtype: Any = None) -> Array:
    """Sum of `dy` over its leading dimensions, accumulated in float32 in an order that the shape fixes.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `dtype`: of the result, by default dy's.

    **Returns:** [N].
    """
    dy = _array("bias_grad", "dy", dy)
    shapes.rows_cols(dy.shape)  # raises for a scalar
    return primitives.bias_grad(dy, _dtype_name("bias_grad", dtype, dy.dtype.name))
