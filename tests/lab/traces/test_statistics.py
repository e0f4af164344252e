"""Statistics against plain Python on each element, exact sums, and the oracle's quantization."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from trace_tools import FLOATS, STORED, native, normal_bits, random_bits, rng

import oracle
from diptych.lab.traces import DTYPES, Quantization, Statistics, quantization, statistics_of
from diptych.lab.traces.statistics import BLOCK
from oracle.copies import values as unscaled_values


def by_element(values: list[float], tiny: float) -> dict[str, float | None]:
    """The same statistics, from exact sums."""
    finite = [Fraction(v) for v in values if math.isfinite(v)]
    n = max(len(values), 1)
    found: dict[str, float | None] = {
        "amax": float(max(map(abs, finite))) if finite else None,
        "mean": float(sum(finite) / len(finite)) if finite else None,
        "rms": None,
        "zero": sum(v == 0 for v in values) / n,
        "nan": sum(math.isnan(v) for v in values) / n,
        "inf": sum(math.isinf(v) for v in values) / n,
        "subnormal": sum(0 < abs(v) < tiny for v in values) / n,
    }
    if finite:
        square = sum(f * f for f in finite) / len(finite)
        scale = 1 << 1200  # a float has no square of the smallest and largest values
        found["rms"] = float(Fraction(math.isqrt(int(square * scale * scale * 4**1200)), scale * 2**1200))
    return found


def check(have: Statistics, want: dict[str, float | None]) -> None:
    for name, value in want.items():
        found = getattr(have, name)
        if name in ("mean", "rms") and value is not None:
            assert found is not None and abs(found - value) <= 1e-12 * (want["rms"] or 0) + 5e-324, name
        else:
            assert found == value, name


@pytest.mark.parametrize("make", [random_bits, normal_bits])
@pytest.mark.parametrize("name", STORED)
def test_of_each_dtype(name, make):
    for shape in ((), (0,), (3, 0), (1,), (40, 9)):
        bits = make(rng(name, shape), name, shape)
        with np.errstate(invalid="ignore"):
            values = bits.view(native(name)).astype(np.float64)
        tiny = smallest_normal(name)
        have = statistics_of(bits, name)
        check(have, by_element(values.reshape(-1).tolist(), tiny))
        assert have == statistics_of(bits.view(native(name)))


def smallest_normal(name: str) -> float:
    if name not in FLOATS or name == "float8_e8m0fnu":
        return 0.0
    return float(ml_dtypes.finfo(native(name)).smallest_normal)


def test_over_several_blocks():
    x = rng().standard_normal(2 * BLOCK + 17).astype(np.float32)
    x[BLOCK - 1], x[-1] = np.nan, -9e9
    want = x.astype(np.float64)
    good = want[np.isfinite(want)]
    have = statistics_of(x)
    assert have.amax == np.abs(good).max() and have.nan == 1 / x.size
    assert have.mean == pytest.approx(good.mean(), rel=1e-12)
    assert have.rms == pytest.approx(np.sqrt(np.square(good).mean()), rel=1e-12)


def test_float64_neither_overflows_nor_underflows():
    big, small = np.finfo(np.float64).max, 5e-324
    for x in ([big, big, big], [big, -big], [small, small], [small, 0.0, 0.0, -small], [big, small]):
        check(statistics_of(np.array(x)), by_element(x, 2.0**-1022))


def test_empty_and_undefined_tensors():
    assert statistics_of(np.zeros((2, 0), np.float32)) == Statistics(None, None, None, 0, 0, 0, 0)
    assert statistics_of(np.full(4, np.nan)) == Statistics(None, None, None, 0, 1, 0, 0)
    assert statistics_of(np.array([np.inf, -np.inf, np.nan, np.inf])) == Statistics(None, None, None, 0, 0.25, 0.75, 0)


# --- quantized tensors ---

ELEMENT = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn"}


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_quantization_of_each_format(fmt):
    x = rng(fmt).standard_normal((128, 256)).astype(np.float32)
    x[rng(fmt, 1).random(x.shape) < 0.1] = 0
    x[0, 0], x[1] = 1e4, 1e-9  # one block of large values, and small values
    more = {"scale": np.float32(100)} if oracle.FORMATS[fmt].one_scale else {}  # a delayed scale, which clips
    copy = oracle.quantize(x, fmt, columnwise=False, **more).copy()
    y = oracle.dequantize(copy)
    codes = oracle.unpack(copy.data) if copy.fmt.pack == 2 else copy.data
    have = quantization(x, codes, ELEMENT[copy.fmt.element], y)

    old, new = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        unscaled = np.abs(old) / (np.abs(new) / np.abs(unscaled_values(copy).astype(np.float64)))
    limit = {"e4m3": 464.0, "e5m2": 61440.0, "e2m1": 7.0}[copy.fmt.element]
    want = np.count_nonzero(unscaled > limit * (1 + 1e-6)) / x.size
    assert have.clipped == want and (want > 0 or not copy.fmt.one_scale)
    want = np.count_nonzero((old != 0) & (new == 0)) / x.size
    assert have.flushed == want and (want > 0 or not copy.fmt.one_scale)
    assert have.sqnr == pytest.approx(10 * np.log10(np.sum(old**2) / np.sum((new - old) ** 2)), abs=1e-9)


def test_rounding_to_the_largest_value_is_not_clipping():
    for element, largest, half in (("float8_e4m3fn", 448, 16), ("float8_e5m2", 57344, 4096), ("float4_e2m1fn", 6, 1)):
        code = np.array([0x7 if element == "float4_e2m1fn" else DTYPES[element].largest] * 2, np.uint8)
        x, y = np.array([largest + half, largest + half * 1.01]), np.array([largest, largest], np.float64)
        assert quantization(x, code, element, y).clipped == 0.5


def test_quantization_without_noise_signal_or_elements():
    def of(old, new):
        return quantization(np.array(old), np.zeros(len(old), np.uint8), "float8_e5m2", np.array(new))

    assert of([1.0, -2.0], [1.0, -2.0]) == Quantization(0, 0, math.inf)
    assert of([0.0], [0.0]) == Quantization(0, 0, None)
    assert of([0.0, 0.0], [1.0, 0.0]).sqnr == -math.inf
    assert of([1.0, 1.0], [1.0, np.nan]).sqnr == -math.inf
    assert of([np.inf, np.nan, 3.0], [np.nan, np.nan, 3.0]) == Quantization(0, 0, math.inf)
    empty = np.zeros((0, 3))
    assert quantization(empty, empty.astype(np.uint8), "float8_e5m2", empty) == Quantization(0, 0, None)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        quantization(np.zeros(2), np.zeros(3, np.uint8), "float8_e5m2", np.zeros(2))
    with pytest.raises(TypeError, match=r"element must be one of float8.*, got float32"):
        quantization(np.zeros(2), np.zeros(2, np.uint8), "float32", np.zeros(2))
