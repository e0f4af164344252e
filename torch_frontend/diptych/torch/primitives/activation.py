"""The activations on raw buffers, forward and backward: kernel call and fake implementation of each."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.ops.activation import ActivationOptions
from diptych.core import _core
from diptych.torch.primitives.checks import (
    ACTIVATION_IDS,
    check_dy,
    halved,
    require_out_dtype,
)
from diptych.torch.primitives.register import define, empty_beside, run


def _activation(x: Tensor, which: int, gated: bool) -> Tensor:
    y = empty_beside(x, halved("activation", x, gated), x.dtype)
    _core.activation(x.contiguous(), y, which, gated)
    return y


def _activation_fake(x: Tensor, which: int, gated: bool) -> Tensor:
    return x.new_empty(halved("activation", x, gated))


def _activation_grad(dy: Tensor, x: Tensor, which: int, gated: bool, dtype: torch.dtype) -> Tensor:
    require_out_dtype("activation_grad", dtype)
    dx = empty_beside(x, x.shape, dtype)
    _core.activation_grad(dy.contiguous(), x.contiguous(), dx, which, gated)
    return dx


def _activation_grad_fake(dy: Tensor, x: Tensor, which: int, gated: bool, dtype: torch.dtype) -> Tensor:
    require_out_dtype("activation_grad", dtype)
    check_dy("activation_grad", dy, x, halved("activation_grad", x, gated))
    return x.new_empty(x.shape, dtype=dtype)


_activation_op = define("activation", "(Tensor x, int which, bool gated) -> Tensor", _activation, _activation_fake)


_activation_grad_op = define(
    "activation_grad", "(Tensor dy, Tensor x, int which, bool gated, ScalarType dtype) -> Tensor",
    _activation_grad, _activation_grad_fake,
)  # fmt: skip


def activation(x: Tensor, options: ActivationOptions) -> Tensor:
    """act(x), or act(a) * b, in x's dtype: [..., F] for x [..., F] or, gated, [..., 2F]."""
    return run("activation", _activation, _activation_op, x, ACTIVATION_IDS[options.which], options.gated)


def activation_grad(dy: Tensor, x: Tensor, options: ActivationOptions, dtype: torch.dtype | None = None) -> Tensor:
    """dy * act'(x), or (dy * b * act'(a) | dy * act(a)), of x's shape; `dtype`: None is x's."""
    args = (dy, x, ACTIVATION_IDS[options.which], options.gated, x.dtype if dtype is None else dtype)
    return run("activation_grad", _activation_grad, _activation_grad_op, *args)
