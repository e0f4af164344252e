"""Recipes: which quantizer each tensor of a layer gets and how its three products accumulate, as values.

Names, fields and defaults are TransformerEngine's if the meaning is the same. No field is read from the environment.

| recipe | input, weight | grad_output | scales |
|---|---|---|---|
| `DelayedScaling` | E4M3 | E5M2 (HYBRID) | float32 per tensor, from earlier steps' amaxes |
| `Float8CurrentScaling` | E4M3 | E5M2 (HYBRID) | float32 per tensor |
| `Float8BlockScaling` | E4M3 1x128, E4M3 128x128 | E4M3 1x128 | power of two in float32 per block |
| `MXFP8BlockScaling` | E4M3 | E4M3 | E8M0 per 32 elements |
| `NVFP4BlockScaling` | E2M1, weights 16x16 | E2M1, stochastic rounding | E4M3 per 16 elements, float32 per tensor |
| `CustomRecipe` | what your function says | | |
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from diptych.common import te
from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.formats import LARGEST
from diptych.common.gemm_options import GemmOptions
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    check_history,
)
from diptych.common.value import Value, check_parts, check_types

GEMMS = tuple(QuantizerRole.GEMMS)


class Elements(NamedTuple):
    """The dtype names of a format's elements, for forward and for backward tensors."""

    forward: str
    backward: str

    @property
    def max_fwd(self) -> float:
        """The largest value of a forward tensor's element."""
        return LARGEST[self.forward]

    @property
    def max_bwd(self) -> float:
        """The largest value of a backward tensor's element."""
        return LARGEST[self.backward]


class Format(enum.Enum):
    """The elements of forward and backward tensors. E2M1 is the element of NVFP4; the FP8 recipes refuse it."""

    E4M3 = Elements("float8_e4m3fn", "float8_e4m3fn")
    E5M2 = Elements("float8_e5m2", "float8_e5m2")
    HYBRID = Elements("float8_e4m3fn", "float8_e5m2")
    E2M1 = Elements("float4_e2m1fn", "float4_e2m1fn")

    def element(self, role: QuantizerRole) -> str:
        return self.value[1 if role.tensor.startswith("grad") else 0]


@dataclasses.dataclass(frozen=True, eq=False)
class QParams(Value):
    """Options of quantizing one kind of tensor.

    **Arguments:** `power_2_scale`: floor scales to powers of two. `amax_epsilon`: lower bound of the amax.
    `random_hadamard_transform`, `stochastic_rounding`, `fp4_2d_quantization`: options of `NVFP4BlockScaling` only.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def _value_fields(self) -> tuple[str, ...]:
        # NVFP4's options are left out if they are off, so that fingerprints of other recipes do not contain them.
        held = vars(self)
        return ("power_2_scale", "amax_epsilon", *(n for n in _NVFP4_OPTIONS if held.get(n, False)))


_NVFP4_OPTIONS = ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")


@dataclasses.dataclass(frozen=True, eq=False)
class MMParams(Value):
    """Options of a product. `use_split_accumulator=False` allows Hopper's fast, reduced accumulation."""

    use_split_accumulator: bool = True


