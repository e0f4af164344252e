"""Layers under jit with sharded arguments: one device's bits, shard_map's sums, plain JAX's collectives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import linear_plan
from jax_frontend import fused_layers, meshes, tools

pytestmark = pytest.mark.sampled

RECIPES = tools.PLAIN_RECIPES | {
    "nvfp4 rotated": dj.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4": dj.NVFP4BlockScaling(),
    "square": dj.Float8BlockScaling(wgrad_input_square=True),
}
NOW = ("fp8-current", "fp8-block", "square", "mxfp8", "nvfp4")
RECIPE = pytest.mark.parametrize("recipe", named(RECIPES, NOW))
ARGS = (
    tools.normal("x", (512, 512), "bfloat16"),
    tools.normal("kernel", (512, 512)) / 16,
    tools.normal("bias", (512,)),
    tools.normal("dy", (512, 512), "bfloat16"),
)
# Specs of x, kernel, bias and dy, and which of y, dx, dkernel and dbias have the bits of one device: those whose sum
# is not cut.
LAYOUTS = {
    "data": ((P("d"), P(), P(), P("d")), "y dx"),
    "columns": ((P(), P("t"), P("t"), P(None, "t")), "y dkernel dbias"),
    "rows": ((P(None, "t"), P(None, "t"), P(), P()), "dx dkernel dbias"),
    "data and columns": ((P("d"), P("t"), P("t"), P("d", "t")), "y"),
    "data and rows": ((P("d", "t"), P(None, "t"), P(), P("d")), "dx"),
    "gathered weights": ((P("d"), P("d"), P("d"), P("d")), "y dx"),
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def random_state(recipe):
    """The argument `rng` of a layer whose recipe rounds stochastically."""
    return {"rng": dj.rng_state(2**40 + 3, 2**33)} if recipe and linear_plan(recipe).needs_rng else {}


def training_step(recipe):
    def f(x, kernel, bias, dy):
        y, vjp = jax.vjp(lambda *args: dj.dense(*args, recipe=recipe, **random_state(recipe)), x, kernel, bias)
        return dict(zip(("y", "dx", "dkernel", "dbias"), (y, *vjp(dy)), strict=True))

    return f


@meshes.AXES
@LAYOUT
@RECIPE
def test_dense(recipe, layout, kind):
    specs, exact = LAYOUTS[layout]
    f = training_step(recipe)
    got, collectives = meshes.run(f, kind, specs, *ARGS)
    want = jax.jit(f)(*ARGS)
    for name, w in want.items():
        if name in exact.split():
            meshes.same(got[name], w, name)
        else:  # added in parts that are rounded to the result's dtype
            a, b = (np.asarray(v).astype(np.float32) for v in (got[name], w))
            bound = 1e-5 if w.dtype == np.float32 else 2.0**-7
            assert np.abs(a - b).max() <= bound * np.abs(b).max(), name
    if layout != "gathered weights":
        amaxes = 0 if recipe.quantizer(dj.QuantizerRole(tensor="input")).format.rule == "e8m0_ceil" else 8
        _, plain = meshes.run(training_step(None), AxisType.Auto, specs, *ARGS)
        cut = {} if layout == "data" else meshes.WHOLE_SUM  # of y or dx, in bfloat16
        reduced = collectives.pop("all-reduce", 0)
        assert collectives == cut
        assert reduced + bool(cut) <= plain.get("all-reduce", 0) + amaxes


@meshes.AXES
@pytest.mark.parametrize("recipe", [dj.Float8CurrentScaling(), dj.NVFP4BlockScaling(disable_stochastic_rounding=True)])
def test_data_parallel_sums_are_those_of_shard_map(recipe, kind):
    """In which the recipe names the axis whose shards have one scale."""
    specs = LAYOUTS["data"][0]
    got, _ = meshes.run(training_step(recipe), kind, specs, *ARGS)
    grouped = training_step(dataclasses.replace(recipe, amax_group="d"))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:4]), ("d",))
    out = {"y": P("d"), "dx": P("d"), "dkernel": P(), "dbias": P()}
    want = jax.jit(jax.shard_map(grouped, mesh=mesh, in_specs=specs, out_specs=out))(*ARGS)
    meshes.same(got, want)


@meshes.AXES
@LAYOUT
@pytest.mark.parametrize("recipe", [None, fused_layers.EVERY["mixed"]], ids=["none", "mixed"])
def test_products_in_high_precision(recipe, layout, kind):
    """Which XLA computes, in another order: on Explicit axes plain JAX refuses some of them without an out_sharding."""
    f = training_step(recipe)
    got, _ = meshes.run(f, kind, LAYOUTS[layout][0], *ARGS)
    for name, want in jax.jit(f)(*ARGS).items():
        g, w = (np.asarray(v).astype(np.float32) for v in (got[name], want))
        assert np.linalg.norm(g - w) <= 2.0**-7 * np.linalg.norm(w), name


@meshes.AXES
def test_memory_is_that_of_one_shard(kind):
    """No device holds a whole input or product: temporaries are those of shard_map, not of one device."""
    recipe, specs = dj.MXFP8BlockScaling(), LAYOUTS["data"][0]
    x, kernel, bias, dy = (jnp.concatenate([v] * 8) if v.ndim == 2 and i != 1 else v for i, v in enumerate(ARGS))
    with meshes.mesh_of(kind) as mesh:
        placed = [
            jax.device_put(v, jax.sharding.NamedSharding(mesh, s))
            for v, s in zip((x, kernel, bias, dy), specs, strict=True)
        ]
        partitioned = jax.jit(training_step(recipe)).lower(*placed).compile().memory_analysis()
    one = jax.jit(training_step(recipe)).lower(x, kernel, bias, dy).compile().memory_analysis()
    assert partitioned.temp_size_in_bytes < one.temp_size_in_bytes / 2


FORMS = {
    "call": lambda layer: layer,
    "vmap": lambda layer: lambda x, *w: jax.vmap(lambda x: layer(x, *w))(x.reshape(4, -1, 512)).reshape(x.shape),
    "scan": lambda layer: _layers(layer),
    "remat": lambda layer: _layers(jax.checkpoint(layer)),
}


def _layers(layer):
    """Three layers with the same kernel, as a scan over their stack."""
    return lambda x, *w: jax.lax.scan(lambda h, w: (layer(h, *w), None), x, tuple(jnp.stack([v] * 3) for v in w))[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", named(LAYOUTS, ("data", "gathered weights")))
@pytest.mark.parametrize("recipe", [dj.Float8CurrentScaling(), dj.MXFP8BlockScaling()], ids=["fp8-current", "mxfp8"])
def test_memory_and_exchanged_bytes_are_at_most_those_of_plain_jax(recipe, layout, form):
    """A training step's temporaries, and the bytes of its collectives but for amaxes of four bytes."""
    specs, x, dy = layout[0], *(jnp.concatenate([v] * 4) for v in (ARGS[0], ARGS[3]))

    def plain(x, kernel, bias):
        return x @ kernel.T.astype(x.dtype) + bias.astype(x.dtype)

    def measured(layer):
        def step(x, kernel, bias, dy):
            y, vjp = jax.vjp(FORMS[form](layer), x, kernel, bias)
            return y, *vjp(dy)

        with meshes.mesh_of(AxisType.Auto) as mesh:
            of_x, of_kernel, of_bias, of_dy = (jax.sharding.NamedSharding(mesh, spec) for spec in specs)
            f = jax.jit(step, in_shardings=(of_x, of_kernel, of_bias, of_dy),
                        out_shardings=(of_dy, of_x, of_kernel, of_bias))  # fmt: skip
            compiled = f.lower(x, *ARGS[1:3], dy).compile()
        return compiled.memory_analysis().temp_size_in_bytes, meshes.sent(compiled.as_text())

    temporaries, sent = measured(lambda x, kernel, bias: dj.dense(x, kernel, bias, recipe=recipe))
    of_plain, sent_by_plain = measured(plain)
    assert temporaries <= of_plain and 0 < sent <= sent_by_plain + 64


