"""Amaxes that are reduced by max over a process group, as the argument `amax_group` of verbs asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.formats import FORMATS
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.private.sharding import maximum


def group_amaxes(
    x: Any, quantizer: Quantizer, group: Any, amaxes: Any = quantize_ops.amax
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the `amax` and `columnwise_amax` that quantizing x needs, reduced over a process group, except amaxes of
    rows.

    `amaxes`: the op that computes them: `source.amax` for a FusedInput, `grouped.amaxes` for each tensor of a stack.
    """
    fmt, flags = FORMATS[quantizer.spec.format_id], quantizer.spec.flags
    if not torch.compiler.is_compiling() and quantizer.needs_scale:  # while compiling, the op refuses the missing scale
        raise ValueError(
            "quantize: amax_group does not apply to delayed scaling, whose scale is given; reduce the amax of the "
            "history and pass it to scale_update(reduced=...)"
        )
    if not fmt.tensor_amax:
        raise ValueError(f"quantize: amax_group is for formats with an amax of the tensor; {fmt.name} has none")
    columnwise = fmt.two_level and quantizer.columnwise
    amax, of_columns = amaxes(x, flags & (ROW_AMAX | RHT | RHT_SIGNS), columnwise=True)
    if flags & ROW_AMAX:
        return amax, (max_over(of_columns, group) if columnwise else None)
    if flags & RHT and quantizer.rowwise:
        amax, of_columns = max_over(torch.cat((amax, of_columns)), group).chunk(2)
    else:  # one number serves both copies
        amax = of_columns = max_over(of_columns, group)
    return (None if fmt.two_level and not quantizer.rowwise else amax), (of_columns if columnwise else None)


def max_over(amax: Tensor, group: Any) -> Tensor:
    """The elementwise maximum of amaxes over a process group.

    It compares integers: amaxes are never negative or NaN, so their bits have the same order, and no subnormal is
    flushed to zero.
    """
    return maximum(amax.view(torch.int32), group).view(torch.float32)
