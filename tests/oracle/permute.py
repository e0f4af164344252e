"""The ops that move rows between token order and expert order (NUMERICS 8), in plain NumPy loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Map(NamedTuple):
    row_id_map: np.ndarray  # int32 [T, slots]
    row_source: np.ndarray  # int32 [rows]
    tokens_per_expert: np.ndarray  # int32 [E]
    expert_offsets: np.ndarray  # int32 [E + 1]

    @property
    def rows(self) -> int:
        return len(self.row_source)


def row_map(routing: np.ndarray, experts: int, rows: int, align: int = 1) -> Map:
    """Returns the map of a mask (bool or uint8 [T, E]) or of expert ids (int [T, k])."""
    tokens, slots = routing.shape
    ids = routing.dtype.kind == "i"
    to = np.full(tokens * slots, -1, np.int64)
    counts, offsets, end = np.zeros(experts, np.int64), np.zeros(experts + 1, np.int64), 0
    for e in range(experts):
        entries = np.flatnonzero(routing.reshape(-1) == e) if ids else np.flatnonzero(routing[:, e]) * slots + e
        to[entries] = end + np.arange(len(entries))
        counts[e], offsets[e] = len(entries), end
        end += -(-len(entries) // align) * align
    offsets[experts] = end
    to[to >= rows] = -1
    row_source = np.full(rows, -1, np.int64)
    row_source[to[to >= 0]] = np.flatnonzero(to >= 0)
    kept = np.clip(rows - offsets[:-1], 0, counts)
    numbers = to.reshape(tokens, slots), row_source, kept, np.minimum(offsets, rows)
    return Map(*(n.astype(np.int32) for n in numbers))


def rows_needed(routing: np.ndarray, experts: int, align: int = 1) -> int:
    """Returns the smallest number of rows with which no row is dropped."""
    counts = [int(((routing == e) if routing.dtype.kind == "i" else routing[:, e]).astype(bool).sum())
              for e in range(experts)]  # fmt: skip
    return sum(-(-c // align) * align for c in counts)


def chunk_map(sizes: np.ndarray, order: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(row_id_map [T, 1], row_source [T])"""
    ends = np.minimum(np.cumsum(np.maximum(sizes.astype(np.int64), 0)), tokens)
    starts = np.concatenate([[0], ends[:-1]]) if len(sizes) else ends
    seen: list[int] = []
    for c in order.tolist():
        if 0 <= c < len(sizes) and c not in seen:
            seen.append(c)
    moved = [t for c in seen for t in range(int(starts[c]), int(ends[c]))]
    to, row_source = np.full((tokens, 1), -1, np.int32), np.full(tokens, -1, np.int32)
    for row, t in enumerate(moved):
        to[t, 0], row_source[row] = row, t
    return to, row_source


def permute(x: np.ndarray, m: Map, fill: np.ndarray | int = 0) -> np.ndarray:
    """Rows of x [T, ...] as raw bytes; absent rows hold `fill`, one row."""
    out = np.empty((m.rows, *x.shape[1:]), x.dtype)
    out[:] = fill
    slots = m.row_id_map.shape[1]
    for r in np.flatnonzero(m.row_source >= 0):
        out[r] = x[m.row_source[r] // slots]
    return out


def permute_probs(probs: np.ndarray, m: Map) -> np.ndarray:
    out = np.zeros(m.rows, probs.dtype)
    there = m.row_source >= 0
    out[there] = probs.reshape(-1)[m.row_source[there]]
    return out


def permute_columns(x: np.ndarray, m: Map) -> np.ndarray:
    return permute(np.ascontiguousarray(x.T), m).T


def unpermute(x: np.ndarray, m: Map, probs: np.ndarray | None = None) -> np.ndarray:
    wide = np.float64 if x.dtype == np.float64 else np.float32
    there = np.where(m.row_id_map >= 0, m.row_id_map.astype(np.int64), 1 << 40)
    slots = np.argsort(there, axis=1, kind="stable")  # ascending rows, then those that do not exist
    acc = np.zeros((len(slots), x.shape[1]), wide)
    with np.errstate(all="ignore"):
        for turn in slots.T:
            rows = np.take_along_axis(m.row_id_map, turn[:, None], 1)[:, 0]
            t = np.flatnonzero(rows >= 0)
            p = np.ones(len(t), wide) if probs is None else probs[t, turn[t]].astype(wide)
            acc[t] = acc[t] + p[:, None] * x[rows[t]].astype(wide)
        return acc.astype(x.dtype)


def gather_probs(permuted: np.ndarray, m: Map) -> np.ndarray:
    out = np.zeros(m.row_id_map.shape, permuted.dtype)
    there = m.row_id_map >= 0
    out[there] = permuted[m.row_id_map[there]]
    return out


def unpermute_dx(dy: np.ndarray, m: Map, probs: np.ndarray) -> np.ndarray:
    wide = np.float64 if dy.dtype == np.float64 else np.float32
    out = np.zeros((m.rows, dy.shape[1]), dy.dtype)
    slots = m.row_id_map.shape[1]
    with np.errstate(all="ignore"):
        for r in np.flatnonzero(m.row_source >= 0):
            t, s = divmod(int(m.row_source[r]), slots)
            out[r] = (probs[t, s].astype(wide) * dy[t].astype(wide)).astype(dy.dtype)
    return out


def unpermute_dprobs(dy: np.ndarray, x: np.ndarray, m: Map) -> tuple[np.ndarray, np.ndarray]:
    """dprobs in float64, and how far float32 sums in any order may lie from it: (H + 1) eps times the sum of |terms|.

    Where that sum is too large for float32, any sum may overflow.
    """
    exact, allowed = np.zeros(m.row_id_map.shape), np.zeros(m.row_id_map.shape)
    t, s = np.nonzero(m.row_id_map >= 0)
    info = np.finfo(np.float64 if x.dtype == np.float64 else np.float32)
    with np.errstate(all="ignore"):
        terms = dy[t].astype(np.float64) * x[m.row_id_map[t, s]].astype(np.float64)
        size = np.abs(terms).sum(1)
        exact[t, s] = terms.sum(1)
        allowed[t, s] = np.where(size < info.max / 2, (terms.shape[1] + 1) * info.eps * size + 1e-44, np.inf)
    return exact, allowed
