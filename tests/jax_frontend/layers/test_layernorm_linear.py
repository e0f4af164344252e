"""`layernorm_dense`: the bits of its parts, its gradients under every transformation, and what it refuses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych.common import ArgumentError, DTypeError, ShapeError, linear_plan
from diptych.jax.functional import norm as norm_verbs
from diptych.jax.layers.layernorm_linear import layernorm_dense
from diptych.jax.primitives import activation as activation_ops
from diptych.jax.primitives import norm as norm_ops
from jax_frontend import fused_layers as fl
from jax_frontend import tools
from jax_frontend.layer_cases import same

pytestmark = pytest.mark.sampled

EVERY = pytest.mark.parametrize("recipe", fl.EVERY.values(), ids=fl.EVERY)
STATELESS = {k: r for k, r in tools.PLAIN_RECIPES.items() if linear_plan(r).input.rowwise.format.pack == 1}
RECIPE = pytest.mark.parametrize("recipe", STATELESS.values(), ids=STATELESS)


def run(recipe, args, dy, **options):
    return fl.run(layernorm_dense, fl.LINEAR, args, dy, recipe, **options)


def dtypes(recipe):
    rotates = getattr(recipe, "disable_rht", True) is False
    return ("bfloat16",) if rotates else ("float32", "bfloat16")


@EVERY
def test_bits(recipe):
    """Equal to norm, quantize and products one after another, on values that are not rounded in between."""
    options = fl.given(recipe, "layernorm_linear")
    for dtype in dtypes(recipe):
        args, dy = fl.linear_operands(dtype=dtype)
        got, news = run(recipe, args, dy, **options)
        want, layer = fl.linear(recipe, *args, dy, scales=fl.scales_of(options), rng=options.get("rng"))
        same(got, want, dtype, layer.plain | ({"dx", "dgamma", "dbeta"} if "dx" in layer.plain else set()))
        assert {k: v.dtype.name for k, v in got.items()} == dict.fromkeys(got, dtype)
        for slot, state in (news or {}).items():
            assert float(state.amax_history[0]) == layer.amaxes[slot], slot


@pytest.mark.parametrize("kind", fl.NORMS.values(), ids=fl.NORMS)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_norms(kind, biased):
    args, dy = fl.linear_operands((3, 5, 33), 21, "bfloat16")
    if kind.get("normalization") == "RMSNorm" or not biased:
        args[2] = None
    args[4] = args[4] if biased else None
    for recipe in (dj.MXFP8BlockScaling(), dj.Float8CurrentScaling()):
        want, _ = fl.linear(recipe, *args, dy, **kind)
        same(run(recipe, args, dy, **kind)[0], want)
        same(jax.jit(lambda a, r=recipe: run(r, a, dy, **kind)[0])(args), want)


@RECIPE
@pytest.mark.parametrize("shape", [(65,), (1, 1), (130, 257), (0, 32)], ids=str)
def test_shapes(recipe, shape):
    args, dy = fl.linear_operands(shape, 33)
    same(run(recipe, args, dy)[0], fl.linear(recipe, *args, dy)[0])


@RECIPE
def test_in_float32_it_is_dense_after_the_norm(recipe):
    args, dy = fl.linear_operands((17, 65), 33)
    options = fl.norm_options()

    def composed(x, gamma, beta, kernel, bias):
        return dj.dense(norm_verbs.layernorm(options, x, gamma, beta), kernel, bias, recipe=recipe)

    y, pull = jax.vjp(composed, *args)
    same(run(recipe, args, dy)[0], dict(zip(fl.LINEAR, (y, *pull(dy)), strict=True)))


def test_without_recipe_it_is_the_plain_product_after_the_norm():
    args, dy = fl.linear_operands((17, 65), 33, "bfloat16")
    options = fl.norm_options()
    before = tools.calls("quantize")

    def composed(x, gamma, beta, kernel, bias):
        return norm_verbs.layernorm(options, x, gamma, beta) @ kernel.T + bias

    y, pull = jax.vjp(composed, *args)
    got = run(None, args, dy)[0]
    for name, want in zip(fl.LINEAR, (y, *pull(dy)), strict=True):
        tools.near(got[name], want, 2.0**-8, name)
    assert tools.calls("quantize") == before


def bound(recipe, gemm):
    """Relative error of a product whose terms have random signs; see the formats' tolerance. Stochastic rounding is off
    by a whole ulp."""
    a, b = (q.format.tolerance for q in recipe.operands(gemm, "layernorm_linear"))
    return (1 + a) * (1 + 2 * b) - 1 + 2 * a


@pytest.mark.parametrize("name", [*tools.PLAIN_RECIPES, "fp8-delayed", "nvfp4"])
def test_near_float64(name):
    recipe = {**tools.PLAIN_RECIPES, **fl.RECIPES}[name]
    args, dy = fl.linear_operands((64, 256), 128, "bfloat16")
    got, _ = run(recipe, args, dy, **fl.given(recipe, "layernorm_linear"))
    x, gamma, beta, kernel, bias, dy = (np.asarray(v, np.float64) for v in (*args, dy))
    r = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    xhat = (x - x.mean(1, keepdims=True)) * r
    z, dz = xhat * gamma + beta, dy @ kernel
    hat = dz * gamma
    want = {
        "y": z @ kernel.T + bias,
        "dx": r * (hat - hat.mean(1, keepdims=True) - xhat * (hat * xhat).mean(1, keepdims=True)),
        "dgamma": (dz * xhat).sum(0),
        "dbeta": dz.sum(0),
        "dkernel": dy.T @ z,
        "dbias": dy.sum(0),
    }
    norm, cast = np.linalg.norm, 2.0**-8  # results are bfloat16
    off = bound(recipe, "dgrad") * norm(dz)
    allowed = {
        "y": bound(recipe, "fprop") * norm(z @ kernel.T),
        "dx": off * r.max() * np.abs(gamma).max(),
        "dgamma": off * norm(xhat, axis=0).max(),
        "dbeta": off * len(x) ** 0.5,
        "dkernel": bound(recipe, "wgrad") * norm(want["dkernel"]),
        "dbias": 0.0,
    }
    for key, value in want.items():
        error = norm(np.asarray(got[key], np.float64) - value)
        assert error <= allowed[key] + cast * norm(value), (key, error, allowed[key])
        assert key == "dbias" or error > 2.0**-12 * norm(value), key


@RECIPE
def test_transformations(recipe):
    """jit, vmap, scan and remat change nothing."""
    args, dy = fl.linear_operands((3, 16, 64), 64)
    x = args[0] * jnp.asarray([1.0, 64.0, 0.01])[:, None, None]
    f = functools.partial(run, recipe)
    each = [f([x[i], *args[1:]], dy[i])[0] for i in range(3)]
    stacked = {k: jnp.stack([e[k] for e in each]) for k in each[0]}
    mapped = jax.vmap(lambda x, dy: f([x, *args[1:]], dy)[0])
    same(mapped(x, dy), stacked)
    same(jax.jit(mapped)(x, dy), stacked)
    _, scanned = jax.lax.scan(lambda c, v: (c, f([v[0], *args[1:]], v[1])[0]), 0, (x, dy))
    same(scanned, stacked)

    def loss(x, gamma, beta, kernel, bias):
        return (layernorm_dense(x, gamma, beta, kernel, bias, recipe=recipe) * dy).sum()

    want = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))(x, *args[1:])
    for policy in (None, jax.checkpoint_policies.save_only_these_names(dj.CHECKPOINT_NAME)):
        got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2, 3, 4)))(x, *args[1:])
        tools.same_tree(got, want)


def test_only_what_is_differentiated_is_computed():
    args, dy = fl.linear_operands()
    recipe = dj.MXFP8BlockScaling()

    def loss(*args):
        return (layernorm_dense(*args, recipe=recipe) * dy).sum()

    for argnums, quantize, gemm, norm_grad in (((0,), 3, 2, 1), ((1,), 3, 2, 1), ((3,), 3, 2, 0), ((4,), 2, 1, 0)):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums))(*args).jaxpr
        found = [len(tools.eqns(jaxpr, f"diptych_{op}")) for op in ("quantize", "gemm", "norm_grad", "norm")]
        assert found == [quantize, gemm, norm_grad, 1], argnums
    full, _ = run(recipe, args, dy)
    for i, name in enumerate(fl.LINEAR[1:]):
        tools.same(jax.grad(loss, i)(*args), full[name], name)


def test_the_norm_is_never_stored():
    """Neither computed nor kept: x, its statistics and the copies are all."""
    args, dy = fl.linear_operands((64, 128), 64, "bfloat16")
    text = tools.hlo(
        lambda *a: jax.vjp(lambda *a: layernorm_dense(*a, recipe=dj.MXFP8BlockScaling()), *a)[1](dy), *args
    )
    outs = [line.split("->")[-1] for line in text.splitlines() if "@diptych_norm(" in line]
    assert outs and all("64x128" not in o for o in outs)


@pytest.mark.parametrize("recipe", [None, dj.MXFP8BlockScaling(), fl.EVERY["mixed"]], ids=lambda r: type(r).__name__)
def test_the_norms_output_beside_it(recipe):
    """In x's dtype, with its gradient joined to that of the product."""
    args, dy = fl.linear_operands(dtype="bfloat16")
    dout, options = tools.normal("dz", args[0].shape, "bfloat16"), fl.norm_options()
    (y, z), pull = jax.vjp(lambda *a: layernorm_dense(*a, recipe=recipe, return_layernorm_output=True), *args)
    got = pull((dy, dout))
    want, _ = run(recipe, args, dy)
    tools.same(y, want["y"])
    tools.same(z, norm_ops.norm(*args[:3], options)[1])
    for g, name in zip(got[3:], fl.LINEAR[4:], strict=True):
        tools.same(g, want[name], name)
    _, pull_z = jax.vjp(lambda x: norm_verbs.layernorm(options, x, *args[1:3]), args[0])
    joint = np.float32(want["dx"]) + np.float32(pull_z(dout)[0])
    assert np.linalg.norm(np.float32(got[0]) - joint) < 2.0**-7 * np.linalg.norm(joint)  # bfloat16, three times
    only_z = jax.grad(lambda x: (layernorm_dense(x, *args[1:], recipe=recipe, return_layernorm_output=True)[1]
                                 * dout).sum())(args[0])  # fmt: skip
    tools.same(only_z, pull_z(dout)[0])


