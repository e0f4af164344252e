"""`grouped_dense` under JAX's transformations, on a mesh, and where its gradients go."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sweeps import others_slow

import diptych.jax as dj
from diptych.common import DelayedScaling, MXFP8BlockScaling
from jax_frontend import tools
from jax_frontend.grouped_layers import EVERY, G, K, given, operands, run, same

pytestmark = pytest.mark.sampled

MX = MXFP8BlockScaling()
DELAYED = DelayedScaling(amax_history_len=4)
PLAIN = {n: r for n, r in tools.PLAIN_RECIPES.items() if n in EVERY} | {"none": None}


@pytest.mark.parametrize("name", others_slow(EVERY, ("fp8-delayed", "fp8-block", "nvfp4")))
def test_remat_gives_the_same_gradient(name):
    recipe = EVERY[name]
    x, kernel, bias, dy, offsets = operands("later", "bfloat16")
    options = given(recipe) | {"recipe": recipe, "align": 16}
    state = options.pop("state", None)

    def loss(x, kernel, bias, state):
        y = dj.grouped_dense(jnp.sin(x), kernel, bias, offsets, state=state, **options)
        return (y.astype(jnp.float32) * dy).sum()

    want = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, kernel, bias, state)
    for policy in (None, jax.checkpoint_policies.save_only_these_names(dj.CHECKPOINT_NAME)):
        got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2, 3)))(x, kernel, bias, state)
        tools.same_tree(got, want, name)


def test_named_copies_are_not_made_twice():
    x, kernel, bias, _, offsets = operands("later")

    def loss(x, kernel):
        return dj.grouped_dense(jnp.sin(x), kernel, bias, offsets, recipe=MX).sum()

    counts = []
    for policy in (
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.save_only_these_names("diptych_q"),
    ):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(jax.checkpoint(loss, policy=policy), (0, 1)))(x, kernel).jaxpr
        counts.append([len(tools.eqns(jaxpr, f"diptych_{op}")) for op in ("quantize", "quantize_stack")])
    assert counts == [[3, 2], [2, 1]]


@tools.WRAP
@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_vmap_is_a_loop_bit_for_bit(name, wrap):
    recipe = PLAIN[name]
    x, kernel, bias, dy, _ = operands("even")
    front = jnp.asarray([1.0, 64.0, 0.01])[:, None, None]  # amaxes differ between examples
    xs, dys = x * front, dy * front[::-1]
    offsets = jnp.asarray([(0, 32, 64, 96, 128), (16, 16, 48, 48, 80), (0, 0, 0, 0, 0)], jnp.int32)
    kernels = kernel * front[:, None]

    def step(x, kernel, dy, offsets):
        return run(recipe, x, kernel, bias, dy, offsets, align=16)

    for axes in ((0, None, 0, None), (0, None, 0, 0), (0, 0, 0, 0), (None, 0, None, 0)):
        args = [v if a == 0 else v[0] for v, a in zip((xs, kernels, dys, offsets), axes, strict=True)]
        got = wrap(jax.vmap(step, axes))(*args)
        for i in range(3):
            want = step(*[v[i] if a == 0 else v for v, a in zip(args, axes, strict=True)])
            each = {key: v[i] for key, v in got.items()}
            if recipe is not None:
                same(each, want, (axes, i))
            else:  # XLA's products under vmap may sum in another order
                for key, v in want.items():
                    np.testing.assert_allclose(each[key], v, rtol=1e-4, atol=1e-4 * float(jnp.abs(v).max() + 1))


def test_scan_over_layers():
    _, kernels, _, _, offsets = operands("even")
    x, kernels = tools.normal("x", (128, 32)), tools.normal("layers", (3, G, 32, 32)) / 6
    states = jax.tree.map(lambda v: jnp.broadcast_to(v, (3, *v.shape)), dj.init_state(DELAYED, module="grouped_linear"))

    def layer(x, kernel, state):
        return dj.grouped_dense(x, kernel, None, offsets, recipe=DELAYED, state=state)

    def looped(x, kernels, states):
        for i in range(3):
            x = layer(x, kernels[i], jax.tree.map(lambda v, i=i: v[i], states))
        return x.sum()

    def scanned(x, kernels, states):
        return jax.lax.scan(lambda x, s: (layer(x, *s), None), x, (kernels, states))[0].sum()

    want, got = (jax.jit(jax.grad(f, (0, 1, 2)))(x, kernels, states) for f in (looped, scanned))
    tools.same_tree(got, want)
    amaxes = got[2]["weight"].amax_history[:, 0]
    tools.same(amaxes, jnp.abs(kernels).max((1, 2, 3)))


def test_sizes_that_are_not_known_before():
    """Exported once for any number of rows."""
    x, kernel, bias, _, offsets = operands("even")
    rows = jax.export.symbolic_shape("rows")[0]
    shapes = (
        jax.ShapeDtypeStruct((rows, K), jnp.float32),
        *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (kernel, bias, offsets)),
    )
    for recipe in (EVERY["fp8-current"], None):
        f = jax.jit(lambda *args, r=recipe: dj.grouped_dense(*args, recipe=r))
        exported = jax.export.export(f, disabled_checks=dj.export_safety_checks())(*shapes)
        for n in (128, 131):
            v = jnp.concatenate([x, x])[:n]
            tools.same(exported.call(v, kernel, bias, offsets), f(v, kernel, bias, offsets))


# --- where gradients go ---


def test_gradients_into_main_grad():
    """As the gradient of an array, and into a reference, in float32."""
    args = operands("later", "bfloat16")
    x, kernel, bias, dy, offsets = args
    main = tools.normal("main", kernel.shape)
    want = run(MX, *args)
    wide = run(MX, x, kernel.astype(jnp.float32), bias, dy, offsets)["dkernel"]  # the same copies

    def loss(x, kernel, bias, main):
        y = dj.grouped_dense(x, kernel, bias, offsets, recipe=MX, main_grad=main)
        return (y * dy).astype(jnp.float32).sum()

    dx, dkernel, dbias, dmain = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, kernel, bias, main)
    same({"dx": dx, "dbias": dbias}, {k: want[k] for k in ("dx", "dbias")})
    tools.same(dmain, wide)
    assert not np.asarray(dkernel).any()
    ref = jax.new_ref(main)
    jax.jit(jax.grad(lambda x, kernel: loss(x, kernel, bias, ref), (0, 1)))(x, kernel)
    tools.same(ref[...], main + wide)


def test_a_second_derivative_is_refused():
    x, kernel, bias, dy, offsets = operands("even")

    def loss(x):
        return (dj.grouped_dense(x, kernel, bias, offsets, recipe=MX) * dy).sum()

    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.hessian(loss)(x)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (x,), (x,))


# --- on a mesh ---


def local_grads(recipe: Any, x: Any, kernel: Any, bias: Any, dy: Any, offsets: Any) -> Any:
    def loss(x, kernel, bias):
        return (dj.grouped_dense(x, kernel, bias, offsets, recipe=recipe, align=16) * dy).sum()

    return jax.grad(loss, (0, 1, 2))(x, kernel, bias)


@tools.WRAP_NOW_JIT
@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_rows_over_the_mesh(mesh, name, wrap):
    """Each device has rows and offsets of its own; gradients of what all share are summed."""
    recipe = PLAIN[name]
    x, kernel, bias, dy, _ = operands("even")
    offsets = jnp.asarray([0, 16, 16, 48, 64, 16, 16, 32, 32, 48], jnp.int32)
    f = jax.shard_map(
        functools.partial(local_grads, recipe), mesh=mesh,
        in_specs=(P("i"), P(), P(), P("i"), P("i")), out_specs=(P("i"), P(), P()),
    )  # fmt: skip
    got = wrap(f)(x, kernel, bias, dy, offsets)
    halves = [local_grads(recipe, x[r], kernel, bias, dy[r], o) for r, o in
              zip((slice(0, 64), slice(64, 128)), offsets.reshape(2, 5), strict=True)]  # fmt: skip
    check = tools.same if recipe is not None else functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3)
    check(got[0], jnp.concatenate([h[0] for h in halves]))
    check(got[1], halves[0][1] + halves[1][1])
    check(got[2], halves[0][2] + halves[1][2])


@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_experts_over_the_mesh(mesh, name):
    """Rows are everywhere; each device has half of the experts, and the offsets alone differ for x."""
    recipe = PLAIN[name]
    x, kernel, bias, dy, offsets = operands("even")
    apart = jnp.stack([offsets[:3], offsets[2:]])

    def local(x, kernel, bias, dy, apart):
        y = dj.grouped_dense(x, kernel, bias, apart[0], recipe=recipe, align=16)
        return jax.lax.psum(y, "i"), *local_grads(recipe, x, kernel, bias, dy, apart[0])

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("i"), P("i"), P(), P("i")), out_specs=(P(), P(), P("i"), P("i"))
    )
    got = dict(zip(("y", "dx", "dkernel", "dbias"), jax.jit(f)(x, kernel, bias, dy, apart), strict=True))
    want = run(recipe, x, kernel, bias, dy, offsets, align=16)
    for key, v in want.items():
        if recipe is not None:
            tools.same(got[key], v, key)
        else:
            np.testing.assert_allclose(got[key], v, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", others_slow({n: r for n, r in PLAIN.items() if r is not None}, ("fp8-current",)))
def test_rows_and_experts_over_the_mesh_have_the_scales_of_one_device(mesh, name):
    """`row_axes` reduces amaxes of x and dy, not those of kernels, whose magnitudes differ.

    Each device has 128 rows, since blocks of 1x128 along the rows begin anew on each.
    """
    recipe = PLAIN[name]
    x, kernel, bias, dy, offsets = operands("even")
    x, dy, offsets = jnp.concatenate([x, -x[::-1]]), jnp.concatenate([dy, 2 * dy]), 2 * offsets
    x, options = x.at[-1, -1].set(50), {"recipe": recipe, "align": 32, "row_axes": "i"}

    def local(x, kernel, bias, dy):
        half = jnp.asarray([0, 64, 128], jnp.int32)
        y, pull = jax.vjp(lambda *args: dj.grouped_dense(*args, half, **options), x, kernel, bias)
        return y, *pull(dy)

    f = jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    got = dict(zip(("y", "dx", "dkernel", "dbias"), jax.jit(f)(x, kernel, bias, dy), strict=True))
    same(got, run(recipe, x, kernel, bias, dy, offsets, align=32), name)


@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_offsets_alone_differ_on_the_mesh(mesh, name):
    """Rows and kernels are everywhere; what each device has groups for is summed."""
    recipe = PLAIN[name]
    x, kernel, bias, dy, offsets = operands("even")
    apart = jnp.stack([jnp.minimum(offsets, 64), jnp.maximum(offsets, 64)])

    def local(x, kernel, bias, dy, apart):
        y = dj.grouped_dense(x, kernel, bias, apart[0], recipe=recipe, align=16)
        return jax.lax.psum(y, "i"), *local_grads(recipe, x, kernel, bias, dy, apart[0])

    f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P(), P(), P("i")), out_specs=P())
    got = dict(zip(("y", "dx", "dkernel", "dbias"), jax.jit(f)(x, kernel, bias, dy, apart), strict=True))
    want = run(recipe, x, kernel, bias, dy, offsets, align=16)
    for key, v in want.items():
        if recipe is not None:
            tools.same(got[key], v, key)
        else:
            np.testing.assert_allclose(got[key], v, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("way", ["gradient", "returned", "references"])
def test_replicated_states_stay_replicated(mesh, way):
    x, kernel, bias, dy, _ = operands("even")
    offsets = jnp.asarray([0, 16, 16, 48, 64], jnp.int32)

    def local(x, kernel, dy, states):
        def layer(kernel, states, **options):
            return dj.grouped_dense(x, kernel, bias, offsets, recipe=DELAYED, state=states, **options)

        if way == "returned":
            return layer(kernel, states, return_state=True)[1]
        if way == "gradient":
            return jax.grad(lambda k, s: (layer(k, s) * dy).sum(), (0, 1))(kernel, states)[1]
        refs = dj.state_refs(states)
        jax.grad(lambda k: (layer(k, refs) * dy).sum())(kernel)
        return dj.read_states(refs)

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P(), P("i"), P()), out_specs=P())
    news = jax.jit(f)(x, kernel, dy, dj.init_state(DELAYED, module="grouped_linear"))
    wants = {"input": x, "weight": kernel, "grad_output": dy * (way != "returned")}
    for slot, value in wants.items():
        assert float(news[slot].amax_history[0]) == float(jnp.abs(value).max()), slot


@pytest.mark.parametrize("name", ("fp8-current", "nvfp4 to nearest"))
def test_amax_group_gives_each_expert_the_scale_of_its_whole(mesh, name):
    """Features of the output are split over the mesh: halves of experts are quantized as the whole ones are."""
    recipe, offsets = tools.PLAIN_RECIPES[name], jnp.asarray([0, 16, 16, 48, 64], jnp.int32)
    shapes = {"x": (64, 32), "kernel": (4, 64, 32), "dy": (64, 64)}
    x, kernel, dy = (tools.normal(f"experts-{n}", shape, "bfloat16") for n, shape in shapes.items())
    kernel, dy = kernel * jnp.where(jnp.arange(64) < 32, 1, 50)[:, None].astype(kernel.dtype), dy * dy[0]

    def layer(recipe, x, kernel, dy):
        y, back = jax.vjp(lambda k: dj.grouped_dense(x, k, None, offsets, recipe=recipe, align=16), kernel)
        return y, back(dy)[0]

    shares = functools.partial(layer, recipe.replace(amax_group="i"))
    split = {"in_specs": (P(), P(None, "i"), P(None, "i")), "out_specs": (P(None, "i"), P(None, "i"))}
    want = layer(recipe, x, kernel, dy)
    tools.same_tree(jax.jit(jax.shard_map(shares, mesh=mesh, **split))(x, kernel, dy), want)
    alone = jax.jit(jax.shard_map(functools.partial(layer, recipe), mesh=mesh, **split))(x, kernel, dy)
    assert not np.array_equal(alone[0], want[0])


def test_two_devices_share_delayed_scales(mesh):
    """With amaxes reduced over the mesh halves are quantized as the whole is, in several steps."""
    recipe = DELAYED.replace(amax_group="i")
    x, kernel, bias, dy, _ = operands("even")
    x = x * jnp.linspace(1, 9, 128)[:, None]
    offsets = jnp.asarray([0, 16, 16, 48, 64], jnp.int32)

    def local(x, dy, states, recipe, offsets):
        outs = []
        for step in range(3):

            def loss(x, s, step=step):
                y = dj.grouped_dense(x * (step + 1), kernel, bias, offsets, recipe=recipe, state=s)
                return (y * dy).sum()

            dx, new = dj.value_and_grad_with_state(loss)(x, states)[1:]
            states = dj.update_state(new, recipe)
            outs.append(dx)
        return jnp.stack(outs), states

    def whole(x, dy, states):  # halves of a stack of kernels twice as large
        both = jnp.concatenate([offsets[:-1], offsets + 64])
        kernels, biases = jnp.concatenate([kernel, kernel]), jnp.concatenate([bias, bias])
        plain = DELAYED

        def step(states, i):
            def loss(x, s):
                y = dj.grouped_dense(x * (i + 1), kernels, biases, both, recipe=plain, state=s)
                return (y * dy).sum()

            dx, new = dj.value_and_grad_with_state(loss)(x, states)[1:]
            return dj.update_state(new, plain), dx

        outs = []
        for i in range(3):
            states, dx = step(states, i)
            outs.append(dx)
        return jnp.stack(outs), states

    states = dj.init_state(DELAYED, module="grouped_linear")
    f = jax.shard_map(
        functools.partial(local, recipe=recipe, offsets=offsets), mesh=mesh,
        in_specs=(P("i"), P("i"), P()), out_specs=(P(None, "i"), P()),
    )  # fmt: skip
    (got, news), (want, wants) = jax.jit(f)(x, dy, states), jax.jit(whole)(x, dy, states)
    tools.same(got, want)
    tools.same_tree(jax.tree.leaves(news), jax.tree.leaves(wants))
    assert float(news["input"].scale[0]) != 1
