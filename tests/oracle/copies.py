"""quantize and dequantize."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from oracle import scales
from oracle.formats import (
    F32,
    FLT_MAX,
    FORMATS,
    FP8_MAX,
    Copy,
    Fmt,
    Quantized,
    cast,
    check_ieee,
    decode,
    encode,
    encode_stochastic,
    fold,
    pack,
    unpack,
)
from oracle.transform import hadamard, noise_of


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One scale per element."""
    rows, cols = (size or n for size, n in zip(block, shape, strict=True))
    scale = scale.reshape(1, 1) if block == (0, 0) else scale
    return scale.repeat(rows, axis=0).repeat(cols, axis=1)[: shape[0], : shape[1]]


def quantize(
    x: np.ndarray,
    fmt: Fmt | str,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = False,
    eps: float = 0.0,
    square: bool = False,
    from_rows: bool = False,
    row_amax: bool = False,
    rht: bool = False,
    rht_signs: bool = False,
    rng: np.ndarray | None = None,
    amax: Any = None,
    columnwise_amax: Any = None,
    scale: Any = None,
    accumulate: Any = None,
) -> Quantized:
    """Quantizes a tensor, both copies from the high-precision values unless `from_rows` says otherwise.

    **Arguments**
    - `x`: `[..., K]` float32 | bfloat16 | float16.
    - `pow2`, `eps`: of the `divide` rule.
    - `square`: one amax for `block_cols` x `block_cols` elements, shared by the copies (`e8m0_ceil`, `two_level`).
    - `from_rows`: the columnwise copy is in square blocks, `shifted` from the rowwise one (`divide`, blocks of a row).
    - `row_amax`, `rht`, `rht_signs`: of the `two_level` rule. `rng`: int32 `[4]`, or `[8]` for a part of a tensor
      (`rng_words`), rounds stochastically.
    - `amax`, `columnwise_amax`: given (for instance reduced) amaxes instead of x's own; each wanted copy of `two_level`
      needs its own.
    - `scale`: float32, the scale of a per-tensor format; `accumulate`: an amax that x's own is to be joined with.

    **Returns** a `Quantized`: data `[M, K]` (`[K, M]` transposed), scales `[1]` or one per block.

    **Raises** ValueError | TypeError for what the format does not take.
    """
    check_ieee()
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    levels, given = fmt.rule == "two_level", (amax, columnwise_amax)
    _refuse(
        {
            f"{fmt.rule} has no pow2 and no eps": fmt.rule != "divide" and (pow2 or eps),
            f"{fmt.rule} has no square blocks": fmt.rule == "divide" and square,
            "only blocks of one row are joined to square ones, by powers of two": from_rows
            and not (fmt.rule == "divide" and fmt.block_rows == 1 and pow2 and columnwise),
            f"{fmt.rule} has no row amax, transform or noise": not levels and (row_amax or rht or rng is not None),
            "random signs without a transform": rht_signs and not rht,
            "a transform without a columnwise copy": rht and not columnwise,
            "square blocks have one amax, no transform and no noise": square and (row_amax or rht or rng is not None),
            "only a per-tensor or two_level format takes an amax": amax is not None and not (fmt.one_scale or levels),
            "only a two_level format has a columnwise amax": columnwise_amax is not None and not levels,
            "only a per-tensor format takes a scale": scale is not None and not fmt.one_scale,
            "a given scale knows no amax, pow2 or eps": scale is not None and (amax is not None or pow2 or eps),
            "only a given scale accumulates": accumulate is not None and scale is None,
        }
    )
    x32 = fold(x).astype(np.float32)
    (m, k), size = x32.shape, fmt.block_cols
    if levels:
        _refuse({f"K {k} is no multiple of {size}": k % size, f"M {m} alike": (columnwise or square) and m % size})
    out: dict[str, Any] = {}
    if from_rows:
        rows = quantize(x, fmt, columnwise=False, pow2=True, eps=eps)
        columns = shifted(rows.copy())
        out = {"columnwise_data": columns.data, "columnwise_scale_inv": columns.scale_inv}
        if rowwise:
            out |= {"rowwise_data": rows.rowwise_data, "rowwise_scale_inv": rows.rowwise_scale_inv}
        return Quantized(fmt, columnwise_fmt=columns.fmt, **out)
    for name, columns in (("rowwise", False), ("columnwise", True)):
        if not (columnwise if columns else rowwise):
            continue
        source = hadamard(fold(x), rht_signs).astype(np.float32) if rht and columns else x32
        special = ~np.isfinite(source)  # infinite values count as NaN
        source = np.where(special, np.float32(np.nan), source)
        y = source.T if columns and fmt.columnwise_transposed else source
        block = fmt.block(columns)
        if square:
            block_amax = _replicated(scales.block_amax(np.abs(source), size, size), fmt, columns, m, k)
        else:
            block_amax = scales.block_amax(np.abs(y), *block)
        if levels:
            per_row = row_amax and not columns
            own = scales.amax(y, row_amax=per_row)
            amax_t = own if given[columns] is None else np.asarray(given[columns], np.float32).reshape(own.shape)
            _refuse({"each wanted copy needs its amax": any(v is not None for v in given) and given[columns] is None})
            scale_inv, factor = scales.two_level(block_amax, amax_t.reshape(-1, 1))
            nan = special.astype(np.float32)
            if square:
                nan = _replicated(scales.block_amax(nan, size, size), fmt, columns, m, k) > 0
            else:
                nan = scales.block_amax(nan.T if columns else nan, *block) > 0
            scale_inv = np.where(nan, np.uint8(0x7F), scale_inv)
            with np.errstate(all="ignore"):
                scaled = y * spread(factor, block, y.shape)
            if rng is None:
                codes = encode(scaled, fmt.element)
            else:
                codes = encode_stochastic(scaled, noise_of(y.shape, rng, columns))
            out[f"{name}_data"] = pack(np.where(spread(nan, block, y.shape), np.uint8(7), codes))
            out[f"{name}_scale_inv"] = scale_inv
            out["columnwise_amax" if columns else "amax"] = amax_t
            continue
        if fmt.rule == "e8m0_ceil":
            scale_inv = scales.e8m0_from_amax(block_amax, fmt.element)
            factor = scales.e8m0_inverse(scale_inv)
        else:
            if amax is not None:
                block_amax = np.asarray(amax, np.float32).reshape(1, 1)
            factor = _factor(fmt, x, block_amax, amax is None, pow2, eps, scale)
            with np.errstate(all="ignore"):
                scale_inv = np.float32(1) / factor
            assert scale_inv.dtype == F32
        with np.errstate(all="ignore"):
            scaled = y * spread(factor, block, y.shape)
        out[f"{name}_data"] = encode(scaled, fmt.element)
        out[f"{name}_scale_inv"] = scale_inv.reshape(1) if fmt.one_scale else scale_inv
        if fmt.one_scale:
            joined = block_amax if accumulate is None else np.maximum(block_amax, np.float32(accumulate))
            out["amax"] = joined.reshape(1)
    return Quantized(fmt, **out)


