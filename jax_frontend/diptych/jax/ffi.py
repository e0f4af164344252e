"""The door to the XLA FFI handlers: finds and loads their library, registers them, and builds their attributes.

Every attribute struct is built here and nowhere else, from NumPy scalars of fixed width: XLA decodes them by exact
name, number and type, and a Python float would become float64 as soon as 64-bit mode is on.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxlib.version import __version__ as JAXLIB

from diptych.core import _core

OPS = ("amax", "quantize", "dequantize", "gemm", "bias_grad")
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # JAX's name of a lowering platform: the FFI registry's name
ATTRIBUTES_VERSION = 1
MAX_BATCH_RANK = 8

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps with DIPTYCH_JAX=on and jaxlib installed"


class Headers(NamedTuple):
    """What the handlers were compiled with: jaxlib's version, and (major, minor) of the XLA FFI."""

    jaxlib: str
    ffi: tuple[int, int]
    library: str


class Batch(NamedTuple):
    """Which operands carry which axes of enclosing vmaps.

    `axes` has one bit mask per operand, bit 0 for the innermost of `rank` axes. An operand has its axes in front, the
    outermost first; a result has all of them.
    """

    rank: int
    axes: tuple[int, ...]

    @classmethod
    def none(cls, operands: int) -> Batch:
        return cls(0, (0,) * operands)

    def outer(self, mapped: list[bool]) -> Batch:
        """One more axis around these, which the operands marked in `mapped` carry."""
        if self.rank == MAX_BATCH_RANK:
            raise NotImplementedError(f"diptych's ops run under at most {MAX_BATCH_RANK} nested vmaps")
        bit = 1 << self.rank
        return Batch(self.rank + 1, tuple(m | (bit if b else 0) for m, b in zip(self.axes, mapped, strict=True)))


def target(op: str) -> str:
    """Name of the custom call of `op`."""
    return f"diptych_{op}"


def library_path() -> pathlib.Path:
    """Where the handlers lie: beside the compiled core, which in an editable install is not beside this file."""
    return pathlib.Path(_core.__file__).parent.parent / "jax" / "libdiptych_jax.so"


def runtime_ffi_version() -> tuple[int, int]:
    """(major, minor) of the running jaxlib's XLA FFI, from the header that it ships.

    Registering a newer handler does not fail: it breaks the whole backend when that starts, so it must be known before.
    """
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
        return int(found["MAJOR"]), int(found["MINOR"])
    except (OSError, KeyError) as error:
        raise ImportError(f"jaxlib {JAXLIB} does not say which XLA FFI it has: {header}: {error}") from error


@functools.cache
def load() -> Headers:
    """Loads the handlers and registers them for CPU and CUDA. Starts no backend and loads no CUDA library.

    **Raises** ImportError saying what to do if the library was not built, or if this jaxlib is older than its headers.
    """
    path = library_path()
    if not path.exists():
        raise ImportError(
            f"diptych was built without its JAX part ({path} is missing): jaxlib was not there at build time, or "
            f"DIPTYCH_JAX was off. Rebuild it: {_REBUILD}"
        )
    library = ctypes.CDLL(str(path))
    library.diptych_jax_headers.restype = ctypes.c_char_p
    version = library.diptych_jax_ffi_version()
    headers = Headers(library.diptych_jax_headers().decode(), (version // 1000, version % 1000), str(path))
    if library.diptych_jax_attributes_version() != ATTRIBUTES_VERSION:
        raise ImportError(
            f"{path} has attributes of version {library.diptych_jax_attributes_version()}, this Python part of version "
            f"{ATTRIBUTES_VERSION}: they come from two builds. Rebuild: {_REBUILD}"
        )
    runtime = runtime_ffi_version()
    if headers.ffi > runtime:
        raise ImportError(
            f"diptych's handlers were compiled with the headers of jaxlib {headers.jaxlib} (XLA FFI "
            f"{headers.ffi[0]}.{headers.ffi[1]}), and jaxlib {JAXLIB} takes up to "
            f"{runtime[0]}.{runtime[1]}: a runtime takes older headers, not newer ones. "
            f"Update jaxlib, or rebuild against this one: {_REBUILD}"
        )
    for op in OPS:
        for platform, registry in PLATFORMS.items():
            handler = jax.ffi.pycapsule(getattr(library, f"{target(op)}_{platform}"))
            jax.ffi.register_ffi_target(target(op), handler, platform=registry)
    return headers


def header_version() -> str:
    """Version of the jaxlib whose headers the handlers were compiled with, as `diptych doctor` prints it."""
    return load().jaxlib


def export_safety_checks() -> list[Any]:
    """What `jax.export.export(..., disabled_checks=...)` needs for programs that hold diptych's custom calls."""
    from jax import export  # not part of `import jax`

    return [export.DisabledSafetyCheck.custom_call(target(op)) for op in OPS]


# --- attributes: one dictionary per op, the twins of csrc/attributes.h ---


def _common(batch: Batch) -> dict[str, np.generic]:
    packed = sum(mask << (8 * i) for i, mask in enumerate(batch.axes))
    return {"version": np.int32(ATTRIBUTES_VERSION), "batch_rank": np.int32(batch.rank), "axes": np.int64(packed)}


def amax_attributes(batch: Batch) -> dict[str, np.generic]:
    return _common(batch)


def quantize_attributes(
    batch: Batch, spec: tuple[int, bool, float], amax_ready: bool, rowwise: bool, columnwise: bool
) -> dict[str, np.generic]:
    format_id, pow2, eps = spec
    return _common(batch) | {
        "format": np.int32(format_id),
        "pow2": np.int32(pow2),
        "eps": np.float32(eps),
        "amax_ready": np.int32(amax_ready),
        "rowwise": np.int32(rowwise),
        "columnwise": np.int32(columnwise),
    }


def dequantize_attributes(batch: Batch, format_id: int, columnwise: bool) -> dict[str, np.generic]:
    return _common(batch) | {"format": np.int32(format_id), "columnwise": np.int32(columnwise)}


def gemm_attributes(
    batch: Batch,
    a: tuple[int, bool],
    b: tuple[int, bool],
    has_bias: bool,
    has_c: bool,
    alpha: float,
    beta: float,
    fast_accum: bool,
) -> dict[str, np.generic]:
    return _common(batch) | {
        "a_format": np.int32(a[0]),
        "a_columnwise": np.int32(a[1]),
        "b_format": np.int32(b[0]),
        "b_columnwise": np.int32(b[1]),
        "has_bias": np.int32(has_bias),
        "has_c": np.int32(has_c),
        "alpha": np.float32(alpha),
        "beta": np.float32(beta),
        "fast_accum": np.int32(fast_accum),
    }


def bias_grad_attributes(batch: Batch) -> dict[str, np.generic]:
    return _common(batch)
