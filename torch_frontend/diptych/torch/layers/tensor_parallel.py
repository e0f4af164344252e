"""Linear layers that are cut over a tensor-parallel group: what the ranks of the group exchange (NUMERICS 9).

                     column: weight [N / ranks, K]             row: weight [N, K / ranks]
    input            whole, or this rank's tokens (sequence)   [M, K / ranks]
    fprop            gathers the input's tokens (sequence)     sums the ranks' partial products, then adds the bias
    gradient         [M, N / ranks]                            whole, or this rank's tokens (sequence)
    dgrad            sums the ranks' partial products          gathers the gradient's tokens (sequence)
    wgrad            gathers the input's tokens (sequence)     gathers the gradient's tokens (sequence)

Tokens are cut along dimension 0, in rank order. Invariants:

- Operands are quantized by amaxes that are reduced over the group, so that their bytes and scales are those of the
  whole tensor; gathers carry these bytes.
- Each rank rounds its partial product to the result's dtype. They travel by all-to-all, and are added in float32 in
  ascending rank, whatever a transport's own order of additions is. A sum is cut into the ranks' tokens (sequence), or
  every rank has all of it.
- Extents along a cut are whole blocks, which `require_whole_blocks` checks before anything is sent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.formats import FORMATS
from diptych.common.layers.schedule import Schedule
from diptych.common.quantizers import ROW_AMAX, SQUARE, Quantizer
from diptych.torch.tensors.copies import Operand
from diptych.torch.tensors.quantized import QuantizedTensorBase

COLUMN, ROW = "column", "row"


class Cut(NamedTuple):
    """How a layer is cut. `mode`: COLUMN or ROW. `sequence`: the activations outside of the layer's pair are cut along
    tokens. `ranks`: the size of the group. `gathered`: the weight comes quantized, by the whole weight's amax."""

    mode: str
    sequence: bool
    ranks: int
    gathered: bool = False

    @property
    def gathers_input(self) -> bool:
        return self.sequence and self.mode == COLUMN

    @property
    def gathers_gradient(self) -> bool:
        return self.sequence and self.mode == ROW

    def out_rows(self, rows: Any) -> Any:
        """The extent of dimension 0 of a layer's result, whose input has `rows`."""
        if not self.sequence:
            return rows
        return rows * self.ranks if self.mode == COLUMN else rows // self.ranks


# --- what the products of a layer call -------------------------------------------------------------------------------


def whole_input(x: Operand, cut: Cut | None, group: Any) -> Operand:
    """The input of fprop and wgrad with the tokens of all ranks."""
    return gathered(x, cut.ranks, group) if cut is not None and cut.gathers_input else x


def whole_gradient(dy: Operand, cut: Cut | None, group: Any) -> Operand:
    """The gradient that dgrad and wgrad read, with the tokens of all ranks."""
    return gathered(dy, cut.ranks, group) if cut is not None and cut.gathers_gradient else dy


def whole_output(y: Tensor, bias: Tensor | None, cut: Cut, group: Any) -> Tensor:
    """fprop's result [M, ...]: of a row-parallel layer the sum over ranks plus the bias."""
    return summed(y, cut.ranks, group, cut.sequence, bias) if cut.mode == ROW else y


def whole_input_gradient(dx: Tensor, cut: Cut | None, group: Any) -> Tensor:
    """dgrad's result [M, ...]: of a column-parallel layer the sum over ranks."""
    return summed(dx, cut.ranks, group, cut.sequence) if cut is not None and cut.mode == COLUMN else dx


def sum_over_tokens(grad: Tensor, cut: Cut | None, group: Any, mode: str) -> Tensor:
    """The gradient of a parameter that every rank holds, and that acts on the rank's tokens alone: a row-parallel
    layer's bias, or the norm in front of a column-parallel layer."""
    if cut is None or not cut.sequence or cut.mode != mode:
        return grad
    return summed(grad.unsqueeze(1), cut.ranks, group, False).squeeze(1)


# --- transport -------------------------------------------------------------------------------------------------------
# A graph's layouts come from running this code on fake tensors, of which nothing is sent.


def gathered(operand: Operand, ranks: int, group: Any) -> Operand:
    """Joins the tokens of all ranks, in rank order. A copy's bytes and scales travel; scales of the whole tensor are on
    every rank already."""
    if isinstance(operand, Tensor):
        return _gathered_rows(operand.reshape(-1, operand.shape[-1]), ranks, group)
    data, scale_inv, amax, format_id, columnwise = operand
    fmt = FORMATS[format_id]
    join = _gathered_columns if columnwise and fmt.columnwise == "transposed" else _gathered_rows
    scales = scale_inv if fmt.per_tensor else join(scale_inv, ranks, group)
    return join(data, ranks, group), scales, amax, format_id, columnwise


def summed(partial: Tensor, ranks: int, group: Any, scatter: bool, bias: Tensor | None = None) -> Tensor:
    """The sum of the ranks' partial results [M, N] plus the bias, rounded once to their dtype: [M / ranks, N] of this
    rank's tokens with `scatter`, which needs M to be a multiple of `ranks`, else [M, N]."""
    rows = partial.shape[0]
    padded = partial if rows % ranks == 0 else F.pad(partial, (0, 0, 0, -rows % ranks))
    received = torch.empty_like(padded, memory_format=torch.contiguous_format)
    if not is_fake(received):
        torch.distributed.all_to_all_single(received, padded.contiguous(), group=group)
    parts = received.view(ranks, -1, *padded.shape[1:])
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    if bias is not None:
        total += bias
    total = total.to(partial.dtype)
    return total if scatter else _gathered_rows(total, ranks, group)[:rows]


