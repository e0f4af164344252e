"""The check of the input of layers that begin with a norm."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.errors import DTypeError, ShapeError
from diptych.torch.primitives.checks import describe, require_device, require_high_precision, require_tensor
from diptych.torch.tensors.quantized import high_precision


def input_for(op: str, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Returns x in high precision, and in the dtype of `torch.amp.autocast` if that is on. **Raises** ShapeError,
    DTypeError or another error of the checks if x or beta does not fit gamma."""
    require_tensor(op, "input", x)
    dtype = x.dtype
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    x = high_precision(op, x, dtype).to(dtype)
    require_high_precision(op, "input", x)
    if x.dim() == 0 or x.size(-1) != gamma.size(0):
        raise ShapeError(
            f"{op}: input must be [..., {gamma.size(0)}], with as many features as layer_norm_weight, got {describe(x)}"
        )
    require_device(op, gamma, x, "input")
    if beta is not None and beta.dtype != gamma.dtype:
        raise DTypeError(f"{op}: layer_norm_bias must have layer_norm_weight's dtype {gamma.dtype}, got {beta.dtype}")
    return x
