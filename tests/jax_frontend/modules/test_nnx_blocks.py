"""nnx modules of several ops: against the functions that they wrap, and against torch's modules in bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych.common import UnsupportedError
from jax_frontend import tools

nnx = pytest.importorskip("flax.nnx")
import diptych.jax.nnx as dnnx  # noqa: E402

pytestmark = pytest.mark.sampled

X = tools.normal("x", (4, 16, 32))
ROWS = np.array([0, 32, 32, 64], np.int32)  # the second group is empty
DELAYED = dj.DelayedScaling(amax_history_len=4)
RECIPES = {"mxfp8": dj.MXFP8BlockScaling(), "current": dj.Float8CurrentScaling(), "blocks": dj.Float8BlockScaling(),
           "delayed": DELAYED, "fp4": dj.NVFP4BlockScaling(disable_rht=True)}  # fmt: skip
RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
WRT = nnx.DiffState(0, dnnx.DIFFERENTIATED)
NORMAL = nnx.initializers.normal()

MAKE = {
    "Linear": lambda r: dnnx.Linear(32, 32, recipe=r, bias_init=NORMAL, rngs=nnx.Rngs(0)),
    "LayerNormLinear": lambda r: dnnx.LayerNormLinear(32, 32, recipe=r, bias_init=NORMAL, rngs=nnx.Rngs(0)),
    "LayerNormMLP": lambda r: dnnx.LayerNormMLP(32, 64, recipe=r, activation="swiglu", bias_init=NORMAL,
                                                rngs=nnx.Rngs(0)),
    "GroupedLinear": lambda r: dnnx.GroupedLinear(3, 32, 32, recipe=r, bias_init=NORMAL, rngs=nnx.Rngs(0)),
}  # fmt: skip


@RECIPE
def test_layernorm_linear_is_the_function(recipe):
    m = MAKE["LayerNormLinear"](recipe)
    states = None if m.states is None else m.states.get_value()
    rng = None if m.random is None else m.random.get_value()
    want = dj.layernorm_dense(X, m.scale[...], m.ln_bias[...], m.kernel[...].T, m.bias[...], recipe=recipe,
                              state=states, rng=rng, return_layernorm_output=True)  # fmt: skip
    tools.same(m(X), want[0])
    m.return_layernorm_output = True
    tools.same(m(X)[1], want[1])


def test_a_mixture_is_its_experts_weighted():
    """Without a recipe each token's result is computed from its experts one at a time."""
    m, x = dnnx.MoE(32, 16, 4, recipe=None, rngs=nnx.Rngs(0)), X.reshape(-1, 32)
    y, balance = m(X)
    probs = jax.nn.softmax(x @ m.router.kernel[...])
    top, experts = jax.lax.top_k(probs, 2)
    want = []
    for token in range(len(x)):
        total = jnp.zeros(32)
        for p, e in zip(top[token] / top[token].sum(), experts[token], strict=True):
            gate, up = jnp.split(x[token] @ m.wi.kernel[e], 2)
            total += p * ((jax.nn.silu(gate) * up) @ m.wo.kernel[e])
        want.append(total)
    np.testing.assert_allclose(y.reshape(-1, 32), jnp.stack(want), atol=1e-5)
    assert 0.5 < balance < 4


