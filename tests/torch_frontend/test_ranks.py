"""The pool of processes: what it returns, and what it says of ranks that fail. Failures have worlds of three, which no
other file uses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_frontend.ranks import Pool, RankError, needs_gloo

pytestmark = [needs_gloo, pytest.mark.sampled]
WORLD_SIZES = (2, 4)


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    given = [None] * dist.get_world_size()
    dist.all_gather_object(given, rank * rank, group=groups["data"])
    return {"sum": total(rank, groups, 1), "squares": given, "threads": torch.get_num_threads()}


def total(rank: int, groups: Any, times: int) -> torch.Tensor:
    x = torch.tensor([float(rank * times)])
    dist.all_reduce(x, group=groups["data"])
    return x


def process(rank: int, groups: Any) -> int:
    return os.getpid()


def fails(rank: int, groups: Any, how: str) -> None:
    if rank == 1:
        if how == "raises":
            raise ValueError("a shape that rank 1 alone has")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(600)
    dist.barrier(groups["data"])


def refuses(rank: int, groups: Any) -> None:
    raise ValueError(f"named on rank {rank}")


def test_results_are_those_of_each_rank(ranks):
    size = len(ranks)
    for made in ranks:
        assert made == {"sum": torch.tensor([size * (size - 1) / 2]), "squares": [0, 1, 4, 9][:size], "threads": 1}


def test_worlds_of_both_sizes_are_tried(request, ranks):
    assert len(ranks) == request.node.callspec.params["ranks"][0]


def test_a_call_takes_arguments(pool, tmp_path):
    assert pool.run(f"{__name__}:total", 10, size=3, into=tmp_path / "a") == [30.0] * 3
    assert (tmp_path / "a.3.2.pt").exists()


def test_processes_stay(pool, tmp_path):
    first = pool.run(f"{__name__}:process", size=3, into=tmp_path / "a")
    assert len({*first, os.getpid()}) == 4
    assert pool.run(f"{__name__}:process", size=3, into=tmp_path / "b") == first


WRONG = {
    "raises": r"rank 1 of 3: Traceback(.|\n)*ValueError: a shape that rank 1 alone has",
    "dies": "rank 1 of 3: the process ended with -9",
    "hangs": r"rank 1 of 3: did not end in 4 seconds; it is at(.|\n)*test_ranks.py\", line \d+ in fails",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_rank_that_fails_is_reported_and_the_next_call_works(how, pool, tmp_path):
    with pytest.raises(RankError, match=WRONG[how]) as error:
        pool.run(f"{__name__}:fails", how, size=3, into=tmp_path / "a", seconds=4 if how == "hangs" else 60)
    for rank in (0, 2):  # these waited: gloo noticed that the other one died, or they are named with the place
        assert re.search(rf"rank {rank} of 3: (.|\n)*(Connection|in fails)", str(error.value)), error.value
    assert pool.run(f"{__name__}:total", 1, size=3, into=tmp_path / "b") == [3.0] * 3


def test_each_rank_that_raises_is_named(pool, tmp_path):
    with pytest.raises(RankError) as error:
        pool.run(f"{__name__}:refuses", size=3, into=tmp_path / "a")
    assert all(f"ValueError: named on rank {rank}" in str(error.value) for rank in range(3))


def test_a_failure_is_kept_for_other_workers(pool):
    """A module whose `on_rank` fails is not computed again by the next worker that asks."""
    module = type(sys)(f"{__name__}_missing")
    for _ in range(2):
        with pytest.raises(RankError, match="No module named"):
            pool.once(module, 3)


def test_processes_end_with_the_tests(tmp_path: Path):
    tests = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pool = Pool(tmp_path / "ranks", tests.pid)
    processes = pool.run(f"{__name__}:process", into=tmp_path / "a")
    tests.communicate(b"\n")
    until = time.monotonic() + 30
    while any(alive(pid) for pid in processes) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in processes)
    assert pool.job is not None and pool.job.wait(30) == 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
