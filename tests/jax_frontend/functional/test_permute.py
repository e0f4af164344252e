"""Permutation of tokens: the oracle's bits eagerly and compiled, gradients, and what maps of any content do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.permute.test_permute import as_mask, routings, top_k

import cases
import diptych.jax as dj
from diptych.common import UnsupportedError
from diptych.jax.functional import permute_op
from jax_frontend import tools
from oracle import permute as oracle

pytestmark = pytest.mark.sampled

T, E, K, H = 37, 5, 2, 24
FLOATS = (*cases.INPUT_DTYPES, "float64")
RNG = cases.rng_for("jax-permutation")
IDS = top_k(RNG, T, E, K)
MASK = as_mask(IDS, E)
PROBS = RNG.random((T, E)).astype(np.float32)
X = RNG.standard_normal((T, H)).astype(np.float32)


def x64(dtype):
    return jax.enable_x64(dtype == "float64")


def draw(name, shape, dtype):
    x = cases.rng_for(name).standard_normal(shape)
    return x if dtype == "float64" else x.astype(cases.INPUT_DTYPES[dtype])


def slots_of(routing, probs=PROBS):
    """[T, slots], whatever the kind of the map."""
    return probs[:, :1].repeat(routing.shape[1], 1) * np.arange(1, routing.shape[1] + 1, dtype=np.float32)


def oracle_of(m: dj.RowMap) -> oracle.Map:
    fields = m._asdict()
    return oracle.Map(*(np.asarray(fields[name]) for name in oracle.Map._fields))


# --- maps, and what they move ---


@pytest.mark.parametrize("align", [1, 16])
def test_maps_and_rows(align, device):
    """Every kind of routing, with rows to spare, just as many, and too few; eagerly and compiled."""
    for turn, (name, routing) in enumerate(routings(T, E, K)):
        ids = routing.dtype.kind == "i"
        need = oracle.rows_needed(routing, E, align)
        rows = (need, need + 9, need * 2 // 3)[turn % 3] or None
        options = {"num_out_tokens": rows, "align_size": align} | ({"map_type": "index"} if ids else {})

        def run(routing, x, probs, options=options):
            m = dj.moe_map(routing, E, **options)
            moved, permuted, row_id_map = dj.moe_permute_with_probs(x, probs, m)
            return m, moved, permuted, dj.moe_unpermute(moved, row_id_map, probs), dj.moe_permute(x, m)[0]

        probs = slots_of(routing)
        given = routing if ids or turn % 2 else routing.astype((np.int32, np.int64)[turn // 2 % 2])
        with jax.enable_x64(given.dtype == np.int64):  # else jit's arguments wrap, before any function sees them
            m, moved, permuted, y, alone = jax.jit(run)(given, X, probs)
        size = routing.size + E * (align - 1)
        want = oracle.row_map(routing, E, rows or size // align * align, align)
        for field in want._fields:
            tools.same(getattr(m, field), getattr(want, field), f"{field} of {name}")
        tools.same(moved, oracle.permute(X, want), name)
        tools.same(alone, moved, name)
        tools.same(permuted, oracle.permute_probs(probs, want), name)
        tools.same(y, oracle.unpermute(np.asarray(moved), want, probs), name)
        if turn % 4 == 0:
            tools.same_tree(run(given, X, probs), (m, moved, permuted, y, alone), f"eager {name}")


def test_masks_of_every_integer_dtype():
    want = dj.moe_map(MASK)
    for dtype in (bool, np.uint8, np.int8, np.int16, np.int32, np.uint16, np.int64):
        mask = MASK.astype(dtype) * np.array(-7).astype(dtype)
        for given in (mask, jnp.asarray(mask)):
            tools.same_tree(dj.moe_map(given), want, dtype)
    with jax.enable_x64(True):
        tools.same_tree(dj.moe_map(jnp.asarray(MASK.astype(np.int64) << 40)), want)


def test_ids_of_64_bits_do_not_wrap():
    """NumPy's, where JAX has none; and JAX's own."""
    wild = np.array([[2**32, 1], [-(2**63), 2**32 + 2], [0, 2**63 - 1]], np.int64)
    want = oracle.row_map(wild, 3, 6)
    with x64("float64"):
        wide = dj.moe_map(jnp.asarray(wild), 3, map_type="index")
    for m in (wide, dj.moe_map(wild, 3, map_type="index")):
        tools.same(m.row_id_map, want.row_id_map)
        tools.same(m.tokens_per_expert, want.tokens_per_expert)


@pytest.mark.parametrize("kind", ["mask", "index"])
def test_how_many_rows(kind):
    """None, -1 and 0 are as many as any routing needs; fewer are dropped and absent; more are zeros."""
    routing, slots = (MASK, E) if kind == "mask" else (IDS, K)
    full, row_id_map = dj.moe_permute(X, routing, map_type=kind)
    assert full.shape == (T * slots, H) and not np.asarray(full[T * K :]).any()
    for sentinel in (None, -1, 0):
        got = dj.moe_permute(X, routing, sentinel, map_type=kind)
        tools.same_tree(got, (full, row_id_map), sentinel)
    for rows in (1, T, T * K, T * slots + 50):
        got, m = dj.moe_permute(X, routing, rows, map_type=kind)
        want = oracle.row_map(routing, 2048 if kind == "index" else E, rows)
        tools.same(got, oracle.permute(X, want))
        tools.same(m, want.row_id_map)
        assert (np.asarray(m) < rows).all()
        tools.same(dj.moe_unpermute(got, m), oracle.unpermute(np.asarray(got), want))
    aligned = dj.moe_map(routing, E, map_type=kind, align_size=16)
    assert aligned.row_source.shape == ((T * slots + E * 15) // 16 * 16,)


def test_a_row_map_stands_for_the_routing():
    m = dj.moe_map(MASK, num_out_tokens=T * K, align_size=8)
    moved, permuted, row_id_map = dj.moe_permute_with_probs(X, PROBS, m)
    tools.same_tree(dj.moe_permute(X, m), (moved, row_id_map))
    tools.same(dj.moe_unpermute(moved, m, PROBS), dj.moe_unpermute(moved, row_id_map, PROBS))
    leaves = jax.tree.leaves(m)
    assert len(leaves) == 4 and row_id_map is m.row_id_map and permuted.shape == (T * K,)
    ids = dj.moe_map(IDS, E, map_type="index")
    probs = np.take_along_axis(PROBS, IDS, 1)
    tools.same(dj.moe_permute_with_probs(X, probs, ids)[1], oracle.permute_probs(probs, oracle_of(ids)))


@pytest.mark.parametrize("dtype", sorted({"uint8", "int32", "int64", "float8_e4m3fn", "float8_e8m0fnu", *FLOATS}))
def test_rows_of_every_dtype_move(dtype, device):
    raw = cases.rng_for(dtype).integers(0, 256, (T, 8 * jnp.dtype(dtype).itemsize), np.uint8)
    x = raw.view(jnp.dtype(dtype))
    with x64("float64" if dtype.endswith("64") else ""):
        got, _ = dj.moe_permute(x.reshape(1, T, 8), MASK, T * K + 3)
    want = oracle.row_map(MASK, E, T * K + 3)
    tools.same(tools.bits(got), oracle.permute(tools.bits(x), want))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_every_dtype(dtype, device):
    if device == "cuda" and dtype == "float64":
        pytest.skip("float64 rows are summed on the CPU alone")
    want = oracle.row_map(MASK, E, T * K - 5)
    x = draw("sums", (want.rows, H), dtype)
    with x64(dtype):
        for prob_dtype in (None, *FLOATS):
            if prob_dtype == "float64" != dtype:
                continue
            probs = None if prob_dtype is None else draw("p", (T, E), prob_dtype)
            y = dj.moe_unpermute(x, want.row_id_map, probs)
            tools.same(y, oracle.unpermute(x, want, probs), prob_dtype)
        shaped = dj.moe_unpermute(x, want.row_id_map, restore_shape=(1, T, H))
        tools.same(shaped[0], oracle.unpermute(x, want))


def test_the_old_name_of_merging_probs():
    m = dj.moe_map(MASK)
    moved, _ = dj.moe_permute(X, m)
    with pytest.warns(UserWarning, match="moe_unpermute: probs is deprecated"):
        y = dj.moe_unpermute(moved, m, probs=PROBS)
    tools.same(y, dj.moe_unpermute(moved, m, PROBS))


def test_a_probability_of_zero():
    probs = PROBS * (cases.rng_for("zero").random(PROBS.shape) < 0.6) * -1
    m, want = dj.moe_map(MASK, num_out_tokens=80), oracle.row_map(MASK, E, 80)
    moved, permuted, _ = dj.moe_permute_with_probs(X, probs, m)
    tools.same(moved, oracle.permute(X, want))
    padded, same, _ = dj.moe_permute_with_probs(X, probs, m, zero_prob_is_padding=True)
    tools.same(same, permuted)
    tools.same(padded, oracle.permute(X, want) * (oracle.permute_probs(probs, want) != 0)[:, None] + 0.0)

    def loss(x, probs):
        y, p, _ = dj.moe_permute_with_probs(x, probs, m, zero_prob_is_padding=True)
        return (y**2).sum() + (p * jnp.arange(80)).sum()

    dx, dprobs = jax.grad(loss, (0, 1))(X, probs)
    tools.same(dx, oracle.unpermute(2 * np.asarray(padded), want))
    tools.same(dprobs, oracle.gather_probs(np.arange(80, dtype=np.float32), want))
    tools.same(jax.grad(loss)(X, probs), dx)


# --- padding ---


def test_counts_on_the_host_make_the_rows_that_they_say():
    counts, align = MASK.sum(0), 8
    rows = int((-(-counts // align) * align).sum())
    whole = dj.moe_permute_and_pad_with_probs(X, PROBS, MASK, None, align)
    want = (whole[0][:rows], whole[1][:rows], *whole[2:])
    for given in (counts, counts.tolist(), tuple(counts.tolist())):
        tools.same_tree(dj.moe_permute_and_pad_with_probs(X, PROBS, MASK, given, align), want)
    on_device = dj.moe_permute_and_pad_with_probs(X, PROBS, MASK, jnp.asarray(counts, jnp.int32), align)
    tools.same_tree(on_device, whole)


def test_padding():
    align = 8
    counts = MASK.sum(0)
    targets = -(-counts // align) * align
    run = jax.jit(lambda x, p, m: dj.moe_permute_and_pad_with_probs(x, p, m, align_size=align, num_out_tokens=120))
    moved, permuted, row_id_map, pad_offsets, target = run(X, PROBS, MASK)
    want = oracle.row_map(MASK, E, 120, align)
    assert pad_offsets is None and target.tolist() == targets.tolist() and target.dtype == jnp.int32
    tools.same(moved, oracle.permute(X, want))
    tools.same(permuted, oracle.permute_probs(PROBS, want))
    tools.same(row_id_map, want.row_id_map)
    back = dj.moe_unpermute(moved, row_id_map, pad_offsets=pad_offsets)
    tools.same(back, oracle.unpermute(np.asarray(moved), want))
    for given in (counts, counts.tolist(), counts.astype(np.int32), jnp.asarray(counts, jnp.int32)):
        again = dj.moe_permute_and_pad_with_probs(X, PROBS, MASK, given, align, num_out_tokens=120)
        tools.same_tree(again, (moved, permuted, row_id_map, None, target))
    # A map that is not padded, with TransformerEngine's pad_offsets beside it
    plain = oracle.row_map(MASK, E, 120)
    pad = targets - counts
    offsets = np.cumsum(pad) - pad
    y, pull = jax.vjp(lambda x, p: dj.moe_unpermute(x, row_id_map, p), moved, PROBS)
    for given in (offsets, offsets.tolist(), jnp.asarray(offsets, jnp.int32)):
        z, other = jax.vjp(lambda x, p, g=given: dj.moe_unpermute(x, plain.row_id_map, p, pad_offsets=g), moved, PROBS)
        tools.same(z, y)
        tools.same_tree(other(y), pull(y))


def test_counts_that_lie():
    """Regions lie where the counts say, and of rows that meet the last one stays."""
    rows, align = 60, 8
    for counts in ([0, 0, 0, 0, 0], [9, 1, 30, 2, 5], [100, 3, 3, 3, 3]):
        counts = np.array(counts)
        target = -(-counts // align) * align
        pad = target - counts
        to = oracle.row_map(MASK, E, T * E).row_id_map.astype(np.int64)
        to = np.where(to >= 0, to + np.cumsum(pad) - pad, -1)
        to[to >= rows] = -1
        row_source = np.full(rows, -1)
        row_source[to.reshape(-1)[to.reshape(-1) >= 0]] = np.flatnonzero(to.reshape(-1) >= 0)
        moved, _, row_id_map, _, got = dj.moe_permute_and_pad_with_probs(
            X, PROBS, MASK, counts, align, num_out_tokens=rows
        )
        tools.same(row_id_map, to.astype(np.int32))
        tools.same(moved, np.where(row_source[:, None] >= 0, X[row_source // E], np.float32(0)))
        assert np.array_equal(got, np.diff(np.minimum(np.cumsum([0, *target]), rows)))
    for counts in ([2**31 - 1] * 4 + [-(2**31)], [-9, 2**31 - 1, 0, 5, -1]):
        _, _, row_id_map, _, target = dj.moe_permute_and_pad_with_probs(
            X, PROBS, MASK, jnp.asarray(counts, jnp.int32), 16, num_out_tokens=rows
        )
        assert (np.asarray(row_id_map) < rows).all() and 0 <= np.asarray(target).sum() <= rows


def test_offsets_that_leave_the_rows():
    rows = 40
    to = np.array([[0, 39, -1], [2**31 - 1, 5, 3]], np.int32)
    for offsets in ([0, 1, 5], [39, -39, 9], [2**31 - 1, -(2**31), 2**31 - 1], [-1, -5, -3]):
        want = to.astype(np.int64) + offsets
        want = np.where((to >= 0) & (want >= 0) & (want < rows), want, -1)
        got = jax.jit(permute_op.shifted, static_argnums=2)(to, jnp.asarray(offsets, jnp.int32), rows)
        assert np.array_equal(got, want), offsets


# --- chunks ---


def test_chunks(device):
    for sizes, order in (([3, 0, 30, 4], [3, 1, 0, 2]), ([-4, 6, 2**31 - 1, 4], [2, 2, 9, 0]), ([2, 3], [1, -1])):
        to, row_source = oracle.chunk_map(np.array(sizes, np.int32), np.array(order, np.int32), T)
        want = oracle.Map(to, row_source, *2 * (np.zeros(1, np.int32),))
        for dtype in (np.int32, np.int64):
            given = np.array(sizes, dtype), np.array(order, dtype)
            for shape in ((T,), (T, 1)):
                probs = PROBS[:, 0].reshape(shape)
                out, permuted = dj.moe_sort_chunks_by_index_with_probs(X.reshape(1, T, H), probs, *given)
                tools.same(out, oracle.permute(X, want))
                tools.same(permuted, oracle.permute_probs(PROBS[:, :1], want))
            tools.same(jax.jit(dj.moe_sort_chunks_by_index)(X, *map(jnp.asarray, given)), out)
        dy = jnp.asarray(draw("chunks", (T, H), "float32"))
        _, pull = jax.vjp(lambda x, g=given: dj.moe_sort_chunks_by_index(x, *g), X)
        tools.same(pull(dy)[0], oracle.unpermute(np.asarray(dy), want))
    out = dj.moe_sort_chunks_by_index(X, [7, 30], (1, 0))
    tools.same(out, np.concatenate([X[7:], X[:7]]))


# --- gradients ---


def dense(x, probs, routing, rows):
    """Both functions as products with matrices of zeros and ones, which JAX differentiates."""
    m = oracle.row_map(routing, E, rows)
    to = np.zeros((rows, *m.row_id_map.shape))
    t, s = np.nonzero(m.row_id_map >= 0)
    to[m.row_id_map[t, s], t, s] = 1
    permuted = jnp.einsum("rts,ts->r", to, probs)
    moved = jnp.einsum("rts,th->rh", to, x)
    return jnp.einsum("rts,rh,ts->th", to, jnp.sin(moved) * permuted[:, None], probs), moved, permuted


@pytest.mark.parametrize(("rows", "carry"), [(T * K, "row_id_map"), (T * K + 7, "RowMap"), (T, "row_id_map")], ids=str)
def test_gradients_in_float64(rows, carry):
    with x64("float64"):
        x, probs = X.astype(np.float64), PROBS.astype(np.float64)

        def loss(x, probs):
            m = dj.moe_map(MASK, num_out_tokens=rows)
            moved, permuted, row_id_map = dj.moe_permute_with_probs(x, probs, m)
            held = m if carry == "RowMap" else row_id_map
            y = dj.moe_unpermute(jnp.sin(moved) * permuted[:, None], held, probs)
            return (jnp.cos(y).sum() + (moved**3).sum() + jnp.tan(permuted).sum()) / T

        def want(x, probs):
            y, moved, permuted = dense(x, probs, MASK, rows)
            return (jnp.cos(y).sum() + (moved**3).sum() + jnp.tan(permuted).sum()) / T

        value, got = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, probs)
        expected, grads = jax.jit(jax.value_and_grad(want, (0, 1)))(x, probs)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for g, w in zip(got, grads, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_have_the_oracles_bits(dtype, device):
    if device == "cuda" and dtype == "float64":
        pytest.skip("float64 rows are summed on the CPU alone")
    rows = T * K - 9
    want = oracle.row_map(IDS, E, rows)
    x, dy, probs = draw("x", (rows, H), dtype), draw("dy", (T, H), dtype), draw("probs", (T, K), dtype)
    tokens, dmoved, dpermuted = (
        draw("t", (T, H), dtype), draw("dm", (rows, H), dtype), draw("dp", (rows,), "float32"),
    )  # fmt: skip
    moving = np.take_along_axis(PROBS, IDS, 1)

    def permuted(tokens, moving):
        return dj.moe_permute_with_probs(tokens, moving, dj.moe_map(IDS, E, map_type="index", num_out_tokens=rows))[:2]

    with x64(dtype):
        for wrap in (lambda f: f, jax.jit):
            _, pull = jax.vjp(wrap(lambda x, p: dj.moe_unpermute(x, want.row_id_map, p)), x, probs)
            dx, dprobs = pull(jnp.asarray(dy))
            tools.same(dx, oracle.unpermute_dx(dy, want, probs))
            exact, allowed = oracle.unpermute_dprobs(dy, x, want)
            allowed += (np.abs(exact) + allowed) * float(jnp.finfo(dprobs.dtype).eps)
            assert (
                dprobs.dtype == probs.dtype and (np.abs(np.asarray(dprobs).astype(np.float64) - exact) <= allowed).all()
            )
            _, alone = jax.vjp(wrap(lambda x: dj.moe_unpermute(x, want.row_id_map, map_type="index")), x)
            tools.same(alone(jnp.asarray(dy))[0], oracle.permute(dy, want))
            _, pull = jax.vjp(wrap(permuted), tokens, moving)
            dtokens, dmoving = pull((jnp.asarray(dmoved), jnp.asarray(dpermuted)))
            tools.same(dtokens, oracle.unpermute(dmoved, want))
            tools.same(dmoving, oracle.gather_probs(dpermuted, want))


def test_what_nobody_differentiates_is_neither_kept_nor_computed():
    m = dj.moe_map(MASK)

    def both(x, probs):
        moved, permuted, row_id_map = dj.moe_permute_with_probs(x, probs, MASK)
        return dj.moe_unpermute(moved, row_id_map, probs), permuted

    def ops(f, *args):
        jaxpr = jax.make_jaxpr(f)(*args).jaxpr
        names = ("permute", "unpermute", "unpermute_grad", "invert_map")
        return {name: len(tools.eqns(jaxpr, f"diptych_{name}")) for name in names}

    for of, counts in ((lambda x, p: both(x, p)[1].sum(), (1, 2, 0, 0)), (lambda x, p: both(x, p)[0].sum(), None)):
        got = ops(jax.grad(of, 1), X, PROBS)
        assert counts is None or tuple(got.values()) == counts, got
        (eqn,) = tools.eqns(jax.make_jaxpr(jax.grad(of))(X, PROBS).jaxpr, "diptych_unpermute_grad") or [None]
        assert eqn is None or not eqn.params["has_dprobs"]
    unpermuted = jax.grad(lambda x, m: dj.moe_unpermute(x, m).sum())
    rows = np.ones((T * E, H), np.float32)
    assert ops(unpermuted, rows, m) == {"permute": 1, "unpermute": 1, "unpermute_grad": 0, "invert_map": 0}
    assert ops(unpermuted, rows, m.row_id_map)["invert_map"] == 1
    _, pull = jax.vjp(lambda x: dj.moe_unpermute(x, m, PROBS), rows)
    assert all(leaf.shape != rows.shape for leaf in jax.tree.leaves(pull))


def test_higher_derivatives_and_forward_mode_are_refused():
    def loss(x, p):
        moved, permuted, row_id_map = dj.moe_permute_with_probs(x, p, MASK)
        return (dj.moe_unpermute(moved * permuted[:, None], row_id_map, p) ** 2).sum()

    twice = (
        jax.grad(lambda x: jax.grad(loss)(x, PROBS).sum()),
        lambda x: jax.jvp(jax.grad(lambda x: loss(x, PROBS)), (x,), (x,)),
        jax.hessian(lambda x: loss(x, PROBS)),
        jax.grad(lambda x: jax.grad(lambda x: (dj.moe_sort_chunks_by_index(x, [7, 30], [1, 0]) ** 2).sum())(x).sum()),
    )
    for f in twice:
        for wrap in (lambda f: f, jax.jit):
            with pytest.raises(UnsupportedError, match=r"diptych_\w+ has no derivative: .* first derivatives"):
                wrap(f)(X)
    for f in (lambda x: loss(x, PROBS), lambda x: dj.moe_permute(x, MASK)[0]):
        with pytest.raises(TypeError, match="jvp"):
            jax.jvp(f, (X,), (X,))
