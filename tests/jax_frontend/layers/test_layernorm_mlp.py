"""`layernorm_mlp`: the bits of its parts, what it keeps, its gradients under every transformation, what it refuses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import ArgumentError, ShapeError, linear_plan
from diptych.common.ops.activation import ACTIVATIONS
from diptych.core import _core
from diptych.jax.functional import activation as activation_verbs
from diptych.jax.functional import norm as norm_verbs
from diptych.jax.layers.layernorm_mlp import layernorm_mlp
from jax_frontend import fused_layers as fl
from jax_frontend import tools
from jax_frontend.layer_cases import same

pytestmark = pytest.mark.sampled

EVERY = pytest.mark.parametrize("recipe", named(fl.EVERY, fl.NOW))
STATELESS = {k: r for k, r in tools.PLAIN_RECIPES.items() if linear_plan(r).input.rowwise.format.pack == 1}
RECIPE = pytest.mark.parametrize("recipe", named(STATELESS, fl.NOW))


def run(recipe, args, dy, **options):
    return fl.run(layernorm_mlp, fl.MLP, args, dy, recipe, **options)


def dtypes(recipe):
    return ("bfloat16",) if getattr(recipe, "disable_rht", True) is False else ("float32", "bfloat16")


@EVERY
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_bits(recipe, activation):
    """Equal to its parts one after another, on values that are not rounded in between; so are recorded amaxes."""
    options = fl.given(recipe, "layernorm_mlp")
    for dtype in dtypes(recipe):
        args, dy = fl.mlp_operands(dtype=dtype, gated=activation == "swiglu")
        got, news = run(recipe, args, dy, activation=activation, **options)
        scales = fl.scales_of(options)
        want, layers = fl.mlp(recipe, *args, dy, activation=activation, scales=scales, rng=options.get("rng"))
        plain = layers[0].plain | layers[1].plain
        if plain:  # what follows from a product by XLA; a rounded value may fall to either side
            for name, value in want.items():
                error = np.linalg.norm(np.float64(got[name]) - np.float64(value))
                assert error <= 2.0**-7 * np.linalg.norm(np.float64(value)), name
        else:
            same(got, want, dtype)
        for layer, states in zip(layers, (news or {}).values(), strict=False):
            found = {slot: float(state.amax_history[0]) for slot, state in states.items()}
            assert found == layer.amaxes


@pytest.mark.parametrize("name", ["fp8-current", "nvfp4 to nearest"])
def test_backward_override_leaves_forward_as_it_is(name):
    """And backward reads the same, whether its operands were kept or are made again."""
    recipe = tools.PLAIN_RECIPES[name]
    args, dy = fl.mlp_operands(dtype="bfloat16", gated=True)
    want = run(recipe, args, dy, activation="swiglu", **fl.given(recipe, "layernorm_mlp"))[0]
    recipe = recipe.replace(backward_override="high_precision")
    options = fl.given(recipe, "layernorm_mlp")
    kept, again = (
        run(recipe, args, dy, activation="swiglu", save_original_input=o, **options)[0] for o in (False, True)
    )
    same({"y": kept["y"]}, {"y": want["y"]})
    same(again, kept)
    assert any((np.asarray(kept[k]) != np.asarray(want[k])).any() for k in want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    gated = ACTIVATIONS[activation][1]
    args, dy = fl.mlp_operands((3, 5, 33), 21, 17, "bfloat16", gated)
    for recipe in (dj.MXFP8BlockScaling(), dj.Float8CurrentScaling()):
        want, _ = fl.mlp(recipe, *args, dy, activation=activation)
        same(run(recipe, args, dy, activation=activation)[0], want)


@pytest.mark.parametrize("kind", fl.NORMS.values(), ids=fl.NORMS)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_norms(kind, biased):
    args, dy = fl.mlp_operands((17, 40), 24, 16, "bfloat16")
    if kind.get("normalization") == "RMSNorm" or not biased:
        args[2] = None
    if not biased:
        args[4] = args[6] = None
    recipe = dj.Float8BlockScaling()
    want, _ = fl.mlp(recipe, *args, dy, **kind)
    same(run(recipe, args, dy, **kind)[0], want)
    same(jax.jit(lambda a: run(recipe, a, dy, **kind)[0])(args), want)


@RECIPE
@pytest.mark.parametrize("shape", [(65,), (1, 1), (130, 40), (0, 32)], ids=str)
def test_shapes(recipe, shape):
    args, dy = fl.mlp_operands(shape, 21, 33)
    same(run(recipe, args, dy)[0], fl.mlp(recipe, *args, dy)[0])


@RECIPE
def test_in_float32_it_is_the_layers_one_after_another(recipe):
    args, dy = fl.mlp_operands((17, 65), 33, 20, gated=True)
    options = fl.norm_options()

    def composed(x, gamma, beta, k1, b1, k2, b2):
        h = dj.dense(norm_verbs.layernorm(options, x, gamma, beta), k1, b1, recipe=recipe)
        return dj.dense(activation_verbs.activate("silu", True, h), k2, b2, recipe=recipe)

    y, pull = jax.vjp(composed, *args)
    got, _ = run(recipe, args, dy, activation="swiglu")
    same(got, dict(zip(fl.MLP, (y, *pull(dy)), strict=True)))


def test_without_recipe_it_is_the_plain_products():
    args, dy = fl.mlp_operands((17, 65), 33, 20, "bfloat16", gated=True)
    options, before = fl.norm_options(), tools.calls("quantize")

    def composed(x, gamma, beta, k1, b1, k2, b2):
        h = norm_verbs.layernorm(options, x, gamma, beta) @ k1.T + b1
        return activation_verbs.activate("silu", True, h) @ k2.T + b2

    y, pull = jax.vjp(composed, *args)
    got = run(None, args, dy, activation="swiglu")[0]
    for name, want in zip(fl.MLP, (y, *pull(dy)), strict=True):
        tools.near(got[name], want, 2.0**-7, name)
    assert tools.calls("quantize") == before


def product_bound(recipe, gemm):
    """Relative error of a product whose terms have random signs; see the formats' tolerance. Stochastic rounding is off
    by a whole ulp."""
    a, b = (q.format.tolerance for q in recipe.operands(gemm, "layernorm_mlp"))
    return (1 + a) * (1 + 2 * b) - 1 + 2 * a


def sigma(matrix):
    """The largest singular value, by the smaller of both Gram matrices."""
    m = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    return np.sqrt(np.linalg.eigvalsh(m.T @ m)[-1])


@pytest.mark.parametrize("name", [*tools.PLAIN_RECIPES, "fp8-delayed", "nvfp4"])
def test_near_float64(name):
    """Each product is off by its formats' tolerance; what follows passes that on, by its largest slope."""
    recipe = {**tools.PLAIN_RECIPES, **fl.RECIPES}[name]
    args, dy = fl.mlp_operands((64, 128), 96, 64, "bfloat16")
    got, _ = run(recipe, args, dy, **fl.given(recipe, "layernorm_mlp"))
    x, gamma, beta, k1, b1, k2, b2, dy = (np.asarray(v, np.float64) for v in (*args, dy))
    fwd, dgrad, wgrad = (product_bound(recipe, g) for g in ("fprop", "dgrad", "wgrad"))
    norm, cast = np.linalg.norm, 2.0**-8
    # gelu and its derivatives; |act'| <= 1.13, |act''| <= 1.13
    c, d = 2 * np.sqrt(2 / np.pi), 0.044715
    r = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    xhat = (x - x.mean(1, keepdims=True)) * r
    z = xhat * gamma + beta
    h = z @ k1.T + b1
    s = 1 / (1 + np.exp(-c * (h + d * h**3)))
    a, slope = h * s, s + h * s * (1 - s) * c * (1 + 3 * d * h * h)
    da = dy @ k2
    dh = da * slope
    dz = dh @ k1
    hat = dz * gamma
    want = {
        "y": a @ k2.T + b2,
        "dx": r * (hat - hat.mean(1, keepdims=True) - xhat * (hat * xhat).mean(1, keepdims=True)),
        "dgamma": (dz * xhat).sum(0),
        "dbeta": dz.sum(0),
        "dkernel1": dh.T @ z,
        "dbias1": dh.sum(0),
        "dkernel2": dy.T @ a,
        "dbias2": dy.sum(0),
    }
    off_h = fwd * norm(z @ k1.T) + cast * norm(h)
    off_a, off_da = 1.13 * off_h, dgrad * norm(da) + cast * norm(da)
    off_dh = 1.13 * off_da + 1.13 * np.abs(da).max() * off_h
    off_dz = dgrad * norm(dz) + (1 + dgrad) * sigma(k1) * off_dh + cast * norm(dz)
    allowed = {
        "y": fwd * norm(a @ k2.T) + (1 + fwd) * sigma(k2) * off_a,
        "dx": off_dz * r.max() * np.abs(gamma).max(),
        "dgamma": off_dz * norm(xhat, axis=0).max(),
        "dbeta": off_dz * len(x) ** 0.5,
        "dkernel1": wgrad * norm(want["dkernel1"]) + (1 + wgrad) * sigma(z) * off_dh,
        "dbias1": off_dh * len(x) ** 0.5,
        "dkernel2": wgrad * norm(want["dkernel2"]) + (1 + wgrad) * sigma(dy) * off_a,
        "dbias2": 0.0,
    }
    for key, value in want.items():
        error = norm(np.asarray(got[key], np.float64) - value)
        assert error <= allowed[key] + cast * norm(value), (key, error, allowed[key])
        assert error <= 0.6 * norm(value), key
        assert key == "dbias2" or error > 2.0**-12 * norm(value), key


