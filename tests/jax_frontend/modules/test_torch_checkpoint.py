"""Checkpoints of diptych.torch in JAX's trees, and back: the same bits of weights, states and results."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common import RECIPES, CheckpointError
from jax_frontend import meshes, tools

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
nnx = pytest.importorskip("flax.nnx")
import safetensors.numpy  # noqa: E402
import safetensors.torch  # noqa: E402

import diptych.jax.nnx as dnnx  # noqa: E402
import diptych.torch as dt  # noqa: E402
from diptych.torch.modules.held_state import plain_state_dict  # noqa: E402

pytestmark = pytest.mark.sampled
EVERY = pytest.mark.parametrize("recipe", RECIPES)
X = np.random.default_rng(0).standard_normal((128, 128)).astype(ml_dtypes.bfloat16)


def torch_model(recipe: Any, held: bool = False) -> Any:
    """A linear layer, a norm with one, a perceptron and a plain norm, whose states have seen data."""
    torch.manual_seed(0)
    with dt.quantized_model_init(recipe=recipe) if held else contextlib.nullcontext():
        model = torch.nn.ModuleDict({
            "fc": dt.Linear(128, 256, bias=False), "normed": dt.LayerNormLinear(128, 384),
            "mlp": dt.LayerNormMLP(128, 256, activation="swiglu", normalization="RMSNorm"),
            "norm": torch.nn.LayerNorm(128),
        })  # fmt: skip
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and p.dim() == 1:
                p.add_(torch.randn(p.shape) / 4)
    for scale in (1, 2):
        results(model, recipe, scale, train=True)
    return model


def results(model: Any, recipe: Any, scale: float = 1, train: bool = False) -> dict[str, np.ndarray]:
    x = torch.from_numpy(X.astype(np.float32)).bfloat16() * scale
    with dt.autocast(recipe=recipe), contextlib.nullcontext() if train else torch.no_grad():
        out = {name: model[name](x) for name in ("fc", "normed", "mlp")}
    if train:
        sum(y.float().square().sum() for y in out.values()).backward()
    return {name: y.detach().float().numpy() for name, y in out.items()}


def saved(model: Any, path: Any) -> dict[str, np.ndarray]:
    safetensors.torch.save_file(plain_state_dict(model), path)
    return dj.read_safetensors(path)


def random(recipe: Any, kind: Any = lambda x: x) -> dict[str, Any]:
    """The random bits of a function's caller, by the name that modules give them."""
    return {"random": kind(dj.rng_state(0))} if isinstance(recipe, dj.NVFP4BlockScaling) else {}


class Model(nnx.Module):
    """nnx modules for the torch model, and parameters of functions where there is no module."""

    def __init__(self, recipe: Any) -> None:
        rngs = nnx.Rngs(1)
        self.fc = dnnx.Linear(128, 256, use_bias=False, recipe=recipe, rngs=rngs)
        self.normed = nnx.Dict(
            scale=nnx.Param(jnp.zeros(128)), ln_bias=nnx.Param(jnp.zeros(128)),
            kernel=nnx.Param(jnp.zeros((128, 384))), bias=nnx.Param(jnp.zeros(384)),
            states=dnnx.ScaleStates(dj.init_state(recipe)), **random(recipe, dnnx.RandomState),
        )  # fmt: skip
        given = {"activation": "swiglu", "normalization": "RMSNorm", "recipe": recipe, "rngs": rngs}
        self.mlp = dnnx.LayerNormMLP(128, 256, **given)
        self.norm = nnx.LayerNorm(128, rngs=rngs)


def run(model: Model, recipe: Any) -> dict[str, Any]:
    n, state = model.normed, {"state": model.normed.states.get_value()}
    y = dj.layernorm_dense(X, n.scale, n.ln_bias, n.kernel.get_value().T, n.bias, recipe=recipe, **state)
    return {"fc": model.fc(X), "normed": y, "mlp": model.mlp(X)}


