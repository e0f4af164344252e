"""transpose against NumPy, for any extents, alignment and number of matrices."""

from __future__ import annotations

import numpy as np
import pytest

import cases
from core import runner
from diptych.core import _core

SIDES = (0, 1, 7, 8, 16, 63, 64, 127, 128, 144, 257)
SHAPES = (
    *((rows, cols) for rows in SIDES for cols in SIDES),
    *((matrices, *shape) for matrices in (0, 1, 3) for shape in ((130, 48), (16, 256), (5, 0))),
    (2, 3, 144, 33),
)


def check(be, shape, offsets=(0, 0), dtype="uint8"):
    x = cases.rng_for(f"transpose {shape}").integers(0, 256, shape).astype(np.uint8)
    got = runner.transpose(be, x, dtype, offsets)
    runner.same_bits(got, np.ascontiguousarray(x.swapaxes(-1, -2)), f"{shape} {offsets} {dtype}")


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_bytes(dtype, device):
    be = runner.backend(device)
    for shape in SHAPES:
        check(be, shape, dtype=dtype)


@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (3, 8), (16, 16)])
def test_unaligned(offsets, device):
    be = runner.backend(device)
    for shape in ((128, 128), (144, 272), (3, 64, 48), (100, 33)):
        check(be, shape, offsets)


def test_large(device):
    """Several tasks and threads, and more tiles than a device runs at once."""
    be = runner.backend(device)
    with runner.setting(threads=3):
        for shape in ((2000, 3001), (4096, 1536), (40, 128, 256)):
            check(be, shape)


def test_errors(device):
    be = runner.backend(device)
    x, out = be.put(np.zeros((4, 6), np.uint8), "uint8"), be.put(np.zeros((6, 4), np.uint8), "uint8")
    four = be.put(np.zeros((4, 6), np.float32), "float32")
    row = be.put(np.zeros(4, np.uint8), "uint8")
    other = be.put(np.zeros((6, 4), np.uint8), "float8_e4m3fn")
    for error, said, call in (
        (ValueError, r"out must be uint8\[6, 4\]", lambda: _core.transpose(x, x)),
        (ValueError, "two dimensions", lambda: _core.transpose(row, row)),
        (TypeError, "one byte", lambda: _core.transpose(four, out)),
        (TypeError, "out must be uint8", lambda: _core.transpose(x, other)),
        (ValueError, "overlaps", lambda: _core.transpose(*[be.put(np.zeros((4, 4), np.uint8), "uint8")] * 2)),
    ):
        with pytest.raises(error, match=said):
            call()
