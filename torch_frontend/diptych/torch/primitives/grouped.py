"""The ops on stacks and on groups of rows, on raw buffers, beside `primitives`.

A copy of a stack of G tensors is a `Copy` whose tensors have a leading G; what is [1] for a tensor is [G] there. Group
g is the rows offsets[g] <= r < offsets[g + 1]. No op waits for the device: on the CPU offsets that descend or leave the
tensor are refused, on CUDA each counts as at least the one before it and at most R. The ops are pure but for
`grouped_gemm_into`, and have no derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops import grouped, shapes
from diptych.common.ops.gemm import require_factors
from diptych.common.quantizers import RHT, ROW_AMAX, Float8Quantizer, Quantizer
from diptych.core import _core
from diptych.torch.primitives import constants
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import (
    Copy,
    check_quantize,
    copy_operands,
    describe,
    dtype_name,
    enforce,
    format_row,
    once,
    operand,
    operand_or_none,
    require_device,
    require_high_precision,
    require_no_grad,
    require_out_dtype,
    require_size,
)
from diptych.torch.primitives.gemm import COPIES, OPTIONS
from diptych.torch.primitives.register import allocator, contiguous, define, direct, workspace, wrote
from diptych.torch.private.graphs import run_eagerly

_KINDS = _core.group_kinds()
_COMPUTE, _GIVEN = 0, 1  # AmaxMode in ops.h

# --- checks ----------------------------------------------------------------------------------------------------------


def require_offsets(op: str, first: Tensor, offsets: Tensor) -> None:
    """Formats a message only on failure, since each eager call comes this way."""
    count = offsets.shape[0] if offsets.dim() == 1 else 0
    if offsets.dtype != torch.int32 or type(count) is not int or count < 1:
        enforce(grouped.offsets_of(op, operand("offsets", offsets))[1])
    require_device(op, first, offsets, "offsets")


def check_stack(x: Tensor, quantizer: Quantizer, *given: Tensor | None) -> None:
    """`given`: amax, columnwise_amax, scale and rng of each tensor."""
    op = "quantize_stack"
    if quantizer.implementation() is not None:
        raise ArgumentError(f"{op}: {type(quantizer).__name__} quantizes on its own; call quantize for each tensor")
    each = grouped.stack_shape(x.shape)
    for arg, t in zip(("amax", "columnwise_amax", "scale", "rng"), given, strict=True):
        if t is None:
            continue
        if t.dim() == 0:
            raise ShapeError(f"{op}: {arg} must have one entry for each tensor of {describe(x)}, got {describe(t)}")
        message = f"{op}: {arg} must have one entry for each tensor of {describe(x)}, got {describe(t)}"
        require_size(t.shape[0], x.shape[0], lambda message=message: message)
    if x.shape[0] > 0:
        check_quantize(x[0], quantizer, *[None if t is None else t[0] for t in given], op=op)
    else:
        first = [None if t is None else t.new_empty(t.shape[1:]) for t in given]
        check_quantize(x.new_empty(each), quantizer, *first, op=op)


def _check_grouped(
    a: Copy,
    b: Copy,
    offsets: Tensor,
    bias: Tensor | None,
    align: int,
    rotated: bool,
    alpha: float,
    out_dtype: torch.dtype,
    options: GemmOptions,
) -> grouped.GroupedShape:
    """Makes the core's checks of a product, except those of the offsets' values."""
    op = "grouped_gemm"
    require_device(op, a[0], offsets, "offsets")
    require_device(op, a[0], b[0], "b")
    require_device(op, a[0], bias, "bias")
    named = copy_operands(op, "a", a), copy_operands(op, "b", b), operand("offsets", offsets)
    shape = grouped.grouped_gemm(*named, operand_or_none("bias", bias), dtype_name(out_dtype), align, rotated, options)
    enforce(shape.constraints)
    require_factors(op, alpha=alpha)
    return shape


# --- stacks ----------------------------------------------------------------------------------------------------------

_layouts: dict[Any, tuple[tuple[str, tuple[int, ...], Callable[..., Tensor]], ...]] = {}


def _layout(x: Tensor, quantizer: Quantizer) -> tuple[tuple[str, tuple[int, ...], Callable[..., Tensor]], ...]:
    """(name, shape, allocator) of each buffer; as `register.layout`."""
    key = (x.shape, quantizer.spec, quantizer.rowwise, quantizer.columnwise, x.device)
    found = _layouts.get(key)
    if found is None:
        shapes.check(shapes.quantize_constraints(grouped.stack_shape(x.shape), quantizer))
        found = tuple(
            (b.name, b.shape, allocator(b.dtype, x.device)) for b in grouped.stack_buffers(x.shape, quantizer)
        )
        if len(_layouts) >= 4096:
            _layouts.clear()
        _layouts[key] = found
    return found


_NONE: dict[str, Tensor | None] = dict.fromkeys(
    ("amax", "columnwise_amax", "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
)


def _quantize_stack(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> list[Tensor]:
    given = amax, columnwise_amax, scale, rng
    check = functools.partial(check_stack, x, quantizer, *given)
    once(check, "quantize_stack", x, type(quantizer), quantizer.spec, quantizer.rowwise, quantizer.columnwise, *given)
    buffers: dict[str, Tensor | None] = dict(_NONE)
    out = []
    for name, shape, new in _layout(x, quantizer):
        buffers[name] = t = new(shape)
        out.append(t)
    mode = _COMPUTE
    for name, given in (("amax", amax), ("columnwise_amax", columnwise_amax)):
        t = buffers[name]
        if given is not None and t is not None:
            mode = _GIVEN
            t.copy_(given.reshape(t.shape))
    format_id, flags, eps = quantizer.spec
    scale = None if scale is None else scale.contiguous()
    rng = None if rng is None else rng.contiguous()
    _core.quantize(
        x.contiguous(), format_id, flags, eps, mode, scale=scale, rng=rng, stack=True,
        **buffers,  # type: ignore[arg-type]
    )  # fmt: skip
    return out


def _quantize_stack_fake(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> list[Tensor]:
    check_stack(x, quantizer, amax, columnwise_amax, scale, rng)
    shape = tuple(x.shape)
    enforce(shapes.quantize_constraints(shape[1:], quantizer))
    return [x.new_empty(b.shape, dtype=getattr(torch, b.dtype)) for b in grouped.stack_buffers(shape, quantizer)]


def _tensor_of(stack: Copy, g: int) -> Copy:
    """Returns the copy of tensor g from a stack's copy."""
    data, scale_inv, amax, format_id, columnwise = stack
    scale = scale_inv[g]
    return (
        data[g],
        scale.reshape(1) if scale.dim() == 0 else scale,
        None if amax is None else amax[g].reshape(-1),
        format_id,
        columnwise,
    )