@meshes.AXES
def test_delayed_states_record_the_whole_arrays_amax(kind):
    recipe = dj.DelayedScaling()
    x, kernel = ARGS[0].at[-1, -1].set(50), ARGS[1]

    def step(x, kernel):
        states = dj.init_state(recipe)
        for _ in range(2):
            loss = dj.value_and_grad_with_state(
                lambda k, s: jnp.square(dj.dense(x, k, recipe=recipe, state=s).astype(jnp.float32)).sum()
            )
            _, _, states = loss(kernel, states)
            states = dj.update_state(states)
        return states

    got, _ = meshes.run(step, kind, (P("d"), P()), x, kernel)
    meshes.same(got, jax.jit(step)(x, kernel))


@meshes.AXES
@pytest.mark.parametrize("recipe", [dj.Float8CurrentScaling(), dj.MXFP8BlockScaling()], ids=["fp8-current", "mxfp8"])
def test_layernorm_mlp(recipe, kind):
    """Data parallel, and column and row parallel kernels: no gather."""
    x, gamma, beta = ARGS[0][:256, :256], tools.normal("gamma", (256,)), tools.normal("beta", (256,))
    dy = tools.normal("dy of mlp", (256, 256))
    first, second = tools.normal("first", (512, 256)) / 16, tools.normal("second", (256, 512)) / 16

    def f(x, gamma, beta, first, second):
        y = dj.layernorm_mlp(x, gamma, beta, first, None, second, None, recipe=recipe)
        return (y.astype(jnp.float32) * dy).sum()

    args = (x, gamma, beta, first, second)
    specs = (P("d"), P(), P(), P("t"), P(None, "t"))
    got, collectives = meshes.run(jax.grad(f, range(5)), kind, specs, *args)
    want = jax.jit(jax.grad(f, range(5)))(*args)
    assert collectives.pop("all-reduce") and collectives == meshes.WHOLE_SUM  # the gradient of the norm's output
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g).astype(np.float32), np.asarray(w).astype(np.float32)
        assert np.linalg.norm(g - w) <= 2.0**-7 * np.linalg.norm(w)  # parts of sums are rounded to bfloat16


