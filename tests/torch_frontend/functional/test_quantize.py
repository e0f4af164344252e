"""The verbs against the oracle, on every device, and what they refuse."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import cases
import diptych.torch as dt
import oracle
from diptych.common import FORMATS, Float8Quantizer, NVFP4Quantizer
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.tensors.quantized import BUFFERS
from torch_frontend import tools
from torch_frontend.tools import normal, poisoned, quantizer, same

GEMM_SHAPES = ((0, 4, 8), (4, 8, 0), (1, 1, 3), (16, 16, 128), (33, 65, 127), (64, 48, 129))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_quantize_is_the_oracle(fmt, device):
    values = ("normal", "scale_edges", "level_edges", "random_bits")
    for case in cases.quantize_cases(formats=(fmt,), values=values, variants=True):
        x, rng = case.make(), case.rng
        want = oracle.quantize(x, fmt, **case.options)
        rng = None if rng is None else tools.to_torch(rng, device)
        q = dt.quantize(tools.to_torch(x, device), tools.of_case(case), rng=rng)
        tools.same_quantized(q, want, case)
        assert q.shape == x.shape and q.device.type == device


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_one_copy_is_the_same_copy(fmt, device):
    x = normal(f"usage-{fmt}", (2, 24, 96), "bfloat16", device)
    for options in tools.variants(fmt):
        quant = quantizer(fmt, **options)
        rng = tools.rng_for(quant, device)
        both = dt.quantize(x, quant, rng=rng)
        for rowwise, columnwise in ((True, False), (False, True)):
            q = dt.quantize(x, quant.with_usage(rowwise=rowwise, columnwise=columnwise), rng=rng)
            for name in BUFFERS:
                got, two_level = getattr(q, name), q.quantizer.format.two_level
                side = "rowwise" if name == "amax" and two_level else name.split("_")[0]
                if not {"rowwise": rowwise, "columnwise": columnwise}.get(side, True):
                    assert got is None, name
                elif got is not None:
                    same(got, getattr(both, name), name)


@pytest.mark.parametrize("fmt", (*cases.TENSOR_FORMATS, *cases.PACKED_FORMATS))
def test_given_amax(fmt, device):
    """Used as it is, for both copies; the result holds a copy of it."""
    x = tools.to_torch(cases.draw(f"amax-{fmt}", "normal", (48, 64), "bfloat16"), device)
    for given, options, usage in itertools.product(cases.GIVEN_AMAX, tools.variants(fmt), tools.USAGES):
        quant = quantizer(fmt, **options).with_usage(rowwise=usage[0], columnwise=usage[1])
        rng, two_level = tools.rng_for(quant, device), quant.format.two_level
        amaxes = {}
        if quant.rowwise or not two_level:
            shape = (48,) if "row_amax" in options else (1,)
            amaxes["amax"] = torch.full(shape, given, device=device)
        if quant.columnwise and two_level:
            amaxes["columnwise_amax"] = torch.full((1,), given / 2, device=device)
        q = dt.quantize(x, quant, **amaxes, rng=rng)
        tools.same_quantized(q, tools.oracle_of(quant, x, **amaxes, rng=rng), (given, options))
        for name, t in amaxes.items():
            assert getattr(q, name).data_ptr() != t.data_ptr()


def test_an_amax_or_scale_may_be_a_scalar(device):
    x = normal("scalar", (4, 64), device=device)
    one = torch.tensor(1.5, device=device)
    quant, delayed = quantizer("fp8_e4m3_tensor"), Float8Quantizer()
    same(dt.quantize(x, quant, amax=one).rowwise_data, dt.quantize(x, quant, amax=one.reshape(1)).rowwise_data)
    same(dt.quantize(x, delayed, scale=one).rowwise_data, dt.quantize(x, delayed, scale=one.reshape(1)).rowwise_data)


@pytest.mark.parametrize("element", ("float8_e4m3fn", "float8_e5m2"))
def test_given_scale(element, device):
    quant = Float8Quantizer(fp8_dtype=element)
    for shape, scale in itertools.product(((0, 16), (33, 65), (2, 3, 96)), (1.0, 0.37, 2.0**-120, 3.4e38)):
        x = normal(f"scale-{scale}", shape, "bfloat16", device)
        given = torch.full((1,), scale, device=device)
        want = tools.oracle_of(quant, x, scale=np.float32(scale))
        tools.same_quantized(dt.quantize(x, quant, scale=given), want, (shape, scale))


def test_delayed_scaling_is_the_oracle(device):
    """Some steps: what is pending gathers over calls, then history and scale are updated in place."""
    draws = cases.rng_for("delayed")
    for length, most_recent, margin in itertools.product((1, 2, 5), (False, True), (0, 2)):
        history, scale = torch.zeros(length, device=device), torch.ones(1, device=device)
        np_history, np_scale = np.zeros((1, length), np.float32), np.ones(1, np.float32)
        quant = Float8Quantizer(amax_history_len=length, margin=margin)
        for step in range(7):
            for call in range(step % 3):
                x = normal(f"delayed-{step}-{call}", (16, 32), "bfloat16", device) * float(draws.choice([1, 0, 40]))
                got = quantize_ops.quantize_delayed(x, quant, scale, history)
                want = tools.oracle_of(quant, x, scale=np_scale[0], accumulate=np_history[0, 0])
                for name, t in zip(BUFFERS, got, strict=False):
                    same(t, getattr(want, name), name)
                np_history[0, 0] = want.amax[0]
                same(history[:1], want.amax)
            reduced = np.float32([3.0]) if step == 4 else None
            state = None if reduced is None else tools.to_torch(reduced, device)
            dt.scale_update(history, scale, reduced=state, margin=margin, most_recent=most_recent)
            np_history, np_scale = oracle.scale_update(
                np_history, np_scale, reduced=reduced, margin=margin, most_recent=most_recent
            )
            same(history, np_history[0])
            same(scale, np_scale)


def test_updates_of_many(device):
    """n tensors at once, an algorithm of the caller's, and amaxes that are of no use."""
    draws = cases.rng_for("updates")
    history = np.abs(draws.standard_normal((5, 4))).astype(np.float32)
    history[1, 0], history[2, 0] = 0, np.inf
    scale, own = np.arange(1, 6, dtype=np.float32), np.float32([3, 4, 5, 0, math.nan])
    for amax in (None, own):
        want = oracle.scale_update(history, scale, fp8_max=57344.0, amax=amax)
        got = tools.to_torch(history.copy(), device), tools.to_torch(scale.copy(), device)
        given = None if amax is None else tools.to_torch(amax, device)
        assert dt.scale_update(*got, fp8_max=57344.0, amax=given) is None
        same(got[0], want[0])
        same(got[1], want[1])


