"""Dtypes of traces: values and distances in units of last place, against ml_dtypes and a list of all values."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from trace_tools import FLOATS, STORED, native, random_bits, rng

from diptych.lab.traces import DTYPES, bits_of

SMALL = [name for name in (*FLOATS, "float4_e2m1fn") if DTYPES[name].nbytes <= 2]


@pytest.mark.parametrize("name", SMALL)
def test_all_values_of_small_floats_are_those_of_ml_dtypes(name):
    codes = np.arange(16 if name == "float4_e2m1fn" else 1 << 8 * DTYPES[name].nbytes).astype(DTYPES[name].bits)
    with np.errstate(invalid="ignore"):
        want = codes.view(native(name)).astype(np.float64)
    have = DTYPES[name].decode(codes)
    np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(np.signbit(have[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))


@pytest.mark.parametrize("name", STORED)
def test_values_are_numpys(name):
    bits = random_bits(rng(name), name, (3, 50))
    room = np.empty(bits.shape)
    assert DTYPES[name].decode(bits, room) is room
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(room, bits.view(native(name)).astype(np.float64))


@pytest.mark.parametrize("name", [name for name in SMALL if name in STORED])
def test_ulps_of_small_floats_count_values_in_between(name):
    form = DTYPES[name]
    codes = np.arange(1 << 8 * form.nbytes).astype(form.bits)
    values = form.decode(codes)
    rank = {v: i for i, v in enumerate(sorted(set(values[~np.isnan(values)])))}  # -0 and +0 are one value
    gen = rng(name)
    a, b = (gen.choice(codes[~np.isnan(values)], 2000) for _ in "ab")
    want = [abs(rank[x] - rank[y]) for x, y in zip(form.decode(a), form.decode(b), strict=True)]
    assert form.ulps(a, b).tolist() == want
    assert form.ulps(a, b).dtype == form.bits


def _steps(name: str, x: int, y: int) -> int:
    """The distance of two bit patterns in Python's integers."""
    form = DTYPES[name]

    def place(bits: int) -> int:
        width = 8 * form.nbytes
        if not form.signed:
            return bits
        if form.kind == "int":
            return bits - (1 << width) if bits >> (width - 1) else bits
        magnitude = bits & ((1 << (width - 1)) - 1)
        return -magnitude if bits >> (width - 1) else magnitude

    return abs(place(x) - place(y))


@pytest.mark.parametrize("name", STORED)
def test_ulps_neither_overflow_nor_round(name):
    a, b = (random_bits(rng(name, side), name, (400,)) for side in "ab")
    extreme = np.array([0, (1 << 8 * DTYPES[name].nbytes) - 1, 1 << (8 * DTYPES[name].nbytes - 1)], a.dtype)
    a, b = np.concatenate([a, extreme, extreme]), np.concatenate([b, extreme, extreme[::-1]])
    assert DTYPES[name].ulps(a, b).tolist() == [_steps(name, int(x), int(y)) for x, y in zip(a, b, strict=True)]


def test_ulps_of_float32_are_steps_of_nextafter():
    x = np.float32(1.5)
    for steps in (1, 2, 5):
        y = x
        for _ in range(steps):
            y = np.nextafter(y, np.float32(9))
        assert DTYPES["float32"].ulps(*(np.array([v]).view(np.uint32) for v in (x, y))).tolist() == [steps]
    tiny = struct.unpack("<I", struct.pack("<f", 1e-45))[0]
    assert DTYPES["float32"].ulps(np.array([tiny], np.uint32), np.array([tiny | 1 << 31], np.uint32)).tolist() == [2]


@pytest.mark.parametrize("name", FLOATS)
def test_properties_of_the_formats(name):
    form = DTYPES[name]
    one = int(np.ones(1, native(name)).view(form.bits)[0])
    after = Fraction(float(form.decode(np.array([one + 1], form.bits))[0])) - 1
    assert form.half_ulp == after / 2
    largest = form.decode(np.array([form.largest, form.largest + 1], form.bits))
    assert math.isfinite(largest[0]) and (largest[1] == math.inf) == form.infinite and not math.isfinite(largest[1])
    if form.signed:
        assert form.smallest_normal == form.decode(np.array([1 << form.mantissa], form.bits))[0]


@pytest.mark.parametrize("name", STORED)
def test_arrays_and_bits_are_taken(name):
    bits = random_bits(rng(name), name, (4, 6))
    for x, dtype in ((bits, name), (bits.view(native(name)), None), (bits.view(native(name)), name)):
        form, found = bits_of(x.T, dtype)
        assert form is DTYPES[name] and found.flags.c_contiguous
        np.testing.assert_array_equal(found, bits.T)
    assert bits_of(bits[0, 0:1].reshape(()), name)[1].shape == ()
    assert bits_of(bits[:0], name)[1].shape == (0, 6)


@pytest.mark.parametrize(
    ("x", "dtype", "why"),
    [
        (np.zeros(2, np.complex64), None, "no dtype complex64"),
        (np.zeros(2), "float9", "no dtype float9"),
        (np.zeros(2, np.float32), "bfloat16", "float32 does not have bfloat16's bits"),
        (np.zeros(2, np.uint32), "bfloat16", "uint32 does not have bfloat16's bits"),
        (np.zeros(2, np.int16), "bfloat16", "int16 does not have bfloat16's bits"),
        (np.zeros(2, ">f4"), None, ">f4 does not have float32's bits"),
    ],
)
def test_other_arrays_are_refused(x, dtype, why):
    with pytest.raises(TypeError, match=why):
        bits_of(x, dtype)
