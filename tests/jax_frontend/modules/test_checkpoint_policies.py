"""Policies of `jax.checkpoint`: which quantized products and copies backward computes a second time."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import pytest

import diptych.jax as dj
from diptych.common import ArgumentError, UnsupportedError
from jax_frontend import tools

policies = dj.checkpoint_policies
RECIPE = dj.MXFP8BlockScaling()
X, W = tools.normal("x", (64, 128)), tools.normal("w", (128, 128))
# Policy: (quantize calls, products) of forward and backward of two layers with a tanh between.
# Without remat there are 6 and 5: backward does not read the second layer's result.
COUNTS = {
    "everything": (jax.checkpoint_policies.everything_saveable, 6, 5),
    "jax's dots": (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, 10, 6),
    "gemms": (policies.gemms_saveable, 9, 5),
    "copies": (policies.quantized_saveable, 6, 6),
    "both": (policies.save_from_any(policies.gemms_saveable, policies.quantized_saveable), 6, 5),
    "dots and gemms": (policies.dots_and_gemms_saveable, 9, 5),
    "without batch dims": (policies.dots_and_gemms_with_no_batch_dims_saveable, 9, 5),
}


def body(w, x):
    return dj.dense(jnp.tanh(dj.dense(x, w, recipe=RECIPE)), w, recipe=RECIPE)


def loss(w, policy):
    return jnp.square(jax.checkpoint(body, policy=policy)(w, X)).sum()


def gemms(f, *args):
    return len(tools.eqns(jax.make_jaxpr(f)(*args), "diptych_gemm"))


@pytest.mark.parametrize(("policy", "quantizes", "products"), COUNTS.values(), ids=COUNTS)
def test_backward_repeats_what_is_not_saved(policy, quantizes, products):
    calls = tools.custom_calls(tools.hlo(jax.grad(lambda w: loss(w, policy)), W))
    assert (calls.count("diptych_quantize"), calls.count("diptych_gemm")) == (quantizes, products)


def test_saved_products_have_the_bits_of_computed_ones():
    want = jax.jit(jax.grad(lambda w: jnp.square(body(w, X)).sum()))(W)
    tools.same(jax.jit(jax.grad(lambda w: loss(w, policies.gemms_saveable)))(W), want)


def test_a_product_is_batched_if_vmap_maps_both_operands():
    def count(policy, axis):
        run = jax.vmap(jax.checkpoint(lambda w, x: jnp.tanh(dj.dense(x, w, recipe=RECIPE)), policy=policy), (axis, 0))
        w = W if axis is None else jnp.stack([W, W])
        return gemms(jax.grad(lambda w: run(w, jnp.stack([X, X])).sum()), w)

    plain, unbatched = policies.gemms_saveable, policies.gemms_with_no_batch_dims_saveable
    nothing = count(None, None)
    assert count(plain, None) == count(plain, 0) == count(unbatched, None) == nothing - 1
    assert count(unbatched, 0) == nothing


def test_products_of_groups_are_saved():
    kernel, offsets = jnp.stack([W, W]), jnp.asarray([0, 32, 64], jnp.int32)

    def count(policy):
        def run(w, x):
            return jnp.tanh(dj.grouped_dense(x, w, None, offsets, recipe=RECIPE, align=32))

        made = jax.make_jaxpr(jax.grad(lambda w: jax.checkpoint(run, policy=policy)(w, X).sum()))(kernel)
        return len(tools.eqns(made, "diptych_grouped_gemm"))

    assert count(policies.gemms_saveable) == count(None) - 1


def test_jax_dots_are_saved_beside_products():
    def run(w, x):
        return jnp.tanh(dj.dense(jnp.tanh(x @ w), w, recipe=RECIPE))

    def dots(policy):
        made = jax.make_jaxpr(jax.grad(lambda w: jax.checkpoint(run, policy=policy)(w, X).sum()))(W)
        return len(tools.eqns(made, "dot_general")), len(tools.eqns(made, "diptych_gemm"))

    all_dots, all_gemms = dots(None)
    assert dots(policies.gemms_saveable) == (all_dots, all_gemms - 1)
    assert dots(policies.dots_and_gemms_saveable) == (all_dots - 1, all_gemms - 1)


def test_policies_are_values():
    assert policies.save_from_any(policies.gemms_saveable) == policies.save_from_any(policies.gemms_saveable)
    copy = pickle.loads(pickle.dumps(policies.dots_and_gemms_saveable))
    assert copy == policies.dots_and_gemms_saveable
    assert hash(copy) == hash(policies.dots_and_gemms_saveable)


def test_misuse_is_named():
    with pytest.raises(ArgumentError, match="takes one or more policies"):
        policies.save_from_any()
    with pytest.raises(ArgumentError, match="takes one or more policies"):
        policies.save_from_any(policies.gemms_saveable, "dots")
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    with pytest.raises(UnsupportedError, match="return a bool"):
        gemms(jax.grad(lambda w: loss(w, policies.save_from_any(offload, policies.gemms_saveable))), W)
