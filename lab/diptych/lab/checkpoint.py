"""Checkpoints: an uncompressed npz of plain NumPy arrays and a JSON header, written atomically and checked before use.

A checkpoint is a zip archive whose members are not compressed. Each member is one array in NumPy's file format;
`header` holds JSON text as bytes. The digest in the header covers the header's other fields and the names and bytes of
all other members, including the arrays' own headers. `np.load` reads such a file too.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import pathlib
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from diptych.common import CheckpointError, linear_plan
from diptych.lab import files
from diptych.lab.frontend import State
from diptych.lab.job import Job

VERSION = 3
FILE_NAME = "checkpoint.npz"
_SECTIONS = ("weights", "first", "second", "quantizing")
_FIELDS = {"version": int, "step": int, "framework": str, "identity": dict, "validation": dict, "digest": str}
_BAD_ARCHIVE = (
    zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error, OverflowError, OSError,
)  # fmt: skip
_MAGIC = b"\x93NUMPY\x01\x00"
_ARRAY_HEADER = re.compile(
    rb"\{'descr': '([<|][biuf]\d)', 'fortran_order': False, 'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\), \} *\n"
)


@dataclasses.dataclass
class Checkpoint:
    """The state after `state.step` updates, the losses until then, and the settings of the run."""

    state: State
    losses: np.ndarray
    validation: dict[int, float]
    identity: dict[str, Any]
    framework: str


class _Damage(Exception):
    """The error for a damaged file. Its message says what is wrong."""


def identity(job: Job, *, seed: int, batch: int, data: np.ndarray) -> dict[str, Any]:
    """Returns the settings that must be equal for a resumed run to equal the uninterrupted one."""
    return {
        "model": dataclasses.asdict(job.model),
        "optimizer": dataclasses.asdict(job.optim),
        "recipe": "none" if job.recipe is None else f"{type(job.recipe).__name__} {job.recipe.fingerprint}",
        "seed": seed,
        "batch": batch,
        "data": hashlib.sha256(data.tobytes()).hexdigest()[:16],
    }


def save(path: pathlib.Path, checkpoint: Checkpoint) -> None:
    """Writes a new file and renames it to `path`, so a crash or a full disk leaves a complete file, old or new.

    **Raises** OSError with the path and the reason if it cannot be written.
    """
    arrays = {f"{s}/{k}": v for s in _SECTIONS for k, v in getattr(checkpoint.state, s).items()}
    arrays["losses"] = np.asarray(checkpoint.losses, np.float64)
    members = {name: _member(array) for name, array in arrays.items()}
    header = {
        "version": VERSION,
        "step": checkpoint.state.step,
        "framework": checkpoint.framework,
        "identity": checkpoint.identity,
        "validation": {str(k): float(v) for k, v in checkpoint.validation.items()},
    }
    text = json.dumps(header | {"digest": _digest(header, members)})
    members["header"] = _member(np.frombuffer(text.encode(), np.uint8))
    with files.replacing(path) as f, zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as archive:
        for name, parts in members.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                for part in parts:
                    member.write(part)


def load(path: pathlib.Path) -> Checkpoint:
    """Reads and verifies a checkpoint. `path`: the file, or the folder that holds it.

    The memory that it allocates is bounded by the file's size, even if the file is damaged.

    **Raises** CheckpointError that names the file and the fault. Nothing is written.
    """
    path = path / FILE_NAME if path.is_dir() else path
    if files.kind(path) == "nothing":
        raise CheckpointError(f"{path}: no such checkpoint; give its file or its folder")
    try:
        with files.reading(path) as f:
            return _read(f)
    except _Damage as e:
        raise CheckpointError(f"{path}: {e}") from e
    except files.FileError as e:
        raise CheckpointError(str(e)) from e


def check(checkpoint: Checkpoint, job: Job, expected: dict[str, Any], path: pathlib.Path) -> None:
    """**Raises** CheckpointError that names each setting in which checkpoint and run differ, or a wrong array."""
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
        raise CheckpointError(f"{path}: belongs to another run: {'; '.join(wrong)}; resume with that run's options")
    for section in ("weights", "first", "second"):
        forms = {k: (v.dtype.name, v.shape) for k, v in getattr(checkpoint.state, section).items()}
        _same_names(path, section, set(forms), set(job.model.shapes()))
        for name, shape in job.model.shapes().items():
            dtype, found = forms[name]
            if (dtype, found) != ("float32", shape):
                raise CheckpointError(f"{path}: {section}/{name} is {dtype}{list(found)}, must be float32{list(shape)}")
    if checkpoint.state.step:
        _same_names(path, "quantizing", set(checkpoint.state.quantizing), _quantizing_names(job))


def _same_names(path: pathlib.Path, section: str, found: set[str], expected: set[str]) -> None:
    for names, what in ((expected - found, "lacks"), (found - expected, "has arrays that this run does not have:")):
        if names:
            raise CheckpointError(f"{path}: {section} {what} {_short(', '.join(sorted(names)))}")


def _quantizing_names(job: Job) -> set[str]:
    """Returns the names of the quantizers' states of all linear layers; see `State`."""
    if job.recipe is None:
        return set()
    plan = linear_plan(job.recipe)
    each = [f"scale_states.{slot.name}.{part}" for slot in plan.states for part in ("scale", "amax_history", "fp8_max")]
    return {f"{linear}.{name}" for linear in job.model.linears for name in each + ["rng_state"] * plan.needs_rng}


