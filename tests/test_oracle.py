"""Compares the oracle with numbers computed by hand, and the case tables with their descriptions."""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle

f32 = np.float32
INF, NAN = math.inf, math.nan
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def arr(*values) -> np.ndarray:
    return np.array(values, f32)


def bits(x: np.ndarray) -> list[str]:
    return [f"{v:08x}" for v in np.asarray(x, f32).reshape(-1).view(np.uint32)]


def up(x: Any) -> np.float32:
    return np.nextafter(f32(x), f32(INF))


@pytest.mark.parametrize(
    "element, x, byte",
    [("e4m3", *case) for case in (
        # 1 = 0 0111 000. Steps of 1/8 above it, so 1.0625 ties to the even 0x38 and 1.1875 to the even 0x3A.
        (1.0, 0x38), (1.0625, 0x38), (up(1.0625), 0x39), (1.1875, 0x3A), (-1.1875, 0xBA),
        # The smallest subnormal is 2^-9: half of it ties to 0, one and a half to 2 units.
        (2.0**-9, 0x01), (2.0**-10, 0x00), (up(2.0**-10), 0x01), (3 * 2.0**-10, 0x02), (-(2.0**-11), 0x80),
        # 7.5 units lie between the last subnormal (7) and the first normal value (8): tie to even.
        (7.5 * 2.0**-9, 0x08),
        # 448 = 0 1111 110 is the largest; everything above saturates, infinities too.
        (448.0, 0x7E), (464.0, 0x7E), (480.0, 0x7E), (1e30, 0x7E), (INF, 0x7E), (-INF, 0xFE), (-3e38, 0xFE),
        (0.0, 0x00), (-0.0, 0x80), (NAN, 0x7F), (-NAN, 0x7F),
    )]
    + [("e5m2", *case) for case in (
        # 1 = 0 01111 00. Steps of 1/4: 1.125 ties to 0x3C, 1.375 to 0x3E.
        (1.0, 0x3C), (1.125, 0x3C), (up(1.125), 0x3D), (1.375, 0x3E), (-1.375, 0xBE),
        (2.0**-16, 0x01), (2.0**-17, 0x00), (up(2.0**-17), 0x01), (3 * 2.0**-17, 0x02), (3.5 * 2.0**-16, 0x04),
        # 57344 = 0 11110 11; 0x7C would be infinity, which a saturating cast never writes.
        (57344.0, 0x7B), (61440.0, 0x7B), (65536.0, 0x7B), (INF, 0x7B), (-INF, 0xFB),
        (0.0, 0x00), (-0.0, 0x80), (NAN, 0x7F), (-NAN, 0x7F),
    )],
)  # fmt: skip
def test_bytes(element, x, byte):
    assert oracle.encode(arr(x), element).tolist() == [byte]


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FC00000, 0xFFC00001, 0xFF812345, 0x7FFFFFFF])
def test_every_nan_is_the_same_byte(payload):
    x = np.array([payload], np.uint32).view(f32)
    assert oracle.encode(x, "e4m3").tolist() == oracle.encode(x, "e5m2").tolist() == [0x7F]


