"""Modules for nnx against the functions that they wrap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import diptych.jax as dj
from diptych.common import ArgumentError, UnsupportedError
from jax_frontend import tools

nnx = pytest.importorskip("flax.nnx")
import diptych.jax.nnx as dnnx  # noqa: E402

pytestmark = pytest.mark.sampled

X = tools.normal("x", (4, 16, 32))
DELAYED = dj.DelayedScaling(amax_history_len=4)
NVFP4 = dj.NVFP4BlockScaling(disable_rht=True)
WRT = nnx.DiffState(0, dnnx.DIFFERENTIATED)


def loss_of(model, x):
    return jnp.square(model(x)).mean()


def linear(recipe):
    return dnnx.Linear(32, 32, recipe=recipe, rngs=nnx.Rngs(0))


def mlp(recipe, **options):
    return dnnx.LayerNormMLP(32, 64, recipe=recipe, activation="swiglu", rngs=nnx.Rngs(0), **options)


def test_linear_is_dense_with_the_initial_values_of_flax():
    recipe, plain = dj.MXFP8BlockScaling(), nnx.Linear(32, 64, rngs=nnx.Rngs(3))
    layer = dnnx.Linear(32, 64, recipe=recipe, rngs=nnx.Rngs(3))
    tools.same_tree(nnx.to_pure_dict(nnx.state(layer)), nnx.to_pure_dict(nnx.state(plain)))
    grads = nnx.jit(nnx.grad(loss_of))(layer, X)

    def loss(kernel, bias):
        return jnp.square(dj.dense(X, kernel.T, bias, recipe=recipe)).mean()

    dkernel, dbias = jax.jit(jax.grad(loss, (0, 1)))(plain.kernel[...], plain.bias[...])
    tools.same(grads["kernel"][...], dkernel)
    tools.same(grads["bias"][...], dbias)
    assert dnnx.Linear(32, 64, recipe=None, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(3))(X).dtype == "bfloat16"


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layernorm_mlp_is_the_function(normalization):
    recipe = dj.Float8CurrentScaling()
    m = mlp(recipe, normalization=normalization, use_bias=normalization == "LayerNorm")
    bias = [None if b is None else b[...] for b in (m.ln_bias, m.wi_bias, m.wo_bias)]
    want = dj.layernorm_mlp(X, m.scale[...], bias[0], m.wi_kernel[...].T, bias[1], m.wo_kernel[...].T, bias[2],
                            recipe=recipe, activation="swiglu", normalization=normalization)  # fmt: skip
    tools.same(m(X), want)
    assert (m.wi_kernel.shape, m.wo_kernel.shape, want.shape) == ((32, 128), (64, 32), X.shape)


@pytest.mark.parametrize("make", [linear, mlp])
def test_delayed_states_follow_the_training_steps(make):
    model = make(DELAYED)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graph, states = nnx.split(model, dnnx.ScaleStates, ...)[:2]

    traces = []

    def step(model, optimizer, x):
        traces.append(0)
        loss, grads = nnx.value_and_grad(loss_of, argnums=WRT)(model, x)
        optimizer.update(model, grads)
        dnnx.update_states(model, grads)
        return loss

    def by_hand(params, states):  # the first step by the functions
        def loss(params, states):
            return loss_of(nnx.merge(graph, states, params), X)

        return dj.update_state(dj.overwrite_states(states, jax.grad(loss, (0, 1))(params, states)[1]))

    want = jax.jit(by_hand)(nnx.state(model, nnx.Not(dnnx.ScaleStates)), states)
    jitted = nnx.jit(step)
    losses = [float(jitted(model, optimizer, X))]
    tools.same_tree(nnx.to_pure_dict(nnx.state(model, dnnx.ScaleStates)), nnx.to_pure_dict(want))
    losses += [float(jitted(model, optimizer, X)) for _ in range(4)]
    assert losses[-1] < losses[0] and len(traces) == 1


def test_states_that_would_be_lost_or_summed_are_refused():
    model = dnnx.Linear(32, 32, recipe=DELAYED, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="would be lost"):
        nnx.grad(loss_of)(model, X)
    grads = nnx.grad(loss_of, argnums=WRT)(model, X)
    with pytest.raises(ArgumentError, match="lack states of the model"):
        dnnx.update_states(model, nnx.state(grads, nnx.Param))
    summed = nnx.grad(lambda model, x: loss_of(model, model(x)), argnums=WRT)(model, X)
    with pytest.raises(ValueError, match="adding 2 states up"):
        dnnx.update_states(model, summed)


def test_layers_can_be_stacked_and_scanned():
    """A scan over a stack of layers has the states of the layers in a row."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        return dnnx.Linear(32, 32, recipe=DELAYED, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    def layer(tree, i):
        return jax.tree.map(lambda v: v[i], tree)

    stack = make(nnx.Rngs(0))
    graph = nnx.graphdef(linear(DELAYED))
    model = nnx.Sequential(*(nnx.merge(graph, layer(nnx.state(stack), i)) for i in range(2)))

    def step(run, model):
        grads = nnx.grad(lambda m: jnp.square(run(m)).mean(), argnums=WRT)(model)
        dnnx.update_states(model, grads)

    nnx.jit(lambda m: step(lambda m: run(X, m), m))(stack)
    nnx.jit(lambda m: step(lambda m: m(X), m))(model)
    for i in range(2):
        tools.same_tree(layer(stack.states.get_value(), i), model.layers[i].states.get_value())


