"""Distances of matched sites in all steps, and of the sites from their references, as a stream in bounded memory."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from diptych.lab.diff.layout import Axes
from diptych.lab.diff.verdict import Distances
from diptych.lab.traces import DTYPES, Distance, Observation, Rank, Tensor, Values, distances

_KEPT = 2**27  # bytes of mapped values after which their memory is given back


class Cell(NamedTuple):
    """Two observations in one step that are compared, and their references. `axes`: the axes of b in the order of a's.
    `h_a`, `h_b`: the references' observations in a's shape (see `viewed`); the same object if there is one
    reference."""

    row: int
    a: Observation
    b: Observation
    h_a: Observation | None
    h_b: Observation | None
    axes: Axes | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Viewed(Observation):
    """An observation in another shape, or with permuted axes; a permuted one has no hash."""

    axes: Axes | None = None

    @property
    def values(self) -> Values | None:
        found = super().values
        if found is None or self.axes is None:
            return found
        if not found.whole:  # a sample cannot be permuted: that of the permuted tensor has other elements
            return None
        bits = np.ascontiguousarray(np.transpose(found.tensor.bits, self.axes))
        return Values(Tensor(found.tensor.dtype, bits), True)


def viewed(o: Observation, shape: tuple[int, ...], axes: Axes | None) -> Observation:
    """Returns an observation in the shape `shape`. `axes`: the axes of `o` in the order of that shape, None if
    equal."""
    if axes is None and o.site.shape == shape:
        return o
    site = dataclasses.replace(o.site, shape=shape)
    record = o.record if axes is None else dataclasses.replace(o.record, hash=None)
    return _Viewed(site, record, o.step, o.hash_name, o.rank, axes)


def measured(cells: Iterable[Cell], threads: int = 2) -> Iterator[tuple[Cell, Distances]]:
    """Yields each cell with its distances, in order. **Raises** TraceError if values are damaged."""
    waiting: collections.deque[tuple[Cell, tuple[str, ...]]] = collections.deque()
    found: list[Distance] = []
    for distance in distances(_pairs(cells, waiting), threads):
        found.append(distance)
        cell, names = waiting[0]
        if len(found) == len(names):
            waiting.popleft()
            yield cell, Distances(**dict(zip(names, found, strict=True)))
            found = []


def _pairs(
    cells: Iterable[Cell], waiting: collections.deque[tuple[Cell, tuple[str, ...]]]
) -> Iterator[tuple[Observation, Observation]]:
    read, ranks = 0, set[Rank]()
    for cell in cells:
        wanted = _wanted(cell)
        waiting.append((cell, tuple(wanted)))
        for pair in wanted.values():
            yield pair
            read += sum(o.record.count * DTYPES[o.site.dtype].nbytes for o in pair)
            ranks.update(o.rank for o in pair)
        if read > _KEPT:
            for rank in ranks:
                rank.release()
            read, ranks = 0, set()


def _wanted(cell: Cell) -> Mapping[str, tuple[Observation, Observation]]:
    """Returns the pairs of a cell to measure, all in A's layout, by their names in `Distances`."""
    a, h_a, h_b = cell.a, cell.h_a, cell.h_b
    b = viewed(cell.b, a.site.shape, cell.axes)
    wanted = {"ab": (a, b)}
    if h_a is not None:
        wanted["ha"] = (h_a, a)
    if h_b is not None:
        wanted["hb"] = (h_b, b)
    if h_a is not None and h_b is not None and h_a is not h_b:
        wanted["hh"] = (h_a, h_b)
    return wanted
