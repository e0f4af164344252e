"""Stacks and products of groups of cut operands: one device's bits for N, sums in order for K, errors for rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import linear_plan
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

RECIPES = tools.PLAIN_RECIPES | {"nvfp4 stochastic": dj.NVFP4BlockScaling(disable_rht=True)}
RECIPE = pytest.mark.parametrize("recipe", named(RECIPES, ("fp8-current", "fp8-block", "mxfp8", "nvfp4 stochastic")))
G, R, N, K = 3, 512, 512, 256
OFFSETS = jnp.asarray([0, 128, 128, 384], jnp.int32)  # the second group is empty, and the last rows are in none
X, DY = tools.normal("x", (R, K)).at[-1, -1].set(40), tools.normal("dy", (R, N))
KERNEL, BIAS = (
    tools.normal("kernel", (G, N, K)) * jnp.asarray([1, 4, 16.0])[:, None, None],
    tools.normal("bias", (G, N)),
)


@meshes.AXES
@pytest.mark.parametrize("spec", [P("d"), P(None, "t", "d")], ids=["tensors", "both"])
@pytest.mark.parametrize("case", named(tools.KINDS, tools.NOW))
def test_a_cut_stack_has_the_bits_of_one_device(case, spec, kind):
    x, quantizer = (
        case.draw("stack", (4,))[:, None, :1, :1] * tools.normal("s", (4, 256, 512), case.dtype),
        case.quantizer,
    )
    x, state = x[:, 0] if x.ndim == 4 else x, case.state((4,))
    state = {name: v[:, 0] if name == "scale" else v for name, v in state.items()}

    def f(x):
        return dj.quantize_stack(x, quantizer, **state)

    got, collectives = meshes.run(f, kind, (spec,), x)
    meshes.same(got, f(x))
    assert set(collectives) <= {"all-reduce"}, collectives


def training_step(recipe, align=32):
    options = {"recipe": recipe, "align": align}
    if linear_plan(recipe).needs_rng:
        options["rng"] = dj.rng_state(2**40 + 3, 2**33)

    def f(x, kernel, bias, dy):
        layer = lambda x, kernel, bias: dj.grouped_dense(x, kernel, bias, OFFSETS, **options)  # noqa: E731
        y, vjp = jax.vjp(layer, x, kernel, bias)
        return dict(zip(("y", "dx", "dkernel", "dbias"), (y, *vjp(dy)), strict=True))

    return f


@meshes.AXES
@RECIPE
def test_column_parallel_kernels(recipe, kind):
    """N is cut: y and the kernels' gradients have one device's bits, and nothing is gathered."""
    specs = (P(), P(None, "d"), P(None, "d"), P(None, "d"))
    got, collectives = meshes.run(training_step(recipe), kind, specs, X, KERNEL, BIAS, DY)
    want = jax.jit(training_step(recipe))(X, KERNEL, BIAS, DY)
    for name in ("y", "dkernel", "dbias"):
        meshes.same(got[name], want[name], name)
    assert np.allclose(got["dx"], want["dx"], rtol=0, atol=1e-5 * np.abs(want["dx"]).max())
    assert set(collectives) == {"all-reduce"} and got["dkernel"].sharding.spec[1] == "d"


@meshes.AXES
@RECIPE
def test_row_parallel_kernels(recipe, kind):
    """K is cut: parts are rounded and added in the order of devices, then each row's bias is added."""
    specs = (P(None, "t"), P(None, None, "t"), P(), P())
    got, collectives = meshes.run(training_step(recipe), kind, specs, X, KERNEL, BIAS, DY)
    want = jax.jit(training_step(recipe))(X, KERNEL, BIAS, DY)
    for name in ("dx", "dkernel", "dbias"):
        meshes.same(got[name], want[name], name)
    assert np.allclose(got["y"], want["y"], rtol=0, atol=1e-5 * np.abs(want["y"]).max())
    assert (np.asarray(got["y"])[384:] == 0).all() and set(collectives) == {"all-reduce"}
    if recipe.quantizer(dj.QuantizerRole(tensor="input")).format.rule == "e8m0_ceil":  # without a scale of the whole
        halves = [
            np.asarray(dj.grouped_dense(X[:, s], KERNEL[:, :, s], None, OFFSETS, recipe=recipe, align=32))
            for s in (slice(0, K // 2), slice(K // 2, K))
        ]
        group = np.searchsorted(np.asarray(OFFSETS)[1:], np.arange(384), side="right")
        total = halves[0] + halves[1]
        total[:384] += np.asarray(BIAS)[group]
        meshes.same(got["y"], jnp.asarray(total))


@meshes.AXES
@pytest.mark.parametrize("rows", [R, R - 3], ids=["shares of rows", "shares of columns"])
def test_sums_in_bfloat16(rows, kind):
    """Each device adds up a share, with its rows' biases, and the shares are gathered."""
    layer = lambda x, kernel, bias: dj.grouped_dense(x, kernel, bias, OFFSETS, recipe=dj.MXFP8BlockScaling())  # noqa: E731
    x, none = X[:rows].astype("bfloat16"), jnp.zeros_like(BIAS)
    got, collectives = meshes.run(layer, kind, (P(None, "d"), P(None, None, "d"), P()), x, KERNEL, BIAS)
    assert collectives == meshes.WHOLE_SUM
    total = np.zeros((rows, N), np.float32)
    for part, kernel in zip(jnp.split(x, 4, 1), jnp.split(KERNEL, 4, 2), strict=True):
        total = total + np.asarray(layer(part, kernel, none)).astype(np.float32)
    group = np.searchsorted(np.asarray(OFFSETS)[1:], np.arange(384), side="right")
    total[:384] += np.asarray(BIAS)[group]
    meshes.same(got, jnp.asarray(total).astype("bfloat16"))


@meshes.AXES
def test_a_result_cut_over_the_axes_of_the_sum_and_examples_of_a_vmap(kind):
    recipe = dj.MXFP8BlockScaling()
    x = jnp.stack([X, X * 2])

    def f(x, kernel, bias):
        layer = lambda x, b: dj.grouped_dense(x, kernel, b, OFFSETS, recipe=recipe)  # noqa: E731
        return jax.vmap(layer)(x, bias)

    got, collectives = meshes.run(
        f, kind, (P(None, None, "t"), P(None, None, "t"), P()), x, KERNEL, jnp.stack([BIAS] * 2)
    )
    want = [
        meshes.run(training_step(recipe), kind, (P(None, "t"), P(None, None, "t"), P(), P()), v, KERNEL, BIAS, DY)[0][
            "y"
        ]
        for v in x
    ]
    meshes.same(got, jnp.stack([jax.device_get(w) for w in want]))
    assert collectives == {"all-reduce": 1}


CUTS = {
    "rows": ((P("d"), P(), P(), P()), r"mesh axes \('d',\) cut the rows, but which expert.*jax\.expert_parallel"),
    "gradient": ((P(), P(), P(), P("d")), r"cut the rows, .*jax\.expert_parallel"),
    "experts": ((P(), P("t"), P(), P()), r"cut the experts, .*jax\.expert_parallel"),
}


@meshes.AXES
@pytest.mark.parametrize("cut", CUTS)
def test_cut_rows_and_experts_are_refused(cut, kind):
    specs, message = CUTS[cut]
    kernel, offsets = KERNEL[:2], OFFSETS[:3]

    def f(x, kernel, bias, dy):
        layer = lambda *args: dj.grouped_dense(*args, offsets, recipe=dj.MXFP8BlockScaling())  # noqa: E731
        return jax.vjp(layer, x, kernel, bias)[1](dy)

    if cut == "gradient" and kind == AxisType.Explicit:
        return  # JAX itself demands a gradient typed as y
    with pytest.raises(meshes.REFUSED, match=message):
        meshes.run(f, kind, specs, X, kernel, BIAS[:2], DY)


def test_products_over_rows_accumulate_on_cut_columns():
    main = jnp.ones((G, N, K))

    def f(x, kernel, main, dy):
        layer = lambda main: dj.grouped_dense(x, kernel, None, OFFSETS, recipe=dj.MXFP8BlockScaling(), main_grad=main)  # noqa: E731
        return jax.vjp(layer, main)[1](dy)

    specs = (P(), P(None, "t", "d"), P(None, "t", "d"), P(None, "t"))
    got, _ = meshes.run(f, AxisType.Auto, specs, X, KERNEL, main, DY)
    meshes.same(got, jax.jit(f)(X, KERNEL, main, DY))
