"""Unmodified flax models in low precision, and delayed scaling inside of linen modules."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diptych.jax as dj
from diptych.common import ArgumentError, DelayedScaling, DTypeError, NVFP4BlockScaling, UnsupportedError
from diptych.jax.layers.inject import dot_general
from diptych.jax.layers.linear import dense
from diptych.jax.state import carry as tr
from diptych.jax.state import scales as st
from diptych.jax.state import update
from jax_frontend import layer_cases as layers
from jax_frontend import tools

pytestmark = pytest.mark.sampled

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

RECIPE = pytest.mark.parametrize("recipe", tools.PLAIN_RECIPES.values(), ids=tools.PLAIN_RECIPES)
X = tools.normal("x", (4, 16, 32))
LAST = (((1,), (0,)), ((), ()))


@RECIPE
def test_a_linen_dense_is_dense(recipe):
    layer = nn.Dense(64, dot_general=dot_general(recipe))
    params = layer.init(jax.random.key(0), X)
    dy = tools.normal("dy", (4, 16, 64))

    def loss(params, x):
        return (layer.apply(params, x) * dy).sum()

    kernel = params["params"]["kernel"]
    grads, dx = jax.jit(jax.grad(loss, (0, 1)))(params, X)
    want = layers.run(recipe, X, kernel.T, None, dy)
    tools.same(layer.apply(params, X), want["y"] + params["params"]["bias"])
    tools.same(dx, want["dx"])
    tools.same(grads["params"]["kernel"], want["dkernel"].T)
    assert grads["params"]["kernel"].shape == (32, 64)


@RECIPE
def test_an_nnx_linear_is_dense(recipe):
    layer = nnx.Linear(32, 64, dot_general=dot_general(recipe), rngs=nnx.Rngs(0))
    kernel, bias = layer.kernel[...], layer.bias[...]
    want = layers.run(recipe, X, kernel.T, None, tools.normal("dy", (4, 16, 64)))
    tools.same(nnx.jit(lambda m, x: m(x))(layer, X), want["y"] + bias)
    grads = nnx.grad(lambda m: (m(X) * tools.normal("dy", (4, 16, 64))).sum())(layer)
    tools.same(grads["kernel"][...], want["dkernel"].T)


def test_layers_with_batch_axes_and_equations_are_injected():
    """flax's own layers, whose kernels have batch axes: each element is a product with its own scales."""
    recipe, x = dj.Float8CurrentScaling(), tools.normal("x", (3, 16, 32)) * jnp.array([1.0, 10, 100])[:, None, None]
    layer = nnx.LinearGeneral(32, (4, 8), axis=-1, batch_axis={0: 3}, dot_general=dot_general(recipe), use_bias=False,
                              rngs=nnx.Rngs(0))  # fmt: skip
    kernel = layer.kernel[...]
    want = jnp.stack([dense(x[i], kernel[i].reshape(32, 32).T, recipe=recipe) for i in range(3)]).reshape(3, 16, 4, 8)
    tools.same(layer(x), want)
    of_heads = nnx.Einsum("btd,dhk->bthk", (32, 4, 8), einsum_op=dj.einsum(recipe), rngs=nnx.Rngs(0))
    tools.same(of_heads(x), dense(x, of_heads.kernel[...].reshape(32, 32).T, recipe=recipe).reshape(3, 16, 4, 8))
    assert dj.einsum(None) is jnp.einsum and dj.einsum(recipe) == dj.einsum(recipe) != dot_general(recipe)
    with pytest.raises(ValueError, match="einsum: DelayedScaling with delayed scaling has state"):
        dj.einsum(DelayedScaling())


class Model(nn.Module):
    """A small classifier, written with no thought of low precision."""

    dot_general: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, dot_general=self.dot_general)(x)
        x = nn.relu(x)
        x = nn.DenseGeneral((4, 16), dot_general=self.dot_general)(x)
        x = nn.DenseGeneral(32, axis=(-2, -1), dot_general=self.dot_general)(x)
        return nn.Dense(16, dot_general=self.dot_general)(x)


@pytest.mark.parametrize("name", ["fp8-current", "mxfp8", "nvfp4 to nearest"])
def test_an_unmodified_model_trains(name):
    teacher = tools.normal("teacher", (32, 16))
    losses = {}
    for way, recipe in (("plain", None), (name, tools.PLAIN_RECIPES[name])):
        model = Model(dot_general(recipe))
        params, optimizer = model.init(jax.random.key(0), X), optax.adam(1e-2)

        def loss(params, x, model=model):
            return ((model.apply(params, x) - x @ teacher) ** 2).mean()

        @jax.jit
        def step(params, opt, x, loss=loss, optimizer=optimizer):
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, opt = optimizer.update(grads, opt, params)
            return optax.apply_updates(params, updates), opt, value

        opt, found = optimizer.init(params), []
        for i in range(60):
            params, opt, value = step(params, opt, tools.normal(f"x{i % 8}", (4, 16, 32)))
            found.append(float(value))
        losses[way] = found
        calls = tools.custom_calls(tools.hlo(loss, params, X))
        assert calls.count("diptych_gemm") == (0 if recipe is None else 4)
    assert losses[name][-1] < 0.35 * losses[name][0]
    assert losses[name][-1] < (2.5 if name.startswith("nvfp4") else 1.35) * losses["plain"][-1]


