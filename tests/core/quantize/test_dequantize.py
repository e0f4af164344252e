"""dequantize against the oracle, bit for bit, for arbitrary bytes and scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.quantize.test_quantize import calls_of
from diptych import core
from diptych.common.quantizers import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from quantizers import oracle_options

RAGGED = ((0, 16), (16, 0), (1, 1), (7,), (1, 200), (200, 1), (33, 65), (2, 3, 96), (130, 257), (256, 384))


def sides(fmt: str) -> list[tuple[tuple[int, ...], bool]]:
    """Shapes, and whether of their columnwise copy."""
    shapes = cases.PACKED_SHAPES if fmt in cases.PACKED_FORMATS else RAGGED
    return [(s, side) for s in shapes for side in (False, True) if not side or cases.has_columnwise(fmt, s)]


ODD = np.array([0.0, 1e-45, 2.0**-126, 3.4e38, np.inf, np.nan, 1.0], np.float32)


def floats(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Any positive float32, odd ones among them."""
    plain = np.exp2(rng.uniform(-149, 127, shape)).astype(np.float32)
    return np.where(rng.random(shape) < 0.2, rng.choice(ODD, shape), plain).astype(np.float32)


def random_copy(fmt: str, shape: tuple[int, ...], columnwise: bool, label: str) -> oracle.Copy:
    """Any bytes, scales and amaxes: NaN codes, subnormals, infinities, E8M0's 0 and 255 and negative E4M3 included."""
    rng = cases.rng_for(label)
    side = {"rowwise": not columnwise, "columnwise": columnwise}
    like = oracle.quantize(np.zeros(shape, np.float32), fmt, **side).copy(columnwise)
    data = rng.integers(0, 256, like.data.shape, dtype=np.uint8)
    amax = None
    if like.fmt.scale == "e4m3":
        scale = rng.integers(0, 256, like.scale_inv.shape, dtype=np.uint8)
        amax = floats(rng, (like.shape[0] if not columnwise and rng.random() < 0.5 else 1,))
    elif like.fmt.scale == "e8m0":
        scale = rng.integers(0, 256, like.scale_inv.shape, dtype=np.uint8)
        scale = np.where(
            rng.random(scale.shape) < 0.2, rng.choice(np.array([0, 1, 254, 255], np.uint8), scale.shape), scale
        )
    else:
        scale = floats(rng, like.scale_inv.shape)
    return oracle.Copy(like.fmt, columnwise, data, scale, amax)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bits(device, fmt, dtype):
    be = runner.backend(device)
    for shape, columnwise in sides(fmt):
        for turn in range(3):
            label = f"dequantize-{fmt}-{dtype}-{shape}-{columnwise}-{turn} ({cases.report_header()})"
            copy = random_copy(fmt, shape, columnwise, label)
            want = oracle.dequantize(copy, cases.INPUT_DTYPES[dtype])
            for isa, threads in calls_of(device, want.size):
                with runner.setting(isa, threads):
                    got = runner.dequantize(be, copy, fmt, dtype, offset=turn, poison=(0xA5, 0x5A, 0xFF)[turn])
                runner.same_bits(got, np.ascontiguousarray(want), f"{label} isa={isa} threads={threads}", nan_free=True)


@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "fp8_e5m2_tensor", "mxfp8_e4m3"])
def test_every_byte(device, fmt):
    be, every = runner.backend(device), np.arange(256, dtype=np.uint8).reshape(8, 32)
    scale = np.ones(1, np.float32) if "tensor" in fmt else np.full((8, 1), 127, np.uint8)
    copy = oracle.Copy(oracle.FORMATS[fmt], False, every, scale)
    want = every.view(oracle.ELEMENT[copy.fmt.element]).astype(np.float32)
    runner.same_bits(runner.dequantize(be, copy, fmt, "float32"), want, fmt, nan_free=True)


def test_every_scale_and_code(device):
    """All 256 E4M3 scales times all 16 codes, either half of a byte."""
    be = runner.backend(device)
    codes = np.broadcast_to(np.concatenate([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8), (128, 32))
    scales = np.arange(256, dtype=np.uint8).reshape(128, 2)
    for amax in (2688.0, 6.0, 3e38, 1e-38, 0.0):
        copy = oracle.Copy(oracle.FORMATS["nvfp4"], False, oracle.pack(codes), scales, np.array([amax], np.float32))
        got = runner.dequantize(be, copy, "nvfp4", "float32")
        runner.same_bits(got, oracle.dequantize(copy), f"amax {amax}", nan_free=True)
        if amax == 2688.0:  # the tensor's factor is 1
            value = scales.repeat(16, 1).view(oracle.ELEMENT["e4m3"]).astype(np.float32) * oracle.E2M1[codes & 7]
            np.testing.assert_array_equal(got, np.where(codes > 7, -value, value))


def test_callers_float_mode_does_not_matter():
    for fmt in cases.FORMATS:
        for shape in ((48, 80), (256, 384)) if fmt in cases.PACKED_FORMATS else ((33, 65), (256, 384)):
            copy = random_copy(fmt, shape, True, f"flush-{fmt}-{shape}")
            want = oracle.dequantize(copy)
            for isa, threads in calls_of("cpu", copy.data.size):
                with runner.setting(isa, threads), runner.flushed():
                    got = runner.dequantize(runner.Numpy(), copy, fmt, "float32")
                runner.same_bits(got, np.ascontiguousarray(want), f"{fmt} {shape} {isa} FTZ+DAZ", nan_free=True)


def test_numpy_face():
    ragged = cases.draw("face", "outlier", (2, 3, 96), "bfloat16")
    whole = cases.draw("face-packed", "outlier", (2, 8, 96), "bfloat16")
    for x, quantizer in (
        (ragged, Float8BlockQuantizer()),
        (ragged, MXFP8Quantizer(rowwise=False)),
        (ragged, Float8BlockQuantizer(rowwise=False)),
        (ragged, NVFP4Quantizer(columnwise=False)),
        (whole, NVFP4Quantizer(row_scaled_nvfp4=True)),
        (whole, NVFP4Quantizer(with_rht=True, rowwise=False)),
    ):
        q = core.quantize(x, quantizer)
        for dtype in ("float32", "bfloat16", "float16", ml_dtypes.bfloat16, np.float32):
            y = core.dequantize(q, dtype)
            assert y.shape == x.shape
            name = quantizer.format.name
            copy = oracle.quantize(x, name, **oracle_options(quantizer)).copy(not quantizer.rowwise)
            want = oracle.dequantize(copy, y.dtype).reshape(x.shape)
            runner.same_bits(y, want, f"{quantizer} {dtype}")
