"""Groups of a grouped layer under a recipe: how they must be aligned, and the plan of one in high precision."""

from __future__ import annotations

from typing import Any

from diptych.common.formats import FORMATS
from diptych.common.layers.plan import LinearPlan, linear_plan
from diptych.common.quantizers import RHT
from diptych.common.recipes import CustomRecipe, Recipe


def _nothing(role: Any) -> None:
    """No quantizer for any role."""


HIGH_PRECISION = CustomRecipe(_nothing)
"""Under which a layer of groups is that in high precision."""


def row_align(recipe: Recipe, module: str = "grouped_linear", name: str = "") -> int:
    """The number of rows at whose multiples groups should begin: those that share a scale where rows are summed.

    32, a step of tensor cores, where that is all of them; 1 where nothing is quantized there.
    """
    return plan_align(linear_plan(recipe, module, name))


_SHARED_ROWS = tuple(32 if row.per_tensor else row.block_cols for row in FORMATS)  # by format id


def plan_align(plan: LinearPlan) -> int:
    """Returns what `row_align` returns for the recipe of this plan."""
    align = 1
    for quantizer in (plan.input.columnwise, plan.grad_output.columnwise):
        if quantizer is not None:
            align = max(align, _SHARED_ROWS[quantizer.spec.format_id])
    return align


def rotates_rows(plan: LinearPlan) -> bool:
    """Whether wgrad's operands are Hadamard-rotated, which they are both or not at all."""
    quantizer = plan.input.columnwise
    return quantizer is not None and bool(quantizer.spec.flags & RHT) and not plan.dequantized_backward
