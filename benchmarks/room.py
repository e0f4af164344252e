"""Measures calls on a GPU: each result is checked first, then a case's calls take turns while the GPU is kept busy."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.results import Row, failed
from diptych import core

DEVICE = "cuda"  # tests measure on "cpu", small shapes by wall time, to see that the calls are right
FLUSH = 256 << 20  # bytes, several times any L2
SPIN, MOST_SPIN = 2_000_000, 100_000_000  # clock cycles of the GPU: 1 and 50 ms
deadline = float("inf")  # of time.perf_counter: no further case or model is begun after it
Call = Callable[[], Any]


@dataclasses.dataclass
class Run:
    """A call to measure. `check`: maps its result to its relative difference from a reference, which `bound` limits.
    `reset`: prepares what a call adds to, which is not poisoned."""

    call: Call
    flops: float = 0.0
    bytes: float = 0.0
    check: Callable[[Any], float] | None = None
    bound: float = 0.0
    reset: Call | None = None
    more: Row = dataclasses.field(default_factory=dict)


def require_time() -> None:
    """**Raises** TimeoutError after the deadline."""
    if time.perf_counter() > deadline:
        raise TimeoutError("not measured: the section's time was over")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the relative difference in float64 from a reference. NaN and infinity make it NaN or infinite."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def tensors_of(made: Any) -> list[torch.Tensor]:
    """Returns the tensors of a result, in tuples too."""
    if isinstance(made, torch.Tensor):
        return [made]
    return [t for part in made for t in tensors_of(part)] if isinstance(made, tuple | list) else []


def poison(*made: torch.Tensor) -> None:
    """Overwrites tensors with bytes that are NaN in every floating-point dtype that has it."""
    for t in made:
        flat = t.detach().reshape(1) if t.dim() == 0 else t.detach()
        (flat if flat.is_contiguous() else flat.t()).view(torch.uint8).fill_(0xFF)


def poisoned(call: Call) -> Any:
    """Returns the result of a second call, made where the poisoned result of a first one was."""
    poison(*tensors_of(call()))
    return call()


def kernels_of(call: Call) -> str:
    """Returns the names of the project's kernels that a call runs."""
    core.reset_calls()
    call()
    return " ".join(r["kernel"] for r in core.kernel_table() if r["calls"])


def checked(case: Case, name: str, run: Run) -> Row:
    """Runs a call on poisoned memory. **Returns** the start of its row, which has `failed` if the result is wrong."""
    row: Row = {"case": str(case), "name": name}
    try:
        if run.check is not None:
            if run.reset is not None:
                run.reset()
            row["difference"] = run.check(run.call() if run.reset else poisoned(run.call))
            if not row["difference"] <= run.bound:
                return failed(case, name, f"differs by {row['difference']:.3g} from its reference, at most {run.bound}")
        if kernels := kernels_of(run.call):
            row["kernel"] = kernels
    except Exception as error:  # the other calls of the case are measured nevertheless
        return failed(case, name, error)
    return row | run.more


def measured(case: Case, runs: Mapping[str, Run], rounds: int = 21) -> Iterator[Row]:
    """Checks every call, and yields a row for each: medians of the device's time in turns, or why there is none."""
    rows = {name: checked(case, name, run) for name, run in runs.items()}
    good = {name: runs[name].call for name, row in rows.items() if "failed" not in row}
    times = device_seconds(good, rounds)
    for name, row in rows.items():
        yield row | rates(runs[name], times[name]) if name in times else row


def rates(run: Run, seconds: float) -> Row:
    """Returns the figures of a row: microseconds and, of work that is counted, its rate."""
    row: Row = {"us": seconds * 1e6}
    if run.flops:
        row |= {"rate": run.flops / seconds / 1e12, "unit": "TFLOP/s", "intensity": run.flops / max(run.bytes, 1.0)}
    elif run.bytes:
        row |= {"rate": run.bytes / seconds / 1e9, "unit": "GB/s"}
    return row


def device_seconds(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Returns the median time of each call between CUDA events, with L2 flushed before it.

    The calls take turns in an order drawn anew for every round: large products heat the chip, which then lowers its
    clock for whoever comes next. A sample counts only if the GPU had not begun the call when the host had launched all
    of it, so that no time of the host is in it; otherwise the GPU spins before the next call, longer each time.

    **Raises** RuntimeError if the host cannot get ahead, such as for a call that waits for the device.
    """
    if DEVICE == "cpu":
        return wall_seconds(calls, 1)
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=DEVICE)
    for call in calls.values():
        for _ in range(3):
            call()
    names, order = list(calls), random.Random(0)
    samples: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    spin = SPIN
    for _ in range(6 * rounds):
        short = [name for name in names if len(samples[name]) < rounds]
        if not short:
            break
        for name in order.sample(short if len(short) < len(names) else names, len(short)):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[name]()
            end.record()
            if start.query():
                torch.cuda._sleep(spin)
                spin = min(2 * spin, MOST_SPIN)
            else:
                samples[name].append((start, end))
    torch.cuda.synchronize()
    if late := [name for name in names if len(samples[name]) < rounds]:
        raise RuntimeError(f"the host did not get ahead of the GPU in calls of {', '.join(late)}")
    return {name: statistics.median(s.elapsed_time(e) for s, e in samples[name]) / 1e3 for name in names}


def seconds(call: Call, *, repeat: int = 15, calls: int = 1) -> float:
    """Returns the median wall time of one call over `repeat` timings of `calls` calls each, after a warm-up."""
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def wall_seconds(
    calls: Mapping[str, Call], rounds: int, each: int = 1, wait: Callable[[Any], object] | None = None
) -> dict[str, float]:
    """Returns the median wall time of one of `each` calls in a row, in turns. `wait`: waits for a call's result."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(list(calls), len(calls)):
            start = time.perf_counter()
            for _ in range(each):
                made = calls[name]()
            if wait is not None:
                wait(made)
            if turn:  # the first warms up
                times[name].append((time.perf_counter() - start) / each)
    return {name: statistics.median(found) for name, found in times.items()}


def host_seconds(calls: Mapping[str, Call], wait: Call, turns: int, batch: int = 10) -> dict[str, float]:
    """Returns the least host time of one call, in turns: of batches that start on an idle device and do not fill its
    queue."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, call in calls.items():
            for _ in range(3):
                call()
            wait()
            for _ in range(20):
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                best[name] = min(best[name], (time.perf_counter() - start) / batch)
                wait()
    return best


def copy_run(nbytes: float) -> Run:
    """Returns a copy that reads half of this number of bytes and writes the other half, the ceiling of traffic."""
    origin = torch.randint(0, 255, (int(nbytes) // 2,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(origin)
    return Run(
        lambda: target.copy_(origin), bytes=2 * origin.numel(), check=lambda t: float(not torch.equal(t, origin))
    )
