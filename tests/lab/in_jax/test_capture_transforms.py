"""capture inside of JAX's transformations: loops, branches, remat, vmap, custom derivatives and shards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from diptych.common.errors import UnsupportedError
from diptych.lab.capture import CaptureWarning
from in_jax.captures import Deep, close, recorded

pytestmark = pytest.mark.sampled

X = jax.random.normal(jax.random.key(1), (4, 8))
LAYERS = 3


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return jnp.tanh(linen.Dense(8, name="fc")(x)), None


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "remat"])
def test_scan_over_layers(tmp_path, remat):
    """Each iteration is a call; a gradient has the call of its output, though backward runs in the other order."""
    model = Deep(Layer, LAYERS, remat)
    variables = model.init(jax.random.key(0), X)
    loss = lambda v: (model.apply(v, X) ** 2).mean()  # noqa: E731
    got = recorded(tmp_path, jax.jit(jax.value_and_grad(loss)), (variables,))
    assert got.meta.plain_bits is True and got.retraces == 1
    calls = ["", "#1", "#2"]
    assert got.names("activation") == [f"{site}{c}" for c in calls for site in ("h/fc", "h[0]")] + ["(model)"]
    assert got.names("activation_grad") == ["(model)", *(f"{s}{c}" for c in calls[::-1] for s in ("h[0]", "h/fc"))]
    kernel, bias = (variables["params"]["h"]["fc"][name] for name in ("kernel", "bias"))

    def unrolled(added):
        x, found = X, []
        for i in range(LAYERS):
            y = x @ kernel[i] + bias[i] + added[i]
            x = jnp.tanh(y)
            found.append(y)
        return (x**2).mean(), found

    grads, outputs = jax.grad(unrolled, has_aux=True)(jnp.zeros((LAYERS, *X.shape)))
    for i, call in enumerate(calls):
        close(got.value(f"activation:h/fc{call}"), outputs[i])
        close(got.value(f"activation_grad:h/fc{call}"), grads[i])
        of_parameters = {"parameter:h/fc/kernel", "parameter:h/fc/bias"}
        before = {f"activation:h[0]{calls[i - 1]}"} if i else set()
        assert set(got.steps[0][f"activation:h/fc{call}"].site.inputs) == of_parameters | before


def test_gradients_of_what_a_loop_does_once(tmp_path):
    """JAX moves the module that depends on no iteration out of the loop: one call, whose gradients belong to none."""
    model = linen.Dense(8, use_bias=False)
    variables = model.init(jax.random.key(0), X)

    def loss(v):
        def body(carry, _):
            return carry + model.apply(v, X).sum() * 2 + (model.apply(v, X * carry) * 3).sum(), None

        return jax.lax.scan(body, 1.0, None, length=2)[0]

    with pytest.warns(CaptureWarning, match=r"leaves out a gradient of \(model\)"):
        got = recorded(tmp_path / "a", jax.jit(jax.grad(loss)), (variables,))
    y = X @ variables["params"]["kernel"]
    carry = 1 + 5 * y.sum()
    assert got.names("activation") == ["(model)", "(model)#1", "(model)#2"]
    assert got.names("activation_grad") == ["(model)#2", "(model)#1"]
    for key, want in (("activation:(model)", y), ("activation:(model)#1", y), ("activation:(model)#2", y * carry),
                      ("activation_grad:(model)#2", jnp.full_like(y, 3)),
                      ("activation_grad:(model)#1", jnp.full_like(y, 3 * (1 + 3 * y.sum())))):  # fmt: skip
        close(got.value(key), want)
    assert "activation_grad:(model)#1" in got.steps[0]["parameter_grad:kernel"].site.inputs

    twice = jax.grad(lambda v: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(lambda v: loss(v) ** 2)(v))))
    with pytest.warns(CaptureWarning, match=r"leaves out a gradient of \(model\)"):
        recorded(tmp_path / "b", jax.jit(twice), (variables,))


@pytest.mark.parametrize("chosen", [True, False])
def test_branches(tmp_path, chosen):
    """The branch that ran is recorded."""

    def layer(name):
        return lambda _, x: linen.Dense(8, name=name)(x)

    class Either(linen.Module):
        @linen.compact
        def __call__(self, x, chosen):
            x = linen.Dense(8, name="first")(x)
            if self.is_initializing():
                return layer("two")(self, layer("one")(self, x))
            return linen.cond(chosen, layer("one"), layer("two"), self, x)

    model = Either()
    variables = model.init(jax.random.key(0), X, True)
    loss = lambda v, chosen: (model.apply(v, X, chosen) ** 2).sum()  # noqa: E731
    got = recorded(
        tmp_path, jax.jit(jax.grad(loss)), (variables, jnp.array(chosen)), (variables, jnp.array(not chosen))
    )
    ran, other = ("one", "two") if chosen else ("two", "one")
    assert got.names("activation") == ["first", ran, "(model)"] and f"activation:{other}" in got.steps[1]
    p = variables["params"]
    first = X @ p["first"]["kernel"] + p["first"]["bias"]
    close(got.value(f"activation:{ran}"), first @ p[ran]["kernel"] + p[ran]["bias"])
    assert "activation:first" in got.steps[0][f"activation:{ran}"].site.inputs


def test_while_loop(tmp_path):
    """The last iteration is recorded, or none if there was none."""
    model = linen.Dense(8, use_bias=False)
    variables = model.init(jax.random.key(0), X)

    def run(variables, n):
        body = lambda s: (s[0] + 1, jnp.tanh(model.apply(variables, s[1])))  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] < n, body, (0, X))[1]

    got = recorded(tmp_path, jax.jit(run), (variables, jnp.int32(3)), (variables, jnp.int32(0)))
    kernel, x = variables["params"]["kernel"], X
    for _ in range(2):
        x = jnp.tanh(x @ kernel)
    close(got.value("activation:(model)"), x @ kernel)
    assert not got.steps[1]
    with pytest.raises(UnsupportedError, match="inside of the condition of a while loop"):
        condition = lambda v: jax.lax.while_loop(lambda x: model.apply(v, x).sum() > 1e9, lambda x: x + 1, X)  # noqa: E731
        recorded(tmp_path / "b", condition, (variables,), check=False)


def test_while_loop_whose_constants_are_no_sites(tmp_path):
    """Arrays that the body of a loop reads and does not change are not computed from the loop's initial state."""

    def run(up, w):
        with jax.named_scope("up"):
            x = X @ up
        with jax.named_scope("loop"):
            return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]

    got = recorded(tmp_path, jax.jit(run), (jnp.ones((8, 8)), jnp.eye(8)), ops="all")
    inputs = {name: got.steps[0][f"operand:loop/matmul.{name}"].site.inputs for name in "ab"}
    assert inputs == {"a": ("result:up/matmul.out",), "b": ()}


