"""The results of ranks that compute together, computed by one process (NUMERICS 9).

A tensor that is cut over ranks is quantized as a whole and its copies are cut: bytes and scales of a rank are a part of
the whole's, and joined along the same axis they are the whole again. Where the parts lie:

| | cut along dim 0 (rows) | cut along dim 1 (columns) |
|---|---|---|
| rowwise data and scales | axis 0 | axis 1 |
| columnwise, transposed `[K, M]` | axis 1 | axis 0 |
| columnwise, row-major (MXFP8) | axis 0 | axis 1 |
| scale of a per-tensor format, tensor amax | every rank has the whole tensor's | the same |
| amax per row | axis 0 | every rank has all |

Extents along a cut are `size` times whole blocks of each copy that is wanted, else ValueError: a block is never cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from oracle.copies import quantize
from oracle.formats import Copy, Fmt, Quantized, cast, check_ieee, pack, unpack
from oracle.products import _cast_error, gemm_cpu

# --- A tensor that is cut over ranks ---


def cut(copy: Copy, size: int, dim: int = 0, *, square: bool = False) -> list[Copy]:
    """Each rank's part of a copy of `[M, K]`: `[M / size, K]` (dim 0) or `[M, K / size]` (dim 1)."""
    if size == 1:
        return [copy]
    axis, fmt = _axis(copy, dim), copy.fmt
    block = fmt.block_cols if square else fmt.block(copy.columnwise)[axis]
    if copy.shape[dim] % (size * max(block, 1)):
        raise ValueError(f"{copy.shape[dim]} elements along dim {dim} are not {size} times whole blocks of {block}")
    data = np.split(copy.data, size, axis)
    scales = [copy.scale_inv] * size if fmt.one_scale else np.split(copy.scale_inv, size, axis)
    amaxes = np.split(copy.amax, size) if dim == 0 and np.size(copy.amax) > 1 else [copy.amax] * size
    return [
        dataclasses.replace(copy, data=d, scale_inv=s, amax=a) for d, s, a in zip(data, scales, amaxes, strict=True)
    ]


def join(parts: Sequence[Copy], dim: int = 0) -> Copy:
    """The whole tensor's copy from each rank's, gathered in rank order."""
    first, axis = parts[0], _axis(parts[0], dim)
    scale, amax = first.scale_inv, first.amax
    if first.fmt.one_scale:
        assert all(np.array_equal(p.scale_inv, scale) for p in parts), "ranks quantized with scales of their own"
    else:
        scale = np.concatenate([p.scale_inv for p in parts], axis)
    if dim == 0 and np.size(amax) == first.shape[0] > 1:
        amax = np.concatenate([p.amax for p in parts])
    else:
        assert amax is None or all(np.array_equal(p.amax, amax) for p in parts), "ranks have amaxes of their own"
    return dataclasses.replace(first, data=np.concatenate([p.data for p in parts], axis), scale_inv=scale, amax=amax)


def _axis(copy: Copy, dim: int) -> int:
    return 1 - dim if copy.transposed else dim


def quantize_cut(
    shards: Sequence[np.ndarray], fmt: Fmt | str, dim: int = 0, *, columnwise: bool = True, **options: Any
) -> list[Quantized]:
    """Each rank's part of a tensor whose shards `[M / size, K]` (dim 1: `[M, K / size]`) ranks hold.

    `options`: of `oracle.quantize`; a given scale, amax or noise is the whole tensor's.
    """
    whole = quantize(np.concatenate(shards, dim), fmt, columnwise=columnwise, **options)
    parts: list[dict[str, Any]] = [{} for _ in shards]
    for which in ("rowwise", "columnwise"):
        if getattr(whole, f"{which}_data") is None:
            continue
        copies = cut(whole.copy(which == "columnwise"), len(shards), dim, square=options.get("square", False))
        for part, copy in zip(parts, copies, strict=True):
            part |= {f"{which}_data": copy.data, f"{which}_scale_inv": copy.scale_inv}
            if copy.amax is not None:
                part["amax" if which == "rowwise" else "columnwise_amax"] = copy.amax
            elif whole.amax is not None:
                part["amax"] = whole.amax
    return [Quantized(whole.fmt, **part) for part in parts]


def one_copy_is_gathered(fmt: Fmt, square: bool = False) -> bool:
    """Whether a gathered weight's columnwise copy follows from its rowwise one: where both have the same amaxes."""
    return square or fmt.block_rows == fmt.block_cols


def columnwise_of(rowwise: Copy, *, square: bool = False) -> Copy:
    """The columnwise copy of a gathered weight, from its rowwise copy alone."""
    fmt, data, scale = rowwise.fmt, rowwise.data, rowwise.scale_inv
    assert one_copy_is_gathered(fmt, square), "a copy with 1-D blocks is never made from the other"
    if fmt.columnwise_transposed:
        data = pack(unpack(data).T) if fmt.pack == 2 else data.T
    if square:  # a rowwise copy repeats a square's scale over its rows, a columnwise one over its columns
        of_squares, cols = scale[:: fmt.block_cols], rowwise.shape[1]
        if fmt.columnwise_transposed:
            scale = of_squares.T.repeat(fmt.block_cols, axis=0)[:cols]
        else:
            scale = of_squares.repeat(fmt.block_cols, axis=1)[:, :cols]
    elif not fmt.one_scale:
        scale = scale.T
    return dataclasses.replace(rowwise, columnwise=True, data=data, scale_inv=scale)


