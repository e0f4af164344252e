"""The HTML page of a comparison: one self-contained file, whose script draws its heat map, charts and table."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jinja2

from diptych.lab.diff.differ import FORWARD, NO_FINDING
from diptych.lab.diff.result import Cell, Result, Row, Verdict
from diptych.lab.traces.schema import Kind

SEVERITY: tuple[Verdict, ...] = ("same", "rounding", "unknown", "differs", "beyond", "definition")
"""Verdicts from the least to the worst. The page's code for a verdict is its position here."""
WORDS: dict[Verdict, str] = {
    "same": "same bits",
    "rounding": "rounding",
    "unknown": "unknown",
    "differs": "differs",
    "beyond": "beyond rounding",
    "definition": "differs by definition",
}
MATCHES = {
    "map": "map",
    "name": "name",
    "table": "table of names",
    "bits": "parameters' bits",
    "order": "shape and order",
    "operation": "operations of a module",
}
_SCRIPTS = ("model.js", "heat.js", "chart.js", "page.js")
_NUMBERS: dict[str, Callable[[Cell], float | None]] = {
    "relative": lambda c: c.relative,
    "ulp": lambda c: c.max_ulp,
    "differing": lambda c: c.differing,
    "compared": lambda c: c.compared,
    "noise": lambda c: c.noise,
    "definition": lambda c: c.definition,
}


def render(result: Result) -> str:
    """Returns the page of a comparison as an HTML document.

    The document loads nothing: its content security policy allows its own script and style alone. Equal results give
    equal documents. Numbers of cells are rounded to five significant digits.
    """
    folder = importlib.resources.files("diptych.lab.diff") / "web"
    style = (folder / "page.css").read_text()
    body = "\n".join((folder / name).read_text() for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{body}}})();\n'
    env = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    env.filters |= {"short": _short, "share": _share}
    hashes = {name: _hash(text) for name, text in (("script", script), ("style", style))}
    return env.from_string((folder / "page.html.j2").read_text()).render(
        r=result,
        style=style,
        script=script,
        hashes=hashes,
        data=as_json(payload(result)),
        words=WORDS,
        summary=_summary(result),
        firsts=_firsts(result),
    )


def payload(result: Result) -> dict[str, Any]:
    """Returns the part of a result that the script reads, in columns.

    `rows`: a list for each field. `cells`: for each field a list of rows; a row is a list of numbers by step, or one
    number if all are equal; None, "inf", "-inf" and "nan" stand for values that are not finite numbers. `verdicts`: a
    string for each row, with a digit (a position in `SEVERITY`) for each step, or "." where a row has no cell.
    """
    at = {step: i for i, step in enumerate(result.steps)}
    table = [_by_step(row, at) for row in result.rows]
    groups, names = _groups(result.rows)
    rows = result.rows
    return {
        "sides": {side.role: side.framework for side in result.sides},
        "steps": [step if step <= 2**53 else str(step) for step in result.steps],  # the script's numbers are float64
        "severity": SEVERITY,
        "quiet": NO_FINDING,
        "forward": FORWARD,
        "kinds": get_args(Kind),
        "words": WORDS,
        "groups": names,
        "first": [[f.row, at[f.step]] for f in result.first if f.step in at],
        "rows": {
            "name": [row.name for row in rows],
            "kind": [row.kind for row in rows],
            "b": [row.b for row in rows],
            "call": [row.call for row in rows],
            "rank": [row.rank for row in rows],
            "group": groups,
            "shape": [row.shape for row in rows],
            "dtype": [row.dtype_a if row.dtype_a == row.dtype_b else f"{row.dtype_a} / {row.dtype_b}" for row in rows],
            "matched": [MATCHES[row.matched] for row in rows],
            "transposed": [int(row.transposed) for row in rows],
            "inputs": [row.inputs for row in rows],
        },
        "verdicts": ["".join("." if c is None else str(SEVERITY.index(c.verdict)) for c in cells) for cells in table],
        "cells": {
            name: [_folded([None if c is None else _number(of(c)) for c in cells]) for cells in table]
            for name, of in _NUMBERS.items()
        },
    }


