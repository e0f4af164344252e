"""quantize against the oracle, bit for bit, however it is called."""

from __future__ import annotations

import concurrent.futures
import platform

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer

ISAS = runner.isas()
CALLS = [(isa, threads) for isa in ISAS for threads in (1, 2, 5)]
USAGES = ({"columnwise": False}, {"rowwise": False})


def calls_of(device: str, size: int) -> list[tuple[str | None, int | None]]:
    """Which (instruction set, threads) to try: all of them where the pool is used at all."""
    if device != "cpu":
        return [(None, None)]
    return CALLS if size >= 1 << 16 else [(isa, None) for isa in ISAS]


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bits(device, fmt, dtype):
    be = runner.backend(device)
    for turn, case in enumerate(cases.quantize_cases([fmt], [dtype])):
        x, options = case.make(), {"pow2": case.pow2, "eps": case.eps}
        both = oracle.quantize(x, fmt, **options)
        for isa, threads in calls_of(device, x.size):
            with runner.setting(isa, threads):
                got = runner.quantize(be, x, both, fmt, **options)
            runner.same_quantized(got, both, f"{case} isa={isa} threads={threads}")
        one = oracle.quantize(x, fmt, **options, **USAGES[turn % 2])
        # Element alignment is all that is promised: pointers move off every wider one.
        got = runner.quantize(be, x, one, fmt, **options, offset=1 + turn % 3, poison=0x5A)
        runner.same_quantized(got, one, f"{case} {USAGES[turn % 2]}")


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_amax(device, fmt, dtype):
    be = runner.backend(device)
    sets = ("normal", "zeros", "inf_nan_mix", "tiny", "huge")
    for turn, case in enumerate(cases.quantize_cases([fmt], [dtype], [(33, 65), (0, 16), (7,)], sets)):
        x, options = case.make(), {"pow2": case.pow2, "eps": case.eps}
        for amax in cases.GIVEN_AMAX[turn % 2 :: 2] if x.size else cases.GIVEN_AMAX:
            want = oracle.quantize(x, fmt, amax=amax, **options)
            got = runner.quantize(be, x, want, fmt, amax=amax, **options)
            runner.same_quantized(got, want, f"{case} amax={amax}")


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
        dtype = list(cases.INPUT_DTYPES)[turn % 3]
        x = cases.draw(f"many-{fmt}-{shape}", "inf_nan_mix" if turn % 2 else "outlier", shape, dtype)
        want = oracle.quantize(x, fmt)
        for isa, threads in calls_of(device, x.size)[:: 1 if turn == 2 else 4]:
            with runner.setting(isa, threads):
                got = runner.quantize(be, x, want, fmt)
            runner.same_quantized(got, want, f"{fmt} {dtype}{shape} isa={isa} threads={threads}")


def test_callers_float_mode_does_not_matter():
    if platform.machine() != "x86_64":
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    be = runner.Numpy()
    for fmt in cases.FORMATS:
        for values in ("subnormal_input", "tiny", "powers_of_two", "scale_edges", "huge"):
            for shape in ((33, 65), (256, 384)):
                x = cases.draw(f"flush-{fmt}-{values}-{shape}", values, shape, "float32")
                want = oracle.quantize(x, fmt, eps=1e-40 if fmt in cases.DIVIDE_FORMATS else 0.0)
                for isa, threads in calls_of("cpu", x.size):
                    with runner.setting(isa, threads), runner.flushed():
                        got = runner.quantize(be, x, want, fmt, eps=1e-40 if fmt in cases.DIVIDE_FORMATS else 0.0)
                    runner.same_quantized(got, want, f"{fmt} {values} {shape} isa={isa} threads={threads} FTZ+DAZ")


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
    work = list(cases.quantize_cases(shapes=[(256, 384)], values=["normal", "inf_nan_mix"], dtypes=["bfloat16"]))
    wanted = [(c, c.make()) for c in work]
    wanted = [(c, x, oracle.quantize(x, c.format, pow2=c.pow2, eps=c.eps)) for c, x in wanted]

    def one(item):
        case, x, want = item
        got = runner.quantize(runner.Numpy(), x, want, case.format, pow2=case.pow2, eps=case.eps)
        runner.same_quantized(got, want, case)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            list(pool.map(one, wanted))


QUANTIZERS = [
    ("fp8_e5m2_tensor", Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2", amax_epsilon=2.0**-10)),
    ("fp8_e4m3_1x128", Float8BlockQuantizer()),
    ("fp8_e4m3_128x128", Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False)),
    ("mxfp8_e4m3", MXFP8Quantizer()),
]


@pytest.mark.parametrize("fmt, quantizer", QUANTIZERS, ids=[q[0] for q in QUANTIZERS])
def test_numpy_face(fmt, quantizer):
    """The public verbs: shapes as users see them, every usage, any input layout."""
    _, pow2, eps = quantizer.spec
    assert quantizer.format.name == fmt
    for shape in ((2, 3, 96), (130, 257), (7,), (0, 16)):
        for dtype in cases.INPUT_DTYPES:
            x = cases.draw(f"face-{fmt}-{shape}", "inf_nan_mix", shape, dtype)
            want = oracle.quantize(x, fmt, pow2=pow2, eps=eps)
            for rowwise, columnwise in ((True, True), (True, False), (False, True)):
                q = core.quantize(x, quantizer.with_usage(rowwise=rowwise, columnwise=columnwise))
                label = f"{fmt} {dtype}{shape} {rowwise} {columnwise}"
                assert q.shape == shape and (q.rowwise_data is not None) == rowwise, label
                assert (q.columnwise_data is not None) == columnwise, label
                assert not rowwise or q.rowwise_data.shape == shape, label
                for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
                    got, bits = getattr(q, name), getattr(want, name)
                    if got is not None:
                        columns = name == "columnwise_data" and got.ndim != bits.ndim
                        runner.same_bits(oracle.fold(got) if columns or name == "rowwise_data" else got, bits, label)
    x = cases.draw(f"face-strided-{fmt}", "normal", (66, 130), "float32")[::2, 1::2]
    assert not x.flags.c_contiguous
    runner.same_bits(
        core.quantize(x, quantizer).rowwise_data, oracle.quantize(x, fmt, pow2=pow2, eps=eps).rowwise_data, fmt
    )
    if quantizer.format.per_tensor:
        q = core.quantize(x, quantizer, amax=np.array([7.0], np.float32))
        runner.same_bits(q.rowwise_data, oracle.quantize(x, fmt, eps=eps, amax=7.0).rowwise_data, "given amax")
        assert q.amax.tolist() == [7.0]
