"""Maps rows of the format table to quantizers, and quantizers to the oracle's arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
from diptych.common import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    format_by_name,
)
from diptych.common.formats import FormatRow
from diptych.common.quantizers import FROM_ROWS, POW2, RHT, RHT_SIGNS, ROW_AMAX, SQUARE, QuantSpec


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class InventedQuantizer(Quantizer):
    """A quantizer of FP8 with float32 scales in blocks that no format has. The core cannot run it: rules can."""

    block: tuple[int, int]

    @property
    def format(self) -> FormatRow:
        return FormatRow("invented", "float8_e4m3fn", "float32", *self.block, "divide", "transposed", 0.0625)

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(-1, 0, 0.0)


def quantizer(
    fmt: str,
    pow2: bool = False,
    eps: float = 0.0,
    *,
    square: bool = False,
    from_rows: bool = False,
    row_amax: bool = False,
    rht: bool = False,
    rht_signs: bool = False,
    stochastic: bool = False,
    **usage: bool,
) -> Quantizer:
    """Returns a format's quantizer as recipes make it; each option is for formats whose scale rule takes it."""
    row = format_by_name(fmt)
    if row.rule == "two_level":
        return NVFP4Quantizer(
            with_2d_quantization=square,
            row_scaled_nvfp4=row_amax,
            with_rht=rht,
            with_random_sign_mask=rht_signs,
            stochastic_rounding=stochastic,
            **usage,
        )
    if row.rule == "e8m0_ceil":
        return MXFP8Quantizer(fp8_dtype=row.element, with_2d_quantization=square, **usage)
    force = pow2 or from_rows
    options: dict[str, Any] = {"fp8_dtype": row.element, "force_pow_2_scales": force, "amax_epsilon": eps, **usage}
    if row.one_scale:
        return Float8CurrentScalingQuantizer(**options)
    dim = 1 if row.block_rows == 1 else 2
    return Float8BlockQuantizer(block_scaling_dim=dim, columnwise_from_rows=from_rows, **options)


def of_case(case: cases.QuantizeCase, **usage: bool) -> Quantizer:
    """Returns the quantizer of a case; the case's `rng` is an argument of the call."""
    if not cases.has_columnwise(case.format, case.shape):
        usage = {"columnwise": False, **usage}
    return quantizer(case.format, case.pow2, case.eps, **dict.fromkeys(case.variant, True), **usage)


def oracle_options(quant: Quantizer) -> dict[str, Any]:
    """Returns keyword arguments of `oracle.quantize`; the caller adds `rng`, `scale` and given amaxes."""
    _, flags, eps = quant.spec
    named = {
        "pow2": POW2, "square": SQUARE, "row_amax": ROW_AMAX, "rht": RHT, "rht_signs": RHT_SIGNS, "from_rows": FROM_ROWS
    }  # fmt: skip
    options: dict[str, Any] = {name: True for name, flag in named.items() if flags & flag}
    return {**options, "eps": eps, "rowwise": quant.rowwise, "columnwise": quant.columnwise}
