"""Captures of JAX's own operations: what equations and modules are recognized as, what is not, and that each recorded
operation, computed again on its recorded operands, gives its recorded result."""

from __future__ import annotations

import math

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.lab.jax import functions
from in_jax.captures import (
    Deep,
    captured,
    close,
    found,
    names_of,
    operations,
    outs,
    recorded,
    replays,
    same_bits,
)  # fmt: skip

pytestmark = pytest.mark.sampled

IDS = jnp.arange(12).reshape(2, 6) % 11
X = jax.random.normal(jax.random.key(1), (2, 6, 8))


def randomized(tree, dtype=None):
    """The same tree with other values, so that no parameter is zero or one."""
    leaves, structure = jax.tree.flatten(tree)
    drawn = [jnp.asarray(np.random.default_rng(i).normal(size=x.shape) * 0.4, dtype) for i, x in enumerate(leaves)]
    return structure.unflatten([d.astype(dtype or x.dtype) for d, x in zip(drawn, leaves, strict=True)])


# --- models ---


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm(name="ln")(x)
        y = linen.dot_product_attention(*[y[:, :, None]] * 3)[:, :, 0]
        y = linen.RMSNorm(name="rms", epsilon=1e-3)(x + y)
        y = linen.silu(linen.Dense(8, name="gate")(y)) * linen.Dense(8, name="up", use_bias=False)(y)
        return linen.gelu(y), linen.gelu(x, approximate=False)


class Model(linen.Module):
    @linen.compact
    def __call__(self, ids):
        a, b = Block(name="h")(linen.Embed(11, 8, name="embed")(ids))
        x = linen.Conv(8, (3,), strides=2, padding="SAME", feature_group_count=2, use_bias=False, name="conv")(a + b)
        return linen.log_softmax(linen.Dense(5, name="head", use_bias=False)(x))


LINEN = [
    "embed/embedding", "h/ln/layer_norm", "h/matmul", "h/softmax", "h/matmul#1", "h/add", "h/rms/rms_norm",
    "h/gate/matmul", "h/gate/add", "h/silu", "h/up/matmul", "h/mul", "h/gelu", "h/gelu#1", "(model)/add", "conv/conv",
    "head/matmul", "(model)/log_softmax",
]  # fmt: skip


@pytest.mark.parametrize("differentiated, dtype", [(False, "bfloat16"), (True, "float32")], ids=["forward", "grad"])
def test_linen(tmp_path, differentiated, dtype):
    model = Model()
    variables = randomized(jax.eval_shape(model.init, jax.random.key(0), IDS), dtype)
    loss = lambda v, ids: model.apply(v, ids).astype(jnp.float32).mean()  # noqa: E731
    fn = jax.jit(jax.value_and_grad(loss) if differentiated else model.apply)
    got = captured(tmp_path, fn, (variables, IDS))
    assert replays(got) == outs(LINEN) and got.meta.options.ops == "all"
    ops = operations(got)
    options = {name: op.options for name, op in ops.items()}
    assert options["h/rms/rms_norm.out"] == {"axes": 1, "eps": 1e-3}
    assert options["h/softmax.out"] == options["(model)/log_softmax.out"] == {"axis": -1}
    assert [options[f"h/gelu.out{c}"]["approximate"] for c in ("", "#1")] == [True, False]
    assert options["h/up/matmul.out"] == {"equation": "abc,cd->abd", "dtype": dtype}
    assert options["conv/conv.out"] == {
        "layout": "N0C,0IO,N0C", "strides": (2,), "padding": ((0, 1),), "dilation": (1,), "input_dilation": (1,),
        "groups": 2,
    }  # fmt: skip
    same_bits(ops["embed/embedding.out"].inputs["ids"].data, IDS.astype(jnp.uint32))
    values = {key: o.values.tensor.bits for key, o in got.steps[0].items()}
    for name, layer in (("layer_norm", "ln"), ("rms_norm", "rms")):
        same_bits(values[f"operand:h/{layer}/{name}.weight"], values[f"parameter:h/{layer}/scale"])
        same_bits(values[f"result:h/{layer}/{name}.out"], values[f"activation:h/{layer}"])
    weight = got.steps[0]["operand:h/ln/layer_norm.weight"].site.inputs
    assert weight == ("parameter:h/ln/scale",)
    assert set(got.steps[0]["activation:head"].site.inputs) == {"result:head/matmul.out"}


