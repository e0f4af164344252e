"""statistics: the oracle's bits for any length, start, thread count and instruction set; NumPy's values; and errors."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import cases
from core import runner
from diptych import core
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.ops import statistics as rules
from diptych.core import _core
from diptych.lab.traces import DTYPES, statistics_of
from oracle.statistics import errors, statistics

NUMBERS = tuple(_core.number_table())
NARROW = ("float32", "bfloat16", "uint8")
LENGTHS = (0, 1, 2, 3, 7, 31, 255, 256, 257, 4095, 4096, 4097, 5000, 65537, 300001)
PARTS = 512 * 4096  # elements of 512 parts, the most, of 4096 elements, the fewest
NATIVE = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in NUMBERS}


def drawn(n: int, dtype: str) -> np.ndarray:
    """Bits of each kind: of any value, and of usual ones."""
    rng, form = cases.rng_for(f"statistics {dtype} {n}"), DTYPES[dtype]
    bits = rng.integers(0, 256, n * form.nbytes).astype(np.uint8).view(form.bits)
    usual = (rng.standard_normal(n) * 3).astype(NATIVE[dtype]).view(form.bits) if form.signed else bits
    return np.where(rng.random(n) < 0.1, bits, usual)


def test_the_numbers_of_dtypes():
    assert {name: number for name, number in rules.NUMBERS.items() if name != "bool"} == _core.number_table()
    assert set(rules.NUMBERS) == {d.name for d in DTYPES.values() if d.code}  # what traces hold


@pytest.mark.parametrize("dtype", NUMBERS)
def test_lengths(dtype, device):
    be, width = runner.backend(device), DTYPES[dtype].nbytes
    for n in LENGTHS:
        x = drawn(n, dtype)
        for offset in (0, width, 16):
            got = runner.statistics(be, x, dtype, offset)
            runner.same_bits(got, statistics(x, dtype), f"{n} {dtype} from {offset} bytes on")


@pytest.mark.parametrize("dtype", NUMBERS)
def test_all_parts(dtype, device):
    """Parts of the fewest rows, and longer ones, on any number of threads."""
    be = runner.backend(device)
    for n in (PARTS, PARTS + 1, 2 * PARTS + 777) if dtype in NARROW else (PARTS + 1,):
        x = drawn(n, dtype)
        want = statistics(x, dtype)
        for threads in (1, 3) if device == "cpu" else (1,):
            with runner.setting(threads=threads):
                runner.same_bits(runner.statistics(be, x, dtype), want, f"{n} {dtype} {threads}")


@pytest.mark.parametrize("dtype", NUMBERS)
def test_instruction_sets(dtype):
    for n in LENGTHS[:-1]:
        x = drawn(n, dtype)
        want = statistics(x, dtype)
        for isa in runner.isas():
            with runner.setting(isa=isa):
                runner.same_bits(runner.statistics(runner.Numpy(), x, dtype), want, f"{isa} {n} {dtype}")


def bits_of_values(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(NATIVE[dtype]).view(DTYPES[dtype].bits)


FILLS = {
    "usual": lambda x: np.abs(x) + 1e-2,
    "large": lambda x: x * 3e38 / 8,
    "zeros": lambda x: x * (x > 0),
    "nothing but zeros": lambda x: 0 * x,
    "one part of zeros": lambda x: np.where(np.arange(x.size) < 4096, 0, x),
    "subnormals": lambda x: np.where(x > 1, x * 1e-40, x),
    "infinite": lambda x: np.where(x > 2, np.inf, x),
    "nan": lambda x: np.where(x > 2, np.nan, x),
    "nothing finite": lambda x: x * np.nan,
}


@pytest.mark.parametrize("dtype", [n for n in NUMBERS if DTYPES[n].kind == "float" and n != "float8_e8m0fnu"])
@pytest.mark.parametrize("fill", FILLS)
def test_values_of_every_kind(dtype, fill, device):
    """Statistics are those that NumPy computes in float64, wherever in a tensor special values lie."""
    be = runner.backend(device)
    for size in (0, 1, 4096, 70001):
        bits = bits_of_values(FILLS[fill](cases.rng_for(f"{fill} {size}").standard_normal(size)), dtype)
        close(runner.statistics(be, bits, dtype), bits, dtype)


def close(got: np.ndarray, bits: np.ndarray, dtype: str) -> None:
    want, size = statistics_of(bits, dtype), bits.size
    counts = [round(n * max(size, 1)) for n in (want.zero, want.nan, want.inf, want.subnormal)]
    assert got[3:].tolist() == counts and got[0] == (want.amax or 0.0)
    for have, number in zip(got[1:3], (want.mean, want.rms), strict=True):
        assert have == pytest.approx(number or 0.0, rel=1e-13, abs=1e-14 * (want.amax or 0.0)), (dtype, size)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_all_bits(dtype, device):
    """All codes of small dtypes, the largest and smallest values of others: sums neither overflow nor vanish."""
    form = DTYPES[dtype]
    if form.nbytes <= 2:
        bits = np.arange(1 << 8 * form.nbytes).astype(form.bits)
    elif form.kind == "float":
        ends = form.largest - np.arange(3), np.arange(6), np.array([1, 2]) << (8 * form.nbytes - 2)
        bits = np.concatenate([np.asarray(part, np.uint64) for part in ends]).astype(form.bits)
    else:
        bits = np.array([0, 1, 2, (1 << 8 * form.nbytes) - 1, 1 << (8 * form.nbytes - 1)], np.uint64).astype(form.bits)
    be = runner.backend(device)
    for part in (bits, bits[:1], bits[-1:], bits[-2:], np.repeat(bits, 4097 // bits.size + 1)):
        got = runner.statistics(be, part, dtype)
        runner.same_bits(got, statistics(part, dtype), dtype)
        if form.nbytes < 8 or form.kind != "float":
            close(got, part, dtype)


def test_float64_of_any_size(device):
    be = runner.backend(device)
    for value in (5e-324, 2e-308, 1e-300, 1e-160, 1.0, 1e160, 1.7e308):
        for n in (1, 3, 5000):
            x = np.full(n, -value)
            got = runner.statistics(be, x.view(np.uint64), "float64")
            assert (
                got[0] == value
                and got[1] == pytest.approx(-value, rel=1e-15)
                and got[2] == pytest.approx(value, rel=1e-15)
            )
    mixed = np.array([1e300, -1e-300, np.inf, np.nan, 3e300])
    got = runner.statistics(be, mixed.view(np.uint64), "float64")
    assert got.tolist() == [3e300, 4e300 / 3, pytest.approx(math.sqrt(10 / 3) * 1e300), 0, 1, 1, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_of_rounding(dtype, device):
    be = runner.backend(device)
    for n in (0, 1, 255, 4097, 70001):
        x, *rounded = rounding(n, dtype)
        for offset in (0, DTYPES[dtype].nbytes):
            got = runner.statistics(be, x, dtype, offset, rounded)
            runner.same_bits(got, errors(x, dtype, *rounded), f"{n} {dtype}")


def rounding(n: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Values of any kind, what they might be rounded to, the largest magnitudes, and what is clipped lies above."""
    bits, rng = drawn(n, dtype), cases.rng_for(f"rounding {n}")
    with np.errstate(all="ignore"):
        largest = rng.choice(np.array([0.5, 2, 4], np.float32), n)
        result = np.clip(np.round(DTYPES[dtype].decode(bits) * 4).astype(np.float32) / 4, -largest, largest)
    for value in (np.inf, 0):  # of elements of any kind, NaN and infinite ones among them
        result[rng.random(n) < 0.05] = value
    return bits, result, largest, 1.125


