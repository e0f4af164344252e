"""gemm on the CPU against the oracle, bit for bit; on a GPU within the tolerance that the oracle derives."""

from __future__ import annotations

import platform
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.core import _core
from quantizers import oracle_options

ISAS = runner.isas()
NATIVE, REST = "cuda.native", "cuda.native_rest"
CUBLASLT, BLOCKS = "cuda.cublaslt", "cuda.cublaslt_blocks"
DECODED, EMULATED = "cuda.decoded", "cuda.emulated"
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


@pytest.mark.parametrize("pair", cases.MIXED_PAIRS, ids="-".join)
def test_bits_of_any_two_formats_on_the_cpu(pair):
    """The finer blocks of two formats rule; one of them may carry an amax of its tensor."""
    shapes = ((7, 5, 33), (33, 65, 127), (20, 18, 257), (16, 1, 400), (4, 8, 0))
    for case in cases.gemm_cases([pair], shapes):
        check_cpu(case, [(isa, 2) for isa in ISAS])
    for case in cases.gemm_cases([pair], [(5, 40, 300)], ADVERSARIAL):
        check_cpu(case, [(isa, 2) for isa in ISAS])


AMAXES = np.array([0.0, 1e-45, 1e-30, 0.3, 2688.0, 1e25, 3.4e38, np.inf, np.nan], np.float32)


@pytest.mark.parametrize("other", cases.FORMATS)
def test_amaxes_enter_alpha(device, other):
    """One for the tensor or one for each row, of one operand or of both; rows need not fill blocks."""
    be = runner.backend(device)
    for turn, (m, n, k) in enumerate(((1, 1, 16), (7, 5, 48), (33, 20, 128), (64, 48, 256), (3, 70, 400))):
        label = f"amaxes-{other}-{m}-{n}-{k} ({cases.report_header()})"
        x, y = (cases.draw(f"{label}-{i}", "outlier", s, "float32") for i, s in enumerate(((m, k), (n, k))))
        x *= np.exp2(cases.rng_for(label).uniform(-9, 9, (m, 1))).astype(np.float32)
        rows = {"row_amax": True} if other in cases.PACKED_FORMATS else {}
        for mine, theirs in (({"row_amax": True}, {}), ({}, rows), ({"row_amax": True}, rows)):
            a = oracle.quantize(x, "nvfp4", columnwise=False, **mine).copy()
            b = oracle.quantize(y, other, columnwise=False, **theirs).copy()
            alpha, beta, bias_dtype, out_dtype = cases.GEMM_EPILOGUES[turn % 5]
            for first, second, mnk in ((a, b, (m, n, k)), (b, a, (n, m, k))):
                bias = cases.draw(f"{label}-bias", "normal", mnk[1:2], bias_dtype) if bias_dtype else None
                c = cases.draw(f"{label}-c", "normal", mnk[:2], out_dtype) if beta else None
                more = {"alpha": alpha, "beta": beta, "bias": bias, "c": c}
                names = ("nvfp4", other) if first is a else (other, "nvfp4")
                dtype = cases.INPUT_DTYPES[out_dtype]

                def product(first=first, second=second, names=names, mnk=mnk, more=more, out_dtype=out_dtype):
                    return runner.gemm(be, first, names[0], second, names[1], mnk, out_dtype=out_dtype, **more)

                if device == "cpu":
                    want = oracle.gemm_cpu(first, second, out_dtype=dtype, **more)
                    for isa in ISAS:
                        with runner.setting(isa):
                            runner.same_bits(product(), want, f"{label} {mine} {theirs} isa={isa}")
                else:
                    exact = oracle.gemm_float64(first, second, **more)
                    allowed = oracle.gemm_tolerance(first, second, out_dtype=dtype, **more)
                    got, largest = product().astype(np.float64), float(ml_dtypes.finfo(dtype).max)
                    near = np.abs(got - exact) <= allowed
                    over = (np.abs(exact) + allowed > largest) & (np.abs(got) >= 0.99 * largest)
                    assert (near | over).all(), f"{label} {mine} {theirs}"


