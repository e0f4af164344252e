"""QuantizedArray as a pytree: through jit, vmap, scan, donation and tree utilities."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import diptych.jax as dj
from diptych.common.ops import shapes
from jax_frontend import tools

pytestmark = pytest.mark.sampled

KIND = tools.KIND


@KIND
def test_leaves_and_metadata(kind):
    quantizer, state = kind.quantizer, kind.state()
    x = tools.normal("x", (2, 16, 96), "bfloat16")
    q = dj.quantize(x, quantizer, **state)
    names = {f"{s}_{p}" for s in ("rowwise", "columnwise") for p in ("data", "scale_inv")}
    names |= {"amax"} if quantizer.format.one_scale or quantizer.format.two_level else set()
    names |= {"columnwise_amax"} if quantizer.format.two_level else set()
    paths = {jax.tree_util.keystr(path).lstrip(".") for path, _ in jax.tree_util.tree_flatten_with_path(q)[0]}
    assert paths == names
    for buffer in shapes.quantize_buffers(x.shape, quantizer):
        got = getattr(q, buffer.name)
        assert (got.shape, got.dtype.name) == (buffer.shape, buffer.dtype), buffer
    assert (q.shape, q.ndim, q.dtype, q.leading) == (x.shape, 3, "bfloat16", (2, 16))
    tools.same_tree(jax.tree.map(lambda v: v, q), q)
    assert jax.tree.structure(q) == jax.tree.structure(dj.quantize(jnp.ones_like(x), quantizer, **state))
    if kind.dtype == "float32":
        other = dj.quantize(x.astype(jnp.float32), quantizer, **state)
        assert jax.tree.structure(q) != jax.tree.structure(other)


@KIND
def test_shape_of_one_copy_alone(kind):
    x, state = tools.normal("x", (4, 2, 16, 96), kind.dtype), kind.state()
    for usage in ({"rowwise": False}, {"columnwise": False}):
        quantizer = kind.quantizer.with_usage(**usage)
        q = dj.quantize(x[0], quantizer, **state)
        assert q.shape == (2, 16, 96) and dj.dequantize(q).shape == (2, 16, 96)
        batched = jax.vmap(lambda v, quantizer=quantizer: dj.quantize(v, quantizer, **state))(x)
        assert batched.shape == (4, 2, 16, 96)
        tools.same(jax.vmap(dj.dequantize)(batched)[0], dj.dequantize(q))


def test_repr():
    q = dj.quantize(jnp.ones((4, 32)), tools.quantizer("mxfp8_e4m3"))
    assert repr(q) == "QuantizedArray(mxfp8_e4m3, shape=[4, 32], dtype=float32, copies=rowwise+columnwise)"
    assert "shape=?" in repr(jax.tree.map(lambda v: object(), q))
    assert "QuantizedArray" in str(jax.tree.structure(q))


def test_through_jit_scan_and_cond():
    quantizer, x = tools.quantizer("fp8_e4m3_tensor"), tools.normal("x", (5, 4, 32))
    stacked = jax.lax.scan(lambda _, v: (None, dj.quantize(v, quantizer)), None, x)[1]
    total, outs = jax.lax.scan(
        lambda s, q: (s + dj.dequantize(q), dj.amax(dj.dequantize(q))), jnp.zeros((4, 32)), stacked
    )
    want = jnp.zeros((4, 32))
    for v in x:
        want = want + dj.dequantize(dj.quantize(v, quantizer))
    tools.same(total, want)
    assert stacked.shape == (5, 4, 32) and outs.shape == (5, 1)
    carried = jax.lax.fori_loop(
        0, 3, lambda i, q: dj.quantize(dj.dequantize(q), quantizer), dj.quantize(x[0], quantizer)
    )
    assert carried.shape == (4, 32)
    picked = jax.jit(lambda p, a, b: jax.lax.cond(p, lambda: a, lambda: b))(True, carried, carried)
    tools.same_tree(picked, carried)


@KIND
def test_donation(kind):
    state = kind.state()
    q = dj.quantize(kind.draw("donated"), kind.quantizer, **state)
    f = functools.partial(lambda q, state: dj.quantize(-dj.dequantize(q), kind.quantizer, **state), state=state)
    want = f(q)
    address = q.rowwise_data.unsafe_buffer_pointer()
    got = jax.jit(f, donate_argnums=0)(q)
    tools.same_tree(got, want)
    assert q.rowwise_data.is_deleted() and address is not None
