"""Quantized tensors placed by one logical sharding: where each array lies, errors, and layers that read them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import linear_plan
from diptych.common.errors import ArgumentError, ShapeError, UnsupportedError
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

KIND = pytest.mark.parametrize("case", named(tools.KINDS, tools.NOW))
RECIPES = {k: r for k, r in tools.PLAIN_RECIPES.items() if not linear_plan(r).needs_rng}
RECIPE = pytest.mark.parametrize("recipe", named(RECIPES, ("fp8-current", "fp8-block", "mxfp8", "nvfp4 to nearest")))


def specs(tree):
    return jax.tree.map(lambda x: P(*[None] * x.ndim) if x.sharding is None else x.sharding.spec, tree)


@meshes.AXES
@pytest.mark.parametrize("spec", [P(("d", "t")), P("t", "d")], ids=["rows", "both"])
@KIND
def test_a_placed_tensor_lies_as_one_that_is_quantized_from_a_cut_tensor(case, spec, kind):
    x = tools.normal("placed", (1024, 512), case.dtype)
    q = dj.quantize(x, case.quantizer, **case.state())
    with meshes.mesh_of(kind) as mesh:
        sharding = NamedSharding(mesh, spec)
        placed = dj.device_put({"q": q, "bias": x[:, 0]}, {"q": sharding, "bias": NamedSharding(mesh, P())})
        meshes.same(placed["q"], q)
        assert placed["bias"].sharding.spec == P() and placed["q"].rowwise_data.sharding.spec[0] == (*spec, None)[0]
        if q.amax is not None:
            assert placed["q"].amax.sharding.spec == P(spec[0] if len(q.amax) > 1 else None)
        if kind == AxisType.Auto:
            return  # types of results are known on Explicit axes alone
        typed = jax.eval_shape(lambda x: dj.quantize(x, case.quantizer, **case.state()), jax.device_put(x, sharding))
        assert jax.tree.leaves(specs(typed)) == jax.tree.leaves(specs(placed["q"]))


@meshes.AXES
@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "fp8_e4m3_128x128", "mxfp8_e4m3", "nvfp4"])
def test_stacks_and_mapped_tensors(fmt, kind):
    x, quantizer = tools.normal("stack", (4, 128, 512)), tools.quantizer(fmt)
    stack, mapped = dj.quantize_stack(x, quantizer), jax.vmap(lambda t: dj.quantize(t, quantizer))(x)
    with meshes.mesh_of(kind) as mesh:
        for q in (stack, mapped):
            for spec in (P("d"), P("t", None, "d")):
                placed = dj.device_put(q, NamedSharding(mesh, spec))
                meshes.same(placed, q)
                assert placed.rowwise_data.sharding.spec == P(*spec, *[None] * (3 - len(spec)))
                one_scale = placed.columnwise_scale_inv if quantizer.format.one_scale else placed.amax
                assert one_scale is None or one_scale.sharding.spec[0] == spec[0]


def test_shardings_for_jit_constraints_and_abstract_arrays():
    """From `jax.eval_shape`, as jit's `out_shardings`, inside of jit, and as specs under the context's mesh."""
    quantizer, x = tools.quantizer("fp8_e4m3_tensor"), tools.normal("x", (128, 64))
    f = lambda x: {"q": dj.quantize(x, quantizer), "x": x}  # noqa: E731
    with meshes.mesh_of(AxisType.Auto) as mesh:
        shardings = dj.leaf_shardings(jax.eval_shape(f, x), NamedSharding(mesh, P(None, "d")))
        made = jax.jit(f, out_shardings=shardings)(x)
        assert jax.tree.leaves(specs(made)) == [s.spec for s in jax.tree.leaves(shardings)]
        inside = jax.jit(lambda x: jax.lax.with_sharding_constraint(f(x), shardings))(x)
        again = jax.jit(lambda t: t, in_shardings=(shardings,))(f(x))
        for got in (made, inside, again):
            meshes.same(got, f(x))
            assert got["q"].columnwise_data.sharding.spec[0] == "d"
        with jax.set_mesh(mesh):
            of_specs = dj.leaf_shardings(f(x), P(None, "d"))
        assert jax.tree.leaves(of_specs) == [s.spec for s in jax.tree.leaves(shardings)][:-1] + [P(None, "d")]
    one = jax.devices("cpu")[3]
    assert all(leaf.devices() == {one} for leaf in jax.tree.leaves(dj.device_put(f(x), one)))
    assert jax.tree.leaves(dj.leaf_shardings(f(x), None)) == []


def test_orbax_restores_where_leaf_shardings_say(tmp_path):
    """A checkpoint that was cut along rows is read along columns."""
    ocp = pytest.importorskip("orbax.checkpoint")
    q = dj.quantize(tools.normal("x", (128, 128)), tools.quantizer("fp8_e4m3_tensor"), as_bytes=True)
    with meshes.mesh_of(AxisType.Auto) as mesh:
        checkpointer = ocp.StandardCheckpointer()
        checkpointer.save(tmp_path / "q", {"q": dj.device_put(q, NamedSharding(mesh, P("d")))})
        checkpointer.wait_until_finished()
        shardings = dj.leaf_shardings(q, NamedSharding(mesh, P(None, "d")))
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), q, shardings)
        restored = checkpointer.restore(tmp_path / "q", {"q": target})["q"]
        meshes.same(restored, q)
        assert jax.tree.map(lambda x: x.sharding, restored).columnwise_data == shardings.columnwise_data


def test_a_tree_of_leaf_shardings_is_taken_as_it_is():
    q = dj.quantize(tools.normal("x", (128, 64)), tools.quantizer("nvfp4"))
    with meshes.mesh_of(AxisType.Auto) as mesh:
        leaves = dj.leaf_shardings(q, NamedSharding(mesh, P("d"), memory_kind="device"))
        assert leaves.rowwise_data.memory_kind == "device"
        assert dj.leaf_shardings(q, leaves).rowwise_scale_inv == leaves.rowwise_scale_inv


def test_what_cannot_be_placed():
    q = dj.quantize(tools.normal("x", (64, 64)), tools.quantizer("mxfp8_e4m3"))
    folded = dj.quantize(tools.normal("x", (4, 32, 64)), tools.quantizer("mxfp8_e4m3"))
    with meshes.mesh_of(AxisType.Auto) as mesh:
        for spec in (P("d"), P(None, "d")):  # 16 of 64 rows: the columnwise copy has blocks of 32
            with pytest.raises(ShapeError, match=r"leaf_shardings: .*cut 64 .*whole blocks of 32.*multiple of 128"):
                dj.device_put(q, NamedSharding(mesh, spec))
        with pytest.raises(ShapeError, match=r"has 3 dimensions, and QuantizedArray.* has 2"):
            dj.leaf_shardings(q, NamedSharding(mesh, P(None, None, "d")))
        with pytest.raises(UnsupportedError, match="dimension 1 of operand 0 is cut over"):
            dj.leaf_shardings(folded, NamedSharding(mesh, P(None, "t")))
        with pytest.raises(ArgumentError, match="without unconstrained dimensions"):
            dj.leaf_shardings(q, NamedSharding(mesh, P(P.UNCONSTRAINED)))
    with pytest.raises(ArgumentError, match=r"a mesh that jax\.set_mesh sets"):
        dj.leaf_shardings(q, P("d"))


# --- layers that read placed kernels ---

LAYOUTS = {  # specs of x, the kernel and dy; whether dx and dkernel have the bits of one device; what is gathered
    "FSDP": (P("d"), P("d"), P("d"), "y dx"),
    "TP columns": (P(), P("t"), P(None, "t"), "y dkernel"),
    "TP rows": (P(None, "t"), P(None, "t"), P(), "dx dkernel"),
}


@meshes.AXES
@pytest.mark.parametrize("layout", LAYOUTS)
@RECIPE
def test_dense_with_a_placed_kernel(recipe, layout, kind):
    """Held quantized, its gradient goes to main_grad. Only payloads and scales are gathered, and only by FSDP."""
    of_x, of_kernel, of_dy, exact = LAYOUTS[layout]
    x, dy = tools.normal("x", (512, 512), "bfloat16"), tools.normal("dy", (512, 512), "bfloat16")
    (q,) = dj.quantize_params([tools.normal("kernel", (512, 512)) / 16], recipe, lambda *_: True)
    main = jnp.zeros((512, 512))

    def step(x, q, main, dy):
        y, vjp = jax.vjp(lambda x, main: dj.dense(x, q, recipe=recipe, main_grad=main), x, main)
        return dict(zip(("y", "dx", "dkernel"), (y, *vjp(dy)), strict=True))

    want = jax.jit(step)(x, q, main, dy)
    with meshes.mesh_of(kind) as mesh:
        of = [NamedSharding(mesh, s) for s in (of_x, of_kernel, of_kernel, of_dy)]
        placed = [dj.device_put(v, s) for v, s in zip((x, q, main, dy), of, strict=True)]
        compiled = jax.jit(step, in_shardings=tuple(map(dj.leaf_shardings, placed, of))).lower(*placed).compile()
        got, text = compiled(*placed), compiled.as_text()
    for name in exact.split():
        meshes.same(got[name], want[name], name)
    for name, w in want.items():  # sums that are cut are added in another order
        a, b = (jax.device_get(v).astype("float32") for v in (got[name], w))
        assert abs(a - b).max() <= 2.0**-7 * abs(b).max(), name
    gathered = re.findall(r"(\w+)\[([\d,]*)\]\S* all-gather\(", text)
    assert gathered.count(("u16", "512,512")) == (layout != "FSDP"), gathered  # y or dx: a sum in bfloat16
    gathered = [g for g in gathered if g[0] != "u16"]
    assert bool(gathered) == (layout == "FSDP"), gathered
    payloads = [size for dtype, size in gathered if dtype in ("u8", "f8e4m3fn") and size == "512,512"]
    assert all(dtype in ("u8", "f8e4m3fn", "f8e8m0fnu", "f8e4m3") or size != "512,512" for dtype, size in gathered)
    packed = recipe.quantizer(dj.QuantizerRole(tensor="weight")).format.pack == 2
    assert not gathered or packed or len(payloads) == 2, gathered  # forward and backward
