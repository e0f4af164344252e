"""Real modules of diptych.torch, through a safetensors file, in those of linen, nnx and equinox, and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from sweeps import others_slow

import diptych.jax as dj
from diptych.common import RECIPES, CheckpointError, UnsupportedError
from jax_frontend import tools

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("flax")
eqx = pytest.importorskip("equinox")
import safetensors.numpy  # noqa: E402
import safetensors.torch  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

import diptych.jax.equinox as dx  # noqa: E402
import diptych.jax.linen as dl  # noqa: E402
import diptych.jax.nnx as dnnx  # noqa: E402
import diptych.torch as dt  # noqa: E402
from diptych.jax.tensors.quantized import BUFFERS  # noqa: E402
from diptych.torch.tensors.quantized import QuantizedTensorBase  # noqa: E402

pytestmark = pytest.mark.sampled

K, N, G, ROWS = 128, 256, 3, 128
OFFSETS = np.array([0, 32, 32, ROWS], np.int32)  # the second group is empty
X = np.random.default_rng(0).standard_normal((ROWS, K)).astype(ml_dtypes.bfloat16)
RMS = {"normalization": "RMSNorm", "zero_centered_gamma": True}
TE_RMS = {"layernorm_type": "rmsnorm", "zero_centered_gamma": True}  # linen has TransformerEngine's arguments


class Kind(NamedTuple):
    """One layer in all frameworks; those of JAX are made from a recipe."""

    torch: Callable[[], Any]
    nnx: Callable[..., Any]
    linen: Callable[..., Any]
    equinox: Callable[..., Any] | None = None
    grouped: bool = False


def equinox_linear(bias: bool) -> Callable[..., Any]:
    return lambda r: dx.Linear(K, N, use_bias=bias, recipe=r, key=jax.random.key(0))


KINDS = {
    "linear": Kind(
        lambda: dt.Linear(K, N), lambda **o: dnnx.Linear(K, N, **o), lambda r: dl.Dense(N, recipe=r),
        equinox_linear(True),
    ),
    "linear without bias": Kind(
        lambda: dt.Linear(K, N, bias=False), lambda **o: dnnx.Linear(K, N, use_bias=False, **o),
        lambda r: dl.Dense(N, use_bias=False, recipe=r), equinox_linear(False),
    ),
    "heads": Kind(
        lambda: dt.Linear(K, N), lambda **o: dnnx.LinearGeneral(K, (4, N // 4), **o),
        lambda r: dl.DenseGeneral((4, N // 4), recipe=r),
    ),
    "norm and linear": Kind(
        lambda: dt.LayerNormLinear(K, N), lambda **o: dnnx.LayerNormLinear(K, N, **o),
        lambda r: dl.LayerNormDenseGeneral(N, epsilon=1e-5, use_bias=True, recipe=r),
    ),
    "rms norm and heads": Kind(
        lambda: dt.LayerNormLinear(K, N, bias=False, **RMS),
        lambda **o: dnnx.LayerNormLinear(K, N, use_bias=False, **RMS, **o),
        lambda r: dl.LayerNormDenseGeneral((2, 2, N // 4), epsilon=1e-5, recipe=r, **TE_RMS),
    ),
    "mlp": Kind(
        lambda: dt.LayerNormMLP(K, N), lambda **o: dnnx.LayerNormMLP(K, N, **o),
        lambda r: dl.LayerNormMLP(N, epsilon=1e-5, use_bias=True, recipe=r),
    ),
    "gated mlp": Kind(
        lambda: dt.LayerNormMLP(K, N, activation="swiglu", **RMS),
        lambda **o: dnnx.LayerNormMLP(K, N, activation="swiglu", **RMS, **o),
        lambda r: dl.LayerNormMLP(N, activations=("silu", "linear"), epsilon=1e-5, use_bias=True, recipe=r, **TE_RMS),
    ),
    "grouped": Kind(
        lambda: dt.GroupedLinear(G, K, N), lambda **o: dnnx.GroupedLinear(G, K, N, **o),
        lambda r: dl.GroupedLinear(G, N, recipe=r), grouped=True,
    ),
}  # fmt: skip
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
RECIPE = pytest.mark.parametrize("recipe", others_slow(RECIPES, ("fp8-delayed", "mxfp8", "nvfp4")))


class Theirs:
    """A torch module whose parameters are random and whose states have seen data, and its file."""

    def __init__(self, kind: Kind, recipe: Any, path: Any, held: bool = False) -> None:
        torch.manual_seed(0)
        self.kind, self.recipe, self.held = kind, recipe, held
        self.module = self.make()
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                if "norm" in name or "bias" in name:
                    p.add_(torch.randn(p.shape) / 4)
        for scale in (1, 2):
            self(scale).float().square().sum().backward()
        safetensors.torch.save_file(dt.plain_state_dict(self.module), path)
        self.tensors = dj.read_safetensors(path)

    def make(self) -> Any:
        with dt.quantized_model_init(recipe=self.recipe) if self.held else contextlib.nullcontext():
            return self.kind.torch()

    def __call__(self, scale: float = 1) -> Any:
        x = torch.from_numpy(X.astype(np.float32)).bfloat16() * scale
        given = {"offsets": torch.from_numpy(OFFSETS), "align": 32} if self.kind.grouped else {}
        with dt.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.module(x, **given)

    def check(self, y: Any) -> None:
        """Compares a result with that of the module."""
        with torch.no_grad():
            want = self().float().numpy()
        assert np.array_equal(np.asarray(y, np.float32).reshape(want.shape), want)

    def check_back(self, back: dict[str, Any], path: Any, keeps_random: bool = True) -> None:
        """Compares a state dict with the file's, and loads it into another torch module."""
        want = {name: t for name, t in self.tensors.items() if keeps_random or not name.endswith("rng_state")}
        tools.same_tree(back, want)
        safetensors.numpy.save_file(back, path)
        again = self.make()
        again.load_state_dict(safetensors.torch.load_file(path))
        for name, t in dt.plain_state_dict(again).items():
            if keeps_random or not name.endswith("rng_state"):  # which is a new one
                want = back.pop(name).view(np.uint8)
                assert np.array_equal(t.contiguous().view(torch.uint8).numpy(), want), name
        assert not back


