"""Inside shard_map on two CPU devices: local quantization, reduced amax, gradient types."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
import oracle
from diptych.common.quantizers import ROW_AMAX
from diptych.jax.functional.amax_group import max_over
from diptych.jax.primitives import quantize as quantize_ops
from jax_frontend import tools

pytestmark = pytest.mark.sampled

RECIPE = pytest.mark.parametrize("recipe", named(tools.PLAIN_RECIPES, ("fp8-current", "mxfp8", "nvfp4 to nearest")))
# Formats with an amax of the tensor, whose calls may reduce it over a mesh axis.
GROUPED = {k: v for k, v in tools.KINDS.items() if k.endswith("_tensor") or v.quantizer.format.two_level}


@RECIPE
@tools.WRAP
def test_data_parallel_gradients_are_summed_over_the_mesh(mesh, recipe, wrap):
    x, dy = tools.normal("x", (2, 16, 32)), tools.normal("dy", (2, 16, 16))
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
    x, kernel, dy = tools.normal("x", (16, 32)), tools.normal("kernel", (32, 32)), tools.normal("dy", (16, 32))

    def local(x, kernel, dy):
        return (dj.dense(x, kernel, recipe=recipe) * dy).sum()

    f = jax.shard_map(jax.grad(local, (0, 1)), mesh=mesh, in_specs=(P(), P("i"), P(None, "i")), out_specs=(P(), P("i")))
    dx, dkernel = jax.jit(f)(x, kernel, dy)
    parts = [jax.grad(local, (0, 1))(x, kernel[s], dy[:, s]) for s in (slice(0, 16), slice(16, 32))]
    tools.same(dx, parts[0][0] + parts[1][0])
    tools.same(dkernel, jnp.concatenate([p[1] for p in parts]))


@pytest.mark.parametrize("layer", ["dense", "layernorm_dense", "layernorm_mlp"])
def test_what_kernels_that_are_held_quantized_get_is_summed_over_the_mesh(mesh, layer):
    """The kernel's rows are split, and nothing else is: gradients of what all share are those of both halves."""
    recipe = dj.MXFP8BlockScaling()
    args = [tools.normal("x", (16, 32)), tools.normal("gamma", (32,)), None, tools.normal("kernel", (64, 32)), None]
    args += [tools.normal("second", (16, 32)), None] if layer == "layernorm_mlp" else []
    (q,) = dj.quantize_params([args[3]], recipe, lambda *_: True)

    def local(x, gamma, q):
        given = (x, q) if layer == "dense" else (x, gamma, None, q, *args[4:])
        options = {} if layer == "dense" else {"normalization": "RMSNorm"}
        return getattr(dj, layer)(*given, recipe=recipe, **options).sum()

    f = jax.shard_map(jax.grad(local, (0, 1)), mesh=mesh, in_specs=(P(), P(), P("i")), out_specs=P())
    halves = [dj.quantize_params([args[3][s]], recipe, lambda *_: True)[0] for s in (slice(0, 32), slice(32, 64))]
    parts = [jax.grad(local, (0, 1))(*args[:2], half) for half in halves]
    tools.same_tree(jax.jit(f)(*args[:2], q), jax.tree.map(jnp.add, *parts))


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


