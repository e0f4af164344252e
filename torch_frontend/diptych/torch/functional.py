"""The verbs on tensors: `quantize`, `dequantize`, `gemm`, `gemm_into`, `amax`, `bias_grad`.

None has a derivative; an argument that requires grad is refused while grad mode is on. All of them trace under
`torch.compile(fullgraph=True)`, with static and dynamic shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common import shapes
from diptych.common.errors import DTypeError
from diptych.common.quantizers import Quantizer
from diptych.torch import primitives
from diptych.torch.primitives import require_quantizer, require_tensor
from diptych.torch.quantized import QuantizedTensor


def _require_quantized(op: str, arg: str, q: Any) -> None:
    if not isinstance(q, QuantizedTensor):
        raise DTypeError(f"{op}: {arg} must be a QuantizedTensor, got {type(q).__name__}; quantize() makes one")


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of a tensor, NaN ignored.

    **Arguments:** `x`: any shape, float32, bfloat16 or float16.

    **Returns:** float32 [1]; 0 for a tensor that is empty or all NaN.

    **Raises:** TypeError for other dtypes.
    """
    require_tensor("amax", "x", x)
    return primitives.amax(x)


def quantize(x: Tensor, quantizer: Quantizer, *, amax: Tensor | None = None) -> QuantizedTensor:
    """Quantizes a tensor as `quantizer` says (NUMERICS 1-4), in one kernel launch.

    **Arguments:** `x`: [..., K] float32, bfloat16 or float16. `quantizer`: from `recipe.quantizer(role)` or your own.
    `amax`: float32 [1], to take the scale from instead of x's own amax (per-tensor formats).

    **Returns:** a `QuantizedTensor` with x's shape, dtype and device, and the copies that `quantizer` wants.

    **Raises:** TypeError for other dtypes or no quantizer, ValueError for a scalar, an `amax` that the format does not
    take, or mixed devices, NotImplementedError where no kernel fits or x requires grad.
    """
    require_tensor("quantize", "x", x)
    require_quantizer("quantize", quantizer)
    buffers = primitives.quantize(x, quantizer, amax)
    named: dict[str, Tensor] = {}
    i = 0
    for side, wanted in (("rowwise", quantizer.rowwise), ("columnwise", quantizer.columnwise)):
        if wanted:
            named[f"{side}_data"], named[f"{side}_scale_inv"] = buffers[i], buffers[i + 1]
            i += 2
    if i < len(buffers):
        named["amax"] = buffers[i]
    return QuantizedTensor(quantizer, x.shape, x.dtype, **named)


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values that a quantized tensor stands for: float32(payload) * scale_inv, rounded once to `dtype`.

    **Arguments:** `dtype`: float32, bfloat16 or float16; None is q's logical dtype.

    **Returns:** a tensor of q's shape, from the rowwise copy if there is one, else from the columnwise copy.

    **Raises:** TypeError for another dtype or for a tensor that is not quantized.
    """
    _require_quantized("dequantize", "q", q)
    return q.dequantize(dtype)


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

    **Returns:** [M, N] in `out_dtype`; a's leading dimensions unfold unless `trans_a`.

    **Raises:** ValueError for unequal reduced lengths, a copy that was not made, mixed devices or an option that the
    formats do not take, TypeError for dtypes, NotImplementedError where no kernel fits or the bias requires grad.
    """
    _require_quantized("gemm", "a", a)
    _require_quantized("gemm", "b", b)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    dtype = a.dtype if out_dtype is None else out_dtype
    d = primitives.gemm(a.copy_of(side_a), b.copy_of(side_b), bias, alpha, dtype, fast_accum)
    return d.view(shapes.gemm_out_shape(a.shape, d.shape[0], d.shape[1], trans_a))


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

    **Raises:** as `gemm`, before `acc` is touched; ValueError also where `acc` is not contiguous or of another shape.
    """
    require_tensor("gemm_into", "acc", acc)
    _require_quantized("gemm_into", "a", a)
    _require_quantized("gemm_into", "b", b)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    primitives.gemm_into(acc, a.copy_of(side_a), b.copy_of(side_b), bias, alpha, beta, fast_accum)
    return acc


def bias_grad(dy: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over all leading dimensions, in float32 and in an order that the shape alone fixes.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `dtype`: of the result; None is dy's.

    **Returns:** [N] in `dtype`. **Raises:** TypeError for other dtypes, ValueError for a scalar.
    """
    require_tensor("bias_grad", "dy", dy)
    return primitives.bias_grad(dy, dy.dtype if dtype is None else dtype)
