"""Experts spread over a mesh axis: one device's bits, what is exchanged, rows beyond the capacity, errors."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import linear_plan, row_align
from diptych.common.errors import ArgumentError, ShapeError
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

RECIPES = {k: r for k, r in tools.PLAIN_RECIPES.items() if not linear_plan(r).needs_rng} | {
    "nvfp4 rotated": dj.NVFP4BlockScaling(disable_stochastic_rounding=True)
}
RECIPE = pytest.mark.parametrize("recipe", named(RECIPES, ("fp8-current", "fp8-block", "mxfp8", "nvfp4 rotated")))
RECIPES_OF_EXAMPLE = {"fp8-delayed": dj.DelayedScaling(), "mxfp8": dj.MXFP8BlockScaling()}
E, K, N, T, TOP = 8, 64, 128, 128, 2
X = tools.normal("tokens", (T, K), "bfloat16").at[-1, -1].set(30)
PARAMS = {
    "up": tools.normal("up", (E, N, K)) / 8 * jnp.arange(1, E + 1)[:, None, None],
    "down": tools.normal("down", (E, K, N)) / 8,
}
SCORES = tools.normal("scores", (T, E)) + jnp.linspace(2, 0, E)  # the first experts have more rows
PROBS, IDS = jax.lax.top_k(jax.nn.softmax(SCORES), TOP)
DY = tools.normal("dy", (T, K), "bfloat16")


def layer(recipe, params, x, rows, row_axes=()):
    options = {"recipe": recipe, "align": 1 if recipe is None else row_align(recipe), "row_axes": row_axes}
    hidden = dj.grouped_dense(x, params["up"], row_map=rows, **options)
    return dj.grouped_dense(jnp.tanh(hidden), params["down"], offsets=rows.expert_offsets, **options)


def one_device(recipe, params, x, ids, probs):
    rows = dj.moe_map(ids, E, map_type="index", align_size=1 if recipe is None else row_align(recipe))
    return dj.moe_unpermute(layer(recipe, params, x, rows), rows, probs)


def spread(recipe, params, x, ids, probs, token_axes=("d",), **options):
    f = functools.partial(layer, recipe, row_axes=() if recipe is None else token_axes)
    align = 1 if recipe is None else row_align(recipe)
    given = {"num_experts": E, "axis": "d", "token_axes": token_axes, "align": align} | options
    return dj.expert_parallel(f, params, x, ids, probs, **given)


def step(f):
    """Returns y and all gradients of a mixture of experts."""

    def g(params, x, ids, probs, dy):
        y, vjp = jax.vjp(lambda params, x, probs: f(params, x, ids, probs), params, x, probs)
        return y, *vjp(dy)

    return g


def run(f, kind, tokens, params=PARAMS, x=X, ids=IDS, probs=PROBS, dy=DY):
    """Runs f under jit on placed arguments, with the mesh as context; returns also its collectives."""
    with meshes.mesh_of(kind) as mesh, jax.set_mesh(mesh):
        cut = NamedSharding(mesh, P(tokens))
        placed = [
            dj.device_put(params, NamedSharding(mesh, P("d"))),
            *(jax.device_put(v, cut) for v in (x, ids, probs, dy)),
        ]
        compiled = jax.jit(f).lower(*placed).compile()
        return compiled(*placed), meshes.counted(compiled.as_text())


@functools.cache
def wanted(recipe):
    return jax.jit(step(functools.partial(one_device, recipe)))(PARAMS, X, IDS, PROBS, DY)


@meshes.AXES
@RECIPE
def test_results_and_gradients_have_the_bits_of_one_device(recipe, kind):
    got, collectives = run(step(lambda *args: spread(recipe, *args)[0]), kind, ("d",))
    meshes.same(got, wanted(recipe))
    assert got[0].sharding.spec[0] == "d" and got[1]["up"].sharding.spec[0] == "d"
    # the counts, and the rows of x and y in both directions; all-reduces are those of amaxes
    assert collectives["all-to-all"] == 5 and set(collectives) <= {"all-to-all", "all-reduce"}, collectives


@meshes.AXES
@RECIPE
def test_experts_that_are_replicated_along_another_axis_of_tokens(recipe, kind):
    """Gradients of experts are sums over that axis."""
    token_axes = ("d", "t")
    got, _ = run(step(lambda *args: spread(recipe, *args, token_axes=token_axes)[0]), kind, token_axes)
    y, dparams, dx, dprobs = got
    want, of_params, *rest = wanted(recipe)
    meshes.same((dx, dprobs), tuple(rest))
    meshes.same(y, want)
    coarse = recipe.quantizer(dj.QuantizerRole(tensor="input")).format.pack == 2  # blocks have other tokens
    for name in PARAMS:
        g, w = np.asarray(dparams[name]), np.asarray(of_params[name])
        assert np.linalg.norm(g - w) <= (0.3 if coarse else 1e-3) * np.linalg.norm(w), name


def test_without_a_recipe_on_leading_dimensions_and_eagerly():
    batched = [v.reshape(8, T // 8, -1) for v in (X, IDS, PROBS)]
    with meshes.mesh_of(AxisType.Auto) as mesh:
        y, overflow = spread(None, PARAMS, *batched, mesh=mesh)
        nothing, none = spread(None, PARAMS, X[:0], np.asarray(IDS[:0], np.int64), PROBS[:0], mesh=mesh)
    meshes.same(y.reshape(T, K), jax.jit(functools.partial(one_device, None))(PARAMS, X, IDS, PROBS))
    assert overflow == none == 0 and nothing.shape == (0, K)


@meshes.AXES
def test_experts_that_are_held_quantized(kind):
    """A stack's arrays are cut along its tensors; gradients go to main_grad."""
    recipe, shapes = dj.MXFP8BlockScaling(), {name: jnp.zeros(w.shape) for name, w in PARAMS.items()}
    held = dj.quantize_params(PARAMS, recipe, lambda *_: True, module="grouped_linear")

    def f(params, x, ids, probs):
        options = {"recipe": recipe, "align": 32, "row_axes": "d"}

        def experts(params, x, rows):
            q, main = params
            h = dj.grouped_dense(x, q["up"], row_map=rows, main_grad=main["up"], **options)
            return dj.grouped_dense(
                jnp.tanh(h), q["down"], offsets=rows.expert_offsets, main_grad=main["down"], **options
            )

        return dj.expert_parallel(experts, params, x, ids, probs, num_experts=E, axis="d", align=32)[0]

    def g(params, x, ids, probs, dy):
        y, vjp = jax.vjp(lambda main, x: f((params[0], main), x, ids, probs), params[1], x)
        return y, *vjp(dy)

    (y, dmain, dx), _ = run(g, kind, ("d",), params=(held, shapes))
    want, dparams, of_x, _ = wanted(recipe)
    meshes.same((y, dmain, dx), (want, dparams, of_x))


