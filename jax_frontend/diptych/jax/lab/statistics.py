"""What is recorded of an array, computed on its device and packed into one vector of words.

Counts and the largest magnitude are taken from bits, because XLA's CPU backend may treat subnormal numbers as zero.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.formats import format_by_name
from diptych.jax.functional.hash import hash
from diptych.jax.primitives.checks import Copy
from diptych.jax.primitives.quantize import dequantize
from diptych.lab import capture
from diptych.lab.traces import DTYPES, DType, Quantization, Site, Statistics

Array = jax.Array

HASH_WORDS = 4
QUANTIZED_WORDS = 6
_LIMITS = {1: 126, 2: 1022}  # of exponents whose power and its inverse are normal, by the words of a number
_ROW = 4096  # elements that are added at once, so that float32 sums of many elements stay exact enough


def observed(x: Array, statistics: bool, quantized: tuple[Array, Copy] | None = None) -> Array:
    """Returns the hash of x and, if asked for, what `decoded` needs for its statistics; uint32 [words]. `quantized`: if
    x is a payload, what was quantized and the copy that it belongs to."""
    words = [_words(hash(x))]
    if not statistics:
        return jnp.concatenate(words)
    return jnp.concatenate([*words, *_statistics(x), *([_errors(*quantized)] if quantized else [])])


def decoded(words: np.ndarray, site: Site) -> tuple[str, Statistics | None]:
    """Returns the hash as hexadecimal digits, and the statistics or None, from what `observed` returned."""
    dtype, size, of_errors = site.dtype, site.size, None
    digits = capture.digits(words[:HASH_WORDS])
    if len(words) == HASH_WORDS:
        return digits, None
    form = DTYPES[dtype]
    counts = tuple(int(n) for n in words[HASH_WORDS : HASH_WORDS + 4])
    rest = words[HASH_WORDS + 4 :]
    if len(rest) > 6:  # three numbers of one or two words, and those of a payload
        rest, errors = np.split(rest, [-QUANTIZED_WORDS])
        of_errors = quantization(errors, capture.elements(site))
    largest, averages = rest[: len(rest) // 3], rest[len(rest) // 3 :].view(f"f{len(rest) // 3 * 4}")
    amax = _magnitude(largest, form)
    exponent = _exponent(amax, len(largest)) if form.kind == "float" else 0
    mean, rms = (math.ldexp(float(v), exponent) for v in averages)
    return digits, capture.statistics(amax, mean, min(rms, amax), counts, size, of_errors)


def _magnitude(words: np.ndarray, form: DType) -> float:
    if form.kind != "float":
        return float(words.view(f"f{4 * len(words)}")[0])
    bits = words.view(f"u{4 * len(words)}")[:1].astype(form.bits)
    return float(form.decode(bits)[0])


def _exponent(amax: float, words: int) -> int:
    """The power of two by which values were divided before they were squared; `_scale` computes it from bits."""
    return 0 if amax == 0 else min(max(math.frexp(amax)[1] - 1, -_LIMITS[words]), _LIMITS[words])


def _words(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)


def _statistics(x: Array) -> list[Array]:
    form, wide = DTYPES[str(x.dtype)], jax.config.jax_enable_x64  # type: ignore[attr-defined]
    real, unsigned = (jnp.float64, jnp.uint64) if wide else (jnp.float32, jnp.uint32)
    flat = x.reshape(-1)
    if form.kind != "float":
        value = flat.astype(real)
        magnitude = jnp.max(jnp.abs(value), initial=0)
        zero = jnp.sum(flat == 0, dtype=jnp.uint32)
        none = jnp.zeros((), jnp.uint32)
        averages = _averages(value, jnp.ones(flat.shape, bool))
        return [jnp.stack([zero, none, none, none]), *map(_words, (magnitude.astype(real), *averages))]
    bits = jax.lax.bitcast_convert_type(flat, form.bits)
    size = 8 * form.nbytes
    of = bits & jnp.asarray((1 << size - 1) - 1, form.bits) if form.signed else bits
    infinity = form.largest + 1 if form.infinite else None
    finite = of <= form.largest
    inf = of == infinity if infinity is not None else jnp.zeros(of.shape, bool)
    zero = of == 0 if form.signed else jnp.zeros(of.shape, bool)  # float8_e8m0fnu has no zero
    subnormal = (of > 0) & (of < 1 << form.mantissa) if form.signed else jnp.zeros(of.shape, bool)
    counts = [jnp.sum(m, dtype=jnp.uint32) for m in (zero, ~finite & ~inf, inf, subnormal)]
    largest = jnp.max(jnp.where(finite, of, 0), initial=0)
    scaled = jnp.where(finite, flat.astype(real), 0) * _scale(largest, form, real, unsigned)
    return [jnp.stack(counts), *map(_words, (largest.astype(unsigned), *_averages(scaled, finite)))]


def _scale(largest: Array, form: DType, real: Any, unsigned: Any) -> Array:
    """Returns 2^-e for the largest magnitude's bits, where e is its exponent within `_LIMITS`."""
    mantissa, bias, limit = (23, 127, _LIMITS[1]) if real == jnp.float32 else (52, 1023, _LIMITS[2])
    wide = jnp.maximum(largest.astype(unsigned), 1)
    top = wide.dtype.itemsize * 8 - 1 - jax.lax.clz(wide).astype(jnp.int32)  # place of the first 1
    normal = (wide >> form.mantissa if form.signed else wide).astype(jnp.int32) - form.bias
    tiny = top + (1 - form.bias - form.mantissa)
    exponent = jnp.where(wide < 1 << form.mantissa, tiny, normal) if form.signed else normal
    exponent = jnp.where(largest == 0, 0, jnp.clip(exponent, -limit, limit))
    return jax.lax.bitcast_convert_type((bias - exponent).astype(unsigned) << mantissa, real)