def test_own(tmp_path):
    """By default nothing is recorded of JAX's operations. With them the step has the same bits as without."""
    model = linen.Sequential([linen.Dense(8), jnp.tanh, linen.Dense(3)])
    variables = randomized(jax.eval_shape(model.init, jax.random.key(0), X))
    step = jax.jit(jax.value_and_grad(lambda v: (model.apply(v, X) ** 2).mean()))
    own, every = (recorded(tmp_path / ops, step, (variables,), ops=ops) for ops in ("own", "all"))
    assert own.meta.plain_bits and every.meta.plain_bits and own.meta.options.ops == "own"
    assert own.names("operand") == [] and own.names("result") == ["loss"] and not operations(own)
    others = [key for key, o in every.steps[0].items() if o.site.operation is None and o.site.kind != "operand"]
    assert list(own.steps[0]) == others
    for key in others:
        same_bits(own.value(key), every.value(key))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)
        self.fc = nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=rngs)
        self.rms = nnx.RMSNorm(8, use_scale=False, rngs=rngs)

    def __call__(self, ids):
        return self.rms(nnx.softmax(self.fc(self.norm(self.embed(ids))), axis=1).astype(jnp.float32))


def test_nnx(tmp_path):
    """A training step. The optimizer's sums and products, which depend on gradients, are no forward operations."""

    def step(model, optimizer, ids):
        loss, grads = nnx.value_and_grad(lambda model: (model(ids) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    model = Nnx(nnx.Rngs(0))
    args = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), IDS
    got = captured(tmp_path, nnx.jit(step), args)
    names = ["embed/embedding", "norm/layer_norm", "fc/matmul", "fc/add", "(model)/softmax", "rms/rms_norm"]
    assert replays(got) == outs(names)
    ops = operations(got)
    assert {k: v.dtype for k, v in ops["norm/layer_norm.out"].inputs.items()} == {"x": "bfloat16", "weight": "bfloat16"}
    assert ops["(model)/softmax.out"].options == {"axis": -2} and set(ops["rms/rms_norm.out"].inputs) == {"x"}


class Equinox(eqx.Module):
    norm: eqx.nn.LayerNorm
    rms: eqx.nn.RMSNorm
    biased: eqx.nn.RMSNorm
    fc: eqx.nn.Linear

    def __init__(self):
        self.norm, self.rms = eqx.nn.LayerNorm((6, 8)), eqx.nn.RMSNorm(8, use_bias=False)
        self.biased, self.fc = eqx.nn.RMSNorm(8), eqx.nn.Linear(8, 8, key=jax.random.key(0))

    def __call__(self, x):
        x = jax.vmap(self.rms)(self.norm(x))
        return jax.nn.gelu(jax.vmap(self.fc)(jax.vmap(self.biased)(x)))


def test_equinox_under_vmap(tmp_path):
    """All examples are one tensor. A norm with a bias that the row does not have is seen equation by equation."""
    model = randomized(Equinox())
    step = jax.jit(jax.value_and_grad(lambda m, x: (jax.vmap(m)(x) ** 2).mean()))
    got = captured(tmp_path, step, (model, X))
    names = ["norm/layer_norm", "rms/rms_norm", "biased/mul", "biased/mul#1", "biased/add"]
    assert replays(got) == outs([*names, "fc/matmul", "fc/add", "(model)/gelu"])
    op = operations(got)["norm/layer_norm.out"]
    assert op.options == {"axes": 2, "eps": 1e-5} and op.inputs["x"].data.shape == X.shape
    assert op.inputs["weight"].data.shape == (6, 8)


def test_parameters_that_differ_between_examples(tmp_path):
    model = eqx.filter_vmap(lambda _: eqx.nn.LayerNorm(8), axis_size=2)(None)
    got = captured(tmp_path, lambda m, x: jax.vmap(lambda m, x: m(x))(m, x), (model, X[:, 0]))
    assert got.steps[0]["result:(model)/layer_norm.out"].site.operation is None
    assert got.steps[0]["operand:(model)/layer_norm.weight"].site.shape == (2, 8)


# --- loops, recomputation, shards ---


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return x + linen.gelu(linen.Dense(8, name="fc")(linen.LayerNorm(name="ln")(x))), None


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "remat"])
def test_scan(tmp_path, remat):
    """Each iteration is a call. What backward recomputes is not recorded again, nor what only it needs."""
    model = Deep(Layer, 2, remat)
    variables = randomized(jax.eval_shape(model.init, jax.random.key(0), X))
    got = captured(tmp_path, jax.jit(jax.grad(lambda v: (model.apply(v, X) ** 2).mean())), (variables,))
    once = ["h/ln/layer_norm", "h/fc/matmul", "h/fc/add", "h/gelu", "h/add"]
    assert replays(got) == outs([*once, *(f"{name}#1" for name in once)])
    first, second = (operations(got)[f"h/{name}"] for name in ("add.out", "ln/layer_norm.out#1"))
    same_bits(first.outputs["out"].data, second.inputs["x"].data)


