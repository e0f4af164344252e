"""Backward keeps of each quantized tensor the one copy that it reads, under every recipe. After a call, nothing lives
on that keeps memory of the C heap from being joined and given back."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

import diptych.torch as dt
from benchmarks.sections import memory
from diptych.common import MXFP8BlockScaling, Recipe
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import register
from torch_frontend import composed, tools
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED
from torch_frontend.tools import RECIPE_NAMES, normal

M = 48
MODULES = {
    "linear": lambda **kw: layers.layer(96, 64, **kw),
    "layernorm_linear": lambda **kw: composed.linear(96, 64, **kw),
    "layernorm_mlp": lambda **kw: composed.mlp(96, 64, **kw),
    "layernorm_mlp swiglu": lambda **kw: composed.mlp(96, 64, activation="swiglu", **kw),
}
OPTIONS = ("save_original_weight", "save_original_input")


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
    """Returns the copies of all weights."""
    return sum((copy_of(recipe, "weight", tuple(w.shape)) for w in weights(module)), Counter())


def without_scalars(found: Counter[tuple[torch.dtype, int]]) -> Counter[tuple[torch.dtype, int]]:
    return Counter({key: n for key, n in found.items() if key[1] > 1})


@pytest.mark.parametrize("originals", [(), *[(n,) for n in OPTIONS], OPTIONS], ids=" ".join)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_one_copy_or_the_original_of_each_weight_and_input(name, kind, originals):
    """No rowwise copy, no second payload, and no copy of what is kept in high precision.

    In high precision beside scales: the originals that an option names, x, statistics and norm parameters where a norm
    is, h where an activation is. Parameters take no memory of their own.
    """
    recipe, module = NAMED[name], MODULES[kind](**{n: n in originals for n in OPTIONS})
    owned = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved = Counter((t.dtype, t.numel()) for t in kept(module, recipe) if t.untyped_storage().data_ptr() not in owned)
    wide, want = getattr(torch, layers.dtype_of(recipe)), Counter()
    if OPTIONS[0] not in originals:
        want += copies(recipe, module)
    if OPTIONS[1] not in originals:
        want += copy_of(recipe, "input", (M, 96))
    if OPTIONS[1] in originals or kind != "linear":
        want += Counter({(wide, M * 96): 1})
    if kind != "linear":
        want += Counter({(torch.float32, M): 2})
    if isinstance(module, dt.LayerNormMLP):
        want += Counter({(wide, M * module.fc1_weight.shape[0]): 1})
    saved = Counter({key: n for key, n in saved.items() if key[0] != torch.int32})  # random states
    assert without_scalars(saved) == without_scalars(want)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_defaults(name):
    """Fused modules keep originals, and so nothing in low precision but what belongs to no tensor here."""
    for kind in MODULES:
        quantized = [t for t in kept(MODULES[kind](), NAMED[name]) if t.dtype.itemsize == 1]
        assert bool(quantized) == (kind == "linear")


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_kept_weights_are_not_copied_again(name, kind):
    """A later microbatch saves the very storages that the first one made."""
    recipe, module = NAMED[name], MODULES[kind]()
    first, second = (kept(module, recipe, is_first_microbatch=flag) for flag in (True, False))
    there = {t.untyped_storage().data_ptr() for t in first}
    shared = Counter((t.dtype, t.numel()) for t in second if t.untyped_storage().data_ptr() in there)
    assert without_scalars(copies(recipe, module)) <= shared


@pytest.mark.parametrize("stack", (False, True))
def test_shapes_share_their_allocators(stack):
    # A tensor kept for each shape would pin the C heap between buffers whose sizes change from call to call.
    quantizer = tools.role(MXFP8BlockScaling(), "input").with_usage(columnwise=False)
    shape = (2, 64, 64) if stack else (64, 64)
    before = sum(type(o) is torch.Tensor for o in gc.get_objects())
    makers = []
    for rows in range(1, 50):
        x = torch.zeros(*shape[:-2], rows, 64)
        found = grouped_ops._layout(x, quantizer) if stack else register.layout(x.shape, quantizer, x.device)
        makers.append([buffer[-1] for buffer in found])
    assert len({id(m.__self__) for each in makers for m in each}) == len(makers[0])
    del x
    assert sum(type(o) is torch.Tensor for o in gc.get_objects()) <= before + len(makers[0])


@pytest.mark.slow
def test_training_on_batches_of_changing_length_takes_no_more_memory():
    plain, ours = (memory.measure(layer, 600, "mxfp8", 4000) for layer in memory.LAYERS)
    assert ours["highest"] <= memory.LIMIT * plain["highest"], (plain, ours)
