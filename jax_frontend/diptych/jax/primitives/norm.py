"""The norms as JAX primitives, forward and backward."""

from __future__ import annotations

from typing import Any

import jax

from diptych.common.ops import shapes
from diptych.common.ops.norm import NormOptions, refuse_dbeta
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import Aval, check_dy, check_norm, operand, own_shape
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.register import batch_shape, primitive, result, workspace_bytes

Array = jax.Array


def _norm_abstract(
    x: Aval, *parameters: Aval, batch: Batch, which: str, eps: float, zero_centered_gamma: bool, dtype: str
) -> Any:
    shape = own_shape(x, batch.axes[0])
    names = ("gamma", "beta")[: len(parameters)]
    check_norm("norm", which, operand("x", x, batch.axes[0]), names, parameters, batch.axes[1:])
    front, m = batch_shape((x, *parameters), batch), shapes.rows_cols(shape)[0]
    statistics = [result((x, *parameters), (*front, m), "float32")] * (1 + (which == "layernorm"))
    return [*statistics, *([result((x, *parameters), (*front, *shape), dtype)] if dtype else [])]


def _norm_attributes(avals: Any, batch: Batch, which: str, eps: float, zero_centered_gamma: bool, dtype: str) -> Any:
    return ffi.norm_attributes(batch, which, eps, zero_centered_gamma, bool(dtype), len(avals) == 3)


norm_p = primitive("norm", _norm_abstract, _norm_attributes)


def statistics(x: Array, options: NormOptions) -> tuple[Array, ...]:
    """Returns a norm's statistics ([mu: layernorm], rsigma), float32 [M] for x [..., K]."""
    which, eps, _ = options
    return tuple(norm_p.bind(x, batch=Batch.none(1), which=which, eps=eps, zero_centered_gamma=False, dtype=""))


def norm(x: Array, gamma: Array, beta: Array | None, options: NormOptions) -> tuple[tuple[Array, ...], Array]:
    """Returns (statistics, y in x's dtype)."""
    args = [x, gamma, *([] if beta is None else [beta])]
    outs = norm_p.bind(*args, batch=Batch.none(len(args)), **options._asdict(), dtype=x.dtype.name)
    return tuple(outs[:-1]), outs[-1]


def _norm_grad_abstract(
    dy: Aval, x: Aval, gamma: Aval, *stats: Aval, batch: Batch, which: str, zero_centered_gamma: bool, has_dbeta: bool
) -> Any:
    avals, shape = (dy, x, gamma, *stats), own_shape(x, batch.axes[1])
    check_dy("norm_grad", dy, batch.axes[0], shape)
    names = ("gamma", "mu", "rsigma") if which == "layernorm" else ("gamma", "rsigma")
    check_norm("norm_grad", which, operand("x", x, batch.axes[1]), names, (gamma, *stats), batch.axes[2:])
    refuse_dbeta("norm_grad", has_dbeta and which == "rmsnorm")
    front = batch_shape(avals, batch)
    of_gamma = result(avals, (*front, shape[-1]), gamma.dtype.name)
    return [result(avals, (*front, *shape), x.dtype.name), *[of_gamma] * (1 + has_dbeta)]


def _norm_grad_finish(ctx: Any, platform: str, batch: Batch, **_: Any) -> Any:
    sizes = shapes.rows_cols(own_shape(ctx.avals_in[1], batch.axes[1]))
    return {}, workspace_bytes("norm_grad", platform, sizes, _core.norm_grad_workspace_bytes)


norm_grad_p = primitive(
    "norm_grad",
    _norm_grad_abstract,
    lambda avals, batch, **params: ffi.norm_grad_attributes(batch, **params),
    _norm_grad_finish,
)


def norm_grad(
    dy: Array, x: Array, gamma: Array, stats: tuple[Array, ...], options: NormOptions, has_dbeta: bool
) -> tuple[Array, Array, Array | None]:
    """Returns dx in x's dtype, dgamma and dbeta in gamma's dtype."""
    args = [dy, x, gamma, *stats]
    outs = norm_grad_p.bind(
        *args,
        batch=Batch.none(len(args)),
        which=options.which,
        zero_centered_gamma=options.zero_centered_gamma,
        has_dbeta=has_dbeta,
    )
    return outs[0], outs[1], outs[2] if has_dbeta else None
