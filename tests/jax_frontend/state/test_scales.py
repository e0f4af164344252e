"""Delayed scaling's states: the update in bits, the three transports, max and never sum, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import oracle
from diptych.common import CheckpointError, CustomRecipe, DelayedScaling, Format, RecipeSwitchWarning
from diptych.jax.layers.linear import dense
from diptych.jax.state import carry as tr
from diptych.jax.state import scales as st
from diptych.jax.state import update
from jax_frontend import tools

pytestmark = pytest.mark.sampled

RECIPE = DelayedScaling(amax_history_len=4)
NOTHING = jax.checkpoint_policies.nothing_saveable
NAMED = jax.checkpoint_policies.save_only_these_names("diptych_q")


def scaled(recipe=RECIPE, **scales):
    return {
        slot: dataclasses.replace(s, scale=jnp.full(1, scales.get(slot, 2.0), jnp.float32))
        for slot, s in st.init_state(recipe).items()
    }


X, KERNEL = tools.normal("x", (8, 32)), tools.normal("layer", (32, 32)) / 6


def pending(states):
    return {slot: float(np.asarray(s.amax_history)[0]) for slot, s in states.items()}


# --- models that use one state three times ---


def looped(x, kernel, s):
    for i in range(3):
        x = jnp.tanh(dense(x * (i + 1), kernel, recipe=RECIPE, state=s))
    return (x * 3).sum()


def scanned(x, kernel, s, policy=None):
    def body(x, i):
        return jnp.tanh(dense(x * (i + 1), kernel, recipe=RECIPE, state=s)), None

    body = body if policy is None else jax.checkpoint(body, policy=policy)
    return (jax.lax.scan(body, x, jnp.arange(3.0))[0] * 3).sum()


def threaded(x, kernel, s):
    for i in range(3):
        x, s = dense(x * (i + 1), kernel, recipe=RECIPE, state=s, return_state=True)
        x = jnp.tanh(x)
    return (x * 3).sum()


def carried(x, kernel, s, policy=None):
    def body(carry, i):
        x, s = carry
        y, s = dense(x * (i + 1), kernel, recipe=RECIPE, state=s, return_state=True)
        return (jnp.tanh(y), s), None

    body = body if policy is None else jax.checkpoint(body, policy=policy)
    return (jax.lax.scan(body, (x, s), jnp.arange(3.0))[0][0] * 3).sum()


def inner_jit(x, kernel, s):
    f = jax.jit(lambda x, s: jnp.tanh(dense(x, kernel, recipe=RECIPE, state=s)))
    return (f(f(f(x, s) * 2, s) * 3, s) * 3).sum()


SHARED = {
    "loop": looped,
    "scan": scanned,
    "scan, remat": functools.partial(scanned, policy=NOTHING),
    "scan, named remat": functools.partial(scanned, policy=NAMED),
    "remat": jax.checkpoint(looped),
    "inner jit": inner_jit,
}
THREADED = {
    "loop": threaded,
    "scan": carried,
    "scan, remat": functools.partial(carried, policy=NOTHING),
    "scan, named remat": functools.partial(carried, policy=NAMED),
}


@pytest.fixture(scope="module")
def want():
    """Gradients of `looped` and the largest amax of each slot, from one state for each use."""
    states = [scaled() for _ in range(3)]

    def f(x, kernel, states):
        for i, s in enumerate(states):
            x = jnp.tanh(dense(x * (i + 1), kernel, recipe=RECIPE, state=s))
        return (x * 3).sum()

    dx, dkernel, news = jax.jit(jax.grad(f, (0, 1, 2)))(X, KERNEL, states)
    amaxes = [pending(s) for s in news]
    assert len({a["input"] for a in amaxes}) == len({a["grad_output"] for a in amaxes}) == 3
    return (dx, dkernel), {slot: max(a[slot] for a in amaxes) for slot in amaxes[0]}


def close(got, want):
    """XLA's tanh may differ in a bit by how it is fused, which may flip a quantized one."""
    assert got.keys() == want.keys()
    for slot in want:
        assert got[slot] == pytest.approx(want[slot], rel=1e-2), slot


