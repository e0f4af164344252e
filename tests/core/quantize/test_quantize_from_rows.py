"""Columnwise copies in square blocks that are made from the rowwise payload and scales (NUMERICS 3)."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.quantize.test_quantize import calls_of
from core.quantize.test_quantize_source import NAMES, encoded
from oracle.copies import shifted

FORMATS = ("fp8_e4m3_1x128", "fp8_e5m2_1x128")
SQUARE = {"fp8_e4m3_1x128": "fp8_e4m3_128x128", "fp8_e5m2_1x128": "fp8_e5m2_128x128"}
SHAPES = (*cases.SHAPES, (127, 129), (128, 1), (129, 255), (300, 392))


def spread(label: str, shape: tuple[int, ...], dtype: str, most: int) -> np.ndarray:
    """Rows of very different sizes, among them rows of zeros, of NaN, and with infinite values."""
    rng, x = cases.rng_for(label), cases.draw(label, "normal", shape, "float32")
    rows = oracle.fold(x)
    with np.errstate(all="ignore"):
        rows *= np.exp2(rng.integers(-most, most + 1, (len(rows), 1))).astype(np.float32)
    kinds = rng.integers(0, 12, len(rows))
    for kind, value in ((0, 0.0), (1, -0.0), (2, np.nan)):
        rows[kinds == kind] = value
    rows[kinds == 3, ::5] = np.inf
    rows[kinds == 4, 1:] = 0
    with np.errstate(all="ignore"):
        return x.astype(runner.NUMPY[dtype])


def inputs(fmt: str, dtype: str):
    """(label, x) of the table's shapes and values, and of rows that differ by up to 2^60."""
    for turn, shape in enumerate(SHAPES):
        for values in list(cases.VALUE_SETS)[turn % 3 :: 3]:
            label = f"from-rows-{fmt}-{dtype}-{shape}-{values} ({cases.report_header()})"
            yield label, cases.draw(label, values, shape, dtype)
        most = (3, 12, 30)[turn % 3] if dtype != "float16" else 8
        label = f"from-rows-{fmt}-{dtype}-{shape}-spread ({cases.report_header()})"
        yield label, spread(label, shape, dtype, most)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bits(fmt, dtype):
    be = runner.backend("cpu")
    for turn, (label, x) in enumerate(inputs(fmt, dtype)):
        options = {"pow2": True, "from_rows": True, "eps": (0.0, 2.0**-10)[turn % 2]}
        want = oracle.quantize(x, fmt, **options)
        for isa, threads in calls_of("cpu", x.size):
            with runner.setting(isa, threads):
                got = runner.quantize(be, x, want, fmt, **options)
            runner.same_quantized(got, want, f"{label} isa={isa} threads={threads}")
        alone = {**options, "rowwise": False}
        want = oracle.quantize(x, fmt, **alone)
        runner.same_quantized(runner.quantize(be, x, want, fmt, offset=1 + turn % 3, **alone), want, label)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_it_is_the_direct_copy_but_for_subnormals(fmt, dtype):
    """Scales are those of the copy quantized from x, always, and so are bytes that are no subnormals."""
    be, element, seen = runner.backend("cpu"), fmt[4:8], 0
    smallest = np.float32(2.0**-6 if element == "e4m3" else 2.0**-14)
    for label, x in inputs(fmt, dtype):
        like = oracle.quantize(x, SQUARE[fmt], pow2=True, rowwise=False)
        direct = runner.quantize(be, x, like, SQUARE[fmt], pow2=True, rowwise=False)
        options = {"pow2": True, "from_rows": True, "rowwise": False}
        made = runner.quantize(be, x, oracle.quantize(x, fmt, **options), fmt, **options)
        assert np.array_equal(made["columnwise_scale_inv"], direct["columnwise_scale_inv"]), label
        a, b = (oracle.decode(q["columnwise_data"], element) for q in (made, direct))
        normal = ~(np.abs(b) < smallest)
        assert np.array_equal(made["columnwise_data"][normal], direct["columnwise_data"][normal]), label
        step = smallest * (np.float32(2.0**-3) if element == "e4m3" else np.float32(2.0**-2))
        assert (np.abs(a - b)[~normal] <= step).all(), label
        assert np.array_equal(np.signbit(a[~normal]), np.signbit(b[~normal])), label
        seen += int((~normal & (b != 0)).sum())
    assert seen > 1000, "few subnormals were drawn"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_of_a_fused_op(fmt, name):
    """A fused op's columnwise copy, alone or beside the rowwise one, is made of the op's rowwise copy."""
    be = runner.backend("cpu")
    for turn, shape in enumerate(((1, 2), (31, 130), (144, 272), (300, 70))):
        x, source, _ = encoded(be, name, turn, shape, ("bfloat16", "float32", "float16")[turn % 3])
        like = oracle.quantize(np.zeros(shape, np.float32), fmt, pow2=True, columnwise=False)
        rows = runner.quantize(be, x, like, fmt, source=source, pow2=True, columnwise=False)
        columns = shifted(oracle.Quantized(like.fmt, **rows).copy())
        made = {"columnwise_data": columns.data, "columnwise_scale_inv": columns.scale_inv}
        for given in (rows, {}):
            want = oracle.Quantized(like.fmt, **given, **made)
            got = runner.quantize(be, x, want, fmt, source=source, pow2=True, from_rows=True)
            runner.same_quantized(got, want, f"{name} {shape} {x.dtype}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_byte_is_shifted_with_one_rounding(fmt):
    """Rows of all bytes below one large row: the shifted bytes are the oracle's for every distance of scales."""
    be, element = runner.backend("cpu"), fmt[4:8]
    finite = oracle.decode(np.arange(256, dtype=np.uint8), element)
    finite = finite[np.isfinite(finite)]
    largest = np.abs(finite).max()
    for distance in range(60):
        block = np.zeros((128, 128), np.float32)
        block[0] = largest
        for i, part in enumerate((finite[:127], finite[127:])):
            block[1 + i, 1 : 1 + len(part)] = part * np.float32(2.0**-distance)
            block[1 + i, 0] = largest * np.float32(2.0**-distance)
        options = {"pow2": True, "from_rows": True}
        want = oracle.quantize(block, fmt, **options)
        got = runner.quantize(be, block, want, fmt, **options)
        runner.same_quantized(got, want, f"{fmt} 2^-{distance}")
        assert np.array_equal(shifted(want.copy()).data, got["columnwise_data"])


@pytest.mark.parametrize(
    ("fmt", "options", "why"),
    [
        ("fp8_e4m3_1x128", {"pow2": False}, "made from rows by powers of two; ask for pow2 too"),
        ("fp8_e4m3_1x128", {"columnwise": False}, "no columnwise copy was asked for"),
        ("fp8_e4m3_128x128", {}, "only formats with one row in a block"),
        ("fp8_e5m2_tensor", {}, "only formats with one row in a block"),
        ("mxfp8_e4m3", {"pow2": False}, "only formats with one row in a block"),
        ("nvfp4", {"pow2": False}, "only formats with one row in a block"),
    ],
)
def test_what_it_does_not_take_is_refused(fmt, options, why):
    be, x = runner.backend("cpu"), np.ones((128, 128), np.float32)
    like = oracle.quantize(x, fmt, **{k: v for k, v in options.items() if k == "columnwise"})
    with pytest.raises(ValueError, match=why):
        runner.quantize(be, x, like, fmt, **{"pow2": True, "from_rows": True, **options})
