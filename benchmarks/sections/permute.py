"""Permuting rows between token order and expert order, beside a copy of as many bytes. Each result is compared with
torch's own indexing, and a fused permute and quantize with the two separate ops.

A permute is timed together with building its map. At least (1 + k) * T rows must be read and written; padding is not
counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import room
from benchmarks.cases import Case
from benchmarks.quantizers import quantizers
from benchmarks.results import Row
from benchmarks.room import Run, copy_run, measured, normal, poison
from benchmarks.sections.quantize import prepared
from diptych.core import _core

KINDS = _core.moe_table()["routing_map"]
PERMUTED = _core.fused_table()["source"]["permuted"]
ONES = 0x3F800000  # float32 1.0: the scale of an absent row
ALIGN = 128


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=room.DEVICE)


class RowMap(NamedTuple):
    """A routing, and the buffers of its map."""

    kind: str
    routing: torch.Tensor
    align: int
    buffers: tuple[torch.Tensor, ...]  # as permute_map takes them
    workspace: torch.Tensor

    @staticmethod
    def new(kind: str, ids: torch.Tensor, experts: int, rows: int, align: int = 1) -> RowMap:
        tokens, k = ids.shape
        routing = ids
        if kind == "mask":
            routing = torch.zeros(tokens, experts, dtype=torch.uint8, device=room.DEVICE).scatter_(1, ids.long(), 1)
        buffers = empty(*routing.shape), empty(experts), empty(experts + 1), empty(rows)
        scratch = _core.permute_map_workspace_bytes(KINDS[kind], tokens if kind == "mask" else tokens * k, experts)
        return RowMap(kind, routing, align, buffers, empty(scratch, dtype=torch.uint8))

    @property
    def to(self) -> torch.Tensor:
        return self.buffers[0]

    @property
    def row_source(self) -> torch.Tensor:
        return self.buffers[3]

    def build(self) -> None:
        to, counts, offsets, row_source = self.buffers
        _core.permute_map(self.routing, KINDS[self.kind], self.align, to, counts, offsets, row_source, self.workspace)


def expected_source(ids: torch.Tensor, experts: int, rows: int, align: int) -> torch.Tensor:
    """Returns each row's token, or -1, computed by torch's stable sort."""
    tokens, k = ids.shape
    token = torch.arange(tokens, device=ids.device).repeat_interleave(k)
    expert = ids.reshape(-1).long()
    order = torch.sort(expert, stable=True).indices
    counts = torch.bincount(expert, minlength=experts)
    whole = (counts + align - 1) // align * align
    starts, first = torch.cumsum(whole, 0) - whole, torch.cumsum(counts, 0) - counts
    row = starts[expert[order]] + torch.arange(len(order), device=ids.device) - first[expert[order]]
    source = torch.full((rows,), -1, dtype=torch.long, device=ids.device)
    source[row] = token[order]
    return source


def rows_at(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.where(source[:, None] >= 0, x.index_select(0, source.clamp(min=0)), torch.zeros_like(x[:1]))


def summed(x: torch.Tensor, to: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    """Returns each token's sum of rows in ascending order, in float32 with every operation rounded."""
    k = int((to >= 0).sum(1).max())
    big = torch.iinfo(torch.int32).max
    found, slots = torch.where(to >= 0, to, big).sort(1)
    acc = torch.zeros(len(to), x.shape[1], device=x.device)
    for j in range(k):
        there = found[:, j] < big
        term = x[found[:, j].clamp(max=len(x) - 1).long()].float()
        if probs is not None:
            term = probs.gather(1, slots[:, j : j + 1]).float() * term
        acc = torch.where(there[:, None], acc + term, acc)
    return acc.to(x.dtype)