def _averages(value: Array, counted: Array) -> tuple[Array, Array]:
    """Returns mean and rms; values that do not count are 0. Each row is averaged first."""
    rows = -(-value.size // _ROW)
    value = jnp.pad(value, (0, rows * _ROW - value.size)).reshape(rows, _ROW)
    factor = _ROW / jnp.maximum(jnp.sum(counted, dtype=value.dtype), 1)
    mean, square = ((jnp.sum(v, axis=1) / _ROW).sum() * factor for v in (value, value * value))
    return mean, jnp.sqrt(square)


def quantized(x: Array, result: Array, largest: Array, beyond: float) -> Array:
    """Returns what `quantization` takes, uint32 [6].

    **Arguments:** arrays of one shape. `x`: before it was quantized. `result`: dequantized, float32. `largest`: what
    the format's largest value is in each place, dequantized, float32. `beyond`: see `capture.beyond`.
    """
    old = x.astype(jnp.float32)
    clipped = (jnp.abs(result) == largest) & (jnp.abs(old) > largest * np.float32(beyond))
    flushed = (old != 0) & (result == 0)
    finite = jnp.isfinite(old)
    count = jnp.maximum(jnp.sum(finite, dtype=jnp.float32), 1)
    found = []
    for values in (jnp.where(finite, old, 0), jnp.where(finite, result - old, 0)):
        amax = jnp.max(jnp.abs(values), initial=0)
        squares = jnp.square(values / jnp.where(amax > 0, amax, 1)).reshape(-1)
        squares = jnp.pad(squares, (0, -squares.size % _ROW)).reshape(-1, _ROW).sum(axis=1)
        found += [amax, jnp.sqrt(squares.sum() / count)]
    counts = jnp.stack([jnp.sum(m, dtype=jnp.uint32) for m in (clipped, flushed)])
    return jnp.concatenate([counts, _words(jnp.stack(found))])


def _errors(x: Array, copy: Copy) -> Array:
    """Returns `quantized` of an array and one copy of it."""
    element = format_by_name(copy.format).element
    full = jnp.full(copy.data.shape, capture.largest_byte(element), jnp.uint8)
    full = jax.lax.bitcast_convert_type(full, copy.data.dtype)
    result, largest = (dequantize(copy._replace(data=d), "float32") for d in (copy.data, full))
    return quantized(x.reshape(result.shape), result, largest, capture.beyond(element))


def quantization(words: np.ndarray, size: int) -> Quantization:
    """Returns how an array of `size` elements was quantized, from what `quantized` computed."""
    amax, rms, of_noise, rms_of_noise = (float(v) for v in words[2:].view(np.float32))
    return capture.quantization(words[:2].tolist(), (amax, rms), (of_noise, rms_of_noise), size)
