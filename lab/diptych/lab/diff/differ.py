"""Compares two traces: matches their sites, measures them step by step, and finds where they first differ."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from diptych.lab.diff import inner_operations, layout, match, measure, names, verdict
from diptych.lab.diff.mapping import Rules
from diptych.lab.diff.measure import viewed
from diptych.lab.diff.result import FORWARD, NO_FINDING, Ambiguous, Cell, DiffError, First, Result, Row, Side
from diptych.lab.progress import SILENT, Progress, Stage
from diptych.lab.replay.table import options_apart
from diptych.lab.traces import DTYPES, Observation, Rank, Site, Trace

_ROLES = (("A", "B"), ("H",), ("H_A", "H_B"))


def diff(
    a: Trace,
    b: Trace,
    references: Sequence[Trace] = (),
    rules: Rules | None = None,
    steps: Sequence[int | range] | None = None,
    threads: int = 2,
    progress: Progress = SILENT,
) -> Result:
    """Compares B with A.

    **Arguments:** `references`: none; one float64 trace of either model; or two, H_A of A's model and H_B of B's.
    `rules`: the rules of a map. `steps`: the steps to compare. Both traces must have each single step, and at least one
    step of each range. By default all common steps are compared.

    **Raises** DiffError if the traces have nothing to compare, TraceError if one is damaged.
    """
    numbers = _steps(a, b, steps)
    if a.meta.ranks != b.meta.ranks:
        raise DiffError(
            f"{a.folder} has {a.meta.ranks} ranks, {b.folder} has {b.meta.ranks}; only traces of equally many ranks "
            "can be compared"
        )
    seen = {rank: [_first_seen(t.ranks[rank], numbers) for t in (a, b)] for rank in a.ranks}
    named = ([o.site for both in seen.values() for o in both[i]] for i in range(2))
    of_rules = [] if rules is None else rules.check(*named)
    rows: list[_Row] = []
    sites: dict[int, tuple[list[Site], list[Site]]] = {}
    shapes: list[str] = []
    differs = False
    unmatched: tuple[dict[str, None], dict[str, None]] = ({}, {})
    ambiguous: dict[Ambiguous, None] = {}
    for rank, (seen_a, seen_b) in seen.items():
        matching = match.match(seen_a, seen_b, (a.meta.framework, b.meta.framework), rules)
        sites[rank] = [o.site for o in seen_a], [o.site for o in seen_b]
        rows += [_Row(rank, pair) for pair in matching.pairs]
        for keys, alone in zip(unmatched, (matching.unmatched_a, matching.unmatched_b), strict=True):
            keys.update(dict.fromkeys(s.key for s in alone))
        ambiguous.update(dict.fromkeys(matching.ambiguous))
        shapes += [n for n in matching.notes if n not in shapes]
        differs |= matching.differs
    if not rows:
        raise DiffError(
            f"no site of {a.folder} was matched with one of {b.folder}; say by a file for --map which names are the "
            "same"
        )
    unknown: list[str] = []
    with progress.stage("comparing", len(rows) * len(numbers), unit="tensors") as stage:
        cells = _cells(rows, (a, b), references, numbers, unknown, threads, stage)
    notes = [*of_rules, *shapes, *unknown, *_notes(a, b, references, numbers, steps)]
    inputs = [x for rank, both in sites.items() for x in _inputs(rows, rank, both)]
    found = [row.row(of, tuple(each)) for row, of, each in zip(rows, inputs, cells, strict=True)]
    found, inner = inner_operations.left_out(found)
    notes += inner
    judged = [cell for row in found for cell in row.cells]
    if all(cell.verdict == "unknown" and not cell.differing for cell in judged):
        raise DiffError(f"nothing can be said: {next(iter(unknown), 'no step has a matched site in both traces')}")
    first = _first(found)
    differs |= any(c.verdict not in NO_FINDING or (c.verdict == "unknown" and c.differing) for c in judged)
    status = "differs" if differs else "green"
    return Result(
        _sides(a, b, references), tuple(numbers), tuple(found), status, first, tuple(unmatched[0]), tuple(unmatched[1]),
        tuple(ambiguous), tuple(notes),
    )  # fmt: skip


class _Row(NamedTuple):
    rank: int
    pair: match.Pair

    def row(self, inputs: tuple[int, ...] | None, cells: tuple[Cell, ...]) -> Row:
        a, b, by, axes = self.pair
        return Row(
            a.key, b.key, self.rank, a.kind, a.name, a.call, a.shape, a.dtype, b.dtype, by, axes is not None,
            inputs, options_apart(a.operation, b.operation), cells,
        )  # fmt: skip


# --- what is compared ---


def _without_steps(trace: Trace) -> str:
    idle = [n for n in range(trace.meta.ranks) if n not in trace.ranks or not trace.ranks[n].steps]
    if not idle:
        return "no step is complete in all ranks"
    if trace.meta.ranks == 1:
        return "no step was recorded"
    ranks = f"{'rank' if len(idle) == 1 else 'ranks'} {names.few(list(map(str, idle)))}"
    return f"no step was recorded by {ranks} of {trace.meta.ranks}, counted from 0"


def _steps(a: Trace, b: Trace, wanted: Sequence[int | range] | None) -> list[int]:
    for trace in (a, b):
        if not trace.steps:
            raise DiffError(f"{trace.folder}: {_without_steps(trace)}")
    both = sorted(set(a.steps) & set(b.steps))
    if not both:
        held = f"{a.folder} has {shown(a.steps)}, {b.folder} has {shown(b.steps)}"
        raise DiffError(f"no step is in both traces: {held}; capture the same steps of both models")
    if wanted is None:
        return both
    found: set[int] = set()
    for part in wanted:
        here = {n for n in both if n in part} if isinstance(part, range) else {part} & set(both)
        if not here:
            named = f"no step from {part[0]} to {part[-1]}" if isinstance(part, range) else f"step {part}"
            said = "is" if isinstance(part, range) else "is not"
            raise DiffError(f"{named} {said} in both traces, which have {shown(both)}")
        found |= here
    return sorted(found)


def shown(steps: Sequence[int]) -> str:
    """Returns step numbers as text."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _notes(
    a: Trace, b: Trace, references: Sequence[Trace], numbers: list[int], wanted: Sequence[int | range] | None
) -> list[str]:
    notes = []
    for trace in (a, b, *references):
        torn = [str(number) for number, rank in trace.ranks.items() if rank.torn]
        if torn:
            notes.append(f"{trace.folder}: rank {', '.join(torn)} was interrupted within a step, which is left out")
        if trace.meta.plain_bits is False:
            notes.append(f"{trace.folder}: its recorded steps do not have the bits of the run without taps")
    for trace in (a, b):
        if wanted is None and len(trace.steps) > len(numbers):
            notes.append(f"{trace.folder}: {len(trace.steps) - len(numbers)} of its {len(trace.steps)} steps are "
                         "not complete in the other trace")  # fmt: skip
    if a.meta.hash != b.meta.hash:
        notes.append(f"hashes are not compared: they are {a.meta.hash} and {b.meta.hash}")
    return notes


