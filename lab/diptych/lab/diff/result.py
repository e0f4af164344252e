"""What a comparison of two traces found. These classes are also the schema of `diptych diff --json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from diptych.lab.traces.schema import Kind

Verdict = Literal["same", "rounding", "beyond", "definition", "differs", "unknown"]
Matched = Literal["map", "name", "table", "bits", "order", "operation"]
GREEN = ("same", "rounding")
"""Verdicts that are no finding; nor is "unknown"."""
NO_FINDING = (*GREEN, "unknown")
FORWARD = ("activation", "parameter", "operand", "result")


class DiffError(ValueError):
    """A comparison that cannot be made; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One of the traces. `role`: "A", "B", or the float64 references "H_A" and "H_B". `steps`: how many it has."""

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
    """A pair of sites in one step.

    `verdict`: "same": all bits but those of NaN, or all values of two dtypes, are equal. With references:
    "definition": H_A and H_B differ by more than 1e-10 in relative rms; "rounding": R is at most 2, or 20 / sqrt(n)
    for n < 100 elements;
    "beyond": R is larger, or A is further from its own reference than rounding leads. Without, or where references do
    not have this step: "differs", as where the shapes of this step do. "unknown": neither hashes nor values tell, or a
    reference lacks the site. `relative`: rms of B - A relative to A's, inf where one of them is not finite; `max_ulp`,
    `differing` and `compared` as in `Distance`. `noise`: R = rms(B - H) / max(rms(A - H), u rms(H)). `definition`: the
    relative rms of H_B - H_A. None where it was not measured.
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
    """A site of A and the site of B that is the same. Rows are in the order of A's computation.

    `a`, `b`: the keys of the sites. `kind`, `name`, `call`: of A's. `matched`: by what. `transposed`: whether B's
    values are compared transposed. `inputs`: the positions of the rows that this one is computed from in A or in B, or
    None where only the order is known. `options`: those of the operation that computed both results which differ, such
    as "approximate: false, true". `cells`: one for each step of the result in which both traces have the site, in
    order, without those in which operations of two frameworks differ and what is computed next from them agrees.
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
    """Sites that could be matched in more than one way, which no one was guessed of. `why`: a sentence."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class First:
    """A row that differs and that is computed from no row that differs, in the first step that has one."""

    row: int
    step: int
    verdict: Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """`status`: "differs" if a cell is a finding, an unknown one is known to differ, or sites of one name have other
    shapes; else "green". `first`: where the traces part, forward sites first; empty if no cell is a finding.
    `unmatched_a`, `unmatched_b`: keys of sites that only one trace has, or that have other shapes in the other one.
    `notes`: sentences on what was not compared."""

    sides: tuple[Side, ...]
    steps: tuple[int, ...]
    rows: tuple[Row, ...]
    status: Literal["green", "differs"]
    first: tuple[First, ...]
    unmatched_a: tuple[str, ...]
    unmatched_b: tuple[str, ...]
    ambiguous: tuple[Ambiguous, ...]
    notes: tuple[str, ...]
