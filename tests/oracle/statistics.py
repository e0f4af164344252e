"""`statistics` in NumPy, written from section 11 of docs/numerics.md."""

from __future__ import annotations

import math

import numpy as np

from diptych.lab.traces import DTYPES

LANES, LEAST_ROWS, MOST_PARTS = 256, 16, 512


def _folded(v: np.ndarray) -> np.ndarray:
    """Sums over the last axis, whose length is a power of two."""
    while v.shape[-1] > 1:
        v = v[..., : v.shape[-1] // 2] + v[..., v.shape[-1] // 2 :]
    return v[..., 0]


def _ordered_sum(v: np.ndarray) -> float:
    rows = max(LEAST_ROWS, -(-v.size // (LANES * MOST_PARTS)))
    parts = np.zeros(MOST_PARTS * rows * LANES)
    parts[: v.size] = v
    parts = parts.reshape(MOST_PARTS, rows, LANES)
    lanes = np.zeros((MOST_PARTS, LANES))
    for row in range(rows):
        lanes = lanes + parts[:, row]
    return float(_folded(_folded(lanes)))


def statistics(bits: np.ndarray, dtype: str) -> np.ndarray:
    """amax, mean, rms and the numbers of zeros, NaNs, infinities and subnormals, float64 [7]. `bits`: of any shape."""
    form = DTYPES[dtype]
    x = form.decode(np.ascontiguousarray(bits).reshape(-1).view(form.bits))
    magnitude, finite = np.abs(x), np.isfinite(x)
    amax = float(magnitude[finite].max(initial=0))
    exponent = 0
    if dtype == "float64" and amax:
        exponent = min(max(math.frexp(amax)[1] - 1, -1022), 1022)
    v = np.where(finite, x, 0) * 2.0**-exponent
    count = max(int(finite.sum()), 1)
    mean, square = _ordered_sum(v) / count, _ordered_sum(v * v) / count
    below = (magnitude > 0) & (magnitude < form.smallest_normal)
    counts = (np.sum(x == 0), np.isnan(x).sum(), np.isinf(x).sum(), below.sum())
    mean = min(max(mean * 2.0**exponent, -amax), amax)
    return np.array([amax, mean, min(math.sqrt(square) * 2.0**exponent, amax), *counts], np.float64)


def errors(bits: np.ndarray, dtype: str, result: np.ndarray, largest: np.ndarray, beyond: float) -> np.ndarray:
    """The statistics of the errors, and the numbers of clipped and flushed elements, float64 [9]."""
    with np.errstate(all="ignore"):
        x = DTYPES[dtype].decode(bits.reshape(-1)).astype(np.float32)
        result, largest = result.reshape(-1), largest.reshape(-1)
        clipped = (np.abs(result) == largest) & (np.abs(x) > largest * np.float32(beyond))
        flushed = (x != 0) & (result == 0)
        error = np.where(np.isfinite(x), result - x, np.float32(np.nan))
    return np.append(statistics(error.view(np.uint32), "float32"), [clipped.sum(), flushed.sum()])