@meshes.AXES
@pytest.mark.parametrize("recipe", [dj.Float8CurrentScaling(), dj.NVFP4BlockScaling()], ids=["fp8-current", "nvfp4"])
@pytest.mark.parametrize("mlp", [False, True], ids=["dense", "mlp"])
def test_data_parallel_fused_layers_have_the_bits_of_one_device(mlp, recipe, kind):
    x, gamma, beta, kernel = ARGS[0], tools.normal("gamma", (512,)), tools.normal("beta", (512,)), ARGS[1]
    state = random_state(recipe)

    def f(x, gamma, beta, kernel):
        def g(x):
            if not mlp:
                return dj.layernorm_dense(x, gamma, beta, kernel, recipe=recipe, **state)
            return dj.layernorm_mlp(x, gamma, beta, kernel, None, kernel, None, recipe=recipe, **state)

        y, vjp = jax.vjp(g, x)
        return y, vjp(y)[0]

    got, collectives = meshes.run(f, kind, (P("d"), P(), P(), P()), x, gamma, beta, kernel)
    meshes.same(got, jax.jit(f)(x, gamma, beta, kernel))
    assert set(collectives) == {"all-reduce"}


@meshes.AXES
def test_leading_dimensions(kind):
    x = ARGS[0].reshape(16, 32, 512)
    specs = (P("d"), P("t"), P("t"), P("d", None, "t"))
    args = (x, *ARGS[1:3], ARGS[3].reshape(16, 32, 512))
    got, collectives = meshes.run(training_step(dj.MXFP8BlockScaling()), kind, specs, *args)
    want = jax.jit(training_step(dj.MXFP8BlockScaling()))(*args)
    meshes.same(got["y"], want["y"])
    assert collectives.pop("all-reduce") and collectives == meshes.WHOLE_SUM  # of dx, in bfloat16


@pytest.mark.parametrize(
    ("spec", "of_kernel"),
    [(P(None, "d"), P()), (P("t", "d"), P()), (P("t", "d"), P("d")), (P(None, "d", "t"), P(None, "t"))],
    ids=["sequence", "batch and sequence", "gathered weights", "sequence and K"],
)
@pytest.mark.parametrize("recipe", [dj.Float8CurrentScaling(), dj.MXFP8BlockScaling()], ids=["fp8-current", "mxfp8"])
def test_a_cut_sequence_on_explicit_axes(recipe, spec, of_kernel):
    """Each device folds its own part into rows: nothing is gathered but weights, and only sums have other bits."""
    args = (ARGS[0].reshape(4, 128, 512), *ARGS[1:3], ARGS[3].reshape(4, 128, 512))
    specs = (spec, of_kernel, P(), P(*spec[:2]))
    got, collectives = meshes.run(training_step(recipe), AxisType.Explicit, specs, *args)
    want = jax.jit(training_step(recipe))(*args)
    meshes.same(got["dx"], want["dx"])
    assert got["y"].sharding.spec == P(*spec[:2], None) and got["dx"].sharding.spec == P(
        *spec, *[None] * (3 - len(spec))
    )
    if len(spec) == 2:
        meshes.same(got["y"], want["y"])
    # A sum of y in bfloat16, or of a gradient that is cut over one of the sum's two axes.
    exchanged = len(spec) == 3 or of_kernel == P("d")
    assert ("all-to-all" in collectives) == ("all-gather" in collectives) == exchanged, collectives
    for name in ("y", "dkernel", "dbias"):
        a, b = (np.asarray(v).astype(np.float32) for v in (got[name], want[name]))
        assert np.abs(a - b).max() <= (2.0**-7 if name == "y" else 1e-5) * np.abs(b).max(), name


def test_a_cut_sequence_in_fused_layers_with_states():
    """Norms fold alike; states and the norm's output are returned as on one device."""
    x, gamma, recipe = ARGS[0].reshape(4, 128, 512), tools.normal("gamma", (512,)), dj.DelayedScaling()

    def f(x, gamma, kernel):
        states = dj.init_state(recipe)
        options = {"recipe": recipe, "normalization": "RMSNorm", "state": states, "return_state": True}
        fused = dj.layernorm_dense(x, gamma, None, kernel, return_layernorm_output=True, **options)
        mlp = dj.layernorm_mlp(x, gamma, None, kernel, None, kernel, None, recipe=dj.MXFP8BlockScaling(),
                               normalization="RMSNorm")  # fmt: skip
        return fused, mlp

    got, collectives = meshes.run(f, AxisType.Explicit, (P("t", "d"), P(), P()), x, gamma, ARGS[1])
    meshes.same(got, jax.jit(f)(x, gamma, ARGS[1]))
    assert set(collectives) == {"all-reduce"} and got[1].sharding.spec == P("t", "d", None)
