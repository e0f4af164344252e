"""`FusedInput`: a source that quantize and amax read in place of a tensor: a norm or an activation of x, or x's rows in
a map's order.

    y = ((x - mu) * rsigma) * g + beta      g is gamma, or 1 + gamma; RMSNorm: mu is 0, and there is no beta
    y = act(a)  or  act(a) * b              gated: x = (a | b)

All arithmetic is float32, each operation rounded. The verbs `layernorm` and `activate` round y to x's dtype; a
`FusedInput` is quantized without that rounding and without ever lying in memory. Permuted rows have the bits of
permuting first. The ops are registered, checked and traced as those of the room `primitives`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.common.ops import shapes
from diptych.common.ops.activation import ActivationOptions
from diptych.common.ops.norm import NormOptions
from diptych.common.ops.permute import tokens_of
from diptych.common.quantizers import ROW_AMAX, Float8Quantizer, Quantizer
from diptych.core import _core
from diptych.torch.primitives import constants
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import (
    ACTIVATION_IDS,
    FROM_ACTIVATION,
    FROM_ACTIVATION_GRAD,
    FROM_NORM,
    FROM_ROWS,
    NORM_IDS,
    check_amax,
    check_delayed,
    check_dy,
    check_norm,
    check_quantize,
    enforce,
    halved,
    operand,
    require_out_dtype,
)
from diptych.torch.primitives.permute import check_maps
from diptych.torch.primitives.register import contiguous_or_none, define, empty_beside, fake_buffers, run, workspace
from diptych.torch.private.graphs import run_eagerly

# --- quantize with a source ------------------------------------------------------------------------------------------


class FusedInput(NamedTuple):
    """A tensor to quantize that is never stored: a norm or activation of x in unrounded float32, or x's permuted rows.

    The fields after x are the core's source: its kind, its norm or activation (`which`), zero_centered_gamma or gated
    (`flag`), and its operands; `row_id_map` and `row_source` belong to a row map.
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
    row_source: Tensor | None = None


_FIELDS = len(FusedInput._fields) - 1  # after x


def encoded_shape(op: str, f: FusedInput) -> tuple[Any, ...]:
    """Returns the shape to quantize, after checks of the source's operands."""
    if f.kind == FROM_NORM:
        check_norm(op, f.x, f.which, gamma=f.gamma, beta=f.beta, mu=f.mu, rsigma=f.rsigma)
        return tuple(f.x.shape)
    if f.kind == FROM_ROWS:
        if f.row_id_map is None or f.row_source is None:
            raise ArgumentError(f"{op}: row_id_map and row_source belong together, and one is missing")
        check_maps(op, f.x, f.row_id_map, f.row_source)
        enforce(tokens_of(op, operand("x", f.x), f.row_id_map.shape[0], "the map's tokens"))
        return (f.row_source.shape[0], f.x.shape[-1])
    if f.kind not in (FROM_ACTIVATION, FROM_ACTIVATION_GRAD):
        raise ValueError(f"{op}: unknown source {f.kind}")
    shape = halved(op, f.x, f.flag)
    if f.kind == FROM_ACTIVATION:
        return shape
    if f.dy is None:
        raise ArgumentError(f"{op}: dy is missing")
    check_dy(op, f.dy, f.x, shape)
    return tuple(f.x.shape)


def _source(f: FusedInput) -> tuple[Any, ...]:
    if f.kind == FROM_ROWS:
        return (f.kind, contiguous_or_none(f.row_id_map), contiguous_or_none(f.row_source))
    return (f.kind, f.which, f.flag, *[contiguous_or_none(t) for t in f[4:9]])


def _sum_results(f: FusedInput, shape: tuple[Any, ...], dtype: torch.dtype | None) -> list[Tensor]:
    if dtype is None:
        return []
    require_out_dtype("quantize column_sum", dtype)
    return [empty_beside(f.x, (shape[-1],), dtype)]


def _core_source(f: FusedInput, shape: tuple[int, ...], total: list[Tensor]) -> tuple[Any, ...]:
    """Returns the core's arguments after the buffers: source, column_sum, workspace."""
    if not total:
        return _source(f), None, None
    nbytes = _core.column_sum_workspace_bytes(*shapes.rows_cols(shape)) if f.x.is_cuda else 0
    return _source(f), total[0], workspace(nbytes, f.x.device)


# The ops below take a FusedInput's fields after x in the place of `*rest`, as their schemas say.


def _quantize(x: Tensor, quantizer: Quantizer, *rest: Any) -> list[Tensor]:
    f, (*given, sum_dtype) = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS:]
    shape = encoded_shape("quantize", f)
    total = _sum_results(f, shape, sum_dtype)
    amax, columnwise_amax, scale, rng = given
    source = _core_source(f, shape, total)
    return quantize_ops._quantize(x, quantizer, amax, columnwise_amax, scale, rng, shape, source) + total


def _quantize_fake(x: Tensor, quantizer: Quantizer, *rest: Any) -> list[Tensor]:
    f, (*given, sum_dtype) = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS:]
    shape = encoded_shape("quantize", f)
    check_quantize(x, quantizer, *given, encoded=shape)
    return fake_buffers(x.new_empty(shape), quantizer) + _sum_results(f, shape, sum_dtype)


