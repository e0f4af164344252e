"""The verbs on stacks and on groups of rows: `quantize_stack`, `grouped_gemm`, `grouped_bias_grad`.

They have no derivative; `GroupedLinear` and `grouped_linear` are differentiable. All of them trace under
`torch.compile(fullgraph=True)`, and none waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.common.gemm_options import DEFAULTS, GemmOptions
from diptych.common.ops import grouped, shapes
from diptych.common.quantizers import Quantizer
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives.checks import (
    operand,
    require_local,
    require_no_grad,
    require_quantizer,
    require_tensor,
)
from diptych.torch.tensors.quantized import QUANTIZE, QuantizedTensor, require_quantized
from diptych.torch.tensors.quantized import QuantizedStack as QuantizedStack


def quantize_stack(
    x: Tensor,
    quantizer: Quantizer,
    *,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> QuantizedStack:
    """Quantizes each tensor of `x` [G, ..., K] as `quantize` would it alone, in one call.

    **Arguments:** those of `quantize`, with a leading G: `amax`, `columnwise_amax`, `scale` [G], `rng` [G, 4] or
    [G, 8].

    **Returns:** a `QuantizedStack`.

    **Raises:** as `quantize`; TypeError also for a quantizer with a `quantize_impl` of its own, NotImplementedError
    where x requires grad.
    """
    op = "quantize_stack"
    require_tensor(op, "x", x)
    require_quantizer(op, quantizer)
    require_no_grad(op, x, amax, columnwise_amax, scale)
    made = grouped_ops.quantize_stack(x, quantizer, amax, columnwise_amax, scale, rng)
    return QuantizedStack(quantizer, x.shape, x.dtype, **dict(zip(quantizer.buffer_names(), made, strict=True)))


def grouped_gemm(
    a: QuantizedTensor,
    b: QuantizedStack | QuantizedTensor,
    offsets: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    align: int = 1,
    fast_accum: bool = False,
) -> Tensor:
    """A product for each group of consecutive rows; group g is rows offsets[g] <= r < offsets[g + 1] of R.

        fprop   grouped_gemm(x, w, offsets)                                 x [R, K], w [G, N, K] -> [R, N]
        dgrad   grouped_gemm(dy, w, offsets, trans_b=False)                 dy [R, N] -> [R, K]
        wgrad   grouped_gemm(dy, x, offsets, trans_a=True, trans_b=False)   over the rows of a group -> [G, N, K]

    Rows in no group, and products over groups without rows, are +0. On the CPU each group has the bits that `gemm`
    gives for it alone, its blocks of scales lying where they do in the whole tensor.

    **Arguments:** `a`: [..., K] with R rows. `b`: a stack of G tensors; for wgrad a tensor with as many rows as `a`.
    `offsets`: int32 [G + 1], ascending, within 0..R: the CPU refuses others, CUDA, which does not wait for them, takes
    each as at least the one before it and at most R. `bias`: [G, N], not for wgrad. `out_dtype`: None is a's logical
    dtype. `align`: a promise that every offset is a multiple of it, which tensor cores need in wgrad: at least 32, and
    128 where scales stand for 128 rows. Hadamard-rotated copies need a multiple of 16. `alpha`, `fast_accum`: as
    `gemm`.

    **Returns:** the result in `out_dtype`, with a's leading dimensions unfolded where its rows survive.

    **Raises:** TypeError for dtypes; ValueError for missing copies, shapes, offsets, an operand that was rotated where
    the other was not, or arguments that do not apply; NotImplementedError where no kernel fits, or anything requires
    grad.
    """
    op = "grouped_gemm"
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    require_quantized(op, "a", a)
    require_local(op, "b", b)
    if not isinstance(b, QuantizedTensor if trans_a else QuantizedStack):
        wanted = "QuantizedTensor" if trans_a else "QuantizedStack, which quantize_stack() makes"
        raise ArgumentError(f"{op}: b must be a {wanted}, got {type(b).__name__}")
    require_tensor(op, "offsets", offsets)
    require_no_grad(op, a, b, bias)
    rotated = grouped.rotated_alike(op, a.quantizer, b.quantizer, trans_a)
    dtype, promise = a.dtype if out_dtype is None else out_dtype, grouped.kernel_align(align)
    options = GemmOptions(fast_accum) if fast_accum else DEFAULTS
    d = grouped_ops.grouped_gemm(
        a.copy_of(side_a), b.copy_of(side_b), offsets, bias, promise, rotated, alpha, dtype, options
    )
    return d if trans_a else d.view(shapes.gemm_out_shape(a.shape, d.shape[0], d.shape[1], False))


def grouped_bias_grad(dy: Tensor, offsets: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of consecutive rows in float32; each group's has the bits that `bias_grad` gives for its rows alone.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `offsets`: as `grouped_gemm`. `dtype`: of the result;
    None is dy's.

    **Returns:** [G, N] in `dtype`; +0 for a group without rows.

    **Raises:** TypeError for other dtypes, ValueError for shapes and offsets.
    """
    op = "grouped_bias_grad"
    require_tensor(op, "dy", dy)
    require_tensor(op, "offsets", offsets)
    if dy.dim() == 0:
        grouped.grouped_bias_grad(operand("dy", dy), operand("offsets", offsets))
    return grouped_ops.grouped_bias_grad(dy, offsets, dy.dtype if dtype is None else dtype)


QUANTIZE[QuantizedStack] = quantize_stack
