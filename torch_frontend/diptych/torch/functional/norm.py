"""`layernorm`: the core's norms in high precision, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.ops.norm import NormOptions
from diptych.torch.primitives.checks import (
    refuse_second_derivative,
    require_no_tangent,
)
from diptych.torch.primitives.norm import norm, norm_grad


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, options: NormOptions) -> Tensor:
        mu, rsigma, y = norm(x, gamma, beta, options)
        assert y is not None
        ctx.save_for_backward(x, gamma, mu, rsigma)
        ctx.call = (options, beta is not None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative("diptych.torch's norm")
        options, has_beta = ctx.call
        x, gamma, mu, rsigma = ctx.saved_tensors
        return *norm_grad(dy, x, gamma, mu, rsigma, options, has_beta), None


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor | None, options: NormOptions) -> Tensor:
    """The norm of x [..., K] in x's dtype; its gradients are those of `norm_grad`."""
    require_no_tangent("diptych.torch's norm", x, gamma, beta)
    return _LayerNorm.apply(x, gamma, beta, options)
