"""Loads the library of XLA FFI handlers, registers the handlers, and builds the attributes of their calls.

All attributes are built in this file, from NumPy scalars of fixed width: XLA decodes them by exact name, number and
type, and a Python float would become float64 in 64-bit mode.
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

from diptych.common.gemm_options import GemmOptions
from diptych.common.quantizers import QuantSpec
from diptych.core import _core

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # JAX's name of a lowering platform: the FFI registry's name
ATTRIBUTES_VERSION = 5
MAX_BATCH_RANK = 8

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps with DIPTYCH_JAX=on and jaxlib installed"


class Handlers(NamedTuple):
    """The library of handlers: its path, the ops that have one, and the versions of the headers that it was compiled
    with: jaxlib's, and (major, minor) of the XLA FFI."""

    jaxlib: str
    ffi: tuple[int, int]
    library: str
    ops: tuple[str, ...]


class Source(NamedTuple):
    """An input of amax and quantize that is computed from x: unrounded values, or rows of x permuted.

    `kind`: "norm", "activation", "activation_grad" or "permuted". `which`: the norm's or activation's name. `option`:
    zero_centered_gamma of a norm, gated of an activation. The source's operands come after all others. They are, in
    the order of kinds: gamma, [beta], [mu: layernorm] and rsigma; none; dy; row_id_map and row_source.
    """

    kind: str
    which: str = ""
    option: bool = False
    has_beta: bool = False


FUSED = _core.fused_table()
"""Numbers of norms, activations and sources, by name."""
MOE = _core.moe_table()
"""Numbers of the kinds of routing maps, by name, and the limits of the ops that move rows."""
GROUP_KINDS = _core.group_kinds()
_COPY = ("format", "columnwise", "has_amax")


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
        """Returns these axes within one more, which the operands marked in `mapped` carry."""
        if self.rank == MAX_BATCH_RANK:
            raise NotImplementedError(f"diptych's ops run under at most {MAX_BATCH_RANK} nested vmaps")
        bit = 1 << self.rank
        return Batch(self.rank + 1, tuple(m | (bit if b else 0) for m, b in zip(self.axes, mapped, strict=True)))


def target(op: str) -> str:
    """Name of the custom call of `op`."""
    return f"diptych_{op}"


def library_path() -> pathlib.Path:
    """Path of the handlers' library: in the compiled core's folder, which an editable install puts elsewhere."""
    return pathlib.Path(_core.__file__).parent.parent / "jax" / "libdiptych_jax.so"


def runtime_ffi_version() -> tuple[int, int]:
    """(major, minor) of the running jaxlib's XLA FFI, from the header that it ships.

    Registering a handler built against newer headers does not fail, but breaks the whole backend when it starts, so the
    version must be checked before.
    """
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
        return int(found["MAJOR"]), int(found["MINOR"])
    except (OSError, KeyError) as error:
        raise ImportError(f"jaxlib {JAXLIB} does not say which XLA FFI it has: {header}: {error}") from error


@functools.cache
def load() -> Handlers:
    """Loads the handlers and registers them for CPU and CUDA. Starts no backend and loads no CUDA library.

    **Raises** ImportError with a remedy if the library was not built, or if this jaxlib is older than its headers.
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
    ops = dict.fromkeys(row["op"] for row in _core.kernel_table())
    found = tuple([op for op in ops if hasattr(library, f"{target(op)}_cpu")])
    headers = Handlers(library.diptych_jax_headers().decode(), (version // 1000, version % 1000), str(path), found)
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
    for op in headers.ops:
        for platform, registry in PLATFORMS.items():
            handler = jax.ffi.pycapsule(getattr(library, f"{target(op)}_{platform}"))
            jax.ffi.register_ffi_target(target(op), handler, platform=registry)
    return headers


def header_version() -> str:
    """Version of the jaxlib whose headers the handlers were compiled with, as `diptych doctor` prints it."""
    return load().jaxlib


def export_safety_checks() -> list[Any]:
    """Returns `disabled_checks` of `jax.export.export` for programs with diptych's custom calls."""
    from jax import export  # not part of `import jax`

    return [export.DisabledSafetyCheck.custom_call(target(op)) for op in load().ops]


# --- attributes: one dictionary per op, the twins of csrc/attributes.h ---


def _common(batch: Batch) -> dict[str, np.generic]:
    packed = np.uint64(sum(mask << (8 * i) for i, mask in enumerate(batch.axes))).astype(np.int64)
    return {"version": np.int32(ATTRIBUTES_VERSION), "batch_rank": np.int32(batch.rank), "axes": packed}


def _ints(**values: int) -> dict[str, np.generic]:
    return {name: np.int32(value) for name, value in values.items()}


def _of_source(source: Source | None) -> dict[str, np.generic]:
    if source is None:
        return _ints(source=FUSED["source"]["plain"], kind=0, option=0, has_beta=0)
    table = FUSED["norm" if source.kind == "norm" else "activation"]
    kind, which = FUSED["source"][source.kind], 0 if source.kind == "permuted" else table[source.which]
    return _ints(source=kind, kind=which, option=source.option, has_beta=source.has_beta)


def amax_attributes(batch: Batch, flags: int, columnwise: bool, source: Source | None = None) -> dict[str, np.generic]:
    return _common(batch) | _ints(flags=flags, columnwise=columnwise) | _of_source(source)


def quantize_attributes(
    batch: Batch, spec: QuantSpec, amax_mode: int, source: Source | None = None, column_sum: bool = False, **there: bool
) -> dict[str, np.generic]:
    """Returns quantize's attributes. `there`: all of has_amax, has_columnwise_amax, has_scale, has_rng, rowwise,
    columnwise."""
    return (
        _common(batch)
        | _of_source(source)
        | _ints(column_sum=column_sum)
        | _ints(format=spec.format_id, flags=spec.flags, amax_mode=amax_mode, **there)
        | {"eps": np.float32(spec.eps)}
    )


