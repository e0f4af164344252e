"""Finds the first operation, in the module that makes a difference, whose result the other model does not compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diptych.lab.bisect.forward import Forward, ModuleCall, within
from diptych.lab.bisect.search import Outcome, Side, distance, paired_inputs, paired_values, path_of, slots
from diptych.lab.capture import named
from diptych.lab.replay import table
from diptych.lab.replay.op import REFUSED, Bits, Op
from diptych.lab.replay.recorded import argument
from diptych.lab.replay.shapes import require_shape
from diptych.lab.traces import Site, Tensor

Replay = Callable[[Op], Mapping[str, Bits]]


class Narrowed(NamedTuple):
    """An operation whose result the other model does not compute. `side`: the operation's model, "A" or "B". `key`: the
    key of its result. `row`, `options`: the operation in the replay table. `other`: the options of the other model's
    first operation of the same row whose result the first model does not compute, None if there is none. `operands`:
    the differences between the operands of these two, in words. `again`: the distance of the other framework's result
    of the operation, on the same operands, or the reason why it cannot compute it. `agrees`: whether that distance is
    within the limit."""

    side: str
    key: str
    row: str
    options: Mapping[str, Any]
    other: Mapping[str, Any] | None
    operands: tuple[str, ...]
    again: float | str
    agrees: bool


def narrow(a: Side, b: Side, outcome: Outcome, replays: tuple[Replay, Replay]) -> list[Narrowed]:
    """Returns the first operation of A, in the code that makes the difference, whose result B does not compute; and the
    same for B, unless it is B's counterpart (`Narrowed.other`) of A's operation. Returns nothing if no operation was
    recognized.

    **Arguments:** `replays`: functions that compute an operation in A's and in B's framework.
    """
    found = outcome.found
    if found is None or found.a is None or found.b is None:
        return []
    calls = (found.a, found.b) if found.itself is not False else found.around
    if calls is None:
        return []
    given: Mapping[str, Tensor] = {}
    if found.itself is not False:
        pairs = paired_inputs(found.calls[0], found.a, found.calls[1], found.b, found.site.pair.axes)
        given = {y.key: x for y, x in paired_values(found.calls, pairs, found.site.pair.axes)}
    inside = [sorted({c.path for c in run.calls}) for run in found.calls]
    runs = [a.run({}, inside[0], ops=calls[0].path), b.run({**outcome.fed, **given}, inside[1], ops=calls[1].path)]
    sites = [[site.pair.a for site in outcome.sites], [site.pair.b for site in outcome.sites]]
    until = found.site.pair.a, found.site.pair.b
    results = [_before(*each) for each in zip(runs, calls, until, strict=True)]
    ours = [_between(*each) for each in zip(results, runs, calls, sites, strict=True)]
    limit = found.site.limit
    known = [{s.key: _sorted(run.values[s.key]) for s in of} for run, of in zip(runs, results, strict=True)]
    narrowed: list[Narrowed] = []
    instead = None
    for mine, name in ((0, "A"), (1, "B")):
        new = _new(ours[mine], known[mine], known[1 - mine], limit)
        if new is None or new is instead:
            continue
        row, options = _operation(new)
        others = [s for s in ours[1 - mine] if s.operation is not None and s.operation.name == row]
        strange = _new(others, known[1 - mine], known[mine], limit)
        other = None if strange is None else _operation(strange)[1]
        operands: Iterable[str] = ()
        if strange is not None:
            operands = _apart((runs[mine], new), (runs[1 - mine], strange), a.framework == b.framework, limit)
        instead = strange
        again = _again(runs[mine], new, replays[1 - mine])
        agrees = isinstance(again, float) and again <= limit
        narrowed.append(Narrowed(name, new.key, row, options, other, tuple(operands), again, agrees))
    return narrowed


def _before(run: Forward, call: ModuleCall, until: Site) -> list[Site]:
    """Returns the results of operations in a call and the modules inside of it, in order, up to the site that differs.
    Later operations and other calls of the module cannot be the reason."""
    order = {key: i for i, key in enumerate(run.values)}
    end = order.get(until.key, len(order))
    begin = min((order[s.key] for s in slots(call) if s.key in order), default=0)
    results = (s for s in run.results if s.operation is not None and within(_module(s), call.path))
    return [s for s in results if begin <= order[s.key] <= end]


def _between(results: Sequence[Site], run: Forward, call: ModuleCall, sites: Sequence[Site]) -> list[Site]:
    """Returns the results without those of inner modules whose outputs are all matched. These modules were compared on
    their own with equal values, so that the difference is made outside of them."""
    paired = {s.key for s in sites}
    whole: dict[str, bool] = {}
    for key in run.values:
        if key.startswith("activation:"):
            path = path_of(key.removeprefix("activation:").partition("#")[0])
            whole[path] = whole.get(path, True) and key in paired
    apart = [p for p, all_paired in whole.items() if all_paired and p not in (call.path, named(call.path))]
    apart = [p for p in apart if within(p, call.path)]
    return [s for s in results if not any(within(_module(s), p) for p in apart)]


def _module(site: Site) -> str:
    """Returns the path of the module that computed an operation's result."""
    return site.name.rpartition("/")[0]


def _new(of: Sequence[Site], mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], limit: float) -> Site | None:
    """Returns the first site of `of` whose values no result of the other model has, in any order of elements, since
    axes may be merged, split or moved; None if there is none. `mine`, `theirs`: sorted values of results, by key."""
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


def _apart(a: tuple[Forward, Site], b: tuple[Forward, Site], alike: bool, limit: float) -> Iterator[str]:
    """Yields the differences between the operands of two operations of one row. Elements are compared in sorted order.

    **Arguments:** `alike`: whether one framework computes both. Otherwise a missing operand is no difference, since the
    other framework may add a bias by an operation of its own.
    """
    of_a, of_b = ({argument(key): run.values[key] for key in site.inputs or ()} for run, site in (a, b))
    for name in dict.fromkeys((*of_a, *of_b)):
        if name not in of_a or name not in of_b:
            if alike:
                yield f"{name} is missing" if name in of_a else f"{name} is there too"
        elif _sizes(of_a[name]) != _sizes(of_b[name]):
            yield f"{name} is {list(of_b[name].bits.shape)} in place of {list(of_a[name].bits.shape)}"
        elif (apart := distance(_sorted(of_a[name]), _sorted(of_b[name]))) > limit:
            yield f"{name} differs ({apart:.3g})"


def _sizes(x: Tensor) -> list[int]:
    """Returns the sizes of a tensor's axes in sorted order, since two frameworks may order axes differently."""
    return sorted(n for n in x.bits.shape if n != 1)


def _again(run: Forward, site: Site, replay: Replay) -> float | str:
    """Returns the distance from a result to another framework's result of the same operation on the same operands, or
    the reason why that framework cannot compute it."""
    row, options = _operation(site)
    of = {argument(key): run.values[key] for key in site.inputs or ()}
    out = run.values[site.key]
    op = Op(
        row, {k: Bits(x.dtype.name, x.bits) for k, x in of.items()}, options, {"out": Bits(out.dtype.name, out.bits)}
    )
    try:
        require_shape(op)
        found = replay(op)["out"]
    except REFUSED as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
    if found.data.size != out.bits.size:
        return math.inf
    return distance(out, Tensor.of(found.data.reshape(out.bits.shape), found.dtype))
