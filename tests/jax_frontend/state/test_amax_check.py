"""States that are sums, averages, multiples or optimizer steps of states are refused, however they were made."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from diptych.common import DelayedScaling, DTypeError
from diptych.jax.layers.linear import dense
from diptych.jax.state import amax_check, update
from diptych.jax.state import carry as tr
from diptych.jax.state import scales as st
from jax_frontend import tools

pytestmark = pytest.mark.sampled

RECIPE = DelayedScaling(amax_history_len=4)
X, KERNEL = tools.normal("x", (8, 32)), tools.normal("layer", (32, 32)) / 6
LOOKS = (np.float32(0), np.float32(1e-42), np.float32(1e-30), np.float32(1), np.float32(3e38), np.float32(np.inf))


def states_of(*amaxes):
    """One state for each amax, as gradients of uses that saw them."""
    fresh = st.init_state(RECIPE)["input"]
    return [st.record(fresh, jnp.full(1, a, jnp.float32)) for a in amaxes]


def mean(*states, weights=None):
    weights = weights or [1 / len(states)] * len(states)
    return jax.tree.map(lambda *v: sum(w * x for w, x in zip(weights, v, strict=True)), *states)


@jax.jit
def many_steps(old, new):
    """The states after more updates than the history is long, in every way that a gradient becomes a state."""
    refs = tr.state_refs(new)
    update.update_state(refs)
    states = [st.overwrite_states(old, new), new, st.merge_states(new, new)]

    def step(states, _):
        return [st.record(update.update_state(s), jnp.ones(1, jnp.float32)) for s in states], None

    states = [update.update_state(s) for s in states]
    return *jax.lax.scan(step, states, None, length=5)[0], tr.read_states(refs)


def refused(state, message):
    """Eagerly an error; compiled a NaN that no further step loses."""
    old = st.init_state(RECIPE)["input"]
    overwrite = functools.partial(st.overwrite_states, old)
    for f in (update.update_state, overwrite, st.state_dict, tr.state_refs, st.merge_states):
        arg = {"input": state} if f is st.state_dict else state
        with pytest.raises(ValueError, match=message):
            f(arg)
    marked = many_steps(old, state)
    assert all(np.isnan(s.scale).all() for s in marked)
    for s in marked:
        with pytest.raises(ValueError, match="a scale is NaN, which is how a state is marked"):
            update.update_state(s)
    y = dense(X, KERNEL, recipe=RECIPE, state=st.init_state(RECIPE) | {"input": marked[0]}, record=False)
    assert np.isnan(y).all()


# --- linear maps of states ---


def test_sums_and_averages():
    a, b, c = states_of(1.0, 1.5, 0.0)
    refused(jax.tree.map(jnp.add, a, b), "adding 2 states up")
    refused(mean(a, b), "averaging states")
    refused(mean(a, c), "averaging states")
    refused(mean(a, b, weights=[0.999, 0.001]), "averaging states")
    refused(mean(a, b, c, a, b), "averaging states|was scaled")
    refused(jax.tree.map(lambda v: v / 1024, a), "was scaled, its count is 0.000976")
    refused(mean(a, b, weights=[2.0, -1.0]), "averaging states")


def test_an_average_of_equal_states_is_right():
    for a in (0.0, 1e-30, 1.0, 3e38):  # XLA flushes subnormal averages
        (s,) = states_of(a)
        tools.same_tree(update.update_state(mean(s, s)), update.update_state(s))


def test_every_average_of_different_amaxes_is_known():
    """Neighbours, far ones and special ones, two to seven at a time, evenly and not."""
    rng = np.random.default_rng(3)
    values = np.concatenate([LOOKS, rng.lognormal(0, 5, 400).astype(np.float32)])
    values = np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))])
    histories = np.zeros((len(values), 4), np.float32)
    histories[:, 0] = values
    checks = np.asarray(amax_check.check_of(jnp.asarray(histories)))
    assert amax_check.is_valid(jnp.asarray(checks)).all()
    bits = values.view(np.int32)
    for n in range(2, 8):
        chosen = rng.integers(0, len(values), (20000, n))
        chosen[:2000, 1:] = chosen[:2000, :1]  # equal ones
        near = (chosen[2000:4000, :1] + len(LOOKS + tuple(range(400))) * np.arange(n) % len(values)) % len(values)
        chosen[2000:4000] = near
        weights = np.full((20000, n), np.float32(1 / n), np.float32)
        weights[10000:] = rng.dirichlet(np.ones(n), 10000).astype(np.float32)
        averaged = np.zeros((20000, 8), np.float32)
        for i in range(n):  # as float32 sums go
            averaged += weights[:, i : i + 1] * checks[chosen[:, i]]
        valid = np.asarray(amax_check.is_valid(jnp.asarray(averaged)))[:, 0]
        different = (bits[chosen] != bits[chosen[:, :1]]).any(1)
        assert not valid[different].any() and different.sum() > 10000
        if n in (2, 4):  # exact weights
            assert valid[:10000][~different[:10000]].all()


def test_maxima_of_states_stay_valid():
    """As of jax.lax.pmax, or over a stack."""
    rng = np.random.default_rng(4)
    histories = jnp.asarray(rng.lognormal(0, 5, (500, 6, 4)).astype(np.float32))
    assert amax_check.is_valid(amax_check.check_of(histories).max(1)).all()
    largest = jax.tree.map(lambda *v: jnp.stack(v).max(0), *states_of(1.0, 5.0, 3.0))
    assert float(update.update_state(largest).amax_history[-1]) == 5


@pytest.mark.parametrize(
    "transform",
    [optax.sgd(0.1), optax.adam(1e-3), optax.clip(1.0), optax.clip_by_global_norm(1.0), optax.lion(1e-3),
     optax.scale(0.5), optax.adamw(1e-3), optax.ema(0.9), optax.sign_sgd(1.0)],
    ids=["sgd", "adam", "clip", "global_norm", "lion", "scale", "adamw", "ema", "sign"],
)  # fmt: skip
def test_states_that_an_optimizer_stepped_on(transform):
    (state,) = states_of(2.5)
    updates, _ = transform.update(state, transform.init(state), state)
    refused(updates, r"states up|averaging states|was scaled")
    with pytest.raises(ValueError, match=r"states up|averaging states|was scaled|nothing contributed"):
        update.update_state(optax.apply_updates(state, updates))


def test_averaged_models():
    """States of different steps, after their updates."""
    first, second = (update.update_state(s) for s in states_of(1.0, 1.25))
    refused(mean(first, second), "averaging states")
    later = update.update_state(states_of(3.0)[0])
    refused(mean(first, later, weights=[0.9, 0.1]), "averaging states")


def test_casts():
    (state,) = states_of(1.2345678)
    low = jax.tree.map(lambda v: v.astype(jnp.bfloat16), state)
    refused(jax.tree.map(lambda v: v.astype(jnp.float32), low), "rounding one")
    with pytest.raises(DTypeError, match="the state of 'input' was cast to bfloat16; states are float32"):
        dense(X, KERNEL, recipe=RECIPE, state=st.init_state(RECIPE) | {"input": low})


def test_what_is_none_is_handed_on_by_uses():
    """A sum or an average that goes on as a state, without an update, does not become one by being used."""
    a, b = states_of(1.0, 1.5)
    for wrong in (jax.tree.map(jnp.add, a, b), mean(a, b)):
        held = st.init_state(RECIPE) | {"input": wrong}
        news = jax.jit(jax.grad(lambda s: dense(X, KERNEL, recipe=RECIPE, state=s).sum()))(held)
        kept = jax.jit(lambda s: dense(X, KERNEL, recipe=RECIPE, state=s, return_state=True)[1])(held)
        shared = jax.jit(
            jax.grad(lambda s: dense(X, KERNEL, recipe=RECIPE, state=tr.share_states(s)).sum())
        )(held)  # fmt: skip
        for s in (news, kept, shared):
            with pytest.raises(ValueError, match="update_state: a"):
                update.update_state(s["input"])
            assert np.isnan(jax.jit(update.update_state)(s)["input"].scale).all()
            update.update_state({k: v for k, v in s.items() if k != "input"})


def test_what_is_made_of_checked_states_is_checked():
    """In one trace, where a checked state is handed on without another check."""
    a, b = states_of(1.0, 1.5)
    old = st.init_state(RECIPE)["input"]

    @jax.jit
    def averaged(a, b):
        taken = [st.overwrite_states(old, s) for s in (a, b)]
        rebuilt = jax.tree.map(lambda x: x * 1.0, taken[0])
        return [update.update_state(s) for s in (mean(*taken), dataclasses.replace(taken[0], check=b.check * 0.5))], [
            update.update_state(s) for s in (taken[0], rebuilt, dataclasses.replace(taken[0]))
        ]

    wrong, right = averaged(a, b)
    assert all(np.isnan(s.scale).all() for s in wrong)
    for s in right:
        tools.same_tree(s, update.update_state(st.overwrite_states(old, a)))


@tools.WRAP_NOW_JIT
def test_a_state_that_was_scaled_is_known_where_the_sum_of_its_uses_looks_like_one(wrap):
    """Two uses of half a state sum up to a count of 1 and to whole check numbers."""
    half = jax.tree.map(lambda v: v / 2, st.init_state(RECIPE))

    def twice(s):
        return (dense(X, KERNEL, recipe=RECIPE, state=s) + dense(X, KERNEL, recipe=RECIPE, state=s)).sum()

    news = wrap(jax.grad(twice))(half)
    for s in news.values():
        assert float(s.count[0]) == 1
        with pytest.raises(ValueError, match="averaging states"):
            update.update_state(s)
        assert np.isnan(jax.jit(update.update_state)(s).scale).all()


def test_a_state_costs_few_operations():
    """XLA compiles in a time that grows with their number, and a model has hundreds of states."""

    def operations(n):
        old = [st.init_state(RECIPE)["input"] for _ in range(n)]
        step = jax.jit(lambda old, new: update.update_state(st.overwrite_states(old, new)))
        use = jax.jit(lambda old: [st.gradient(s, [s.scale], None) for s in old])
        texts = step.lower(old, old).as_text(), use.lower(old).as_text()
        return [len(re.findall(r"^ +%.* = ", text, re.MULTILINE)) for text in texts]

    first, second = (np.array(operations(n)) for n in (2, 4))
    assert ((second - first) / 2 <= (42, 34)).all(), (second - first) / 2


def test_states_made_by_hand_are_checked_too():
    (state,) = states_of(1.5)
    made = st.ScaleState(state.quantizer, state.scale, state.amax_history, state.count)
    tools.same_tree(made, state)
    refused(mean(made, *states_of(2.0)), "averaging states")


# --- how sums and averages come about ---


def reduced(mesh, how, vma):
    """New states of a data-parallel step that treats them as it treats gradients."""

    def local(x, kernel, s):
        news = jax.grad(lambda s: dense(x, kernel, recipe=RECIPE, state=s).sum())(s)
        return how(news)

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P(), check_vma=vma)
    return jax.jit(f)(X * jnp.arange(1, 9)[:, None], KERNEL, st.init_state(RECIPE))


def test_states_reduced_over_a_mesh(mesh):
    pmean = functools.partial(jax.tree.map, lambda v: jax.lax.pmean(v, "i"))
    psum = functools.partial(jax.tree.map, lambda v: jax.lax.psum(v, "i"))
    pmax = functools.partial(jax.tree.map, lambda v: jax.lax.pmax(v, "i"))
    refused(reduced(mesh, pmean, False)["input"], "averaging states")
    refused(reduced(mesh, psum, False)["input"], "adding 2 states up")
    right = reduced(mesh, pmax, False)
    assert float(right["input"].amax_history[0]) == float(jnp.abs(X * jnp.arange(1, 9)[:, None]).max())
    tools.same_tree(update.update_state(right), update.update_state(reduced(mesh, lambda s: s, True)))

    def outside(vma):  # the gradient is taken around shard_map
        f = jax.shard_map(lambda x, s: dense(x, KERNEL, recipe=RECIPE, state=s), mesh=mesh, in_specs=(P("i"), P()),
                          out_specs=P("i"), check_vma=vma)  # fmt: skip
        return jax.jit(jax.grad(lambda s: f(X, s).sum()))(st.init_state(RECIPE))

    refused(outside(False)["input"], "adding 2 states up")
    update.update_state(outside(True))


def test_microbatches_that_are_averaged():
    def one(x):
        return jax.grad(lambda s: dense(x, KERNEL, recipe=RECIPE, state=s).sum())(st.init_state(RECIPE))

    def accumulate(total, x):
        return jax.tree.map(lambda t, g: t + g / 8, total, one(x[None])), None

    zero = jax.tree.map(jnp.zeros_like, st.init_state(RECIPE))
    scanned = jax.jit(lambda: jax.lax.scan(accumulate, zero, X)[0])()
    refused(scanned["input"], "averaging states|was scaled")
    mapped = jax.jit(lambda: jax.tree.map(lambda v: v.mean(0), jax.vmap(one)(X[:, None])))()
    refused(mapped["input"], "averaging states")
    refused(jax.grad(lambda s: jax.vmap(lambda x: dense(x, KERNEL, recipe=RECIPE, state=s))(X[:, None]).mean())(
        st.init_state(RECIPE))["input"], "adding 8 states up")  # fmt: skip


# --- arrays lent to branches and mapped functions ---


def lent_to_a_branch(kernel, s, taken, times=1):
    y = dense(X, kernel, recipe=RECIPE, state=s)
    lent = tr.lend_states(s, kernel)

    def branch(y):
        for _ in range(times):
            y = dense(y * 100, kernel, recipe=RECIPE, state=lent)
        return y

    return dense(jax.lax.cond(taken, branch, jnp.sin, y), kernel, recipe=RECIPE, state=s).sum()


def inputs_of_layers(taken):
    """Returns the inputs of the layers of `lent_to_a_branch` behind the first."""

    def layer(y):
        return dense(y, KERNEL, recipe=RECIPE, state=st.init_state(RECIPE), record=False)

    y = layer(X)
    return [y * 100, layer(y * 100)] if taken else [jnp.sin(y)]


@tools.WRAP_NOW_JIT
def test_a_state_in_one_branch(wrap):
    run = wrap(tr.value_and_grad_with_state(lent_to_a_branch))
    for taken in (True, False):
        news = run(KERNEL, st.init_state(RECIPE), taken)[2]
        inputs = [X, *inputs_of_layers(taken)]
        want = max(float(jnp.abs(v).max()) for v in inputs)
        assert float(news["input"].amax_history[0]) == pytest.approx(want, rel=1e-5)
        refs = tr.state_refs(st.init_state(RECIPE))
        wrap(jax.grad(lent_to_a_branch))(KERNEL, refs, taken)
        tools.same_tree(tr.read_states(refs), news)
    twice = jax.jit(tr.value_and_grad_with_state(functools.partial(lent_to_a_branch, times=2)))
    assert np.isnan(twice(KERNEL, st.init_state(RECIPE), True)[2]["input"].scale).all()

    def threaded(s, taken):
        def branch(y, s):
            return dense(y, KERNEL, recipe=RECIPE, state=s, return_state=True)

        y, s = jax.lax.cond(taken, branch, lambda y, s: (y, s), X, s)
        return branch(y * 0.5, s)[0].sum()

    for taken in (True, False):
        news = wrap(jax.grad(threaded))(st.init_state(RECIPE), taken)
        amax = jnp.abs(X).max() * (1 if taken else 0.5)
        assert float(news["input"].amax_history[0]) >= float(amax) and float(news["input"].count[0]) == 1

    def used(s):
        return dense(X, KERNEL, recipe=RECIPE, state=s).sum()

    alone = wrap(jax.grad(lambda s, taken: jax.lax.cond(taken, used, lambda s: 0.0, s)))
    old = st.init_state(RECIPE)
    tools.same_tree(st.overwrite_states(old, alone(old, False)), old)
    assert float(alone(old, True)["input"].amax_history[0]) == float(jnp.abs(X).max())


WAY_OUT = "by lend_states, and use each once inside; hand states on by return_state; or call jax.grad inside of it"


def test_references_that_jax_cannot_differentiate(mesh):
    s, x = st.init_state(RECIPE), X

    def d(y, kernel, s):
        return dense(y, kernel, recipe=RECIPE, state=s)

    mapped = jax.shard_map(d, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P("i"))
    closed = {
        "a branch of jax.lax.cond": lambda k, s: jax.lax.cond(k[0, 0] > 0, lambda: d(x, k, s), lambda: x).sum(),
        "a branch of jax.lax.cond or switch": lambda k, s: jax.lax.switch(1, [jnp.sin, lambda y: d(y, k, s)], x).sum(),
        "jax.lax.while_loop, which has no reverse mode": lambda k, s: jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, d(c[1], k, s)), (0, x))[1].sum(),
        "shard_map": lambda k, s: jax.shard_map(
            lambda y: d(y, k, s), mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x).sum(),
    }  # fmt: skip
    for name, loss in closed.items():
        message = f"cannot be differentiated from outside of {name}.*{WAY_OUT}"
        with pytest.raises(NotImplementedError, match=message):
            jax.jit(tr.value_and_grad_with_state(loss))(KERNEL, s)
        with pytest.raises(NotImplementedError, match=message):
            jax.jit(jax.grad(loss))(KERNEL, tr.state_refs(s))
    with pytest.raises(NotImplementedError, match=f"outside of shard_map.*{WAY_OUT}"):
        jax.jit(tr.value_and_grad_with_state(lambda k, s: mapped(x, k, s).sum()))(KERNEL, s)
    lent = jax.jit(tr.value_and_grad_with_state(lambda k, s: mapped(x, k, tr.lend_states(s)).sum()))(KERNEL, s)
    assert float(lent[2]["input"].amax_history[0]) == float(jnp.abs(x).max())
    acc = jax.new_ref(jnp.zeros(KERNEL.shape))

    def summed(k):
        return dense(x, k, recipe=RECIPE, state=s, record=False, main_grad=acc)

    with pytest.raises(NotImplementedError, match=r"a reference as main_grad cannot .* pass main_grad as an array"):
        jax.grad(lambda k: jax.lax.cond(k[0, 0] > 0, summed, lambda k: x, k).sum())(KERNEL)


def test_a_gradient_inside_of_a_branch_or_a_shard_map(mesh):
    """References stay inside of one trace there, and work."""
    s = st.init_state(RECIPE)

    def loss(k, s):
        return dense(dense(X, k, recipe=RECIPE, state=s), k, recipe=RECIPE, state=s).sum()

    step = tr.value_and_grad_with_state(loss)
    want = step(KERNEL, s)
    got = jax.jit(lambda p: jax.lax.cond(p, lambda: step(KERNEL, s), lambda: (0.0, KERNEL, s)))(True)
    tools.same_tree(got[2], want[2])
    inside = jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    tools.same_tree(jax.jit(inside)(KERNEL, s)[2], want[2])


def test_dataclasses_replace_keeps_the_check():
    (state,) = states_of(2.0)
    scaled = dataclasses.replace(state, scale=jnp.full(1, 8.0))
    tools.same(scaled.check, state.check)
    update.update_state(scaled)
