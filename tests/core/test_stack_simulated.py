"""The CUDA kernels that quantize stacks, without their hardware: their source against that of single tensors'."""

from __future__ import annotations

import ctypes

import pytest

import cases
from core import simulation

pytestmark = pytest.mark.simulated

KERNELS = ("cuda/quantize/tiles.cu", "cuda/quantize/amax.cu", "cuda/quantize/quantize.cu")


def test_each_tensor_has_the_bytes_that_it_has_alone():
    library = simulation.built("quantize_stack.cpp", KERNELS)
    message = ctypes.create_string_buffer(256)
    seed = int(cases.rng_for("simulated-stacks").integers(1 << 30))
    assert library.compare_stacks(seed, 60, message, len(message)) == 0, f"seed {seed}: {message.value.decode()}"
