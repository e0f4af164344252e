"""How calls are partitioned, and which are not: transformations, manual axes, exported programs, GSPMD."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common.errors import ShapeError, UnsupportedError
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

RECIPE = dj.Float8CurrentScaling()
X, KERNEL = tools.normal("x", (256, 64)), tools.normal("kernel", (64, 64))


def dense(x, kernel=KERNEL):
    return dj.dense(x, kernel, recipe=RECIPE)


def test_results_on_explicit_axes_are_typed():
    with meshes.mesh_of(AxisType.Explicit) as mesh:
        x = jax.device_put(X, NamedSharding(mesh, P("d", "t")))
        typed = jax.eval_shape(lambda x: dj.quantize(x, tools.quantizer("mxfp8_e4m3")), x)
    assert typed.rowwise_data.sharding.spec == P("d", "t")
    assert typed.columnwise_scale_inv.sharding.spec == P("d", "t")


def test_explicit_axes_refuse_while_tracing():
    with meshes.mesh_of(AxisType.Explicit) as mesh:
        x = jax.device_put(X[:60], NamedSharding(mesh, P("d")))
        with pytest.raises(ShapeError, match=r"\('d',\) cut 60 rows into 4 shards.*whole blocks of 32"):
            jax.eval_shape(lambda x: dj.quantize(x, tools.quantizer("mxfp8_e4m3")), x)


@meshes.AXES
def test_eager_calls(kind):
    with meshes.mesh_of(kind) as mesh:
        y = dense(jax.device_put(X, NamedSharding(mesh, P("d"))))
    meshes.same(y, dense(X))
    assert y.sharding.spec[0] == "d"


@meshes.AXES
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P("t", "d")], ids=["examples", "rows", "both"])
def test_vmap(spec, kind):
    """Each example has its own amax, whose maximum is over that example's shards."""
    x = tools.normal("x", (8, 64, 64)) * jnp.logspace(0, 2, 8)[:, None, None]
    got, collectives = meshes.run(jax.vmap(dense), kind, (spec,), x)
    meshes.same(got, jax.vmap(dense)(x))
    assert set(collectives) <= {"all-reduce"} and bool(collectives) == (spec != P("d"))


def test_vmap_with_an_axis_of_the_mesh():
    x = tools.normal("x", (8, 32, 64))
    got, collectives = meshes.run(jax.vmap(dense, spmd_axis_name="d"), AxisType.Auto, (P("d"),), x)
    meshes.same(got, jax.vmap(dense)(x))
    assert not collectives


@meshes.AXES
def test_scan_and_remat(kind):
    kernels = jnp.stack([KERNEL] * 3)

    def loss(x, kernels):
        return jnp.square(jax.lax.scan(jax.checkpoint(lambda h, k: (dense(h, k), None)), x, kernels)[0]).sum()

    (dx, dkernels), collectives = meshes.run(jax.grad(loss, (0, 1)), kind, (P("d"), P()), X, kernels)
    want, of_kernels = jax.jit(jax.grad(loss, (0, 1)))(X, kernels)
    meshes.same(dx, want)
    assert jnp.abs(dkernels - of_kernels).max() <= 1e-5 * jnp.abs(of_kernels).max()  # added in another order
    assert set(collectives) == {"all-reduce"}


@meshes.AXES
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("manual", [{"d"}, {"d", "t"}], ids=["one", "all"])
def test_manual_axes(manual, check_vma, kind):
    """A shard is a tensor of its own. Where other axes remain, XLA gathers what they cut."""
    with meshes.mesh_of(kind) as mesh:
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        kernel = jax.device_put(KERNEL, NamedSharding(mesh, P() if "t" in manual else P("t")))
        f = jax.shard_map(
            dense, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), axis_names=manual, check_vma=check_vma
        )
        got = jax.jit(f)(x, kernel)
    meshes.same(got, jnp.concatenate([dense(part) for part in jnp.split(X, 4)]))


def test_exported_programs_are_not_partitioned():
    from jax import export  # not part of `import jax`

    with meshes.mesh_of(AxisType.Auto) as mesh:
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        exported = export.export(jax.jit(dense), disabled_checks=dj.export_safety_checks())(x)
        meshes.same(jax.jit(exported.call)(x), dense(X))


def test_gspmd_is_refused():
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(UnsupportedError, match="Shardy"):
            meshes.run(dense, AxisType.Auto, (P("d"),), X)
        meshes.same(jax.jit(dense)(X), dense(X))  # on one device
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
