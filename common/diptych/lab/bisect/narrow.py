"""Looks into the module that makes a difference: the first operation whose result the other model does not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diptych.lab.bisect.forward import Forward, within
from diptych.lab.bisect.search import Found, Side, distance, paired_inputs, paired_values
from diptych.lab.replay import table
from diptych.lab.replay.op import REFUSED, Bits, Op
from diptych.lab.replay.recorded import argument
from diptych.lab.traces import Site, Tensor

Replay = Callable[[Op], Mapping[str, Bits]]


class Narrowed(NamedTuple):
    """`side`: "A" or "B", whose result the other one does not have. `key`, `row`, `options`: of its operation. `other`:
    the options of the first operation of the same kind in the other model whose result is new too, None if there is
    none. `again`: how far the same operation in the other framework, on the same operands, is from it, or why it cannot
    compute it. `agrees`: whether that is within the limit."""

    side: str
    key: str
    row: str
    options: Mapping[str, Any]
    other: Mapping[str, Any] | None
    again: float | str
    agrees: bool


def narrow(a: Side, b: Side, found: Found, fed: Mapping[str, Tensor], replays: tuple[Replay, Replay]) -> list[Narrowed]:
    """Returns the first operation of A in the code that makes the difference whose result B does not have, and the
    first of B whose result A does not have if it is not what B has in the place of A's. There is none if none was
    recognized.

    **Arguments:** `fed`: what B was fed. `replays`: compute an operation in A's and in B's framework.
    """
    regions, runs = [], []
    given: Mapping[str, Tensor] = {}
    calls = found.around if found.itself is False else (found.a, found.b)
    for call in calls or (None,):
        if call is None:
            return []
        regions.append(call.path)
    if found.itself and found.a is not None and found.b is not None:
        pairs = paired_inputs(found.calls[0], found.a, found.calls[1], found.b, found.site.pair.axes)
        given = {y.key: x for y, x in paired_values(found.calls, pairs, found.site.pair.axes)}
    inside = [sorted({c.path for c in run.calls}) for run in found.calls]
    runs = [a.run({}, inside[0], ops=regions[0]), b.run({**fed, **given}, inside[1], ops=regions[1])]
    results = [_results(run, region) for run, region in zip(runs, regions, strict=True)]
    limit = found.site.limit
    known = [{s.key: _sorted(run.values[s.key]) for s in of} for run, of in zip(runs, results, strict=True)]
    narrowed: list[Narrowed] = []
    instead = None
    for mine, name in ((0, "A"), (1, "B")):
        new = _new(results[mine], known[mine], known[1 - mine], limit)
        if new is None or new is instead:
            continue
        row, options = _operation(new)
        others = [s for s in results[1 - mine] if s.operation is not None and s.operation.name == row]
        strange = _new(others, known[1 - mine], known[mine], limit)
        other = None if strange is None else _operation(strange)[1]
        instead = strange
        again = _again(runs[mine], new, replays[1 - mine])
        agrees = isinstance(again, float) and again <= limit
        narrowed.append(Narrowed(name, new.key, row, options, other, again, agrees))
    return narrowed


def _results(run: Forward, region: str) -> list[Site]:
    """Returns the results of operations in a module, in order."""
    return [s for s in run.results if s.operation is not None and within(s.name.rpartition("/")[0], region)]


def _new(of: Sequence[Site], mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], limit: float) -> Site | None:
    """Returns the first of some results whose values are in no result of the other model, in any order: axes may be
    merged, split or moved. `mine`, `theirs`: sorted values of results, by key."""
    for site in of:
        x = mine[site.key]
        same = (y for y in theirs.values() if y.bits.shape == x.bits.shape)
        if not any(distance(x, y) <= limit for y in same):
            return site
    return None


def _sorted(x: Tensor) -> Tensor:
    return Tensor.of(np.sort(x.dtype.decode(x.bits), axis=None))


def _operation(site: Site) -> tuple[str, dict[str, Any]]:
    assert site.operation is not None
    return site.operation.name, table.decoded(site.operation.name, site.operation.options)


def _again(run: Forward, site: Site, replay: Replay) -> float | str:
    """Returns how far another framework's result of the same operation on the same operands is from a result, or why
    the framework cannot compute it."""
    row, options = _operation(site)
    of = {argument(key): run.values[key] for key in site.inputs or ()}
    out = run.values[site.key]
    op = Op(
        row, {k: Bits(x.dtype.name, x.bits) for k, x in of.items()}, options, {"out": Bits(out.dtype.name, out.bits)}
    )
    try:
        found = replay(op)["out"]
    except REFUSED as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
    if found.data.size != out.bits.size:
        return math.inf
    return distance(out, Tensor.of(found.data.reshape(out.bits.shape), found.dtype))
