"""Every CUDA kernel once on tiny shapes: `compute-sanitizer python -m pytest -m sanitize tests/core`."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.test_gemm import NATIVE, operands, run
from diptych import core

pytestmark = [pytest.mark.cuda, pytest.mark.sanitize, pytest.mark.usefixtures("cuda")]
SHAPES = ((1, 1), (33, 65), (130, 144))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_quantize_dequantize(fmt):
    be = runner.Torch()
    for turn, (dtype, shape) in enumerate((d, s) for d in cases.INPUT_DTYPES for s in SHAPES):
        x = cases.draw(f"sanitize-{fmt}-{dtype}-{shape}", "normal", shape, dtype)
        for usage in ({}, {"columnwise": False}, {"rowwise": False}):
            want = oracle.quantize(x, fmt, **usage)
            got = runner.quantize(be, x, want, fmt, offset=turn % 2)
            runner.same_quantized(got, want, f"{fmt} {dtype}{shape} {usage}")
            copy = want.copy("rowwise" in usage)
            y = runner.dequantize(be, copy, fmt, dtype, offset=turn % 2)
            runner.same_bits(y, np.ascontiguousarray(oracle.dequantize(copy, y.dtype)), f"{fmt} {dtype}{shape}")
    if oracle.FORMATS[fmt].per_tensor:
        want = oracle.quantize(x, fmt, amax=3.0)
        runner.same_quantized(runner.quantize(be, x, want, fmt, amax=3.0), want, f"{fmt} given amax")


def test_amax_and_bias_grad():
    be = runner.Torch()
    for dtype in cases.INPUT_DTYPES:
        for shape in (*SHAPES, (300, 40)):
            x = cases.draw(f"sanitize-{dtype}-{shape}", "normal", shape, dtype)
            runner.same_bits(runner.amax(be, x, offset=1), oracle.amax(x), f"amax {dtype}{shape}")
            exact, allowed = oracle.bias_grad_tolerance(x)
            assert (np.abs(runner.bias_grad(be, x, "float32") - exact) <= allowed).all(), f"bias_grad {dtype}{shape}"


# Extents that only the emulated kernel takes, and one that cuBLASLt takes.
OURS, THEIRS = [(7, 5, 33), (33, 20, 130), (1, 1, 1), (4, 8, 0)], [(16, 32, 160)]


@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
@pytest.mark.parametrize("shapes", (OURS, THEIRS), ids=("ours", "theirs"))
def test_gemm(pair, shapes):
    """racecheck cannot follow cuBLASLt's own kernels (its instrumentation faults in them): deselect `theirs` there."""
    be, core_rows = runner.Torch(), {r["kernel"] for r in core.kernel_table()}
    assert NATIVE in core_rows
    for case in cases.gemm_cases([pair], shapes):
        qa, qb, epilogue = operands(case)
        got = run(be, case, qa, qb, epilogue).astype(np.float64)
        dtype = cases.INPUT_DTYPES[case.out_dtype]
        allowed = oracle.gemm_tolerance(qa, qb, out_dtype=dtype, accumulator_bits=14, promote_every=128, **epilogue)
        assert (np.abs(got - oracle.gemm_float64(qa, qb, **epilogue)) <= allowed).all(), str(case)
