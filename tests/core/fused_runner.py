"""Calls the norm and activation ops, and quantize with a source, as `runner` calls the others."""

from __future__ import annotations

from typing import Any

import numpy as np

import oracle
from core import runner
from diptych.core import _core

TABLE = _core.fused_table()
NORMS, ACTIVATIONS, SOURCES = TABLE["norm"], TABLE["activation"], TABLE["source"]


def put(be: Any, x: np.ndarray | None, offset: int = 0) -> Any:
    return None if x is None else be.put(x, x.dtype.name, offset)


def norm(
    be: Any, x: np.ndarray, gamma: np.ndarray | None, beta: np.ndarray | None, *, kind: str, eps: float = 1e-5,
    zero_centered: bool = False, dtype: str | None = "float32", offset: int = 0, poison: int = runner.POISON,
) -> dict[str, np.ndarray]:  # fmt: skip
    """mu (layernorm), rsigma and, unless `dtype` is None, y."""
    out, rows = runner.Outputs(be, poison, offset), oracle.fold(x).shape[0]
    mu = out.new("mu", (rows,), "float32") if kind == "layernorm" else None
    rsigma = out.new("rsigma", (rows,), "float32")
    y = None if dtype is None else out.new("y", x.shape, dtype)
    parameters = put(be, gamma, offset), put(be, beta, offset)
    _core.norm(put(be, x, offset), *parameters, mu, rsigma, y, NORMS[kind], eps, zero_centered)
    return out.read()


def norm_grad(
    be: Any, dy: np.ndarray, x: np.ndarray, gamma: np.ndarray, mu: np.ndarray | None, rsigma: np.ndarray, *,
    zero_centered: bool = False, offset: int = 0, poison: int = runner.POISON,
) -> dict[str, np.ndarray]:  # fmt: skip
    """dx, dgamma and, with a mu (layernorm), dbeta."""
    out, rows = runner.Outputs(be, poison, offset), oracle.fold(x).shape
    dx, dgamma = out.new("dx", x.shape, x.dtype.name), out.new("dgamma", gamma.shape, gamma.dtype.name)
    dbeta = None if mu is None else out.new("dbeta", gamma.shape, gamma.dtype.name)
    workspace = out.workspace(_core.norm_grad_workspace_bytes(*rows))
    kind = NORMS["rmsnorm" if mu is None else "layernorm"]
    given = {"dy": dy, "x": x, "gamma": gamma, "mu": mu, "rsigma": rsigma}
    _core.norm_grad(
        **{name: put(be, t, offset) for name, t in given.items()},
        dx=dx,
        dgamma=dgamma,
        dbeta=dbeta,
        workspace=workspace,
        norm=kind,
        zero_centered_gamma=zero_centered,
    )
    read = out.read()
    read.pop("workspace", None)
    return read


def activation(
    be: Any, x: np.ndarray, kind: str, gated: bool, dtype: str, offset: int = 0, poison: int = runner.POISON
) -> np.ndarray:
    out = runner.Outputs(be, poison, offset)
    y = out.new("y", (*x.shape[:-1], x.shape[-1] // (1 + gated)), dtype)
    _core.activation(put(be, x, offset), y, ACTIVATIONS[kind], gated)
    return out.read()["y"]


def activation_grad(
    be: Any, dy: np.ndarray, x: np.ndarray, kind: str, gated: bool, dtype: str, offset: int = 0,
    poison: int = runner.POISON,
) -> np.ndarray:  # fmt: skip
    out = runner.Outputs(be, poison, offset)
    dx = out.new("dx", x.shape, dtype)
    _core.activation_grad(put(be, dy, offset), put(be, x, offset), dx, ACTIVATIONS[kind], gated)
    return out.read()["dx"]


def quantize(
    be: Any, x: np.ndarray, source: tuple[Any, ...] | None, like: dict[str, np.ndarray], fmt: str, *,
    sum_dtype: str | None = None, offset: int = 0, rows: int | None = None, **options: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """`_core.quantize` of a source into buffers like those of an unfused call; amaxes are computed.

    `rows` of what is encoded, where they are not those of x.
    """
    out = runner.Outputs(be, offset=offset)
    dtypes = {"data": runner.payload(fmt), "scale_inv": runner.ROWS[fmt]["scale"], "amax": "float32"}
    names = [f"{side}_{part}" for side in ("rowwise", "columnwise") for part in ("data", "scale_inv")]
    buffers: dict[str, Any] = dict.fromkeys((*names, "amax", "columnwise_amax"))
    for name, array in like.items():
        part = name.removeprefix("rowwise_").removeprefix("columnwise_")
        buffers[name] = out.new(name, array.shape, dtypes[part])
    for name, dtype in (("scale", np.float32), ("rng", np.int32)):
        value = options.get(name)
        buffers[name] = None if value is None else be.put(np.asarray(value, dtype).reshape(-1), np.dtype(dtype).name)
    folded, cols = oracle.fold(x).shape
    encoded = folded if rows is None else rows
    cols //= 2 if source and source[0] == SOURCES["activation"] and source[2] else 1
    if sum_dtype:
        buffers["column_sum"] = out.new("column_sum", (cols,), sum_dtype)
        buffers["workspace"] = out.workspace(_core.column_sum_workspace_bytes(encoded, cols))
    _core.quantize(
        put(be, x, offset),
        format=runner.IDS[fmt],
        flags=runner.flags(options),
        eps=options.get("eps", 0.0),
        amax_mode=runner.COMPUTE,
        source=source,
        **buffers,
    )
    read = out.read()
    read.pop("workspace", None)
    return read