def test_each_call_has_its_own_random_bits():
    layer = dnnx.Linear(32, 32, recipe=NVFP4, rngs=nnx.Rngs(0))
    kernel, start = layer.kernel[...], layer.random[...]

    def dkernel(layer):
        return nnx.grad(loss_of)(layer, X)["kernel"][...]

    def by_hand(rng):
        return jax.grad(lambda k: jnp.square(dj.dense(X, k.T, layer.bias, recipe=NVFP4, rng=rng)).mean())(kernel)

    jitted = nnx.jit(dkernel)
    tools.same(jitted(layer), jax.jit(by_hand)(start))
    tools.same(layer.random[...], dj.rng_at(start, dj.OFFSETS))
    tools.same(jitted(layer), jax.jit(by_hand)(dj.rng_at(start, dj.OFFSETS)))
    other = dnnx.Linear(32, 32, recipe=NVFP4, rngs=nnx.Rngs(1))
    assert (other.random[...] != start).any()


@pytest.mark.parametrize("make", [dj.MXFP8BlockScaling, dj.DelayedScaling])
def test_equal_modules_share_compiled_code(make):
    traces = []
    f = nnx.jit(lambda m, x: (traces.append(0), m(x))[1])
    for _ in range(3):
        f(linear(make()), X)
    assert len(traces) == 1


def test_misuse_is_named():
    with pytest.raises(ArgumentError, match="must be a diptych Recipe"):
        dnnx.Linear(32, 32, recipe="mxfp8", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="activation"):
        dnnx.LayerNormMLP(32, 32, recipe=None, activation="nonsense", rngs=nnx.Rngs(0))
    layer = dnnx.Linear(32, 32, recipe=dj.MXFP8BlockScaling(), rngs=nnx.Rngs(0))
    nnx.update(layer, dj.quantize_params(nnx.state(layer), layer.recipe, lambda path, _: path == "kernel"))
    with pytest.raises(UnsupportedError, match="must be a HeldKernel"):
        layer(X)


GENERAL = {
    "last": (lambda **o: nnx.LinearGeneral(32, (4, 8), **o), lambda **o: dnnx.LinearGeneral(32, (4, 8), **o)),
    "two axes": (
        lambda **o: nnx.LinearGeneral((4, 32), 64, axis=(0, -1), **o),
        lambda **o: dnnx.LinearGeneral((4, 32), 64, axis=(0, -1), **o),
    ),
    "batch": (
        lambda **o: nnx.LinearGeneral(32, (4, 8), batch_axis={0: 4}, **o),
        lambda **o: dnnx.LinearGeneral(32, (4, 8), batch_axis={0: 4}, **o),
    ),
    "einsum": (
        lambda **o: nnx.Einsum("btd,dhk->hbtk", (32, 2, 16), (2, 16), **o),
        lambda **o: dnnx.Einsum("btd,dhk->hbtk", (32, 2, 16), (2, 16), **o),
    ),
    "einsum with batch": (
        lambda **o: nnx.Einsum("btd,bdk->tkb", (4, 32, 16), (16, 4), **o),
        lambda **o: dnnx.Einsum("btd,bdk->tkb", (4, 32, 16), (16, 4), **o),
    ),
}
ALL_RECIPES = {"mxfp8": dj.MXFP8BlockScaling(), "current": dj.Float8CurrentScaling(), "delayed": DELAYED, "fp4": NVFP4}


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
@pytest.mark.parametrize("name", GENERAL)
def test_general_layers_have_the_parameters_of_flax_and_its_results_nearly(name, recipe):
    """Without a recipe the results are flax's. With one they are near, and the same through flax's own layer."""
    plain, ours = (f(**o, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(3))
                   for f, o in zip(GENERAL[name], ({}, {"recipe": None}), strict=True))  # fmt: skip
    tools.same_tree(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(plain)))
    jnp.allclose(ours(X), plain(X), atol=1e-5).item() or pytest.fail("not flax's result")
    layer = GENERAL[name][1](recipe=recipe, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(3))
    grads = nnx.jit(nnx.grad(loss_of, argnums=WRT))(layer, X)
    want = nnx.grad(loss_of)(plain, X)["kernel"][...]
    error = jnp.linalg.norm(grads["kernel"][...] - want) / jnp.linalg.norm(want)
    assert error < (0.3 if recipe is NVFP4 else 0.1)
    dnnx.update_states(layer, grads)
    if recipe is DELAYED:
        batch = (4,) if "batch" in name else ()
        assert layer.states.get_value()["weight"].scale.shape == (*batch, 1)
        assert (layer.states.get_value()["grad_output"].scale != 1).all()


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_flax_layers_hold_the_state_of_a_dot_general(recipe):
    """A DotGeneral in flax's Linear trains with the bits of the module Linear without a bias."""
    theirs = nnx.Linear(32, 32, use_bias=False, dot_general=dnnx.DotGeneral(recipe, rngs=nnx.Rngs(7)), rngs=nnx.Rngs(0))
    ours = dnnx.Linear(32, 32, use_bias=False, recipe=recipe, rngs=nnx.Rngs(0))
    if recipe is NVFP4:
        ours.random.set_value(theirs.dot_general.random.get_value())

    @nnx.jit
    def step(model):
        loss, grads = nnx.value_and_grad(loss_of, argnums=WRT)(model, X)
        dnnx.update_states(model, grads)
        return loss, grads["kernel"][...]

    for _ in range(2):
        tools.same_tree(step(theirs), step(ours))
    if recipe is DELAYED:
        tools.same_tree(theirs.dot_general.states.get_value(), ours.states.get_value())
    if recipe is NVFP4:
        tools.same(theirs.dot_general.random[...], ours.random[...])


