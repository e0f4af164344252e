"""The verbs on stacks and on groups of rows: `quantize_stack`, `grouped_gemm`, `grouped_bias_grad`.

These verbs have no derivative; `diptych.jax.grouped_dense` is differentiable. None of them waits for the device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.errors import ArgumentError, ShapeError, UnsupportedError
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops import grouped, shapes
from diptych.common.quantizers import Quantizer
from diptych.jax.functional.amax_group import group_amaxes
from diptych.jax.primitives import grouped as grouped_ops
from diptych.jax.primitives.checks import dtype_name, factor, small_operand, to_array
from diptych.jax.tensors.quantized import QuantizedArray, QuantizedStack

Array = jax.Array


def quantize_stack(
    x: Array,
    quantizer: Quantizer,
    *,
    amax: Array | None = None,
    columnwise_amax: Array | None = None,
    scale: Array | None = None,
    rng: Array | None = None,
    as_bytes: bool = False,
) -> QuantizedStack:
    """Quantizes each tensor of `x` [G, ..., K] in one call, with the bits of `quantize` on that tensor alone.

    **Arguments:** as `quantize`, but with a leading G: `amax`, `columnwise_amax`, `scale` [G], `rng` [G, 4] or
    [G, 8]. They may not be numbers, and there is no `amax_group`.

    **Returns:** a `QuantizedStack`.

    **Raises:** as `quantize`; TypeError also for a quantizer with a `quantize_impl` of its own.
    """
    op = "quantize_stack"
    grouped.require_stackable(op, quantizer)
    x = to_array(op, "x", x)
    leading = grouped.stack_shape(x.shape)[:-1]
    given = {"amax": amax, "columnwise_amax": columnwise_amax, "scale": scale, "rng": rng}
    operands: Any = {name: _operand(op, name, value) for name, value in given.items()}
    buffers = grouped_ops.quantize_stack(x, quantizer, **operands, as_bytes=bool(as_bytes))
    return QuantizedStack(quantizer, leading, x.dtype.name, **buffers)


def quantize_each(
    x: Array,
    quantizer: Quantizer,
    *,
    as_bytes: bool,
    scale: Array | None = None,
    rng: Array | None = None,
    amax_group: Any = None,
) -> QuantizedStack:
    """Quantizes a grouped layer's kernels as a stack. `scale`: [1], for all kernels. `amax_group`: mesh axes over which
    each kernel's amax is reduced. **Raises** NotImplementedError for an `rng`."""
    if rng is not None:
        raise UnsupportedError(f"quantize_stack: kernels rounded stochastically, by {quantizer}")
    each = None if scale is None else jnp.broadcast_to(scale, x.shape[:1])
    amaxes: dict[str, Array] = {}
    if amax_group is not None:
        amaxes = jax.vmap(lambda t: group_amaxes(t, quantizer, amax_group))(x)
        amaxes = {name: a[:, 0] if a.shape[1] == 1 else a for name, a in amaxes.items()}
    return quantize_stack(x, quantizer, scale=each, as_bytes=as_bytes, **amaxes)


def largest(amaxes: Array) -> Array:
    """Returns the largest of several amaxes, [1]; like `scales.larger`, it does not flush subnormals."""
    bits = jax.lax.bitcast_convert_type(amaxes, jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, keepdims=True, initial=0), jnp.float32)


