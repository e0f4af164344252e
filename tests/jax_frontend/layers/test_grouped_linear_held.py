"""`grouped_dense` with kernels that are held quantized: the bits of quantizing them each time."""

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
from diptych.common import (
    ArgumentError,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4Quantizer,
    Recipe,
    ShapeError,
    UnsupportedError,
    linear_plan,
)
from jax_frontend import tools
from jax_frontend.grouped_layers import (
    EVERY,
    GROUPS,
    G,
    K,
    N,
    dtypes_for,
    given,
    operands,
    recipe_for,
    reference,
    run,
    same,
)
from jax_frontend.layers.test_grouped_linear import Own, _noisy, _own
from jax_frontend.layers.test_grouped_linear_permuted import ALIGN, map_for
from jax_frontend.layers.test_grouped_linear_permuted import operands as permuted_operands

pytestmark = pytest.mark.sampled

MX, DELAYED = MXFP8BlockScaling(), DelayedScaling(amax_history_len=4)
PLAIN = {n: r for n, r in tools.PLAIN_RECIPES.items() if n in EVERY}
NOW = ("fp8-delayed", "fp8-block", "nvfp4")


def hold(kernel: Any, recipe: Recipe) -> dj.QuantizedStack:
    """As parameters are held."""
    tree = {"experts": {"kernel": kernel}, "norm": kernel[0, 0]}
    held = dj.quantize_params(tree, recipe, lambda path, _: path == "experts.kernel", module="grouped_linear")
    assert held["norm"] is tree["norm"]
    return held["experts"]["kernel"]


def kept(kernel: Any, recipe: Recipe) -> Any:
    """The same copies, for a kernel in high precision."""
    quantizer = dj.kernel_quantizer(recipe, "grouped_linear")
    assert quantizer is not None
    sides = (quantizer.with_usage(columnwise=False), quantizer.with_usage(rowwise=False))
    return tuple(dj.quantize_stack(kernel, side, as_bytes=True) for side in sides)


def held_run(recipe: Any, x: Any, q: Any, bias: Any, dy: Any, groups: Any, **options: Any) -> dict[str, Any]:
    """y, dx, dkernel (that of main_grad) and dbias, and the new "state" where there is one. `groups`: offsets, or a
    map of rows."""
    options = given(recipe) | {"recipe": recipe} | options
    state = options.pop("state", None)
    which = "row_map" if isinstance(groups, dj.RowMap) else "offsets"

    def layer(x: Any, acc: Any, bias: Any, state: Any) -> Any:
        return dj.grouped_dense(x, q, bias, **{which: groups}, state=state, main_grad=acc, **options)

    y, pull = jax.vjp(layer, x, jnp.zeros(q.shape), bias, state)
    *grads, news = pull(dy)
    made = dict(zip(("y", "dx", "dkernel", "dbias"), (y, *grads), strict=True))
    return made | ({"state": news} if state else {})


# --- bits ---


@tools.WRAP
@pytest.mark.parametrize("where", ["later", "unaligned"])
@pytest.mark.parametrize("name", others_slow(EVERY, (*NOW, "fp8-current", "mxfp8")))
def test_bits(name, where, wrap):
    """Those of the oracle, and of a layer that quantizes its kernels to the same copies."""
    align = GROUPS[where][2]
    recipe = recipe_for(name, align)
    dtype, _, of_bias = dtypes_for(recipe, list(EVERY).index(name))
    args = operands(where, (dtype, "float32", of_bias))
    q = hold(args[1], recipe)
    assert type(q) is dj.QuantizedStack and q.shape == (G, N, K) and q.quantizer == dj.kernel_quantizer(recipe)
    assert {v.dtype.itemsize for v in (q.rowwise_data, q.columnwise_data)} == {1} and q.rowwise_data.dtype == jnp.uint8
    before = tools.calls("quantize")
    got = wrap(lambda q, x, *rest: held_run(recipe, x, q, *rest, align=align))(q, args[0], *args[2:])
    assert tools.calls("quantize") - before == 2  # of x and dy
    same(got, reference(recipe, *args, held=q.quantizer))
    want = run(recipe, *args, align=align, copies=kept(args[1], recipe))
    tools.same_tree(got, want)
    if not linear_plan(recipe).states:
        same(got, run(recipe, *args, align=align))


