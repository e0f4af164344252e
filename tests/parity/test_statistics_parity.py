"""statistics gives the same bits in the core, torch and JAX."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from core.statistics.test_statistics import NATIVE, drawn

from diptych import core
from diptych.jax.primitives.statistics import statistics as in_jax
from diptych.torch.primitives.statistics import statistics as in_torch


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu", "int16", "int32", "uint32", "uint8"]
)
def test_frameworks(dtype, device):
    for shape in ((), (7,), (33, 65), (3, 0), (4, 100, 257)):
        x = drawn(int(np.prod(shape)), dtype).view(NATIVE[dtype]).reshape(shape)
        tensor = torch.frombuffer(bytearray(x.tobytes() or 8), dtype=getattr(torch, dtype))[: x.size]
        want = core.statistics(x).tobytes()
        assert in_torch(tensor.reshape(shape).to(device)).cpu().numpy().tobytes() == want
        place = jax.devices("gpu" if device == "cuda" else "cpu")[0]
        assert np.asarray(in_jax(jax.device_put(x, place))).tobytes() == want