def test_rng_state(device):
    assert tools.to_numpy(dt.rng_state(0)).tolist() == [0, 0, 0, 0]
    for seed, offset in ((1, 2), (2**64 - 1, 2**63), (0x80000000, 0x1_7FFFFFFF)):
        state = dt.rng_state(seed, offset, device)
        assert state.device.type == device and state.dtype == torch.int32
        same(state, oracle.rng_words(seed, offset))
    for bad in ((-1,), (2**64,), (0, -1), (0, 2**64)):
        with pytest.raises(ValueError, match=r"must lie in 0..2\^64-1"):
            dt.rng_state(*bad)
    with pytest.raises(TypeError, match="seed must be an int"):
        dt.rng_state(1.5)


def test_non_contiguous_inputs(device):
    base = normal("strides", (96, 64), device=device)
    quant = quantizer("fp8_e4m3_1x128")
    for view in (base.t(), base[::2], base[:, 3:35], base[0].expand(64, 64), base.view(4, 24, 64).permute(1, 0, 2)):
        got, want = dt.quantize(view, quant), dt.quantize(view.contiguous(), quant)
        same(got.rowwise_data, want.rowwise_data)
        same(got.columnwise_scale_inv, want.columnwise_scale_inv)
        same(dt.amax(view), dt.amax(view.contiguous()))
        delayed = [dt.quantize(t, Float8Quantizer(), scale=torch.ones(2, device=device)[::2]) for t in (view, view * 1)]
        same(delayed[0].columnwise_data, delayed[1].columnwise_data)
        same(dt.bias_grad(view), dt.bias_grad(view.contiguous()))
    parameter = torch.nn.Parameter(base)
    with torch.no_grad():
        same(dt.quantize(parameter.t(), quant).rowwise_data, dt.quantize(base.t().contiguous(), quant).rowwise_data)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_dequantize_is_the_oracle(fmt, device):
    shapes = ((0, 16), (1,), (33, 65), (2, 3, 96), (130, 257), (0,), (16,), (48, 80), (2, 24, 96))
    for shape, dtype, options in itertools.product(shapes, cases.INPUT_DTYPES, tools.variants(fmt)):
        if shape not in cases.shapes_of(fmt, False) or ("rht" in options and dtype != "bfloat16"):
            continue
        x = tools.to_torch(cases.draw(f"dequantize-{fmt}-{shape}", "normal", shape, dtype), device)
        for rowwise, columnwise in tools.USAGES:
            if (columnwise or "square" in options) and not cases.has_columnwise(fmt, shape):
                continue
            quant = quantizer(fmt, **options, rowwise=rowwise, columnwise=columnwise)
            rng = tools.rng_for(quant, device)
            q = dt.quantize(x, quant, rng=rng)
            copy = tools.oracle_of(quant, x, rng=rng).copy(columnwise=not rowwise)
            y = dt.dequantize(q)
            assert y.dtype == q.dtype and y.shape == q.shape
            same(y, oracle.dequantize(copy, tools.to_numpy(x).dtype).reshape(shape))
            same(q.dequantize(torch.bfloat16), oracle.dequantize(copy, oracle.BF16).reshape(shape))


