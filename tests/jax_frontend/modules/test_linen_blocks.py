"""Modules for linen of several ops against the functions that they wrap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import diptych.jax as dj
from diptych.common import RECIPES, UnsupportedError
from jax_frontend import tools

nn = pytest.importorskip("flax.linen")
import diptych.jax.linen as dl  # noqa: E402
from jax_frontend.modules.test_linen import BITS, DELAYED, KEY, NVFP4, X, compare, loss_of  # noqa: E402

pytestmark = pytest.mark.sampled

OFFSETS = jnp.asarray([0, 32, 64], jnp.int32)
NORM = {"eps": 1e-6, "normalization": "RMSNorm", "zero_centered_gamma": True}


def layernorm_dense(p, **options):
    y = dj.layernorm_dense(
        X, p["scale"], p["ln_bias"], p["kernel"].reshape(64, 64).T, p["bias"].reshape(64), eps=1e-6, **options
    )
    return y.reshape(2, 32, 2, 32)


def layernorm_mlp(p, **options):
    if "state" not in options:
        options["state"] = None
    wi = p["wi_kernel"].reshape(64, 192).T
    return dj.layernorm_mlp(
        X, p["scale"], None, wi, None, p["wo_kernel"].T, None, activation="swiglu", **NORM, **options
    )


def grouped(p, **options):
    x = X.reshape(64, 64)
    return dj.grouped_dense(x, p["kernel"].transpose(0, 2, 1), p["bias"], OFFSETS, align=32, **options)


MLP = {
    "intermediate_dim": 96,
    "activations": ("silu", "linear"),
    "layernorm_type": "rmsnorm",
    "zero_centered_gamma": True,
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("kind", ["layernorm_dense", "layernorm_mlp"])
def test_modules_are_the_functions(kind, recipe):
    if kind == "layernorm_dense":
        model, function = dl.LayerNormDenseGeneral((2, 32), use_bias=True, recipe=recipe), layernorm_dense
    else:
        model, function = dl.LayerNormMLP(recipe=recipe, **MLP), layernorm_mlp
    compare(model, model.init(KEY, X), X, function)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_grouped_linear_is_the_function(recipe):
    x = X.reshape(64, 64)

    class Model(dl.GroupedLinear):  # knows its offsets
        @nn.compact
        def __call__(self, x):
            return dl.GroupedLinear.__call__(self, x, OFFSETS, align=32)

    model = Model(2, 32, recipe=recipe)
    compare(model, model.init(KEY, x), x, grouped)


def test_initial_values_and_names():
    params = dl.LayerNormMLP(recipe=None, use_bias=True, **MLP | {"layernorm_type": "layernorm"}).init(KEY, X)["params"]
    assert {name: v.shape for name, v in params.items()} == {
        "scale": (64,), "ln_bias": (64,), "wi_kernel": (64, 2, 96), "wi_bias": (2, 96), "wo_kernel": (96, 64),
        "wo_bias": (64,),
    }  # fmt: skip
    assert not params["scale"].any()  # zero_centered_gamma
    assert 0.8 < float(params["wi_kernel"].std()) * 8 < 1.2  # 1 / sqrt(64), however the kernel is shaped
    stack = dl.GroupedLinear(8, 64, recipe=None).init(KEY, X, jnp.arange(9, dtype=jnp.int32))["params"]["kernel"]
    assert 0.8 < float(stack.std()) * 8 < 1.2
    for activations in ("qgelu", "quick_gelu", ("quick_gelu",)):
        got = dl.LayerNormMLP(intermediate_dim=64, activations=activations, recipe=None)
        tools.same(got.apply({"params": got.init(KEY, X)["params"]}, X), dl.LayerNormMLP(
            intermediate_dim=64, activations="qgelu", recipe=None
        ).apply(got.init(KEY, X), X))  # fmt: skip
    names = {"kernel_axes_1": ("embed", "act", "mlp"), "kernel_axes_2": ("mlp", "embed"), "scale_axes": ("embed",)}
    spec = nn.get_partition_spec(dl.LayerNormMLP(recipe=DELAYED, **MLP, **names).init(KEY, X))["params"]
    assert [tuple(spec[n]) for n in ("wi_kernel", "wo_kernel", "scale")] == [names[n] for n in names]


def test_names_and_defaults_are_those_of_transformer_engine():
    """Arguments have the defaults of TransformerEngine's transformer_engine/jax/flax/module.py (August 2026), except
    for the differences that docs/jax.md lists."""
    norm = {"layernorm_type": "layernorm", "epsilon": 1e-6, "zero_centered_gamma": False, "scale_init": None,
            "use_bias": False}  # fmt: skip
    wanted = {
        dl.DenseGeneral: {"kernel_axes": (), "use_bias": True, "bias_axes": (), "axis": -1},
        dl.LayerNormDenseGeneral: norm | {"kernel_axes": (), "bias_axes": (), "return_layernorm_output": False},
        dl.LayerNormMLP: norm | {"intermediate_dim": 2048, "activations": ("gelu",)},
    }
    for module, defaults in wanted.items():
        fields = module.__dataclass_fields__
        assert {name: fields[name].default for name in defaults} == defaults
    given = {"intermediate_dim": 64, "recipe": None}
    want = dl.LayerNormMLP(activations="swiglu", layernorm_type="rmsnorm", **given)
    variables = want.init(KEY, X)
    for activations, norm_type in ((("linear", "silu"), "rms_norm"), (("SiLU", "linear"), "RMSNorm")):
        model = dl.LayerNormMLP(activations=activations, layernorm_type=norm_type, **given)
        tools.same(model.apply(variables, X), want.apply(variables, X))


def test_the_norms_output_is_returned_on_request():
    model = dl.LayerNormDenseGeneral(32, recipe=dj.MXFP8BlockScaling(), return_layernorm_output=True)
    variables = model.init(KEY, X)
    y, z = model.apply(variables, X)
    assert (y.shape, z.shape) == ((2, 32, 32), X.shape)
    tools.same(y, dl.LayerNormDenseGeneral(32, recipe=dj.MXFP8BlockScaling()).apply(variables, X))


@pytest.mark.parametrize(
    "recipe", [None, dj.MXFP8BlockScaling(), DELAYED, NVFP4], ids=["plain", "mxfp8", "delayed", "nvfp4"]
)
def test_a_mixture_of_experts_sums_its_experts(recipe):
    model = dl.MoE(4, 96, recipe=recipe)
    variables = model.init(KEY, X)
    grads = jax.jit(jax.grad(lambda v: jnp.square(model.apply(v, X, **BITS)[0]).mean()))(variables)
    assert jax.tree.structure(dl.update_states(variables, grads)) == jax.tree.structure(variables)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads["params"]))
    y, balance = model.apply(variables, X)
    assert (y.shape, balance.shape) == (X.shape, ()) and float(balance) >= 0.9
    if recipe is None:
        x, p = X.reshape(-1, 64).astype(jnp.float32), variables["params"]
        probs = jax.nn.softmax(x @ p["router"]["kernel"])
        top, experts = jax.lax.top_k(probs, 2)
        weights = (jax.nn.one_hot(experts, 4) * (top / top.sum(-1, keepdims=True))[..., None]).sum(1)
        a, b = jnp.split(jnp.einsum("td,edh->teh", x, p["wi"]["kernel"]), 2, axis=-1)
        want = jnp.einsum("teh,ehd,te->td", jax.nn.silu(a) * b, p["wo"]["kernel"], weights).reshape(X.shape)
        assert jnp.allclose(model.apply(variables, X.astype(jnp.float32))[0], want, atol=1e-4)


def test_misuse_is_named():
    for options, word in (
        ({"activations": "nonsense"}, "activation"), ({"activations": ("linear", "linear")}, "activations must be"),
        ({"layernorm_type": "nonsense"}, "layernorm_type"), ({"activations": (jax.nn.silu,)}, "activation"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            dl.LayerNormMLP(recipe=None, **options).init(KEY, X)
    model = dl.LayerNormMLP(intermediate_dim=64, recipe=dj.MXFP8BlockScaling())
    held = dj.quantize_params(model.init(KEY, X), model.recipe, lambda path, _: path == "params.wo_kernel")
    with pytest.raises(UnsupportedError, match="held in high precision"):
        loss_of(model, held, X)
