"""Norms and activations of the core, alone and differentiated; and what quantize encodes instead of its input: these,
or rows where a map sends them.

    y = ((x - mu) * rsigma) * g + beta      g is gamma, or 1 + gamma; RMSNorm: mu is 0, and there is no beta
    y = act(a)  or  act(a) * b              gated: x = (a | b)

All arithmetic is float32, each operation rounded. `layernorm` and `activate` round y to x's dtype and have a first
derivative; a `FusedInput` is quantized without that rounding and without ever lying in memory. Permuted rows have the
bits of permuting first. The ops are registered, checked and traced as those of `primitives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common import shapes
from diptych.common.errors import ArgumentError, DTypeError
from diptych.common.fused import ActivationOptions, NormOptions
from diptych.common.quantizers import ROW_AMAX, Float8Quantizer, Quantizer
from diptych.core import _core
from diptych.torch.primitives import constants as opaque
from diptych.torch.primitives import quantize as primitives
from diptych.torch.primitives.checks import (
    check_amax,
    check_delayed,
    check_quantize,
    define,
    describe,
    direct,
    enforce,
    fake_buffers,
    refuse_second_derivative,
    require_device,
    require_high_precision,
    require_no_grad,
    require_no_tangent,
    require_out_dtype,
    require_size,
    workspace,
)
from diptych.torch.primitives.permute import check_maps, require_tokens

_TABLE = _core.fused_table()
_NORMS, _ACTIVATIONS = _TABLE["norm"], _TABLE["activation"]
_NORM, _ACTIVATION, _ACTIVATION_GRAD, _PERMUTED = (
    _TABLE["source"][n] for n in ("norm", "activation", "activation_grad", "permuted")
)
_LAYERNORM, _RMSNORM = _NORMS["layernorm"], _NORMS["rmsnorm"]


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_vector(op: str, arg: str, t: Tensor | None, x: Tensor, numel: Any, *, statistic: bool = False) -> None:
    if t is None:
        return
    require_device(op, x, t, arg)
    if statistic and t.dtype != torch.float32:
        raise DTypeError(f"{op}: {arg} must be float32, got {describe(t)}")
    require_high_precision(op, arg, t)
    say = f"{op}: {arg} must hold {{}} elements for x {{}}, got {{}}"
    require_size(math.prod(t.shape), numel, lambda: say.format(numel, describe(x), describe(t)))


def _check_norm(op: str, x: Tensor, which: int, **operands: Tensor | None) -> None:
    """gamma, beta [K] and mu, rsigma [M], against x; those that an op reads or writes."""
    require_high_precision(op, "x", x)
    m, k = shapes.rows_cols(x.shape)
    if which not in (_LAYERNORM, _RMSNORM):
        raise ValueError(f"{op}: unknown norm {which}")
    for arg, t in operands.items():
        statistic = arg in ("mu", "rsigma")
        if t is not None and which == _RMSNORM and arg in ("mu", "beta"):
            raise ValueError(f"{op}: RMSNorm has no {arg}, and one was given")
        if t is None and (arg in ("gamma", "rsigma") or (arg == "mu" and which == _LAYERNORM)):
            raise ArgumentError(f"{op}: {arg} is missing")
        _check_vector(op, arg, t, x, m if statistic else k, statistic=statistic)


def _check_dy(op: str, dy: Tensor, x: Tensor, shape: tuple[Any, ...]) -> None:
    require_high_precision(op, "dy", dy)
    require_device(op, x, dy, "dy")
    message = f"{op}: dy must be {list(shape)} for x {describe(x)}, got {describe(dy)}"
    pairs = zip(shapes.rows_cols(dy.shape), shapes.rows_cols(shape), strict=True)
    enforce(tuple(shapes.Constraint(a, b, message) for a, b in pairs))


def _halved(op: str, x: Tensor, gated: bool) -> tuple[Any, ...]:
    """Shape of an activation of x."""
    require_high_precision(op, "x", x)
    shape, constraints = shapes.activation_shape(op, tuple(x.shape), gated)
    enforce(constraints)
    return shape


# --- norm ------------------------------------------------------------------------------------------------------------


def _empty(x: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _norm_results(x: Tensor, which: int, with_y: bool) -> list[Tensor]:
    """Buffers: rsigma, mu of LayerNorm, y if wanted."""
    m, _ = shapes.rows_cols(x.shape)
    out = [_empty(x, (m,), torch.float32) for _ in range(1 + (which == _LAYERNORM))]
    return [*out, _empty(x, x.shape, x.dtype)] if with_y else out


def _norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, which: int, eps: float, zero_centered_gamma: bool
) -> list[Tensor]:
    require_high_precision("norm", "x", x)
    out = _norm_results(x, which, gamma is not None)
    mu, y = (out[1] if which == _LAYERNORM else None), (None if gamma is None else out[-1])
    gamma, beta = _contiguous(gamma), _contiguous(beta)
    _core.norm(x.contiguous(), gamma, beta, mu, out[0], y, which, eps, zero_centered_gamma)
    return out


def _norm_fake(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, which: int, eps: float, zero_centered_gamma: bool
) -> list[Tensor]:
    if gamma is None:
        _check_norm("norm", x, which)
    else:
        _check_norm("norm", x, which, gamma=gamma, beta=beta)
    return _norm_results(x, which, gamma is not None)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _norm_grad_results(x: Tensor, gamma: Tensor, has_beta: bool) -> list[Tensor]:
    return [_empty(x, x.shape, x.dtype), *[_empty(x, gamma.shape, gamma.dtype) for _ in range(1 + has_beta)]]


def _norm_grad(
    dy: Tensor, x: Tensor, gamma: Tensor, mu: Tensor | None, rsigma: Tensor, zero_centered_gamma: bool, has_beta: bool
) -> list[Tensor]:
    require_high_precision("norm_grad", "x", x)
    out = _norm_grad_results(x, gamma, has_beta)
    nbytes = _core.norm_grad_workspace_bytes(*shapes.rows_cols(x.shape)) if x.is_cuda else 0
    which = _RMSNORM if mu is None else _LAYERNORM
    _core.norm_grad(
        dy.contiguous(), x.contiguous(), gamma.contiguous(), _contiguous(mu), rsigma.contiguous(), out[0], out[1],
        out[2] if has_beta else None, workspace(nbytes, x.device), which, zero_centered_gamma,
    )  # fmt: skip
    return out


def _norm_grad_fake(
    dy: Tensor, x: Tensor, gamma: Tensor, mu: Tensor | None, rsigma: Tensor, zero_centered_gamma: bool, has_beta: bool
) -> list[Tensor]:
    which = _RMSNORM if mu is None else _LAYERNORM
    _check_norm("norm_grad", x, which, gamma=gamma, mu=mu, rsigma=rsigma)
    if has_beta and mu is None:
        raise ValueError("norm_grad: RMSNorm has no beta, and its gradient was asked for")
    _check_dy("norm_grad", dy, x, tuple(x.shape))
    return _norm_grad_results(x, gamma, has_beta)


# --- activation ------------------------------------------------------------------------------------------------------


def _activation(x: Tensor, which: int, gated: bool) -> Tensor:
    y = _empty(x, _halved("activation", x, gated), x.dtype)
    _core.activation(x.contiguous(), y, which, gated)
    return y


def _activation_fake(x: Tensor, which: int, gated: bool) -> Tensor:
    return x.new_empty(_halved("activation", x, gated))


def _activation_grad(dy: Tensor, x: Tensor, which: int, gated: bool, dtype: torch.dtype) -> Tensor:
    require_out_dtype("activation_grad", dtype)
    dx = _empty(x, x.shape, dtype)
    _core.activation_grad(dy.contiguous(), x.contiguous(), dx, which, gated)
    return dx


def _activation_grad_fake(dy: Tensor, x: Tensor, which: int, gated: bool, dtype: torch.dtype) -> Tensor:
    require_out_dtype("activation_grad", dtype)
    _check_dy("activation_grad", dy, x, _halved("activation_grad", x, gated))
    return x.new_empty(x.shape, dtype=dtype)


# --- quantize with a source ------------------------------------------------------------------------------------------


class FusedInput(NamedTuple):
    """A tensor to quantize that is never stored: what a source makes of x, in float32, unrounded, or x's rows permuted.

    Fields after x are the core's source: its kind, norm or activation, zero_centered_gamma or gated, and its operands,
    of which `row_id_map` and `source` are a map's.
    """

    x: Tensor
    kind: int
    which: int
    flag: bool
    gamma: Tensor | None = None
    beta: Tensor | None = None
    mu: Tensor | None = None
    rsigma: Tensor | None = None
    dy: Tensor | None = None
    row_id_map: Tensor | None = None
    source: Tensor | None = None


_FIELDS = len(FusedInput._fields) - 1  # after x


def _encoded(op: str, f: FusedInput) -> tuple[Any, ...]:
    """Shape of what is encoded, after checks of the source's operands."""
    if f.kind == _NORM:
        _check_norm(op, f.x, f.which, gamma=f.gamma, beta=f.beta, mu=f.mu, rsigma=f.rsigma)
        return tuple(f.x.shape)
    if f.kind == _PERMUTED:
        if f.row_id_map is None or f.source is None:
            raise ArgumentError(f"{op}: row_id_map and source belong together, and one is missing")
        check_maps(op, f.x, f.row_id_map, f.source)
        require_tokens(op, "x", f.x, f.row_id_map.shape[0], "the map's tokens")
        return (f.source.shape[0], f.x.shape[-1])
    if f.kind not in (_ACTIVATION, _ACTIVATION_GRAD):
        raise ValueError(f"{op}: unknown source {f.kind}")
    shape = _halved(op, f.x, f.flag)
    if f.kind == _ACTIVATION:
        return shape
    if f.dy is None:
        raise ArgumentError(f"{op}: dy is missing")
    _check_dy(op, f.dy, f.x, shape)
    return tuple(f.x.shape)


