"""Definition or rounding: the verdict on a pair of sites in one step, from distances of A, B and their references.

A reference H is a trace of the same model in float64. Where H_A and H_B differ, the models compute different things.
Where they do not, R says how large B's error is beside A's, or beside one rounding if A's is smaller.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from diptych.lab.diff.result import Verdict
from diptych.lab.traces import DTYPES, Distance

DEFINITION = 1e-10
"""Relative rms from which on two references differ by more than float64's rounding."""
GREEN = 2.0
"""R up to which an error is rounding, for a tensor of at least 100 elements."""
_FEW = 20.0
"""Of fewer elements R scatters more, by about the root of their number: this divided by it is the limit."""
_CANCELLED = 64
"""A reference's own rounding, as a multiple of A's error scaled to float64's precision."""


class Distances(NamedTuple):
    """What was measured of a cell. `ab`: from A to B. `ha`, `hb`: from each side's reference to it. `hh`: from H_A to
    H_B, None with one reference."""

    ab: Distance
    ha: Distance | None = None
    hb: Distance | None = None
    hh: Distance | None = None


class Judgement(NamedTuple):
    verdict: Verdict
    relative: float | None
    noise: float | None
    definition: float | None


def judge(found: Distances, dtype: str, referenced: bool) -> Judgement:
    """Returns the verdict on a cell.

    **Arguments:** `dtype`: A's. `referenced`: whether there are references, so that a difference alone is no finding.
    """
    ab, hh = found.ab, found.hh
    relative, noise = _relative(ab), None
    definition = _relative(hh) if hh is not None else None
    if found.ha is not None and found.hb is not None:
        noise = _noise(ab, found.ha, found.hb, DTYPES[dtype].half_ulp)
    if definition is not None and definition > _limit(found, dtype):
        return Judgement("definition", relative, noise, definition)
    if _same(ab):
        return Judgement("same", relative, noise, definition)
    if noise is not None:
        green = noise <= max(GREEN, _FEW / math.sqrt(ab.compared))
        return Judgement("rounding" if green else "beyond", relative, noise, definition)
    if ab.equal is False or ab.differing:
        return Judgement("unknown" if referenced else "differs", relative, noise, definition)
    return Judgement("unknown", relative, noise, definition)


def _same(d: Distance) -> bool:
    """Whether all bits are known to be equal, or all values of two dtypes; an empty tensor has none."""
    return bool(d.equal) or d.elements == 0 or (d.equal is None and d.compared == d.elements and d.differing == 0)


def _relative(d: Distance) -> float | None:
    found = d.relative
    return math.inf if found is not None and math.isnan(found) else found


def _limit(found: Distances, dtype: str) -> float:
    """Returns the relative rms up to which references agree.

    Terms that cancel, as in gradients that are 0 in exact arithmetic, leave nothing but rounding in a reference too.
    A's error shows how large those terms were: it is as much larger than the reference's as A's precision is lower.
    """
    if found.ha is None or not found.ha.rms_a or not found.ha.rms_difference:
        return DEFINITION
    finer = DTYPES["float64"].half_ulp / (DTYPES[dtype].half_ulp or 1.0)
    return max(DEFINITION, _CANCELLED * finer * found.ha.rms_difference / found.ha.rms_a)


def _noise(ab: Distance, ha: Distance, hb: Distance, roundoff: float) -> float | None:
    """Returns R = rms(B - H) / max(rms(A - H), u rms(H)), over finite values.

    It is inf where A and B disagree about values that are not finite; None without values. 0 / 0 is 0.
    """
    if ab.not_finite is None and not ab.equal:
        return None
    if ha.rms_difference is None or hb.rms_difference is None or ha.rms_a is None:
        return None
    if ab.not_finite:
        return math.inf
    allowed = max(ha.rms_difference, roundoff * ha.rms_a)
    if hb.rms_difference == 0:
        return 0.0
    return hb.rms_difference / allowed if allowed and math.isfinite(hb.rms_difference) else math.inf