def scale_update_attributes(
    batch: Batch, has_reduced: bool, has_amax: bool, fp8_max: float, margin: int, most_recent: bool
) -> dict[str, np.generic]:
    ints = _ints(has_reduced=has_reduced, has_amax=has_amax, margin=margin, most_recent=most_recent)
    return _common(batch) | ints | {"fp8_max": np.float32(fp8_max)}


def dequantize_attributes(batch: Batch, format_id: int, columnwise: bool, has_amax: bool) -> dict[str, np.generic]:
    return _common(batch) | _ints(format=format_id, columnwise=columnwise, has_amax=has_amax)


def _copies(a: tuple[int, bool, bool], b: tuple[int, bool, bool]) -> dict[str, np.generic]:
    named = {
        f"{side}_{what}": value for side, copy in (("a", a), ("b", b)) for what, value in zip(_COPY, copy, strict=True)
    }
    return _ints(**named)


def gemm_attributes(
    batch: Batch,
    a: tuple[int, bool, bool],
    b: tuple[int, bool, bool],
    has_bias: bool,
    has_c: bool,
    alpha: float,
    beta: float,
    options: GemmOptions,
) -> dict[str, np.generic]:
    """Returns gemm's attributes. `a`, `b`: (format id, whether the copy is columnwise, whether it has an amax)."""
    ints = _copies(a, b) | _ints(has_bias=has_bias, has_c=has_c, **options._asdict())
    return _common(batch) | ints | {"alpha": np.float32(alpha), "beta": np.float32(beta)}


def bias_grad_attributes(batch: Batch) -> dict[str, np.generic]:
    return _common(batch)


def norm_attributes(
    batch: Batch, which: str, eps: float, zero_centered_gamma: bool, has_y: bool, has_beta: bool
) -> dict[str, np.generic]:
    ints = _ints(kind=FUSED["norm"][which], zero_centered_gamma=zero_centered_gamma, has_y=has_y, has_beta=has_beta)
    return _common(batch) | ints | {"eps": np.float32(eps)}


def norm_grad_attributes(batch: Batch, which: str, zero_centered_gamma: bool, has_dbeta: bool) -> dict[str, np.generic]:
    kind = FUSED["norm"][which]
    return _common(batch) | _ints(kind=kind, zero_centered_gamma=zero_centered_gamma, has_dbeta=has_dbeta)


def activation_attributes(batch: Batch, which: str, gated: bool) -> dict[str, np.generic]:
    """The attributes of activation and activation_grad."""
    return _common(batch) | _ints(kind=FUSED["activation"][which], gated=gated)


def permute_map_attributes(batch: Batch, kind: str, align: int) -> dict[str, np.generic]:
    return _common(batch) | _ints(kind=MOE["routing_map"][kind], align=align)


def row_map_attributes(batch: Batch) -> dict[str, np.generic]:
    """The attributes of chunk_map and invert_map."""
    return _common(batch)


def permute_attributes(
    batch: Batch, fills: tuple[int, ...], has_probs: bool, zero_prob_is_padding: bool
) -> dict[str, np.generic]:
    """Returns permute's attributes. `fills`: for each tensor, four bytes of absent rows as an unsigned integer."""
    all_fills = (*fills, *[0] * (MOE["max_planes"] - len(fills)))
    bits = {f"fill{i}": np.uint32(fill).view(np.int32) for i, fill in enumerate(all_fills)}
    ints = _ints(planes=len(fills), has_probs=has_probs, zero_prob_is_padding=zero_prob_is_padding)
    return _common(batch) | ints | bits


def permute_columns_attributes(batch: Batch, slots: int) -> dict[str, np.generic]:
    return _common(batch) | _ints(slots=slots)


def unpermute_attributes(batch: Batch, has_probs: bool, has_permuted_dprobs: bool) -> dict[str, np.generic]:
    return _common(batch) | _ints(has_probs=has_probs, has_permuted_dprobs=has_permuted_dprobs)


def unpermute_grad_attributes(batch: Batch, has_dprobs: bool) -> dict[str, np.generic]:
    return _common(batch) | _ints(has_dprobs=has_dprobs)


def quantize_stack_attributes(batch: Batch, spec: QuantSpec, amax_mode: int, **there: bool) -> dict[str, np.generic]:
    """Returns quantize_stack's attributes. `there`: as in `quantize_attributes`."""
    ints = _ints(format=spec.format_id, flags=spec.flags, amax_mode=amax_mode, **there)
    return _common(batch) | ints | {"eps": np.float32(spec.eps)}


def grouped_gemm_attributes(
    batch: Batch,
    a: tuple[int, bool, bool],
    b: tuple[int, bool, bool],
    has_bias: bool,
    has_c: bool,
    kind: str,
    align: int,
    rotated: bool,
    alpha: float,
    options: GemmOptions,
) -> dict[str, np.generic]:
    """Returns grouped_gemm's attributes. `a`, `b`: as in `gemm_attributes`. `kind`: "rows" or "depth"."""
    ints = _copies(a, b) | _ints(has_bias=has_bias, has_c=has_c, kind=GROUP_KINDS[kind], align=align, rotated=rotated)
    return _common(batch) | ints | _ints(**options._asdict()) | {"alpha": np.float32(alpha)}


def grouped_bias_grad_attributes(batch: Batch) -> dict[str, np.generic]:
    return _common(batch)


def hash_attributes(batch: Batch) -> dict[str, np.generic]:
    return _common(batch)
