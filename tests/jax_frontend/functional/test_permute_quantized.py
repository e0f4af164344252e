"""Permuting quantized tensors moves all their planes unchanged; absent rows are quantized zeros."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.permute.test_permute import as_mask, top_k

import cases
import diptych.jax as dj
from diptych.common import FORMATS, ShapeError, UnsupportedError, format_by_name
from jax_frontend import tools
from oracle import permute as oracle

T, E, K, H = 48, 5, 2, 128
IDS = top_k(cases.rng_for("jax-quantized"), T, E, K)
MASK = as_mask(IDS, E)
PROBS = cases.rng_for("jax-quantized-probs").random((T, E)).astype(np.float32)
ROWS = T * K + 30
WANT = oracle.row_map(MASK, E, ROWS, 8)
ABSENT = {"float32": np.float32(1), "float8_e8m0fnu": np.uint8(0), "float8_e4m3fn": np.uint8(0)}  # scales of zeros
MOVABLE = {name: kind for name, kind in tools.KINDS.items() if kind.quantizer.format.block_rows <= 1}


def row_map():
    return dj.moe_map(MASK, num_out_tokens=ROWS, align_size=8)


def alone(kind):
    """A quantizer of copies whose rows can move: no columnwise one whose blocks run along tokens."""
    return kind.quantizer.with_usage(columnwise=kind.quantizer.format.one_scale)


def quantized(kind, name="x", **options):
    x = tools.normal(name, (T, H), kind.dtype)
    return dj.quantize(x, alone(kind), **kind.state(), **options)


def same_moved(got, q, m, label):
    """`got` holds q's planes where the map `m` sends them."""
    fmt = q.format
    for name in tools.COPIES:
        old, new = getattr(q, name), getattr(got, name)
        assert (old is None) == (new is None), f"{label} {name}"
        if old is None:
            continue
        assert old.dtype == new.dtype, f"{label} {name}"
        bits = tools.bits(old)
        if name == "rowwise_data":
            want = oracle.permute(bits, m)
        elif name == "columnwise_data":
            want = oracle.permute_columns(bits, m)
        elif name == "rowwise_scale_inv" and not fmt.one_scale:
            fill = ABSENT[fmt.scale]
            want = oracle.permute(bits, m, fill if fill.dtype == np.uint8 else fill.view(np.uint32))
        elif name == "amax" and old.shape == (T,):
            want = oracle.permute(bits, m)
        else:  # of the whole tensor
            want = bits
        tools.same(tools.bits(new), want, f"{label} {name}")


@pytest.mark.parametrize("as_bytes", [False, True], ids=["typed", "bytes"])
@pytest.mark.parametrize("kind", MOVABLE.values(), ids=MOVABLE)
def test_every_format(kind, as_bytes, device):
    q = quantized(kind, as_bytes=as_bytes)

    def run(q, probs):
        m = row_map()
        return dj.moe_permute(q, m)[0], dj.moe_permute_with_probs(q, probs, m)

    moved, (again, permuted, row_id_map) = jax.jit(run)(q, PROBS)
    same_moved(moved, q, WANT, kind.quantizer)
    tools.same_tree(again, moved)
    tools.same(permuted, oracle.permute_probs(PROBS, WANT))
    tools.same(row_id_map, WANT.row_id_map)
    assert moved.shape == (ROWS, H) and moved.leading == (ROWS,) and moved.dtype == q.dtype
    assert moved.quantizer == alone(kind)
    values = np.asarray(dj.dequantize(moved))
    tools.same(np.abs(values), np.abs(oracle.permute(np.asarray(dj.dequantize(q)), WANT)))  # +0 for any zero
    tools.same_tree(dj.moe_permute(q, row_map())[0], moved, "eager")


@pytest.mark.parametrize("fmt", [f.name for f in FORMATS if f.block_rows <= 1])
def test_padding_is_what_zeros_quantize_to(fmt):
    """Quantizing permuted rows by the same amax gives the same planes."""
    quantizer = tools.quantizer(fmt, columnwise=format_by_name(fmt).one_scale)
    x = tools.normal("zeros", (T, H))
    q, m = dj.quantize(x, quantizer), row_map()
    own = {"amax": q.amax} if q.amax is not None else {}
    tools.same_tree(dj.moe_permute(q, m)[0], dj.quantize(dj.moe_permute(x, m)[0], quantizer, **own))


