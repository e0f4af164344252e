"""Shape rules of the ops that move rows between token order and expert order, beside those of `shapes`."""

from __future__ import annotations

from diptych.common.shapes import Buffer, Size


def padded_rows(entries: Size, experts: Size, align: int) -> Size:
    """Rows that hold `entries` (token, expert) pairs whatever the routing, each expert's region rounded up to `align`.

    An index map of [T, k] has at most T * k entries; of a mask the caller knows how many choices a token makes.
    """
    return (entries + experts * (align - 1)) // align * align


def map_buffers(tokens: Size, slots: Size, experts: Size, rows: Size) -> tuple[Buffer, ...]:
    """What `permute_map` fills."""
    return (
        Buffer("row_id_map", (tokens, slots), "int32"),
        Buffer("tokens_per_expert", (experts,), "int32"),
        Buffer("expert_offsets", (experts + 1,), "int32"),
        Buffer("source", (rows,), "int32"),
    )
