"""hash against the oracle for any length, start, thread count and instruction set; what must change it, and errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cases
from core import runner
from diptych import core
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.core import _core
from oracle.hash import hash_bits, hash_rows

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 1023, 1024, 1025, 2047, 2048, 5000, 32767, 32768, 32769, 131073, 300001)
BYTE_FLOATS = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
DTYPES = (
    *map(np.dtype, ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")),
    np.dtype(ml_dtypes.bfloat16),
    *(np.dtype(getattr(ml_dtypes, f"float8_{name}")) for name in BYTE_FLOATS),
)


def drawn(n: int, name: str = "") -> np.ndarray:
    return cases.rng_for(f"hash {name} {n}").integers(0, 256, n).astype(np.uint8)


def distinct(hashes: list[np.ndarray] | np.ndarray) -> bool:
    """Whether all are different, in each of their two halves too: of 64 bits, all differ if the hash is any good."""
    halves = np.ascontiguousarray(hashes).view(np.int64)
    return all(len(np.unique(half)) == len(halves) for half in halves.T)


def hash_each(rows: np.ndarray) -> np.ndarray:
    """The core's hash of each row."""
    out = np.empty((len(rows), 4), np.int32)
    for row, made in zip(np.ascontiguousarray(rows).view(np.uint8), out, strict=True):
        _core.hash((row, runner.CODES["uint8"]), (made, runner.CODES["int32"]))
    return out


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 15])
def test_bytes(offset, device):
    be = runner.backend(device)
    for n in LENGTHS:
        x = drawn(n)
        runner.same_bits(runner.hash(be, x, offset=offset), hash_bits(x), f"{n} bytes from {offset} on")


@pytest.mark.parametrize("dtype", [*cases.INPUT_DTYPES, "float8_e4m3fn", "float8_e8m0fnu", "int32", "int64", "float64"])
def test_dtypes_of_the_core(dtype, device):
    be = runner.backend(device)
    for shape in ((), (5,), (3, 0), (7, 33), (2, 3, 130)):
        x = drawn(int(np.prod(shape)) * runner.NUMPY[dtype].itemsize, dtype).view(runner.NUMPY[dtype]).reshape(shape)
        runner.same_bits(runner.hash(be, x, dtype), hash_bits(x), f"{dtype}{shape}")


def test_large(device):
    """Several tasks and threads, and more blocks than a device takes at once."""
    be = runner.backend(device)
    for n in (1 << 20, 8 << 20, (9 << 20) + 1022):
        x = drawn(n)
        want = hash_bits(x)
        for threads in (1, 2, 3, 7):
            with runner.setting(threads=threads):
                runner.same_bits(runner.hash(be, x), want, f"{n} {threads}")


@pytest.mark.parametrize("isa", runner.isas())
def test_instruction_sets(isa):
    with runner.setting(isa=isa):
        for n in LENGTHS:
            x = drawn(n)
            runner.same_bits(core.hash(x), hash_bits(x), f"{isa} {n}")


