"""`make_graphed_callables`: CUDA graphs of modules that keep state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import UnsupportedError
from diptych.common.recipes import Recipe
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.state.autocast import autocast
from diptych.torch.state.scales import ScaleSlot, ScaleStates


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    enabled: bool = True,
    recipe: Recipe | None = None,
    amax_groups: Any = None,
) -> Any:
    """torch.cuda.make_graphed_callables, warmed up and captured inside `autocast(enabled, recipe, amax_groups)`.

    Effects of the warm-up are undone: delayed scales, their histories, random generators and `main_grad`s have the
    values from before the call. The graphs update scales as eager modules do, once in each outermost `autocast` region:
    enter one around each step. To keep weights across microbatches, pass the tensor `skip_weight_update`.

    **Arguments, returns:** as torch's; `enabled`, `recipe`, `amax_groups` as `autocast`'s. Weights whose gradients go
    to `main_grad` count as unused inputs, which are allowed then.

    **Raises:** what torch's function and `autocast` raise; NotImplementedError for modules with `delay_wgrad_compute`.
    """
    several = isinstance(callables, (tuple, list))
    models = [c for c in (callables if several else (callables,)) if isinstance(c, nn.Module)]
    elsewhere = [g for m in models for s in m.modules() if (g := getattr(s, "_weight_gradients", None)) is not None]
    if any(g.options.delay for g in elsewhere):
        raise UnsupportedError("make_graphed_callables: delay_wgrad_compute leaves gradients to code outside of graphs")
    allow_unused_input = allow_unused_input or len(elsewhere) > 0
    before = {t: t.clone() for t in _kept(models)}
    try:
        with autocast(enabled=enabled, recipe=recipe, amax_groups=amax_groups):
            return torch.cuda.make_graphed_callables(callables, sample_args, num_warmup_iters, allow_unused_input, pool)
    finally:
        with torch.no_grad():
            _forget(models, before)


def _kept(models: list[nn.Module]) -> dict[Tensor, tuple[int, float]]:
    """The tensors that a step writes to, each with (the element from which it is reset, the value that fills it)."""
    found: dict[Tensor, tuple[int, float]] = {}
    for module in [m for model in models for m in model.modules()]:
        if isinstance(module, ScaleSlot):
            found |= {module.scale: (0, 1.0), module.amax_history: (0, 0.0)}
        elif isinstance(module, ScaleStates):
            found |= {t: (0, 0.0) for t in module._buffers.values() if t is not None}
        elif isinstance(module, QuantizedModule):
            rng = module._buffers.get("rng_state")
            if rng is not None:
                found[rng] = (2, 0.0)  # the seed stays, the offset becomes 0
            grads = [getattr(p, "main_grad", None) for p in module.parameters()]
            found |= {g: (0, 0.0) for g in grads if isinstance(g, Tensor)}
    return found


def _forget(models: list[nn.Module], before: dict[Tensor, Tensor]) -> None:
    """Restores the tensors that existed before, and sets those that the warm-up made to their initial values."""
    for t, (first, start) in _kept(models).items():
        if t in before:
            t.copy_(before[t])
        else:
            t[first:].fill_(start)
