"""Training's surface of the fused functions: inputs not kept, calibration; what they keep."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweeps import named, others_slow

import diptych.jax as dj
from diptych import core
from diptych.common import RECIPES, DelayedScaling, linear_plan
from diptych.common.ops.activation import ACTIVATIONS
from diptych.jax.functional import activation as activation_verbs
from diptych.jax.functional import norm as norm_verbs
from diptych.jax.layers.layernorm_linear import layernorm_dense
from diptych.jax.layers.layernorm_mlp import layernorm_mlp
from jax_frontend import fused_layers as fl
from jax_frontend import tools

pytestmark = pytest.mark.sampled

EVERY = pytest.mark.parametrize("recipe", named(fl.EVERY, fl.NOW))


class Kind:
    """A fused function of the JAX panel, with its operands and the names of its results."""

    def __init__(self, name, f, module, names, operands, init, layers, **options):
        self.name, self.module, self.names, self.operands, self.init = name, module, names, operands, init
        self.f = functools.partial(f, **options)
        self.layers = layers

    def drawn(self, recipe):
        rotates = getattr(recipe, "disable_rht", True) is False
        return self.operands(dtype="bfloat16" if rotates else "float32")

    def run(self, recipe, args, dy, **options):
        return fl.run(self.f, self.names, args, dy, recipe, **options)


_mlp = functools.partial(
    Kind, f=layernorm_mlp, module="layernorm_mlp", names=fl.MLP,
    init=dj.init_layernorm_mlp_state, layers=("fc1", "fc2"),
)  # fmt: skip
DENSE = Kind(
    "dense", layernorm_dense, "layernorm_linear", fl.LINEAR, fl.linear_operands,
    dj.init_state, (),
)  # fmt: skip
MLP = _mlp("mlp", operands=fl.mlp_operands)
GATED = _mlp("gated", operands=functools.partial(fl.mlp_operands, gated=True), activation="swiglu")
KINDS = pytest.mark.parametrize("kind", [DENSE, MLP, GATED], ids=lambda k: k.name)


# --- inputs not kept ---


@KINDS
@EVERY
def test_inputs_made_again_have_the_same_bits(recipe, kind):
    """The norm's output is computed again with the same bits, and amaxes are too."""
    args, dy = kind.drawn(recipe)
    options = fl.given(recipe, kind.module)
    want, states = kind.run(recipe, args, dy, **options)
    again, states_again = kind.run(recipe, args, dy, save_original_input=True, **options)
    tools.same_tree(again, want)
    tools.same_tree(states_again, states)


@KINDS
def test_what_a_pullback_holds_is_there_once(kind):
    """The copy of the norm's output, unless it is made again."""
    recipe = dj.Float8CurrentScaling()
    args, dy = kind.operands()
    want, _ = kind.run(recipe, args, dy)
    for original in (False, True):
        f = functools.partial(kind.f, recipe=recipe, save_original_input=original)
        y, pullback = jax.jit(lambda *args, f=f: jax.vjp(f, *args))(*args)
        big = [tools.bits(v).tobytes() for v in jax.tree.leaves(pullback) if v.size > 1000]
        assert len(set(big)) == len(big)
        copies_of_z = sum(v.dtype == jnp.uint8 and v.size == args[0].size for v in jax.tree.leaves(pullback))
        assert copies_of_z == (0 if original else 1)
        tools.same(y, want["y"])
        tools.same(jax.jit(lambda pullback, dy: pullback(dy)[0])(pullback, dy), want["dx"])


