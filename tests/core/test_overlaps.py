"""Operands that share memory: refused before anything is written, except updates in place."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from core import runner
from core.test_bad_input import BLOCK, FP8, NV, ROW_AMAX, STOCHASTIC, TENSOR, K, M
from diptych.core import _core


def at(memory: np.ndarray, byte: int, shape: tuple[int, ...], dtype: str) -> Any:
    size = int(np.prod(shape)) * runner.NUMPY[dtype].itemsize
    return runner.Numpy._pair(memory[byte : byte + size], shape, dtype)


def test_overlaps_are_refused():
    """Any output that shares memory with an input or another output."""
    memory = np.full(4 * M * K + 4096, runner.POISON, np.uint8)
    e4m3, f32 = runner.CODES["float8_e4m3fn"], runner.CODES["float32"]
    here = functools.partial(at, memory)
    apart = (np.ones((M, 1), np.float32), f32)
    x = here(0, (M, K), "float32")
    end = 4 * M * K
    overlapping = [
        ("data over x", x, (here(end - 1, (M, K), FP8), apart, None, None)),
        ("scale over x", x, ((np.ones((M, K), np.uint8), e4m3), here(end - 4, (M, 1), "float32"), None, None)),
        ("scale in data", x, (here(end, (M, K), FP8), here(end + 200, (M, 1), "float32"), None, None)),
        ("both copies", x, (here(end, (M, K), FP8), apart, here(end, (K, M), FP8),
                            (np.ones((K, 1), np.float32), f32))),
    ]  # fmt: skip
    before = memory.copy()
    for name, source, buffers in overlapping:
        with pytest.raises(ValueError, match=r"quantize: .*overlaps"):
            _core.quantize(source, runner.IDS[BLOCK], 0, 0.0, 0, None, None, None, None, *buffers)
            pytest.fail(name)
    with pytest.raises(ValueError, match="amax: out overlaps x"):
        _core.amax(here(0, (9,), "float32"), here(32, (1,), "float32"), None, 0)
    with pytest.raises(ValueError, match="amax: columnwise_out overlaps x"):
        _core.amax(here(0, (9,), "float32"), here(48, (1,), "float32"), here(0, (1,), "float32"), 0)
    with pytest.raises(ValueError, match="amax: columnwise_out overlaps out"):
        _core.amax(here(0, (4, 2), "float32"), here(32, (4,), "float32"), here(44, (1,), "float32"), ROW_AMAX)
    q = here(0, (M, K), FP8)
    args = [q, apart, None, runner.IDS[BLOCK], False]
    with pytest.raises(ValueError, match="dequantize: out overlaps data"):
        _core.dequantize(*args, here(0, (M, K), "float32"))
    with pytest.raises(ValueError, match="gemm: d overlaps"):
        _core.gemm(*args, *args, here(0, (M, M), "float32"), None, None, None, 1.0, 0.0, False)
    with pytest.raises(ValueError, match="gemm: d overlaps c"):
        d, c = here(end, (M, M), "float32"), here(end + 4, (M, M), "float32")
        _core.gemm(*args, *args, d, c, None, None, 1.0, 1.0, False)
    with pytest.raises(ValueError, match="bias_grad: out overlaps dy"):
        _core.bias_grad(here(0, (4, 8), "float32"), here(16, (8,), "float32"), None)
    assert (memory == before).all()


def test_overlaps_of_scales_and_amaxes_are_refused():
    memory = np.full(1 << 14, runner.POISON, np.uint8)
    here = functools.partial(at, memory)
    before = memory.copy()
    good: dict[str, Any] = {
        "x": here(0, (16, 48), "float32"), "format": runner.IDS[NV], "flags": STOCHASTIC, "eps": 0.0, "amax_mode": 0,
        "amax": here(4000, (1,), "float32"), "columnwise_amax": here(4004, (1,), "float32"), "scale": None,
        "rng": here(4016, (4,), "int32"),
        "rowwise_data": here(5000, (16, 24), "uint8"), "rowwise_scale_inv": here(6000, (16, 3), FP8),
        "columnwise_data": here(7000, (48, 8), "uint8"), "columnwise_scale_inv": here(8000, (48, 1), FP8),
    }  # fmt: skip
    for change in (
        {"amax": here(100, (1,), "float32")},
        {"columnwise_amax": here(4000, (1,), "float32")},
        {"columnwise_amax": here(4020, (1,), "float32")},
        {"rowwise_data": here(3800, (16, 24), "uint8")},
        {"rowwise_scale_inv": here(4010, (16, 3), FP8)},
        {"columnwise_scale_inv": here(6040, (48, 1), FP8)},
    ):
        with pytest.raises(ValueError, match=r"quantize: .*overlaps"):
            _core.quantize(**{**good, **change})
            pytest.fail(str(change))
    tensor = {"x": here(0, (16, 48), "float32"), "format": runner.IDS[TENSOR], "flags": 0, "eps": 0.0, "amax_mode": 2,
              "amax": here(4000, (1,), "float32"), "columnwise_amax": None, "scale": here(4000, (1,), "float32"),
              "rng": None, "rowwise_data": here(5000, (16, 48), FP8), "rowwise_scale_inv": here(4100, (1,), "float32"),
              "columnwise_data": None, "columnwise_scale_inv": None}  # fmt: skip
    for change in ({}, {"amax": here(4004, (1,), "float32"), "rowwise_scale_inv": here(4000, (1,), "float32")}):
        with pytest.raises(ValueError, match=r"quantize: .*overlaps"):
            _core.quantize(**{**tensor, **change})
    copy = [here(1000, (16, 24), "uint8"), here(2000, (16, 3), FP8), here(4000, (1,), "float32"), runner.IDS[NV], False]
    with pytest.raises(ValueError, match="dequantize: out overlaps amax"):
        _core.dequantize(*copy, here(3000, (16, 48), "float32"))
    with pytest.raises(ValueError, match="gemm: d overlaps"):
        _core.gemm(*copy, *copy, here(3500, (16, 16), "float32"), None, None, None, 1.0, 0.0, False)
    history, scale = here(0, (4, 8), "float32"), here(256, (4,), "float32")
    for outputs in (
        (here(4, (4, 8), "float32"), scale),  # partly in place
        (history, here(260, (4,), "float32")),
        (history, here(112, (4,), "float32")),
        (here(132, (4, 8), "float32"), here(512, (4,), "float32")),  # over the scale
        (scale, history),
    ):
        with pytest.raises(ValueError, match="scale_update"):
            _core.scale_update(history, scale, None, None, *outputs, 448.0, 0, False)
    for reduced, amax in ((scale, None), (None, here(16, (4,), "float32"))):
        with pytest.raises(ValueError, match=r"scale_update: .*overlaps"):
            _core.scale_update(history, scale, reduced, amax, history, scale, 448.0, 0, False)
    assert (memory == before).all()
    _core.scale_update(history, scale, None, None, history, scale, 448.0, 0, False)  # in place is fine
    _core.quantize(**{**good, "flags": 0, "rng": None, "amax_mode": 1, "columnwise_amax": good["amax"]})  # both read


def test_neighbours_do_not_overlap():
    """Outputs that touch their inputs end to end are fine."""
    memory = np.zeros(4 * 64 + 64 + 4, np.uint8)
    x, data, scale = (
        at(memory, 0, (1, 64), "float32"),
        at(memory, 256, (1, 64), FP8),
        at(memory, 320, (1, 1), "float32"),
    )
    _core.quantize(x, runner.IDS[BLOCK], 0, 0.0, 0, None, None, None, None, data, scale, None, None)
    assert scale[0].tolist() == [[1.0]]
