"""Hashes and statistics of recorded arrays, computed on each array's device and packed into a vector of words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.formats import format_by_name
from diptych.common.ops.statistics import NAMES
from diptych.jax.functional.hash import hash
from diptych.jax.primitives.checks import Copy
from diptych.jax.primitives.quantize import dequantize
from diptych.jax.primitives.statistics import errors, statistics
from diptych.lab import capture
from diptych.lab.traces import Site, Statistics

Array = jax.Array

HASH_WORDS = 4


def observed(x: Array, with_statistics: bool, quantized: tuple[Array, Copy] | None = None) -> Array:
    """Returns the hash of x and, if `with_statistics`, the numbers that `decoded` needs for statistics; uint32 [words].
    `quantized`: if x is a payload, its original and the copy that it belongs to."""
    words = [_words(hash(x))]
    if not with_statistics:
        return jnp.concatenate(words)
    return jnp.concatenate([*words, _words(statistics(x)), *(_errors(*quantized) if quantized else [])])


def decoded(words: np.ndarray, site: Site) -> tuple[str, Statistics | None]:
    """Returns the hash as hexadecimal digits, and the statistics or None, from the result of `observed`."""
    digits = capture.digits(words[:HASH_WORDS])
    if len(words) == HASH_WORDS:
        return digits, None
    row, of_errors = np.split(words[HASH_WORDS:].view(np.float64), [len(NAMES)])
    found = capture.quantization(of_errors.tolist(), capture.elements(site)) if len(of_errors) else None
    return digits, capture.statistics(row.tolist(), site.size, found)


def _words(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)


def _errors(x: Array, copy: Copy) -> list[Array]:
    """Returns the words of an original's statistics and a copy's errors, which `capture.quantization` takes."""
    element = format_by_name(copy.format).element
    full = jnp.full(copy.data.shape, capture.largest_byte(element), jnp.uint8)
    full = jax.lax.bitcast_convert_type(full, copy.data.dtype)
    result, largest = (dequantize(copy._replace(data=d), "float32") for d in (copy.data, full))
    x = x.reshape(result.shape)
    return [_words(statistics(x)), _words(errors(x, result, largest, capture.beyond(element)))]