@pytest.mark.parametrize("element, exponent_bits, mantissa_bits, bias", [("e4m3", 4, 3, 7), ("e5m2", 5, 2, 15)])
def test_all_bytes_decode(element, exponent_bits, mantissa_bits, bias):
    data = np.arange(256, dtype=np.uint8)
    expected = []
    for byte in range(256):
        e, m = (byte >> mantissa_bits) & (2**exponent_bits - 1), byte & (2**mantissa_bits - 1)
        value = math.ldexp(m + (2**mantissa_bits if e else 0), max(e, 1) - bias - mantissa_bits)
        if element == "e4m3" and byte & 0x7F == 0x7F:
            value = NAN
        if element == "e5m2" and e == 31:
            value = NAN if m else INF
        expected.append(math.copysign(value, -1 if byte & 0x80 else 1))
    got = oracle.decode(data, element)
    np.testing.assert_array_equal(got, np.array(expected, f32))
    np.testing.assert_array_equal(got, data.view({"e4m3": E4M3, "e5m2": E5M2}[element]).astype(f32))
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), (data >= 128)[~np.isnan(got)])
    finite = np.isfinite(got)
    np.testing.assert_array_equal(oracle.encode(got, element)[finite], data[finite])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_encode_is_nearest_even_by_search(element):
    rng = cases.rng_for(f"encode-{element}")
    grid = oracle.decode(np.arange(0x7F if element == "e4m3" else 0x7C, dtype=np.uint8), element).astype(np.float64)
    x = np.abs(np.exp2(rng.uniform(-20, 17, 20000)).astype(f32))
    x[:1000] = rng.choice((grid[1:] + grid[:-1]) / 2, 1000)
    distance = np.abs(x.astype(np.float64)[:, None] - grid)
    best = distance.argmin(axis=1)
    after = np.minimum(best + 1, len(grid) - 1)
    tie = (distance[np.arange(len(x)), after] == distance.min(axis=1)) & (best % 2 == 1)
    expected = np.where(tie, after, best)  # argmin takes the lower one
    assert (oracle.encode(x, element) == expected).all(), cases.report_header()


@pytest.mark.parametrize(
    "amax, eps, pow2, inf, scale, scale_inv",
    [
        (448.0, 0.0, False, oracle.FLT_MAX, "3f800000", "3f800000"),
        # 448/3 = 149.333.. = 2^7 (1 + 1398101.33 * 2^-23) rounds down; times the rounded 1/3 it would give 43155556.
        (3.0, 0.0, False, oracle.FLT_MAX, "43155555", "3bdb6db7"),
        (3.0, 0.0, True, oracle.FLT_MAX, "43000000", "3c000000"),  # floor to 128, inverse 2^-7
        (0.0, 0.0, False, oracle.FLT_MAX, "3f800000", "3f800000"),
        (INF, 0.0, False, oracle.FLT_MAX, "3f800000", "3f800000"),
        (INF, 2.0, True, oracle.FLT_MAX, "3f800000", "3f800000"),
        (NAN, 2.0, False, oracle.FLT_MAX, "3f800000", "3f800000"),
        (0.0, 1.0, False, oracle.FLT_MAX, "43e00000", "3b124925"),  # eps first: 448 / 1
        (0.5, 1.0, False, oracle.FLT_MAX, "43e00000", "3b124925"),
        (2.0, 1.0, False, oracle.FLT_MAX, "43600000", "3b924925"),
        # 448 * 2^149 overflows. 1/FLT_MAX = 2^-128 (1 + 2^-24) is a subnormal; 2^127 has the inverse 2^-127, one too.
        (2.0**-149, 0.0, False, oracle.FLT_MAX, "7f7fffff", "00200000"),
        (2.0**-149, 0.0, True, oracle.FLT_MAX, "7f000000", "00400000"),
        (2.0**-149, 1.0, False, oracle.FLT_MAX, "43e00000", "3b124925"),
        # bfloat16's largest is 2^128 (1 - 2^-8): inverse 2^-128 (1 + 2^-8 + 2^-16 + ..), 0x202020.2 * 2^-149
        (2.0**-149, 0.0, False, f32(ml_dtypes.finfo(oracle.BF16).max), "7f7f0000", "00202020"),
        # 7 * 2^-122 is the largest amax that overflows: 448 / it = 2^128. One ulp (2^-143) more is
        # a relative 1.14 * 2^-24, so 1.14 units of 2^104 below 2^128: FLT_MAX by rounding. Two ulps: 2.29 units.
        (7 * 2.0**-122, 0.0, False, f32(1), "3f800000", "3f800000"),
        (up(7 * 2.0**-122), 0.0, False, f32(1), "7f7fffff", "00200000"),
        (up(up(7 * 2.0**-122)), 0.0, False, f32(1), "7f7ffffe", "00200000"),
    ],
)  # fmt: skip
def test_scale_from_amax(amax, eps, pow2, inf, scale, scale_inv):
    got = oracle.scale_from_amax(arr(amax), f32(448), eps, pow2, inf)
    assert bits(got) == [scale]
    assert bits(f32(1) / got) == [scale_inv]


