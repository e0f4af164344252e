"""Finds the operation that computed a site of a trace, with the recorded values of its operands and results."""

from __future__ import annotations

import collections
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diptych.lab.replay import table
from diptych.lab.replay.op import Bits, Op, ReplayError
from diptych.lab.traces import Observation, Trace


class Recorded(NamedTuple):
    """An operation `op` with the observations of its operands and results, by their names in the operation's row."""

    op: Op
    operands: dict[str, Observation]
    results: dict[str, Observation]


def recorded(trace: Trace, site: str, step: int | None = None, rank: int = 0) -> Recorded:
    """Returns the operation that computed a site.

    **Arguments:** `site`: the key of a result, such as "result:h.0/gemm.d", or its name alone; or an activation that
    has the bits of a result. `step`: None means the first recorded step.

    **Raises** ReplayError if the trace does not have the step, rank or site, if no operation is known for it, or if
    values of an operand or result are missing; TraceError if the file with values is damaged.
    """
    if rank not in trace.ranks:
        raise ReplayError(f"{trace.folder}: has no rank {rank}; it has {', '.join(map(str, trace.ranks)) or 'none'}")
    steps = trace.ranks[rank].steps
    if not steps:
        raise ReplayError(f"{trace.folder}: rank {rank} has completed no step")
    step = steps[0] if step is None else step
    if step not in steps:
        raise ReplayError(f"{trace.folder}: has no step {step}; it has {_listed(steps)}")
    observations = trace.ranks[rank].step(step)
    of = _with_operation(_found(observations, site), observations, trace)
    return _operation(_results(observations)[of.site.operation, of.site.inputs], _by_key(observations))


def operations(observations: Sequence[Observation]) -> Iterator[Recorded]:
    """Yields all operations of a step that can be computed again, in the order of their first results.

    **Arguments:** `observations`: all observations of one step of one rank. **Raises** the errors of `recorded`.
    """
    by_key = _by_key(observations)
    for results in _results(observations).values():
        yield _operation(results, by_key)


def _by_key(observations: Sequence[Observation]) -> dict[str, Observation]:
    return {o.site.key: o for o in observations}


def _results(observations: Sequence[Observation]) -> dict[tuple[Any, Any], list[Observation]]:
    """Returns the results of each operation. Two calls of one operation have operands with different keys."""
    found: dict[tuple[Any, Any], list[Observation]] = collections.defaultdict(list)
    for o in observations:
        if o.site.operation is not None:
            found[o.site.operation, o.site.inputs].append(o)
    return found


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{len(steps)} from {steps[0]} to {steps[-1]}"


def _found(observations: list[Observation], site: str) -> Observation:
    by_key = {o.site.key: o for o in observations}
    if site in by_key:
        return by_key[site]
    named = [o for o in observations if site in (o.site.name, o.site.key.partition(":")[2])]
    named = [o for o in named if o.site.kind == "result"] or named
    if len(named) == 1:
        return named[0]
    if named:
        keys = ", ".join(o.site.key for o in named[:8])
        raise ReplayError(f"{site}: is the name of {len(named)} sites; give the key of one: {keys}")
    near = difflib.get_close_matches(site, {**by_key, **dict.fromkeys(o.site.name for o in observations)}, 3, 0.5)
    raise ReplayError(f"{site!r}: the step has no such site" + (f"; similar are {', '.join(near)}" if near else ""))


def _with_operation(found: Observation, observations: list[Observation], trace: Trace) -> Observation:
    """Returns `found` if an operation computed it, else the result that has the bits of the activation `found`."""
    if found.site.operation is not None:
        return found
    same = [
        o
        for o in observations
        if o.site.operation is not None
        and o.record.hash is not None
        and (o.record.hash, o.site.shape, o.site.dtype) == (found.record.hash, found.site.shape, found.site.dtype)
    ]
    own = [o for o in same if o.site.name.startswith(found.site.name + "/")]
    if found.site.kind == "activation" and same:
        return (own or same)[0]
    more = "" if trace.meta.options.ops == "all" else '; capture with ops="all" records operations of the framework too'
    raise ReplayError(f"{found.site.key}: no operation that computed it was recorded{more}")


def _operation(found: list[Observation], by_key: Mapping[str, Observation]) -> Recorded:
    """Returns the operation with the results `found`."""
    site = found[0].site
    assert site.operation is not None and site.inputs is not None
    name = site.operation.name
    try:
        options = table.decoded(name, site.operation.options)
    except ValueError as e:
        raise ReplayError(f"{site.key}: {e}") from None
    operands = {argument(key): by_key[key] for key in site.inputs}
    results = {argument(o.site.key): o for o in found}
    row = table.TABLE[name]
    if missing := [n for n in row.operands if n not in operands]:
        raise ReplayError(
            f"{site.key}: operand {missing[0]} of {name} was not recorded; capture with sites that match operands too"
        )
    if unknown := [n for n in operands if n not in row.operands + row.optional]:
        raise ReplayError(f"{site.key}: {name} has no operand {unknown[0][:80]!r}")
    inputs, outputs = ({k: _whole(o) for k, o in some.items()} for some in (operands, results))
    return Recorded(Op(name, inputs, options, outputs), operands, results)


def argument(key: str) -> str:
    """Returns the name that an operand or result has in the table's row, from its key: "a_data" for
    "operand:h.0.mlp.fc/gemm.a_data#1" and, for a shard, for ".../gemm.a_data@data=1"."""
    last = key.rpartition("/")[2].partition("#")[0].partition("@")[0]
    return last.partition(".")[2] or last


def _whole(o: Observation) -> Bits:
    values = o.values
    if values is None or not values.whole:
        raise ReplayError(
            f'{o.site.key}: its values are not whole in the trace; capture with values="full" and a budget that '
            "holds them, or with a pattern of sites that matches fewer"
        )
    return Bits(o.site.dtype, values.tensor.bits)
