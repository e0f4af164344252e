"""Recipes: which quantizer each tensor of a layer gets and how its three products accumulate, as values.

Names, fields and defaults are TransformerEngine's where the thing is the same. No field is read from the environment.

| recipe | input, weight | grad_output | scales |
|---|---|---|---|
| `Float8CurrentScaling` | E4M3 | E5M2 (HYBRID) | float32 per tensor |
| `Float8BlockScaling` | E4M3 1x128, E4M3 128x128 | E4M3 1x128 | power of two in float32 per block |
| `MXFP8BlockScaling` | E4M3 | E4M3 | E8M0 per 32 elements |
"""

from __future__ import annotations

import dataclasses
import enum

from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
    QuantizerRole,
)
from diptych.common.value import Value


class Format(enum.Enum):
    """Element of the forward and of the backward tensors."""

    E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
    E5M2 = ("float8_e5m2", "float8_e5m2")
    HYBRID = ("float8_e4m3fn", "float8_e5m2")

    def element(self, role: QuantizerRole) -> str:
        return self.value[1 if role.tensor == "grad_output" else 0]


@dataclasses.dataclass(frozen=True)
class QParams(Value):
    """Options of a scale: floored to a power of two, and the lower bound of its amax."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclasses.dataclass(frozen=True)
class MMParams(Value):
    """Options of a product. `use_split_accumulator=False` allows Hopper's fast, reduced accumulation."""

    use_split_accumulator: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Value):
    """Base of all recipes."""

    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    def __post_init__(self) -> None:
        for tensor in QuantizerRole.TENSORS:  # options that name no format fail here, not in the first step
            quantizer = self.quantizer(QuantizerRole(tensor=tensor))
            if not quantizer.format.per_tensor and any(self.fast_accum(p) for p in ("fprop", "dgrad", "wgrad")):
                raise ValueError(
                    f"{type(self).__name__}: fast accumulation exists for per-tensor FP8 only, "
                    f"and {tensor} is {quantizer.format.name}; leave use_split_accumulator=True"
                )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """The quantizer of one tensor of a module, making both copies; see `Quantizer.with_usage`."""
        raise NotImplementedError(f"{type(self).__name__} must define `quantizer`")

    def fast_accum(self, product: str) -> bool:
        """Whether `product` ("fprop", "dgrad" or "wgrad") may accumulate in reduced precision."""
        return not getattr(self, f"fp8_gemm_{product}").use_split_accumulator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8, scales from each tensor's own amax. Default element HYBRID: E4M3 forward, E5M2 gradients."""

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = _params(self, role)
        return Float8CurrentScalingQuantizer(
            fp8_dtype=self.fp8_format.element(role),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """FP8 in blocks: 1x128 for inputs and gradients, 128x128 for weights, E4M3 everywhere, power-of-two scales."""

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = QParams(power_2_scale=True)
    fp8_quant_fwd_weight: QParams = QParams(power_2_scale=True)
    fp8_quant_bwd_grad: QParams = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = _params(self, role)
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return Float8BlockQuantizer(
            fp8_dtype=self.fp8_format.element(role),
            block_scaling_dim=dims[role.tensor],
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8, E4M3 everywhere: one E8M0 scale per 32 elements along the reduced axis."""

    fp8_format: Format = Format.E4M3

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return MXFP8Quantizer(fp8_dtype=self.fp8_format.element(role))


def _params(recipe: Float8CurrentScaling | Float8BlockScaling, role: QuantizerRole) -> QParams:
    return {
        "input": recipe.fp8_quant_fwd_inp,
        "weight": recipe.fp8_quant_fwd_weight,
        "grad_output": recipe.fp8_quant_bwd_grad,
    }[role.tensor]


DEFAULT_RECIPE: Recipe = Float8CurrentScaling()

RECIPES: dict[str, Recipe] = {
    "fp8-current": Float8CurrentScaling(),
    "fp8-block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
"""The recipes with their default fields by the names that commands use."""


def recipe_by_name(name: str) -> Recipe:
    """One of `RECIPES`. **Raises** ValueError with the known names."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    return RECIPES[name]