def test_per_tensor_with_inf_and_nan():
    # Neither counts: amax 2, scale 224, payload 448. Both become NaN, whatever the sign.
    q = oracle.quantize(arr(INF, 2.0, NAN, -0.0, -INF), "fp8_e4m3_tensor")
    assert q.amax.tolist() == [2.0] and bits(q.rowwise_scale_inv) == bits(f32(1) / f32(224))
    assert q.rowwise_data.tolist() == [[0x7F, 0x7E, 0x7F, 0x80, 0x7F]]
    # Nothing finite: amax 0, scale 1.
    q = oracle.quantize(arr(INF, -INF), "fp8_e5m2_tensor")
    assert q.amax.tolist() == [0.0] and q.rowwise_scale_inv.tolist() == [1.0]
    assert q.rowwise_data.tolist() == [[0x7F, 0x7F]]
    # A product that overflows saturates; inf stays NaN under any scale. 57344 = 0 11110 11.
    for scale, byte in ((oracle.FLT_MAX, 0x7B), (f32(2.0**-149), 0x00), (f32(0), 0x00)):
        q = oracle.quantize(arr(INF, 2.0, 0.0), "fp8_e5m2_tensor", scale=scale)
        assert q.amax.tolist() == [2.0] and q.rowwise_data.tolist() == [[0x7F, byte, 0x00]], scale


@pytest.mark.parametrize("given, byte", [(448.0, 0x38), (224.0, 0x40), (NAN, 0x38), (INF, 0x38), (0.0, 0x38)])
def test_given_amax(given, byte):
    q = oracle.quantize(arr(1.0), "fp8_e4m3_tensor", amax=given)
    assert q.rowwise_data.tolist() == [[byte]]
    np.testing.assert_array_equal(q.amax, arr(given))


def test_amax():
    assert oracle.amax(arr(NAN, -3.0, 2.0)).tolist() == [3.0]
    assert oracle.amax(arr(NAN, -NAN)).tolist() == oracle.amax(arr()).tolist() == [0.0]
    assert oracle.amax(arr(-INF, NAN)).tolist() == [0.0]
    assert oracle.amax(arr(-INF, -3.0, INF)).tolist() == [3.0]
    assert oracle.amax(arr(-INF, 2.0, INF, NAN).reshape(2, 2), row_amax=True).tolist() == [2.0, 0.0]
    assert oracle.amax(np.zeros((2, 0, 3), oracle.BF16)).dtype == f32


@pytest.mark.parametrize("dtype, scale", [("float32", "7f7fffff"), ("bfloat16", "7f7f0000")])
def test_block_scale_stays_in_the_input_dtype(dtype, scale):
    x = arr(2.0**-130).astype(cases.INPUT_DTYPES[dtype])  # 448 * 2^130 overflows
    q = oracle.quantize(x, "fp8_e4m3_1x128")
    np.testing.assert_array_equal(q.rowwise_scale_inv, f32(1) / np.array([[int(scale, 16)]], np.uint32).view(f32))
    # 2^-130 * (just below 2^128) is just below 1/4 = 0 0101 000.
    assert q.rowwise_data.tolist() == [[0x28]] and q.amax is None
    assert bits(oracle.quantize(x, "fp8_e4m3_tensor").rowwise_scale_inv) == ["00200000"]


