"""The exchanges between ranks of linear layers that are cut over a tensor-parallel group (docs/numerics.md, section 9).

                     column: weight [N / ranks, K]             row: weight [N, K / ranks]
    input            whole, or this rank's tokens (sequence)   [M, K / ranks]
    fprop            gathers the input's tokens (sequence)     sums the ranks' partial products, then adds the bias
    gradient         [M, N / ranks]                            whole, or this rank's tokens (sequence)
    dgrad            sums the ranks' partial products          gathers the gradient's tokens (sequence)
    wgrad            gathers the input's tokens (sequence)     gathers the gradient's tokens (sequence)

Tokens are cut along dimension 0, in rank order. Invariants:

- Operands are quantized by amaxes that are reduced over the group, so that their bytes and scales are those of the
  whole tensor; gathers carry these bytes.
- An exchange begins as soon as the tensors to send are there, and is finished where its result is read, so that
  products run meanwhile. All ranks begin the exchanges of a group in the same order.
- Each rank rounds its partial product to the result's dtype. Partial products travel by all-to-all, and are added in
  float32 in ascending rank, whatever a transport's own order of additions is. A sum is cut into the ranks' tokens
  (sequence), or every rank has all of it.
- Stochastic rounding counts random bits over the whole tensor, which is the ranks' parts in rank order. The ranks of a
  group have one random state, which their module's seed decides.
- Extents along a cut are whole blocks, which `require_whole_blocks` checks before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.formats import FORMATS
from diptych.common.layer_options import COLUMN, ROW
from diptych.common.layers.schedule import Call, Schedule
from diptych.common.quantizers import ROW_AMAX, SQUARE, Quantizer
from diptych.torch.primitives.quantize import transpose
from diptych.torch.private.graphs import is_fake
from diptych.torch.tensors.copies import Copies, Operand
from diptych.torch.tensors.quantized import QuantizedTensorBase

T = TypeVar("T")
U = TypeVar("U")


class Cut(NamedTuple):
    """How a layer is cut. `mode`: COLUMN or ROW. `sequence`: the activations outside of the layer's pair are cut along
    tokens. `ranks`: the size of the group. `gathered`: the weight comes quantized, by the whole weight's amax. `group`:
    the process group; a graph has it beside the others, which are constants."""

    mode: str
    sequence: bool
    ranks: int
    gathered: bool = False
    group: Any = None

    def constants(self) -> tuple[str, bool, int, bool]:
        return self.mode, self.sequence, self.ranks, self.gathered

    @property
    def gathers_input(self) -> bool:
        return self.sequence and self.mode == COLUMN

    @property
    def gathers_gradient(self) -> bool:
        return self.sequence and self.mode == ROW

    def out_rows(self, rows: Any) -> Any:
        """Returns the extent of dimension 0 of a layer's result, if that of its input is `rows`."""
        if not self.sequence:
            return rows
        return rows * self.ranks if self.mode == COLUMN else rows // self.ranks


# --- exchanges -------------------------------------------------------------------------------------------------------


class Exchange(Generic[T]):
    """An exchange between ranks that has begun. Work that does not read its result may run until `finish`.

    `make`: a function that makes the result from the received tensors. `work`: torch's handle of the transfer; None if
    nothing is transferred. `sent`: the tensor that is kept alive until it has been transferred.
    """

    def __init__(self, make: Callable[[], T], work: Any = None, sent: Tensor | None = None) -> None:
        self._make, self._work, self._sent = make, work, sent
        self._made: list[T] = []

    def finish(self) -> T:
        """Returns the result, the same object each time. On a GPU the current stream waits for it, but not the host."""
        if not self._made:
            if self._work is not None:
                self._work.wait()
            self._made.append(self._make())
            del self._make, self._work, self._sent
        return self._made[0]

    def then(self, make: Callable[[T], U]) -> Exchange[U]:
        """Returns an exchange whose result is make(the result of this exchange)."""
        return Exchange(lambda: make(self.finish()))


