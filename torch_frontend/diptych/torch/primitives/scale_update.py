"""The update of delayed scales on raw buffers: kernel call and fake implementation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from diptych.core import _core
from diptych.torch.primitives.checks import (
    check_scale_update,
    require_no_grad,
)
from diptych.torch.primitives.register import define, direct, wrote


class Update(NamedTuple):
    """One update of `scale_update_many`: the operands of `scale_update`, and what its calls in graphs need.

    `seen`, `step`: int64 [1] on the same device; where they are equal, nothing changes. `pending`, `log`, `written`,
    `taken`: those of `log_buffers` in update.py, which history takes in. `scale_out`: gets a copy of the scale.
    """

    history: Tensor
    scale: Tensor
    reduced: Tensor | None
    amax: Tensor | None
    fp8_max: float
    margin: int
    most_recent: bool
    seen: Tensor | None = None
    step: Tensor | None = None
    pending: Tensor | None = None
    log: Tensor | None = None
    written: Tensor | None = None
    taken: Tensor | None = None
    scale_out: Tensor | None = None


def scale_update_many(updates: list[Update]) -> None:
    """Runs independent updates in one call of the core, which is one launch on a GPU."""
    _core.scale_update_many(updates)
    wrote(*[t for one in updates for t in (one.history, one.scale)])


def _scale_update(
    history: Tensor,
    scale: Tensor,
    reduced: Tensor | None,
    amax: Tensor | None,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> None:
    reduced = None if reduced is None else reduced.contiguous()
    amax = None if amax is None else amax.contiguous()
    _core.scale_update(history, scale, reduced, amax, history, scale, fp8_max, margin, most_recent)
    wrote(history, scale)


_scale_update_op = define(
    "scale_update",
    "(Tensor(a!) history, Tensor(b!) scale, Tensor? reduced, Tensor? amax, float fp8_max, int margin, bool most_recent)"
    " -> ()",
    _scale_update,
    check_scale_update,
)


def scale_update(
    history: Tensor,
    scale: Tensor,
    reduced: Tensor | None,
    amax: Tensor | None,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> None:
    """Delayed scaling's update of history [n, L] and scale [n] (or [L] and [1]), in place."""
    if direct(history, scale, reduced, amax):
        require_no_grad("diptych::scale_update", history, scale, reduced, amax)
        _scale_update(history, scale, reduced, amax, fp8_max, margin, most_recent)
    else:
        _scale_update_op(history, scale, reduced, amax, fp8_max, margin, most_recent)