def test_remat_of_a_block(tmp_path):
    block = jax.checkpoint(lambda w, x: jax.nn.silu(x @ w) * x)
    fn = jax.jit(jax.value_and_grad(lambda w, x: block(w, block(w, x)).sum()))
    got = captured(tmp_path, fn, (jnp.eye(8) * 0.5, X))
    assert replays(got) == outs(["matmul", "silu", "mul", "matmul#1", "silu#1", "mul#1"])


def test_shards(tmp_path, mesh):
    """Each shard's operands and results have its place in their names."""
    fn = jax.shard_map(lambda w, x: jax.nn.softmax(x @ w), mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    got = captured(tmp_path, jax.jit(fn), (jnp.eye(8), X))
    sites = [o.site for o in got.steps[0].values() if o.site.kind == "result"]
    assert [s.name for s in sites] == [f"{op}.out@i={i}" for i in (0, 1) for op in ("matmul", "softmax")]
    assert sites[2].inputs == ("operand:matmul.a@i=1", "operand:matmul.b@i=1") and sites[2].operation is not None
    close(got.value("result:softmax.out@i=1"), jax.nn.softmax(X[1:]))


def test_branches_and_loops(tmp_path):
    def fn(w, x):
        x = lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jax.nn.silu(x), x)
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + w), (0, x))[1]

    w = jax.random.normal(jax.random.key(2), (8, 8))
    for i, (x, op) in enumerate(((jnp.ones((8, 8)), "matmul"), (-jnp.ones((8, 8)), "silu"))):
        got = captured(tmp_path / str(i), jax.jit(fn), (w, x))
        assert replays(got) == outs([op, "add"])  # the last iteration


def test_scopes_steps_and_patterns(tmp_path):
    """A function without modules, with two steps of training; `sites` chooses what is recorded."""

    def loss(w, x):
        with jax.named_scope("up"):
            return (jax.nn.silu(x @ w["up"]) ** 2).sum()

    @jax.jit
    def train(w, x):
        for _ in range(2):
            w = jax.tree.map(lambda w, g: w - w * g, w, jax.grad(loss)(w, x))
        return w

    args = {"up": jnp.eye(8) * 0.5}, X
    got = captured(tmp_path / "a", train, args)
    assert replays(got) == outs(["up/matmul", "up/silu", "up/matmul#1", "up/silu#1"])
    got = captured(tmp_path / "b", train, args, sites="up/silu.*")
    assert replays(got) == outs(["up/silu", "up/silu#1"])
    got = captured(tmp_path / "c", train, args, sites="up/silu.out")
    assert [o.site.operation for o in got.steps[0].values()] == [None, None]


def test_own_operations_beside(tmp_path):
    """diptych's operations are recorded as before, between JAX's."""
    got = captured(tmp_path, jax.jit(lambda w, x: dj.hash(x @ w)), (jnp.eye(8), X[0]))
    assert got.names("operand") == ["matmul.a", "matmul.b", "hash.x"]
    assert got.names("result") == ["matmul.out", "hash.out"]


# --- what is recognized ---


A, B = jnp.ones((4, 8)), jnp.ones((4, 8))
SQUARE = jnp.ones((4, 4))


