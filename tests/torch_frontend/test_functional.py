"""The verbs against the oracle, on every device, and what they refuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import cases
import diptych.torch as dt
import oracle
from diptych.common import FORMATS, RECIPES, QuantizerRole
from torch_frontend import tools
from torch_frontend.tools import normal, poisoned, quantizer, same

GEMM_SHAPES = ((0, 4, 8), (4, 8, 0), (1, 1, 3), (16, 16, 128), (33, 65, 127), (64, 48, 129))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_quantize_is_the_oracle(fmt, device):
    for case in cases.quantize_cases(formats=(fmt,), values=("normal", "scale_edges", "random_bits")):
        x = case.make()
        want = oracle.quantize(x, fmt, pow2=case.pow2, eps=case.eps)
        q = dt.quantize(tools.to_torch(x, device), quantizer(fmt, case.pow2, case.eps))
        tools.same_quantized(q, want, case)
        assert q.shape == x.shape and q.device.type == device


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_one_copy_is_the_same_copy(fmt, device):
    x = normal(f"usage-{fmt}", (2, 3, 96), "bfloat16", device)
    both = dt.quantize(x, quantizer(fmt))
    for rowwise, columnwise in ((True, False), (False, True)):
        q = dt.quantize(x, quantizer(fmt, rowwise=rowwise, columnwise=columnwise))
        for name in dt.quantized.BUFFERS:
            got = getattr(q, name)
            if not {"rowwise": rowwise, "columnwise": columnwise}.get(name.split("_")[0], True):
                assert got is None, name
            elif got is not None:
                same(got, getattr(both, name), name)


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_amax(fmt, device):
    x = cases.draw(f"amax-{fmt}", "normal", (33, 65), "float32")
    for given in cases.GIVEN_AMAX:
        q = dt.quantize(tools.to_torch(x, device), quantizer(fmt), amax=torch.tensor([given], device=device))
        tools.same_quantized(q, oracle.quantize(x, fmt, amax=given), given)


def test_non_contiguous_inputs(device):
    base = normal("strides", (96, 64), device=device)
    quant = quantizer("fp8_e4m3_1x128")
    for view in (base.t(), base[::2], base[:, 3:35], base[0].expand(64, 64), base.view(4, 24, 64).permute(1, 0, 2)):
        got, want = dt.quantize(view, quant), dt.quantize(view.contiguous(), quant)
        same(got.rowwise_data, want.rowwise_data)
        same(got.columnwise_scale_inv, want.columnwise_scale_inv)
        same(dt.amax(view), dt.amax(view.contiguous()))
        same(dt.bias_grad(view), dt.bias_grad(view.contiguous()))
    parameter = torch.nn.Parameter(base)
    with torch.no_grad():
        same(dt.quantize(parameter.t(), quant).rowwise_data, dt.quantize(base.t().contiguous(), quant).rowwise_data)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_dequantize_is_the_oracle(fmt, device):
    for shape, dtype in itertools.product(((0, 16), (1,), (33, 65), (2, 3, 96), (130, 257)), cases.INPUT_DTYPES):
        x = cases.draw(f"dequantize-{fmt}-{shape}", "normal", shape, dtype)
        for rowwise, columnwise in tools.USAGES:
            q = dt.quantize(tools.to_torch(x, device), quantizer(fmt, rowwise=rowwise, columnwise=columnwise))
            copy = oracle.quantize(x, fmt, rowwise=rowwise, columnwise=columnwise).copy(columnwise=not rowwise)
            y = dt.dequantize(q)
            assert y.dtype == q.dtype and y.shape == q.shape
            same(y, oracle.dequantize(copy, x.dtype).reshape(shape))
            same(q.dequantize(torch.bfloat16), oracle.dequantize(copy, oracle.BF16).reshape(shape))


def _gemm_case(case: cases.GemmCase, device: str):
    a, b, bias, c = case.make()
    copies = []
    for x, fmt, columnwise in ((a, case.a_format, case.a_columnwise), (b, case.b_format, case.b_columnwise)):
        usage = {"rowwise": not columnwise, "columnwise": columnwise}
        q = dt.quantize(tools.to_torch(x, device), quantizer(fmt, **usage))
        copies.append((q, oracle.quantize(x, fmt, **usage).copy(columnwise=columnwise)))
    (qa, oa), (qb, ob) = copies
    np_dtype = cases.INPUT_DTYPES[case.out_dtype]
    options = {"alpha": case.alpha, "beta": case.beta, "bias": bias, "c": c}
    torch_bias = None if bias is None else tools.to_torch(bias, device)
    kw = {"trans_a": case.a_columnwise, "trans_b": not case.b_columnwise, "alpha": case.alpha, "bias": torch_bias}
    if case.beta:
        got = dt.gemm_into(tools.to_torch(c.copy(), device), qa, qb, beta=case.beta, **kw)
    else:
        got = dt.gemm(qa, qb, out_dtype=getattr(torch, case.out_dtype), **kw)
    if device == "cpu":
        same(got, oracle.gemm_cpu(oa, ob, out_dtype=np_dtype, **options), case)
    else:
        exact = oracle.gemm_float64(oa, ob, **options)
        bound = oracle.gemm_tolerance(oa, ob, out_dtype=np_dtype, accumulator_bits=14, promote_every=128, **options)
        error = np.abs(tools.to_numpy(got).astype(np.float64) - exact)
        assert (error <= bound).all(), f"{case}: {error.max()}"


@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_gemm_is_the_oracle(pair, device):
    for case in cases.gemm_cases(pairs=(pair,), shapes=GEMM_SHAPES):
        _gemm_case(case, device)


def test_gemm_shapes_and_defaults(device):
    x, w = normal("x", (2, 3, 64), "bfloat16", device), normal("w", (32, 64), "float32", device)
    dy = normal("dy", (2, 3, 32), "bfloat16", device)
    for recipe in RECIPES.values():
        qx, qw, qdy = (
            dt.quantize(t, tools.role(recipe, r)) for r, t in zip(QuantizerRole.TENSORS, (x, w, dy), strict=True)
        )
        y = dt.gemm(qx, qw)
        assert (y.shape, y.dtype) == ((2, 3, 32), torch.bfloat16)
        assert dt.gemm(qdy, qw, trans_b=False, out_dtype=torch.float32).shape == (2, 3, 64)
        assert dt.gemm(qdy, qx, trans_a=True, trans_b=False).shape == (32, 64)
        acc = torch.full((2, 3, 32), torch.nan, dtype=torch.bfloat16, device=device)
        same(dt.gemm_into(acc, qx, qw, beta=0.0), y)  # beta 0 does not read what was there
        assert dt.gemm_into(acc, qx, qw) is acc


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_amax_and_bias_grad_are_the_oracle(dtype, device):
    for shape in cases.SHAPES:
        x = cases.draw(f"reduce-{dtype}-{shape}", "normal", shape, dtype)
        same(dt.amax(tools.to_torch(x, device)), oracle.amax(x), shape)
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
E4M3 = quantizer("fp8_e4m3_tensor")
BAD = {
    "not a tensor": (lambda: dt.quantize(X.numpy(), E4M3), TypeError, "quantize: x must be a torch.Tensor"),
    "not a quantizer": (lambda: dt.quantize(X, "fp8"), TypeError, "must be a diptych.common.Quantizer, got str"),
    "float64": (lambda: dt.quantize(X.double(), E4M3), TypeError, r"float64\[4, 64\]"),
    "int amax": (lambda: dt.amax(X.int()), TypeError, "amax: x must be float32, bfloat16 or float16"),
    "scalar": (lambda: dt.quantize(torch.tensor(1.0), E4M3), ValueError, "at least one dimension"),
    "amax of blocks": (
        lambda: dt.quantize(X, quantizer("mxfp8_e4m3"), amax=torch.ones(1)),
        ValueError,
        "mxfp8_e4m3 takes one per block",
    ),
    "amax dtype": (lambda: dt.quantize(X, E4M3, amax=torch.ones(1).double()), TypeError, "amax must be float32"),
    "amax shape": (lambda: dt.quantize(X, E4M3, amax=torch.ones(2)), ValueError, "amax must hold one element"),
    "sparse": (lambda: dt.quantize(X.to_sparse(), E4M3), NotImplementedError, "diptych::quantize"),
    "mkldnn": (lambda: dt.quantize(X.to_mkldnn(), E4M3), NotImplementedError, "diptych::quantize"),
    "dequantize dtype": (lambda: dt.dequantize(_operands()[0], torch.int8), TypeError, "not torch.int8"),
    "dequantize tensor": (lambda: dt.dequantize(X), TypeError, "must be a QuantizedTensor, got Tensor"),
    "gemm tensor": (lambda: dt.gemm(X, _operands()[1]), TypeError, "gemm: a must be a QuantizedTensor"),
    "gemm reduced": (
        lambda: dt.gemm(_operands()[0], dt.quantize(torch.zeros(8, 32), E4M3)),
        ValueError,
        "reduces over 64 elements",
    ),
    "gemm missing copy": (
        lambda: dt.gemm(dt.quantize(X, E4M3.with_usage(columnwise=False)), _operands()[1], trans_a=True),
        ValueError,
        "needs the columnwise copy",
    ),
    "gemm bias shape": (lambda: dt.gemm(*_operands(), bias=torch.zeros(9)), ValueError, "bias must hold 8 elements"),
    "gemm bias dtype": (lambda: dt.gemm(*_operands(), bias=torch.zeros(8).int()), TypeError, "."),
    "gemm out dtype": (lambda: dt.gemm(*_operands(), out_dtype=torch.int32), TypeError, "not torch.int32"),
    "gemm alpha": (lambda: dt.gemm(*_operands(), alpha=float("inf")), ValueError, "must be finite"),
    "fast accum": (
        lambda: dt.gemm(
            dt.quantize(X, quantizer("mxfp8_e4m3")), dt.quantize(X, quantizer("mxfp8_e4m3")), fast_accum=True
        ),
        ValueError,
        "fast_accum exists for per-tensor FP8 only",
    ),
    "bias_grad scalar": (lambda: dt.bias_grad(torch.tensor(1.0)), ValueError, "at least one dimension"),
    "bias_grad dtype": (lambda: dt.bias_grad(X, torch.int32), TypeError, "not torch.int32"),
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
        lambda: dt.quantize(X.cuda(), E4M3, amax=torch.ones(1)),
    ):
        with pytest.raises(ValueError, match="cuda:0"):
            call()
    assert (acc == -123).all()


def test_tolerance_of_a_round_trip(device):
    for row in FORMATS:
        x = normal(f"tolerance-{row.name}", (64, 256), device=device)
        back = dt.dequantize(dt.quantize(x, quantizer(row.name)))
        big = x.abs() > 2.0**-3
        assert ((back - x).abs()[big] <= row.tolerance * x.abs()[big]).all(), row.name