@tools.WRAP
@pytest.mark.parametrize("name", others_slow(EVERY, NOW))
def test_a_map_of_rows(name, wrap):
    recipe, m = EVERY[name], map_for(f"held-{name}")
    x, kernel, bias, dy = permuted_operands(f"held-{name}", m, ("bfloat16", "float32", "bfloat16"))
    q = hold(kernel, recipe)
    got = wrap(lambda q, *a: held_run(recipe, a[0], q, *a[1:], align=ALIGN))(q, x, bias, dy, m)
    rows, pull = jax.vjp(lambda x: dj.moe_permute(x, m)[0], x)
    want = run(recipe, rows, kernel, bias, dy, m.expert_offsets, align=ALIGN, copies=kept(kernel, recipe))
    tools.same_tree(got, want | {"dx": pull(want["dx"])[0]})


@pytest.mark.parametrize("name", EVERY)
def test_backward_overrides(name):
    """Backward multiplies by what the held copy stands for, whichever way it is asked."""
    recipe, args = EVERY[name], operands("later", ("bfloat16", "float32", "bfloat16"))
    x, kernel, bias, dy, offsets = args
    q = hold(kernel, recipe)
    plain = run(None, x, q.dequantize(x.dtype), bias, dy, offsets)
    for override in ("high_precision", "dequantized"):
        got = held_run(recipe.replace(backward_override=override), x, q, bias, dy, offsets)
        tools.same(got["y"], held_run(recipe, x, q, bias, dy, offsets, align=16)["y"])
        tools.same(got["dx"], plain["dx"])


def test_no_recipe_and_calibration_take_what_it_stands_for():
    x, kernel, bias, dy, offsets = operands("later")
    q = hold(kernel * 7, DELAYED)
    opened, state = q.dequantize(), dj.init_state(DELAYED, module="grouped_linear")
    want = run(None, x, opened, bias, dy, offsets)
    for options in ({"recipe": None}, {"recipe": DELAYED, "state": state, "calibrate": True, "return_state": True}):
        y = dj.grouped_dense(x, q, bias, offsets, **options)
        y, news = y if "state" in options else (y, {})
        tools.same(y, want["y"])
    assert float(news["weight"].amax_history[0]) == float(jnp.abs(opened).max())
    m = map_for("held-plain")
    x, kernel, bias, _ = permuted_operands("held-plain", m)
    q = hold(kernel, DELAYED)
    y = dj.grouped_dense(x, q, bias, row_map=m, recipe=None)
    tools.same(y, dj.grouped_dense(x, q.dequantize(), bias, row_map=m, recipe=None))


def test_delayed_scales_of_held_kernels_are_their_own():
    """Each expert's comes from itself; the state's is neither read nor changed."""
    x, kernel, bias, dy, offsets = operands("even")
    q = hold(kernel, DELAYED)
    for g in range(G):
        alone = dj.quantize(kernel[g], dj.kernel_quantizer(Float8CurrentScaling()), as_bytes=True)
        tools.same_tree(jax.tree.leaves(q[g]), jax.tree.leaves(alone))
    assert len(set(np.asarray(q.rowwise_scale_inv).tolist())) == G
    states = dj.init_state(DELAYED, module="grouped_linear")
    other = states | {"weight": jax.tree.map(lambda v: v + 5, states["weight"])}
    got = held_run(DELAYED, x, q, bias, dy, offsets, state=other)
    want = held_run(DELAYED, x, q, bias, dy, offsets, state=states)
    tools.same_tree(got["state"]["weight"].amax_history, other["weight"].amax_history)
    tools.same_tree({k: v for k, v in got.items() if k != "state"}, {k: v for k, v in want.items() if k != "state"})
    for slot, value in (("input", x), ("grad_output", dy)):
        assert float(got["state"][slot].amax_history[0]) == float(jnp.abs(value).max())


