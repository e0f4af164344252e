"""Cross entropy and rotary embeddings in captures of JAX: what is recognized, that both frameworks compute it again of
the recorded operands within the judge's bounds, and that other losses are not recorded under this name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax
from jax.sharding import PartitionSpec as P

from diptych.lab.frontend import require
from diptych.lab.replay.judge import judged
from diptych.lab.replay.op import ReplayError
from diptych.lab.replay.shapes import require_shape
from in_jax.captures import captured, found, names_of, operations, same_bits

pytestmark = pytest.mark.sampled

BATCH, LENGTH, CLASSES = 3, 5, 7
integer = optax.softmax_cross_entropy_with_integer_labels


def drawn(name: str, offset: float = 0.0, dtype=jnp.float32):
    """Logits and targets, other ones for each name."""
    rng = np.random.default_rng([ord(c) for c in name])
    logits = rng.normal(offset, 3, (BATCH, LENGTH, CLASSES))
    return jnp.asarray(logits, dtype), jnp.asarray(rng.integers(0, CLASSES, (BATCH, LENGTH)))


def expected(logits, targets, reduction):
    """In float64, element by element."""
    logits, out = np.asarray(logits, np.float64), np.zeros(targets.shape)
    for at in np.ndindex(*targets.shape):
        row = logits[at]
        out[at] = np.log(np.exp(row - row.max()).sum()) + row.max() - row[int(targets[at])]
    return {"none": out, "sum": out.sum(), "mean": out.mean()}[reduction]


def one_hot(targets, on=1.0, off=0.0):
    """Returns one-hot labels by the equations of flax's `common_utils.onehot`."""
    same = targets[..., None] == jnp.arange(CLASSES).reshape((1,) * targets.ndim + (-1,))
    return lax.select(same, jnp.full(same.shape, on), jnp.full(same.shape, off)).astype(jnp.float32)


def take(x, targets):
    return jnp.take_along_axis(x, targets[..., None], -1)


def shifted(logits, targets):
    """Returns the loss of each position by the equations of optax 0.1: of logits less their largest."""
    logits = logits - lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(logits), -1)) - take(logits, targets)[..., 0]


def indexed(x, t):
    return x[jnp.arange(BATCH)[:, None], jnp.arange(LENGTH)[None], t]


log_softmax, logsumexp = jax.nn.log_softmax, jax.nn.logsumexp
FORMS = {
    "optax": ("none", integer),
    "optax, mean": ("mean", lambda x, t: integer(x, t).mean()),
    "optax, sum": ("sum", lambda x, t: integer(x, t).sum()),
    "optax, means": ("mean", lambda x, t: integer(x, t).mean(-1).mean()),
    "one-hot": ("none", lambda x, t: optax.softmax_cross_entropy(x, jax.nn.one_hot(t, CLASSES))),
    "one-hot, mean": ("mean", lambda x, t: optax.softmax_cross_entropy(x, one_hot(t)).mean()),
    "one-hot, sums": ("mean", lambda x, t: -jnp.mean(jnp.sum(jax.nn.one_hot(t, CLASSES) * log_softmax(x), -1))),
    "one-hot, one sum": ("mean", lambda x, t: -jnp.sum(one_hot(t) * log_softmax(x)) / (BATCH * LENGTH)),
    "one-hot of logits": ("none", lambda x, t: logsumexp(x, axis=-1) - (x * one_hot(t)).sum(-1)),
    "t5x": ("none", lambda x, t: -jnp.sum(one_hot(t) * (x - logsumexp(x, axis=-1, keepdims=True)), -1)),
    "take": ("none", lambda x, t: -take(log_softmax(x), t)[..., 0]),
    "take, squeezed": ("none", lambda x, t: (-take(log_softmax(x), t)).squeeze(-1)),
    "take, mean": ("mean", lambda x, t: -take(log_softmax(x), t).mean()),
    "take of the negative": ("sum", lambda x, t: take(-log_softmax(x), t).sum()),
    "take, other way round": ("mean", lambda x, t: -(take(x, t) - logsumexp(x, axis=-1, keepdims=True)).mean()),
    "clipped": ("none", lambda x, t: -jnp.take_along_axis(log_softmax(x), t[..., None], -1, mode="clip")[..., 0]),
    "indices": ("none", lambda x, t: -indexed(log_softmax(x), t)),
    "shifted": ("none", shifted),
    "jit": ("mean", lambda x, t: jax.jit(lambda x, t: jax.jit(integer)(x, t).mean())(x, t)),
    "vmap": ("mean", lambda x, t: jax.vmap(integer)(x, t).mean()),
    "vmap of means": ("mean", lambda x, t: jax.vmap(lambda x, t: integer(x, t).mean())(x, t).mean()),
    "vmap of indices": ("none", jax.vmap(lambda x, t: -log_softmax(x)[jnp.arange(LENGTH), t])),
    "vmap twice": ("none", jax.vmap(jax.vmap(lambda x, t: -log_softmax(x)[t]))),
}


