"""Activations of cut tensors."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from diptych.jax.primitives import activation as activation_ops
from jax_frontend import meshes, tools


@meshes.AXES
@pytest.mark.parametrize(("which", "gated", "spec"), [("gelu", False, P("d", None, "t")), ("silu", True, P("d", "t"))])
def test_every_dimension_is_cut_but_that_of_both_halves(which, gated, spec, kind):
    x = tools.normal("x", (8, 4, 64))
    dy = tools.normal("dy", (8, 4, 32 if gated else 64))

    def f(x, dy):
        return activation_ops.activation(x, which, gated), activation_ops.activation_grad(dy, x, which, gated)

    got, collectives = meshes.run(f, kind, (spec, spec), x, dy)
    meshes.same(got, f(x, dy))
    assert not collectives and got[1].sharding.spec[: len(spec)] == tuple(spec)