@EVERY
def test_nnx_modules_compute_what_torch_does(recipe, tmp_path):
    recipe = RECIPES[recipe]
    theirs, model = torch_model(recipe), Model(recipe)
    tensors = saved(theirs, tmp_path / "file")
    state = dj.load_torch(nnx.state(model), tensors)
    nnx.update(model, state)
    want = results(theirs, recipe)
    for name, y in run(model, recipe).items():
        assert np.array_equal(np.asarray(y, np.float32), want[name]), name
    back = dj.to_torch(state)
    tools.same_tree(back, tensors)
    other = torch_model(recipe)
    for p in other.parameters():
        p.data.zero_()
    safetensors.numpy.save_file(back, tmp_path / "back")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "back"))
    again = results(other, recipe)
    assert all(np.array_equal(again[name], y) for name, y in want.items())


def held_params(recipe: Any) -> dict[str, Any]:
    """Parameters by torch's names, for `dense` and the like."""
    zeros = {
        "fc": {"weight": (256, 128)},
        "normed": {"layer_norm_weight": (128,), "layer_norm_bias": (128,), "weight": (384, 128), "bias": (384,)},
        "mlp": {"layer_norm_weight": (128,), "fc1_weight": (512, 128), "fc1_bias": (512,), "fc2_weight": (128, 256),
                "fc2_bias": (128,)},
        "norm": {"weight": (128,), "bias": (128,)},
    }  # fmt: skip
    params = jax.tree.map(jnp.zeros, zeros, is_leaf=lambda x: isinstance(x, tuple))
    params = dj.quantize_params(params, recipe, lambda path, leaf: leaf.ndim == 2)
    for name, states in (("fc", dj.init_state(recipe)), ("normed", dj.init_state(recipe)),
                         ("mlp", dj.init_layernorm_mlp_state(recipe))):  # fmt: skip
        params[name] |= {"states": states, **random(recipe)}
    return params


@EVERY
@pytest.mark.parametrize("as_bytes", (True, False), ids=("bytes", "elements"))
def test_kernels_that_are_held_quantized(recipe, as_bytes, tmp_path):
    recipe = RECIPES[recipe]
    theirs = torch_model(recipe, held=True)
    tensors, params = saved(theirs, tmp_path / "file"), held_params(recipe)
    if not as_bytes:
        kernel = params["fc"]["weight"]
        params["fc"]["weight"] = dj.quantize(jnp.zeros(kernel.shape), kernel.quantizer)
    params = dj.load_torch(params, tensors)
    want, x = results(theirs, recipe), jnp.asarray(X)
    fc, n, m = (params[name] for name in ("fc", "normed", "mlp"))
    got = {
        "fc": dj.dense(x, fc["weight"], recipe=recipe, state=fc["states"]),
        "normed": dj.layernorm_dense(
            x, n["layer_norm_weight"], n["layer_norm_bias"], n["weight"], n["bias"], recipe=recipe, state=n["states"]
        ),
        "mlp": dj.layernorm_mlp(
            x, m["layer_norm_weight"], None, m["fc1_weight"], m["fc1_bias"], m["fc2_weight"], m["fc2_bias"],
            recipe=recipe, activation="swiglu", normalization="RMSNorm", state=m["states"],
        ),
    }  # fmt: skip
    for name, y in got.items():
        assert np.array_equal(np.asarray(y, np.float32), want[name]), name
    for key, weight in (("fc.weight", fc["weight"]), ("mlp.fc2_weight", m["fc2_weight"])):
        copy = theirs.state_dict()[key]  # both copies, of which the file may have one
        for part in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            one, two = getattr(weight, part), getattr(copy, part)
            assert np.array_equal(np.asarray(one).view(np.uint8), two.view(torch.uint8).numpy()), (key, part)
    back = dj.to_torch(params)
    tools.same_tree(back, tensors)