@RECIPE
def test_transformations(recipe):
    """jit, vmap, scan and remat change nothing."""
    args, dy = fl.mlp_operands((3, 16, 64), 32, 64, gated=True)
    x = args[0] * jnp.asarray([1.0, 64.0, 0.01])[:, None, None]
    f = functools.partial(run, recipe, activation="swiglu")
    each = [f([x[i], *args[1:]], dy[i])[0] for i in range(3)]
    stacked = {k: jnp.stack([e[k] for e in each]) for k in each[0]}
    mapped = jax.vmap(lambda x, dy: f([x, *args[1:]], dy)[0])
    same(mapped(x, dy), stacked)
    same(jax.jit(mapped)(x, dy), stacked)
    _, scanned = jax.lax.scan(lambda c, v: (c, f([v[0], *args[1:]], v[1])[0]), 0, (x, dy))
    same(scanned, stacked)

    def loss(*args):
        return (layernorm_mlp(*args, recipe=recipe, activation="swiglu") * dy).sum()

    every = tuple(range(7))
    want = jax.jit(jax.grad(loss, every))(x, *args[1:])
    for policy in (None, jax.checkpoint_policies.save_only_these_names(dj.CHECKPOINT_NAME)):
        tools.same_tree(jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), every))(x, *args[1:]), want)


