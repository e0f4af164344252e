"""The frameworks' operations of `diptych.lab.replay.table` in plain torch.

Each function is self-contained, so that its source text runs in a script that begins with these imports. Its arguments
are the row's operands, followed by the row's options as keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def linear(x, weight, bias=None, *, dtype):
    result = getattr(torch, dtype)
    given = [t for t in (x, weight, bias) if t is not None]
    if any(t.dtype != result for t in given) or not result.is_floating_point:
        if not result.is_floating_point:
            work = torch.int64
        elif torch.float64 in [result, *[t.dtype for t in given]]:
            work = torch.float64
        else:
            work = torch.float32  # a product of two narrower floats is exact in float32
        x, weight, bias = x.to(work), weight.to(work), None if bias is None else bias.to(work)
    return F.linear(x, weight, bias).to(result)


def matmul(a, b, *, equation, dtype):
    result = getattr(torch, dtype)
    if a.dtype != result or b.dtype != result or not result.is_floating_point:
        if not result.is_floating_point:
            work = torch.int64
        elif torch.float64 in (result, a.dtype, b.dtype):
            work = torch.float64
        else:
            work = torch.float32  # a product of two narrower floats is exact in float32
        a, b = a.to(work), b.to(work)
    terms, out = equation.split("->")
    left, right = terms.split(",")
    k = "".join([c for c in left if c in right and c not in out])
    m = "".join([c for c in out if c not in right])[-1:]
    n = "".join([c for c in out if c not in left])[-1:]
    batch = out[: len(out) - len(m + n)]
    of_a, of_b = ("".join([c for c in batch if c in term]) for term in (left, right))
    simple = len(k) == 1 and out == batch + m + n and batch.endswith(of_a) and batch.endswith(of_b)
    of_a, of_b = of_a + m + k, of_b + k + n
    simple = simple and sorted(of_a) == sorted(left) and sorted(of_b) == sorted(right)
    if simple and (m or left == k) and (n or right == k):  # einsum may add up in another order
        a, b = a.permute([left.index(c) for c in of_a]), b.permute([right.index(c) for c in of_b])
        return torch.matmul(a, b).to(result)
    return torch.einsum(equation, a, b).to(result)


def embedding(ids, table):
    return F.embedding(ids.to(torch.int64), table)


def conv(x, weight, bias=None, *, layout, strides, dilation, input_dilation, groups, padding):
    of_x, of_weight, of_out = layout.split(",")
    axes = "".join(sorted(of_x.replace("N", "").replace("C", "")))
    x = x.permute([of_x.index(c) for c in "NC" + axes])
    weight = weight.permute([of_weight.index(c) for c in "OI" + axes])
    if any(n != 1 for n in input_dilation):
        sizes = [max((n - 1) * d + 1, 0) for n, d in zip(x.shape[2:], input_dilation, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        spread[(..., *[slice(None, None, d) for d in input_dilation])] = x
        x = spread
    both = [max(min(low, high), 0) for low, high in padding]  # torch pads both ends alike; `rest` is padded before
    rest = [(low - n, high - n) for (low, high), n in zip(padding, both, strict=True)]
    if any(n for pair in rest for n in pair):
        x = F.pad(x, [n for pair in reversed(rest) for n in pair])
    run = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(axes)]
    out = run(x, weight, bias, strides, both, dilation, groups)
    return out.permute([("NC" + axes).index(c) for c in of_out])


def softmax(x, *, axis):
    return torch.softmax(x, axis)


def log_softmax(x, *, axis):
    return torch.log_softmax(x, axis)


def layer_norm(x, weight=None, bias=None, *, axes, eps):
    work = x.dtype
    for t in (weight, bias):
        work = work if t is None else torch.promote_types(work, t.dtype)
    weight, bias = (None if t is None else t.to(work) for t in (weight, bias))
    return F.layer_norm(x.to(work), x.shape[x.ndim - axes :], weight, bias, eps).to(x.dtype)


def rms_norm(x, weight=None, *, axes, eps):
    work = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    weight = None if weight is None else weight.to(work)
    return F.rms_norm(x.to(work), x.shape[x.ndim - axes :], weight, eps).to(x.dtype)


def gelu(x, *, approximate):
    return F.gelu(x, approximate="tanh" if approximate else "none")


def silu(x):
    return F.silu(x)


def add(a, b):
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(a.dtype)
    if signed is not None and a.dtype == b.dtype:  # torch adds no unsigned integers; signed sums have the same bits
        return (a.view(signed) + b.view(signed)).view(a.dtype)
    return a + b


def mul(a, b):
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(a.dtype)
    if signed is not None and a.dtype == b.dtype:  # torch multiplies no unsigned integers; signed ones have equal bits
        return (a.view(signed) * b.view(signed)).view(a.dtype)
    return a * b


def rotary(x, cos, sin, *, interleaved):
    if interleaved:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    return x * cos + rotated * sin


def cross_entropy(logits, targets, *, axis, reduction, ignore_index):
    logits = logits.movedim(axis, min(logits.ndim - 1, 1))
    ignored = torch.iinfo(torch.int64).min if ignore_index is None else ignore_index  # the minimum is never a target
    return F.cross_entropy(logits, targets.to(torch.int64), ignore_index=ignored, reduction=reduction)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    f.__name__: f
    for f in (
        linear, matmul, embedding, conv, softmax, log_softmax, layer_norm, rms_norm, gelu, silu, add, mul, rotary,
        cross_entropy,
    )
}  # fmt: skip
