"""The border between the lab and a framework: NumPy arrays and value objects in, NumPy arrays out.

A frontend registers an object under the entry-point group `diptych.frontends`. The lab imports neither torch nor jax.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Protocol

import numpy as np

from diptych.lab.job import Job, Weights
from diptych.lab.trace import Bits, Op, StepTrace

GROUP = "diptych.frontends"


class FrontendError(RuntimeError):
    """A framework that is not installed, or cannot do what was asked on this machine."""


class TrainingError(RuntimeError):
    """A run that went wrong in itself, such as a loss that is not finite."""


@dataclasses.dataclass
class State:
    """All that training carries from step to step, under one set of names in both frameworks.

    `first`, `second`: AdamW's running means of the gradient and of its square. `step`: updates made so far.
    `quantizing`: what the linears' quantizers keep, as a torch state dict names it: <linear>.scale_states.<slot>.scale,
    .amax_history and .fp8_max (float32), <linear>.rng_state (int32 [4]); empty for recipes without state.
    """

    step: int
    weights: Weights
    first: Weights
    second: Weights
    quantizing: Weights


class Trainer(Protocol):
    """A model, its optimizer and its state in one framework."""

    def step(self, batch: np.ndarray) -> float:
        """One update on int32 [batch, seq + 1] tokens; returns the loss before it, in nats per byte."""
        ...

    def traced_step(self, batch: np.ndarray) -> StepTrace:
        """One update, as `step` makes it, with every diptych op and the named activations recorded."""
        ...

    def evaluate(self, batch: np.ndarray) -> float:
        """Loss without an update; quantizers keep what they kept."""
        ...

    def scales(self) -> dict[str, float]:
        """The delayed scales as they are, by linear and slot joined with a dot; empty for recipes without them."""
        ...

    def state(self) -> State:
        """A copy of the state."""
        ...

    def restore(self, state: State) -> None:
        """Continues from `state`."""
        ...


class Frontend(Protocol):
    """One framework's adapter. Importing its module imports the framework."""

    name: str

    def versions(self) -> dict[str, str]:
        """Versions of the framework and of what it loaded."""
        ...

    def device_problem(self, device: str) -> str | None:
        """Why "cpu" or "cuda" cannot be used here, None if it can."""
        ...

    def trainer(self, job: Job, weights: Weights) -> Trainer:
        """A fresh trainer that starts from `weights`."""
        ...

    def replay(self, op: Op, device: str) -> dict[str, Bits]:
        """Outputs of a recorded diptych op, computed anew by this framework's raw ops."""
        ...

    def apply(self, kind: str, inputs: list[np.ndarray], heads: int) -> np.ndarray:
        """Output of one framework op of `trace.framework_ops` on given inputs, on the CPU."""
        ...


def discover() -> dict[str, Frontend | Exception]:
    """Every registered frontend by name: itself, or why it could not be loaded."""
    found: dict[str, Frontend | Exception] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        try:
            found[entry.name] = entry.load()
        except Exception as e:
            found[entry.name] = e  # reported by whoever needs it: a broken framework must not hide the other
    return found


def require(name: str, device: str) -> Frontend:
    """The frontend called `name`, able to use `device`.

    **Raises** FrontendError saying what is missing.
    """
    entries = [e for e in importlib.metadata.entry_points(group=GROUP) if e.name == name]
    if not entries:
        raise FrontendError(f"no frontend {name!r} is registered; reinstall with: pip install 'diptych[{name}]'")
    try:
        frontend: Frontend = entries[0].load()
    except Exception as e:
        raise FrontendError(
            f"frontend {name!r} does not load ({type(e).__name__}: {e}); install it with: pip install 'diptych[{name}]'"
        ) from e
    problem = frontend.device_problem(device)
    if problem is not None:
        raise FrontendError(f"{name} cannot run on {device}: {problem}")
    return frontend