def test_inputs_made_again_change_nothing_else():
    """Kernels alone, the norm's output beside it, a mesh axis, and remat."""
    recipe = dj.Float8CurrentScaling()
    args, dy = fl.linear_operands()
    want, _ = DENSE.run(recipe, args, dy)
    f = functools.partial(layernorm_dense, recipe=recipe, save_original_input=True)
    _, pull = jax.vjp(lambda k: f(*args[:3], k, args[4]), args[3])
    tools.same(pull(dy)[0], want["dkernel"])
    (_, z), pull = jax.vjp(lambda k: f(*args[:3], k, args[4], return_layernorm_output=True), args[3])
    tools.same(pull((dy, jnp.ones_like(z)))[0], want["dkernel"])
    (_, z), pull = jax.vjp(
        lambda k: layernorm_dense(*args[:3], k, recipe=recipe, return_layernorm_output=True), args[3]
    )
    tools.same(pull((dy, jnp.ones_like(z)))[0], want["dkernel"])
    grad = jax.grad(lambda *a: (f(*a) * dy).sum(), (0, 1, 2, 3, 4))
    tools.same_tree(
        dict(zip(fl.LINEAR[1:], jax.jit(jax.checkpoint(grad))(*args), strict=True)) | {"y": want["y"]}, want
    )
    axis = functools.partial(f, recipe=dj.Float8CurrentScaling(amax_group="i"))
    pair = jnp.stack([args[0], args[0] / 4])
    both = jax.vmap(jax.grad(lambda x: (axis(x, *args[1:]) * dy).sum()), axis_name="i")(pair)
    tools.same(both[0], want["dx"])


# --- calibration ---


def _parts(kind, args, dy):
    """Every tensor that a calibration looks at, and all gradients, in high precision."""
    options = fl.norm_options()
    x, gamma, beta, *rest = args
    z = norm_verbs.layernorm(options, x, gamma, beta)
    if kind is DENSE:
        return {"input": z, "weight": rest[0], "grad_output": dy}
    which = ACTIVATIONS["swiglu" if kind is GATED else "gelu"]
    k1, b1, k2, b2 = rest
    h = z @ k1.T + b1
    a = activation_verbs.activate(*which, h)
    _, pull = jax.vjp(lambda h: activation_verbs.activate(*which, h) @ k2.T + b2, h)
    return {
        "fc1": {"input": z, "weight": k1, "grad_output": pull(dy)[0]},
        "fc2": {"input": a, "weight": k2, "grad_output": dy},
    }


@KINDS
@tools.WRAP
@pytest.mark.parametrize("way", ["gradient", "references", "returned"])
def test_calibration_records_what_training_would(kind, way, wrap):
    recipe = DelayedScaling(amax_history_len=4)
    args, dy = kind.operands()
    states, call = kind.init(recipe, module=kind.module), functools.partial(kind.f, recipe=recipe, calibrate=True)
    plain = kind.run(None, args, dy)[0]
    want = jax.tree.map(lambda v: float(core.amax(np.asarray(v))[0]), _parts(kind, args, dy))
    numbers = tuple(range(len(args)))
    if way == "returned":
        y, news = wrap(lambda s: call(*args, state=s, return_state=True))(states)
        np.testing.assert_allclose(y, plain["y"], rtol=1e-4, atol=1e-4)
        for of_layer in want.values() if kind.layers else (want,):
            of_layer["grad_output"] = 0.0
    else:
        held = dj.state_refs(states) if way == "references" else states
        argnums = numbers if way == "references" else (*numbers, len(args))
        grads = wrap(jax.grad(lambda *a: (call(*a[:-1], state=a[-1]) * dy).sum(), argnums))(*args, held)
        news = dj.read_states(held) if way == "references" else grads[-1]
        for got, name in zip(grads, kind.names[1:], strict=False):
            np.testing.assert_allclose(got, plain[name], rtol=1e-4, atol=1e-4)
    found = jax.tree.map(lambda s: float(s.amax_history[0]), news, is_leaf=lambda s: isinstance(s, dj.ScaleState))
    assert jax.tree.structure(found) == jax.tree.structure(want)
    np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(want), rtol=1e-5)
    kind.f(*args, recipe=recipe, state=dj.update_state(news))


