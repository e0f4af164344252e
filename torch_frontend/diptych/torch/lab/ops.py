"""What the sites of diptych's ops are called."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diptych.common.ops import shapes

NAMES = {
    "quantize_delayed": "quantize",
    "quantize_again": "quantize",
    "quantize_fused": "quantize",
    "quantize_fused_delayed": "quantize",
    "amax_fused": "amax",
    "gemm_into": "gemm",
    "grouped_gemm_into": "grouped_gemm",
}
"""Names in traces of ops that have another one in torch."""
UNRECORDED = {"hash", "rng_take", "empty", "log_amax"}
# Results of ops that write to operands, which have no others.
_WRITTEN = {
    "gemm_into": {"d": "acc"},
    "grouped_gemm_into": {"d": "acc"},
    "scale_update": {"history": "history", "scale": "scale"},
}


def results(op: str, given: dict[str, Any], out: Any) -> dict[str, Tensor]:
    """Returns an op's results by name.

    **Arguments:** `op`: its name in torch. `given`: its arguments by name. `out`: what it returned.
    """
    if op in _WRITTEN:
        return {name: given[argument] for name, argument in _WRITTEN[op].items()}
    found = list(out) if isinstance(out, (tuple, list)) else [out]
    if "quantizer" in given:
        found = [t for t in found if t.numel()]  # copies that are not made are empty
        names = [b.name for b in shapes.quantize_buffers(tuple(given["x"].shape), given["quantizer"])]
        names = names[: len(found)]  # the last is the amax, which not every op returns
    else:
        names = ["d" if op.endswith("gemm") else "out"]
    if len(names) != len(found):
        names = [f"out[{i}]" for i in range(len(found))]
    return dict(zip(names, found, strict=True))
