"""Delayed scaling's update, eagerly and in graphs, and how graphs record amaxes.

A graph runs the update in each forward, and the device decides whether it is a step's first (`seen`, `step`). Graphs
record amaxes in buffers, which reach the histories at the next update, or when the histories are saved:

    pending   float32 [n]     amaxes of forwards; forward graphs write them, and also run the update
    log       float32 [n, R]  amaxes of backwards, with the number `written` of them (int64 [1])
    taken     int64 [n]       the number of entries of the log that each history has taken

Invariant: only backward graphs write `log` and `written`, and only forward graphs read them. So a layer may run
forward again before its first backward, and hooks on saved tensors see none of these buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.quantizers import Float8Quantizer
from diptych.core import _core
from diptych.torch.functional.amax_group import max_over
from diptych.torch.graph import program
from diptych.torch.graph.program import Programs, Replay
from diptych.torch.primitives import constants
from diptych.torch.primitives import scale_update as scale_update_ops
from diptych.torch.primitives.checks import describe
from diptych.torch.primitives.constants import Constants
from diptych.torch.primitives.register import define, direct, wrote
from diptych.torch.primitives.scale_update import Update
from diptych.torch.private.autograd import backward_pass
from diptych.torch.private.dispatch import assert_async, foreach_copy_
from diptych.torch.state.checkpoint import SAVED, require_saved, tape_call, taped_call

LOGGED = 1024  # the most backwards of a layer between two updates

LOG = ("pending", "log", "written", "taken")


def fp8_max(quantizer: Float8Quantizer) -> float:
    """Returns the largest finite value of a quantizer's element."""
    return torch.finfo(getattr(torch, quantizer.fp8_dtype)).max


def log_buffers(n: int, device: torch.device | str | None) -> dict[str, Tensor]:
    """Returns new buffers in which graphs record the amaxes of n states."""
    return {
        "pending": torch.zeros(n, dtype=torch.float32, device=device),
        "log": torch.zeros(n, LOGGED, dtype=torch.float32, device=device),
        "written": torch.zeros(1, dtype=torch.int64, device=device),
        "taken": torch.zeros(n, dtype=torch.int64, device=device),
    }


def forget(log: list[Tensor]) -> None:
    """Drops the amaxes that `log_buffers` hold."""
    if log:
        pending, _, written, taken = log
        pending.zero_()
        taken.copy_(written.expand_as(taken))


def record_pending(pending: Tensor, amaxes: Tensor) -> None:
    """Enters the amaxes of a forward. A recomputation enters the same amaxes again, which changes nothing."""
    pending.copy_(torch.maximum(pending, amaxes))


def _log_amax(amax: Tensor, log: Tensor, written: Tensor) -> None:
    _core.log_amax(amax, log, written)
    wrote(log, written)


_log_amax_op = define(
    "log_amax",
    "(Tensor amax, Tensor(a!) log, Tensor(b!) written) -> ()",
    _log_amax,
    lambda *_: None,
    buffers=True,
)


def log_amax(amax: Tensor, log: Tensor, written: Tensor) -> None:
    """Enters the amaxes [n] of a backward."""
    (_log_amax if direct(amax, log, written) else _log_amax_op)(amax, log, written)


# --- the update ------------------------------------------------------------------------------------------------------


def _chosen(quantizer: Float8Quantizer, history: Tensor, reduced: Tensor | None) -> Tensor | None:
    """Returns the amax that a recipe's own function picks from copies of the history; None if the core is to pick
    it."""
    algo = quantizer.amax_compute_algo
    if not callable(algo):
        return None
    program.refuse()
    last = history[:1].clone()
    if reduced is not None:
        last = torch.where(reduced != 0, reduced, last)
    amax: Any = algo(history.clone()[None], last)
    if not isinstance(amax, Tensor):
        raise ArgumentError(
            f"DelayedScaling's amax_compute_algo returned {type(amax).__name__}; the function must return a tensor "
            "float32[1], the amax chosen from the history [1, L] that it was given"
        )
    if amax.dtype != torch.float32 or tuple(amax.shape) != (1,) or amax.device != history.device:
        raise ValueError(
            f"DelayedScaling's function amax_compute_algo must return float32[1] on {history.device}, got "
            f"{describe(amax)}"
        )
    return amax.detach().contiguous()


