"""Training's surface: kept copies, quantized kernels, float32 gradients, gradients computed later, calibration."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych import core
from diptych.common import (
    ArgumentError,
    CustomRecipe,
    DelayedScaling,
    NVFP4BlockScaling,
    ShapeError,
    UnsupportedError,
)
from diptych.jax.layers.held import kernel_quantizer, quantize_kernel, quantize_params
from diptych.jax.layers.linear import CHECKPOINT_NAME, dense
from diptych.jax.state import carry as tr
from diptych.jax.state import scales as st
from diptych.jax.state import update
from jax_frontend import layer_cases as layers
from jax_frontend import tools
from jax_frontend.layers.test_linear_plans import CASES, RNG

pytestmark = pytest.mark.sampled

STATELESS = {k: r for k, r in tools.PLAIN_RECIPES.items()} | {
    k: CASES[k] for k in ("hybrid", "half", "fp4", "dequantized backward", "clipped")
}


def operands(recipe, dtype="float32"):
    fp4 = isinstance(recipe, NVFP4BlockScaling) and not recipe.disable_rht
    return layers.operands((32, 64), 48, "bfloat16" if fp4 else dtype)


# --- copies kept across microbatches ---


@tools.WRAP
@pytest.mark.parametrize("name", STATELESS)
def test_kept_copies_change_no_bit(name, wrap):
    recipe = STATELESS[name]
    x, kernel, bias, dy = operands(recipe)

    def f(x, kernel, bias, keep):
        copies = quantize_kernel(kernel, recipe, rng=RNG) if keep else None
        return (dense(x, kernel, bias, recipe=recipe, rng=RNG, copies=copies) * dy).sum()

    grad = wrap(jax.grad(f, (0, 1, 2)), **({"static_argnums": 3} if wrap is jax.jit else {}))
    tools.same_tree(grad(x, kernel, bias, True), grad(x, kernel, bias, False))


def test_a_kernel_is_quantized_once_for_all_microbatches():
    recipe = dj.MXFP8BlockScaling()
    x, kernel, _, _ = operands(recipe)

    def step(kernel, parts):
        copies = quantize_kernel(kernel, recipe)

        def micro(total, part):
            return total + jax.grad(lambda k: (dense(part, k, recipe=recipe, copies=copies) ** 2).sum())(kernel), None

        return jax.lax.scan(micro, jnp.zeros_like(kernel), parts)[0]

    parts = x.reshape(4, 8, 64)
    before = tools.calls("quantize")
    got = jax.block_until_ready(jax.jit(step)(kernel, parts))
    assert tools.calls("quantize") - before == 1 + 4 * 2
    want = sum(jax.grad(lambda k, p=p: (dense(p, k, recipe=recipe) ** 2).sum())(kernel) for p in parts)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


def test_kept_copies_record_the_amax_once():
    recipe = DelayedScaling(amax_history_len=4)
    x, kernel, _, _ = operands(recipe)
    states = st.init_state(recipe)
    copies, states = quantize_kernel(kernel, recipe, state=states, return_state=True)
    assert float(states["weight"].amax_history[0]) == float(jnp.abs(kernel).max())
    y, news = dense(x, kernel * 100, recipe=recipe, state=states, copies=copies, return_state=True)
    assert float(news["weight"].amax_history[0]) == float(jnp.abs(kernel).max())
    tools.same(y, dense(x, kernel, recipe=recipe, state=states))
    refs = tr.state_refs(st.init_state(recipe))
    quantize_kernel(kernel, recipe, state=refs)
    assert float(tr.read_states(refs)["weight"].amax_history[0]) == float(jnp.abs(kernel).max())
    with pytest.raises(ValueError, match="amax of weight would be lost"):
        quantize_kernel(kernel, recipe, state=states)


# --- kernels held quantized ---


@tools.WRAP
@pytest.mark.parametrize("name", [*tools.PLAIN_RECIPES, "fp8-delayed"])
def test_a_quantized_kernel(name, wrap):
    """A quantized kernel computes the same as its values, and its gradient goes to main_grad."""
    recipe = tools.PLAIN_RECIPES.get(name, DelayedScaling())
    x, kernel, bias, dy = operands(recipe)
    states = st.init_state(recipe) or None
    held = quantize_params({"up": {"kernel": kernel, "bias": bias}}, recipe, lambda path, _: path == "up.kernel")
    q, zero = held["up"]["kernel"], jnp.zeros(kernel.shape, jnp.float32)
    assert isinstance(q, dj.QuantizedArray) and held["up"]["bias"] is bias
    assert all(v.dtype == jnp.uint8 for v in (q.rowwise_data, q.columnwise_data))
    assert q.quantizer == kernel_quantizer(recipe)

    def f(x, q, acc, s):
        return (dense(x, q, bias, recipe=recipe, state=s, main_grad=acc) * dy).sum()

    def plain(x, kernel, s):
        return (dense(x, kernel, bias, recipe=recipe, state=s, copies=copies) * dy).sum()

    dx, dacc, _ = wrap(jax.grad(f, (0, 2, 3)))(x, q, zero, states)
    sides = ((q.quantizer.with_usage(columnwise=False), False), (q.quantizer.with_usage(rowwise=False), True))
    copies = tuple(dj.quantize(kernel, quantizer, as_bytes=True) for quantizer, _ in sides)
    tools.same_tree((dx, dacc), wrap(jax.grad(plain, (0, 1, 2)))(x, kernel, states)[:2])
    assert dacc.dtype == jnp.float32
    with pytest.raises(ValueError, match="reference as main_grad"):
        dense(x, q, recipe=recipe, state=states, main_grad=jax.new_ref(zero))
    np.testing.assert_allclose(dense(x, q, bias, recipe=None), x @ q.dequantize().T + bias, rtol=1e-4, atol=1e-4)


def test_a_quantized_kernel_needs_what_the_recipe_asks():
    x, kernel, _, _ = operands(None)
    mx = dj.MXFP8BlockScaling()
    q = dj.quantize(kernel, kernel_quantizer(mx).with_usage(columnwise=False))
    dense(x, q, recipe=mx)
    with pytest.raises(ValueError, match="dgrad reads the columnwise copy"):
        jax.grad(lambda x: dense(x, q, recipe=mx).sum())(x)
    with pytest.raises(ValueError, match=r"is held as .* asks for"):
        dense(x, q, recipe=dj.Float8CurrentScaling())
    with pytest.raises(ValueError, match="copies of one were given too"):
        dense(x, q, recipe=mx, copies=(q, None))
    both = dj.quantize(kernel, kernel_quantizer(dj.Float8CurrentScaling()))
    with pytest.raises(UnsupportedError, match="no gradient of its own"):
        jax.grad(lambda q: dense(x, q, recipe=dj.Float8CurrentScaling()).sum(), allow_int=True)(both)
    with pytest.raises(ValueError, match="quantizes the kernel as"):
        kernel_quantizer(CASES["hybrid"])
    with pytest.raises(ValueError, match="rounds stochastically"):
        kernel_quantizer(CustomRecipe(lambda role: layers.FP4))
    assert kernel_quantizer(CustomRecipe(lambda role: None)) is None
    with pytest.raises(ValueError, match="picked no leaf"):
        quantize_params({"w": kernel}, mx, lambda path, leaf: path == "v")
    with pytest.raises(ShapeError, match=r"b must be \[N, K\]"):
        quantize_params({"b": x[0]}, mx, lambda path, leaf: True)


@pytest.mark.parametrize("policy", [None, "named"])
def test_quantized_kernels_survive_remat(policy):
    """Payloads of one byte are no floats that a remat could round, also those of a user who did not ask for bytes."""
    recipe = dj.MXFP8BlockScaling(backward_override="dequantized")  # forward and backward read the same copy
    x, kernel, _, dy = operands(recipe)
    held = quantize_params({"kernel": kernel * 300}, recipe, lambda path, _: True)

    def f(x, kernel):
        q = kernel
        if isinstance(kernel, jax.Array):
            q = dj.quantize(jax.lax.stop_gradient(kernel), kernel_quantizer(recipe))
        return (dense(jnp.sin(x), q, recipe=recipe) * dy).sum()

    want = jax.jit(jax.value_and_grad(f))(x, held["kernel"])
    policy = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME) if policy else None
    for given in (held["kernel"], kernel * 300):
        tools.same_tree(jax.jit(jax.value_and_grad(jax.checkpoint(f, policy=policy)))(x, given), want)


# --- gradients in float32 ---


@tools.WRAP
@pytest.mark.parametrize("name", ["fp8-current", "mxfp8", "half", "fp4"])
def test_main_grad_is_wgrad_in_float32(name, wrap):
    recipe = STATELESS[name]
    x, kernel, bias, dy = operands(recipe, "float32" if name == "half" else "bfloat16")  # XLA widens bfloat16 under jit
    layer = layers.Layer(recipe, rng=RNG)
    want = layer.product("wgrad", np.asarray(dy), np.asarray(x), None, np.float32)
    acc = tools.normal("acc", kernel.shape)

    def f(kernel, acc):
        return (dense(x, kernel, bias, recipe=recipe, rng=RNG, main_grad=acc).astype(jnp.float32) * dy).sum()

    dkernel, dacc = wrap(jax.grad(f, (0, 1)))(kernel, acc)
    layers.same({"dkernel": dacc}, {"dkernel": want}, name, layer.plain)
    assert dacc.dtype == jnp.float32 and not np.asarray(dkernel, np.float32).any()
    ref = jax.new_ref(acc)
    dkernel = wrap(jax.grad(f))(kernel, ref)
    tools.same(ref[...], acc + dacc)
    assert not np.asarray(dkernel, np.float32).any()
    wrap(jax.grad(lambda x: dense(x, kernel, recipe=recipe, rng=RNG, main_grad=ref).astype(jnp.float32).sum()))(x)
    tools.same(ref[...], acc + dacc, "a kernel that is not trained adds nothing")


def test_main_grad_sums_over_uses_and_microbatches():
    recipe = dj.Float8CurrentScaling()
    x, kernel, _, dy = operands(recipe)
    ref = jax.new_ref(jnp.zeros(kernel.shape))

    def f(kernel, parts):
        def body(total, part):
            y = dense(part[0], kernel, recipe=recipe, main_grad=ref)
            return total + (y * part[1]).sum(), None

        return jax.lax.scan(body, 0.0, parts)[0]

    parts = (x.reshape(4, 8, 64), dy.reshape(4, 8, 48))
    jax.jit(jax.grad(f))(kernel, parts)
    want = jnp.zeros(kernel.shape)
    for a, b in reversed(list(zip(*parts, strict=True))):
        q = [
            dj.quantize(v, recipe.quantizer(dj.QuantizerRole(tensor=t))) for v, t in ((b, "grad_output"), (a, "input"))
        ]
        want = dj.gemm_into(want, *q, trans_a=True, trans_b=False)
    tools.same(ref[...], want)


def test_bad_main_grad():
    x, kernel, _, _ = operands(None)
    f = functools.partial(dense, x, kernel, recipe=dj.MXFP8BlockScaling())
    for bad, error, message in (
        (jnp.zeros(kernel.shape, jnp.bfloat16), ShapeError, r"float32 \[48, 64\], got bfloat16"),
        (jnp.zeros((64, 48)), ShapeError, r"got float32\[64, 48\]"),
        (np.zeros(kernel.shape, np.float32), ArgumentError, "JAX array or reference"),
    ):
        with pytest.raises(error, match=message):
            f(main_grad=bad)


# --- gradients computed later ---


def test_programs_run_the_products_that_their_results_need():
    """jax.vjp's pullback crosses jit, and one program of it makes dx, another one dkernel."""
    recipe = dj.MXFP8BlockScaling()
    x, kernel, bias, dy = operands(recipe)
    _, pullback = jax.jit(lambda *a: jax.vjp(functools.partial(dense, recipe=recipe), *a))(x, kernel, bias)
    dx, dkernel, dbias = pullback(dy)
    for some, want, products in ((slice(1), (dx,), 1), (slice(1, 2), (dkernel,), 1), (slice(2, 3), (dbias,), 0)):
        program = jax.jit(lambda pullback, dy, some=some: pullback(dy)[some]).lower(pullback, dy).compile()
        before = tools.calls("gemm")
        tools.same_tree(program(pullback, dy), want)
        assert tools.calls("gemm") - before == products


