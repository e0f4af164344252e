"""Matrices with an empty extent take no time for any other extent, and their outputs are written."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diptych.common.formats import FORMATS
from diptych.core import _core

F32, BF16, I32 = (_core.dtype_table()[name] for name in ("float32", "bfloat16", "int32"))
FLAGS, FUSED = _core.flag_table(), _core.fused_table()
TALL, TOKENS = 1 << 60, (1 << 31) - 1  # rows that a loop would not end over; as many tokens as maps number


def f32(*shape: int, value: float = 7.0) -> tuple[np.ndarray, int]:
    return np.full(shape, value, np.float32), F32


def bf16(*shape: int) -> tuple[np.ndarray, int]:
    return np.zeros(shape, np.uint16), BF16


def i32(*shape: int) -> tuple[np.ndarray, int]:
    return np.zeros(shape, np.int32), I32


def payload(fmt: Any, *shape: int) -> tuple[np.ndarray, int]:
    return np.zeros(shape, np.uint8), _core.dtype_table()[fmt.data]


def amax(flags: int, x: tuple[np.ndarray, int], source: Any = None) -> None:
    rows = x[0].shape[0] if flags & FLAGS["row_amax"] else 1
    out, columns = f32(rows), f32(1)
    _core.amax(x, out, columns, flags, source)
    assert not out[0].any() and not columns[0].any()


def quantize(name: str, stack: bool = False) -> None:
    fmt = next(f for f in FORMATS if f.name == name)
    lead, scales = ((TALL,), (TALL, 0)) if stack else ((), (TALL // max(1, fmt.block_rows), 0))
    shape = (*lead, 0, 0) if stack else (TALL, 0)
    one = f32(*lead, 1) if fmt.one_scale or fmt.two_level else None
    scale = np.zeros((*scales, 0) if stack else scales, {"float32": np.float32}.get(fmt.scale, np.uint8))
    scale = f32(1) if fmt.one_scale else (scale, _core.dtype_table()[fmt.scale])
    none = (None, None, None)
    made = payload(fmt, *shape), scale
    _core.quantize(f32(*shape), fmt.id, 0, 0.0, 0, one, *none, *made, None, None, stack=stack)
    if fmt.one_scale:
        assert one is not None and one[0] == 0 and scale[0] == 1


def norm_grad(m: int, k: int) -> None:
    dgamma, dbeta, stats = f32(k), f32(k), (f32(m), f32(m))
    _core.norm_grad(f32(m, k), f32(m, k), f32(k), *stats, f32(m, k), dgamma, dbeta, None, 0, False)
    assert not dgamma[0].any() and not dbeta[0].any()


def norm(m: int, k: int) -> None:
    mu, rsigma = f32(m), f32(m)
    _core.norm(f32(m, k), f32(k), None, mu, rsigma, f32(m, k), 0, 1.0, False)
    assert not mu[0].any() and (rsigma[0] == 1).all()


def gemm(m: int, n: int, k: int, bias: bool, beta: float) -> None:
    fmt = next(f for f in FORMATS if f.one_scale)
    d, c = f32(m, n), f32(m, n, value=3.0)
    one = f32(1)
    copies = [x for rows in (m, n) for x in (payload(fmt, rows, k), one, None, fmt.id, False)]
    _core.gemm(*copies, d, c if beta else None, f32(n) if bias else None, None, 1.0, beta, False)
    assert (d[0] == 7.0 * bias + 3.0 * beta).all()


def bias_grad(m: int, n: int) -> None:
    out = f32(n)
    _core.bias_grad(f32(m, n), out, None)
    assert not out[0].any()


def unpermute(width: int, slots: int) -> None:
    tokens = 5 if width or slots else TOKENS
    y = f32(tokens, width)
    _core.unpermute(f32(0, width), i32(tokens, slots), None, y)
    assert not y[0].any()


def unpermute_grad(tokens: int, rows: int, width: int, slots: int) -> None:
    source, dx = i32(rows), f32(rows, width)
    source[0][:] = -1
    probs = f32(tokens, slots)
    _core.unpermute_grad(f32(tokens, width), i32(tokens, slots), source, probs, dx)
    assert not dx[0].any()


def permute(tokens: int, rows: int, width: int, slots: int) -> None:
    source, out = i32(rows), f32(rows, width)
    source[0][:] = -1
    _core.permute([(f32(tokens, width), out, 0)], i32(tokens, slots), source)
    assert not out[0].any()


ACTIVATION = FUSED["source"]["activation"], 0, False, None, None, None, None, None
PERMUTED = FUSED["source"]["permuted"], i32(TOKENS, 0), i32(5)
CALLS: dict[str, Callable[[], None]] = {
    "amax": lambda: amax(0, f32(TALL, 0)),
    "amax wide": lambda: amax(0, f32(0, TALL)),
    "amax rht": lambda: amax(FLAGS["rht"], bf16(TALL, 0)),
    "amax rht wide": lambda: amax(FLAGS["rht"], bf16(0, TALL)),
    "amax rows": lambda: amax(FLAGS["row_amax"], f32(1000, 0)),
    "amax source": lambda: amax(0, f32(TALL, 0), ACTIVATION),
    "amax permuted": lambda: amax(0, f32(TOKENS, 0), PERMUTED),
    **{f"quantize {f.name}": lambda name=f.name: quantize(name) for f in FORMATS},
    "quantize_stack": lambda: quantize("mxfp8_e4m3", stack=True),
    "dequantize": lambda: _core.dequantize(payload(FORMATS[0], TALL, 0), f32(1), None, 0, False, f32(TALL, 0)),
    "activation": lambda: _core.activation(f32(TALL, 0), f32(TALL, 0), 0, False),
    "activation gated": lambda: _core.activation(f32(TALL, 0), f32(TALL, 0), 0, True),
    "activation wide": lambda: _core.activation(f32(0, TALL), f32(0, TALL), 0, False),
    "activation_grad": lambda: _core.activation_grad(f32(TALL, 0), f32(TALL, 0), f32(TALL, 0), 0, False),
    "norm": lambda: norm(1000, 0),
    "norm wide": lambda: norm(0, 1000),
    "norm_grad": lambda: norm_grad(1000, 0),
    "norm_grad wide": lambda: norm_grad(0, 1000),
    "bias_grad": lambda: bias_grad(TALL, 0),
    "bias_grad wide": lambda: bias_grad(0, 1000),
    "gemm rows": lambda: gemm(TALL, 0, 0, False, 0.0),
    "gemm depth": lambda: gemm(0, 0, TALL, False, 0.0),
    "gemm without depth": lambda: gemm(5, 3, 0, False, 0.0),
    "gemm bias without depth": lambda: gemm(5, 3, 0, True, 2.0),
    "grouped_bias_grad": lambda: _core.grouped_bias_grad(f32(TOKENS, 0), i32(4), f32(3, 0), None),
    "permute": lambda: permute(TOKENS, 5, 0, 0),
    "permute without slots": lambda: permute(5, 5, 3, 0),
    "permute_columns": lambda: _core.permute_columns(
        payload(FORMATS[0], TALL, 0), payload(FORMATS[0], TALL, 0), i32(0), 1
    ),
    "hash": lambda: _core.hash(f32(TALL, 0), i32(4)),
    "statistics": lambda: _core.statistics(f32(TALL, 0), None, None, i32(14), None, 1, 1.0),
    "transpose": lambda: _core.transpose(payload(FORMATS[0], TALL, 0), payload(FORMATS[0], 0, TALL)),
    "unpermute": lambda: unpermute(0, 0),
    "unpermute without slots": lambda: unpermute(4, 0),
    "unpermute without width": lambda: unpermute(0, 2),
    "unpermute_grad": lambda: unpermute_grad(TOKENS, 3, 0, 0),
    "unpermute_grad without slots": lambda: unpermute_grad(4, 3, 2, 0),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_empty_extent_takes_no_time(call):
    start = time.perf_counter()
    CALLS[call]()
    assert time.perf_counter() - start < 0.5


def test_extents_that_no_int64_counts():
    x = (ctypes.c_float * 0 * (1 << 40) * (1 << 40))()
    with pytest.raises(ValueError, match="argument 'x' has extents whose product does not fit int64"):
        _core.amax((x, F32), f32(1), None, 0)