@pytest.mark.parametrize("kind", named(GROUPED, tools.NOW))
@tools.WRAP
def test_amax_group_gives_the_bits_of_one_device(mesh, kind, wrap):
    """Rows are split over the mesh; the payloads of both halves are those of the whole tensor."""
    m, k = 2 * kind.shape[0], kind.shape[1]
    x = tools.normal("group", (m, k), kind.dtype) * jnp.where(jnp.arange(m) < m // 2, 1, 50)[:, None].astype(kind.dtype)
    state, quantizer = kind.state(), kind.quantizer
    whole = dj.quantize(x, quantizer, **state)
    specs = {"rowwise_data": P("i"), "columnwise_data": P(None, "i"), "amax": P(), "columnwise_amax": P()}
    specs |= {"rowwise_scale_inv": P("i"), "columnwise_scale_inv": P(None, "i")}
    if quantizer.format.one_scale:
        specs |= {"rowwise_scale_inv": P(), "columnwise_scale_inv": P()}  # typed as equal everywhere
    by_row = bool(quantizer.spec.flags & ROW_AMAX)
    if by_row:
        specs["amax"] = P("i")
    names = [n for n in tools.COPIES if getattr(whole, n) is not None]

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("i"), P()), out_specs={name: specs[name] for name in names}
    )
    def sharded(x, state):
        q = dj.quantize(x, quantizer, amax_group="i", **state)
        return {name: getattr(q, name) for name in names}

    got = wrap(sharded)(x, state)
    random = quantizer.needs_rng  # noise counts the elements of each device's own copy
    for name in names:
        if not (random and name.endswith("data")):
            tools.same(got[name], getattr(whole, name), name)
    if random:
        rows = (slice(0, m // 2), slice(m // 2, m))
        given = {"columnwise_amax": got["columnwise_amax"], **state}
        halves = [dj.quantize(x[r], quantizer, amax=got["amax"][r if by_row else ...], **given) for r in rows]
        tools.same(got["rowwise_data"], jnp.concatenate([h.rowwise_data for h in halves]))
        tools.same(got["columnwise_data"], jnp.concatenate([h.columnwise_data for h in halves], axis=1))


@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "nvfp4"])
def test_amax_group_in_all_its_forms(mesh, fmt):
    """Several axes, a quantizer of one's own, an axis of vmap, a tensor that is the same everywhere, subnormals."""
    quantizer, x = tools.quantizer(fmt), tools.normal("x", (2, 16, 32)) * jnp.asarray([1.0, 8.0])[:, None, None]
    want = dj.quantize(x.reshape(32, 32), quantizer)
    grid = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]).reshape(1, 2), ("j", "i"))
    shard = functools.partial(jax.shard_map, mesh=grid, in_specs=P(("j", "i")), out_specs=(P(("j", "i")), P()))

    class Own(type(quantizer)):
        def quantize_impl(self, x, quantize):
            return quantize(x, quantizer)

    def split(x, used):
        q = dj.quantize(x[0], used, amax_group=("j", "i"))
        return q.rowwise_data[None], q.amax

    for used in (quantizer, Own()):
        f = shard(functools.partial(split, used=used))
        data, amax = jax.jit(f)(x)
        tools.same(data.reshape(want.rowwise_data.shape), want.rowwise_data)
        tools.same(amax, want.amax)
    data = jax.vmap(lambda v: dj.quantize(v, quantizer, amax_group="i").rowwise_data, axis_name="i")(x)
    tools.same(data.reshape(want.rowwise_data.shape), want.rowwise_data)
    amax = functools.partial(jax.shard_map, lambda x: dj.quantize(x, quantizer, amax_group="i").amax, mesh=mesh)
    tools.same(jax.jit(amax(in_specs=P(), out_specs=P()))(x[1]), dj.amax(x[1]))
    tiny = np.full((32, 16), 1e-41, np.float32)
    tiny[20, 3] = 3e-41
    tools.same(jax.jit(amax(in_specs=P("i"), out_specs=P()))(tiny), oracle.amax(tiny))


def test_delayed_scaling_over_a_mesh(mesh):
    """Each device records its own amax; the update takes the largest, and all scales stay equal."""
    quantizer, x = dj.Float8Quantizer(), tools.normal("x", (2, 8, 32)) * jnp.asarray([1.0, 8.0])[:, None, None]
    scale, history = jnp.full(1, 2.0), jnp.asarray([0.5, 1.0, 2.0])

    def step(x, scale, history):
        copies, recorded = quantize_ops.quantize_delayed(x[0], quantizer, scale, history)
        history, scale = dj.scale_update(history, scale, reduced=max_over(recorded[:1], "i"))
        return copies["rowwise_data"][None], recorded[None], copies["rowwise_scale_inv"], history, scale

    f = jax.shard_map(step, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=(P("i"), P("i"), P(), P(), P()))
    data, recorded, scale_inv, *updated = jax.jit(f)(x, scale, history)
    data = np.asarray(data)  # JAX indexes an axis that is sharded by a sum, in which -0 becomes 0
    for i in range(2):
        copies, own = quantize_ops.quantize_delayed(x[i], quantizer, scale, history)
        tools.same_tree([data[i], recorded[i], scale_inv], [copies["rowwise_data"], own, copies["rowwise_scale_inv"]])
    tools.same_tree(tuple(updated), dj.scale_update(history, scale, reduced=recorded[:, 0].max(keepdims=True)))
