"""Functions by the names that TransformerEngine gives them: what runs here, and regions by their earlier names."""

from __future__ import annotations

import functools
from typing import Any

import torch

from diptych import core
from diptych.common.recipes import (
    DEFAULT_RECIPE,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from diptych.common.shapes import gemm_copies
from diptych.core import _core
from diptych.torch.autocast import autocast
from diptych.torch.weights import quantized_model_init

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
    """Why a linear layer's products do not all run natively by a recipe; empty where they do."""
    levels = {}
    for gemm in ("fprop", "dgrad", "wgrad"):
        a, b = recipe.operands(gemm)
        assert a is not None and b is not None
        sides = gemm_copies(gemm == "wgrad", gemm == "fprop")
        row = _core.gemm_row(
            a.format.id, sides[0], b.format.id, sides[1], _EXTENT, _EXTENT, _EXTENT, "bfloat16", device, index
        )
        levels[gemm] = "missing" if row < 0 else core.kernel_table()[row]["level"]
    lacking = [f"{gemm} is {level}" for gemm, level in levels.items() if level != "native"]
    return f"{type(recipe).__name__} on {device}: {', '.join(lacking)}" if lacking else ""


def _available(recipe: Recipe, return_reason: bool) -> bool | tuple[bool, str]:
    device, index = ("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else ("cpu", 0)
    reason = _reason(recipe, device, index)
    return (not reason, reason) if return_reason else not reason


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether per-tensor FP8 products run natively on the current device: the current GPU, or the CPU where there is
    none. What is not native runs all the same, decoded to bfloat16, with an `EmulationWarning`.

    **Returns:** a bool; with `return_reason` that and the reason, empty where it is True.
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
