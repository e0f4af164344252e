"""A plan cut down to one call of a linear layer: which copies are made, by which quantize call, with which random draw.

Both panels follow it, so that the calls have the same numbers, and with them the same random bits, in both. torch
traces it into its graphs: no comprehension over generators, no property of a quantizer but its spec.
"""

from __future__ import annotations

from typing import NamedTuple

from diptych.common.formats import FORMATS
from diptych.common.layers.plan import LinearPlan, TensorPlan
from diptych.common.quantizers import STOCHASTIC, Quantizer

OFFSETS = 18
"""Offsets of the random generator that one forward and backward of a linear layer use: nine calls of two."""


class Call(NamedTuple):
    """One quantize call: with which quantizer, scale state and number of random draw, and what else it wants."""

    quantizer: Quantizer
    state: str
    number: int
    plain: bool  # nothing but the tensor is needed
    reducible: bool  # its amax may be reduced over a group
    needs_rng: bool


class Schedule(NamedTuple):
    """The calls of one forward and backward.

    `x_late`: the calls on the original x that backward makes. `x_kept`, `w_kept`: which operand backward reads,
    "columnwise", "rowwise", or "original"; empty: none. `backward_rng`: whether backward draws.
    """

    plan: LinearPlan
    x: tuple[Call, ...]
    w: tuple[Call, ...]
    dy: tuple[Call, ...]
    x_late: tuple[Call, ...]
    x_kept: str
    w_kept: str
    results: tuple[Call | None, Call | None, Call | None]
    backward_rng: bool

    def late_states(self) -> list[str]:
        """The delayed states that only backward's calls on x read, and that forward therefore has to record."""
        known = [c.state for c in self.x]
        return [c.state for c in self.x_late if c.state and c.state not in known]


def make_schedule(plan: LinearPlan, need_dx: bool, need_dw: bool, original: bool) -> Schedule:
    """The schedule of one call. `original`: keep the input, not its copy."""
    kept = []
    for tensor, needed in ((plan.input, need_dw), (plan.weight, need_dx)):
        side, held = "columnwise", tensor.columnwise
        if plan.dequantized_backward:
            side, held = "rowwise", tensor.rowwise
        kept.append("" if not needed else "original" if held is None else side)
    x_late: tuple[Call, ...] = ()
    if original and kept[0] not in ("", "original"):
        x_late = _calls(plan.input, 0, kept[0] == "rowwise", kept[0] == "columnwise")
    x = _calls(plan.input, 0, True, kept[0] == "columnwise" and not x_late)
    w = _calls(plan.weight, 2, True, kept[1] == "columnwise")
    dy = _calls(plan.grad_output, 4, need_dx, need_dw)
    results = [None if q is None else _call(q, "", 6 + i) for i, q in enumerate(plan.results)]
    backward_rng = False
    for call in (*dy, *x_late, results[1], results[2]):
        backward_rng = backward_rng or (call is not None and call.needs_rng)
    return Schedule(plan, x, w, dy, x_late, kept[0], kept[1], (results[0], results[1], results[2]), backward_rng)


def _call(quantizer: Quantizer, state: str, number: int) -> Call:
    spec = quantizer.spec
    fmt, draws = FORMATS[spec.format_id], bool(spec.flags & STOCHASTIC)
    plain = quantizer.implementation() is None and not state and not draws
    return Call(quantizer, state, number, plain, not state and (fmt.per_tensor or fmt.two_level), draws)


def _calls(plan: TensorPlan, number: int, rowwise: bool, columnwise: bool) -> tuple[Call, ...]:
    """A quantizer that serves both copies takes its tensor's first number."""
    second = 0 if plan.shared else 1
    calls = plan.calls(rowwise, columnwise)
    return tuple([_call(q, state, number + (0 if q.rowwise else second)) for q, state in calls])
