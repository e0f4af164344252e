"""The noise that recipes add: a training step of the model of `benchmarks.quality` is captured, with the statistics of
its payloads' errors."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.cases import Case
from benchmarks.quality import Setting
from benchmarks.results import Row

BEFORE = 50  # steps of training before the one that is captured


def rows(case: Case, _: Any) -> Iterator[Row]:
    from diptych.lab.data import load
    from diptych.lab.job import initial_weights
    from diptych.lab.torch.adapter import TorchTrainer
    from diptych.lab.traces import Trace
    from diptych.torch import lab

    width, layers, batch, seq = case.shape
    setting = Setting(width=width, layers=layers, batch=batch, seq=seq, device="cpu", compile=False)
    data = load()
    for name in case.names:
        job = dataclasses.replace(setting.job(name, 0), threads=2)
        trainer = TorchTrainer(job, initial_weights(job.model, 0))
        with tempfile.TemporaryDirectory() as folder:
            with lab.capture(trainer._model, out=f"{folder}/trace", every=BEFORE) as capture:
                for step in range(BEFORE + 1):
                    trainer.step(data.batch(0, step, batch, seq))
                    capture.step()
            noise = noise_of(Trace.open(f"{folder}/trace").ranks[0].step(BEFORE))
        mean = statistics.fmean(noise)
        yield {"case": str(case), "name": name, "payloads": len(noise), "noise": mean, "dB": -10 * math.log10(mean)}


def noise_of(observations: list[Any]) -> list[float]:
    """Returns the power of each payload's errors as a share of that of the tensor that it was made from."""
    found = [o.record.statistics.quantized for o in observations if o.record.statistics is not None]
    return [10 ** (-q.sqnr / 10) for q in found if q is not None and q.sqnr is not None]
