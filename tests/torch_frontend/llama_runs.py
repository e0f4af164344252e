"""Runs of examples/torch_llama.py, and what they wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from llama_logs import await_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = str(EXAMPLES / "torch_llama.py")
sys.path.append(str(EXAMPLES))
import torch_llama as program  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"


def command(*args: Any, ranks: int = 0) -> list[str]:
    """The program's command; `ranks`: 0 is without torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*(run if ranks else [sys.executable]), PROGRAM, *map(str, args), "--device", "cpu"]


def call(*args: Any, ranks: int = 0) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args, ranks=ranks), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def killed(log: Path, lines: int, *args: Any) -> None:
    """Runs two ranks, and kills all processes when `log` has so many lines."""
    with subprocess.Popen(
        command(*args, "--metrics", log, ranks=2), env=ENVIRONMENT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as job:  # fmt: skip
        await_lines(job, log, lines)
        ranks = [int(p) for p in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        for process in (job.pid, *ranks):  # torchrun's workers have sessions of their own
            os.kill(process, signal.SIGKILL)


def trained(*args: Any, ranks: int = 0) -> subprocess.CompletedProcess:
    done = call(*args, ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def here(*args: Any, ranks: int = 1) -> str:
    """Runs the program in this process. Returns what it refused with, or ""."""
    with mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)):
        if ranks == 1:
            del os.environ["WORLD_SIZE"]
        try:
            program.main([*map(str, args), "--device", "cpu"])
        except SystemExit as stopped:
            return str(stopped)
    return ""


def on_rank(rank: int, groups: Any, *args: Any) -> str:
    """Runs the program on a rank of the tests' pool, whose process group it takes."""
    with mock.patch.object(program, "start"), mock.patch.object(dist, "destroy_process_group"):
        return here(*args, ranks=dist.get_world_size())