def _operand(op: str, arg: str, value: Any) -> Array | None:
    """Returns an array of one entry for each tensor or group as a JAX array; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise ArgumentError(f"{op}: {arg} must be a JAX or NumPy array, got {type(value).__name__}")
    if value.ndim == 0:
        raise ShapeError(f"{op}: {arg} must have one entry for each tensor or group, got a scalar")
    return small_operand(op, arg, value)


def _offsets(op: str, offsets: Any) -> Array:
    out = _operand(op, "offsets", offsets)
    if out is None:
        raise ArgumentError(f"{op}: offsets must be a JAX or NumPy array, got None")
    return out


def grouped_gemm(
    a: QuantizedArray,
    b: QuantizedStack | QuantizedArray,
    offsets: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Array | None = None,
    alpha: float = 1.0,
    out_dtype: Any = None,
    align: int = 1,
    fast_accum: bool = False,
) -> Array:
    """A product for each group of consecutive rows; group g is rows offsets[g] <= r < offsets[g + 1] of R.

        fprop   grouped_gemm(x, w, offsets)                                 x [R, K], w [G, N, K] -> [R, N]
        dgrad   grouped_gemm(dy, w, offsets, trans_b=False)                 dy [R, N] -> [R, K]
        wgrad   grouped_gemm(dy, x, offsets, trans_a=True, trans_b=False)   over the rows of a group -> [G, N, K]

    Rows in no group, and products over groups without rows, are +0. On the CPU each group has the bits that `gemm`
    gives for its rows alone, with the blocks of scales of the whole tensor.

    **Arguments:** `a`: [..., K] with R rows. `b`: a stack of G tensors; for wgrad a tensor with as many rows as `a`.
    `offsets`: int32 [G + 1], ascending, within 0..R: the CPU refuses others when it runs, CUDA clamps each to between
    the one before it and R. `bias`: [G, N], not for wgrad. `out_dtype`: by default the dtype that `a` was
    quantized from. `align`: a promise that every offset is a multiple of it, which tensor cores need in wgrad: at least
    32, and 128 where scales stand for 128 rows. Hadamard-rotated copies need a multiple of 16. `alpha`, `fast_accum`:
    as `gemm`.

    **Returns:** the result in `out_dtype`; fprop and dgrad keep a's leading dimensions.

    **Raises:** TypeError for dtypes; ValueError for missing copies, shapes, only one Hadamard-rotated operand, or
    arguments that do not apply; NotImplementedError if a derivative is requested.
    """
    op = "grouped_gemm"
    trans_a = bool(trans_a)
    side_a, side_b = shapes.gemm_copies(trans_a, bool(trans_b))
    if not isinstance(a, QuantizedArray):
        raise ArgumentError(f"{op}: a must be a QuantizedArray, got {type(a).__name__}; quantize() makes one")
    if not isinstance(b, QuantizedArray if trans_a else QuantizedStack):
        wanted = "QuantizedArray" if trans_a else "QuantizedStack, which quantize_stack() makes"
        raise ArgumentError(f"{op}: b must be a {wanted}, got {type(b).__name__}")
    rotated = grouped.rotated_alike(op, a.quantizer, b.quantizer, trans_a)
    d = grouped_ops.grouped_gemm(
        a.copy_of(side_a, f"{op}: a"),
        b.copy_of(side_b, f"{op}: b"),
        _offsets(op, offsets),
        None if bias is None else to_array(op, "bias", bias),
        align=grouped.kernel_align(align),
        rotated=rotated,
        alpha=factor(op, "alpha", alpha),
        out_dtype=dtype_name(op, out_dtype, a.dtype),
        options=GemmOptions(bool(fast_accum)),
    )
    return d if trans_a else d.reshape(shapes.gemm_out_shape(a.shape, d.shape[0], d.shape[1], False))


def grouped_bias_grad(dy: Array, offsets: Array, dtype: Any = None) -> Array:
    """Sums of consecutive rows in float32; each group's has the bits that `bias_grad` gives for its rows alone.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `offsets`: as `grouped_gemm`. `dtype`: of the result, by
    default dy's.

    **Returns:** [G, N] in `dtype`; +0 for a group without rows.

    **Raises:** TypeError for other dtypes, ValueError for shapes.
    """
    op = "grouped_bias_grad"
    dy = to_array(op, "dy", dy)
    return grouped_ops.grouped_bias_grad(dy, _offsets(op, offsets), dtype_name(op, dtype, dy.dtype.name))