def raw(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


def call(kind: Kind, f: Any, *args: Any) -> Any:
    return f(*args, jnp.asarray(X), *([OFFSETS] if kind.grouped else []), **({"align": 32} if kind.grouped else {}))


@RECIPE
@KIND
def test_nnx(kind, recipe, tmp_path):
    theirs = Theirs(kind, RECIPES[recipe], tmp_path / "file")
    model = kind.nnx(recipe=RECIPES[recipe], rngs=nnx.Rngs(1))
    nnx.update(model, dj.load_torch(nnx.state(model), theirs.tensors))
    back = dj.to_torch(nnx.state(model), like=theirs.tensors)
    theirs.check(call(kind, model))
    theirs.check_back(back, tmp_path / "back")


@RECIPE
@KIND
def test_linen(kind, recipe, tmp_path):
    theirs = Theirs(kind, RECIPES[recipe], tmp_path / "file")
    model = kind.linen(RECIPES[recipe])
    target = jax.eval_shape(lambda: call(kind, model.init, jax.random.key(1)))
    variables = dj.load_torch(target, theirs.tensors)
    theirs.check(call(kind, model.apply, variables))
    back = dj.to_torch(variables, like=theirs.tensors)
    theirs.check_back(back, tmp_path / "back", keeps_random=False)


@RECIPE
@pytest.mark.parametrize(
    "kind", [k for k in KINDS.values() if k.equinox], ids=[n for n, k in KINDS.items() if k.equinox]
)
def test_equinox(kind, recipe, tmp_path):
    theirs = Theirs(kind, RECIPES[recipe], tmp_path / "file")
    model = dj.load_torch(kind.equinox(RECIPES[recipe]), theirs.tensors)
    theirs.check(call(kind, model))
    theirs.check_back(dj.to_torch(model), tmp_path / "back", keeps_random=False)


@RECIPE
def test_a_perceptron_of_equinox(recipe, tmp_path):
    recipe = RECIPES[recipe]
    layers = Kind(lambda: torch.nn.Sequential(dt.Linear(K, N), torch.nn.ReLU(), dt.Linear(N, K)), Any, Any)
    theirs = Theirs(layers, recipe, tmp_path / "file")
    model = dx.MLP(K, K, N, 1, recipe=recipe, key=jax.random.key(0))
    named = {"rename": lambda place: {"layers.0": "0", "layers.1": "2"}[place]}
    model = dj.load_torch(model, theirs.tensors, **named)
    theirs.check(model(jnp.asarray(X)))
    theirs.check_back(dj.to_torch(model, **named), tmp_path / "back", keeps_random=False)


@RECIPE
def test_layers_of_flax_with_a_dot_general(recipe, tmp_path):
    """The states of the product, which is a module of its own in flax, belong to torch's linear layer."""
    kind, recipe = KINDS["linear without bias"], RECIPES[recipe]
    theirs = Theirs(kind, recipe, tmp_path / "file")
    named = {"rename": lambda place: place.removesuffix("dot_general").removesuffix("DotGeneral_0").strip(".")}
    product = dnnx.DotGeneral(recipe, rngs=nnx.Rngs(2))
    model = nnx.Linear(K, N, use_bias=False, dot_general=product, rngs=nnx.Rngs(1))
    nnx.update(model, dj.load_torch(nnx.state(model), theirs.tensors, **named))
    back = dj.to_torch(nnx.state(model), **named)
    layer = nn.Dense(N, use_bias=False, dot_general=dl.DotGeneral(recipe=recipe))
    target = jax.eval_shape(lambda: layer.init(jax.random.key(1), jnp.asarray(X)))
    variables = dj.load_torch(target, theirs.tensors, **named)
    if not isinstance(recipe, dj.NVFP4BlockScaling):  # which refuses float32, to which flax promotes x
        for y in (model(jnp.asarray(X)), layer.apply(variables, jnp.asarray(X))):
            theirs.check(y.astype(jnp.bfloat16))
    theirs.check_back(back, tmp_path / "back")
    theirs.check_back(dj.to_torch(variables, **named), tmp_path / "back", keeps_random=False)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_norms(dtype, tmp_path):
    """Parameters of torch's norms in those of the frameworks, which have the names of a norm without a linear layer."""
    norms = {"norm": torch.nn.LayerNorm(K), "rms": torch.nn.RMSNorm(K)}
    model = torch.nn.ModuleDict(norms).to(getattr(torch, dtype))
    for p in model.parameters():
        torch.nn.init.normal_(p)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "file")
    tensors = dj.read_safetensors(tmp_path / "file")
    given, x = {"param_dtype": dtype}, jnp.asarray(X)
    flax = {"norm": nn.LayerNorm(**given), "rms": nn.RMSNorm(**given)}
    targets = {
        "nnx": nnx.state(nnx.Dict(norm=nnx.LayerNorm(K, rngs=nnx.Rngs(0), **given),
                                  rms=nnx.RMSNorm(K, rngs=nnx.Rngs(0), **given))),
        "linen": {"params": {name: m.init(jax.random.key(0), x)["params"] for name, m in flax.items()}},
        "equinox": {"norm": eqx.nn.LayerNorm(K, dtype=dtype), "rms": eqx.nn.RMSNorm(K, use_bias=False, dtype=dtype)},
    }  # fmt: skip
    for target in targets.values():
        loaded = dj.load_torch(target, tensors)
        tools.same_tree(dj.to_torch(loaded), tensors)
        leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(loaded) if eqx.is_array(leaf)]
        assert len(leaves) == len(tensors) and not any((leaf == leaf[0]).all() for leaf in leaves)


