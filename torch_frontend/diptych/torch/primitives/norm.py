"""The norms on raw buffers, forward and backward: kernel call and fake implementation of each."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.ops import shapes
from diptych.common.ops.norm import NormOptions, refuse_dbeta
from diptych.core import _core
from diptych.torch.primitives.checks import (
    LAYERNORM,
    NORM_IDS,
    RMSNORM,
    check_dy,
    check_norm,
    require_high_precision,
)
from diptych.torch.primitives.register import contiguous_or_none, define, empty_beside, run, workspace


def _norm_results(x: Tensor, which: int, with_y: bool) -> list[Tensor]:
    """Buffers: rsigma, mu of LayerNorm, y if wanted."""
    m, _ = shapes.rows_cols(x.shape)
    out = [empty_beside(x, (m,), torch.float32) for _ in range(1 + (which == LAYERNORM))]
    return [*out, empty_beside(x, x.shape, x.dtype)] if with_y else out


def _norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, which: int, eps: float, zero_centered_gamma: bool
) -> list[Tensor]:
    require_high_precision("norm", "x", x)
    out = _norm_results(x, which, gamma is not None)
    mu, y = (out[1] if which == LAYERNORM else None), (None if gamma is None else out[-1])
    gamma, beta = contiguous_or_none(gamma), contiguous_or_none(beta)
    _core.norm(x.contiguous(), gamma, beta, mu, out[0], y, which, eps, zero_centered_gamma)
    return out


def _norm_fake(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, which: int, eps: float, zero_centered_gamma: bool
) -> list[Tensor]:
    if gamma is None:
        check_norm("norm", x, which)
    else:
        check_norm("norm", x, which, gamma=gamma, beta=beta)
    return _norm_results(x, which, gamma is not None)


def _norm_grad_results(x: Tensor, gamma: Tensor, has_beta: bool) -> list[Tensor]:
    return [
        empty_beside(x, x.shape, x.dtype),
        *[empty_beside(x, gamma.shape, gamma.dtype) for _ in range(1 + has_beta)],
    ]


def _norm_grad(
    dy: Tensor, x: Tensor, gamma: Tensor, mu: Tensor | None, rsigma: Tensor, zero_centered_gamma: bool, has_beta: bool
) -> list[Tensor]:
    require_high_precision("norm_grad", "x", x)
    out = _norm_grad_results(x, gamma, has_beta)
    nbytes = _core.norm_grad_workspace_bytes(*shapes.rows_cols(x.shape)) if x.is_cuda else 0
    which = RMSNORM if mu is None else LAYERNORM
    _core.norm_grad(
        dy.contiguous(), x.contiguous(), gamma.contiguous(), contiguous_or_none(mu), rsigma.contiguous(),
        out[0], out[1], out[2] if has_beta else None, workspace(nbytes, x.device), which, zero_centered_gamma,
    )  # fmt: skip
    return out


def _norm_grad_fake(
    dy: Tensor, x: Tensor, gamma: Tensor, mu: Tensor | None, rsigma: Tensor, zero_centered_gamma: bool, has_beta: bool
) -> list[Tensor]:
    which = RMSNORM if mu is None else LAYERNORM
    check_norm("norm_grad", x, which, gamma=gamma, mu=mu, rsigma=rsigma)
    refuse_dbeta("norm_grad", mu is None and has_beta)
    check_dy("norm_grad", dy, x, tuple(x.shape))
    return _norm_grad_results(x, gamma, has_beta)


_norm_op = define(
    "norm",
    "(Tensor x, Tensor? gamma, Tensor? beta, int which, float eps, bool zero_centered_gamma) -> Tensor[]",
    _norm,
    _norm_fake,
)


_norm_grad_op = define(
    "norm_grad",
    "(Tensor dy, Tensor x, Tensor gamma, Tensor? mu, Tensor rsigma, bool zero_centered_gamma, bool has_beta) "
    "-> Tensor[]",
    _norm_grad,
    _norm_grad_fake,
)


def norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, options: NormOptions
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(mu, rsigma, y): float32 [M] of x [..., K], mu None for RMSNorm; y in x's dtype, None without gamma."""
    which, eps, centered = NORM_IDS[options.which], options.eps, options.zero_centered_gamma
    out = run("norm", _norm, _norm_op, x, gamma, beta, which, eps, centered and gamma is not None)
    return (out[1] if which == LAYERNORM else None), out[0], (None if gamma is None else out[-1])


def norm_grad(
    dy: Tensor, x: Tensor, gamma: Tensor, mu: Tensor | None, rsigma: Tensor, options: NormOptions, has_beta: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx in x's dtype, dgamma and dbeta in gamma's."""
    args = (dy, x, gamma, mu, rsigma, options.zero_centered_gamma, has_beta)
    out = run("norm_grad", _norm_grad, _norm_grad_op, *args)
    return out[0], out[1], out[2] if has_beta else None
