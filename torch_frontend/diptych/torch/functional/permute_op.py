"""The permutations as differentiable ops: eagerly functions, in a graph one node forward and one backward.

Backward keeps arguments, above all maps, and recomputes what costs less than its memory: a graph that is retained under
torch.compile must still hold all that it saved.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from diptych.common.ops import shapes
from diptych.core._permute import moved_parts
from diptych.torch.graph.custom_op import CustomOp, Size
from diptych.torch.graph.proto import TensorProto
from diptych.torch.primitives import permute as permute_ops
from diptych.torch.primitives.register import direct
from diptych.torch.tensors.quantized import BUFFERS, QuantizedTensor

FIRST_ALONE = "; detach() what is not to be differentiated twice"


def _move(
    x: Tensor | QuantizedTensor,
    row_id_map: Tensor,
    row_source: Tensor,
    probs: Tensor | None,
    zero_prob_is_padding: bool,
) -> tuple[Tensor, ...]:
    """Returns x's rows in the order of the map, and with `probs` each row's probability, [rows]."""
    if not isinstance(x, QuantizedTensor):
        return tuple(permute_ops.permute([x], [0], row_id_map, row_source, probs, zero_prob_is_padding))
    parts = moved_parts(x.quantizer)
    planes: list[Any] = [getattr(x, name) for name in parts]
    made = permute_ops.permute(planes, list(parts.values()), row_id_map, row_source, probs, zero_prob_is_padding)
    buffers = dict(zip(parts, made, strict=False))
    for name in BUFFERS:
        t = getattr(x, name)
        if t is None or name in buffers:
            continue
        if name == "columnwise_data":
            buffers[name] = permute_ops.permute_columns(t, row_source, max(1, row_id_map.shape[1]))
        else:  # of the whole tensor
            buffers[name] = t.clone()
    moved = QuantizedTensor(x.quantizer, (row_source.shape[0], x.shape[-1]), x.dtype, **buffers)
    return moved, *made[len(parts) :]


def moved_protos(x: Any, probs: Any, rows: Any, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    quantizer = x.quantizer if isinstance(x, QuantizedTensor) else None
    protos = [TensorProto((rows, x.shape[-1]), x.dtype, quantizer, x.device, "x" in needs)]
    if probs is not None:
        protos.append(TensorProto((rows,), probs.dtype, None, probs.device, "probs" in needs))
    return tuple(protos)


def move_back(
    a: Any, needs: tuple[str, ...], grads: list[Tensor | None], row_id_map: Tensor, x_map: Tensor
) -> list[Tensor]:
    """The gradients of x, a sum over the rows of `x_map`, and of probs."""
    dy, moved = grads[0], grads[1] if len(grads) > 1 else None
    made: dict[str, Tensor] = {}
    at_once = dy if "x" in needs and x_map is row_id_map else None
    if "probs" in needs:
        if moved is None:
            made["probs"] = torch.zeros(a.probs.shape, dtype=a.probs.dtype, device=row_id_map.device)
        else:  # rows without columns: nothing is summed
            rows = moved.new_empty((moved.shape[0], 0), dtype=torch.float32) if at_once is None else at_once
            summed, gathered = permute_ops.unpermute(rows, row_id_map, None, moved)
            made["probs"] = gathered.view(a.probs.shape)
            if at_once is not None:
                made["x"] = summed.view(a.x.shape)
    if "x" in needs and "x" not in made:
        if dy is None:
            made["x"] = torch.zeros(a.x.shape, dtype=a.x.dtype, device=row_id_map.device)
        else:
            made["x"] = permute_ops.unpermute(dy, x_map)[0].view(a.x.shape)
    return [made[name] for name in needs]


@dataclasses.dataclass
class Permute:
    x: Tensor | QuantizedTensor
    probs: Tensor | None
    row_id_map: Tensor
    row_source: Tensor
    zero_prob_is_padding: bool


def _permute_forward(a: Permute, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    return _move(a.x, a.row_id_map, a.row_source, a.probs, a.zero_prob_is_padding), []


def _permute_layout(a: Permute, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    return moved_protos(a.x, a.probs, a.row_source.shape[0], needs)


def _permute_backward(
    a: Permute, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]
) -> list[Tensor]:
    x_map = a.row_id_map
    if a.zero_prob_is_padding:  # such rows are zeros whatever x is, and give it no gradient
        assert a.probs is not None
        x_map = torch.where(a.probs == 0, -1, a.row_id_map)
    return move_back(a, needs, grads, a.row_id_map, x_map)


def _permute_keeps(a: Permute, needs: tuple[str, ...]) -> tuple[str, ...]:
    return ("row_id_map", "probs") if a.zero_prob_is_padding else ("row_id_map",)


_permute_op = CustomOp(
    "diptych::moe_permute", Permute, _permute_forward, _permute_layout, _permute_backward, keeps=_permute_keeps,
    remedy=FIRST_ALONE,
)  # fmt: skip


@dataclasses.dataclass
class SortChunks:
    """Sizes and order of chunks, as tensors or as numbers. Backward makes the map again, which is cheaper than keeping
    it."""

    x: Tensor | QuantizedTensor
    probs: Tensor | None
    split_sizes: Tensor | None
    sorted_index: Tensor | None
    sizes: tuple[Size, ...]
    index: tuple[Size, ...]

    def map(self) -> tuple[Tensor, Tensor]:
        sizes, index = [
            as_int32(numbers if t is None else t, self.x.device)
            for t, numbers in ((self.split_sizes, self.sizes), (self.sorted_index, self.index))
        ]
        return permute_ops.chunk_map(sizes, index, shapes.rows_cols(self.x.shape)[0])


def host_numbers(given: Any) -> tuple[Any, ...] | None:
    """Returns integers as numbers if the host has them without waiting; None for a GPU's and for traced ones."""
    if not isinstance(given, Tensor):
        return tuple(given)
    if torch.compiler.is_compiling() or not given.is_cpu or not direct(given, watched=True):
        return None
    return tuple(given.tolist())


