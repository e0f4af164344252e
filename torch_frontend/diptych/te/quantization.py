"""Regions, roles and questions about the hardware, under TransformerEngine's names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

import diptych.torch as dt
from diptych.common import CustomRecipe, Format, NVFP4BlockScaling, Quantizer, Recipe, UnsupportedError, row_align
from diptych.common import DelayedScaling as _DelayedScaling
from diptych.common import QuantizerRole as QuantizerRole
from diptych.common.te_arguments import absorb
from diptych.te import absent
from diptych.te.common.recipe import DelayedScaling
from diptych.torch import fp8_model_init as fp8_model_init
from diptych.torch import get_default_recipe as get_default_recipe
from diptych.torch import is_fp8_available as is_fp8_available
from diptych.torch import is_fp8_block_scaling_available as is_fp8_block_scaling_available
from diptych.torch import is_mxfp8_available as is_mxfp8_available
from diptych.torch import is_nvfp4_available as is_nvfp4_available
from diptych.torch import quantized_model_init as quantized_model_init

__getattr__ = absent.attributes_of(__name__)


def _group(recipe: Recipe | None, group: Any) -> Any:
    """Returns the ranks over which delayed scaling reduces amaxes: those given, else all ranks, unless the recipe says
    reduce_amax=False."""
    if isinstance(recipe, DelayedScaling) and not recipe.reduce_amax:
        return None
    by_default, distributed = isinstance(recipe, DelayedScaling) or (recipe and recipe.custom()), torch.distributed
    if group is not None or not (by_default and distributed.is_available() and distributed.is_initialized()):
        return group
    return distributed.group.WORLD if distributed.get_world_size() > 1 else None


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
    *,
    amax_groups: Mapping[str, Any] | None = None,
) -> dt.autocast:
    """Returns diptych.torch's `autocast`. Delayed scaling reduces its amaxes over `amax_reduction_group`, or over all
    ranks if that is None, as TransformerEngine does; a recipe with `reduce_amax=False` reduces none.

    **Raises:** as diptych.torch's; NotImplementedError for `_graph`.
    """
    absorb("autocast", {"_graph": _graph})
    return dt.autocast(enabled, calibrating, recipe, _group(recipe, amax_reduction_group), amax_groups=amax_groups)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> dt.autocast:
    """Returns `autocast` by its earlier name."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Returns the rows at whose multiples groups of a `GroupedLinear` should begin: TransformerEngine's number for the
    recipe, or the least multiple of it that is one of diptych.common's `row_align`, which some kernels need."""
    theirs = 128 if isinstance(recipe, NVFP4BlockScaling | CustomRecipe) else 32 if recipe.mxfp8() else 16
    return theirs if recipe.custom() else math.lcm(theirs, row_align(recipe))


class QuantizerRequest:
    """The base of what a factory of `CustomRecipe` returns for a quantizer with state."""


@dataclasses.dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """A factory's answer that a role is quantized by delayed scaling, whose state the module keeps.

    **Arguments:** as `DelayedScaling`'s. `reduce_amax`: True; `autocast` names the ranks.

    **Raises** NotImplementedError for other values of `reduce_amax`.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.reduce_amax is not True:
            raise UnsupportedError(
                "DelayedScalingRequest.reduce_amax must be True: the region names the ranks; use DelayedScaling, or a "
                "group of this rank alone"
            )

    def for_role(self, role: QuantizerRole) -> Quantizer | None:
        """Returns the quantizer of a role."""
        recipe = _DelayedScaling(
            fp8_format=self.fp8_format,
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            scaling_factor_compute_algo=self.scaling_factor_compute_algo,  # type: ignore[call-arg] - diptych.common.te
        )
        return recipe.quantizer(role)