def _override(_: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {"backward_override": value}


_TE = {**te.NO_ATTENTION, "backward_override": _override}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Recipe(Value):
    """Base of all recipes.

    The recipes of this module take TransformerEngine's arguments too. These set equivalent fields: `use_f32_scales`,
    `use_power_2_scales`, `fp4_quant_fwd_inp`, `fp4_quant_fwd_weight`, `fp4_quant_bwd_grad`, `backward_override=None`.
    Others are accepted with one value only.

    **Arguments:** `fp8_gemm_fprop`, `fp8_gemm_dgrad`, `fp8_gemm_wgrad`: accumulation of the three products.
    `backward_override`: "high_precision" computes dgrad and wgrad on the original tensors, "dequantized" on the
    dequantized copies of forward, both without quantizing the gradient; empty: on operands quantized by role.
    `amax_group`: name of the group of ranks whose tensor amaxes are reduced by max: a mesh axis in JAX (several
    separated by commas), a process group given to `autocast(amax_groups={name: group})` in torch; empty: no reduction.
    """

    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    backward_override: str = ""
    amax_group: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        check_parts(self, Format, QParams, MMParams)
        if self.backward_override not in ("", "high_precision", "dequantized"):
            raise ValueError(
                f"{type(self).__name__}.backward_override must be 'high_precision', 'dequantized' or empty, "
                f"got {self.backward_override!r}"
            )
        for gemm in GEMMS:  # options that name no format fail here, not in the first step
            self.operands(gemm)

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        """Returns the quantizer of one tensor of a module, which makes both copies; None: high precision."""
        raise NotImplementedError(f"{type(self).__name__} must define `quantizer`")

    def operands(self, gemm: str, module: str = "linear", name: str = "") -> tuple[Quantizer | None, Quantizer | None]:
        """Returns the quantizers of the two operands of "fprop", "dgrad" or "wgrad".

        **Raises** ValueError if their results cannot be multiplied, or `fast_accum` is set for formats without it.
        """
        a, b = (
            self.quantizer(QuantizerRole(module=module, tensor=t, gemm=gemm, name=name))
            for t in QuantizerRole.GEMMS[gemm][:2]
        )
        if gemm == "wgrad" and _rotation(a) != _rotation(b):
            raise ValueError(
                f"{type(self).__name__}: a Hadamard transform cancels only where both operands of wgrad carry it, "
                f"got {a} and {b}"
            )
        if self.fast_accum(gemm) and a and b and not (a.format.one_scale and b.format.one_scale):
            raise ValueError(
                f"{type(self).__name__}: fast accumulation exists for per-tensor FP8 only, and {gemm} multiplies "
                f"{a.format.name} and {b.format.name}; leave use_split_accumulator=True"
            )
        return a, b

    def with_results(self, output: bool, grad_input: bool) -> Recipe:
        """Returns a recipe that also quantizes modules' outputs or their inputs' gradients (TransformerEngine's
        `fp8_output` and `fp8_grad`), with this recipe's quantizers of inputs and of gradients. The result is cached.

        **Raises** NotImplementedError for delayed scaling.
        """
        made = self._with_results.get((output, grad_input))
        if made is None:
            kept: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)}
            made = _WithResults(base=self, output=output, grad_input=grad_input, **kept)
            for tensor in ("output", "grad_input"):
                made.quantizer(QuantizerRole(tensor=tensor))
            self._with_results[output, grad_input] = made
        return made

    @functools.cached_property
    def _with_results(self) -> dict[tuple[bool, bool], Recipe]:
        return {}

    def delayed(self) -> bool:
        """Whether this is a `DelayedScaling`."""
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Whether this is a `Float8CurrentScaling`."""
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        """Whether this is a `DelayedScaling` or a `Float8CurrentScaling`."""
        return isinstance(self, (DelayedScaling, Float8CurrentScaling))

    def float8_block_scaling(self) -> bool:
        """Whether this is a `Float8BlockScaling`."""
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        """Whether this is an `MXFP8BlockScaling`."""
        return isinstance(self, MXFP8BlockScaling)

    def nvfp4(self) -> bool:
        """Whether this is an `NVFP4BlockScaling`."""
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        """Whether this is a `CustomRecipe`."""
        return isinstance(self, CustomRecipe)

    def fast_accum(self, product: str) -> bool:
        """Whether `product` ("fprop", "dgrad" or "wgrad") may accumulate in reduced precision."""
        return not getattr(self, f"fp8_gemm_{product}").use_split_accumulator

    def gemm_options(self, product: str) -> GemmOptions:
        """Returns the options of a product, "fprop", "dgrad" or "wgrad"."""
        return GemmOptions(fast_accum=self.fast_accum(product))


def _rotation(quantizer: Quantizer | None) -> Any:
    return isinstance(quantizer, NVFP4Quantizer) and quantizer.with_rht and (quantizer.with_random_sign_mask, True)


def _quantized_by(params: QParams) -> dict[str, Any]:
    return {f"fp8_quant_{tensor}": params for tensor in ("fwd_inp", "fwd_weight", "bwd_grad")}


def _nvfp4_flags(**flags: str) -> te.Translation:
    """Returns a translation of one tensor's QParams to the recipe's flags that disable options."""

    def translate(argument: str, params: Any) -> dict[str, Any]:
        if not isinstance(params, QParams):
            raise TypeError(f"{argument} must be QParams, got {type(params).__name__}")
        for option in _NVFP4_OPTIONS:
            if getattr(params, option) and option not in flags:
                raise UnsupportedError(
                    f"{argument}: NVFP4BlockScaling has no {option} for this tensor; a CustomRecipe with "
                    "NVFP4Quantizers quantizes any tensor in any way"
                )
        return {flag: not getattr(params, option) for option, flag in flags.items()}

    return translate


@te.takes(
    **_TE,
    scaling_factor_compute_algo=te.only(None, "a quantizer of your own, given by a CustomRecipe, scales as it likes"),
    reduce_amax=te.only(False, "name the ranks: autocast(amax_reduction_group=...), or amax_group here"),
)
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DelayedScaling(Recipe):
    """Per-tensor FP8 with scales from the amaxes of earlier steps. Default element HYBRID.

    **Arguments:** `margin`: the scale leaves 2^margin of headroom. `amax_history_len`: steps in the history.
    `amax_compute_algo`: "max" of the history, "most_recent", or a function (history [n, L], last [n]) -> amax [n] of
    the calling framework's arrays, compared by identity.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)

    def __post_init__(self) -> None:
        check_types(self)
        check_history(self)
        super().__post_init__()

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor in role.RESULTS:
            return None
        return Float8Quantizer(
            fp8_dtype=self.fp8_format.element(role),
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
        )