@tools.WRAP_NOW_JIT
@pytest.mark.parametrize("name", SHARED)
def test_shared_states_combine_by_max(name, wrap, want):
    f = SHARED[name]
    value, grads, news = wrap(tr.value_and_grad_with_state(lambda p, s: f(*p, s)))((X, KERNEL), scaled())
    if name != "inner jit":
        close(pending(news), want[1])
    loop = want if name != "inner jit" else None
    refs = tr.state_refs(scaled())
    by_refs = wrap(jax.value_and_grad(f, (0, 1)))(X, KERNEL, refs)
    tools.same_tree(by_refs, (value, grads), "references and gradients are two ways to one end")
    assert pending(tr.read_states(refs)) == pending(news)
    assert all(float(s.scale[0]) == 2 and (np.asarray(s.amax_history)[1:] == 0).all() for s in news.values())
    if loop:
        for g, w in zip(grads, loop[0], strict=True):
            np.testing.assert_allclose(g, w, rtol=0.1, atol=0.02 * float(np.abs(w).max()))  # as in `close`


@tools.WRAP
@pytest.mark.parametrize("name", THREADED)
def test_threaded_states_combine_by_max(name, wrap, want):
    news = wrap(jax.grad(THREADED[name], (0, 1, 2)))(X, KERNEL, scaled())[2]
    close(pending(news), want[1])
    assert all(float(s.count[0]) == 1 for s in news.values())


@tools.WRAP
def test_a_sum_is_refused(wrap):
    """Every way in which JAX adds gradients up: reuse, loops, vmap, and a user's own addition."""
    s = scaled()
    sums = {
        "reuse": wrap(jax.grad(looped, 2))(X, KERNEL, s),
        "scan": wrap(jax.grad(scanned, 2))(X, KERNEL, s),
        "vmap": wrap(jax.grad(each))(s),
        "microbatches": jax.tree.map(jnp.add, *[jax.grad(threaded, 2)(X, KERNEL, s)] * 2),
        "fork": wrap(jax.grad(lambda s: fork(s)))(s),
    }  # fmt: skip
    for name, summed in sums.items():
        for f in (update.update_state, functools.partial(st.overwrite_states, s), st.state_dict):
            with pytest.raises(ValueError, match=r"adding [238] states up"):
                f(summed)
        for f in (update.update_state, functools.partial(st.overwrite_states, s)):
            poisoned = jax.jit(f)(summed)
            # Under vmap a kernel's amax is the same for each example, so that nothing is summed.
            assert (
                {k for k, v in poisoned.items() if np.isnan(v.scale).all()}
                == {k for k, v in summed.items() if v.count != 1}
                >= {"input"}
            ), name


def each(s):
    return jax.vmap(lambda x: dense(x, KERNEL, recipe=RECIPE, state=s))(X[:, None]).sum()


def fork(s):
    """One returned state goes to two uses."""
    y, s = dense(X, KERNEL, recipe=RECIPE, state=s, return_state=True)
    return sum(dense(y, KERNEL, recipe=RECIPE, state=s, return_state=True)[0].sum() for _ in range(2))


@tools.WRAP
def test_a_state_that_nothing_used_stays(wrap):
    s = {"used": scaled(input=3.0), "unused": scaled(input=5.0)}

    def f(params, s):
        return dense(params, KERNEL, recipe=RECIPE, state=s["used"]).sum()

    news = wrap(tr.value_and_grad_with_state(f))(X, s)[2]
    tools.same_tree(news["unused"], s["unused"])
    assert pending(news["used"])["input"] > 0
    direct = wrap(jax.grad(lambda s: f(X, s)))(s)
    with pytest.raises(ValueError, match="nothing contributed to"):
        update.update_state(direct)
    tools.same_tree(st.overwrite_states(s, direct)["unused"], s["unused"])