@RECIPE
def test_a_mixture_trains_under_jit(recipe):
    m = dnnx.MoE(32, 32, 4, recipe=recipe, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(m):
        loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(X)[0] - X).mean(), argnums=WRT)(m)
        nnx.update(m, jax.tree.map(lambda p, g: p - 0.3 * g, nnx.state(m, nnx.Param), nnx.state(grads, nnx.Param)))
        dnnx.update_states(m, grads)
        return loss

    losses = [float(step(m)) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_equal_modules_share_compiled_code():
    for name, make in MAKE.items():
        traces, groups = [], (ROWS,) if name == "GroupedLinear" else ()
        f = nnx.jit(lambda m, x, traces=traces, groups=groups: (traces.append(0), m(x, *groups))[1])
        for _ in range(2):
            f(make(dj.MXFP8BlockScaling()), X.reshape(-1, 32))
        assert len(traces) == 1, name


@pytest.mark.parametrize("name", MAKE)
def test_held_kernels_have_the_bits_of_kernels_quantized_in_each_call(name):
    m, groups = MAKE[name](dj.MXFP8BlockScaling()), (ROWS,) if name == "GroupedLinear" else ()
    rows = X.reshape(-1, 32)
    dx = lambda m: nnx.grad(lambda m, x: jnp.square(m(x, *groups)).sum(), argnums=1)(m, rows)  # noqa: E731
    want = m(rows, *groups), dx(m)
    dnnx.hold_kernels(m)
    assert len(jax.tree.leaves(nnx.state(m, dnnx.HeldKernel))) >= 4  # data and scales of both copies
    tools.same_tree((m(rows, *groups), dx(m)), want)


def test_blocks_can_be_stacked_and_scanned():
    """A scan over a stack of LayerNormMLPs, whose layers are recomputed, has the bits of the layers in a row."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        return dnnx.LayerNormMLP(32, 32, recipe=DELAYED, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def run(x, layer):
        return layer(x)

    stack = make(nnx.Rngs(0))
    graph = nnx.graphdef(dnnx.LayerNormMLP(32, 32, recipe=DELAYED, rngs=nnx.Rngs(0)))
    row = [nnx.merge(graph, jax.tree.map(lambda v, i=i: v[i], nnx.state(stack))) for i in range(2)]
    tools.same(run(X, stack), row[1](row[0](X)))
    grads = nnx.grad(lambda m: jnp.square(run(X, m)).mean(), argnums=WRT)(stack)
    dnnx.update_states(stack, grads)
    assert stack.states.get_value()["fc1"]["input"].scale.shape == (2, 1)
    assert (stack.states.get_value()["fc2"]["grad_output"].scale != 1).all()


def test_forward_mode_and_second_derivatives_are_refused():
    m = MAKE["LayerNormLinear"](dj.MXFP8BlockScaling())
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(m, (X,), (X,))
    with pytest.raises(UnsupportedError, match=r"second derivatives.*recipe=None"):
        jax.grad(lambda x: jax.grad(lambda x: jnp.square(m(x)).sum())(x).sum())(X)


# --- torch's modules ---

NAMES = {
    "kernel": "weight", "bias": "bias", "scale": "layer_norm_weight", "ln_bias": "layer_norm_bias",
    "wi_kernel": "fc1_weight", "wi_bias": "fc1_bias", "wo_kernel": "fc2_weight", "wo_bias": "fc2_bias",
}  # fmt: skip


def of_torch(name, dt):
    options = {"LayerNormMLP": {"activation": "swiglu"}}.get(name, {})
    sizes = {"LayerNormMLP": (32, 64), "GroupedLinear": (3, 32, 32)}.get(name, (32, 32))
    return getattr(dt, name)(*sizes, **options)


def as_torch_has_it(key, value):
    return np.swapaxes(np.asarray(value), -2, -1) if "kernel" in key else np.asarray(value)


@RECIPE
@pytest.mark.parametrize("name", MAKE)
def test_steps_have_the_bits_of_torch(name, recipe):
    """Three steps with equal parameters: y, dx, the gradients of all parameters, and the states with all amaxes."""
    torch, dt = pytest.importorskip("torch"), pytest.importorskip("diptych.torch")
    model, module, dy = MAKE[name](recipe), of_torch(name, dt), tools.normal("dy", X.shape)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    groups = (ROWS,) if name == "GroupedLinear" else ()
    inputs = X.reshape(-1, 32) if groups else X
    dy = dy.reshape(inputs.shape)
    with torch.no_grad():
        held = dict(module.named_parameters())
        for key, value in params.items():
            held[NAMES[key]].copy_(torch.from_numpy(as_torch_has_it(key, value).copy()))
    if model.random is not None:
        module.seed_rng(5, 0)
        model.random.set_value(dj.rng_state(5, 0))

    @nnx.jit
    def step(model, x):
        def loss(model, x):
            y = model(x, *groups)
            return (y * dy).sum(), y

        wrt = (WRT, 1)
        (_, y), (grads, dx) = nnx.value_and_grad(loss, argnums=wrt, has_aux=True)(model, x)
        news = {} if model.states is None else model.states.get_value()
        if news:
            news = dj.overwrite_states(news, grads["states"].get_value())
        dnnx.update_states(model, grads)
        return y, dx, nnx.state(grads, nnx.Param), news

    for i in range(3):
        y, dx, grads, news = step(model, inputs)
        x = torch.from_numpy(np.array(inputs)).requires_grad_()
        module.zero_grad()
        with dt.autocast(recipe=recipe):
            got = module(x, *([[32, 0, 32]] if groups else []))
        got.backward(torch.from_numpy(np.array(dy)))
        tools.same(y, got.detach().numpy(), f"y of step {i}")
        tools.same(dx, x.grad.numpy(), f"dx of step {i}")
        for key, value in nnx.to_pure_dict(grads).items():
            tools.same(as_torch_has_it(key, value), held[NAMES[key]].grad.numpy(), f"gradient of {key} in step {i}")
        recorded = {k: v for k, v in module.state_dict().items() if k.endswith(("scale", "amax_history"))}
        flat = dj.state_dict(news)
        assert len(recorded) == (0 if recipe is not DELAYED else 12 if name == "LayerNormMLP" else 6)
        for key, value in recorded.items():
            tools.same(flat[key], value.numpy(), f"{key} of step {i}")
