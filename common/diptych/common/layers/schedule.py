"""Schedules: a plan reduced to one call of a linear layer, with its quantize calls, their copies and random draws.

Both panels use it, so that quantize calls have the same numbers, and with them the same random bits. torch traces this
code into its graphs, so it uses no comprehension over generators, and no property of a quantizer except `spec`.
"""

from __future__ import annotations

from typing import NamedTuple

from diptych.common.formats import FORMATS
from diptych.common.layer_options import NO_ORIGINALS, Originals
from diptych.common.layers.plan import LinearPlan, TensorPlan
from diptych.common.quantizers import STOCHASTIC, Quantizer

OFFSETS = 18
"""Number of random offsets that one forward and backward of a linear layer use: nine calls with two each."""


class Call(NamedTuple):
    """One quantize call: its quantizer, the name of its scale state, and the number of its random draw."""

    quantizer: Quantizer
    state: str
    number: int
    plain: bool  # nothing but the tensor is needed
    reducible: bool  # its amax may be reduced over a group
    needs_rng: bool


class Schedule(NamedTuple):
    """The quantize calls of one forward and backward.

    `x_late`, `w_late`: calls on the original x and w that backward makes. `x_kept`, `w_kept`: the operand that backward
    reads, "columnwise", "rowwise", or "original"; empty: none. `backward_rng`: whether backward uses random bits.
    """

    plan: LinearPlan
    x: tuple[Call, ...]
    w: tuple[Call, ...]
    dy: tuple[Call, ...]
    x_late: tuple[Call, ...]
    w_late: tuple[Call, ...]
    x_kept: str
    w_kept: str
    results: tuple[Call | None, Call | None, Call | None]
    backward_rng: bool


def late_states(calls: tuple[Call, ...], late: tuple[Call, ...]) -> list[str]:
    """Returns the delayed states of one tensor that only backward's calls read; forward must record their amaxes."""
    known = [c.state for c in calls]
    return [c.state for c in late if c.state and c.state not in known]


def make_schedule(plan: LinearPlan, need_dx: bool, need_dw: bool, originals: Originals = NO_ORIGINALS) -> Schedule:
    """Returns the schedule of one call. A weight's copies that the user's own code makes are kept, whatever `originals`
    says."""
    kept = []
    for tensor, needed in ((plan.input, need_dw), (plan.weight, need_dx)):
        side, held = "columnwise", tensor.columnwise
        if plan.dequantized_backward:
            side, held = "rowwise", tensor.rowwise
        kept.append("" if not needed else "original" if held is None else side)
    x_late: tuple[Call, ...] = ()
    w_late: tuple[Call, ...] = ()
    if originals.input and kept[0] not in ("", "original"):
        x_late = _calls(plan.input, 0, kept[0] == "rowwise", kept[0] == "columnwise")
    if originals.weight and kept[1] not in ("", "original"):
        w_late = _calls(plan.weight, 2, kept[1] == "rowwise", kept[1] == "columnwise")
        w_late = () if w_late[0].quantizer.implementation() is not None else w_late
    x = _calls(plan.input, 0, True, kept[0] == "columnwise" and not x_late)
    w = _calls(plan.weight, 2, True, kept[1] == "columnwise" and not w_late)
    dy = _calls(plan.grad_output, 4, need_dx, need_dw)
    results = [None if q is None else _call(q, "", 6 + i) for i, q in enumerate(plan.results)]
    backward_rng = False
    for call in (*dy, *x_late, *w_late, results[1], results[2]):
        backward_rng = backward_rng or (call is not None and call.needs_rng)
    return Schedule(
        plan, x, w, dy, x_late, w_late, kept[0], kept[1], (results[0], results[1], results[2]), backward_rng
    )


def _call(quantizer: Quantizer, state: str, number: int) -> Call:
    spec = quantizer.spec
    fmt, draws = FORMATS[spec.format_id], bool(spec.flags & STOCHASTIC)
    plain = quantizer.implementation() is None and not state and not draws
    return Call(quantizer, state, number, plain, not state and fmt.tensor_amax, draws)


def _calls(plan: TensorPlan, number: int, rowwise: bool, columnwise: bool) -> tuple[Call, ...]:
    """A quantizer that serves both copies takes its tensor's first number."""
    second = 0 if plan.shared else 1
    calls = plan.calls(rowwise, columnwise)
    return tuple([_call(q, state, number + (0 if q.rowwise else second)) for q, state in calls])
