"""What every benchmark needs: medians, where it ran, and a file to put it in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def seconds(fn: Callable[[], object], *, repeat: int = 15, calls: int = 1) -> float:
    """Median seconds of one call, over `repeat` timings of `calls` calls each, after a warm-up."""
    fn()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def paired(
    ours: Callable[[], object], peer: Callable[[], object], *, rounds: int = 15, calls: int = 1
) -> tuple[float, float]:
    """Median seconds of both, measured in turn, so that a drifting machine slows both alike."""
    ours(), peer()
    a, b = [], []
    for _ in range(rounds):
        a.append(seconds(ours, repeat=1, calls=calls))
        b.append(seconds(peer, repeat=1, calls=calls))
    return statistics.median(a), statistics.median(b)


def environment() -> dict[str, Any]:
    """Commit (of the checkout, or DIPTYCH_COMMIT where there is no git), versions and machine of this run."""
    from diptych import core

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS.parent)
    return {
        "commit": git.stdout.strip() or os.environ.get("DIPTYCH_COMMIT", "unknown"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {p: version(p) for p in ("diptych", "numpy", "torch", "jax", "jaxlib")},
        "build": dict(core.build_info()),
        "threads": core.get_num_threads(),
    }


def save(path: Path, rows: list[dict[str, Any]], **extra: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **extra, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    if not rows:
        return "(nothing)"
    head = list(rows[0])
    cells = [head] + [[f"{r[k]:.3g}" if isinstance(r[k], float) else str(r[k]) for k in head] for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