ROOT = math.sqrt(2 / math.pi)
TANH = (
    lambda x: 0.5 * x * (1 + jnp.tanh(ROOT * (x + 0.044715 * x**3))),
    lambda x: x * (0.5 * (jnp.tanh(ROOT * (x + 0.044715 * x**3)) + 1)),
    lambda x: (1 + jnp.tanh((0.044715 * x * x * x + x) * ROOT)) * x * 0.5,
    jax.nn.gelu,
)
ERF = (
    lambda x: x * 0.5 * (1.0 + lax.erf(x / math.sqrt(2))),
    lambda x: 0.5 * (x * (lax.erf(x * math.sqrt(0.5)) + 1)),
    lambda x: jax.nn.gelu(x, False),
)


def softmax(x):
    e = jnp.exp(x - x.max(1)[:, None])
    return e / e.sum(1).reshape(-1, 1)


def test_forms():
    """Other ways to write an operation."""
    for approximate, forms in ((True, TANH), (False, ERF)):
        for form in forms:
            for dtype in (jnp.float32, jnp.bfloat16):
                assert found(form, A.astype(dtype)) == [("gelu", {"approximate": approximate}, {"x": 0})]
    assert found(lambda x: x * jax.nn.sigmoid(x), A) == [("silu", {}, {"x": 0})]
    assert found(lambda x: jax.nn.softmax(x, 0), A) == [("softmax", {"axis": -2}, {"x": 0})]
    assert found(softmax, SQUARE) == [("softmax", {"axis": -1}, {"x": 0})]
    assert names_of(lambda a, b: jax.nn.gelu(a * b), A, B) == ["mul", "gelu"]
    assert names_of(lambda a, b: jax.nn.softmax(a + b), A, B) == ["add", "softmax"]
    halves = lambda x: jnp.split(x, 2, -1)  # noqa: E731
    for rotated in (
        lambda x: jnp.concatenate((-x[..., 4:], x[..., :4]), -1),
        lambda x: jnp.concatenate((-halves(x)[1], halves(x)[0]), -1),
    ):
        want = [("rotary", {"interleaved": False}, {"x": 0, "cos": 1, "sin": 2})]
        assert found(lambda x, c, s, f=rotated: x * c + f(x) * s, X, X, X) == want
        assert found(lambda x, c, s, f=rotated: s * f(x) + c * x, X, X, X) == want
        assert names_of(lambda x, c, s, f=rotated: x * c + f(x) * s, X, A[:1], B[:1]) == ["rotary"]
    pairs = lambda x: x.reshape(*x.shape[:-1], -1, 2)  # noqa: E731
    for rotated in (
        lambda x: jnp.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape),  # as in transformers' GPT-J
        lambda x: jnp.stack((-pairs(x)[..., 1], pairs(x)[..., 0]), -1).reshape(x.shape),
        lambda x: jnp.concatenate((-pairs(x)[..., 1:], pairs(x)[..., :1]), -1).reshape(x.shape),
        lambda x: jnp.concatenate((-x[..., 1::2, None], x[..., ::2, None]), -1).reshape(x.shape),
    ):
        want = [("rotary", {"interleaved": True}, {"x": 0, "cos": 1, "sin": 2})]
        assert found(lambda x, c, s, f=rotated: x * c + f(x) * s, X, X, X) == want
        assert found(jax.vmap(lambda x, c, s, f=rotated: f(x) * s + x * c), X, X, X) == want
    for take in (lambda t, i: t[i], lambda t, i: jnp.take(t, i, 0), lambda t, i: t.at[i].get(mode="clip"),
                 lambda t, i: jax.vmap(lambda i: t[i])(i)):  # fmt: skip
        assert names_of(take, A, IDS) == ["embedding"]


def turned(x):
    e = jnp.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1)


def squared_often(x):
    for _ in range(40):
        x = x * x
    return x