def _quantize_delayed(
    x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    f, sum_dtype = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS]
    shape = encoded_shape("quantize_delayed", f)
    total = _sum_results(f, shape, sum_dtype)
    made = quantize_ops._quantize_delayed(x, quantizer, scale, history, shape, _core_source(f, shape, total))
    return _five(x, quantizer, made, total)


def _quantize_delayed_fake(
    x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    f, sum_dtype = FusedInput(x, *rest[:_FIELDS]), rest[_FIELDS]
    shape = encoded_shape("quantize_delayed", f)
    check_delayed(x, quantizer, scale, history, shape)
    made = fake_buffers(x.new_empty(shape), quantizer)[:-1]
    return _five(x, quantizer, made, _sum_results(f, shape, sum_dtype))


def _five(x: Tensor, quantizer: Quantizer, made: list[Tensor], total: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns the buffers of two copies and the sum, an empty tensor standing for each that is not made."""
    empty = [x.new_empty(0) for _ in range(4 - len(made))]
    return *(made + empty if quantizer.rowwise else empty + made), *(total or [x.new_empty(0)])


def _amax_results(x: Tensor, *rest: Any) -> list[Tensor]:
    flags, columnwise = rest[_FIELDS:]
    shape = encoded_shape("amax", FusedInput(x, *rest[:_FIELDS]))
    check_amax(x, flags, columnwise, shape)
    rows = shapes.rows_cols(shape)[0] if flags & ROW_AMAX else 1
    return [empty_beside(x, (n,), torch.float32) for n in ([rows, 1] if columnwise else [rows])]


def _amax(x: Tensor, *rest: Any) -> list[Tensor]:
    out, (flags, columnwise) = _amax_results(x, *rest), rest[_FIELDS:]
    source = _source(FusedInput(x, *rest[:_FIELDS]))
    _core.amax(x.contiguous(), out[0], out[1] if columnwise else None, flags, source)
    return out


# --- registration ----------------------------------------------------------------------------------------------------

_SOURCE = "int kind, int which, bool flag, " + ", ".join(f"Tensor? {name}" for name in FusedInput._fields[4:])
_amax_op = define("amax_fused", f"(Tensor x, {_SOURCE}, int flags, bool columnwise) -> Tensor[]", _amax, _amax_results)
_quantize_op: Callable[..., list[Tensor]]
_quantize_delayed_op: Callable[..., tuple[Tensor, ...]]
if constants.AVAILABLE:
    _QUANTIZER = constants.schema_type(Float8Quantizer)  # see primitives
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
    _quantize_op = run_eagerly(_quantize)
    _quantize_delayed_op = run_eagerly(_quantize_delayed)


# --- the ops as the rest of this package calls them ------------------------------------------------------------------


def amax(f: FusedInput, flags: int = 0, *, columnwise: bool = False) -> Any:
    """The op `amax` of a FusedInput."""
    out = run("amax_fused", _amax, _amax_op, *f, flags, columnwise)
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
    """The op `quantize` of a FusedInput; with `sum_dtype`, the last result is the sum over the rows before
    quantizing."""
    rest = (*f[1:], amax, columnwise_amax, scale, rng, sum_dtype)
    return run("quantize_fused", _quantize, _quantize_op, f.x, quantizer, *rest)


def quantize_delayed(
    f: FusedInput, quantizer: Quantizer, scale: Tensor, history: Tensor, sum_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The op `quantize_delayed` of a FusedInput; with `sum_dtype`, the last result is the sum over the rows."""
    args = (f.x, quantizer, scale, history, *f[1:], sum_dtype)
    made = run("quantize_fused_delayed", _quantize_delayed, _quantize_delayed_op, *args)
    total = [made[4]] if sum_dtype is not None else []
    return [*(made[:2] if quantizer.rowwise else ()), *(made[2:4] if quantizer.columnwise else ()), *total]


def normalized(
    x: Tensor, gamma: Tensor, beta: Tensor | None, mu: Tensor | None, rsigma: Tensor, options: NormOptions
) -> FusedInput:
    """The output of a norm of x, computed from given statistics."""
    return FusedInput(x, FROM_NORM, NORM_IDS[options.which], options.zero_centered_gamma, gamma, beta, mu, rsigma)


def activated(x: Tensor, options: ActivationOptions) -> FusedInput:
    return FusedInput(x, FROM_ACTIVATION, ACTIVATION_IDS[options.which], options.gated)


def permuted(x: Tensor, row_id_map: Tensor, row_source: Tensor) -> FusedInput:
    """The rows of x [..., K] in the order of a map, [rows, K]; absent rows are zeros."""
    return FusedInput(x, FROM_ROWS, 0, False, row_id_map=row_id_map, row_source=row_source)


def activated_grad(dy: Tensor, x: Tensor, options: ActivationOptions) -> FusedInput:
    return FusedInput(x, FROM_ACTIVATION_GRAD, ACTIVATION_IDS[options.which], options.gated, dy=dy)