# --- Sums over ranks ---


def sum_partials(partials: Sequence[np.ndarray], bias: np.ndarray | None = None) -> np.ndarray:
    """Products over parts of a cut K, each rounded to the op's output dtype: float32 sums in ascending rank that begin
    with rank 0's product, then the bias, then one rounding to that dtype."""
    check_ieee()
    dtype, total = partials[0].dtype, partials[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for partial in partials[1:]:
            total = total + partial.astype(np.float32)
        if bias is not None:
            total = total + np.asarray(bias).astype(np.float32)
    return cast(total, dtype)


def sum_gradients(gradients: Sequence[np.ndarray], *, average: bool = True) -> np.ndarray:
    """Returns the gradient that FSDP makes of each rank's gradients: their sum in rank order, in their own dtype, each
    addition rounded; the average is that times 1 / size, exact where the size is a power of two."""
    check_ieee()
    total = gradients[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for gradient in gradients[1:]:
            total = cast(total + gradient.astype(np.float32), gradient.dtype).astype(np.float32)
        if average:
            total = total * np.float32(1 / len(gradients))
    return cast(total, gradients[0].dtype)


def sum_gradients_tolerance(gradients: Sequence[np.ndarray], *, average: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The float64 sum and a bound on |framework - it|: any order of additions, each rounded to the gradients' dtype.

    A gradient passes at most size - 1 additions, and the average's rounding. Two gradients have the same sum in bits.
    """
    wide = np.stack(gradients).astype(np.float64)
    factor = 1 / len(wide) if average else 1.0
    one = _cast_error(np.abs(wide).sum(axis=0) * factor, gradients[0].dtype)
    return wide.sum(axis=0) * factor, (1.01 * (len(wide) - 1) + average) * one


# --- Linear layers, y = x @ w.T + bias, with x [M, K], w [N, K] and dy [M, N] quantized as whole tensors ---


def column_forward(
    x: Copy, w: Copy, size: int, bias: np.ndarray | None = None, out_dtype: Any = np.float32
) -> list[np.ndarray]:
    """Each rank's columns `[M, N / size]` of y. `w` and bias are cut along N; `x` is on every rank, or gathered from
    the ranks' rows: then its amax is that of all of them. Both copies are rowwise."""
    biases = [None] * size if bias is None else np.split(bias, size)
    return [gemm_cpu(x, w_, bias=b, out_dtype=out_dtype) for w_, b in zip(cut(w, size), biases, strict=True)]


def column_backward(
    dy: Quantized, x: Copy, w: Copy, size: int, dx_dtype: Any = np.float32, dw_dtype: Any = np.float32
) -> tuple[np.ndarray, list[np.ndarray]]:
    """dx `[M, K]`, whose K products are cut along N (with sequence parallelism a rank keeps its rows), and each rank's
    dw `[N / size, K]`. dy is cut along N, with the amax of all of it; `x` and `w` are columnwise copies."""
    cuts = zip(cut(dy.copy(), size, 1), cut(w, size), strict=True)
    dx = sum_partials([gemm_cpu(dy_, w_, out_dtype=dx_dtype) for dy_, w_ in cuts])
    return dx, [gemm_cpu(dy_, x, out_dtype=dw_dtype) for dy_ in cut(dy.copy(columnwise=True), size, 1)]


def row_forward(x: Copy, w: Copy, size: int, bias: np.ndarray | None = None, out_dtype: Any = np.float32) -> np.ndarray:
    """y `[M, N]` (with sequence parallelism a rank keeps its rows). `x` and `w`, rowwise, are cut along K, with the
    amax of the whole tensor. One rank cuts nothing: its bias joins the product before the only rounding."""
    if size == 1:
        return gemm_cpu(x, w, bias=bias, out_dtype=out_dtype)
    cuts = zip(cut(x, size, 1), cut(w, size, 1), strict=True)
    return sum_partials([gemm_cpu(x_, w_, out_dtype=out_dtype) for x_, w_ in cuts], bias)


def row_backward(
    dy: Quantized, x: Copy, w: Copy, size: int, dx_dtype: Any = np.float32, dw_dtype: Any = np.float32
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each rank's dx `[M, K / size]` and dw `[N, K / size]`. dy is on every rank, or gathered from the ranks' rows;
    `x` and `w`, columnwise, are cut along K."""
    dx = [gemm_cpu(dy.copy(), w_, out_dtype=dx_dtype) for w_ in cut(w, size, 1)]
    return dx, [gemm_cpu(dy.copy(columnwise=True), x_, out_dtype=dw_dtype) for x_ in cut(x, size, 1)]
