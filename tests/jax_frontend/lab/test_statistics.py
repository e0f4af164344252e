"""Statistics and hashes on the device: those of the NumPy reference, for each dtype of a trace."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from lab import quantized_cases

import oracle
from diptych.jax.lab.statistics import decoded, observed, quantization, quantized
from diptych.lab.traces import DTYPES, Quantization, Site, statistics_of
from oracle.hash import hash_bits

pytestmark = pytest.mark.sampled


MEANS = ("mean", 1e-5), ("rms", 1e-5)


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
            want = statistics_of(x)
            assert bytes.fromhex(digits) == hash_bits(x).tobytes()
            exact = 0 if DTYPES[name].kind == "float" else 1e-6  # integers are rounded
            for field, rtol in (*((f, exact) for f in ("amax", "zero", "nan", "inf", "subnormal")), *MEANS):
                a, b = getattr(got, field), getattr(want, field)
                assert (a is None) == (b is None), (name, field)
                assert a is None or abs(a - b) <= rtol * max(abs(b), want.rms or 0), (name, field)


def test_large_tensors_and_extremes():
    """Sums of many float32 elements are exact enough, and squares neither overflow nor vanish."""
    ones = np.full(1 << 22, 1.1, np.float32)
    for x in (ones, ones * np.float32(3e38 / 1.1), ones[:4097] * np.float32(2e-38)):
        _, got = decoded(np.asarray(jax.jit(observed, static_argnums=1)(x, True)), site(x))
        assert abs(got.rms / float(x[0]) - 1) < 1e-5 and abs(got.mean / float(x[0]) - 1) < 1e-5 and got.amax == x[0]
    digits, got = decoded(np.asarray(observed(jax.numpy.ones(3), False)), site(ones[:3]))
    assert got is None and len(digits) == 32


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_how_an_array_was_quantized(fmt):
    for case in quantized_cases.cases(fmt):
        words = jax.jit(quantized, static_argnums=3)(*case[:4])
        quantized_cases.same(quantization(np.asarray(words), case.x.size), case.want)


def test_how_nothing_was_quantized():
    x = np.zeros((0, 4), np.float32)
    assert quantization(np.asarray(quantized(x, x, x, 1.1)), 0) == Quantization(0, 0, None)
