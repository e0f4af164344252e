"""NumPy gives a dtype one name in both byte orders; the core takes only this machine's and refuses the other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from diptych import core
from diptych.common.errors import DTypeError
from diptych.common.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from diptych.core import _core

MX, NOISY = MXFP8Quantizer(), NVFP4Quantizer(stochastic_rounding=True)
X = np.arange(1, 64 * 32 + 1, dtype=np.float32).reshape(64, 32)
ONE, RNG = np.ones(1, np.float32), np.arange(4, dtype=np.int32)
ROUTING = np.array([[0], [1], [0]], np.int32)
MAP = core.permute_map(ROUTING, experts=2)
Y, PROBS, OFFSETS = np.ones((3, 4), np.float32), np.full((3, 1), 0.5, np.float32), np.array([0, 2, 3], np.int32)
Q = core.quantize(X, Float8CurrentScalingQuantizer())
STACK = core.quantize_stack(np.ones((2, 32, 32), np.float32), MX)
ROWS = core.quantize(X[:32], MX)


def swapped(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder())


def moved(name: str) -> core.RowMap:
    return dataclasses.replace(MAP, **{name: swapped(getattr(MAP, name))})


# Every argument that takes a NumPy array: called with it in the other order.
CALLS: dict[str, Callable[[], Any]] = {
    "amax x": lambda: core.amax(swapped(X)),
    "amax half": lambda: core.amax(swapped(X.astype(np.float16))),
    "quantize x": lambda: core.quantize(swapped(X), MX),
    "quantize amax": lambda: core.quantize(X, Float8CurrentScalingQuantizer(), amax=swapped(ONE)),
    "quantize scale": lambda: core.quantize(X, Float8Quantizer(), scale=swapped(ONE)),
    "quantize rng": lambda: core.quantize(X, NOISY, rng=swapped(RNG)),
    "quantize_stack x": lambda: core.quantize_stack(swapped(X.reshape(2, 32, 32)), MX),
    "bias_grad dy": lambda: core.bias_grad(swapped(X)),
    "bias_grad dtype": lambda: core.bias_grad(X, np.dtype(np.float32).newbyteorder()),
    "dequantize dtype": lambda: core.dequantize(Q, np.dtype(np.float16).newbyteorder()),
    "dequantize scale_inv": lambda: core.dequantize(
        dataclasses.replace(Q, rowwise_scale_inv=swapped(Q.rowwise_scale_inv))  # type: ignore[arg-type]
    ),
    "gemm bias": lambda: core.gemm(Q, Q, bias=swapped(np.ones(64, np.float32))),
    "gemm c": lambda: core.gemm(Q, Q, c=swapped(np.ones((64, 64), np.float32)), beta=1.0),
    "scale_update history": lambda: core.scale_update(swapped(np.ones((1, 4), np.float32)), ONE),
    "scale_update step": lambda: core.scale_update(
        np.ones((1, 4), np.float32), ONE, seen=np.zeros(1, np.int64), step=swapped(np.ones(1, np.int64))
    ),
    "permute_map routing": lambda: core.permute_map(swapped(ROUTING), experts=2),
    "chunk_map order": lambda: core.chunk_map(OFFSETS[:2], swapped(OFFSETS[:2]), 4),
    "invert_map row_id_map": lambda: core.invert_map(swapped(MAP.row_id_map), 3),
    "permute x": lambda: core.permute(swapped(Y), MAP),
    "permute double": lambda: core.permute(swapped(Y.astype(np.float64)), MAP),
    "permute probs": lambda: core.permute(Y, MAP, probs=swapped(PROBS)),
    "permute row_id_map": lambda: core.permute(Y, moved("row_id_map")),
    "permute row_source": lambda: core.permute(Y, moved("row_source")),
    "permute_quantize row_source": lambda: core.permute_quantize(X[:3], moved("row_source"), MX),
    "unpermute probs": lambda: core.unpermute(Y, MAP, probs=swapped(PROBS)),
    "unpermute_grad x": lambda: core.unpermute_grad(Y, MAP, PROBS, swapped(Y)),
    "grouped_gemm offsets": lambda: core.grouped_gemm(ROWS, STACK, swapped(np.array([0, 16, 32], np.int32))),
    "grouped_bias_grad dy": lambda: core.grouped_bias_grad(swapped(Y), OFFSETS),
    "raw input": lambda: _core.amax((swapped(X), 0), (ONE.copy(), 0), None, 0),
    "raw output": lambda: _core.amax((X, 0), (swapped(ONE), 0), None, 0),
    "raw counter": lambda: _core.log_amax((ONE, 0), (ONE[None].copy(), 0), (swapped(np.zeros(1, np.int64)), 8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_other_byte_order_is_refused(call):
    with pytest.raises(DTypeError, match="-endian.*" + re.escape("use x.astype(x.dtype.newbyteorder('='))")):
        CALLS[call]()


def test_the_remedy_in_the_message_helps():
    big = X.astype(">f4")
    native = big.astype(big.dtype.newbyteorder("="))
    assert core.amax(native) == X.max()
    assert core.dequantize(core.quantize(native, MX)).tobytes() == core.dequantize(core.quantize(X, MX)).tobytes()


def test_bits_that_hide_their_order():
    # The core is given bfloat16 as uint16, in which no order shows.
    big = X.astype(ml_dtypes.bfloat16)
    big = big.view(big.dtype.newbyteorder(">"))
    with pytest.raises(DTypeError):
        core.amax(big)


def test_single_bytes_have_no_order():
    mask = np.array([[1, 0], [0, 1], [1, 0]], np.uint8)
    assert (core.permute_map(mask.view(">u1"), rows=3).row_id_map == core.permute_map(mask, rows=3).row_id_map).all()
