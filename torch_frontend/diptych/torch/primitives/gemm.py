"""Products and the bias gradient on raw buffers: kernel call and fake implementation of each."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from diptych.common.gemm_options import GemmOptions
from diptych.common.ops import shapes
from diptych.core import _core
from diptych.torch.primitives.checks import (
    Copy,
    check_acc,
    check_gemm,
    format_row,
    require_device,
    require_high_precision,
    require_no_grad,
    require_out_dtype,
)
from diptych.torch.primitives.register import contiguous, define, direct, workspace, wrote


@functools.lru_cache(maxsize=4096)
def _gemm_mnk(a_format: int, a_side: bool, a: tuple[int, ...], b_format: int, b_side: bool, b: tuple[int, ...]):
    shape = shapes.gemm_shape(format_row("gemm", a_format), a_side, a, format_row("gemm", b_format), b_side, b)
    shapes.check(shape.constraints)
    return shape.m, shape.n, shape.k


def _run_gemm(
    a: Copy,
    b: Copy,
    d: Tensor,
    bias: Tensor | None,
    mnk: tuple[int, int, int],
    alpha: float,
    beta: float,
    options: tuple[bool, ...],
) -> None:
    epilogue = bias is not None or beta != 0.0
    scratch = workspace(_core.gemm_workspace_bytes(a[3], b[3], *mnk, epilogue), d.device) if d.is_cuda else None
    if bias is not None:
        bias = bias.contiguous()
    c = d if beta != 0.0 else None
    _core.gemm(*contiguous(a), *contiguous(b), d, c, bias, scratch, alpha, beta, *options)


def _gemm(
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, out_dtype: torch.dtype, *options: bool,
) -> Tensor:  # fmt: skip
    require_out_dtype("gemm", out_dtype)
    mnk = _gemm_mnk(a_format, a_columnwise, a_data.shape, b_format, b_columnwise, b_data.shape)
    d = torch.empty(mnk[0], mnk[1], dtype=out_dtype, device=a_data.device)
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    _run_gemm(a, b, d, bias, mnk, alpha, 0.0, options)
    return d


def _gemm_fake(
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, out_dtype: torch.dtype, *options: bool,
) -> Tensor:  # fmt: skip
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    m, n = check_gemm(a, b, bias, alpha, 0.0, out_dtype, GemmOptions(*options))
    return a_data.new_empty((m, n), dtype=out_dtype)


def _gemm_into(
    acc: Tensor,
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, beta: float, *options: bool,
) -> None:  # fmt: skip
    mnk = _gemm_mnk(a_format, a_columnwise, a_data.shape, b_format, b_columnwise, b_data.shape)
    check_acc(acc, mnk[0], mnk[1])
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    _run_gemm(a, b, acc, bias, mnk, alpha, beta, options)
    wrote(acc)


def _gemm_into_fake(
    acc: Tensor,
    a_data: Tensor, a_scale_inv: Tensor, a_amax: Tensor | None, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_amax: Tensor | None, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, beta: float, *options: bool,
) -> None:  # fmt: skip
    a, b = (a_data, a_scale_inv, a_amax, a_format, a_columnwise), (b_data, b_scale_inv, b_amax, b_format, b_columnwise)
    require_high_precision("gemm_into", "acc", acc)
    m, n = check_gemm(a, b, bias, alpha, beta, acc.dtype, GemmOptions(*options))
    require_device("gemm_into", a_data, acc, "acc")
    check_acc(acc, m, n)


def _bias_grad(dy: Tensor, dtype: torch.dtype) -> Tensor:
    require_high_precision("bias_grad", "dy", dy)
    require_out_dtype("bias_grad", dtype)
    m, n = shapes.rows_cols(dy.shape)
    out = torch.empty(n, dtype=dtype, device=dy.device)
    scratch = workspace(_core.bias_grad_workspace_bytes(m, n), dy.device) if dy.is_cuda else None
    _core.bias_grad(dy.contiguous(), out, scratch)
    return out


def _bias_grad_fake(dy: Tensor, dtype: torch.dtype) -> Tensor:
    require_high_precision("bias_grad", "dy", dy)
    require_out_dtype("bias_grad", dtype)
    return dy.new_empty(shapes.rows_cols(dy.shape)[1], dtype=dtype)


# Two copies, and the options of products, as schemas name them
COPIES = ", ".join(
    f"Tensor {s}_data, Tensor {s}_scale_inv, Tensor? {s}_amax, int {s}_format, bool {s}_columnwise" for s in "ab"
)
OPTIONS = ", ".join(f"bool {name}" for name in GemmOptions._fields)


_gemm_op = define(
    "gemm",
    f"({COPIES}, Tensor? bias, float alpha, ScalarType out_dtype, {OPTIONS}) -> Tensor",
    _gemm,
    _gemm_fake,
    recordable=True,
)


_gemm_into_op = define(
    "gemm_into",
    f"(Tensor(a!) acc, {COPIES}, Tensor? bias, float alpha, float beta, {OPTIONS}) -> ()",
    _gemm_into,
    _gemm_into_fake,
)


_bias_grad_op = define(
    "bias_grad", "(Tensor dy, ScalarType dtype) -> Tensor", _bias_grad, _bias_grad_fake, recordable=True
)


def gemm(a: Copy, b: Copy, bias: Tensor | None, alpha: float, out_dtype: torch.dtype, options: GemmOptions) -> Tensor:
    """alpha * op(a) @ op(b) + bias, [M, N] in out_dtype."""
    if direct(*a[:3], *b[:3], bias):
        require_no_grad("diptych::gemm", bias)
        return _gemm(*a, *b, bias, alpha, out_dtype, *options)
    return _gemm_op(*a, *b, bias, alpha, out_dtype, *options)


def gemm_into(
    acc: Tensor, a: Copy, b: Copy, bias: Tensor | None, alpha: float, beta: float, options: GemmOptions
) -> None:
    """acc [M, N] = alpha * op(a) @ op(b) + bias + beta * acc, in place."""
    if direct(acc, *a[:3], *b[:3], bias):
        require_no_grad("diptych::gemm_into", acc, bias)
        _gemm_into(acc, *a, *b, bias, alpha, beta, *options)
    else:
        _gemm_into_op(acc, *a, *b, bias, alpha, beta, *options)


def bias_grad(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of dy [..., N] over its leading dimensions, [N] in dtype."""
    if direct(dy):
        require_no_grad("diptych::bias_grad", dy)
        return _bias_grad(dy, dtype)
    return _bias_grad_op(dy, dtype)
