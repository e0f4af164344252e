"""quantize against the oracle, bit for bit, with all kinds of arguments."""

from __future__ import annotations

import concurrent.futures
import itertools
import platform
from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from quantizers import oracle_options

ISAS = runner.isas()
CALLS = [(isa, threads) for isa in ISAS for threads in (1, 2, 5)]
USAGES = ({"columnwise": False}, {"rowwise": False})
# Options that belong to the other copy.
FOREIGN = ({"rht", "rht_signs", "columnwise_amax", "from_rows"}, {"row_amax", "amax"})
BUFFERS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax", "columnwise_amax")


def calls_of(device: str, size: int) -> list[tuple[str | None, int | None]]:
    """Which (instruction set, threads) to try: all of them where the pool is used at all."""
    if device != "cpu":
        return [(None, None)]
    return CALLS if size >= 1 << 16 else [(isa, None) for isa in ISAS]


def one_sided(options: dict[str, Any], side: int) -> dict[str, Any]:
    """The options of a call that makes one copy only, its usage included."""
    return {name: v for name, v in options.items() if name not in FOREIGN[side]} | USAGES[side]


def check(be: Any, x: np.ndarray, fmt: str, options: dict[str, Any], label: Any, **more: Any) -> None:
    want = oracle.quantize(x, fmt, **options)
    runner.same_quantized(runner.quantize(be, x, want, fmt, **options, **more), want, f"{label} {options}")


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bits(device, fmt, dtype):
    be = runner.backend(device)
    for turn, case in enumerate(cases.quantize_cases([fmt], [dtype], variants=True)):
        if device == "cpu" and turn % 2 == {"float16": 0, "bfloat16": 1}.get(dtype):
            continue  # of two bytes each case is tried with one dtype
        x, options = case.make(), case.options
        both = oracle.quantize(x, fmt, **options)
        for isa, threads in calls_of(device, x.size):
            with runner.setting(isa, threads):
                got = runner.quantize(be, x, both, fmt, **options)
            runner.same_quantized(got, both, f"{case} isa={isa} threads={threads}")
        # Element alignment is all that is promised: pointers move off every wider one.
        side = turn % 2 if cases.has_columnwise(fmt, case.shape) else 0
        if turn // 2 % 2 == 0:
            check(be, x, fmt, one_sided(options, side), case, offset=1 + turn % 3, poison=0x5A)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_amax(device, fmt, dtype):
    be = runner.backend(device)
    sets = ("normal", "zeros", "inf_nan_mix", "tiny", "huge")
    for turn, case in enumerate(cases.quantize_cases([fmt], [dtype], [(33, 65), (0, 16), (7,)], sets)):
        x = case.make()
        for amax in cases.GIVEN_AMAX[turn % 2 :: 2] if x.size else cases.GIVEN_AMAX:
            check(be, x, fmt, {**case.options, "amax": amax}, case)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.PACKED_FORMATS)
def test_given_amaxes(device, fmt, dtype):
    """Given amaxes of both copies are used, whatever their values; with the option, one for each row."""
    be = runner.backend(device)
    sets, shapes = ("normal", "zeros", "inf_nan_mix", "level_edges", "huge"), ((48, 80), (0, 16), (144, 272))
    for turn, case in enumerate(cases.quantize_cases([fmt], [dtype], shapes, sets, variants=True, every_option=True)):
        x, given = case.make(), np.roll(np.array(cases.GIVEN_AMAX), turn)
        rows = given[np.arange(x.shape[0]) % len(given)] if "row_amax" in case.variant else given[0]
        other = given[0] if "square" in case.variant else given[1]  # the copies of a square block share its amax
        options = {**case.options, "amax": rows, "columnwise_amax": other}
        check(be, x, fmt, options, case)
        check(be, x, fmt, one_sided(options, turn % 2), case)


