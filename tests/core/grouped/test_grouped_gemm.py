"""Products of groups: the CPU against the oracle, bit for bit; a GPU within the tolerance that the oracle derives."""

from __future__ import annotations

import dataclasses
import itertools
import platform
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.grouped_runner import (
    ALIGNED,
    DECODED,
    EMULATED,
    EXTENTS,
    GROUPS,
    NATIVE,
    PRODUCTS,
    Case,
    arguments,
    expected_kernel,
    formats,
    grouped_cases,
    grouped_gemm,
)  # fmt: skip
from diptych import core
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.core import _core

ISAS = runner.isas()
TENSOR, BLOCK, MX, NV = "fp8_e4m3_tensor", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4"
CPU = "cpu.grouped_gemm"
FAMILIES = (
    ("fp8_e4m3_tensor", "fp8_e5m2_tensor"),
    ("fp8_e5m2_1x128", "fp8_e4m3_128x128"),
    ("mxfp8_e4m3", "mxfp8_e5m2"),
    ("nvfp4", "nvfp4"),
    ("mxfp8_e4m3", "nvfp4"),
    ("fp8_e4m3_tensor", "fp8_e4m3_1x128"),
)
ADVERSARIAL = ("inf_nan_mix", "subnormal_input", "huge", "outlier", "zero_blocks")


def check_cpu(case: Case, settings) -> None:
    problem = case.make()
    want = problem.cpu()
    for turn, (isa, threads) in enumerate(settings):
        align = case.align if turn % 2 else 1
        with runner.setting(isa, threads):
            got = grouped_gemm(runner.Numpy(), problem, formats(case), offset=turn, align=align)
        runner.same_bits(got, want, f"{case} isa={isa} threads={threads}", nan_free=True)


@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_bits_on_the_cpu(pair):
    for case in grouped_cases([pair]):
        check_cpu(case, [(isa, 2) for isa in ISAS])
    for product in PRODUCTS:
        for case in grouped_cases([pair], GROUPS[:1], [(40, 130)], ADVERSARIAL, [product]):
            check_cpu(case, [(isa, 2) for isa in ISAS])


@pytest.mark.parametrize("pair", cases.MIXED_PAIRS, ids="-".join)
def test_bits_of_any_two_formats_on_the_cpu(pair):
    for product in PRODUCTS:
        for case in grouped_cases([pair], GROUPS[:2], values=("normal", "inf_nan_mix"), products=[product]):
            check_cpu(case, [(isa, 2) for isa in ISAS])


@pytest.mark.parametrize("pair", FAMILIES, ids="-".join)
def test_many_tasks_on_the_cpu(pair):
    """Groups that several threads share, groups that a thread has for itself, and both at once."""
    groups = ((700, (0, 3, 20, 20, 650, 660)), (330, (0, 160, 330)), (600, tuple(range(0, 601, 3))))
    for product in PRODUCTS:
        for case in grouped_cases([pair], groups, [(270, 160), (530, 96), (20, 30)], products=[product]):
            check_cpu(case, [(isa, threads) for isa in ISAS for threads in (1, 2, 5)])


def test_callers_float_mode_does_not_matter():
    if platform.machine() != "x86_64":
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    for case in grouped_cases(FAMILIES, GROUPS[:3], [(40, 130)], ["tiny"]):
        problem = case.make()
        want = problem.cpu()
        with runner.flushed():
            got = grouped_gemm(runner.Numpy(), problem, formats(case))
        runner.same_bits(got, want, f"{case} FTZ+DAZ", nan_free=True)