def _sides(a: Trace, b: Trace, references: Sequence[Trace]) -> tuple[Side, ...]:
    roles = (*_ROLES[0], *(_ROLES[len(references)] if references else ()))
    return tuple(
        Side(
            role, str(t.folder), t.meta.framework, t.meta.versions, t.meta.device, t.meta.recipe, t.meta.instrumented,
            t.meta.plain_bits, t.meta.ranks, len(t.steps),
        )
        for role, t in zip(roles, (a, b, *references), strict=True)
    )  # fmt: skip


def _first_seen(rank: Rank, numbers: list[int]) -> list[Observation]:
    """Returns one observation of each site, from the first of these steps that recorded it. A site that first occurs in
    a later step is placed behind the site that precedes it in that step."""
    found: dict[str, Observation] = {}
    following: dict[str | None, str | None] = {None: None}
    for number in numbers:
        before = None
        for o in rank.step(number):
            key = o.site.key
            if key not in found:
                found[key] = o
                following[key], following[before] = following[before], key
            before = key
    ordered, key = [], following[None]
    while key is not None:
        ordered.append(found[key])
        key = following[key]
    return ordered


def _inputs(rows: Sequence[_Row], rank: int, sites: tuple[list[Site], list[Site]]) -> list[tuple[int, ...] | None]:
    """Returns, for each row of a rank, the nearest rows that it is computed from in A or in B; None if neither trace
    knows any. The rows of both are joined, since a trace may know a part of them alone."""
    found = []
    for side, of in enumerate(sites):
        keys = {(row.pair.a, row.pair.b)[side].key: i for i, row in enumerate(rows) if row.rank == rank}
        found.append(_nearest(of, keys))
    both = zip(*found, strict=True)
    return [tuple(sorted({*(x or ()), *(y or ())})) if (x, y) != (None, None) else None for x, y in both]


