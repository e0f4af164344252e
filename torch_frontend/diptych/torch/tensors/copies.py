"""Operands of products: taken apart into the tensors that autograd saves, and rebuilt from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.ops import shapes
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import Copy
from diptych.torch.tensors.quantized import QuantizedTensorBase

Operand = Any  # Copy or Tensor: isinstance(Tensor) tells them apart
Copies = tuple[Copy | None, Copy | None]
Spec = tuple[int, bool, bool] | None


def pick(kept: str, copies: Copies, original: Tensor) -> Operand:
    if kept == "original":
        quantized = isinstance(original, QuantizedTensorBase)
        return original.copy_of(original.rowwise_data is None) if quantized else original
    return copies[1 if kept == "columnwise" else 0]  # torch 2.11 indexes by no bool


def pack(operand: Operand, tensors: list[Tensor]) -> Spec:
    """Appends an operand's tensors to a list, for `save_for_backward`. Returns the spec by which `unpack` rebuilds
    it."""
    if isinstance(operand, Tensor):
        tensors.append(operand)
        return None
    data, scale_inv, amax = operand[:3]
    tensors += (data, scale_inv) if amax is None else (data, scale_inv, amax)
    return spec_of(operand)


def spec_of(copy: Copy) -> Spec:
    """Returns the spec that `pack` returns."""
    return copy[3], copy[4], copy[2] is not None


def unpack(spec: Spec, tensors: list[Tensor]) -> Operand:
    """Rebuilds an operand from the front of a list, whose tensors it removes."""
    if spec is None:
        return tensors.pop(0)
    format_id, columnwise, has_amax = spec
    data, scale_inv = tensors.pop(0), tensors.pop(0)
    return with_scales((data, scale_inv, tensors.pop(0) if has_amax else None, format_id, columnwise))


def with_scales(copy: Copy) -> Copy:
    """Returns a copy with E8M0 scales that may be stored as bytes viewed as E8M0."""
    scale_inv = copy[1].view(torch.float8_e8m0fnu) if copy[1].dtype == torch.uint8 else copy[1]
    return copy[0], scale_inv, *copy[2:]


def values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Returns an operand in high precision, as a matrix."""
    t = operand.to(dtype) if isinstance(operand, Tensor) else quantize_ops.dequantize(operand, dtype)
    return t.reshape(shapes.rows_cols(t.shape))
