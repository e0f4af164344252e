"""A folder of checkpoints. It stays readable if a process that writes it is killed at any moment, even by SIGKILL.

    latest                  a file with the name of the newest complete checkpoint
    step-000123/            a complete checkpoint; `step-000123-1` if it replaced one of the same step
    .step-000124.writing/   an unfinished or partly removed checkpoint, which the next save removes

A checkpoint is written to an unfinished folder and synced. The folder is renamed, `latest` is updated, and older ones
are renamed and removed. So a folder `step-*` is complete whenever it exists.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from diptych.common.errors import CheckpointError, CheckpointWarning
from diptych.common.files import kind, replacing, sync_folder

HEADER = "header.pt"
_LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{6,})(?:-(\d+))?")
UNFINISHED = re.compile(r"\.step-\d{6,}(?:-\d+)?\.writing|\.latest\.[0-9a-f]{16}\.partial")


def begin(root: Path, step: int) -> str:
    """Removes the rest of unfinished saves. Returns the name that the checkpoint will have, and makes its unfinished
    folder."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    taken = [int(found[2] or 0) for path in root.iterdir() if (found := _named(path)) and int(found[1]) == step]
    name = f"step-{step:06}" + (f"-{max(taken) + 1}" if taken else "")
    unfinished(root, name).mkdir()
    return name


def unfinished(root: Path, name: str) -> Path:
    return root / f".{name}.writing"


def finish(root: Path, name: str, keep: int | None) -> None:
    """Names a checkpoint, makes it the latest, and removes those that it replaces and the oldest beyond `keep`."""
    sync_folder(unfinished(root, name))
    os.rename(unfinished(root, name), root / name)
    sync_folder(root)
    with replacing(root / _LATEST) as f:
        f.write(f"{name}\n".encode())
    others = [path for path in _oldest_first(root) if path.name != name]
    replaced = [path for path in others if _step(path) == _step(root / name)]
    kept = [path for path in others if path not in replaced]
    old = [] if keep is None else kept[: max(0, len(kept) - (keep - 1))]
    for path in replaced + old:
        aside = unfinished(root, path.name)
        os.rename(path, aside)
        shutil.rmtree(aside)


def find(root: Path, step: int | None) -> str:
    """Returns the name of a step's checkpoint, or of the latest one. **Raises** CheckpointError if there is none."""
    if kind(root) != "a folder":
        raise CheckpointError(f"{root}: no such folder of checkpoints, it is {kind(root)}")
    complete = _oldest_first(root)
    if not complete:
        raise CheckpointError(f"{root}: holds no complete checkpoint")
    if step is not None:
        found = [path.name for path in complete if _step(path) == step]
        if not found:
            steps = ", ".join(map(str, sorted({_step(path) for path in complete})))
            raise CheckpointError(f"{root}: holds no checkpoint of step {step}, but of {steps}")
        return found[-1]
    latest = root / _LATEST
    if not latest.exists():
        return complete[-1].name  # the first save was killed before it wrote `latest`
    name = latest.read_text().strip()
    if root / name not in complete:
        warnings.warn(
            f"{latest} names {name!r}, which is no complete checkpoint there; {complete[-1].name} is the newest",
            CheckpointWarning,
            stacklevel=2,
        )
        return complete[-1].name
    return name


def _named(path: Path) -> re.Match[str] | None:
    return _COMPLETE.fullmatch(path.name)


def _step(path: Path) -> int:
    found = _named(path)
    assert found
    return int(found[1])


def _oldest_first(root: Path) -> list[Path]:
    """Returns the complete checkpoints in the order in which they were written, which is not that of steps if a run has
    returned to an earlier step."""
    complete = [path for path in root.iterdir() if _named(path) and (path / HEADER).exists()]
    return sorted(complete, key=lambda path: ((path / HEADER).stat().st_mtime_ns, path.name))
