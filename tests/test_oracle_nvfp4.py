"""The oracle's NVFP4, transform, noise, square blocks and delayed scaling against numbers computed by hand.

`rn` is a second float32, made of exact fractions, in which each formula is written once more.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle

f32 = np.float32
INF, NAN = math.inf, math.nan
FLT_MAX = Fraction(float(oracle.FLT_MAX))


def arr(*values) -> np.ndarray:
    return np.array(values, f32)


def rn(x: Fraction | int) -> Fraction:
    """To the nearest float32, ties to even, subnormals kept; what overflows stays beyond FLT_MAX."""
    x = Fraction(x)
    e = math.frexp(float(x))[1]  # float64 has range to spare
    unit = Fraction(2) ** (max(e, -125) - 24)
    return round(x / unit) * unit  # round() takes ties to even


E4M3 = [(i % 2, Fraction(float(v))) for i, v in enumerate(cases.GRIDS["e4m3"])]


def e4m3(x: Fraction) -> Fraction:
    return min((abs(v - x), odd, v) for odd, v in E4M3)[2]


def test_the_second_float32():
    rng = cases.rng_for("second")
    with np.errstate(all="ignore"):
        a, b = (np.exp2(rng.uniform(-70, 55, 500)).astype(f32) for _ in range(2))
        for x, y, product, ratio in zip(a, b, a * b, a / b, strict=True):
            x, y = Fraction(float(x)), Fraction(float(y))
            assert rn(x * y) == Fraction(float(product)) and rn(x / y) == Fraction(float(ratio))
    assert rn(Fraction(3, 2) * Fraction(2) ** -149) == Fraction(2) ** -148 and rn(Fraction(2) ** -150) == 0


@pytest.mark.parametrize(
    "x, code",
    [
        # 0 .5 1 1.5 2 3 4 6; ties to the even code
        (0.0, 0), (0.25, 0), (0.2500001, 1), (0.5, 1), (0.7499999, 1), (0.75, 2), (1.0, 2), (1.25, 2), (1.2500001, 3),
        (1.5, 3), (1.7499999, 3), (1.75, 4), (2.0, 4), (2.5, 4), (2.5000002, 5), (3.0, 5), (3.4999998, 5), (3.5, 6),
        (4.0, 6), (5.0, 6), (5.0000005, 7), (6.0, 7), (7.0, 7), (1e38, 7), (INF, 7), (1e-45, 0),
    ],
)  # fmt: skip
def test_e2m1_codes(x, code):
    assert oracle.encode(arr(x, -x), "e2m1").tolist() == [code, code + 8]


def test_e2m1_nan_is_plus_six():
    assert (
        oracle.encode(np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(f32), "e2m1").tolist() == [7] * 3
    )


def test_e2m1_is_ml_dtypes_where_that_is_defined():
    fp4 = ml_dtypes.float4_e2m1fn
    codes = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(oracle.decode(codes, "e2m1"), codes.view(fp4).astype(f32))
    assert np.signbit(oracle.decode(codes, "e2m1")).tolist() == [False] * 8 + [True] * 8
    x = cases.rng_for("e2m1").uniform(-6, 6, 50000).astype(f32)
    ties = (cases.GRIDS["e2m1"][1:] + cases.GRIDS["e2m1"][:-1]).astype(f32) / f32(2)
    for values in (x, ties, -ties, np.nextafter(ties, f32(9)), np.nextafter(ties, f32(0)), arr(0.0, -0.0, 6, -6)):
        np.testing.assert_array_equal(oracle.encode(values, "e2m1"), values.astype(fp4).view(np.uint8) & 15)


def test_packing():
    codes = np.array([[1, 2, 15, 8], [0, 7, 3, 0]], np.uint8)
    assert oracle.pack(codes).tolist() == [[0x21, 0x8F], [0x70, 0x03]]  # the low nibble is the even element
    np.testing.assert_array_equal(oracle.unpack(oracle.pack(codes)), codes)


@pytest.mark.parametrize(
    "amax_t, amax_b, s8, enc",
    [
        (2688.0, 6.0, 0x38, 1.0),  # S = 1: 6 * float32(1/6) rounds to 1
        (2688.0, 2688.0, 0x7E, f32(1) / f32(448)),
        (6.0, 6.0, 0x7E, 1.0),  # S = 448; 448 * float32(1/448) rounds to 1
        (3.0, 3.0, 0x7E, 2.0),
        # S = 2688, S/6 = 448 + 1.3e-5 -> 448; 0.3 * 448 = 134.4 lies between 128 and 144; 2688 / 128 = 21
        (1.0, 0.3, 0x70, 21.0),
        (2688.0, 0.0, 0x00, oracle.FLT_MAX),  # 1 / 0 is cut to FLT_MAX
        (0.0, 0.0, 0x00, oracle.FLT_MAX),
        (0.0, 6.0, 0x38, 1.0),  # S = 1 without an amax
        (INF, 6.0, 0x38, 1.0),  # 2688 / inf = 0: S = 1
        (INF, INF, 0x7E, f32(1) / f32(448)),
        (6.0, 60.0, 0x7E, 1.0),  # saturates where a given amax is too small
        # S = FLT_MAX below 2688/FLT_MAX = 7.9e-36: 1e-45 * FLT_MAX / 6 < 2^-10
        (2.0**-149, 2.0**-149, 0x00, oracle.FLT_MAX),
        # 2^-9 is E4M3's smallest: 6 * 2^-10 is the tie to 0, its neighbour not
        (2688.0, 6 * 2.0**-10, 0x00, oracle.FLT_MAX),
        (2688.0, np.nextafter(f32(6 * 2.0**-10), f32(1)), 0x01, 512.0),
    ],
)
def test_two_level(amax_t, amax_b, s8, enc):
    got = oracle.two_level(arr(amax_b), arr(amax_t))
    assert (got[0].tolist(), got[1].tolist()) == ([s8], [float(enc)])


def test_two_level_in_fractions():
    rng = cases.rng_for("two-level")
    amax_t = np.exp2(rng.uniform(-149, 128, 1000)).astype(f32)
    amax_b = (amax_t * np.exp2(-rng.choice([0, 1, 6, 20], 1000) * rng.random(1000))).astype(f32)
    bytes_, factors = oracle.two_level(amax_b, amax_t)
    for t, b, s8, enc in zip(amax_t, amax_b, oracle.decode(bytes_, "e4m3"), factors, strict=True):
        t, b = Fraction(float(t)), Fraction(float(b))
        s = min(rn(Fraction(2688) / t), FLT_MAX) if t else Fraction(1)
        want = e4m3(min(rn(b * rn(s * rn(Fraction(1, 6)))), FLT_MAX))
        assert Fraction(float(s8)) == want, (t, b)
        factor = rn(want * rn(1 / s))
        assert Fraction(float(enc)) == (min(rn(1 / factor), FLT_MAX) if factor else FLT_MAX), (t, b)


BLOCK = arr(6, -6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0, -0.0, 1, 2, 3, 4, 0.5).reshape(1, 16)


def test_one_block():
    q = oracle.quantize(BLOCK, "nvfp4", columnwise=False)
    assert q.amax.tolist() == [6.0] and q.columnwise_amax is None and q.rowwise_scale_inv.tolist() == [[0x7E]]
    assert q.rowwise_data.tolist() == [[0xF7, 0x20, 0x42, 0x64, 0x06, 0x28, 0x54, 0x16]]
    one = rn(rn(Fraction(448 * 6)) * rn(Fraction(1, 2688)))
    back = arr(6, -6, 0, 1, 1, 2, 2, 4, 4, 0, -0.0, 1, 2, 3, 4, 0.5)
    got = oracle.dequantize(q.copy())[0]
    assert [Fraction(float(v)) for v in got] == [rn(Fraction(float(v)) * one) for v in back]
    assert np.signbit(got).tolist() == np.signbit(back).tolist()


def test_dequantize_in_fractions():
    rng = cases.rng_for("dequantize-nvfp4")
    amax = np.exp2(rng.uniform(-40, 40, 32)).astype(f32)
    data, s8 = rng.integers(0, 256, (32, 8), np.uint8), rng.integers(0, 0x7F, (32, 1), np.uint8)
    got = oracle.dequantize(oracle.Copy(oracle.FORMATS["nvfp4"], False, data, s8, amax))
    for row in range(32):
        s = Fraction(float(cases.GRIDS["e4m3"][s8[row, 0]]))
        scale = rn(rn(s * Fraction(float(amax[row]))) * rn(Fraction(1, 2688)))
        for i in range(16):
            code = int(data[row, i // 2]) >> 4 * (i % 2) & 15
            value = Fraction(float(cases.GRIDS["e2m1"][code & 7])) * (-1 if code & 8 else 1)
            assert Fraction(float(got[row, i])) == rn(value * scale)


def test_amax_per_row():
    x = np.concatenate([BLOCK, BLOCK / f32(2), BLOCK * f32(0), BLOCK * f32(NAN)] * 4)
    q = oracle.quantize(x, "nvfp4", row_amax=True)
    assert q.amax.tolist() == [6, 3, 0, 0] * 4 and q.columnwise_amax.tolist() == [6]
    assert q.rowwise_scale_inv.ravel().tolist() == [0x7E, 0x7E, 0, 0x7F] * 4
    assert q.rowwise_data[0].tolist() == q.rowwise_data[1].tolist()
    assert q.rowwise_data[2].tolist() == [0x80, 0, 0, 0, 0, 8, 0, 0]  # zeros keep their signs
    np.testing.assert_allclose(oracle.dequantize(q.copy())[1], oracle.dequantize(q.copy())[0] / 2, rtol=1e-6)
    for row in range(3):  # each row is a tensor of its own
        one = oracle.quantize(x[row : row + 1], "nvfp4", columnwise=False)
        assert one.rowwise_data.tolist() == q.rowwise_data[row : row + 1].tolist()


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_nan_and_inf_poison_their_block_and_no_other(special):
    x = np.ones((16, 32), f32)
    x[3, 5] = special
    q = oracle.quantize(x, "nvfp4")
    rows, columns = oracle.unpack(q.rowwise_data), oracle.unpack(q.columnwise_data)
    assert q.amax.tolist() == q.columnwise_amax.tolist() == [1.0]
    assert q.rowwise_scale_inv[3].tolist() == [0x7F, 0x7E] and (q.rowwise_scale_inv == 0x7F).sum() == 1
    assert (rows[3, :16] == 7).all() and (q.columnwise_scale_inv == 0x7F).sum() == 1
    assert q.columnwise_scale_inv[5, 0] == 0x7F and (columns[5] == 7).all()
    square = oracle.quantize(x, "nvfp4", square=True)
    assert (square.rowwise_scale_inv == [0x7F, 0x7E]).all() and (oracle.unpack(square.rowwise_data)[:, :16] == 7).all()
    assert (square.columnwise_scale_inv[:16] == 0x7F).all() and (square.columnwise_scale_inv[16:] == 0x7E).all()
    negative = oracle.quantize(np.where(np.isfinite(x), -x, x), "nvfp4", rng=oracle.rng_words(1, 2))
    assert (oracle.unpack(negative.rowwise_data)[3, :16] == 7).all()  # positive, whatever the signs were


def test_inf_under_the_transform():
    """The rotated value, rounded to bfloat16, determines the result."""
    x = np.ones((32, 16), oracle.BF16)
    x[3, 5] = INF  # each of the column's 16 sums holds it
    x[16:, 7] = ml_dtypes.finfo(oracle.BF16).max  # their sum / 4 overflows, the differences are 0
    q = oracle.quantize(x, "nvfp4", rht=True)
    assert q.columnwise_scale_inv.tolist() == [
        [0x7F if (c, b) in ((5, 0), (7, 1)) else 0x7E for b in (0, 1)] for c in range(16)
    ]
    assert (oracle.unpack(q.columnwise_data)[5, :16] == 7).all() and q.columnwise_amax.tolist() == [4.0]
    assert oracle.columnwise_amax(x, rht=True) == 4 and oracle.columnwise_amax(x) == float(x[16, 7])


@pytest.mark.parametrize("element", ["nvfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_square_blocks_share_one_amax(element):
    fmt = oracle.FORMATS[element]
    side = fmt.block_cols
    for m, k in ((2 * side, 3 * side), *(((side + 1, 2 * side + 5), (1, 7)) if fmt.pack == 1 else ())):
        x = cases.draw(f"square-{element}-{m}-{k}", "powers_of_two", (m, k), "float32")
        q = oracle.quantize(x, element, square=True)
        for r in range(m):
            for c in range(k):
                block = x[r // side * side : (r // side + 1) * side, c // side * side : (c // side + 1) * side]
                top = np.abs(block).max()
                if fmt.pack == 2:
                    want = oracle.two_level(arr(top), q.amax)[0][0]
                else:
                    want = oracle.e8m0_from_amax(arr(top), fmt.element)[0]
                transposed = q.columnwise_scale_inv[c, r // side] if fmt.pack == 2 else None
                assert q.rowwise_scale_inv[r, c // side] == want
                assert (q.columnwise_scale_inv[r // side, c] if transposed is None else transposed) == want
        rows = oracle.unpack(q.rowwise_data) if fmt.pack == 2 else q.rowwise_data
        columns = oracle.unpack(q.columnwise_data).T if fmt.pack == 2 else q.columnwise_data
        np.testing.assert_array_equal(rows, columns)
        np.testing.assert_array_equal(oracle.dequantize(q.copy()), oracle.dequantize(q.copy(True)))


def test_mxfp8_by_search():
    """The smallest power of two not below amax / max, by exact comparison; payloads divided by it exactly."""
    rng = cases.rng_for("mx-search")
    x = (rng.standard_normal((64, 32)) * np.exp2(rng.uniform(-100, 100, (64, 1)))).astype(f32)
    for element, top in (("e4m3", 448), ("e5m2", 57344)):
        q = oracle.quantize(x, f"mxfp8_{element}", columnwise=False)
        for row, code, data in zip(x, q.rowwise_scale_inv[:, 0], q.rowwise_data, strict=True):
            v = rn(Fraction(float(np.abs(row).max())) * rn(Fraction(1, top)))
            scale = Fraction(2) ** (int(code) - 127)
            assert scale / 2 < v <= scale
            exact = np.array([float(Fraction(float(e)) / scale) for e in row], f32)
            np.testing.assert_array_equal(data, oracle.encode(exact, element))


def test_hadamard():
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    parity = np.array([[bin(i & j).count("1") % 2 for j in range(16)] for i in range(16)])
    matrix = (1 - 2 * parity) / 4
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    unit = np.eye(16, dtype=oracle.BF16)
    np.testing.assert_array_equal(oracle.hadamard(unit, False).astype(f32), matrix)
    np.testing.assert_array_equal(oracle.hadamard(unit, True).astype(f32), matrix * signs)
    assert oracle.hadamard(np.ones((16, 1), oracle.BF16), False)[:, 0].tolist() == [4.0] + [0.0] * 15
    # Groups of 16 rows, columns apart.
    x = cases.rng_for("hadamard").integers(-8, 9, (48, 5)).astype(oracle.BF16)
    for group in range(3):
        want = (matrix * signs) @ x[16 * group : 16 * group + 16].astype(np.float64)
        got = oracle.hadamard(x, True)[16 * group : 16 * group + 16]
        np.testing.assert_array_equal(got, want.astype(f32).astype(oracle.BF16))
    # The order of additions shows: 2^24 swallows a 1 that it meets alone, and not a 2 that two of them made before.
    z = np.zeros((16, 1), f32)
    z[[0, 2, 3], 0] = 2.0**26, 4, 4
    assert oracle.hadamard(z.astype(oracle.BF16), False)[0, 0] == oracle.BF16.type(2.0**24 + 2)
    # NaN, and inf that meets itself, become NaN; what overflows is inf.
    z = np.zeros((32, 2), oracle.BF16)
    z[0, 0], z[16:18, 1] = NAN, INF
    got = oracle.hadamard(z, False).astype(f32)
    assert np.isnan(got[:16, 0]).all() and not got[:16, 1].any() and not got[16:, 0].any()
    assert got[16::2, 1].tolist() == [INF] * 8 and np.isnan(got[17::2, 1]).all()
    for bad, error in ((np.zeros((16, 4), f32), TypeError), (np.zeros((24, 4), oracle.BF16), ValueError)):
        with pytest.raises(error):
            oracle.hadamard(bad, True)


def test_transformed_copy():
    x = cases.draw("rht", "outlier", (32, 48), "bfloat16")
    q, plain = (oracle.quantize(x, "nvfp4", rht=rht, rht_signs=rht) for rht in (True, False))
    rotated = oracle.quantize(oracle.hadamard(x, True), "nvfp4")
    for name in ("rowwise_data", "rowwise_scale_inv", "amax"):
        np.testing.assert_array_equal(getattr(q, name), getattr(plain, name))
    for name in ("columnwise_data", "columnwise_scale_inv", "columnwise_amax"):
        np.testing.assert_array_equal(getattr(q, name), getattr(rotated, name))
    assert (
        q.columnwise_amax
        == oracle.columnwise_amax(x, rht=True, rht_signs=True)
        == oracle.amax(oracle.hadamard(x, True))
    )
    assert oracle.columnwise_amax(x) == oracle.amax(x)


KNOWN = [  # Random123's kat_vectors: counter, key, result of philox4x32-10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(w, 16) for w in text.split()]


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_philox_known_answers(counter, key, result):
    k = words(key)
    got = oracle.philox(np.array([words(counter)] * 2, np.uint32), (k[0], k[1]))
    assert got.tolist() == [words(result)] * 2


def test_noise_layout():
    bytes_ = oracle.noise(40, oracle.rng_words(0, 0), False)
    assert bytes_[:16].tolist() == list(bytes.fromhex("d5e82766 8dc569e1 4cac57bc d8db009b"))  # little-endian words
    seed, offset = 0x299F31D0A4093822, 0x0370734413198A2E
    assert oracle.rng_words(seed, offset).view(np.uint32).tolist() == words("a4093822 299f31d0 13198a2e 03707344")
    key = (0xA4093822, 0x299F31D0)
    for columnwise, low in ((False, 0x13198A2E), (True, 0x13198A2F)):
        counters = np.array([[b, 0, low, 0x03707344] for b in range(3)], np.uint32)
        want = oracle.philox(counters, key).astype("<u4").tobytes()[:40]
        assert oracle.noise(40, oracle.rng_words(seed, offset), columnwise).tobytes() == want
    for offset in (2**32 - 1, 2**64 - 1):  # the next offset carries, and wraps
        got = oracle.noise(32, oracle.rng_words(7, offset), True)
        np.testing.assert_array_equal(got, oracle.noise(32, oracle.rng_words(7, (offset + 1) % 2**64), False))
    assert oracle.noise(0, oracle.rng_words(7, 7), False).shape == (0,)


def test_a_part_has_the_whole_tensors_noise():
    """A 16 x 32 part, at row 48 and column 16 of a 64 x 80 tensor, has the random bytes of the tensor there."""
    part, plain = oracle.rng_words(5, 2**32 - 1, 48, 16, 64, 80), oracle.rng_words(5, 2**32 - 1)
    rows = oracle.noise(64 * 80, plain, False).reshape(64, 80)
    np.testing.assert_array_equal(oracle.noise_of((16, 32), part, False), rows[48:64, 16:48])
    columns = oracle.noise(64 * 80, plain, True).reshape(80, 64)
    np.testing.assert_array_equal(oracle.noise_of((32, 16), part, True), columns[16:48, 48:64])


@pytest.mark.parametrize(
    "x, byte, code",
    [
        # u = (r + .5) / 256: .5 - 2^-9 for 127, .5 + 2^-9 for 128; half a step below the next value
        (0.25, 127, 0), (0.25, 128, 1), (0.75, 127, 1), (0.75, 128, 2), (1.75, 127, 3), (1.75, 128, 4),
        (2.5, 127, 4), (2.5, 128, 5), (3.5, 127, 5), (3.5, 128, 6), (5.0, 127, 6), (5.0, 128, 7),
        # what is on the grid stays there
        (0.0, 255, 0), (0.5, 255, 1), (2.0, 255, 4), (4.0, 255, 6), (6.0, 255, 7), (6.0, 0, 7),
        (7.0, 0, 7), (INF, 0, 7),
        # r = 255 adds .5 - 2^-10 below 2; t is rounded: .5 - 2^-26 is a tie to .5, .5 - 2^-25 a float32
        (2.0**-10 - 2.0**-26, 255, 1), (2.0**-10 - 2.0**-25, 255, 0), (1e-45, 255, 0),
    ],
)  # fmt: skip
def test_stochastic_codes(x, byte, code):
    got = oracle.encode_stochastic(arr(x, -x), np.array([byte] * 2, np.uint8))
    assert got.tolist() == [code, code + 8]


def test_stochastic_rounding_is_unbiased_over_all_bytes():
    every = np.arange(256, dtype=np.uint8)
    grid = cases.GRIDS["e2m1"]
    for low, high in itertools.pairwise(grid):
        for part in range(256):
            x = np.full(256, low + (high - low) * part / 256, f32)
            codes = oracle.encode_stochastic(x, every)
            assert oracle.decode(codes, "e2m1").astype(np.float64).mean() == x[0]


def test_stochastic_copies():
    x = cases.draw("stochastic", "normal", (48, 32), "float32")
    q = oracle.quantize(x, "nvfp4", rng=oracle.rng_words(11, 2**32 - 1))
    turned = oracle.quantize(np.ascontiguousarray(x.T), "nvfp4", rng=oracle.rng_words(11, 2**32))
    np.testing.assert_array_equal(q.columnwise_data, turned.rowwise_data)
    nearest = oracle.quantize(x, "nvfp4")
    np.testing.assert_array_equal(q.rowwise_scale_inv, nearest.rowwise_scale_inv)
    assert (q.rowwise_data != nearest.rowwise_data).mean() > 0.1


def test_given_amaxes():
    q = oracle.quantize(np.repeat(BLOCK, 16, axis=0), "nvfp4", amax=2688.0, columnwise_amax=12.0)
    assert (q.amax.tolist(), q.columnwise_amax.tolist()) == ([2688.0], [12.0])
    assert (q.rowwise_scale_inv == 0x38).all()  # 6 / 2688 * 448
    assert q.columnwise_scale_inv[0].tolist() == [0x76]  # half of 448
    for bad in ({"amax": 1.0}, {"columnwise_amax": 1.0}):
        with pytest.raises(ValueError, match="its amax"):
            oracle.quantize(np.ones((16, 16), f32), "nvfp4", **bad)


def test_given_scale():
    x = arr(1.0, -2.0, NAN, 600.0, -0.0, INF)
    q = oracle.quantize(x, "fp8_e4m3_tensor", scale=3.0)
    assert q.amax.tolist() == [600.0] and q.rowwise_scale_inv.tolist() == [float(f32(1) / f32(3))]
    assert q.rowwise_data.tolist() == [[0x44, 0xCC, 0x7F, 0x7E, 0x80, 0x7F]]  # 3, -6, NaN, 448, -0, NaN
    assert oracle.quantize(x[:3], "fp8_e4m3_tensor", scale=3.0).amax.tolist() == [2.0]
    for before, after in ((0.5, 2.0), (7.0, 7.0)):
        assert oracle.quantize(x[:3], "fp8_e4m3_tensor", scale=3.0, accumulate=before).amax.tolist() == [after]
    empty = oracle.quantize(np.zeros((0, 3), f32), "fp8_e5m2_tensor", scale=4.0, accumulate=1.5)
    assert empty.amax.tolist() == [1.5] and empty.rowwise_scale_inv.tolist() == [0.25]


@pytest.mark.parametrize(
    "history, options, new_history, new_scale",
    [
        ([3, 1, 8, 2], {}, [0, 8, 2, 3], 448 / 8),
        ([3, 1, 8, 2], {"most_recent": True}, [0, 8, 2, 3], f32(448) / f32(3)),
        ([9, 8, 1, 2], {}, [0, 1, 2, 9], f32(448) / f32(9)),
        ([3, 1, 8, 2], {"margin": 3}, [0, 8, 2, 3], 448 / 64),
        ([3, 1, 8, 2], {"margin": -3}, [0, 8, 2, 3], 448),
        ([3, 1, 8, 2], {"fp8_max": 57344}, [0, 8, 2, 3], 57344 / 8),
        ([0, 1, 8, 2], {}, [0, 1, 8, 2], 5),  # nothing was quantized: nothing rolls, the scale stays
        ([0, 1, 8, 2], {"reduced": 4.0}, [0, 8, 2, 4], 448 / 8),
        ([3, 1, 8, 2], {"reduced": 0.0}, [0, 8, 2, 3], 448 / 8),
        ([3, 1, 8, 2], {"reduced": 16.0}, [0, 8, 2, 16], 448 / 16),
        ([3, 1, 8, 2], {"reduced": NAN, "most_recent": True}, [0, 8, 2, NAN], 5),
        ([3, 1, 8, 2], {"reduced": NAN}, [0, 8, 2, NAN], 448 / 8),  # a maximum ignores NaN
        ([3, 1, NAN, 2], {}, [0, NAN, 2, 3], f32(448) / f32(3)),
        ([3, 1, 8, 2], {"amax": 7.0}, [0, 8, 2, 3], 64),
        ([3, 1, 8, 2], {"amax": 0.0}, [0, 8, 2, 3], 5),
        ([3, 1, 8, 2], {"amax": -1.0}, [0, 8, 2, 3], 5),
        ([3, 1, 8, 2], {"amax": NAN}, [0, 8, 2, 3], 5),
        ([0, 1, 8, 2], {"amax": 7.0}, [0, 1, 8, 2], 5),
        ([INF, 1, 8, 2], {}, [0, 8, 2, INF], 5),
        ([3, 1, INF, 2], {}, [0, INF, 2, 3], 5),
        ([3, 1, INF, 2], {"most_recent": True}, [0, INF, 2, 3], f32(448) / f32(3)),
        ([2.0**-149, 0], {}, [0, 2.0**-149], oracle.FLT_MAX),  # 448 / it overflows
        ([4], {}, [0], 112),
        ([4], {"most_recent": True}, [0], 112),
        ([0], {}, [0], 5),
    ],
)
def test_scale_update(history, options, new_history, new_scale):
    named = {k: arr(v) if k in ("reduced", "amax") else v for k, v in options.items()}
    old = arr(*history).reshape(1, -1)
    got = oracle.scale_update(old, arr(5), **named)
    np.testing.assert_array_equal(got[0], arr(*new_history).reshape(1, -1))
    np.testing.assert_array_equal(old, arr(*history).reshape(1, -1), "inputs are kept")
    assert got[1].tolist() == [float(new_scale)]


def tensor_copy(row, scales, amax) -> oracle.Copy:
    data = oracle.pack(oracle.encode(np.atleast_2d(np.array(row, f32)), "e2m1"))
    return oracle.Copy(oracle.FORMATS["nvfp4"], False, data, oracle.encode(arr(*scales), "e4m3")[None], arr(amax))


def test_gemm_alpha():
    a, b = tensor_copy([6.0] * 16, [448.0], 3.0), tensor_copy([6.0] * 16, [448.0], 5.0)
    alpha = rn(rn(3 * Fraction(float(f32(0.7)))) * 5)
    alpha = rn(alpha * rn(Fraction(1, 36 * 448 * 448)))
    acc = 16 * 36 * 448 * 448  # 441 * 2^18: exact
    assert Fraction(float(oracle.gemm_cpu(a, b, alpha=0.7)[0, 0])) == rn(alpha * acc)
    data, two = np.full((1, 16), 0x38, np.uint8), np.full((1, 1), 128, np.uint8)
    one = oracle.Copy(oracle.FORMATS["mxfp8_e4m3"], False, data, two)
    alpha = rn(rn(3 * Fraction(float(f32(0.7)))) * rn(Fraction(1, 2688)))
    for pair in ((a, one), (one, a)):
        assert Fraction(float(oracle.gemm_cpu(*pair, alpha=0.7)[0, 0])) == rn(alpha * 16 * 6 * 448 * 2)


def test_gemm_with_an_amax_per_row():
    x = cases.draw("rows", "normal", (5, 32), "float32") * arr(1, 2, 30, 0, 1e-3)[:, None]
    q = oracle.quantize(x, "nvfp4", row_amax=True, columnwise=False)
    w = oracle.quantize(cases.draw("cols", "normal", (3, 32), "float32"), "nvfp4", columnwise=False).copy()
    for other in (w, oracle.quantize(x[:3], "nvfp4", row_amax=True, columnwise=False).copy()):
        got, turned = oracle.gemm_cpu(q.copy(), other), oracle.gemm_cpu(other, q.copy())
        assert got.shape == (5, 3) and turned.shape == (3, 5)
        want = oracle.dequantize(q.copy()).astype(np.float64) @ oracle.dequantize(other).astype(np.float64).T
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(turned, want.T, rtol=1e-4, atol=1e-5)


def test_gemm_blocks_of_sixteen():
    """Two halves of 16 meet their scales apart, also against a format with longer blocks."""
    a = tensor_copy([6.0] * 32, [1.0, 448.0], 2688.0)
    long = oracle.quantize(np.ones((1, 32), f32), "fp8_e4m3_1x128", columnwise=False).copy()
    short = oracle.quantize(np.ones((1, 32), f32), "mxfp8_e4m3", columnwise=False).copy()
    for other in (long, short):
        assert oracle.gemm_cpu(a, other)[0, 0] == oracle.gemm_cpu(other, a)[0, 0] == pytest.approx(96 * 449, rel=1e-6)
    nan = tensor_copy([6.0] * 32, [1.0, NAN], 2688.0)
    assert np.isnan(oracle.gemm_cpu(nan, long)).all()


def test_refused_options():
    x, rng = np.ones((16, 16), f32), oracle.rng_words(0, 0)
    bad = [
        ("nvfp4", {"pow2": True}), ("nvfp4", {"eps": 1.0}), ("mxfp8_e4m3", {"eps": 1.0}),
        ("nvfp4", {"square": True, "row_amax": True}), ("nvfp4", {"square": True, "rng": rng}),
        ("nvfp4", {"square": True, "rht": True}), ("nvfp4", {"rht_signs": True}), ("nvfp4", {"scale": 1.0}),
        ("nvfp4", {"rht": True, "columnwise": False}), ("mxfp8_e4m3", {"row_amax": True}), ("mxfp8_e4m3", {"rng": rng}),
        ("fp8_e4m3_1x128", {"square": True}), ("fp8_e4m3_tensor", {"rht": True}), ("fp8_e4m3_1x128", {"scale": 1.0}),
        ("fp8_e4m3_tensor", {"scale": 1.0, "pow2": True}), ("fp8_e4m3_tensor", {"scale": 1.0, "amax": 1.0}),
        ("fp8_e4m3_tensor", {"accumulate": 1.0}), ("fp8_e4m3_tensor", {"columnwise_amax": 1.0}),
    ]  # fmt: skip
    for name, options in bad:
        with pytest.raises(ValueError):
            oracle.quantize(x, name, **options)
            pytest.fail(f"{name} {options}")
    for shape in ((16, 24), (8, 16)):
        with pytest.raises(ValueError, match=r"multiple|alike"):
            oracle.quantize(np.ones(shape, f32), "nvfp4")
    with pytest.raises(TypeError, match="bfloat16"):
        oracle.quantize(x, "nvfp4", rht=True)
