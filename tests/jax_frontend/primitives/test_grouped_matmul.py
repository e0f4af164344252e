"""Products of groups in high precision, for any position of groups, any offsets, and any values in no group."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from diptych.common import ShapeError
from diptych.jax.primitives.grouped_matmul import TILE, grouped_matmul
from jax_frontend import tools
from jax_frontend.grouped_layers import GROUPS

pytestmark = pytest.mark.sampled

K, N = 24, 16


@jax.jit
def products(a, w, bias, dy, offsets):
    return {
        "rows": grouped_matmul(a, w, offsets, bias),
        "rows, no bias": grouped_matmul(a, w, offsets),
        "turned": grouped_matmul(dy, w, offsets, trans_b=False),
        "depth": grouped_matmul(dy, a, offsets, depth=True),
    }


def loop(a, w, bias, dy, at):
    a, w, bias, dy = (np.asarray(v, np.float64) for v in (a, w, bias, dy))
    out = {
        "rows": np.zeros((len(a), w.shape[1])), "rows, no bias": np.zeros((len(a), w.shape[1])),
        "turned": np.zeros((len(a), w.shape[2])), "depth": np.zeros(w.shape),
    }  # fmt: skip
    for g, (i, j) in enumerate(itertools.pairwise(at)):
        out["rows, no bias"][i:j] = a[i:j] @ w[g].T
        out["rows"][i:j] = a[i:j] @ w[g].T + bias[g]
        out["turned"][i:j] = dy[i:j] @ w[g]
        out["depth"][g] = dy[i:j].T @ a[i:j]
    return out


def drawn(rows, groups, dtype):
    shapes = {"a": (rows, K), "w": (groups, N, K), "bias": (groups, N), "dy": (rows, N)}
    return [tools.normal(f"grouped-matmul-{name}", shape, dtype) for name, shape in shapes.items()]


def check(arrays, offsets, at, dtype):
    got, want = products(*arrays, jnp.asarray(offsets, jnp.int32)), loop(*arrays, at)
    for name, value in want.items():
        assert got[name].dtype == jnp.dtype(dtype), name
        mine = np.asarray(got[name], np.float64)
        assert not mine[value == 0].any(), name
        error = np.linalg.norm(mine - value)
        assert error <= (1e-5 if dtype == "float32" else 1e-2) * np.linalg.norm(value), (name, at)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_every_group_has_its_product(dtype):
    for rows, at, _ in GROUPS.values() if dtype == "float32" else [GROUPS["unaligned"]]:
        check(drawn(rows, 4, dtype), at, at, dtype)


def test_any_sizes():
    rng = cases.rng_for("grouped-matmul-sizes")
    for groups, rows in ((1, 2 * TILE), (3, TILE - 1), (40, 3 * TILE + 5), (7, 0)):
        at = np.sort(rng.integers(0, rows + 1, groups + 1))
        check(drawn(rows, groups, "float32"), at, at, "float32")
    a, w, bias, dy = drawn(5, 0, "float32")
    made = products(a, w, bias, dy, jnp.zeros(1, jnp.int32))
    assert made["rows"].shape == (5, N) and made["depth"].shape == (0, N, K) and not made["rows"].any()


def test_offsets_that_lie():
    """Each counts as at least the one before it and at most R."""
    for offsets in ((5, 3, 200, 10, 20), (-4, 20, 70, 60, 79), (2**31 - 1, -(2**31), 0, 0, 5), (0, 300, 0, 300, 0)):
        at = np.maximum.accumulate(np.clip(offsets, 0, 80))
        check(drawn(80, 4, "float32"), offsets, at, "float32")


def test_nothing_leaks_between_groups():
    """Rows in no group, and weights that are not finite, change nothing elsewhere."""
    a, w, bias, dy = drawn(80, 4, "float32")
    offsets = jnp.asarray((3, 8, 8, 41, 75), jnp.int32)
    want = products(a, w, bias, dy, offsets)
    outside = np.ones(80, bool)
    outside[3:75] = False
    spoiled = [jnp.where(outside[:, None], bad, v) for v, bad in ((a, jnp.nan), (dy, jnp.inf))]
    tools.same_tree(products(spoiled[0], w, bias, spoiled[1], offsets), want)
    got = products(a, w.at[2].set(jnp.inf), bias, dy, offsets)
    elsewhere = np.r_[0:8, 41:80]
    for name in ("rows", "turned"):
        tools.same(got[name][elsewhere], want[name][elsewhere], name)
        assert not np.isfinite(got[name][8:41]).any()


def test_nothing_waits_for_the_offsets():
    """No host is asked, and loops have lengths that are known."""
    a, w, bias, dy = drawn(300, 4, "float32")
    text = str(jax.make_jaxpr(products)(a, w, bias, dy, jnp.zeros(5, jnp.int32)))
    assert "callback" not in text and "while[" not in text and text.count(f"length={300 // TILE + 4}") >= 1


def test_bad_shapes():
    a, w, _, dy = drawn(80, 4, "float32")
    offsets = jnp.zeros(5, jnp.int32)
    for bad in (
        lambda: grouped_matmul(a, w, offsets[:4]),
        lambda: grouped_matmul(a, w, offsets, trans_b=False),
        lambda: grouped_matmul(a, w[0], offsets),
        lambda: grouped_matmul(a, dy[:5], offsets, depth=True),
    ):
        with pytest.raises(ShapeError, match=r"do not fit, in [34] groups"):
            bad()
