"""Kernels of linen modules that are held quantized, in a collection beside the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych.common import CustomRecipe, MXFP8Quantizer, UnsupportedError
from diptych.jax.tensors.quantized import QuantizedArray, QuantizedStack
from jax_frontend import tools

nn = pytest.importorskip("flax.linen")
from flax import traverse_util  # noqa: E402

import diptych.jax.linen as dl  # noqa: E402

pytestmark = pytest.mark.sampled

X, KEY = tools.normal("x", (2, 32, 64), "bfloat16"), jax.random.key(0)
ROWS, OFFSETS = X.reshape(64, 64), np.array([0, 32, 64], np.int32)
MODULES = {  # module, its input and other arguments of a call
    "dense": (lambda r: dl.Dense(32, kernel_axes=("embed", "mlp"), recipe=r), (X,)),
    "heads": (lambda r: dl.DenseGeneral((2, 32), recipe=r), (X,)),
    "two axes": (lambda r: dl.DenseGeneral(64, axis=(0, 2), recipe=r), (X,)),
    "einsum": (lambda r: dl.Einsum((2, 64, 32), "btd, hdk -> hbtk", recipe=r), (X,)),
    "norm": (lambda r: dl.LayerNormDenseGeneral((2, 32), recipe=r), (X,)),
    "mlp": (lambda r: dl.LayerNormMLP(96, activations="swiglu", use_bias=True, recipe=r), (X,)),
    "grouped": (lambda r: dl.GroupedLinear(2, 32, recipe=r), (ROWS, OFFSETS)),
    "experts": (lambda r: dl.MoE(4, 96, recipe=r), (X,)),
}  # fmt: skip


def run(model, variables, x, *args):
    """y, and dx."""

    def f(x):
        y = model.apply(variables, x, *args)
        return jnp.square(jax.tree.leaves(y)[0]).mean(), y

    dx, y = jax.jit(jax.grad(f, has_aux=True))(x)
    return y, dx


@pytest.mark.parametrize(
    "recipe",
    (dj.MXFP8BlockScaling(), pytest.param(dj.Float8BlockScaling(), marks=pytest.mark.slow)),
    ids=("mxfp8", "blocks"),
)
@pytest.mark.parametrize("kind", MODULES)
def test_they_have_the_bits_of_kernels_quantized_in_each_call(kind, recipe):
    make, args = MODULES[kind]
    model = make(recipe)
    variables = model.init(KEY, *args)
    held = dl.hold_kernels(model, variables, *args)
    found = jax.tree.leaves(held[dl.HELD], is_leaf=lambda x: isinstance(x, QuantizedArray | QuantizedStack))
    assert len(found) == (2 if kind in ("mlp", "experts") else 1)
    left = [path for path in traverse_util.flatten_dict(held["params"]) if "kernel" in path[-1]]
    assert left == ([("router", "kernel")] if kind == "experts" else [])
    tools.same_tree(run(model, held, *args), run(model, variables, *args))
    tools.same_tree(dl.hold_kernels(model, held, *args), held)


def test_the_recipe_chooses_by_role_and_layers_may_be_stacked():
    """Each module's role, in a stack of blocks, of which the recipe quantizes the kernels of one linear layer."""

    def factory(role):
        fits = role.name.endswith(".fc1") and role.module == "layernorm_mlp"
        return MXFP8Quantizer() if fits else None

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = dl.LayerNormMLP(96, recipe=CustomRecipe(factory), name="mlp")(x)
            return y + dl.Dense(64, recipe=CustomRecipe(factory))(x), None

    def stacked(**axes):
        axes = {"params": 0, **axes}
        return nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)()

    model = stacked(**{dl.HELD: 0})
    variables = model.init(KEY, X, None)
    held = dl.hold_kernels(model, variables, X, None)
    assert dl.HELD not in variables and list(held[dl.HELD]) == ["mlp"] and list(held[dl.HELD]["mlp"]) == ["wi_kernel"]
    assert held[dl.HELD]["mlp"]["wi_kernel"].shape == (3, 96, 64)
    assert "wo_kernel" in held["params"]["mlp"] and "wi_kernel" not in held["params"]["mlp"]
    tools.same_tree(model.apply(held, X, None), model.apply(variables, X, None))
    with pytest.raises(ValueError, match="no diptych module"):  # the scan does not hand the collection on
        dl.hold_kernels(stacked(), variables, X, None)


def test_what_cannot_be_held_is_named():
    recipe = dj.MXFP8BlockScaling()
    for model in (
        dl.DenseGeneral(32, batch_dims=(0,), recipe=recipe),
        dl.Einsum((64, 32, 2), "btd,dkb->tkb", recipe=recipe),
    ):
        with pytest.raises(UnsupportedError, match="batch axes"):
            dl.hold_kernels(model, model.init(KEY, X), X)
    for model in (nn.Dense(32), dl.Dense(32, recipe=None)):
        with pytest.raises(ValueError, match="no diptych module"):
            dl.hold_kernels(model, model.init(KEY, X), X)
    model = dl.Dense(64, recipe=recipe)
    params = dj.quantize_params(model.init(KEY, X), recipe, lambda path, _: path == "params.kernel")
    with pytest.raises(UnsupportedError, match=r"held in high precision.*hold_kernels"):
        model.apply(params, X)