def other_bytes(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Returns the fraction of bytes in which tensors differ."""
    flat = [tuple(t.contiguous().view(torch.uint8).flatten() for t in pair) for pair in pairs]
    return float(sum((a != b).sum() for a, b in flat)) / sum(a.numel() for a, _ in flat)


def exactly(call: Any, outputs: list[torch.Tensor], *pairs: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Returns a check that poisons a call's outputs, repeats it and compares bytes."""

    def check(_: Any) -> float:
        poison(*outputs)
        call()
        return other_bytes(*pairs)

    return check


def moves(kind: str, ids: torch.Tensor, x: torch.Tensor, experts: int) -> Iterator[tuple[str, Run]]:
    (tokens, k), width = ids.shape, x.shape[1]
    moved = (1 + k) * tokens * width * 2
    m = RowMap.new(kind, ids, experts, tokens * k)
    y, back = empty(tokens * k, width, dtype=x.dtype), torch.empty_like(x)
    source = expected_source(ids, experts, tokens * k, 1)

    def permute() -> None:
        m.build()
        _core.permute([(x, y, 0)], m.to, m.row_source)

    yield "permute", Run(permute, bytes=moved, check=exactly(permute, [y, *m.buffers], (y, rows_at(x, source))))
    yield "permute, map built before", Run(lambda: _core.permute([(x, y, 0)], m.to, m.row_source), bytes=moved)
    permute()
    probs = torch.rand(m.to.shape, device=room.DEVICE)
    dprobs, moved_dprobs = torch.empty_like(probs), torch.rand(tokens * k, device=room.DEVICE)
    rows, dx = rows_at(x, source), torch.empty_like(y)

    def unpermute() -> None:
        _core.unpermute(rows, m.to, probs, back)

    def permute_grad() -> None:
        _core.unpermute(rows, m.to, None, back, moved_dprobs, dprobs)

    def unpermute_grad() -> None:
        _core.unpermute_grad(x, m.to, m.row_source, probs, dx, rows, dprobs)

    p = probs.reshape(-1)[m.row_source.long()]
    want_dx = (p[:, None] * rows.float()).bfloat16()
    yield "unpermute", Run(unpermute, bytes=moved, check=exactly(unpermute, [back], (back, summed(rows, m.to, probs))))
    yield (
        "gradient of permute",
        Run(permute_grad, bytes=moved, check=exactly(permute_grad, [back], (back, summed(rows, m.to, None)))),
    )
    yield (
        "gradient of unpermute",
        Run(unpermute_grad, bytes=(1 + 2 * k) * tokens * width * 2, check=exactly(unpermute_grad, [dx], (dx, want_dx))),
    )
    counts = torch.bincount(ids.reshape(-1).long())
    count = int(((counts + ALIGN - 1) // ALIGN * ALIGN).sum())
    padded = RowMap.new(kind, ids, experts, count, ALIGN)
    wide, moved_probs = empty(count, width, dtype=x.dtype), empty(count, dtype=probs.dtype)

    def pad() -> None:
        padded.build()
        _core.permute([(x, wide, 0)], padded.to, padded.row_source, probs, moved_probs)

    want = rows_at(x, expected_source(ids, experts, count, ALIGN))
    yield "permute, padded, probs", Run(pad, bytes=moved, check=exactly(pad, [wide], (wide, want)))


def planes(ids: torch.Tensor, width: int, experts: int) -> Iterator[tuple[str, Run]]:
    """FP8 payloads with float32 scales of 128 elements beside them, and the columnwise copy of a per-tensor one."""
    tokens, k = ids.shape
    data = torch.randint(0, 255, (tokens, width), dtype=torch.uint8, device=room.DEVICE)
    scales = torch.rand(tokens, width // 128, device=room.DEVICE)
    m = RowMap.new("index", ids, experts, tokens * k)
    m.build()
    to_data, to_scales = empty(tokens * k, width, dtype=data.dtype), empty(tokens * k, width // 128, dtype=scales.dtype)
    columns, to_columns = data.t().contiguous(), empty(width, tokens * k, dtype=data.dtype)

    def rows() -> None:
        m.build()
        _core.permute([(data, to_data, 0), (scales, to_scales, ONES)], m.to, m.row_source)

    def transposed() -> None:
        _core.permute_columns(columns, to_columns, m.row_source, k)

    source = expected_source(ids, experts, tokens * k, 1)
    wants = rows_at(data, source), rows_at(scales, source)
    check = exactly(rows, [to_data, to_scales], (to_data, wants[0]), (to_scales, wants[1]))
    yield "rows and scales", Run(rows, bytes=(1 + k) * tokens * (width + width // 32), check=check)
    check = exactly(transposed, [to_columns], (to_columns, wants[0].t()))
    yield "columns", Run(transposed, bytes=(1 + k) * tokens * width, check=check)


def quantizing(case: Case, ids: torch.Tensor, x: torch.Tensor, experts: int) -> Iterator[tuple[str, Run]]:
    """The fused quantize of permuted rows. Bytes: x, as often as the scale rule reads it, and the outputs."""
    tokens, k = ids.shape
    m = RowMap.new("index", ids, experts, tokens * k)
    m.build()
    moved = empty(tokens * k, x.shape[1], dtype=x.dtype)
    _core.permute([(x, moved, 0)], m.to, m.row_source)
    for name in case.names:
        named = quantizers()[name].with_copies(case.what.split()[1])
        (_, fused, outputs), (_, apart, wants) = prepared(moved, named), prepared(moved, named)
        _core.quantize(moved, *apart)

        def one(arguments: list[Any] = fused) -> None:
            _core.quantize(x, *arguments, source=(PERMUTED, m.to, m.row_source))

        nbytes = x.numel() * 2 * named.reads + sum(t.numel() * t.element_size() for t in outputs)
        yield name, Run(one, bytes=nbytes, check=exactly(one, outputs, *zip(outputs, wants, strict=True)))


def rows(case: Case, _: Any) -> Iterator[Row]:
    tokens, width, experts, k = case.shape
    ids = torch.rand(tokens, experts, device=room.DEVICE).topk(k, dim=1).indices.int()
    if case.what == "FP8 planes":
        runs = dict(planes(ids, width, experts))
    elif case.what in KINDS:
        runs = dict(moves(case.what, ids, normal(tokens, width), experts))
    else:
        runs = dict(quantizing(case, ids, normal(tokens, width), experts))
    yield from measured(case, {"copy": copy_run((1 + k) * tokens * width * 2)} | runs)
