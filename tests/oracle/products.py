"""gemm and bias_grad: the CPU's bits, the float64 reference, and how far a device may be from it (NUMERICS 6, 7)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from oracle.copies import scale32, values
from oracle.formats import Copy, cast, check_ieee, fold


def _operand(copy: Copy) -> tuple[np.ndarray, np.ndarray, int]:
    """Values `[outer, K]`, scales `[outer, blocks]` and the block length along K (the reduced axis) of one operand.

    A rowwise copy reduces over its columns; a columnwise copy over its tensor's rows.
    """
    data, scale = values(copy), scale32(copy)
    if copy.columnwise and not copy.fmt.columnwise_transposed:
        data, scale = data.T, scale.T
    outer, k = data.shape
    if copy.fmt.one_scale:
        return data, np.broadcast_to(scale.reshape(1, 1), (outer, 1)), max(k, 1)
    scale = scale.repeat(copy.fmt.block_rows or outer, axis=0)[:outer]
    return data, scale, copy.fmt.block_cols or max(k, 1)


def full_alpha(alpha: float, a: Copy, b: Copy) -> np.ndarray:
    """alpha with the amaxes of two_level operands, float32 `[M or 1, N or 1]`, each operation rounded."""
    r, count = np.full((1, 1), alpha, np.float32), 0
    with np.errstate(all="ignore"):
        for copy, shape in ((a, (-1, 1)), (b, (1, -1))):
            if copy.fmt.rule == "two_level":
                r, count = r * np.asarray(copy.amax, np.float32).reshape(shape), count + 1
        if count:
            r = r * np.float32(1 / (36 * 448 * 448) if count == 2 else 1 / 2688)
    assert r.dtype == np.float32
    return r


def gemm_cpu(a: Copy, b: Copy, *, alpha=1.0, bias=None, beta=0.0, c=None, out_dtype: Any = np.float32) -> np.ndarray:
    """The CPU's `[M, N]` product, bit for bit (NUMERICS 7).

    A product of two elements is exact in float32 (8 significant bits), so fma(a, b, p) is p + a * b.
    """
    check_ieee()
    av, sa, block_a = _operand(a)
    bv, sb, block_b = _operand(b)
    k = av.shape[1]
    assert k == bv.shape[1], f"reduced axes differ: {k} and {bv.shape[1]}"
    step = min(block_a, block_b)
    acc = np.zeros((av.shape[0], bv.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, k, step):
            p = np.zeros_like(acc)
            for i in range(start, min(start + step, k)):
                p = p + av[:, i, None] * bv[None, :, i]
            acc = acc + p * (sa[:, start // block_a, None] * sb[None, :, start // block_b])
        r = full_alpha(alpha, a, b) * acc
        if bias is not None:
            r = r + np.asarray(bias).astype(np.float32)
        if beta != 0:
            r = r + np.float32(beta) * np.asarray(c).astype(np.float32)
    return cast(r, out_dtype)


def _operand64(copy: Copy) -> np.ndarray:
    """The decoded operand `[outer, K]`, block scales included, exactly in float64 (4 + 24 significant bits)."""
    data, scale, block = _operand(copy)
    spread = scale.astype(np.float64).repeat(block, axis=1)[:, : data.shape[1]]
    return data.astype(np.float64) * spread


def gemm_float64(a: Copy, b: Copy, *, alpha=1.0, bias=None, beta=0.0, c=None) -> np.ndarray:
    """The same product of the decoded operands in float64; alpha, tensor amaxes included, is the float32 one."""
    r = full_alpha(alpha, a, b).astype(np.float64) * (_operand64(a) @ _operand64(b).T)
    if bias is not None:
        r = r + np.asarray(bias).astype(np.float64)
    if beta != 0:
        r = r + float(np.float32(beta)) * np.asarray(c).astype(np.float64)
    return r


def _cast_error(magnitude: np.ndarray, dtype: Any) -> np.ndarray:
    """Half an ulp of an IEEE cast, subnormals included."""
    info = ml_dtypes.finfo(dtype)
    return magnitude * 2.0 ** -(info.nmant + 1) + 0.5 * float(info.smallest_subnormal)


def gemm_tolerance(
    a: Copy, b: Copy, *, alpha=1.0, bias=None, beta=0.0, c=None, out_dtype: Any = np.float32,
    accumulator_bits: int = 24, promote_every: int | None = None, worst_case: bool = True,
) -> np.ndarray:  # fmt: skip
    """Elementwise bound `[M, N]` on |device - gemm_float64| for finite, not overflowing operands.

    **Arguments**
    - `accumulator_bits`: significant bits: 24 for float32 FMA and bfloat16 tensor cores, 14 for Hopper's FP8 ones
      ("around 14 bits", DeepSeek-V3, arXiv:2412.19437, 3.3.2).
    - `promote_every`: products per chain before it joins the float32 sum: 128, or None for the whole K (fast_accum).
    - `worst_case`: False adds the roundings in quadrature, six sigma: far sharper, for products of random signs only.

    The model: every addend of a 32-product step is cut at 2^(1 - bits) of the step's largest value, which is at most
    |chain so far| + sum of |products|; up to 1.25 addends per product (steps of 4 products or more, plus their carry).
    A cut is uniform in [0, 1) units, mean square 1/3. A chain then joins the sum with three float32 roundings. Twice
    that covers split-K (its partial sums are differences of two such prefixes) and second-order terms. MXFP8 decoded to
    bfloat16 is covered only where that is exact (codes 3..246 for E4M3, 10..239 for E5M2); NVFP4 always is.
    """
    av, bv = _operand64(a), _operand64(b)
    k = av.shape[1]
    chain_length = promote_every or max(k, 1)
    total = np.zeros((av.shape[0], bv.shape[0]))
    error, variance = np.zeros_like(total), np.zeros_like(total)
    unit = 2.0**-24
    for start in range(0, k, chain_length):
        chain = np.zeros_like(total)
        stop = min(start + chain_length, k)
        for i in range(start, stop, 32):
            x, y = av[:, i : min(i + 32, stop)], bv[:, i : min(i + 32, stop)].T
            cut = 2.0 ** (1 - accumulator_bits) * (np.abs(chain) + np.abs(x) @ np.abs(y))
            if worst_case:
                error += 1.25 * x.shape[1] * cut
            variance += 1.25 * x.shape[1] * cut**2 / 3
            chain += x @ y
        total += chain
        error += unit * (2 * np.abs(chain) + np.abs(total))
    # Scales may multiply in the subnormal range, once per block.
    error = 2 * (error if worst_case else error + 6 * np.sqrt(variance)) + (k / 16 + 2) * 2.0**-149
    factor = np.abs(full_alpha(alpha, a, b).astype(np.float64))
    r = factor * np.abs(total)
    error = factor * error + unit * r
    for addend, weight in ((bias, 1.0), (c if beta != 0 else None, abs(float(np.float32(beta))))):
        if addend is not None:
            term = weight * np.abs(np.asarray(addend).astype(np.float64))
            r = r + term
            error = error + unit * (term + r)
    return error + _cast_error(r + error, out_dtype)


def bias_grad(dy: np.ndarray, out_dtype: Any = np.float32) -> np.ndarray:
    """Column sums `[N]` of `[..., N]` on the CPU: +0, float32 adds in ascending row order, one cast."""
    check_ieee()
    rows = fold(dy).astype(np.float32)
    acc = np.zeros(rows.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for row in rows:
            acc = acc + row
    return cast(acc, out_dtype)


def bias_grad_tolerance(dy: np.ndarray, out_dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The float64 column sums and a bound on |device - them|: any order of float32 adds, each half an ulp."""
    rows = fold(dy).astype(np.float64)
    exact, magnitude = rows.sum(axis=0), np.abs(rows).sum(axis=0)
    error = 1.01 * rows.shape[0] * 2.0**-24 * magnitude
    return exact, error + _cast_error(np.abs(exact) + error, out_dtype)
