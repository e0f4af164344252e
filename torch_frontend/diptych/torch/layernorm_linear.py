"""`LayerNormLinear`: a norm and the linear layer behind it, whose input is quantized without ever lying in memory.

    y = quantize(norm(x)) @ quantize(w).T + bias       the norm in float32, unrounded until it is quantized

Invariants:

- The products are those of `products`; an operand is a tensor or a `FusedInput`, and which of them follows from the
  plan alone (`input_fusable`), so that training, evaluation and both panels give the same bits.
- Backward keeps x, the statistics and the copies that it multiplies, not the norm's output.
- Outside of regions the norm is the core's too, rounded to x's dtype, and the product is torch's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.fused import NORMS, NormOptions, norm_options
from diptych.common.plan import LinearPlan, TensorPlan
from diptych.common.recipes import Recipe
from diptych.common.schedule import Schedule
from diptych.torch import fused, primitives
from diptych.torch.custom_op import CustomOp
from diptych.torch.fx import as_leaf
from diptych.torch.layer_node import LayerArguments, finished, kept_spec, result_proto, run, weight_gradient
from diptych.torch.model_init import initial_weight, initialize
from diptych.torch.module import QuantizedModule
from diptych.torch.opaque import Constants
from diptych.torch.operands import Copies, Operand, pack, pick, unpack
from diptych.torch.products import Options, encode, fprop, product, quantize_calls, rounded
from diptych.torch.proto import TensorProto
from diptych.torch.quantized import QuantizedTensor, high_precision
from diptych.torch.rules import describe, require_device, require_high_precision, require_tensor
from diptych.torch.te_arguments import absorb, dtype_of, one_input

# --- what the fused modules share ------------------------------------------------------------------------------------


def fusable(tensor: TensorPlan) -> bool:
    """Whether a tensor may stay unstored: every use of it reads a copy that the core makes."""
    return all([q is not None and not q.custom for q in (tensor.rowwise, tensor.columnwise)])


def input_fusable(plan: LinearPlan) -> bool:
    """Whether forward quantizes the input of a linear layer from what is not stored. What backward reads does not
    change forward's bits: where wgrad reads the input itself, that is stored beside."""
    forward, backward = plan.input.rowwise, plan.input.columnwise
    if forward is None or forward.custom:
        return False
    return backward is None or plan.dequantized_backward or not backward.custom


def input_gradient(
    dy: Operand, w: Operand, x: Tensor, s: Schedule, options: Options, rng: Tensor | None, width: int
) -> Tensor:
    """dgrad: [..., width] beside x's leading dimensions, in x's dtype."""
    dx = product("dgrad", dy, w, None, x.dtype, s.plan.fast_accum[1])
    return rounded(dx, s.results[1], options, rng).view(*x.shape[:-1], width)


def input_for(op: str, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """x in high precision and the dtype of `torch.amp.autocast`, checked beside the parameters of its norm."""
    require_tensor(op, "input", x)
    dtype = x.dtype
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    x = high_precision(op, x, dtype).to(dtype)
    require_high_precision(op, "input", x)
    if x.dim() == 0 or x.size(-1) != gamma.size(0):
        raise ShapeError(f"{op}: input must be [..., {gamma.size(0)}], got {describe(x)}")
    require_device(op, gamma, x, "input")
    if beta is not None and beta.dtype != gamma.dtype:
        raise DTypeError(f"{op}: layer_norm_bias must have layer_norm_weight's dtype {gamma.dtype}, got {beta.dtype}")
    return x


def require_sizes(op: str, **sizes: Any) -> None:
    """**Raises** TypeError or ValueError for what is no positive int."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise ArgumentError(f"{op}: {name} must be an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{op}: {name} must be >= 1, got {size}")


class NormedModule(QuantizedModule):
    """A module that begins with a norm: its parameters, and how they start."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    norm: NormOptions
    norm_constants: Constants

    def _make_norm(self, normalization: str, width: int, eps: float, zero_centered_gamma: bool, **placed: Any) -> None:
        self.norm = norm_options(type(self).__name__, normalization, eps, zero_centered_gamma)
        self.norm_constants = Constants(self.norm)  # dynamic shapes make plain floats symbolic
        self.normalization = normalization
        self.layer_norm_weight = nn.Parameter(torch.empty(width, **placed))
        self.layer_norm_bias = nn.Parameter(torch.empty(width, **placed)) if normalization == "LayerNorm" else None

    def _reset_norm(self) -> None:
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.norm.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _repr_norm(self) -> str:
        """The norm where it is another than by default, and the recipe."""
        _, eps, centered = self.norm
        given = "" if f"{eps:g}" == "1e-05" else f", eps={eps:g}"
        return f", {self.normalization}{given}{', zero-centered' if centered else ''}{self._repr_recipe()}"


# --- the layer -------------------------------------------------------------------------------------------------------


def normed_fprop(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None, rng: Tensor | None,
    s: Schedule, options: Options, norm: NormOptions, with_z: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, Tensor], Copies, Copies]:  # fmt: skip
    """y, z where it is stored, (mu, rsigma), and the copies of z and of the weight."""
    fuse = input_fusable(s.plan)
    needs_z = with_z or not fuse or s.x_kept == "original"
    mu, rsigma, z = fused.norm(x, gamma if needs_z else None, beta if needs_z else None, norm)
    operand = fused.normalized(x, gamma, beta, mu, rsigma, norm) if fuse else z
    assert operand is not None
    copies_z = encode(operand, s.x, options, rng, options.replay).copies
    y, _, copies_w = fprop(x if fuse or z is None else z, weight, bias, rng, s, options, copies_z)
    return y, z, (mu, rsigma), copies_z, copies_w