@EVERY
def test_each_gradient_alone(recipe):
    """The choice of the other differentiated arguments changes no gradient's bits."""
    args, dy = fl.mlp_operands(dtype="bfloat16")
    options = fl.given(recipe, "layernorm_mlp")
    full, _ = run(recipe, args, dy, **options)

    def y(*args):
        return layernorm_mlp(*args, recipe=recipe, record=False, **options)

    for i, name in enumerate(fl.MLP[1:]):
        _, pull = jax.vjp(lambda v, i=i: y(*args[:i], v, *args[i + 1 :]), args[i])
        tools.same(pull(dy)[0], full[name], name)


@pytest.mark.parametrize("activation,ratio", [("gelu", 0.6), ("swiglu", 0.7)])
def test_what_is_kept_for_backward(activation, ratio):
    """x, its statistics, h and one copy of the norm; not the activation, which a product in bfloat16 keeps.

    Compared to this function without a recipe, whose fused activation keeps h alone: a gated h is 0.6 of all that, and
    nothing can be made again without it. Compared to layers of JAX, see `test_layernorm_mlp_training`.
    """
    gated, m, k, f = activation == "swiglu", 384, 64, 256
    args, _ = fl.mlp_operands((m, k), f, k, "bfloat16", gated)

    def kept(recipe):
        _, pull = jax.vjp(lambda *a: layernorm_mlp(*a, recipe=recipe, activation=activation), *args)
        found = {id(v): v for v in jax.tree.leaves(pull) if m in v.shape}.values()
        return sorted((v.dtype.name, *sorted(v.shape)) for v in found), sum(v.nbytes for v in found)

    h = ("bfloat16", *sorted((m, f * (1 + gated))))
    statistics = [("float32", m)] * 2
    _, plain = kept(None)
    for recipe in (dj.MXFP8BlockScaling(), dj.Float8CurrentScaling()):
        found, size = kept(recipe)
        assert found == sorted([("bfloat16", k, m), h, *statistics, ("uint8", k, m)])
        assert size <= ratio * plain, (size, plain)


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("i",))