def update_all(
    histories: list[Tensor],
    scales: list[Tensor],
    log: list[Tensor],
    quantizers: tuple[Any, ...],
    group: Any = None,
    seen: Tensor | None = None,
    step: Tensor | None = None,
    shown: bool = False,
) -> list[Tensor]:
    """Updates the scales in place from the amaxes so far (docs/numerics.md, "Delayed scaling"); returns a copy, [n].

    `log`: nothing, or `log_buffers`. `group`: process group over which pending amaxes are reduced first. If `seen`
    equals `step` (int64 [1]), no scale changes. `shown`: runs the op that modes and traces see, if there is neither a
    log nor `seen`.
    """
    reduced: list[Tensor | None] = [None] * len(histories)
    chosen = list(reduced)
    if group is not None or any([callable(q.amax_compute_algo) for q in quantizers]):
        collect(histories, scales, log)
        log = []
        if group is not None:
            pending = torch.cat([history[:1] for history in histories])
            reduced = list(max_over(pending, group).split(1))
        # The user's code may raise, so it runs before anything changes.
        chosen = [_chosen(*one) for one in zip(quantizers, histories, reduced, strict=True)]
    rows = list(zip(quantizers, reduced, chosen, strict=True))
    options = [(r, c, fp8_max(q), q.margin, q.amax_compute_algo == "most_recent") for q, r, c in rows]
    if shown and seen is None and not log:
        for history, scale, given in zip(histories, scales, options, strict=True):
            scale_update_ops.scale_update(history, scale, *given)
        return [torch.cat(scales)]
    copy = scales[0].new_empty(len(scales))
    updates = [
        Update(history, scale, *given, seen, step, *_of(log, i), copy.narrow(0, i, 1))
        for i, (history, scale, given) in enumerate(zip(histories, scales, options, strict=True))
    ]
    scale_update_ops.scale_update_many(updates)
    return [copy]


def update_eagerly(
    planned: tuple[Any, ...],
    histories: list[Tensor],
    scales: list[Tensor],
    log: list[Tensor],
    group: Any,
    seen: Tensor | None = None,
    step: Tensor | None = None,
) -> Tensor:
    """Runs `update_all` outside of graphs, by a program if one can repeat it. `planned`: the plan's states."""
    quantizers = tuple([one.quantizer for one in planned])
    times = [] if seen is None or step is None else [seen, step]
    tensors = [*histories, *scales, *log, *times]
    if group is not None or not direct(*tensors):
        return update_all(histories, scales, log, quantizers, group, seen, step, shown=True)[0]
    replay = Replay((id(planned), bool(log), seen is None), planned, tensors, [*histories, *scales])
    return _programs.repeat(replay, None, update_all, histories, scales, log, quantizers, None, seen, step)[0][0]


class JointUpdate:
    """The updates of many layers' scales, which run in one call of the core where the first of the layers enters a new
    region.

    An update to which no amax was recorded changes nothing. So a layer that enters later finds its scales as its own
    update would leave them, and skips that update unless its state was written in between. The plan decides how
    scales follow from amaxes, so only layers whose states are bound to the plan that this region gives them take part.
    """

    def __init__(self, layers: list[tuple[Any, Callable[[Any], Any]]]) -> None:
        self._layers, self._region = layers, 0
        self._made: dict[int, tuple[Tensor, list[Any]]] = {}  # by the states' id: their scales, and `_written` then
        for one, _ in layers:
            one.__dict__["joint"] = self

    def scales(self, states: Any, recipe: Any, region: int, step: Tensor) -> Tensor | None:
        """Returns a copy of a layer's scales, [n], updated for this region; None if the layer has to update them
        itself. `recipe`, `region`, `step`: the region's recipe and number, and the count of regions on the device."""
        if not self._region:
            joined = [one for one, plan in self._layers if self._joins(one) and plan(recipe) is one.plan]
            if all([one is not states for one in joined]):
                return None
            self._region = region
            self._run(joined, step)
        made = self._made.pop(id(states), None)
        if made is None or made[1] != _written(states):
            return None
        if self._region != region and states._buffers["seen"] is not None:
            states._buffers["seen"].copy_(step)
        return made[0]

    def _joins(self, states: Any) -> bool:
        """Returns whether a layer still takes part in this update, which it does not if graphs use its states."""
        return states.joint is self and not states.graphed

    def _run(self, joined: list[Any], step: Tensor) -> None:
        states = [one for one in joined if one._in_order()[0].scale.device == step.device]
        slots = [slot for one in states for slot in one._in_order()]
        tensors = [t for slot in slots for t in (slot.amax_history, slot.scale)]
        if not states or not direct(*tensors):
            return
        copy, updates = step.new_empty(len(slots), dtype=torch.float32), []
        for i, slot in enumerate(slots):
            q = slot.quantizer
            options = fp8_max(q), q.margin, q.amax_compute_algo == "most_recent"
            updates.append(Update(slot.amax_history, slot.scale, None, None, *options, scale_out=copy.narrow(0, i, 1)))
        scale_update_ops.scale_update_many(updates)
        seen = [one._buffers["seen"] for one in states if one._buffers["seen"] is not None]
        if seen:
            foreach_copy_(seen, [step] * len(seen))
        first = 0
        for one in states:
            count = len(one._in_order())
            self._made[id(one)] = copy.narrow(0, first, count), _written(one)
            first += count


def _written(states: Any) -> list[Any]:
    """Returns a state's plan and its tensors with their version counters."""
    tensors = [t for slot in states._in_order() for t in (slot.amax_history, slot.scale)]
    return [id(states.plan), *[(id(t), 0 if t.is_inference() else t._version) for t in tensors]]


