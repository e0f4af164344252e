"""Randomly damaged files and command lines: each is refused with a message, or has its original meaning."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import lab_files
from diptych.common import RECIPES, CheckpointError
from diptych.lab import checkpoint, cli, data, doctor
from diptych.lab.job import Job, ModelConfig, OptimConfig, initial_weights
from fuzz.draw import Draw

_FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_MODEL = ModelConfig(width=4, layers=1, heads=1, seq=4, vocab=8)
_GOOD: dict[int, tuple[bytes, Any]] = {}


def _place() -> pathlib.Path:
    """Returns a path that does not exist."""
    path = _FOLDER / checkpoint.FILE_NAME
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return path


def _example(seed: int) -> tuple[bytes, Any]:
    """A checkpoint's bytes and content."""
    if seed not in _GOOD:
        path = _place()
        checkpoint.save(path, lab_files.example(seed))
        _GOOD[seed] = path.read_bytes(), lab_files.content(checkpoint.load(path))
    return _GOOD[seed]


def damaged(d: Draw, blob: bytes) -> bytes:
    """Some bytes changed, moved, lost or repeated."""
    out = bytearray(blob)
    for _ in range(d.choice((1, 1, 1, 2, 5, 50))):
        at = d.randrange(len(out) + 1)
        end = min(len(out), at + d.choice((1, 2, 4, 8, 100, 1000)))
        match d.randrange(8):
            case 0 | 1 | 2 if at < len(out):
                out[at] ^= 1 << d.randrange(8)
            case 3 if at < len(out):
                out[at:end] = d.choice((b"\0", b"\xff", b"\x7f", d.randbytes(1))) * (end - at)
            case 4:
                del out[at:end]
            case 5:
                out[at:at] = out[at:end]
            case 6:
                del out[at:]
            case _:
                other = d.randrange(len(out) + 1)
                out[other:other] = d.randbytes(d.randrange(20))
    return bytes(out)


def check_bytes(d: Draw) -> bool:
    """The bytes of a checkpoint: refused, or the same content."""
    blob, want = _example(d.randrange(6))
    path = _place()
    path.write_bytes(damaged(d, blob))
    try:
        found = lab_files.content(checkpoint.load(path))
    except CheckpointError as e:
        assert str(e).startswith(str(path)) and len(str(e)) < 1000 + len(str(path)), f"refused without words: {e}"
        return False
    assert found == want, "a damaged checkpoint loads with other content"
    return True


def something(d: Draw) -> Any:
    """JSON of any kind."""
    return d.choice((None, True, 0, -1, 7, 1.5, float("nan"), 10**30, "", "x", [], {}, [1], {"a": 1}, {"1": 2.0}))


def check_forgery(d: Draw) -> bool:
    """A checkpoint with one field or member replaced. Refused, or, if its digest fits, a checkpoint by its types."""
    path, (blob, want), sign = _place(), _example(d.randrange(6)), d.maybe(0.6)
    path.write_bytes(blob)

    def header(fields: dict[str, Any]) -> Any:
        if d.maybe(0.05):
            return something(d)
        name = d.choice([*fields, "more"])
        if d.maybe(0.3):
            fields.pop(name, None)
        else:
            fields[name] = something(d)
        return fields

    kind = d.choice(("<f4", "<f8", "|b1", ">f4", "<f2", "<i8", "<u2", "|S5", "|O", "<c8", "<f3", "<M8", "garbage"))
    shape = d.choice(("()", "(1,)", "(2, 3)", "(0,)", "(10000000000000,)", "(-1,)", "(1,,)", "1", "(99999999999,) * 9",
                      "(0, 9999999999999, 9999999999999)"))  # fmt: skip
    member = d.choice((lab_files.said_to_be(shape, kind, d.randbytes(d.choice((0, 4, 8, 24)))), d.randbytes(40), b"",
                       lab_files.npy(np.ones((2, 3), np.float32))))  # fmt: skip
    name = d.choice(("weights/a.npy", "first/a.npy", "losses.npy", "quantizing/new.npy", "weights/.npy", "other.npy",
                     "../up.npy", "x", "é.npy", "header.npy.npy"))  # fmt: skip
    try:
        if d.maybe(0.5):
            lab_files.rewritten(path, header=header, sign=sign)
        else:
            drop = d.choice(((), ("losses.npy",), ("second/a.npy",)))
            lab_files.rewritten(path, extra={name: member}, drop=drop, sign=sign)
        loaded = checkpoint.load(path)
    except CheckpointError as e:
        assert str(e).startswith(str(path)), f"refused without words: {e}"
        return False
    assert sign or lab_files.content(loaded) == want, "a forged checkpoint loads with other content"
    assert type(loaded.state.step) is int and loaded.losses.shape == (loaded.state.step,)
    assert isinstance(loaded.identity, dict) and isinstance(loaded.framework, str)
    return True


