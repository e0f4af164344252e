"""Rules of JAX primitives: batching, export with symbolic sizes, lowering for each platform, no derivative."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.ad_checkpoint import checkpoint_name

import diptych.jax as dj
from diptych.common import ShapeError, UnsupportedError
from diptych.common.quantizers import SQUARE
from diptych.jax.primitives import ffi
from diptych.jax.primitives import quantize as quantize_ops
from jax_frontend import tools

pytestmark = pytest.mark.sampled

KIND = tools.KIND
quantize = jax.jit(dj.quantize, static_argnames="quantizer")


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def at(tree, i):
    return jax.tree.map(lambda v: v[i], tree)


@KIND
@tools.WRAP
def test_vmap_is_a_loop_bit_for_bit(kind, wrap):
    x, state = kind.draw("vmap", (3,)), kind.state((3,))
    q = wrap(jax.vmap(lambda x, state: dj.quantize(x, kind.quantizer, **state)))(x, state)
    each = [dj.quantize(x[i], kind.quantizer, **at(state, i)) for i in range(3)]
    tools.same_tree(q, stack(each))
    assert q.shape == x.shape and q.leading == kind.shape[:1]
    tools.same(wrap(jax.vmap(dj.dequantize))(q), stack([dj.dequantize(e) for e in each]))
    # A state that is not mapped is every example's, random bits included.
    shared = wrap(jax.vmap(lambda x: dj.quantize(x, kind.quantizer, **at(state, 0))))(x)
    tools.same_tree(shared, stack([dj.quantize(v, kind.quantizer, **at(state, 0)) for v in x]))


@tools.WRAP
def test_vmap_of_sums_and_amaxes(wrap):
    x = tools.normal("vmap", (3, 33, 65))
    tools.same(wrap(jax.vmap(dj.amax, in_axes=2))(x), stack([dj.amax(x[:, :, i]) for i in range(65)]))
    tools.same(wrap(jax.vmap(dj.bias_grad, in_axes=1))(x), stack([dj.bias_grad(x[:, i]) for i in range(33)]))
    rows = wrap(jax.vmap(functools.partial(dj.amax, per_row=True)))(x)
    tools.same(rows, stack([dj.amax(v, per_row=True) for v in x]))
    x = tools.normal("rotated", (3, 32, 40), "bfloat16")
    rotated = functools.partial(dj.amax, rht=True, random_signs=True)
    tools.same_tree(wrap(jax.vmap(rotated))(x), stack([rotated(v) for v in x]))


@KIND
def test_another_state_for_each_example_of_one_tensor(kind):
    """Amaxes, scales and random states are mapped, x is not copied."""
    x, quantizer = kind.draw("one"), kind.quantizer
    if kind.quantizer.format.one_scale and not quantizer.needs_scale:
        state = {"amax": jnp.asarray([[1.0], [2.0], [4.0]])}
    elif quantizer.format.two_level:
        q = dj.quantize(x, quantizer, **kind.state())
        factors = jnp.asarray([1.0, 2.0, 4.0])[:, None]
        state = {name: getattr(q, name) * factors for name in ("amax", "columnwise_amax")} | kind.state((3,))
    elif not (state := kind.state((3,))):
        pytest.skip("calls of this quantizer are given x alone")
    f = jax.vmap(lambda state: dj.quantize(x, quantizer, **state))
    want = stack([dj.quantize(x, quantizer, **at(state, i)) for i in range(3)])
    for wrap in (lambda f: f, jax.jit):
        tools.same_tree(wrap(f)(state), want)
    assert "tensor<{}x{}x".format(*kind.shape) in tools.hlo(f, state).split("@diptych_quantize")[1].split("->")[0]


def test_vmap_of_a_history_that_accumulates():
    """In place, so that a history that is not mapped is copied for each example; the copies of x are not."""
    quantizer, x = dj.Float8Quantizer(), tools.normal("x", (3, 4, 16)) * jnp.asarray([1.0, 10.0, 0.1])[:, None, None]
    scale, history = jnp.ones((3, 1)), jnp.asarray([2.0, 9.0])
    f = functools.partial(quantize_ops.quantize_delayed)
    each = [f(v, quantizer, s, history) for v, s in zip(x, scale, strict=True)]
    g = jax.vmap(lambda x, s: f(x, quantizer, s, history))
    for wrap in (lambda f: f, jax.jit):
        tools.same_tree(wrap(g)(x, scale), stack(each))
    nested = jax.vmap(lambda h: jax.vmap(lambda x: f(x, quantizer, scale[0], h)[1])(x))
    histories = jnp.asarray([[2.0, 9.0], [0.0, 1.0]])
    tools.same(jax.jit(nested)(histories), [[f(v, quantizer, scale[0], h)[1] for v in x] for h in histories])
    only = jax.vmap(lambda h: f(x[0], quantizer, scale[0], h)[1])
    tools.same(only(histories), [f(x[0], quantizer, scale[0], h)[1] for h in histories])


def test_vmap_of_scale_update():
    history, scale = jnp.abs(tools.normal("h", (4, 3, 5))), jnp.abs(tools.normal("s", (4, 3))) + 1
    reduced = jnp.asarray([0.0, 3.0, 0.5])
    f = functools.partial(dj.scale_update, margin=1)
    for wrap in (lambda f: f, jax.jit):
        got = wrap(jax.vmap(lambda h, s: f(h, s, reduced=reduced)))(history, scale)
        tools.same_tree(got, stack([f(h, s, reduced=reduced) for h, s in zip(history, scale, strict=True)]))
        tools.same_tree(wrap(jax.vmap(lambda s: f(history[0], s)))(scale), stack([f(history[0], s) for s in scale]))
    tools.same_tree(jax.vmap(f)(history, scale), tuple(v.reshape(u.shape) for u, v in zip(
        (history, scale), f(history.reshape(12, 5), scale.reshape(12)), strict=True)))  # fmt: skip


@KIND
def test_nested_vmap_of_gemm_walks_each_operand_by_its_own_axes(kind):
    square = kind.quantizer.format.pack == 2 and kind.quantizer.spec.flags & SQUARE
    m, n, k = *((16, 32) if square else (7, 5)), 2 * kind.shape[1]
    quantizer = kind.quantizer.with_usage(columnwise=False)
    state = kind.state()
    a, b = (tools.normal(name, shape, kind.dtype) for name, shape in (("a", (3, m, k)), ("b", (2, n, k))))
    bias, c = tools.normal("bias", (4, n)), tools.normal("c", (4, 3, m, n))
    qa, qb = (jax.vmap(lambda v: dj.quantize(v, quantizer, **state))(v) for v in (a, b))

    def one(qa, qb, bias, c):
        return dj.gemm_into(c, qa, qb, bias=bias, alpha=0.5, beta=0.25)

    f = jax.vmap(one, in_axes=(0, None, None, 0))  # 3
    f = jax.vmap(f, in_axes=(None, 0, None, None))  # 2
    f = jax.vmap(f, in_axes=(None, None, 0, 0))  # 4
    want = [[[one(at(qa, i), at(qb, j), bias[k], c[k, i]) for i in range(3)] for j in range(2)] for k in range(4)]
    for got in (f(qa, qb, bias, c), jax.jit(f)(qa, qb, bias, c)):
        tools.same(got, np.asarray(want))
    # No operand was copied along an axis that it lacks.
    (call,) = (line for line in tools.hlo(f, qa, qb, bias, c).splitlines() if "@diptych_gemm" in line)
    shapes = call.split(" : (")[1].split(") -> ")[0]
    width = k // quantizer.format.pack
    assert shapes.startswith(f"tensor<3x{m}x{width}x") and f"tensor<2x{n}x{width}x" in shapes, shapes
    assert f"tensor<4x{n}xf32>" in shapes and f"tensor<4x3x{m}x{n}xf32>" in shapes, shapes


@KIND
def test_through_scan_checkpoint_and_custom_vjp(kind):
    """The bits of plain calls; residuals as bytes survive a remat policy that saves them."""
    x, state = kind.draw("scan", (3,)), kind.state((3,))
    want = [dj.quantize(x[i], kind.quantizer, **at(state, i)) for i in range(3)]
    body = jax.jit(lambda _, xs: (None, dj.quantize(xs[0], kind.quantizer, **xs[1])))
    tools.same_tree(jax.lax.scan(body, None, (x, state))[1], stack(want))

    @jax.custom_vjp
    def restored(x, state):
        return dj.dequantize(dj.quantize(x, kind.quantizer, **state))

    def forward(x, state):
        q = dj.quantize(x, kind.quantizer, **state, as_bytes=True)
        return dj.dequantize(q), checkpoint_name(q, "q")

    def backward(q, dy):  # not a derivative: what was saved, times dy
        return dj.dequantize(q) * dy, None

    restored.defvjp(forward, backward)
    values = dj.dequantize(want[0])
    for policy in (None, *(getattr(jax.checkpoint_policies, n) for n in ("everything_saveable", "dots_saveable")),
                   jax.checkpoint_policies.save_only_these_names("q")):  # fmt: skip
        f = jax.checkpoint(lambda x: (restored(x, at(state, 0)) * 3).astype(jnp.float32).sum(), policy=policy)
        for wrap in (lambda f: f, jax.jit):
            tools.same(wrap(jax.grad(f))(x[0]), values * 3)


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


@KIND
def test_export_with_symbolic_sizes(kind):
    quantizer, state = kind.quantizer, kind.state()

    def f(x, w, state):
        q = dj.quantize(x, quantizer, **state)
        w = dj.quantize(w, quantizer, **state)
        wgrad = dj.gemm(q, q, trans_a=True, trans_b=False)
        return q, dj.gemm(q, w), wgrad, dj.dequantize(q), dj.bias_grad(x), dj.amax(x)

    unit = 16 if quantizer.format.pack == 2 else 1
    b, n, k, odd = export.symbolic_shape(f"{unit}*b, {unit}*n, {unit}*k, k")
    dtype = jnp.dtype(kind.dtype)
    args = [jax.ShapeDtypeStruct(s, dtype) for s in ((b, 3, k), (n, k))]
    exporting = functools.partial(export.export, jax.jit(f), disabled_checks=dj.export_safety_checks())
    exported = exporting(platforms=["cpu"])(*args, state)
    for sizes in ((2, 5, 65), (1, 7, 130)):
        sizes = [-(-s // unit) * unit for s in sizes]
        x, w = tools.normal("x", (sizes[0], 3, sizes[2]), kind.dtype), tools.normal("w", sizes[1:], kind.dtype)
        want = f(x, w, state)
        for g, v in zip(jax.tree.leaves(exported.call(x, w, state)), jax.tree.leaves(want), strict=True):
            tools.same(g, v)
    with pytest.raises(ShapeError, match="reduces over"):
        exporting()(args[0], jax.ShapeDtypeStruct((n, k + unit), dtype), state)
    if unit > 1:
        with pytest.raises(ShapeError, match=r"last extent .* does not hold for every symbolic size.*'16\*k'"):
            exporting()(jax.ShapeDtypeStruct((16, 3, odd), dtype), args[1], state)


def test_export_of_scale_update():
    n, length = export.symbolic_shape("n, l")
    f = jax.jit(lambda h, s: dj.scale_update(h, s, margin=1))
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, length), (n,))]
    exported = export.export(f, disabled_checks=dj.export_safety_checks(), platforms=["cpu"])(*args)
    h, s = jnp.abs(tools.normal("h", (3, 5))), jnp.ones(3)
    tools.same_tree(exported.call(h, s), f(h, s))


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
    lie = quantize_ops.Batch(1, (1,))
    f = jax.jit(lambda x: quantize_ops.amax_p.bind(x, batch=lie, flags=0, columnwise=False)[0])
    tools.same(f(jnp.ones((3, 5))), np.ones((3, 1), np.float32))
    call = jax.ffi.ffi_call("diptych_amax", jax.ShapeDtypeStruct((4, 1), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="operand 0 lacks batch axis 0 of length 4"):
        call(jnp.ones((3, 5)), attributes=ffi.amax_attributes(lie, 0, False))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*out must be \[1\]"):
        call(jnp.ones((3, 5)), attributes=ffi.amax_attributes(quantize_ops.Batch(0, (0,)), 0, False))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no op takes"):
        call(jnp.ones((3, 5), jnp.int16), attributes=ffi.amax_attributes(quantize_ops.Batch(0, (0,)), 0, False))