def _gemm_case(case: cases.GemmCase, device: str, **options: bool):
    a, b, bias, c = case.make()
    copies = []
    for x, fmt, columnwise in ((a, case.a_format, case.a_columnwise), (b, case.b_format, case.b_columnwise)):
        usage = {"rowwise": not columnwise, "columnwise": columnwise}
        q = dt.quantize(tools.to_torch(x, device), quantizer(fmt, **usage, **options))
        copies.append((q, tools.oracle_of(q.quantizer, tools.to_torch(x)).copy(columnwise=columnwise)))
    (qa, oa), (qb, ob) = copies
    np_dtype = cases.INPUT_DTYPES[case.out_dtype]
    epilogue = {"alpha": case.alpha, "beta": case.beta, "bias": bias, "c": c}
    torch_bias = None if bias is None else tools.to_torch(bias, device)
    kw = {"trans_a": case.a_columnwise, "trans_b": not case.b_columnwise, "alpha": case.alpha, "bias": torch_bias}
    if case.beta:
        got = dt.gemm_into(tools.to_torch(c.copy(), device), qa, qb, beta=case.beta, **kw)
    else:
        got = dt.gemm(qa, qb, out_dtype=getattr(torch, case.out_dtype), **kw)
    if device == "cpu":
        same(got, oracle.gemm_cpu(oa, ob, out_dtype=np_dtype, **epilogue), case)
    else:
        exact = oracle.gemm_float64(oa, ob, **epilogue)
        bound = oracle.gemm_tolerance(oa, ob, out_dtype=np_dtype, accumulator_bits=14, promote_every=128, **epilogue)
        error = np.abs(tools.to_numpy(got).astype(np.float64) - exact)
        assert (error <= bound).all(), f"{case}: {error.max()}"


@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_gemm_is_the_oracle(pair, device):
    for case in cases.gemm_cases(pairs=(pair,), shapes=GEMM_SHAPES):
        _gemm_case(case, device)


@pytest.mark.parametrize("fmt", cases.PACKED_FORMATS)
def test_gemm_of_row_amaxes_is_the_oracle(fmt, device):
    for case in cases.gemm_cases(pairs=((fmt, fmt),), shapes=GEMM_SHAPES):
        _gemm_case(case, device, row_amax=True)


