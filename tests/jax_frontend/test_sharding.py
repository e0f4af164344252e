"""Inside shard_map on two CPU devices: local quantization, reduced amax, gradient types."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common import RECIPES
from jax_frontend import tools

RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@pytest.fixture
def mesh():
    devices = jax.devices("cpu")
    assert len(devices) >= 2, "a backend started before conftest.py asked for two CPU devices"
    return jax.sharding.Mesh(np.asarray(devices[:2]), ("i",))


@RECIPE
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_data_parallel_gradients_are_summed_over_the_mesh(mesh, recipe, wrap):
    x, dy = tools.normal("x", (2, 8, 32)), tools.normal("dy", (2, 8, 16))
    kernel, bias = tools.normal("kernel", (16, 32)), tools.normal("bias", (16,))

    def local(x, kernel, bias, dy):
        return (dj.dense(x, kernel, bias, recipe=recipe) * dy).sum()

    grad = jax.grad(local, (0, 1, 2))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("i"), P(), P(), P("i")), out_specs=(P("i"), P(), P()))
    def sharded(x, kernel, bias, dy):
        return grad(x, kernel, bias, dy)

    dx, dkernel, dbias = wrap(sharded)(x, kernel, bias, dy)
    parts = [grad(x[i : i + 1], kernel, bias, dy[i : i + 1]) for i in range(2)]
    tools.same(dx, jnp.concatenate([p[0] for p in parts]))
    tools.same(dkernel, parts[0][1] + parts[1][1])
    tools.same(dbias, parts[0][2] + parts[1][2])


@RECIPE
def test_tensor_parallel_gradients_are_summed_over_the_mesh(mesh, recipe):
    """The kernel's rows are split, x is everywhere: dx is the sum of both halves."""
    x, kernel, dy = tools.normal("x", (8, 32)), tools.normal("kernel", (16, 32)), tools.normal("dy", (8, 16))

    def local(x, kernel, dy):
        return (dj.dense(x, kernel, recipe=recipe) * dy).sum()

    f = jax.shard_map(jax.grad(local, (0, 1)), mesh=mesh, in_specs=(P(), P("i"), P(None, "i")), out_specs=(P(), P("i")))
    dx, dkernel = jax.jit(f)(x, kernel, dy)
    parts = [jax.grad(local, (0, 1))(x, kernel[s], dy[:, s]) for s in (slice(0, 8), slice(8, 16))]
    tools.same(dx, parts[0][0] + parts[1][0])
    tools.same(dkernel, jnp.concatenate([p[1] for p in parts]))


def test_no_gather_and_local_shapes_inside_shard_map(mesh):
    f = jax.shard_map(
        lambda x, k: dj.dense(x, k, recipe=dj.MXFP8BlockScaling()), mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")
    )
    args = (jnp.ones((8, 32)), jnp.ones((16, 32)))
    shardings = (NamedSharding(mesh, P("i")), NamedSharding(mesh, P()))
    text = jax.jit(f, in_shardings=shardings).lower(*args).compile().as_text()
    assert "all-gather" not in text and "u8[4,32]" in text


def test_without_check_vma(mesh):
    f = jax.shard_map(
        lambda x: dj.dequantize(dj.quantize(x, tools.quantizer("fp8_e4m3_tensor"))),
        mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False,
    )  # fmt: skip
    x = tools.normal("x", (8, 32))
    want = [dj.dequantize(dj.quantize(v, tools.quantizer("fp8_e4m3_tensor"))) for v in (x[:4], x[4:])]
    tools.same(jax.jit(f)(x), jnp.concatenate(want))


def test_vmap_and_scan_inside_shard_map(mesh):
    recipe, kernel, x = dj.Float8CurrentScaling(), tools.normal("kernel", (32, 32)), tools.normal("x", (4, 3, 8, 32))

    def local(x):
        def body(h, _):
            return jax.vmap(jax.vmap(lambda v: dj.dense(v, kernel, recipe=recipe)))(h), None

        return jax.lax.scan(body, x, None, length=2)[0]

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    tools.same(got, jnp.concatenate([local(x[:2]), local(x[2:])]))
