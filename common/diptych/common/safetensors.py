"""Safetensors files: which files a checkpoint has, and where in them each tensor lies. The panels read the bytes.

A file is the length of its header as 8 bytes, the header as JSON (each tensor's dtype, shape and place) and the bytes
of the tensors. A folder holds `model.safetensors`, or several files and an index, `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diptych.common.errors import CheckpointError

DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""The dtypes of files by their names there, as torch, jax and ml_dtypes call them."""

_BYTES = {"bool": 1, "bfloat16": 2}
_INDEX, _ONE, _LONGEST_HEADER = ".safetensors.index.json", "model.safetensors", 100_000_000


class Entry(NamedTuple):
    """One tensor of a file. `dtype`: a value of `DTYPES`. `begin`, `end`: its bytes, counted from the file's first.
    `pieces`: those of a tensor that lies in pieces, in the order of its rows; its own place is then the first one's."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    pieces: tuple[Entry, ...] = ()


def joined(pieces: Sequence[Entry], shape: tuple[int, ...]) -> Entry | None:
    """Returns the tensor of a shape [.., K] whose rows are those of matrices [n, K], one after the other; None if these
    do not make it up."""
    first = pieces[0]
    alike = all([p.dtype == first.dtype and len(p.shape) == 2 and p.shape[1] == shape[-1] for p in pieces])
    if not alike or sum([p.shape[0] for p in pieces]) != math.prod(shape[:-1]):
        return None
    return first._replace(shape=shape, pieces=tuple(pieces))


def element_bytes(dtype: str) -> int:
    """Returns the size of one element of a dtype of `DTYPES`."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    return 1 if dtype.startswith("float8") else int("".join([c for c in dtype if c.isdigit()])) // 8


def file_entries(path: str | Path) -> dict[str, Entry]:
    """Returns the tensors of one file by name. **Raises** CheckpointError for a file that is damaged; OSError."""
    path = Path(path)
    size = os.stat(path).st_size
    with open(path, "rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        try:
            if size < 8 or start > size or start > _LONGEST_HEADER:
                raise ValueError(f"its header ends at byte {start} of {size}")
            found = json.loads(f.read(start - 8))
            return {name: _entry(path, name, e, start, size) for name, e in found.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{path}: is no safetensors file, or a damaged one: {e!r}") from e


def _entry(path: Path, name: str, given: Mapping[str, Any], start: int, size: int) -> Entry:
    if given["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} is {given['dtype']}; known are {', '.join(DTYPES)}")
    dtype, shape = DTYPES[given["dtype"]], tuple([int(n) for n in given["shape"]])
    begin, end = [start + int(place) for place in given["data_offsets"]]
    if not start <= begin <= end <= size or end - begin != math.prod(shape) * element_bytes(dtype):
        raise ValueError(f"{name!r}, {dtype} {list(shape)}, lies at bytes {begin} to {end} of {size}")
    return Entry(path, dtype, shape, begin, end)


def checkpoint_entries(path: str | Path) -> dict[str, Entry]:
    """Returns the tensors of a checkpoint by name: a file, an index of files, or a folder with one of these.

    In a folder `model.safetensors` goes before an index, and either before a file under another name.

    **Raises:** CheckpointError for files that are damaged, absent, or not known by one name; OSError.
    """
    path = Path(path)
    if path.is_dir():
        path = _main_file(path)
    elif not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.name.endswith(".json"):
        return file_entries(path)
    try:
        places = {str(n): str(f) for n, f in json.loads(path.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: is no index of safetensors files: {e!r}") from e
    files = {}
    for name in sorted(set(places.values())):
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path}: names the file {name!r}, which does not exist")
        files[name] = file_entries(path.parent / name)
    if lacking := [n for n, file in places.items() if n not in files[file]]:
        raise CheckpointError(f"{path}: {lacking[0]!r} is not in {places[lacking[0]]!r}")
    return {n: files[file][n] for n, file in places.items()}


def _main_file(folder: Path) -> Path:
    for known in (_ONE, f"model{_INDEX}"):
        if (folder / known).is_file():
            return folder / known
    for end in (_INDEX, ".safetensors"):
        found = sorted(folder.glob(f"*{end}"))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join([f.name for f in found[:4]])
            raise CheckpointError(f"{folder}: holds several of *{end} ({names}, ...); give the path of one")
    raise CheckpointError(f"{folder}: holds no *.safetensors file")