def test_odd_amaxes_on_the_cpu():
    """Whatever an amax is, alpha takes it in the order that NUMERICS states, beside any alpha of the caller's."""
    x = oracle.quantize(cases.draw("odd-amax", "normal", (9, 32), "float32"), "nvfp4", columnwise=False).copy()
    rows = oracle.Copy(x.fmt, False, x.data, x.scale_inv, AMAXES)
    for amax in AMAXES:
        one = oracle.Copy(x.fmt, False, x.data, x.scale_inv, np.array([amax]))
        for a, b in ((rows, one), (one, rows), (one, one), (rows, rows)):
            for alpha in (1.0, 1e30, -1e-30):
                want = oracle.gemm_cpu(a, b, alpha=alpha)
                got = runner.gemm(runner.Numpy(), a, "nvfp4", b, "nvfp4", (9, 9, 32), alpha=alpha)
                runner.same_bits(got, want, f"amax {amax} alpha {alpha}", nan_free=True)


FAMILIES = (
    ("fp8_e4m3_tensor", "fp8_e5m2_tensor"),
    ("fp8_e5m2_1x128", "fp8_e4m3_128x128"),
    ("mxfp8_e4m3", "mxfp8_e5m2"),
    ("nvfp4", "nvfp4"),
    ("mxfp8_e4m3", "nvfp4"),
)


@pytest.mark.parametrize("pair", FAMILIES, ids="-".join)
def test_many_tasks_on_the_cpu(pair):
    """Several tasks along m and n, several passes along k, whatever the thread count."""
    for case in cases.gemm_cases([pair], [(131, 530, 700), (1, 1100, 515), (600, 3, 1100)]):
        check_cpu(case, [(isa, threads) for isa in ISAS for threads in (1, 2, 5)])


def test_callers_float_mode_does_not_matter():
    if platform.machine() != "x86_64":
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    for case in cases.gemm_cases((*cases.GEMM_PAIRS, *FAMILIES), shapes=[(33, 65, 127)], values=["tiny"]):
        qa, qb, epilogue = operands(case)
        want = oracle.gemm_cpu(qa, qb, out_dtype=cases.INPUT_DTYPES[case.out_dtype], **epilogue)
        for isa in ISAS:
            with runner.setting(isa), runner.flushed():
                got = run(runner.Numpy(), case, qa, qb, epilogue)
            runner.same_bits(got, want, f"{case} isa={isa} FTZ+DAZ", nan_free=True)


def test_beta_zero_does_not_read_c(device):
    be = runner.backend(device)
    for pair in (("fp8_e4m3_tensor",) * 2, ("fp8_e4m3_1x128",) * 2, ("mxfp8_e4m3",) * 2, ("nvfp4",) * 2):
        case = next(cases.gemm_cases([pair], [(16, 16, 128)]))
        qa, qb, _ = operands(case)
        nan = np.full(case.mnk[:2], np.nan, np.float32)
        got = runner.gemm(be, qa, pair[0], qb, pair[1], case.mnk, c=nan, beta=0.0)
        assert np.isfinite(got).all(), str(case)


def test_c_may_be_d(device):
    """Accumulating in place, as gradient accumulation does."""
    be = runner.backend(device)
    families = (("fp8_e4m3_tensor",) * 2, ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("mxfp8_e4m3",) * 2, ("nvfp4",) * 2)
    for pair in families:
        for mnk in ((16, 32, 128), (7, 5, 48 if "nvfp4" in pair else 33)):
            a, b = (cases.draw(f"inplace-{pair}-{mnk}-{i}", "normal", (mnk[i], mnk[2]), "float32") for i in (0, 1))
            qa, qb = (oracle.quantize(v, f, columnwise=False).copy() for v, f in zip((a, b), pair, strict=True))
            c = cases.draw(f"inplace-{mnk}", "normal", mnk[:2], "float32")
            apart = runner.gemm(be, qa, pair[0], qb, pair[1], mnk, c=c, beta=1.0)
            out = runner.Outputs(be)
            d = out.new("d", mnk[:2], "float32")
            filled = be.put(c, "float32")
            (d[0] if device == "cpu" else d)[...] = filled[0] if device == "cpu" else filled
            space = out.workspace(_core.gemm_workspace_bytes(*(runner.IDS[f] for f in pair), *mnk, True))
            _core.gemm(
                *runner.copy_operands(be, qa, pair[0]), *runner.copy_operands(be, qb, pair[1]),
                d, d, None, space, 1.0, 1.0, False,
            )  # fmt: skip
            runner.same_bits(out.read()["d"], apart, f"{pair} {mnk}: c is d")


