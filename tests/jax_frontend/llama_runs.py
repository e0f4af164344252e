"""Runs of examples/jax_llama.py, and what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = str(EXAMPLES / "jax_llama.py")
sys.path.append(str(EXAMPLES))
import jax_llama as program  # noqa: E402

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
    "max_position_embeddings": 256,
}  # fmt: skip
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
        until = time.monotonic() + 300
        while not (log.exists() and log.read_text().count("\n") >= lines):
            assert job.poll() is None and time.monotonic() < until, "the run ended before it was killed"
            time.sleep(0.01)
        os.kill(job.pid, signal.SIGKILL)


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(log: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(log)]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def near(log: Path, reference: Path, bound: float) -> None:
    """Checks losses and norms of a run against those of another."""
    got, want = rows(log), rows(reference)
    assert [row["step"] for row in got] == [row["step"] for row in want]
    for a, b in zip(got, want, strict=True):
        assert abs(a["loss"] - b["loss"]) < bound and abs(a["grad_norm"] / b["grad_norm"] - 1) < 5 * bound, (a, b)
