"""Files for tests of the lab's readers: checkpoints, forged checkpoints, and paths that are no regular files."""

from __future__ import annotations

import io
import json
import os
import pathlib
import socket
import zipfile

import numpy as np

from diptych.lab import checkpoint
from diptych.lab.frontend import State


def example(seed: int = 0) -> checkpoint.Checkpoint:
    rng = np.random.default_rng(seed)
    weights = {"a": rng.standard_normal((2, 3)).astype(np.float32), "b.c": np.float32(rng.random()) * np.ones(())}
    kept = {"r": rng.integers(-9, 9, 4).astype(np.int32), "none": np.zeros((0, 5), np.float32)}
    steps = int(rng.integers(0, 4))
    state = State(steps, weights, {k: -v for k, v in weights.items()}, weights, kept)
    found = {"model": {"width": 3, "eps": 1e-8}, "recipe": "none"}
    return checkpoint.Checkpoint(state, rng.random(steps), {steps: rng.random()}, found, "torch")


def content(c: checkpoint.Checkpoint) -> object:
    arrays = [
        (s, k, v.dtype.str, v.shape, v.tobytes()) for s in checkpoint._SECTIONS for k, v in getattr(c.state, s).items()
    ]
    return c.state.step, arrays, c.losses.tobytes(), c.validation, c.identity, c.framework


def rewritten(path, *, header=None, drop=(), extra=None, compression=zipfile.ZIP_STORED, sign=True):
    """The same file with a header changed by a function, members dropped or added, and a digest that fits again."""
    with zipfile.ZipFile(path) as z:
        members = {n: z.read(n) for n in z.namelist() if n not in drop}
    members |= extra or {}
    if "header.npy" in members:
        fields = json.loads(np.load(io.BytesIO(members.pop("header.npy"))).tobytes())
        fields = fields if header is None else header(fields)
        if sign and isinstance(fields, dict) and "digest" in fields:
            rest = {k: v for k, v in fields.items() if k != "digest"}
            fields["digest"] = checkpoint._digest(rest, {n.removesuffix(".npy"): (m,) for n, m in members.items()})
        out = io.BytesIO()
        np.save(out, np.frombuffer(json.dumps(fields).encode(), np.uint8))
        members["header.npy"] = out.getvalue()
    with zipfile.ZipFile(path, "w", compression) as z:
        for name, data in members.items():
            z.writestr(name, data)


def npy(array) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def said_to_be(shape: str, descr: str = "<f4", data: bytes = b"") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def make(path: pathlib.Path, what: str) -> pathlib.Path:
    """Makes something at `path` that is no regular file."""
    match what:
        case "a folder":
            path.mkdir()
        case "a named pipe":
            os.mkfifo(path)
        case "a socket":
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(str(path))
        case "a character device":
            path.symlink_to("/dev/zero")
        case "a dangling link to there":
            path.symlink_to("there")
        case "a link that leads back to itself":
            path.symlink_to(path.name)
    return path


SPECIAL = ["a folder", "a named pipe", "a socket", "a character device", "a dangling link to there",
           "a link that leads back to itself"]  # fmt: skip
