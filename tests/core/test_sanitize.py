"""Every CUDA kernel once on tiny shapes: `compute-sanitizer python -m pytest -m sanitize tests/core`."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.gemm.test_gemm import CUBLASLT, operands, run
from core.quantize.test_quantize import one_sided
from core.statistics.test_statistics import rounding
from diptych.core import _core
from diptych.lab.traces import DTYPES
from oracle.hash import hash_bits
from oracle.statistics import errors, statistics

pytestmark = [pytest.mark.cuda, pytest.mark.sanitize, pytest.mark.usefixtures("cuda")]
SHAPES = ((1, 1), (33, 65), (130, 144))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_quantize_dequantize(fmt):
    be = runner.Torch()
    for turn, case in enumerate(
        cases.quantize_cases([fmt], shapes=SHAPES, values=["normal"], variants=True, every_option=True)
    ):
        x, dtype = case.make(), case.dtype
        for options in (case.options, *(one_sided(case.options, side) for side in (0, 1))):
            want = oracle.quantize(x, fmt, **options)
            got = runner.quantize(be, x, want, fmt, offset=turn % 2, **options)
            runner.same_quantized(got, want, f"{case} {options}")
            copy = want.copy(options.get("rowwise") is False)
            y = runner.dequantize(be, copy, fmt, dtype, offset=turn % 2)
            runner.same_bits(y, np.ascontiguousarray(oracle.dequantize(copy, y.dtype)), f"{case} {options}")
    given: tuple[dict[str, float], ...] = ()
    if oracle.FORMATS[fmt].one_scale:
        given = ({"amax": 3.0}, {"scale": 3.0}, {"scale": 3.0, "accumulate": 2.0})
    for options in given:
        want = oracle.quantize(x, fmt, **options)
        runner.same_quantized(runner.quantize(be, x, want, fmt, **options), want, f"{fmt} {options}")


def test_scale_update():
    be = runner.Torch()
    for shape in ((1, 1), (3, 20), (2, 1024), (300, 7)):
        history = cases.rng_for(f"sanitize-update-{shape}").random(shape).astype(np.float32)
        for in_place in (False, True):
            want = oracle.scale_update(history, history[:, 0])
            got = runner.scale_update(be, history, history[:, 0], in_place=in_place)
            for g, w in zip(got, want, strict=True):
                runner.same_bits(g, w, f"{shape} in_place={in_place}")


def test_transpose():
    be = runner.Torch()
    for shape in (*SHAPES, (144, 272), (3, 130, 48), (0, 4)):
        x = cases.rng_for(f"sanitize-transpose-{shape}").integers(0, 256, shape).astype(np.uint8)
        for offsets in ((0, 0), (1, 0), (0, 1)):
            got = runner.transpose(be, x, offsets=offsets)
            runner.same_bits(got, np.ascontiguousarray(x.swapaxes(-1, -2)), f"transpose {shape} {offsets}")


def test_hash():
    be = runner.Torch()
    for n in (0, 1, 1023, 1040, 32769, 70000):
        x = cases.rng_for(f"sanitize-hash-{n}").integers(0, 256, n).astype(np.uint8)
        for offset in (0, 1, 4):
            runner.same_bits(runner.hash(be, x, offset=offset), hash_bits(x), f"hash {n} {offset}")


def test_statistics():
    be = runner.Torch()
    for dtype in _core.number_table():
        for n in (0, 1, 4096, 9000):
            x = cases.rng_for(f"sanitize-statistics-{n}").integers(0, 256, 8 * n).astype(np.uint8)
            x = x.view(DTYPES[dtype].bits)[:n]
            runner.same_bits(runner.statistics(be, x, dtype), statistics(x, dtype), f"statistics {n} {dtype}")
    for dtype in cases.INPUT_DTYPES:
        x, *rounded = rounding(9000, dtype)
        runner.same_bits(
            runner.statistics(be, x, dtype, rounded=rounded), errors(x, dtype, *rounded), f"errors {dtype}"
        )


def test_amax_and_bias_grad():
    be = runner.Torch()
    for dtype in cases.INPUT_DTYPES:
        for shape in (*SHAPES, (300, 40)):
            x = cases.draw(f"sanitize-{dtype}-{shape}", "normal", shape, dtype)
            got = runner.amax(be, x, offset=1, columnwise=True, row_amax=True)
            runner.same_bits(got["out"], oracle.amax(x, row_amax=True), f"amax {dtype}{shape}")
            runner.same_bits(got["columnwise_out"], oracle.amax(x), f"amax {dtype}{shape}")
            exact, allowed = oracle.bias_grad_tolerance(x)
            assert (np.abs(runner.bias_grad(be, x, "float32") - exact) <= allowed).all(), f"bias_grad {dtype}{shape}"

    x = cases.draw("sanitize-rht", "normal", (48, 40), "bfloat16")
    got = runner.amax(be, x, columnwise=True, rht=True, rht_signs=True)
    runner.same_bits(got["columnwise_out"], oracle.columnwise_amax(x, rht=True, rht_signs=True), "rotated amax")


# Extents for the project's kernels, the last two for FP8 tensor cores too, and one that cuBLASLt takes.
OURS, THEIRS = [(7, 5, 33), (33, 20, 130), (1, 1, 1), (4, 8, 0), (200, 37, 160), (200, 48, 160)], [(16, 32, 160)]


@pytest.mark.parametrize("pair", (*cases.GEMM_PAIRS, *cases.MIXED_PAIRS[::7]), ids="-".join)
@pytest.mark.parametrize("shapes", (OURS, THEIRS), ids=("ours", "theirs"))
def test_gemm(pair, shapes):
    """racecheck cannot follow cuBLASLt's own kernels (its instrumentation faults in them): deselect `theirs` there."""
    _core.switch_kernel(CUBLASLT, shapes is THEIRS)
    try:
        products(pair, shapes)
    finally:
        _core.switch_kernel(CUBLASLT, True)


def products(pair, shapes):
    be = runner.Torch()
    for case in cases.gemm_cases([pair], shapes):
        qa, qb, epilogue = operands(case)
        got = run(be, case, qa, qb, epilogue).astype(np.float64)
        dtype = cases.INPUT_DTYPES[case.out_dtype]
        allowed = oracle.gemm_tolerance(qa, qb, out_dtype=dtype, accumulator_bits=14, promote_every=128, **epilogue)
        assert (np.abs(got - oracle.gemm_float64(qa, qb, **epilogue)) <= allowed).all(), str(case)