def test_known_answers():
    """Hashes are kept in files, so the definition and the oracle must not change together."""
    known = {
        b"": "a333d71ca4469950979990be0ee511bf",
        b"abc": "b624153b487b10f2d0af41af7287b13d",
        b"abc\0": "a77ace210398798cca51ece244f2b8d9",
        bytes(range(256)) * 20: "df20df452c192e440c6e53acf84a5f51",
    }
    for text, want in known.items():
        assert core.hash(np.frombuffer(text, np.uint8)).tobytes().hex() == want, text[:8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_verb_takes_any_dtype(dtype):
    x = drawn(24 * 5 * dtype.itemsize, str(dtype))
    x = (x.view(dtype) if dtype.kind != "b" else x < 128).reshape(24, 5)
    x.setflags(write=False)
    for v in (x, x.T, x[::2, 1:3], x[3], x[:0], x[2:3, 2].reshape(()), x.reshape(-1)[::120], x[:0].T):
        got = core.hash(v)
        assert got.dtype == np.int32 and got.shape == (4,)
        runner.same_bits(got, hash_bits(v), f"{dtype}{v.shape}")
    runner.same_bits(core.hash(x), core.hash(x.reshape(5, 24)), "the shape does not count")


def test_each_bit_counts():
    """All inputs that differ in one bit have different hashes, among zeros and among random bytes."""
    for x in (np.zeros(1040, np.uint8), drawn(1040)):
        flips = np.unpackbits(x)[None] ^ np.eye(8 * len(x), dtype=np.uint8)
        assert distinct(hash_each(np.concatenate([np.packbits(flips, axis=1), x[None]])))


def test_places_count():
    """Swapped words, 16-bit halves, bytes, vectors, blocks and rows, and transposition change the hash."""
    x = drawn(8192, "places")
    moved = [x]
    for size in (1, 2, 4, 8, 16, 32, 64, 256, 512, 1024, 2048):
        units = x.reshape(-1, size)
        for a, b in ((0, 1), (0, 2), (1, 3), (0, len(units) - 1)):
            swapped = units.copy()
            swapped[[a, b]] = units[[b, a]]
            moved.append(swapped)
    moved += [x.view(kind).reshape(-1, cols).T for kind in ("u1", "u2", "u4") for cols in (2, 16, 32)]
    moved += [np.roll(x, shift) for shift in (1, 2, 4, 8, 64, 1024)] + [x[::-1]]
    different = {each.tobytes(): each for each in moved}  # two bytes drawn alike may be swapped without effect
    assert len(different) > len(moved) - 4
    assert distinct([core.hash(each) for each in different.values()])


def test_lengths_count():
    """Zeros at the end, and zeros alone, of any number."""
    start = drawn(40, "lengths")
    assert distinct([core.hash(np.concatenate([start, np.zeros(n, np.uint8)])) for n in range(2100)])
    assert distinct([core.hash(np.zeros(n, np.uint8)) for n in range(2100)])


def test_one_value_among_zeros():
    """One value at any place, in either of two blocks; -0 among +0 is one of them."""
    for value in (-0.0, 1.0, -1.0, 2.0, 1e-45):
        assert distinct(hash_each(np.where(np.eye(512, dtype=bool), np.float32(value), np.float32(0))))


def test_no_sums_of_similar_inputs_meet():
    """2^17 patterns of signs, of small integers and of bfloat16 steps, all different."""
    n = 1 << 17
    bits = (np.arange(n)[:, None] >> np.arange(17)) & 1
    signs = np.where(bits, np.float32(-0.0), np.float32(0.0))
    pairs = np.stack(np.divmod(np.arange(n, dtype=np.int32), 362), -1)
    steps = (0x3F80 + bits).astype(np.uint16)
    blocks = np.zeros((n >> 4, 17, 1024), np.uint8)
    blocks[..., 0] = bits[: n >> 4]  # of 17 blocks, each with another first byte
    for rows in (signs, 1 - 2.0 * bits.astype(np.float32), pairs, steps, blocks.reshape(n >> 4, -1)):
        assert distinct(hash_each(rows))


@pytest.mark.slow
def test_a_million_similar_inputs():
    n = 1 << 20
    bits = (np.arange(n)[:, None] >> np.arange(20)) & 1
    rows = np.concatenate([np.where(bits, np.float32(-0.0), np.float32(0.0)), 1 - 2.0 * bits.astype(np.float32)])
    assert distinct(hash_each(rows))


def test_the_oracle_hashes_rows_alike():
    rows = drawn(3 * 1500).reshape(3, 1500)
    runner.same_bits(hash_rows(rows), np.stack([hash_bits(row) for row in rows]), "rows")


def test_errors():
    swapped = np.ones(3, np.dtype(np.float32).newbyteorder())
    for error, said, call in (
        (ArgumentError, "hash: x must be a NumPy array, got list", lambda: core.hash([1.0])),
        (DTypeError, "hash: x is big-endian", lambda: core.hash(swapped)),
        (DTypeError, "hash: x must hold integers.* got object", lambda: core.hash(np.array([None]))),
        (DTypeError, "hash: x must hold", lambda: core.hash(np.array(["a"]))),
        (DTypeError, "hash: x must hold", lambda: core.hash(np.zeros(2, "i4, f4"))),
        (DTypeError, "hash: x must hold .*longdouble", lambda: core.hash(np.zeros(2, np.longdouble))),
        (DTypeError, r"hash: x must hold .* got int4\[2\]", lambda: core.hash(np.zeros(2, ml_dtypes.int4))),
    ):
        with pytest.raises(error, match=said):
            call()


def test_errors_of_the_binding(device):
    be = runner.backend(device)
    x, out = be.put(np.zeros(8, np.int32), "int32"), be.put(np.zeros(4, np.int32), "int32")
    for error, said, call in (
        (TypeError, "hash: x is missing", lambda: _core.hash(None, out)),
        (TypeError, "hash: out is missing", lambda: _core.hash(x, None)),
        (ShapeError, r"hash: out must be \[4\]", lambda: _core.hash(x, x)),
        (DTypeError, "hash: out must be int32", lambda: _core.hash(x, be.put(np.zeros(4, np.float32), "float32"))),
        (ValueError, "aligned to 8 bytes", lambda: _core.hash(x, be.put(np.zeros(4, np.int32), "int32", 1))),
        (ValueError, "overlaps", lambda: _core.hash(out, out)),
    ):
        with pytest.raises(error, match=said):
            call()