def check_states(d: Draw) -> bool:
    """The arrays of a run: what is not the model's is refused by name."""
    weights = initial_weights(_MODEL, d.getrandbits(32))
    parts = {s: dict(weights) for s in ("weights", "first", "second")}
    section, name = d.choice(list(parts)), d.choice(list(weights))
    array, spoiled = parts[section][name], True
    match d.randrange(5):
        case 0:
            del parts[section][name]
        case 1:
            parts[section][name] = array.astype(d.choice((np.float64, np.float16, np.int32)))
        case 2:
            parts[section][name] = array[..., None] if d.maybe(0.5) else np.concatenate([array, array])
        case 3:
            parts[section][name + d.choice(("x", ".weight", "/"))] = array
        case _:
            spoiled = False
    state = checkpoint.State(0, **parts, quantizing={})
    found = checkpoint.Checkpoint(state, np.zeros(0), {}, {}, "torch")
    try:
        checkpoint.check(found, Job(model=_MODEL), {}, _FOLDER)
    except CheckpointError as e:
        assert spoiled and section in str(e), e
        return False
    assert not spoiled, f"{section}/{name} is not the model's, and passes"
    return True


def check_data(d: Draw) -> bool:
    """Checks `lab.data.load` on the kinds of paths that `--data` may name."""
    path = _place()
    match d.randrange(6):
        case 0:
            lab_files.make(path, d.choice(lab_files.SPECIAL))
        case 1:
            path.write_bytes(d.randbytes(d.choice((0, 1, 9, 10, 200, 5000))))
        case _:
            path.mkdir()
            for i in range(d.choice((0, 1, 3, 12, 25))):
                inner = path / d.choice(("", "a", "tests", ".hidden")) / f"{d.choice(('', '.'))}{i}"
                inner.parent.mkdir(exist_ok=True)
                if d.maybe(0.2):
                    lab_files.make(inner, d.choice(lab_files.SPECIAL))
                else:
                    inner.write_bytes(d.randbytes(d.choice((0, 1, 300))))
    seq = d.choice((1, 16, 1000))
    try:
        found = data.load(path, cap=d.choice((1, 10, 1000, 1 << 20, 10**30)))
        found.check(seq)
    except data.DataError as e:
        assert str(path) in str(e), f"refused without naming the path: {e}"
        return False
    assert found.batch(0, d.randrange(100), 2, seq).shape == (2, seq + 1)
    return True


_OPTIONS = ("--steps", "--seed", "--batch", "--lr", "--eval-every", "--eval-batches", "--width", "--layers", "--heads",
            "--seq", "--threads", "--data-cap", "--data", "--out", "--recipe", "--device", "--framework", "--resume",
            "--stop-after", "--checkpoint-every", "--trace-steps", "--corrupt-scale", "--quiet", "--no-compile",
            "--overwrite", "--json", "--what", "-x")  # fmt: skip
_WORDS = ("0", "1", "-1", "3", "16", "1e3", "nan", "inf", "-inf", "1e-400", "1e400", "", " ", "x", "torch", "jax",
          "cpu", "cuda", "fp8-block", "none", "/dev/null", "/dev/zero", "/no/such", "a\0b", "é", "9" * 30, "0x10",
          "1_0", "--", "\udcff", "a" * 5000)  # fmt: skip


class _Stop(cli.InputError):
    """Ends a command where the training would begin."""


def _stop(*_: Any) -> Any:
    raise _Stop("everything before the run was in order")


def check_arguments(d: Draw) -> bool:
    """Command lines: one line that says what is wrong and status 2, or the run would begin."""
    argv = [d.choice(("train", "train", "compare", "doctor", "fly", ""))]
    argv += ["--framework", d.choice(("torch", "jax"))] * (argv[0] == "train" and d.maybe(0.9))
    small = _FOLDER / "small"
    if not small.exists():
        small.write_bytes(bytes(range(256)) * 20)
    argv += ["--data", str(small)] * (argv[0] != "doctor")
    for _ in range(d.randrange(4)):
        argv += [d.choice(_OPTIONS), d.choice((*_WORDS, *RECIPES))][: d.choice((1, 2, 2, 2))]
    out, err, before = io.StringIO(), io.StringIO(), (cli._frontend, doctor.diagnose)
    cli._frontend = doctor.diagnose = _stop  # both take seconds
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(argv)
    except SystemExit as e:
        status = e.code
    finally:
        cli._frontend, doctor.diagnose = before
    said = err.getvalue()
    assert status == 2, f"{argv}: status {status}, {said!r}"
    assert said.startswith("diptych") and said.count("\n") == 1 and ": error: " in said, f"{argv}: {said!r}"
    return "everything before the run was in order" in said


def check_configs(d: Draw) -> bool:
    """Values that configure a run."""
    kind = d.choice((ModelConfig, OptimConfig))
    fields = list(kind.__dataclass_fields__)
    given = {d.choice(fields): d.scalar() for _ in range(d.randrange(3))}
    try:
        made = kind(**given)
    except (ValueError, TypeError):
        return False
    json.dumps(checkpoint.identity(Job(**{"model" if kind is ModelConfig else "optim": made}), seed=0, batch=1,
                                   data=np.zeros(3, np.uint8)))  # fmt: skip
    return True


CHECKS: tuple[Callable[[Draw], bool], ...] = (
    check_bytes, check_bytes, check_bytes, check_forgery, check_states, check_data, check_arguments, check_configs,
)  # fmt: skip


def run(d: Draw, count: Callable[[bool], None]) -> None:
    count(d.choice(CHECKS)(d))
