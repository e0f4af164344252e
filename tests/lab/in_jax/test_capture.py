"""capture: the values, gradients and ancestors that plain JAX computes, the results of the function, and misuse."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common.errors import ArgumentError
from diptych.jax import lab
from diptych.lab.capture import CaptureWarning
from diptych.lab.traces import Trace, TraceError
from in_jax.captures import close, recorded, same_bits

pytestmark = pytest.mark.sampled

X = jax.random.normal(jax.random.key(1), (6, 8))


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, name="down")(linen.gelu(linen.Dense(16, name="up")(x)))


def mlp():
    return Mlp(), Mlp().init(jax.random.key(0), X)


def plain_mlp(params, x, at_up=0.0, at_down=0.0):
    """The same model, with something added to the layers' outputs, whose gradients are thus those of the outputs."""
    up = x @ params["up"]["kernel"] + params["up"]["bias"] + at_up
    down = linen.gelu(up) @ params["down"]["kernel"] + params["down"]["bias"] + at_down
    return up, down


def test_linen_training_step(tmp_path):
    model, variables = mlp()

    @jax.jit
    def step(variables, x):
        loss, grads = jax.value_and_grad(lambda v: (model.apply(v, x) ** 2).mean())(variables)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, variables, grads)

    calls = [(variables, X), step(variables, X)[1:] + (X,), (variables, X + 1)]
    got = recorded(tmp_path, step, *calls)
    assert got.meta.plain_bits is True and got.meta.instrumented and got.retraces == 1 and len(got.steps) == 3
    same_bits(got.results, [step(*c) for c in calls])

    names = [f"{layer}/{p}" for layer in ("down", "up") for p in ("bias", "kernel")]
    assert got.names("parameter") == got.names("parameter_grad") == names
    assert got.names("activation") == ["up", "down", "(model)"] and got.names("activation_grad") == [
        "(model)",
        "down",
        "up",
    ]
    params = variables["params"]
    zeros = [jnp.zeros_like(y) for y in plain_mlp(params, X)]
    loss = lambda p, up, down: (plain_mlp(p, X, up, down)[1] ** 2).mean()  # noqa: E731
    of_params, of_up, of_down = jax.grad(loss, (0, 1, 2))(params, *zeros)
    up, down = plain_mlp(params, X)
    for key, want in (("activation:up", up), ("activation:down", down), ("activation:(model)", down),
                      ("activation_grad:up", of_up), ("activation_grad:(model)", of_down),
                      ("result:loss", (down**2).mean())):  # fmt: skip
        close(got.value(key), want)
    for name in names:
        layer, p = name.split("/")
        same_bits(got.value(f"parameter:{name}"), params[layer][p])
        close(got.value(f"parameter_grad:{name}"), of_params[layer][p])
    inputs = {key: set(o.site.inputs) for key, o in got.steps[0].items()}
    assert inputs["activation:down"] == {"activation:up", "parameter:down/kernel", "parameter:down/bias"}
    assert inputs["activation:(model)"] == {"activation:down"} and inputs["result:loss"] == {"activation:(model)"}
    assert inputs["parameter_grad:up/kernel"] == {"activation_grad:up"}  # and x, which is no site
    assert inputs["parameter_grad:down/kernel"] == {"activation:up", "activation_grad:down"}


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.fc = nnx.Linear(width, width, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.gelu(self.fc(x)))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.h = nnx.List([Block(8, rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.h:
            x = block(x)
        return x


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def stack():
    model = Stack(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X


def test_nnx_training_step(tmp_path):
    """The model and the optimizer change in place; the models of three steps are one plain model's."""
    ours, plain, step = stack(), stack(), nnx.jit(nnx_step)
    structure = nnx.graphdef(ours[0])
    got = recorded(tmp_path, step, ours, ours, ours)
    same_bits(got.results, [step(*plain) for _ in range(3)])
    same_bits(nnx.state(ours[:2]), nnx.state(plain[:2]))
    assert got.retraces == 1 and got.meta.plain_bits is True and nnx.graphdef(ours[0]) == structure
    layers = [f"h/{i}{part}" for i in range(2) for part in ("/fc", "/drop", "")]
    assert got.names("activation") == [*layers, "(model)"]
    assert got.names("activation_grad") == [*layers, "(model)"][::-1]
    assert got.names("parameter") == [f"h/{i}/fc/{p}" for i in range(2) for p in ("bias", "kernel")]
    first = stack()[0]
    same_bits(got.value("parameter:h/1/fc/kernel"), first.h[1].fc.kernel[...])
    close(got.value("activation:h/0/fc"), X @ first.h[0].fc.kernel[...] + first.h[0].fc.bias[...])
    assert got.steps[0]["activation:h/0/drop"].record.statistics.zero > 0


def test_forward_alone_and_two_models(tmp_path):
    """Parameters of a model that is not differentiated are recorded where it runs."""
    a, b = Block(8, nnx.Rngs(0)), Block(8, nnx.Rngs(1))
    got = recorded(tmp_path, lambda actor, critic: critic(actor(X)), (a, b))
    assert got.names("activation") == [f"{m}{part}" for m in ("actor", "critic") for part in ("/fc", "/drop", "")]
    assert got.names("parameter") == [f"{m}/fc/{p}" for m in ("actor", "critic") for p in ("bias", "kernel")]
    assert set(got.steps[0]["activation:critic/fc"].site.inputs) == {
        "activation:actor", "parameter:critic/fc/bias", "parameter:critic/fc/kernel"
    }  # fmt: skip


@pytest.mark.parametrize("ops", ["own", "all"])
def test_scalar_parameters_that_are_constants(tmp_path, ops):
    class Scaled(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x * self.param("scale", lambda key: jnp.ones(()))

    got = recorded(tmp_path, lambda x: Scaled().apply({"params": {"scale": jnp.asarray(2.0)}}, x), (X,), ops=ops)
    same_bits(got.results, [2 * X])
    assert got.names("parameter") == ["scale"] and got.names("activation") == ["(model)"]


def test_plain_function(tmp_path):
    def loss(params, x):
        with jax.named_scope("up"):
            x = jnp.tanh(x @ params["up"])
        x = jax.ad_checkpoint.checkpoint_name(x, "hidden")
        with jax.named_scope("down"):
            return (x @ params["down"]).sum()

    params = {"up": X.T @ X, "down": X.T}
    got = recorded(tmp_path, jax.value_and_grad(loss), (params, X))
    assert got.names("parameter") == ["down", "up"] and got.names("activation") == ["hidden"]
    assert got.names("result")[:3] == ["up/dot_general.out", "down/dot_general.out", "loss"]
    close(got.value("activation:hidden"), jnp.tanh(X @ params["up"]))
    close(got.value("parameter_grad:up"), jax.grad(loss)(params, X)["up"])


def test_diptych_ops(tmp_path):
    kernel = jax.random.normal(jax.random.key(0), (32, 64))
    x = jnp.ones((32, 64), jnp.bfloat16)
    recipe = dj.Float8CurrentScaling()
    step = jax.jit(jax.grad(lambda kernel: dj.dense(x, kernel.astype(x.dtype), recipe=recipe).sum().astype("float32")))
    got = recorded(tmp_path, step, (kernel,))
    same_bits(got.results[0], step(kernel))
    assert got.names("operand")[:2] == ["quantize.x", "quantize.x#1"]
    site = got.steps[0]["operand:gemm.b_data"].site
    assert site.inputs == ("result:quantize.rowwise_data#1",)
    assert site.dtype == "float8_e4m3fn"  # JAX has bytes
    of_d = {"a_data", "a_scale_inv", "b_data", "b_scale_inv"}
    assert set(got.steps[0]["result:gemm.d"].site.inputs) == {f"operand:gemm.{name}" for name in of_d}
    bare = recorded(tmp_path / "none", step, (kernel,), ops="none")
    same_bits(bare.results[0], got.results[0])
    of_ops = [key for key in got.steps[0] if key.startswith(("operand:", "result:"))]
    assert set(bare.steps[0]) == set(got.steps[0]) - set(of_ops) | {"result:loss"} & set(of_ops)


def test_states_that_are_donated_as_pytrees(tmp_path):
    graph, state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    def loss(state):
        return (nnx.merge(graph, state)(jnp.ones((2, 4))) ** 2).mean()

    def step(state):
        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    want = step(state)
    got = recorded(tmp_path / "a", jax.jit(step, donate_argnums=0), (state,))
    assert got.meta.plain_bits is True
    same_bits(jax.tree.leaves(got.results[0]), jax.tree.leaves(want))


def test_cached_partial_is_refused(tmp_path):
    cached = nnx.cached_partial(nnx.jit(lambda model, x: model(x)), nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(NotImplementedError, match="cached_partial"):
        lab.capture(cached, tmp_path / "t")


def test_patterns_that_match_nothing_are_named(tmp_path):
    with (
        pytest.warns(CaptureWarning, match=r"step 0 records nothing, since no site matches 'encoder\.\*\*'"),
        lab.capture(jax.jit(jnp.sin), tmp_path / "t", sites="encoder.**") as run,
    ):
        run(jnp.ones(3))


def test_jit_options_are_kept(tmp_path):
    """Donation, static arguments, shardings, and results that are no arrays."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    rows, columns = NamedSharding(mesh, P("d")), NamedSharding(mesh, P(None, "d"))

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def donating(x, n, factor=2.0):
        return {"x": functools.reduce(lambda x, _: jnp.sin(x) * factor, range(n), x)}

    x, y = jnp.ones((4, 4)), jnp.ones((4, 4))
    got = recorded(tmp_path / "a", donating, (x, 3), (y, 2))
    assert x.is_deleted() and y.is_deleted() and got.retraces == 2 and got.meta.plain_bits is True
    same_bits(got.results, [donating(jnp.ones((4, 4)), n) for n in (3, 2)])
    sharded = jax.jit(lambda x: x @ x.T, in_shardings=rows, out_shardings=columns)
    got = recorded(tmp_path / "b", sharded, (np.ones((8, 8), np.float32),))
    assert got.results[0].sharding.is_equivalent_to(columns, 2)
    got = recorded(tmp_path / "c", lambda x, name: (x + 1, 3, name), (X, "a"))
    assert got.results[0][1:] == (3, "a") and got.names("activation") == []


def test_jitted_functions_keep_their_compiled_code(tmp_path):
    """A function that was traced before is traced anew, and only once; layers that share a trace keep their names."""
    count = []

    @jax.jit
    def layer(kernel, x):
        count.append(1)
        return jnp.tanh(x @ kernel)

    class Two(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Inner(name="b")(Inner(name="a")(x))

    class Inner(linen.Module):
        @linen.compact
        def __call__(self, x):
            return layer(self.param("kernel", linen.initializers.ones, (8, 8)), x)

    variables = Two().init(jax.random.key(0), X)
    step = jax.jit(Two().apply)
    want, before = step(variables, X), len(count)
    got = recorded(tmp_path, step, (variables, X), (variables, X))
    assert len(count) == before + 2  # the two modules
    same_bits([want] * 2, got.results)
    step(variables, X)
    assert len(count) == before + 2 and got.names("activation") == ["a", "b", "(model)"]


def test_every_sites_and_budget(tmp_path):
    model, variables = mlp()
    step = jax.jit(jax.grad(lambda v, x: (model.apply(v, x) ** 2).sum()))
    got = recorded(tmp_path / "a", step, *[(variables, X)] * 5, every=2, sites="up/**", values="hash", statistics=False)
    assert [len(s) for s in got.steps] == [6] * 3  # the layer's output, parameters and their gradients
    assert all(o.record.statistics is None and o.record.values == "none" for o in got.steps[0].values())
    assert [s for s in Trace.open(tmp_path / "a" / "trace").ranks[0].steps] == [0, 2, 4]

    big = jax.random.normal(jax.random.key(0), (64, 64))
    f = jax.jit(jax.value_and_grad(lambda p: (p @ p).sum()))
    got = recorded(tmp_path / "b", f, *[(big,)] * 3, budget=2 * 5 * 64 * 64 * 4)
    kept = [[o.record.values for o in s.values() if o.site.size > 1] for s in got.steps]
    assert kept[0] != kept[-1] and {"whole", "sampled"} == {k for s in kept for k in s}
    sample = got.steps[-1]["parameter:0"]
    assert sample.record.count == 1024
    got = recorded(tmp_path / "c", f, (big,), values="sample")
    assert got.steps[0]["parameter:0"].values.tensor.bits.shape == (1024,)


def test_bits_that_differ_are_noted(tmp_path):
    """A function outside of jit runs op by op, and need not have the bits of the compiled one."""
    state = [0.0]

    def changing(x):
        state[0] += 1
        return x + state[0]

    assert recorded(tmp_path / "a", changing, (X,)).meta.plain_bits is False
    assert recorded(tmp_path / "b", jnp.sin, (X,), check=False).meta.plain_bits is None


def test_errors(tmp_path):
    for error, said, options in (
        (ArgumentError, "capture: fn must be a function, got int", {"fn": 1}),
        (ArgumentError, "capture: statistics must be bool", {"statistics": 1}),
        (ArgumentError, "capture: every must be int", {"every": 1.5}),
        (ValueError, "capture: every must be at least 1", {"every": 0}),
        (ValueError, 'values must be "hash", "sample" or "full"', {"values": "all"}),
    ):
        with pytest.raises(error, match=said):
            lab.capture(**({"fn": jnp.sin, "out": tmp_path / "no"} | options))
    assert not (tmp_path / "no").exists()
    run = lab.capture(jnp.sin, out=tmp_path / "a")
    with pytest.raises(TraceError, match="a trace needs a new folder"):
        lab.capture(jnp.sin, out=tmp_path / "a")
    with pytest.raises(ZeroDivisionError):
        lab.capture(lambda x: x / (1 // 0), out=tmp_path / "b", check=False)(X)
    same_bits(run(X), jnp.sin(X))
    run.close()
    with pytest.raises(ValueError, match="capture: it is closed"):
        run(X)


@pytest.mark.filterwarnings("ignore:.*float64.*")
def test_float64(tmp_path):
    with jax.enable_x64(True):
        got = recorded(tmp_path, jax.jit(jax.grad(lambda x: (x @ x.T).sum())), (np.asarray(X, np.float64),))
        assert got.steps[0]["parameter:0"].site.dtype == "float64"
        close(got.value("parameter:0"), X)


def test_the_device_is_the_one_that_ran(tmp_path, monkeypatch):
    """meta.json names the device that holds the arguments, which need not be the default device."""
    module = importlib.import_module("diptych.lab.jax.capture")  # as an attribute of the package, it is the function
    monkeypatch.setattr(module, "_device", lambda: "cuda")
    with lab.capture(jnp.sin, out=tmp_path / "t") as run:
        assert Trace.open(tmp_path / "t").meta.device == "cuda"
        run(jax.device_put(jnp.ones(4), jax.devices("cpu")[0]))
    assert Trace.open(tmp_path / "t").meta.device == "cpu"
