"""Shape rules of the ops that move rows between token order and expert order, beside those of `shapes`."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.ops.shapes import Buffer, Size


def padded_rows(entries: Size, experts: Size, align: int) -> Size:
    """Rows that hold `entries` (token, expert) pairs whatever the routing, each expert's region rounded up to `align`.

    An index map of [T, k] has at most T * k entries; of a mask the caller knows how many choices a token makes.
    """
    return (entries + experts * (align - 1)) // align * align


def counted_rows(counts: Sequence[Size], align: int) -> Size:
    """Rows of regions for these counts, each rounded up to a multiple of `align`."""
    rows: Size = 0
    for n in counts:
        rows += (n + align - 1) // align * align
    return rows


def overflow(counts: Sequence[int], found: Sequence[int], align: int) -> int:
    """Where regions are placed by `counts` and hold what was `found`: how many more rows than theirs they reach."""
    before = end = pad = 0
    for n, there in zip(counts, found, strict=True):
        before += there
        end = max(end, before + pad if there else 0)
        pad += -n % align
    return end - counted_rows(counts, align)


def map_buffers(tokens: Size, slots: Size, experts: Size, rows: Size) -> tuple[Buffer, ...]:
    """The buffers that `permute_map` fills."""
    return (
        Buffer("row_id_map", (tokens, slots), "int32"),
        Buffer("tokens_per_expert", (experts,), "int32"),
        Buffer("expert_offsets", (experts + 1,), "int32"),
        Buffer("row_source", (rows,), "int32"),
    )
