"""Selective checkpoints (torch.utils.checkpoint.create_selective_checkpoint_contexts) around our modules, eagerly."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

import diptych.torch as dt
from diptych.common import RECIPES, CustomRecipe
from torch_frontend.layer_cases import NAMED, SEED, slow
from torch_frontend.state.test_scales import _mixed

ops: Any = torch.ops.diptych
EVERY: dict[str, Any] = {**NAMED, "mixed": CustomRecipe(_mixed)}
KINDS: dict[str, Any] = {
    "Linear": lambda: dt.Linear(64, 96),
    "input kept": lambda: dt.Linear(64, 96, save_original_input=True),
    "LayerNormLinear": lambda: dt.LayerNormLinear(64, 96),
    "LayerNormMLP": lambda: dt.LayerNormMLP(64, 96),
    "two": lambda: torch.nn.Sequential(dt.Linear(64, 64), torch.nn.GELU(), dt.Linear(64, 64)),
}


class Ran(TorchDispatchMode):
    """Counts the ops that run: what a checkpoint's mode takes from its store does not get here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def everything(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def every_second() -> Any:
    """Saves every second product, as a policy that counts does."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op is not ops.gemm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES: dict[str, Any] = {
    "nothing": lambda: [],
    "products": lambda: [ops.gemm.default],
    "quantizing": lambda: [ops.quantize.default, ops.quantize_delayed.default],
    "states": lambda: [ops.scale_update.default, ops.rng_take.default, torch.ops.aten.clone.default],
    "everything": lambda: everything,
    "every second product": every_second,
}
DEFAULT = {
    *(("Linear", "fp8-delayed", policy) for policy in POLICIES),
    ("two", "nvfp4", "every second product"),
    ("LayerNormMLP", "mixed", "everything"),
    ("input kept", "fp8-delayed", "everything"),
    ("LayerNormLinear", "fp8-block", "quantizing"),
}


def steps(model: Any, recipe: Any, run: Any) -> list[torch.Tensor]:
    dt.seed_rng(model, SEED)
    torch.manual_seed(1)
    found = []
    for i in range(3):
        xs = [(torch.randn(32, 64) * (1 + i)).bfloat16().requires_grad_() for _ in range(2)]
        with dt.autocast(recipe=recipe):
            ys = [run(model, x) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            y.float().square().mean().backward()
            found += [y.detach(), x.grad]
    return [*found, *[p.grad for p in model.parameters()], *model.state_dict().values()]


@pytest.mark.parametrize(
    ("kind", "name", "policy"),
    [c if c in DEFAULT else slow(*c) for c in [(k, n, p) for k in KINDS for n in EVERY for p in POLICIES]],
)
def test_the_same_bits_as_without(kind, name, policy):
    """Outputs, gradients, scales, histories and random states, over three steps of two microbatches."""
    torch.manual_seed(0)
    plain = KINDS[kind]().bfloat16()
    checkpointed = copy.deepcopy(plain)

    def run(model: Any, x: torch.Tensor) -> Any:
        context_fn = functools.partial(selective, POLICIES[policy]())
        return dt.checkpoint(model, x, use_reentrant=False, context_fn=context_fn)

    want = steps(plain, EVERY[name], lambda model, x: model(x))
    for i, (a, b) in enumerate(zip(steps(checkpointed, EVERY[name], run), want, strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize(("saved", "products"), (("nothing", 4), ("products", 3)))
def test_a_policy_saves_our_products(saved, products):
    """fprop, dgrad and wgrad, and fprop once more where it was not saved. Recorded amaxes are the forward's alone."""
    model, recipe = dt.Linear(64, 64), RECIPES["fp8-delayed"]
    x = torch.randn(32, 64, requires_grad=True)
    with Ran() as ran:
        with dt.autocast(recipe=recipe):
            y = dt.checkpoint(model, x, use_reentrant=False, context_fn=lambda: selective(POLICIES[saved]()))
        y.sum().backward()
    assert ran.counts[ops.gemm.default] == products
    assert ran.counts[ops.scale_update.default] == 3


def test_calibrating_in_a_selective_checkpoint():
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    found = []
    for run in (
        lambda model: model(x),
        lambda model: dt.checkpoint(model, x, use_reentrant=False, context_fn=lambda: selective(everything)),
    ):
        torch.manual_seed(0)
        model = dt.Linear(64, 64)
        for _ in range(2):
            with dt.autocast(enabled=False, calibrating=True, recipe=RECIPES["fp8-delayed"]):
                y = run(model)
            y.square().sum().backward()
        found.append([*model.state_dict().values(), model.weight.grad])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