def _source(f: FusedInput) -> tuple[Any, ...]:
    if f.kind == _PERMUTED:
        return (f.kind, _contiguous(f.row_id_map), _contiguous(f.source))
    return (f.kind, f.which, f.flag, *[_contiguous(t) for t in f[4:9]])


def _sum_results(f: FusedInput, shape: tuple[Any, ...], dtype: torch.dtype | None) -> list[Tensor]:
    if dtype is None:
        return []
    require_out_dtype("quantize column_sum", dtype)
    return [_empty(f.x, (shape[-1],), dtype)]


def _core_source(f: FusedInput, shape: tuple[int, ...], total: list[Tensor]) -> tuple[Any, ...]:
    """The core's arguments after the buffers: source, column_sum, workspace."""
    if not total:
        return _source(f), None, None
    nbytes = _core.column_sum_workspace_bytes(*shapes.rows_cols(shape)) if f.x.is_cuda else 0
    return _source(f), total[0], workspace(nbytes, f.x.device)


# The ops below take a FusedInput's fields after x in the place of `*rest`, as their schemas say.


def _quantize(x: Tensor, quantizer: Quantizer, *rest: Any) -> list[Tensor]:
    f, (*given, sum_dtype) = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS:]
    shape = _encoded("quantize", f)
    total = _sum_results(f, shape, sum_dtype)
    amax, columnwise_amax, scale, rng = given
    source = _core_source(f, shape, total)
    return primitives._quantize(x, quantizer, amax, columnwise_amax, scale, rng, shape, source) + total