def tensors_of(stack: Copy) -> list[Copy]:
    """Returns the copies of a stack's tensors, as views."""
    return [_tensor_of(stack, g) for g in range(stack[0].shape[0])]


def stack_values(stack: Copy, dtype: torch.dtype) -> Tensor:
    """The values of one copy of a stack of matrices, [G, M, K]."""
    return torch.stack([quantize_ops.dequantize(copy, dtype) for copy in tensors_of(stack)])


# --- products --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _shape(
    groups: int, a_format: int, a_side: bool, a: tuple[int, ...], b_format: int, b_side: bool, b: tuple[int, ...]
) -> grouped.GroupedShape:
    op = "grouped_gemm"
    formats = format_row(op, a_format), format_row(op, b_format)
    shape = grouped.grouped_shape(groups, formats[0], a_side, a, formats[1], b_side, b)
    shapes.check(shape.constraints)
    return shape


def _shape_of(a: Copy, b: Copy, offsets: Tensor) -> grouped.GroupedShape:
    require_offsets("grouped_gemm", a[0], offsets)
    return _shape(offsets.shape[0] - 1, a[3], a[4], a[0].shape, b[3], b[4], b[0].shape)


def _product(
    a: Copy,
    b: Copy,
    offsets: Tensor,
    d: Tensor,
    bias: Tensor | None,
    shape: grouped.GroupedShape,
    align: int,
    rotated: bool,
    factors: tuple[float, float],
    options: tuple[bool, ...],
) -> None:
    """d = alpha * the product + bias + beta * d. `factors`: alpha and beta."""
    kind, scratch = _KINDS[shape.kind], None
    if d.is_cuda:
        sizes = shape.out[-2], shape.n, shape.k, offsets.shape[0] - 1
        scratch = workspace(_core.grouped_gemm_workspace_bytes(a[3], b[3], kind, *sizes), d.device)
    bias = None if bias is None else bias.contiguous()
    c = d if factors[1] != 0.0 else None
    _core.grouped_gemm(
        *contiguous(a), *contiguous(b), offsets.contiguous(), d, c, bias, scratch, kind, align, rotated, *factors,
        *options,
    )  # fmt: skip


