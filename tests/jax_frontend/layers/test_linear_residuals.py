"""A compiled layer that is called several times, each time with other gradients wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import diptych.jax as dj
from diptych.jax.primitives import register
from diptych.jax.state import carry as tr
from jax_frontend import fused_layers, tools
from jax_frontend.layers.test_inject import OWG, Delayed, nn

pytestmark = pytest.mark.sampled

MX = dj.MXFP8BlockScaling()
X, KERNEL = tools.normal("x", (32, 32)), tools.normal("kernel", (32, 32)) / 6
NORM = (jnp.ones(32), jnp.zeros(32))
OFFSETS = jnp.asarray([0, 16, 32], jnp.int32)
LAYERS = {
    "dense": lambda x, k: dj.dense(x, k, recipe=MX),
    "dense, mixed": lambda x, k: dj.dense(x, k, recipe=fused_layers.EVERY["mixed"]),
    "layernorm_dense": lambda x, k: dj.layernorm_dense(x, *NORM, k, recipe=MX),
    "layernorm_mlp": lambda x, k: dj.layernorm_mlp(x, *NORM, k, None, k, None, recipe=MX),
    "grouped_dense": lambda x, k: dj.grouped_dense(x, jnp.stack([k, k]), None, OFFSETS, recipe=MX, align=16),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_one_trace_and_other_gradients(name):
    """On data, on activations, and with a kernel that is frozen: as without an inner jit."""

    def loss(layer, kernel, scale):
        y = layer(jnp.tanh(layer(X, kernel)), kernel)
        return (layer(y * scale, KERNEL) * X).sum()

    plain, compiled = LAYERS[name], jax.jit(LAYERS[name])
    want = jax.jit(jax.grad(lambda k, s: loss(plain, k, s), (0, 1)))(KERNEL * 2, 3.0)
    got = jax.jit(jax.grad(lambda k, s: loss(compiled, k, s), (0, 1)))(KERNEL * 2, 3.0)
    for g, w in zip(got, want, strict=True):  # XLA's tanh differs in a bit by how it is fused
        assert float(jnp.abs(g - w).max()) <= 1e-3 * float(jnp.abs(w).max())


def test_permutations_of_one_trace():
    m = dj.moe_map(jnp.arange(32, dtype=jnp.int32)[:, None] % 4, 4, map_type="index")

    def move(x, probs):
        rows, moved, _ = dj.moe_permute_with_probs(x, probs, m)
        return dj.moe_unpermute(rows * moved[:, None], m, merging_probs=probs)

    def loss(f, x, probs):
        return jnp.square(f(f(X, probs), jnp.ones((32, 1))) * f(x, jnp.full((32, 1), 2.0))).sum()

    args = X * 2, jnp.abs(X[:, :1])
    want = jax.grad(lambda *a: loss(move, *a), (0, 1))(*args)
    got = jax.grad(lambda *a: loss(jax.jit(move), *a), (0, 1))(*args)
    for g, w in zip(got, want, strict=True):
        assert float(jnp.abs(g - w).max()) <= 1e-5 * float(jnp.abs(w).max())


class Twice(nn.Module):
    """Two layers of one compiled class, and one of them again."""

    lift: object

    @nn.compact
    def __call__(self, x):
        layer = self.lift(Delayed)
        first = layer(32, name="first")
        return first(jnp.tanh(layer(32, name="second")(jnp.tanh(first(x)))))


@pytest.mark.parametrize("way", ["share", "references"])
def test_reused_nn_jit_with_states(way):
    def news(lift):
        def loss(params, held):
            return jnp.square(Twice(lift).apply({"params": params, OWG: held}, X)).sum()

        if way == "share":
            return jax.jit(tr.value_and_grad_with_state(loss))(variables["params"], variables[OWG])[1:]
        refs = tr.state_refs(variables[OWG])
        return jax.jit(jax.grad(loss))(variables["params"], refs), tr.read_states(refs)

    variables = Twice(lambda c: c).init(jax.random.key(0), X)
    want, got = news(lambda c: c), news(nn.jit)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        assert float(jnp.abs(g - w).max()) <= 0.1 * float(jnp.abs(w).max())  # a bit of tanh flips a quantized one
    for name, layer in want[1].items():
        for slot, state in layer["state"].items():
            made = got[1][name]["state"][slot]
            assert float(made.amax_history[0]) == pytest.approx(float(state.amax_history[0]), rel=1e-2)
            assert float(made.count[0]) == 1


# --- lookups of structures ---


def test_more_than_there_is_room_for_is_an_error():
    with pytest.raises(AssertionError, match="3 arrays are saved, and there is room for 2"):
        register._packed([1, 2, 3], 2)
    packed = register._packed({"a": 1, "b": [2]}, 5)
    assert len(packed) == len(register._packed(7, 5)) == 6
    assert register._unpacked(packed) == {"a": 1, "b": [2]}
