"""Files of an earlier version still load and give the bits that they gave: weights, modules, programs, JAX's values."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import diptych.jax as dj
import diptych.torch as dt
from diptych.common import RECIPES
from saved.make import SAVED, model, normal

FOLDER = Path(__file__).parent / "ff111d3"


def load(name: str, weights_only: bool = True) -> Any:
    return torch.load(FOLDER / name, weights_only=weights_only)


def result(net: torch.nn.Module, recipe: str) -> torch.Tensor:
    with torch.no_grad(), dt.autocast(recipe=SAVED[recipe]):
        return net.eval()(normal(32, 32))


@pytest.mark.parametrize("recipe", SAVED)
def test_modules_and_their_states(recipe):
    """Pickled whole, and as a state dict for a module that is made now."""
    want = load(f"result_{recipe}.pt")
    fresh = model(recipe)
    fresh.load_state_dict(load(f"states_{recipe}.pt"))
    for net in (fresh, load(f"module_{recipe}.pt", weights_only=False)):
        assert torch.equal(result(net, recipe), want)


@pytest.mark.parametrize("recipe", ("fp8-current", "mxfp8"))
def test_held_weights(recipe):
    values = load(f"held_values_{recipe}.pt")
    with dt.quantized_model_init(recipe=RECIPES[recipe]):
        fresh = dt.Linear(32, 32, dtype=torch.bfloat16)
    fresh.load_state_dict(load(f"held_{recipe}.pt"))
    held, groups = load(f"held_module_{recipe}.pt", weights_only=False)
    for layer in (fresh, held):
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, dt.QuantizedParameter)
        assert torch.equal(weight.dequantize(), values[0]) and torch.equal(bias, values[1])
    assert isinstance(groups.weight, dt.QuantizedParameter) and groups.weight.shape == (2, 32, 32)
    with dt.autocast(recipe=RECIPES[recipe]):
        groups(normal(64, 32), [32, 32]).sum().backward()


def test_gradients_that_go_elsewhere():
    """The module was saved with kept copies of its weight."""
    layer = load("accumulating.pt", weights_only=False)
    layer.weight.main_grad = torch.zeros(32, 32)
    with dt.autocast(recipe=RECIPES["fp8-current"]):
        layer(normal(32, 32).float(), is_first_microbatch=True).sum().backward()
    assert layer.weight.main_grad.eq(0).all()
    layer.backward_dw()
    assert layer.weight.main_grad.ne(0).any() and layer.weight.grad is None


def test_quantized_tensors():
    q = load("quantized.pt")
    again = dt.quantize(normal(32, 32), q.quantizer)
    assert torch.equal(q.dequantize(), again.dequantize())


def test_jax_values_and_programs():
    x = jnp.asarray(normal(32, 32).float().numpy())
    params = pickle.loads((FOLDER / "jax_params.pkl").read_bytes())
    now = dj.quantize_params({"kernel": x}, RECIPES["mxfp8"], lambda path, leaf: True)
    assert jax.tree.structure(params) == jax.tree.structure(now)
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(now), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))
    state = pickle.loads((FOLDER / "jax_state.pkl").read_bytes())
    assert jax.tree.structure(state) == jax.tree.structure(dj.init_state(SAVED["fp8-delayed"]))
    program = jax.export.deserialize((FOLDER / "jax_program.bin").read_bytes())
    np.testing.assert_array_equal(np.asarray(program.call(x, x)), np.load(FOLDER / "jax_program_result.npy"))
