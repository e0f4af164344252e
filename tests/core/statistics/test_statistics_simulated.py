"""The CUDA kernels of statistics, without hardware, against the oracle."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from core import runner, simulation
from core.simulation import Tensor
from core.statistics.test_statistics import NUMBERS, PARTS, drawn, rounding
from diptych.core import _core
from oracle.statistics import errors, statistics

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def library():
    return simulation.built("statistics.cpp", ["cuda/statistics/statistics.cu"])


@pytest.fixture
def simulated(library, monkeypatch):
    def call(x, result, largest, out, _, number, beyond):
        message = ctypes.create_string_buffer(256)
        scratch = np.full(_core.statistics_workspace_bytes(), 0xFF, np.uint8)
        given = [Tensor.of(t) for t in (x, result, largest, out, (scratch, runner.CODES["uint8"]))]
        given = [ctypes.byref(t) for t in given]
        done = library.statistics(*given, number, ctypes.c_float(beyond), message, len(message))
        assert done == 0, message.value.decode()

    monkeypatch.setattr(_core, "statistics", call)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_any_length(simulated, dtype):
    for n in (0, 1, 255, 257, 4096, 4097, 9000):  # a thread block takes 4096
        x = drawn(n, dtype)
        got = runner.statistics(runner.Numpy(), x, dtype)
        runner.same_bits(got, statistics(x, dtype), f"{n} {dtype}")


@pytest.mark.parametrize(("dtype", "n"), [("uint8", PARTS + 4097), ("float64", 257 * 4096 + 1)])
def test_many_parts(simulated, dtype, n):
    """Parts of 17 rows, and more parts than a thread block has threads."""
    x = drawn(n, dtype)
    runner.same_bits(runner.statistics(runner.Numpy(), x, dtype), statistics(x, dtype), f"{n} {dtype}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_of_rounding(simulated, dtype):
    for n in (0, 1, 4096, 4097, 9000):
        x, *rounded = rounding(n, dtype)
        got = runner.statistics(runner.Numpy(), x, dtype, rounded=rounded)
        runner.same_bits(got, errors(x, dtype, *rounded), f"{n} {dtype}")
