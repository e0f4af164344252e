"""The verbs `gemm`, `gemm_into` and `bias_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import UnsupportedError
from diptych.common.gemm_options import DEFAULTS, GemmOptions
from diptych.common.ops import shapes
from diptych.torch.graph import functorch
from diptych.torch.graph.custom_op import IN_HIGH_PRECISION
from diptych.torch.graph.engine import asked
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives.checks import (
    Copy,
    refuse_second_derivative,
    require_no_grad,
    require_no_tangent,
    require_tensor,
)
from diptych.torch.private.functorch import transforms_active
from diptych.torch.tensors.copies import pack, unpack, values
from diptych.torch.tensors.quantized import QuantizedTensor, require_quantized, rotated


def gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """alpha * op(a) @ op(b) + bias, accumulated in float32 (NUMERICS 7).

    **Arguments:** `a`, `b`: quantized tensors; op transposes their [rows, cols] form. An operand whose rows are reduced
    is read from its columnwise copy: fprop `gemm(x, w)`, dgrad `gemm(dy, w, trans_b=False)`, wgrad
    `gemm(dy, x, trans_a=True, trans_b=False)`. `bias`: [N] float32, bfloat16 or float16. `out_dtype`: None is a's
    logical dtype. `fast_accum`: Hopper's reduced accumulation, per-tensor formats only.

    **Returns:** [M, N] in `out_dtype`; a's leading dimensions unfold unless `trans_a`. Differentiable once: the
    gradients of a and b are products in `out_dtype` of dy and the values of the copy that was multiplied (of the
    rowwise one where that is Hadamard-rotated), plain tensors in their logical dtypes; the bias gets `bias_grad`.

    **Raises:** ValueError for unequal reduced lengths, a copy that was not made, mixed devices or an option that the
    formats do not take, TypeError for dtypes, NotImplementedError where no kernel fits, for a second derivative, or one
    that needs a rowwise copy that was not made.
    """
    require_quantized("gemm", "a", a)
    require_quantized("gemm", "b", b)
    require_no_tangent("gemm", a, b, bias)
    if transforms_active():
        return functorch.outside(
            "gemm", gemm, a, b, trans_a=trans_a, trans_b=trans_b, bias=bias, alpha=alpha, out_dtype=out_dtype,
            fast_accum=fast_accum,
        )  # fmt: skip
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    dtype, options = a.dtype if out_dtype is None else out_dtype, GemmOptions(fast_accum) if fast_accum else DEFAULTS
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        return _Gemm.apply(a, b, bias, trans_a, trans_b, alpha, dtype, options)
    d = gemm_ops.gemm(a.copy_of(side_a), b.copy_of(side_b), bias, alpha, dtype, options)
    return d.view(shapes.gemm_out_shape(a.shape, d.shape[0], d.shape[1], trans_a))


def _copy_for_gradient(arg: str, q: QuantizedTensor, columnwise: bool) -> Copy:
    """Returns the copy of one operand that the other's gradient multiplies: the one that the product read, or the
    rowwise copy where that is Hadamard-rotated."""
    if columnwise and rotated(q.quantizer):
        if q.rowwise_data is None:
            raise UnsupportedError(f"gemm: the derivative needs the rowwise copy of {arg}, whose columns are rotated")
        columnwise = False
    return q.copy_of(columnwise)


class _Gemm(torch.autograd.Function):
    """The differentiable product. It saves the buffers of the copies that backward reads."""

    @staticmethod
    def forward(
        ctx: Any,
        a: QuantizedTensor,
        b: QuantizedTensor,
        bias: Tensor | None,
        trans_a: bool,
        trans_b: bool,
        alpha: float,
        dtype: torch.dtype,
        options: GemmOptions,
    ) -> Tensor:
        side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
        operands = (("a", a), ("b", b), ("bias", bias))
        saved: list[Tensor] = []
        specs = []
        for arg, q, side, wanted in (("a", a, side_a, b.requires_grad), ("b", b, side_b, a.requires_grad)):
            if wanted:
                specs.append(pack(_copy_for_gradient(arg, q, side), saved))
            else:
                specs.append(None)
        ctx.save_for_backward(*saved)
        ctx.specs, ctx.options = specs, (trans_a, trans_b, alpha)
        ctx.edges = tuple([(n, i) for i, (n, t) in enumerate(operands) if t is not None and t.requires_grad])
        ctx.forms = ((a.shape, a.dtype), (b.shape, b.dtype), None if bias is None else bias.dtype)
        d = gemm_ops.gemm(a.copy_of(side_a), b.copy_of(side_b), bias, alpha, dtype, options)
        return d.view(shapes.gemm_out_shape(a.shape, d.shape[0], d.shape[1], trans_a))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        now = ("a", "b", "bias")
        if not torch.compiler.is_compiling():
            refuse_second_derivative("gemm", IN_HIGH_PRECISION)
            part = asked(ctx, ctx.edges)  # a compiled graph's backward is one node
            now = now if part is None else part
        saved = list(ctx.saved_tensors)
        trans_a, trans_b, alpha = ctx.options
        (a_shape, a_dtype), (b_shape, b_dtype), bias_dtype = ctx.forms
        a, b = [None if spec is None else unpack(spec, saved) for spec in ctx.specs]
        da = db = dbias = None
        if bias_dtype is not None and ctx.needs_input_grad[2] and "bias" in now:
            if functorch.mapped(dy):
                (dbias,) = functorch.below("gemm", lambda dy: [gemm_ops.bias_grad(dy, bias_dtype)], dy)
            else:
                dbias = gemm_ops.bias_grad(dy, bias_dtype)
        dy = dy.reshape(shapes.rows_cols(dy.shape))
        with torch.amp.autocast(dy.device.type, enabled=False):
            if b is not None and "a" in now:
                b = values(b, dy.dtype)
                op_b = b if trans_b else b.t()  # transposed: [N, K]
                da = _scaled(op_b.t() @ dy.t() if trans_a else dy @ op_b, alpha).to(a_dtype).view(a_shape)
            if a is not None and "b" in now:
                a = values(a, dy.dtype)
                op_a = a.t() if trans_a else a  # [M, K]
                db = _scaled(dy.t() @ op_a if trans_b else op_a.t() @ dy, alpha).to(b_dtype).view(b_shape)
        return da, db, dbias, None, None, None, None, None


def _scaled(t: Tensor, alpha: float) -> Tensor:
    return t if alpha == 1.0 else t * alpha


def gemm_into(
    acc: Tensor,
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    fast_accum: bool = False,
) -> Tensor:
    """alpha * op(a) @ op(b) + bias + beta * acc, written into `acc`.

    **Arguments:** as `gemm`. `acc`: contiguous [M, N] (or a's leading dimensions and N), float32, bfloat16 or float16.
    With `beta=0` its old content is not read.

    **Returns:** `acc`.

    **Raises:** as `gemm`, before `acc` is touched; ValueError also where `acc` is not contiguous or of another shape,
    NotImplementedError where anything requires grad.
    """
    require_tensor("gemm_into", "acc", acc)
    require_quantized("gemm_into", "a", a)
    require_quantized("gemm_into", "b", b)
    require_no_grad("gemm_into", acc, a, b, bias)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    options = GemmOptions(fast_accum) if fast_accum else DEFAULTS
    gemm_ops.gemm_into(acc, a.copy_of(side_a), b.copy_of(side_b), bias, alpha, beta, options)
    return acc


def bias_grad(dy: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over all leading dimensions, in float32 and in an order that the shape alone fixes.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `dtype`: of the result; None is dy's.

    **Returns:** [N] in `dtype`. **Raises:** TypeError for other dtypes, ValueError for a scalar.
    """
    require_tensor("bias_grad", "dy", dy)
    return gemm_ops.bias_grad(dy, dy.dtype if dtype is None else dtype)
