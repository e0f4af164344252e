"""Tensors and traces for the tests of traces."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np

from cases.values import rng_for
from diptych.lab.traces import DTYPES, Entry, Meta, Options, Site, Writer, bits_of, statistics_of

STORED = [name for name, d in DTYPES.items() if d.code]
FLOATS = [name for name in STORED if DTYPES[name].kind == "float"]


def rng(*key: object) -> np.random.Generator:
    """Random numbers of this run, which DIPTYCH_TEST_SEED repeats, and of `key`."""
    return rng_for(f"traces {key}")


def native(dtype: str) -> np.dtype:
    """The dtype of NumPy or ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def random_bits(gen: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits, with many zeros of both signs, subnormals, infinities and NaN."""
    nbytes = DTYPES[dtype].nbytes
    if dtype == "bool":
        return gen.integers(0, 2, shape).astype(np.uint8)
    bits = gen.integers(0, 256, (*shape, nbytes)).astype(np.uint8).view(f"u{nbytes}")[..., 0]
    if DTYPES[dtype].signed and DTYPES[dtype].kind == "float":
        top = DTYPES[dtype].largest
        special = np.array([0, 1, 2, top, top + 1, min(top + 2, 2 ** (8 * nbytes - 1) - 1)], bits.dtype)
        special = np.concatenate([special, special | bits.dtype.type(1 << (8 * nbytes - 1))])
        bits = np.where(gen.random(shape) < 0.4, gen.choice(special, shape), bits)
    return bits


def normal_bits(gen: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bits of normally distributed values; of small whole numbers if the dtype is not a float."""
    x = gen.standard_normal(shape) * 3
    x = np.abs(x) if not DTYPES[dtype].signed else x
    return bits_of(np.asarray(x, np.float32).astype(native(dtype)))[1].reshape(shape)


def digest(bits: np.ndarray) -> str:
    return hashlib.blake2b(bits.tobytes(), digest_size=16).hexdigest()


def meta(**changes: object) -> Meta:
    given = {
        "framework": "torch", "versions": {"torch": "2.13"}, "device": "cpu", "ranks": 1, "recipe": None,
        "hash": "blake2b-128", "instrumented": True, "plain_bits": None, "options": Options(values="full"),
    }  # fmt: skip
    return Meta(**(given | changes))  # type: ignore[arg-type]


def entry(name: str, bits: np.ndarray, dtype: str, kind: str = "activation", **site: object) -> Entry:
    """Returns the entry with which a frontend hands over a tensor."""
    place = Site(name, kind, site.pop("call", 0), bits.shape, dtype, **site)  # type: ignore[arg-type]
    return Entry(place, statistics_of(bits, dtype), digest(bits), bits)


def write(folder: Path, steps: list[list[Entry]], **changes: object) -> Path:
    with Writer(folder, meta(**changes)) as writer:
        for number, entries in enumerate(steps):
            writer.step(number, entries)
    return folder


def few(gen: np.random.Generator, steps: int = 2) -> list[list[Entry]]:
    """Steps of a few sites of several dtypes and shapes."""
    shapes = {"float32": (5, 7), "bfloat16": (3, 0, 2), "float8_e4m3fn": (1500,), "float64": (), "int32": (2, 1)}
    made = []
    for _ in range(steps):
        each = {d: random_bits(gen, d, shape) for d, shape in shapes.items()}
        made.append([entry(f"layer.{d}", bits, d, call=i % 2) for i, (d, bits) in enumerate(each.items())])
    return made