@pytest.mark.parametrize("way", ["main_grad", "copies", "held"])
def test_kernels_between_steps(way):
    args, dy = fl.linear_operands((16, 64), 48)
    recipe = dj.MXFP8BlockScaling()
    want, _ = run(recipe, args, dy)
    acc = jnp.zeros((48, 64), jnp.float32)
    copies = dj.quantize_kernel(args[3], recipe, module="layernorm_linear") if way == "copies" else None
    kernel = dj.quantize_params([args[3]], recipe, lambda *_: True)[0] if way == "held" else args[3]

    def f(x, acc):
        return layernorm_dense(
            x, *args[1:3], kernel, args[4], recipe=recipe, copies=copies, main_grad=None if way == "copies" else acc
        )

    y, pull = jax.vjp(f, args[0], acc)
    dx, dmain = pull(dy)
    tools.same(y, want["y"])
    tools.same(dx, want["dx"])
    if way != "copies":
        tools.same(dmain, want["dkernel"])


BAD = [
    (lambda a: {"recipe": "mxfp8"}, TypeError, "Recipe"),
    (lambda a: {"normalization": "BatchNorm"}, ValueError, "LayerNorm, RMSNorm"),
    (lambda a: {"normalization": "RMSNorm"}, ValueError, "no beta"),
    (lambda a: {"eps": -1.0}, ValueError, "eps"),
    (lambda a: {"eps": float("nan")}, ValueError, "eps"),
    (lambda a: {"eps": "small"}, ArgumentError, "eps"),
    (lambda a: {"zero_centered_gamma": 1}, ArgumentError, "zero_centered_gamma"),
    (lambda a: {"gamma": a["gamma"][:-1]}, ShapeError, "gamma"),
    (lambda a: {"beta": a["beta"][:-1]}, ShapeError, "beta"),
    (lambda a: {"beta": a["beta"].astype("bfloat16")}, DTypeError, "beta"),
    (lambda a: {"gamma": a["gamma"].astype(int)}, DTypeError, "gamma"),
    (lambda a: {"x": a["x"][..., :-1]}, ShapeError, "do not fit"),
    (lambda a: {"bias": a["bias"][:-1]}, ShapeError, "bias"),
    (lambda a: {"recipe": dj.DelayedScaling()}, TypeError, "state="),
    (lambda a: {"recipe": dj.NVFP4BlockScaling(disable_rht=True)}, TypeError, "rng"),
    (lambda a: {"recipe": dj.NVFP4BlockScaling(), "rng": dj.rng_state(1)}, DTypeError, "bfloat16"),
    (lambda a: {"recipe": None, "state": {"input": 1}}, ValueError, "without a recipe"),
    (lambda a: {"rng": jnp.zeros(3, jnp.int32)}, TypeError, "rng"),
]