CONTRACTIONS = [
    ((4, 8, 32), (32, 16), ((2,), (0,))),
    ((4, 32, 8), (16, 32), ((1,), (1,))),
    ((8, 4, 32), (4, 32, 16), ((1, 2), (0, 1))),
    ((8, 32, 4), (4, 32, 2, 8), ((2, 1), (0, 1))),
    ((32,), (32, 16), ((0,), (0,))),
]


@pytest.mark.parametrize("lhs, rhs, contract", CONTRACTIONS, ids=str)
def test_any_contraction_is_moved_into_place(lhs, rhs, contract):
    a, b = tools.normal("lhs", lhs), tools.normal("rhs", rhs)
    got = dot_general(dj.Float8CurrentScaling())(a, b, (contract, ((), ())))
    want = jax.lax.dot_general(a, b, (contract, ((), ())))
    assert got.shape == want.shape and got.dtype == want.dtype
    # Each E4M3 operand is off by 2^-4 of itself, or by half of the smallest step, 2^-10 / 448 of the amax.
    bound = jax.lax.dot_general(abs(a) + abs(a).max() * 1e-5, abs(b) + abs(b).max() * 1e-5, (contract, ((), ())))
    assert (abs(got - want) <= ((1 + 2**-4) ** 2 - 1) * bound).all()


