"""The verbs on stacks and groups of rows: torch bits == JAX bits on one device; on the CPU stacks are the oracle's."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from core.grouped_runner import GROUPS
from sweeps import one_in

import cases
import oracle
from diptych.common import Float8Quantizer
from parity.panels import FIELDS, backends, cublaslt_mismatch, dj, dt, jax, same, to_jax, to_torch, torch
from quantizers import of_case
from quantizers import quantizer as quantizer_for

pytestmark = pytest.mark.sampled

# x and grad_output, weight; what each is asked for; the dtype of x
KINDS = {
    "tensor": ("fp8_e4m3_tensor", {}, "fp8_e5m2_tensor", {"pow2": True}, "float16"),
    "blocks": ("fp8_e5m2_1x128", {}, "fp8_e4m3_128x128", {}, "bfloat16"),
    "mx": ("mxfp8_e5m2", {}, "mxfp8_e4m3", {"square": True}, "float32"),
    "nv": ("nvfp4", {"rht": True, "rht_signs": True}, "nvfp4", {"square": True}, "bfloat16"),
    "nv rows": ("nvfp4", {"row_amax": True}, "nvfp4", {}, "float32"),
    "two families": ("mxfp8_e4m3", {}, "nvfp4", {}, "float32"),
}
ALIGNED = tuple((rows, at) for rows, at in GROUPS if all(v % 16 == 0 for v in (rows, *at)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("cuda")
        if not backends("cuda"):
            pytest.skip("this JAX has no GPU backend")
        if reason := cublaslt_mismatch():
            pytest.skip(reason)
    return request.param


def same_stacks(mine, theirs, label):
    assert tuple(mine.shape) == theirs.shape and len(mine) == len(theirs), label
    for name in FIELDS:
        a, b = getattr(mine, name), getattr(theirs, name)
        assert (a is None) == (b is None), f"{label} {name}"
        if a is not None:
            same(a, b, f"{label} {name}")


@pytest.mark.parametrize("fmt", one_in(4, cases.FORMATS))
def test_stacks(fmt, device):
    """Every option of the format; each tensor is the oracle's on the CPU."""
    for turn, shape in enumerate(((3, 32, 64), (2, 2, 16, 48), (1, 144, 272), (2, 0, 16))):
        dtype = list(cases.INPUT_DTYPES)[(turn + 1) % 3]
        for case in cases.quantize_cases([fmt], [dtype], [shape[1:]], ["outlier"], every_option=True, variants=True):
            label = f"{case} {device}"
            x = cases.draw(f"stack-{label}", "outlier", shape, dtype)
            rng = np.stack([oracle.rng_words(turn + 5 * g, 1 << 40) for g in range(len(x))])
            given = {"rng": rng} if "rng" in case.options else {}
            mine, theirs = (
                panel.quantize_stack(put(x, device), of_case(case), **{k: put(v, device) for k, v in given.items()})
                for panel, put in ((dt, to_torch), (dj, to_jax))
            )
            same_stacks(mine, theirs, label)
            for g, each in enumerate(x):
                if device == "cpu":
                    want = oracle.quantize(each, fmt, **case.options | {k: v[g] for k, v in given.items()})
                    for name in FIELDS:
                        if getattr(want, name) is not None:
                            same(np.asarray(getattr(theirs[g], name)).reshape(getattr(want, name).shape),
                                 getattr(want, name), f"{label} {name} of tensor {g}")  # fmt: skip
                same(mine[g].dequantize(), theirs[g].dequantize(), f"values of tensor {g} of {label}")
            same(mine.dequantize(), theirs.dequantize(), f"values of {label}")


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_scales_and_amaxes_of_each(fmt, device):
    x = cases.draw(f"verbs-given-{fmt}", "outlier", (4, 33, 65), "bfloat16")
    delayed = Float8Quantizer(fp8_dtype=quantizer_for(fmt).format.element)
    numbers = np.array([1.0, 0.25, 300.0, 7.5], np.float32)
    for name, quantizer in (("scale", delayed), ("amax", quantizer_for(fmt))):
        mine, theirs = (
            panel.quantize_stack(put(x, device), quantizer, **{name: put(numbers, device)})
            for panel, put in ((dt, to_torch), (dj, to_jax))
        )
        same_stacks(mine, theirs, f"{fmt} {name} {device}")


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_sums(kind, device):
    """Every grouping that all formats take gives the same bits; alpha, bias and result take turns."""
    fmt_x, more_x, fmt_w, more_w, dtype = KINDS[kind]
    qx, qw = quantizer_for(fmt_x, **more_x), quantizer_for(fmt_w, **more_w)
    for turn, (rows, at) in enumerate(ALIGNED):
        n, k, groups = (48, 96, len(at) - 1) if turn % 2 else (32, 144, len(at) - 1)
        label = f"{kind} {rows} rows {at} {device} {cases.report_header()}"
        x, dy = (cases.draw(f"{label}-{v}", "normal", (rows, v), dtype) for v in (k, n))
        w = cases.draw(f"{label}-w", "normal", (groups, n, k), "float32")
        bias = cases.draw(f"{label}-b", "normal", (groups, n), list(cases.INPUT_DTYPES)[turn % 3]) if turn % 2 else None
        align = next(a for a in (128, 32, 16) if all(v % a == 0 for v in at))
        alpha, out = (1.0, -0.75)[turn % 2], list(cases.INPUT_DTYPES)[(turn + 1) % 3]

        def step(panel, dtype_of, x, dy, w, bias, offsets, alpha=alpha, out=out, align=align):
            q, grad, weights = panel.quantize(x, qx), panel.quantize(dy, qx), panel.quantize_stack(w, qw)
            return (
                panel.grouped_gemm(q, weights, offsets, bias=bias, alpha=alpha),
                panel.grouped_gemm(grad, weights, offsets, trans_b=False, out_dtype=dtype_of(out)),
                panel.grouped_gemm(grad, q, offsets, trans_a=True, trans_b=False, alpha=alpha, align=align),
                panel.grouped_bias_grad(dy, offsets),
                panel.grouped_bias_grad(dy, offsets, dtype_of(out)),
            )

        given = x, dy, w, bias, np.array(at, np.int32)
        mine = step(dt, functools.partial(getattr, torch), *(to_torch(v, device) for v in given))
        theirs = jax.jit(functools.partial(step, dj, str))(*(to_jax(v, device) for v in given))
        names = ("fprop", "dgrad", "wgrad", "sums", "cast sums")
        for name, a, b in zip(names, mine, theirs, strict=True):
            same(a, b, f"{name} of {label}", nan_free=True)
        if device == "cpu":
            sums = [oracle.bias_grad(dy[a:b], dy.dtype) for a, b in itertools.pairwise(at)]
            same(theirs[3], np.array(sums, dy.dtype).reshape(groups, n), f"sums of {label}")


@pytest.mark.cuda
def test_offsets_that_lie_on_cuda(cuda):
    """Each counts as at least the one before it and at most R, in both panels alike."""
    if not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")
    dy = cases.draw("verbs-lies", "normal", (300, 32), "float32")
    quantizer = quantizer_for("mxfp8_e4m3")
    for lie, honest in (((-5, 96, 40, 2**31 - 1), (0, 96, 96, 300)), ((400, 500, -(2**31)), (300, 300, 300))):
        for panel, put in ((dt, to_torch), (dj, to_jax)):
            q = panel.quantize(put(dy, "cuda"), quantizer)
            weights = panel.quantize_stack(put(np.stack([dy[:48]] * (len(lie) - 1)), "cuda"), quantizer)
            for f in (
                lambda at, panel=panel, put=put: panel.grouped_bias_grad(put(dy, "cuda"), at),
                lambda at, panel=panel, q=q, weights=weights: panel.grouped_gemm(q, weights, at),
                lambda at, panel=panel, q=q: panel.grouped_gemm(q, q, at, trans_a=True, trans_b=False),
            ):
                got, want = (f(put(np.array(at, np.int32), "cuda")) for at in (lie, honest))
                same(got, want, f"{panel.__name__} {lie}")