NOT_WHOLE = {
    "a power with 2^40 factors": (squared_often, A),
    "a quotient of arrays": (lambda x, y: x / y * (1 + lax.erf(x / math.sqrt(2))), A, B),
    "softmax over the wrong axis": (turned, SQUARE),
    "softmax without the largest value": (lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True), A),
    "masked softmax": (lambda x: jax.nn.softmax(x, where=x > 0), A),
    "softmax over two axes": (lambda x: jax.nn.softmax(x, (0, 1)), A),
    "log without exp": (lambda x: x - jnp.log(jnp.abs(x).sum(1, keepdims=True)), A),
    "quick gelu": (lambda x: x * jax.nn.sigmoid(1.702 * x), A),
    "another constant": (lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * x**3))), A),
    "another power": (lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**2))), A),
    "half of gelu": (lambda x: x * (1 + lax.erf(x / np.sqrt(2))), A),
    "gelu of another": (lambda x, y: 0.5 * y * (1 + lax.erf(x / np.sqrt(2))), A, B),
    "silu of another": (lambda x, y: y * jax.nn.sigmoid(x), A, B),
    "turned back": (lambda x, c, s: x * c + jnp.concatenate((x[:, 4:], -x[:, :4]), 1) * s, A, A, B),
    "turned by three": (lambda x, c, s: x * c + jnp.concatenate((-x[:, 3:], x[:, :3]), 1) * s, A, A, B),
    "turned rows": (lambda x, c, s: x * c + jnp.concatenate((-x[2:], x[:2]), 0) * s, A, A, B),
    "pairs turned back": (lambda x, c, s: x * c + jnp.stack((x[:, 1::2], -x[:, ::2]), 2).reshape(x.shape) * s, A, A, B),
    "pairs unturned": (lambda x, c, s: x * c + jnp.stack((-x[:, ::2], x[:, 1::2]), 2).reshape(x.shape) * s, A, A, B),
    "pairs of halves": (lambda x, c, s: x * c + jnp.stack((-x[:, 4:], x[:, :4]), 2).reshape(x.shape) * s, A, A, B),
    "halves of pairs": (lambda x, c, s: x * c + jnp.concatenate((-x[:, 1::2], x[:, ::2]), 1) * s, A, A, B),
    "pairs of rows": (lambda x, c, s: x * c + jnp.stack((-x[1::2], x[::2]), 1).reshape(x.shape) * s, A, A, B),
    "pairs in another order": (
        lambda x, c, s: x * c + jnp.stack((-x[:, 1::2], x[:, ::2]), 1).reshape(x.shape) * s,
        A,
        A,
        B,
    ),
    "two turned": (lambda x, y, c: x * c + jnp.concatenate((-y[:, 4:], y[:, :4]), 1) * c, A, B, A),
    "columns": (lambda t, i: t[:, i], A, jnp.arange(3)),
    "parts of rows": (lambda t, i: lax.dynamic_slice(t, (i, 0), (1, 4)), A, jnp.array(1)),
    "a scalar": (lambda x: 2 * x + 1, A),
    "a scalar array": (lambda x, s: x * s + s, A, jnp.array(2.0)),
    "integers": (lambda i: i * i + i, IDS),
}


@pytest.mark.parametrize("case", NOT_WHOLE)
def test_what_is_no_operation(case):
    fn, *args = NOT_WHOLE[case]
    assert set(names_of(fn, *args)) <= {"add", "mul"}


def test_products():
    of = lambda fn, *args: [(n, o) for n, o, _ in found(fn, *args)]  # noqa: E731
    dot = lambda **options: lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), **options)  # noqa: E731
    half = A.astype(jnp.bfloat16)
    matmul = lambda dtype: [("matmul", {"equation": "ab,cb->ac", "dtype": dtype})]  # noqa: E731
    assert of(dot(), A, B) == matmul("float32")
    assert of(dot(preferred_element_type=jnp.float32), half, half) == matmul("float32")
    assert of(dot(preferred_element_type=jnp.bfloat16), A, B) == []  # operands are not rounded first
    assert of(dot(preferred_element_type=jnp.int32), IDS, IDS) == []
    eight = half.astype(jnp.float8_e4m3fn)
    assert of(dot(preferred_element_type=jnp.bfloat16), eight, eight.astype(jnp.float8_e5m2)) == matmul("bfloat16")
    assert of(lambda a, b: jnp.einsum("abc,dab->dbc", a, b), X, jnp.ones((3, 2, 6)))[0][0] == "matmul"
    conv = lambda x, w, **o: lax.conv_general_dilated(x, w, (1,), "VALID", **o)  # noqa: E731
    x, w = jnp.ones((2, 4, 5)), jnp.ones((6, 4, 3))
    assert [n for n, _ in of(conv, x, w)] == ["conv"]
    for axes in (0, 4):  # a row has one to three spatial axes
        ones = (1,) * axes
        assert (
            of(lambda x, w, n=ones: lax.conv(x, w, n, "VALID"), jnp.ones((2, 4, *ones)), jnp.ones((3, 4, *ones))) == []
        )
    assert of(dot(preferred_element_type="float8_e4m3b11fnuz"), *[half.astype("float8_e4m3b11fnuz")] * 2) == []
    assert of(lambda x, w: conv(x, w, batch_group_count=2), x, w) == []
    assert of(lambda *v: conv(*v, preferred_element_type=jnp.float32), x.astype("bfloat16"), w.astype("bfloat16")) == []
    [(_, options, operands)] = found(
        lambda w, x: lax.conv_general_dilated(
            x, w, (2, 1), ((1, -1), (0, 2)), (1, 2), (2, 1), ("CN01", "1IO0", "0NC1"), feature_group_count=2
        ),
        jnp.ones((3, 2, 4, 3)), jnp.ones((4, 2, 9, 7)),
    )  # fmt: skip
    assert operands == {"x": 1, "weight": 0} and options == {
        "layout": "CN10,0IO1,1NC0", "groups": 2,
        "strides": [2, 1], "padding": [[1, -1], [0, 2]], "dilation": [2, 1], "input_dilation": [1, 2],
    }  # fmt: skip