def _short(text: str) -> str:
    """Returns an excerpt of a damaged file, shortened for an error message."""
    return text if len(text) <= 200 else f"{text[:200]}…"


# --- the archive ---


def _read(f: BinaryIO) -> Checkpoint:
    size = os.fstat(f.fileno()).st_size
    members = _members(f, size)
    if "header" not in members:
        raise _Damage("not a checkpoint: it holds no header")
    header = _header(members.pop("header"))
    digest = header.pop("digest")
    if digest != _digest(header, {name: (raw,) for name, raw in members.items()}):
        raise _Damage("damaged: header and arrays do not match the digest in the header")
    arrays = {name: _array(name, raw) for name, raw in members.items()}
    losses = arrays.pop("losses", None)
    if losses is None or losses.dtype != np.float64 or losses.shape != (header["step"],):
        held = "none" if losses is None else f"{losses.dtype.name}{list(losses.shape)}"
        raise _Damage(f"damaged: the losses of {header['step']} steps must be as many float64, there are {held}")
    sections: dict[str, dict[str, np.ndarray]] = {s: {} for s in _SECTIONS}
    for name, array in arrays.items():
        section, _, key = name.partition("/")
        if section not in sections or not key:
            raise _Damage(f"damaged: it holds an array {_short(name)!r}, which belongs to no part of a checkpoint")
        sections[section][key] = array
    validation = {int(k): float(v) for k, v in header["validation"].items()}
    return Checkpoint(State(header["step"], **sections), losses, validation, header["identity"], header["framework"])


def _members(f: BinaryIO, size: int) -> dict[str, np.ndarray]:
    """Returns each member's bytes, uint8, by its name without ".npy"."""
    try:
        with zipfile.ZipFile(f) as archive:
            return _stored(archive, size)
    except _BAD_ARCHIVE as e:
        if isinstance(e, OSError) and e.errno != errno.EINVAL:  # an impossible offset in the archive gives EINVAL
            raise
        f.seek(0)
        found = "it is empty" if not size else f"{type(e).__name__}: {_short(str(e))}"
        found = "it is a single array, not an archive" if f.read(6) == _MAGIC[:6] else found
        raise _Damage(f"damaged or not a checkpoint ({found})") from e


def _stored(archive: zipfile.ZipFile, size: int) -> dict[str, np.ndarray]:
    """Returns what `_members` does, of an open archive in a file of `size` bytes."""
    members: dict[str, np.ndarray] = {}
    left = size
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if info.compress_type != zipfile.ZIP_STORED:
            raise _Damage(f"not a checkpoint: {_short(info.filename)!r} is compressed, checkpoints are not")
        left -= info.file_size
        if info.file_size != info.compress_size or left < 0:
            raise _Damage(
                f"damaged: {_short(info.filename)!r} is said to have more bytes than the file, which has {size}"
            )
        if name in members or name == info.filename:
            raise _Damage(f"not a checkpoint: {_short(info.filename)!r} is there twice or is no .npy")
        members[name] = raw = np.empty(info.file_size, np.uint8)
        with archive.open(info) as member:
            got = member.readinto(raw.data) if len(raw) else 0  # type: ignore[arg-type]
            if got != len(raw) or member.read(1):  # reading past the end makes zipfile compare the CRC
                raise _Damage(f"damaged: {_short(info.filename)!r} ends after {got} of {len(raw)} bytes")
    return members


