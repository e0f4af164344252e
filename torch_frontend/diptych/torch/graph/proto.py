"""`TensorProto`: what is known of a tensor before it exists, plain or quantized.

Buffers, their order and their names come from `shapes.quantize_buffers`, as those of the real op do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.common.quantizers import Quantizer
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import require_tensor
from diptych.torch.tensors.quantized import QuantizedStack, QuantizedTensor, QuantizedTensorBase


class TensorProto(NamedTuple):
    """A tensor without its data.

    **Arguments:** `shape`: ints, which may be symbolic while tracing. `dtype`: the logical dtype if the tensor is
    quantized. `quantizer`: None for a plain tensor. `requires_grad`: whether the tensor required a gradient when the
    prototype was made. `stack`: whether it is a `QuantizedStack`, whose leading extent counts its tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    device: torch.device = torch.device("cpu")
    requires_grad: bool = False
    stack: bool = False

    @property
    def buffers(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """(name, shape, dtype) of each buffer of a quantized tensor, in the order of `__tensor_flatten__`."""
        if self.quantizer is None:
            return ()
        held = self._replace(requires_grad=False).create_tensor("meta")
        names = self.quantizer.buffer_names()  # Dynamo cannot call `__tensor_flatten__` of a tensor that it makes
        return tuple([(n, tuple(getattr(held, n).shape), getattr(held, n).dtype) for n in names])

    def create_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Makes an uninitialized tensor of this form. `device`: where it lies if not on the prototype's device."""
        place = self.device if device is None else device
        if self.quantizer is None:
            made = torch.empty(self.shape, dtype=self.dtype, device=place)
        else:
            empty, kind = (
                (grouped_ops.empty_stack, QuantizedStack) if self.stack else (quantize_ops.empty, QuantizedTensor)
            )
            buffers = empty(self.shape, self.quantizer, place)
            named = dict(zip(self.quantizer.buffer_names(), buffers, strict=True))
            made = kind(self.quantizer, self.shape, self.dtype, **named)
        return made.requires_grad_() if self.requires_grad else made

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> TensorProto:
        """Returns a prototype with other copies; None leaves a copy as it is. The quantizer itself does not change.

        **Raises** TypeError for a plain tensor, ValueError if no copy is left.
        """
        if self.quantizer is None:
            raise ArgumentError(
                "TensorProto.update_usage: a plain tensor has no copies; make a prototype with quantizer= first"
            )
        q = self.quantizer
        wanted = q.with_usage(
            rowwise=q.rowwise if rowwise_usage is None else rowwise_usage,
            columnwise=q.columnwise if columnwise_usage is None else columnwise_usage,
        )
        return self._replace(quantizer=wanted)


def to_tensor_proto(t: Any, requires_grad: bool | None = None) -> TensorProto:
    """Returns the prototype of a tensor. `requires_grad`: None takes the tensor's own. **Raises** TypeError if `t` is
    no tensor."""
    require_tensor("to_tensor_proto", "t", t)
    made = proto_of(t)
    return made if requires_grad is None else made._replace(requires_grad=requires_grad)


def proto_of(t: Tensor) -> TensorProto:
    """Returns the prototype of a tensor, without the check of `to_tensor_proto`."""
    quantizer = t.quantizer if isinstance(t, QuantizedTensorBase) else None
    return TensorProto(t.shape, t.dtype, quantizer, t.device, t.requires_grad, isinstance(t, QuantizedStack))