@te.takes(**_TE, use_power_2_scales=lambda _, on: _quantized_by(QParams(power_2_scale=on)))
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8, scales from each tensor's own amax. Default element HYBRID: E4M3 forward, E5M2 gradients."""

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor in role.RESULTS:
            return None
        params = _params(self, role)
        return Float8CurrentScalingQuantizer(
            fp8_dtype=self.fp8_format.element(role),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )


@te.takes(**_TE, use_f32_scales=lambda _, on: _quantized_by(QParams(power_2_scale=not on)))
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Float8BlockScaling(Recipe):
    """FP8 in blocks: 1x128 for inputs and gradients, 128x128 for weights, E4M3 everywhere, power-of-two scales.

    **Arguments:** `wgrad_input_square`: wgrad reads the input in 128x128 blocks, made from fprop's 1x128 ones (NUMERICS
    3), which Hopper multiplies faster. Elements far below the largest of their square are rounded twice.
    **Raises** ValueError for `wgrad_input_square` with other blocks or scales that are no powers of two.
    """

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = QParams(power_2_scale=True)
    fp8_quant_fwd_weight: QParams = QParams(power_2_scale=True)
    fp8_quant_bwd_grad: QParams = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    wgrad_input_square: bool = False

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor in role.RESULTS:
            return None
        params = _params(self, role)
        dims = {"input": self.x_block_scaling_dim, "weight": self.w_block_scaling_dim}
        return Float8BlockQuantizer(
            fp8_dtype=self.fp8_format.element(role),
            block_scaling_dim=dims.get(role.tensor, self.grad_block_scaling_dim),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
            columnwise_from_rows=self.wgrad_input_square and role.tensor == "input",
        )