def _nearest(sites: Sequence[Site], rows: Mapping[str, int]) -> list[tuple[int, ...] | None]:
    """Returns, for each row, the nearest rows that it is computed from in one trace, through sites that have no row;
    None if only the order is known. `rows`: the rows' numbers by the keys of their sites."""
    nearest: dict[str, frozenset[int] | None] = {}
    last = {key: site.key for site in sites for key in site.inputs or ()}
    ordered: dict[str, tuple[int, ...] | None] = {}
    for site in sites:
        found: set[int] | None = None if site.inputs is None else set()
        for key in site.inputs or ():
            through = frozenset((rows[key],)) if key in rows else nearest.get(key)
            found = None if found is None or through is None else found | through
        if site.key in rows:
            ordered[site.key] = None if found is None else tuple(sorted(found))
        elif site.key in last:
            nearest[site.key] = None if found is None else frozenset(found)
        # Sets that no later site reads are dropped: those of a long chain would take memory that grows with the square
        # of its length.
        for key in site.inputs or ():
            if last[key] == site.key:
                nearest.pop(key, None)
    return [ordered[key] for key in rows]


# --- cells ---


def _cells(
    rows: Sequence[_Row], sides: tuple[Trace, Trace], references: Sequence[Trace], numbers: list[int],
    notes: list[str], threads: int, stage: Stage,
) -> list[list[Cell]]:  # fmt: skip
    found: list[list[Cell]] = [[] for _ in rows]
    seen = collections.Counter[str]()
    for cell, distances in measure.measured(_compared(rows, sides, references, numbers, found, seen), threads):
        stage.advance()
        ab = distances.ab
        judging = bool(references) and all(_has(t, rows[cell.row].rank, cell.a.step) for t in references)
        judged = verdict.judge(distances, cell.a.site.dtype, judging, cell.b.site.dtype)
        found[cell.row].append(
            Cell(cell.a.step, judged.verdict, judged.relative, ab.max_ulp, ab.differing, ab.compared, judged.noise,
                 judged.definition)
        )  # fmt: skip
        if judged.verdict == "unknown":
            seen[_why(cell, distances, bool(references))] += 1
    for row in found:
        row.sort(key=lambda cell: cell.step)
    notes += [f"{count} {'cell is' if count == 1 else 'cells are'} {why}" for why, count in seen.items()]
    return found


def _compared(
    rows: Sequence[_Row], sides: tuple[Trace, Trace], references: Sequence[Trace], numbers: list[int],
    found: list[list[Cell]], seen: collections.Counter[str],
) -> Iterator[measure.Cell]:  # fmt: skip
    """Yields the cells to measure, step by step, since each file holds one step. A row whose shapes differ in a step
    gets a cell in `found` instead."""
    one = _one_reference(rows, references[0]) if len(references) == 1 else None
    for rank, number in itertools.product(sides[0].ranks, numbers):
        a, b = ({o.site.key: o for o in side.ranks[rank].step(number)} for side in sides)
        h = [_recorded(t, rank, number) for t in references]
        for i, pair in ((i, row.pair) for i, row in enumerate(rows) if row.rank == rank):
            x, y = a.get(pair.a.key), b.get(pair.b.key)
            if x is None or y is None:
                continue
            if not layout.holds(x.site.shape, y.site.shape, pair.axes):
                found[i].append(Cell(number, "differs", None, None, None, 0))
                seen["of sites whose shapes differ in that step"] += 1
                continue
            h_a, h_b = _references(h, x, y, pair, one)
            yield measure.Cell(i, x, y, h_a, h_b, pair.axes)


def _recorded(trace: Trace, rank: int, number: int) -> Mapping[str, Observation]:
    return {o.site.key: o for o in trace.ranks[rank].step(number)} if _has(trace, rank, number) else {}


def _has(trace: Trace, rank: int, number: int) -> bool:
    return rank in trace.ranks and number in trace.ranks[rank].steps


