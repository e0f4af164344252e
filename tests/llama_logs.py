"""Inputs and outputs of runs of both Llama trainers: a small config, and the metrics of each step."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
    "max_position_embeddings": 256,
}  # fmt: skip


def await_lines(job: subprocess.Popen, log: Path, lines: int) -> None:
    """Waits until a running trainer has written so many lines of metrics. Fails if it ends before."""
    until = time.monotonic() + 300
    while not (log.exists() and log.read_text().count("\n") >= lines):
        assert job.poll() is None and time.monotonic() < until, "the run ended before it was killed"
        time.sleep(0.01)


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def near(log: Path, reference: Path, bound: float) -> None:
    """Checks losses and norms of a run against those of another."""
    got, want = rows(log), rows(reference)
    assert [row["step"] for row in got] == [row["step"] for row in want]
    for a, b in zip(got, want, strict=True):
        assert abs(a["loss"] - b["loss"]) < bound and abs(a["grad_norm"] / b["grad_norm"] - 1) < 5 * bound, (a, b)
