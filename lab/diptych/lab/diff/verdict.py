"""The verdict on a pair of sites in one step, definition or rounding, from the distances of A, B and their references.

A reference H is a trace of the same model in float64. If H_A and H_B differ, the models compute different functions. If
they do not, R is the ratio of B's error to A's error, or to one rounding if A's error is smaller.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from diptych.lab.diff.result import Verdict
from diptych.lab.traces import DTYPES, Distance

DEFINITION = 1e-10
"""The relative rms above which two references differ by more than float64's rounding."""
GREEN = 2.0
"""The largest R that rounding explains, for a tensor of at least 100 elements."""
_FEW = 20.0
"""The limit of R for n < 100 elements is this divided by sqrt(n), since R scatters more for fewer elements."""
_FAR = 64
"""A's distance from its reference may be so many times that of B, or one rounding."""
_CANCELLED = 64
"""The bound of a reference's own rounding, as a multiple of A's error scaled to float64's precision."""


class Distances(NamedTuple):
    """The measured distances of a cell. `ab`: from A to B. `ha`, `hb`: from each side's reference to the side. `hh`:
    from H_A to H_B, None with one reference."""

    ab: Distance
    ha: Distance | None = None
    hb: Distance | None = None
    hh: Distance | None = None


class Judgement(NamedTuple):
    verdict: Verdict
    relative: float | None
    noise: float | None
    definition: float | None


def judge(found: Distances, dtype: str, referenced: bool, dtype_b: str | None = None) -> Judgement:
    """Returns the verdict on a cell.

    **Arguments:** `dtype`: A's. `referenced`: whether the step has references, so that a difference without a reference
    of the site is "unknown". `dtype_b`: B's, if it differs.
    """
    ab, hh = found.ab, found.hh
    relative, noise = _relative(ab), None
    definition = _relative(hh) if hh is not None else None
    if found.ha is not None and found.hb is not None:
        noise = _noise(ab, found.ha, found.hb, DTYPES[dtype].half_ulp)
    if definition is not None and definition > DEFINITION and not _cancelled(found, dtype):
        return Judgement("definition", relative, noise, definition)
    if _same(ab):
        return Judgement("same", relative, noise, definition)
    if noise is not None:
        green = noise <= max(GREEN, _FEW / math.sqrt(_errors(found))) and not _a_is_far(found, dtype, dtype_b or dtype)
        return Judgement("rounding" if green else "beyond", relative, noise, definition)
    if ab.equal is False or ab.differing:
        return Judgement("unknown" if referenced else "differs", relative, noise, definition)
    return Judgement("unknown", relative, noise, definition)


def _same(d: Distance) -> bool:
    """Returns whether all bits are known to be equal except NaN's, or all values of two dtypes; True for empty
    tensors."""
    return bool(d.equal) or d.elements == 0 or (d.compared == d.elements and d.differing == 0)


def _relative(d: Distance) -> float | None:
    found = d.relative
    return math.inf if found is not None and math.isnan(found) else found


def _cancelled(found: Distances, dtype: str) -> bool:
    """Returns whether two references differ by no more than their own rounding.

    Terms that cancel, as in gradients that are 0 in exact arithmetic, leave only rounding errors, in a reference too.
    A's error shows how large those terms were: it exceeds the reference's error by the ratio of the precisions.
    """
    ha, hh = found.ha, found.hh
    if ha is None or hh is None or hh.not_finite or hh.rms_difference is None or not ha.rms_difference:
        return False
    finer = DTYPES["float64"].half_ulp / (DTYPES[dtype].half_ulp or 1.0)
    return hh.rms_difference <= _CANCELLED * finer * ha.rms_difference


def _errors(found: Distances) -> int:
    """Returns the number of elements of A or B that are not exact, which is the number of errors in a mean. Zeros
    behind a ReLU are exact, and so are those of tokens that an expert does not get."""
    known = [d.differing for d in (found.ha, found.hb) if d is not None and d.differing is not None]
    return max(1, max(known, default=found.ab.compared))


def _a_is_far(found: Distances, dtype: str, dtype_b: str) -> bool:
    """Returns whether A's error is so much larger than B's and than one rounding that A does not compute what its
    reference does; R would then allow B any error. B's error is scaled to A's precision."""
    ha, hb = found.ha, found.hb
    if ha is None or hb is None or not ha.rms_difference or hb.rms_difference is None or ha.rms_a is None:
        return False
    u_a, u_b = DTYPES[dtype].half_ulp, DTYPES[dtype_b].half_ulp
    of_b = hb.rms_difference * (u_a / u_b if u_a and u_b else 1.0)
    far = _FAR * max(1.0, _FEW / GREEN / math.sqrt(_errors(found)))
    return ha.rms_difference > far * max(of_b, u_a * ha.rms_a)


def _noise(ab: Distance, ha: Distance, hb: Distance, roundoff: float) -> float | None:
    """Returns R = rms(B - H) / max(rms(A - H), u rms(H)), over finite values.

    R is inf if A and B disagree about values that are not finite, None without values, and 0 for 0 / 0.
    """
    if ab.not_finite is None and not ab.equal:
        return None
    # Without values of H, equal hashes show that A's values have its rms.
    by_values = ha.rms_a is not None
    scale, compared = (ha.rms_a, ha.compared) if by_values or not ha.equal else (ab.rms_a, ab.compared)
    if ha.rms_difference is None or hb.rms_difference is None or scale is None:
        return None
    if compared != hb.compared and not hb.equal:  # errors of other elements cannot be compared
        return None
    if ab.not_finite:
        return math.inf
    allowed = max(ha.rms_difference, roundoff * scale)
    if hb.rms_difference == 0:
        return 0.0
    return hb.rms_difference / allowed if allowed and math.isfinite(hb.rms_difference) else math.inf
