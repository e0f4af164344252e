"""Arrays and numbers as the primitives take them, and what is refused beforehand."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common import shapes
from diptych.common.errors import ArgumentError, DTypeError
from diptych.jax.primitives.checks import check_high_precision, check_native

Array = jax.Array


def to_array(op: str, arg: str, x: Any) -> Array:
    """A JAX array of a high-precision dtype. NumPy's float64 is refused before JAX would round it to float32."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentError(f"{op}: {arg} must be a JAX or NumPy array, got {type(x).__name__}")
    check_high_precision(op, arg, x.dtype, x.shape)
    check_native(op, arg, x)
    return jnp.asarray(x)


def dtype_name(op: str, dtype: Any, default: str) -> str:
    """Name of a result's dtype. **Raises** DTypeError for one that is not of high precision."""
    if dtype is None:
        return default
    try:
        name = np.dtype(jnp.dtype(dtype)).name
    except TypeError:
        raise DTypeError(f"{op}: {dtype!r} is no dtype; choose float32, bfloat16 or float16") from None
    if name not in shapes.HIGH_PRECISION:
        raise DTypeError(f"{op}: the result can be float32, bfloat16 or float16, not {name}")
    return name


def factor(op: str, arg: str, value: Any) -> float:
    """A Python number rounded to float32. Arrays are refused: factors are attributes of the compiled call."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentError(
            f"{op}: {arg} must be a Python number, got {type(value).__name__}; scale the result instead"
        )
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if not math.isfinite(value):
        raise ValueError(f"{op}: {arg} must be finite in float32, got {value}")
    return value


def small_operand(op: str, arg: str, value: Any) -> Array | None:
    """A small operand: numbers become float32 [1], arrays stay what they are and are checked while tracing."""
    if value is None or isinstance(value, jax.Array):
        out = value
    elif isinstance(value, (int, float)):
        out = jnp.full(1, value, jnp.float32)
    elif isinstance(value, (np.ndarray, np.generic)):
        check_native(op, arg, value)
        out = jnp.asarray(value)
        if out.dtype != value.dtype:
            raise DTypeError(f"{op}: {arg} is {value.dtype}, which JAX would turn into {out.dtype}; cast it first")
    else:
        raise ArgumentError(f"{op}: {arg} must be a JAX or NumPy array or a number, got {type(value).__name__}")
    return out.reshape(1) if out is not None and out.ndim == 0 else out


def same_axes(*operands: Any) -> list[Any]:
    """Lets all operands, pytrees, vary over the same mesh axes; the transpose sums the gradient of those that did
    not."""
    arrays, tree = jax.tree.flatten(operands)
    axes = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*axes)
    missing = [tuple(sorted(union - own, key=str)) for own in axes]
    arrays = [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)]
    return list(tree.unflatten(arrays))
