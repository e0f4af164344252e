"""The verb `hash`: a hash of a tensor's bits."""

from __future__ import annotations

from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.torch.primitives import hash as hash_ops
from diptych.torch.primitives.checks import require_tensor
from diptych.torch.tensors.quantized import QuantizedTensor


def hash(x: Tensor) -> Tensor:
    """Returns the hash of the bits of `x`, int32 [4] on its device (NUMERICS 10). The host does not wait for it.

    **Arguments:** `x`: any shape; integers, floats, complex numbers or bools of whole bytes. Its elements count in
    row-major order; shape and dtype do not count.

    **Raises:** TypeError for another dtype, or a quantized tensor, whose copies have hashes of their own;
    NotImplementedError where grad mode is on and `x` requires grad, since a hash has no derivative.
    """
    require_tensor("hash", "x", x)
    if isinstance(x, QuantizedTensor):
        raise ArgumentError("hash: x is a QuantizedTensor; hash the tensors of its copies, such as x.rowwise_data")
    return hash_ops.hash(x)
