"""Verdicts against R and relative distances computed by NumPy in float64, and where nothing can be computed."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from trace_tools import rng

from diptych.lab.diff import verdict
from diptych.lab.traces import Tensor, tensor_distance
from diptych.lab.traces.measure import Distance

DTYPES = ("float32", "bfloat16", "float16")
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def distances(a, b, h_a=None, h_b=None) -> verdict.Distances:
    def of(x, y):
        return None if x is None or y is None else apart(x, y)

    return verdict.Distances(apart(a, b), of(h_a, a), of(h_b, b), of(h_a, h_b))


def apart(x, y) -> Distance:
    return tensor_distance(Tensor.of(x), Tensor.of(y))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def root(x: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(x, dtype=np.float64))))


def by_numpy(a, b, h_a, h_b, dtype: str) -> tuple[str, float, float]:
    a, b = a.astype(np.float64), b.astype(np.float64)
    apart = root(h_b - h_a) / root(h_a)
    noise = root(b - h_b) / max(root(a - h_a), ROUNDOFF[dtype] * root(h_a))
    few = max(1, 10 / math.sqrt(a.size))
    far = root(a - h_a) > 64 * few * max(root(b - h_b), ROUNDOFF[dtype] * root(h_a))
    same = "same" if (a == b).all() else "rounding" if noise <= 2 * few and not far else "beyond"
    return "definition" if apart > 1e-10 else same, noise, apart


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_numpy(dtype):
    gen, seen = rng("verdict", dtype), set()
    for _ in range(300):
        h_a = gen.standard_normal(gen.choice([3, 40, 500])) * 10.0 ** gen.integers(-2, 3)
        error = ROUNDOFF[dtype] * gen.choice([0, 0.5, 2, 8, 50, 300], 2)
        h_b = h_a * (1 + gen.choice([0, 1e-15, 3e-11, 3e-10, 1e-3]) * gen.standard_normal(h_a.shape))
        a, b = (
            rounded(h * (1 + e * gen.standard_normal(h.shape)), dtype) for h, e in ((h_a, error[0]), (h_b, error[1]))
        )
        want, noise, apart = by_numpy(a, b, h_a, h_b, dtype)
        have = verdict.judge(distances(a, b, h_a, h_b), dtype, True)
        assert have.verdict == want
        assert have.noise == pytest.approx(noise, rel=1e-9) and have.definition == pytest.approx(apart, rel=1e-6)
        seen.add(want)
    assert seen == {"same", "rounding", "beyond", "definition"}


def test_without_references():
    x = np.linspace(1, 2, 8, dtype=np.float32)
    assert verdict.judge(distances(x, x), "float32", False).verdict == "same"
    moved = verdict.judge(distances(x, np.nextafter(x, np.float32(3))), "float32", False)
    assert moved == ("differs", pytest.approx(1e-7, rel=0.5), None, None)
    assert verdict.judge(distances(x, x.astype(np.float64)), "float32", False).verdict == "same"
    assert verdict.judge(distances(x, x.astype(np.float16)), "float32", False).verdict == "differs"


def test_bits_of_nan_do_not_count():
    x = np.array([NAN, 1], np.float32)
    y = x.view(np.uint32).copy()
    y[0] |= 0x80000000
    assert verdict.judge(distances(x, y.view(np.float32)), "float32", False).verdict == "same"
    assert verdict.judge(distances(x, np.array([NAN, -0.0], np.float32)), "float32", False).verdict == "differs"


def test_one_reference_does_not_judge_the_definition():
    h = np.linspace(1, 2, 1000)
    a, b = h.astype(np.float32), (h * 1.01).astype(np.float32)
    have = verdict.judge(distances(a, b, h, h)._replace(hh=None), "float32", True)
    assert have.verdict == "beyond" and have.definition is None and have.noise is not None and have.noise > 1e5


def test_definition_counts_although_bits_are_equal():
    h, x = np.linspace(1, 2, 100), np.linspace(1, 2, 100).astype(ml_dtypes.bfloat16)
    assert verdict.judge(distances(x, x, h, h * (1 + 1e-5)), "bfloat16", True).verdict == "definition"
    assert verdict.judge(distances(x, x, h, h * (1 + 1e-12)), "bfloat16", True).verdict == "same"


def test_what_cancels_in_the_references_too():
    """Sums that are 0 in exact arithmetic are rounding alone, in float64 as in float32."""
    gen = rng("cancelled")
    terms = gen.standard_normal((100, 32)).astype(np.float32)
    terms = np.concatenate([terms, -terms])

    def total(dtype):
        out = np.zeros(32, dtype)
        for row in np.sin(terms[gen.permutation(200)].astype(dtype)):
            out += row
        return out

    a, b, h_a, h_b = total(np.float32), total(np.float32), total(np.float64), total(np.float64)
    have = verdict.judge(distances(a, b, h_a, h_b), "float32", True)
    assert have.definition is not None and have.definition > 0.1
    assert have.verdict == "rounding"
    assert verdict.judge(distances(a, b, h_a, h_b + 1e-9), "float32", True).verdict == "definition"


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "h", "want", "noise"),
    [
        ([NAN, 1], [NAN, 1], [NAN, 1], "same", 0),
        ([NAN, 1], [NAN, 1 + 2**-23], [NAN, 1], "rounding", 2),
        ([1, 1], [NAN, 1], [1, 1], "beyond", INF),
        ([NAN, 1], [1, 1], [1, 1], "beyond", INF),
        ([INF, 1], [INF, 1 + 2**-23], [1e300, 1], "rounding", 2),
        ([INF, 1], [-INF, 1], [1, 1], "beyond", INF),
        ([NAN, NAN], [NAN, NAN], [1, 1], "same", 0),
        ([0, 0], [0, 0], [0, 0], "same", 0),
        ([0, 0], [0, 1e-30], [0, 0], "beyond", INF),
        ([0, 1e-30], [0, 0], [0, 0], "beyond", 0),
        ([0, 0], [-0.0, 0], [0, 0], "rounding", 0),
    ],
)
def test_not_finite_and_zero(a, b, h, want, noise):
    a, b, h = np.array(a, np.float32), np.array(b, np.float32), np.array(h, np.float64)
    have = verdict.judge(distances(a, b, h, h), "float32", True)
    assert (have.verdict, have.noise) == (want, noise)


def test_a_reference_that_is_not_finite():
    x, h = np.ones(4, np.float32), np.ones(4)
    broken = np.array([1, 1, 1, NAN])
    have = verdict.judge(distances(x, x, h, broken), "float32", True)
    assert have.verdict == "definition" and have.definition == INF
    assert verdict.judge(distances(x, x, broken, broken), "float32", True).verdict == "same"


def test_a_that_is_far_from_its_own_reference():
    """R alone would allow B any error."""
    h = rng("far").standard_normal(200)
    b = h.astype(np.float32)
    have = verdict.judge(distances(2 * b, b, h, h), "float32", True)
    assert have.verdict == "beyond" and have.noise is not None and have.noise < 1e-6
    low = h.astype(ml_dtypes.bfloat16)
    assert verdict.judge(distances(low, b, h, h), "bfloat16", True, "float32").verdict == "rounding"
    assert verdict.judge(distances(2 * low, b, h, h), "bfloat16", True, "float32").verdict == "beyond"


def test_a_reference_that_is_exactly_zero():
    noise = rng("zero").standard_normal(200)
    a, b, h = (noise * 1e-9).astype(np.float32), (noise * 1.1e-9).astype(np.float32), np.zeros(200)
    assert verdict.judge(distances(a, b, h, noise * 1e-18), "float32", True).verdict == "rounding"
    assert verdict.judge(distances(a, b, h, noise * 1e-14), "float32", True).verdict == "definition"


def test_a_of_float64_with_its_references_hash():
    """Equal hashes leave the scale to A's values."""
    h = np.linspace(1, 2, 1000)
    by_hash, b = Distance(1000, 1000, True, 0, None, 0, 0.0, 0, rms_difference=0.0), h.astype(np.float32)
    found = verdict.Distances(apart(h, b), by_hash, apart(h, b), by_hash)
    assert verdict.judge(found, "float64", True, "float32").verdict == "beyond"
    found = verdict.Distances(apart(h, np.nextafter(h, 3)), by_hash, apart(h, h * (1 + 2**-53)), by_hash)
    assert verdict.judge(found, "float64", True).verdict == "rounding"


