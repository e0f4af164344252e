"""`dense`: its arithmetic against the oracle, its gradients under every transformation, and what it refuses."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych import common
from diptych.common import ArgumentError, DTypeError, ShapeError, UnsupportedError, linear_plan
from jax_frontend import tools
from jax_frontend.layer_cases import operands, run, same

pytestmark = pytest.mark.sampled

# Those that take any shape; the others are in test_linear_plans.py.
RECIPES = {k: r for k, r in tools.PLAIN_RECIPES.items() if linear_plan(r).input.rowwise.format.pack == 1}
RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def loss(recipe, x, kernel, bias):
    return (dj.dense(x, kernel, bias, recipe=recipe).astype(jnp.float32) ** 2).sum()


@RECIPE
@pytest.mark.parametrize("shape", [(2, 17, 65), (65,), (1, 1), (128, 256), (0, 32)], ids=str)
def test_bits(recipe, shape):
    args = operands(shape)
    want = tools.oracle_dense(recipe, *args)
    same(run(recipe, *args), want)
    same(jax.jit(run, static_argnums=0)(recipe, *args), want)


@RECIPE
@pytest.mark.parametrize("dtypes", [("bfloat16",), ("float16",), ("bfloat16", "float32", "float16")], ids=str)
def test_dtypes(recipe, dtypes):
    args = operands((17, 65), 33, *dtypes)
    got = run(recipe, *args)
    same(got, tools.oracle_dense(recipe, *args))
    assert [got[k].dtype.name for k in ("y", "dx")] == [dtypes[0]] * 2
    assert got["dkernel"].dtype == args[1].dtype and got["dbias"].dtype == args[2].dtype


@RECIPE
def test_without_bias(recipe):
    x, kernel, _, dy = operands()
    same(run(recipe, x, kernel, None, dy), tools.oracle_dense(recipe, x, kernel, None, dy))


@pytest.mark.parametrize("step", [run, jax.jit(run, static_argnums=0)], ids=["eager", "jit"])
@pytest.mark.parametrize("shape", [(1024, 64), (64, 16, 64)], ids=str)
def test_high_precision_sums_are_not_rounded_to_bfloat16(shape, step):
    """Each result is a sum in float32 or better, rounded once."""
    x, kernel, _, dy = operands(shape, 48, "bfloat16")
    got = step(None, x, kernel, None, dy)
    x, kernel, dy = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, kernel, dy))
    for name, (a, b) in {"y": (x, kernel.T), "dx": (dy, kernel), "dkernel": (dy.T, x)}.items():
        rounded, summed = 2.0**-8 * np.abs(a @ b), 2.0**-14 * (np.abs(a) @ np.abs(b))
        error = np.abs(np.asarray(got[name], np.float64).reshape(rounded.shape) - a @ b)
        assert (error <= rounded + summed).all(), name


@RECIPE
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_infinite_values_are_not_lost(recipe, dtype):
    """They come out as NaN where the product has them, so that a loss scaler sees them, and nothing else changes."""
    x, kernel, bias, dy = operands((32, 96), 64, dtype)
    want = run(recipe, x, kernel, bias, dy)
    for step in (run, jax.jit(run, static_argnums=0)):
        got = step(recipe, x.at[20, 7].set(-jnp.inf), kernel, bias, dy.at[9, 3].set(jnp.inf))
        for key, rows, cols in (("y", [20], []), ("dx", [9], []), ("dkernel", [3], [7]), ("dbias", [3], [])):
            value, plain = (np.asarray(v[key], np.float32) for v in (got, want))
            nan = np.zeros(value.shape, bool)
            nan[rows], nan[..., cols] = True, True
            assert not np.isfinite(value[nan]).any() and np.isfinite(value[~nan]).all(), key
            assert np.linalg.norm((value - plain)[~nan]) < 0.1 * np.linalg.norm(plain), key


def test_without_recipe_is_the_plain_product():
    x, kernel, bias, _ = operands(kernel_dtype="bfloat16")
    before = tools.calls("quantize")
    tools.near(dj.dense(x, kernel, bias, recipe=None), x @ kernel.astype(jnp.float32).T + bias, 1e-6)
    assert tools.calls("quantize") == before
    grads = jax.grad(functools.partial(loss, None), (0, 1, 2))(x, kernel, bias)
    assert [g.dtype for g in grads] == [x.dtype, kernel.dtype, bias.dtype]


@RECIPE
def test_near_the_plain_product(recipe):
    args = operands((64, 128), 64)
    got, plain = run(recipe, *args), run(None, *args)
    for name, value in got.items():
        error = np.linalg.norm(np.asarray(value - plain[name])) / np.linalg.norm(np.asarray(plain[name]))
        assert error < (0.12 if name != "dbias" else 1e-5), (name, error)


@RECIPE
def test_all_three_products_run_quantized_kernels(recipe):
    args = operands()
    before = {op: tools.calls(op) for op in ("quantize", "gemm", "bias_grad")}
    jax.block_until_ready(run(recipe, *args))
    ran = {op: tools.calls(op) - n for op, n in before.items()}
    assert ran == {"quantize": 3, "gemm": 3, "bias_grad": 1}


def test_only_what_is_differentiated_is_computed():
    x, kernel, bias, _ = operands()
    recipe = dj.MXFP8BlockScaling()
    base = functools.partial(loss, recipe)
    for argnums, quantize, gemm in ((0, 3, 2), (1, 3, 2), (2, 2, 1), ((0, 1), 3, 3)):
        jaxpr = jax.make_jaxpr(jax.grad(base, argnums))(x, kernel, bias)
        found = tools.eqns(jaxpr.jaxpr, "diptych_quantize")
        assert len(found) == quantize and len(tools.eqns(jaxpr.jaxpr, "diptych_gemm")) == gemm, argnums
        columnwise = [e.params["quantizer"].columnwise for e in found]
        wants = (argnums in (0, (0, 1)), argnums in (1, (0, 1)))  # dx, dkernel
        # input's columnwise copy serves dkernel, weight's dx; the gradient's serves dkernel.
        assert columnwise[:2] == [wants[1], wants[0]], argnums
        if quantize == 3:
            assert (found[2].params["quantizer"].rowwise, columnwise[2]) == wants


@RECIPE
def test_vmap_is_a_loop_bit_for_bit(recipe):
    x, kernel, bias, dy = operands((3, 17, 65))
    x = x * jnp.asarray([1.0, 64.0, 0.01])[:, None, None]  # per-example amax matters
    each = [run(recipe, x[i], kernel, bias, dy[i]) for i in range(3)]
    for f in (jax.vmap(functools.partial(run, recipe), in_axes=(0, None, None, 0)),) * 2:
        for g in (f, jax.jit(f)):
            same(g(x, kernel, bias, dy), {k: jnp.stack([e[k] for e in each]) for k in each[0]})
    batched = jax.grad(
        lambda kernel: jax.vmap(lambda x, dy: (dj.dense(x, kernel, bias, recipe=recipe) * dy).sum())(x, dy).sum()
    )(kernel)
    np.testing.assert_allclose(batched, sum(e["dkernel"] for e in each), rtol=1e-4, atol=1e-4)
    # The shared kernel is neither quantized per example nor copied.
    text = tools.hlo(jax.vmap(lambda x: dj.dense(x, kernel, recipe=recipe)), x)
    weights = [line for line in text.splitlines() if "@diptych_quantize" in line and "tensor<33x65xf32>)" in line]
    gemm = next(line for line in text.splitlines() if "@diptych_gemm" in line)
    assert len(weights) == 1 and "tensor<33x65xui8>" in gemm and "tensor<3x33x65" not in text


@RECIPE
def test_scan_over_layers(recipe):
    x, kernels = tools.normal("x", (8, 32)), tools.normal("layers", (4, 32, 32)) / 6

    def looped(x, kernels):
        for kernel in kernels:
            x = jnp.tanh(dj.dense(x, kernel, recipe=recipe))
        return x.sum()

    def scanned(x, kernels):
        return jax.lax.scan(lambda x, k: (jnp.tanh(dj.dense(x, k, recipe=recipe)), None), x, kernels)[0].sum()

    want = jax.jit(jax.value_and_grad(looped, (0, 1)))(x, kernels)
    got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(x, kernels)
    np.testing.assert_allclose(got[0], want[0], atol=2e-2)
    for g, w in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-2, atol=2e-3)  # XLA's tanh differs by fusion; a byte may flip


@RECIPE
def test_remat_gives_the_same_gradient(recipe):
    args = operands()[:3]
    f = functools.partial(loss, recipe)
    want = jax.jit(jax.grad(f, (0, 1, 2)))(*args)
    for policy in (None, jax.checkpoint_policies.save_only_these_names(dj.CHECKPOINT_NAME)):
        got = jax.jit(jax.grad(jax.checkpoint(f, policy=policy), (0, 1, 2)))(*args)
        for g, w in zip(got, want, strict=True):
            tools.same(g, w)


def test_donated_parameters_in_a_training_step():
    recipe = dj.Float8CurrentScaling()
    x, kernel, bias, _ = operands((16, 32), 32)

    def step(params, x):
        grads = jax.grad(lambda p: loss(recipe, x, *p))(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    want = jax.jit(step)((kernel, bias), x)
    params = (kernel.copy(), bias.copy())
    got = jax.jit(step, donate_argnums=0)(params, x)
    tools.same_tree(got, want)
    assert params[0].is_deleted()


def test_recipe_is_a_static_argument_with_one_cache_entry_per_value():
    traced = []

    @functools.partial(jax.jit, static_argnames="recipe")
    def f(x, kernel, recipe):
        traced.append(recipe)
        return dj.dense(x, kernel, recipe=recipe)

    x, kernel, *_ = operands()
    outs = [f(x, kernel, recipe=r()) for r in (dj.Float8CurrentScaling, dj.MXFP8BlockScaling, dj.Float8CurrentScaling)]
    assert len(traced) == 2
    tools.same(outs[0], outs[2])
    assert (np.asarray(outs[0]) != np.asarray(outs[1])).any()


@pytest.mark.parametrize("name", tools.RECIPE_NAMES)
def test_equal_recipes_and_later_states_share_compiled_code(name):
    traced = []

    @functools.partial(jax.jit, static_argnames="recipe")
    def step(kernel, states, x, rng, recipe):
        traced.append(recipe)
        loss = lambda k, s: dj.dense(x, k, recipe=recipe, state=s, rng=rng).astype(jnp.float32).sum()  # noqa: E731
        grads, news = jax.grad(loss, (0, 1))(kernel, states)
        return kernel - grads, dj.update_state(dj.overwrite_states(states, news))

    x, kernel, *_ = operands((32, 64), 32, "bfloat16")
    states, rng = dj.init_state(common.RECIPES[name]), dj.rng_state(jax.random.key(0))
    for _ in range(3):
        kernel, states = step(kernel, states, x, rng, recipe=copy.deepcopy(common.RECIPES[name]))
    assert len(traced) == 1


BAD = {
    "recipe": (((4, 8), (3, 8), (3,)), "mxfp8", ArgumentError, r"recipe must be .*got str"),
    "kernel rank": (((4, 8), (3, 8, 1), (3,)), ..., ShapeError, r"do not fit: \[4, 8\] and \[3, 8, 1\]"),
    "k": (((4, 8), (3, 9), (3,)), ..., ShapeError, r"do not fit: \[4, 8\] and \[3, 9\]"),
    "scalar": (((), (3, 8), (3,)), ..., ShapeError, r"do not fit: \[\] and"),
    "bias": (((4, 8), (3, 8), (4,)), ..., ShapeError, r"bias must be \[3\].*got \[4\]"),
    "bias rank": (((4, 8), (3, 8), (1, 3)), ..., ShapeError, r"got \[1, 3\]"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("recipe", [None, dj.Float8BlockScaling()], ids=["plain", "block"])
def test_bad_input(name, recipe):
    shapes, given, error, message = BAD[name]
    args = [np.zeros(s, np.float32) for s in shapes]
    recipe = recipe if given is ... else given
    before = tools.calls("quantize")
    for call in (lambda *a: dj.dense(*a, recipe=recipe), jax.jit(lambda *a: dj.dense(*a, recipe=recipe))):
        with pytest.raises(error, match=message):
            call(*args)
    assert tools.calls("quantize") == before


@pytest.mark.parametrize("at", range(3))
def test_bad_dtypes(at):
    args = [np.zeros(s, np.float32) for s in ((4, 8), (3, 8), (3,))]
    args[at] = args[at].astype(np.int32)
    with pytest.raises(DTypeError, match=rf"dense: {('x', 'kernel', 'bias')[at]} must be float32.*int32"):
        dj.dense(*args, recipe=dj.MXFP8BlockScaling())
    with pytest.raises(TypeError, match="recipe"):
        dj.dense(*args)


def test_second_derivatives_say_what_is_defined():
    x = jnp.ones((32, 32))

    def gradient(x):
        return jax.grad(lambda x: jnp.square(dj.dense(x, x, recipe=dj.MXFP8BlockScaling())).sum())(x).sum()

    for f in (jax.grad(gradient), jax.jit(jax.grad(gradient))):
        with pytest.raises(UnsupportedError, match=r"neither second derivatives nor forward mode.*recipe=None"):
            f(x)


@pytest.mark.kept
def test_nvfp4_says_what_to_do_about_rows_and_dtypes():
    """Inference quantizes along rows alone, and takes any number of them."""
    kernel, x = jnp.ones((32, 32)), jnp.ones((2, 9, 32))
    plain = common.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)

    def loss(kernel, x, recipe):
        return dj.dense(x, kernel, recipe=recipe, rng=dj.rng_state(0), name="up").sum()

    assert dj.dense(x, kernel, recipe=plain).shape == x.shape
    with pytest.raises(ValueError, match=r"dense 'up': .* rows of a \[2, 9, 32\] tensor must be a multiple of 16: pad"):
        jax.grad(loss)(kernel, x, plain)
    with pytest.raises(TypeError, match=r"dense 'up': .* bfloat16 alone, got float32\[2, 16, 32\]: train in bfloat16"):
        jax.grad(loss)(kernel, jnp.ones((2, 16, 32)), common.NVFP4BlockScaling())
