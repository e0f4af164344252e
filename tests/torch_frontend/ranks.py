"""What two processes compute together. What the CPU's tests ask of a pair is computed by one pair for each run of the
tests: it imports and compiles once for all files, and the workers of a run share its results."""

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
rank, device, folder, *calls = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group(
    "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2,
    device_id=torch.device("cuda", rank) if device == "cuda" else None,
)
for call in calls:
    module, function, *given = call.split(":")
    made = getattr(importlib.import_module(module), function)(rank, {"data": dist.group.WORLD}, *given)
    torch.save(made, f"{folder}/{module}.{rank}.pt")
dist.destroy_process_group()
"""


def pair(folder: Path, *calls: str, device: str = "cpu") -> None:
    """Runs each call "module:function:argument:..." on two ranks, with (rank, groups) before its arguments. What it
    returned is saved in `folder`, by module and rank."""
    folder.mkdir(exist_ok=True)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), device, str(folder), *calls],
            cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [job.communicate(timeout=300)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)


def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Returns for each rank the result of `on_rank(rank, groups)` of the test's module."""
    run = tmp_path_factory.getbasetemp()
    folder = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "ranks"
    made = [folder / f"{request.module.__name__}.{rank}.pt" for rank in range(2)]
    with FileLock(f"{folder}.lock"):
        if not all(path.exists() for path in made):
            modules = {item.module.__name__ for item in request.session.items if hasattr(item.module, "on_rank")}
            pair(folder, *(f"{module}:on_rank" for module in sorted(modules)))
    return [torch.load(path, weights_only=True) for path in made]
