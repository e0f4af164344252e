"""What JAX asks of a primitive: batching, export with symbolic sizes, lowering for each platform, no derivative."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import cases
import diptych.jax as dj
from diptych.common import ShapeError, UnsupportedError
from diptych.jax import ffi, primitives
from jax_frontend import tools

FORMATS = ("fp8_e5m2_tensor", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3")
quantize = jax.jit(dj.quantize, static_argnames="quantizer")


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_vmap_is_a_loop_bit_for_bit(fmt, wrap):
    quantizer = tools.quantizer(fmt)
    x = tools.normal(f"vmap-{fmt}", (3, 33, 65)) * jnp.asarray([1.0, 100.0, 1e-3])[:, None, None]
    q = wrap(jax.vmap(lambda x: dj.quantize(x, quantizer)))(x)
    tools.same_tree(q, stack([dj.quantize(v, quantizer) for v in x]))
    assert q.shape == x.shape and q.leading == (33,)
    tools.same(wrap(jax.vmap(dj.dequantize))(q), stack([dj.dequantize(dj.quantize(v, quantizer)) for v in x]))
    tools.same(wrap(jax.vmap(dj.amax, in_axes=2))(x), stack([dj.amax(x[:, :, i]) for i in range(65)]))
    tools.same(wrap(jax.vmap(dj.bias_grad, in_axes=1))(x), stack([dj.bias_grad(x[:, i]) for i in range(33)]))


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_vmap_over_a_given_amax(fmt):
    quantizer, x, amax = tools.quantizer(fmt), tools.normal("x", (4, 16)), jnp.asarray([[1.0], [2.0], [4.0]])
    q = jax.vmap(lambda a: dj.quantize(x, quantizer, amax=a))(amax)
    tools.same_tree(q, stack([dj.quantize(x, quantizer, amax=a) for a in amax]))
    q = jax.vmap(lambda v: dj.quantize(v, quantizer, amax=2.0))(jnp.stack([x, -x]))
    for i, v in enumerate((x, -x)):
        tools.same(q.rowwise_data[i], dj.quantize(v, quantizer, amax=2.0).rowwise_data)


@pytest.mark.parametrize("fmt", FORMATS)
def test_nested_vmap_of_gemm_walks_each_operand_by_its_own_axes(fmt):
    quantizer = tools.quantizer(fmt)
    a, b = tools.normal("a", (3, 7, 130)), tools.normal("b", (2, 5, 130))
    bias, c = tools.normal("bias", (4, 5)), tools.normal("c", (4, 3, 7, 5))
    qa, qb = (jax.vmap(lambda v: dj.quantize(v, quantizer))(v) for v in (a, b))

    def one(qa, qb, bias, c):
        return dj.gemm_into(c, qa, qb, bias=bias, alpha=0.5, beta=0.25)

    f = jax.vmap(one, in_axes=(0, None, None, 0))  # 3
    f = jax.vmap(f, in_axes=(None, 0, None, None))  # 2
    f = jax.vmap(f, in_axes=(None, None, 0, 0))  # 4
    want = [[[one(jax.tree.map(lambda v, i=i: v[i], qa), jax.tree.map(lambda v, j=j: v[j], qb), bias[k], c[k, i])
              for i in range(3)] for j in range(2)] for k in range(4)]  # fmt: skip
    for got in (f(qa, qb, bias, c), jax.jit(f)(qa, qb, bias, c)):
        tools.same(got, np.asarray(want))
    # No operand was copied along an axis that it lacks.
    (call,) = (line for line in tools.hlo(f, qa, qb, bias, c).splitlines() if "@diptych_gemm" in line)
    shapes = call.split(" : (")[1].split(") -> ")[0]
    assert shapes.startswith("tensor<3x7x130x") and "tensor<2x5x130x" in shapes, shapes
    assert "tensor<4x5xf32>" in shapes and "tensor<4x3x7x5xf32>" in shapes, shapes


def test_vmap_of_no_element():
    q = jax.vmap(lambda x: dj.quantize(x, tools.quantizer("mxfp8_e4m3")))(jnp.zeros((0, 4, 32)))
    assert q.shape == (0, 4, 32) and q.amax is None


def test_batched_leaves_are_refused_outside_vmap():
    q = jax.vmap(lambda x: dj.quantize(x, tools.quantizer("mxfp8_e4m3")))(jnp.zeros((2, 4, 32)))
    with pytest.raises(ShapeError, match=r"carries 1 more axis.*jax.vmap"):
        dj.dequantize(q)
    with pytest.raises(ShapeError, match=r"jax\.vmap"):
        dj.gemm(q, q)


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["grad", "jvp"])
def test_no_derivative(transform):
    quantizer, x = tools.quantizer("mxfp8_e4m3"), jnp.ones((4, 32))
    q = dj.quantize(x, quantizer)
    for f in (
        lambda x: dj.quantize(x, quantizer).rowwise_scale_inv.astype(jnp.float32).sum(),
        lambda x: dj.dequantize(dj.quantize(x, quantizer)).sum(),
        lambda x: dj.gemm_into(x, q, dj.quantize(jnp.ones((32, 32)), quantizer)).sum(),
        lambda x: dj.amax(x)[0],
        lambda x: dj.bias_grad(x).sum(),
    ):
        for g in (f, jax.jit(f)):
            with pytest.raises(UnsupportedError, match=r"has no derivative.*diptych\.jax\.dense"):
                transform(g)(x)
    stopped = jax.grad(lambda x: (x * dj.dequantize(dj.quantize(jax.lax.stop_gradient(x), quantizer))).sum())(x)
    tools.same(stopped, dj.dequantize(q))


@pytest.mark.parametrize("fmt", FORMATS)
def test_export_with_symbolic_sizes(fmt):
    quantizer = tools.quantizer(fmt)

    def f(x, w):
        q = dj.quantize(x, quantizer)
        return q, dj.gemm(q, dj.quantize(w, quantizer), trans_b=True), dj.dequantize(q), dj.bias_grad(x), dj.amax(x)

    b, n, k = export.symbolic_shape("b, n, k")
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((b, 3, k), (n, k))]
    exported = export.export(jax.jit(f), disabled_checks=dj.export_safety_checks(), platforms=["cpu"])(*args)
    for sizes in ((2, 5, 65), (1, 7, 130)):
        x, w = tools.normal("x", (sizes[0], 3, sizes[2])), tools.normal("w", sizes[1:])
        got, want = exported.call(x, w), f(x, w)
        for g, v in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            tools.same(g, v)
    with pytest.raises(ShapeError, match="reduces over"):
        export.export(jax.jit(f), disabled_checks=dj.export_safety_checks())(
            args[0], jax.ShapeDtypeStruct((n, k + 1), jnp.float32)
        )


def test_export_needs_the_named_checks_off():
    f = jax.jit(lambda x: dj.dense(x, jnp.ones((3, 32)), recipe=dj.MXFP8BlockScaling()))
    x = tools.normal("x", (4, 32))
    with pytest.raises(ValueError, match="diptych_"):
        export.export(f, platforms=["cpu"])(x)
    exported = export.export(f, disabled_checks=dj.export_safety_checks(), platforms=["cpu"])(x)
    tools.same(exported.call(x), f(x))


def test_symbolic_sizes_are_refused_where_cuda_needs_the_workspace():
    n = export.symbolic_shape("n")[0]
    f = jax.jit(functools.partial(dj.bias_grad))
    with pytest.raises(UnsupportedError, match="bias_grad: symbolic sizes"):
        export.export(f, disabled_checks=dj.export_safety_checks(), platforms=["cuda"])(
            jax.ShapeDtypeStruct((n, 8), jnp.float32)
        )


def test_a_platform_without_handlers_is_an_error():
    with pytest.raises(NotImplementedError, match="diptych_amax"):
        jax.jit(dj.amax).trace(jnp.ones(3)).lower(lowering_platforms=("tpu",))


def test_primitives_are_not_recompiled_per_call():
    x, quantizer = jnp.ones((4, 32)), tools.quantizer("mxfp8_e4m3")
    dj.quantize(x, quantizer)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffi, "quantize_attributes", lambda *a: pytest.fail("lowered again"))
        dj.quantize(x + 1, tools.quantizer("mxfp8_e4m3"))  # an equal quantizer, not the same one


def test_handlers_check_what_the_primitives_did_not():
    """The core's own checks stand behind the tracing ones: here the axes of an operand are a lie."""
    lie = primitives.Batch(1, (1,))
    f = jax.jit(lambda x: primitives.amax_p.bind(x, batch=lie)[0])
    tools.same(f(jnp.ones((3, 5))), np.ones((3, 1), np.float32))
    call = jax.ffi.ffi_call("diptych_amax", jax.ShapeDtypeStruct((4, 1), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="operand 0 lacks batch axis 0 of length 4"):
        call(jnp.ones((3, 5)), attributes=ffi.amax_attributes(lie))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*out must hold 1 elements"):
        call(jnp.ones((3, 5)), attributes=ffi.amax_attributes(primitives.Batch(0, (0,))))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no op takes"):
        call(jnp.ones((3, 5), jnp.int16), attributes=ffi.amax_attributes(primitives.Batch(0, (0,))))