@tools.WRAP
def test_vmap_over_shared_states_raises(wrap):
    def f(x, s):
        return jax.vmap(lambda v: dense(v, KERNEL, recipe=RECIPE, state=s))(x[:, None]).sum()

    with pytest.raises(Exception, match="vmapped value on an unbatched array reference"):
        wrap(tr.value_and_grad_with_state(f))(X, scaled())

    def mapped(s):  # the way that is documented
        stacked = jax.tree.map(lambda v: jnp.broadcast_to(v, (8, *v.shape)), s)
        return jax.vmap(lambda v, s: dense(v, KERNEL, recipe=RECIPE, state=s))(X[:, None], stacked).sum(), stacked

    stacked = mapped(scaled())[1]
    grads = wrap(jax.grad(lambda k, st: jax.vmap(
        lambda v, s: dense(v, k, recipe=RECIPE, state=s))(X[:, None], st).sum(), 1))(KERNEL, stacked)  # fmt: skip
    news = jax.tree.map(lambda v: v.max(0), grads)
    assert pending(news)["input"] == float(jnp.abs(X).max())
    update.update_state(news)


def test_lost_amaxes_are_refused():
    s = scaled()
    f = jax.grad(lambda x, **o: dense(x, KERNEL, recipe=RECIPE, state=s, **o).sum())
    with pytest.raises(ValueError, match=r"the amax of grad_output, input, weight would be lost.*record=False"):
        f(X)
    f(X, record=False)
    forward = jax.grad(lambda x: dense(x, KERNEL, recipe=RECIPE, state=s, return_state=True)[0].sum())
    with pytest.raises(ValueError, match="amax of grad_output would be lost"):
        forward(X)
    frozen = jax.grad(lambda s: dense(X, KERNEL, recipe=RECIPE, state=s, record=False).sum())(s)
    tools.same_tree(frozen, s)
    dense(X, KERNEL, recipe=RECIPE, state=s)  # inference loses nothing that anyone waits for


def test_forward_amaxes_come_back_without_a_gradient():
    s = scaled()
    y, news = jax.jit(lambda s: dense(X, KERNEL, recipe=RECIPE, state=s, return_state=True))(s)
    want = {"input": float(jnp.abs(X).max()), "weight": float(jnp.abs(KERNEL).max()), "grad_output": 0.0}
    assert pending(news) == want
    refs = tr.state_refs(s)
    tools.same(jax.jit(lambda r: dense(X, KERNEL, recipe=RECIPE, state=r))(refs), y)
    assert pending(tr.read_states(refs)) == want
    small, kept = dense(X * 1e-30, KERNEL, recipe=RECIPE, state=news, return_state=True)
    assert pending(kept) == want and float(jnp.abs(small).max()) == 0


def test_subnormal_amaxes_survive():
    """XLA:CPU flushes subnormals in its own maximum."""
    tiny = jnp.full((4, 32), np.float32(3e-42))
    for wrap in (lambda f: f, jax.jit):
        news = wrap(lambda s: dense(tiny, KERNEL, recipe=RECIPE, state=s, return_state=True)[1])(scaled())
        refs = tr.state_refs(scaled())
        wrap(lambda r: dense(tiny, KERNEL, recipe=RECIPE, state=r))(refs)
        merged = wrap(st.merge_states)(scaled(), news)
        for s in (news, tr.read_states(refs), merged):
            tools.same(s["input"].amax_history, np.float32([3e-42, 0, 0, 0]))


# --- the update ---


def first_two(history, last):
    return jnp.maximum(history[:, 1] * 2, last)


def wide(history, last):
    return history


ALGOS = ["max", "most_recent", first_two]


