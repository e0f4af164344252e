"""Distances against Python's exact numbers, one element at a time; hashes first; samples; bounded memory."""

import dataclasses
import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from trace_tools import STORED, entry, meta, native, normal_bits, random_bits, rng, write

from diptych.lab.traces import (
    DTYPES,
    Distance,
    Entry,
    Options,
    Site,
    Tensor,
    Trace,
    TraceError,
    Writer,
    distance,
    distances,
    measure,
    places,
    tensor_distance,
)


def by_element(a: Tensor, b: Tensor) -> Distance:
    """The same distance from exact numbers."""
    one_dtype = a.dtype is b.dtype
    bits_a, bits_b = a.bits.reshape(-1).tolist(), b.bits.reshape(-1).tolist()
    with np.errstate(invalid="ignore"):
        x, y = (t.bits.view(native(t.dtype.name)).astype(np.float64).reshape(-1).tolist() for t in (a, b))
    differing, ulps, squares, not_finite = [], [], [], 0
    for i, (p, q, u, v) in enumerate(zip(bits_a, bits_b, x, y, strict=True)):
        differs = (p != q if one_dtype else u != v) and not (math.isnan(u) and math.isnan(v))
        if differs:
            differing.append(i)
            not_finite += not (math.isfinite(u) and math.isfinite(v))
        if one_dtype and not (math.isnan(u) or math.isnan(v)):
            ulps.append(int(a.dtype.ulps(*(np.array([n], a.bits.dtype) for n in (p, q)))[0]))
        if math.isfinite(u) and math.isfinite(v):
            squares.append([Fraction(n) ** 2 for n in (u, v, Fraction(v) - Fraction(u))])

    def root(n: int) -> float:
        if not squares:
            return 0.0
        found = math.isqrt(int(sum(s[n] for s in squares) / len(squares) * 4**1200))
        return found / 2**1200 if found < 2**2224 - 2**2170 else math.inf

    return Distance(
        len(x), len(x), bits_a == bits_b if one_dtype else None, len(differing), differing[0] if differing else None,
        max(ulps, default=0) if one_dtype else None, sum(ulps) / max(len(ulps), 1) if one_dtype else None,
        not_finite, root(0), root(1), root(2),
    )  # fmt: skip


def check(have: Distance, want: Distance) -> None:
    for name in (f.name for f in dataclasses.fields(Distance)):
        x, y = getattr(have, name), getattr(want, name)
        if isinstance(y, float):
            assert x == pytest.approx(y, rel=1e-12, abs=1e-300), name
        else:
            assert x == y and type(x) is type(y), name


def near(gen: np.random.Generator, tensor: Tensor) -> Tensor:
    """The tensor with a bit changed in some elements."""
    flip = (gen.random(tensor.bits.shape) < 0.5) << gen.integers(0, 3, tensor.bits.shape)
    flip = np.minimum(flip, 1) if tensor.dtype.name == "bool" else flip
    return Tensor(tensor.dtype, tensor.bits ^ flip.astype(tensor.bits.dtype))


@pytest.mark.parametrize("make", [random_bits, normal_bits])
@pytest.mark.parametrize("dtype", STORED)
def test_equal_dtypes(monkeypatch, dtype, make):
    monkeypatch.setattr(measure, "BLOCK", 64)
    monkeypatch.setattr(measure, "_SPAN", 128)
    gen = rng(dtype, make.__name__)
    for shape in ((), (0, 3), (1,), (7, 9), (64,), (300,)):
        a, other = (Tensor(DTYPES[dtype], make(gen, dtype, shape)) for _ in "ab")
        for b in (other, near(gen, a), a):
            check(tensor_distance(a, b), by_element(a, b))


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(["float64", "float32", "bfloat16", "float8_e4m3fn", "int32"], 2))
)
def test_different_dtypes(monkeypatch, pair):
    monkeypatch.setattr(measure, "BLOCK", 64)
    gen = rng(pair)
    for make in (random_bits, normal_bits):
        for shape in ((), (0,), (130,)):
            a, b = (Tensor(DTYPES[d], make(gen, d, shape)) for d in pair)
            check(tensor_distance(a, b), by_element(a, b))
    x = gen.standard_normal(100).astype(native("bfloat16"))
    found = tensor_distance(Tensor.of(x), Tensor.of(x.astype(np.float32)))
    assert (found.differing, found.relative, found.equal, found.max_ulp) == (0, 0.0, None, None)


