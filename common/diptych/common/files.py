"""Files that are written atomically, and what a path names."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

from diptych.common.errors import ExplainedError

_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class FileError(ExplainedError, OSError):
    """A file that cannot be read or written; the message has its path and the reason.

    **Cause:** A path that is missing, is of another kind (a folder where a file is needed), may not be written, or
    lies inside of a trace.

    **Remedy:** Name another path, or change its permissions.
    """

    def __str__(self) -> str:
        return str(self.strerror)


def kind(path: pathlib.Path) -> str:
    """Returns what `path` names: "a file", "a folder", "a named pipe", "a dangling link to x", "nothing", ..."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"a dangling link to {os.readlink(path)}" if path.is_symlink() else "nothing"
    except OSError as e:
        return "a link that leads back to itself" if e.errno == errno.ELOOP else f"not accessible ({e.strerror})"
    return next(word for test, word in _KINDS if test(mode))


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an exception, with all bytes synced to disk.

    Its temporary name, in the same folder, is unique and follows no link. If the block raises or is interrupted, the
    new file is removed and `path` does not change. If `path` is a link, the link is replaced, not its target.

    **Raises** FileError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    made = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        made = True
        with open(fd, "wb") as f:
            yield f
            f.flush()
            os.fsync(fd)
        os.replace(temporary, path)
        made = False
        sync_folder(path.parent)
    except FileError:
        raise
    except OSError as e:
        what = "the file there is as it was" if path.exists() else "nothing is there"
        raise FileError(e.errno, f"{path}: cannot be written: {e.strerror or e}; {what}") from e
    finally:
        if made:
            with contextlib.suppress(OSError):  # the exception being raised has the reason
                os.unlink(temporary)


def sync_folder(folder: pathlib.Path) -> None:
    """Syncs a rename to disk, if the file system supports it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
