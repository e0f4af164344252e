"""Quantized tensors, what they were before, and what NumPy says of them, for the statistics of both captures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

import oracle
from cases.values import rng_for
from diptych.lab.capture import beyond
from diptych.lab.traces import Quantization, quantization

ELEMENT = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn"}


class Case(NamedTuple):
    """`largest`: what the format's largest value is in each place, dequantized. `want`: of NumPy's `quantization`."""

    x: np.ndarray
    result: np.ndarray
    largest: np.ndarray
    beyond: float
    want: Quantization


def cases(fmt: str) -> Iterator[Case]:
    """Values that are clipped and flushed, without and with what is not finite, and an empty tensor."""
    x = rng_for(fmt).standard_normal((128, 256)).astype(np.float32)
    x[rng_for(f"{fmt} 1").random(x.shape) < 0.1] = 0
    x[0, 0], x[1] = 1e4, 1e-9
    yield _case(x, fmt)
    yield _case(x.astype(ml_dtypes.bfloat16), fmt)
    x = x.copy()
    x[3, 5], x[64, 7] = np.nan, np.inf
    yield _case(x, fmt)
    yield _case(np.zeros((128, 256), np.float32), fmt)


def _case(x: np.ndarray, fmt: str) -> Case:
    more = {"scale": np.float32(100)} if oracle.FORMATS[fmt].one_scale else {}  # a delayed scale, which clips
    copy = oracle.quantize(x, fmt, columnwise=False, **more).copy()
    top = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x77}[copy.fmt.element]
    result, largest = (
        oracle.dequantize(c) for c in (copy, dataclasses.replace(copy, data=np.full_like(copy.data, top)))
    )
    codes = oracle.unpack(copy.data) if copy.fmt.pack == 2 else copy.data
    element = ELEMENT[copy.fmt.element]
    with np.errstate(all="ignore"):
        return Case(x, result, largest, beyond(element), quantization(x, codes, element, result))


def same(got: Quantization, want: Quantization) -> None:
    assert (got.clipped, got.flushed) == (want.clipped, want.flushed)
    if want.sqnr is None or not np.isfinite(want.sqnr):
        assert got.sqnr == want.sqnr
    else:
        assert got.sqnr is not None and abs(got.sqnr - want.sqnr) < 1e-6
