"""Leaves out operations of two frameworks that differ without an effect: the tensors that are computed next from them
agree.

Two frameworks compute the same function by different operations: one scales a product, the other one an operand. Such a
difference ends where both have computed the same tensor again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from diptych.lab.diff import names
from diptych.lab.diff.result import FORWARD, GREEN, NO_FINDING, Cell, Row


def left_out(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Returns the rows without the cells of such operations, and notes that name them. An operation is left out in a
    step if it differs and every row that is computed next from it agrees. Its row stays, even without cells."""
    apart: dict[int, set[int]] = collections.defaultdict(set)
    for rank in {row.rank for row in rows}:
        ours = [i for i, row in enumerate(rows) if row.rank == rank]
        if any(rows[i].matched == "operation" for i in ours):
            next_rows = _next(rows, ours)
            steps: dict[int, dict[int, Cell]] = collections.defaultdict(dict)
            for i in ours:
                for cell in rows[i].cells:
                    steps[cell.step][i] = cell
            for step, cells in steps.items():
                for i in _without_effect(rows, ours, next_rows, cells):
                    apart[i].add(step)
    if not apart:
        return list(rows), []
    found = [
        dataclasses.replace(row, cells=tuple(cell for cell in row.cells if cell.step not in apart[i]))
        if i in apart
        else row
        for i, row in enumerate(rows)
    ]
    few = names.few([rows[i].a for i in sorted(apart)])
    return found, [f"operations that differ are left out where all that is computed next from them agrees: {few}"]


def _next(rows: Sequence[Row], ours: Sequence[int]) -> dict[int, list[int]]:
    """Returns the rows of the forward pass that are computed next from each row. An operation outside of modules
    without such rows computes the loss: its next row is the first gradient."""
    found: dict[int, list[int]] = {i: [] for i in ours}
    for j in ours:
        for i in rows[j].inputs or () if rows[j].kind in FORWARD else ():
            found[i].append(j)
    gradients = [j for j in ours if rows[j].kind == "activation_grad"]
    modules = {names.split(rows[j].name).path for j in ours if rows[j].kind == "activation"}
    for i, after in found.items():
        outside = names.caller(rows[i].name) not in modules
        if not after and outside and rows[i].matched == "operation":
            after += gradients[:1]
    return found


def _without_effect(
    rows: Sequence[Row], ours: Sequence[int], next_rows: Mapping[int, Sequence[int]], cells: Mapping[int, Cell]
) -> set[int]:
    """Returns the operations that are left out in a step. `cells`: the step's cells by row."""
    findings = {i for i, cell in cells.items() if cell.verdict not in NO_FINDING}
    agree = {i for i, cell in cells.items() if cell.verdict in GREEN}
    found: set[int] = set()
    for i in reversed(ours):
        if i not in findings or rows[i].matched != "operation":
            continue
        # A finding whose definition was judged, and is equal, is a loss of precision and must be reported.
        of_precision = cells[i].definition is not None and cells[i].verdict != "definition"
        if not of_precision and next_rows[i] and all(j in found or j in agree for j in next_rows[i]):
            found.add(i)
    return found - _behind_gradients(rows, ours, findings, found)


def _behind_gradients(rows: Sequence[Row], ours: Sequence[int], findings: set[int], apart: set[int]) -> set[int]:
    """Returns the operations among `apart` that alone explain a gradient that differs. A factor of zero, such as that
    of a fresh adapter, can hide a difference from all that is computed next."""
    explained, needed = set[int](), set[int]()
    for i in ours:
        inputs = rows[i].inputs or ()
        if any(j in explained or (j in findings and j not in apart) for j in inputs):
            explained.add(i)
        elif i in findings and rows[i].kind not in FORWARD:
            needed |= apart.intersection(inputs)
    return needed
