"""amax against the oracle, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.quantize.test_quantize import calls_of
from diptych import core


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_bits(device, dtype):
    be = runner.backend(device)
    for shape in (*cases.SHAPES, (1, 70001), (515, 389), (65536,), (65537,), (131072 + 3,)):
        large = np.prod(shape) > 1 << 16
        few = ("outlier", "inf_nan_mix", "inf_places", "all_nan")
        for turn, values in enumerate(few if large else cases.VALUE_SETS):
            x = cases.draw(f"amax-{dtype}-{shape}-{values}", values, shape, dtype)
            want = oracle.amax(x)
            for isa, threads in calls_of(device, x.size):
                with runner.setting(isa, threads):
                    got = runner.amax(be, x, offset=turn % 4)
                runner.same_bits(got["out"], want, f"amax {dtype}{shape} {values} isa={isa} {cases.report_header()}")


def test_the_only_value_counts_wherever_it_stands(device):
    be = runner.backend(device)
    for n in (1, 15, 16, 17, 63, 64, 65, 129, 300):
        for at in {0, n // 2, n - 1}:
            for value in (-3.0, np.nan, -np.inf, 1e-45):
                x = np.zeros(n, np.float32)
                x[at] = value
                want = abs(np.float32(value)) if np.isfinite(value) else 0
                assert runner.amax(be, x)["out"][0] == want, (n, at, value)


def test_subnormals_survive_flush_to_zero():
    x = cases.draw("amax-flush", "subnormal_input", (300, 300), "float32")
    want = oracle.amax(x)
    for isa in runner.isas():
        with runner.setting(isa, 2), runner.flushed():
            got = runner.amax(runner.Numpy(), x)
        runner.same_bits(got["out"], want, f"isa={isa} FTZ+DAZ")


OPTIONS = (
    {},
    {"row_amax": True},
    {"rht": True},
    {"rht": True, "rht_signs": True},
    {"row_amax": True, "rht": True, "rht_signs": True},
)


def check(be, x: np.ndarray, options: dict[str, bool], label, **more) -> None:
    rotation = {name: v for name, v in options.items() if name != "row_amax"}
    got = runner.amax(be, x, columnwise=True, **options, **more)
    runner.same_bits(got["out"], oracle.amax(x, row_amax="row_amax" in options), f"{label} {options}")
    runner.same_bits(got["columnwise_out"], oracle.columnwise_amax(x, **rotation), f"{label} {options} columnwise")


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_options(device, dtype):
    """One for each row, and that of the columnwise copy, rotated or not."""
    be = runner.backend(device)
    shapes = (*cases.PACKED_SHAPES, (32, 33), (17, 65), (48, 1), (1, 70000), (70000, 1), (528, 400))
    for turn, shape in enumerate(shapes):
        large, rows = np.prod(shape) > 1 << 16, np.prod(shape[:-1])
        for values in ("outlier", "inf_nan_mix", "inf_places") if large else cases.VALUE_SETS:
            x = cases.draw(f"amax-options-{dtype}-{shape}-{values}", values, shape, dtype)
            for options in OPTIONS if dtype == "bfloat16" and rows % 16 == 0 else OPTIONS[:2]:
                for isa, threads in calls_of(device, x.size):
                    with runner.setting(isa, threads):
                        label = f"{dtype}{shape} {values} isa={isa} threads={threads} {cases.report_header()}"
                        check(be, x, options, label, offset=turn % 4)
            alone = runner.amax(be, x, row_amax=True)
            runner.same_bits(alone["out"], oracle.amax(x, row_amax=True), f"{dtype}{shape} {values} rows alone")


def test_options_survive_flush_to_zero():
    for values in ("subnormal_input", "tiny"):
        x = cases.draw(f"amax-flush-{values}", values, (272, 320), "bfloat16")
        for isa in runner.isas():
            for options in OPTIONS:
                want = oracle.amax(x, row_amax="row_amax" in options)
                rotation = {name: v for name, v in options.items() if name != "row_amax"}
                rotated = oracle.columnwise_amax(x, **rotation)
                with runner.setting(isa, 2), runner.flushed():
                    got = runner.amax(runner.Numpy(), x, columnwise=True, **options)
                runner.same_bits(got["out"], want, f"isa={isa} {options} FTZ+DAZ")
                runner.same_bits(got["columnwise_out"], rotated, f"isa={isa} {options} FTZ+DAZ columnwise")


def test_numpy_face():
    x = cases.draw("amax-face", "inf_nan_mix", (4, 5, 60), "float16")
    runner.same_bits(core.amax(x), oracle.amax(x), "contiguous")
    runner.same_bits(core.amax(x[:, ::2, 1::3]), oracle.amax(x[:, ::2, 1::3]), "strided")
    assert core.amax(np.array(-2.0, np.float32)).tolist() == [2.0]
    x = cases.draw("amax-face-rows", "inf_nan_mix", (4, 8, 48), "bfloat16")
    runner.same_bits(core.amax(x, per_row=True), oracle.amax(x, row_amax=True), "rows")
    for signs in (False, True):
        top, rotated = core.amax(x, per_row=True, rht=True, random_signs=signs)
        runner.same_bits(top, oracle.amax(x, row_amax=True), "rows beside the rotated amax")
        runner.same_bits(rotated, oracle.columnwise_amax(x, rht=True, rht_signs=signs), f"rotated, signs {signs}")