def check_kernels(theirs: Theirs, kernels: Callable[[str], Any]) -> None:
    """Compares both copies of kernels, of which the file may have one, with those of the torch module."""
    weights = {name: t for name, t in theirs.module.state_dict().items() if isinstance(t, QuantizedTensorBase)}
    assert weights
    for name, want in weights.items():
        kernel = kernels({"weight": "kernel", "fc1_weight": "wi_kernel", "fc2_weight": "wo_kernel"}[name])
        for part in BUFFERS:
            got, expected = getattr(kernel, part), getattr(want, part)
            assert (got is None) == (expected is None), (name, part)
            if got is not None:
                assert np.array_equal(raw(got).ravel(), raw(expected.contiguous().view(torch.uint8)).ravel()), part


@RECIPE
@KIND
def test_weights_that_torch_and_nnx_hold_quantized(kind, recipe, tmp_path):
    theirs = Theirs(kind, RECIPES[recipe], tmp_path / "file", held=True)
    model = kind.nnx(recipe=RECIPES[recipe], rngs=nnx.Rngs(1))
    dnnx.hold_kernels(model)
    nnx.update(model, dj.load_torch(nnx.state(model), theirs.tensors))
    back = dj.to_torch(nnx.state(model))
    check_kernels(theirs, lambda name: getattr(model, name).get_value())
    theirs.check(call(kind, model))
    theirs.check_back(back, tmp_path / "back")


