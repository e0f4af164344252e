"""Permutation gives the same results under vmap, scan, checkpoint, shard_map and export as without them."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common import ShapeError, UnsupportedError
from jax_frontend import tools
from jax_frontend.functional.test_permute import MASK, PROBS, E, H, K, T, X, x64

pytestmark = pytest.mark.sampled


def layer(x, probs, mask):
    """Computes a layer of operations that XLA rounds alike wherever they stand."""
    moved, permuted, row_id_map = dj.moe_permute_with_probs(x, probs, mask, T * K)
    return dj.moe_unpermute(jnp.maximum(moved, 0), row_id_map, probs), permuted


def loss(x, probs, mask):
    y, permuted = layer(x, probs, mask)
    return (y**2).sum() + (permuted**2).sum(), y


def step(x, probs, mask):
    """Output and gradients."""
    grads, y = jax.grad(loss, (0, 1), has_aux=True)(x, probs, mask)
    return y, grads


XS = np.stack([X, X * 2, X[::-1]])
PS = np.stack([PROBS, PROBS[::-1], PROBS * 3])
MS = np.stack([MASK, MASK[::-1], ~MASK])


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, None, 0)], ids=str)
def test_vmap(axes):
    given = [many if a == 0 else many[0] for many, a in zip((XS, PS, MS), axes, strict=True)]
    got = jax.jit(jax.vmap(step, axes))(*given)
    for i in range(3):
        one = step(*(g[i] if a == 0 else g for g, a in zip(given, axes, strict=True)))
        tools.same_tree(jax.tree.map(lambda v, i=i: v[i], got), one, i)


def test_nested_vmap_of_maps_and_chunks():
    def f(mask, order, x):
        m = dj.moe_map(mask, align_size=8)
        return m, dj.moe_sort_chunks_by_index(x, np.array([7, 30]), order), dj.moe_permute(x, m)[0]

    orders = np.array([[0, 1], [1, 0]], np.int32)
    got = jax.vmap(jax.vmap(f, (0, None, 0)), (None, 0, None))(MS, orders, XS)
    for i, j in itertools.product(range(2), range(3)):
        tools.same_tree(jax.tree.map(lambda v, i=i, j=j: v[i, j], got), f(MS[j], orders[i], XS[j]))
    assert jax.vmap(lambda m: dj.moe_map(m).row_source)(np.zeros((0, T, E), bool)).shape == (0, T * E)


@pytest.mark.parametrize("policy", [None, "everything_saveable", "nothing_saveable", "dots_saveable"])
def test_checkpoint(policy):
    rule = None if policy is None else getattr(jax.checkpoint_policies, policy)
    f = jax.checkpoint(loss, policy=rule)
    grads, y = jax.jit(jax.grad(f, (0, 1), has_aux=True))(X, PROBS, MASK)
    tools.same_tree((y, grads), step(X, PROBS, MASK))


def test_scan():
    def scanned(x):
        return (jax.lax.scan(lambda x, m: (layer(x, PROBS, m)[0], None), x, MS)[0] ** 2).sum()

    def looped(x):
        for m in MS:
            x, _ = layer(x, PROBS, m)
        return (x**2).sum()

    tools.same(jax.jit(jax.grad(scanned))(X), jax.jit(jax.grad(looped))(X))


@pytest.mark.parametrize("specs", [(P("i"), P("i"), P("i")), (P(), P("i"), P("i")), (P(), P(), P("i"))], ids=str)
def test_shard_map(specs):
    """Each shard has tokens of its own; gradients of what all shards share are summed."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("i",))

    def local(x, probs, mask):
        return step(x.reshape(T, H), probs.reshape(T, E), mask.reshape(T, E))

    given = [many[:2] if s == P("i") else many[:1] for many, s in zip((XS, PS, MS), specs, strict=True)]
    shared = [s == P() for s in specs[:2]]
    out = (P("i"), tuple(P() if s else P("i") for s in shared))
    y, grads = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out))(*given)
    parts = [step(*(g[i % len(g)] for g in given)) for i in range(2)]
    tools.same(y, jnp.concatenate([part[0] for part in parts]))
    for got, summed, a, b in zip(grads, shared, *(part[1] for part in parts), strict=True):
        if summed:
            np.testing.assert_allclose(got, a + b, rtol=1e-6, atol=1e-6)
        else:
            tools.same(got, jnp.concatenate([a, b]))


def test_export_with_symbolic_sizes():
    (t,) = export.symbolic_shape("t")
    f = jax.jit(lambda x, p, m: (dj.moe_permute_and_pad_with_probs(x, p, m), layer_of(x, p, m)))

    def layer_of(x, p, m):
        moved, _, row_id_map = dj.moe_permute_with_probs(x, p, m)
        return dj.moe_unpermute(moved, row_id_map, p)

    args = [jax.ShapeDtypeStruct((t, n), d) for n, d in ((H, "float32"), (E, "float32"), (E, "bool"))]
    exporting = functools.partial(export.export, f, disabled_checks=dj.export_safety_checks())
    exported = exporting(platforms=["cpu"])(*args)
    tools.same_tree(exported.call(X, PROBS, MASK), f(X, PROBS, MASK))
    with pytest.raises(UnsupportedError, match="permute_map: symbolic sizes"):
        exporting(platforms=["cuda"])(*args)
    with pytest.raises(ShapeError, match=r"num_experts|has \d+ experts"):
        jax.eval_shape(lambda m: dj.moe_map(m, 3), args[2])


def test_float64_rows_are_refused_for_cuda():
    with x64("float64"):
        f = jax.jit(lambda x, m: dj.moe_unpermute(x, m))
        args = np.ones((4, 8)), np.zeros((4, 1), np.int32)
        with pytest.raises(UnsupportedError, match="float64 rows are summed on the CPU alone"):
            f.trace(*args).lower(lowering_platforms=("cuda",))
