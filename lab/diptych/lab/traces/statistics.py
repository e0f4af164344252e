"""Statistics of tensors, computed in float64 block by block: the reference for the statistics that frontends compute.

Sums are scaled, so that float64 tensors neither overflow nor underflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from diptych.common.formats import LARGEST
from diptych.lab.traces.dtypes import DTYPES, bits_of
from diptych.lab.traces.schema import Quantization, Statistics

BLOCK = 1 << 16
"""The number of elements that are decoded at once. With fewer, NumPy's calls cost more than the work in them; with
more, the float64 values do not fit into a core's cache."""


def statistics_of(x: np.ndarray, dtype: str | None = None, quantized: Quantization | None = None) -> Statistics:
    """Returns the statistics of a tensor, or of its bits if `dtype` is given (see `bits_of`).

    **Raises** TypeError for a dtype that traces do not have.
    """
    form, bits = bits_of(x, dtype)
    counts, means, squares, amax = np.zeros(4, np.int64), [], [], None
    for part in blocks(bits):
        value = form.decode(part)
        magnitude = np.abs(value)
        subnormal = (magnitude > 0) & (magnitude < form.smallest_normal)
        counts += [np.count_nonzero(m) for m in (value == 0, np.isnan(value), np.isinf(value), subnormal)]
        if (finite := value[np.isfinite(value)]).size:
            amax = max(amax or 0.0, float(np.abs(finite).max()))
            means.append((scaled(np.mean, finite), finite.size))
            squares.append((rms(finite), finite.size))
    zero, nan, inf, tiny = (float(n) / max(bits.size, 1) for n in counts)
    if amax is None:
        return Statistics(None, None, None, zero, nan, inf, tiny, quantized)
    total = sum(n for _, n in means)
    mean = math.fsum(m * (n / total) for m, n in means)
    return Statistics(amax, mean, min(combined_rms(squares), amax), zero, nan, inf, tiny, quantized)


def quantization(
    x: np.ndarray,
    codes: np.ndarray,
    element: str,
    result: np.ndarray,
    *,
    dtype: str | None = None,
    result_dtype: str | None = None,
) -> Quantization:
    """Returns how a tensor was quantized, from three arrays of one shape.

    **Arguments:** `x`: the original, or its bits if `dtype` is given. `codes`: the payload's elements in the same
    order, one in each uint8, without scales. `element`: the payload's dtype, such as "float8_e4m3fn". `result`: the
    dequantized tensor, or its bits if `result_dtype` is given.

    **Raises** ValueError if the shapes differ, TypeError for an unknown dtype.
    """
    if not x.shape == codes.shape == result.shape:
        raise ValueError(f"shapes differ: x has {x.shape}, codes has {codes.shape}, result has {result.shape}")
    (form, before), (result_form, after) = bits_of(x, dtype), bits_of(result, result_dtype)
    if element not in LARGEST:
        raise TypeError(f"element must be one of {', '.join(LARGEST)}, to which tensors are quantized, got {element}")
    payload, largest = DTYPES[element], LARGEST[element]
    # Rounding to the largest value moves a value by at most half of the last step between two values of the format.
    step = largest - float(payload.decode(np.array([payload.largest - 1], np.uint8))[0])
    clipped = flushed = 0
    signals, noises = [], []
    for old_bits, code, new_bits in zip(blocks(before), blocks(codes), blocks(after), strict=True):
        old, new = form.decode(old_bits), result_form.decode(new_bits)
        value = payload.decode(code)
        beyond = np.abs(old) > np.abs(new) * (1 + step / 2 / largest)
        clipped += int(np.count_nonzero((np.abs(value) == largest) & beyond))
        flushed += int(np.count_nonzero((old != 0) & (new == 0)))
        kept = np.isfinite(old)
        with np.errstate(over="ignore"):
            signals.append((rms(old[kept]), np.count_nonzero(kept)))
            noises.append((rms(new[kept] - old[kept]), np.count_nonzero(kept)))
    share = max(x.size, 1)
    signal, noise = (logarithm(combined_rms(parts)) for parts in (signals, noises))
    return Quantization(clipped / share, flushed / share, decibels(signal, noise))


def decibels(signal: float, noise: float) -> float | None:
    """Returns a ratio of two magnitudes in decibels, None if both are 0. The arguments are their logarithms to base 10:
    -inf for the magnitude 0, inf for one that is not finite."""
    if noise == -math.inf:
        return None if signal == -math.inf else math.inf
    return 20 * (signal - noise) if math.isfinite(signal) and math.isfinite(noise) else -math.inf


def logarithm(magnitude: float) -> float:
    """Returns the logarithm to base 10 of a magnitude, as `decibels` takes it."""
    if not math.isfinite(magnitude):
        return math.inf
    return math.log10(magnitude) if magnitude else -math.inf


def rms(x: np.ndarray) -> float:
    """Returns the root mean square of float64 values: inf if one of them is not finite, 0 if there are none."""
    if not np.isfinite(x).all():
        return math.inf
    return scaled(lambda y: math.sqrt(np.square(y).mean()), x) if x.size else 0.0


def scaled(average: Callable[[np.ndarray], float], x: np.ndarray) -> float:
    """Returns `average(x)` for finite values, clamped to their largest magnitude. Before it is computed x is scaled by
    a power of two, to a largest magnitude from 0.5 to 1."""
    significand, exponent = math.frexp(float(np.abs(x).max()))
    found = float(average(np.ldexp(x, -exponent)))
    return math.ldexp(min(max(found, -significand), significand), exponent)


def blocks(x: np.ndarray) -> Iterator[np.ndarray]:
    """Returns the elements of a contiguous array in pieces of `BLOCK`."""
    flat = x.reshape(-1)
    return (flat[i : i + BLOCK] for i in range(0, flat.size, BLOCK))


def combined_rms(parts: Iterable[tuple[float, int]]) -> float:
    """Returns the rms of all values from the rms and the number of values of each part; 0 for no values."""
    parts = list(parts)
    total = sum(n for _, n in parts)
    return math.hypot(*(rms * math.sqrt(n / total) for rms, n in parts if n))