def shifted(rows: Copy) -> Copy:
    """The columnwise copy in square blocks that a rowwise copy in blocks of one row determines, element by element."""
    fmt = dataclasses.replace(rows.fmt, block_rows=rows.fmt.block_cols)
    (m, k), size = rows.data.shape, fmt.block_cols
    elements = values(rows)
    data = np.empty((k, m), np.uint8)
    scale = np.empty((-(-k // size), -(-m // size)), np.float32)
    for j, i in np.ndindex(scale.shape):
        at = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
        block, inv = elements[at], np.asarray(rows.scale_inv[at[0], j], np.float64)
        counts = (np.isfinite(block) & (block != 0)).any(axis=1)
        top = scale[j, i] = inv[counts].max() if counts.any() else inv.max()
        ratio = np.where(counts, inv / top, 1.0)[:, None]
        exact = np.where(np.isfinite(block), block.astype(np.float64) * ratio, np.nan)
        with np.errstate(under="ignore"):  # what float32 cannot hold is far below any element, and keeps its sign
            data[at[1], at[0]] = encode(exact.astype(np.float32), fmt.element).T
    return Copy(fmt, True, data, scale)


def _refuse(reasons: dict[str, Any]) -> None:
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)


def _factor(fmt: Fmt, x: np.ndarray, block_amax: np.ndarray, own: bool, pow2: bool, eps: float, scale: Any):
    """Returns the factor by which the `divide` rule multiplies elements."""
    if scale is not None:
        return np.asarray(scale, np.float32).reshape(1, 1)
    # A block's scale may not leave the input's own dtype; a tensor's may.
    value_for_inf = FLT_MAX if fmt.one_scale else np.float32(ml_dtypes.finfo(x.dtype).max)
    # The amax of no elements says nothing, so eps does not act on it: scale 1.
    empty = own and x.size == 0
    return scales.scale_from_amax(block_amax, FP8_MAX[fmt.element], 0.0 if empty else eps, pow2, value_for_inf)


def _replicated(squares: np.ndarray, fmt: Fmt, columns: bool, m: int, k: int) -> np.ndarray:
    """One value per square of the tensor, as the 1-D blocks of one copy store it."""
    if columns and not fmt.columnwise_transposed:
        return squares.repeat(fmt.block_cols, axis=1)[:, :k]
    return (squares.T if columns else squares).repeat(fmt.block_cols, axis=0)[: k if columns else m]


def scale32(copy: Copy) -> np.ndarray:
    """A copy's scales as float32 values; those of `two_level` without the tensor's amax."""
    if copy.fmt.scale == "float32":
        return np.asarray(copy.scale_inv, np.float32)
    return scales.e8m0_decode(copy.scale_inv) if copy.fmt.scale == "e8m0" else decode(copy.scale_inv, copy.fmt.scale)


def values(copy: Copy) -> np.ndarray:
    """A copy's elements as float32, unscaled, in the orientation of its data."""
    return decode(unpack(copy.data) if copy.fmt.pack == 2 else copy.data, copy.fmt.element)


def dequantize(copy: Copy, dtype: Any = np.float32) -> np.ndarray:
    """One copy back to `[M, K]` in the tensor's own orientation: a float32 product, then one cast."""
    check_ieee()
    with np.errstate(all="ignore"):
        y, scale = values(copy), scale32(copy)
        if copy.fmt.rule == "two_level":
            scale = (scale * np.asarray(copy.amax, np.float32).reshape(-1, 1)) * np.float32(1 / 2688)
        y = y * spread(scale, copy.fmt.block(copy.columnwise), y.shape)
    return cast(y.T if copy.transposed else y, dtype)
