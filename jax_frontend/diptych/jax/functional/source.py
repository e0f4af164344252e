"""Norms and activations of the core, alone and differentiated; and what quantize encodes instead of its input: these,
or rows where a map sends them.

    y = ((x - mu) * rsigma) * g + beta      g is gamma, or 1 + gamma; RMSNorm: mu is 0, and there is no beta
    y = act(a)  or  act(a) * b              gated: x = (a | b)

All arithmetic is float32, each operation rounded. `layernorm` and `activate` round y to x's dtype; a `FusedInput` is
quantized without that rounding and without ever lying in memory. Permuted rows have the bits of permuting first. The
primitives know no derivative, `layernorm` and `activate` do.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from diptych.common import shapes
from diptych.common.errors import DTypeError, ShapeError
from diptych.common.fused import NormOptions
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.jax.functional import quantize as functional
from diptych.jax.primitives import arrays, ffi
from diptych.jax.primitives import quantize as primitives
from diptych.jax.primitives.checks import (
    Aval,
    batch_shape,
    check_gated,
    check_high_precision,
    check_norm,
    check_shape,
    own_shape,
    primitive,
    result,
    workspace_bytes,
)
from diptych.jax.primitives.ffi import Batch, Source
from diptych.jax.tensors.quantized import QuantizedArray, from_buffers

Array = jax.Array


def check_parameters(op: str, x: Array, gamma: Any, beta: Any, options: NormOptions) -> tuple[Array, Array | None]:
    """gamma and beta as arrays that fit x. **Raises** TypeError, ValueError."""
    gamma = arrays.to_array(op, "gamma", gamma)
    if beta is not None:
        if options.which == "rmsnorm":
            raise ValueError(f"{op}: RMSNorm has no beta, and one was given")
        beta = arrays.to_array(op, "beta", beta)
        if beta.dtype != gamma.dtype:
            raise DTypeError(f"{op}: beta must have gamma's dtype {gamma.dtype}, got {beta.dtype}")
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        if parameter is not None and (x.ndim == 0 or parameter.shape != x.shape[-1:]):
            raise ShapeError(
                f"{op}: {name} must be [K] for x [..., K], got {list(parameter.shape)} for {list(x.shape)}"
            )
    return gamma, beta


# --- norm ---


def _norm_abstract(
    x: Aval, *parameters: Aval, batch: Batch, which: str, eps: float, zero_centered_gamma: bool, dtype: str
) -> Any:
    shape = own_shape(x, batch.axes[0])
    check_high_precision("norm", "x", x.dtype, shape)
    check_norm("norm", which, shape, ("gamma", "beta")[: len(parameters)], parameters, batch.axes[1:])
    front, m = batch_shape((x, *parameters), batch), shapes.rows_cols(shape)[0]
    statistics = [result((x, *parameters), (*front, m), "float32")] * (1 + (which == "layernorm"))
    return [*statistics, *([result((x, *parameters), (*front, *shape), dtype)] if dtype else [])]


def _norm_attributes(avals: Any, batch: Batch, which: str, eps: float, zero_centered_gamma: bool, dtype: str) -> Any:
    return ffi.norm_attributes(batch, which, eps, zero_centered_gamma, bool(dtype), len(avals) == 3)


norm_p = primitive("norm", _norm_abstract, _norm_attributes)


def statistics(x: Array, options: NormOptions) -> tuple[Array, ...]:
    """([mu: layernorm], rsigma), float32 [M] for x [..., K]."""
    which, eps, _ = options
    return tuple(norm_p.bind(x, batch=Batch.none(1), which=which, eps=eps, zero_centered_gamma=False, dtype=""))


def norm(x: Array, gamma: Array, beta: Array | None, options: NormOptions) -> tuple[tuple[Array, ...], Array]:
    """(statistics, y in x's dtype)."""
    args = [x, gamma, *([] if beta is None else [beta])]
    outs = norm_p.bind(*args, batch=Batch.none(len(args)), **options._asdict(), dtype=x.dtype.name)
    return tuple(outs[:-1]), outs[-1]


def _norm_grad_abstract(
    dy: Aval, x: Aval, gamma: Aval, *stats: Aval, batch: Batch, which: str, zero_centered_gamma: bool, has_dbeta: bool
) -> Any:
    avals, shape = (dy, x, gamma, *stats), own_shape(x, batch.axes[1])
    for name, aval, mask in zip(("dy", "x"), (dy, x), batch.axes, strict=False):
        check_high_precision("norm_grad", name, aval.dtype, own_shape(aval, mask))
    check_shape("norm_grad", "dy", own_shape(dy, batch.axes[0]), shape)
    names = ("gamma", "mu", "rsigma") if which == "layernorm" else ("gamma", "rsigma")
    check_norm("norm_grad", which, shape, names, (gamma, *stats), batch.axes[2:])
    if has_dbeta and which == "rmsnorm":
        raise ValueError("norm_grad: rmsnorm has no beta")
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
    """dx in x's dtype, dgamma and dbeta in gamma's."""
    args = [dy, x, gamma, *stats]
    outs = norm_grad_p.bind(
        *args,
        batch=Batch.none(len(args)),
        which=options.which,
        zero_centered_gamma=options.zero_centered_gamma,
        has_dbeta=has_dbeta,
    )
    return outs[0], outs[1], outs[2] if has_dbeta else None


# --- activation ---


def _activation_abstract(x: Aval, *, batch: Batch, which: str, gated: bool) -> Any:
    shape = own_shape(x, batch.axes[0])
    check_high_precision("activation", "x", x.dtype, shape)
    return [result((x,), (*batch_shape((x,), batch), *check_gated("activation", shape, gated)), x.dtype.name)]


def _activation_attributes(_: Any, batch: Batch, which: str, gated: bool) -> Any:
    return ffi.activation_attributes(batch, which, gated)


activation_p = primitive("activation", _activation_abstract, _activation_attributes)


def activation(x: Array, which: str, gated: bool) -> Array:
    """act(x) or act(a) * b in x's dtype: [..., F] for x [..., F] or, gated, [..., 2F]."""
    return activation_p.bind(x, batch=Batch.none(1), which=which, gated=gated)[0]


def _activation_grad_abstract(dy: Aval, x: Aval, *, batch: Batch, which: str, gated: bool) -> Any:
    op, shape = "activation_grad", own_shape(x, batch.axes[1])
    for name, aval, mask in zip(("dy", "x"), (dy, x), batch.axes, strict=True):
        check_high_precision(op, name, aval.dtype, own_shape(aval, mask))
    check_shape(op, "dy", own_shape(dy, batch.axes[0]), check_gated(op, shape, gated))
    return [result((dy, x), (*batch_shape((dy, x), batch), *shape), x.dtype.name)]


activation_grad_p = primitive("activation_grad", _activation_grad_abstract, _activation_attributes)


def activation_grad(dy: Array, x: Array, which: str, gated: bool) -> Array:
    """dy * act'(x), or (dy * b * act'(a) | dy * act(a)), of x's shape and dtype."""
    return activation_grad_p.bind(dy, x, batch=Batch.none(2), which=which, gated=gated)[0]


# --- quantizing what a source makes of x ---


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x", "operands", "amax"), meta_fields=("source",))
@dataclasses.dataclass(frozen=True, eq=False)
class FusedInput:
    """A tensor to quantize that is never stored: what `source` makes of x, in float32, unrounded, or x's rows permuted.

    `amax`: float32 [1], where it is known; used instead of computing it, by per-tensor formats without a scale.
    """

    x: Array
    operands: tuple[Array, ...]
    source: Source
    amax: Array | None = None

    @property
    def dtype(self) -> Any:
        """The dtype of its unfused form."""
        return self.x.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        if self.source.kind == "permuted":
            return (*self.operands[1].shape, self.x.shape[-1])
        halved = self.source.kind == "activation" and self.source.option
        return (*self.x.shape[:-1], self.x.shape[-1] // 2) if halved else self.x.shape

    def with_amax(self, group: Any) -> FusedInput:
        """This, with its amax computed; over the mesh axes `group`, if any."""
        amax = primitives.amax(self.x, 0, self.source, self.operands, columnwise=True)[0]
        return dataclasses.replace(self, amax=functional.max_over(amax, group) if group else amax)

    def quantize(
        self,
        quantizer: Quantizer,
        *,
        scale: Array | None = None,
        rng: Array | None = None,
        amax_group: Any = None,
        as_bytes: bool = False,
        column_sum: str = "",
    ) -> tuple[QuantizedArray, Array | None]:
        """As `functional.quantize`, with the sum over rows in dtype `column_sum`, where one is named."""
        given: dict[str, Array | None] = {"scale": scale, "rng": rng}
        if self.amax is not None and scale is None and quantizer.format.per_tensor:
            given["amax"] = self.amax
        elif amax_group is not None:
            given |= functional.group_amaxes(self.x, quantizer, amax_group, self.source, self.operands)
        buffers = primitives.quantize(
            self.x,
            quantizer,
            **given,
            as_bytes=as_bytes,
            source=self.source,
            operands=self.operands,
            column_sum=column_sum,
        )
        total = buffers.pop("column_sum", None)
        return from_buffers(buffers, quantizer, self.shape, self.x.dtype), total


def normalized(
    x: Array, gamma: Array, beta: Array | None, stats: tuple[Array, ...], options: NormOptions
) -> FusedInput:
    """What a norm makes of x, given its statistics."""
    source = Source("norm", options.which, options.zero_centered_gamma, beta is not None)
    return FusedInput(x, (gamma, *([] if beta is None else [beta]), *stats), source)


def activated(x: Array, which: str, gated: bool) -> FusedInput:
    return FusedInput(x, (), Source("activation", which, gated))


def activated_grad(dy: Array, x: Array, which: str, gated: bool) -> FusedInput:
    return FusedInput(x, (dy,), Source("activation_grad", which, gated))


def permuted(x: Array, row_id_map: Array, source: Array) -> FusedInput:
    """Rows of x where a map sends them."""
    return FusedInput(x, (row_id_map, source), Source("permuted"))


# --- differentiable, in high precision ---


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def activate(which: str, gated: bool, x: Array) -> Array:
    """An activation in x's dtype; its gradient is that of `activation_grad`."""
    return activation(x, which, gated)


activate.defvjp(
    lambda which, gated, x: (activation(x, which, gated), x),
    lambda which, gated, x, dy: (activation_grad(dy, x, which, gated),),
)