# --- calibration ---


@tools.WRAP
@pytest.mark.parametrize("way", ["gradient", "references", "returned"])
def test_calibration_records_what_training_would(way, wrap):
    recipe = CASES["delayed"].replace(amax_history_len=4)
    x, kernel, bias, dy = operands(recipe)
    states, call = st.init_state(recipe), functools.partial(dense, recipe=recipe, calibrate=True)
    plain = jax.jit(jax.grad(lambda *a: (dense(*a, recipe=None) * dy).sum(), (0, 1, 2)))(x, kernel, bias)
    want = {n: float(core.amax(np.asarray(v))[0]) for n, v in (("input", x), ("weight", kernel), ("grad_output", dy))}

    if way == "returned":
        y, news = wrap(lambda s: call(x, kernel, bias, state=s, return_state=True))(states)
        want["grad_output"] = 0.0
        np.testing.assert_allclose(y, dense(x, kernel, bias, recipe=None), rtol=1e-4, atol=1e-4)
    else:
        held = tr.state_refs(states) if way == "references" else states
        argnums = (0, 1, 2) if way == "references" else (0, 1, 2, 3)
        grads = wrap(jax.grad(lambda *a: (call(*a[:3], state=a[3]) * dy).sum(), argnums))(x, kernel, bias, held)
        news = tr.read_states(held) if way == "references" else grads[3]
        for got, plainly in zip(grads, plain, strict=False):
            np.testing.assert_allclose(got, plainly, rtol=1e-4, atol=1e-4)
    assert {n: float(s.amax_history[0]) for n, s in news.items()} == want
    ready = update.update_state(news)
    tools.same(ready["input"].scale, np.float32([448]) / np.float32([want["input"]]))
    dense(x, kernel, bias, recipe=recipe, state=ready)


def test_calibration_loses_nothing_silently():
    recipe = DelayedScaling()
    x, kernel, _, _ = operands(recipe)
    states = st.init_state(recipe)
    with pytest.raises(ValueError, match="would be lost"):
        jax.grad(lambda x: dense(x, kernel, recipe=recipe, state=states, calibrate=True).sum())(x)