def test_shares_of_zeros_and_nan():
    a = Tensor.of(np.array([0.0, np.nan, np.inf, 1.0, np.inf], np.float32))
    b = Tensor.of(np.array([-0.0, np.nan, np.inf, 1.0, -np.inf], np.float32))
    b.bits[1] ^= 1 << 31  # another NaN
    found = tensor_distance(a, b)
    assert (found.differing, found.first, found.not_finite, found.equal) == (2, 0, 1, False)
    assert found.relative == math.inf
    zeros = tensor_distance(Tensor.of(np.float32([0, 2])), Tensor.of(np.float32([-0.0, 2])))
    assert (zeros.differing, zeros.max_ulp, zeros.relative, zeros.equal) == (1, 0, 0.0, False)
    one = tensor_distance(Tensor.of(np.float64([1, 1])), Tensor.of(np.float64([1, 3])))
    assert one.relative == pytest.approx(math.sqrt(2))
    assert tensor_distance(Tensor.of(np.zeros(2)), Tensor.of(np.ones(2))).relative == math.inf


@pytest.mark.parametrize("at", [0, 63, 64, 130, 299])
def test_one_element_in_any_block(monkeypatch, at):
    monkeypatch.setattr(measure, "BLOCK", 64)
    monkeypatch.setattr(measure, "_SPAN", 128)
    a = Tensor(DTYPES["float32"], normal_bits(rng(at), "float32", (300,)))
    b = Tensor(a.dtype, a.bits ^ (np.arange(300) == at).astype(np.uint32))
    found = tensor_distance(a, b)
    assert (found.differing, found.first, found.max_ulp, found.mean_ulp) == (1, at, 1, 1 / 300)


def test_large_and_small_float64():
    for scale in (1e-310, 1e-200, 1e200, 1e300):
        x = rng(scale).standard_normal((2, 50)) * scale
        found, want = tensor_distance(Tensor.of(x[0]), Tensor.of(x[1])), by_element(Tensor.of(x[0]), Tensor.of(x[1]))
        assert found.relative == pytest.approx(want.relative, rel=1e-9) and math.isfinite(want.relative)


