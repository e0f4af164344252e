"""Functions under TransformerEngine's names, and state dicts in the form of its modules."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import UnsupportedError
from diptych.common.recipes import (
    DEFAULT_RECIPE,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from diptych.core import _kernels
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.model_init import quantized_model_init
from diptych.torch.modules.te_states import EXTRA, SLOTS, WIDTH, layers_of
from diptych.torch.state.autocast import autocast

_EXTENT = 512  # any shape that tensor cores take


def get_default_recipe() -> Recipe:
    """The recipe of `autocast` and `quantized_model_init` where none is given."""
    return DEFAULT_RECIPE


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> autocast:
    """`autocast` by its earlier name in TransformerEngine, with that function's arguments."""
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """`quantized_model_init` by its earlier name in TransformerEngine."""
    return quantized_model_init(
        enabled=enabled, recipe=recipe, preserve_high_precision_init_val=preserve_high_precision_init_val
    )


@functools.cache
def _reason(recipe: Recipe, device: str, index: int) -> str:
    """Returns why not all products of a linear layer run natively under a recipe; empty if they do."""
    levels = {}
    for gemm in _kernels.PRODUCTS:
        extents, options = (_EXTENT, _EXTENT, _EXTENT), recipe.gemm_options(gemm)
        found = _kernels.product(gemm, recipe.operands(gemm), extents, "bfloat16", device, index, options)
        levels[gemm] = found["level"]
    lacking = [f"{gemm} is {level}" for gemm, level in levels.items() if level != "native"]
    return f"{type(recipe).__name__} on {device}: {', '.join(lacking)}" if lacking else ""


def _available(recipe: Recipe, return_reason: bool) -> bool | tuple[bool, str]:
    device, index = ("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else ("cpu", 0)
    reason = _reason(recipe, device, index)
    return (not reason, reason) if return_reason else not reason


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether per-tensor FP8 products run natively on the current device: the current GPU, or the CPU where there is
    none. Other products run too, decoded to bfloat16, with an `EmulationWarning`.

    **Returns:** a bool; with `return_reason` a pair of it and the reason, which is empty if it is True.
    """
    return _available(Float8CurrentScaling(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether `Float8BlockScaling`'s products run natively; see `is_fp8_available`."""
    return _available(Float8BlockScaling(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether `MXFP8BlockScaling`'s products run natively; see `is_fp8_available`."""
    return _available(MXFP8BlockScaling(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether `NVFP4BlockScaling`'s products run natively; see `is_fp8_available`."""
    return _available(NVFP4BlockScaling(), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True: every backend takes bfloat16."""
    return (True, "") if return_reason else True


# --- state dicts -----------------------------------------------------------------------------------------------------

_THEIRS = "transformer_engine.common.recipe"


class Format:
    """Stands in a pickle for TransformerEngine's class of this name, called with its value."""

    def __init__(self, largest: tuple[float, float]) -> None:
        self.largest = largest

    def __reduce__(self) -> tuple[Any, ...]:
        return Format, (self.largest,)


class DelayedScaling:
    """Stands in a pickle for TransformerEngine's recipe of this name."""


def _pickled(state: dict[str, Any]) -> Tensor:
    # Protocol 2 names classes in plain text and has no lengths around them.
    data = pickle.dumps(state, 2)
    for cls in (DelayedScaling, Format):
        own, theirs = (f"c{where}\n{cls.__name__}\n".encode() for where in (__name__, _THEIRS))
        assert data.count(own) == 1
        data = data.replace(own, theirs)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _extra_of(module: QuantizedModule, states: dict[str, Tensor]) -> Tensor:
    """Returns the `_extra_state` of a module from its states, given by their names below the module."""
    own = layers_of(module)
    made: dict[str, Any] = {}
    extra: dict[str, Any] = {"num_gemms": len(own)}
    for way, width in WIDTH.items():
        slots = {at: slot for slot, (w, at) in SLOTS.items() if w == way}
        scales, histories = [], []
        for below in own:
            if missing := [f"{below}{slot}" for slot in SLOTS if f"{below}{slot}.scale" not in states]:
                raise UnsupportedError(
                    f"{type(module).__name__} has no state {missing[0]!r}: TransformerEngine's modules have one "
                    "for the input, the weight and the output's gradient each"
                )
            length = states[f"{below}input.amax_history"].numel()
            for name in [f"{below}{slots[at]}" if at in slots else "" for at in range(width)]:
                scales.append(states[f"{name}.scale"].cpu() if name else torch.ones(1))
                histories.append(states[f"{name}.amax_history"].cpu() if name else torch.zeros(length))
                if name:
                    extra[f"fp8_max_{way}"] = states[f"{name}.fp8_max"].item()
        made[f"scale_{way}"], made[f"amax_history_{way}"] = torch.cat(scales), torch.stack(histories, 1)
    recipe = DelayedScaling()
    recipe.__dict__ |= {
        "margin": 0, "fp8_format": Format((extra["fp8_max_fwd"], extra["fp8_max_bwd"])), "amax_compute_algo": "max",
        "amax_history_len": made["amax_history_fwd"].shape[0], "scaling_factor_compute_algo": None,
        "reduce_amax": True, "fp8_dpa": False, "fp8_mha": False,
    }  # fmt: skip
    return _pickled(made | {"recipe": recipe, "extra_fp8_variables": extra})


def te_state_dict(model: nn.Module) -> dict[str, Any]:
    """A model's state dict under the names of TransformerEngine's modules, delayed scales in their `_extra_state`.

    `GroupedLinear`'s stacks become `weight0`, `bias0`, ... The state of stochastic rounding has no counterpart and is
    left out. Written by TransformerEngine's public source; no run of TransformerEngine itself has read it.

    TransformerEngine keeps delayed scales in pickles. From version 2.18 on it refuses to load them with a RuntimeError,
    unless the environment variable NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE is 1 in the process that loads. A model
    without delayed scales needs nothing.

    **Raises** NotImplementedError for a module whose states have no counterpart there.
    """
    out: dict[str, Any] = dict(model.state_dict())
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        prefix = f"{path}." if path else ""
        states = {k[len(prefix) :]: out.pop(k) for k in list(out) if k.startswith(f"{prefix}scale_states.")}
        out.pop(f"{prefix}rng_state", None)
        if hasattr(module, "num_gemms"):
            for name in ("weight", "bias"):
                if f"{prefix}{name}" in out:
                    parts = out.pop(f"{prefix}{name}")
                    out |= {f"{prefix}{name}{g}": part.clone() for g, part in enumerate(parts)}
        out[f"{prefix}{EXTRA}"] = _extra_of(module, states) if states else torch.empty(0, dtype=torch.uint8)
    return out