@RECIPE
@KIND
def test_weights_that_torch_and_linen_hold_quantized(kind, recipe, tmp_path):
    theirs = Theirs(kind, RECIPES[recipe], tmp_path / "file", held=True)
    model = kind.linen(RECIPES[recipe])

    def make():
        variables = call(kind, model.init, jax.random.key(1))
        return call(kind, functools.partial(dl.hold_kernels, model, variables))

    variables = dj.load_torch(jax.eval_shape(make), theirs.tensors)
    check_kernels(theirs, lambda name: variables[dl.HELD][name])
    theirs.check(call(kind, model.apply, variables))
    theirs.check_back(dj.to_torch(variables), tmp_path / "back", keeps_random=False)


@RECIPE
def test_a_weight_that_equinox_holds_quantized(recipe, tmp_path):
    recipe = RECIPES[recipe]
    theirs = Theirs(KINDS["linear"], recipe, tmp_path / "file", held=True)
    model = dj.quantize_params(equinox_linear(True)(recipe), recipe, lambda path, leaf: path == "weight")
    model = dj.load_torch(model, theirs.tensors)
    theirs.check(model(jnp.asarray(X)))
    theirs.check_back(dj.to_torch(model), tmp_path / "back", keeps_random=False)


def test_shapes_tell_inputs_from_outputs():
    """A kernel of several axes is taken apart by the weight's shape, and back only where the shape is given."""
    weight = np.arange(24, dtype=np.float32).reshape(6, 4)
    tree = {"kernel": jnp.zeros((2, 2, 3, 2)), "bias": jnp.zeros((3, 2))}
    got = dj.load_torch(tree, {"weight": weight, "bias": weight[:, 0]})
    assert np.array_equal(np.einsum("abcd->cdab", got["kernel"]).reshape(6, 4), weight)
    assert np.array_equal(got["bias"], weight[:, 0].reshape(3, 2))
    for like in ({"weight": (6, 4), "bias": [6]}, {"weight": weight, "bias": weight[:, 0]}):
        back = dj.to_torch(got, like=like)
        assert np.array_equal(back["weight"], weight) and np.array_equal(back["bias"], weight[:, 0])
    stack = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    got = dj.load_torch({"kernel": jnp.zeros((2, 2, 2, 3))}, {"weight": stack})
    assert np.array_equal(np.einsum("abco->aboc", got["kernel"]).reshape(4, 3, 2), stack)
    assert np.array_equal(dj.to_torch(got, like={"weight": stack.shape})["weight"], stack)
    with pytest.raises(UnsupportedError, match=r"weight: a kernel \[2, 2, 2, 3\] does not tell .*like="):
        dj.to_torch(got)
    for tensors in ({"weight": weight.T}, {"weight": weight.reshape(3, 8)}, {"weight": weight.reshape(-1)}):
        with pytest.raises(CheckpointError, match=r"weight is .* in the checkpoint, and the kernel here"):
            dj.load_torch({"kernel": jnp.zeros((2, 2, 3, 2))}, tensors)
        with pytest.raises(CheckpointError, match=r"weight is .* in the checkpoint, and the kernel here"):
            dj.to_torch({"kernel": jnp.zeros((2, 2, 3, 2))}, like=tensors)
    with pytest.raises(CheckpointError, match=r"bias is \[4\] in the checkpoint, and \[6\] here"):
        dj.to_torch({"bias": jnp.zeros(6)}, like={"bias": (4,)})