@pytest.mark.cuda
def test_the_workspace_of_decoded_operands_is_bounded(cuda):
    fmt, most, flags = runner.IDS["mxfp8_e4m3"], 3 << 29, 1 << 20
    dense, grouped = _core.gemm_workspace_bytes, _core.grouped_gemm_workspace_bytes
    rows, depth = (_core.group_kinds()[kind] for kind in ("rows", "depth"))
    assert 0 <= dense(fmt, fmt, 4096, 4096, 4096, True) - 2 * 8192 * 4096 <= flags
    for m, n, k in ((1 << 20, 1 << 17, 8192), (16384, 128256, 4096), (300, 1 << 21, 512), (1 << 14, 1 << 14, 1 << 17)):
        bound = max(most, 16384 * k)
        for size in (dense(fmt, fmt, m, n, k, False), grouped(fmt, fmt, depth, m, n, k, 8)):
            assert bound // 2 < size <= bound + flags, (m, n, k)
    for m, n, k, groups in ((32768, 4096, 7168, 32), (4096, 1 << 18, 4096, 3)):
        bound = 2 * m * k + max(most, 2 * n * k)
        assert bound // 2 < grouped(fmt, fmt, rows, m, n, k, groups) <= bound + flags, (m, n, k, groups)


def kernels_of(case: cases.GemmCase) -> set[str]:
    """Returns the kernels of which one has to run on Hopper."""
    a, b = (oracle.FORMATS[f] for f in (case.a_format, case.b_format))
    m, n, k = case.mnk
    if min(case.mnk) > 0 and (case.a_format, case.b_format) in cases.DECODED_PAIRS:
        return {DECODED}
    if not (a.rule == b.rule == "divide" and a.one_scale == b.one_scale and min(case.mnk) > 0 and k % 16 == 0):
        return {EMULATED}
    if case.mnk in LARGE_SHAPES:
        return {NATIVE}
    refused = a.element == b.element == "e5m2" or a.block_rows == b.block_rows == 128 or n % 16
    library = CUBLASLT if a.one_scale else BLOCKS
    return {REST} if refused else {library} if m % 16 == 0 else {library, REST}


# What fills one wave of the tiles of 132 SMs, with rows of D in whole 16 bytes and without
LARGE_SHAPES = ((2112, 1536, 272), (2100, 1531, 144))
# The small aligned shapes meet every pair of copies.
CUDA_SHAPES = (*cases.GEMM_SHAPES, *cases.GEMM_SHAPES_ALIGNED[:2] * 4, *cases.GEMM_SHAPES_ALIGNED[2:], (33, 32, 64))
MIXED_CUDA_SHAPES = ((4, 8, 0), (7, 5, 33), (64, 48, 256), (130, 20, 257))


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.GEMM_PAIRS + cases.MIXED_PAIRS, ids="-".join)
def test_tolerance_on_cuda(pair, cuda):
    """Every shape, the row that the registry names, within the tolerance of that row; twice the same bits."""
    properties = pytest.importorskip("torch").cuda.get_device_properties(0)
    hopper = (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
    be, ran = runner.Torch(), set()
    fp8 = all(oracle.FORMATS[f].rule == "divide" for f in pair)
    shapes = CUDA_SHAPES if pair in cases.GEMM_PAIRS else MIXED_CUDA_SHAPES
    drawn = [*cases.gemm_cases([pair], shapes)]
    for case in cases.gemm_cases([pair], LARGE_SHAPES if fp8 else ()):
        drawn += [replace(case, beta=0.0, bias_dtype=None, out_dtype=out) for out in ("bfloat16", "float16")] + [case]
    for case in drawn:
        ids = (runner.IDS[pair[0]], case.a_columnwise, runner.IDS[pair[1]], case.b_columnwise)
        row = core.kernel_table()[_core.gemm_row(*ids, *case.mnk, case.out_dtype, "cuda", 0)]
        if hopper:
            assert row["kernel"] in kernels_of(case), f"{case}: {row['kernel']}"
        qa, qb, epilogue = operands(case)
        before = runner.want_calls(row["kernel"])
        got = run(be, case, qa, qb, epilogue)
        assert runner.want_calls(row["kernel"]) == before + 1, f"{case}: {row['kernel']} did not run"
        ran.add(row["kernel"])
        tensor_cores = row["kernel"] in (NATIVE, CUBLASLT, BLOCKS, REST)
        accumulate = {"accumulator_bits": 14, "promote_every": 128} if tensor_cores else {}
        dtype = cases.INPUT_DTYPES[case.out_dtype]
        exact = oracle.gemm_float64(qa, qb, **epilogue)
        allowed = oracle.gemm_tolerance(qa, qb, out_dtype=dtype, worst_case=False, **accumulate, **epilogue)
        error = np.abs(got.astype(np.float64) - exact)
        assert (error <= allowed).all(), f"{case}: {(error / allowed).max():.2f} x the tolerance on {row['kernel']}"
        again = run(be, case, qa, qb, epilogue, poison=0x5A)
        runner.same_bits(again, got, f"{case}: second run on {row['kernel']}")
    assert ran & {DECODED, EMULATED}, ran


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
    (MXFP8Quantizer(), MXFP8Quantizer(with_2d_quantization=True)),
    (NVFP4Quantizer(with_rht=True), NVFP4Quantizer(with_2d_quantization=True)),
    (NVFP4Quantizer(row_scaled_nvfp4=True), NVFP4Quantizer()),
)


