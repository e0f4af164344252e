"""`report`: says which products a function computes, on which kernels, and which of them stay in high precision.

Layers in JAX are functions, so the report is one of a traced call: it reads the jaxpr, in which diptych's products are
primitives with their formats, and all others are dot_general and convolutions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from diptych.common.errors import ArgumentError
from diptych.common.formats import format_by_name
from diptych.core import _kernels
from diptych.jax.jaxprs.flat import jaxprs
from diptych.jax.primitives import gemm as gemm_ops
from diptych.jax.primitives.ffi import target
from diptych.jax.primitives.register import batch_shape

HIGH = "high precision"
_PLAIN = ("dot_general", "conv_general_dilated")
_GEMMS = {(False, False): "fprop", (False, True): "dgrad", (True, True): "wgrad"}  # by columnwise copies of a and b


@dataclasses.dataclass(frozen=True)
class ProductRow:
    """One product of a traced call. `where`: the scopes around it, such as flax's modules, with the transforms that
    made it. `op`: the primitive. `product`: "fprop", "dgrad" or "wgrad" by the copies that it reads, or empty. `level`:
    "native", "emulated", "high precision", or "missing" where no kernel takes it. `kernel`: its name in the kernel
    table, or empty. `formats`: of both operands; their dtypes in high precision. `mnk`: its extents; empty for a
    grouped product, symbolic extents, dot_general and convolutions. `runs`: how often it runs in a call; None in a loop
    that ends by its values. `note`: what the kernel table says about it."""

    where: str
    op: str
    product: str
    level: str
    kernel: str
    formats: tuple[str, str]
    mnk: tuple[int, ...]
    runs: int | None
    note: str


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """The products of a traced call on one backend, `rows`, in the jaxpr's order. `str()` prints a table with one line
    for products that are equal but for their scopes; `json()` returns plain values."""

    backend: str
    rows: tuple[ProductRow, ...]

    @property
    def levels(self) -> dict[str, int]:
        """The counts of products by level; those in loops that end by their values count once."""
        counts: collections.Counter[str] = collections.Counter()
        for row in self.rows:
            counts[row.level] += 1 if row.runs is None else row.runs
        return dict(counts)

    def json(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        rows = [{**row, "formats": list(row["formats"]), "mnk": list(row["mnk"])} for row in rows]
        return {"backend": self.backend, "levels": self.levels, "rows": rows}

    def __str__(self) -> str:
        counts = ", ".join([f"{count} {level}" for level, count in self.levels.items()]) or "none"
        lines = [f"report: products of a call on {self.backend}: {counts}"]
        equal: dict[tuple[Any, ...], list[ProductRow]] = {}
        for row in self.rows:
            equal.setdefault(dataclasses.astuple(dataclasses.replace(row, where="", runs=0)), []).append(row)
        for found in equal.values():
            row = found[0]
            runs = None if any([r.runs is None for r in found]) else sum([r.runs or 0 for r in found])
            places = list(dict.fromkeys([r.where for r in found if r.where]))
            names = f"; {places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else "") if places else ""
            extents = f" {'x'.join(map(str, row.mnk))}" if row.mnk else ""
            note = f": {row.note}" if row.note and row.level != "native" else ""
            said = f"{row.op}{f' ({row.product})' if row.product else ''} {' x '.join(row.formats)}{extents}"
            kernel = f"; {row.kernel}{note}" if row.kernel or note else ""
            lines.append(f"  {row.level:<14} {'any number of' if runs is None else runs} x {said}{kernel}{names}")
        return "\n".join(lines)


def report(f: Callable[..., Any], *args: Any, backend: str | None = None, **kwargs: Any) -> ProgramReport:
    """Traces a call and returns which products it computes, on which kernels, natively or emulated, and which stay in
    high precision. Nothing is computed.

    Give the function that a step calls, such as `jax.value_and_grad(loss)`: a loss alone has no products of backward.
    Kernels are those that dispatch takes on the backend for the formats and extents; operands at addresses that are no
    multiple of 16, which run emulated on GPUs, are not seen. In a sharded call extents are those of whole arrays,
    outside of shard_map. All branches of a cond are listed, and products whose result nothing reads, which XLA leaves
    out.

    **Arguments:** `f`: a function of arrays. `args`, `kwargs`: its arguments, or `jax.ShapeDtypeStruct`s of them.
    `backend`: "cpu" or "gpu"; None is `jax.default_backend()`.

    **Returns:** a `ProgramReport`; `print` it, or read its `rows`.

    **Raises:** ArgumentError, a TypeError, if `f` cannot be called; ValueError for another backend, or "gpu" where the
    core finds no GPU; what tracing `f` raises.
    """
    if not callable(f):
        raise ArgumentError(f"report: f must be a function, got {type(f).__name__}")
    platform = jax.default_backend() if backend is None else backend
    device = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}.get(platform)
    if device is None:
        raise ValueError(f'report: backend must be "cpu" or "gpu", got {platform!r}')
    try:
        arch = _kernels.arch_of(device, 0)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"report: backend is {platform!r}, and the core finds no GPU: {error}") from error
    closed = jax.make_jaxpr(f)(*args, **kwargs)
    found = [_row(eqn, where, runs, device, arch) for eqn, where, runs in _products(closed.jaxpr, "", 1)]
    return ProgramReport("cpu" if device == "cpu" else f"gpu (sm_{arch})", tuple(found))


def _products(jaxpr: Any, around: str, runs: int | None) -> Iterator[tuple[Any, str, int | None]]:
    """Yields the equations that are products, with the scopes around them and how often they run."""
    ours = (target("gemm"), target("grouped_gemm"))
    for eqn in jaxpr.eqns:
        where = "/".join([part for part in (around, str(eqn.source_info.name_stack)) if part])
        name = eqn.primitive.name
        if name in ours or name in _PLAIN:
            yield eqn, where, runs
            continue
        inner = runs
        if name == "while":
            inner = None
        elif name == "scan" and runs is not None:
            inner = runs * eqn.params["length"]
        for body in jaxprs(eqn.params.values()):
            yield from _products(body, where, inner)


def _row(eqn: Any, where: str, runs: int | None, device: str, arch: int) -> ProductRow:
    name, avals, params = eqn.primitive.name, [v.aval for v in eqn.invars], eqn.params
    if name in _PLAIN:
        dtypes = (str(avals[0].dtype), str(avals[1].dtype))
        return ProductRow(where, name, "", HIGH, "", dtypes, (), runs, "")
    a, b, batch = params["a"], params["b"], params["batch"]
    formats, product = (a[0], b[0]), _GEMMS.get((a[1], b[1]), "")
    if runs is not None:
        runs *= math.prod(batch_shape(tuple(avals), batch))
    mnk: tuple[Any, ...] = gemm_ops.gemm_sizes(avals, batch, a, b)[:3] if name == target("gemm") else ()
    op = name.removeprefix(target(""))
    if mnk and all([isinstance(extent, int) for extent in mnk]):
        copies = [(format_by_name(fmt), columnwise) for fmt, columnwise in (a, b)]
        found = _kernels.of_copies(copies[0], copies[1], mnk, params["out_dtype"], device, 0, params["options"])
    else:  # groups lie on the device, and symbolic extents are not known yet
        mnk, found = (), _kernels.any_shape(op, formats, device, arch)
    return ProductRow(where, op, product, found["level"], found["kernel"], formats, mnk, runs, found["note"])
