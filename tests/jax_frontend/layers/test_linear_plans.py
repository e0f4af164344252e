"""`dense` under every kind of recipe against a composition of NumPy calls of the core, in bits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    NVFP4BlockScaling,
    Quantizer,
)
from diptych.jax.layers import linear, products, quantize
from diptych.jax.state import carry, update
from diptych.jax.state import scales as state
from diptych.jax.tensors import copies
from jax_frontend import layer_cases as layers
from jax_frontend import tools

pytestmark = pytest.mark.sampled

E5M2, E4M3, MX, FP4 = layers.E5M2, layers.E4M3, layers.MX, layers.FP4
RNG = dj.rng_state(7, (1 << 32) - 3)  # the low word of the offset overflows on the way


def hybrid(role):
    """Other quantizers for the two uses of a tensor, mixed in each product."""
    return {"fprop": MX, "dgrad": E4M3, "wgrad": E5M2}[role.gemm] if role.tensor != "grad_output" else E5M2


def half(role):
    """Each product has one operand in high precision, another one each time."""
    return E4M3 if (role.tensor, role.gemm) in {("input", "fprop"), ("weight", "dgrad"), ("input", "wgrad")} else None


def only_fprop(role):
    return MX if role.gemm == "fprop" else None


def nothing(role):
    return None


def results(role):
    return E5M2 if role.tensor in role.RESULTS else MX


def random(role):
    """Every quantize call rounds stochastically, results too."""
    return FP4 if role.tensor != "input" or role.gemm == "fprop" else FP4.with_usage(rowwise=True, columnwise=True)


def delayed_mix(role):
    """Delayed scales of three kinds beside other formats; the input has two states."""
    if role.tensor == "input":
        return DelayedScaling(margin=1 if role.gemm == "wgrad" else 0).quantizer(role)
    return MX if role.tensor == "weight" else DelayedScaling().quantizer(role)


def by_name(role):
    assert role.module == "mlp"
    return MX if role.name == "up" else E4M3


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Clipped(Quantizer):
    """A quantizer of a user's own: outliers are clipped before an E4M3 with its scale."""

    limit: float = 1.0

    @functools.cached_property
    def format(self):
        return E4M3.format

    def quantize_impl(self, x, quantize):
        xp = jnp if isinstance(x, jax.Array) else np
        inner = Float8CurrentScalingQuantizer(rowwise=self.rowwise, columnwise=self.columnwise)
        return quantize(xp.clip(x, -self.limit, self.limit), inner)


CLIPPED = Clipped()


def clipped(role):
    return CLIPPED if role.tensor == "input" else E4M3


CASES = {
    "hybrid": CustomRecipe(hybrid),
    "half": CustomRecipe(half),
    "only fprop": CustomRecipe(only_fprop),
    "nothing": CustomRecipe(nothing),
    "results": CustomRecipe(results, quantize_results=True),
    "random": CustomRecipe(random, quantize_results=True),
    "clipped": CustomRecipe(clipped),
    "delayed mix": CustomRecipe(delayed_mix),
    "delayed": DelayedScaling(),
    "high precision backward": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized backward": RECIPES["mxfp8"].replace(backward_override="dequantized"),
    "dequantized backward, half": CustomRecipe(half, backward_override="dequantized"),
    "fp4": NVFP4BlockScaling(),
    "fp4, rows": NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
}


