"""Operands that are quantized already: weights that are held so, and inputs of another module's."""

from __future__ import annotations

from torch import Tensor

from diptych.common.layers.held import require_same
from diptych.common.layers.schedule import Call, Schedule
from diptych.torch.tensors.copies import Copies
from diptych.torch.tensors.quantized import QuantizedTensor, QuantizedTensorBase


def dequantized_weight(weight: Tensor) -> Tensor:
    """A weight for a product in high precision; its gradient is the parameter's."""
    return weight.dequantize() if isinstance(weight, QuantizedTensorBase) else weight


def held_copies(q: QuantizedTensorBase, calls: tuple[Call, ...], what: str, remedy: str) -> Copies:
    """The copies that calls would make, of what is quantized already; `what` and `remedy` are for what it raises.

    **Raises** ValueError for a copy that was not made, or of another format or transform.
    """
    rowwise = columnwise = None
    for call in calls:
        asked = call.quantizer
        require_same(what, q.quantizer, asked, asked.rowwise, asked.columnwise, remedy)
        rowwise = q.copy_of(False) if asked.rowwise else rowwise
        columnwise = q.copy_of(True) if asked.columnwise else columnwise
    return rowwise, columnwise


def given_copies(x: QuantizedTensor, s: Schedule, op: str = "linear") -> Copies:
    """The copies that forward would make of an input that comes quantized."""
    return held_copies(x, s.x, f"{op}: the input", "quantize it by recipe.quantizer(QuantizerRole(module, 'input'))")
