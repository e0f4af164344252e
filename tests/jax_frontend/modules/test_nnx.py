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

    def step(model, optimizer, x):
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
    assert losses[-1] < losses[0]


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


def test_equal_modules_share_compiled_code():
    traces = []
    f = nnx.jit(lambda m, x: (traces.append(0), m(x))[1])
    for _ in range(3):
        f(dnnx.Linear(32, 32, recipe=dj.MXFP8BlockScaling(), rngs=nnx.Rngs(0)), X)
    assert len(traces) == 1


def test_misuse_is_named():
    with pytest.raises(ArgumentError, match="must be a diptych Recipe"):
        dnnx.Linear(32, 32, recipe="mxfp8", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="activation"):
        dnnx.LayerNormMLP(32, 32, recipe=None, activation="nonsense", rngs=nnx.Rngs(0))
    layer = dnnx.Linear(32, 32, recipe=dj.MXFP8BlockScaling(), rngs=nnx.Rngs(0))
    nnx.update(layer, dj.quantize_params(nnx.state(layer), layer.recipe, lambda path, _: path == "kernel"))
    with pytest.raises(UnsupportedError, match="hold kernels in high precision"):
        layer(X)