def test_remat_and_scan_over_layers():
    recipe = dj.MXFP8BlockScaling()

    def loss(params, x, ids, probs, dy, moe):
        body = jax.checkpoint(lambda h, _: (h + moe(params, h, ids, probs), None))
        return (jax.lax.scan(body, x, None, length=2)[0] * dy).astype(jnp.float32).sum()

    many = jax.grad(functools.partial(loss, moe=lambda *args: spread(recipe, *args)[0]), (0, 1))
    one = jax.grad(functools.partial(loss, moe=functools.partial(one_device, recipe)), (0, 1))
    meshes.same(run(many, AxisType.Auto, ("d",))[0], jax.jit(one)(PARAMS, X, IDS, PROBS, DY))


@meshes.AXES
def test_delayed_states_are_shared_and_train_as_on_one_device(kind):
    """Two steps: states record the amaxes of all devices' rows and kernels."""
    recipe = dj.DelayedScaling(amax_history_len=4)

    def experts(axes, params, x, rows, states):
        options = {"recipe": recipe, "align": 32, "row_axes": axes}
        h = dj.grouped_dense(x, params["up"], row_map=rows, state=states["up"], **options)
        offsets = rows.expert_offsets
        return dj.grouped_dense(jnp.tanh(h), params["down"], offsets=offsets, state=states["down"], **options)

    def many(params, states, x, ids, probs):
        f = functools.partial(experts, "d")
        given = {"num_experts": E, "axis": "d", "align": 32, "shared": states}
        return dj.expert_parallel(f, params, x, ids, probs, **given)[0]

    def one(params, states, x, ids, probs):
        rows = dj.moe_map(ids, E, map_type="index", align_size=32)
        return dj.moe_unpermute(experts((), params, x, rows, states), rows, probs)

    def train(moe, params, x, ids, probs, dy):
        states = {name: dj.init_state(recipe, module="grouped_linear") for name in PARAMS}
        for _ in range(2):
            states = dj.update_state(states, recipe)
            loss = lambda params, states: (moe(params, states, x, ids, probs) * dy).astype(jnp.float32).sum()  # noqa: E731
            _, grads, states = dj.value_and_grad_with_state(loss)(params, states)
        return grads, states

    got, _ = run(functools.partial(train, many), kind, ("d",))
    meshes.same(got, jax.jit(functools.partial(train, one))(PARAMS, X, IDS, PROBS, DY))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES_OF_EXAMPLE)
