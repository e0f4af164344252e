"""Statistics and hashes on the device: those of the oracle, for each dtype of a trace."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import oracle
from diptych.jax.primitives.statistics import errors, statistics
from diptych.lab import capture
from diptych.lab.jax.statistics import decoded, observed
from diptych.lab.traces import DTYPES, Quantization, Site
from lab import quantized_cases
from oracle import statistics as oracle_of_statistics
from oracle.hash import hash_bits

pytestmark = pytest.mark.sampled


def site(x):
    return Site("x", "activation", 0, x.shape, x.dtype.name)


def cases(dtype):
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, 5000 * dtype.itemsize).astype(np.uint8)
    yield raw < 128 if dtype.kind == "b" else raw.view(dtype)  # all kinds of bits: NaN, infinite, subnormal
    yield (rng.standard_normal((3, 3000)) * 3).astype(dtype)
    yield np.zeros((0, 2), dtype)
    yield (np.ones if dtype.name == "float8_e8m0fnu" else np.zeros)(5, np.float32).astype(dtype)  # that has no zero


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "x64"])
@pytest.mark.parametrize("name", [d.name for d in DTYPES.values() if d.code])
def test_any_dtype(name, wide):
    if DTYPES[name].nbytes == 8 and not wide:
        return
    with jax.enable_x64(wide):
        for x in cases(jax.numpy.dtype(name)):
            digits, got = decoded(np.asarray(jax.jit(observed, static_argnums=1)(x, True)), site(x))
            want = oracle_of_statistics.statistics(x.view(DTYPES[name].bits), name)
            assert bytes.fromhex(digits) == hash_bits(x).tobytes()
            assert got == capture.statistics(want.tolist(), x.size)


def test_hashes_alone():
    digits, got = decoded(np.asarray(observed(jax.numpy.ones(3), False)), site(np.ones(3, np.float32)))
    assert got is None and len(digits) == 32


def row(x, *rounded):
    found = jax.jit(lambda *a: (statistics(a[0]), errors(*a, rounded[-1])))(x, *rounded[:-1])
    return np.concatenate([np.asarray(words).view(np.float64) for words in found]).tolist()


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_how_an_array_was_quantized(fmt):
    for case in quantized_cases.cases(fmt):
        quantized_cases.same(capture.quantization(row(*case[:4]), case.x.size), case.want)


def test_how_nothing_was_quantized():
    x = np.zeros((0, 4), np.float32)
    assert capture.quantization(row(x, x, x, 1.1), 0) == Quantization(0, 0, None)
