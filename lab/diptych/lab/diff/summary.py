"""The summary of a comparison: at most 40 lines of plain text of at most 80 columns, as far as names allow."""

from __future__ import annotations

import collections
import heapq
import math
import textwrap
from collections.abc import Iterator, Sequence

from diptych.lab.diff.differ import FORWARD, shown
from diptych.lab.diff.names import few
from diptych.lab.diff.result import Cell, Result, Row, Verdict

_WIDTH = 80
_FIRST, _WORST, _NOTES, _KEYS = 5, 5, 3, 3
_VERDICTS: tuple[Verdict, ...] = ("same", "rounding", "beyond", "definition", "differs", "unknown")
_MEANING = {
    "definition": "the references differ by more than float64's rounding",
    "beyond": "B, or A, is further from its reference than rounding leads",
    "differs": "bits or values differ",
}


def text(result: Result) -> str:
    """Returns the summary of a comparison."""
    lines = [*_sides(result), ""]
    unknown = [cell for _, cell in _cells(result) if cell.verdict == "unknown"]
    status = "GREEN: nothing differs" if result.status == "green" else "DIFFERS"
    if result.status == "green" and unknown:
        status = f"GREEN in what was judged; {len(unknown)} of {sum(1 for _ in _cells(result))} cells unknown"
    elif result.status == "green" and _referenced(result):
        status += " by definition or beyond rounding"
    lines += [f"{status} ({len(result.rows)} pairs of sites, {shown(result.steps)})", *_counts(result)]
    if unjudged := sum(bool(cell.differing) for cell in unknown):
        lines.append(f"  of the unknown cells {unjudged} differ, which no reference judges")
    if result.first:
        lines += ["", f"First, in step {result.first[0].step}:"]
        lines += _lines([(result.rows[f.row], _cell(result.rows[f.row], f.step)) for f in result.first], _FIRST)
        lines += [f"  {v}: {_MEANING[v]}" for v in dict.fromkeys(f.verdict for f in result.first)]
    apart = [(row, cell) for row, cell in _cells(result) if cell.verdict != "same" and cell.relative]
    if worst := heapq.nlargest(_WORST, apart, key=lambda found: found[1].relative or 0.0):
        lines += ["", "Largest distances:", *_lines(worst, _WORST)]
    return "\n".join([*lines, *_left(result)])


def _sides(result: Result) -> Iterator[str]:
    for s in result.sides:
        versions = ", ".join(f"{name} {version}" for name, version in list(s.versions.items())[:2])
        recipe = f", {s.recipe}" if s.recipe else ""
        ranks = f", {s.ranks} ranks" if s.ranks > 1 else ""
        yield _cut(f"{s.role:<3} {s.folder}: {s.framework} on {s.device} ({versions}){recipe}{ranks}")


def _referenced(result: Result) -> bool:
    return len(result.sides) > 2


def _counts(result: Result) -> Iterator[str]:
    """Yields a table of the number of cells by verdict, with one line for forward and one for backward."""
    kinds = {"forward": collections.Counter[str](), "backward": collections.Counter[str]()}
    for row, cell in _cells(result):
        kinds["forward" if row.kind in FORWARD else "backward"][cell.verdict] += 1
    shown = [v for v in _VERDICTS if any(count[v] for count in kinds.values())]
    yield "  cells      " + "".join(f"{v:>11}" for v in shown)
    for name, count in kinds.items():
        if count:
            yield f"  {name:<11}" + "".join(f"{count[v]:>11}" for v in shown)


def _lines(found: Sequence[tuple[Row, Cell]], most: int) -> Iterator[str]:
    for row, cell in found[:most]:
        name = row.a if row.rank == 0 else f"{row.a} (rank {row.rank})"
        yield "  " + _cut(name, _WIDTH - 2)
        dtype = row.dtype_a if row.dtype_a == row.dtype_b else f"{row.dtype_a}/{row.dtype_b}"
        noise = "" if cell.noise is None else f", R {number(cell.noise)}"
        ulp = "" if cell.max_ulp is None else f", {number(cell.max_ulp)} ulp"
        apart = "" if cell.relative is None else f", relative {number(cell.relative)}"
        apart += "" if not cell.definition else f", definition {number(cell.definition)}"
        yield f"    {cell.verdict}, step {cell.step}, {dtype}{apart}{ulp}{noise}"
        for option in row.options:
            yield "    " + _cut(f"option {option}", _WIDTH - 4)
    if len(found) > most:
        yield f"  and {len(found) - most} more"


def _left(result: Result) -> Iterator[str]:
    """Yields lines about sites that were not compared."""
    unmatched = {"A": result.unmatched_a, "B": result.unmatched_b}
    if any(unmatched.values()) or result.ambiguous:
        yield ""
    for side, keys in unmatched.items():
        if keys:
            yield _cut(f"Only in {side}: {len(keys)} sites: {few(keys, _KEYS)}")
    if result.ambiguous:
        yield f"Ambiguous, which --map can settle: {len(result.ambiguous)}"
        for each in result.ambiguous[:_KEYS]:
            yield _cut(f"  {few(each.a, 2)} with {few(each.b, 2)}")
    for note in result.notes[:_NOTES]:
        yield from textwrap.wrap(f"Note: {note}", _WIDTH, subsequent_indent="  ", max_lines=2)
    if len(result.notes) > _NOTES:
        yield f"{len(result.notes) - _NOTES} more notes are in --json and --html"


def _cells(result: Result) -> Iterator[tuple[Row, Cell]]:
    return ((row, cell) for row in result.rows for cell in row.cells)


def _cell(row: Row, step: int) -> Cell:
    return next(cell for cell in row.cells if cell.step == step)


def number(x: float) -> str:
    """Returns a number as text, with two significant digits unless it is a small integer."""
    if isinstance(x, int) and x < 10**6:
        return str(x)
    return "inf" if math.isinf(x) else f"{x:.2g}"


def _cut(line: str, width: int = _WIDTH) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."
