"""Norms of cut rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from diptych.common.ops.norm import NormOptions
from diptych.jax.primitives import norm as norm_ops
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled


@meshes.AXES
@pytest.mark.parametrize("which", ["layernorm", "rmsnorm"])
def test_forward_and_backward(which, kind):
    x, dy = tools.normal("x", (64, 3, 32), "bfloat16"), tools.normal("dy", (64, 3, 32), "bfloat16")
    gamma, options = tools.normal("gamma", (32,)), NormOptions(which, 1e-5, False)
    beta = gamma + 1 if which == "layernorm" else None

    def f(x, dy, gamma):
        stats, y = norm_ops.norm(x, gamma, beta, options)
        dx, dgamma, dbeta = norm_ops.norm_grad(dy, x, gamma, stats, options, beta is not None)
        return (stats, y, dx), (dgamma, dbeta)

    (got, sums), collectives = meshes.run(f, kind, (P("d"), P("d"), P("d")), x, dy, gamma)
    want, _ = f(x, dy, gamma)
    meshes.same(got, want)
    parts = [f(*(jnp.split(v, 4)[i] for v in (x, dy)), gamma)[1] for i in range(4)]
    meshes.same(sums, jax.tree.map(lambda *p: p[0] + p[1] + p[2] + p[3], *parts))
    assert collectives.pop("all-gather") == 1 and set(collectives) == {"all-reduce"}  # of gamma


def test_cut_columns_are_gathered_or_refused():
    x, options = tools.normal("x", (64, 32)), NormOptions("rmsnorm", 1e-5, False)

    def f(x):
        return norm_ops.statistics(x, options)

    meshes.same(meshes.run(f, AxisType.Auto, (P(None, "d"),), x)[0], f(x))
    with pytest.raises(meshes.REFUSED, match="norm: dimension 1 of operand 0 is cut"):
        meshes.run(f, AxisType.Explicit, (P(None, "d"),), x)
