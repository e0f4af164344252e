"""The numerics lab on two threads: the core's hash, training steps while they are captured, and comparing large traces.

A row's goal stands in it as "at least" or "at most". Traces are written to a temporary folder.
"""

from __future__ import annotations

import functools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.results import Row

THREADS = 2
HASH, STATISTICS = 5.0, 3.0  # GB/s
BOUNDS = {"hashes alone, no operations": 1.15, "after a capture": 1.05}
"""Times a step of a model that was never captured; after a capture it is the same but for noise."""
DIFF_SECONDS, DIFF_GB = 10.0, 1.0
ROUNDS, WARM = 21, 3
CAPTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "hashes alone, no operations": (1, {"ops": "none", "statistics": False}),
    "hashes alone": (1, {"statistics": False}),
    "with statistics": (4, {}),
}
"""Kinds of captures: one step in so many of `ROUNDS` is timed, and the options. A trace's first steps, which list its
sites, do not count."""
TENSOR = 2**22  # elements of each tensor of a trace
PARTS = (
    "ln_1",
    "attn.c_attn",
    "attn.softmax",
    "attn.c_proj",
    "attn",
    "ln_2",
    "mlp.c_fc",
    "mlp.act",
    "mlp.c_proj",
    "mlp",
)


def at_least(bound: float, found: float) -> Row:
    return {"at least": bound, "ratio": found / bound, "goal": 1.0}


def at_most(bound: float, found: float) -> Row:
    return {"at most": bound, "ratio": bound / found, "goal": 1.0}


# --- hash and statistics ---


