"""The training loop of `train` and `compare`: the same batches in the same order for every framework and recipe."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diptych import core
from diptych.lab import checkpoint as ckpt
from diptych.lab.data import ByteData
from diptych.lab.frontend import Frontend, TrainingError
from diptych.lab.job import Job, initial_weights
from diptych.lab.progress import SILENT, Progress

SCALE_SAMPLES = 100
"""The number of times in a run at which delayed scales are recorded."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run's data and evaluation. The validation loss is computed every `eval_every` steps and
    last."""

    seed: int = 0
    batch: int = 8
    eval_every: int = 50
    eval_batches: int = 16
    checkpoint_every: int = 0

    def evaluations(self, steps: int) -> list[int]:
        """Returns the numbers of updates after which the validation loss is computed."""
        return sorted({steps, *range(self.eval_every, steps + 1, self.eval_every)}) if self.eval_every else [steps]


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a run that one call makes. `checkpoint`: path of the checkpoint, written every
    `Settings.checkpoint_every` steps and at the end. `resume`: a checkpoint to continue. `stop_after`: end after this
    many updates in all, before the job's last."""

    checkpoint: pathlib.Path | None = None
    resume: pathlib.Path | None = None
    stop_after: int | None = None


WHOLE = Stretch()


@dataclasses.dataclass
class RunResult:
    """The curves, kernel calls and times of one run. `scales`: the delayed scales by number of updates."""

    name: str
    losses: np.ndarray
    validation: dict[int, float]
    seconds: float
    calls: dict[str, int]
    steps_run: int
    evaluations_run: int
    step_seconds: float
    scales: dict[int, dict[str, float]]

    @property
    def final(self) -> float:
        return self.validation[max(self.validation)]


def kernel_calls() -> dict[str, int]:
    """Returns the number of kernel calls since the last reset, by op and by kernel name."""
    calls: dict[str, int] = {}
    for row in core.kernel_table():
        for key in (row["op"], row["kernel"]):
            calls[key] = calls.get(key, 0) + row["calls"]
    return calls


def _require_finite(loss: float, what: str) -> None:
    if not np.isfinite(loss):
        raise TrainingError(f"{what} is {loss}; try a smaller --lr")


def run(
    frontend: Frontend,
    job: Job,
    data: ByteData,
    settings: Settings,
    stretch: Stretch = WHOLE,
    *,
    name: str = "",
    on_step: Callable[[int, float, float | None], Any] | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress = SILENT,
) -> RunResult:
    """Trains one job from its seed, or continues from a checkpoint.

    **Arguments:** `stretch`: the updates to make, and the checkpoints before and after them. `on_step`: called with
    (updates so far, loss, validation loss or None). `stop`: called after every step; if it returns True, the checkpoint
    is written and KeyboardInterrupt raised.

    **Returns:** a `RunResult`, whose losses include those before a resume.

    **Raises:** CheckpointError, before anything runs; TrainingError for a loss that is not finite.
    """
    steps = job.optim.steps
    ours = ckpt.identity(job, seed=settings.seed, batch=settings.batch, data=data.train)
    losses: list[float] = []
    validation: dict[int, float] = {}
    start = None
    if stretch.resume is not None:
        start = ckpt.load(stretch.resume)
        ckpt.check(start, job, ours, stretch.resume)
        losses, validation = list(start.losses), dict(start.validation)
    trainer = frontend.trainer(job, initial_weights(job.model, settings.seed) if start is None else start.state.weights)
    if start is not None:
        trainer.restore(start.state)
    held_out = data.validation_batches(settings.eval_batches, settings.batch, job.model.seq)
    evaluations = set(settings.evaluations(steps))
    first, last = len(losses), min(steps, stretch.stop_after or steps)
    core.reset_calls()
    began, evaluated = time.perf_counter(), 0
    durations: list[float] = []
    scales: dict[int, dict[str, float]] = {}
    name = name or frontend.name
    with progress.stage(name, last, done=min(first, last), stays=True) as stage:
        for step in range(first, last):
            batch = data.batch(settings.seed, step, settings.batch, job.model.seq)
            at = time.perf_counter()
            loss = trainer.step(batch)
            durations.append(time.perf_counter() - at)
            _require_finite(loss, f"{name}: the loss of step {step}")
            losses.append(loss)
            done, held_loss = step + 1, None
            if done in evaluations:
                held_loss = float(np.mean([trainer.evaluate(b) for b in held_out]))
                _require_finite(held_loss, f"{name}: the validation loss after {done} steps")
                validation[done] = held_loss
                evaluated += len(held_out)
            if done % max(1, steps // SCALE_SAMPLES) == 0 and (held := trainer.scales()):
                scales[done] = held
            if on_step is not None:
                on_step(done, loss, held_loss)
            shown = f", validation {validation[max(validation)]:.3f}" if validation else ""
            stage.advance(f"loss {loss:.3f}{shown}")
            every = settings.checkpoint_every
            stopping = stop is not None and stop()
            if stretch.checkpoint is not None and (stopping or done == last or (every and done % every == 0)):
                record = ckpt.Checkpoint(trainer.state(), np.array(losses), validation, ours, frontend.name)
                ckpt.save(stretch.checkpoint, record)
            if stopping and done < last:
                raise KeyboardInterrupt
    return RunResult(
        name,
        np.array(losses),
        validation,
        time.perf_counter() - began,
        kernel_calls(),
        max(0, last - first),
        evaluated,
        float(np.median(durations)) if durations else 0.0,
        scales,
    )
