"""`activate`: the core's activations in high precision, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.ops.activation import ActivationOptions
from diptych.torch.primitives.activation import activation, activation_grad
from diptych.torch.primitives.checks import (
    refuse_second_derivative,
    require_no_tangent,
)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, options: ActivationOptions) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = options
        return activation(x, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative("diptych.torch's activation")
        return activation_grad(dy, ctx.saved_tensors[0], ctx.options), None


def activate(x: Tensor, options: ActivationOptions) -> Tensor:
    """An activation in x's dtype; its gradient is that of `activation_grad`."""
    require_no_tangent("diptych.torch's activation", x)
    return _Activate.apply(x, options)
