"""The case tables that every test loops over: formats, dtypes, shapes, value sets, options.

Values are drawn afresh in each run. The seed is DIPTYCH_TEST_SEED or a new one, which child processes (xdist workers,
the parity tests' second framework) inherit through the environment; `report_header` and `Case.__str__` print it.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

SEED = int(os.environ.setdefault("DIPTYCH_TEST_SEED", str(secrets.randbits(32))))


def report_header() -> str:
    """One line for pytest_report_header: how to draw the same values again."""
    return f"values: DIPTYCH_TEST_SEED={SEED}"


def rng_for(case_id: str) -> np.random.Generator:
    """A generator of this run's seed and the case's name alone, so that order and worker do not matter."""
    return np.random.default_rng([SEED, zlib.crc32(case_id.encode())])


FORMATS = (
    "fp8_e4m3_tensor",
    "fp8_e5m2_tensor",
    "fp8_e4m3_1x128",
    "fp8_e5m2_1x128",
    "fp8_e4m3_128x128",
    "fp8_e5m2_128x128",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
)
DIVIDE_FORMATS = tuple(name for name in FORMATS if not name.startswith("mxfp8"))
TENSOR_FORMATS = tuple(name for name in FORMATS if name.endswith("_tensor"))

INPUT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

SHAPES: tuple[tuple[int, ...], ...] = (
    (0, 16),
    (16, 0),
    (0,),
    (2, 0, 48),
    (1, 1),
    (1,),
    (7,),
    (1, 200),
    (200, 1),
    (32, 32),
    (33, 65),
    (31, 129),
    (2, 3, 96),
    (128, 128),
    (130, 257),
    (256, 384),
)

# (pow2, eps) of the divide rule; the E8M0 rule has neither. A large eps lifts whole blocks; the last is subnormal.
OPTIONS = ((False, 0.0), (True, 0.0), (False, 2.0**-10), (True, 1e-12), (False, 1e-40))

# A reduced amax that a per-tensor quantize may be given, the corner cases of NUMERICS 2 included.
GIVEN_AMAX = tuple(
    np.float32(v) for v in (0.0, 1.5, 448.0, 1e-45, 1e-38, 1.3e-36, 2.0**-126, 3.4028235e38, math.inf, math.nan)
)

Values = Callable[[np.random.Generator, tuple[int, ...], np.dtype], np.ndarray]


def _bits(dtype: np.dtype) -> tuple[np.dtype, int]:
    """The unsigned integer of a dtype's width, and its count of mantissa bits."""
    return np.dtype(f"u{dtype.itemsize}"), ml_dtypes.finfo(dtype).nmant


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array([-1.0, 1.0]), shape)


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(np.float32).astype(dtype)


def _lattice(shape: tuple[int, ...], every: int = 32) -> np.ndarray:
    """A mask with exactly one element in every aligned run of 32, along rows and along columns alike."""
    if not shape:
        return np.ones(shape, bool)
    rows, cols = math.prod(shape[:-1]), shape[-1]
    return ((np.arange(rows)[:, None] + np.arange(cols)[None, :]) % every == 0).reshape(shape)