# --- transformations ---


@tools.WRAP
@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_vmap_is_a_loop_bit_for_bit(name, wrap):
    recipe = PLAIN[name]
    x, kernel, bias, dy, offsets = operands("even")
    front = jnp.asarray([1.0, 64.0, 0.01])[:, None, None]  # amaxes differ between examples
    xs, stacks = x * front, jax.vmap(lambda kernel: hold(kernel, recipe))(kernel * front[:, None])
    for axes in ((0, None), (None, 0), (0, 0)):
        args = [v if a == 0 else jax.tree.map(lambda leaf: leaf[1], v) for v, a in zip((xs, stacks), axes, strict=True)]
        got = wrap(jax.vmap(lambda x, q: held_run(recipe, x, q, bias, dy, offsets), axes))(*args)
        for i in range(3):
            x, q = (jax.tree.map(lambda v, i=i: v[i], v) if a == 0 else v for v, a in zip(args, axes, strict=True))
            tools.same_tree(
                jax.tree.map(lambda v, i=i: v[i], got), held_run(recipe, x, q, bias, dy, offsets), (axes, i)
            )


@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_scan_over_layers(name):
    recipe = PLAIN[name]
    offsets = operands("even")[-1]
    x, kernels = tools.normal("x", (128, 32)), tools.normal("layers", (3, G, 32, 32)) / 6
    stacks = jax.vmap(lambda kernel: hold(kernel, recipe))(kernels)

    def scanned(x, stacks, acc):
        def layer(x, own):
            return dj.grouped_dense(x, own[0], None, offsets, recipe=recipe, main_grad=own[1]), None

        return jax.lax.scan(layer, x, (stacks, acc))[0].sum()

    def looped(x, kernels):
        for kernel in kernels:
            x = dj.grouped_dense(x, kernel, None, offsets, recipe=recipe)
        return x.sum()

    got = jax.jit(jax.grad(scanned, (0, 2)))(x, stacks, jnp.zeros(kernels.shape))
    tools.same_tree(got, jax.jit(jax.grad(looped, (0, 1)))(x, kernels))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names(dj.CHECKPOINT_NAME)])
def test_remat(policy):
    """Also of a stack whose payloads and scales are no bytes, which remat could round."""
    recipe = MX.replace(backward_override="dequantized")  # forward and backward read the same copy
    x, kernel, bias, dy, offsets = operands("later")

    def loss(x, kernel):
        q = kernel
        if isinstance(kernel, jax.Array):
            quantizer = dj.kernel_quantizer(recipe, "grouped_linear")
            assert quantizer is not None
            q = dj.quantize_stack(jax.lax.stop_gradient(kernel), quantizer)
        return (dj.grouped_dense(jnp.sin(x), q, bias, offsets, recipe=recipe) * dy).sum()

    want = jax.jit(jax.value_and_grad(loss))(x, hold(kernel * 300, recipe))
    for each in (hold(kernel * 300, recipe), kernel * 300):
        tools.same_tree(jax.jit(jax.value_and_grad(jax.checkpoint(loss, policy=policy)))(x, each), want)


# --- on a mesh ---


def local_grads(recipe: Any, q: Any, x: Any, acc: Any, dy: Any, offsets: Any) -> Any:
    def loss(x, acc):
        return (dj.grouped_dense(x, q, None, offsets, recipe=recipe, align=16, main_grad=acc) * dy).sum()

    return jax.grad(loss, (0, 1))(x, acc)