@pytest.mark.kept
def test_a_norm_is_given_its_layers_arrays():
    """Norms of each library, with a scale and a bias, and with a scale alone."""
    x, scale, bias = jnp.ones((4, 8)), jnp.arange(8.0), -jnp.arange(8.0)
    made = {name: nnx.LayerNorm(8, use_bias=name == "both", rngs=nnx.Rngs(0)) for name in ("both", "scale alone")}
    for module in made.values():
        module.scale.set_value(scale)
    made["both"].bias.set_value(bias)
    given = {"params": {"scale": scale, "bias": bias}}
    layers = [(made["both"], bias), (made["scale alone"], None)]
    layers.append((linen.LayerNorm().bind(given), bias))
    layers.append((linen.LayerNorm(use_bias=False).bind({"params": {"scale": scale}}), None))
    own = eqx.tree_at(lambda m: (m.weight, m.bias), eqx.nn.LayerNorm((4, 8)), (x * 2, x * 3))
    assert functions.norm(own, (x,), {}).parameters() == {"weight": own.weight, "bias": own.bias}
    for module, held in layers:
        found = functions.norm(module, (x,), {}).parameters()
        assert found.keys() == {"weight", "bias"} and isinstance(found["weight"], jax.Array)
        same_bits(found["weight"], scale)
        assert found["bias"] is None if held is None else (found["bias"] == held).all()


def test_norms_that_no_row_describes():
    x, mask = jnp.ones((4, 8)), jnp.ones((4, 8), bool)
    norm = lambda module, *args, **kwargs: functions.norm(module, args, kwargs)  # noqa: E731
    rngs = nnx.Rngs(0)
    for module in (linen.LayerNorm(), linen.RMSNorm(reduction_axes=(0, 1), feature_axes=(0, 1)),
                   nnx.LayerNorm(8, rngs=rngs), eqx.nn.LayerNorm((4, 8))):  # fmt: skip
        assert norm(module, x) is not None
        assert norm(module, x, mask=mask) is None and norm(module, np.ones((4, 8))) is None

    class Special(linen.LayerNorm):
        pass

    for module in (linen.LayerNorm(reduction_axes=(), feature_axes=()),
                   linen.LayerNorm(reduction_axes=0, feature_axes=0), linen.LayerNorm(reduction_axes=(0, 1)),
                   linen.LayerNorm(axis_name="i"), linen.RMSNorm(force_float32_reductions=False), linen.GroupNorm(2),
                   Special(), nnx.RMSNorm(8, promote_dtype=lambda x, dtype: x, rngs=rngs),
                   nnx.LayerNorm(8, axis_name="i", rngs=rngs), eqx.nn.RMSNorm((4, 8)),
                   eqx.nn.LayerNorm(8)):  # fmt: skip
        assert norm(module, x) is None
    narrow = functions.Norm("rms_norm", 1, 1e-6, x, dict).operands(x.astype(jnp.bfloat16))
    assert narrow[0] is None  # a row's result has x's dtype