def _tiles(shape: tuple[int, ...], draw: Callable[[tuple[int, int]], np.ndarray]) -> np.ndarray:
    """One drawn value per 32 x 32 tile, so that a block of either copy sees only that value."""
    rows, cols = math.prod(shape[:-1]), shape[-1] if shape else 1
    values = draw((-(-rows // 32), -(-cols // 32)))
    return values.repeat(32, axis=0).repeat(32, axis=1)[:rows, :cols].reshape(shape)


def _specials(rng, shape, dtype, nan: bool, inf: bool, share: float) -> np.ndarray:
    """Normal values of which a share has all exponent bits set: inf, or NaN of any sign, payload and quietness."""
    uint, nmant = _bits(dtype)
    x = _cast(rng.standard_normal(shape), dtype)
    bits = x.view(uint).copy()
    exponent = ((1 << (8 * dtype.itemsize - 1)) - 1) >> nmant << nmant
    sign = rng.integers(0, 2, shape).astype(uint) << uint.type(8 * dtype.itemsize - 1)
    payload = rng.integers(1, 1 << nmant, shape).astype(uint)
    is_nan = rng.random(shape) < 0.5 if nan and inf else np.full(shape, nan)
    special = sign | uint.type(exponent) | np.where(is_nan, payload, uint.type(0)).astype(uint)
    return np.where(rng.random(shape) < share, special, bits).astype(uint).view(dtype)


def normal(rng, shape, dtype):
    return _cast(rng.standard_normal(shape), dtype)


def zeros(rng, shape, dtype):
    return _cast(_signs(rng, shape) * 0.0, dtype)


def zero_blocks(rng, shape, dtype):
    """Whole tiles of signed zeros among normal ones."""
    keep = _tiles(shape, lambda s: rng.integers(0, 2, s))
    return _cast(rng.standard_normal(shape) * keep, dtype)


def subnormal_input(rng, shape, dtype):
    """Only subnormals of the input dtype, of all lengths."""
    uint, nmant = _bits(dtype)
    mantissa = rng.integers(0, 1 << nmant, shape).astype(uint) >> rng.integers(0, nmant, shape).astype(uint)
    sign = rng.integers(0, 2, shape).astype(uint) << uint.type(8 * dtype.itemsize - 1)
    return (mantissa | sign).astype(uint).view(dtype)


def subnormal_result(rng, shape, dtype):
    """A block reaches from its amax of 1 down past the smallest FP8 subnormal."""
    x = np.exp2(rng.uniform(-36, 0, shape))
    return _cast(np.where(_lattice(shape), 1.0, x) * _signs(rng, shape), dtype)


def huge(rng, shape, dtype):
    """The top binade of the dtype, its largest finite value included."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.where(rng.random(shape) < 0.1, 1.0, rng.uniform(0.5, 1.0, shape)) * largest
    return _cast(x * _signs(rng, shape), dtype)


def tiny(rng, shape, dtype):
    """Around the smallest normal value, both sides."""
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    return _cast(rng.uniform(0.0, 8.0, shape) * smallest * _signs(rng, shape), dtype)


def inf_mix(rng, shape, dtype):
    return _specials(rng, shape, dtype, nan=False, inf=True, share=0.01)


def nan_mix(rng, shape, dtype):
    return _specials(rng, shape, dtype, nan=True, inf=False, share=0.05)


def inf_nan_mix(rng, shape, dtype):
    return _specials(rng, shape, dtype, nan=True, inf=True, share=0.02)


def all_nan(rng, shape, dtype):
    return _specials(rng, shape, dtype, nan=True, inf=False, share=2.0)


def _ties(element: str) -> Values:
    """Midpoints of neighbouring FP8 values, with the largest value in each run of 32, so that scales are 1."""

    def values(rng, shape, dtype):
        fp8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[element]
        grid = np.arange(128, dtype=np.uint8).view(fp8).astype(np.float64)
        grid = grid[np.isfinite(grid)]
        x = rng.choice((grid[1:] + grid[:-1]) / 2, shape)
        return _cast(np.where(_lattice(shape), grid[-1], x) * _signs(rng, shape), dtype)

    return values


def powers_of_two(rng, shape, dtype):
    """The whole exponent range of the dtype; half of the tiles hold one exponent only."""
    info = ml_dtypes.finfo(dtype)
    low, high = info.minexp - info.nmant, info.maxexp
    narrow = _tiles(shape, lambda s: rng.integers(low, high, s))
    mixed = _tiles(shape, lambda s: rng.integers(0, 2, s))
    return _cast(np.exp2(np.where(mixed, rng.integers(low, high, shape), narrow)) * _signs(rng, shape), dtype)


def outlier(rng, shape, dtype):
    """One value of 2^14 in each run of 32 among normal ones."""
    x = np.where(_lattice(shape), 2.0**14 * rng.uniform(1, 2, shape), rng.standard_normal(shape))
    return _cast(x * _signs(rng, shape), dtype)


def scale_edges(rng, shape, dtype):
    """Tiles of 7 * 2^n and its neighbours: amax / max is a power of two (448 = 7 * 2^6, 57344 = 7 * 2^13) or just off.

    These are the edges of the E8M0 round-up and of the pow2 floor, down to where amax / max is subnormal.
    """
    uint, _ = _bits(dtype)
    info = ml_dtypes.finfo(dtype)
    low, high = info.minexp - info.nmant, info.maxexp - 2

    def draw(tiles):
        # Half around the float32 subnormal boundary of amax / max, where the dtype reaches it.
        deep = rng.integers(max(low, -124), max(low, -112), tiles, endpoint=True)
        n = np.where(rng.random(tiles) < 0.5, deep, rng.integers(low, high, tiles))
        bits = _cast(7.0 * np.exp2(n), dtype).view(uint).astype(np.int64)
        return np.maximum(bits + rng.integers(-2, 3, tiles), 0)

    sign = rng.integers(0, 2, shape).astype(np.int64) << (8 * dtype.itemsize - 1)
    return (_tiles(shape, draw) | sign).astype(uint).view(dtype)


def random_bits(rng, shape, dtype):
    uint, _ = _bits(dtype)
    return rng.integers(0, 1 << (8 * dtype.itemsize), shape, dtype=np.uint64).astype(uint).view(dtype)


VALUE_SETS: dict[str, Values] = {
    "normal": normal,
    "zeros": zeros,
    "zero_blocks": zero_blocks,
    "subnormal_input": subnormal_input,
    "subnormal_result": subnormal_result,
    "huge": huge,
    "tiny": tiny,
    "inf_mix": inf_mix,
    "nan_mix": nan_mix,
    "inf_nan_mix": inf_nan_mix,
    "all_nan": all_nan,
    "ties_e4m3": _ties("e4m3"),
    "ties_e5m2": _ties("e5m2"),
    "powers_of_two": powers_of_two,
    "outlier": outlier,
    "scale_edges": scale_edges,
    "random_bits": random_bits,
}


def draw(case_id: str, values: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of one set under the generator of `case_id`."""
    with np.errstate(all="ignore"):
        return VALUE_SETS[values](rng_for(case_id), tuple(shape), INPUT_DTYPES[dtype])


@dataclass(frozen=True)
class QuantizeCase:
    """One quantize call: what goes in, and with which options."""

    format: str
    dtype: str
    shape: tuple[int, ...]
    values: str
    pow2: bool = False
    eps: float = 0.0

    @property
    def id(self) -> str:
        shape = "x".join(map(str, self.shape))
        options = f"-{'pow2' if self.pow2 else 'exact'}-{self.eps:g}" if self.format in DIVIDE_FORMATS else ""
        return f"{self.format}-{self.dtype}-{shape}-{self.values}{options}"

    def __str__(self) -> str:
        return f"{self.id} (DIPTYCH_TEST_SEED={SEED})"

    def make(self) -> np.ndarray:
        return draw(self.id, self.values, self.shape, self.dtype)


def quantize_cases(
    formats: Sequence[str] = FORMATS,
    dtypes: Sequence[str] = tuple(INPUT_DTYPES),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    values: Sequence[str] = tuple(VALUE_SETS),
    every_option: bool = False,
) -> Iterator[QuantizeCase]:
    """Every format x dtype x shape x value set; options of the divide rule take turns unless all are asked for."""
    for fmt in formats:
        options = OPTIONS if fmt in DIVIDE_FORMATS else OPTIONS[:1]
        for turn, (dtype, shape, value) in enumerate(itertools.product(dtypes, shapes, values)):
            for pow2, eps in options if every_option else (options[turn % len(options)],):
                yield QuantizeCase(fmt, dtype, shape, value, pow2, eps)


# (M, N, K): empty, one element, ragged against every block, several blocks.
GEMM_SHAPES = (
    (0, 4, 8),
    (4, 0, 8),
    (4, 8, 0),
    (1, 1, 1),
    (1, 1, 3),
    (7, 5, 33),
    (16, 16, 128),
    (33, 65, 127),
    (64, 48, 129),
    (130, 20, 257),
    (128, 144, 384),
    (3, 2, 1000),
)
# What the CUDA tensor cores take (multiples of 16), several tiles included.
GEMM_SHAPES_ALIGNED = ((16, 16, 128), (64, 48, 256), (256, 128, 384), (128, 256, 1024))

# Operands of one family; elements mix (HYBRID), and so do 1x128 and 128x128.
GEMM_PAIRS = tuple(
    (a, b)
    for family in (("tensor",), ("1x128", "128x128"), ("mxfp8",))
    for a, b in itertools.product([f for f in FORMATS if any(word in f.split("_") for word in family)], repeat=2)
)
# (alpha, beta, bias dtype, out dtype), taking turns
GEMM_EPILOGUES = (
    (1.0, 0.0, None, "float32"),
    (1.0, 0.0, "bfloat16", "bfloat16"),
    (0.7, 0.0, "float32", "float16"),
    (-1.5, 1.0, None, "float32"),
    (1.0, 0.5, "float16", "bfloat16"),
)


@dataclass(frozen=True)
class GemmCase:
    """One product; `a_columnwise` says that A is the columnwise copy of a [K, M] tensor, B alike of a [K, N] one."""

    a_format: str
    b_format: str
    mnk: tuple[int, int, int]
    a_columnwise: bool
    b_columnwise: bool
    alpha: float
    beta: float
    bias_dtype: str | None
    out_dtype: str
    values: str = "normal"

    @property
    def id(self) -> str:
        copies = "".join("c" if c else "r" for c in (self.a_columnwise, self.b_columnwise))
        epilogue = f"{self.alpha:g}-{self.beta:g}-{self.bias_dtype}-{self.out_dtype}"
        mnk = "x".join(map(str, self.mnk))
        return f"{self.a_format}-{self.b_format}-{mnk}-{copies}-{epilogue}-{self.values}"

    def __str__(self) -> str:
        return f"{self.id} (DIPTYCH_TEST_SEED={SEED})"

    def make(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Tensors A, B (as they are before quantizing), bias `[N]` and C `[M, N]`; the latter two may be None."""
        m, n, k = self.mnk
        a = draw(f"{self.id}-a", self.values, (k, m) if self.a_columnwise else (m, k), "float32")
        b = draw(f"{self.id}-b", self.values, (k, n) if self.b_columnwise else (n, k), "float32")
        bias = draw(f"{self.id}-bias", "normal", (n,), self.bias_dtype) if self.bias_dtype else None
        c = draw(f"{self.id}-c", "normal", (m, n), self.out_dtype) if self.beta else None
        return a, b, bias, c


def gemm_cases(
    pairs: Sequence[tuple[str, str]] = GEMM_PAIRS,
    shapes: Sequence[tuple[int, int, int]] = GEMM_SHAPES,
    values: Sequence[str] = ("normal",),
) -> Iterator[GemmCase]:
    """Every pair x shape x value set; copies and epilogues take turns so that each pair meets each of them."""
    copies = tuple(itertools.product((False, True), repeat=2))
    for pair_turn, (a, b) in enumerate(pairs):
        for turn, (mnk, value) in enumerate(itertools.product(shapes, values), start=pair_turn):
            (a_copy, b_copy), epilogue = copies[turn % len(copies)], GEMM_EPILOGUES[turn % len(GEMM_EPILOGUES)]
            yield GemmCase(a, b, mnk, a_copy, b_copy, *epilogue, values=value)
