"""`layernorm`: the core's norms in high precision, differentiable."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from diptych.common.ops.norm import NormOptions
from diptych.torch.graph import functorch
from diptych.torch.primitives.checks import refuse_second_derivative, require_no_tangent
from diptych.torch.primitives.norm import norm, norm_grad
from diptych.torch.private.functorch import transforms_active

_NAME = "diptych.torch's norm"


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
        refuse_second_derivative(_NAME)
        options, has_beta = ctx.call
        x, gamma, mu, rsigma = ctx.saved_tensors
        if functorch.mapped(dy):
            a = _Arguments(x, gamma, gamma if has_beta else None, options)
            made = functorch.below(_NAME, lambda dy, *t: _backward(a, _TENSORS, list(t), [dy]), dy, *_stats(mu, rsigma))
            return *made, *[None] * (4 - len(made))
        return *norm_grad(dy, x, gamma, mu, rsigma, options, has_beta), None


_TENSORS = ("x", "gamma", "beta")


@dataclasses.dataclass
class _Arguments:
    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    options: NormOptions


def _stats(mu: Tensor | None, rsigma: Tensor) -> list[Tensor]:
    return [rsigma] if mu is None else [mu, rsigma]


def _forward(a: _Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    mu, rsigma, y = norm(a.x, a.gamma, a.beta, a.options)
    assert y is not None
    return (y,), _stats(mu, rsigma)


def _backward(a: _Arguments, needs: tuple[str, ...], saved: list[Tensor], grads: list[Any]) -> list[Tensor]:
    mu, rsigma = saved if len(saved) == 2 else (None, saved[0])
    made = norm_grad(grads[0], a.x, a.gamma, mu, rsigma, a.options, a.beta is not None)
    by_name: dict[str, Tensor | None] = dict(zip(_TENSORS, made, strict=True))
    return [t for name in needs if (t := by_name[name]) is not None]


_below = functorch.Verb(_NAME, _Arguments, _TENSORS, _forward, _backward)


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor | None, options: NormOptions) -> Tensor:
    """The norm of x [..., K] in x's dtype; its gradients are those of `norm_grad`."""
    require_no_tangent(_NAME, x, gamma, beta)
    if transforms_active():
        return functorch.call(_below, _Arguments(x, gamma, beta, options))[0]
    return _LayerNorm.apply(x, gamma, beta, options)