def test_small_values_beside_large_ones(device):
    """Sums in float64 keep what sums in float32 lose."""
    x = np.full(3_000_000, 2e-4, np.float32)
    x[:64] = 1
    got = runner.statistics(runner.backend(device), x.view(np.uint32), "float32")
    assert got[2] == pytest.approx(math.sqrt(np.square(x, dtype=np.float64).mean()), rel=1e-13)


def test_known_answers():
    """Statistics are kept in files, so the definition and the oracle must not change together."""
    known = ["0x1.1a7e4c0000000p+6", "0x1.166630bca8498p+5", "0x1.43dbc943819b9p+5"]
    x = (np.arange(70_000, dtype=np.float32) - 1000) / np.float32(977)
    assert [v.hex() for v in core.statistics(x)[:3].tolist()] == known
    assert core.statistics(np.zeros((0, 3), np.float16)).tolist() == [0.0] * 7
    assert core.statistics(np.array([True, False, True, True])).tolist() == [1, 0.75, math.sqrt(0.75), 1, 0, 0, 0]


def test_the_verb_takes_any_layout():
    x = cases.rng_for("layouts").standard_normal((24, 10)).astype(np.float32)
    x.setflags(write=False)
    for v in (
        x,
        x.T,
        x[::2, 1:3],
        x[3],
        x[:0],
        x[2:3, 2].reshape(()),
        x.reshape(-1)[::120],
        x.astype(ml_dtypes.bfloat16),
    ):
        runner.same_bits(
            core.statistics(v), statistics(np.ascontiguousarray(v).view(f"u{v.itemsize}"), v.dtype.name), ""
        )


