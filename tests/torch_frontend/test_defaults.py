"""torch's default device and dtype, and modes that look on, change nothing of what a layer does."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import diptych.torch as dt
from diptych.common import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from torch_frontend.tools import normal, same

pytestmark = pytest.mark.sampled

RECIPES = {"delayed": DelayedScaling(), "current": Float8CurrentScaling(), "nvfp4": NVFP4BlockScaling()}
KINDS = {
    "Linear": lambda: dt.Linear(64, 64, dtype=torch.bfloat16),
    "LayerNormMLP": lambda: dt.LayerNormMLP(64, 64, dtype=torch.bfloat16),
    "GroupedLinear": lambda: dt.GroupedLinear(2, 64, 64, dtype=torch.bfloat16),
}


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "device": lambda: torch.device("meta"),
    "float64": lambda: _default_dtype(torch.float64),
    "bfloat16": lambda: _default_dtype(torch.bfloat16),
    "functions": _Functions,
    "ops": _Ops,
}


def _steps(kind, recipe, default, compiling=False):
    """Outputs, gradients and states of steps that begin from nothing, under a default from the first on."""
    torch.manual_seed(0)
    module = KINDS[kind]()
    fn = torch.compile(module, backend="aot_eager") if compiling else module
    x, out = normal("x", (64, 64), "bfloat16"), []
    torch.manual_seed(1)  # where a module draws its seed
    with default():
        for calibrating in (False, True, False):
            leaf = x.clone().requires_grad_()
            with dt.autocast(not calibrating, recipe=recipe, calibrating=calibrating):
                y = fn(leaf, *([[32, 32]] if kind == "GroupedLinear" else []))
            y.sum().backward()
            out += [y.detach(), leaf.grad]
    states = [b for n, b in module.named_buffers() if not n.endswith("seen")]  # that counts regions of all tests
    return out + [p.grad for p in module.parameters()] + states


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_begins_and_runs_under_any_default(kind, name):
    want = _steps(kind, RECIPES[name], contextlib.nullcontext)
    for default in DEFAULTS.values():
        for got, value in zip(_steps(kind, RECIPES[name], default), want, strict=True):
            same(got, value)


@pytest.mark.parametrize("default", ["device", "float64"])
def test_a_graph_is_traced_under_any_default(default):
    torch._dynamo.reset()
    want = _steps("Linear", RECIPES["delayed"], contextlib.nullcontext, True)
    torch._dynamo.reset()
    for got, value in zip(_steps("Linear", RECIPES["delayed"], DEFAULTS[default], True), want, strict=True):
        same(got, value)


@pytest.mark.parametrize("default", DEFAULTS)
def test_rows_move_under_any_default(default):
    x, probs, mask = normal("x", (8, 4)), normal("p", (8, 3)).abs(), (torch.arange(24).reshape(8, 3) % 5 < 2)
    counts = mask.sum(0).tolist()

    def moved():
        y, moved, ids, _, target = dt.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)
        return [y, moved, ids, target, dt.moe_unpermute(y, ids), dt.moe_sort_chunks_by_index(x, [3, 5], [1, 0])]

    want = moved()
    with DEFAULTS[default]():
        for got, value in zip(moved(), want, strict=True):
            same(got, value)