def _quantize_fake(x: Tensor, quantizer: Quantizer, *rest: Any) -> list[Tensor]:
    f, (*given, sum_dtype) = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS:]
    shape = _encoded("quantize", f)
    check_quantize(x, quantizer, *given, encoded=shape)
    return fake_buffers(x.new_empty(shape), quantizer) + _sum_results(f, shape, sum_dtype)


def _quantize_delayed(
    x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    f, sum_dtype = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS]
    shape = _encoded("quantize_delayed", f)
    total = _sum_results(f, shape, sum_dtype)
    made = primitives._quantize_delayed(x, quantizer, scale, history, shape, _core_source(f, shape, total))
    return _five(x, quantizer, made, total)


def _quantize_delayed_fake(
    x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    f, sum_dtype = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS]
    shape = _encoded("quantize_delayed", f)
    check_delayed(x, quantizer, scale, history, shape)
    made = fake_buffers(x.new_empty(shape), quantizer)[:-1]
    return _five(x, quantizer, made, _sum_results(f, shape, sum_dtype))


def _five(x: Tensor, quantizer: Quantizer, made: list[Tensor], total: list[Tensor]) -> tuple[Tensor, ...]:
    """Both copies' buffers and the sum, an empty tensor for each that is not made; see `primitives._both`."""
    empty = [x.new_empty(0) for _ in range(4 - len(made))]
    return *(made + empty if quantizer.rowwise else empty + made), *(total or [x.new_empty(0)])


