"""`check_states`: finds delayed scales of a model that serve their tensors badly, judged by their histories."""

from __future__ import annotations

import dataclasses
import math

from torch import nn

from diptych.torch.state.scales import ScaleSlot, ScaleStates
from diptych.torch.state.update import fp8_max


@dataclasses.dataclass(frozen=True)
class StateRow:
    """One delayed scale. `name`: the prefix of its keys in the state dict. `scale`: what the next quantize multiplies
    by. `steps`: amaxes in its history, at most the history's length less one. `newest`, `median`, `largest`: of these,
    0 without any. `finding`: "", "frozen", "outlying" or "unused"; `detail`: what was found, in words."""

    name: str
    scale: float
    steps: int
    newest: float
    median: float
    largest: float
    finding: str = ""
    detail: str = ""

    def __str__(self) -> str:
        amaxes = f"amaxes of {self.steps} steps: newest {self.newest:.3g}, median {self.median:.3g}"
        found = f": {self.finding}, {self.detail}" if self.finding else ""
        return f"{self.name}{found} (scale {self.scale:.3g}; {amaxes}, largest {self.largest:.3g})"


@dataclasses.dataclass(frozen=True)
class StatesReport:
    """The delayed scales of a model, `rows`, by module and tensor; as a string, counts and the rows with a finding."""

    rows: tuple[StateRow, ...]

    def _found(self, finding: str) -> tuple[StateRow, ...]:
        return tuple([row for row in self.rows if row.finding == finding])

    @property
    def frozen(self) -> tuple[StateRow, ...]:
        """Scales that were not updated while others of their layer were."""
        return self._found("frozen")

    @property
    def outlying(self) -> tuple[StateRow, ...]:
        """Scales that one amax sets, far above the median of its history."""
        return self._found("outlying")

    @property
    def unused(self) -> tuple[StateRow, ...]:
        """Scales for which nothing has been recorded."""
        return self._found("unused")

    def __str__(self) -> str:
        counts = [f"{len(self._found(kind))} {kind}" for kind in ("frozen", "outlying", "unused")]
        found = [f"  {row}" for row in self.rows if row.finding]
        return "\n".join([f"{len(self.rows)} delayed scales: {', '.join(counts)}", *found])


def check_states(model: nn.Module, outlier: float = 64.0) -> StatesReport:
    """Looks for delayed scales that serve their tensors badly. It waits for the device, so do not call it in each step.

    - frozen: others of its layer have amaxes of at least three steps more, or its history holds an amax that is not
      finite. Its tensor is 0 throughout, or no call that records quantizes it.
    - outlying: the scale comes from one amax of more than `outlier` times the median of its history (of three steps or
      more). Smaller values may be rounded to 0 until that amax leaves the history.
    - unused: nothing was recorded in its layer yet, or no recipe has used what was loaded.

    **Arguments:** `model`: any module. `outlier`: a ratio above 1.

    **Returns:** a `StatesReport`, whose string is made for printing; empty rows for a model without delayed scales.

    **Raises:** TypeError for a model that is no module, ValueError for an `outlier` of 1 or less.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"check_states: model must be a torch.nn.Module, got {type(model).__name__}")
    if not outlier > 1:
        raise ValueError(f"check_states: outlier must be greater than 1, got {outlier}")
    rows: list[StateRow] = []
    for prefix, states in model.named_modules():
        if isinstance(states, ScaleStates) and states.slots():
            states.collect()
            slots = states.slots()
            histories = {key: slot.amax_history.tolist() for key, slot in slots.items()}
            steps = max([sum(amax != 0 for amax in history[1:]) for history in histories.values()])
            for key, slot in slots.items():
                name = f"{prefix}.{key}" if prefix else key
                rows.append(_row(name, slot, histories[key], steps, outlier))
    return StatesReport(tuple(rows))


def _row(name: str, slot: ScaleSlot, history: list[float], layer_steps: int, outlier: float) -> StateRow:
    """`layer_steps`: the most amaxes that a history of the layer holds."""
    amaxes = [amax for amax in history[1:] if amax != 0]
    ordered = sorted(amaxes)
    scale, largest = slot.scale.item(), ordered[-1] if ordered else 0.0
    median = ordered[len(ordered) // 2] if ordered else 0.0
    row = StateRow(name, scale, len(amaxes), amaxes[-1] if amaxes else 0.0, median, largest)
    if slot.quantizer is None:
        return dataclasses.replace(row, finding="unused", detail="no recipe has used it since it was loaded")
    if not all([math.isfinite(amax) for amax in amaxes]):
        return dataclasses.replace(row, finding="frozen", detail="its history holds an amax that is not finite")
    if layer_steps - len(amaxes) >= 3:
        detail = f"others of its layer have amaxes of {layer_steps} steps"
        return dataclasses.replace(row, finding="frozen", detail=detail)
    if layer_steps == 0 and history[0] == 0:
        return dataclasses.replace(row, finding="unused", detail="nothing has been recorded")
    sets_scale = math.isclose(scale * largest, fp8_max(slot.quantizer) * 2.0**-slot.quantizer.margin, rel_tol=1e-5)
    if len(amaxes) >= 3 and sets_scale and largest > outlier * median:
        stays = len(history) - 1 - history[:0:-1].index(largest)
        detail = f"one amax is {largest / median:.3g} times the median and sets the scale for {stays} more updates"
        return dataclasses.replace(row, finding="outlying", detail=detail)
    return row