@pytest.mark.parametrize("form", FORMS)
def test_cross_entropy(form, tmp_path):
    """Recognized forward, differentiated and under jit, with the function's arguments as operands and the loss as its
    result, in both frameworks; also where all logits are large."""
    reduction, loss = FORMS[form]
    weighted = lambda x, t: (loss(x, t) * jnp.linspace(1, 2, LENGTH)).sum()  # noqa: E731
    scalar = weighted if reduction == "none" else loss
    options = {"axis": -1, "reduction": reduction, "ignore_index": None}
    runs = (loss, 0.0), (jax.grad(scalar), 1.0), (jax.jit(jax.value_and_grad(scalar)), 300.0)
    for i, (fn, offset) in enumerate(runs):
        logits, targets = drawn(form, offset)
        assert found(loss, logits, targets)[-1] == ("cross_entropy", options, {"logits": 0, "targets": 1})
        (op,) = losses(captured(tmp_path / str(i), fn, (logits, targets)))
        assert op.options == options
        same_bits(op.inputs["logits"].data, logits.view(jnp.uint32))
        same_bits(op.inputs["targets"].data, targets.astype(jnp.uint32))
        exact = expected(logits, targets, reduction)
        np.testing.assert_allclose(op.outputs["out"].data.view(np.float32), exact, 1e-5, 4e-7 * (9 + offset))
        agrees(op)


def losses(got):
    """The cross entropies of the first step. Nothing inside of them is an operation."""
    ops = operations(got).values()
    assert not {"log_softmax", "embedding"} & {op.kind for op in ops}
    return [op for op in ops if op.kind == "cross_entropy"]


def agrees(op):
    require_shape(op)
    for framework in ("torch", "jax"):
        (outcome,) = judged(op, require(framework, "cpu").replay(op, "cpu"), True)
        assert outcome.agrees, (framework, outcome)


def test_axes_dtypes_and_sizes(tmp_path):
    """Other axes than the last, one example alone, batches of one, narrow dtypes, and labels of other integers."""
    x, t = drawn("axes")
    turned = x.swapaxes(1, 2)
    forms = [
        ("axis 1", lambda x, t: integer(x, t, axis=1).mean(), (turned, t)),
        ("axis 1, taken", lambda x, t: -jnp.take_along_axis(log_softmax(x, 1), t[:, None], 1).sum(), (turned, t)),
        ("axis 0", lambda x, t: -(jax.nn.one_hot(t, CLASSES, axis=0) * log_softmax(x, 0)).sum(0), (x.T, t.T)),
        ("one", lambda x, t: -log_softmax(x)[t], (x[0, 0], t[0, 0])),
        ("one, optax", integer, (x[0, 0], t[0, 0])),
        ("batch of one", integer, (x[:1], t[:1])),
        ("batch of one, taken", lambda x, t: -take(log_softmax(x), t).mean(), (x[:1, :1], t[:1, :1])),
        ("batch of one, indexed", lambda x, t: -log_softmax(x)[jnp.arange(1), t], (x[0, :1], t[0, :1])),
        ("bfloat16", lambda x, t: integer(x, t).mean(), (x.astype("bfloat16"), t)),
        ("bfloat16, one-hot", lambda x, t: optax.softmax_cross_entropy(x, jax.nn.one_hot(t, CLASSES, dtype=x.dtype)),
         (x.astype("bfloat16"), t)),
        ("bytes", integer, (x, t.astype("uint8"))),
    ]  # fmt: skip
    for name, fn, args in forms:
        (op,) = losses(captured(tmp_path / name, jax.jit(fn), args))
        assert op.inputs["logits"].data.shape == args[0].shape, name
        agrees(op)