def test_the_example_learns_as_on_one_device(name):
    """A whole step under jit: attention and shared experts are cut by XLA. Sums over tokens have another order."""
    spec = importlib.util.spec_from_file_location("jax_moe", Path(__file__).parents[3] / "examples/jax_moe.py")
    example = sys.modules["jax_moe"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    recipe = RECIPES_OF_EXAMPLE[name]
    config = example.Config(width=32, hidden=32, seq=32, blocks=1, align=row_align(recipe))
    one, many = (example.train(recipe, 3, batch=4, config=config, devices=devices) for devices in (1, 4))
    assert np.allclose(one, many, rtol=1e-5) and one[-1] < one[0]


# --- capacity ---


def kept_rows(ids, capacity, devices=4):
    """Returns which of the rows [T, k] find a place: by sender and receiver, in the order of experts and tokens."""
    kept = np.zeros(ids.shape, bool)
    for sender in np.split(np.arange(T), devices):
        for receiver in range(devices):
            there = [(e, t, s) for t in sender for s, e in enumerate(ids[t]) if e // (E // devices) == receiver]
            for _, t, s in sorted(there)[:capacity]:
                kept[t, s] = True
    return kept


@meshes.AXES
@pytest.mark.parametrize("capacity", [1, 20, 64])
def test_rows_beyond_the_capacity_are_dropped_and_counted(capacity, kind):
    """A row beyond the capacity gives the result and gradients of a row that is routed to no expert."""
    kept = kept_rows(np.asarray(IDS), capacity)
    recipe, ids = dj.MXFP8BlockScaling(), jnp.where(kept, IDS, E)

    def f(*args):
        layer = functools.partial(spread, recipe, capacity=capacity, drop=True)
        return *step(lambda *a: layer(*a)[0])(*args), layer(*args[:-1])[1]

    (*got, overflow), _ = run(f, kind, ("d",))
    want = jax.jit(step(functools.partial(one_device, recipe)))(PARAMS, X, ids, PROBS, DY)
    meshes.same(tuple(got), want)
    assert int(overflow) == (~kept).sum() and (capacity < 64) == bool(overflow)


@meshes.AXES
def test_rows_beyond_the_capacity_raise(kind):
    def f(capacity, params, x, ids, probs, dy):
        return spread(dj.MXFP8BlockScaling(), params, x, ids, probs, capacity=capacity)

    kept = kept_rows(np.asarray(IDS), 20)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{(~kept).sum()} rows found no place.*at most 20 rows"):
        jax.block_until_ready(run(functools.partial(f, 20), kind, ("d",))[0])
    y, overflow = run(functools.partial(f, 60), kind, ("d",))[0]
    meshes.same(y, wanted(dj.MXFP8BlockScaling())[0])
    assert overflow == 0


def test_only_a_capacity_that_may_not_suffice_calls_the_host():
    with meshes.mesh_of(AxisType.Auto) as mesh, jax.set_mesh(mesh):
        text = {
            options: jax.jit(functools.partial(spread, None, capacity=options[0], drop=options[1]))
            .lower(PARAMS, X, IDS, PROBS)
            .as_text()
            for options in ((None, False), (64, False), (63, False), (63, True))
        }
    assert [options for options, t in text.items() if "callback" in t] == [(63, False)]


# --- errors ---


def test_misuse():
    with meshes.mesh_of(AxisType.Auto) as mesh:
        f = functools.partial(spread, None, mesh=mesh)
        cases = [
            (ShapeError, r"6 experts over 4 devices", {"num_experts": 6}, {"up": jnp.zeros((6, N, K))}, X),
            (ShapeError, r"126 tokens over 4 devices", {}, PARAMS, X[:126]),
            (ShapeError, r"params\['up'\] must have a leading 8", {}, {"up": jnp.zeros((4, N, K))}, X),
            (ValueError, r"token_axes \('t',\) must be axes of the mesh", {"token_axes": ("t",)}, PARAMS, X),
            (ValueError, r"capacity", {"capacity": 0}, PARAMS, X),
            (TypeError, r"capacity", {"capacity": 1.5}, PARAMS, X),
        ]
        for error, message, options, params, x in cases:
            with pytest.raises(error, match=message):
                f(params, x, IDS[: len(x)], PROBS[: len(x)], **options)
        with pytest.raises(ShapeError, match=r"experts \[\.\.\., k\] and probs \[\.\.\., k\] must agree"):
            f(PARAMS, X, IDS, PROBS[:, :1])
        with pytest.raises(ArgumentError, match="experts must be a JAX or NumPy array, got list"):
            f(PARAMS, X, IDS.tolist(), PROBS)
        with pytest.raises(TypeError, match="experts must be"):
            f(PARAMS, X, IDS.astype(jnp.float32), PROBS)
        with pytest.raises(ShapeError, match=r"layer must return a row for each row of the map"):
            dj.expert_parallel(lambda params, x, rows: x[:3], PARAMS, X, IDS, PROBS, num_experts=E, axis="d", mesh=mesh)
    with pytest.raises(ArgumentError, match="no mesh"):
        spread(None, PARAMS, X, IDS, PROBS)