def case(name):
    """The recipe, operands and state of a case."""
    recipe = CASES[name]
    bf16 = isinstance(recipe, NVFP4BlockScaling)
    args = layers.operands((2, 16, 64), 32, "bfloat16" if bf16 else "float32")
    states = {
        slot: dataclasses.replace(s, scale=jnp.full(1, 1.5 + i, jnp.float32))
        for i, (slot, s) in enumerate(state.init_state(recipe).items())
    }
    return recipe, args, states


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"save_original_input": True}], ids=["", "original input"])
def test_bits(name, options):
    recipe, (x, kernel, bias, dy), states = case(name)
    layer = layers.Layer(recipe, {slot: s.scale for slot, s in states.items()}, RNG)
    want = layer.run(x, kernel, bias, dy)

    def f(x, kernel, bias, states, dy):
        call = functools.partial(linear.dense, recipe=recipe, rng=RNG, **options)
        y, pull = jax.vjp(lambda x, kernel, bias, s: call(x, kernel, bias, state=s), x, kernel, bias, states)
        return y, *pull(dy)

    for wrap in (lambda f: f, jax.jit):
        y, dx, dkernel, dbias, news = wrap(f)(x, kernel, bias, states, dy)
        layers.same({"y": y, "dx": dx, "dkernel": dkernel, "dbias": dbias}, want, name, layer.plain)
        assert {slot: float(s.amax_history[0]) for slot, s in news.items()} == layer.amaxes
    y = linear.dense(x, kernel, bias, recipe=recipe, rng=RNG, state=states)
    layers.same({"y": y}, {"y": want["y"]}, "inference", layer.plain)


@pytest.mark.parametrize("name", ["hybrid", "half", "fp4", "delayed mix", "dequantized backward"])
@pytest.mark.parametrize("policy", [None, "named"])
def test_recomputation_gives_the_same_bits(name, policy):
    recipe, (x, kernel, bias, dy), states = case(name)

    def loss(x, kernel, bias, s):
        return (linear.dense(jnp.sin(x), kernel, bias, recipe=recipe, rng=RNG, state=s) * dy).sum()

    policy = jax.checkpoint_policies.save_only_these_names(copies.CHECKPOINT_NAME) if policy else None
    *want, news = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, kernel, bias, states)
    *got, again = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2, 3)))(x, kernel, bias, states)
    layer = layers.Layer(recipe, {slot: s.scale for slot, s in states.items()}, RNG)
    layer.run(x, kernel, bias, dy)  # tells which products are XLA's own
    names = ("dx", "dkernel", "dbias")
    layers.same(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), name, layer.plain)
    tools.same_tree(again, news, name)


def with_state(recipe, x, kernel, bias, states):
    return linear.dense(x, kernel, bias, recipe=recipe, rng=RNG, state=states)


def test_saved_copies_are_quantized_ones():
    """A forward keeps one byte for each element, or half of one."""
    for name, largest in (("hybrid", 1), ("fp4", 0.5), ("delayed", 1)):
        recipe, (x, kernel, bias, _), states = case(name)
        pull = jax.vjp(functools.partial(with_state, recipe), x, kernel, bias, states)[1]
        saved = [v for v in jax.tree.leaves(pull) if v.size >= 512 and v.dtype.itemsize == 1]
        held = [v for v in jax.tree.leaves(pull) if v.size >= 2048 and v.dtype.itemsize > 1 and v.dtype != jnp.int32]
        assert len(saved) == 2 and not held, (name, jax.tree.map(jax.typeof, jax.tree.leaves(pull)))
        assert sum(v.nbytes for v in saved) == largest * (x.size + kernel.size)


def test_random_bits_differ_between_calls_and_steps():
    recipe, (x, kernel, bias, dy), _ = case("fp4")
    grads = []
    for rng in (RNG, quantize.rng_at(RNG, products.OFFSETS), dj.rng_state(8)):
        grads.append(layers.run(recipe, x, kernel, bias, dy, rng=rng)["dx"])
    assert all((np.asarray(a) != np.asarray(grads[0])).any() for a in grads[1:])


@pytest.mark.parametrize("offset", [0, 1, 18, (1 << 32) - 1, (1 << 40) + 5])
@pytest.mark.parametrize("start", [0, (1 << 32) - 1, (1 << 64) - 2])
def test_rng_at_adds_in_64_bits(offset, start):
    rng = dj.rng_state(123456789012345, start)
    tools.same(jax.jit(quantize.rng_at, static_argnums=1)(rng, offset), layers.rng_words(rng, offset))


