"""The names of operands and results of diptych's primitives, as sites of a trace."""

from __future__ import annotations

from typing import Any

from diptych.common.ops import shapes
from diptych.jax.primitives import checks
from diptych.jax.primitives import quantize as quantize_ops


def names(op: str, params: dict[str, Any], operands: list[Any], results: int) -> tuple[list[str], list[str]]:
    """Returns the names of an op's operands and results, in order; of ops that are not listed, "in0", "out0", ..."""
    found, outs = _listed(op, params, operands)
    found += [f"in{i}" for i in range(len(found), len(operands))]
    outs += [f"out{i}" for i in range(len(outs), results)]
    return found[: len(operands)], outs[:results]


def _listed(op: str, params: dict[str, Any], operands: list[Any]) -> tuple[list[str], list[str]]:
    if op == "quantize":
        buffers = shapes.quantize_buffers(operands[0].shape, params["quantizer"])
        outs = [b.name for b in buffers]
        given = [n for n in outs if n.endswith("amax")] if params["mode"] == quantize_ops.GIVEN else []
        ins = ["x", *given, *["pending"] * (params["mode"] == quantize_ops.ACCUMULATE)]
        return [*ins, *["scale"] * params["has_scale"], *["rng"] * params["has_rng"]], outs
    if op == "gemm":
        ins = [f"{side}_{part}" for side in "ab" for part in ("data", "scale_inv", "amax")[: _length(params[side][0])]]
        return [*ins, *["bias"] * params["has_bias"], *["c"] * params["has_c"]], ["d"]
    if op == "dequantize":
        return ["data", "scale_inv", "amax"][: len(operands)], ["out"]
    if op == "scale_update":
        ins = ["history", "scale", *["reduced"] * params["has_reduced"], *["amax"] * params["has_amax"]]
        return ins, ["history", "scale"]
    single = {"amax": (["x"], ["out", "columnwise_out"]), "bias_grad": (["dy"], ["out"]), "hash": (["x"], ["out"])}
    ins, outs = single.get(op, ([], []))
    return list(ins), list(outs)


def _length(format: str) -> int:
    return checks.copy_length(format)