def _references(
    h: Sequence[Mapping[str, Observation]], a: Observation, b: Observation, pair: match.Pair, one: str | None
) -> tuple[Observation | None, Observation | None]:
    """Returns the observations of the references in A's shape: of A's model and of B's. `one`: "A" or "B" if there is a
    single reference, which then serves both sides and has the names of that side."""
    shape = a.site.shape
    of_a = h[0].get(pair.a.key) if h else None
    of_b = h[-1].get(pair.b.key) if h else None
    of_a = viewed(of_a, shape, None) if of_a and _judges(of_a, a) else None
    of_b = viewed(of_b, shape, pair.axes) if of_b and _judges(of_b, b) else None
    if one is not None:
        return (of_a, of_a) if one == "A" else (of_b, of_b)
    return of_a, of_b


def _one_reference(rows: Sequence[_Row], h: Trace) -> str:
    """Returns "A" or "B": the side whose model a single reference belongs to, which has more of its sites.

    **Raises** DiffError if both sides have equally many, under different names.
    """
    keys = {o.site.key for rank in h.ranks.values() for number in rank.steps for o in rank.step(number)}
    pairs = {(row.pair.a.key, row.pair.b.key) for row in rows}
    of_a, of_b = (sum(pair[i] in keys for pair in pairs) for i in range(2))
    if of_a == of_b and any(a != b and (a in keys or b in keys) for a, b in pairs):
        raise DiffError(
            f"--ref {h.folder}: it is not clear whether this is a trace of A's or of B's model, since it has as many "
            "sites of each; give one trace of either, --ref H_A H_B"
        )
    return "A" if of_a >= of_b else "B"


def _judges(h: Observation, x: Observation) -> bool:
    """Returns whether `h` can be the reference of `x`: it is float64, or has x's dtype if that is not a float."""
    rounded = DTYPES[x.site.dtype].kind == "float"
    return h.site.shape == x.site.shape and h.site.dtype == ("float64" if rounded else x.site.dtype)


def _why(cell: measure.Cell, distances: verdict.Distances, referenced: bool) -> str:
    """Returns the reason why a cell's verdict is unknown."""
    if cell.axes is not None and (cell.a.record.values, cell.b.record.values) != ("whole", "whole"):
        return "unknown: a transposed tensor is compared whole, and a trace has no whole values of it"
    if referenced and (cell.h_a is None or cell.h_b is None):
        return "unknown: no reference has the site in float64"
    ha, hb = distances.ha, distances.hb
    if ha is not None and hb is not None and ha.compared and hb.compared and ha.compared != hb.compared:
        return "unknown: values of A and of B, or of their references, were kept at other elements"
    if referenced and distances.ab.compared:
        return "unknown: a reference has no values of the site"
    return "unknown: a trace has neither values nor hashes that tell"


# --- where the traces first differ ---


def _first(rows: Sequence[Row]) -> tuple[First, ...]:
    """Returns the findings of the first step that has one, without those whose rows are computed from another finding.

    A site that differs by definition is left out only behind another such site, since rounding does not explain a
    difference of definitions.
    """
    by_step: dict[int, dict[int, Cell]] = {}
    for i, row in enumerate(rows):
        for cell in row.cells:
            if cell.verdict not in NO_FINDING:
                by_step.setdefault(cell.step, {})[i] = cell
    if not by_step:
        return ()
    step = min(by_step)
    findings = by_step[step]
    by_definition = {i: cell for i, cell in findings.items() if cell.verdict == "definition"}
    first = [First(i, step, "definition") for i in _not_behind(rows, by_definition)]
    first += [First(i, step, findings[i].verdict) for i in _not_behind(rows, findings) if i not in by_definition]
    return tuple(sorted(first, key=lambda f: (f.verdict != "definition", rows[f.row].kind not in FORWARD)))


def _not_behind(rows: Sequence[Row], findings: Mapping[int, Cell]) -> list[int]:
    """Returns the rows of findings that are not computed from another finding's row."""
    behind = set[int]()
    any_before, unknown_before = set[int](), set[int]()  # the ranks with an earlier finding of either kind
    first: list[int] = []
    for i, row in enumerate(rows):
        # A parameter depends on no tensor of this step.
        inputs = () if row.kind == "parameter" else row.inputs
        if inputs is None:
            late = row.rank in any_before
        else:
            # The row may depend on an unlisted input: a tensor that gets no gradient, such as a frozen encoder's.
            unlisted = row.kind != "parameter" and row.rank in unknown_before
            late = unlisted or any(n in findings or n in behind for n in inputs)
        if late:
            behind.add(i)
        if i in findings:
            any_before.add(row.rank)
            if inputs is None and row.kind != "operand":  # no other row reads an operand than its own operation's
                unknown_before.add(row.rank)
            if not late:
                first.append(i)
    return first