def test_gemm_of_any_two_formats(device):
    for pair in cases.MIXED_PAIRS:
        for case in cases.gemm_cases(pairs=(pair,), shapes=GEMM_SHAPES[-2:]):
            _gemm_case(case, device)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_gemm_shapes_and_defaults(fmt, device):
    x, w = normal("x", (2, 8, 64), "bfloat16", device), normal("w", (32, 64), "float32", device)
    dy = normal("dy", (2, 8, 32), "bfloat16", device)
    qx, qw, qdy = (dt.quantize(t, quantizer(fmt)) for t in (x, w, dy))
    y = dt.gemm(qx, qw)
    assert (y.shape, y.dtype) == ((2, 8, 32), torch.bfloat16)
    assert dt.gemm(qdy, qw, trans_b=False, out_dtype=torch.float32).shape == (2, 8, 64)
    assert dt.gemm(qdy, qx, trans_a=True, trans_b=False).shape == (32, 64)
    acc = torch.full((2, 8, 32), torch.nan, dtype=torch.bfloat16, device=device)
    same(dt.gemm_into(acc, qx, qw, beta=0.0), y)  # beta 0 does not read what was there
    assert dt.gemm_into(acc, qx, qw) is acc


def test_a_rotation_cancels_in_wgrad(device):
    """Both operands carry it: what is left is the quantization error, as without one."""
    x, dy = normal("x", (256, 64), "bfloat16", device), normal("dy", (256, 32), "bfloat16", device)
    exact = dy.float().T @ x.float()
    errors = []
    for options in ({}, {"rht": True}, {"rht": True, "rht_signs": True}):
        qx, qdy = (dt.quantize(t, quantizer("nvfp4", **options)) for t in (x, dy))
        got = dt.gemm(qdy, qx, trans_a=True, trans_b=False, out_dtype=torch.float32)
        errors.append(float((got - exact).norm() / exact.norm()))
    assert max(errors) < 0.2 and max(errors) < 1.3 * min(errors), errors


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_amax_and_bias_grad_are_the_oracle(dtype, device):
    for shape in cases.SHAPES:
        x = cases.draw(f"reduce-{dtype}-{shape}", "normal", shape, dtype)
        t = tools.to_torch(x, device)
        same(dt.amax(t), oracle.amax(x), shape)
        same(dt.amax(t, per_row=True), oracle.amax(x, row_amax=True), shape)
        if dtype == "bfloat16" and math.prod(shape[:-1]) % 16 == 0:
            for signs, per_row in itertools.product((False, True), repeat=2):
                own, rotated = dt.amax(t, rht=True, random_signs=signs, per_row=per_row)
                same(own, oracle.amax(x, row_amax=per_row), shape)
                same(rotated, oracle.columnwise_amax(x, rht=True, rht_signs=signs), shape)
        got = dt.bias_grad(tools.to_torch(x, device), torch.float32)
        if device == "cpu":
            same(got, oracle.bias_grad(x), shape)
        else:
            exact, bound = oracle.bias_grad_tolerance(x)
            assert (np.abs(tools.to_numpy(got) - exact) <= bound).all(), shape


def _operands(device: str = "cpu"):
    x, w = normal("bad-x", (4, 64), device=device), normal("bad-w", (8, 64), device=device)
    return dt.quantize(x, quantizer("fp8_e4m3_tensor")), dt.quantize(w, quantizer("fp8_e4m3_tensor"))