@KINDS
def test_calibration_returns_what_was_asked_for_and_loses_nothing(kind):
    recipe = DelayedScaling()
    args, _ = kind.operands()
    states = kind.init(recipe, module=kind.module)
    call = functools.partial(kind.f, *args, recipe=recipe, calibrate=True)
    assert call(state=states).shape == kind.run(None, args, jnp.zeros((2, 16, 48)))[0]["y"].shape
    if kind is DENSE:
        y, z, news = call(state=states, return_state=True, return_layernorm_output=True)
        assert (y.shape[-1], z.shape, news.keys()) == (48, args[0].shape, states.keys())
    with pytest.raises(ValueError, match="would be lost"):
        jax.grad(lambda x: kind.f(x, *args[1:], recipe=recipe, state=states, calibrate=True).sum())(args[0])
    with pytest.raises(ValueError, match="calibrate runs in high precision"):
        call(state=states, record=False)
    many = {"main_grads": (None, jnp.zeros((48, 80)))} if kind.layers else {"main_grad": jnp.zeros((48, 64))}
    with pytest.raises(ValueError, match="calibrate runs in high precision"):
        call(state=states, **many)
    with pytest.raises(ValueError, match="calibrate given without a recipe"):
        kind.f(*args, recipe=None, calibrate=True)


# --- what is kept ---


def _layers(activation, x, gamma, beta, k1, b1, k2, b2):
    """The same layers of JAX, but for the norm, which is the frugal one of this library."""
    h = norm_verbs.layernorm(fl.norm_options(), x, gamma, beta) @ k1.T + b1
    if activation == "gelu":
        return jax.nn.gelu(h) @ k2.T + b2
    gate, up = jnp.split(h, 2, -1)
    return (jax.nn.silu(gate) * up) @ k2.T + b2


def _kept(f, args):
    """Returns the values that backward keeps, except parameters that are known as such."""
    _, pull = jax.vjp(f, *args)
    parameters = {id(a) for a in args[1:]}
    return list({id(v): v for v in jax.tree.leaves(pull) if id(v) not in parameters}.values())


def _sizes(arrays):
    """Shapes and dtypes, without single numbers."""
    return sorted((v.dtype.name, *v.shape) for v in arrays if v.nbytes > 16)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", others_slow(RECIPES, fl.NOW))
def test_saved_activations(name, activation):
    """At most 0.6 of what the layers of JAX keep in bfloat16, copies of weights counted against us: x, its statistics,
    h, and columnwise copies of the norm and of both kernels, one each; of the norm none where it is made again."""
    recipe, m, k, f = RECIPES[name], 2048, 64, 256 if activation == "gelu" else 176
    args, _ = fl.mlp_operands((m, k), f, k, "bfloat16", activation == "swiglu")
    options = fl.given(recipe, "layernorm_mlp")
    x, gamma, beta, k1, _, k2, _ = args
    plan = linear_plan(recipe, "layernorm_mlp", "fc1")
    z, of_k1, of_k2 = (
        jax.tree.leaves(
            dj.quantize(v, q.with_usage(rowwise=False), as_bytes=True, **({"scale": 1.0} if q.needs_scale else {}))
        )
        for v, q in ((x, plan.input.columnwise), (k1, plan.weight.columnwise), (k2, plan.weight.columnwise))
    )
    h, statistics = jnp.zeros((m, len(k1)), jnp.bfloat16), jnp.zeros((2, m))
    own = [x, gamma, beta, h, *statistics, *of_k1, *of_k2, *jax.tree.leaves(options)]
    plain = sum(v.nbytes for v in _kept(functools.partial(_layers, activation), args))
    for original in (False, True):
        more = {"save_original_input": original, "record": False, **options}
        found = _kept(functools.partial(layernorm_mlp, recipe=recipe, activation=activation, **more), args)
        want = own if original else [*own, *z]
        assert _sizes(found) == _sizes(want)
        kept = sum(v.nbytes for v in found)
        assert kept <= 0.6 * plain, (kept, plain)