@dataclasses.dataclass
class NormedArguments(LayerArguments):
    """Of an op that begins with a norm; `norm`: its `NormOptions`."""

    gamma: Tensor
    beta: Tensor | None
    norm: Constants

    @staticmethod
    def wants_dz(needs: tuple[str, ...]) -> bool:
        """Whether the gradient of the norm's output is needed."""
        return "x" in needs or "gamma" in needs or "beta" in needs

    def kept_operands(self, needs: tuple[str, ...], schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
        return ("x", "gamma") if self.wants_dz(needs) else ()

    def norm_options(self) -> NormOptions:
        held = self.norm.items  # a graph rebuilds it as a plain tuple
        return held if isinstance(held, NormOptions) else NormOptions(*held)

    def norm_gradients(self, dz: Tensor, saved: list[Tensor]) -> dict[str, Any]:
        """Of the norm's operands; takes its statistics off the front."""
        options = self.norm_options()
        mu = saved.pop(0) if options.which == NORMS["LayerNorm"] else None
        made = fused.norm_grad(dz, self.x, self.gamma, mu, saved.pop(0), options, self.beta is not None)
        return {"x": made[0], "gamma": made[1], "beta": made[2]}


@dataclasses.dataclass
class _Arguments(NormedArguments):
    weight: Tensor | QuantizedTensor
    bias: Tensor | None
    rng: Tensor | None
    with_z: bool

    def wanted(self, needs: tuple[str, ...]) -> tuple[tuple[bool, bool], ...]:
        return ((self.wants_dz(needs), "weight" in needs),)


def _forward(a: _Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    s = a.schedules(needs)[0]
    (options,), amaxes = a.forward_options(needs)
    y, z, stats, copies_z, copies_w = normed_fprop(
        a.x, a.gamma, a.beta, a.weight, a.bias, a.rng, s, options, a.norm_options(), a.with_z
    )
    saved: list[Tensor] = []
    if s.x_kept:
        operand = pick(s.x_kept, copies_z, a.x if z is None else z)
        pack(operand.clone() if operand is z and a.with_z and a.options is None else operand, saved)
    a.pack_weight(0, s, copies_w, saved)
    if s.w_kept:
        saved += [t for t in stats if t is not None]
    y = finished(y, s, options, a.rng)
    return (y, z, *amaxes) if a.with_z and z is not None else (y, *amaxes), saved


def _layout(a: _Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    y = result_proto(a.x, a.weight.shape[0], a.schedules(needs)[0])
    z = TensorProto(a.x.shape, a.x.dtype, None, a.x.device, True)
    return (y, z, *a.amax_protos(needs)) if a.with_z else (y, *a.amax_protos(needs))


def _backward(a: _Arguments, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
    s, options, dy = a.schedules(needs)[0], a.backward_options(needs)[0], grads[0]
    assert dy is not None
    z = unpack(kept_spec(s.x_kept, s.plan.input), saved) if s.x_kept else None
    w = a.kept_weight(0, s, saved) if s.w_kept else None
    rowwise, columnwise = quantize_calls(dy, s.dy, options, a.rng)
    made: dict[str, Any] = {}
    if s.w_kept:
        dz = input_gradient(dy if rowwise is None else rowwise, w, a.x, s, options, a.rng, a.x.shape[-1])
        dz_out = grads[1] if a.with_z else None
        made |= a.norm_gradients(dz if dz_out is None else dz + dz_out, saved)
    if "weight" in needs:
        operand = dy if columnwise is None else columnwise
        made["weight"] = weight_gradient(operand, z, a.weight.dtype, s, options, a.rng)
    if "bias" in needs:
        assert a.bias is not None
        made["bias"] = primitives.bias_grad(dy, a.bias.dtype)
    a.log_amaxes()
    return [made[name] for name in a.gradients(needs)]


_layernorm_linear = CustomOp(
    "diptych::layernorm_linear", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients,
)  # fmt: skip


class LayerNormLinear(NormedModule):
    """A norm and a linear layer; inside `autocast` the norm's output is quantized in the same pass that computes it.

    **Arguments:** `in_features`, `out_features`, `bias`, `device`, `dtype`, `recipe`, `name`: as `Linear`. `eps`: added
    to the variance, or to RMSNorm's mean square. `normalization`: "LayerNorm" or "RMSNorm". `zero_centered_gamma`:
    layer_norm_weight holds gamma - 1, and starts at 0. `return_layernorm_output`: the call returns (y, norm's output).
    `fuse_wgrad_accumulation`, `delay_wgrad_compute`: as `QuantizedModule`. `params_dtype`, `init_method`,
    `return_bias`, arguments about parallelism: as `Linear`; with `return_bias` the call returns (y, bias) or
    (y, bias, norm's output).

    Parameters: `layer_norm_weight`, `layer_norm_bias` (None for RMSNorm), `weight`, `bias`. The module kind of roles is
    "layernorm_linear". Under `torch.amp.autocast` the input is cast to its dtype first.

    **Raises:** TypeError and ValueError for arguments of other kinds and values; see `QuantizedModule.quantized_linear`
    for the forward.
    """

    module_kind = "layernorm_linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str | None = "",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        **others: Any,
    ) -> None:
        absorb("LayerNormLinear", others)
        require_recipe("LayerNormLinear", recipe)
        require_sizes("LayerNormLinear", in_features=in_features, out_features=out_features)
        super().__init__(fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        placed = {"device": device, "dtype": dtype_of("LayerNormLinear", dtype, params_dtype)}
        self.in_features, self.out_features = in_features, out_features
        self.recipe, self.name, self.return_layernorm_output = recipe, name or "", return_layernorm_output
        self.init_method, self.return_bias = init_method, return_bias
        self._make_norm(normalization, in_features, eps, zero_centered_gamma, **placed)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **placed))
        self.bias = nn.Parameter(torch.empty(out_features, **placed)) if bias else None
        self.reset_parameters()
        self.weight = initial_weight(self.weight, recipe, self.module_kind, self.name)
        self._make_initial_states()

    def reset_parameters(self) -> None:
        """Makes the norm the identity, and the rest anew as `Linear` does."""
        self._reset_norm()
        initialize(self.weight, self.bias, self.init_method)

    def forward(
        self,
        input: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        *,
        inp: Tensor | None = None,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """norm(x) @ weight.T + bias.

        **Arguments:** as `Linear`'s forward. **Returns:** [..., N], or a tuple that begins with it: see the class.
        """
        gamma, beta, weight, bias = self.layer_norm_weight, self.layer_norm_bias, self.weight, self.bias
        if self.return_bias:
            bias = None
        given_x = one_input("LayerNormLinear", input, inp)
        if not isinstance(given_x, Tensor):
            return as_leaf(self, given_x, is_first_microbatch, skip_weight_update=skip_weight_update)
        x = input_for("LayerNormLinear", given_x, gamma, beta)
        if torch.compiler.is_compiling() and (outside := self._eager_only(weight)) is not None:
            return outside.run(
                self.forward, given_x, is_first_microbatch, fp8_output, skip_weight_update=skip_weight_update
            )
        recipe = self._active_recipe()
        if recipe is None:
            z = fused.layernorm(x, gamma, beta, self.norm)
            return self._returned(self.quantized_linear(z, weight, bias), z)
        if fp8_output:
            recipe = recipe.with_results(True, False)
        options, rng = self._options_for(recipe, x, weight, "", is_first_microbatch, skip_weight_update)
        with_z = self.return_layernorm_output
        operands = (gamma, beta, self.norm_constants, weight, bias, rng, with_z)
        made = run(_layernorm_linear, x, recipe, (options,), *operands)
        return self._returned(*made[: 1 + with_z])

    def _returned(self, y: Tensor, z: Tensor | None = None) -> Any:
        """What the call returns; `z`: the norm's output."""
        parts = (y, *((self.bias,) if self.return_bias else ()), *((z,) if self.return_layernorm_output else ()))
        return parts if len(parts) > 1 else y

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{sizes}{self._repr_norm()}"
