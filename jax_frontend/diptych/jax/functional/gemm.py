"""The verbs `gemm`, `gemm_into` and `bias_grad`."""

from __future__ import annotations

from typing import Any

import jax

from diptych.common.errors import ShapeError
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops import shapes
from diptych.jax.primitives import gemm as gemm_ops
from diptych.jax.primitives.checks import dtype_name, enforce, factor, to_array
from diptych.jax.tensors.quantized import QuantizedArray, require_quantized

Array = jax.Array


def _gemm(
    op: str,
    acc: Array | None,
    a: QuantizedArray,
    b: QuantizedArray,
    transposed: tuple[bool, bool],
    bias: Array | None,
    factors: tuple[Any, Any],
    out_dtype: str | None,
    options: GemmOptions,
) -> Array:
    """alpha * op(a) @ op(b) + bias + beta * acc. `factors`: alpha and beta."""
    trans_a, trans_b = transposed
    a, b = require_quantized(op, "a", a), require_quantized(op, "b", b)
    a_side, b_side = shapes.gemm_copies(bool(trans_a), bool(trans_b))
    a_copy, b_copy = a.copy_of(a_side, f"{op}: a"), b.copy_of(b_side, f"{op}: b")
    formats = a.quantizer.copy_format(a_side), b.quantizer.copy_format(b_side)
    size = shapes.gemm_shape(formats[0], a_side, a_copy.data.shape, formats[1], b_side, b_copy.data.shape)
    enforce(size.constraints)
    shape = shapes.gemm_out_shape(a.shape, size.m, size.n, bool(trans_a))
    if acc is not None and acc.shape != shape:
        raise ShapeError(f"{op}: acc must have shape {list(shape)}, got {list(acc.shape)}")
    return gemm_ops.gemm(
        a_copy,
        b_copy,
        None if bias is None else to_array(op, "bias", bias),
        None if acc is None else acc.reshape(size.m, size.n),
        alpha=factor(op, "alpha", factors[0]),
        beta=factor(op, "beta", factors[1]),
        out_dtype=a.dtype if out_dtype is None else out_dtype,
        options=options,
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
    options = GemmOptions(bool(fast_accum))
    return _gemm("gemm", None, a, b, (trans_a, trans_b), bias, (alpha, 0.0), name, options)


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

    **Arguments:** as `gemm`; `acc`: [..., N] in the result's dtype. It does not change unless donated: use the result.

    **Returns:** the new `acc`.
    """
    acc = to_array("gemm_into", "acc", acc)
    options = GemmOptions(bool(fast_accum))
    return _gemm("gemm_into", acc, a, b, (trans_a, trans_b), bias, (alpha, beta), acc.dtype.name, options)


def bias_grad(dy: Array, dtype: Any = None) -> Array:
    """Sum of `dy` over its leading dimensions, accumulated in float32 in an order that the shape fixes.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `dtype`: of the result, by default dy's.

    **Returns:** [N].
    """
    dy = to_array("bias_grad", "dy", dy)
    shapes.rows_cols(dy.shape)  # raises for a scalar
    return gemm_ops.bias_grad(dy, dtype_name("bias_grad", dtype, dy.dtype.name))
