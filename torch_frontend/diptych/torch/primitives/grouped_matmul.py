"""Products of groups of rows in high precision: for layers outside of regions, and operands that are not quantized.

On CUDA nothing waits for the device: torch's grouped product is used where it reads offsets there (bfloat16 on Hopper
and Blackwell, extents in multiples of 8), and else every group multiplies all rows and keeps its own, which is G times
the work.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.common.errors import ShapeError
from diptych.torch.primitives.checks import describe, require_no_grad, require_size
from diptych.torch.primitives.grouped import check_rows
from diptych.torch.primitives.register import define, direct


def _check_matmul(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, depth: bool, trans_b: bool) -> list[Any]:
    """Checks the operands and returns the result's shape."""
    op, groups = "grouped_matmul", offsets.shape[0] - 1
    for arg, t in (("a", a), ("b", b)):
        check_rows(op, arg, t, offsets)
    message = f"{op}: a {describe(a)} and b {describe(b)} do not fit, in {groups} groups"
    if a.dim() != 2 or b.dim() != (2 if depth else 3):
        raise ShapeError(message)
    if depth:
        require_size(a.shape[0], b.shape[0], lambda: message)
        return [groups, a.shape[1], b.shape[1]]
    require_size(b.shape[0], groups, lambda: message)
    require_size(a.shape[1], b.shape[2 if trans_b else 1], lambda: message)
    return [a.shape[0], b.shape[1 if trans_b else 2]]


def _grouped_matmul_fake(
    a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, depth: bool, trans_b: bool
) -> Tensor:
    return a.new_empty(_check_matmul(a, b, offsets, bias, depth, trans_b))


def _grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, depth: bool, trans_b: bool) -> Tensor:
    shape = _check_matmul(a, b, offsets, bias, depth, trans_b)
    with torch.amp.autocast(a.device.type, enabled=False):
        if a.is_cuda:
            return _matmul_on_device(a, b, offsets, bias, depth, trans_b)
        return _matmul_on_host(a, b, offsets, bias, depth, trans_b, a.new_zeros(shape))


def _matmul_on_host(
    a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, depth: bool, trans_b: bool, out: Tensor
) -> Tensor:
    """Multiplies group by group, where the host can read offsets."""
    op, at, rows = "grouped_matmul", offsets.tolist(), a.shape[0]
    for i, (first, last) in enumerate(itertools.pairwise(at)):
        if not 0 <= first <= last <= rows:
            raise ValueError(f"{op}: group {i} is rows {first} to {last} of {rows}")
        part = a[first:last]
        if depth:
            out[i] = part.t() @ b[first:last]
        elif trans_b:
            out[first:last] = F.linear(part, b[i], None if bias is None else bias[i])
        else:
            out[first:last] = part @ b[i]
    return out


def _matmul_on_device(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, depth: bool, trans_b: bool) -> Tensor:
    """Multiplies without waiting for the device: by torch's grouped product if that does not wait, else by a masked
    product for each group."""
    rows, groups = a.shape[0], offsets.shape[0] - 1
    at = offsets.clamp(0, rows).cummax(0).values
    group = torch.searchsorted(at, torch.arange(rows, dtype=torch.int32, device=a.device), right=True) - 1
    group = torch.where(group < groups, group, -1)[:, None]  # -1: in no group
    if _native(a, b, depth):  # torch counts the rows before at[0] in its first group
        if depth:
            made = F.grouped_mm(torch.where(group >= 0, a, 0).t(), torch.where(group >= 0, b, 0), offs=at[1:])
            return torch.where((at.diff() > 0)[:, None, None], made, 0)
        y = F.grouped_mm(a, b.transpose(1, 2) if trans_b else b, offs=at[1:])
        if bias is not None:
            y = y + bias[group[:, 0].clamp(min=0)]
        return torch.where(group >= 0, y, 0)
    if depth:
        each = [torch.where(group == g, a, 0).t() @ torch.where(group == g, b, 0) for g in range(groups)]
        return torch.stack(each) if each else a.new_empty((0, a.shape[1], b.shape[1]))
    y = a.new_zeros((rows, b.shape[1 if trans_b else 2]))
    for g in range(groups):
        made = F.linear(a, b[g], None if bias is None else bias[g]) if trans_b else a @ b[g]
        y = torch.where(group == g, made, y)
    return y


def _native(a: Tensor, b: Tensor, depth: bool) -> bool:
    """Whether torch's own grouped product takes these operands without waiting for the offsets."""
    if not hasattr(F, "grouped_mm") or a.dtype != torch.bfloat16 or 0 in (*a.shape, *b.shape):
        return False
    whole = all([t.is_contiguous() and t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in (a, b)])
    whole = whole and (depth or b.shape[1] % 8 == 0)
    return whole and torch.cuda.get_device_capability(a.device)[0] in (9, 10)


_grouped_matmul_op = define(
    "grouped_matmul",
    "(Tensor a, Tensor b, Tensor offsets, Tensor? bias, bool depth, bool trans_b) -> Tensor",
    _grouped_matmul,
    _grouped_matmul_fake,
)


def grouped_matmul(
    a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None, depth: bool = False, trans_b: bool = True
) -> Tensor:
    """Grouped products in high precision, of tensors of one dtype: a [R, K] @ b [G, N, K].T (or [G, K, N]) + bias
    [G, N]; `depth`: a [R, M].T @ b [R, N], [G, M, N]. Rows in no group and products over none are 0."""
    if direct(a, b, offsets, bias):
        require_no_grad("diptych::grouped_matmul", a, b, bias)
        return _grouped_matmul(a, b, offsets, bias, depth, trans_b)
    return _grouped_matmul_op(a, b, offsets, bias, depth, trans_b)
