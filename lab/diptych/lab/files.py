"""Files of the lab: it reads regular files alone, writes atomically, and lets one run at a time write in a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from diptych.common.errors import ExplainedError
from diptych.common.files import FileError, kind, replacing

LOCK_NAME = ".diptych.lock"
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial")


class BusyError(ExplainedError, RuntimeError):
    """The error for a folder in which another run writes.

    **Cause:** Two commands with the same `--out` at the same time.

    **Remedy:** Wait for the process that the message names, or choose another `--out`.
    """


@contextlib.contextmanager
def reading(path: pathlib.Path, *, links: bool = True) -> Iterator[BinaryIO]:
    """Opens a regular file; it never blocks on a pipe or a device. `links`: whether a link is followed.

    **Raises** FileError if the file cannot be opened, or if an error occurs while it is read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
        with open(fd, "rb") as f:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileError(errno.EINVAL, f"{path}: is {kind(path)}, not a file")
            yield f
    except FileError:
        raise
    except OSError as e:
        found = "a link" if e.errno == errno.ELOOP and not links else kind(path)
        why = e.strerror or str(e) if found in ("a file", "nothing") else f"it is {found}"
        raise FileError(e.errno, f"{path}: cannot be read: {why}") from e


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces `path` by a file with this text. **Raises** FileError if it cannot; the old file is then unchanged."""
    with replacing(path) as f:
        f.write(text.encode())


def real(path: pathlib.Path) -> pathlib.Path:
    """Returns the path with links resolved. Unlike `Path.resolve` it accepts a link to itself."""
    return pathlib.Path(os.path.realpath(path))


def require_writable(option: str, path: pathlib.Path, traces: Sequence[pathlib.Path]) -> None:
    """**Raises** FileError at once if a file could not be written later, is inside of a trace's folder, or is a link,
    which would be replaced. `option`: the option of the command line that names it."""
    if os.fspath(path) == "-":
        raise FileError(errno.EINVAL, f"{option} -: is no name of a file; standard output has the summary")
    if path.is_symlink():
        raise FileError(errno.EINVAL, f"{option} {path}: is a link to {os.readlink(path)}; name the file itself")
    if (found := kind(path)) not in ("a file", "nothing"):
        raise FileError(errno.EINVAL, f"{option} {path}: is {found}, where a file is to be written")
    if any(real(path).is_relative_to(real(folder)) for folder in traces):
        raise FileError(errno.EINVAL, f"{option} {path}: is inside of a trace; write it elsewhere")
    nearest = next(p for p in real(path).parents if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise FileError(errno.EACCES, f"{option} {path}: cannot be written in {nearest}")


@contextlib.contextmanager
def only_run(folder: pathlib.Path) -> Iterator[None]:
    """Makes `folder`, and locks it against other runs until the context ends or the process dies.

    Partial files of killed runs are removed. If the file system has no locks, a warning is printed on stderr.

    **Raises** BusyError that names the process with the lock, FileError if the folder cannot be written.
    """
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = _lock(path)
    except OSError as e:
        raise FileError(e.errno, f"{folder}: cannot be written: {e.strerror or e}") from e
    try:
        for entry in os.scandir(folder):
            if _PARTIAL.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):  # someone may have removed the folder meanwhile
            os.unlink(path)
        os.close(fd)


def _lock(path: pathlib.Path) -> int:
    """Returns the descriptor of a locked file at `path`, which contains this process's id."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise BusyError(
                f"{path.parent}: another run (process {holder}) writes there; wait for it or choose another --out"
            ) from None
        except OSError as e:
            print(f"warning: {path}: no locks here ({e.strerror}); a second run in this folder goes unnoticed",
                  file=sys.stderr)  # fmt: skip
        try:
            current = os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            current = False
        if current:
            os.truncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
            return fd
        os.close(fd)  # the previous holder has removed the file meanwhile
