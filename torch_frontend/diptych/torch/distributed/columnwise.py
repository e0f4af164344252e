"""Columnwise copies made from rowwise ones, for formats whose blocks are square or whole tensors.

Both copies of such a tensor have the same amaxes, so the columnwise copy is the rowwise one transposed, and no rank has
to send it ([Numerics](docs/numerics.md), 2-D blocks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.quantizers import Quantizer

LOW_BITS = 0xF  # the first element's bits in a byte that packs two


def transposed(quantizer: Quantizer, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the columnwise copy (data, scales) of a matrix or of a stack of matrices, as views where possible. If the
    bytes of the data must be transposed (`byte_transposed`), the data are returned unchanged.

    **Arguments:** `data`, `scale_inv`: the rowwise copy that a quantizer made whose copies agree (`copies_agree`).
    """
    fmt = quantizer.format
    turned = fmt.columnwise == "transposed"
    if turned and fmt.pack == 2:
        data = _transposed_nibbles(data)
    if fmt.one_scale:
        return data, scale_inv
    if fmt.block_rows == fmt.block_cols:
        return data, scale_inv.transpose(-2, -1)
    each = fmt.block_cols  # scales of square blocks are repeated for each of their rows
    once = scale_inv.view(torch.uint8)[..., ::each, :]
    spread = once.transpose(-2, -1) if turned else once
    columns = data.shape[-2] if turned and fmt.pack == 2 else data.shape[-1]  # columns may end inside of a block
    dim = -2 if turned else -1
    return data, spread.repeat_interleave(each, dim).narrow(dim, 0, columns).view(scale_inv.dtype)


def byte_transposed(quantizer: Quantizer) -> bool:
    """Returns whether the columnwise data are the rowwise data with their bytes transposed."""
    return quantizer.format.columnwise == "transposed" and quantizer.format.pack == 1


def _transposed_nibbles(data: Tensor) -> Tensor:
    """Returns transposed matrices, whose bytes pack two elements of a row, the first one in the low bits."""
    turned = torch.stack((data & LOW_BITS, data >> 4), -1).flatten(-2).transpose(-2, -1)
    return turned[..., ::2] | turned[..., 1::2] << 4