def rates(case: Case) -> Iterator[Row]:
    from benchmarks.room import seconds
    from diptych import core

    (size,) = case.shape
    rng = np.random.default_rng(0)
    for call, x, bound in (
        (core.hash, rng.integers(0, 256, size, np.uint8), HASH),
        (core.statistics, rng.standard_normal(size // 4, np.float32), STATISTICS),
    ):
        taken = seconds(functools.partial(call, x))
        rate = size / taken / 1e9
        name = f"core.{call.__name__}"
        yield {"name": name, "us": taken * 1e6, "rate": rate, "unit": "GB/s", **at_least(bound, rate)}


# --- capture ---


def captured(case: Case, device: str = "cpu") -> Iterator[Row]:
    """Steps of the demo model, in turns of a model that was never captured and of one that is, or was until now.

    A row compares with the other model's steps of the same turns, but for captures of operations: they make diptych's
    layers run op by op in all models of the process, and compare with steps of the other model before all captures.
    """
    import torch

    from diptych.common import RECIPES
    from diptych.lab.job import Job, ModelConfig, initial_weights
    from diptych.lab.torch.adapter import TorchTrainer
    from diptych.torch import lab

    width, layers, batch, seq = case.shape
    job = Job(
        ModelConfig(width=width, layers=layers, seq=seq), recipe=RECIPES["fp8-current"], device=device, threads=THREADS
    )
    bounds = BOUNDS if device == "cpu" else {}
    weights = initial_weights(job.model, 0)
    never, often = (TorchTrainer(job, weights) for _ in range(2))
    tokens = np.random.default_rng(0).integers(0, 256, (batch, seq + 1), np.uint8)

    def timed(trainer: TorchTrainer, capture: Any = None) -> float:
        start = time.perf_counter()
        trainer.step(tokens)
        if capture is not None:
            capture.step()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def turns(rounds: int, capture: Any = None) -> tuple[float, float]:
        times = [(timed(never), timed(often, capture)) for _ in range(WARM + rounds)]
        plain, taken = (statistics.median(some) for some in zip(*times[WARM:], strict=True))
        return plain, taken

    def row(name: str, plain: float, taken: float) -> Row:
        bound = at_most(bounds[name], taken / plain) if name in bounds else {}
        return {"name": name, "us": taken * 1e6, "plain us": plain * 1e6, "times": taken / plain, **bound}

    before, _ = turns(ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        for name, (one_in, options) in CAPTURES.items():
            with lab.capture(often._model, out=f"{folder}/{name}", **options) as capture:
                plain, taken = turns(-(-ROUNDS // one_in), capture)
            yield row(name, plain if options.get("ops") == "none" else before, taken)
    yield row("after a capture", *turns(ROUNDS))


# --- diff ---


def compared(case: Case) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}" for name in "ab"]
        write(case.shape[0], paths)
        # A small process in between: a process counts the memory of what it was forked from as its own.
        command = [sys.executable, "-m", "benchmarks.sections.lab", *paths]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    wall, memory = at_most(DIFF_SECONDS, found["s"]), at_most(DIFF_GB, found["GB"])
    worst = min(wall["ratio"], memory["ratio"])
    goals = {"at most, s": DIFF_SECONDS, "at most, GB": DIFF_GB, "ratio": worst, "goal": 1.0}
    yield {"name": "diptych diff", "us": found["s"] * 1e6, **found, **goals}


def write(size: int, folders: list[str]) -> None:
    """Writes two traces of float32 tensors, `size` bytes each, in which every tensor differs."""
    from diptych.lab.traces import Entry, Meta, Options, Site, Writer

    options = Options(values="full", budget=4 * size)  # half of it is for whole tensors
    meta = Meta("numpy", {"numpy": np.__version__}, "cpu", 1, None, "none", False, None, options)
    count = max(size // 4 // TENSOR, 1)
    shape = (size // 4 // count,)
    for number, folder in enumerate(folders):
        with Writer(folder, meta) as writer:
            for step in range(count):  # a step's tensors are held at once
                x = np.random.default_rng(step).standard_normal(shape, np.float32)
                x += np.float32(number * 1e-5) * x
                writer.step(step, [Entry(Site("h.0", "activation", 0, shape, "float32"), None, None, x)])


def diff(a: str, b: str) -> dict[str, float]:
    """Runs the command, which compares in two threads. **Returns** seconds, those of processors, and memory in GB."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "diptych.lab.cli", "diff", a, b]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    taken = time.perf_counter() - start
    if done.returncode != 1:
        raise RuntimeError(f"diptych diff of traces that differ ended with status {done.returncode}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"s": taken, "cpu s": usage.ru_utime + usage.ru_stime, "GB": usage.ru_maxrss * 1024 / 1e9}


# --- page ---


def rendered(case: Case) -> Iterator[Row]:
    from benchmarks.room import seconds
    from diptych.lab.diff.page import render

    layers, steps = case.shape
    result = made(layers, steps)
    size = len(render(result).encode())
    taken = seconds(lambda: render(result), repeat=5)
    yield {"name": "page", "us": taken * 1e6, "MB": size / 1e6, "sites": float(len(result.rows))}


def made(layers: int, steps: int) -> Any:
    """Returns a comparison of GPTs that differ from a middle layer and step on, with references."""
    from diptych.lab.diff.result import Cell, First, Result, Row, Side

    rng = np.random.default_rng(0)
    names = ["wte", *(f"h.{i}.{part}" for i in range(layers) for part in PARTS), "ln_f"]
    sites: list[tuple[Any, str]] = [("parameter", n) for n in names] + [("activation", n) for n in names]
    sites += [("activation_grad", n) for n in reversed(names)] + [("parameter_grad", n) for n in names]
    rows = []
    for number, (kind, name) in enumerate(sites):
        cells = []
        for step in range(steps):
            bad = 2 * step > steps and number > len(sites) // 3
            level = math.exp(rng.standard_normal()) * (1e-3 if bad else 1e-7)
            ulp, noise, apart = int(level * 1e8), level * 1e7, level if bad else 0.0
            cells.append(Cell(step, "definition" if bad else "rounding", level, ulp, ulp * 9, 65536, noise, apart))
        inputs = (number - 1,) if number and kind == "activation" else None
        keys = f"{kind}:{name}", f"{kind}:{name.replace('.', '/')}"
        shape_and_dtypes = (256, 256), "float32", "float32"
        rows.append(Row(*keys, 0, kind, name, 0, *shape_and_dtypes, "table", False, inputs, (), tuple(cells)))
    side = ("torch", {"torch": "2.13.0"}, "cpu", None, True, True, 1, steps)
    sides = tuple(Side(role, f"/runs/{role}", *side) for role in ("A", "B", "H_A", "H_B"))
    first = (First(len(sites) // 3 + 1, steps // 2 + 1, "definition"),)
    return Result(sides, tuple(range(steps)), tuple(rows), "differs", first, (), (), (), ())


PARTS_OF = {"hash": rates, "capture": captured, "diff": compared, "page": rendered}


def rows(case: Case, _: Any) -> Iterator[Row]:
    import torch

    from diptych import core

    torch.set_num_threads(THREADS)
    core.set_num_threads(THREADS)
    for row in PARTS_OF[case.what](case):
        yield {"case": str(case), **row}


if __name__ == "__main__":
    print(json.dumps(diff(*sys.argv[1:])))
