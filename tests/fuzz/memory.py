"""Memory that ends where an inaccessible page begins, so that an access beyond it ends the process.

The same pages are there twice, once to read only: a write to an input ends the process too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
from core import runner

from fuzz.draw import Draw

PAGE = mmap.PAGESIZE
_NONE, _READ, _WRITE = 0, mmap.PROT_READ, mmap.PROT_WRITE
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = mmap.MAP_SHARED, mmap.MAP_PRIVATE, 0x10, mmap.MAP_ANONYMOUS
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def _map(at: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    address = _LIBC.mmap(at, nbytes, protection, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return address


class Region:
    """`nbytes` of whole pages with an inaccessible page on both sides: bytes to write, and the same to read only."""

    def __init__(self, pages: int) -> None:
        self.nbytes = pages * PAGE
        fd = os.memfd_create("fuzz")
        os.ftruncate(fd, self.nbytes)
        self.writable, self.readable = (self._view(fd, p) for p in (_READ | _WRITE, _READ))
        self.readable.flags.writeable = False
        os.close(fd)

    def _view(self, fd: int, protection: int) -> np.ndarray:
        around = _map(None, self.nbytes + 2 * PAGE, _NONE, _PRIVATE | _ANONYMOUS, -1)
        at = _map(around + PAGE, self.nbytes, protection, _SHARED | _FIXED, fd)
        return np.frombuffer((ctypes.c_ubyte * self.nbytes).from_address(at), np.uint8)


class Pool:
    """Regions that calls use in turn; `reset` gives all of them back."""

    SIZES = (1, 4, 16, 64, 256)

    def __init__(self) -> None:
        self._free: dict[int, list[Region]] = {pages: [] for pages in self.SIZES}
        self._used: list[tuple[int, Region]] = []

    def take(self, nbytes: int) -> Region:
        pages = next((p for p in self.SIZES if nbytes <= p * PAGE), 0)
        if not pages:
            raise MemoryError(f"{nbytes} bytes are more than a region of {self.SIZES[-1]} pages has")
        region = self._free[pages].pop() if self._free[pages] else Region(pages)
        self._used.append((pages, region))
        return region

    def reset(self) -> None:
        for pages, region in self._used:
            self._free[pages].append(region)
        self._used.clear()


class Output:
    """Bytes of a region that a call may write, all others of the region being checked."""

    def __init__(self, region: Region, start: int, nbytes: int) -> None:
        self.region, self.start, self.nbytes = region, start, nbytes
        self.bytes = region.writable[start : start + nbytes]

    def poison(self, byte: int, kept: np.ndarray | None = None) -> None:
        self.region.writable[:] = byte
        if kept is not None:
            self.bytes[:] = kept

    def stray(self, byte: int) -> bool:
        """Returns whether bytes outside the region's writable part changed."""
        raw, end = self.region.writable, self.start + self.nbytes
        return bool((raw[: self.start] != byte).any() or (raw[end:] != byte).any())


class Guarded(runner.Numpy):
    """A backend of the runners of tests/core whose operands lie at the ends, or beginnings, of regions."""

    def __init__(self, pool: Pool, d: Draw) -> None:
        self.pool, self.d = pool, d
        self.outputs: list[Output] = []
        self.raw: dict[int, Output] = {}

    def place(self, nbytes: int) -> tuple[Region, int]:
        region = self.pool.take(nbytes)
        return region, region.nbytes - nbytes if self.d.maybe(0.7) else 0

    def put(self, array: np.ndarray, dtype: str, offset: int = 0) -> Any:
        region, start = self.place(array.nbytes)
        region.writable[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        return self._pair(region.readable[start : start + array.nbytes], array.shape, dtype)

    def poisoned(self, nbytes: int, poison: int) -> np.ndarray:
        """Returns bytes filled with `poison`. The runner puts guards of its own on both sides of those it uses."""
        return np.full(nbytes, poison, np.uint8)

    def part(self, raw: np.ndarray, start: int, nbytes: int, shape: tuple[int, ...], dtype: str) -> Any:
        """An output of its own memory, with what the runner has put into `raw`."""
        region, at = self.place(nbytes)
        out = Output(region, at, nbytes)
        out.poison(runner.POISON, raw[start : start + nbytes])
        self.outputs.append(out)
        self.raw[id(raw)] = out
        out.host = raw, start  # type: ignore[attr-defined]
        return self._pair(out.bytes, shape, dtype)

    def fetch(self, raw: np.ndarray) -> np.ndarray:
        out = self.raw[id(raw)]
        host, start = out.host  # type: ignore[attr-defined]
        host[start : start + out.nbytes] = out.bytes
        return host
