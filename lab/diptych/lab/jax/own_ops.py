"""diptych's operations as rows of the lab's table: descriptions of recorded calls, and their replay on given operands.

Operands and results have the names that PyTorch's ops give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.formats import format_by_name
from diptych.common.gemm_options import GemmOptions
from diptych.jax.primitives import checks
from diptych.jax.primitives import quantize as quantize_ops
from diptych.jax.primitives.ffi import Batch, Source
from diptych.jax.primitives.register import PRIMITIVES
from diptych.lab.replay.op import Op, Operands, ReplayError, require_results

Array = jax.Array


# --- recorded calls ---

_OPERANDS: dict[str, tuple[str, ...]] = {
    "norm": ("x", "gamma", "beta"),
    "activation": ("x",),
    "activation_grad": ("dy", "x"),
    "bias_grad": ("dy",),
    "grouped_bias_grad": ("dy", "offsets"),
    "dequantize": ("data", "scale_inv", "amax"),
    "hash": ("x",),
    "statistics": ("x", "result", "largest"),
    "permute_map": ("routing",),
    "chunk_map": ("split_sizes", "sorted_index"),
    "invert_map": ("row_id_map",),
    "permute_columns": ("x", "row_source"),
    "unpermute_grad": ("dy", "row_id_map", "row_source", "probs", "x"),
}
"""The names of operands by op, in order. The last ones may be absent."""
_RESULTS: dict[str, tuple[str, ...]] = {
    "gemm": ("d",),
    "grouped_gemm": ("d",),
    "scale_update": ("history", "scale"),
    "invert_map": ("out[1]", "out[0]"),  # PyTorch's op has the other order
}


def names(op: str, params: dict[str, Any], operands: int, results: int) -> tuple[list[str], list[str]]:
    """Returns the names of an op's operands and results, in order. Results without names of their own are "out", or
    "out[0]", "out[1]", ... if there are several. `operands`, `results`: their numbers."""
    if op in ("quantize", "quantize_stack"):
        buffers = params["quantizer"].buffer_names()
        amaxes = [n for n in buffers if n.endswith("amax")]
        state = {quantize_ops.GIVEN: amaxes, quantize_ops.ACCUMULATE: ["pending"]}.get(params["mode"], [])
        state += [*["scale"] * params["has_scale"], *["rng"] * params["has_rng"]]
        outs = [n for n in buffers if params["mode"] != quantize_ops.GIVEN or n not in amaxes]
        return ["x", *state, *_of_source(params.get("source"))], outs + ["column_sum"] * (results - len(outs))
    ins, outs = _operands(op, params, operands), list(_RESULTS.get(op, ()))
    if op == "norm" and params["which"] == "layernorm":  # PyTorch's op returns rsigma first
        outs = ["out[1]", "out[0]", "out[2]"][:results]
    elif not outs:
        outs = ["out"] if results == 1 else [f"out[{i}]" for i in range(results)]
    return ins, outs[:results]


def _operands(op: str, params: dict[str, Any], count: int) -> list[str]:
    has = lambda name, part: [name] * bool(params[part])  # noqa: E731
    if op == "amax":
        return ["x", *_of_source(params.get("source"))]
    if op in ("gemm", "grouped_gemm"):
        copies = [f"{s}_{p}" for s in "ab" for p in _OPERANDS["dequantize"][: checks.copy_length(params[s][0])]]
        return [*copies, *["offsets"] * (op == "grouped_gemm"), *has("bias", "has_bias"), *has("acc", "has_c")]
    if op == "norm_grad":
        return ["dy", "x", "gamma", *_statistics(params["which"])]
    if op == "permute":
        planes = [f"planes[{i}]" for i in range(len(params["fills"]))]
        return ["row_id_map", "row_source", *planes, *has("probs", "has_probs")]
    if op == "unpermute":
        return ["x", "row_id_map", *has("probs", "has_probs"), *has("permuted_dprobs", "has_permuted_dprobs")]
    if op == "scale_update":
        return ["history", "scale", *has("reduced", "has_reduced"), *has("amax", "has_amax")]
    return list(_OPERANDS[op][:count])


def _statistics(which: str) -> list[str]:
    return ["mu", "rsigma"] if which == "layernorm" else ["rsigma"]


def _of_source(source: Source | None) -> list[str]:
    if source is None or source.kind == "activation":
        return []
    if source.kind == "norm":
        return ["gamma", *["beta"] * source.has_beta, *_statistics(source.which)]
    return ["dy"] if source.kind == "activation_grad" else ["row_id_map", "row_source"]


def stored_dtype(params: dict[str, Any], name: str) -> str | None:
    """Returns the format's dtype of a payload or of scales, which calls may pass as uint8 arrays of their bytes; None
    for other operands and results. `name`: the name of the operand or result."""
    part = {"data": "data", "inv": "scale"}.get(name.rsplit("_", 1)[-1])
    if part is None:
        return None
    if "quantizer" in params:
        return getattr(params["quantizer"].format, part)
    return getattr(format_by_name(params["format"] if "format" in params else params[name[0]][0]), part)


def copies(op: str, params: dict[str, Any], results: dict[str, Any]) -> dict[str, checks.Copy]:
    """Returns the copies that a call of quantize made, by the names of their payloads. It returns none for a source,
    whose values were never stored, none for several examples under vmap, and no copy that was transformed before it was
    quantized."""
    if op != "quantize" or params["source"] is not None or params["batch"].rank:
        return {}
    quantizer, found = params["quantizer"], {}
    form, amaxes = quantizer.format, {"rowwise": "amax", "columnwise": "columnwise_amax"}
    for side, amax in amaxes.items():
        present = f"{side}_data" in results and (not form.two_level or amax in results)
        if present and not (side == "columnwise" and getattr(quantizer, "with_rht", False)):
            parts = results[f"{side}_data"], results[f"{side}_scale_inv"], results[amax] if form.two_level else None
            found[f"{side}_data"] = checks.Copy(*parts, form.name, side == "columnwise")
    return found


_PRODUCT = ("a", "b", "alpha", "out_dtype", *GemmOptions._fields)
_OPTIONS: dict[str, tuple[str, ...]] = {
    "quantize": ("quantizer", "source", "column_sum"),
    "quantize_stack": ("quantizer",),
    "amax": ("flags", "columnwise", "source"),
    "dequantize": ("format", "columnwise", "dtype"),
    "scale_update": ("fp8_max", "margin", "most_recent"),
    "gemm": (*_PRODUCT, "beta"),
    "grouped_gemm": (*_PRODUCT, "align", "rotated"),
    "bias_grad": ("dtype",),
    "grouped_bias_grad": ("dtype",),
    "norm": ("which", "eps", "zero_centered_gamma"),
    "norm_grad": ("which", "zero_centered_gamma", "has_beta"),
    "activation": ("which", "gated"),
    "activation_grad": ("which", "gated", "dtype"),
    "permute_map": ("kind", "experts", "rows", "align"),
    "chunk_map": ("tokens",),
    "invert_map": ("rows",),
    "permute": ("fills", "zero_prob_is_padding"),
    "permute_columns": ("slots",),
    "unpermute": (),
    "unpermute_grad": (),
}


def options(op: str, params: dict[str, Any], results: Sequence[Any]) -> dict[str, Any] | None:
    """Returns the options of the row `op` of the lab's table; None for an op without a row, or for a call on several
    examples under vmap. `results`: the call's results."""
    if op not in _OPTIONS or params["batch"].rank:
        return None
    of = {k: int(v) if isinstance(v, np.integer) else v for k, v in params.items()}
    of |= {k: float.fromhex(params[k]) for k in ("alpha", "beta", "fp8_max") if k in params}
    of |= params["options"]._asdict() if "options" in params else {}
    of |= {"dtype": results[0].dtype.name} if op == "activation_grad" else {}
    of |= {"has_beta": params.get("has_dbeta"), "source": tuple(params.get("source") or ()) or None}
    return {name: of[name] for name in _OPTIONS[op]}


