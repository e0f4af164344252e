"""`layernorm`: the core's norms in high precision, differentiable."""

from __future__ import annotations

import functools
from typing import Any

import jax

from diptych.common.errors import DTypeError, ShapeError
from diptych.common.ops.norm import NormOptions
from diptych.jax.primitives import checks
from diptych.jax.primitives.norm import norm, norm_grad

Array = jax.Array


def check_parameters(op: str, x: Array, gamma: Any, beta: Any, options: NormOptions) -> tuple[Array, Array | None]:
    """gamma and beta as arrays that fit x. **Raises** TypeError, ValueError."""
    gamma = checks.to_array(op, "gamma", gamma)
    if beta is not None:
        if options.which == "rmsnorm":
            raise ValueError(f"{op}: RMSNorm has no beta, and one was given")
        beta = checks.to_array(op, "beta", beta)
        if beta.dtype != gamma.dtype:
            raise DTypeError(f"{op}: beta must have gamma's dtype {gamma.dtype}, got {beta.dtype}")
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        if parameter is not None and (x.ndim == 0 or parameter.shape != x.shape[-1:]):
            raise ShapeError(
                f"{op}: {name} must be [K] for x [..., K], got {list(parameter.shape)} for {list(x.shape)}"
            )
    return gamma, beta


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def layernorm(options: NormOptions, x: Array, gamma: Array, beta: Array | None) -> Array:
    """The norm of x [..., K] in x's dtype; its gradients are those of `norm_grad`."""
    return norm(x, gamma, beta, options)[1]


def _layernorm_forward(options: NormOptions, x: Array, gamma: Array, beta: Array | None) -> Any:
    stats, y = norm(x, gamma, beta, options)
    return y, (x, gamma, beta, stats)


def _layernorm_backward(options: NormOptions, saved: Any, dy: Array) -> Any:
    x, gamma, beta, stats = saved
    return norm_grad(dy, x, gamma, stats, options, beta is not None)


layernorm.defvjp(_layernorm_forward, _layernorm_backward)
