"""orbax's checkpoints of quantized arrays, stacks, states and random bits: saved on one mesh, restored on another."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common import RECIPES, CheckpointError
from jax_frontend import meshes, tools

ocp = pytest.importorskip("orbax.checkpoint")
nnx = pytest.importorskip("flax.nnx")
import diptych.jax.nnx as dnnx  # noqa: E402

pytestmark = pytest.mark.sampled
X = tools.normal("orbax", (512, 512))


def tree_of(recipe: Any, as_bytes: bool = True) -> dict[str, Any]:
    quantizer = dj.kernel_quantizer(recipe)
    layer = dnnx.LayerNormMLP(32, 32, recipe=recipe, rngs=nnx.Rngs(0))
    return {
        "kernel": dj.quantize(X, quantizer, as_bytes=as_bytes), "stack": dj.quantize_stack(X[None], quantizer),
        "plain": X, "layer": nnx.state(layer), "states": dj.init_state(recipe), "rng": dj.rng_state(3),
    }  # fmt: skip


def placed(tree: Any, mesh: Any) -> Any:
    """The tree's forms with shardings: columns of matrices and stacks are cut, all else is replicated."""
    how = {"kernel": P(None, "d"), "stack": P(None, None, "d"), "plain": P(None, "d")}
    shardings = dj.leaf_shardings(tree, {name: NamedSharding(mesh, how.get(name, P())) for name in tree})
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


@pytest.mark.parametrize("as_bytes", (True, False), ids=("bytes", "elements"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_another_mesh_restores_the_same_bits(recipe, as_bytes, tmp_path):
    tree = tree_of(RECIPES[recipe], as_bytes)
    devices = jax.devices("cpu")
    four, two = (jax.make_mesh((n,), ("d",), axis_types=(AxisType.Auto,), devices=devices[:n]) for n in (4, 2))
    cut = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), tree, placed(tree, four))
    assert cut["kernel"].rowwise_data.addressable_shards[0].data.size * 4 == cut["kernel"].rowwise_data.size
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", cut)
    target = placed(tree, two)
    dj.check_quantizers(target, json.loads(json.dumps(dj.quantizers_of(cut))))
    with ocp.StandardCheckpointer() as checkpointer:
        back = checkpointer.restore(tmp_path / "saved", target)
    meshes.same(back, tree)
    for x, to in zip(jax.tree.leaves(back), jax.tree.leaves(target), strict=True):
        assert x.sharding == to.sharding and x.dtype == to.dtype


def test_quantizers_are_compared():
    """Bytes of another element, or of square blocks, have the same shapes and dtypes."""
    one = {"w": dj.quantize(jnp.ones((128, 128)), dj.kernel_quantizer(RECIPES["mxfp8"]), as_bytes=True)}
    two = {"w": dj.quantize(jnp.ones((128, 128)), dj.kernel_quantizer(RECIPES["mxfp8-2d"]), as_bytes=True)}
    assert [x.shape for x in jax.tree.leaves(one)] == [x.shape for x in jax.tree.leaves(two)]
    dj.check_quantizers(jax.eval_shape(lambda: one), dj.quantizers_of(one))
    with pytest.raises(CheckpointError, match=r"\['w'\]: the checkpoint's is .*MXFP8Quantizer.*, the target's"):
        dj.check_quantizers(one, dj.quantizers_of(two))
    states = dj.init_state(RECIPES["fp8-delayed"]), dj.init_state(dj.DelayedScaling(margin=1))
    with pytest.raises(CheckpointError, match=r"\['grad_output'\]: the checkpoint's"):
        dj.check_quantizers(states[0], dj.quantizers_of(states[1]))
    for other in ({}, None, dj.quantizers_of({"v": one["w"]})):
        with pytest.raises(CheckpointError, match=r"the target of \[.*'w'"):
            dj.check_quantizers(one, other)
