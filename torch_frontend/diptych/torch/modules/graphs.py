"""`make_graphed_callables`: CUDA graphs of modules that keep state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import UnsupportedError
from diptych.common.recipes import Recipe
from diptych.common.te_arguments import absorb, either
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.state.autocast import autocast
from diptych.torch.state.scales import ScaleSlot, ScaleStates


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: None = None,
    *,
    pool: Any = None,
    enabled: bool | None = None,
    recipe: Recipe | None = None,
    amax_groups: Any = None,
    calibrating: bool | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    fp8_enabled: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_calibrating: bool | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    **others: Any,
) -> Any:
    """torch.cuda.make_graphed_callables, warmed up and captured inside `autocast(enabled, recipe, amax_groups)`.

    Effects of the warm-up are undone: delayed scales, their histories, random generators and `main_grad`s have the
    values from before the call. The graphs update scales as eager modules do, once in each outermost `autocast` region:
    enter one around each step. To keep weights across microbatches, pass the tensor `skip_weight_update`.

    **Arguments, returns:** as torch's; `enabled` (None: True), `recipe`, `amax_groups`, `amax_reduction_group` as
    `autocast`'s. Weights whose gradients go to `main_grad` count as unused inputs, which are allowed then. `pool` comes
    by name, since TransformerEngine's function has `sample_kwargs`, here None, in its place. `fp8_enabled`,
    `fp8_recipe`, `fp8_group`: earlier names of these. `calibrating`, `cache_quantized_params` and their earlier names:
    False or None. Others of TransformerEngine's: their defaults.

    **Raises:** what torch's function and `autocast` raise; NotImplementedError for modules with `delay_wgrad_compute`
    and for arguments of TransformerEngine's that ask for what is not done; ValueError for an argument given by both of
    its names.
    """
    op = "make_graphed_callables"
    absorb(op, {"sample_kwargs": sample_kwargs, **others})
    enabled = either(op, "enabled", enabled, "fp8_enabled", fp8_enabled)
    recipe = either(op, "recipe", recipe, "fp8_recipe", fp8_recipe)
    group = either(op, "amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group)
    if either(op, "calibrating", calibrating, "fp8_calibrating", fp8_calibrating):
        raise UnsupportedError(f"{op}: a calibrating region is not captured; calibrate by plain calls before")
    if either(op, "cache_quantized_params", cache_quantized_params, "fp8_weight_caching", fp8_weight_caching):
        raise UnsupportedError(
            f"{op}: cache_quantized_params must be False: pass the modules' argument skip_weight_update, a tensor that "
            "says in each replay whether the kept copies of weights stay"
        )
    several = isinstance(callables, (tuple, list))
    models = [c for c in (callables if several else (callables,)) if isinstance(c, nn.Module)]
    elsewhere = [g for m in models for s in m.modules() if (g := getattr(s, "_weight_gradients", None)) is not None]
    if any(g.options.delay for g in elsewhere):
        raise UnsupportedError("make_graphed_callables: delay_wgrad_compute leaves gradients to code outside of graphs")
    allow_unused_input = allow_unused_input or len(elsewhere) > 0
    before = {t: t.clone() for t in _kept(models)}
    try:
        region = {"recipe": recipe, "amax_reduction_group": group, "amax_groups": amax_groups}
        with autocast(enabled=enabled is None or enabled, **region):
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