@pytest.mark.parametrize(
    "v, code",
    [
        (1.0, 127), (up(1.0), 128), (np.nextafter(f32(1), f32(0)), 127), (2.0, 128), (3.0, 129),
        (0.0, 0), (INF, 254), (oracle.FLT_MAX, 254), (2.0**127, 254),
        # 2^-127 has mantissa bits 0x400000: code 0 holds it exactly, its upper neighbour needs 2^-126 = code 1.
        (2.0**-149, 0), (2.0**-127, 0), (up(2.0**-127), 1), (2.0**-126, 1), (up(2.0**-126), 2),
    ],
)  # fmt: skip
def test_e8m0_code(v, code):
    assert oracle.e8m0_code(arr(v)).tolist() == [code]


def test_e8m0_from_amax():
    # float32(1/448) = (1 + 0.75 * 2^-24) / 448, so 448 gives 1 + 0.375 ulp = 1; one ulp of 448 more, 0.95 ulp above 1.
    assert oracle.e8m0_from_amax(arr(448, up(448), 57344, 1e-45, 0, INF), "e4m3").tolist() == [127, 128, 134, 0, 0, 254]
    assert oracle.e8m0_from_amax(arr(57344, up(57344), 448), "e5m2").tolist() == [127, 128, 120]


def test_e8m0_inverse_and_decode():
    code = np.array([0, 1, 126, 127, 128, 253, 254], np.uint8)
    assert oracle.e8m0_inverse(code).tolist() == [2.0**e for e in (127, 126, 1, 0, -1, -126, -127)]
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(oracle.e8m0_decode(every), every.view(ml_dtypes.float8_e8m0fnu).astype(f32))
    np.testing.assert_array_equal(oracle.e8m0_decode(every[:255]), np.ldexp(f32(1), np.arange(255) - 127))


def test_mxfp8_extremes():
    # inf does not count: amax 1.75 = 448 * 2^-8, code 119; it becomes NaN. Zeros: code 0, signs kept.
    q = oracle.quantize(arr(INF, 1.75, NAN, -1.75), "mxfp8_e4m3", columnwise=False)
    assert q.rowwise_scale_inv.tolist() == [[119]] and q.rowwise_data.tolist() == [[0x7F, 0x7E, 0x7F, 0xFE]]
    assert np.isnan(oracle.dequantize(q.copy())[0, [0, 2]]).all()
    q = oracle.quantize(arr(INF, -INF), "mxfp8_e4m3", columnwise=False)
    assert q.rowwise_scale_inv.tolist() == [[0]] and q.rowwise_data.tolist() == [[0x7F, 0x7F]]
    q = oracle.quantize(arr(0.0, -0.0), "mxfp8_e5m2", columnwise=False)
    assert q.rowwise_scale_inv.tolist() == [[0]] and q.rowwise_data.tolist() == [[0x00, 0x80]]
    # One byte 1.0 at code 0 is 2^-127, a subnormal that has to survive.
    assert (
        bits(oracle.dequantize(oracle.quantize(arr(2.0**-127, 448 * 2.0**-127), "mxfp8_e4m3").copy()))[0] == "00400000"
    )


def test_copies_of_a_ragged_block():
    x = arr(448, 224, 14, 7, 0, -3.5).reshape(3, 2)
    q = oracle.quantize(x, "fp8_e4m3_1x128")
    # Row amaxes 448, 14, 3.5 give scales 1, 32, 128; column amaxes 448, 224 give 1, 2 over the transpose.
    assert q.rowwise_scale_inv.tolist() == [[1], [2.0**-5], [2.0**-7]]
    assert oracle.decode(q.rowwise_data, "e4m3").tolist() == [[448, 224], [448, 224], [0, -448]]
    assert q.columnwise_scale_inv.tolist() == [[1], [0.5]]
    assert oracle.decode(q.columnwise_data, "e4m3").tolist() == [[448, 14, 0], [448, 14, -7]]
    for columnwise in (False, True):
        np.testing.assert_array_equal(oracle.dequantize(q.copy(columnwise)), x)


