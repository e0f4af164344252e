"""Errors of the verbs for bad input: the same eagerly and while tracing, and no kernel runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import diptych.jax as dj
from diptych.common import ArgumentError, DTypeError, NVFP4Quantizer, ShapeError, UnsupportedError
from diptych.jax.primitives import quantize as quantize_ops
from jax_frontend import tools

X = np.ones((4, 32), np.float32)
BIG = np.ones((4, 32), ">f4")
B16 = np.ones((16, 32), cases.INPUT_DTYPES["bfloat16"])
CURRENT, MX, BLOCK, FP4 = (tools.quantizer(f) for f in ("fp8_e4m3_tensor", "mxfp8_e4m3", "fp8_e4m3_1x128", "nvfp4"))
DELAYED, NOISY, ROTATED = dj.Float8Quantizer(), NVFP4Quantizer(stochastic_rounding=True), NVFP4Quantizer(with_rht=True)
ONE, RNG = np.ones(1, np.float32), np.zeros(4, np.int32)
H = np.ones((2, 3), np.float32)


OPERANDS = {}


@pytest.fixture(autouse=True)
def operands(default_device):
    """Made by a fixture, so that importing this file starts no backend."""
    OPERANDS["q"] = dj.quantize(X, MX)
    OPERANDS["row"] = dj.quantize(X, MX.with_usage(columnwise=False))


def gemm(a="q", b="q", **options):
    return dj.gemm(OPERANDS.get(a, X), OPERANDS[b], **options)


def gemm_into(acc):
    return dj.gemm_into(acc, OPERANDS["q"], OPERANDS["q"])


BAD = {
    "quantize float64": (lambda: dj.quantize(np.ones((4, 4)), MX), DTypeError, "float64"),
    "quantize big-endian": (lambda: dj.quantize(BIG, MX), DTypeError, "x is big-endian.*newbyteorder"),
    "quantize amax big-endian": (lambda: dj.quantize(X, CURRENT, amax=BIG[0, :1]), DTypeError, "amax is big-endian"),
    "amax big-endian": (lambda: dj.amax(BIG), DTypeError, "amax: x is big-endian"),
    "scale_update big-endian": (lambda: dj.scale_update(BIG, BIG[:, 0]), DTypeError, "history is big-endian"),
    "map big-endian": (
        lambda: dj.moe_map(np.zeros((4, 1), ">i4"), 2, map_type="index"),
        DTypeError,
        "routing_map is big-endian",
    ),
    "quantize amax float64": (lambda: dj.quantize(X, CURRENT, amax=np.ones(1)), DTypeError, "amax is float64"),
    "quantize amax text": (
        lambda: dj.quantize(X, CURRENT, amax="1"),
        ArgumentError,
        "amax must be a JAX or NumPy array",
    ),
    "quantize group block": (lambda: dj.quantize(X, MX, amax_group="i"), ValueError, "amax_group .*mxfp8_e4m3"),
    "quantize group delayed": (
        lambda: dj.quantize(X, DELAYED, amax_group="i"),
        ValueError,
        r"amax_group .*scale_update\(reduced=\)",
    ),
    "quantize group amax": (lambda: dj.quantize(X, CURRENT, amax_group="i", amax=1.0), ValueError, "was given too"),
    "scale_update dtype": (lambda: dj.scale_update(H, np.ones(2)), DTypeError, "scale must be float32, got float64"),
    "scale_update margin type": (lambda: dj.scale_update(H, H[:, 0], margin=1.0), ArgumentError, "margin .*float"),
    "dequantize array": (lambda: dj.dequantize(X), ArgumentError, "QuantizedArray"),
    "dequantize dtype": (lambda: dj.dequantize(OPERANDS["q"], "float8_e5m2"), DTypeError, "float8_e5m2"),
    "dequantize no dtype": (lambda: dj.dequantize(OPERANDS["q"], "real"), DTypeError, "'real' is no dtype"),
    "gemm array": (lambda: gemm("x"), ArgumentError, "a must be a QuantizedArray"),
    "gemm copy": (lambda: gemm("row", "row", trans_a=True), ValueError, r"columnwise copy .*\[4, 32\]"),
    "gemm out_dtype": (lambda: gemm(out_dtype=jnp.int32), DTypeError, "int32"),
    "gemm alpha": (lambda: gemm(alpha=jnp.ones(())), ArgumentError, "alpha must be a Python number"),
    "gemm alpha inf": (lambda: gemm(alpha=1e39), ValueError, "alpha must be finite"),
    "gemm_into shape": (lambda: gemm_into(X), ShapeError, r"acc .*\[4, 4\], got \[4, 32\]"),
    "gemm_into dtype": (lambda: gemm_into(jnp.ones((4, 4), jnp.int32)), DTypeError, r"acc .*int32"),
    "bias_grad": (lambda: dj.bias_grad(jnp.float32(1)), ShapeError, "scalar"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    before = {op: tools.calls(op) for op in ("quantize", "gemm", "dequantize", "bias_grad", "amax", "scale_update")}
    with pytest.raises(error, match=message):
        call()
    with pytest.raises(error, match=message):
        jax.make_jaxpr(call)()  # traces and runs nothing
    if name not in ("gemm reduced",):  # its operand is quantized first
        assert before == {op: tools.calls(op) for op in before}


def test_a_corrupted_quantized_array_is_refused_at_its_own_name():
    for field, value, message in (
        ("rowwise_scale_inv", jnp.ones((4, 2), ml_dtypes.float8_e8m0fnu), r"scale_inv \(mxfp8_e4m3\).*\[4, 1\]"),
        ("rowwise_scale_inv", jnp.ones((4, 1)), "scale_inv .*float8_e8m0fnu, got float32"),
        ("rowwise_data", jnp.asarray(X, jnp.float8_e5m2), "data .*float8_e4m3fn, got float8_e5m2"),
    ):
        broken = dataclasses.replace(OPERANDS["q"], **{field: value})
        with pytest.raises((DTypeError, ShapeError), match=f"a {message}"):
            dj.gemm(broken, OPERANDS["q"])
        with pytest.raises((DTypeError, ShapeError), match=f"q {message}"):
            dj.dequantize(broken)


def test_a_format_without_a_gemm_kernel_is_refused_while_compiling(monkeypatch):
    monkeypatch.setattr(quantize_ops._core, "gemm_row", lambda *a: -1)
    with pytest.raises(UnsupportedError, match=r"no CPU kernel for mxfp8_e4m3 x .* \[4, 4, 32\]; nearest: cpu.gemm"):
        jax.jit(lambda q: dj.gemm(q, q, alpha=3.25)).lower(OPERANDS["q"])
