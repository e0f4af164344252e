"""Functions that several processes run together. One pool of them serves all files and workers of a run of the tests:
its processes start, import and compile once for each size of world."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import budget
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock  # torch's own requirement

from torch_frontend.rank_pool import SECONDS, Call

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo")


def here() -> str:
    """Returns the type of the device that ranks compute on, on one of them."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


class RankError(Exception):
    """An error on ranks, with the traceback, or the place where a rank was when its time ended."""


class Pool:
    """The tests' side of the pool. `folder`: one for all workers of a run; `tests`: the process that it ends with."""

    def __init__(self, folder: Path, tests: int):
        folder.mkdir(exist_ok=True)
        self.folder, self.tests = folder, tests
        self.job: subprocess.Popen | None = None  # here, so that it is not reported as forgotten

    def run(
        self, function: str, *given: Any, into: Path, size: int = 2, device: str = "cpu", seconds: float = SECONDS
    ) -> list[Any]:
        """Calls `function` ("module:name") on each rank with (rank, groups, *given).

        **Returns** its results by rank, with tensors on the CPU; they are saved at `into` with the world's size and the
        rank in the name.

        **Raises** RankError with each failed rank's traceback, or where it was after `seconds`.
        """
        call = Call(function, given, size, device, seconds, str(into))
        with self._connect() as pool:
            pool.send(call)
            try:
                wrong, spent = pool.recv()
            except EOFError:
                raise RankError(f"the pool ended\n{self._log.read_text(errors='replace')[-8000:]}") from None
        budget.elsewhere += spent
        if wrong:
            raise RankError("\n".join(f"rank {rank} of {size}: {text}" for rank, text in sorted(wrong.items())))
        return self._results(call)

    def once(self, module: ModuleType, size: int, device: str = "cpu") -> list[Any]:
        """Returns by rank what `on_rank(rank, groups)` of a module returns, which one worker of a run computes."""
        into = str(self.folder / f"{module.__name__}.{device}")
        call = Call(f"{module.__name__}:on_rank", (), size, device, SECONDS, into)
        failed = Path(f"{call.into}.{size}.failed")
        with FileLock(f"{call.into}.{size}.lock"):
            if failed.exists():
                raise RankError(failed.read_text())
            if all(call.result(rank).exists() for rank in range(size)):
                return self._results(call)
            try:
                return self.run(call.function, into=Path(call.into), size=size, device=device)
            except RankError as error:
                failed.write_text(str(error))
                raise

    @staticmethod
    def _results(call: Call) -> list[Any]:
        return [torch.load(call.result(rank), "cpu", weights_only=True) for rank in range(call.size)]

    @property
    def _log(self) -> Path:
        return self.folder / "pool.log"

    def _connect(self) -> Connection:
        """Returns a connection to the run's pool, which it starts where there is none."""
        address = self.folder / "address"
        with FileLock(f"{address}.lock"):
            try:
                return Client(address.read_text())
            except OSError:
                self.job = subprocess.Popen(
                    [sys.executable, "-m", "torch_frontend.rank_pool", str(self.folder), str(self.tests)],
                    cwd=Path(__file__).parent.parent, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=self._log.open("a"), text=True, start_new_session=True,
                )  # fmt: skip
                assert self.job.stdout is not None
                address.write_text(self.job.stdout.readline().strip())
                return Client(address.read_text())


def pool_of_run(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return Pool(run.parent / "ranks", os.getppid())
    return Pool(run / "ranks", os.getpid())