# Scales as an update leaves them, and what only a caller could hand over.
SCALES = tuple(np.float32(v) for v in (1.0, 448 / 3, 2.0**-149, 2.0**-126, 2.0**127, 3.4028235e38, 0.0, np.inf, np.nan))


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_scale(device, fmt, dtype):
    """Delayed scaling: the scale as it is, and x's amax beside it, alone or joined with an earlier one."""
    be = runner.backend(device)
    for turn, (shape, values) in enumerate(itertools.product(cases.SHAPES, ("normal", "inf_nan_mix", "tiny", "huge"))):
        label = f"scale-{fmt}-{dtype}-{shape}-{values} ({cases.report_header()})"
        x = cases.draw(label, values, shape, dtype)
        for more in ({}, {"accumulate": 0.0}, {"accumulate": 2.5}, {"accumulate": np.inf})[turn % 2 :: 2]:
            options = {"scale": SCALES[turn % len(SCALES)], **more}
            for isa, threads in calls_of(device, x.size):
                with runner.setting(isa, threads):
                    check(be, x, fmt, options, f"{label} isa={isa} threads={threads}")
            check(be, x, fmt, {**options, **USAGES[turn % 2]}, label, offset=1 + turn % 3)


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_scale_is_one_without_an_amax(device, fmt):
    be = runner.backend(device)
    x = np.array([[1.0, -2.0, 3.0, 0.0]], np.float32)
    for amax, eps in ((np.nan, 0.0), (np.inf, 0.0), (0.0, 0.0), (np.nan, 0.5)):
        want = oracle.quantize(x, fmt, amax=amax, eps=eps)
        got = runner.quantize(be, x, want, fmt, amax=amax, eps=eps)
        assert got["rowwise_scale_inv"].tolist() == got["columnwise_scale_inv"].tolist() == [1.0], (amax, eps)
    for shape in ((0, 16), (16, 0), (0,)):
        x = np.zeros(shape, np.float32)
        want = oracle.quantize(x, fmt, eps=1.0)
        got = runner.quantize(be, x, want, fmt, eps=1.0)
        assert got["rowwise_scale_inv"].tolist() == [1.0] and got["amax"].tolist() == [0.0], shape


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_many_tiles(device, fmt):
    """Larger and more ragged than one task, strip or thread block of any kernel."""
    be = runner.backend(device)
    shapes = ((1, 70001), (70001, 1), (515, 389)) + (((2049, 1032),) if device == "cuda" else ())
    for turn, shape in enumerate(shapes):
        dtype = ("float32", "bfloat16", "float16", "bfloat16")[turn]
        values = "inf_nan_mix" if turn % 2 else "outlier"
        for case in cases.quantize_cases([fmt], [dtype], [shape], [values], variants=True, every_option=True):
            x, options = case.make(), case.options
            want = oracle.quantize(x, fmt, **options)
            for isa, threads in calls_of(device, x.size)[:: 1 if turn == 2 else 4]:
                with runner.setting(isa, threads):
                    got = runner.quantize(be, x, want, fmt, **options)
                runner.same_quantized(got, want, f"{case} isa={isa} threads={threads}")


def test_callers_float_mode_does_not_matter():
    if platform.machine() != "x86_64":
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    be, sets = runner.Numpy(), ("subnormal_input", "tiny", "powers_of_two", "scale_edges", "huge")
    for fmt, dtype in itertools.product(cases.FORMATS, ("float32", "bfloat16")):
        for case in cases.quantize_cases([fmt], [dtype], [(33, 65), (256, 384)], sets, variants=True):
            x = case.make()
            options = case.options | ({"eps": 1e-40} if fmt in cases.DIVIDE_FORMATS else {})
            if fmt in cases.TENSOR_FORMATS and dtype == "bfloat16":
                options = {"scale": np.float32(1e-40)}
            want = oracle.quantize(x, fmt, **options)
            for isa, threads in calls_of("cpu", x.size):
                with runner.setting(isa, threads), runner.flushed():
                    got = runner.quantize(be, x, want, fmt, **options)
                runner.same_quantized(got, want, f"{case} {options} isa={isa} threads={threads} FTZ+DAZ")