def _grouped_gemm(
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    offsets: Tensor, bias: Tensor | None, align: int, rotated: bool, alpha: float, out_dtype: torch.dtype,
    *options: bool,
) -> Tensor:  # fmt: skip
    require_out_dtype("grouped_gemm", out_dtype)
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    shape = _shape_of(a, b, offsets)
    d = torch.empty(shape.out, dtype=out_dtype, device=a_data.device)
    _product(a, b, offsets, d, bias, shape, align, rotated, (alpha, 0.0), options)
    return d


def _grouped_gemm_fake(
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    offsets: Tensor, bias: Tensor | None, align: int, rotated: bool, alpha: float, out_dtype: torch.dtype,
    *options: bool,
) -> Tensor:  # fmt: skip
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    shape = _check_grouped(a, b, offsets, bias, align, rotated, alpha, out_dtype, GemmOptions(*options))
    return a_data.new_empty(shape.out, dtype=out_dtype)


def _check_acc(acc: Tensor, shape: grouped.GroupedShape) -> None:
    op = "grouped_gemm_into"
    require_high_precision(op, "acc", acc)
    message = f"{op}: acc must be contiguous {list(shape.out)}, got {describe(acc)}"
    if acc.dim() != len(shape.out) or not acc.is_contiguous():
        raise ShapeError(message)
    for found, wanted in zip(acc.shape, shape.out, strict=True):
        require_size(found, wanted, lambda: message)


def _grouped_gemm_into(
    acc: Tensor,
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    offsets: Tensor, align: int, rotated: bool, *options: bool,
) -> None:  # fmt: skip
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    shape = _shape_of(a, b, offsets)
    _check_acc(acc, shape)
    _product(a, b, offsets, acc, None, shape, align, rotated, (1.0, 1.0), options)
    wrote(acc)


def _grouped_gemm_into_fake(
    acc: Tensor,
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    offsets: Tensor, align: int, rotated: bool, *options: bool,
) -> None:  # fmt: skip
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    require_high_precision("grouped_gemm_into", "acc", acc)
    _check_acc(acc, _check_grouped(a, b, offsets, None, align, rotated, 1.0, acc.dtype, GemmOptions(*options)))


# --- sums ------------------------------------------------------------------------------------------------------------


def check_rows(op: str, arg: str, t: Tensor, offsets: Tensor) -> None:
    require_high_precision(op, arg, t)
    require_offsets(op, t, offsets)