@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "mxfp8_e4m3", "nvfp4"])
def test_products_of_moved_rows(fmt):
    quantizer = tools.quantizer(fmt, columnwise=False)
    q = dj.quantize(tools.normal("x", (T, H)), quantizer)
    w = dj.quantize(tools.normal("w", (32, H)), quantizer)
    y = dj.gemm(dj.moe_permute(q, row_map())[0], w)
    tools.same(y, oracle.permute(np.asarray(dj.gemm(q, w)), WANT))


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "mxfp8_e4m3", "nvfp4-row_amax"])
def test_chunks_padding_and_vmap(name):
    q = quantized(MOVABLE[name])
    sizes, order = [8, 30, 10], [2, 0, 1]
    chunks = oracle.Map(*oracle.chunk_map(np.array(sizes), np.array(order), T), *2 * (np.zeros(1, np.int32),))
    out, permuted = dj.moe_sort_chunks_by_index_with_probs(q, PROBS[:, 0], sizes, order)
    same_moved(out, q, chunks, name)
    tools.same(permuted, oracle.permute_probs(PROBS[:, :1], chunks))
    padded, *_ = dj.moe_permute_and_pad_with_probs(q, PROBS, MASK, align_size=8, num_out_tokens=ROWS)
    same_moved(padded, q, WANT, name)
    many = jax.tree.map(lambda *a: jnp.stack(a), q, quantized(MOVABLE[name], "other"))
    got = jax.vmap(lambda q: dj.moe_permute(q, row_map())[0])(many)
    tools.same_tree(jax.tree.map(lambda a: a[0], got), dj.moe_permute(q, row_map())[0])
    with pytest.raises(ShapeError, match=r"carries 1 more axis.*jax\.vmap"):
        dj.moe_permute(many, row_map())


def test_probabilities_beside_a_quantized_tensor_are_differentiated():
    q = quantized(MOVABLE["mxfp8_e4m3"])
    dmoved = cases.rng_for("dmoved").standard_normal(ROWS).astype(np.float32)

    def loss(probs, q):
        out, permuted, _ = dj.moe_permute_with_probs(q, probs, row_map())
        return (permuted * dmoved).sum() + jax.lax.stop_gradient(dj.dequantize(out)).sum()

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        tools.same(wrap(jax.grad(loss))(PROBS, q), oracle.gather_probs(dmoved, WANT))
    with pytest.raises(UnsupportedError, match="moe_permute: rows of float8_e4m3fn have no gradient"):
        jax.grad(lambda q: dj.moe_permute(q, row_map())[0].rowwise_data.astype(jnp.float32).sum())(q)


@pytest.mark.parametrize("policy", [None, "everything_saveable", "dots_saveable"])
def test_checkpoint(policy):
    """A checkpoint's saved values do not round payloads and scales that are bytes."""
    kind = MOVABLE["mxfp8_e4m3"]

    @jax.custom_vjp
    def moved(x):
        return dj.dequantize(dj.moe_permute(dj.quantize(x, alone(kind), as_bytes=True), row_map())[0])

    def forward(x):
        q = dj.moe_permute(dj.quantize(x, alone(kind), as_bytes=True), row_map())[0]
        return dj.dequantize(q), q

    moved.defvjp(forward, lambda q, dy: (dj.moe_unpermute(dj.dequantize(q) * dy, row_map()),))
    x = tools.normal("remat", (T, H)) * 400
    rule = None if policy is None else getattr(jax.checkpoint_policies, policy)
    got = jax.jit(jax.grad(lambda x: moved(x).sum()))(x)
    tools.same(jax.jit(jax.grad(jax.checkpoint(lambda x: moved(x).sum(), policy=rule)))(x), got)
    assert np.isfinite(np.asarray(got)).all()


@pytest.mark.parametrize("name", [n for n, k in tools.KINDS.items() if not k.quantizer.format.one_scale])
def test_blocks_along_tokens_are_refused(name):
    kind = tools.KINDS[name]
    fmt, x = kind.quantizer.format, tools.normal("blocks", (T, H), kind.dtype)
    q = dj.quantize(x, kind.quantizer, **kind.state())
    for call in (
        lambda q: dj.moe_permute(q, MASK),
        lambda q: dj.moe_permute_with_probs(q, PROBS, MASK),
        lambda q: dj.moe_sort_chunks_by_index(q, [T], [0]),
    ):
        message = f"span {fmt.block_rows} rows" if fmt.block_rows > 1 else f"run along {fmt.block_cols} tokens"
        with pytest.raises(ValueError, match=rf"moe_\w+: blocks of inp's .*{fmt.name}.* {message}"):
            call(q)
    columns = dataclasses.replace(q, rowwise_data=None, rowwise_scale_inv=None)
    with pytest.raises(ValueError, match="moe_permute: rows are what moves, and inp has no rowwise copy"):
        dj.moe_permute(columns, MASK)
    broken = dataclasses.replace(
        q, columnwise_data=None, rowwise_scale_inv=jnp.ones((T, 77), q.rowwise_scale_inv.dtype)
    )
    with pytest.raises(ValueError, match=r"inp scale_inv|span"):
        dj.moe_permute(broken, MASK)
