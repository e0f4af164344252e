"""The initial values of modules' parameters, and `quantized_model_init`, the region in which new modules hold their
weights quantized."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.layers.plan import held_quantizer
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import DEFAULT_RECIPE, Recipe
from diptych.torch.functional import quantize as quantize_verbs
from diptych.torch.functional.grouped import quantize_stack
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.tensors.quantized import QuantizedStack, QuantizedTensor


class _InitState(threading.local):
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.preserve = False


_INIT = _InitState()


class quantized_model_init:
    """Region in which new modules hold their weights quantized, and in no other precision.

    Under `torch.no_grad()` or `torch.inference_mode()` a weight has its rowwise copy alone: about one byte an element
    in FP8, for inference. A layer whose input needs a gradient then raises ValueError. On the meta device a weight has
    its quantizer and no data; `to_empty`, then `reset_parameters` or `load_state_dict`, and
    `load_state_dict(assign=True)` fill it, inside of the region or outside.

    **Arguments:** `enabled`: False makes plain weights, also inside an enabled region. `recipe`: which decides on the
    weights' format; None is `DEFAULT_RECIPE`. Under delayed scaling a weight's scale comes from the weight itself.
    `preserve_high_precision_init_val`: each weight keeps its initial values on the CPU, from which an optimizer can
    take its master weights: `weight.get_high_precision_init_val()`, `weight.clear_high_precision_init_val()`. A weight
    made on meta keeps the first values that fill it.

    **Raises:** TypeError if `recipe` is not a recipe; ValueError from a module whose weight the recipe quantizes in two
    ways, or stochastically.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        op = "quantized_model_init"
        require_switches(op, enabled=enabled, preserve_high_precision_init_val=preserve_high_precision_init_val)
        require_recipe(op, recipe)
        self.recipe = (DEFAULT_RECIPE if recipe is None else recipe) if enabled else None
        self.preserve = preserve_high_precision_init_val
        self._outer: list[tuple[Recipe | None, bool]] = []

    def __enter__(self) -> quantized_model_init:
        self._outer.append((_INIT.recipe, _INIT.preserve))
        _INIT.recipe, _INIT.preserve = self.recipe, self.preserve
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _INIT.recipe, _INIT.preserve = self._outer.pop()


def initial_recipe() -> Recipe | None:
    """The recipe of the `quantized_model_init` region around; None outside of regions."""
    return _INIT.recipe


def initial_weight(weight: Tensor, recipe: Recipe | None, module: str, name: str) -> Any:
    """Returns a module's new weight, quantized inside of a `quantized_model_init` region; [G, N, K] becomes a stack."""
    if _INIT.recipe is None:
        return weight
    quantizer = held_quantizer("quantized_model_init", _INIT.recipe if recipe is None else recipe, module, name)
    if quantizer is None:
        return weight
    return held_parameter(weight, quantizer.with_usage(columnwise=quantizer.columnwise and torch.is_grad_enabled()))


def held_parameter(weight: Tensor, quantizer: Quantizer) -> Any:
    """Returns a parameter that holds a weight by a quantizer, which requires a gradient if the weight does. The region
    around says whether it preserves the values."""
    with torch.inference_mode(False), torch.no_grad():  # inference tensors could never be saved for a backward
        param = nn.Parameter(_hold(weight.detach(), quantizer), weight.requires_grad)
        if _INIT.preserve and weight.is_meta:
            param._awaits_init = True  # type: ignore[attr-defined]
        elif _INIT.preserve:
            param._high_precision_init_val = weight.detach().to("cpu", copy=True)  # type: ignore[attr-defined]
    return param


def initialize(weight: Tensor, bias: Tensor | None, init_method: Callable[[Tensor], Any] | None) -> None:
    """Fills a weight [N, K] by `init_method`, its bias with zeros; None: both as nn.Linear initializes."""
    if init_method is not None:
        with torch.no_grad():
            init_method(weight)
            if bias is not None:
                bias.zero_()
        return
    nn.init.kaiming_uniform_(weight, a=5**0.5)
    if bias is not None:
        bound = weight.size(1) ** -0.5
        nn.init.uniform_(bias, -bound, bound)


def _hold(weight: Tensor, quantizer: Quantizer) -> Any:
    if weight.is_meta:
        return empty_held(weight.shape, weight.dtype, quantizer, weight.device)
    return QuantizedParameter.of((quantize_stack if weight.dim() == 3 else quantize_verbs.quantize)(weight, quantizer))


def empty_held(shape: tuple[int, ...], dtype: torch.dtype, quantizer: Quantizer, device: torch.device) -> Any:
    """Returns a held weight [N, K] or stack [G, N, K] without values, which is no nn.Parameter yet."""
    stack, shape = len(shape) == 3, tuple(shape)
    buffers = (grouped_ops.empty_stack if stack else quantize_ops.empty)(shape, quantizer, device)
    named = dict(zip(quantizer.buffer_names(), buffers, strict=True))
    return QuantizedParameter.of((QuantizedStack if stack else QuantizedTensor)(quantizer, shape, dtype, **named))
