"""Columnwise copies made from rowwise ones, for formats whose blocks are square or whole tensors.

Both copies of such a tensor have the same amaxes, so the columnwise copy is the rowwise one transposed, and no rank has
to send it ([Numerics](docs/numerics.md), 2-D blocks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.quantizers import SQUARE, Quantizer

LOW_BITS = 0xF  # of a byte that packs two elements: the first one's


def transposable(quantizer: Quantizer) -> bool:
    """Whether a quantizer's columnwise copy is its rowwise copy transposed."""
    fmt = quantizer.format
    return fmt.per_tensor or fmt.block_rows == fmt.block_cols or bool(quantizer.spec.flags & SQUARE)


def transposed(quantizer: Quantizer, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the columnwise copy (data, scales) of a matrix, as views where they suffice.

    **Arguments:** `data`, `scale_inv`: the rowwise copy, by a quantizer that is `transposable`.
    """
    fmt = quantizer.format
    if fmt.columnwise == "transposed":
        turned = _transposed_nibbles(data) if fmt.pack == 2 else data.view(torch.uint8).t().view(data.dtype)
    else:
        turned = data
    if fmt.per_tensor:
        return turned, scale_inv
    if fmt.block_rows == fmt.block_cols:
        return turned, scale_inv.t()
    each = fmt.block_cols  # scales of square blocks are repeated for each of their rows
    once = scale_inv.view(torch.uint8)[::each]
    spread = once.t() if fmt.columnwise == "transposed" else once
    dim = 0 if fmt.columnwise == "transposed" else 1
    return turned, spread.repeat_interleave(each, dim).narrow(dim, 0, turned.shape[dim]).view(scale_inv.dtype)


def _transposed_nibbles(data: Tensor) -> Tensor:
    """Transposes a matrix whose bytes pack two elements of a row, the first in the low bits."""
    turned = torch.stack((data & LOW_BITS, data >> 4), -1).flatten(1).t()
    return turned[:, ::2] | turned[:, 1::2] << 4
