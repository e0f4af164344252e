"""Bytes to train on: the standard library's source or the user's files, split and batched deterministically."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sysconfig

import numpy as np

from diptych.common.errors import ExplainedError
from diptych.lab import files

DEFAULT_CAP = 8 << 20
"""The largest number of bytes that is read by default."""

_SKIPPED_DIRS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "node_modules"}
_VALIDATION_PERIOD = 10


class DataError(ExplainedError, ValueError):
    """The error for data that is missing, unreadable or too small.

    **Cause:** A `--data` that does not exist or has no files to train on, or fewer bytes than a window of `--seq`.

    **Remedy:** Name a file or a folder of text files, with more data or a shorter `--seq`.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class ByteData:
    """A training and a validation split of bytes, uint8 arrays, and their source."""

    train: np.ndarray
    valid: np.ndarray
    source: str
    files: int

    @property
    def unigram_entropy(self) -> float:
        """The entropy of single bytes in nats, over both splits: the lowest loss of a model without context."""
        counts = np.bincount(self.train, minlength=256) + np.bincount(self.valid, minlength=256)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())

    def batch(self, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
        """Returns the training windows of a step, int32 [batch, seq + 1]. They depend on the data, `seed` and `step`
        alone."""
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - seq, size=batch)
        return self.train[starts[:, None] + np.arange(seq + 1)].astype(np.int32)

    def validation_batches(self, count: int, batch: int, seq: int) -> list[np.ndarray]:
        """Returns `count` batches of windows spread evenly over the validation split, equal for every run."""
        starts = np.linspace(0, len(self.valid) - seq - 1, count * batch).astype(np.int64)
        windows = self.valid[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
        return list(windows.reshape(count, batch, seq + 1))

    def check(self, seq: int) -> None:
        """**Raises** DataError if a split is shorter than a window."""
        for name, split in (("training", self.train), ("validation", self.valid)):
            if len(split) < seq + 2:
                raise DataError(
                    f"{self.source}: the {name} split has {len(split)} bytes and a window needs {seq + 2}; "
                    "give more data or a shorter --seq"
                )


def load(path: str | os.PathLike[str] | None = None, *, cap: int = DEFAULT_CAP) -> ByteData:
    """Reads bytes and splits them.

    **Arguments:** `path`: a file or a directory; None: the source of Python's standard library. `cap`: the largest
    number of bytes to read; files are read in sorted order.

    **Returns:** `ByteData`. Every tenth file is for validation, or the last tenth of a single file.

    **Raises** DataError if the path is missing, unreadable or holds nothing.
    """
    if path is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        return _split(_read(_walk(root, suffix=".py"), cap), f"Python {_python_version()} standard library", root)
    root = pathlib.Path(path)
    match files.kind(root):
        case "a file":
            return _split(_read([root], cap), str(root), root)
        case "a folder":
            if not (found := _walk(root, suffix="")):
                raise DataError(
                    f"{root}: a folder without files to train on; hidden ones, packages and tests do not count"
                )
            return _split(_read(found, cap), str(root), root)
        case "nothing":
            raise DataError(f"{root}: no such file or directory")
        case other:
            raise DataError(f"{root}: is {other}; give a file or a folder of files")


def _python_version() -> str:
    import platform

    return platform.python_version()


def _walk(root: pathlib.Path, suffix: str) -> list[pathlib.Path]:
    """Returns the files below `root` in sorted order. Hidden files, packages and tests differ by installation and are
    left out."""

    def unreadable(e: OSError) -> None:
        raise DataError(f"{e.filename}: cannot be read: {e.strerror}") from e

    found = []
    for folder, dirs, names in os.walk(root, onerror=unreadable):
        dirs[:] = sorted(d for d in dirs if d not in _SKIPPED_DIRS and not d.startswith("."))
        found += [pathlib.Path(folder, f) for f in sorted(names) if f.endswith(suffix) and not f.startswith(".")]
    return [f for f in found if f.is_file()]


def _read(paths: list[pathlib.Path], cap: int) -> list[bytes]:
    parts, left = [], cap
    for path in paths:
        if left <= 0:
            break
        try:
            with files.reading(path) as f:
                part = f.read(min(left, os.fstat(f.fileno()).st_size))
        except files.FileError as e:
            raise DataError(str(e)) from e
        if part:
            parts.append(part)
            left -= len(part)
    return parts


def _split(parts: list[bytes], source: str, root: pathlib.Path) -> ByteData:
    if not parts:
        raise DataError(f"{root}: holds no bytes to train on")
    if len(parts) < _VALIDATION_PERIOD:
        whole = b"".join(parts)
        cut = len(whole) - len(whole) // _VALIDATION_PERIOD
        train, valid = whole[:cut], whole[cut:]
    else:
        last = _VALIDATION_PERIOD - 1
        train = b"".join(p for i, p in enumerate(parts) if i % _VALIDATION_PERIOD != last)
        valid = b"".join(p for i, p in enumerate(parts) if i % _VALIDATION_PERIOD == last)
    return ByteData(np.frombuffer(train, np.uint8), np.frombuffer(valid, np.uint8), source, len(parts))