# --- what the products of a layer call -------------------------------------------------------------------------------


def whole_input(make: Callable[[], Operand], cut: Cut | None) -> Exchange[Operand]:
    """Returns the exchange that gives the input of fprop and wgrad, with the tokens of all ranks. `make`: makes this
    rank's part. It is called at once if the part is sent, else when the exchange is finished."""
    return gathered(make(), cut.ranks, cut.group) if cut is not None and cut.gathers_input else Exchange(make)


def gradient_calls(calls: tuple[Call, ...], cut: Cut | None) -> tuple[Call, ...]:
    """Returns the calls by which a rank quantizes the gradient: only rowwise, if `whole_gradients` makes the columnwise
    copy from the rowwise one."""
    if not _turned(calls, cut):
        return calls
    return (calls[0]._replace(quantizer=calls[0].quantizer.with_usage(rowwise=True, columnwise=False)),)


def whole_gradients(
    dy: Tensor, copies: Copies, s: Schedule, cut: Cut | None
) -> tuple[Exchange[Operand], Exchange[Operand]]:
    """Returns the exchanges that give the gradient for dgrad and for wgrad, with the tokens of all ranks. `copies`: the
    gradient's, by `gradient_calls`."""
    rows, columns = [dy if copy is None else copy for copy in copies]
    if cut is None or not cut.gathers_gradient:
        return Exchange(lambda: rows), Exchange(lambda: columns)
    of_rows = gathered(rows, cut.ranks, cut.group) if s.w_kept else Exchange(lambda: rows)
    if _turned(s.dy, cut):
        return of_rows, of_rows.then(_turn)
    if not s.x_kept or (s.w_kept and columns is rows):
        return of_rows, of_rows
    return of_rows, gathered(columns, cut.ranks, cut.group)


def _turned(calls: tuple[Call, ...], cut: Cut | None) -> bool:
    """Returns whether the gradient's columnwise copy is its gathered rowwise copy transposed, since both have one
    scale."""
    if cut is None or not cut.gathers_gradient or len(calls) != 1:
        return False
    quantizer = calls[0].quantizer
    return quantizer.rowwise and quantizer.columnwise and quantizer.format.one_scale and not quantizer.custom


def _turn(rowwise: Operand) -> Operand:
    assert not isinstance(rowwise, Tensor)
    data, scale_inv, amax, format_id, _ = rowwise
    return transpose(data.reshape(-1, data.shape[-1])), scale_inv, amax, format_id, True


