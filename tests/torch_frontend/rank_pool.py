"""The program that runs what tests ask of several ranks: `python -m torch_frontend.rank_pool FOLDER PID`.

It prints the address where it takes calls, one after the other, and ends soon after the process PID has. The ranks of a
world start with its first call and stay for the next ones; a world in which a call failed is ended, and the next call
starts it anew. Ranks on the CPU are forks of this program, so that all of them together import torch once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

SECONDS = 300.0  # of a call, unless it says otherwise, and of a collective
GRACE = 3.0  # seconds for other ranks to end a call that failed on one


@dataclass(frozen=True)
class Call:
    """`function` ("module:name") is called on each rank with (rank, groups, *given). What it returns is saved at
    `into`, with the rank in the name."""

    function: str
    given: tuple[Any, ...]
    size: int
    device: str
    seconds: float
    into: str

    def result(self, rank: int) -> Path:
        return Path(f"{self.into}.{self.size}.{rank}.pt")


def work(rank: int, size: int, device: str, folder: Path, pipe: Connection, parent: int) -> None:
    """Is one rank: takes calls and answers each with None or a traceback, and its processor time since the last one, as
    long as its parent lives."""
    import torch
    import torch.distributed as dist

    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank) if device == "cuda" else None
    if gpu:
        # A program that ends badly while it uses multicast can put all GPUs of its host out of use.
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size,
        timeout=timedelta(seconds=SECONDS), device_id=gpu,
    )  # fmt: skip
    spent = 0.0
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this ends with its parent, even while it is stopped
    if os.getppid() != parent:
        os._exit(1)
    while True:
        call, wrong = pipe.recv(), None
        try:
            module, name = call.function.split(":")
            made = getattr(importlib.import_module(module), name)(rank, {"data": dist.group.WORLD}, *call.given)
            torch.save(made, call.result(rank))
        except BaseException:
            wrong = traceback.format_exc()
        before, spent = spent, sum(os.times()[:4])
        pipe.send((wrong, spent - before))


class World:
    """The processes of one process group, and a pipe to each."""

    def __init__(self, size: int, device: str, folder: Path):
        folder.mkdir(parents=True)
        self.device, self.folder, self.pipes, self.jobs = device, folder, [], []
        self.spent = 0.0  # seconds of processor time
        context: Any = get_context("spawn" if device == "cuda" else "fork")  # CUDA does not outlive a fork
        for rank in range(size):
            ours, theirs = context.Pipe()
            job = context.Process(target=work, args=(rank, size, device, folder, theirs, os.getpid()))
            job.start()
            theirs.close()  # else a rank that died would look silent
            self.pipes.append(ours)
            self.jobs.append(job)

    def run(self, call: Call) -> dict[int, str]:
        """Returns what went wrong, by rank."""
        self.signal(signal.SIGCONT)
        until, wrong = time.monotonic() + call.seconds, {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        for pipe, rank in list(waiting.items()):
            try:
                pipe.send(call)
            except OSError:
                wrong[waiting.pop(pipe)] = self.death(rank)
        while waiting and (left := until - time.monotonic()) > 0:
            ready: list[Any] = wait(list(waiting), left)
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    said, seconds = pipe.recv()
                    self.spent += seconds
                except (EOFError, OSError):
                    said = self.death(rank)
                if said:
                    wrong[rank] = said
            if wrong:
                until = min(until, time.monotonic() + GRACE)
        for rank in waiting.values():
            os.kill(self.jobs[rank].pid, signal.SIGUSR1)  # prints where it is
        if waiting:
            time.sleep(0.5)
        if not wrong and not waiting:
            self.signal(signal.SIGSTOP)
        late = "did not end after another rank failed" if wrong else f"did not end in {call.seconds:g} seconds"
        return wrong | {rank: f"{late}; it is at\n{self.log(rank)}" for rank in waiting.values()}

    def signal(self, number: int) -> None:
        """Stops the ranks between calls, on the CPU: threads of gloo that nothing ends take a tenth of a core there."""
        for job in self.jobs if self.device == "cpu" else ():
            os.kill(job.pid, number)

    def death(self, rank: int) -> str:
        self.jobs[rank].join(GRACE)
        return f"the process ended with {self.jobs[rank].exitcode}\n{self.log(rank)}"

    def log(self, rank: int) -> str:
        """The end of what a rank printed."""
        path = self.folder / f"{rank}.log"
        return path.read_text(errors="replace")[-8000:] if path.exists() else ""

    def end(self) -> None:
        for job in self.jobs:
            job.kill()
        for job in self.jobs:
            job.join()


def serve(folder: Path, tests: int) -> None:
    worlds: dict[tuple[int, str], World] = {}
    started, counted = 0, 0.0

    def look(*_: Any) -> None:
        try:
            os.kill(tests, 0)
        except ProcessLookupError:
            sys.exit()

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        listener = Listener(family="AF_UNIX", backlog=64)
        print(listener.address, flush=True)
        for module in ("diptych.torch", "torch._dynamo", "torch.distributed.tensor", "pytest"):
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # forks collect little garbage, and share what was imported
        gc.set_threshold(100_000, 20, 50)
        while True:
            asked = listener.accept()
            try:
                call: Call = asked.recv()
                key = call.size, call.device
                if key not in worlds:
                    started += 1
                    worlds[key] = World(*key, folder / f"{call.device}-{call.size}-{started}")
                world = worlds[key]
                before, wrong = world.spent, world.run(call)
                if wrong:
                    worlds.pop(key).end()
                own = sum(os.times()[:2])  # without the ranks that ended
                asked.send((wrong, world.spent - before + own - counted))
                counted = own
            except (EOFError, OSError):
                traceback.print_exc()  # who asked has gone, or no process can start
            finally:
                asked.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # else an alarm might end this program before its ranks are
        for job in active_children():  # of a world that is starting, too
            job.kill()


if __name__ == "__main__":
    # Makes torch count GPUs without starting CUDA, which a fork would not survive.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    serve(Path(sys.argv[1]), int(sys.argv[2]))
