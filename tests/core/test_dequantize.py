"""dequantize against the oracle, bit for bit, for arbitrary bytes and scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.test_quantize import calls_of
from diptych import core
from diptych.common.quantizers import Float8BlockQuantizer, MXFP8Quantizer

SHAPES = ((0, 16), (16, 0), (1, 1), (7,), (1, 200), (200, 1), (33, 65), (2, 3, 96), (130, 257), (256, 384))


def random_copy(fmt: str, shape: tuple[int, ...], columnwise: bool, label: str) -> oracle.Copy:
    """Any bytes and any scales, NaN codes, subnormals, infinities and E8M0's 0 and 255 included."""
    rng = cases.rng_for(label)
    like = oracle.quantize(np.zeros(shape, np.float32), fmt).copy(columnwise)
    data = rng.integers(0, 256, like.data.shape, dtype=np.uint8)
    if like.scale_inv.dtype == np.uint8:
        scale = rng.integers(0, 256, like.scale_inv.shape, dtype=np.uint8)
        scale = np.where(
            rng.random(scale.shape) < 0.2, rng.choice(np.array([0, 1, 254, 255], np.uint8), scale.shape), scale
        )
    else:
        scale = np.exp2(rng.uniform(-149, 127, like.scale_inv.shape)).astype(np.float32)
        odd = np.array([0.0, 1e-45, 2.0**-126, 3.4e38, np.inf, np.nan, 1.0], np.float32)
        scale = np.where(rng.random(scale.shape) < 0.2, rng.choice(odd, scale.shape), scale).astype(np.float32)
    return oracle.Copy(like.fmt, columnwise, data, scale)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bits(device, fmt, dtype):
    be = runner.backend(device)
    for shape in SHAPES:
        for columnwise in (False, True):
            for turn in range(3):
                label = f"dequantize-{fmt}-{dtype}-{shape}-{columnwise}-{turn} ({cases.report_header()})"
                copy = random_copy(fmt, shape, columnwise, label)
                want = oracle.dequantize(copy, cases.INPUT_DTYPES[dtype])
                for isa, threads in calls_of(device, copy.data.size):
                    with runner.setting(isa, threads):
                        got = runner.dequantize(be, copy, fmt, dtype, offset=turn, poison=(0xA5, 0x5A, 0xFF)[turn])
                    runner.same_bits(
                        got, np.ascontiguousarray(want), f"{label} isa={isa} threads={threads}", nan_free=True
                    )


@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "fp8_e5m2_tensor", "mxfp8_e4m3"])
def test_every_byte(device, fmt):
    be, every = runner.backend(device), np.arange(256, dtype=np.uint8).reshape(8, 32)
    scale = np.ones(1, np.float32) if "tensor" in fmt else np.full((8, 1), 127, np.uint8)
    copy = oracle.Copy(oracle.FORMATS[fmt], False, every, scale)
    want = every.view(oracle.ELEMENT[copy.fmt.element]).astype(np.float32)
    runner.same_bits(runner.dequantize(be, copy, fmt, "float32"), want, fmt, nan_free=True)


def test_callers_float_mode_does_not_matter():
    for fmt in cases.FORMATS:
        for shape in ((33, 65), (256, 384)):
            copy = random_copy(fmt, shape, True, f"flush-{fmt}-{shape}")
            want = oracle.dequantize(copy)
            for isa, threads in calls_of("cpu", copy.data.size):
                with runner.setting(isa, threads), runner.flushed():
                    got = runner.dequantize(runner.Numpy(), copy, fmt, "float32")
                runner.same_bits(got, np.ascontiguousarray(want), f"{fmt} {shape} {isa} FTZ+DAZ", nan_free=True)


def test_numpy_face():
    x = cases.draw("face", "outlier", (2, 3, 96), "bfloat16")
    for quantizer in (Float8BlockQuantizer(), MXFP8Quantizer(rowwise=False), Float8BlockQuantizer(rowwise=False)):
        q = core.quantize(x, quantizer)
        for dtype in ("float32", "bfloat16", "float16", ml_dtypes.bfloat16, np.float32):
            y = core.dequantize(q, dtype)
            assert y.shape == x.shape
            name = quantizer.format.name
            copy = oracle.quantize(x, name, pow2=quantizer.spec[1]).copy(not quantizer.rowwise)
            want = oracle.dequantize(copy, y.dtype).reshape(x.shape)
            runner.same_bits(y, want, f"{quantizer} {dtype}")
