"""Checkpoints: one npz of plain NumPy arrays and a JSON header, written atomically, checked whole before use."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import zipfile
from typing import Any

import numpy as np

from diptych.common import CheckpointError
from diptych.lab.frontend import State
from diptych.lab.job import Job

VERSION = 2
FILE_NAME = "checkpoint.npz"
_SECTIONS = ("weights", "first", "second", "quantizing")


@dataclasses.dataclass
class Checkpoint:
    """State after `state.step` updates, the losses that led to it, and what it belongs to."""

    state: State
    losses: np.ndarray
    validation: dict[int, float]
    identity: dict[str, Any]
    framework: str


def identity(job: Job, *, seed: int, batch: int, data: np.ndarray) -> dict[str, Any]:
    """What must be equal for a resumed run to be the uninterrupted one."""
    return {
        "model": dataclasses.asdict(job.model),
        "optimizer": dataclasses.asdict(job.optim),
        "recipe": "none" if job.recipe is None else f"{type(job.recipe).__name__} {job.recipe.fingerprint}",
        "seed": seed,
        "batch": batch,
        "data": hashlib.sha256(data.tobytes()).hexdigest()[:16],
    }


def save(path: pathlib.Path, checkpoint: Checkpoint) -> None:
    """Writes beside `path` and renames: a crash leaves the old file or the new one, never half of one."""
    arrays = {f"{s}/{k}": v for s in _SECTIONS for k, v in getattr(checkpoint.state, s).items()}
    arrays["losses"] = np.asarray(checkpoint.losses, np.float64)
    header = {
        "version": VERSION,
        "step": checkpoint.state.step,
        "framework": checkpoint.framework,
        "identity": checkpoint.identity,
        "validation": {str(k): v for k, v in checkpoint.validation.items()},
        "digest": _digest(arrays),
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as f:
        f.write(buffer.getbuffer())
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)


def load(path: pathlib.Path) -> Checkpoint:
    """Reads and verifies a checkpoint; `path` may be the folder that holds it.

    **Raises** CheckpointError saying what is wrong with the file. Nothing is written.
    """
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        with np.load(path, allow_pickle=False) as f:
            arrays = {name: f[name] for name in f.files}
        header = json.loads(arrays.pop("header").tobytes())
        version, digest = header["version"], header["digest"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as e:
        raise CheckpointError(f"{path}: damaged or not a checkpoint ({type(e).__name__}: {e})") from e
    if version != VERSION:
        raise CheckpointError(f"{path}: written in checkpoint format {version}, this diptych reads {VERSION}")
    if digest != _digest(arrays):
        raise CheckpointError(f"{path}: damaged: the arrays do not match the digest in the header")
    sections: dict[str, dict[str, np.ndarray]] = {s: {} for s in _SECTIONS}
    for name, array in arrays.items():
        section, _, key = name.partition("/")
        if key:
            sections[section][key] = array
    return Checkpoint(
        State(int(header["step"]), **sections),
        arrays["losses"],
        {int(k): float(v) for k, v in header["validation"].items()},
        header["identity"],
        header["framework"],
    )


def check(checkpoint: Checkpoint, expected: dict[str, Any], path: pathlib.Path) -> None:
    """**Raises** CheckpointError naming every setting in which the checkpoint and this run differ."""
    wrong = []
    for key, want in expected.items():
        have = checkpoint.identity.get(key)
        if have == want:
            continue
        if isinstance(want, dict) and isinstance(have, dict):
            wrong += [f"{key}.{k} is {have.get(k)!r} there, {v!r} here" for k, v in want.items() if have.get(k) != v]
        else:
            wrong.append(f"{key} is {have!r} there, {want!r} here")
    if wrong:
        raise CheckpointError(f"{path}: belongs to another run: {'; '.join(wrong)}")


def _digest(arrays: dict[str, np.ndarray]) -> str:
    h = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        h.update(f"{name} {array.dtype.str} {array.shape}".encode())
        h.update(array.tobytes())
    return h.hexdigest()
