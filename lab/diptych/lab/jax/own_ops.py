"""diptych's operations in the lab's table: what a recorded call computed, and its computation on given operands.

The names and options of a call are those of `diptych.jax.graph.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diptych.common.gemm_options import GemmOptions
from diptych.jax.graph import ops
from diptych.jax.primitives import quantize as quantize_ops
from diptych.jax.primitives.ffi import Batch, Source
from diptych.jax.primitives.register import PRIMITIVES
from diptych.lab.replay.op import Op, Operands, ReplayError, require_results

Array = jax.Array


class Call(NamedTuple):
    """A call as a row of the table. `options`: None if it cannot be computed again."""

    row: str
    options: dict[str, Any] | None
    operands: dict[str, Any]
    results: dict[str, Any]


def described(op: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> Call:
    """Describes a call. `op`: the primitive's name without its prefix. `ins`, `outs`: its operands and results."""
    operands, results = ops.names(op, params, len(ins), len(outs))
    named = dict(zip(operands, ins, strict=True)), dict(zip(results, outs, strict=True))
    return Call(op, ops.options(op, params, outs), *named)


def replayed(op: Op, x: dict[str, Array]) -> dict[str, Array]:
    """Computes an operation on these operands. Returns all of its results, by name.

    **Raises** ReplayError for operands or results that are not those of the operation, and the errors of the operation
    for operands that do not fit.
    """
    x = Operands(_widened(op, x))
    params = _params(op.kind, op.options, x)
    names, _ = ops.names(op.kind, params, len(x), 0)
    outs = PRIMITIVES[op.kind].bind(*[x[n] for n in names], batch=Batch.none(len(names)), **params)
    _, results = ops.names(op.kind, params, len(x), len(outs))
    given = {n: x[n] for n in ("amax", "columnwise_amax") if n in x} if params.get("mode") == quantize_ops.GIVEN else {}
    return require_results(op, dict(zip(results, outs, strict=True)) | given)


def _widened(op: Op, x: dict[str, Array]) -> dict[str, Array]:
    """The primitive activation_grad returns x's dtype. A wider result is that of x in the wider dtype."""
    if op.kind != "activation_grad" or "x" not in x:
        return x
    have, want = x["x"].dtype, jnp.dtype(op.options["dtype"])
    if jnp.promote_types(have, want) != want:
        raise ReplayError(f"activation_grad: JAX computes x's dtype, {have}, or a wider one; the result has {want}")
    return {**x, "x": x["x"].astype(want)}


def _params(kind: str, options: dict[str, Any], x: dict[str, Array]) -> dict[str, Any]:
    """Returns a primitive's parameters, but for `batch`."""
    params = dict(options)
    params |= {k: float(options[k]).hex() for k in ("alpha", "beta", "fp8_max") if k in options}
    if options.get("source") is not None:
        params["source"] = Source(*options["source"])
    if kind in ("quantize", "quantize_stack"):
        given = "amax" in x or "columnwise_amax" in x
        mode = quantize_ops.ACCUMULATE if "pending" in x else quantize_ops.GIVEN if given else quantize_ops.COMPUTE
        params |= {"mode": mode, "has_scale": "scale" in x, "has_rng": "rng" in x, "as_bytes": False}
    elif kind in ("gemm", "grouped_gemm"):
        params["options"] = GemmOptions(*[params.pop(name) for name in GemmOptions._fields])
        params |= {"has_bias": "bias" in x, "has_c": "acc" in x}
    elif kind == "scale_update":
        params |= {"has_reduced": "reduced" in x, "has_amax": "amax" in x}
    elif kind == "norm":
        params["dtype"] = x["x"].dtype.name if "gamma" in x else ""
    elif kind == "norm_grad":
        params["has_dbeta"] = params.pop("has_beta")
    elif kind in ("permute", "unpermute"):
        params["has_probs"] = "probs" in x
        params |= {"has_permuted_dprobs": "permuted_dprobs" in x} if kind == "unpermute" else {}
    elif kind == "activation_grad":
        del params["dtype"]
    elif kind == "unpermute_grad":
        params["has_dprobs"] = "x" in x
    return params
