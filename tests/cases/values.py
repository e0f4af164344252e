"""Value sets, and the generators that draw from them.

Values are drawn afresh in each run. The seed is DIPTYCH_TEST_SEED or a new one, which child processes (xdist workers,
the parity tests' second framework) inherit through the environment; `report_header` and the cases' `__str__` print it.
"""

from __future__ import annotations

import math
import os
import secrets
import zlib
from collections.abc import Callable

import ml_dtypes
import numpy as np

SEED = int(os.environ.setdefault("DIPTYCH_TEST_SEED", str(secrets.randbits(32))))


def report_header() -> str:
    """One line for pytest_report_header: how to draw the same values again."""
    return f"values: DIPTYCH_TEST_SEED={SEED}"


def rng_for(case_id: str) -> np.random.Generator:
    """A generator of this run's seed and the case's name alone, so that order and worker do not matter."""
    return np.random.default_rng([SEED, zlib.crc32(case_id.encode())])


INPUT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

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
    """A mask with exactly one element in every aligned run of `every`, along rows and along columns alike."""
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


def nan_mix(rng, shape, dtype):
    return _specials(rng, shape, dtype, nan=True, inf=False, share=0.05)


def inf_nan_mix(rng, shape, dtype):
    return _specials(rng, shape, dtype, nan=True, inf=True, share=0.02)


def inf_places(rng, shape, dtype):
    """Infinities of either sign where kernels have edges: first and last elements, whole rows, columns and tiles.

    Among normal values, subnormals, NaN or nothing finite at all.
    """
    x = (normal, subnormal_input, tiny, nan_mix)[rng.integers(4)](rng, shape, dtype)
    if not x.size:
        return x
    infinite = np.zeros((math.prod(shape[:-1]), shape[-1] if shape else 1), bool)
    row, col = (rng.integers(n) for n in infinite.shape)
    places = [np.s_[0, 0], np.s_[-1, -1], np.s_[0, -1], np.s_[row, col], np.s_[row], np.s_[:, col], np.s_[:, -1],
              np.s_[row // 32 * 32 :, col // 32 * 32 :], np.s_[row // 16 * 16 :: 128, :16]]  # fmt: skip
    for place in rng.choice(len(places), rng.integers(1, 4), replace=False):
        infinite[places[place]] = True
    infinite |= rng.random() < 1 / 16
    return np.where(infinite.reshape(shape), _cast(_signs(rng, shape) * math.inf, dtype), x).astype(dtype)


def all_nan(rng, shape, dtype):
    return _specials(rng, shape, dtype, nan=True, inf=False, share=2.0)


def _fp8_grid(fp8) -> np.ndarray:
    grid = np.arange(128, dtype=np.uint8).view(fp8).astype(np.float64)
    return grid[np.isfinite(grid)]


GRIDS = {
    "e4m3": _fp8_grid(ml_dtypes.float8_e4m3fn),
    "e5m2": _fp8_grid(ml_dtypes.float8_e5m2),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
}


def _ties(element: str) -> Values:
    """Midpoints of neighbouring values, with the largest value in each run of a block, so that factors are 1."""

    def values(rng, shape, dtype):
        grid, every = GRIDS[element], 16 if element == "e2m1" else 32
        x = rng.choice((grid[1:] + grid[:-1]) / 2, shape)
        return _cast(np.where(_lattice(shape, every), grid[-1], x) * _signs(rng, shape), dtype)

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


def level_edges(rng, shape, dtype):
    """Tiles around 6 times the E4M3 values and their midpoints below a tensor amax of 448 * 6.

    These are the edges of an E4M3 block scale: where it rounds, saturates or becomes 0.
    """
    uint, _ = _bits(dtype)
    grid = GRIDS["e4m3"]
    edges = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]) * 6

    def draw(tiles):
        bits = _cast(rng.choice(edges, tiles), dtype).view(uint).astype(np.int64)
        return np.maximum(bits + rng.integers(-2, 3, tiles), 0)

    sign = rng.integers(0, 2, shape).astype(np.int64) << (8 * dtype.itemsize - 1)
    x = (_tiles(shape, draw) | sign).astype(uint).view(dtype)
    if x.size:
        x.reshape(-1)[rng.integers(x.size)] = 448 * 6
    return x


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
    "nan_mix": nan_mix,
    "inf_nan_mix": inf_nan_mix,
    "inf_places": inf_places,
    "all_nan": all_nan,
    "ties_e4m3": _ties("e4m3"),
    "ties_e5m2": _ties("e5m2"),
    "ties_e2m1": _ties("e2m1"),
    "powers_of_two": powers_of_two,
    "outlier": outlier,
    "scale_edges": scale_edges,
    "level_edges": level_edges,
    "random_bits": random_bits,
}


def draw(case_id: str, values: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of one set under the generator of `case_id`."""
    with np.errstate(all="ignore"):
        return VALUE_SETS[values](rng_for(case_id), tuple(shape), INPUT_DTYPES[dtype])