def _gathered_rows(t: Tensor, ranks: int, group: Any) -> Tensor:
    sent = t.contiguous()
    if sent.element_size() == 1:
        sent = sent.view(torch.uint8)  # gloo refuses FP8, and NCCL E8M0 and E2M1
    made = torch.empty((ranks * sent.shape[0], *sent.shape[1:]), dtype=sent.dtype, device=sent.device)
    if not is_fake(made):
        _all_gather()(made, sent, group=group)
    return made.view(t.dtype)


def _all_gather() -> Any:
    """torch's gather into one tensor, whose name torch 2.13 has changed."""
    found = getattr(torch.distributed, "all_gather_single", None)
    return torch.distributed.all_gather_into_tensor if found is None else found


def _gathered_columns(t: Tensor, ranks: int, group: Any) -> Tensor:
    """Joins [K, M / ranks] of all ranks to [K, M]."""
    stacked = _gathered_rows(t, ranks, group).view(ranks, *t.shape)
    if stacked.element_size() == 1:
        return stacked.view(torch.uint8).transpose(0, 1).flatten(1).view(t.dtype)
    return stacked.transpose(0, 1).flatten(1)


# --- what can be cut -------------------------------------------------------------------------------------------------


def require_whole_blocks(
    op: str, s: Schedule, cut: Cut, leading: tuple[int, ...], weight: Any, stacked: int = 1
) -> None:
    """Checks a layer's operands and results before its ranks exchange anything.

    **Arguments:** `leading`: the input's leading dimensions. `stacked`: the weights that lie one below the other in
    `weight`, each of which is cut.

    **Raises** ShapeError for tokens that ranks would not share evenly and for blocks that a cut would divide,
    UnsupportedError for a weight that is held quantized, whose amax may be the part's, a user's own quantizer, and
    amaxes of rows.
    """
    if isinstance(weight, QuantizedTensorBase) and not cut.gathered:
        raise UnsupportedError(f"{op}: a weight that is held quantized cannot be cut over a tensor-parallel group")
    if cut.sequence:
        if not leading:
            raise ShapeError(f"{op}: sequence parallelism cuts dimension 0 of an input [tokens, ..., K]; got one row")
        if cut.mode == ROW and leading[0] % cut.ranks:
            raise ShapeError(f"{op}: dimension 0 of the input, {leading[0]}, is no multiple of the {cut.ranks} ranks")
    tokens = math.prod(leading)
    shared = tokens if cut.gathers_input or not cut.sequence else tokens // cut.ranks
    n, k = weight.shape[0] // stacked, weight.shape[1]
    # Each operand's calls, with the extent that a rank has along the cut, or None where the operand is whole.
    inputs = (shared if cut.gathers_input else None, k if cut.mode == ROW else None)
    gradients = (shared if cut.gathers_gradient else None, n if cut.mode == COLUMN else None)
    weights = (n, None) if cut.mode == COLUMN else (None, k)
    output, *of_gradients = [() if call is None else (call,) for call in s.results]
    dx, dw = [
        [call._replace(quantizer=call.quantizer.with_usage(columnwise=False)) for call in of] for of in of_gradients
    ]
    for what, calls, (rows, cols) in (
        ("input", (*s.x, *s.x_late), inputs), ("weight", (*s.w, *s.w_late), weights), ("gradient", s.dy, gradients),
        ("result", output, gradients), ("input's gradient", dx, inputs), ("weight's gradient", dw, weights),
    ):  # fmt: skip
        for call in calls:
            require_whole(f"{op}: the {what}", call.quantizer, rows, cols)


def require_whole(what: str, quantizer: Quantizer, rows: int | None, cols: int | None) -> None:
    """Checks one operand. `rows`, `cols`: the extents that a rank has along a cut, else None. `what`: the operand's
    name. **Raises** as `require_whole_blocks`."""
    if rows is None and cols is None:
        return
    if quantizer.custom:
        raise UnsupportedError(
            f"{what}'s {quantizer} is the user's own and may read the whole tensor; it cannot be cut"
        )
    if quantizer.spec.flags & ROW_AMAX:
        raise UnsupportedError(f"{what}'s {quantizer} has amaxes of rows, which are not reduced over ranks")
    fmt = quantizer.format
    if fmt.per_tensor:
        return
    square = bool(quantizer.spec.flags & SQUARE)
    tall = fmt.block_cols if quantizer.columnwise or square else fmt.block_rows
    wide = fmt.block_cols if quantizer.rowwise or square else fmt.block_rows
    for extent, block, name in ((rows, max(tall, fmt.block_rows), "rows"), (cols, wide, "columns")):
        if extent is not None and extent % block:
            raise ShapeError(
                f"{what} has {extent} {name} on each rank, and {fmt.name} needs a multiple of {block}: "
                "a block is never cut"
            )
