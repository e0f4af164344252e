"""Quantizers: how one tensor is quantized, as a value.

A quantizer names a format row, the options of its scale rule, and which copies are wanted. It is **not** a kernel and
holds no state; `diptych.torch.quantize`, `diptych.jax.quantize` and `diptych.core.quantize` all take the same object.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

from diptych.common.formats import FormatRow, find_format
from diptych.common.value import Value

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class QuantizerRole(Value):
    """What a quantizer is asked for: `tensor` is "input", "weight" or "grad_output"; `module` is free text."""

    module: str = ""
    tensor: str = "input"

    TENSORS: ClassVar[tuple[str, ...]] = ("input", "weight", "grad_output")

    def __post_init__(self) -> None:
        if self.tensor not in self.TENSORS:
            raise ValueError(f"QuantizerRole.tensor must be one of {self.TENSORS}, got {self.tensor!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer(Value):
    """Base of all quantizers.

    **Arguments:** `rowwise`, `columnwise`: which copies to make; at least one. The rowwise copy serves products that
    reduce over the last axis, the columnwise copy those that reduce over the rows.
    """

    rowwise: bool = True
    columnwise: bool = True

    def __post_init__(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError(f"{type(self).__name__}: at least one of rowwise and columnwise must be wanted")
        self.format  # raises for options that name no format  # noqa: B018

    @functools.cached_property
    def format(self) -> FormatRow:
        """The row of the format table. Subclasses say which."""
        raise NotImplementedError(f"{type(self).__name__} must define `format`")

    @functools.cached_property
    def spec(self) -> tuple[int, bool, float]:
        """(format id, pow2, eps): the scalars of the core's QuantSpec."""
        return (self.format.id, False, 0.0)

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """A quantizer that makes these copies instead; None keeps what is. Nothing is mutated."""
        rowwise = self.rowwise if rowwise is None else rowwise
        columnwise = self.columnwise if columnwise is None else columnwise
        if (rowwise, columnwise) == (self.rowwise, self.columnwise):
            return self
        return dataclasses.replace(self, rowwise=rowwise, columnwise=columnwise)


def _check_fp8(owner: object, fp8_dtype: str) -> None:
    if fp8_dtype not in FP8_DTYPES:
        raise ValueError(f"{type(owner).__name__}.fp8_dtype must be one of {FP8_DTYPES}, got {fp8_dtype!r}")


def _check_eps(owner: object, eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{type(owner).__name__}.amax_epsilon must be finite and >= 0, got {eps!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with one float32 scale per tensor, taken from the tensor's own amax (NUMERICS 2).

    **Arguments:** `fp8_dtype`: "float8_e4m3fn" or "float8_e5m2". `force_pow_2_scales`: floor scales to powers of two.
    `amax_epsilon`: lower bound of the amax.
    """

    fp8_dtype: str = "float8_e4m3fn"
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_fp8(self, self.fp8_dtype)
        _check_eps(self, self.amax_epsilon)
        super().__post_init__()

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format(self.fp8_dtype, "float32", (0, 0))

    @functools.cached_property
    def spec(self) -> tuple[int, bool, float]:
        return (self.format.id, self.force_pow_2_scales, float(self.amax_epsilon))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockQuantizer(Quantizer):
    """FP8 with one float32 scale per 1x128 (`block_scaling_dim=1`) or 128x128 (`2`) block (NUMERICS 3).

    **Arguments:** as `Float8CurrentScalingQuantizer`; scales are powers of two by default.
    """

    fp8_dtype: str = "float8_e4m3fn"
    block_scaling_dim: int = 1
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_fp8(self, self.fp8_dtype)
        _check_eps(self, self.amax_epsilon)
        if self.block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer.block_scaling_dim must be 1 or 2, got {self.block_scaling_dim!r}")
        super().__post_init__()

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format(self.fp8_dtype, "float32", (1 if self.block_scaling_dim == 1 else 128, 128))

    @functools.cached_property
    def spec(self) -> tuple[int, bool, float]:
        return (self.format.id, self.force_pow_2_scales, float(self.amax_epsilon))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Quantizer(Quantizer):
    """MXFP8: FP8 with one E8M0 scale per 32 elements along the reduced axis (NUMERICS 4)."""

    fp8_dtype: str = "float8_e4m3fn"

    def __post_init__(self) -> None:
        _check_fp8(self, self.fp8_dtype)
        super().__post_init__()

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format(self.fp8_dtype, "float8_e8m0fnu", (1, 32))
