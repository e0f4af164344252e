"""gemm on the CPU against the oracle, bit for bit; on a GPU within the tolerance that the oracle derives."""

from __future__ import annotations

import platform

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer
from diptych.core import _core

ISAS = runner.isas()
NATIVE, EMULATED = "cuda.cublaslt", "cuda.emulated"
# A few value sets beyond normal ones; NaN and inf travel through products and epilogues.
ADVERSARIAL = ("inf_nan_mix", "subnormal_input", "huge", "outlier", "zero_blocks")


def operands(case: cases.GemmCase, **options):
    a, b, bias, c = case.make()
    qa = oracle.quantize(a, case.a_format, **options).copy(case.a_columnwise)
    qb = oracle.quantize(b, case.b_format, **options).copy(case.b_columnwise)
    return qa, qb, {"alpha": case.alpha, "beta": case.beta, "bias": bias, "c": c}


def run(be, case: cases.GemmCase, qa, qb, epilogue, **more) -> np.ndarray:
    return runner.gemm(be, qa, case.a_format, qb, case.b_format, case.mnk, out_dtype=case.out_dtype, **epilogue, **more)


def check_cpu(case: cases.GemmCase, settings) -> None:
    qa, qb, epilogue = operands(case)
    want = oracle.gemm_cpu(qa, qb, out_dtype=cases.INPUT_DTYPES[case.out_dtype], **epilogue)
    for turn, (isa, threads) in enumerate(settings):
        with runner.setting(isa, threads):
            got = run(runner.Numpy(), case, qa, qb, epilogue, offset=turn)
        runner.same_bits(got, want, f"{case} isa={isa} threads={threads}", nan_free=True)


@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_bits_on_the_cpu(pair):
    for case in cases.gemm_cases([pair]):
        check_cpu(case, [(isa, 2) for isa in ISAS])
    for case in cases.gemm_cases([pair], [(33, 65, 127), (5, 40, 300)], ADVERSARIAL):
        check_cpu(case, [(isa, 2) for isa in ISAS])


FAMILIES = (
    ("fp8_e4m3_tensor", "fp8_e5m2_tensor"),
    ("fp8_e5m2_1x128", "fp8_e4m3_128x128"),
    ("mxfp8_e4m3", "mxfp8_e5m2"),
)


@pytest.mark.parametrize("pair", FAMILIES, ids="-".join)
def test_many_tasks_on_the_cpu(pair):
    """Several tasks along m and n, several passes along k, whatever the thread count."""
    for case in cases.gemm_cases([pair], [(131, 530, 700), (1, 1100, 515), (600, 3, 1100)]):
        check_cpu(case, [(isa, threads) for isa in ISAS for threads in (1, 2, 5)])


def test_callers_float_mode_does_not_matter():
    if platform.machine() != "x86_64":
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    for case in cases.gemm_cases(shapes=[(33, 65, 127)], values=["tiny"]):
        qa, qb, epilogue = operands(case)
        want = oracle.gemm_cpu(qa, qb, out_dtype=cases.INPUT_DTYPES[case.out_dtype], **epilogue)
        for isa in ISAS:
            with runner.setting(isa), runner.flushed():
                got = run(runner.Numpy(), case, qa, qb, epilogue)
            runner.same_bits(got, want, f"{case} isa={isa} FTZ+DAZ", nan_free=True)


def test_beta_zero_does_not_read_c(device):
    be = runner.backend(device)
    for pair in (("fp8_e4m3_tensor",) * 2, ("fp8_e4m3_1x128",) * 2, ("mxfp8_e4m3",) * 2):
        case = next(cases.gemm_cases([pair], [(16, 16, 128)]))
        qa, qb, _ = operands(case)
        nan = np.full(case.mnk[:2], np.nan, np.float32)
        got = runner.gemm(be, qa, pair[0], qb, pair[1], case.mnk, c=nan, beta=0.0)
        assert np.isfinite(got).all(), str(case)


