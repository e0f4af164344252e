"""The ops on stacks and on groups of rows, on raw buffers, as JAX primitives.

A copy of a stack of G tensors is a `Copy` whose arrays have a leading G; [1] of a tensor is [G] of a stack. Group g has
the rows offsets[g] <= r < offsets[g + 1]. No op waits for the device: the CPU refuses offsets that descend or leave the
tensor, CUDA clamps each to between the one before it and R. The ops have no derivative.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from diptych.common.formats import format_by_name
from diptych.common.gemm_options import DEFAULTS, GemmOptions
from diptych.common.ops import grouped, shapes
from diptych.common.ops import quantize as rules
from diptych.common.ops.operand import Operand
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import (
    Aval,
    Copy,
    check_buffer,
    check_result,
    copy_length,
    copy_operands,
    dtype_of,
    enforce,
    given_amaxes,
    operand,
    own_shape,
)
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.quantize import COMPUTE, GIVEN
from diptych.jax.primitives.register import batch_shape, in_place, primitive, result, workspace_bytes

Array = jax.Array

_NO_DERIVATIVE = (
    "rounding to a few bits has none. Use diptych.jax.grouped_dense, which defines the products of training, or wrap "
    "the inputs in jax.lax.stop_gradient"
)
_NO_DERIVATIVE_OF_SUMS = "it sums gradients. Wrap its input in jax.lax.stop_gradient"


def _groups(op: str, aval: Aval, mask: int) -> Any:
    """Demands offsets of groups and returns the number of groups."""
    groups, constraints = grouped.offsets_of(op, operand("offsets", aval, mask))
    enforce(constraints)
    return groups


# --- stacks ---


def _amaxes(shape: shapes.Shape, quantizer: Quantizer) -> dict[str, shapes.Buffer]:
    return {b.name: b for b in grouped.stack_buffers(shape, quantizer) if b.name.endswith("amax")}


def _quantize_stack_abstract(
    *avals: Aval, batch: Batch, quantizer: Quantizer, mode: int, has_scale: bool, has_rng: bool, as_bytes: bool
) -> Any:
    op, x = "quantize_stack", avals[0]
    named = operand("x", x, batch.axes[0])
    shape = named.shape
    each, count = grouped.stack_shape(shape), shape[0]
    want = {name: (b.dtype, b.shape) for name, b in _amaxes(shape, quantizer).items()} if mode == GIVEN else {}
    want |= {"scale": ("float32", (count,))} if has_scale else {}
    if has_rng:
        words = own_shape(avals[-1], batch.axes[-1])
        want["rng"] = ("int32", (count, 8 if words == (count, 8) else 4))
    given = dict(zip(want, avals[1:], strict=True))
    for name, mask in zip(want, batch.axes[1:], strict=True):
        check_buffer(op, name, given[name], mask, *want[name])
    state = {name: Operand(name, dtype, own[1:]) for name, (dtype, own) in want.items()}
    enforce(rules.quantize(op, named._replace(shape=each), quantizer, **state))
    # A result varies over the mesh axes of the operands that it depends on, as in quantize.
    amaxes = [a for name, a in given.items() if name.endswith("amax")]
    fixed = [given["scale"]] if has_scale else amaxes if quantizer.format.one_scale else []
    sources = {"data": avals, "inv": tuple(fixed or [x, *amaxes]), "amax": (x, *amaxes)}
    front, outs = batch_shape(avals, batch), []
    for buffer in grouped.stack_buffers(shape, quantizer):
        if mode == GIVEN and buffer.name.endswith("amax"):
            continue
        dtype = "uint8" if as_bytes and dtype_of(buffer.dtype).itemsize == 1 else buffer.dtype
        outs.append(result(sources[buffer.name.rsplit("_", 1)[-1]], (*front, *buffer.shape), dtype))
    return outs


def _quantize_stack_attributes(
    avals: Any, batch: Batch, quantizer: Quantizer, mode: int, as_bytes: bool, **there: bool
) -> Any:
    amaxes = _amaxes(own_shape(avals[0], batch.axes[0]), quantizer)
    return ffi.quantize_stack_attributes(
        batch,
        quantizer.spec,
        mode,
        has_amax="amax" in amaxes,
        has_columnwise_amax="columnwise_amax" in amaxes,
        rowwise=quantizer.rowwise,
        columnwise=quantizer.columnwise,
        **there,
    )


quantize_stack_p = primitive(
    "quantize_stack", _quantize_stack_abstract, _quantize_stack_attributes, no_derivative=_NO_DERIVATIVE
)


def quantize_stack(
    x: Array,
    quantizer: Quantizer,
    amax: Array | None = None,
    columnwise_amax: Array | None = None,
    scale: Array | None = None,
    rng: Array | None = None,
    as_bytes: bool = False,
) -> dict[str, Array]:
    """Returns the buffers of `grouped.stack_buffers` by name, for x [G, ..., K]; amaxes that are passed are returned.

    `amax`, `columnwise_amax`, `scale`: float32 [G] (an amax per row: [G, M]). `rng`: int32 [G, 4] or [G, 8].
    """
    amaxes = given_amaxes("quantize_stack", quantizer, amax=amax, columnwise_amax=columnwise_amax)
    mode = GIVEN if amaxes else COMPUTE
    args = [x, *amaxes.values(), *(v for v in (scale, rng) if v is not None)]
    outs = quantize_stack_p.bind(
        *args,
        batch=Batch.none(len(args)),
        quantizer=quantizer,
        mode=mode,
        has_scale=scale is not None,
        has_rng=rng is not None,
        as_bytes=as_bytes,
    )
    names = [b.name for b in grouped.stack_buffers(x.shape, quantizer) if b.name not in amaxes]
    return dict(zip(names, outs, strict=True)) | amaxes


# --- products ---


def _sizes(avals: Any, batch: Batch, a: tuple[str, bool], b: tuple[str, bool]) -> grouped.GroupedShape:
    op, at = "grouped_gemm", copy_length(a[0])
    end = at + copy_length(b[0])
    groups = _groups(op, avals[end], batch.axes[end])
    a_data, b_data = own_shape(avals[0], batch.axes[0]), own_shape(avals[at], batch.axes[at])
    return grouped.grouped_shape(groups, format_by_name(a[0]), a[1], a_data, format_by_name(b[0]), b[1], b_data)


def _grouped_gemm_abstract(
    *avals: Aval,
    batch: Batch,
    a: tuple[str, bool],
    b: tuple[str, bool],
    has_bias: bool,
    has_c: bool,
    align: int,
    rotated: bool,
    alpha: str,
    out_dtype: str,
    options: GemmOptions,
) -> Any:
    op, pair = "grouped_gemm", f"{a[0]} x {b[0]}"
    at = copy_length(a[0])
    end = at + copy_length(b[0])
    copies = copy_operands(avals[:at], batch.axes[:at], *a), copy_operands(avals[at:end], batch.axes[at:end], *b)
    bias = operand("bias", avals[end + 1], batch.axes[end + 1]) if has_bias else None
    offsets = operand("offsets", avals[end], batch.axes[end])
    size = grouped.grouped_gemm(*copies, offsets, bias, out_dtype, align, rotated, options)
    enforce(size.constraints)
    if has_c:
        if has_bias:
            raise ValueError(f"{op} ({pair}): a bias and an acc exclude one another")
        check_buffer(op, "acc", avals[-1], batch.axes[-1], out_dtype, size.out)
    return [result(avals, (*batch_shape(avals, batch), *size.out), out_dtype)]


def _grouped_gemm_attributes(
    avals: Any, batch: Batch, a: tuple[str, bool], b: tuple[str, bool], alpha: str, out_dtype: str, **params: Any
) -> Any:
    rows = ((format_by_name(fmt), columnwise) for fmt, columnwise in (a, b))
    a_copy, b_copy = ((row.id, columnwise, row.two_level) for row, columnwise in rows)
    kind = _sizes(avals, batch, a, b).kind
    return ffi.grouped_gemm_attributes(batch, a_copy, b_copy, kind=kind, alpha=float.fromhex(alpha), **params)


def _grouped_gemm_finish(
    ctx: Any, platform: str, batch: Batch, a: tuple[str, bool], b: tuple[str, bool], has_c: bool, **_: Any
) -> Any:
    aliases = in_place(batch, {len(ctx.avals_in) - 1: 0}) if has_c else {}
    ids = (format_by_name(fmt).id for fmt, _ in (a, b))
    shape = _sizes(ctx.avals_in, batch, a, b)
    rule = functools.partial(_core.grouped_gemm_workspace_bytes, *ids, ffi.GROUP_KINDS[shape.kind])
    if not rule(1, 1, 1, 1):  # then sizes may be symbolic
        return aliases, None
    at = copy_length(a[0]) + copy_length(b[0])
    groups = _groups("grouped_gemm", ctx.avals_in[at], batch.axes[at])
    sizes = (shape.out[-2], shape.n, shape.k, groups)
    return aliases, workspace_bytes("grouped_gemm", platform, sizes, rule)


grouped_gemm_p = primitive(
    "grouped_gemm", _grouped_gemm_abstract, _grouped_gemm_attributes, _grouped_gemm_finish, no_derivative=_NO_DERIVATIVE
)


def grouped_gemm(
    a: Copy,
    b: Copy,
    offsets: Array,
    bias: Array | None = None,
    *,
    align: int = 1,
    rotated: bool = False,
    alpha: float = 1.0,
    out_dtype: str,
    options: GemmOptions = DEFAULTS,
    acc: Array | None = None,
) -> Array:
    """[R, N] of a rowwise a and a stack b, or [G, M, N] of columnwise copies, in out_dtype. `align`: of ALIGNS.

    `acc`: of the result's shape and dtype, and only without a bias; the product is added to it, in its memory if XLA
    may reuse it.
    """
    copies = (*a.operands("grouped_gemm: a"), *b.operands("grouped_gemm: b"))
    operands = [*copies, offsets, *(x for x in (bias, acc) if x is not None)]
    return grouped_gemm_p.bind(
        *operands,
        batch=Batch.none(len(operands)),
        a=(a.format, a.columnwise),
        b=(b.format, b.columnwise),
        has_bias=bias is not None,
        has_c=acc is not None,
        align=align,
        rotated=rotated,
        alpha=alpha.hex(),  # as in gemm
        out_dtype=out_dtype,
        options=options,
    )[0]


# --- sums ---


def _grouped_bias_grad_abstract(dy: Aval, offsets: Aval, *, batch: Batch, dtype: str) -> Any:
    named = operand("dy", dy, batch.axes[0])
    groups, constraints = grouped.grouped_bias_grad(named, operand("offsets", offsets, batch.axes[1]))
    enforce(constraints)
    check_result("grouped_bias_grad", dtype)
    operands = (dy, offsets)
    return [result(operands, (*batch_shape(operands, batch), groups, named.shape[-1]), dtype)]


def _grouped_bias_grad_finish(ctx: Any, platform: str, batch: Batch, dtype: str) -> Any:
    dy, offsets = (own_shape(aval, mask) for aval, mask in zip(ctx.avals_in, batch.axes, strict=True))
    sizes = (*shapes.rows_cols(dy), offsets[0] - 1)
    return {}, workspace_bytes("grouped_bias_grad", platform, sizes, _core.grouped_bias_grad_workspace_bytes)


grouped_bias_grad_p = primitive(
    "grouped_bias_grad",
    _grouped_bias_grad_abstract,
    lambda _, batch, dtype: ffi.grouped_bias_grad_attributes(batch),
    _grouped_bias_grad_finish,
    no_derivative=_NO_DERIVATIVE_OF_SUMS,
)


def grouped_bias_grad(dy: Array, offsets: Array, dtype: str) -> Array:
    """The sum of each group's rows of dy [..., N], [G, N] in dtype."""
    return grouped_bias_grad_p.bind(dy, offsets, batch=Batch.none(2), dtype=dtype)[0]
