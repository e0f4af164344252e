"""Processes that train, save and are killed. This program imports once and forks each of them: a process that is killed
cannot be one of the tests' own, and one that imports anew takes seconds.

    python -m torch_frontend.distributed.checkpoint_forks kill <folder> <ranks> <times> <seed>
    python -m torch_frontend.distributed.checkpoint_forks points <folder>
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch import nn

import diptych.torch as dt
from diptych.common.errors import CheckpointError
from diptych.torch.distributed import checkpoint_folders
from torch_frontend.distributed.checkpoint_cases import content, differing, model, optimizer_of, sharded, train

_numbers = itertools.count()


def forked(folder: Path, ranks: int, work: Callable[[int], None]) -> list[int]:
    """Starts `work(rank)` in processes that form a group, if they are several. Returns their numbers."""
    meet = folder / f"meet-{next(_numbers)}"
    pids = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            code = 1
            try:
                if ranks > 1:
                    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def joined(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def made(ranks: int, rank: int) -> tuple[nn.Module, Any]:
    if ranks > 1:
        return sharded("delayed", rank)
    net = model("delayed")
    return net, optimizer_of(net)


def run(folder: Path, ranks: int, rank: int, until: int, saves: bool = True, keep: int = 2) -> None:
    """Trains from the last complete checkpoint on, and saves after each step. A run without saves writes its end."""
    net, optimizer = made(ranks, rank)
    begin = 0
    if saves:
        try:
            begin = dt.parallel.load(folder / "checkpoints", net, optimizer).step
        except CheckpointError as e:
            assert "no such folder" in str(e) or "no complete checkpoint" in str(e), e
        note(folder, rank, f"began {begin}")
    for step in range(begin, until):
        train(net, optimizer, range(step, step + 1), rank=rank)
        if saves:
            dt.parallel.save(folder / "checkpoints", net, optimizer, step=step + 1, extra={"step": step + 1}, keep=keep)
            note(folder, rank, f"saved {step + 1}")
    end = content(net, optimizer)  # collective
    torch.save(end, folder / f"{'resumed' if saves else 'uninterrupted'}.{rank}.pt")


def note(folder: Path, rank: int, text: str) -> None:
    if rank == 0:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, f"{text}\n".encode())
        os.close(log)


def notes(folder: Path) -> list[tuple[str, int]]:
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [(word, int(number)) for word, number in map(str.split, lines)]


def last_complete(folder: Path) -> int:
    root = folder / "checkpoints"
    complete = [p for p in root.glob("step-*")] if root.exists() else []
    return int(checkpoint_folders.find(root, None).split("-")[1]) if complete else 0


def check(folder: Path) -> None:
    """Every run began with a step whose save had returned, or with the next one if it was complete."""
    saved = 0
    for word, step in notes(folder):
        assert word == "saved" or step in (saved, saved + 1), (word, step, saved)
        saved = step
    assert last_complete(folder) in (saved, saved + 1), (last_complete(folder), saved)


def same_end(folder: Path, ranks: int, until: int) -> None:
    assert joined(forked(folder, ranks, lambda rank: run(folder, ranks, rank, until))) == [0] * ranks
    assert joined(forked(folder, ranks, lambda rank: run(folder, ranks, rank, until, saves=False))) == [0] * ranks
    for rank in range(ranks):
        one, other = (torch.load(folder / f"{name}.{rank}.pt") for name in ("resumed", "uninterrupted"))
        assert differing(one, other) == [], differing(one, other)


def kill(folder: Path, ranks: int, times: int, seed: int) -> str:
    """Kills all ranks at random moments of their loading, training and saving."""
    draw, unfinished, moments = random.Random(seed), 0, []
    for _ in range(times):
        pids = forked(folder, ranks, lambda rank: run(folder, ranks, rank, 10**6))
        begun, loaded = len(notes(folder)), draw.random() < 0.9
        while loaded and len(notes(folder)) == begun:  # the others die while they load
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.3))
        for pid in draw.sample(pids, len(pids)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(draw.choice((0, 0.02)))
        assert -signal.SIGKILL in joined(pids)  # another rank may have found out before it was killed, and raised
        unfinished += any(checkpoint_folders.UNFINISHED.fullmatch(p.name) for p in (folder / "checkpoints").glob(".*"))
        check(folder)
        moments.append(last_complete(folder))
    same_end(folder, ranks, last_complete(folder) + 2)
    return f"killed {times} times, {unfinished} times within a save; steps {moments}"


_CALLS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "open")


def points(folder: Path) -> str:
    """Kills one process before each call, in its second save, that changes or syncs files."""
    count = 0
    for number in itertools.count(1):
        place = folder / str(number)
        place.mkdir()

        def work(rank: int, place: Path = place, number: int = number) -> None:
            run(place, 1, rank, 1, keep=1)
            calls = itertools.count(1)

            def before(call: Any) -> Any:
                def instead(*args: Any, **kwargs: Any) -> Any:
                    if next(calls) == number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                return instead

            for name in _CALLS:
                setattr(os, name, before(getattr(os, name)))
            run(place, 1, rank, 2, keep=1)

        if joined(forked(place, 1, work)) == [0]:
            break
        check(place)
        count += 1
        if number % 8 == 0:
            same_end(place, 1, last_complete(place) + 2)
    return f"killed before each of {count} calls"


if __name__ == "__main__":
    torch.set_num_threads(1)
    made(1, 0)  # the first optimizer imports what torch imports late
    what, where, *numbers = sys.argv[1:]
    print({"kill": kill, "points": points}[what](Path(where), *map(int, numbers)))
