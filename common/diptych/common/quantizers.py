"""Quantizers: how one tensor is quantized, as a value.

A quantizer names a format row, the options of its scale rule, and the copies to make. It is **not** a kernel and
holds no state: scales of delayed scaling and random states of stochastic rounding are arguments of each call.
`diptych.torch.quantize`, `diptych.jax.quantize` and `diptych.core.quantize` all take the same object.

A custom quantizer derives from `Quantizer`, or from one of the classes below, and overrides `quantize_impl`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from diptych.common.formats import FORMATS, FormatRow, find_format
from diptych.common.value import Value, check_types, field_names

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")

# Options of the core's quantize, as `QuantFlag` in ops.h numbers them.
POW2, SQUARE, ROW_AMAX, RHT, RHT_SIGNS, STOCHASTIC, FROM_ROWS = 1, 2, 4, 8, 16, 32, 64


class QuantSpec(NamedTuple):
    """The scalars of the core's QuantSpec."""

    format_id: int
    flags: int
    eps: float


# By id of a format: the id of the one that has square blocks of its block_cols, or its own.
SQUARE_OF = tuple(
    next((s.id for s in FORMATS if (s.element, s.scale, s.rule, s.block_rows, s.block_cols)
          == (f.element, f.scale, f.rule, f.block_cols, f.block_cols)), f.id)
    for f in FORMATS
)  # fmt: skip