def _grouped_bias_grad(dy: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    check_rows("grouped_bias_grad", "dy", dy, offsets)
    require_out_dtype("grouped_bias_grad", dtype)
    groups, (rows, n) = offsets.shape[0] - 1, shapes.rows_cols(dy.shape)
    out = torch.empty(groups, n, dtype=dtype, device=dy.device)
    scratch = None
    if dy.is_cuda:
        scratch = workspace(_core.grouped_bias_grad_workspace_bytes(rows, n, groups), dy.device)
    _core.grouped_bias_grad(dy.contiguous(), offsets.contiguous(), out, scratch)
    return out


def _grouped_bias_grad_fake(dy: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    require_out_dtype("grouped_bias_grad", dtype)
    check_rows("grouped_bias_grad", "dy", dy, offsets)
    return dy.new_empty((offsets.shape[0] - 1, shapes.rows_cols(dy.shape)[1]), dtype=dtype)


# --- registration ----------------------------------------------------------------------------------------------------

_grouped_gemm_op = define(
    "grouped_gemm",
    f"({COPIES}, Tensor offsets, Tensor? bias, int align, bool rotated, float alpha, ScalarType out_dtype, "
    f"{OPTIONS}) -> Tensor",
    _grouped_gemm,
    _grouped_gemm_fake,
    recordable=True,
)
_grouped_gemm_into_op = define(
    "grouped_gemm_into",
    f"(Tensor(a!) acc, {COPIES}, Tensor offsets, int align, bool rotated, {OPTIONS}) -> ()",
    _grouped_gemm_into,
    _grouped_gemm_into_fake,
)
_grouped_bias_grad_op = define(
    "grouped_bias_grad",
    "(Tensor dy, Tensor offsets, ScalarType dtype) -> Tensor",
    _grouped_bias_grad,
    _grouped_bias_grad_fake,
)
_quantize_stack_op: Callable[..., list[Tensor]]
if constants.AVAILABLE:
    _quantize_stack_op = define(
        "quantize_stack",
        f"(Tensor x, {constants.schema_type(Float8Quantizer)} quantizer, Tensor? amax=None, "
        "Tensor? columnwise_amax=None, Tensor? scale=None, Tensor? rng=None) -> Tensor[]",
        _quantize_stack,
        _quantize_stack_fake,
        recordable=True,
    )
else:  # pragma: no cover - no supported torch
    _quantize_stack_op = run_eagerly(_quantize_stack)


# --- the ops as the rest of this package calls them ------------------------------------------------------------------


def quantize_stack(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> list[Tensor]:
    """The buffers of `grouped.stack_buffers`, in its order, for x [G, ..., K]; the rest as the op `quantize`, with
    a leading G."""
    if direct(x, amax, columnwise_amax, scale, rng):
        require_no_grad("diptych::quantize_stack", x, amax, columnwise_amax, scale)
        return _quantize_stack(x, quantizer, amax, columnwise_amax, scale, rng)
    return _quantize_stack_op(x, quantizer, amax, columnwise_amax, scale, rng)


def empty_stack(shape: tuple[int, ...], quantizer: Quantizer, device: torch.device | str) -> list[Tensor]:
    """The buffers that `quantize_stack` fills for a stack of this shape, uninitialized."""
    buffers = grouped.stack_buffers(shape, quantizer)
    return [torch.empty(b.shape, dtype=getattr(torch, b.dtype), device=device) for b in buffers]


def amaxes(x: Tensor, flags: int = 0, *, columnwise: Literal[True]) -> tuple[Tensor, Tensor]:
    """The op `amax` of each tensor of a stack [G, ..., K]: two of [G, 1], with ROW_AMAX the first is [G, M]."""
    if flags & RHT and x.shape[0] > 0:  # the core has no amaxes of parts of a rotated tensor
        each = [quantize_ops.amax(t, flags, columnwise=columnwise) for t in x.unbind()]
        return torch.stack([a for a, _ in each]), torch.stack([c for _, c in each])
    rows = quantize_ops.amax(x, ROW_AMAX).view(x.shape[:-1]).flatten(1)
    bits = F.pad(rows.view(torch.int32), (1, 0))  # as `max_over` does; padded because there may be no row
    whole = bits.amax(1, keepdim=True).view(torch.float32)
    return rows if flags & ROW_AMAX else whole, whole


def grouped_gemm(
    a: Copy,
    b: Copy,
    offsets: Tensor,
    bias: Tensor | None,
    align: int,
    rotated: bool,
    alpha: float,
    out_dtype: torch.dtype,
    options: GemmOptions,
) -> Tensor:
    """[R, N] of a rowwise a and a stack b, or [G, M, N] of columnwise copies, in out_dtype. `align`: of ALIGNS."""
    if direct(*a[:3], *b[:3], offsets, bias):
        require_no_grad("diptych::grouped_gemm", bias)
        return _grouped_gemm(*a, *b, offsets, bias, align, rotated, alpha, out_dtype, *options)
    return _grouped_gemm_op(*a, *b, offsets, bias, align, rotated, alpha, out_dtype, *options)


def grouped_gemm_into(
    acc: Tensor, a: Copy, b: Copy, offsets: Tensor, align: int, rotated: bool, options: GemmOptions
) -> None:
    """acc [G, M, N] += the product over the rows of each group, in place."""
    if direct(acc, *a[:3], *b[:3], offsets):
        require_no_grad("diptych::grouped_gemm_into", acc)
        _grouped_gemm_into(acc, *a, *b, offsets, align, rotated, *options)
    else:
        _grouped_gemm_into_op(acc, *a, *b, offsets, align, rotated, *options)


def grouped_bias_grad(dy: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each group's rows of dy [..., N], [G, N] in dtype."""
    if direct(dy, offsets):
        require_no_grad("diptych::grouped_bias_grad", dy)
        return _grouped_bias_grad(dy, offsets, dtype)
    return _grouped_bias_grad_op(dy, offsets, dtype)
