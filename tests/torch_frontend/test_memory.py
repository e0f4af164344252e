"""What backward keeps: of each quantized tensor the one copy that it reads, under every recipe."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import diptych.torch as dt
from diptych.common import Recipe
from torch_frontend import composed, layers, tools
from torch_frontend.layers import NAMED
from torch_frontend.tools import RECIPE_NAMES, normal

M = 48
MODULES = {
    "linear": lambda: layers.layer(96, 64),
    "layernorm_linear": lambda: composed.linear(96, 64),
    "layernorm_mlp": lambda: composed.mlp(96, 64),
    "layernorm_mlp swiglu": lambda: composed.mlp(96, 64, activation="swiglu"),
}


def kept(module: torch.nn.Module, recipe: Recipe, **call: bool) -> list[torch.Tensor]:
    """Every tensor that a forward saves, one of each storage."""
    x, found = normal("x", (M, 96), layers.dtype_of(recipe)).requires_grad_(), {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), dt.autocast(recipe=recipe):
        module(x, **call)
    return list(found.values())


def copy_of(recipe: Recipe, tensor: str, shape: tuple[int, ...]) -> Counter[tuple[torch.dtype, int]]:
    """(dtype, elements) of the columnwise copy, which backward reads: payload, scales and, of two levels, an amax."""
    quantizer = tools.role(recipe, tensor).with_usage(rowwise=False)
    given = {"scale": torch.ones(1)} if quantizer.needs_scale else {}
    q = dt.quantize(torch.zeros(shape, dtype=torch.bfloat16), quantizer, **given)
    parts = (q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax)
    return Counter((t.dtype, t.numel()) for t in parts if t is not None)


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p for n, p in module.named_parameters() if n in ("weight", "fc1_weight", "fc2_weight")]


def copies(recipe: Recipe, module: torch.nn.Module) -> Counter[tuple[torch.dtype, int]]:
    """Of all weights."""
    return sum((copy_of(recipe, "weight", tuple(w.shape)) for w in weights(module)), Counter())


def without_scalars(found: Counter[tuple[torch.dtype, int]]) -> Counter[tuple[torch.dtype, int]]:
    return Counter({key: n for key, n in found.items() if key[1] > 1})


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_one_copy_of_each_weight_and_input(name, kind):
    """No rowwise copy, no second payload, no weight in high precision but the parameter itself, which is not saved.

    What is in high precision beside scales: x, statistics and gamma where a norm is, h where an activation is.
    """
    recipe, module = NAMED[name], MODULES[kind]()
    saved = Counter((t.dtype, t.numel()) for t in kept(module, recipe))
    want = copies(recipe, module) + copy_of(recipe, "input", (M, 96))
    wide = getattr(torch, layers.dtype_of(recipe))
    if kind != "linear":
        want += Counter({(wide, M * 96): 1, (torch.float32, 96): 1, (torch.float32, M): 2})
    if isinstance(module, dt.LayerNormMLP):
        want += Counter({(wide, M * module.fc1_weight.shape[0]): 1})
    saved = Counter({key: n for key, n in saved.items() if key[0] != torch.int32})  # random states
    assert without_scalars(saved) == without_scalars(want)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_kept_weights_are_not_copied_again(name, kind):
    """A later microbatch saves the very storages that the first one made."""
    recipe, module = NAMED[name], MODULES[kind]()
    first, second = (kept(module, recipe, is_first_microbatch=flag) for flag in (True, False))
    there = {t.untyped_storage().data_ptr() for t in first}
    shared = Counter((t.dtype, t.numel()) for t in second if t.untyped_storage().data_ptr() in there)
    assert without_scalars(copies(recipe, module)) <= shared