@pytest.mark.parametrize("pair", QUANTIZERS, ids=lambda p: f"{p[0].format.name}-{p[0].spec.flags}-{p[1].spec.flags}")
def test_numpy_face_three_products(pair):
    """fprop, dgrad and wgrad as a user writes them, leading dimensions kept where rows survive."""
    qx, qw = pair
    rows, n = (24, 32) if qx.format.pack == 2 else (13, 20)
    x = cases.draw("face-x", "normal", (2, rows, 48), "bfloat16")
    w = cases.draw("face-w", "normal", (n, 48), "float32")
    dy = cases.draw("face-dy", "normal", (2, rows, n), "bfloat16")
    bias = cases.draw("face-b", "normal", (n,), "float32")
    c = cases.draw("face-c", "normal", (n, 48), "bfloat16")
    cx, cw, cdy = core.quantize(x, qx), core.quantize(w, qw), core.quantize(dy, qx)

    def want(value, quantizer, columnwise):
        return oracle.quantize(value, quantizer.format.name, **oracle_options(quantizer)).copy(columnwise)

    y = core.gemm(cx, cw, bias=bias)
    exact = oracle.gemm_cpu(want(x, qx, False), want(w, qw, False), bias=bias)
    runner.same_bits(y, exact.reshape(2, rows, n), "fprop")
    dx = core.gemm(cdy, cw, trans_b=False, out_dtype="float16")
    exact = oracle.gemm_cpu(want(dy, qx, False), want(w, qw, True), out_dtype=np.float16)
    runner.same_bits(dx, exact.reshape(2, rows, 48), "dgrad")
    dw = core.gemm(cdy, cx, trans_a=True, trans_b=False, beta=1.0, c=c, out_dtype="bfloat16", alpha=0.5)
    exact = oracle.gemm_cpu(want(dy, qx, True), want(x, qx, True), alpha=0.5, beta=1.0, c=c, out_dtype=oracle.BF16)
    runner.same_bits(dw, exact, "wgrad")


def test_the_transform_cancels_in_the_product():
    """dW of rotated copies is dW: both carry the same orthogonal rotation of the rows that are summed over."""
    x, dy = (cases.draw(f"cancel-{i}", "normal", (256, 64), "bfloat16") for i in range(2))
    exact = dy.astype(np.float64).T @ x.astype(np.float64)
    for quantizer in (NVFP4Quantizer(with_rht=True), NVFP4Quantizer()):
        got = core.gemm(core.quantize(dy, quantizer), core.quantize(x, quantizer), trans_a=True, trans_b=False)
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert error < 0.2, f"{quantizer}: relative error {error:.3f} {cases.report_header()}"
