"""JAX's modes: in each of them verbs and layers give the bits that they give without, forward and backward."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from sweeps import others_slow

import cases
import diptych.jax as dj
from diptych.common import DelayedScaling
from jax_frontend import fused_layers, grouped_layers, tools

pytestmark = pytest.mark.sampled

DELAYED = DelayedScaling(amax_history_len=4)
MODES = {
    "jax_disable_jit": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_enable_x64": True,
    "jax_debug_nans": True,
    "jax_default_matmul_precision": "float32",
}


@contextlib.contextmanager
def modes(*names):
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name in names:
            jax.config.update(name, MODES[name])
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


RECIPES = fused_layers.EVERY | {"fp8-delayed": DELAYED, "none": None}


# --- layers: y, gradients and states ---


def stepped(recipe, layer, names, args, dy, **options):
    out = fused_layers.run(layer, names, args, dy, recipe, **options)
    return out[0] | {"state": out[1]}


def dense(recipe):
    args, dy = fused_layers.linear_operands(dtype="bfloat16")
    options = {} if recipe is None else fused_layers.given(recipe, "layernorm_linear")
    return stepped(recipe, dj.dense, ("y", "x", "kernel", "bias"), [args[0], *args[3:]], dy, **options)


def dense_of_two_dtypes(recipe):
    args, dy = fused_layers.linear_operands(dtype="bfloat16")
    args = [args[0], args[3].astype(jnp.float32), args[4].astype(jnp.float16)]
    options = {} if recipe is None else fused_layers.given(recipe, "layernorm_linear")
    return stepped(recipe, dj.dense, ("y", "x", "kernel", "bias"), args, dy, **options)


def calibrated(recipe):
    args, dy = fused_layers.linear_operands(dtype="bfloat16")
    options = fused_layers.given(recipe, "layernorm_linear") | {"calibrate": True}
    return stepped(recipe, dj.dense, ("y", "x", "kernel", "bias"), [args[0], *args[3:]], dy, **options)


def layernorm_dense(recipe):
    args, dy = fused_layers.linear_operands(dtype="bfloat16")
    options = {} if recipe is None else fused_layers.given(recipe, "layernorm_linear")
    return stepped(recipe, dj.layernorm_dense, fused_layers.LINEAR, args, dy, **options)


def layernorm_mlp(recipe, activation="swiglu"):
    args, dy = fused_layers.mlp_operands(dtype="bfloat16", gated=True)
    options = {} if recipe is None else fused_layers.given(recipe, "layernorm_mlp")
    return stepped(recipe, dj.layernorm_mlp, fused_layers.MLP, args, dy, activation=activation, **options)


def grouped_dense(recipe):
    return grouped_layers.run(recipe, *grouped_layers.operands(dtypes="bfloat16"), align=32)


LAYERS = {
    f.__name__: f for f in (dense, dense_of_two_dtypes, calibrated, layernorm_dense, layernorm_mlp, grouped_dense)
}


# --- verbs ---


def quantized(_):
    out = {}
    for name, kind in tools.KINDS.items():
        q = dj.quantize(kind.draw("x"), kind.quantizer, **kind.state())
        out[name] = q, dj.dequantize(q)
    return out


def verbs(_):
    x, mx = tools.normal("x", (32, 64)), dj.MXFP8Quantizer()
    q, stack = dj.quantize(x, mx), dj.quantize_stack(tools.normal("stack", (2, 32, 64)), mx)
    offsets = jnp.asarray([0, 16, 32], jnp.int32)
    bias = tools.normal("bias", (32,))
    return {
        "amax": (dj.amax(x), dj.amax(x, per_row=True)),
        "gemm": (dj.gemm(q, q, bias=bias), dj.gemm_into(jnp.zeros((32, 32), jnp.float32), q, q)),
        "grouped_gemm": dj.grouped_gemm(q, stack, offsets, bias=jnp.stack([bias, bias])),
        "bias_grad": (dj.bias_grad(x), dj.grouped_bias_grad(x, offsets)),
        "scale_update": dj.scale_update(jnp.ones((3, 4), jnp.float32), jnp.ones(3, jnp.float32)),
        "rng": (dj.rng_at(dj.rng_state(3, 5), 2**33), dj.rng_state(jax.random.key(0), jnp.int32(3))),
        "dot_general": dj.dot_general(dj.MXFP8BlockScaling())(x, x, (((1,), (1,)), ((), ()))),
        "kernels": dj.quantize_kernel(x, dj.MXFP8BlockScaling()),
    }


def permuted(_):
    ids = jnp.asarray(cases.rng_for("modes").integers(0, 4, (16, 2)), jnp.int32)
    x, probs = tools.normal("tokens", (16, 64)), jnp.abs(tools.normal("probs", (16, 2)))

    def loss(x, probs):
        m = dj.moe_map(ids, 4, map_type="index", align_size=16)
        rows, moved, _ = dj.moe_permute_with_probs(x, probs, m)
        back = dj.moe_unpermute(rows * moved[:, None], m, merging_probs=probs)
        sizes, order = jnp.asarray([32, 32], jnp.int32), jnp.asarray([1, 0], jnp.int32)
        sorted_rows = dj.moe_sort_chunks_by_index(rows[:64], sizes, order)
        return jnp.square(back).sum() + jnp.square(sorted_rows).sum()

    m = dj.moe_map(ids, 4, map_type="index", align_size=16)
    return jax.value_and_grad(loss, (0, 1))(x, probs), dj.moe_permute_and_quantize(x, m, dj.MXFP8Quantizer())


def states(_):
    """Ways of states, with a branch."""
    x, kernel, s = tools.normal("x", (8, 32)), tools.normal("kernel", (32, 32)), dj.init_state(DELAYED)

    def loss(kernel, s):
        y, lent = dj.dense(x, kernel, recipe=DELAYED, state=s), dj.lend_states(s, kernel)
        return jax.lax.cond(y[0, 0] < 1e9, lambda y: dj.dense(y, kernel, recipe=DELAYED, state=lent), jnp.sin, y).sum()

    out = dj.value_and_grad_with_state(loss)(kernel, s)
    refs = dj.state_refs(s)
    by_refs = jax.lax.scan(lambda y, _: (dj.dense(y, kernel, recipe=DELAYED, state=refs), None), x, None, length=2)[0]
    once = jax.grad(lambda s: dj.dense(x, kernel, recipe=DELAYED, state=s).sum())(s)
    merged = dj.merge_states(once, dj.dense(x * 2, kernel, recipe=DELAYED, state=s, return_state=True)[1])
    news = dj.update_state(dj.overwrite_states(s, merged))
    return out, by_refs, dj.read_states(refs), news, dj.state_dict(news), dj.update_state(out[2])


VERBS = {f.__name__: f for f in (quantized, verbs, permuted, states)}
EVERY = {
    f"{layer}, {name}": functools.partial(f, recipe)
    for layer, f in LAYERS.items()
    for name, recipe in RECIPES.items()
    if not (f is calibrated and recipe is None)
    and not (f is grouped_dense and name == "stochastic")  # refused: a stack of kernels is not rounded so
} | {name: functools.partial(f, None) for name, f in VERBS.items()}
# One of each layer, and what differs most
NOW = (*VERBS, "dense, none", "calibrated, fp8-delayed", "layernorm_mlp, mixed", "grouped_dense, mixed")


@pytest.mark.parametrize("name", others_slow(EVERY, NOW))
def test_bits_are_those_without_a_mode(name):
    """Each mode by itself behind `slow`; by default disable_jit, and all others at once."""
    want = EVERY[name]()
    for together in (("jax_disable_jit",), [m for m in MODES if m != "jax_disable_jit"]):
        with modes(*together):
            tools.same_tree(EVERY[name](), want, f"{name} {together}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EVERY)
def test_bits_are_those_without_one_mode(name, mode):
    want = EVERY[name]()
    with modes(mode):
        tools.same_tree(EVERY[name](), want)
