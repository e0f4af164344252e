"""Errors of the verbs on stacks and groups, the same eagerly and while tracing, and results for wrong offsets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import diptych.jax as dj
from diptych.common import (
    ArgumentError,
    DTypeError,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    ShapeError,
    UnsupportedError,
)
from diptych.common.quantizers import NVFP4Quantizer
from diptych.jax.primitives import grouped as grouped_ops
from jax_frontend import tools

X, STACK, DY = np.ones((96, 32), np.float32), np.ones((3, 16, 32), np.float32), np.ones((96, 16), np.float32)
OFFSETS, BIAS = np.array([0, 32, 64, 96], np.int32), np.ones((3, 16), np.float32)
MX, TENSOR = tools.quantizer("mxfp8_e4m3"), tools.quantizer("fp8_e4m3_tensor")
NV, RHT = NVFP4Quantizer(), NVFP4Quantizer(with_rht=True)
WGRAD = {"trans_a": True, "trans_b": False}


class Own(Float8CurrentScalingQuantizer):
    def quantize_impl(self, x, quantize):
        return quantize(x)


def stack(x=STACK, quantizer=MX, **options):
    return dj.quantize_stack(x, quantizer, **options)


def fprop(offsets=OFFSETS, a=MX, b=MX, x=X, w=STACK, **options):
    return dj.grouped_gemm(dj.quantize(x, a), dj.quantize_stack(w, b), offsets, **options)


def wgrad(offsets=OFFSETS, a=MX, b=MX, dy=DY, x=X, **options):
    qa, qb = (dj.quantize(jnp.asarray(v, jnp.bfloat16), q) for v, q in ((dy, a), (x, b)))
    return dj.grouped_gemm(qa, qb, offsets, **WGRAD | options)


def raw(change):
    """The primitive on copies whose stack was changed."""
    a, b = dj.quantize(X, MX).copy_of(False, "test"), dj.quantize_stack(STACK, MX).copy_of(False, "test")
    return grouped_ops.grouped_gemm(a, change(b), jnp.asarray(OFFSETS), out_dtype="float32")


def added(acc, bias=None):
    a, b = dj.quantize(X, MX).copy_of(False, "test"), dj.quantize_stack(STACK, MX).copy_of(False, "test")
    return grouped_ops.grouped_gemm(a, b, jnp.asarray(OFFSETS), bias, out_dtype="float32", acc=acc)


def sums(dy=DY, offsets=OFFSETS, dtype=None):
    return dj.grouped_bias_grad(dy, offsets, dtype)


# name: call, error, message
BAD = {
    "stack list": (lambda: stack([[1.0]]), ArgumentError, "quantize_stack: x must be a JAX or NumPy"),
    "stack float64": (lambda: stack(STACK.astype(np.float64)), DTypeError, "quantize_stack: x .*float64"),
    "stack quantizer": (lambda: stack(quantizer="mxfp8"), ArgumentError, "quantize_stack: quantizer must be .*got str"),
    "stack own": (lambda: stack(quantizer=Own()), ArgumentError, "quantize_stack: Own quantizes on its own"),
    "stack extents": (lambda: stack(STACK[:, :, :31], NV), ShapeError, "multiple of 16"),
    "stack scale": (
        lambda: stack(quantizer=Float8Quantizer(), scale=np.ones(1, np.float32)), ShapeError,
        r"quantize_stack: scale must be \[3\], got float32\[1\]",
    ),
    "stack scale number": (
        lambda: stack(quantizer=Float8Quantizer(), scale=2.0), ArgumentError, "quantize_stack: scale must be a JAX",
    ),
    "stack scale scalar": (
        lambda: stack(quantizer=Float8Quantizer(), scale=jnp.ones(())), ShapeError,
        "quantize_stack: scale must have one entry for each tensor",
    ),
    "stack scale dtype": (
        lambda: stack(quantizer=Float8Quantizer(), scale=np.ones(3, np.float16)), DTypeError,
        "quantize_stack: scale must be float32, got float16",
    ),
    "stack amax": (
        lambda: stack(quantizer=TENSOR, amax=np.ones((3, 1), np.float32)), ShapeError,
        r"quantize_stack: amax must be \[3\], got float32\[3, 1\]",
    ),
    "stack amax not read": (
        lambda: stack(quantizer=TENSOR, columnwise_amax=np.ones(3, np.float32)), ValueError,
        "quantize_stack: columnwise_amax .* is not read",
    ),
    "stack no rng": (
        lambda: stack(quantizer=NVFP4Quantizer(stochastic_rounding=True)), TypeError, "quantize_stack: .*pass rng=",
    ),
    "stack rng": (
        lambda: stack(quantizer=NVFP4Quantizer(stochastic_rounding=True), rng=dj.rng_state(1)), ShapeError,
        r"quantize_stack: rng must be \[3, 4\], got int32\[4\]",
    ),
    "stack rng not read": (
        lambda: stack(rng=np.zeros((3, 4), np.int32)), ValueError, "quantize_stack .*: rng is for stochastic rounding",
    ),
    "a": (lambda: dj.grouped_gemm(X, stack(), OFFSETS), ArgumentError, "grouped_gemm: a must be a QuantizedArray, got"),
    "a stack": (lambda: dj.grouped_gemm(stack(), stack(), OFFSETS), ArgumentError, "a must be .*got QuantizedStack"),
    "b": (
        lambda: dj.grouped_gemm(dj.quantize(X, MX), dj.quantize(X, MX), OFFSETS), ArgumentError,
        "grouped_gemm: b must be a QuantizedStack, which .*got QuantizedArray",
    ),
    "b of wgrad": (
        lambda: dj.grouped_gemm(dj.quantize(X, MX), stack(), OFFSETS, **WGRAD), ArgumentError,
        "grouped_gemm: b must be a QuantizedArray, got QuantizedStack",
    ),
    "rows of a alone": (lambda: wgrad(trans_b=True), ValueError, "rows of a are reduced and those of b are not"),
    "copy of a": (lambda: fprop(a=MX.with_usage(rowwise=False)), ValueError, "grouped_gemm: a needs the rowwise copy"),
    "copy of b": (
        lambda: fprop(b=MX.with_usage(rowwise=False)), ValueError, "grouped_gemm: b needs the rowwise copy of .*Stack",
    ),
    "groups": (
        lambda: fprop(OFFSETS[:3]), ShapeError, "grouped_gemm: b is a stack of 3 tensors, and offsets are those of 2",
    ),
    "stack of more": (lambda: fprop(w=STACK[:, None]), ShapeError, r"grouped_gemm: b must be a stack of matrices"),
    "reduced": (lambda: fprop(x=X[:, :16]), ShapeError, "grouped_gemm: a .*reduces over 16 elements.*over 32"),
    "reduced rows": (lambda: wgrad(dy=DY[:64]), ShapeError, "grouped_gemm: a .*reduces over 64 elements.*over 96"),
    "offsets none": (lambda: fprop(None), ArgumentError, "grouped_gemm: offsets must be a JAX or .* got None"),
    "offsets list": (lambda: fprop([0, 1]), ArgumentError, "grouped_gemm: offsets must be a JAX or .* got list"),
    "offsets dtype": (lambda: fprop(OFFSETS.astype(np.int16)), DTypeError, "offsets must be int32, got int16"),
    "offsets int64": (lambda: fprop(OFFSETS.astype(np.int64)), DTypeError, "grouped_gemm: offsets is int64.*cast it"),
    "offsets float": (lambda: fprop(X[0, :4]), DTypeError, "grouped_gemm: offsets must be int32, got float32"),
    "offsets rank": (lambda: fprop(OFFSETS[None]), ShapeError, r"offsets must be \[groups \+ 1\], got int32\[1, 4\]"),
    "offsets of nothing": (lambda: fprop(OFFSETS[:0]), ShapeError, r"grouped_gemm: offsets must be \[groups \+ 1\]"),
    "offsets scalar": (lambda: fprop(jnp.int32(3)), ShapeError, "grouped_gemm: offsets must have one entry for each"),
    "bias shape": (lambda: fprop(bias=BIAS[0]), ShapeError, r"bias must be \[3, 16\], got float32\[16\]"),
    "bias dtype": (lambda: fprop(bias=BIAS.astype(np.int32)), DTypeError, "grouped_gemm: bias must be .*int32"),
    "bias of wgrad": (lambda: wgrad(bias=BIAS), ValueError, "grouped_gemm: bias was given and is not read"),
    "alpha": (lambda: fprop(alpha=float("inf")), ValueError, "grouped_gemm: alpha must be finite"),
    "alpha array": (lambda: fprop(alpha=jnp.ones(())), ArgumentError, "grouped_gemm: alpha must be a Python number"),
    "out_dtype": (lambda: fprop(out_dtype="int32"), DTypeError, "grouped_gemm: the result can be .*not int32"),
    "align": (lambda: fprop(align=0), ValueError, "align must be at least 1, got 0"),
    "fast": (
        lambda: fprop(fast_accum=True), ValueError, "grouped_gemm: fast_accum exists for per-tensor FP8 only, got mx",
    ),
    "rotated and not": (lambda: wgrad(a=RHT, b=NV, align=16), ValueError, "grouped_gemm: .*do not rotate alike"),
    "rotated": (lambda: wgrad(a=RHT, b=RHT, align=8), ValueError, "grouped_gemm: .*align must be 16, 32 or 128, got 1"),
    "primitive align": (
        lambda: grouped_ops.grouped_gemm(*[dj.quantize(X, MX).copy_of(True, "")] * 2, jnp.asarray(OFFSETS), align=3,
                                        out_dtype="float32"), ValueError, "align must be 1, 16, 32 or 128, got 3",
    ),
    "stack's scales": (
        lambda: raw(lambda b: b._replace(scale_inv=b.scale_inv[:2])), ShapeError,
        r"grouped_gemm: b scale_inv \(mxfp8_e4m3\) must begin with the number of groups, 3, got .*\[2, 16, 1\]",
    ),
    "stack's dtype": (
        lambda: raw(lambda b: b._replace(data=b.data.astype(jnp.int8))), DTypeError, "grouped_gemm: b data .*int8",
    ),
    "stack's amax": (lambda: raw(lambda b: b._replace(amax=jnp.ones(3))), ValueError, "grouped_gemm: b: .*amax"),
    "acc": (
        lambda: added(jnp.ones((96, 15))), ShapeError, r"grouped_gemm: acc must be \[96, 16\], got float32\[96, 15\]",
    ),
    "acc dtype": (
        lambda: added(jnp.ones((96, 16), jnp.bfloat16)), DTypeError, "grouped_gemm: acc must be float32, got bfloat16",
    ),
    "acc and bias": (
        lambda: added(jnp.ones((96, 16)), jnp.asarray(BIAS)), ValueError, "grouped_gemm .*a bias and an acc exclude",
    ),
    "dy": (lambda: sums(DY.astype(np.float64)), DTypeError, "grouped_bias_grad: dy must be .*float64"),
    "dy list": (lambda: sums([1.0]), ArgumentError, "grouped_bias_grad: dy must be a JAX or NumPy array, got list"),
    "dy scalar": (lambda: sums(jnp.ones(())), ShapeError, "grouped_bias_grad: dy must .*got a scalar"),
    "sum offsets": (lambda: sums(offsets=OFFSETS[None]), ShapeError, r"offsets must be \[groups \+ 1\]"),
    "sum offsets dtype": (lambda: sums(offsets=BIAS[:, 0]), DTypeError, "grouped_bias_grad: offsets must be int32"),
    "sum offsets list": (lambda: sums(offsets=[0, 4]), ArgumentError, "grouped_bias_grad: offsets must be a JAX"),
    "sum dtype": (lambda: sums(dtype="int8"), DTypeError, "grouped_bias_grad: the result can be .*not int8"),
}  # fmt: skip
OPS = ("grouped_gemm", "grouped_bias_grad")


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        jax.make_jaxpr(call)()  # traces and runs nothing
    before = [tools.calls(op) for op in OPS]
    with pytest.raises(error, match=message):
        call()
    assert before == [tools.calls(op) for op in OPS]


HOSTILE = {
    "descend": ([0, 50, 40, 96], r"offsets\[2\] = 40 is less than the one before it, 50"),
    "leave": ([0, 32, 64, 97], "outside of the tensor's 96 rows"),
    "leave far": ([0, 32, 64, 2**31 - 1], "outside of the tensor's 96 rows"),
    "below": ([-1, 32, 64, 96], "outside of the tensor's 96 rows"),
    "least": ([-(2**31), 0, 0, 0], "outside of the tensor's 96 rows"),
}


@pytest.mark.parametrize("name", HOSTILE)
@tools.WRAP
def test_hostile_offsets_are_refused_when_the_cpu_meets_them(name, wrap):
    """While tracing nobody knows them. Nothing is returned, and honest ones work afterwards."""
    values, message = HOSTILE[name]
    for op, call in (("grouped_gemm", fprop), ("grouped_gemm", wgrad),
                     ("grouped_bias_grad", lambda offsets: sums(offsets=offsets))):  # fmt: skip
        run = wrap(call)
        with pytest.raises(tools.MET, match=f"INVALID_ARGUMENT: {op}: .*{message}"):
            jax.block_until_ready(run(jnp.asarray(values, jnp.int32)))
        tools.same(run(jnp.asarray(OFFSETS)), call(OFFSETS))


def test_a_broken_promise_is_refused_by_the_cpu():
    with pytest.raises(tools.MET, match=r"grouped_gemm: .*multiple.* 32"):
        jax.block_until_ready(wgrad(np.array([0, 32, 48, 96], np.int32), align=32))


def test_one_bad_example_of_many_is_refused():
    """Under vmap the offsets of every example are looked at."""
    dy = jnp.asarray(cases.draw("jax-bad-example", "normal", (3, 96, 16), "float32"))
    for bad in range(3):
        offsets = np.stack([OFFSETS] * 3)
        offsets[bad, 2] = 97
        with pytest.raises(tools.MET, match=r"grouped_bias_grad: offsets.*97"):
            jax.block_until_ready(jax.jit(jax.vmap(dj.grouped_bias_grad))(dy, offsets))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["grad", "jvp"])
def test_no_derivative(transform):
    q, weights = dj.quantize(jnp.asarray(X), MX), stack()
    for x, f in (
        (STACK, lambda w: dj.quantize_stack(w, MX).dequantize().sum()),
        (BIAS, lambda b: dj.grouped_gemm(q, weights, OFFSETS, bias=b).sum()),
        (DY, lambda dy: dj.grouped_bias_grad(dy, OFFSETS).sum()),
    ):
        for g in (f, jax.jit(f)):
            with pytest.raises(UnsupportedError, match=r"has no derivative.*stop_gradient"):
                transform(g)(jnp.asarray(x))
    stopped = jax.grad(lambda w: (w * dj.quantize_stack(jax.lax.stop_gradient(w), MX).dequantize()).sum())(STACK)
    tools.same(stopped, weights.dequantize())
