"""What two gloo processes compute, which is computed once for each run of the tests: workers of one run share it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock  # torch's own requirement

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo")

WORKER = """
import importlib, sys, torch, torch.distributed as dist
module, rank, rendezvous, out = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=2)
torch.save(importlib.import_module(module).on_rank(rank, {"data": dist.group.WORLD}), out)
dist.destroy_process_group()
"""


def results(tmp_path_factory: pytest.TempPathFactory, module: str) -> list[Any]:
    """Of each rank: what `on_rank(rank, groups)` of that test module returned there."""
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    folder = run / module
    made = [folder / f"{rank}.pt" for rank in range(2)]
    with FileLock(f"{folder}.lock"):
        if not all(path.exists() for path in made):
            folder.mkdir()
            jobs = [
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, module, str(rank), str(folder / "rendezvous"), str(path)],
                    cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE, text=True,
                )
                for rank, path in enumerate(made)
            ]  # fmt: skip
            try:
                said = [job.communicate(timeout=240)[1] for job in jobs]
            finally:
                for job in jobs:
                    job.kill()
            assert [job.returncode for job in jobs] == [0, 0], said
    return [torch.load(path, weights_only=True) for path in made]