def test_roles_have_module_and_name():
    recipe = CustomRecipe(lambda role: by_name(role) if role.module == "mlp" else None)
    x, kernel, _, _ = layers.operands((4, 64), 32)
    got = {n: linear.dense(x, kernel, recipe=recipe, module="mlp", name=n) for n in ("up", "down")}
    for n, quantizer in (("up", MX), ("down", E4M3)):
        tools.same(got[n], dj.gemm(dj.quantize(x, quantizer), dj.quantize(kernel, quantizer)))
    tools.same(linear.dense(x, kernel, recipe=recipe), jnp.einsum("mk,nk->mn", x, kernel))


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("data",))


GROUPED = {
    "current": Float8CurrentScaling(amax_group="data"),
    "fp4": NVFP4BlockScaling(amax_group="data", disable_rht=True, disable_stochastic_rounding=True),
    "delayed": DelayedScaling(amax_group="data", amax_history_len=3),
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("check", [True, False], ids=["typed", "untyped"])
def test_two_devices_equal_one(mesh, name, check):
    """With amaxes reduced over the mesh, halves of a batch are quantized as the whole is, in several steps."""
    recipe = GROUPED[name]
    x, kernel, _, dy = layers.operands((32, 64), 32)
    x = x * jnp.linspace(1, 9, 32)[:, None]
    states = state.init_state(recipe)

    def local(x, kernel, dy, states, recipe):
        outs = []
        for step in range(3):

            def loss(x, kernel, s, step=step):
                return (linear.dense(x * (step + 1), kernel, recipe=recipe, state=s) * dy).sum()

            grads, new = carry.value_and_grad_with_state(lambda p, s, loss=loss: loss(*p, s))((x, kernel), states)[1:]
            states = update.update_state(new, recipe)
            outs.append(grads[0])
        return jnp.stack(outs, 1), states

    one = functools.partial(local, recipe=recipe.replace(amax_group=""))
    want, want_states = jax.jit(one)(x, kernel, dy, states)
    f = functools.partial(local, recipe=recipe)
    f = jax.shard_map(
        f, mesh=mesh, in_specs=(P("data"), P(), P("data"), P()), out_specs=(P("data"), P()), check_vma=check
    )
    got, got_states = jax.jit(f)(x, kernel, dy, states)
    tools.same(got, want)
    tools.same_tree(jax.tree.leaves(got_states), jax.tree.leaves(want_states))
    assert not want_states or float(want_states["input"].scale[0]) != 1


def test_bad_arguments():
    x, kernel, bias, _ = layers.operands((4, 64), 32)
    delayed, fp4 = DelayedScaling(), NVFP4BlockScaling(disable_rht=True)
    states = state.init_state(delayed)
    bad = {
        r"needs state=": lambda: linear.dense(x, kernel, recipe=delayed),
        r"needs rng=": lambda: jax.grad(lambda x: linear.dense(x, kernel, recipe=fp4).sum())(jnp.ones((16, 64))),
        r"rng must be int32 \[4\].*\[2\]": lambda: linear.dense(x, kernel, recipe=fp4, rng=jnp.zeros(2, jnp.int32)),
        r"rng must be .*float32": lambda: linear.dense(x, kernel, recipe=fp4, rng=jnp.zeros(4)),
        r"mapping of state names": lambda: linear.dense(x, kernel, recipe=delayed, state=states["input"]),
        r"another recipe's; switch_state": lambda: linear.dense(x, kernel, recipe=dj.MXFP8BlockScaling(), state=states),
        r"'input' was made for .*switch_state": lambda: linear.dense(
            x, kernel, recipe=delayed.replace(margin=1), state=states
        ),
        r"stack of states": lambda: linear.dense(
            x, kernel, recipe=delayed, state=jax.tree.map(lambda v: jnp.stack([v, v]), states)
        ),
        r"state given without a recipe": lambda: linear.dense(x, kernel, recipe=None, state=states),
        r"calibrate.*do not apply": lambda: linear.dense(
            x, kernel, recipe=delayed, state=states, calibrate=True, record=False
        ),
    }
    for message, call in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    del bias