def _sharded(mesh, recipe, args, dy):
    """y and the gradients, rows of x split over the mesh."""

    def local(*args):
        y, pull = jax.vjp(lambda *a: layernorm_mlp(*a, recipe=recipe, activation="swiglu"), *args[:-1])
        return y, *pull(args[-1])

    rows, whole = P("i"), [P()] * 6
    f = jax.shard_map(local, mesh=mesh, in_specs=(rows, *whole, rows), out_specs=(rows, rows, *whole))
    return dict(zip(fl.MLP, jax.jit(f)(*args, dy), strict=True))


@RECIPE
def test_data_parallel_gradients_are_summed_over_the_mesh(mesh, recipe):
    args, dy = fl.mlp_operands((2, 16, 64), 32, 16, gated=True)
    halves = [run(recipe, [args[0][i : i + 1], *args[1:]], dy[i : i + 1], activation="swiglu")[0] for i in range(2)]
    want = {k: halves[0][k] + halves[1][k] for k in fl.MLP[2:]}
    want |= {k: jnp.concatenate([h[k] for h in halves]) for k in ("y", "dx")}
    same(_sharded(mesh, recipe, args, dy), want)


def test_amax_group_gives_the_values_of_one_device(mesh):
    args, dy = fl.mlp_operands((2, 16, 64), 32, 16, gated=True)
    args[0] = args[0] * jnp.asarray([1.0, 8.0])[:, None, None]
    dy = dy * jnp.asarray([1.0, 8.0])[:, None, None]
    got = _sharded(mesh, dj.Float8CurrentScaling(amax_group="i"), args, dy)
    want, _ = run(dj.Float8CurrentScaling(), args, dy, activation="swiglu")
    for name in ("y", "dx"):
        tools.same(got[name], want[name], name)
    for name in fl.MLP[2:]:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-3 * float(jnp.abs(want[name]).max()))


def test_ops_of_one_step():
    """Four quantize calls forward, two of them on kernels, and three backward: dy, the activation again, dh."""
    args, dy = fl.mlp_operands()
    before = {op: tools.calls(op) for op in ("quantize", "gemm", "norm", "norm_grad", "activation", "activation_grad")}
    jax.block_until_ready(run(dj.MXFP8BlockScaling(), args, dy)[0])
    ran = {op: tools.calls(op) - n for op, n in before.items()}
    assert ran == {"quantize": 7, "gemm": 6, "norm": 1, "norm_grad": 1, "activation": 0, "activation_grad": 0}


def test_delayed_scaling_over_steps():
    """Amaxes of forward and backward reach the next step's scales, by each transport; recomputing adds none."""
    recipe = dj.DelayedScaling(amax_history_len=4)
    args, dy = fl.mlp_operands((16, 64), 48, 32)
    states = dj.init_layernorm_mlp_state(recipe)

    def loss(args, states):
        return (layernorm_mlp(*args, recipe=recipe, state=states) * dy).sum()

    step = jax.jit(dj.value_and_grad_with_state(loss))
    by_grad, refs = states, dj.state_refs(states)
    for _ in range(3):
        _, _, by_grad = step(args, by_grad)
        jax.grad(loss)(args, refs)
        by_grad = dj.update_state(by_grad)
        dj.update_state(refs)
    tools.same_tree(dj.read_states(refs), by_grad)
    scales = [float(s.scale[0]) for of_part in by_grad.values() for s in of_part.values()]
    assert len(scales) == 6 and 1 not in scales
    flat = dj.state_dict(by_grad, prefix="mlp.")
    assert "mlp.scale_states.fc1.input.scale" in flat
    tools.same_tree(dj.load_state_dict(flat, states, "mlp.")[0], by_grad)
    y, news = layernorm_mlp(*args, recipe=recipe, state=by_grad, return_state=True)
    assert y.shape == dy.shape and news.keys() == states.keys()
    with pytest.raises(ValueError, match="lost"):
        jax.grad(lambda a: loss(a, states))(args)


@pytest.mark.parametrize("way", ["main_grads", "copies", "held"])
def test_kernels_between_steps(way):
    args, dy = fl.mlp_operands((16, 64), 48, 32)
    recipe = dj.MXFP8BlockScaling()
    want, _ = run(recipe, args, dy)
    kernels = [args[3], args[5]]
    accs = tuple(jnp.zeros(k.shape, jnp.float32) for k in kernels)
    options = {}
    if way == "copies":
        options["copies"] = tuple(
            dj.quantize_kernel(k, recipe, module="layernorm_mlp", name=n)
            for k, n in zip(kernels, ("fc1", "fc2"), strict=True)
        )
    if way == "held":
        kernels = dj.quantize_params(kernels, recipe, lambda *_: True, module="layernorm_mlp")

    def f(x, accs):
        more = options if way == "copies" else {"main_grads": accs}
        return layernorm_mlp(x, *args[1:3], kernels[0], args[4], kernels[1], args[6], recipe=recipe, **more)

    y, pull = jax.vjp(f, args[0], accs)
    dx, dmain = pull(dy)
    tools.same(y, want["y"])
    tools.same(dx, want["dx"])
    if way != "copies":
        tools.same(dmain[0], want["dkernel1"])
        tools.same(dmain[1], want["dkernel2"])


