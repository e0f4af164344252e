"""The ops on stacks and on groups of rows, on raw buffers, beside `primitives`.

A copy of a stack of G tensors is a `Copy` whose arrays have a leading G; what is [1] for a tensor is [G] there. Group g
is the rows offsets[g] <= r < offsets[g + 1]. No op waits for the device: on the CPU offsets that descend or leave the
tensor are refused, on CUDA each counts as at least the one before it and at most R. None has a derivative.
"""

from __future__ import annotations

from typing import Any

import jax

from diptych.common.errors import ShapeError
from diptych.common.formats import format_by_name
from diptych.common.gemm_options import DEFAULTS, GemmOptions, check_gemm_options
from diptych.common.ops import grouped, shapes
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import (
    Aval,
    Copy,
    check_buffer,
    check_copy,
    check_dtype,
    check_high_precision,
    check_options,
    check_shape,
    copy_length,
    dtype_of,
    enforce,
    given_amaxes,
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


def _check_offsets(op: str, aval: Aval, mask: int) -> Any:
    """G"""
    check_dtype(op, "offsets", aval, "int32")
    shape = own_shape(aval, mask)
    if len(shape) != 1 or (isinstance(shape[0], int) and shape[0] < 1):
        raise ShapeError(f"{op}: offsets must be [G + 1], got {list(shape)}")
    return shape[0] - 1


# --- stacks ---


def _amaxes(shape: shapes.Shape, quantizer: Quantizer) -> dict[str, shapes.Buffer]:
    return {b.name: b for b in grouped.stack_buffers(shape, quantizer) if b.name.endswith("amax")}


def _quantize_stack_abstract(
    *avals: Aval, batch: Batch, quantizer: Quantizer, mode: int, has_scale: bool, has_rng: bool, as_bytes: bool
) -> Any:
    x, op = avals[0], f"quantize_stack ({quantizer.format.name})"
    shape = own_shape(x, batch.axes[0])
    check_high_precision(op, "x", x.dtype, shape)
    each, count = grouped.stack_shape(shape), shape[0]
    check_options("quantize_stack", x, each, quantizer, mode == GIVEN, has_scale, has_rng)
    enforce(shapes.quantize_constraints(each, quantizer))
    want = {name: (b.dtype, b.shape) for name, b in _amaxes(shape, quantizer).items()} if mode == GIVEN else {}
    want |= {"scale": ("float32", (count,))} if has_scale else {}
    want |= {"rng": ("int32", (count, 4))} if has_rng else {}
    given = dict(zip(want, avals[1:], strict=True))
    for name, mask in zip(want, batch.axes[1:], strict=True):
        check_buffer("quantize_stack", name, given[name], mask, *want[name])
    # What a result depends on is what it varies with, as in quantize.
    amaxes = [a for name, a in given.items() if name.endswith("amax")]
    fixed = [given["scale"]] if has_scale else amaxes if quantizer.format.per_tensor else []
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
    """The buffers of `grouped.stack_buffers` by name, for x [G, ..., K]; amaxes that are given come back as they are.

    `amax`, `columnwise_amax`, `scale`: float32 [G] (an amax per row: [G, M]). `rng`: int32 [G, 4].
    """
    read = _amaxes(x.shape, quantizer)
    amaxes = given_amaxes("quantize_stack", quantizer, read, amax=amax, columnwise_amax=columnwise_amax)
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


def _check_stack(
    op: str, arg: str, avals: tuple[Aval, ...], masks: tuple[int, ...], format: str, columnwise: bool, count: Any
) -> None:
    """A stack's data, scales and amaxes against its format row; what `check_copy` asks of one tensor."""
    row = format_by_name(format)
    data = own_shape(avals[0], masks[0])
    m, k = shapes.copy_extents(row, columnwise, data[1:])
    check_dtype(op, f"{arg} data ({format})", avals[0], row.data)
    scale = () if row.per_tensor else shapes.scale_shape(row, columnwise, m, k)
    check_buffer(op, f"{arg} scale_inv ({format})", avals[1], masks[1], row.scale, (count, *scale))
    if row.two_level:
        each_row = not columnwise and len(own_shape(avals[2], masks[2])) == 2
        want = (count, m) if each_row else (count,)
        check_buffer(op, f"{arg} amax ({format})", avals[2], masks[2], "float32", want)


def _sizes(avals: Any, batch: Batch, a: tuple[str, bool], b: tuple[str, bool]) -> grouped.GroupedShape:
    op, at = "grouped_gemm", copy_length(a[0])
    end = at + copy_length(b[0])
    groups = _check_offsets(op, avals[end], batch.axes[end])
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
    check_high_precision(op, "out_dtype", dtype_of(out_dtype), ())
    check_copy(op, "a", avals[:at], batch.axes[:at], *a)
    size = _sizes(avals, batch, a, b)
    enforce(size.constraints)
    depth, groups = size.kind == "depth", own_shape(avals[end], batch.axes[end])[0] - 1
    if depth:
        check_copy(op, "b", avals[at:end], batch.axes[at:end], *b)
    else:
        _check_stack(op, "b", avals[at:end], batch.axes[at:end], *b, groups)
    if has_bias:
        if depth:
            raise ValueError(f"{op} ({pair}): a product over rows has no bias")
        own = own_shape(avals[end + 1], batch.axes[end + 1])
        check_high_precision(op, "bias", avals[end + 1].dtype, own)
        check_shape(op, "bias", own, (groups, size.n))
    if has_c:
        if has_bias:
            raise ValueError(f"{op} ({pair}): a bias and an acc exclude one another")
        check_buffer(op, "acc", avals[-1], batch.axes[-1], out_dtype, size.out)
    if align not in grouped.ALIGNS:
        raise ValueError(f"{op}: align must be one of {list(grouped.ALIGNS)}, got {align}")
    if rotated and (not depth or align % 16):
        raise ValueError(
            f"{op} ({pair}): Hadamard-rotated copies mix 16 rows, so that groups must begin at multiples of 16; align "
            f"must be 16, 32 or 128, got {align}"
        )
    check_gemm_options(op, options, format_by_name(a[0]), format_by_name(b[0]))
    return [result(avals, (*batch_shape(avals, batch), *size.out), out_dtype)]


def _grouped_gemm_attributes(
    avals: Any, batch: Batch, a: tuple[str, bool], b: tuple[str, bool], alpha: str, out_dtype: str, **params: Any
) -> Any:
    rows = ((format_by_name(fmt), columnwise) for fmt, columnwise in (a, b))
    a_copy, b_copy = ((row.id, columnwise, row.two_level) for row, columnwise in rows)
    kind = _sizes(avals, batch, a, b).kind
    return ffi.grouped_gemm_attributes(batch, a_copy, b_copy, kind=kind, alpha=float.fromhex(alpha), **params)


def _grouped_gemm_finish(ctx: Any, platform: str, batch: Batch, has_c: bool, **_: Any) -> Any:
    return (in_place(batch, {len(ctx.avals_in) - 1: 0}) if has_c else {}), None


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

    `acc`: of the result's shape and dtype, without a bias; the product is added to it, in its memory where XLA may give
    that away.
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
    op, shape = "grouped_bias_grad", own_shape(dy, batch.axes[0])
    check_high_precision(op, "dy", dy.dtype, shape)
    check_high_precision(op, "the result", dtype_of(dtype), ())
    groups = _check_offsets(op, offsets, batch.axes[1])
    operands = (dy, offsets)
    return [result(operands, (*batch_shape(operands, batch), groups, shapes.rows_cols(shape)[1]), dtype)]


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