def _header(raw: np.ndarray) -> dict[str, Any]:
    """Returns the checked fields of the header, including the digest."""
    try:
        header = json.loads(_array("header", raw).tobytes())
    except (ValueError, RecursionError) as e:
        raise _Damage(f"damaged: its header is no JSON ({e})") from e
    if not isinstance(header, dict):
        raise _Damage(f"damaged: its header is no JSON object but {type(header).__name__}")
    version = header.get("version")
    if type(version) is int and version != VERSION:
        raise _Damage(f"written in checkpoint format {version}, this diptych reads {VERSION}")
    for name, want in _FIELDS.items():
        if type(header.get(name)) is not want:
            held = f"{name} of type {type(header[name]).__name__}" if name in header else f"no {name}"
            raise _Damage(f"damaged: its header has {held}, must have {name} of type {want.__name__}")
    if unknown := header.keys() - _FIELDS.keys():
        raise _Damage(f"damaged: its header has unknown fields: {_short(', '.join(sorted(map(repr, unknown))))}")
    if header["step"] < 0:
        raise _Damage(f"damaged: its header says step {header['step']}")
    for step, loss in header["validation"].items():
        if not re.fullmatch(r"[0-9]{1,19}", step) or type(loss) is not float:
            raise _Damage(f"damaged: its header has a validation loss {_short(repr(loss))} after step {_short(step)!r}")
    return header


def _digest(header: Mapping[str, Any], members: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the header's fields except the digest, and of the names and bytes of all members."""
    h = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(members):
        h.update(json.dumps([name, sum(len(part) for part in members[name])]).encode())
        for part in members[name]:
            h.update(part)
    return h.hexdigest()


# --- NumPy's file format, as far as checkpoints use it ---


def _member(array: np.ndarray) -> tuple[bytes, memoryview]:
    """Returns an array as the header and the data of a .npy file, version 1.0."""
    array = np.asarray(array)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}".encode()
    text += b" " * (-(len(_MAGIC) + 2 + len(text) + 1) % 64) + b"\n"
    header = _MAGIC + len(text).to_bytes(2, "little") + text
    if not _ARRAY_HEADER.fullmatch(text):
        raise TypeError(f"a checkpoint holds arrays of numbers, not of {array.dtype}")
    return header, array.reshape(-1).view(np.uint8).data


def _array(name: str, raw: np.ndarray) -> np.ndarray:
    """Returns a member's array as a view of its bytes."""
    start = len(_MAGIC) + 2
    text = raw[start : start + int.from_bytes(raw[start - 2 : start].tobytes(), "little")].tobytes()
    found = _ARRAY_HEADER.fullmatch(text)
    if raw[: len(_MAGIC)].tobytes() != _MAGIC or not found:
        raise _Damage(f"damaged: {_short(name)} has no header of an array of numbers")
    try:
        dtype = np.dtype(found[1].decode())
    except TypeError:
        raise _Damage(f"damaged: {_short(name)} has a dtype that is unknown: {found[1].decode()!r}") from None
    shape = tuple(int(n) for n in found[2].decode().split(",") if n.strip())
    data, nbytes = raw[start + len(text) :], math.prod(shape) * dtype.itemsize
    if nbytes != len(data):
        raise _Damage(
            f"damaged: {_short(name)} is said to be {dtype.name}{list(shape)} and has {len(data)} bytes, not {nbytes}"
        )
    try:
        return data.view(dtype).reshape(shape)
    except ValueError as e:  # NumPy refuses an empty array whose extents are beyond any memory
        raise _Damage(f"damaged: {_short(name)} is said to be {dtype.name}{list(shape)} ({e})") from None