@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_rows_over_the_mesh(mesh, name):
    """Each device has rows of its own and all experts; the gradient of what all share is summed."""
    recipe = PLAIN[name]
    x, kernel, _, dy, _ = operands("even")
    q, acc, offsets = hold(kernel, recipe), jnp.zeros(kernel.shape), jnp.asarray([0, 16, 16, 48, 64], jnp.int32)
    f = jax.shard_map(
        functools.partial(local_grads, recipe), mesh=mesh,
        in_specs=(P(), P("i"), P(), P("i"), P()), out_specs=(P("i"), P()),
    )  # fmt: skip
    got = jax.jit(f)(q, x, acc, dy, offsets)
    halves = [local_grads(recipe, q, x[r], acc, dy[r], offsets) for r in (slice(0, 64), slice(64, 128))]
    tools.same_tree(got, (jnp.concatenate([h[0] for h in halves]), halves[0][1] + halves[1][1]))


@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_experts_over_the_mesh(mesh, name):
    """Rows and offsets are everywhere and the kernels alone differ: dx is the sum over the devices."""
    recipe = PLAIN[name]
    x, kernel, _, dy, _ = operands("even")
    q, offsets = hold(kernel, recipe), jnp.asarray([0, 64, 128], jnp.int32)

    def local(q, x, dy):
        return jax.grad(lambda x: (dj.grouped_dense(x, q, None, offsets, recipe=recipe, align=16) * dy).sum())(x)

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P())
    halves = [local(hold(kernel[s], recipe), x, dy) for s in (slice(0, 2), slice(2, 4))]
    tools.same(jax.jit(f)(q, x, dy), halves[0] + halves[1])


# --- what is refused ---


def test_a_held_stack_needs_what_the_recipe_asks():
    x, kernel, bias, _, offsets = operands("even")
    quantizer = dj.kernel_quantizer(MX, "grouped_linear")
    assert quantizer is not None
    rowwise = dj.quantize_stack(kernel, quantizer.with_usage(columnwise=False))
    columnwise = dj.quantize_stack(kernel, quantizer.with_usage(rowwise=False))
    both = hold(kernel, MX)

    def layer(q, recipe: Any = MX, **options):
        return dj.grouped_dense(x, q, bias, offsets, recipe=recipe, **options)

    tools.same(layer(rowwise), layer(kernel))
    with pytest.raises(ValueError, match="grouped_dense: dgrad reads the columnwise copy of the kernel"):
        jax.grad(lambda x: dj.grouped_dense(x, rowwise, bias, offsets, recipe=MX).sum())(x)
    with pytest.raises(ValueError, match="grouped_dense: fprop reads the rowwise copy of the kernel"):
        layer(columnwise)
    with pytest.raises(ValueError, match="grouped_dense: the kernel is held as mxfp8_e4m3, and the recipe asks"):
        layer(both, Float8CurrentScaling())
    with pytest.raises(ValueError, match="grouped_dense: kernel is quantized already, and copies"):
        layer(both, copies=(rowwise, None))
    with pytest.raises(ValueError, match="grouped_dense: a reference as main_grad"):
        layer(both, main_grad=jax.new_ref(jnp.zeros(kernel.shape)))
    with pytest.raises(ShapeError, match=r"grouped_dense: main_grad must be float32 \[4, 64, 96\]"):
        layer(both, main_grad=jnp.zeros(kernel.shape[1:]))
    with pytest.raises(UnsupportedError, match="grouped_dense: a quantized kernel has no gradient of its own"):
        q = hold(kernel, Float8CurrentScaling())
        jax.grad(lambda q: layer(q, Float8CurrentScaling()).sum(), allow_int=True)(q)
    with pytest.raises(TypeError, match="needs state="):
        layer(hold(kernel, DELAYED), DELAYED)
    with pytest.raises(ValueError, match="grouped_dense: the amax of grad_output, input would be lost"):
        options = {"recipe": DELAYED, "state": dj.init_state(DELAYED, module="grouped_linear")}
        held = hold(kernel, DELAYED)
        jax.grad(lambda x: dj.grouped_dense(x, held, bias, offsets, **options).sum())(x)
    with pytest.raises(ArgumentError, match=r"grouped_dense: a kernel .* must be a QuantizedStack, got a Quan"):
        layer(dj.quantize(kernel, quantizer))
    with pytest.raises(
        ArgumentError, match="dense: a kernel that is held quantized must be a QuantizedArray, got a QuantizedStack"
    ):
        dj.dense(x, both, recipe=MX)
    with pytest.raises(ShapeError, match=r"kernel \[G, N, K\] do not fit: \[128, 90\] and \[4, 64, 96\]"):
        dj.grouped_dense(x[:, :90], both, bias, offsets, recipe=MX)
    with pytest.raises(ShapeError, match=r"offsets must be \[5\]"):
        dj.grouped_dense(x, both, bias, offsets[1:], recipe=MX)
    with pytest.raises(ShapeError, match=r"do not fit: \[128, 96\] and \[2, 4, 64, 96\]"):
        layer(jax.tree.map(lambda v: jnp.stack([v, v]), both))


