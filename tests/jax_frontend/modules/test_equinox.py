"""Modules for equinox against the functions that they wrap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import diptych.jax as dj
from diptych.common import RECIPES, ArgumentError
from jax_frontend import tools

eqx = pytest.importorskip("equinox")
import diptych.jax.equinox as dx  # noqa: E402

pytestmark = pytest.mark.sampled

X = tools.normal("x", (2, 32, 64), "bfloat16")  # which a Hadamard transform needs
DELAYED = dj.DelayedScaling(amax_history_len=4)
NVFP4 = dj.NVFP4BlockScaling()
KEY = jax.random.key(0)


def loss_of(model, x, **options):
    return jnp.square(model(x, **options)).mean()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_linear_is_dense_with_the_initial_values_of_equinox(recipe):
    model, plain = dx.Linear(64, 32, recipe=recipe, key=KEY), eqx.nn.Linear(64, 32, key=KEY)
    tools.same_tree((model.weight, model.bias), (plain.weight, plain.bias))
    bits = jax.random.key(7)

    def by_hand(weight, bias, states):
        given = {"rng": dj.rng_state(bits)} if tools.linear_plan(recipe).needs_rng else {}
        return jnp.square(dj.dense(X, weight, bias, recipe=recipe, state=states, **given)).mean()

    got = eqx.filter_jit(eqx.filter_grad(loss_of))(model, X, key=bits)
    want = jax.jit(jax.grad(by_hand, (0, 1, 2)))(plain.weight, plain.bias, model.states)
    tools.same_tree((got.weight, got.bias, got.states), want)


def test_mlp_is_that_of_equinox():
    model, plain = dx.MLP(64, 32, 96, 2, recipe=None, key=KEY), eqx.nn.MLP(64, 32, 96, 2, key=KEY)
    x = X.astype(jnp.float32)
    assert jnp.allclose(model(x), jax.vmap(jax.vmap(plain))(x), atol=1e-5)
    assert len(dx.MLP(64, 32, 96, 0, recipe=None, key=KEY).layers) == 1
    names = [layer.name for layer in dx.MLP(64, 32, 96, 1, recipe=DELAYED, name="mlp", key=KEY).layers]
    assert names == ["mlp.0", "mlp.1"]


@pytest.mark.parametrize("recipe", [DELAYED, NVFP4], ids=["delayed", "nvfp4"])
def test_training(recipe):
    model = dx.MLP(64, 32, 64, 1, recipe=recipe, key=KEY)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    opt_state = optimizer.init(dx.parameters(model))

    @eqx.filter_jit
    def step(model, opt_state, key):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.square(m(X, key=key) - 1).mean())(model)
        updates, opt_state = optimizer.update(dx.parameters(grads), opt_state, dx.parameters(model))
        return dx.update_states(eqx.apply_updates(model, updates), grads), opt_state, loss

    losses, before = [], model
    for i in range(5):
        model, opt_state, loss = step(model, opt_state, jax.random.key(i))
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert jax.tree.structure(model) == jax.tree.structure(before)
    assert (model.layers[0].states is not None) == (recipe is DELAYED)


def test_states_are_next_states_and_no_parameters():
    model = dx.Linear(64, 32, recipe=DELAYED, key=KEY)
    tools.same_tree(jax.tree.leaves(dx.parameters(model)), [model.weight, model.bias])
    grads = eqx.filter_grad(loss_of)(model, X)

    def by_hand(weight, states):
        return jnp.square(dj.dense(X, weight, model.bias, recipe=DELAYED, state=states)).mean()

    want = dj.update_state(jax.grad(by_hand, (0, 1))(model.weight, model.states)[1])
    tools.same_tree(dx.update_states(model, grads).states, want)
    with pytest.raises(ArgumentError, match="gradients lack states of the model"):
        dx.update_states(model, dx.parameters(grads))
    with pytest.raises(ValueError, match="adding 2 states up"):
        dx.update_states(model, eqx.filter_grad(lambda m: jnp.square(jax.vmap(m)(X)).mean())(model))


def test_a_scan_over_layers_is_the_layers_in_a_row():
    layers = [dx.Linear(64, 64, recipe=DELAYED, key=key) for key in jax.random.split(KEY, 2)]
    stack = jax.tree.map(lambda *v: jnp.stack(v), *layers)

    def scanned(stack):
        block = jax.checkpoint(lambda x, layer: (jnp.tanh(layer(x)), None))
        return jnp.square(jax.lax.scan(block, X, stack)[0]).mean()

    def in_a_row(layers):
        x = X
        for layer in layers:
            x = jnp.tanh(layer(x))
        return jnp.square(x).mean()

    got = dx.update_states(stack, eqx.filter_jit(eqx.filter_grad(scanned))(stack))
    want = dx.update_states(layers, eqx.filter_jit(eqx.filter_grad(in_a_row))(layers))
    tools.same_tree(got.states, jax.tree.map(lambda *v: jnp.stack(v), *(layer.states for layer in want)))


def test_random_bits_are_those_of_the_key():
    model = dx.Linear(64, 32, recipe=NVFP4, key=KEY)
    grad = eqx.filter_jit(lambda key: eqx.filter_grad(loss_of)(model, X, key=key).weight)
    tools.same(grad(jax.random.key(1)), grad(jax.random.PRNGKey(1)))
    assert (grad(jax.random.key(1)) != grad(jax.random.key(2))).any()
    model(X)  # forward rounds nothing stochastically
    with pytest.raises(ArgumentError, match="pass key="):
        eqx.filter_grad(loss_of)(model, X)


def test_a_weight_may_be_held_quantized():
    model = dx.Linear(64, 32, recipe=dj.MXFP8BlockScaling(), key=KEY)
    held = dj.quantize_params(model, model.recipe, lambda path, _: path == "weight")
    tools.same(held(X), model(X))
    tools.same_tree(jax.tree.leaves(dx.parameters(held)), [model.bias])


def test_equal_modules_share_compiled_code():
    traces = []
    f = eqx.filter_jit(lambda m, x: (traces.append(0), m(x))[1])
    for _ in range(3):
        f(dx.MLP(64, 32, 64, 1, recipe=dj.MXFP8BlockScaling(), key=KEY), X)
    assert len(traces) == 1


def test_misuse_is_named():
    with pytest.raises(ArgumentError, match="must be a diptych Recipe"):
        dx.Linear(64, 32, recipe="mxfp8", key=KEY)
    with pytest.raises(TypeError, match="recipe"):
        dx.Linear(64, 32, key=KEY)
    for features in ((0, 32), ("scalar", 32)):
        with pytest.raises(ValueError, match="features must be"):
            dx.Linear(*features, recipe=None, key=KEY)
