"""The statistics of a tensor's elements, or of the errors with which they were rounded: kernel calls and fake
implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.ops import statistics as rules
from diptych.common.ops.shapes import Shape
from diptych.core import _core
from diptych.torch.primitives.checks import enforce, operand, require_device
from diptych.torch.primitives.hash import flat
from diptych.torch.primitives.register import define, empty_beside, run, workspace


def _statistics(x: Tensor) -> Tensor:
    shape, number = rules.statistics(operand("x", x))
    out = empty_beside(x, shape, torch.float64)
    scratch = workspace(_core.statistics_workspace_bytes(), x.device)
    _core.statistics(flat(x).view(torch.uint8), None, None, out.view(torch.int32), scratch, number, 1.0)
    return out


def _statistics_fake(x: Tensor) -> Tensor:
    return x.new_empty(rules.statistics(operand("x", x))[0], dtype=torch.float64)


def _checked(x: Tensor, result: Tensor, largest: Tensor) -> tuple[Shape, int]:
    for t, name in ((result, "result"), (largest, "largest")):
        require_device("statistics", x, t, name)
    shape, number, sizes = rules.errors(operand("x", x), operand("result", result), operand("largest", largest))
    enforce(sizes)
    return shape, number


def _errors(x: Tensor, result: Tensor, largest: Tensor, beyond: float) -> Tensor:
    shape, number = _checked(x, result, largest)
    out = empty_beside(x, shape, torch.float64)
    scratch = workspace(_core.statistics_workspace_bytes(), x.device)
    given = flat(x).view(torch.uint8), flat(result), flat(largest)
    _core.statistics(*given, out.view(torch.int32), scratch, number, beyond)
    return out


def _errors_fake(x: Tensor, result: Tensor, largest: Tensor, beyond: float) -> Tensor:
    return x.new_empty(_checked(x, result, largest)[0], dtype=torch.float64)


_statistics_op = define("statistics", "(Tensor x) -> Tensor", _statistics, _statistics_fake)
_errors_op = define(
    "rounding_errors", "(Tensor x, Tensor result, Tensor largest, float beyond) -> Tensor", _errors, _errors_fake
)


def statistics(x: Tensor) -> Tensor:
    """The statistics of the elements of x, float64 [7] on x's device (NUMERICS 11). They have no derivative."""
    return run("statistics", _statistics, _statistics_op, x)


def errors(x: Tensor, result: Tensor, largest: Tensor, beyond: float) -> Tensor:
    """The statistics of the errors of x, float64 [9] on x's device (NUMERICS 11). They have no derivative.

    **Arguments:** as many elements each. `x`: float32, bfloat16 or float16. `result`: float32, what x was rounded to.
    `largest`: float32, the largest magnitude that each element can be rounded to. `beyond`: an element counts as
    clipped if its magnitude is above `beyond` times `largest`.
    """
    return run("rounding_errors", _errors, _errors_op, x, result, largest, beyond)