def test_shapes_must_be_equal(tmp_path):
    a, b = Tensor.of(np.zeros((2, 3))), Tensor.of(np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[3, 2\]"):
        tensor_distance(a, b)
    pair = [recorded(tmp_path / n, t.bits, "float64") for n, t in (("a", a), ("b", b))]
    with pytest.raises(ValueError, match=r"activation:x is \[2, 3\] and activation:x is \[3, 2\]"):
        distance(*pair)


# --- observations ---


def recorded(folder, bits, dtype, values="full", budget=2**30, hashed=True, **changes):
    e = entry("x", bits, dtype)
    e = e if hashed else e._replace(hash=None)
    write(folder, [[e]], options=Options(values=values, budget=budget), **changes)
    return Trace.open(folder).ranks[0].step(0)[0]


def test_equal_hashes_need_no_values(tmp_path):
    """Neither file of values is opened: one is missing, the other one damaged."""
    bits = random_bits(rng("hash"), "float32", (20, 30))
    a, b = (recorded(tmp_path / n, bits, "float32") for n in "ab")
    (tmp_path / "a/rank0/step-00000.safetensors").unlink()
    (tmp_path / "b/rank0/step-00000.safetensors").write_text("x")
    found = distance(a, b)
    assert (found.equal, found.compared, found.differing, found.max_ulp, found.relative) == (True, 600, 0, 0, 0.0)
    other = recorded(tmp_path / "c", bits, "float32", hash="another")
    with pytest.raises(TraceError, match=r"a/rank0/step-00000.safetensors: cannot be read: No such"):
        distance(a, other)


def test_what_is_known_without_values(tmp_path):
    gen = rng("none")
    x, y = (normal_bits(gen, "float32", (40,)) for _ in "ab")
    a, b, same = (recorded(tmp_path / n, t, "float32", "hash") for n, t in (("a", x), ("b", y), ("c", x)))
    assert distance(a, b) == Distance(40, 0, False) and distance(a, b).relative is None
    assert distance(a, same).equal is True
    for name, changes in (("d", {"hashed": False}), ("e", {"hash": "another"})):
        assert distance(a, recorded(tmp_path / name, x, "float32", "hash", **changes)) == Distance(40, 0, None)


@pytest.mark.parametrize(("hashed", "equal"), [(True, False), (False, None)])
def test_samples_meet_whole_tensors(tmp_path, hashed, equal):
    """Also samples of different sizes: those of another version, for which the number of places is patched."""
    gen = rng("samples")
    x = normal_bits(gen, "bfloat16", (3, 1000))
    y = x.copy()
    unseen = np.setdiff1d(np.arange(3000), places(3000, 1024))[7]
    y.reshape(-1)[unseen] ^= 1
    whole = [recorded(tmp_path / f"w{i}", t, "bfloat16", hashed=hashed) for i, t in enumerate((x, y))]
    sampled = [recorded(tmp_path / f"s{i}", t, "bfloat16", "sample", hashed=hashed) for i, t in enumerate((x, y))]
    assert distance(*whole).differing == 1 and distance(*whole).first == unseen and distance(*whole).equal is False
    for a, b in ((whole[0], sampled[1]), (sampled[0], whole[1]), (sampled[0], sampled[1])):
        found = distance(a, b)
        assert (found.elements, found.compared, found.differing, found.equal) == (3000, 1024, 0, equal)
    seen = int(places(3000, 1024)[100])
    y.reshape(-1)[seen] ^= 1
    found = distance(sampled[0], recorded(tmp_path / "z", y, "bfloat16", "sample", hashed=hashed))
    assert (found.differing, found.first, found.equal) == (1, seen, False)


def test_samples_of_different_sizes(tmp_path, monkeypatch):
    gen = rng("sizes")
    x, y = (normal_bits(gen, "float32", (5000,)) for _ in "ab")
    a = recorded(tmp_path / "a", x, "float32", "sample")
    monkeypatch.setattr("diptych.lab.traces.sampling.SAMPLES", 300)
    b = recorded(tmp_path / "b", y, "float32", "sample")
    at = places(5000, 300)
    want = by_element(Tensor.of(x[at], "float32"), Tensor.of(y[at], "float32"))
    want = dataclasses.replace(want, elements=5000, first=int(at[want.first]))
    check(distance(a, b), want)
    check(distance(recorded(tmp_path / "w", x, "float32"), b), want)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_pairs_come_in_order(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(measure, "BLOCK", 16)
    monkeypatch.setattr(measure, "_SPAN", 32)
    gen = rng("many")
    sizes = [int(n) for n in gen.integers(1, 400, 60)]
    tensors = [[normal_bits(gen, "float16", (n,)) for n in sizes] for _ in "ab"]
    tensors[1][3] = tensors[0][3]
    sides = []
    for name, each in zip("ab", tensors, strict=True):
        made = [[entry(f"s{i}", bits, "float16") for i, bits in enumerate(each)]]
        sides.append(Trace.open(write(tmp_path / name, made)).ranks[0].step(0))
    found = list(distances(zip(*sides, strict=True), threads))
    assert found == [distance(a, b) for a, b in zip(*sides, strict=True)]
    assert found[3].equal and [d.elements for d in found] == sizes
    for d, x, y in list(zip(found, *tensors, strict=True))[4:]:
        check(d, by_element(Tensor.of(x, "float16"), Tensor.of(y, "float16")))


def test_stopping_early_leaves_no_thread_behind(tmp_path):
    a = recorded(tmp_path / "a", normal_bits(rng(1), "float32", (10,)), "float32")
    b = recorded(tmp_path / "b", normal_bits(rng(2), "float32", (10,)), "float32")
    found = distances(itertools.repeat((a, b)))
    assert next(found).compared == 10
    found.close()


def test_memory_is_bounded(tmp_path):
    """Less than 16 MB of two tensors of 64 MB are ever in memory besides the mapped files. NumPy reports its memory to
    tracemalloc."""
    n, sides = 2**21, []
    for name in "ab":
        gen = rng("memory", name)
        with Writer(tmp_path / name, meta(options=Options(values="full", budget=2**40))) as writer:
            for step in range(2):
                x = [gen.integers(0, 2**14, k, np.uint16) for k in (4 * n, n, n, 2 * n)]
                sites = [Site(f"s{i}", "activation", 0, bits.shape, "bfloat16") for i, bits in enumerate(x)]
                writer.step(step, [Entry(site, values=bits) for site, bits in zip(sites, x, strict=True)])
        sides.append(Trace.open(tmp_path / name))
    tracemalloc.start()
    pairs = (p for s in (0, 1) for p in zip(*(t.ranks[0].step(s) for t in sides), strict=True))
    found = list(distances(pairs))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 8 and all(d.differing for d in found) and peak < 16 * 2**20
