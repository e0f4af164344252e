"""From amax to scale: the three rules, and delayed scaling's update (NUMERICS 2-5)."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.formats import F32, FLT_MAX, FP8_MAX, check_ieee, decode, encode, fold
from oracle.transform import hadamard


def block_amax(ax: np.ndarray, block_rows: int, block_cols: int) -> np.ndarray:
    """Amax of each block of `|x|` `[R, C]`: `[ceil(R/br), ceil(C/bc)]`; only finite values count. A block of 0 is one
    block of the whole extent."""
    ax = np.where(np.isfinite(ax), ax, np.float32(0))
    r, c = (-(-n // block) if block else 1 for n, block in zip(ax.shape, (block_rows, block_cols), strict=True))
    block_rows, block_cols = block_rows or max(ax.shape[0], 1), block_cols or max(ax.shape[1], 1)
    full = np.zeros((r * block_rows, c * block_cols), np.float32)
    full[: ax.shape[0], : ax.shape[1]] = ax
    return full.reshape(r, block_rows, c, block_cols).max(axis=(1, 3), initial=np.float32(0))


def amax(x: np.ndarray, *, row_amax: bool = False) -> np.ndarray:
    """Max over the finite |x| as float32 `[1]`, or `[M]` of each row; 0 where there is none."""
    ax = np.abs(fold(x).astype(np.float32))
    if row_amax:
        return np.where(np.isfinite(ax), ax, np.float32(0)).max(axis=1, initial=np.float32(0))
    return block_amax(ax, 0, 0).reshape(1)


def columnwise_amax(x: np.ndarray, *, rht: bool = False, rht_signs: bool = False) -> np.ndarray:
    """Amax of what a two_level columnwise copy encodes, float32 `[1]`."""
    return amax(hadamard(fold(x), rht_signs) if rht else x)


def scale_from_amax(
    amax: np.ndarray, fp8_max: np.float32, eps: float, pow2: bool, value_for_inf: np.float32
) -> np.ndarray:
    """NUMERICS 2, elementwise on float32 amaxes."""
    a = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        a = np.where(a < np.float32(eps), np.float32(eps), a)
        scale = np.float32(fp8_max) / a
    scale = np.where(np.isinf(scale), np.float32(value_for_inf), scale)
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    scale = np.where((a == 0) | ~np.isfinite(a), np.float32(1), scale)
    assert scale.dtype == F32
    return scale


def e8m0_from_amax(amax: np.ndarray, element: str) -> np.ndarray:
    """NUMERICS 4: the E8M0 code of a block, amax / max (as a product in float32) rounded up to a power of two."""
    return e8m0_code(np.asarray(amax, np.float32) * np.float32(1.0 / float(FP8_MAX[element])))


def e8m0_code(v: np.ndarray) -> np.ndarray:
    """The code of the smallest 2^(code - 127) that is not below float32 v; 254 where none is."""
    assert v.dtype == F32
    bits = v.view(np.uint32)
    e, m = (bits >> np.uint32(23)).astype(np.int64), bits & np.uint32(0x7FFFFF)
    up = (m > 0) & (e != 254) & ~((e == 0) & (m <= 0x400000))
    code = np.where(np.isinf(v), 254, np.where(v == 0, 0, e + up))
    return code.astype(np.uint8)


def e8m0_inverse(code: np.ndarray) -> np.ndarray:
    """2^(127 - code) as float32, the factor that quantize multiplies by."""
    c = code.astype(np.uint32)
    bits = np.where(c == 254, np.uint32(0x00400000), (np.uint32(254) - c) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def e8m0_decode(code: np.ndarray) -> np.ndarray:
    """2^(code - 127) as float32: code 0 is a subnormal, 255 is NaN."""
    c = code.astype(np.uint32)
    bits = np.where(c == 0, np.uint32(0x00400000), np.where(c == 255, np.uint32(0x7FC00000), c << np.uint32(23)))
    return bits.astype(np.uint32).view(np.float32)


def two_level(block_amax: np.ndarray, tensor_amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """NUMERICS 5: the E4M3 bytes of blocks and the float32 factor of their elements.

    `tensor_amax` broadcasts against `block_amax`. A NaN tensor amax passes `min` as FLT_MAX (C's fminf).
    """
    amax_t, amax_b = np.asarray(tensor_amax, np.float32), np.asarray(block_amax, np.float32)
    with np.errstate(all="ignore"):
        s = np.fmin(np.float32(448 * 6) / amax_t, FLT_MAX)
        s = np.where((amax_t == 0) | (s == 0), np.float32(1), s)
        s8 = encode(np.minimum(amax_b * (s * np.float32(1 / 6)), FLT_MAX), "e4m3")
        enc = np.minimum(np.float32(1) / (decode(s8, "e4m3") * (np.float32(1) / s)), FLT_MAX)
    assert enc.dtype == F32
    return s8, enc


def scale_update(
    history: np.ndarray,
    scale: np.ndarray,
    *,
    fp8_max: float = 448.0,
    margin: int = 0,
    most_recent: bool = False,
    reduced: Any = None,
    amax: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """NUMERICS 2, "Delayed": the new history `[n, L]` and the new scales `[n]` of n tensors.

    `reduced` and `amax`: float32 `[n]`; `amax` is what a caller's own algorithm chose. A history of one slot ends 0.
    """
    check_ieee()
    new_history, new_scale = history.copy(), scale.copy()
    top = np.float32(fp8_max) * np.float32(2.0**-margin)
    for i, h in enumerate(history):
        last = h[0] if reduced is None or reduced[i] == 0 else np.float32(reduced[i])
        if last == 0:
            continue
        chosen = last
        if amax is not None:
            chosen = np.float32(amax[i])
        elif not most_recent:
            chosen = np.fmax.reduce(h[1:], initial=last)  # as every amax, it ignores NaN
        new_history[i] = np.append(h[1:], last)
        new_history[i, 0] = 0
        if np.isfinite(chosen) and chosen > 0:
            with np.errstate(all="ignore"):
                new_scale[i] = np.minimum(top / chosen, FLT_MAX)
    return new_history, new_scale
