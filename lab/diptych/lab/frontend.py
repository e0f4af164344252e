"""The interface between the lab and a framework: arguments and results are NumPy arrays and value objects.

A frontend registers an object under the entry-point group `diptych.frontends`. The lab's files outside of `lab/torch`
and `lab/jax` import neither framework.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from diptych.common.errors import ExplainedError
from diptych.lab.bisect.forward import Feeder
from diptych.lab.job import Job, Weights
from diptych.lab.replay.op import Bits, Op

GROUP = "diptych.frontends"


class FrontendError(ExplainedError, RuntimeError):
    """The error for a framework that is not installed, or cannot run what was requested on this machine.

    **Cause:** A command that needs torch or JAX in an environment without it, or `--device cuda` where the framework
    or diptych has no CUDA.

    **Remedy:** Install the framework that the message names, or choose another device; `diptych doctor` says what is
    usable.
    """


class TrainingError(ExplainedError, RuntimeError):
    """The error for a run that failed, for example because a loss is not finite.

    **Cause:** Often a learning rate that is too large for the model.

    **Remedy:** Take a smaller `--lr` or a longer `--warmup`, or clip gradients (`--clip`). If high precision trains
    with the same settings, `diptych compare` shows where the runs part.
    """


@dataclasses.dataclass
class State:
    """The complete state of a training run, with the same names in both frameworks.

    `first`, `second`: AdamW's running means of the gradient and of its square. `step`: the number of updates so far.
    `quantizing`: the quantizers' states of all linear layers, with the names of a torch state dict:
    <linear>.scale_states.<slot>.scale, .amax_history and .fp8_max (float32), <linear>.rng_state (int32 [4]); empty for
    recipes without state.
    """

    step: int
    weights: Weights
    first: Weights
    second: Weights
    quantizing: Weights


class Trainer(Protocol):
    """A model, its optimizer and its state in one framework."""

    def step(self, batch: np.ndarray) -> float:
        """Makes one update on tokens, int32 [batch, seq + 1]. Returns the loss before the update, in nats per byte."""
        ...

    def captured(self, out: pathlib.Path) -> AbstractContextManager[Callable[[np.ndarray], float]]:
        """Returns a context with a function like `step`, whose calls are recorded as the steps of a trace in `out`: all
        values of all sites, and operations of the framework. The trainer's job must not be compiled."""
        ...

    def evaluate(self, batch: np.ndarray) -> float:
        """Returns the loss without an update; the quantizers' states do not change."""
        ...

    def scales(self) -> dict[str, float]:
        """Returns the current delayed scales by "<linear>.<slot>"; empty for recipes without delayed scales."""
        ...

    def state(self) -> State:
        """Returns a copy of the state."""
        ...

    def restore(self, state: State) -> None:
        """Continues from `state`."""
        ...


class Frontend(Protocol):
    """One framework's adapter. Importing its module imports the framework."""

    name: str
    updates_together: bool
    """Whether the delayed scales of a linear are updated by one call of scale_update_many, not by a call for each."""

    def versions(self) -> dict[str, str]:
        """Returns the versions of the framework and of the libraries that it loaded."""
        ...

    def device_problem(self, device: str) -> str | None:
        """Returns the reason why "cpu" or "cuda" cannot be used here, None if it can."""
        ...

    def trainer(self, job: Job, weights: Weights) -> Trainer:
        """Returns a new trainer that starts from `weights`."""
        ...

    def replay(self, op: Op, device: str) -> dict[str, Bits]:
        """Returns the results of a recorded operation, computed again by this framework."""
        ...

    def feeder(self, model: Any, device: str) -> Feeder:
        """Returns the feeder of a model of this framework, on a device, for a bisection."""
        ...


def discover() -> dict[str, Frontend | Exception]:
    """Returns every registered frontend by name: the frontend, or the reason why it could not be loaded."""
    found: dict[str, Frontend | Exception] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        try:
            found[entry.name] = entry.load()
        except Exception as e:
            found[entry.name] = e  # `require` reports the error; a broken framework must not hide the other one
    return found


def require(name: str, device: str) -> Frontend:
    """Returns the frontend called `name` if it can use `device`.

    **Raises** FrontendError with the reason if it cannot.
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
