"""Operands that come quantized: held weights, and inputs that another module quantized."""

from __future__ import annotations

from torch import Tensor

from diptych.common.layers.held import require_same
from diptych.common.layers.schedule import Call, Schedule
from diptych.torch.tensors.copies import Copies
from diptych.torch.tensors.quantized import QuantizedTensor, QuantizedTensorBase


def dequantized_weight(weight: Tensor) -> Tensor:
    """Returns a weight in high precision; gradients pass through to the parameter."""
    return weight.dequantize() if isinstance(weight, QuantizedTensorBase) else weight


def held_copies(q: QuantizedTensorBase, calls: tuple[Call, ...], what: str, remedy: str) -> Copies:
    """Returns those copies of a quantized tensor that `calls` would make. `what`, `remedy`: the operand and the advice
    in the error message.

    **Raises** ValueError if a copy is missing, or has another format or transform.
    """
    rowwise = columnwise = None
    for call in calls:
        asked = call.quantizer
        require_same(what, q.quantizer, asked, asked.rowwise, asked.columnwise, remedy)
        rowwise = q.copy_of(False) if asked.rowwise else rowwise
        columnwise = q.copy_of(True) if asked.columnwise else columnwise
    return rowwise, columnwise


def given_copies(x: QuantizedTensor, s: Schedule, op: str = "linear") -> Copies:
    """Returns the copies of a quantized input that forward would otherwise make."""
    return held_copies(x, s.x, f"{op}: the input", "quantize it by recipe.quantizer(QuantizerRole(module, 'input'))")