def test_errors():
    swapped = np.ones(3, np.dtype(np.float32).newbyteorder())
    for error, said, call in (
        (ArgumentError, "statistics: x must be a NumPy array, got list", lambda: core.statistics([1.0])),
        (DTypeError, "statistics: x is big-endian", lambda: core.statistics(swapped)),
        (
            DTypeError,
            "statistics: x must be one of float64.* got complex64",
            lambda: core.statistics(np.zeros(2, "c8")),
        ),
        (DTypeError, r"got int4\[2\]", lambda: core.statistics(np.zeros(2, ml_dtypes.int4))),
    ):
        with pytest.raises(error, match=said):
            call()


def test_errors_of_the_binding(device):
    be = runner.backend(device)
    put = lambda n, dtype, offset=0: be.put(np.zeros(n, runner.NUMPY[dtype]), dtype, offset)  # noqa: E731
    x, out, scratch = put(20, "uint8"), put(14, "int32"), put(_core.statistics_workspace_bytes(), "uint8")
    floats, half = put(5, "float32"), put(10, "bfloat16")
    for error, said, given in (
        (TypeError, "statistics: x is missing", (None, None, None, out, scratch, 1)),
        (TypeError, "statistics: out is missing", (x, None, None, None, scratch, 1)),
        (ShapeError, r"statistics: out must be \[14\]", (x, None, None, put(13, "int32"), scratch, 1)),
        (ShapeError, r"statistics: out must be \[18\]", (x, floats, floats, out, scratch, 1)),
        (DTypeError, "statistics: out must be int32", (x, None, None, put(14, "float32"), scratch, 1)),
        (ValueError, "unknown number 15", (x, None, None, out, scratch, 15)),
        (ValueError, "unknown number -1", (x, None, None, out, scratch, -1)),
        (ShapeError, r"uint8\[20\].* holds no whole elements of float64", (x, None, None, out, scratch, 0)),
        (ValueError, "is not aligned to elements of float32", (put(20, "uint8", 2), None, None, out, scratch, 1)),
        (ValueError, "aligned to 8 bytes", (x, None, None, put(14, "int32", 1), scratch, 1)),
        (ValueError, "overlaps", (out, None, None, out, scratch, 1)),
        (TypeError, "largest is missing", (x, floats, None, put(18, "int32"), scratch, 1)),
        (TypeError, "result is missing", (x, None, floats, put(18, "int32"), scratch, 1)),
        (DTypeError, "result must be float32, got bfloat16", (x, half, half, put(18, "int32"), scratch, 3)),
        (ShapeError, r"result must be \[10\], got float32\[5\]", (x, floats, floats, put(18, "int32"), scratch, 3)),
        (DTypeError, "x was rounded.* got int32", (x, floats, floats, put(18, "int32"), scratch, 8)),
    ):
        with pytest.raises(error, match=said):
            _core.statistics(*given, 1.0)
    need = _core.statistics_workspace_bytes()
    for workspace in (None, put(need - 1, "uint8"), put(need, "uint8", 1), put(need, "float32")) * (device == "cuda"):
        with pytest.raises((TypeError, ValueError), match="statistics: workspace"):
            _core.statistics(x, None, None, out, workspace, 1, 1.0)