def test_while_loop_under_vmap(tmp_path):
    """Examples end in iterations of their own, which the captured function must not change."""

    def run(n, x, w):
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))

    args = jnp.array([[3, 0], [1, 5]]), X.reshape(2, 2, 8), jnp.eye(8) / 2
    both = jax.vmap(jax.vmap(run, in_axes=(0, 0, None)), in_axes=(0, 0, None))
    got = recorded(tmp_path, jax.jit(both), args, ops="all")
    assert got.meta.plain_bits is True
    assert got.results[0][0].tolist() == args[0].tolist()
    assert got.steps[0]["operand:matmul.a"].site.shape == (2, 2, 8)


def test_vmap_records_all_examples(tmp_path):
    """The axis of the examples comes first, wherever JAX has put it."""
    model = linen.Dense(3)
    x = jnp.moveaxis(jax.random.normal(jax.random.key(2), (5, 4, 8)), 0, 1)
    variables = model.init(jax.random.key(0), X)
    apply = jax.vmap(model.apply, in_axes=(None, 1), out_axes=2)
    got = recorded(tmp_path, jax.jit(jax.grad(lambda v: (apply(v, x) ** 2).sum())), (variables,))
    want = jnp.moveaxis(x, 1, 0) @ variables["params"]["kernel"]
    close(got.value("activation:(model)"), want)
    close(got.value("activation_grad:(model)"), 2 * want)


def test_custom_derivatives(tmp_path):
    """Rules run as they are, differentiated or not."""

    @jax.custom_vjp
    def odd(x):
        return jnp.sin(x)

    odd.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jax.vjp(jnp.tanh, x)[1](g)[0] * 2,))

    class Custom(linen.Module):
        @linen.compact
        def __call__(self, x):
            return odd(linen.Dense(8, name="fc")(x))

    model = Custom()
    variables = model.init(jax.random.key(0), X)
    got = recorded(tmp_path / "a", jax.jit(jax.grad(lambda v: model.apply(v, X).sum())), (variables,))
    y = X @ variables["params"]["fc"]["kernel"]
    close(got.value("activation_grad:fc"), 2 * (1 - jnp.tanh(y) ** 2))
    assert got.names("parameter") == ["fc/bias", "fc/kernel"]
    got = recorded(tmp_path / "b", lambda v: model.apply(v, X), (variables,))
    close(got.value("activation:(model)"), jnp.sin(y))