@tools.WRAP
@pytest.mark.parametrize("algo", ALGOS, ids=lambda a: getattr(a, "__name__", a))
@pytest.mark.parametrize("length", [1, 2, 5])
def test_update_is_the_oracles(algo, length, wrap):
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo, margin=2)
    states, rng = st.init_state(recipe), np.random.default_rng(0)
    want = {slot: (np.zeros(length, np.float32), np.float32(1)) for slot in states}
    for step in range(7):
        for slot, s in states.items():
            amax = np.float32(rng.choice([0.0, 1e-42, 1e-3, 3.7, np.inf, rng.uniform(0, 9)]))
            states = states | {slot: st.record(s, jnp.full(1, amax))}
            history, scale = want[slot]
            history = history.copy()
            history[0] = max(history[0], amax)
            chosen = np.asarray(first_two(history[None], history[:1])) if callable(algo) and length > 1 else None
            if callable(algo) and length == 1:
                chosen = history[:1]
            largest = np.float32(57344 if slot == "grad_output" else 448)
            out = oracle.scale_update(
                history[None], np.array([scale]), amax=chosen, fp8_max=largest, margin=2,
                most_recent=algo == "most_recent",
            )  # fmt: skip
            want[slot] = out[0][0], out[1][0]
        if callable(algo) and length == 1:
            return
        states = wrap(update.update_state)(states)
        for slot, s in states.items():
            tools.same(s.amax_history, want[slot][0], (slot, step))
            tools.same(s.scale, np.array([want[slot][1]]), (slot, step))


def test_references_are_updated_in_place():
    refs, arrays = tr.state_refs(scaled()), scaled()
    for _ in range(3):
        jax.jit(lambda r: dense(X, KERNEL, recipe=RECIPE, state=r))(refs)
        arrays = dense(X, KERNEL, recipe=RECIPE, state=arrays, return_state=True)[1]
        assert jax.jit(lambda r: update.update_state(r) and None)(refs) is None
        arrays = update.update_state(arrays)
        tools.same_tree(tr.read_states(refs), arrays)


def test_bad_algorithms():
    for algo, error, message in (
        (wide, ValueError, r"must return float32\[1\], got float32\[1, 4\]"),
        (lambda h, last: 3.0, TypeError, "returned float"),
        (lambda h, last: last.astype(jnp.bfloat16), ValueError, "got bfloat16"),
    ):
        states = st.init_state(RECIPE.replace(amax_compute_algo=algo))
        with pytest.raises(error, match=message):
            update.update_state(states)
    with pytest.raises(ValueError, match=r"axis_name .* is not the recipe's amax_group"):
        update.update_state(st.init_state(RECIPE), RECIPE.replace(amax_group="data"), axis_name="model")
    with pytest.raises(ValueError, match="stack of states"):
        update.update_state(jax.tree.map(lambda v: jnp.stack([v, v]), st.init_state(RECIPE)))


# --- several steps ---


def test_microbatches_are_one_step():
    """Passed on, merged, or as one function of all: the same amaxes."""
    f = tr.value_and_grad_with_state(lambda p, s, x: dense(x, p, recipe=RECIPE, state=s).sum())
    parts = [X[:4], X[4:] * 3]
    s, grads = scaled(), []
    for part in parts:
        _, g, s = f(KERNEL, s, part)
        grads.append(g)
    separate = [f(KERNEL, scaled(), part)[2] for part in parts]
    tools.same_tree(st.merge_states(*separate), s)
    tools.same_tree(jax.jit(st.merge_states)(*separate), s)
    whole = tr.value_and_grad_with_state(lambda p, s, x: sum(dense(v, p, recipe=RECIPE, state=s).sum() for v in x))
    _, g, together = whole(KERNEL, scaled(), parts)
    tools.same_tree(together, s)
    np.testing.assert_allclose(g, grads[0] + grads[1], rtol=1e-5, atol=1e-5)
    assert pending(s)["input"] == float(jnp.abs(X[4:] * 3).max())
    with pytest.raises(ValueError, match="scales differ"):
        st.merge_states(s, update.update_state(s))
    with pytest.raises(ValueError, match="no states of one quantizer"):
        st.merge_states(s, st.init_state(RECIPE.replace(margin=1)))
    assert np.isnan(jax.jit(st.merge_states)(s, update.update_state(s))["input"].scale).all()


