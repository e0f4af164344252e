"""Groups of a grouped layer under a recipe: their alignment, and the plan of a layer in high precision."""

from __future__ import annotations

from typing import Any

from diptych.common.formats import FORMATS
from diptych.common.layers.plan import LinearPlan, linear_plan
from diptych.common.quantizers import RHT
from diptych.common.recipes import CustomRecipe, Recipe


def _nothing(role: Any) -> None:
    """Returns no quantizer for any role."""


HIGH_PRECISION = CustomRecipe(_nothing)
"""The plan of a grouped layer in high precision."""


def row_align(recipe: Recipe, module: str = "grouped_linear", name: str = "") -> int:
    """Returns the number of rows at whose multiples groups should begin under a recipe.

    It is the number of rows that share a scale in wgrad, which sums over rows; 32, a step of tensor cores, if all rows
    share one; 1 if wgrad is not quantized.
    """
    return plan_align(linear_plan(recipe, module, name))


_SHARED_ROWS = tuple(row.block(True)[0] or 32 for row in FORMATS)  # by format id


def plan_align(plan: LinearPlan) -> int:
    """Returns `row_align` for the recipe of this plan."""
    align = 1
    for quantizer in (plan.input.columnwise, plan.grad_output.columnwise):
        if quantizer is not None:
            align = max(align, _SHARED_ROWS[quantizer.spec.format_id])
    return align


def rotates_rows(plan: LinearPlan) -> bool:
    """Returns whether wgrad's operands are Hadamard-rotated; either both are or none is."""
    quantizer = plan.input.columnwise
    return quantizer is not None and bool(quantizer.spec.flags & RHT) and not plan.dequantized_backward