def test_loaded_arrays_lie_as_the_targets_do(mesh):
    tree = {"plain": {"kernel": jnp.asarray(X, jnp.float32)}, "held": {}, "embed": {"embedding": jnp.ones((4, 3))}}
    tree["held"]["weight"] = dj.quantize(tree["plain"]["kernel"], dj.kernel_quantizer(RECIPES["mxfp8-2d"]))
    how = dj.leaf_shardings(tree, NamedSharding(mesh, P("i")))
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, how)
    tensors = dj.to_torch(tree)
    assert np.array_equal(tensors["plain.weight"], X.astype(np.float32).T) and "embed.weight" in tensors
    assert not [name for name in tensors if "columnwise" in name]
    got = dj.load_torch(target, tensors)
    meshes.same(got, tree)
    assert [x.sharding for x in jax.tree.leaves(got)] == jax.tree.leaves(how)


def test_linen_and_equinox_names():
    """Collections of linen's variables are left out; equinox's layers have torch's layout; a gate may be an axis."""
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    variables = {"params": {"a": {"kernel": jnp.zeros((3, 4))}, "n": {"scale": jnp.zeros(3), "bias": jnp.zeros(3)}}}
    mlp = {"scale": jnp.zeros(3), "wi_kernel": jnp.zeros((3, 2, 2)), "wi_bias": jnp.zeros((2, 2))}
    tensors = {"m.a.weight": w, "m.n.weight": w[0], "m.n.bias": w[1], "m.b.layer_norm_weight": w[2],
               "m.b.fc1_weight": w, "m.b.fc1_bias": w[:, 0]}  # fmt: skip
    variables["params"]["mlp"] = mlp
    states = dj.init_state(dj.DelayedScaling(amax_history_len=2))
    variables["_overwrite_with_gradient"] = {"a": {"states": states}}
    tensors |= dj.state_dict(states, "m.a.") | {"m.a.scale_states.weight.scale": np.full(1, 4, np.float32)}
    given = {"prefix": "m.", "rename": lambda place: {"mlp": "b"}.get(place, place)}
    got = dj.load_torch(variables, tensors, **given)
    assert np.array_equal(got["params"]["a"]["kernel"], w.T)
    assert np.array_equal(got["params"]["mlp"]["wi_kernel"][:, 1], w[2:].T)
    assert got["_overwrite_with_gradient"]["a"]["states"]["weight"].scale == 4
    back = dj.to_torch(got, **given)
    assert back.keys() == tensors.keys() and all(np.array_equal(back[name], t) for name, t in tensors.items())
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 4, 3, 0, use_final_bias=False, activation=lambda x: x, key=jax.random.key(0))
    loaded = dj.load_torch(model, {"layers.0.weight": w})
    assert np.array_equal(loaded.layers[0].weight, w) and loaded.activation is model.activation
    assert dj.to_torch(loaded).keys() == {"layers.0.weight"}


def test_what_does_not_fit_is_named(tmp_path):
    kernel = {"a": {"kernel": jnp.zeros((3, 4))}}
    w = np.zeros((4, 3), np.float32)
    for tensors, said in (
        ({}, "lacks a.weight"),
        ({"a.weight": w.T}, r"a.weight is \[3, 4\] in the checkpoint, and the kernel here \[3, 4\], inputs before"),
        ({"a.weight": w.astype(np.float16)}, "a.weight is float16 in the checkpoint and float32 here"),
        ({"a.weight": w, "a.weight_scale_inv": w}, "a.weight is quantized in the checkpoint and in high precision"),
    ):
        with pytest.raises(CheckpointError, match=said):
            dj.load_torch(kernel, tensors)
    mx, fp8 = (dj.kernel_quantizer(RECIPES[r]) for r in ("mxfp8", "fp8-current"))
    held = {name: {"weight": dj.quantize(jnp.ones((32, 32)), q)} for name, q in (("mx", mx), ("fp8", fp8))}
    with pytest.raises(CheckpointError, match="weight is held quantized here"):
        dj.load_torch(held["mx"], {"weight": w})
    with pytest.raises(CheckpointError, match=r"lacks weight_columnwise_data|another quantizer's"):
        dj.load_torch(held["mx"], dj.to_torch(held["fp8"]))
    whole = safetensors.numpy.save({"weight": w})
    for damaged in (b"", b"\x08" + bytes(7) + b"{}", json.dumps({"a": 1}).encode(), whole[:40], whole[:-1]):
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="or a damaged one"):
            dj.read_safetensors(tmp_path / "file")