def copy_format_id(spec: QuantSpec, columnwise: bool) -> int:
    """Returns the id of one copy's format. Dynamo can call this on a quantizer's spec, unlike methods that read
    `format`."""
    return SQUARE_OF[spec.format_id] if columnwise and spec.flags & FROM_ROWS else spec.format_id


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class QuantizerRole(Value):
    """The use of a tensor for which a recipe chooses a quantizer.

    TransformerEngine's names are taken too: `module_type` for `module`, `tensor_type` for `tensor`.

    **Arguments:** `module`: the kind of module, such as "linear". `tensor`: "input", "weight" or "grad_output", the
    operands of its products; "output", "grad_input" or "grad_weight", their results. `gemm`: the product that reads or
    makes the tensor, "fprop", "dgrad" or "wgrad"; empty: any. `name`: the module's own name, if it has one.

    **Raises** ValueError for an unknown tensor or product, or a product without that tensor.
    """

    module: str = ""
    tensor: str = "input"
    gemm: str = ""
    name: str = ""

    OPERANDS: ClassVar[tuple[str, ...]] = ("input", "weight", "grad_output")
    RESULTS: ClassVar[tuple[str, ...]] = ("output", "grad_input", "grad_weight")
    GEMMS: ClassVar[dict[str, tuple[str, str, str]]] = {  # a, b and the result of each product
        "fprop": ("input", "weight", "output"),
        "dgrad": ("grad_output", "weight", "grad_input"),
        "wgrad": ("grad_output", "input", "grad_weight"),
    }

    FUSED: ClassVar[tuple[str, ...]] = ("layernorm_linear", "layernorm_mlp")  # modules around linear layers

    def __init__(
        self,
        module: str | None = None,
        tensor: str | None = None,
        gemm: str = "",
        name: str = "",
        *,
        module_type: str | None = None,
        tensor_type: str | None = None,
    ) -> None:
        for own, theirs in ((module, module_type), (tensor, tensor_type)):
            if own is not None and theirs is not None and own != theirs:
                raise ValueError(f"QuantizerRole: {own!r} and {theirs!r} are given for one thing by its two names")
        module, tensor = module_type if module is None else module, tensor_type if tensor is None else tensor
        given = ("" if module is None else module, "input" if tensor is None else tensor, gemm, name)
        for field, value in zip(field_names(QuantizerRole), given, strict=True):
            object.__setattr__(self, field, value)
        check_types(self)
        if self.tensor not in self.OPERANDS + self.RESULTS:
            raise ValueError(f"QuantizerRole.tensor must be one of {self.OPERANDS + self.RESULTS}, got {self.tensor!r}")
        if self.gemm and self.tensor not in self.GEMMS.get(self.gemm, ()):
            raise ValueError(
                f"QuantizerRole: {self.tensor!r} is no tensor of the product {self.gemm!r}; products are {self.GEMMS}"
            )

    @property
    def module_type(self) -> str:
        """The kind of the product's layer: "linear" in modules that fuse a linear layer with others too, as in
        TransformerEngine; `module` for other modules."""
        return "linear" if self.module in self.FUSED else self.module

    @property
    def tensor_type(self) -> str:
        """`tensor`, by TransformerEngine's name."""
        return self.tensor


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Quantizer(Value):
    """Base of all quantizers.

    Quantizers of a custom class are compared by identity unless the class overrides `_value_fields`; only then can
    torch.compile and jax.jit treat equal objects as the same, and rebuild them.

    **Arguments:** `rowwise`, `columnwise`: which copies to make; at least one. The rowwise copy serves products that
    reduce over the last axis, the columnwise copy those that reduce over the rows.
    """

    rowwise: bool = True
    columnwise: bool = True

    # Class attributes, not properties, because each eager call reads them and should not pay for a function call.
    needs_scale: ClassVar[bool] = False  # whether a call must be given the scale to use (delayed scaling)
    custom: ClassVar[bool] = False  # whether `quantize_impl` is overridden

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.custom = cls.quantize_impl is not Quantizer.quantize_impl

    def __post_init__(self) -> None:
        check_types(self)
        if not (self.rowwise or self.columnwise):
            raise ValueError(f"{type(self).__name__}: at least one of rowwise and columnwise must be wanted")
        self.format  # raises for options that name no format  # noqa: B018

    def _value_fields(self) -> tuple[str, ...] | None:
        return None

    @functools.cached_property
    def format(self) -> FormatRow:
        """The format's row of the format table. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} must define `format`")

    def copy_format(self, columnwise: bool) -> FormatRow:
        """Returns the format of one of the copies: `format`, but square blocks for a columnwise copy made from rows."""
        if columnwise and self.spec.flags & FROM_ROWS:
            return FORMATS[copy_format_id(self.spec, True)]
        return self.format

    @functools.cached_property
    def spec(self) -> QuantSpec:
        """(format id, flags, eps), as the core takes them."""
        return QuantSpec(self.format.id, 0, 0.0)

    def buffer_names(self) -> tuple[str, ...]:
        """Names of the buffers that a quantized tensor of this quantizer has, in the order of `quantize_buffers`.

        This is a method, because Dynamo can call a method of a constant but cannot read its properties.
        """
        sides = [side for side, wanted in (("rowwise", self.rowwise), ("columnwise", self.columnwise)) if wanted]
        names = [f"{side}_{part}" for side in sides for part in ("data", "scale_inv")]
        if self.format.one_scale or (self.format.two_level and self.rowwise):
            names.append("amax")
        if self.format.two_level and self.columnwise:
            names.append("columnwise_amax")
        return tuple(names)

    def copies_agree(self) -> bool:
        """Whether both copies hold the same values, so that one of them determines the other."""
        return self.format.block_rows == self.format.block_cols or bool(self.spec.flags & SQUARE)

    @property
    def needs_rng(self) -> bool:
        """Whether a call must be given the state of a random generator (stochastic rounding)."""
        return bool(self.spec.flags & STOCHASTIC)

    def quantize_impl(self, x: Any, quantize: Callable[..., Any]) -> Any:
        """Quantizes x; custom quantizers override it. It is not called for the classes of this module.

        **Arguments:** `x`: a tensor of the calling framework. `quantize`: that framework's `quantize`. Call it on a
        tensor computed from x, with a built-in quantizer whose copies (rowwise, columnwise) are those of `self`.

        **Returns:** the result of `quantize`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `quantize_impl`")

    def implementation(self) -> Callable[..., Any] | None:
        """Returns the plain function `quantize_impl` if it is overridden, else None.

        This is a method, because Dynamo evaluates methods of a graph's constants in every version, but not all
        properties.
        """
        return type(self).quantize_impl if self.custom else None

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """Returns a quantizer that makes these copies instead; None keeps `self`'s choice. `self` does not change.

        **Raises** ValueError if neither copy is wanted.
        """
        rowwise = self.rowwise if rowwise is None else rowwise
        columnwise = self.columnwise if columnwise is None else columnwise
        if (rowwise, columnwise) == (self.rowwise, self.columnwise):
            return self
        if not (rowwise or columnwise):
            raise ValueError(f"{type(self).__name__}: at least one of rowwise and columnwise must be wanted")
        kept = {name: held for name, held in vars(self).items() if name not in self._cached}
        return self._rebuild(**kept | {"rowwise": rowwise, "columnwise": columnwise})


