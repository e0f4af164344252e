"""Result files: `suite.json` holds the rows of each section, and the machine and versions that gave them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.cases import RANKS, Case

FOLDER = Path(__file__).parent / "results"
FILE = "suite.json"
PACKAGES = ("diptych", "numpy", "torch", "torchao", "jax", "jaxlib", "transformer_engine")

Row = dict[str, Any]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: str) -> dict[str, Any]:
    """Returns the commit (DIPTYCH_COMMIT if it is set, else that of the checkout), versions and machine of this run."""
    from diptych import core

    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=FOLDER.parent)
    found: dict[str, Any] = {
        "commit": os.environ.get("DIPTYCH_COMMIT") or git.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} {platform.machine()} cores",
        "versions": {p: v for p in PACKAGES if (v := _version(p))},
        "build": dict(core.build_info()),
        "threads": core.get_num_threads(),
    }
    if device != "cpu":
        import torch

        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, **dict(core.cuda_info())}
        found |= {"gpus": RANKS} if device == "gpus" else {}
    return found


def machine(env: dict[str, Any]) -> str:
    """Returns the name of the folder of results, such as h200, or h100-x2 for two of them."""
    if "gpu" not in env:
        return "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", env["gpu"].lower().removeprefix("nvidia ")).split("-")[0]
    return f"{name}-x{env['gpus']}" if "gpus" in env else name


def load(folder: Path) -> dict[str, Any]:
    """Returns the sections of a folder's file by name; none if there is no file."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def save(folder: Path, section: str, env: dict[str, Any], rows: list[Row], **extra: Any) -> None:
    """Replaces one section of the folder's file, which has a line for each row."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = load(folder) | {section: {"environment": env, **extra, "rows": rows}}
    parts = []
    for name, held in sections.items():
        head = json.dumps({k: v for k, v in held.items() if k != "rows"})[:-1]
        lines = ",\n  ".join(json.dumps(r, ensure_ascii=False) for r in held["rows"])
        parts.append(f' {json.dumps(name)}: {head}, "rows": [\n  {lines}\n ]}}')
    unfinished = folder / f".{FILE}"
    unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    unfinished.replace(folder / FILE)


def failed(case: Case, name: str, reason: object) -> Row:
    """Returns a row without figures. `reason`: an exception, or what to say."""
    said = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
    return {"case": str(case), "name": name, "failed": said.strip().partition("\n")[0][:300]}


def misses(row: Row) -> bool:
    """Returns whether a row with a goal of its own is below it by more than its slack."""
    return "goal" in row and not row["ratio"] >= row.get("slack", 1.0) * row["goal"]


def table(rows: list[Row]) -> str:
    """Returns rows as aligned text."""
    if not rows:
        return "(nothing)"
    heads = list(dict.fromkeys(k for r in rows for k in r if k != "sources"))
    cells = [heads] + [[_cell(r.get(h, "")) for h in heads] for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(heads))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
