"""hash's CUDA kernels, without hardware, against the oracle."""

from __future__ import annotations

import ctypes

import pytest

from core import runner, simulation
from core.hash.test_hash import drawn
from core.simulation import Tensor
from diptych.core import _core
from oracle.hash import hash_bits

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def library():
    return simulation.built("hash.cpp", ["cuda/hash/hash.cu"])


@pytest.mark.parametrize("offset", [0, 1, 4, 6])
def test_bytes(library, monkeypatch, offset):
    def simulated(x, out):
        message = ctypes.create_string_buffer(256)
        given = Tensor.of(x), Tensor.of(out)
        result = library.hash(*(ctypes.byref(t) for t in given), message, len(message))
        assert result == 0, message.value.decode()

    monkeypatch.setattr(_core, "hash", simulated)
    # One thread block takes up to 32768 bytes. A device of three processors has at most 12, 98304 bytes at a time.
    for n in (0, 1, 5, 1023, 1024, 1040, 9000, 32767, 32769, 98304, 250003):
        x = drawn(n)
        runner.same_bits(runner.hash(runner.Numpy(), x, offset=offset), hash_bits(x), f"{n} bytes from {offset} on")