def test_mxfp8_columnwise_stays_row_major():
    x = np.zeros((33, 2), f32)
    x[0], x[32] = (448, 3.5), (7, 14)
    q = oracle.quantize(x, "mxfp8_e4m3")
    # 7 * 2^n over 448 = 7 * 2^6 is 2^(n-6): 448 -> code 127, 3.5 -> 120, 7 -> 121, 14 -> 122.
    assert q.columnwise_scale_inv.tolist() == [[127, 120], [121, 122]]
    assert oracle.decode(q.columnwise_data[[0, 32]], "e4m3").tolist() == [[448, 448], [448, 448]]
    assert q.columnwise_data.shape == (33, 2) and q.rowwise_scale_inv.shape == (33, 1)
    np.testing.assert_array_equal(oracle.dequantize(q.copy(True)), x)


@pytest.mark.parametrize("name", cases.FORMATS)
def test_shapes(name):
    fmt = oracle.FORMATS[name]
    # Half an ulp and a little for the scale and bfloat16; then relative to the amax, where a block's values underflow.
    step, floor = {"e4m3": (0.07, 2.0**-9), "e5m2": (0.14, 2.0**-9), "e2m1": (0.27, 0.06)}[fmt.element]
    for shape in cases.shapes_of(name):
        x = cases.draw(f"shapes-{name}-{shape}", "normal", shape, "bfloat16")
        m, k = math.prod(shape[:-1]), shape[-1]
        q = oracle.quantize(x, name)
        by_16, by_32, by_128 = (lambda n, by=by: -(-n // by) for by in (16, 32, 128))
        rows, columns = {
            "tensor": ((1,), (1,)),
            "1x128": ((m, by_128(k)), (k, by_128(m))),
            "128x128": ((by_128(m), by_128(k)), (by_128(k), by_128(m))),
            "e4m3": ((m, by_32(k)), (by_32(m), k)),
            "e5m2": ((m, by_32(k)), (by_32(m), k)),
            "nvfp4": ((m, by_16(k)), (k, by_16(m))),
        }[name.split("_")[-1]]
        assert q.rowwise_data.shape == (m, k // fmt.pack) and q.rowwise_scale_inv.shape == rows
        assert q.columnwise_data.shape == ((k, m // fmt.pack) if fmt.columnwise_transposed else (m, k))
        assert q.columnwise_scale_inv.shape == columns
        assert not fmt.one_scale or (q.amax.shape == (1,) and (x.size or q.rowwise_scale_inv[0] == 1))
        for copy in (q.copy(), q.copy(True)):
            assert copy.scale_inv.dtype == (f32 if fmt.scale == "float32" else np.uint8)
            back = oracle.dequantize(copy, oracle.BF16)
            assert back.shape == copy.shape == (m, k) and back.dtype == oracle.BF16
            error = np.abs(back.astype(f32) - oracle.fold(x).astype(f32))
            assert (error <= step * np.abs(oracle.fold(x).astype(f32)) + floor * oracle.amax(x)).all(), (shape, copy)


def test_empty_per_tensor_ignores_eps_but_not_a_given_amax():
    x = np.zeros((0, 16), f32)
    assert oracle.quantize(x, "fp8_e4m3_tensor", eps=1.0).rowwise_scale_inv.tolist() == [1.0]
    assert oracle.quantize(x, "fp8_e4m3_tensor", amax=224.0).rowwise_scale_inv.tolist() == [0.5]


def test_dequantize_casts_once():
    copy = oracle.quantize(arr(57344.0, 57344.0 * 2**14), "fp8_e5m2_1x128", columnwise=False).copy()
    assert oracle.dequantize(copy, np.float16)[0].tolist() == [57344.0, INF]


def tensor_copy(values, scale_inv: Any = 1.0, name="fp8_e5m2_tensor") -> oracle.Copy:
    fmt = oracle.FORMATS[name]
    data = oracle.encode(np.atleast_2d(np.array(values, f32)), fmt.element)
    return oracle.Copy(fmt, False, data, np.atleast_1d(np.array(scale_inv, f32)))


def test_gemm_adds_in_increasing_k():
    # 57344^2 = 49 * 2^26 has ulp 256: each 16 * 8 = 128 is a tie to even that vanishes, both together are one ulp.
    big, a, b = 49 * 2.0**26, (57344.0, 16.0, 16.0), (57344.0, 8.0, 8.0)
    assert oracle.gemm_cpu(tensor_copy(a), tensor_copy(b)).tolist() == [[big]]
    assert oracle.gemm_cpu(tensor_copy(a[::-1]), tensor_copy(b[::-1])).tolist() == [[big + 256]]
    assert oracle.gemm_float64(tensor_copy(a), tensor_copy(b)).tolist() == [[big + 256]]
    # In blocks of 128 the two small ones meet in the second block before they meet the big one.
    a, b = [57344.0] + [0.0] * 127 + [16.0, 16.0], [57344.0] + [0.0] * 127 + [8.0, 8.0]
    blocks = [tensor_copy(v, [[1.0, 1.0]], f"fp8_e5m2_{block}") for v, block in ((a, "1x128"), (b, "128x128"))]
    assert oracle.gemm_cpu(*blocks).tolist() == [[big + 256]]
    assert oracle.gemm_cpu(tensor_copy(a), tensor_copy(b)).tolist() == [[big]]
    mixed = (tensor_copy(a), tensor_copy(b, [[1.0, 2.0]], "fp8_e5m2_1x128"))  # the finer block rules
    assert oracle.gemm_cpu(*mixed).tolist() == oracle.gemm_cpu(*mixed[::-1]).tolist() == [[big + 512]]


def test_gemm_multiplies_the_scales_first():
    # s * s = 1 + 2 units (2^-23) + .. rounds to that; 3 times it is 3 + 3 units of 2^-22. (3 s) s would round to 3 + 4.
    s = up(1.0)
    got = oracle.gemm_cpu(tensor_copy([3.0], s), tensor_copy([1.0], s))
    assert got.tolist() == [[3 + 3 * 2.0**-22]] != [[float((f32(3) * s) * s)]]


def test_gemm_epilogue():
    a, b = tensor_copy([4096.0]), tensor_copy([4096.0])  # 2^24, ulp 2: each addend of 1 is a tie that vanishes
    one = np.ones((1, 1), f32)
    assert oracle.gemm_cpu(a, b, bias=one[0], beta=1.0, c=one).tolist() == [[2.0**24]]
    assert oracle.gemm_cpu(a, b, alpha=0.5, bias=one[0], beta=2.0, c=one).tolist() == [[2.0**23 + 3]]
    assert oracle.gemm_cpu(a, b, beta=0.0, c=one * f32(NAN)).tolist() == [[2.0**24]]
    assert oracle.gemm_cpu(a, b, out_dtype=np.float16).tolist() == [[INF]]
    empty = oracle.gemm_cpu(tensor_copy(np.zeros((2, 0))), tensor_copy(np.zeros((3, 0))))
    assert empty.shape == (2, 3) and not np.signbit(empty).any()
    assert oracle.gemm_cpu(a, b, alpha=-0.0, out_dtype=oracle.BF16).astype(f32).tobytes() == arr(-0.0).tobytes()


@pytest.mark.parametrize("pair", cases.GEMM_PAIRS + cases.MIXED_PAIRS, ids="-".join)
def test_gemm_within_tolerance_of_float64(pair):
    shapes = cases.GEMM_SHAPES if pair in cases.GEMM_PAIRS else ((7, 5, 33), (1, 3, 130), (18, 20, 257))
    for case in cases.gemm_cases([pair], shapes):
        a, b, bias, c = case.make()
        qa = oracle.quantize(a, pair[0]).copy(case.a_columnwise)
        qb = oracle.quantize(b, pair[1]).copy(case.b_columnwise)
        epilogue = {"alpha": case.alpha, "bias": bias, "beta": case.beta, "c": c}
        dtype = cases.INPUT_DTYPES[case.out_dtype]
        got = oracle.gemm_cpu(qa, qb, out_dtype=dtype, **epilogue)
        assert got.shape == case.mnk[:2] and got.dtype == dtype
        exact = oracle.gemm_float64(qa, qb, **epilogue)
        x, y = (oracle.dequantize(q).astype(np.float64) for q in (qa, qb))
        x, y = (x.T if case.a_columnwise else x), (y if case.b_columnwise else y.T)
        plain = case.alpha * (x @ y)
        plain += 0 if bias is None else bias.astype(np.float64)
        plain += 0 if c is None else case.beta * c.astype(np.float64)
        np.testing.assert_allclose(exact, plain, rtol=1e-6, atol=1e-4, err_msg=str(case))
        for worst_case in (True, False):
            tolerance = oracle.gemm_tolerance(qa, qb, out_dtype=dtype, worst_case=worst_case, **epilogue)
            assert (np.abs(got.astype(np.float64) - exact) <= tolerance).all(), str(case)


def test_gemm_tolerance_sees_a_lost_column():
    x = cases.draw("lost", "normal", (64, 256), "float32")
    a = oracle.quantize(x, "fp8_e4m3_1x128").copy()
    lost = oracle.Copy(a.fmt, False, np.where(np.arange(256) == 200, np.uint8(0), a.data), a.scale_inv)
    error = np.abs(oracle.gemm_float64(lost, a) - oracle.gemm_float64(a, a))
    for options in ({}, {"accumulator_bits": 14, "promote_every": 128, "worst_case": False}):
        assert (error > oracle.gemm_tolerance(a, a, **options)).any(), cases.report_header()


def test_bias_grad_order():
    # 2^24 has ulp 2: two ones vanish after it one by one, and reach it together when they come first.
    assert oracle.bias_grad(arr(2.0**24, 1, 1).reshape(3, 1)).tolist() == [2.0**24]
    assert oracle.bias_grad(arr(1, 1, 2.0**24).reshape(3, 1)).tolist() == [2.0**24 + 2]
    # One cast at the end: 1 + 2^-8 is a bfloat16 tie (to 1), a little more goes up to 1 + 2^-7.
    assert oracle.bias_grad(arr(1, 2.0**-8).reshape(2, 1), oracle.BF16).astype(f32).tolist() == [1.0]
    assert oracle.bias_grad(arr(1, 2.0**-8, 2.0**-20).reshape(3, 1), oracle.BF16).astype(f32).tolist() == [1 + 2.0**-7]
    assert bits(oracle.bias_grad(arr(-0.0).reshape(1, 1))) == ["00000000"]  # it starts at +0
    assert oracle.bias_grad(np.zeros((2, 0, 3), f32)).tolist() == [0, 0, 0]
    dy = cases.draw("bias", "normal", (3, 50, 7), "bfloat16")
    exact, tolerance = oracle.bias_grad_tolerance(dy, oracle.BF16)
    assert (np.abs(oracle.bias_grad(dy, oracle.BF16).astype(np.float64) - exact) <= tolerance).all()


def test_flushed_subnormals_are_noticed():
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    libm = ctypes.CDLL("libm.so.6")
    saved, flushed = (ctypes.create_string_buffer(32) for _ in range(2))
    assert libm.fegetenv(saved) == 0
    ctypes.memmove(flushed, saved, 32)
    mxcsr = ctypes.c_uint32.from_buffer(flushed, 28)  # the struct's last word
    mxcsr.value |= 0x8040  # FTZ | DAZ
    try:
        libm.fesetenv(flushed)
        with pytest.raises(RuntimeError, match="flushes"):
            oracle.quantize(arr(1.0), "mxfp8_e4m3")
    finally:
        libm.fesetenv(saved)
    oracle.check_ieee()


def test_case_tables():
    assert tuple(oracle.FORMATS) == cases.FORMATS
    every = list(cases.quantize_cases(variants=True))
    assert len({c.id for c in every}) == len(every)
    for pairs, shapes in ((cases.GEMM_PAIRS, cases.GEMM_SHAPES), (cases.MIXED_PAIRS, cases.GEMM_SHAPES)):
        assert len({c.id for c in cases.gemm_cases(pairs, shapes)}) == len(pairs) * len(shapes)
    assert len(cases.GEMM_PAIRS) + len(cases.MIXED_PAIRS) == len(cases.FORMATS) ** 2
    for name in cases.FORMATS:
        fmt, wanted = oracle.FORMATS[name], cases.variants_of(name)
        assert cases.rule_of(name) == fmt.rule and (name in cases.PACKED_FORMATS) == (fmt.pack == 2)
        assert oracle.FORMATS["nvfp4"].block_cols == cases.PACKED_BLOCK
        for value in cases.VALUE_SETS:
            some = [c for c in every if (c.format, c.values) == (name, value)]
            seen = {(c.pow2, c.eps) for c in some if "from_rows" not in c.variant}
            assert all(c.pow2 for c in some if "from_rows" in c.variant)
            assert seen == set(cases.OPTIONS if fmt.rule == "divide" else cases.OPTIONS[:1]), f"{name} {value}: {seen}"
            assert {c.variant for c in some} == set(wanted), f"{name} {value} misses a variant"
    for case in cases.quantize_cases(["nvfp4"], values=["normal"], variants=True):
        q = oracle.quantize(case.make(), case.format, **case.options)
        assert (q.columnwise_data is None) == (case.shape in cases.PACKED_SHAPES[-6:]), str(case)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_value_sets_hold_what_they_name(dtype):
    x = {name: cases.draw(f"sets-{name}-{dtype}", name, (64, 96), dtype) for name in cases.VALUE_SETS}
    y = {name: v.astype(f32) for name, v in x.items()}
    assert all(v.dtype == cases.INPUT_DTYPES[dtype] and v.shape == (64, 96) for v in x.values())
    assert cases.draw(f"sets-normal-{dtype}", "normal", (64, 96), dtype).tobytes() == x["normal"].tobytes()
    info = ml_dtypes.finfo(cases.INPUT_DTYPES[dtype])
    assert (np.abs(y["subnormal_input"]) < float(info.smallest_normal)).all() and y["subnormal_input"].any()
    assert (np.abs(y["huge"]) == float(info.max)).any() and np.isfinite(y["huge"]).all()
    places = [cases.draw(f"places-{i}-{dtype}", "inf_places", (64, 96), dtype).astype(f32) for i in range(24)]
    assert all(np.isinf(v).any() for v in places) and any(np.isfinite(v[0]).any() for v in places)
    assert any(np.isneginf(v).any() for v in places) and any(np.isposinf(v).any() for v in places)
    assert np.isnan(y["all_nan"]).all() and len(set(x["all_nan"].tobytes()[::2])) > 1
    assert np.signbit(y["all_nan"]).any() and not np.signbit(y["all_nan"]).all()
    assert np.signbit(y["zeros"]).any() and not y["zeros"].any()
    assert (y["level_edges"] == 448 * 6).any() and (np.abs(y["level_edges"]) < 1.02 * 448 * 6).all()
    for name in cases.FORMATS:
        q = oracle.quantize(x[f"ties_{oracle.FORMATS[name].element}"], name)
        one = {"divide": 1, "e8m0_ceil": 127, "two_level": 0x7E}[oracle.FORMATS[name].rule]  # 448 of 448
        assert (q.rowwise_scale_inv == one).all() and (q.columnwise_scale_inv == one).all(), (
            f"{name}: ties need scale 1"
        )
