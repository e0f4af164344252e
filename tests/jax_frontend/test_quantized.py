"""QuantizedArray as a pytree: through jit, vmap, scan, donation and tree utilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import cases
import diptych.jax as dj
from jax_frontend import tools

FORMATS = cases.FORMATS


@pytest.mark.parametrize("fmt", FORMATS)
def test_leaves_and_metadata(fmt):
    quantizer = tools.quantizer(fmt)
    q = dj.quantize(tools.normal("x", (2, 3, 96), "bfloat16"), quantizer)
    names = {f"{s}_{p}" for s in ("rowwise", "columnwise") for p in ("data", "scale_inv")}
    names |= {"amax"} if quantizer.format.per_tensor else set()
    paths = {jax.tree_util.keystr(path).lstrip(".") for path, _ in jax.tree_util.tree_flatten_with_path(q)[0]}
    assert paths == names and q.columnwise_amax is None
    assert (q.shape, q.ndim, q.dtype, q.leading) == ((2, 3, 96), 3, "bfloat16", (2, 3))
    tools.same_tree(jax.tree.map(lambda v: v, q), q)
    assert jax.tree.structure(q) == jax.tree.structure(dj.quantize(jnp.ones((2, 3, 96), jnp.bfloat16), quantizer))
    assert jax.tree.structure(q) != jax.tree.structure(dj.quantize(jnp.ones((2, 3, 96)), quantizer))


@pytest.mark.parametrize("fmt", ("fp8_e4m3_tensor", "mxfp8_e4m3"))
def test_shape_of_a_columnwise_copy_alone(fmt):
    quantizer = tools.quantizer(fmt, rowwise=False)
    x = tools.normal("x", (4, 2, 3, 96))
    q = dj.quantize(x[0], quantizer)
    assert q.shape == (2, 3, 96) and dj.dequantize(q).shape == (2, 3, 96)
    batched = jax.vmap(lambda v: dj.quantize(v, quantizer))(x)
    assert batched.shape == (4, 2, 3, 96)
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


def test_donation():
    q = dj.quantize(tools.normal("x", (64, 64)), tools.quantizer("mxfp8_e4m3"))
    want = dj.quantize(-dj.dequantize(q), q.quantizer)
    address = q.rowwise_data.unsafe_buffer_pointer()
    got = jax.jit(lambda q: dj.quantize(-dj.dequantize(q), q.quantizer), donate_argnums=0)(q)
    tools.same_tree(got, want)
    assert q.rowwise_data.is_deleted() and address is not None