def test_what_is_around_it(tmp_path):
    """A mask, weights of examples and a z-loss are no parts of it: it is the loss of each position."""
    x, t = drawn("around")
    mask = jnp.asarray(np.random.default_rng(5).integers(0, 2, t.shape), jnp.float32)
    labels = jnp.where(mask > 0, t, -100)
    for name, loss in {
        "mask": lambda x, t: (integer(x, t) * mask).sum() / mask.sum(),
        "where": lambda x, t: jnp.where(mask > 0, integer(x, t), 0).sum() / mask.sum(),
        "ignored": lambda x, t: (integer(x, jnp.where(labels == -100, 0, labels)) * mask).sum(),
        "where of mean": lambda x, t: integer(x, t).mean(where=mask > 0),
        "z-loss": lambda x, t: (integer(x, t) + 1e-4 * logsumexp(x, axis=-1) ** 2).mean(),
        "one more": lambda x, t: integer(x, t).sum() / (t.size - 1),
        "examples": lambda x, t: integer(x, t).mean(1),
        "wider": lambda x, t: integer(x.astype("bfloat16"), t).astype(jnp.float32).mean(),
        "focal": lambda x, t: ((1 - jnp.exp(-integer(x, t))) ** 2 * integer(x, t)).mean(),
    }.items():
        got = captured(tmp_path / name, jax.jit(jax.value_and_grad(lambda x, t, f=loss: f(x, t).sum())), (x, t))
        ops = [op for op in operations(got).values() if op.kind == "cross_entropy"]
        assert {op.options["reduction"] for op in ops} == {"sum" if name == "one more" else "none"}, name
        for op in ops:
            agrees(op)


