"""transpose's CUDA kernel, without hardware, against NumPy."""

from __future__ import annotations

import ctypes

import pytest

from core import runner, simulation
from core.simulation import Tensor
from core.transpose import test_transpose as transposing
from diptych.core import _core

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def library():
    return simulation.built("transpose.cpp", ["cuda/transpose/transpose.cu"])


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 1), (8, 3)])
def test_bytes(library, monkeypatch, offsets):
    def simulated(x, out):
        message = ctypes.create_string_buffer(256)
        given = Tensor.of(x), Tensor.of(out)
        result = library.transpose(*(ctypes.byref(t) for t in given), message, len(message))
        assert result == 0, message.value.decode()

    monkeypatch.setattr(_core, "transpose", simulated)
    for shape in ((1, 1), (16, 16), (128, 128), (144, 272), (33, 130), (130, 33), (0, 5), (3, 129, 48)):
        transposing.check(runner.Numpy(), shape, offsets)