@pytest.mark.parametrize("change,error,match", BAD)
def test_bad_input(change, error, match):
    args, _ = fl.linear_operands()
    given = dict(zip(("x", "gamma", "beta", "kernel", "bias"), args, strict=True)) | {"recipe": dj.MXFP8BlockScaling()}

    def f(x, kernel):
        own = {k: v for k, v in (("x", x), ("kernel", kernel)) if k not in change(given)}
        return layernorm_dense(**given | change(given) | own).sum()

    grad = jax.grad(f, (0, 1))
    with pytest.raises(error, match=match):
        jax.eval_shape(grad, args[0], args[3])
    with pytest.raises(error, match=match):
        grad(args[0], args[3])


def test_the_ops_alone_have_no_derivative():
    x = tools.normal("x", (4, 32))
    options = fl.norm_options()
    for f in (
        lambda x: norm_ops.norm(x, x[0], x[0], options)[1],
        lambda x: activation_ops.activation(x, "silu", True),
        lambda x: activation_ops.activation_grad(x[:, :16], x, "silu", True),
    ):
        with pytest.raises(NotImplementedError, match="no derivative"):
            jax.grad(lambda x, f=f: f(x).sum())(x)


def test_module_and_name_reach_the_recipe():
    seen = []

    def ask(role):
        seen.append((role.module, role.name))
        return fl.E4M3

    args, _ = fl.linear_operands()
    recipe = dj.CustomRecipe(ask)
    seen.clear()
    layernorm_dense(*args, recipe=recipe, name="block.0")
    assert set(seen) == {("layernorm_linear", "block.0")}


def test_a_quantizer_of_the_users_own_gets_the_norm_in_x_s_dtype():
    class Halved(dj.Float8CurrentScalingQuantizer):
        def quantize_impl(self, x, quantize):
            assert isinstance(x, jax.Array) and x.dtype == jnp.bfloat16
            plain = dj.Float8CurrentScalingQuantizer(rowwise=self.rowwise, columnwise=self.columnwise)
            return quantize(x / 2, plain)

    own = Halved()
    args, dy = fl.linear_operands(dtype="bfloat16")
    recipe = dj.CustomRecipe(lambda role: own if role.tensor == "input" else fl.E4M3)
    z = norm_ops.norm(*args[:3], fl.norm_options())[1]
    want, pull = jax.vjp(lambda z, k: dj.dense(z, k, args[4], recipe=recipe), z, args[3])
    got, _ = run(recipe, args, dy)
    tools.same(got["y"], want)
    tools.same(got["dkernel"], pull(dy)[1])
