"""amax against the oracle, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.test_quantize import calls_of
from diptych import core


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_bits(device, dtype):
    be = runner.backend(device)
    for shape in (*cases.SHAPES, (1, 70001), (515, 389), (65536,), (65537,), (131072 + 3,)):
        large = np.prod(shape) > 1 << 16
        for turn, values in enumerate(("outlier", "inf_nan_mix", "all_nan") if large else cases.VALUE_SETS):
            x = cases.draw(f"amax-{dtype}-{shape}-{values}", values, shape, dtype)
            want = oracle.amax(x)
            for isa, threads in calls_of(device, x.size):
                with runner.setting(isa, threads):
                    got = runner.amax(be, x, offset=turn % 4)
                runner.same_bits(got, want, f"amax {dtype}{shape} {values} isa={isa} {cases.report_header()}")


def test_the_only_value_counts_wherever_it_stands(device):
    be = runner.backend(device)
    for n in (1, 15, 16, 17, 63, 64, 65, 129, 300):
        for at in {0, n // 2, n - 1}:
            for value in (-3.0, np.nan, -np.inf, 1e-45):
                x = np.zeros(n, np.float32)
                x[at] = value
                assert runner.amax(be, x)[0] == (0 if np.isnan(value) else abs(np.float32(value))), (n, at, value)


def test_subnormals_survive_flush_to_zero():
    x = cases.draw("amax-flush", "subnormal_input", (300, 300), "float32")
    want = oracle.amax(x)
    for isa in runner.isas():
        with runner.setting(isa, 2), runner.flushed():
            got = runner.amax(runner.Numpy(), x)
        runner.same_bits(got, want, f"isa={isa} FTZ+DAZ")


def test_numpy_face():
    x = cases.draw("amax-face", "inf_nan_mix", (4, 5, 60), "float16")
    runner.same_bits(core.amax(x), oracle.amax(x), "contiguous")
    runner.same_bits(core.amax(x[:, ::2, 1::3]), oracle.amax(x[:, ::2, 1::3]), "strided")
    assert core.amax(np.array(-2.0, np.float32)).tolist() == [2.0]
