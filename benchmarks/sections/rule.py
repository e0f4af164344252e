"""The rule that gives a dense FP8 product to the project's kernel or to cuBLASLt, on a grid of shapes: geometric means
of each one's time over the faster one's."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.cases import Case
from benchmarks.results import Row
from benchmarks.room import device_seconds, kernels_of
from benchmarks.sections.gemm import CUBLASLT, OWN, Operands, ours, switched

GRID = tuple(
    mnk
    for mnk in itertools.product(
        (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        (512, 1024, 2048, 4096, 8192, 16384),
        (256, 1024, 2048, 4096, 8192, 16384),
    )
    if 1e7 <= math.prod(mnk) <= 6e11
)


def rows(case: Case, _: Any) -> Iterator[Row]:
    (recipe,) = case.names
    costs: dict[str, list[float]] = {"rule": [], "always the project's kernel": [], "always cuBLASLt": []}
    for shape in GRID:
        run = ours(Operands(case.what.split()[0], shape), recipe, case.what).call
        both = {"own": switched(("cuda.native", *CUBLASLT), run), "cublaslt": switched(OWN, run)}
        times = device_seconds(both, 5)
        chosen = "cublaslt" if "cublaslt" in kernels_of(run) else "own"
        for name, kernel in zip(costs, (chosen, "own", "cublaslt"), strict=True):
            costs[name].append(times[kernel] / min(times.values()))
    for name, cost in costs.items():
        yield {"case": f"{recipe} {case.what}, {len(cost)} shapes", "name": name,
               "of the faster": statistics.geometric_mean(cost), "worst": max(cost)}  # fmt: skip
