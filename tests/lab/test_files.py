"""Reading and writing files: kinds of files, failed writes, and locks of folders."""

import errno
import os
import secrets
import signal
import stat
import subprocess
import sys

import pytest

from diptych.lab import files
from lab_files import SPECIAL, make


@pytest.mark.parametrize("what", SPECIAL)
def test_what_is_no_file_is_not_read(tmp_path, what):
    path = make(tmp_path / "x", what)
    assert files.kind(path) == what
    with pytest.raises(files.FileError, match=rf"x: .*is {what}"), files.reading(path):
        pass


def test_a_link_is_read_and_replaced(tmp_path):
    (tmp_path / "a").write_text("old")
    link = tmp_path / "b"
    link.symlink_to("a")
    with files.reading(link) as f:
        assert f.read() == b"old"
    files.write_text(link, "new")
    assert link.read_text() == "new" and not link.is_symlink() and (tmp_path / "a").read_text() == "old"


def test_a_new_file_has_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "deep" / "x", "é")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "deep" / "x").stat().st_mode) == 0o640
    assert (tmp_path / "deep" / "x").read_bytes() == "é".encode()


def test_a_temporary_name_that_is_taken_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f".x.{'0' * 16}.partial").symlink_to("elsewhere")
    with pytest.raises(files.FileError, match="x: cannot be written: File exists; nothing is there"):
        files.write_text(tmp_path / "x", "new")
    assert [p.name for p in tmp_path.iterdir()] == [f".x.{'0' * 16}.partial"]


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("e", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, old, e):
    path = tmp_path / "x"
    if old:
        path.write_text(old)
    at_stake = "the file there is as it was" if old else "nothing is there"
    expected = files.FileError if isinstance(e, OSError) else type(e)
    with pytest.raises(expected) as caught, files.replacing(path) as f:
        f.write(b"half")
        raise e
    if isinstance(e, OSError):
        assert str(caught.value) == f"{path}: cannot be written: No space left on device; {at_stake}"
        assert caught.value.errno == errno.ENOSPC
    assert [p.read_text() for p in tmp_path.iterdir()] == ([old] if old else [])


def test_a_full_disk_is_noticed_when_the_file_is_closed(tmp_path):
    """Small files reach the disk at the last moment, when the buffer is flushed."""
    path = tmp_path / "x"
    path.write_text("old")
    code = "import resource, pathlib, sys; from diptych.lab import files\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    code += "files.write_text(pathlib.Path(sys.argv[1]), 'y' * 200)"
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert f"{path}: cannot be written: File too large; the file there is as it was" in out.stderr
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


HOLD = """
import pathlib, sys, time
from diptych.lab import files
with files.only_run(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_run_at_a_time_and_a_dead_one_does_not_count(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        busy = f"run: another run .process {holder.pid}. writes there"
        with pytest.raises(files.BusyError, match=busy), files.only_run(folder):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    (folder / f".checkpoint.npz.{'a' * 16}.partial").write_text("half")
    (folder / "mine.partial").write_text("kept")
    with files.only_run(folder):
        assert sorted(p.name for p in folder.iterdir()) == [files.LOCK_NAME, "mine.partial"]
        with pytest.raises(files.BusyError, match=f"process {os.getpid()}"), files.only_run(folder):
            pass
    assert [p.name for p in folder.iterdir()] == ["mine.partial"]


def test_a_lock_that_was_a_link_is_not_followed(tmp_path):
    (tmp_path / files.LOCK_NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(files.FileError, match=f"{tmp_path}: cannot be written"), files.only_run(tmp_path):
        pass
    assert not (tmp_path / "victim").exists()


def test_without_locks_a_warning_says_so(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with files.only_run(tmp_path):
        pass
    assert "no locks here (No locks available); a second run in this folder goes unnoticed" in capsys.readouterr().err