def test_a_state_for_each_layer_of_a_scan():
    """Slices of stacked states are used once each, and need nothing."""
    kernels = tools.normal("layers", (4, 32, 32)) / 6
    stacked = jax.tree.map(lambda v: jnp.broadcast_to(v, (4, *v.shape)), scaled())

    def f(s):
        return jax.lax.scan(
            lambda x, ks: (jnp.tanh(dense(x, ks[0], recipe=RECIPE, state=ks[1])), None), X, (kernels, s)
        )[0].sum()

    news = jax.jit(jax.grad(f))(stacked)
    want = [float(jnp.abs(k).max()) for k in kernels]
    assert news["weight"].amax_history[:, 0].tolist() == want
    updated = jax.vmap(update.update_state)(st.overwrite_states(stacked, news))
    tools.same(updated["weight"].scale[:, 0], np.float32(448) / np.float32(want))


def test_an_optimizer_beside_states():
    tree = {"layer": {"kernel": KERNEL, "bias": None, "state": scaled()}, "gain": jnp.ones(())}

    def loss(tree):
        y = dense(X, tree["layer"]["kernel"], recipe=RECIPE, state=tree["layer"]["state"])
        return (y * tree["gain"]).sum()

    optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(0.1))
    params, states = tr.partition_states(tree)
    moments = optimizer.init(params)
    assert not any(x.shape == (4,) for x in jax.tree.leaves(moments))
    for _ in range(3):
        grads, news = tr.partition_states(jax.grad(loss)(tree))
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        states = update.update_state(st.overwrite_states(states, news), RECIPE)
        tree = tr.combine_states(params, states)
    assert float(tree["gain"]) != 1 and tree["layer"]["bias"] is None
    tools.same(tree["layer"]["state"]["input"].scale, np.float32([448 / jnp.abs(X).max()]))
    with pytest.raises(ValueError, match="one of both"):
        tr.combine_states(tree, states)


# --- on a mesh ---


