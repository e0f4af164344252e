"""Captures on a GPU: the core's hash and statistics beside a copy, and captured steps of the demo model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import room
from benchmarks.cases import Case
from benchmarks.results import Row
from benchmarks.room import Run, copy_run, measured
from benchmarks.sections import lab
from diptych.torch.primitives import hash as hashes
from diptych.torch.primitives import statistics


def ops(case: Case) -> Iterator[Row]:
    """The ops read a float32 tensor of so many bytes; errors also its rounded values and the largest ones. Results have
    the bits of the CPU's."""
    (size,) = case.shape
    x = torch.randn(size // 4, device=room.DEVICE)
    rounded, largest = x.bfloat16().float(), torch.full_like(x, math.inf)

    def run(call: Any, *operands: torch.Tensor) -> Run:
        want = call(*(t.cpu() for t in operands)).view(torch.uint8)
        return Run(
            lambda: call(*operands),
            bytes=sum(t.nbytes for t in operands),
            check=lambda got: float(not torch.equal(got.cpu().view(torch.uint8), want)),
        )

    calls = {
        "copy": copy_run(size),
        "hash": run(hashes.hash, x),
        "statistics": run(statistics.statistics, x),
        "errors": run(lambda *given: statistics.errors(*given, 1.0), x, rounded, largest),
    }
    yield from measured(case, calls)


def rows(case: Case, _: Any) -> Iterator[Row]:
    if case.what == "ops":
        yield from ops(case)
    else:
        for row in lab.captured(case, room.DEVICE):
            yield {"case": str(case), **row}