def test_c_may_be_d(device):
    """Accumulating in place, as gradient accumulation does."""
    be = runner.backend(device)
    for pair in (("fp8_e4m3_tensor",) * 2, ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("mxfp8_e4m3",) * 2):
        for mnk in ((16, 32, 128), (7, 5, 33)):
            a, b = (cases.draw(f"inplace-{pair}-{mnk}-{i}", "normal", (mnk[i], mnk[2]), "float32") for i in (0, 1))
            qa, qb = oracle.quantize(a, pair[0]).copy(), oracle.quantize(b, pair[1]).copy()
            c = cases.draw(f"inplace-{mnk}", "normal", mnk[:2], "float32")
            apart = runner.gemm(be, qa, pair[0], qb, pair[1], mnk, c=c, beta=1.0)
            out = runner.Outputs(be)
            d = out.new("d", mnk[:2], "float32")
            filled = be.put(c, "float32")
            (d[0] if device == "cpu" else d)[...] = filled[0] if device == "cpu" else filled
            _core.gemm(
                be.put(qa.data, runner.ROWS[pair[0]]["element"]), be.put(qa.scale_inv, runner.ROWS[pair[0]]["scale"]),
                runner.IDS[pair[0]], False,
                be.put(qb.data, runner.ROWS[pair[1]]["element"]), be.put(qb.scale_inv, runner.ROWS[pair[1]]["scale"]),
                runner.IDS[pair[1]], False,
                d, d, None, out.workspace(_core.gemm_workspace_bytes(*mnk, True)), 1.0, 1.0, False,
            )  # fmt: skip
            runner.same_bits(out.read()["d"], apart, f"{pair} {mnk}: c is d")


def native(case: cases.GemmCase) -> bool | None:
    """Whether FP8 tensor cores have to take a product; None where their library may say either."""
    formats = (case.a_format, case.b_format)
    row = next(r for r in core.kernel_table() if r["kernel"] == NATIVE)
    fmts = [oracle.FORMATS[f] for f in formats]
    suits = all(f in row["formats"] for f in formats) and case.mnk[0] > 0
    suits = suits and not all(f.element == "e5m2" for f in fmts) and not all(f.block_rows == 128 for f in fmts)
    if not suits or any(v == 0 or v % 16 for v in case.mnk[1:]):
        return False
    return None if case.mnk[0] % 16 else True