# --- replay ---


class Call(NamedTuple):
    """A call as a row of the table. `options`: the row's options, None if the call cannot be computed again."""

    row: str
    options: dict[str, Any] | None
    operands: dict[str, Any]
    results: dict[str, Any]


def described(op: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> Call:
    """Returns the description of a call. `op`: the primitive's name without its prefix. `ins`: operands. `outs`:
    results."""
    operands, results = names(op, params, len(ins), len(outs))
    named = dict(zip(operands, ins, strict=True)), dict(zip(results, outs, strict=True))
    return Call(op, options(op, params, outs), *named)


def replayed(op: Op, x: dict[str, Array]) -> dict[str, Array]:
    """Computes an operation on these operands. Returns all of its results by name.

    **Raises** ReplayError if operands are missing or a recorded result is not computed, and the operation's own errors
    if the operands do not fit.
    """
    x = Operands(_widened(op, x))
    params = _params(op.kind, op.options, x)
    operands, _ = names(op.kind, params, len(x), 0)
    outs = PRIMITIVES[op.kind].bind(*[x[n] for n in operands], batch=Batch.none(len(operands)), **params)
    _, results = names(op.kind, params, len(x), len(outs))
    given = {n: x[n] for n in ("amax", "columnwise_amax") if n in x} if params.get("mode") == quantize_ops.GIVEN else {}
    return require_results(op, dict(zip(results, outs, strict=True)) | given)


def _widened(op: Op, x: dict[str, Array]) -> dict[str, Array]:
    """Returns the operands with x cast to a wider result's dtype, since the primitive activation_grad returns x's
    dtype."""
    if op.kind != "activation_grad" or "x" not in x:
        return x
    have, want = x["x"].dtype, jnp.dtype(op.options["dtype"])
    if jnp.promote_types(have, want) != want:
        raise ReplayError(
            f"activation_grad: JAX computes a result in x's dtype, {have}, or a wider one, and the recorded result has "
            f"{want}; replay it in torch"
        )
    return {**x, "x": x["x"].astype(want)}


def _params(kind: str, options: dict[str, Any], x: dict[str, Array]) -> dict[str, Any]:
    """Returns a primitive's parameters, except `batch`."""
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
