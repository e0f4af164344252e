"""A file with a step's values: a safetensors file, read as a memory map, whose tensors are NumPy arrays of bits.

The file is the length of its header as 8 bytes, the header as JSON (each tensor's dtype, shape and place) and the
tensors' bytes. Tensors of wider elements come first, so that each is aligned.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from diptych.lab import files
from diptych.lab.traces.dtypes import STORED, DType, bits_of
from diptych.lab.traces.schema import TraceError, check_shape, from_json, parse

LONGEST_HEADER = 100_000_000  # the limit of the safetensors format


class Tensor(NamedTuple):
    """A tensor as its dtype and its `bits`: unsigned integers of the dtype's width, in the tensor's shape."""

    dtype: DType
    bits: np.ndarray

    @staticmethod
    def of(x: np.ndarray, dtype: str | None = None) -> Tensor:
        """Returns the tensor of an array, or of its bits if `dtype` is given. **Raises** the errors of `bits_of`."""
        return Tensor(*bits_of(x, dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]


def write(path: pathlib.Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a temporary file, syncs it and renames it to `path`. **Raises** FileError if it cannot be written."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.nbytes)
    header: dict[str, Any] = {"__metadata__": {"format": "diptych-trace"}}
    end = 0
    for name, (dtype, bits) in ordered:
        begin, end = end, end + bits.nbytes
        header[name] = {"dtype": dtype.code, "shape": list(bits.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.replacing(path) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, (_, bits) in ordered:
            f.write(bits.reshape(-1).view(np.uint8).data)


def read(path: pathlib.Path) -> dict[str, Tensor]:
    """Maps a file. The tensors are views of the file, whose pages are read when they are used.

    **Raises** TraceError that names the file and the tensor if the file is not exactly as `write` makes it: every byte
    behind the header must belong to one tensor.
    """
    try:
        with files.reading(path, links=False) as f:
            f.seek(0, 2)
            data = np.asarray(np.memmap(f, np.uint8, "r") if f.tell() else np.zeros(0, np.uint8))
    except files.FileError as e:
        raise TraceError(str(e)) from None
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(data.size - 8, LONGEST_HEADER):
        raise TraceError(f"{path}: is damaged: of {data.size} bytes, {length} would be its header")
    header = parse(data[8 : 8 + length].tobytes(), f"{path}: header")
    if not isinstance(header, dict):
        raise TraceError(f"{path}: header: must be an object")
    metadata = header.pop("__metadata__", {})
    from_json(Mapping[str, str], metadata, f"{path}: __metadata__")
    entries = {n: from_json(_Entry, entry, f"{path}: tensor {n[:200]!r}") for n, entry in header.items()}
    return _mapped(path, entries, data[8 + length :])


def release(tensors: Mapping[str, Tensor]) -> None:
    """Gives back the memory of a mapped file, whose pages are read again when they are next used."""
    for tensor in tensors.values():
        base: Any = tensor.bits
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            base.madvise(mmap.MADV_DONTNEED)
            return


def _mapped(path: pathlib.Path, entries: dict[str, _Entry], data: np.ndarray) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        where = f"{path}: tensor {name[:200]!r}"
        dtype = STORED.get(entry.dtype)
        if dtype is None:
            raise TraceError(f"{where}: dtype: is unknown: {entry.dtype[:40]!r}")
        try:
            check_shape(entry.shape, dtype.nbytes)
        except ValueError as e:
            raise TraceError(f"{where}: {e}") from None
        nbytes = math.prod(entry.shape) * dtype.nbytes
        if entry.data_offsets == (end, end + nbytes) and end + nbytes > data.size:
            raise TraceError(f"{where}: is cut off: it ends at byte {end + nbytes} of {data.size} behind the header")
        if entry.data_offsets != (end, end + nbytes):
            raise TraceError(
                f"{where}: data_offsets: are {str(list(entry.data_offsets))[:80]}, must be {[end, end + nbytes]}, "
                f"since the tensors of the file's {data.size} bytes neither overlap nor leave gaps"
            )
        found[name] = Tensor(dtype, data[end : end + nbytes].view(dtype.bits).reshape(entry.shape))
        end += nbytes
    if end != data.size:
        raise TraceError(f"{path}: is damaged: its tensors end at byte {end} of {data.size} behind the header")
    return found
