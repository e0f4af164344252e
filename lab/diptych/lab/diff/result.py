"""The result of a comparison of two traces. These classes are also the schema of `diptych diff --json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from diptych.common.errors import ExplainedError
from diptych.lab.traces.schema import Kind

Verdict = Literal["same", "rounding", "beyond", "definition", "differs", "unknown"]
Matched = Literal["map", "name", "table", "bits", "order", "operation"]
GREEN = ("same", "rounding")
"""Verdicts of cells that agree. `NO_FINDING` adds "unknown"."""
NO_FINDING = (*GREEN, "unknown")
FORWARD = ("activation", "parameter", "operand", "result")


class DiffError(ExplainedError, ValueError):
    """The error for a comparison that cannot be made. Its message says why.

    **Cause:** Traces without a common step or site, or a file of references that does not fit them.

    **Remedy:** Capture both runs with the same steps and sites, or map their names (docs/lab.md).
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A compared trace. `role`: "A", "B", or "H", "H_A" or "H_B" for a float64 reference. `steps`: the number of its
    steps."""

    role: str
    folder: str
    framework: str
    versions: Mapping[str, str]
    device: str
    recipe: str | None
    instrumented: bool
    plain_bits: bool | None
    ranks: int
    steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A pair of sites in one step. A field is None if it was not measured.

    `verdict`: "same": all bits are equal except those of NaN, or all values if the dtypes differ.
    "definition", with references: H_A and H_B differ by more than 1e-10 in relative rms.
    "rounding", with references: R is at most 2, or 20 / sqrt(n) for n < 100 elements.
    "beyond", with references: R is larger, or A is further from its own reference than rounding explains.
    "differs": the bits differ and no reference has the step, or the shapes differ in this step.
    "unknown": neither hashes nor values show it, or a reference lacks the site.

    `relative`: rms of B - A divided by the rms of A, inf if one of them is not finite. `max_ulp`, `differing`,
    `compared`: see `Distance`. `noise`: R = rms(B - H) / max(rms(A - H), u rms(H)). `definition`: the relative rms of
    H_B - H_A.
    """

    step: int
    verdict: Verdict
    relative: float | None
    max_ulp: int | None
    differing: int | None
    compared: int
    noise: float | None = None
    definition: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A site of A and the site of B that is matched with it. Rows are in the order of A's computation.

    `a`, `b`: the keys of the sites. `kind`, `name`, `call`, `shape`: those of A's site. `matched`: how they were
    matched. `transposed`: whether B's values are compared with permuted axes. `inputs`: the positions of the rows that
    this one is computed from in A or in B, None if only the order is known. `options`: the options in which the
    operations of the two results differ, such as "approximate: false, true". `cells`: one for each step in which both
    traces have the site, in order, without those that `inner_operations` leaves out.
    """

    a: str
    b: str
    rank: int
    kind: Kind
    name: str
    call: int
    shape: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    matched: Matched
    transposed: bool
    inputs: tuple[int, ...] | None
    options: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Ambiguous:
    """Sites that could be matched in several ways, and were not matched. `why`: the reason, as a sentence."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class First:
    """A row that differs in the first step with a difference, and is computed from no other row that differs."""

    row: int
    step: int
    verdict: Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of `differ.diff`. `status`: "differs" if a cell is a finding, an unknown cell is known to differ, or
    sites with one name have different shapes; else "green". `first`: where the traces first differ, forward sites
    first; empty if no cell is a finding. `unmatched_a`, `unmatched_b`: keys of sites that only one trace has, or that
    have another shape in the other trace. `notes`: sentences on sites that were not compared."""

    sides: tuple[Side, ...]
    steps: tuple[int, ...]
    rows: tuple[Row, ...]
    status: Literal["green", "differs"]
    first: tuple[First, ...]
    unmatched_a: tuple[str, ...]
    unmatched_b: tuple[str, ...]
    ambiguous: tuple[Ambiguous, ...]
    notes: tuple[str, ...]