@pytest.mark.parametrize("way", ["gradient", "references", "returned"])
def test_replicated_states_stay_replicated(way):
    """On two devices the amax that comes back is that of both halves, whichever way it travels."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("i",))
    x = X * jnp.arange(1, 9)[:, None]

    def local(x, kernel, s):
        if way == "gradient":
            return jax.grad(lambda k, s: dense(x, k, recipe=RECIPE, state=s).sum(), (0, 1))(kernel, s)[1]
        if way == "returned":
            return dense(x, kernel, recipe=RECIPE, state=s, return_state=True)[1]
        refs = tr.state_refs(s)
        jax.grad(lambda k: dense(x, k, recipe=RECIPE, state=refs).sum())(kernel)
        return tr.read_states(refs)

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P()))
    news = f(x, KERNEL, scaled())
    assert pending(news)["input"] == float(jnp.abs(x).max())
    assert pending(news)["weight"] == float(jnp.abs(KERNEL).max())
    assert pending(news)["grad_output"] == (0.0 if way == "returned" else 1.0)


# --- recipes and checkpoints ---


def test_switching_recipes():
    held = update.update_state(dense(X, KERNEL, recipe=RECIPE, state=scaled(), return_state=True)[1])
    longer = RECIPE.replace(amax_history_len=6, margin=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = st.switch_state(held, longer)
    for slot, s in kept.items():
        tools.same(s.scale, held[slot].scale)
        history = np.asarray(held[slot].amax_history)
        tools.same(s.amax_history, np.float32([history[0], 0, 0, *history[1:]]), slot)
    dense(X, KERNEL, recipe=longer, state=kept)
    back = st.switch_state(kept, RECIPE)
    tools.same_tree(back, held)
    other = RECIPE.replace(fp8_format=Format.E4M3)
    st._warned.clear()
    with pytest.warns(RecipeSwitchWarning, match="grad_output were another recipe's"):
        fresh = st.switch_state(held, other)
    assert float(fresh["grad_output"].scale[0]) == 1 and float(fresh["input"].scale[0]) == float(held["input"].scale[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.switch_state(held, other)
    with pytest.warns(RecipeSwitchWarning, match="grad_output, input, weight"):
        assert st.switch_state(held, CustomRecipe(lambda role: None)) == {}


def per_product(role):
    return DelayedScaling(margin=1 if role.gemm == "wgrad" else 0, amax_history_len=3).quantizer(role)


def test_checkpoints_round_trip():
    for recipe in (RECIPE, CustomRecipe(per_product)):
        states = {"fc1": st.init_state(recipe), "fc2": st.init_state(recipe)}
        states = st.map_states(lambda s: st.record(s, jnp.full(1, 3.25)), states)
        rng = jnp.asarray([1, -2, 3, 4], jnp.int32)
        flat = st.state_dict(states, "blocks.0.", rng)
        assert all(isinstance(v, jax.Array) for v in flat.values()) and "blocks.0.rng_state" in flat
        got, got_rng = st.load_state_dict({k: np.asarray(v) for k, v in flat.items()} | {"other": 0}, {
            "fc1": st.init_state(recipe), "fc2": st.init_state(recipe)}, "blocks.0.")  # fmt: skip
        tools.same_tree(got, states)
        tools.same(got_rng, rng)
    assert "blocks.0.scale_states.fc1.input_fprop.scale" in flat
    one = st.state_dict(tr.state_refs(scaled()))
    assert set(one) == {f"scale_states.{slot}.{b}" for slot in ("input", "weight", "grad_output") for b in st.BUFFERS}
    assert st.load_state_dict(one, scaled())[1] is None
    short, _ = st.load_state_dict(one, st.init_state(RECIPE.replace(amax_history_len=2)))
    assert short["input"].amax_history.shape == (2,)


def test_bad_checkpoints():
    good = {k: np.asarray(v) for k, v in st.state_dict(scaled()).items()}
    key = "scale_states.input"
    bad = {
        "another recipe": {k: v for k, v in good.items() if not k.startswith(key)},
        "must hold": {k: v for k, v in good.items() if k != f"{key}.fp8_max"},
        r"input.scale must be float32 \[1\], got float64": good | {f"{key}.scale": np.ones(1)},
        r"amax_history must be float32 \[L\]": good | {f"{key}.amax_history": np.ones((2, 2), np.float32)},
        r"elements up to 57344": good | {f"{key}.fp8_max": np.float32([57344])},
        r"rng_state must be int32 \[4\], got int64": good | {"rng_state": np.zeros(4, np.int64)},
        r"input.scale must be finite and greater than 0, got 0(?m:$)": good | {f"{key}.scale": np.zeros(1, np.float32)},
        r"input.scale must be finite .*, got -2(?m:$)": good | {f"{key}.scale": np.float32([-2])},
        r"input.scale must be finite .*, got nan(?m:$)": good | {f"{key}.scale": np.float32([np.nan])},
        r"input.scale must be finite .*, got inf(?m:$)": good | {f"{key}.scale": np.float32([np.inf])},
        r"amax_history must hold finite amaxes of 0 or more, got -1(?m:$)": good
        | {f"{key}.amax_history": np.float32([0, -1, 2])},
        r"amax_history must hold .*, got nan(?m:$)": good | {f"{key}.amax_history": np.float32([np.nan, 1])},
        r"are states of \['extra'": good | {f"scale_states.extra.{b}": good[f"{key}.{b}"] for b in st.BUFFERS},
    }
    for message, flat in bad.items():
        with pytest.raises(CheckpointError, match=message):
            st.load_state_dict(flat, scaled())
    st.load_state_dict(good | {f"{key}.fp8_max": np.float32([448 * (1 - 1e-6)])}, scaled())  # a rounded mean