def test_nnx_scan_and_remat(tmp_path):
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))
            self.layers = make(rngs)

        def __call__(self, x):
            call = nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
            return nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    model = Scanned(nnx.Rngs(0))
    step = nnx.jit(nnx.value_and_grad(lambda model: (model(X) ** 2).sum()))
    got = recorded(tmp_path, step, (model,))
    assert got.names("activation") == ["layers", "layers#1", "layers#2", "(model)"]
    kernels, x = model.layers.kernel[...], X
    for i, call in enumerate(("", "#1", "#2")):
        close(got.value(f"activation:layers{call}"), x @ kernels[i])
        x = jnp.tanh(x @ kernels[i])
    assert set(got.names("activation_grad")) == {"layers", "layers#1", "layers#2", "(model)"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shards(tmp_path, kind):
    """Inside of shard_map each shard is a tensor of its own; a sharded array under jit is one."""
    model = linen.Dense(8, name="fc")
    variables = model.init(jax.random.key(0), X)
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, kind), devices=jax.devices("cpu")[:4])
    specs = {"in_specs": (P(), P("d")), "out_specs": P()}
    mapped = jax.shard_map(lambda v, x: jax.lax.pmean((model.apply(v, x) ** 2).mean(), "d"), mesh=mesh, **specs)
    placed = jax.device_put(variables, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("d")))
    kernel = variables["params"]["kernel"]
    with jax.set_mesh(mesh):
        got = recorded(tmp_path / "a", jax.jit(jax.value_and_grad(mapped)), placed)
        assert got.names("activation") == ["(model)@d=0", "(model)@d=1"]
        for i in range(2):
            close(got.value(f"activation:(model)@d={i}"), X[2 * i : 2 * i + 2] @ kernel)
        whole = lambda v, x: (model.apply(v, x) ** 2).mean()  # noqa: E731
        got = recorded(tmp_path / "b", jax.jit(jax.value_and_grad(whole)), placed, values="sample")
    close(got.value("activation:(model)"), X @ kernel)
    close(got.value("activation_grad:(model)"), 2 * (X @ kernel) / X.size)


def test_shards_over_explicit_axes_without_a_mesh_around(tmp_path):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    x, w = (jax.device_put(a, NamedSharding(mesh, P(*p))) for a, p in ((X, ["d", None]), (jnp.ones((8, 3)), [])))
    got = recorded(tmp_path, jax.jit(jax.grad(lambda w: jnp.tanh(x @ w).sum())), (w,), ops="all")
    close(got.value("operand:matmul.a"), X)


def test_collectives_are_inputs_from_other_shards(tmp_path):
    """Inputs of a summed gradient, and of what `ppermute` or `psum` returns, are sites of all shards along the axis."""
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    model = linen.Dense(8, name="fc")
    variables = model.init(jax.random.key(0), X)

    def step(v, x):
        return jax.lax.pmean(jax.grad(lambda v: (model.apply(v, x) ** 2).mean())(v), "d")

    specs: dict = {"mesh": mesh, "in_specs": (P(), P("d"))}
    got = recorded(tmp_path / "a", jax.jit(jax.shard_map(step, out_specs=P(), **specs)), (variables, X))
    inputs = got.steps[0]["parameter_grad:kernel"].site.inputs
    assert set(inputs) == {"activation_grad:(model)@d=0", "activation_grad:(model)@d=1"}

    def ring(w, x):
        for i in range(2):
            with jax.named_scope(f"s{i}"):
                x = jax.lax.ppermute(jnp.tanh(x @ w), "d", [(0, 1), (1, 0)])
        return x

    got = recorded(tmp_path / "b", jax.jit(jax.shard_map(ring, out_specs=P("d"), **specs)), (jnp.eye(8), X), ops="all")
    for i in range(2):
        inputs = got.steps[0][f"operand:s1/matmul.a@d={i}"].site.inputs
        assert set(inputs) == {"result:s0/matmul.out@d=0", "result:s0/matmul.out@d=1"}
        close(got.value(f"operand:s1/matmul.a@d={i}"), jnp.tanh(got.value(f"result:s0/matmul.out@d={1 - i}")))
    along = lambda x: jax.lax.psum(x @ jnp.ones((8, 8)), "t") @ jnp.ones((8, 8))  # noqa: E731
    two = jax.shard_map(along, mesh=mesh, in_specs=P("d", "t"), out_specs=P("d"))
    got = recorded(tmp_path / "c", jax.jit(two), (jnp.ones((4, 16)),), ops="all")
    for i in range(2):
        inputs = got.steps[0][f"operand:matmul.a@d={i}"].site.inputs
        assert inputs == (f"result:matmul.out@d={i},t=0", f"result:matmul.out@d={i},t=1")


def test_primitives_that_are_not_known(tmp_path):
    model = linen.Dense(8)
    variables = model.init(jax.random.key(0), X)
    solve = lambda v: jax.lax.custom_linear_solve(  # noqa: E731
        lambda x: model.apply(v, x), X, solve=lambda _, b: b, transpose_solve=lambda _, b: b
    )
    with pytest.raises(UnsupportedError, match="inside of JAX's primitive custom_linear_solve are not supported"):
        recorded(tmp_path, solve, (variables,), check=False)