V = jnp.linspace(0.5, 2, CLASSES)
OTHERS: dict[str, Callable[..., jax.Array]] = {
    "smoothed": lambda x, t: optax.softmax_cross_entropy(x, optax.smooth_labels(jax.nn.one_hot(t, CLASSES), 0.1)),
    "smoothed by flax": lambda x, t: optax.softmax_cross_entropy(x, one_hot(t, 0.9, 0.1 / 6)),
    "class weights": lambda x, t: optax.softmax_cross_entropy(x, jax.nn.one_hot(t, CLASSES) * V),
    "weights of log-probabilities": lambda x, t: -take(log_softmax(x) * V, t),
    "masked classes": lambda x, t: integer(x, t, where=t > 2),
    "masked sum of classes": lambda x, t: logsumexp(x, axis=-1, where=x > 0) - take(x, t)[..., 0],
    "scaled": lambda x, t: 2 * logsumexp(x, axis=-1) - take(x, t)[..., 0],
    "of others": lambda x, t: logsumexp(x * V, axis=-1) - take(x, t)[..., 0],
    "of another axis": lambda x, t: -take(log_softmax(x, 1), t),
    "with a temperature of one part": lambda x, t: logsumexp(x / 2, axis=-1) - take(x, t)[..., 0],
    "added": lambda x, t: logsumexp(x, axis=-1) + take(x, t)[..., 0],
    "the probability": lambda x, t: -take(jax.nn.softmax(x), t),
    "the likelihood": lambda x, t: take(log_softmax(x), t)[..., 0],
    "twice": lambda x, t: -2 * take(log_softmax(x), t)[..., 0],
    "two logarithms": lambda x, t: jnp.log(logsumexp(x, axis=-1)) - take(x, t)[..., 0],
    "another largest value": lambda x, t: jnp.log(jnp.exp(x - x[..., :1]).sum(-1)) + x.max(-1) - take(x, t)[..., 0],
    "another guard": lambda x, t: jnp.log(jnp.exp(x - x.max(-1, keepdims=True)).sum(-1))
    + jnp.where(jnp.isfinite(x.max(-1)), x.max(-1), 1) - take(x, t)[..., 0],
    "all but the targets": lambda x, t: -((1 - one_hot(t)) * log_softmax(x)).sum(-1),
    "all but the targets, by selection": lambda x, t: -(one_hot(t, 0.0, 1.0) * log_softmax(x)).sum(-1),
    "twos": lambda x, t: -(one_hot(t, 2.0) * log_softmax(x)).sum(-1),
    "classes from one": lambda x, t: -((t[..., None] == 1 + jnp.arange(CLASSES)) * log_softmax(x)).sum(-1),
    "classes up to the targets": lambda x, t: -((jnp.arange(CLASSES) <= t[..., None]) * log_softmax(x)).sum(-1),
    "positions": lambda x, t: -((t[..., None] == jnp.arange(LENGTH)[:, None]) * log_softmax(x)).sum(-1),
    "summed over positions": lambda x, t: -(one_hot(t) * log_softmax(x)).sum(1),
    "a part of the sum": lambda x, t: -(one_hot(t) * log_softmax(x))[..., 1:].sum(-1),
    "rounded": lambda x, t: -take(log_softmax(x), t)[..., 0].astype(jnp.bfloat16).astype(jnp.float32),
    "rounded sum": lambda x, t: (
        jnp.log(jnp.exp(x - x.max(-1, keepdims=True)).sum(-1).astype(jnp.int32).astype(jnp.float32))
        + x.max(-1) - take(x, t)[..., 0]
    ),
    "targets of others": lambda x, t: -log_softmax(x)[jnp.arange(BATCH)[:, None], jnp.arange(LENGTH)[None] * 0, t],
    "two targets": lambda x, t: -log_softmax(x)[t % BATCH, jnp.arange(LENGTH)[None], t],
    "rows of classes": lambda x, t: -log_softmax(x)[..., t[0]],
    "the first of several": lambda x, t: -jnp.take_along_axis(log_softmax(x), jnp.stack((t, t), -1), -1)[..., 0],
    "floats": lambda x, t: -(jax.nn.one_hot(t + 0.5, CLASSES) * log_softmax(x)).sum(-1),
    "a learned distribution": lambda x, t: optax.softmax_cross_entropy(x, jax.nn.softmax(x * V)),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_no_cross_entropy(form):
    x, t = drawn(form)
    for fn in (OTHERS[form], jax.value_and_grad(lambda x, t: (OTHERS[form](x, t) ** 2).mean())):
        assert "cross_entropy" not in names_of(fn, x, t)


def test_parts_of_a_smoothed_loss():
    x, t = drawn("parts")
    assert names_of(OTHERS["smoothed"], x, t)[0] == "log_softmax"
    assert names_of(OTHERS["the probability"], x, t) == ["softmax"]


def test_targets_that_are_no_classes(tmp_path):
    """One-hot labels of these are zero, and indices count from the end or give NaN: they are not computed again."""
    x, t = drawn("out of range")
    t = t.at[1, 2].set(-100).at[2, 0].set(-1)
    for i, loss in enumerate((integer, lambda x, t: optax.softmax_cross_entropy(x, one_hot(t)))):
        (op,) = losses(captured(tmp_path / str(i), loss, (x, t)))
        with pytest.raises(ReplayError, match="2 targets are no classes from 0 to 6, the first is -100"):
            require_shape(op)


class Model(linen.Module):
    @linen.compact
    def __call__(self, x, t):
        with jax.named_scope("loss"):
            return integer(linen.Dense(CLASSES, name="head")(x), t).mean()


def test_in_a_module_a_scan_and_shards(tmp_path, mesh):
    x, t = drawn("places")
    model = Model()
    variables = model.init(jax.random.key(3), x, t)
    got = captured(tmp_path / "linen", jax.jit(jax.value_and_grad(model.apply)), (variables, x, t))
    assert list(operations(got)) == ["head/matmul.out", "head/add.out", "(model)/cross_entropy.out"]
    same_bits(got.value("operand:(model)/cross_entropy.logits"), got.value("activation:head"))
    same_bits(got.value("result:(model)/cross_entropy.out"), got.results[0][0])

    def accumulated(loss, w, x, t):
        return lax.scan(lambda total, row: (total + loss(row[0] @ w, row[1]), None), 0.0, (x, t))[0]

    w = jnp.eye(CLASSES) * 0.7
    for form in ("optax, mean", "one-hot, mean", "take, mean"):  # JAX moves their constants out of the loop
        run = functools.partial(accumulated, FORMS[form][1])
        ops = losses(captured(tmp_path / form, jax.jit(jax.value_and_grad(run)), (w, x, t)))
        assert len(ops) == BATCH and [op.options["reduction"] for op in ops] == ["mean"] * BATCH
        for op in ops:
            agrees(op)

    sharded = jax.shard_map(
        lambda x, t: optax.softmax_cross_entropy(x, one_hot(t)), mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i")
    )
    got = captured(tmp_path / "shards", jax.jit(sharded), (x[:2], t[:2]))
    results = [o.site for o in got.steps[0].values() if o.site.kind == "result"]
    assert [s.name for s in results] == [f"cross_entropy.out@i={i}" for i in (0, 1)]
    assert all(s.operation is not None for s in results)


def test_rotary_of_pairs(tmp_path):
    """The rotation of queries by pairs of neighbours, by the equations of transformers' GPT-J in flax."""
    rng = np.random.default_rng(11)
    x, angles = jnp.asarray(rng.normal(size=(2, 5, 3, 8)), jnp.float32), rng.normal(size=(2, 5, 4))
    sin, cos = (jnp.asarray(f(angles), jnp.float32) for f in (np.sin, np.cos))

    def rotated(x, sin, cos):
        sin, cos = (v[:, :, None, :].repeat(2, 3) for v in (sin, cos))
        turned = jnp.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), axis=-1)
        return x * cos + turned.reshape(*turned.shape[:-2], -1) * sin

    for i, fn in enumerate((rotated, jax.jit(jax.grad(lambda *v: (rotated(*v) ** 2).sum())))):
        (op,) = operations(captured(tmp_path / str(i), fn, (x, sin, cos))).values()
        assert (op.kind, op.options) == ("rotary", {"interleaved": True})
        same_bits(op.inputs["x"].data, x.view(jnp.uint32))
        agrees(op)