X = torch.zeros(4, 64)
X16, ONE = torch.zeros(16, 64), torch.ones(1)
E4M3, FP4 = quantizer("fp8_e4m3_tensor"), NVFP4Quantizer()
NOISY = NVFP4Quantizer(stochastic_rounding=True)
BAD = {
    "not a tensor": (lambda: dt.quantize(X.numpy(), E4M3), TypeError, "quantize: x must be a torch.Tensor"),
    "float64": (lambda: dt.quantize(X.double(), E4M3), TypeError, r"float64\[4, 64\]"),
    "rows of nothing": (lambda: dt.amax(X[0, 0], per_row=True), ValueError, "at least one dimension"),
    "the other amax": (
        lambda: dt.quantize(X16, FP4.with_usage(rowwise=False), amax=ONE),
        ValueError,
        "amax .* is not read",
    ),
    "update number": (lambda: dt.scale_update(torch.zeros(3), 1.0), TypeError, "scale must be a torch.Tensor"),
    "update strides": (
        lambda: dt.scale_update(torch.zeros(3, 2).t(), torch.ones(2)),
        ValueError,
        "history .* is not contiguous",
    ),
    "group of scales": (
        lambda: dt.quantize(X, Float8Quantizer(), amax_group="a group"),
        ValueError,
        "does not apply to delayed scaling",
    ),
    "group of blocks": (lambda: dt.quantize(X, quantizer("mxfp8_e4m3"), amax_group="a group"), ValueError, "has none"),
    "group and amax": (lambda: dt.quantize(X, E4M3, amax=ONE, amax_group="a group"), ValueError, "was given too"),
    "sparse": (lambda: dt.quantize(X.to_sparse(), E4M3), NotImplementedError, "diptych::quantize"),
    "mkldnn": (lambda: dt.quantize(X.to_mkldnn(), E4M3), NotImplementedError, "diptych::quantize"),
    "dequantize tensor": (lambda: dt.dequantize(X), TypeError, "must be a QuantizedTensor, got Tensor"),
    "gemm tensor": (lambda: dt.gemm(X, _operands()[1]), TypeError, "gemm: a must be a QuantizedTensor"),
    "gemm missing copy": (
        lambda: dt.gemm(dt.quantize(X, E4M3.with_usage(columnwise=False)), _operands()[1], trans_a=True),
        ValueError,
        "needs the columnwise copy",
    ),
    "gemm out dtype": (lambda: dt.gemm(*_operands(), out_dtype=torch.int32), TypeError, "not int32"),
    "bias_grad scalar": (lambda: dt.bias_grad(torch.tensor(1.0)), ValueError, "at least one dimension"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_bad_gemm_into_leaves_acc_untouched():
    a, b = _operands()
    for acc, kw, error in (
        (poisoned((4, 9)), {}, ValueError),
        (poisoned((4, 8)), {"alpha": float("nan")}, ValueError),
        (poisoned((4, 8)), {"bias": torch.zeros(7)}, ValueError),
        (poisoned((4, 8)), {"trans_a": True}, ValueError),
        (poisoned((8, 4)).t(), {}, ValueError),
        (poisoned((4, 8), torch.float64), {}, TypeError),
        (poisoned((1, 8)).expand(4, 8), {}, ValueError),
    ):
        with pytest.raises(error):
            dt.gemm_into(acc, a, b, **kw)
        assert (acc == -123).all()


@pytest.mark.cuda
def test_mixed_devices_are_refused(device):
    if device == "cpu":
        pytest.skip("takes a GPU besides the CPU")
    a, b = _operands("cuda")
    cpu_a, _ = _operands("cpu")
    acc = poisoned((4, 8), device="cuda")
    for call in (
        lambda: dt.gemm(cpu_a, b),
        lambda: dt.gemm(a, b, bias=torch.zeros(8)),
        lambda: dt.gemm_into(acc, cpu_a, b),
        lambda: dt.quantize(X.cuda(), E4M3, amax=ONE),
        lambda: dt.quantize(X.cuda(), Float8Quantizer(), scale=ONE),
        lambda: dt.quantize(X16.cuda(), NOISY, rng=dt.rng_state(0)),
        lambda: dt.scale_update(torch.zeros(3).cuda(), ONE),
    ):
        with pytest.raises(ValueError, match="cuda:0"):
            call()
    assert (acc == -123).all()


def test_tolerance_of_a_round_trip(device):
    for row in FORMATS:
        x = normal(f"tolerance-{row.name}", (64, 256), device=device)
        back = dt.dequantize(dt.quantize(x, quantizer(row.name)))
        # Values that are normal in their block: E2M1's are 1 to 6 times the scale, which E4M3 rounds.
        blocks = x.abs().reshape(64, 16, 16).amax(-1, keepdim=True).expand(64, 16, 16).reshape(x.shape)
        big = x.abs() > (blocks / 5 if row.two_level else 2.0**-3)
        assert ((back - x).abs()[big] <= row.tolerance * x.abs()[big]).all(), row.name
