"""bias_grad: the CPU's bits are the oracle's; a GPU stays within the tolerance and repeats its own bits."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.quantize.test_quantize import calls_of
from diptych import core

SHAPES = (*cases.SHAPES, (70, 1000), (5000, 3), (1, 3000), (400, 513), (33, 2, 5, 64))


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_bits_on_the_cpu(dtype):
    for turn, shape in enumerate(SHAPES):
        for values in ("normal", "inf_nan_mix", "subnormal_input", "huge", "random_bits"):
            dy = cases.draw(f"bias-{dtype}-{shape}-{values}", values, shape, dtype)
            for out_dtype in list(cases.INPUT_DTYPES)[turn % 3 :]:
                want = oracle.bias_grad(dy, cases.INPUT_DTYPES[out_dtype])
                for isa, threads in calls_of("cpu", dy.size):
                    with runner.setting(isa, threads):
                        got = runner.bias_grad(runner.Numpy(), dy, out_dtype, offset=turn % 3)
                    label = (
                        f"{dtype}{shape} {values} -> {out_dtype} isa={isa} threads={threads} {cases.report_header()}"
                    )
                    runner.same_bits(got, want, label, nan_free=True)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_tolerance_on_cuda(dtype, cuda):
    be = runner.Torch()
    for shape in (*SHAPES, (20000, 129)):
        for out_dtype in cases.INPUT_DTYPES:
            dy = cases.draw(f"bias-{dtype}-{shape}", "normal", shape, dtype)
            got = runner.bias_grad(be, dy, out_dtype)
            exact, allowed = oracle.bias_grad_tolerance(dy, cases.INPUT_DTYPES[out_dtype])
            label = f"{dtype}{shape} -> {out_dtype} {cases.report_header()}"
            assert (np.abs(got.astype(np.float64) - exact) <= allowed).all(), label
            again = runner.bias_grad(be, dy, out_dtype, offset=1, poison=0x5A)
            runner.same_bits(again, got, f"{label}: second run, shifted")


def test_numpy_face():
    dy = cases.draw("bias-face", "normal", (2, 9, 40), "bfloat16")
    runner.same_bits(core.bias_grad(dy), oracle.bias_grad(dy, oracle.BF16), "the input's dtype")
    runner.same_bits(core.bias_grad(dy, "float32"), oracle.bias_grad(dy), "float32")
    runner.same_bits(core.bias_grad(dy[:, ::2]), oracle.bias_grad(dy[:, ::2], oracle.BF16), "strided")
