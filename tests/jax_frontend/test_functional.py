"""Every verb against the oracle, eager and compiled, and what it says to bad input."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import diptych.jax as dj
import oracle
from diptych.common import DTypeError, ShapeError, UnsupportedError
from jax_frontend import tools

EACH = [(f, d) for f in cases.FORMATS for d in cases.INPUT_DTYPES]
SOME_VALUES = ("normal", "inf_nan_mix", "random_bits", "scale_edges", "zeros", "subnormal_input")
quantize = jax.jit(dj.quantize, static_argnames="quantizer")
dequantize = jax.jit(dj.dequantize, static_argnames="dtype")


@pytest.mark.parametrize(("fmt", "dtype"), EACH)
def test_quantize_bits(device, fmt, dtype):
    for turn, shape in enumerate(cases.SHAPES):
        for values in (SOME_VALUES[turn % len(SOME_VALUES)], "random_bits"):
            (case,) = cases.quantize_cases([fmt], [dtype], [shape], [values])
            x = case.make()
            want = oracle.quantize(x, fmt, pow2=case.pow2, eps=case.eps)
            quantizer = tools.quantizer(fmt, case.pow2, case.eps)
            q = (dj.quantize if turn % 2 else quantize)(jnp.asarray(x), quantizer)
            tools.same_quantized(q, want, case)
            assert (q.shape, q.dtype) == (shape, dtype)


@pytest.mark.parametrize(("fmt", "dtype"), EACH)
def test_one_copy_alone_has_the_same_bits(fmt, dtype):
    x = jnp.asarray(cases.draw(f"alone-{fmt}-{dtype}", "outlier", (33, 65), dtype))
    both = dj.quantize(x, tools.quantizer(fmt))
    for side in ("rowwise", "columnwise"):
        usage = {"rowwise": side == "rowwise", "columnwise": side == "columnwise"}
        one = dj.quantize(x, tools.quantizer(fmt).with_usage(**usage))
        tools.same(getattr(one, f"{side}_data"), getattr(both, f"{side}_data"))
        tools.same(getattr(one, f"{side}_scale_inv"), getattr(both, f"{side}_scale_inv"))
        assert sum(getattr(one, f"{s}_data") is None for s in ("rowwise", "columnwise")) == 1


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_amax(device, fmt):
    x = cases.draw(f"given-{fmt}", "normal", (33, 65), "bfloat16")
    for amax in cases.GIVEN_AMAX:
        want = oracle.quantize(x, fmt, amax=amax)
        for given in (float(amax), np.float32(amax), jnp.asarray([amax])):
            tools.same_quantized(dj.quantize(jnp.asarray(x), tools.quantizer(fmt), amax=given), want, amax)
        tools.same_quantized(quantize(jnp.asarray(x), tools.quantizer(fmt), amax=jnp.asarray([amax])), want, amax)


@pytest.mark.parametrize("fmt", cases.FORMATS)
@pytest.mark.parametrize("shape", [(33, 65), (2, 3, 96), (7,), (0, 16)])
def test_dequantize_bits(device, fmt, shape):
    x = cases.draw(f"dequantize-{fmt}-{shape}", "random_bits", shape, "float32")
    want = oracle.quantize(x, fmt)
    for side in ("rowwise", "columnwise"):
        usage = {"rowwise": side == "rowwise", "columnwise": side == "columnwise"}
        q = dj.quantize(jnp.asarray(x), tools.quantizer(fmt, **usage))
        for dtype in (None, "bfloat16", jnp.float16):
            out = np.dtype(np.float32 if dtype is None else jnp.dtype(dtype))
            expected = oracle.dequantize(want.copy(columnwise=side == "columnwise"), out).reshape(shape)
            tools.same(dj.dequantize(q, dtype), expected, (side, dtype))
            tools.same(dequantize(q, dtype), expected, (side, dtype))
        tools.same(q.dequantize(), dj.dequantize(q))
        raw = dj.quantize(jnp.asarray(x), tools.quantizer(fmt, **usage), as_bytes=True)
        assert {v.dtype for v in jax.tree.leaves(raw)} <= {np.dtype(np.uint8), np.dtype(np.float32)}
        tools.same(dj.dequantize(raw), dj.dequantize(q))


@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_gemm_bits(pair):
    shapes = [s for i, s in enumerate(cases.GEMM_SHAPES) if i % 2 == cases.GEMM_PAIRS.index(pair) % 2]
    for case in cases.gemm_cases([pair], shapes):
        a, b, bias, c = case.make()
        sides = {"trans_a": case.a_columnwise, "trans_b": not case.b_columnwise}
        qa, qb = (dj.quantize(jnp.asarray(v), tools.quantizer(f)) for v, f in ((a, pair[0]), (b, pair[1])))
        copies = (oracle.quantize(v, f).copy(s) for v, f, s in (
            (a, pair[0], case.a_columnwise), (b, pair[1], case.b_columnwise)))  # fmt: skip
        want = oracle.gemm_cpu(
            *copies, alpha=case.alpha, bias=bias, beta=case.beta, c=c, out_dtype=cases.INPUT_DTYPES[case.out_dtype]
        )
        bias = None if bias is None else jnp.asarray(bias)
        if c is None:
            got = dj.gemm(qa, qb, **sides, bias=bias, alpha=case.alpha, out_dtype=case.out_dtype)
        else:
            got = dj.gemm_into(jnp.asarray(c), qa, qb, **sides, bias=bias, alpha=case.alpha, beta=case.beta)
        tools.same(got, want, case)


def test_gemm_unfolds_leading_dimensions_and_defaults_to_the_dtype_of_a():
    x, w = tools.normal("x", (2, 3, 32), "bfloat16"), tools.normal("w", (5, 32))
    y = dj.gemm(dj.quantize(x, tools.quantizer("mxfp8_e4m3")), dj.quantize(w, tools.quantizer("mxfp8_e4m3")))
    assert (y.shape, y.dtype) == ((2, 3, 5), jnp.bfloat16)


def test_gemm_into_reuses_donated_memory():
    quantizer = tools.quantizer("mxfp8_e4m3")
    qa, qb = dj.quantize(tools.normal("a", (32, 64)), quantizer), dj.quantize(tools.normal("b", (48, 64)), quantizer)
    acc = jnp.ones((32, 48))
    want = dj.gemm_into(acc, qa, qb)
    tools.same(acc, np.ones((32, 48), np.float32))  # not donated: untouched
    step = jax.jit(dj.gemm_into, donate_argnums=0)
    text = step.lower(acc, qa, qb).compile().as_text()
    assert "output_to_operand_aliasing={{}: (4, {})}" in text and "copy(" not in text, text
    address = acc.unsafe_buffer_pointer()
    got = step(acc, qa, qb)
    tools.same(got, want)
    assert acc.is_deleted() and got.unsafe_buffer_pointer() == address


def test_alpha_keeps_the_sign_of_zero():
    q = dj.quantize(jnp.ones((1, 32)), tools.quantizer("mxfp8_e4m3"))
    plus, minus = (np.asarray(dj.gemm(q, q, alpha=alpha)) for alpha in (0.0, -0.0))
    assert not np.signbit(plus).any() and np.signbit(minus).all()


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_amax_and_bias_grad(device, dtype):
    for values in ("normal", "inf_nan_mix", "all_nan", "subnormal_input"):
        for shape in ((33, 65), (0, 16), (7,), (2, 3, 96)):
            x = cases.draw(f"amax-{values}-{shape}", values, shape, dtype)
            tools.same(dj.amax(jnp.asarray(x)), oracle.amax(x), (values, shape))
    if device == "cpu":
        dy = cases.draw("dy", "normal", (3, 33, 65), dtype)
        for out in (None, "float32"):
            want = tools.oracle_bias_grad(dy, dy.dtype if out is None else np.float32)
            tools.same(dj.bias_grad(jnp.asarray(dy), out), want)
            tools.same(jax.jit(lambda v, out=out: dj.bias_grad(v, out))(dy), want)


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_gemm_on_a_gpu_is_near_the_exact_product(pair):
    with jax.default_device(tools.gpu()):
        for case in cases.gemm_cases([pair], cases.GEMM_SHAPES_ALIGNED):
            a, b, bias, c = case.make()
            copies = [oracle.quantize(v, f).copy(s) for v, f, s in (
                (a, pair[0], case.a_columnwise), (b, pair[1], case.b_columnwise))]  # fmt: skip
            options = {"alpha": case.alpha, "bias": bias, "beta": case.beta, "c": c}
            qa, qb = (dj.quantize(jnp.asarray(v), tools.quantizer(f)) for v, f in ((a, pair[0]), (b, pair[1])))
            sides = {"trans_a": case.a_columnwise, "trans_b": not case.b_columnwise}
            bias = None if bias is None else jnp.asarray(bias)
            if c is None:
                got = dj.gemm(qa, qb, **sides, bias=bias, alpha=case.alpha, out_dtype=case.out_dtype)
            else:
                got = dj.gemm_into(jnp.asarray(c), qa, qb, **sides, bias=bias, alpha=case.alpha, beta=case.beta)
            allowed = oracle.gemm_tolerance(
                *copies, **options, out_dtype=cases.INPUT_DTYPES[case.out_dtype], accumulator_bits=14, promote_every=128
            )
            error = np.abs(np.asarray(got).astype(np.float64) - oracle.gemm_float64(*copies, **options))
            assert (error <= allowed).all(), (case, float((error / allowed).max()))


# --- bad input: the same error eager and while tracing, and no kernel has run ---

X = np.ones((4, 32), np.float32)
CURRENT, MX, BLOCK = (tools.quantizer(f) for f in ("fp8_e4m3_tensor", "mxfp8_e4m3", "fp8_e4m3_1x128"))


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
    "quantize int": (lambda: dj.quantize(jnp.ones((4, 4), jnp.int32), MX), DTypeError, r"mxfp8_e4m3.*int32"),
    "quantize list": (lambda: dj.quantize([1.0], MX), DTypeError, "JAX or NumPy array, got list"),
    "quantize float64": (lambda: dj.quantize(np.ones((4, 4)), MX), DTypeError, "float64"),
    "quantize scalar": (lambda: dj.quantize(jnp.float32(1), MX), ShapeError, "at least one dimension"),
    "quantize quantizer": (lambda: dj.quantize(X, dj.MXFP8BlockScaling()), DTypeError, "Quantizer"),
    "quantize amax block": (lambda: dj.quantize(X, BLOCK, amax=1.0), ValueError, "fp8_e4m3_1x128"),
    "quantize amax shape": (lambda: dj.quantize(X, CURRENT, amax=jnp.ones(2)), ShapeError, r"\[1\], got \[2\]"),
    "quantize amax dtype": (lambda: dj.quantize(X, CURRENT, amax=jnp.ones(1, jnp.bfloat16)), DTypeError, "float32"),
    "dequantize array": (lambda: dj.dequantize(X), DTypeError, "QuantizedArray"),
    "dequantize dtype": (lambda: dj.dequantize(OPERANDS["q"], "float8_e5m2"), DTypeError, "float8_e5m2"),
    "dequantize no dtype": (lambda: dj.dequantize(OPERANDS["q"], "real"), DTypeError, "'real' is no dtype"),
    "gemm array": (lambda: gemm("x"), DTypeError, "a must be a QuantizedArray"),
    "gemm reduced": (
        lambda: dj.gemm(OPERANDS["q"], dj.quantize(np.ones((4, 64), np.float32), MX)),
        ShapeError,
        r"32 elements, b .* over 64",
    ),
    "gemm copy": (lambda: gemm("row", "row", trans_a=True), ValueError, r"columnwise copy .*\[4, 32\]"),
    "gemm bias": (lambda: gemm(bias=jnp.ones(5)), ShapeError, r"bias .*\[4\], got \[5\]"),
    "gemm bias dtype": (lambda: gemm(bias=jnp.ones(4, jnp.int8)), DTypeError, r"bias .*int8"),
    "gemm out_dtype": (lambda: gemm(out_dtype=jnp.int32), DTypeError, "int32"),
    "gemm alpha": (lambda: gemm(alpha=jnp.ones(())), DTypeError, "alpha must be a Python number"),
    "gemm alpha inf": (lambda: gemm(alpha=1e39), ValueError, "alpha must be finite"),
    "gemm fast_accum": (lambda: gemm(fast_accum=True), ValueError, r"fast_accum .*mxfp8_e4m3"),
    "gemm_into shape": (lambda: gemm_into(X), ShapeError, r"acc .*\[4, 4\], got \[4, 32\]"),
    "gemm_into dtype": (lambda: gemm_into(jnp.ones((4, 4), jnp.int32)), DTypeError, r"acc .*int32"),
    "amax": (lambda: dj.amax(jnp.ones(3, jnp.int32)), DTypeError, "int32"),
    "bias_grad": (lambda: dj.bias_grad(jnp.float32(1)), ShapeError, "scalar"),
    "bias_grad dtype": (lambda: dj.bias_grad(X, jnp.int32), DTypeError, "int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    before = {op: tools.calls(op) for op in ("quantize", "gemm", "dequantize", "bias_grad", "amax")}
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
    from diptych.jax import primitives

    monkeypatch.setattr(primitives._core, "gemm_row", lambda *a: -1)
    with pytest.raises(UnsupportedError, match=r"no CPU kernel for mxfp8_e4m3 x .* \[4, 4, 32\]; nearest: cpu.gemm"):
        jax.jit(lambda q: dj.gemm(q, q, alpha=3.25)).lower(OPERANDS["q"])
