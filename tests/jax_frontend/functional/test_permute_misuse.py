"""Errors of the permutation functions, the same eagerly and while tracing, and results for wrong maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.permute.test_permute_misuse import lie

import cases
import diptych.jax as dj
from diptych.common import ArgumentError, DTypeError
from jax_frontend import tools
from oracle import permute as oracle

T, E, H = 6, 3, 8
X, PROBS, MASK = np.ones((T, H), np.float32), np.ones((T, E), np.float32), np.ones((T, E), bool)
IDS, TO, ROWS = np.zeros((T, 2), np.int32), np.zeros((T, E), np.int32), np.ones((9, H), np.float32)
SIZES, ORDER = np.array([2, 4], np.int32), np.array([1, 0], np.int32)


def row_map():
    return dj.moe_map(MASK)


def quantized():
    return dj.quantize(jnp.ones((T, 32)), tools.quantizer("mxfp8_e4m3", columnwise=False))


def permute(*args, **options):
    return dj.moe_permute(*args, **options)


# name: call, error, message
BAD = {
    "map list": (lambda: dj.moe_map([[1]]), ArgumentError, "moe_map: routing_map must be a JAX or .* got list"),
    "map ids dtype": (lambda: dj.moe_map(IDS.astype(np.int16), 3, map_type="index"), DTypeError, "int64, got int16"),
    "map align array": (lambda: dj.moe_map(MASK, align_size=jnp.ones(())), ArgumentError, "sizes are static"),
    "map rows float": (lambda: dj.moe_map(MASK, num_out_tokens=4.0), ArgumentError, "num_out_tokens .*got float"),
    "map rows array": (
        lambda: dj.moe_map(MASK, num_out_tokens=jnp.int32(4)), ArgumentError, "num_out_tokens .*sizes are static",
    ),
    "permute list": (lambda: permute([[1.0]], MASK), ArgumentError, "moe_permute: inp must be a JAX or NumPy array"),
    "permute float64": (lambda: permute(X.astype(np.float64), MASK), DTypeError, "inp is float64.*jax_enable_x64"),
    "permute routing": (lambda: permute(X, X), DTypeError, "moe_permute: routing_map"),
    "permute kind": (lambda: permute(X, row_map(), map_type="?"), ValueError, "map_type"),
    "permute max type": (lambda: permute(X, MASK, max_token_num=2.0), ArgumentError, "max_token_num .*float"),
    "probs none": (lambda: dj.moe_permute_with_probs(X, None, MASK), ArgumentError, "probs must be .*NoneType"),
    "probs float64": (
        lambda: dj.moe_permute_with_probs(X, PROBS.astype(np.float64), MASK), DTypeError, "probs is float64",
    ),
    "pad map": (lambda: dj.moe_permute_and_pad_with_probs(X, PROBS, row_map()), ArgumentError, "routing_map .*got Row"),
    "pad counts numbers": (
        lambda: dj.moe_permute_and_pad_with_probs(X, PROBS, MASK, 3), ArgumentError, "tokens_per_expert .*got int",
    ),
    "pad align": (lambda: dj.moe_permute_and_pad_with_probs(X, PROBS, MASK, None, 0), ValueError, "align_size"),
    "sum float64": (lambda: dj.moe_unpermute(ROWS.astype(np.float64), TO), DTypeError, "inp is float64"),
    "sum quantized": (lambda: dj.moe_unpermute(quantized(), TO), ArgumentError, "inp is quantized.*dequantize"),
    "sum probs dtype": (lambda: dj.moe_unpermute(ROWS, TO, MASK), DTypeError, "merging_probs must be .*got bool"),
    "sum probs float64": (
        lambda: dj.moe_unpermute(ROWS, TO, PROBS.astype(np.float64)), DTypeError, "merging_probs must be .*float64",
    ),
    "sum kind": (lambda: dj.moe_unpermute(ROWS, TO, map_type="x"), ValueError, "moe_unpermute: map_type"),
    "sum pad dtype": (lambda: dj.moe_unpermute(ROWS, TO, pad_offsets=X[0]), DTypeError, "pad_offsets must be int32 or"),
    "chunks many": (
        lambda: dj.moe_sort_chunks_by_index(X, *[np.zeros(2049, np.int32)] * 2), NotImplementedError, "2049 chunks",
    ),
    "chunks no probs": (
        lambda: dj.moe_sort_chunks_by_index_with_probs(X, None, SIZES, ORDER), ArgumentError, "probs must .*NoneType",
    ),
}  # fmt: skip
OPS = ("permute_map", "chunk_map", "invert_map", "permute", "permute_columns", "unpermute", "unpermute_grad")


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        jax.make_jaxpr(call)()  # traces and runs nothing
    before = {op: tools.calls(op) for op in OPS}
    with pytest.raises(error, match=message):
        call()
    after = {op: tools.calls(op) for op in OPS}
    after["permute_map"] = before["permute_map"]  # a map may be made before the rows are looked at
    assert before == after


def test_maps_that_lie():
    """Nothing is read or written out of bounds, and sums are those of the rows that exist, forward and backward."""
    for turn in range(4):
        slots, rows = (3, 1, 40, 5)[turn], 50
        m = lie(f"jax-{turn}", slots=slots)
        to = np.where((m.row_id_map >= 0) & (m.row_id_map < rows), m.row_id_map, -1)
        honest = m._replace(row_id_map=to.astype(np.int32))
        x = cases.rng_for(f"jax-lie-{turn}").standard_normal((rows, 16)).astype(np.float32)
        dy = jnp.asarray(cases.rng_for(f"jax-lie-dy-{turn}").standard_normal((len(to), 16)), jnp.float32)
        probs = cases.rng_for(f"jax-lie-p-{turn}").random(to.shape).astype(np.float32)
        y, pull = jax.vjp(lambda x, p, to=m.row_id_map: dj.moe_unpermute(x, to, p), x, probs)
        tools.same(y, oracle.unpermute(x, honest, probs))
        row_source = np.full(rows, -1, np.int32)
        flat = to.reshape(-1)
        row_source[flat[flat >= 0]] = np.flatnonzero(flat >= 0)  # of several, the last
        kept = np.full(flat.shape, -1, np.int32)
        kept[row_source[row_source >= 0]] = np.flatnonzero(row_source >= 0)
        alone = oracle.Map(kept.reshape(to.shape), row_source, *m[2:])
        dx, dprobs = pull(dy)
        tools.same(dx, oracle.unpermute_dx(np.asarray(dy), alone, probs))
        exact, allowed = oracle.unpermute_dprobs(np.asarray(dy), x, alone)
        assert (np.abs(np.asarray(dprobs) - exact) <= allowed + np.abs(exact) * 2.0**-23).all()
        hostile = dj.RowMap(*(jnp.asarray(v) for v in (m.row_id_map, *m[2:], m.row_source)))
        tokens = jnp.ones((len(to), 16))
        moved, pull = jax.vjp(lambda x, p, m=hostile: dj.moe_permute_with_probs(x, p, m)[:2], tokens, probs)
        dx, dprobs = pull(moved)  # in bounds, whatever they hold
        assert dx.shape == tokens.shape and dprobs.shape == probs.shape


def test_nothing_at_all():
    """No tokens, no rows, no width, no slots."""
    for tokens, slots, rows, width in ((0, 3, 5, 8), (5, 3, None, 0), (5, 0, 7, 8), (0, 1, None, 0)):
        ids, probs = np.zeros((tokens, slots), np.int32), np.ones((tokens, slots), np.float32)

        def run(x, probs, ids=ids, rows=rows):
            m = dj.moe_map(ids, 2, map_type="index", num_out_tokens=rows)
            moved, permuted, row_id_map = dj.moe_permute_with_probs(x, probs, m)
            return moved.sum() + permuted.sum() + dj.moe_unpermute(moved, row_id_map, probs).sum()

        dx, dprobs = jax.grad(run, (0, 1))(np.ones((tokens, width), np.float32), probs)
        assert dx.shape == (tokens, width) and np.array_equal(np.asarray(dprobs), np.full(probs.shape, 1 + width))