def as_int32(numbers: Any, device: torch.device) -> Tensor:
    """Returns sizes or indices as an int32 tensor on the device, without waiting for it."""
    most = 2**31 - 1
    if isinstance(numbers, Tensor):
        return numbers if numbers.dtype == torch.int32 else numbers.clamp(-1, most).to(torch.int32)
    if not all(type(n) is int for n in numbers):  # traced: no values
        return torch.empty(len(numbers), dtype=torch.int32, device=device)
    # A captured copy would read host memory that is freed by then. Dynamo cannot trace the question for a capture.
    if device.type == "cuda" and (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()):
        each = [torch.full((1,), min(n, most), dtype=torch.int32, device=device) for n in numbers]
        return torch.cat(each) if each else torch.empty(0, dtype=torch.int32, device=device)
    return torch.tensor([min(n, most) for n in numbers], dtype=torch.int32, device="cpu").to(device, non_blocking=True)


def _sort_forward(a: SortChunks, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    row_id_map, row_source = a.map()
    probs = None if a.probs is None else a.probs.reshape(row_id_map.shape)
    return _move(a.x, row_id_map, row_source, probs, False), []


def _sort_layout(a: SortChunks, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    return moved_protos(a.x, a.probs, shapes.rows_cols(a.x.shape)[0], needs)


def _sort_backward(
    a: SortChunks, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]
) -> list[Tensor]:
    row_id_map, _ = a.map()
    return move_back(a, needs, grads, row_id_map, row_id_map)


_sort_chunks_op = CustomOp(
    "diptych::moe_sort_chunks", SortChunks, _sort_forward, _sort_layout, _sort_backward,
    keeps=lambda a, needs: ("split_sizes", "sorted_index"), remedy=FIRST_ALONE,
)  # fmt: skip


@dataclasses.dataclass
class Unpermute:
    """`row_source`: that of the map, if known. `pad_offsets`: numbers that are added to each expert's rows first."""

    x: Tensor
    probs: Tensor | None
    row_id_map: Tensor
    row_source: Tensor | None
    pad_offsets: Tensor | None

    def rows(self) -> Any:
        return shapes.rows_cols(self.x.shape)[0]

    def map(self) -> Tensor:
        return self.row_id_map if self.pad_offsets is None else shifted(self.row_id_map, self.pad_offsets, self.rows())


def shifted(row_id_map: Tensor, pad_offsets: Tensor, rows: Any) -> Tensor:
    """Returns a map whose rows are moved by their expert's offset; -1 for absent rows and those outside of
    0..rows-1."""
    to = row_id_map + pad_offsets.to(torch.int64)
    return torch.where((row_id_map >= 0) & (to >= 0) & (to < rows), to, -1).to(torch.int32)


def _unpermute_forward(a: Unpermute, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    return (permute_ops.unpermute(a.x, a.map(), a.probs)[0],), []


def _unpermute_layout(a: Unpermute, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    return (TensorProto((a.row_id_map.shape[0], a.x.shape[-1]), a.x.dtype, None, a.x.device, bool(needs)),)


def _unpermute_keeps(a: Unpermute, needs: tuple[str, ...]) -> tuple[str, ...]:
    kept = ("row_id_map", "row_source", "pad_offsets", "probs")
    return (*kept, "x") if "probs" in needs else kept


def _unpermute_backward(
    a: Unpermute, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]
) -> list[Tensor]:
    dy = grads[0]
    assert dy is not None
    row_id_map, row_source = a.row_id_map, a.row_source
    if row_source is None or a.pad_offsets is not None:
        row_id_map, row_source = permute_ops.invert_map(a.map(), a.rows())
    if a.probs is None:
        (dx,) = permute_ops.permute([dy], [0], row_id_map, row_source)
        return [dx.view(a.x.shape)]
    made = permute_ops.unpermute_grad(dy, row_id_map, row_source, a.probs, a.x if "probs" in needs else None)
    by_name: dict[str, Tensor] = dict(zip(("x", "probs"), made, strict=False))
    by_name["x"] = made[0].view(a.x.shape)
    return [by_name[name] for name in needs]


_unpermute_op = CustomOp(
    "diptych::moe_unpermute", Unpermute, _unpermute_forward, _unpermute_layout, _unpermute_backward,
    keeps=_unpermute_keeps, remedy=FIRST_ALONE,
)  # fmt: skip


def call(op: CustomOp, a: Any, *others: Tensor | None) -> tuple[Tensor, ...]:
    plain = None if isinstance(a.x, QuantizedTensor) else a.x
    return op.eager(a) if direct(plain, *others, unnamed=True) else op(a)


def permute(a: Permute) -> tuple[Tensor, ...]:
    """Moves rows by a map. Returns (permuted,), or (permuted, permuted_probs) where there are probabilities."""
    return call(_permute_op, a, a.probs, a.row_id_map, a.row_source)


def sort_chunks(a: SortChunks) -> tuple[Tensor, ...]:
    """Reorders chunks of rows. Returns (out,), or (out, permuted_probs) where there are probabilities."""
    return call(_sort_chunks_op, a, a.probs, a.split_sizes, a.sorted_index)


def unpermute(a: Unpermute) -> Tensor:
    """Sums each token's rows. Returns [T, H]."""
    return call(_unpermute_op, a, a.probs, a.row_id_map, a.row_source, a.pad_offsets)[0]