def test_torch_flush_denormal():
    torch = pytest.importorskip("torch", reason="torch is not installed: set_flush_denormal is its switch")
    x = cases.draw("torch-flush", "subnormal_input", (256, 384), "float32")
    want = oracle.quantize(x, "fp8_e4m3_1x128")
    if not torch.set_flush_denormal(True):
        pytest.skip("torch.set_flush_denormal does nothing on this processor")
    try:
        got = runner.quantize(runner.Numpy(), x, want, "fp8_e4m3_1x128")
    finally:
        torch.set_flush_denormal(False)
    runner.same_quantized(got, want, "torch.set_flush_denormal(True)")


def test_several_python_threads():
    work = list(
        cases.quantize_cases(
            shapes=[(256, 384)], values=["normal", "inf_nan_mix"], dtypes=["bfloat16"], variants=True, every_option=True
        )
    )
    wanted = [(c, c.make(), oracle.quantize(c.make(), c.format, **c.options)) for c in work]

    def one(item):
        case, x, want = item
        runner.same_quantized(runner.quantize(runner.Numpy(), x, want, case.format, **case.options), want, case)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            list(pool.map(one, wanted))


QUANTIZERS = (
    Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2", amax_epsilon=2.0**-10),
    Float8Quantizer(),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    MXFP8Quantizer(),
    MXFP8Quantizer(fp8_dtype="float8_e5m2", with_2d_quantization=True),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=True, stochastic_rounding=True),
)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.format.name}-{q.spec.flags}-{q.needs_scale}")
def test_numpy_face(quantizer):
    """The public verbs: shapes as users see them, every usage, any input layout."""
    fmt, packed = quantizer.format.name, quantizer.format.pack == 2
    state = {"scale": np.array([3.0], np.float32)} if quantizer.needs_scale else {}
    if quantizer.needs_rng:
        state = {"rng": oracle.rng_words(2**63 + 5, 2**32 - 1)}
    shapes = ((2, 8, 96), (144, 272), (0, 16)) if packed else ((2, 3, 96), (130, 257), (7,), (0, 16))
    dtypes = ("bfloat16",) if getattr(quantizer, "with_rht", False) else tuple(cases.INPUT_DTYPES)
    for shape, dtype, (rowwise, columnwise) in itertools.product(
        shapes, dtypes, ((True, True), (True, False), (False, True))
    ):
        x = cases.draw(f"face-{fmt}-{shape}", "inf_nan_mix", shape, dtype)
        usage = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        q = core.quantize(x, usage, **state)
        want = oracle.quantize(x, fmt, **oracle_options(usage), **state)
        label = f"{usage} {dtype}{shape}"
        assert q.shape == shape, label
        for name in BUFFERS:
            got, bits = getattr(q, name), getattr(want, name)
            assert (got is None) == (bits is None), f"{label} {name}"
            if got is not None:
                if name == "rowwise_data":
                    assert got.shape == (*shape[:-1], shape[-1] // quantizer.format.pack), label
                runner.same_bits(oracle.fold(got) if name.endswith("data") else got, bits, f"{label} {name}")
    x = cases.draw(f"face-strided-{fmt}", "normal", (96, 160), dtypes[0] if packed else "float32")[::2, ::2]
    assert not x.flags.c_contiguous
    want = oracle.quantize(x, fmt, **oracle_options(quantizer), **state)
    runner.same_bits(core.quantize(x, quantizer, **state).rowwise_data, want.rowwise_data, fmt)
    if state:
        return
    given = {"amax": np.array([7.0], np.float32)} if quantizer.format.one_scale or packed else {}
    given |= {"columnwise_amax": np.array([9.0], np.float32)} if packed else {}
    q, want = core.quantize(x, quantizer, **given), oracle.quantize(x, fmt, **oracle_options(quantizer), **given)
    for name in BUFFERS:
        if getattr(want, name) is not None:
            runner.same_bits(getattr(q, name), np.ascontiguousarray(getattr(want, name)), f"given {name}")


def test_rng_and_scale_stay_as_they_are():
    x, rng = np.ones((16, 16), np.float32), oracle.rng_words(3, 2**32 - 1)
    before = rng.copy()
    core.quantize(x, NVFP4Quantizer(stochastic_rounding=True), rng=rng)
    assert (rng == before).all(), "offsets are the caller's to advance"
