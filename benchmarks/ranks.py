"""Measures what several GPUs do together: a process for each GPU, and the timing of calls that all of them make."""

from __future__ import annotations

import importlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks import room
from benchmarks.cases import RANKS, Case
from benchmarks.results import Row

# NVLink multicast stays off: a program that ends badly while it uses multicast can put all GPUs of its host out of use.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
GRACE = 120.0  # seconds after the section's time in which what has begun may end
CYCLES = 2.0e9  # of a GPU's clock in a second, at most

Call = Callable[[], Any]


def measured(module: str, case: Case, **options: Any) -> Iterator[Row]:
    """Yields the rows that `on_rank(case, rank, **options)` of a module yields on rank 0 of processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        rows = torch.multiprocessing.get_context("spawn").SimpleQueue()
        given = (module, case, room.DEVICE, room.deadline, folder, rows, options)
        until = min(room.deadline, time.perf_counter() + 1800) + GRACE
        jobs: Any = torch.multiprocessing.start_processes(_work, given, nprocs=RANKS, join=False, start_method="spawn")
        try:
            yield from _received(rows, jobs, until)
        finally:
            for job in jobs.processes:
                job.kill()


def _received(rows: Any, jobs: Any, until: float) -> Iterator[Row]:
    """Yields what comes through a queue until all jobs have ended. **Raises** TimeoutError if they run after `until`,
    and what a job has raised."""
    ended = False
    while not ended:
        try:
            ended = jobs.join(timeout=0.1)
        finally:
            while not rows.empty():
                yield rows.get()
        if time.perf_counter() > until:
            raise TimeoutError("the ranks did not end")


def _work(
    rank: int, module: str, case: Case, device: str, deadline: float, folder: str, rows: Any, options: dict[str, Any]
) -> None:
    os.environ.update(ENVIRONMENT)
    room.DEVICE, room.deadline = device, deadline
    gpu = torch.device("cuda", rank) if device == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=GRACE), device_id=gpu,
    )  # fmt: skip
    for row in importlib.import_module(module).on_rank(case, rank, **options):
        if rank == 0:
            rows.put(row)
    dist.barrier()  # gloo may abort a process whose peer has closed their connection
    dist.destroy_process_group()
    # Without the interpreter's own end, at which gloo's threads may still be waiting for its lock to release a tensor:
    # it ends such threads, which aborts the process. All rows have been written by now.
    os._exit(0)


def of_all(value: Any) -> list[Any]:
    """Returns each rank's value. Collective, as all below."""
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def wait() -> None:
    if room.DEVICE == "cuda":
        torch.cuda.synchronize()


def wall_seconds(calls: Mapping[str, Call], rounds: int, each: int) -> dict[str, float]:
    """Returns the median wall time of one of `each` calls in a row, in turns: the mean of the ranks' times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            wait()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(each):
                calls[name]()
            wait()
            times[name].append(statistics.fmean(of_all((time.perf_counter() - start) / each)))
    return {name: statistics.median(found) for name, found in times.items()}


def device_seconds(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Returns the median time of each call between CUDA events, the mean of the ranks', with L2 flushed before it.

    As `room.device_seconds`, but an all-reduce on the device lets all ranks begin a call at the same time, and the GPU
    always spins before it for as long as the slowest host needs: ranks that decided one by one to go on would part.
    Calls in which a host did not get ahead of its GPU in half of the rounds have no time.
    """
    if room.DEVICE == "cpu":
        return wall_seconds(calls, 1, 1)
    flush = torch.empty(room.FLUSH, dtype=torch.uint8, device=room.DEVICE)
    token = torch.zeros(1, device=room.DEVICE)
    host = 0.0
    for call in calls.values():
        call()
        wait()
        start = time.perf_counter()
        call()
        host = max(host, time.perf_counter() - start)
        wait()
    spin = int(2 * max(of_all(host)) * CYCLES) + room.SPIN
    order = random.Random(0)  # the same on all ranks
    samples: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event, bool]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(spin)
            dist.all_reduce(token)
            start.record()
            calls[name]()
            end.record()
            samples[name].append((start, end, not start.query()))
    wait()
    own = {name: [s.elapsed_time(e) / 1e3 if ahead else None for s, e, ahead in found]
           for name, found in samples.items()}  # fmt: skip
    every = of_all(own)
    times = {}
    for name in calls:
        good = [statistics.fmean(of) for of in zip(*(found[name] for found in every), strict=True) if None not in of]
        if 2 * len(good) >= rounds:
            times[name] = statistics.median(good)
    return times
