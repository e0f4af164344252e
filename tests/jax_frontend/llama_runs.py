"""Runs of examples/jax_llama.py, and what they wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from llama_logs import await_lines, rows

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = str(EXAMPLES / "jax_llama.py")
sys.path.append(str(EXAMPLES))
import jax_llama as program  # noqa: E402

FLAGS = "--xla_backend_optimization_level=0"  # compiling takes longer than running
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"XLA_FLAGS": FLAGS}


def here(*args: Any) -> str:
    """Runs the program in this process, whose CPU devices it takes. Returns what it refused with, or ""."""
    with mock.patch.object(program, "start"):
        try:
            program.main([*map(str, args)])
        except SystemExit as stopped:
            return str(stopped)
    return ""


def begun(*args: Any, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, args)], env=ENVIRONMENT | environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def killed(log: Path, lines: int, *args: Any) -> None:
    """Runs the program, and kills it when `log` has so many lines."""
    with begun(*args, "--metrics", log) as job:
        await_lines(job, log, lines)
        os.kill(job.pid, signal.SIGKILL)


def losses(log: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(log)]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")