def whole_output(y: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """Returns fprop's result [M, ...], for a row-parallel layer summed over ranks and with the bias."""
    return summed(y, cut.ranks, cut.group, cut.sequence, bias).finish() if cut.mode == ROW else y


def whole_input_gradient(dx: Tensor, cut: Cut | None) -> Exchange[Tensor]:
    """Returns the exchange that gives dgrad's result [M, ...], for a column-parallel layer summed over ranks."""
    if cut is None or cut.mode != COLUMN:
        return Exchange(lambda: dx)
    return summed(dx, cut.ranks, cut.group, cut.sequence)


def sum_over_tokens(grad: Tensor, cut: Cut | None, mode: str) -> Tensor:
    """Returns a gradient summed over ranks, for a parameter that every rank holds and that acts only on the rank's own
    tokens: a row-parallel layer's bias, or the norm in front of a column-parallel layer."""
    if cut is None or not cut.sequence or cut.mode != mode:
        return grad
    return summed(grad.unsqueeze(1), cut.ranks, cut.group, False).finish().squeeze(1)


# --- transport -------------------------------------------------------------------------------------------------------
# This code also runs on fake tensors, which give a graph its layouts. Nothing is sent then.


def gathered(operand: Operand, ranks: int, group: Any) -> Exchange[Operand]:
    """Begins to join the tokens of all ranks, in rank order. A copy's bytes and scales are sent, but not the scale of a
    whole tensor, which every rank has."""
    if isinstance(operand, Tensor):
        return _gathered_rows(operand.reshape(-1, operand.shape[-1]), ranks, group)
    data, scale_inv, amax, format_id, columnwise = operand
    fmt = FORMATS[format_id]
    join = _gathered_columns if columnwise and fmt.columnwise == "transposed" else _gathered_rows
    payload = join(data, ranks, group)
    scales = Exchange(lambda: scale_inv) if fmt.one_scale else join(scale_inv, ranks, group)
    return payload.then(lambda whole: (whole, scales.finish(), amax, format_id, columnwise))


def summed(partial: Tensor, ranks: int, group: Any, scatter: bool, bias: Tensor | None = None) -> Exchange[Tensor]:
    """Begins the sum of the ranks' partial results [M, N] plus the bias, rounded once to their dtype: [M / ranks, N] of
    this rank's tokens with `scatter`, which needs M to be a multiple of `ranks`, else [M, N]."""
    rows = partial.shape[0]
    sent = (partial if rows % ranks == 0 else F.pad(partial, (0, 0, 0, -rows % ranks))).contiguous()
    received = torch.empty_like(sent)
    work = None
    if not is_fake(received):
        work = torch.distributed.all_to_all_single(received, sent, group=group, async_op=True)

    def added() -> Tensor:
        total = _sum(list(received.view(ranks, -1, *sent.shape[1:])), bias)
        return total if scatter else _gathered_rows(total, ranks, group).finish()[:rows]

    return Exchange(added, work, sent)


def _sum(parts: list[Tensor], bias: Tensor | None) -> Tensor:
    """Adds parts in their order, and the bias last, in float32, and rounds once."""
    first, *others = parts if bias is None else [*parts, bias]
    if len(others) == 1 and bias is None:
        return first + others[0]  # torch adds tensors of two bytes in float32 and rounds once
    total = first.to(torch.float32, copy=True)
    for t in others[:-1]:
        total += t
    return torch.add(total, others[-1], out=torch.empty_like(first)) if others else total.to(first.dtype)


def _gathered_rows(t: Tensor, ranks: int, group: Any) -> Exchange[Tensor]:
    sent = t.contiguous()
    if sent.element_size() == 1:
        sent = sent.view(torch.uint8)  # gloo refuses FP8, and NCCL refuses E8M0 and E2M1
    made = torch.empty((ranks * sent.shape[0], *sent.shape[1:]), dtype=sent.dtype, device=sent.device)
    work = None if is_fake(made) else _all_gather()(made, sent, group=group, async_op=True)
    return Exchange(lambda: made.view(t.dtype), work, sent)


def _all_gather() -> Any:
    """Returns torch's gather into one tensor, whose name changed in torch 2.13."""
    found = getattr(torch.distributed, "all_gather_single", None)
    return torch.distributed.all_gather_into_tensor if found is None else found


def _gathered_columns(t: Tensor, ranks: int, group: Any) -> Exchange[Tensor]:
    """Joins [K, M / ranks] of all ranks to [K, M]."""

    def joined(stacked: Tensor) -> Tensor:
        # Larger elements make fewer copies.
        words = stacked.view(ranks, *t.shape).view(_widest(t.shape[1] * t.element_size()))
        return words.transpose(0, 1).contiguous().view(t.dtype).flatten(1)

    return _gathered_rows(t, ranks, group).then(joined)


def _widest(nbytes: int) -> torch.dtype:
    """Returns the largest integer dtype whose size divides a row of `nbytes` bytes."""
    every = (torch.int64, torch.int32, torch.int16, torch.uint8) if nbytes else (torch.uint8,)
    return next(d for d in every if nbytes % d.itemsize == 0)


# --- random bits -----------------------------------------------------------------------------------------------------

_INPUT, _WEIGHT, _GRADIENT = range(3)
# The tensor of each quantize call, by the call's number (schedule.py): two calls for each operand, then y, dx and dw.
_TENSORS = (_INPUT, _INPUT, _WEIGHT, _WEIGHT, _GRADIENT, _GRADIENT, _GRADIENT, _INPUT, _WEIGHT)


def placed(rng: Tensor, call: Call, extents: tuple[Any, Any], cut: Cut) -> Tensor:
    """Returns the random state of a quantize call on this rank's part of a tensor, int32 [8]: the call's own state
    `rng`, and the part's place in the whole tensor. If every rank has the whole tensor, returns `rng`, [4]. `extents`:
    the part's rows and columns."""
    tensor, dim = _TENSORS[call.number], None
    if tensor == _WEIGHT:
        dim = 0 if cut.mode == COLUMN else 1
    elif (tensor == _INPUT) == (cut.mode == ROW):  # activations between the layers of a pair are cut along features
        dim = 1
    elif cut.sequence:
        dim = 0
    if dim is None:
        return rng
    place = [0, 0, *extents]
    place[dim] = torch.distributed.get_rank(cut.group) * extents[dim]
    place[2 + dim] = cut.ranks * extents[dim]
    return torch.cat([rng, *[rng.new_full((1,), n) for n in place]])  # new_full copies nothing from the host


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
        raise UnsupportedError(
            f"{op}: a weight that is held quantized cannot be cut over a tensor-parallel group; make the module "
            "outside of quantized_model_init"
        )
    if cut.sequence:
        if not leading:
            raise ShapeError(
                f"{op}: sequence parallelism cuts dimension 0 of an input [tokens, ..., K], got an input of one "
                "dimension; reshape it to [1, K]"
            )
        if cut.mode == ROW and leading[0] % cut.ranks:
            raise ShapeError(
                f"{op}: dimension 0 of the input must be a multiple of the {cut.ranks} ranks of the tensor-parallel "
                f"group, got {leading[0]}; pad the tokens"
            )
    tokens = math.prod(leading)
    shared = tokens if cut.gathers_input or not cut.sequence else tokens // cut.ranks
    n, k = weight.shape[0] // stacked, weight.shape[1]
    # (rows, columns) of each operand: the extent that a rank has along the cut, None along an axis that is not cut.
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
    """Checks one operand. `rows`, `cols`: the extent that a rank has, or None along an axis that is not cut. `what`:
    the operand's name. **Raises** as `require_whole_blocks`."""
    if rows is None and cols is None:
        return
    if quantizer.custom:
        raise UnsupportedError(
            f"{what} cannot be cut over ranks: its {quantizer.described()} is the user's own and may read the whole "
            "tensor; use a recipe with diptych's quantizers for a cut layer"
        )
    if quantizer.spec.flags & ROW_AMAX:
        raise UnsupportedError(
            f"{what} cannot be cut over ranks: its {quantizer.described()} has amaxes of rows, which are not reduced "
            "over ranks; use a quantizer with one amax (row_scaled_nvfp4=False), or do not cut this layer"
        )
    fmt = quantizer.format
    if fmt.one_scale:
        return
    square = bool(quantizer.spec.flags & SQUARE)
    made = [c for c, wanted in ((False, quantizer.rowwise), (True, quantizer.columnwise)) if wanted or square]
    blocks = [quantizer.copy_format(c).block(c) for c in made]
    for extent, axis, name in ((rows, 0, "rows"), (cols, 1, "columns")):
        if extent is None:
            continue
        each = [block[axis] for block in blocks]
        if not all(each):
            raise UnsupportedError(
                f"{what} is cut along its {name}, and a scale of {fmt.name} belongs to a block of all {name}; use a "
                "format with smaller blocks, or do not cut this layer"
            )
        block = max(each)
        if extent % block:
            raise ShapeError(
                f"{what} has {extent} {name} on each rank, and {fmt.name} needs a multiple of {block}, since "
                "a block is never cut"
            )