@te.takes(**_TE, margin=te.only(0, "E8M0 scales come from each block's amax"))
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8, E4M3 everywhere: one E8M0 scale per 32 elements along the reduced axis.

    **Arguments:** `enable_2d_quantization`: 32x32 elements of a weight share a scale.
    """

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor in role.RESULTS:
            return None
        return MXFP8Quantizer(
            fp8_dtype=self.fp8_format.element(role),
            with_2d_quantization=self.enable_2d_quantization and role.tensor == "weight",
        )


@te.takes(
    **_TE,
    fp4_format=te.only(Format.E2M1, "NVFP4's elements are E2M1"),
    fp8_format=te.only(Format.E4M3, "NVFP4's block scales are E4M3"),
    **te.FOUR_OVER_SIX,
    fp4_quant_fwd_inp=_nvfp4_flags(random_hadamard_transform="disable_rht"),
    fp4_quant_fwd_weight=_nvfp4_flags(fp4_2d_quantization="disable_2d_quantization"),
    fp4_quant_bwd_grad=_nvfp4_flags(
        random_hadamard_transform="disable_rht", stochastic_rounding="disable_stochastic_rounding"
    ),
)
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 16x16 weights, a random Hadamard transform before wgrad, stochastic rounding of gradients.

    The transform takes bfloat16 inputs and gradients only.

    **Arguments:** `disable_rht`, `disable_stochastic_rounding`, `disable_2d_quantization`: switch that option off.
    `row_scaled_activation`: one amax per row of an input, instead of one per tensor. `rht_random_signs`: False for the
    plain Hadamard transform.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    rht_random_signs: bool = True

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor in role.RESULTS:
            return None
        if role.tensor == "weight":
            return NVFP4Quantizer(with_2d_quantization=not self.disable_2d_quantization)
        gradient = role.tensor == "grad_output"
        return NVFP4Quantizer(
            row_scaled_nvfp4=self.row_scaled_activation and not gradient,
            with_rht=not self.disable_rht,
            with_random_sign_mask=self.rht_random_signs,
            stochastic_rounding=gradient and not self.disable_stochastic_rounding,
        )


@te.takes(
    **_TE,
    fp8_format=te.only(Format.HYBRID, "the quantizers that qfactory returns name their elements"),
    quantization_alignment=te.only(128, "row_align(recipe) gives the rows to which groups are padded"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class CustomRecipe(Recipe):
    """Any quantizer for any role.

    **Arguments:** `qfactory`: called with a `QuantizerRole`; returns a `Quantizer`, or None for a tensor that stays in
    high precision. A module-level function or an instance of a frozen dataclass with `__call__` is compared by value; a
    lambda or a local function by identity, so a new one in each step makes a new recipe in each step. It must be a pure
    function of the role, since its results are cached. `quantize_results`: call it for the results of the products too
    ("output", "grad_input", "grad_weight"); those for which it returns a quantizer are quantized.

    A product with one unquantized operand runs in high precision, on the dequantized values of the other.

    **Raises** TypeError if `qfactory` returns anything else.
    """

    qfactory: Callable[[QuantizerRole], Quantizer | None] = dataclasses.field(kw_only=False)
    quantize_results: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.qfactory):
            raise ArgumentError(f"CustomRecipe.qfactory must be a function of a QuantizerRole, got {self.qfactory!r}")
        super().__post_init__()

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor in role.RESULTS and not self.quantize_results:
            return None
        made: Any = self.qfactory(role)
        made = getattr(made, "for_role", lambda _: made)(role)  # diptych.te's objects
        if made is not None and not isinstance(made, Quantizer):
            raise ArgumentError(
                f"CustomRecipe.qfactory returned {made!r} for {role}; it must return a Quantizer or None"
            )
        return made


def _params(recipe: Float8CurrentScaling | Float8BlockScaling, role: QuantizerRole) -> QParams:
    params = {
        "input": recipe.fp8_quant_fwd_inp,
        "weight": recipe.fp8_quant_fwd_weight,
        "grad_output": recipe.fp8_quant_bwd_grad,
    }[role.tensor]
    if asked := [option for option in _NVFP4_OPTIONS if getattr(params, option)]:
        raise UnsupportedError(f"{type(recipe).__name__}: FP8 has no {', '.join(asked)}; NVFP4BlockScaling has")
    return params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _WithResults(Recipe):
    """A recipe that also quantizes a module's output like an input, or its input's gradient like a gradient."""

    base: Recipe
    output: bool
    grad_input: bool

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        alike = {"output": "input"} if self.output else {}
        alike |= {"grad_input": "grad_output"} if self.grad_input else {}
        if role.tensor not in alike:
            return self.base.quantizer(role)
        made = self.base.quantizer(role.replace(tensor=alike[role.tensor], gemm=""))
        if made is not None and made.needs_scale:
            raise UnsupportedError(
                f"{type(self.base).__name__} has no delayed scale for a module's result: a result is quantized by its "
                "own amax; use Float8CurrentScaling, or a CustomRecipe with quantize_results=True"
            )
        return made


DEFAULT_RECIPE: Recipe = Float8CurrentScaling()
"""The recipe of a region that names none."""


class _Recipes(dict[str, Recipe]):
    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(_unknown(name))


RECIPES: dict[str, Recipe] = _Recipes({
    "fp8-delayed": DelayedScaling(),
    "fp8-current": Float8CurrentScaling(),
    "fp8-block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8-2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(),
})  # fmt: skip
"""The recipes with default fields, by their names in commands."""


def recipe_by_name(name: str) -> Recipe:
    """Returns one of `RECIPES`. **Raises** ValueError with the known names for an unknown one."""
    if name not in RECIPES:
        raise ValueError(_unknown(name))
    return RECIPES[name]


def _unknown(name: object) -> str:
    return f"unknown recipe {name!r}; known: {', '.join(RECIPES)}"