def as_json(value: Any) -> str:
    """Returns JSON that may stand within a script element: it cannot end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def module_of(row: Row) -> str:
    """Returns the module that a row is grouped by: its path to the first numbered part, such as "h.0" or
    "encoder/layers_3".

    Without a numbered part it is the path of the module that the site belongs to.
    """
    parts = re.split(r"([./])", row.name)
    for i in range(0, len(parts), 2):
        if re.search(r"(^|_)\d+$|\[\d+\]$", parts[i]) and i + 1 < len(parts):
            return "".join(parts[: i + 1])
    own = {"operand": 2, "result": 2, "parameter": 1, "parameter_grad": 1}.get(row.kind, 0)
    return "".join(parts[: max(1, len(parts) - 2 * own)])


def _groups(rows: Sequence[Row]) -> tuple[list[int], list[str]]:
    """Returns each row's group and the groups' names. A group is a run of rows of one module and rank; forward and
    backward, and parameters and other sites, are in different groups."""
    names: list[str] = []
    last: dict[bool, tuple[tuple[str, int, bool], int]] = {}
    found, several = [], len({row.rank for row in rows}) > 1
    for row in rows:
        backward, parameter = row.kind not in FORWARD, row.kind.startswith("parameter")
        key = (module_of(row), row.rank, parameter)
        if backward not in last or last[backward][0] != key:
            last[backward] = key, len(names)
            names.append(key[0] + " parameters" * parameter + f" (rank {row.rank})" * several)
        found.append(last[backward][1])
    return found, names


def _by_step(row: Row, at: dict[int, int]) -> list[Cell | None]:
    cells: list[Cell | None] = [None] * len(at)
    for cell in row.cells:
        cells[at[cell.step]] = cell
    return cells


def _number(x: float | None) -> float | str | None:
    if x is None or isinstance(x, int):
        return x
    if not math.isfinite(x):
        return str(x)
    return float(f"{x:.5g}")


def _folded(values: list[Any]) -> Any:
    same = not values or all(v == values[0] for v in values)
    return (values[0] if values else None) if same else values


def _hash(text: str) -> str:
    """Returns the hash of an inline script or style as a source of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- the header ---


def _short(x: float | None) -> str:
    if x is None:
        return "–"
    if not math.isfinite(x):
        return "∞" if x > 0 else str(x)
    if isinstance(x, int):
        return f"{x:,}".replace(",", "\u202f")  # narrow no-break space
    return f"{x:.3g}" if x == 0 or 0.01 <= x < 1e4 else re.sub(r"e([+-])0", r"e\1", f"{x:.2e}")


def _share(cell: Cell) -> str:
    if cell.differing is None or not cell.compared:
        return "–"
    return f"{100 * cell.differing / cell.compared:.3g} %"


def _summary(result: Result) -> dict[str, Any]:
    """Returns the status as a heading, its tone, and the number of sites with findings in each direction."""
    cells = sum(len(row.cells) for row in result.rows)
    unknown = [cell for row in result.rows for cell in row.cells if cell.verdict == "unknown"]
    references = len(result.sides) > 2
    directions = []
    for name, backward in (("Forward", False), ("Backward", True)):
        rows = [row for row in result.rows if (row.kind not in FORWARD) == backward]
        found = sum(any(c.verdict not in NO_FINDING for c in row.cells) for row in rows)
        directions.append({"name": name, "sites": len(rows), "found": found})
    if not cells:
        tone, head = "none", "Nothing was compared"
    elif result.status == "green":
        head = "No difference beyond rounding" if references else "No difference"
        tone = "good"
        if unknown:
            tone, head = "none", f"{head} in what was judged; {len(unknown)} of {cells} cells are unknown"
    elif not result.first:
        differing = sum(bool(cell.differing) for cell in unknown)
        apart = f"{differing} of {cells} cells differ, and no reference judges them"
        tone, head = "bad", apart if differing else "Sites of one name have other shapes"
    else:
        found, sites = (sum(d[key] for d in directions) for key in ("found", "sites"))
        what = "differ by more than rounding" if references else "differ"
        tone, head = "bad", f"{found} of {sites} sites {what}"
    return {"tone": tone, "head": head, "directions": directions, "references": references, "cells": cells}


def _firsts(result: Result) -> list[tuple[str, list[dict[str, Any]]]]:
    """Returns the first differences of each direction."""
    at = {step: i for i, step in enumerate(result.steps)}
    found = []
    for f in result.first:
        row = result.rows[f.row]
        cell = next((c for c in row.cells if c.step == f.step), None)
        found.append(
            {"index": f.row, "at": at.get(f.step), "row": row, "cell": cell, "step": f.step, "verdict": f.verdict}
        )
    parts = itertools.groupby(sorted(found, key=_is_backward), key=_is_backward)
    by = {backward: list(items) for backward, items in parts}
    return [("Forward", by.get(False, [])), ("Backward", by.get(True, []))]


def _is_backward(item: dict[str, Any]) -> bool:
    return item["row"].kind not in FORWARD
