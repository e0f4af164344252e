"""The quantizer of a row of the format table, by name."""

from __future__ import annotations

from typing import Any

from diptych.common import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
    format_by_name,
)


def quantizer(fmt: str, pow2: bool = False, eps: float = 0.0, **usage: bool) -> Quantizer:
    """As a recipe would make it; `pow2` and `eps` are for formats whose scale rule takes them."""
    row = format_by_name(fmt)
    if row.rule != "divide":
        return MXFP8Quantizer(fp8_dtype=row.element, **usage)
    options: dict[str, Any] = {"fp8_dtype": row.element, "force_pow_2_scales": pow2, "amax_epsilon": eps, **usage}
    if row.per_tensor:
        return Float8CurrentScalingQuantizer(**options)
    return Float8BlockQuantizer(block_scaling_dim=1 if row.block_rows == 1 else 2, **options)