def _amax_results(x: Tensor, *rest: Any) -> list[Tensor]:
    flags, columnwise = rest[_FIELDS:]
    shape = _encoded("amax", FusedInput(x, *rest[:_FIELDS]))
    check_amax(x, flags, columnwise, shape)
    rows = shapes.rows_cols(shape)[0] if flags & ROW_AMAX else 1
    return [_empty(x, (n,), torch.float32) for n in ([rows, 1] if columnwise else [rows])]


def _amax(x: Tensor, *rest: Any) -> list[Tensor]:
    out, (flags, columnwise) = _amax_results(x, *rest), rest[_FIELDS:]
    source = _source(FusedInput(x, *rest[:_FIELDS]))
    _core.amax(x.contiguous(), out[0], out[1] if columnwise else None, flags, source)
    return out


# --- registration ----------------------------------------------------------------------------------------------------

_SOURCE = "int kind, int which, bool flag, " + ", ".join(f"Tensor? {name}" for name in FusedInput._fields[4:])
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
_activation_op = define("activation", "(Tensor x, int which, bool gated) -> Tensor", _activation, _activation_fake)
_activation_grad_op = define(
    "activation_grad", "(Tensor dy, Tensor x, int which, bool gated, ScalarType dtype) -> Tensor",
    _activation_grad, _activation_grad_fake,
)  # fmt: skip
_amax_op = define("amax_fused", f"(Tensor x, {_SOURCE}, int flags, bool columnwise) -> Tensor[]", _amax, _amax_results)
_quantize_op: Callable[..., list[Tensor]]
_quantize_delayed_op: Callable[..., tuple[Tensor, ...]]
if opaque.AVAILABLE:
    _QUANTIZER = opaque.schema_type(Float8Quantizer)  # see primitives
    _quantize_op = define(
        "quantize_fused",
        f"(Tensor x, {_QUANTIZER} quantizer, {_SOURCE}, Tensor? amax, Tensor? columnwise_amax, Tensor? scale, "
        "Tensor? rng, ScalarType? sum_dtype) -> Tensor[]",
        _quantize,
        _quantize_fake,
    )
    _quantize_delayed_op = define(
        "quantize_fused_delayed",
        f"(Tensor x, {_QUANTIZER} quantizer, Tensor scale, Tensor(a!) history, {_SOURCE}, ScalarType? sum_dtype) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _quantize_delayed,
        _quantize_delayed_fake,
    )
else:  # pragma: no cover - no supported torch
    _quantize_op = torch._disable_dynamo(_quantize)  # type: ignore[attr-defined]
    _quantize_delayed_op = torch._disable_dynamo(_quantize_delayed)  # type: ignore[attr-defined]


# --- the ops as the rest of this package calls them ------------------------------------------------------------------


def _run(name: str, real: Callable[..., Any], op: Callable[..., Any], *args: Any) -> Any:
    tensors = [t for t in args if isinstance(t, Tensor)]
    if not direct(*tensors):
        return op(*args)
    require_no_grad(f"diptych::{name}", *tensors)
    return real(*args)


def norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, options: NormOptions
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(mu, rsigma, y): float32 [M] of x [..., K], mu None for RMSNorm; y in x's dtype, None without gamma."""
    which, eps, centered = _NORMS[options.which], options.eps, options.zero_centered_gamma
    out = _run("norm", _norm, _norm_op, x, gamma, beta, which, eps, centered and gamma is not None)
    return (out[1] if which == _LAYERNORM else None), out[0], (None if gamma is None else out[-1])