def update_jointly(layers: list[tuple[Any, Callable[[Any], Any]]]) -> None:
    """Makes the updates of many layers' scales in the next region one joint update.

    Layers that did not run, or that graphs use, keep an update of their own, and so do recipes with a function of the
    user's own.

    **Arguments:** `layers`: the `ScaleStates` of each, and a function that is called with the region's recipe and
    returns the plan by which the layer would run there, or None if it would not update its scales alone.
    """
    for one, _ in layers:
        one.__dict__["joint"] = None
    found = [
        (one, plan)
        for one, plan in layers
        if one.plan is not None and one.view is not None and not one.graphed and one.plan.states
        if not any([callable(slot.quantizer.amax_compute_algo) for slot in one._in_order()])
    ]
    if found:
        JointUpdate(found)


def collect(histories: list[Tensor], scales: list[Tensor], log: list[Tensor]) -> None:
    """Moves what graphs have recorded into the histories. `log`: nothing, or `log_buffers`."""
    if log:
        never = torch.zeros_like(log[2])
        scale_update_ops.scale_update_many(
            [
                Update(history, scale, None, None, 1.0, 0, False, never, never, *_of(log, i))
                for i, (history, scale) in enumerate(zip(histories, scales, strict=True))
            ]
        )


def _of(log: list[Tensor], i: int) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the part of `log_buffers` that belongs to state i."""
    if not log:
        return (None, None, None, None)
    pending, amaxes, written, taken = log
    return pending.narrow(0, i, 1), amaxes[i], written, taken.narrow(0, i, 1)


_programs = Programs()


def _update_in_graph(
    histories: list[Tensor],
    scales: list[Tensor],
    pending: Tensor,
    log: Tensor,
    written: Tensor,
    taken: Tensor,
    seen: Tensor,
    step: Tensor,
    quantizers: Constants,
    group: Any,
) -> Tensor:
    """Runs the update in compiled code. In a graph that an eager checkpoint recomputes, the scales stay those of the
    forward. **Raises** NotImplementedError if they were updated since, because a graph cannot be given the old ones."""
    entry = taped_call(None, "compiled scales")
    if entry is not None and entry.seen is not None:
        same = seen == entry.seen
        said = (
            "delayed scaling in compiled code that a checkpoint recomputes: a later autocast region has updated the "
            "scales since the forward; run backward before that region, or checkpoint inside of the compiled function"
        )
        if same.is_cuda:
            assert_async(same, said)
        elif not same.item():
            raise UnsupportedError(said)
        return torch.cat(scales)
    if backward_pass() != -1:
        raise UnsupportedError(
            "delayed scaling in compiled code that a checkpoint recomputes: the recomputation would update scales "
            "again; use diptych.torch.checkpoint"
        )
    logs = [pending, log, written, taken]
    if group is None:
        tensors = [*histories, *scales, *logs, seen, step]
        made = _programs(quantizers, tensors, update_all, histories, scales, logs, quantizers.items, None, seen, step)
    else:
        made = update_all(histories, scales, logs, quantizers.items, constants.group_of(group), seen, step)
    wrote(*histories, *scales)
    seen.copy_(step)
    tape_call(None, "compiled scales", None, None, None, seen=seen)
    return made[0]


def _update_in_graph_fake(histories: list[Tensor], scales: list[Tensor], *_: Any) -> Tensor:
    require_saved("delayed scaling")
    return scales[0].new_empty(len(scales))


if constants.AVAILABLE:
    _update_op = define(
        "update_scales",
        "(Tensor(a!)[] histories, Tensor(b!)[] scales, Tensor(c!) pending, Tensor log, Tensor written, "
        "Tensor(d!) taken, Tensor(e!) seen, Tensor step, "
        f"{constants.schema_type(Constants)} quantizers, {constants.GROUP_TYPE}? group) -> Tensor",
        _update_in_graph,
        _update_in_graph_fake,
        buffers=True,
    )
    SAVED.add(_update_op)


def update_once(states: Any, planned: tuple[Any, ...], step: Tensor, group: Any) -> Tensor:
    """Runs `ScaleStates.update` if `step` has changed since the last update. The device decides that, since a graph
    calls this in each forward. `planned`: the plan's states. **Returns** a copy of the scales, in their order."""
    pairs = [states.tensors(one.name) for one in planned]
    histories, scales = [p[1] for p in pairs], [p[0] for p in pairs]
    buffers = states._buffers
    seen = buffers["seen"]
    if direct(seen, step, watched=True):
        made = update_eagerly(planned, histories, scales, states.recorded(), group, seen, step)
        seen.copy_(step)
        return made
    log = [buffers[name] for name in LOG]
    quantizers = Constants(tuple([one.quantizer for one in planned]))
    return _update_op(histories, scales, *log, seen, step, quantizers, constants.group_argument(group))