QUANTIZERS = (
    (Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2")),
    (Float8BlockQuantizer(), Float8BlockQuantizer(block_scaling_dim=2)),
    (MXFP8Quantizer(), MXFP8Quantizer(with_2d_quantization=True)),
    (NVFP4Quantizer(with_rht=True), NVFP4Quantizer(with_2d_quantization=True)),
    (NVFP4Quantizer(row_scaled_nvfp4=True), NVFP4Quantizer()),
)


@pytest.mark.parametrize("pair", QUANTIZERS, ids=lambda p: f"{p[0].format.name}-{p[0].spec.flags}-{p[1].spec.flags}")
def test_numpy_face_gives_the_bits_of_gemm(pair):
    """fprop, dgrad and wgrad as a user writes them, against `gemm` of each group's rows, quantized as they were."""
    qx, qw = pair
    groups, n, k, align = 4, 48, 96, 128
    offsets = np.array([0, 128, 128, 384, 512], np.int32)
    x, dy = (cases.draw(f"face-{i}", "normal", (2, 272, v), "bfloat16") for i, v in enumerate((k, n)))
    w = cases.draw("face-w", "normal", (groups, n, k), "float32")
    bias = cases.draw("face-b", "normal", (groups, n), "float32")
    cw, cx, cdy = core.quantize_stack(w, qw), core.quantize(x, qx), core.quantize(dy, qx)
    assert len(cw) == groups and [t.shape for t in cw] == [(n, k)] * groups
    y = core.grouped_gemm(cx, cw, offsets, bias=bias)
    dx = core.grouped_gemm(cdy, cw, offsets, trans_b=False, out_dtype="float16", align=align)
    c = cases.draw("face-c", "normal", (groups, n, k), "bfloat16")
    how = {"trans_a": True, "trans_b": False, "alpha": 0.5, "beta": 1.0, "out_dtype": "bfloat16"}
    dw = core.grouped_gemm(cdy, cx, offsets, c=c, align=align, **how)
    assert y.shape == (2, 272, n) and dx.shape == (2, 272, k) and dw.shape == (groups, n, k)
    rows = [slice(a, b) for a, b in itertools.pairwise(offsets)]
    for g, at in enumerate(rows):
        want = core.gemm(cut(cx, at), cw[g], bias=bias[g])
        runner.same_bits(y.reshape(-1, n)[at], want, f"fprop {g}")
        want = core.gemm(cut(cdy, at), cw[g], trans_b=False, out_dtype="float16")
        runner.same_bits(dx.reshape(-1, k)[at], want, f"dgrad {g}")
        want = core.gemm(cut(cdy, at), cut(cx, at), c=c[g], **how) if g != 1 else c[g]
        runner.same_bits(dw[g], want, f"wgrad {g}")
    for d in (y, dx):
        assert (d.reshape(544, -1)[512:].view(np.uint8) == 0).all(), "rows in no group"


def cut(q: core.QuantizedArray, at: slice) -> core.QuantizedArray:
    """Those rows' part of a quantized tensor, whole blocks of it."""
    fmt, made = q.quantizer.format, {"amax": q.amax, "columnwise_amax": q.columnwise_amax}
    for side, (part, unit) in itertools.product(
        ("rowwise", "columnwise"), (("data", fmt.pack), ("scale_inv", fmt.block_cols))
    ):
        array, columnwise = getattr(q, f"{side}_{part}"), side == "columnwise"
        if part == "scale_inv" and fmt.one_scale:
            made[f"{side}_{part}"] = array
            continue
        rows = slice(at.start // unit, at.stop // unit) if columnwise else at
        array = array.reshape(-1, array.shape[-1])
        last = columnwise and fmt.columnwise == "transposed"
        made[f"{side}_{part}"] = np.ascontiguousarray(array[:, rows] if last else array[rows])
    if q.amax is not None and q.amax.size > 1:
        made["amax"] = q.amax[at]
    return core.QuantizedArray(q.quantizer, (at.stop - at.start, q.shape[-1]), **made)


def test_beta_zero_does_not_read_c(device):
    be = runner.backend(device)
    for case in grouped_cases(FAMILIES, GROUPS[:2], [(16, 32)]):
        problem = dataclasses.replace(case.make(), beta=0.0)
        nan = np.full(problem.shape, np.nan, problem.out_dtype)
        got = grouped_gemm(be, dataclasses.replace(problem, c=nan), formats(case))
        assert np.isfinite(got.astype(np.float32)).all(), str(case)


def test_c_may_be_d(device):
    """Accumulating in place, as gradient accumulation does; rows in no group and empty groups keep what they hold."""
    be = runner.backend(device)
    for product in PRODUCTS:
        for case in grouped_cases(FAMILIES, GROUPS[:2], [(16, 32)], products=[product]):
            problem = dataclasses.replace(case.make(), beta=1.0, out_dtype=np.dtype(np.float32))
            c = cases.draw(f"in-place-{case}", "normal", problem.shape, "float32")
            apart = grouped_gemm(be, dataclasses.replace(problem, c=c), formats(case))
            out, filled = runner.Outputs(be), runner.Outputs(be)
            args = arguments(be, dataclasses.replace(problem, c=c), formats(case), out)
            d = filled.new("d", problem.shape, "float32", c)
            _core.grouped_gemm(**args | {"d": d, "c": d})
            runner.same_bits(filled.read()["d"], apart, f"{case}: c is d")
            nothing = ~problem.summed()
            runner.same_bits(apart[nothing], c[nothing], f"{case}: nothing was added there")


def test_nothing_to_sum_is_zero_whatever_multiplies_it(device):
    be = runner.backend(device)
    for case in grouped_cases(FAMILIES, [(64, (16, 32, 32, 48)), (64, (0, 0))], [(32, 16), (32, 0)]):
        problem = dataclasses.replace(case.make(), alpha=-1.5, beta=0.0)

        def spoiled(copy: oracle.Copy) -> oracle.Copy:
            nan = np.float32(np.nan)
            scale = np.full_like(copy.scale_inv, nan) if copy.fmt.one_scale else copy.scale_inv
            return dataclasses.replace(copy, scale_inv=scale, amax=None if copy.amax is None else copy.amax * nan)

        a, like = spoiled(problem.a), spoiled(problem.like)
        b = [spoiled(copy) for copy in problem.b] if isinstance(problem.b, list) else like
        for p in (problem, dataclasses.replace(problem, a=a, b=b, like=like)):
            got = grouped_gemm(be, p, formats(case))
            nothing = ~p.summed()
            if not p.depth and p.a.shape[1] == 0 and p.bias is None:
                nothing[:] = True
            assert (got[nothing].view(np.uint8) == 0).all(), str(case)


def test_rows_of_other_groups_do_not_enter(device):
    """Whatever stands in them: also within a block of scales, whose scale is then another."""
    be = runner.backend(device)
    for pair in FAMILIES:
        for case in grouped_cases([pair], [(160, (0, 37, 37, 90, 128))], [(16, 32)], products=["fprop", "wgrad"]):
            problem = case.make()
            inside = np.zeros(160, bool)
            inside[37:90] = True
            g = 2
            want = grouped_gemm(be, problem, formats(case))[g if problem.depth else inside]

            def noisy(copy: oracle.Copy, inside=inside) -> oracle.Copy:
                """NaN, or where there is none the largest value, in all other rows."""
                data = oracle.unpack(copy.data) if copy.fmt.pack == 2 else copy.data.copy()
                rows = data.T if copy.transposed else data
                rows[~inside] = 7 if copy.fmt.pack == 2 else 0x7F
                return dataclasses.replace(copy, data=oracle.pack(data) if copy.fmt.pack == 2 else data)

            b = noisy(problem.like) if problem.depth else problem.b
            spoiled = dataclasses.replace(problem, a=noisy(problem.a), b=b)
            got = grouped_gemm(be, spoiled, formats(case))
            runner.same_bits(got[g if problem.depth else inside], want, str(case))


BAD_OFFSETS = (
    ((0, 30, 20, 64), 1, "offsets[2] = 20 is less than the one before it, 30"),
    ((-1, 16, 32, 64), 1, "offsets[0] = -1 lies outside of the tensor's 64 rows"),
    ((0, 16, 32, 65), 1, "offsets[3] = 65 lies outside of the tensor's 64 rows"),
    ((0, 2**31 - 1, 32, 64), 1, "offsets[1] = 2147483647 lies outside"),
    ((0, 16, 40, 64), 16, "offsets[2] = 40 is no multiple of align, 16"),
    ((16, 32, 32, 64), 32, "offsets[0] = 16 is no multiple of align, 32"),
)


@pytest.mark.parametrize("pair", FAMILIES, ids="-".join)
def test_bad_offsets_raise_on_the_cpu(pair):
    be = runner.Numpy()
    for product in PRODUCTS:
        case = next(grouped_cases([pair], [(64, (0, 16, 32, 64))], [(32, 16)], products=[product]))
        for offsets, align, message in BAD_OFFSETS:
            out = runner.Outputs(be)
            args = arguments(be, case.make(), formats(case), out)
            args |= {"offsets": be.put(np.array(offsets, np.int32), "int32"), "align": align}
            with pytest.raises(ValueError, match="grouped_gemm: ") as caught:
                _core.grouped_gemm(**args)
            assert message in str(caught.value)
            assert out.untouched(), f"wrote before it refused: {message}"


def clamped(offsets: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Returns the offsets as a GPU reads them: within the rows, and never decreasing."""
    return tuple(np.maximum.accumulate(np.clip(offsets, 0, rows)).tolist())


def check_cuda(case: Case, ran: set[str], **changes: Any) -> None:
    be, problem = runner.Torch(), case.make()
    kernel = expected_kernel(case, aligned=not changes.get("offset"), align=changes.get("align", 1))
    before = runner.want_calls(kernel)
    got = grouped_gemm(be, problem, formats(case), **changes)
    empty = case.rows == 0 and case.product != "wgrad"
    assert runner.want_calls(kernel) == before + 1 or empty, f"{case}: {kernel} did not run"
    ran.add(kernel)
    fast = {"accumulator_bits": 14}
    accumulate = {} if kernel != NATIVE else fast if changes.get("fast_accum") else fast | {"promote_every": 128}
    exact, allowed = problem.float64(), problem.tolerance(**accumulate)
    error = np.abs(got.astype(np.float64) - exact)
    assert (error <= allowed).all(), f"{case}: {(error / allowed).max():.2f} x the tolerance on {kernel}"
    nothing = ~problem.summed()
    runner.same_bits(got[nothing], problem.cpu()[nothing], f"{case}: nothing to sum")
    again = grouped_gemm(be, problem, formats(case), poison=0x5A, **changes)
    runner.same_bits(again, got, f"{case}: second run on {kernel}")


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_tolerance_on_cuda(pair, cuda):
    ran: set[str] = set()
    for case in grouped_cases([pair], GROUPS, EXTENTS):
        check_cuda(case, ran, offset=1)
    groups = [(rows, offsets) for rows, offsets in GROUPS if offsets == clamped(offsets, rows) and rows % 16 == 0]
    for product in PRODUCTS:
        partial = ((700, (0, 128, 256, 256, 640)), (704, (0, 32, 96, 96, 288, 672)), (1664, (0, 640, 640, 1664)))
        partial += ((2112, (0, 1024, 2112)),)  # fewer warps decode such long groups
        for case in grouped_cases([pair], [*groups, *partial], ALIGNED, products=[product]):
            check_cuda(case, ran, align=case.align)
    native = _core.cuda_info()["archs"][0] == 90 and all(oracle.FORMATS[f].rule == "divide" for f in pair)
    assert ran >= ({EMULATED, NATIVE} if native else set()) and ran & {DECODED, EMULATED}


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.MIXED_PAIRS, ids="-".join)
def test_tolerance_of_any_two_formats_on_cuda(pair, cuda):
    ran: set[str] = set()
    for product in PRODUCTS:
        for case in grouped_cases([pair], GROUPS[:2], products=[product]):
            check_cuda(case, ran)
        for case in grouped_cases([pair], GROUPS[8:9], [(144, 96)], products=[product]):
            check_cuda(case, ran, align=case.align)


@pytest.mark.cuda
def test_fast_accumulation_on_cuda(cuda):
    ran: set[str] = set()
    for pair in itertools.product(cases.TENSOR_FORMATS, repeat=2):
        for product in PRODUCTS:
            for case in grouped_cases([pair], [(384, (0, 256, 256, 384))], ALIGNED, products=[product]):
                check_cuda(case, ran, align=case.align, fast_accum=True)


@pytest.mark.cuda
@pytest.mark.parametrize("pair", FAMILIES, ids="-".join)
def test_offsets_of_anyone_stay_in_bounds_on_cuda(pair, cuda):
    """Guards around every output stay; with a promise that holds, offsets count as clamped ones."""
    wild = np.array([-(2**31), -7, 0, 1, 50, 127, 128, 200, 299, 300, 301, 2**31 - 1])
    rng = cases.rng_for(f"hostile-{pair}")
    for turn in range(12):
        drawn = tuple(int(v) for v in rng.choice(wild, 1 + turn % 7))
        for product in PRODUCTS:
            (case,) = grouped_cases([pair], [(304, drawn)], [(48, 64)], products=[product])
            made = dataclasses.replace(case, offsets=clamped(drawn, 304)).make()
            problem = dataclasses.replace(made, offsets=drawn)
            for align in (1, 128):
                got = grouped_gemm(runner.Torch(), problem, formats(case), align=align)
                if align == 1 or product != "wgrad":
                    error = np.abs(got.astype(np.float64) - made.float64())
                    allowed = made.tolerance(accumulator_bits=14, promote_every=128)
                    assert (error <= allowed).all(), f"{case} {drawn}"


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("pair", FAMILIES, ids="-".join)
def test_every_cuda_kernel_on_small_shapes(pair, cuda):
    """Both kernels of each product; groups that cut tiles, are empty, or leave rows out."""
    ran: set[str] = set()
    for product in PRODUCTS:
        groups = ((160, (0, 32, 32, 96, 160)), (256, (0, 128, 256)), (130, (3, 3, 60, 61, 120)))
        for case in grouped_cases([pair], groups, [(48, 64), (33, 65)], products=[product]):
            for align in {1, case.align}:
                check_cuda(case, ran, align=align, offset=int(align == 1))
        for case in grouped_cases([pair], [*groups[:2], (1152, (0, 1152))], [(48, 64), (48, 1152)], products=[product]):
            check_cuda(case, ran, align=case.align)


@pytest.mark.cuda
def test_specials_on_cuda(cuda):
    """NaN lands where the float64 product has it. No inf here, as in gemm's tests."""
    for product in PRODUCTS:
        for case in grouped_cases(FAMILIES, [(130, (3, 3, 60, 61, 120))], [(33, 65)], ["nan_mix"], [product]):
            problem = case.make()
            got = grouped_gemm(runner.Torch(), problem, formats(case)).astype(np.float64)
            with np.errstate(all="ignore"):
                assert (np.isnan(got) == np.isnan(problem.float64())).all(), f"{case}: NaN in other places"


def test_a_program_runs_it_again():
    """On other tensors of the same forms: also with other offsets."""
    torch = pytest.importorskip("torch")
    be = runner.Torch("cpu")
    case = Case(TENSOR, TENSOR, "fprop", 64, (0, 16, 32, 64), 32, 16, 1.0, 0.0, "float32", "float32")
    args = arguments(be, case.make(), formats(case), runner.Outputs(be))
    d = args["d"] = torch.empty(64, 32)
    names = [n for n, v in args.items() if isinstance(v, torch.Tensor) and n != "d"]
    program = _core.Program()
    program.start()
    _core.grouped_gemm(**args)
    program.stop()
    maker = (lambda rows, columns: torch.empty(rows, columns), (64, 32))
    assert program.seal([args[n] for n in names], [d], [], [], [maker], lambda n: torch.empty(n, dtype=torch.uint8))
    args["offsets"] = torch.tensor([0, 0, 48, 64], dtype=torch.int32)
    (got,) = program.run([args[n].clone() for n in names])
    want = grouped_gemm(runner.Numpy(), dataclasses.replace(case.make(), offsets=(0, 0, 48, 64)), formats(case))
    runner.same_bits(got.numpy(), want, str(case))


def change(**changes: Any):
    return lambda be: {n: v(be) if callable(v) else v for n, v in changes.items()}


def tensor(shape, dtype="float32"):
    return lambda be: be.put(np.ones(shape, runner.NUMPY[dtype]), dtype)


FP8 = "float8_e4m3fn"
# format, product, change (of a correct call: 64 rows, 3 groups, N 32, K or M 16), error, words of its message
BAD = [
    (BLOCK, "fprop", change(offsets=None), TypeError, ["offsets", "missing"]),
    (BLOCK, "fprop", change(offsets=tensor((4,))), TypeError, ["offsets", "int32", "float32[4]"]),
    (BLOCK, "fprop", change(offsets=tensor((4,), "int64")), TypeError, ["offsets", "int32", "int64[4]"]),
    (BLOCK, "fprop", change(offsets=tensor((2, 2), "int32")), ValueError, ["offsets", "[groups + 1]", "[2, 2]"]),
    (BLOCK, "fprop", change(offsets=tensor((0,), "int32")), ValueError, ["offsets", "[groups + 1]", "[0]"]),
    (
        BLOCK,
        "fprop",
        change(offsets=tensor((3,), "int32")),
        ValueError,
        ["b data", "groups, 2", "[3, 32, 16]"],
    ),
    (BLOCK, "fprop", change(kind=2), ValueError, ["kind 2"]),
    (BLOCK, "fprop", change(kind=-1), ValueError, ["kind -1"]),
    *((BLOCK, "fprop", change(align=v), ValueError, ["align", str(v), "1, 16, 32 or 128"]) for v in (0, -1, 8, 64)),
    (BLOCK, "fprop", change(rotated=True), ValueError, ["rotated", "kind rows"]),
    (NV, "dgrad", change(rotated=True, align=16), ValueError, ["rotated", "kind rows", NV]),
    (BLOCK, "wgrad", change(rotated=True, align=16), ValueError, ["rotated", BLOCK]),
    (NV, "wgrad", change(rotated=True), ValueError, ["16 rows", "align", "got 1", NV]),
    (BLOCK, "fprop", change(a_format=99), ValueError, ["unknown format id 99"]),
    (BLOCK, "fprop", change(b_format=-1), ValueError, ["unknown format id -1"]),
    (BLOCK, "fprop", change(b_format=runner.IDS[MX]), TypeError, [MX, "float8_e8m0fnu"]),
    (BLOCK, "fprop", change(a_data=None), TypeError, ["a data", BLOCK, "missing"]),
    (BLOCK, "fprop", change(b_data=None), TypeError, ["b data", BLOCK, "missing"]),
    (BLOCK, "fprop", change(b_data=tensor((32, 16), FP8)), ValueError, ["stack", "[32, 16]"]),
    (BLOCK, "fprop", change(b_data=tensor((3, 2, 16, 16), FP8)), ValueError, ["stack of matrices", "[3, 2, 16, 16]"]),
    (BLOCK, "fprop", change(b_data=tensor((3, 32, 17), FP8)), ValueError, [BLOCK, "16", "17", "[64, 16]"]),
    (
        BLOCK,
        "fprop",
        change(b_scale_inv=tensor((32, 1))),
        ValueError,
        ["b scale_inv", "groups, 3", "[32, 1]"],
    ),
    (TENSOR, "fprop", change(b_scale_inv=tensor((1,))), ValueError, ["b scale_inv", "groups, 3", "[1]"]),
    (NV, "fprop", change(b_amax=tensor((1,))), ValueError, ["b amax", "groups, 3", "[1]"]),
    (NV, "fprop", change(b_amax=None), TypeError, ["b amax", NV, "missing"]),
    (BLOCK, "fprop", change(b_amax=tensor((3,))), ValueError, ["b amax", BLOCK]),
    (BLOCK, "dgrad", change(a_columnwise=True), ValueError, [BLOCK]),
    (MX, "fprop", change(a_columnwise=True), ValueError, [MX]),
    (BLOCK, "wgrad", change(kind=0), ValueError, ["stack"]),
    (MX, "wgrad", change(b_columnwise=False), ValueError, [MX]),
    (TENSOR, "fprop", change(a_columnwise=True), ValueError, ["rowwise copy of a"]),
    (TENSOR, "wgrad", change(b_columnwise=False), ValueError, ["columnwise copies of both"]),
    (TENSOR, "wgrad", change(b_data=tensor((32, 65), FP8)), ValueError, [TENSOR, "64", "65"]),
    (BLOCK, "fprop", change(d=None), TypeError, ["d", "missing"]),
    (BLOCK, "fprop", change(d=tensor((32, 64))), ValueError, ["d", "[64, 32]", "[32, 64]"]),
    (BLOCK, "fprop", change(d=tensor((64, 32), "uint8")), TypeError, ["d", "uint8[64, 32]"]),
    (BLOCK, "wgrad", change(d=tensor((48, 32))), ValueError, ["d", "[3, 16, 32]", "[48, 32]"]),
    (BLOCK, "fprop", change(beta=1.0), ValueError, ["beta", "c"]),
    (BLOCK, "fprop", change(beta=1.0, c=tensor((64, 32), "bfloat16")), TypeError, ["c", "bfloat16[64, 32]"]),
    (BLOCK, "wgrad", change(beta=1.0, c=tensor((48, 32))), ValueError, ["c", "[3, 16, 32]", "[48, 32]"]),
    (BLOCK, "fprop", change(bias=tensor((32,))), ValueError, ["bias", "[3, 32]", "[32]"]),
    (BLOCK, "fprop", change(bias=tensor((3, 32), "uint8")), TypeError, ["bias", "uint8[3, 32]"]),
    (BLOCK, "wgrad", change(bias=tensor((3, 32))), ValueError, ["bias"]),
    (BLOCK, "fprop", change(alpha=float("nan")), ValueError, ["alpha"]),
    (BLOCK, "fprop", change(fast_accum=True), ValueError, ["fast_accum", "per-tensor", BLOCK]),
]


def good(be: Any, fmt: str, product: str) -> tuple[runner.Outputs, dict[str, Any]]:
    case = Case(fmt, fmt, product, 64, (0, 16, 16, 64), 32, 16, 1.0, 0.0, None, "float32")
    out = runner.Outputs(be)
    return out, arguments(be, case.make(), (fmt, fmt), out)


@pytest.mark.parametrize("fmt, product, changes, error, words", BAD)
def test_error_names_the_matter_and_writes_nothing(device, fmt, product, changes, error, words):
    be = runner.backend(device)
    out, args = good(be, fmt, product)
    with pytest.raises(error) as caught:
        _core.grouped_gemm(**args | changes(be))
    for word in ["grouped_gemm", *words]:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert out.untouched()
    _core.grouped_gemm(**args)  # unchanged it is good


def test_overlaps_are_refused():
    memory = np.zeros(1 << 14, np.uint8)
    for name, size in (("a_data", 1024), ("b_data", 1536), ("offsets", 16), ("a_scale_inv", 256)):
        _, args = good(runner.Numpy(), BLOCK, "fprop")
        array, code = args[name]
        args[name] = (memory[8000 : 8000 + size].view(array.dtype).reshape(array.shape), code)
        args["d"] = (memory[:8192].view(np.float32).reshape(64, 32), args["d"][1])
        with pytest.raises(ValueError, match=r"grouped_gemm: .*overlaps"):
            _core.grouped_gemm(**args)


def test_numpy_face_refuses():
    q, offsets = Float8BlockQuantizer(), np.array([0, 128], np.int32)
    x = core.quantize(np.ones((128, 64), np.float32), q)
    w = core.quantize_stack(np.ones((1, 32, 64), np.float32), q)
    wgrad = {"trans_a": True, "trans_b": False}
    rht = core.quantize(np.ones((128, 64), ml_dtypes.bfloat16), NVFP4Quantizer(with_rht=True))
    plain = core.quantize(np.ones((128, 64), np.float32), NVFP4Quantizer())
    for call, error, words in (
        (lambda: core.grouped_gemm(x, x, offsets), TypeError, "QuantizedStack"),
        (lambda: core.grouped_gemm(x, w, offsets, **wgrad), TypeError, "QuantizedArray"),
        (lambda: core.grouped_gemm(x, x, offsets, trans_a=True), ValueError, "trans_b=False"),
        (lambda: core.grouped_gemm(x, w, offsets.astype(np.int64)), TypeError, "int32"),
        (lambda: core.grouped_gemm(x, w, offsets[:1]), ValueError, "0 groups"),
        (lambda: core.grouped_gemm(x, w, offsets[None]), ValueError, "offsets must be"),
        (lambda: core.grouped_gemm(x, w, offsets, align=3), ValueError, "align"),
        (lambda: core.grouped_gemm(x, w, offsets, out_dtype="int32"), TypeError, "int32"),
        (lambda: core.grouped_gemm(x, w, offsets, beta=1.0, c=np.ones((128, 64), np.float32)), ValueError, "c must be"),
        (lambda: core.grouped_gemm(rht, plain, offsets, **wgrad, align=16), ValueError, "rotate alike"),
        (lambda: core.grouped_gemm(rht, rht, offsets, **wgrad), ValueError, "align"),
    ):
        with pytest.raises(error, match=words):
            call()
