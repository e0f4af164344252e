"""`activate`: the core's activations in high precision, differentiable."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from diptych.common.ops.activation import ActivationOptions
from diptych.torch.graph import functorch
from diptych.torch.primitives.activation import activation, activation_grad
from diptych.torch.primitives.checks import refuse_second_derivative, require_no_tangent
from diptych.torch.private.functorch import transforms_active

_NAME = "diptych.torch's activation"


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, options: ActivationOptions) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = options
        return activation(x, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative(_NAME)
        (x,) = ctx.saved_tensors
        if functorch.mapped(dy):
            return functorch.below(_NAME, lambda dy, x: [activation_grad(dy, x, ctx.options)], dy, x)[0], None
        return activation_grad(dy, x, ctx.options), None


@dataclasses.dataclass
class _Arguments:
    x: Tensor
    options: ActivationOptions


_below = functorch.Verb(
    _NAME, _Arguments, ("x",),
    lambda a, needs: ((activation(a.x, a.options),), []),
    lambda a, needs, saved, grads: [activation_grad(grads[0], a.x, a.options)],
)  # fmt: skip


def activate(x: Tensor, options: ActivationOptions) -> Tensor:
    """An activation in x's dtype; its gradient is that of `activation_grad`."""
    require_no_tangent(_NAME, x)
    if transforms_active():
        return functorch.call(_below, _Arguments(x, options))[0]
    return _Activate.apply(x, options)