class _BuiltIn(Quantizer):
    """Base of the quantizers of this module, whose value is that of their dataclass fields.

    A subclass with further attributes is compared by identity unless it overrides `_value_fields`.
    """

    def _value_fields(self) -> tuple[str, ...] | None:
        fields = field_names(type(self))
        if type(self).__module__ == __name__:
            return fields
        return fields if {*fields, *self._cached} >= vars(self).keys() else None


def _check_fp8(owner: Any) -> None:
    if owner.fp8_dtype not in FP8_DTYPES:
        raise ValueError(f"{type(owner).__name__}.fp8_dtype must be one of {FP8_DTYPES}, got {owner.fp8_dtype!r}")


def _check_eps(owner: Any) -> None:
    if not (isinstance(owner.amax_epsilon, (int, float)) and math.isfinite(owner.amax_epsilon)):
        raise ValueError(f"{type(owner).__name__}.amax_epsilon must be finite, got {owner.amax_epsilon!r}")
    if owner.amax_epsilon < 0:
        raise ValueError(f"{type(owner).__name__}.amax_epsilon must be >= 0, got {owner.amax_epsilon!r}")


def check_history(owner: Any) -> None:
    """**Raises** ValueError for options of delayed scaling that nothing can follow. `owner`: a quantizer or a recipe,
    which the message names."""
    name = type(owner).__name__
    if owner.amax_history_len < 1:
        raise ValueError(f"{name}.amax_history_len must be >= 1, got {owner.amax_history_len}")
    if not -64 <= owner.margin <= 64:
        raise ValueError(f"{name}.margin must lie in -64..64, got {owner.margin}")
    if not (callable(owner.amax_compute_algo) or owner.amax_compute_algo in ("max", "most_recent")):
        raise ValueError(
            f"{name}.amax_compute_algo must be 'max', 'most_recent' or a function "
            f"(history [n, L], last [n]) -> amax [n], got {owner.amax_compute_algo!r}"
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Float8Quantizer(_BuiltIn):
    """Delayed scaling: FP8 with one float32 scale per tensor, which is an argument of the call (NUMERICS 2).

    **Arguments:** `fp8_dtype`: "float8_e4m3fn" or "float8_e5m2". `margin`, `amax_history_len`, `amax_compute_algo`:
    options of the update of scales, see `DelayedScaling`; quantizing itself does not read them.
    """

    fp8_dtype: str = "float8_e4m3fn"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"

    needs_scale = True

    def __post_init__(self) -> None:
        _check_fp8(self)
        super().__post_init__()
        check_history(self)

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format(self.fp8_dtype, "float32", (0, 0))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Float8CurrentScalingQuantizer(_BuiltIn):
    """FP8 with one float32 scale per tensor, taken from the tensor's own amax (NUMERICS 2).

    **Arguments:** `fp8_dtype`: "float8_e4m3fn" or "float8_e5m2". `force_pow_2_scales`: floor scales to powers of two.
    `amax_epsilon`: lower bound of the amax.
    """

    fp8_dtype: str = "float8_e4m3fn"
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_fp8(self)
        _check_eps(self)
        super().__post_init__()

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format(self.fp8_dtype, "float32", (0, 0))

    @functools.cached_property
    def spec(self) -> QuantSpec:
        return QuantSpec(self.format.id, POW2 * self.force_pow_2_scales, float(self.amax_epsilon))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Float8BlockQuantizer(_BuiltIn):
    """FP8 with one float32 scale per 1x128 (`block_scaling_dim=1`) or 128x128 (`2`) block (NUMERICS 3).

    **Arguments:** as `Float8CurrentScalingQuantizer`; scales are powers of two by default. `columnwise_from_rows`: the
    columnwise copy has 128x128 blocks, and is a function of the rowwise copy's payload and scales alone; for 1x128
    blocks with powers of two.

    **Raises** ValueError for options that exclude each other.
    """

    fp8_dtype: str = "float8_e4m3fn"
    block_scaling_dim: int = 1
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0
    columnwise_from_rows: bool = False

    def __post_init__(self) -> None:
        _check_fp8(self)
        _check_eps(self)
        if self.block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer.block_scaling_dim must be 1 or 2, got {self.block_scaling_dim!r}")
        if self.columnwise_from_rows and (self.block_scaling_dim == 2 or not self.force_pow_2_scales):
            raise ValueError(
                "Float8BlockQuantizer.columnwise_from_rows (of a recipe: wgrad_input_square): 128x128 blocks are made "
                "of 1x128 ones by powers of two; leave block_scaling_dim=1 (x_block_scaling_dim) and "
                f"force_pow_2_scales=True (power_2_scale), or the option out; got {self.block_scaling_dim} and "
                f"{self.force_pow_2_scales}"
            )
        super().__post_init__()

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format(self.fp8_dtype, "float32", (1 if self.block_scaling_dim == 1 else 128, 128))

    @functools.cached_property
    def spec(self) -> QuantSpec:
        flags = POW2 * self.force_pow_2_scales | FROM_ROWS * (self.columnwise_from_rows and self.columnwise)
        return QuantSpec(self.format.id, flags, float(self.amax_epsilon))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MXFP8Quantizer(_BuiltIn):
    """MXFP8: FP8 with one E8M0 scale per 32 elements along the reduced axis (NUMERICS 4).

    **Arguments:** `with_2d_quantization`: 32x32 elements share one scale, so that both copies hold the same values.
    """

    fp8_dtype: str = "float8_e4m3fn"
    with_2d_quantization: bool = False

    def __post_init__(self) -> None:
        _check_fp8(self)
        super().__post_init__()

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format(self.fp8_dtype, "float8_e8m0fnu", (1, 32))

    @functools.cached_property
    def spec(self) -> QuantSpec:
        return QuantSpec(self.format.id, SQUARE * self.with_2d_quantization, 0.0)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NVFP4Quantizer(_BuiltIn):
    """NVFP4: E2M1 with one E4M3 scale per 16 elements and a float32 amax of the whole tensor (NUMERICS 5).

    **Arguments:** `with_2d_quantization`: 16x16 elements share one scale. `row_scaled_nvfp4`: the rowwise copy has one
    amax per row. `with_rht`: the columnwise copy is of the tensor after a random Hadamard transform along its rows
    (bfloat16 input only); `with_random_sign_mask`: with random signs. `stochastic_rounding`: calls need an `rng`.

    **Raises** ValueError for options that exclude each other: 2-D blocks with any other but the sign mask.
    """

    with_2d_quantization: bool = False
    row_scaled_nvfp4: bool = False
    with_rht: bool = False
    with_random_sign_mask: bool = True
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("row_scaled_nvfp4", "with_rht", "stochastic_rounding"):
            if self.with_2d_quantization and getattr(self, name):
                raise ValueError(
                    f"NVFP4Quantizer: with_2d_quantization makes both copies alike; {name} would make them differ"
                )

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format("float4_e2m1fn", "float8_e4m3fn", (1, 16))

    @functools.cached_property
    def spec(self) -> QuantSpec:
        rht = self.with_rht and self.columnwise
        flags = (
            SQUARE * self.with_2d_quantization
            + ROW_AMAX * (self.row_scaled_nvfp4 and self.rowwise)
            + RHT * rht
            + RHT_SIGNS * (rht and self.with_random_sign_mask)
            + STOCHASTIC * self.stochastic_rounding
        )
        return QuantSpec(self.format.id, flags, 0.0)