@pytest.mark.parametrize("name", ["last", "two axes", "einsum"])
def test_held_kernels_have_the_bits_of_kernels_quantized_in_each_call(name):
    layer = GENERAL[name][1](recipe=dj.MXFP8BlockScaling(), rngs=nnx.Rngs(0))
    dx = nnx.jit(lambda m: jax.grad(lambda x: loss_of(m, x))(X))
    want = layer(X), dx(layer)
    dnnx.hold_kernels(layer)
    assert isinstance(layer.kernel, dnnx.HeldKernel)
    tools.same_tree((layer(X), dx(layer)), want)
    assert "kernel" not in nnx.state(layer, nnx.Param)


def test_held_kernels_that_cannot_be_are_named():
    with pytest.raises(UnsupportedError, match="batch axes"):
        dnnx.hold_kernels(GENERAL["batch"][1](recipe=dj.MXFP8BlockScaling(), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="no diptych module"):
        dnnx.hold_kernels(nnx.Linear(32, 32, rngs=nnx.Rngs(0)))


def test_shardings_are_given_as_in_flax():
    """Metadata of parameters gives `nnx.get_partition_spec` the names that it was given."""
    names, init = (None, "model"), nnx.initializers.lecun_normal()
    by_metadata = {"out_sharding": names, "eager_sharding": False}
    layers = [
        dnnx.Linear(32, 64, recipe=DELAYED, kernel_metadata=by_metadata, rngs=nnx.Rngs(0)),
        dnnx.LayerNormLinear(32, 64, recipe=DELAYED, kernel_metadata=by_metadata, rngs=nnx.Rngs(0)),
        dnnx.Linear(32, 64, recipe=DELAYED, rngs=nnx.Rngs(0),
                    kernel_init=nnx.with_partitioning(init, names, eager_sharding=False)),
    ]  # fmt: skip
    for layer in layers:
        specs = nnx.get_partition_spec(nnx.state(layer, nnx.Param))
        assert specs["kernel"].get_value() == jax.sharding.PartitionSpec(*names)
        assert specs["bias"].get_value() == jax.sharding.PartitionSpec()


def test_ops_have_the_name_of_their_module():
    for name in ("", "fc1"):
        layer = dnnx.Linear(32, 32, recipe=dj.MXFP8BlockScaling(), name=name, rngs=nnx.Rngs(0))
        assert f"{name or 'Linear'}/" in jax.jit(lambda x, m=layer: m(x)).lower(X).as_text(debug_info=True)


def test_vmap_and_remat_of_modules_have_the_bits_of_the_module():
    layer = linear(dj.MXFP8BlockScaling())
    tools.same(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, X), layer(X))
    kept, again = (nnx.jit(nnx.grad(lambda m, f=f: jnp.square(f(m, X)).mean()))(layer)
                   for f in (lambda m, x: m(x), nnx.remat(lambda m, x: m(x))))  # fmt: skip
    tools.same_tree(nnx.to_pure_dict(again), nnx.to_pure_dict(kept))
