"""hash gives the same bits in the core, torch and JAX."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import cases
import diptych.jax as dj
import diptych.torch as dt
from diptych import core


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "bool", "int16", "complex64"])
def test_frameworks(dtype, device):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for shape in ((), (7,), (33, 65), (3, 0), (4, 100, 257)):
        raw = cases.rng_for(f"hash {dtype} {shape}").integers(0, 256, int(np.prod(shape)) * kind.itemsize)
        x = (raw < 128 if kind.kind == "b" else raw.astype(np.uint8).view(kind)).reshape(shape)
        tensor = torch.frombuffer(bytearray(x.tobytes() or kind.itemsize), dtype=getattr(torch, dtype))[: x.size]
        want = core.hash(x)
        assert np.array_equal(want, dt.hash(tensor.reshape(shape).to(device)).cpu())
        place = jax.devices("gpu" if device == "cuda" else "cpu")[0]
        assert np.array_equal(want, dj.hash(jax.device_put(x, place)))
