"""Sites and traces for the tests of comparisons."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from trace_tools import entry, meta

from diptych.lab.diff import differ, match
from diptych.lab.diff.result import Result
from diptych.lab.traces import Entry, Trace, Writer, bits_of


def site(name: str, value: np.ndarray, kind: str = "activation", **more: object) -> Entry:
    """Returns the entry with which a frontend hands over an array."""
    form, bits = bits_of(np.asarray(value))
    return entry(name, bits, form.name, kind, **more)


def parameter(name: str, value: np.ndarray) -> Entry:
    return site(name, value, "parameter")


def trace(folder: Path, *steps: list[Entry], **changes: object) -> Trace:
    with Writer(folder, meta(**changes)) as writer:
        for number, entries in enumerate(steps):
            writer.step(number, entries)
    return Trace.open(folder)


def matched(tmp_path: Path, a: list[Entry], b: list[Entry], frameworks=("torch", "jax"), rules=None) -> match.Matching:
    seen_a, seen_b = (trace(tmp_path / n, entries).ranks[0].step(0) for n, entries in (("a", a), ("b", b)))
    if rules is not None:
        rules.check([o.site for o in seen_a], [o.site for o in seen_b])
    return match.match(seen_a, seen_b, frameworks, rules)


def pairs(found: match.Matching) -> dict[str, tuple[str, str, bool]]:
    """B's key, by what, and whether it is transposed, by A's key."""
    return {p.a.key: (p.b.key, p.by, p.axes is not None) for p in found.pairs}


def firsts(result: Result) -> list[tuple[str, str]]:
    return [(result.rows[f.row].a, f.verdict) for f in result.first]


def compared(tmp_path: Path, a: list[list[Entry]], b: list[list[Entry]], **more) -> Result:
    return differ.diff(trace(tmp_path / "a", *a), trace(tmp_path / "b", *b), **more)