def test_what_is_no_linear_layer_is_refused():
    f, x = dot_general(dj.MXFP8BlockScaling()), jnp.ones((2, 8, 32))
    q = dj.quantize(jnp.ones((32, 32)), dj.MXFP8Quantizer())
    last = (((2,), (1,)), ((), ()))
    bad = {
        "contracts nothing": (UnsupportedError, lambda: f(x, x, (((), ()), ((), ())))),
        "precision=HIGHEST": (ValueError, lambda: f(x, x[0], last, precision=jax.lax.Precision.HIGHEST)),
        "int32": (DTypeError, lambda: f(x, x[0], last, preferred_element_type=jnp.int32)),
        "last axis alone is contracted": (UnsupportedError, lambda: f(x, q, (((2,), (0,)), ((), ())))),
        "one dtype": (DTypeError, lambda: f(x, x[0].astype(jnp.bfloat16), last)),
        "out_sharding": (UnsupportedError, lambda: f(x, x[0], last, out_sharding=0)),
        "delayed scaling has state": (ValueError, lambda: dot_general(DelayedScaling())),
        "stochastic rounding has state": (ValueError, lambda: dot_general(NVFP4BlockScaling(disable_rht=True))),
        "must be a diptych Recipe": (ArgumentError, lambda: dot_general("mxfp8")),
    }
    for message, (error, call) in bad.items():
        with pytest.raises(error, match=message):
            call()
    assert dot_general(None) is jax.lax.dot_general
    f(x, x[0], last, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def test_preferred_element_type_is_the_result_s():
    """flax's layers pass `preferred_element_type` on. bfloat16 inputs have the same quantized values in float32."""
    recipe, x, kernel = dj.MXFP8BlockScaling(), X[0].astype(jnp.bfloat16), tools.normal("k", (32, 16), "bfloat16")
    layer = nnx.Linear(32, 16, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, use_bias=False,
                       dot_general=dot_general(recipe), rngs=nnx.Rngs(0))  # fmt: skip
    layer.kernel[...] = kernel.astype(jnp.float32)
    wide = layer(x)
    assert wide.dtype == jnp.float32
    tools.same(wide.astype(jnp.bfloat16), dense(x, kernel.T, recipe=recipe))
    narrow = dot_general(recipe)(X[0], kernel.astype(jnp.float32), LAST, preferred_element_type=jnp.bfloat16)
    tools.same(narrow, dense(X[0], kernel.T.astype(jnp.float32), recipe=recipe).astype(jnp.bfloat16))


def test_params_of_nnx_are_arrays():
    """`nnx.Param`s stand for their arrays, and a state's kernels can be quantized."""
    recipe, layer = dj.MXFP8BlockScaling(), nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    tools.same(dense(X, layer.kernel, layer.bias, recipe=recipe), dense(X, layer.kernel[...], recipe=recipe))
    tools.same_tree(dj.quantize(layer.kernel, dj.MXFP8Quantizer()), dj.quantize(layer.kernel[...], dj.MXFP8Quantizer()))
    held = dj.quantize_params(nnx.state(layer), recipe, lambda path, _: path == "kernel")
    tools.same(dense(X, held["kernel"], recipe=recipe), dense(X, layer.kernel, recipe=recipe))
    q = held["kernel"].get_value()
    tools.same(dot_general(recipe)(X, q, (((2,), (1,)), ((), ()))), dense(X, layer.kernel, recipe=recipe))


def test_dot_general_is_a_value():
    """Equal recipes give equal functions: models that hold them share compiled code."""
    make = lambda **options: dot_general(dj.MXFP8BlockScaling(), **options)  # noqa: E731
    assert make() == make() and hash(make()) == hash(make()) and make() != make(name="fc1")
    assert make() != dot_general(dj.Float8CurrentScaling()) and "MXFP8BlockScaling" in repr(make())
    assert pickle.loads(pickle.dumps(make())) == make()
    x, traces = jnp.ones((32, 64)), []

    def run(model, v, x):
        traces.append(0)
        return model.apply(v, x)

    jitted = jax.jit(run, static_argnums=0)
    v = nn.Dense(32).init(jax.random.key(0), x)
    outs = [jitted(nn.Dense(32, dot_general=pickle.loads(pickle.dumps(make()))), v, x) for _ in range(3)]
    assert len(traces) == 1
    tools.same(outs[2], make()(x, v["params"]["kernel"], (((1,), (0,)), ((), ()))))
    nnx_jitted = nnx.jit(lambda m, x: (traces.append(1), m(x))[1])
    for _ in range(3):
        nnx_jitted(nnx.Linear(64, 32, dot_general=make(), rngs=nnx.Rngs(0)), x)
    assert len(traces) == 2


# --- overwrite with gradient, in linen ---

OWG = "_overwrite_with_gradient"
DELAYED = DelayedScaling(amax_history_len=4)


class Delayed(nn.Module):
    """A user's own linear layer with delayed scales in the collection that flax keeps for them."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (self.features, x.shape[-1]))
        state = self.variable(OWG, "state", lambda: st.init_state(DELAYED)).value
        return dense(x, kernel, recipe=DELAYED, state=state)


class Cell(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Delayed(32, name="layer")(x), None


class Stack(nn.Module):
    """One layer that is used twice, behind layers that a scan made, recomputed."""

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, OWG: 0}
        x, _ = nn.scan(nn.remat(Cell), variable_axes=axes, split_rngs={"params": True}, length=3)(name="scanned")(
            x, None
        )
        shared = Delayed(32, name="shared")
        return shared(jnp.tanh(shared(x)))


def test_linen_overwrites_with_gradient():
    model, x = Stack(), X[0]
    variables = model.init(jax.random.key(0), x)
    assert variables[OWG]["scanned"]["layer"]["state"]["input"].amax_history.shape == (3, 4)

    def loss(variables, share):
        held = variables[OWG]
        if share:
            held = held | {"shared": tr.share_states(held["shared"])}
        return (model.apply({"params": variables["params"], OWG: held}, x) ** 2).sum()

    summed = jax.jit(jax.grad(lambda v: loss(v, False)))(variables)
    with pytest.raises(ValueError, match="adding 2 states up"):
        update.update_state(summed[OWG]["shared"])

    optimizer = optax.sgd(1e-4)
    opt = optimizer.init(variables["params"])

    @jax.jit
    def step(variables, opt):
        value, grads = jax.value_and_grad(lambda v: loss(v, True))(variables)
        updates, opt = optimizer.update(grads["params"], opt)
        scanned = jax.vmap(update.update_state)(grads[OWG]["scanned"])
        held = {"scanned": scanned, "shared": update.update_state(grads[OWG]["shared"])}
        return {"params": optax.apply_updates(variables["params"], updates), OWG: held}, opt, value

    first = variables
    values = []
    for _ in range(5):
        variables, opt, value = step(variables, opt)
        values.append(float(value))
    assert values[-1] < values[0]
    kernels = np.abs(np.asarray(first["params"]["scanned"]["layer"]["kernel"])).max((1, 2))
    after = jax.jit(lambda v: step(v, opt)[0])(first)[OWG]
    tools.same(after["scanned"]["layer"]["state"]["weight"].scale[:, 0], np.float32(448) / kernels)
    tools.same(after["scanned"]["layer"]["state"]["input"].scale[:1, 0], np.float32([448]) / np.abs(x).max())
    assert after["shared"]["state"]["grad_output"].scale != 1