def norm_grad(
    dy: Tensor, x: Tensor, gamma: Tensor, mu: Tensor | None, rsigma: Tensor, options: NormOptions, has_beta: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx in x's dtype, dgamma and dbeta in gamma's."""
    args = (dy, x, gamma, mu, rsigma, options.zero_centered_gamma, has_beta)
    out = _run("norm_grad", _norm_grad, _norm_grad_op, *args)
    return out[0], out[1], out[2] if has_beta else None


def activation(x: Tensor, options: ActivationOptions) -> Tensor:
    """act(x), or act(a) * b, in x's dtype: [..., F] for x [..., F] or, gated, [..., 2F]."""
    return _run("activation", _activation, _activation_op, x, _ACTIVATIONS[options.which], options.gated)


def activation_grad(dy: Tensor, x: Tensor, options: ActivationOptions, dtype: torch.dtype | None = None) -> Tensor:
    """dy * act'(x), or (dy * b * act'(a) | dy * act(a)), of x's shape; `dtype`: None is x's."""
    args = (dy, x, _ACTIVATIONS[options.which], options.gated, x.dtype if dtype is None else dtype)
    return _run("activation_grad", _activation_grad, _activation_grad_op, *args)


def amax(f: FusedInput, flags: int = 0, *, columnwise: bool = False) -> Any:
    """`primitives.amax` of a FusedInput."""
    out = _run("amax_fused", _amax, _amax_op, *f, flags, columnwise)
    return (out[0], out[1]) if columnwise else out[0]


def quantize(
    f: FusedInput,
    quantizer: Quantizer,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """`primitives.quantize` of a FusedInput; with `sum_dtype`, last, the sum over the rows of what is encoded."""
    rest = (*f[1:], amax, columnwise_amax, scale, rng, sum_dtype)
    return _run("quantize_fused", _quantize, _quantize_op, f.x, quantizer, *rest)


def quantize_delayed(
    f: FusedInput, quantizer: Quantizer, scale: Tensor, history: Tensor, sum_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """`primitives.quantize_delayed` of a FusedInput; with `sum_dtype`, last, the sum over the rows."""
    args = (f.x, quantizer, scale, history, *f[1:], sum_dtype)
    made = _run("quantize_fused_delayed", _quantize_delayed, _quantize_delayed_op, *args)
    total = [made[4]] if sum_dtype is not None else []
    return [*(made[:2] if quantizer.rowwise else ()), *(made[2:4] if quantizer.columnwise else ()), *total]


def normalized(
    x: Tensor, gamma: Tensor, beta: Tensor | None, mu: Tensor | None, rsigma: Tensor, options: NormOptions
) -> FusedInput:
    """What a norm makes of x, given its statistics."""
    return FusedInput(x, _NORM, _NORMS[options.which], options.zero_centered_gamma, gamma, beta, mu, rsigma)


def activated(x: Tensor, options: ActivationOptions) -> FusedInput:
    return FusedInput(x, _ACTIVATION, _ACTIVATIONS[options.which], options.gated)


def permuted(x: Tensor, row_id_map: Tensor, source: Tensor) -> FusedInput:
    """Rows of x [..., K] where a map sends them, [rows, K]; absent ones are zeros."""
    return FusedInput(x, _PERMUTED, 0, False, row_id_map=row_id_map, source=source)


def activated_grad(dy: Tensor, x: Tensor, options: ActivationOptions) -> FusedInput:
    return FusedInput(x, _ACTIVATION_GRAD, _ACTIVATIONS[options.which], options.gated, dy=dy)


# --- differentiable, in high precision -------------------------------------------------------------------------------


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


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor | None, options: NormOptions) -> Tensor:
    """The norm of x [..., K] in x's dtype; its gradients are those of `norm_grad`."""
    require_no_tangent("diptych.torch's norm", x, gamma, beta)
    return _LayerNorm.apply(x, gamma, beta, options)


def activate(x: Tensor, options: ActivationOptions) -> Tensor:
    """An activation in x's dtype; its gradient is that of `activation_grad`."""
    require_no_tangent("diptych.torch's activation", x)
    return _Activate.apply(x, options)