# The small aligned shapes meet every pair of copies.
CUDA_SHAPES = (*cases.GEMM_SHAPES, *cases.GEMM_SHAPES_ALIGNED[:2] * 4, *cases.GEMM_SHAPES_ALIGNED[2:], (33, 32, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_tolerance_on_cuda(pair, cuda):
    """Every shape, the row that the registry names, within the tolerance of that row; twice the same bits."""
    arch = _core.cuda_info()["archs"][0]
    be, ran = runner.Torch(), set()
    for case in cases.gemm_cases([pair], CUDA_SHAPES):
        ids = (runner.IDS[pair[0]], case.a_columnwise, runner.IDS[pair[1]], case.b_columnwise)
        row = core.kernel_table()[_core.gemm_row(*ids, *case.mnk, case.out_dtype, "cuda", 0)]
        expected = native(case) if arch == 90 else None
        if expected is not None:
            assert row["kernel"] == (NATIVE if expected else EMULATED), f"{case}: {row['kernel']}"
        qa, qb, epilogue = operands(case)
        before = runner.want_calls(row["kernel"])
        got = run(be, case, qa, qb, epilogue)
        assert runner.want_calls(row["kernel"]) == before + 1, f"{case}: {row['kernel']} did not run"
        ran.add(row["kernel"])
        accumulate = {"accumulator_bits": 14, "promote_every": 128} if row["kernel"] == NATIVE else {}
        dtype = cases.INPUT_DTYPES[case.out_dtype]
        exact = oracle.gemm_float64(qa, qb, **epilogue)
        allowed = oracle.gemm_tolerance(qa, qb, out_dtype=dtype, worst_case=False, **accumulate, **epilogue)
        error = np.abs(got.astype(np.float64) - exact)
        assert (error <= allowed).all(), f"{case}: {(error / allowed).max():.2f} x the tolerance on {row['kernel']}"
        again = run(be, case, qa, qb, epilogue, poison=0x5A)
        runner.same_bits(again, got, f"{case}: second run on {row['kernel']}")
    assert EMULATED in ran, ran


@pytest.mark.cuda
@pytest.mark.parametrize("pair", [p for p in cases.GEMM_PAIRS if p[0] in cases.TENSOR_FORMATS], ids="-".join)
def test_fast_accumulation_on_cuda(pair, cuda):
    be = runner.Torch()
    for case in cases.gemm_cases([pair], cases.GEMM_SHAPES_ALIGNED):
        qa, qb, epilogue = operands(case)
        got = run(be, case, qa, qb, epilogue, fast_accum=True)
        exact, dtype = oracle.gemm_float64(qa, qb, **epilogue), cases.INPUT_DTYPES[case.out_dtype]
        allowed = oracle.gemm_tolerance(qa, qb, out_dtype=dtype, accumulator_bits=14, worst_case=False, **epilogue)
        error = np.abs(got.astype(np.float64) - exact)
        assert (error <= allowed).all(), f"{case}: {(error / allowed).max():.2f} x the tolerance"


@pytest.mark.cuda
def test_offsets_and_specials_on_cuda(cuda):
    """Operands that are aligned to their element only; NaN lands where the float64 product has it.

    No inf here: it gives MXFP8 blocks scales beyond those that bfloat16 decodes exactly (NUMERICS 6).
    """
    be = runner.Torch()
    for case in cases.gemm_cases(shapes=[(33, 65, 127), (64, 48, 256)], values=["normal", "nan_mix"]):
        qa, qb, epilogue = operands(case)
        got = run(be, case, qa, qb, epilogue).astype(np.float64)
        shifted = run(be, case, qa, qb, epilogue, offset=1).astype(np.float64)
        with np.errstate(all="ignore"):
            exact = oracle.gemm_float64(qa, qb, **epilogue)
        for name, d in (("aligned", got), ("shifted", shifted)):
            assert (np.isnan(d) == np.isnan(exact)).all(), f"{case} {name}: NaN in other places"
        if case.values == "normal":
            dtype = cases.INPUT_DTYPES[case.out_dtype]
            allowed = oracle.gemm_tolerance(qa, qb, out_dtype=dtype, accumulator_bits=14, promote_every=128, **epilogue)
            assert (np.abs(shifted - exact) <= allowed).all(), f"{case}: operands off the wide alignment"


QUANTIZERS = (
    (Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2")),
    (Float8BlockQuantizer(), Float8BlockQuantizer(block_scaling_dim=2)),
    (MXFP8Quantizer(), MXFP8Quantizer(fp8_dtype="float8_e5m2")),
)


@pytest.mark.parametrize("pair", QUANTIZERS, ids=lambda p: p[0].format.name)
def test_numpy_face_three_products(pair):
    """fprop, dgrad and wgrad as a user writes them, leading dimensions kept where rows survive."""
    qx, qw = pair
    x = cases.draw("face-x", "normal", (2, 13, 48), "bfloat16")
    w = cases.draw("face-w", "normal", (20, 48), "float32")
    dy = cases.draw("face-dy", "normal", (2, 13, 20), "float32")
    bias = cases.draw("face-b", "normal", (20,), "float32")
    c = cases.draw("face-c", "normal", (20, 48), "bfloat16")
    cx, cw, cdy = core.quantize(x, qx), core.quantize(w, qw), core.quantize(dy, qx)

    def want(value, quantizer, columnwise):
        _, pow2, eps = quantizer.spec
        options = {"pow2": pow2, "eps": eps} if quantizer.format.rule == "divide" else {}
        return oracle.quantize(value, quantizer.format.name, **options).copy(columnwise)

    y = core.gemm(cx, cw, bias=bias)
    runner.same_bits(y, oracle.gemm_cpu(want(x, qx, False), want(w, qw, False), bias=bias).reshape(2, 13, 20), "fprop")
    dx = core.gemm(cdy, cw, trans_b=False, out_dtype="float16")
    exact = oracle.gemm_cpu(want(dy, qx, False), want(w, qw, True), out_dtype=np.float16)
    runner.same_bits(dx, exact.reshape(2, 13, 48), "dgrad")
    dw = core.gemm(cdy, cx, trans_a=True, trans_b=False, beta=1.0, c=c, out_dtype="bfloat16", alpha=0.5)
    exact = oracle.gemm_cpu(want(dy, qx, True), want(x, qx, True), alpha=0.5, beta=1.0, c=c, out_dtype=oracle.BF16)
    runner.same_bits(dw, exact, "wgrad")