def test_errors_of_other_elements_are_not_compared():
    h = np.ones(5000)
    a, b = h.astype(np.float32), (h * (1 + 1e-4)).astype(np.float32)
    few = dataclasses.replace(apart(h, b), compared=1024)
    found = distances(a * np.float32(1 + 1e-5), b, h, h)._replace(hb=few)
    assert (judged := verdict.judge(found, "float32", True)).verdict == "unknown" and judged.noise is None


def test_integers_do_not_round():
    a = np.array([1, 2, 3])
    assert verdict.judge(distances(a, a, a, a), "int64", True).verdict == "same"
    assert verdict.judge(distances(a, a + 1, a, a), "int64", True).verdict == "beyond"
    assert verdict.judge(distances(a, a + 1, a, a + 1), "int64", True).verdict == "definition"


def test_empty_and_unknown():
    empty = np.zeros((0, 3), np.float32)
    assert (
        verdict.judge(distances(empty, empty, empty.astype(float), empty.astype(float)), "float32", True).verdict
        == "same"
    )
    for ab, plain, referenced in (
        (Distance(9, 0, None), "unknown", "unknown"),
        (Distance(9, 0, False), "differs", "unknown"),
        (Distance(9, 0, True, 0), "same", "same"),
        (Distance(0, 0, None), "same", "same"),
        (Distance(9, 4, None, 0, None, 0, 0.0, 0, 1.0, 1.0, 0.0), "unknown", "unknown"),
        (Distance(9, 4, None, 1, 2, None, None, 0, 1.0, 1.0, 0.1), "differs", "unknown"),
    ):
        assert verdict.judge(verdict.Distances(ab), "float32", False).verdict == plain
        assert verdict.judge(verdict.Distances(ab), "float32", True).verdict == referenced