BAD = [
    (lambda a: {"recipe": "mxfp8"}, TypeError, "Recipe"),
    (lambda a: {"activation": "tanh"}, ValueError, "swiglu"),
    (lambda a: {"activation": "swiglu"}, ShapeError, "kernel2"),
    (lambda a: {"normalization": "None"}, ValueError, "RMSNorm"),
    (lambda a: {"eps": -1.0}, ValueError, "eps"),
    (lambda a: {"gamma": a["gamma"][:-1]}, ShapeError, "gamma"),
    (lambda a: {"kernel1": a["kernel1"][0]}, ShapeError, "N, K"),
    (lambda a: {"kernel1": a["kernel1"][:-1], "bias1": None, "activation": "geglu"}, ShapeError, "halves"),
    (lambda a: {"kernel2": a["kernel2"][:, :-1]}, ShapeError, "kernel2"),
    (lambda a: {"kernel2": 3}, ArgumentError, "kernel2"),
    (lambda a: {"bias2": a["bias2"][:-1]}, ShapeError, "bias2"),
    (lambda a: {"recipe": dj.DelayedScaling()}, TypeError, "init_layernorm_mlp_state"),
    (lambda a: {"recipe": dj.DelayedScaling(), "state": dj.init_state(dj.DelayedScaling())}, TypeError, "layer"),
    (lambda a: {"state": {"fc3": {}}}, ValueError, "fc1 and fc2"),
    (lambda a: {"state": dj.init_layernorm_mlp_state(dj.DelayedScaling())}, ValueError, "another recipe"),
    (lambda a: {"recipe": dj.NVFP4BlockScaling(disable_rht=True)}, TypeError, "rng"),
    (lambda a: {"recipe": None, "copies": ((None, None), None)}, ValueError, "copies given without"),
]


@pytest.mark.parametrize("change,error,match", BAD)
def test_bad_input(change, error, match):
    args, _ = fl.mlp_operands()
    names = ("x", "gamma", "beta", "kernel1", "bias1", "kernel2", "bias2")
    given = dict(zip(names, args, strict=True)) | {"recipe": dj.MXFP8BlockScaling()}

    def f(x):
        return layernorm_mlp(**(given | change(given) | {"x": x})).sum()

    with pytest.raises(error, match=match):
        jax.eval_shape(jax.grad(f), args[0])
    with pytest.raises(error, match=match):
        jax.grad(f)(args[0])


def test_names_of_the_parts_reach_the_recipe():
    seen = []

    def ask(role):
        seen.append((role.module, role.name))
        return fl.E4M3

    args, _ = fl.mlp_operands()
    recipe = dj.CustomRecipe(ask)
    for name, parts in (("", {"fc1", "fc2"}), ("block.0", {"block.0.fc1", "block.0.fc2"})):
        seen.clear()
        layernorm_mlp(*args, recipe=recipe, name=name)
        assert set(seen) == {("layernorm_mlp", part) for part in parts}


def test_lowering_for_cuda_asks_for_workspaces():
    """As one more result of those calls that sum over rows, of the size that the core names."""
    args, dy = fl.mlp_operands((16, 64), 48, 32)

    def f(*args):
        y, pull = jax.vjp(lambda *a: layernorm_mlp(*a, recipe=dj.MXFP8BlockScaling()), *args)
        return y, pull(dy)

    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @diptych_" in line]
    sums = {
        "quantize": f"tensor<48xf32>, tensor<{_core.column_sum_workspace_bytes(16, 48)}xui8>)",
        "norm_grad": f"tensor<{_core.norm_grad_workspace_bytes(16, 64)}xui8>)",
    }
    for op, workspace in sums.items():
        found = [line.split("->")[-1] for line in calls if f"@diptych_{op}(" in line]
        assert sum(workspace in outs for outs in found) == 1, (op, found)