def test_another_rotation_or_amax_is_refused():
    """The columnwise copy of a rotated kernel stands for another one, and its rowwise copy for itself."""
    x, kernel, _, _, offsets = operands("even", "bfloat16")
    recipe = EVERY["nvfp4"].replace(disable_stochastic_rounding=True)
    rotated = NVFP4Quantizer(with_rht=True)
    for q, layer in (
        (dj.quantize_stack(kernel, rotated), lambda q: dj.grouped_dense(x, q, None, offsets, recipe=recipe)),
        (dj.quantize(kernel[0], rotated), lambda q: dj.dense(x, q, recipe=recipe)),
    ):
        with pytest.raises(ValueError, match=r"dense: the kernel is held by .*with_rht=True.*asks for .*by the recipe"):
            layer(q)
    by_row = dj.quantize_stack(kernel, NVFP4Quantizer(row_scaled_nvfp4=True))
    with pytest.raises(ValueError, match=r"held by .*row_scaled_nvfp4=True.*asks for"):
        dj.grouped_dense(x, by_row, None, offsets, recipe=recipe)
    one = dj.quantize(kernel[0], rotated.with_usage(columnwise=False))
    assert dj.dense(x, one, recipe=recipe).shape == (128, N)


def test_noise_and_quantizers_of_ones_own_matter_to_no_held_kernel():
    """A recipe that a kernel in high precision is refused asks nothing of one that is held."""
    x, kernel, bias, dy, offsets = operands("even")
    steady = CustomRecipe(lambda role: NVFP4Quantizer())
    noisy = held_run(_noisy("weight"), x, dj.quantize_stack(kernel, NVFP4Quantizer()), bias, dy, offsets, align=16)
    same(noisy, run(steady, x, kernel, bias, dy, offsets, align=16))
    same(held_run(_own("weight"), x, hold(kernel, MX), bias, dy, offsets), run(MX, x, kernel, bias, dy, offsets))
    with pytest.raises(ArgumentError, match="Own quantizes on its own"):
        hold(kernel, CustomRecipe(lambda role: Own()))


def test_parameters_of_all_layers():
    """Matrices and stacks of one tree; what the recipe leaves alone stays."""
    tree = {"up": tools.normal("up", (4, 64, 96)), "out": tools.normal("out", (64, 96)), "scale": jnp.ones(3)}
    held = dj.quantize_params(tree, MX, lambda path, _: path != "scale", module="grouped_linear")
    assert (type(held["up"]), type(held["out"])) == (dj.QuantizedStack, dj.QuantizedArray)
    assert held["scale"] is tree["scale"]
    tools.same(held["up"].dequantize()[2], dj.quantize(tree["up"][2], held["up"].quantizer).dequantize())
    seen = set()
    by_role = CustomRecipe(lambda role: seen.add((role.module, role.name)))
    left = dj.quantize_params(tree, by_role, lambda path, _: path == "up", module="grouped_linear", name=str.upper)
    assert left["up"] is tree["up"] and ("grouped_linear", "UP") in seen and ("linear", "UP") not in seen
    for bad in (tree["scale"], tree["up"][None]):
        with pytest.raises(ShapeError, match=r"up must be \[N, K\], or a stack \[G, N, K\], got"):
            dj.quantize_params({"up": bad}, MX, lambda *_: True, module="grouped_linear")
