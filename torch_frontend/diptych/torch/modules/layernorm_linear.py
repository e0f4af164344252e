"""`LayerNormLinear`: a norm and the linear layer behind it, whose high-precision input is never stored.

    y = quantize(norm(x)) @ quantize(w).T + bias       the norm in float32, unrounded until it is quantized

Invariants:

- The products are those of `layers/products.py`; an operand is a tensor or a `FusedInput`, and which of them
  follows from the plan alone (`input_fusable`), so that training, evaluation and both panels give the same bits.
- Backward keeps x and the statistics, from which it makes the copy of the norm's output again, with forward's bits;
  likewise the weight's. With `save_original_input` or `save_original_weight` False it keeps these copies.
- Outside of regions the norm is the core's too, rounded to x's dtype, and the product is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.layer_options import COLUMN, ROW, Originals, TensorParallel, WeightGradientOptions
from diptych.common.ops.norm import NormOptions, norm_options
from diptych.common.recipes import Recipe
from diptych.common.te_arguments import absorb, module_arguments, one_input, placed
from diptych.torch.functional import norm as norm_verbs
from diptych.torch.layers.checks import input_for
from diptych.torch.layers.layernorm_linear import layernorm_linear
from diptych.torch.layers.products import run
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.fx import as_leaf
from diptych.torch.modules.model_init import initial_weight
from diptych.torch.primitives.constants import Constants

# --- what the fused modules share ------------------------------------------------------------------------------------


def require_sizes(op: str, **sizes: Any) -> None:
    """**Raises** TypeError or ValueError for sizes that are not positive ints."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise ArgumentError(f"{op}: {name} must be an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{op}: {name} must be >= 1, got {size}")


class NormedModule(QuantizedModule):
    """A module that begins with a norm: the norm's parameters and their initial values."""

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
        """Returns the norm's options that differ from the defaults, and the recipe."""
        _, eps, centered = self.norm
        given = "" if f"{eps:g}" == "1e-05" else f", eps={eps:g}"
        return f", {self.normalization}{given}{', zero-centered' if centered else ''}{self._repr_recipe()}"


# --- the layer -------------------------------------------------------------------------------------------------------


class LayerNormLinear(NormedModule):
    """A norm and a linear layer; inside `autocast` the norm's output is quantized in the same pass that computes it.

    **Arguments:** `in_features`, `out_features`, `bias`, `device`, `dtype`, `recipe`, `name`: as `Linear`. `eps`: added
    to the variance, or to RMSNorm's mean square. `normalization`: "LayerNorm" or "RMSNorm". `zero_centered_gamma`:
    layer_norm_weight holds gamma - 1, and starts at 0. `return_layernorm_output`: the call returns (y, norm's output).
    `fuse_wgrad_accumulation`, `delay_wgrad_compute`: as `QuantizedModule`. `params_dtype`, `init_method`,
    `return_bias`, `tp_group`, `tp_size`, `sequence_parallel`: as `Linear`, whose
    `parallel_mode` "column" is the only one here; with `return_bias` the call returns (y, bias) or
    (y, bias, norm's output). `save_original_input`: backward keeps x alone and computes and quantizes the norm's output
    again, instead of keeping a copy of that. `save_original_weight`: as `Linear`, but True by default: backward reads
    the weight once more.

    Parameters: `layer_norm_weight`, `layer_norm_bias` (None for RMSNorm), `weight`, `bias`. The module kind of roles is
    "layernorm_linear". Under `torch.amp.autocast` the input is cast to its dtype first.

    **Raises:** TypeError and ValueError for arguments of other kinds and values; see `QuantizedModule.quantized_linear`
    for the forward.
    """

    module_kind = "layernorm_linear"
    _cut_extents: Mapping[str, str] = {COLUMN: "out_features"}

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
        save_original_input: bool = True,
        save_original_weight: bool = True,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        parallel_mode: str | None = None,
        **others: Any,
    ) -> None:
        given = module_arguments(
            "LayerNormLinear", others, recipe, name, placed("LayerNormLinear", device, dtype, params_dtype),
            originals=Originals(save_original_input, save_original_weight),
            weight_gradients=WeightGradientOptions(fuse_wgrad_accumulation, delay_wgrad_compute),
            parallel=TensorParallel(tp_group, tp_size, sequence_parallel, {"": parallel_mode}),
            init_method=init_method, return_bias=return_bias,
        )  # fmt: skip
        require_sizes("LayerNormLinear", in_features=in_features, out_features=out_features)
        if parallel_mode == ROW:
            raise UnsupportedError(
                "LayerNormLinear: parallel_mode='row' would cut the features that the norm reads whole"
            )
        super().__init__()
        self._take(given, out_features=out_features)
        out_features //= self.tp_size
        self.in_features, self.out_features = in_features, out_features
        self.return_layernorm_output = return_layernorm_output
        self._make_norm(normalization, in_features, eps, zero_centered_gamma, **given.placed)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **given.placed))
        self.bias = nn.Parameter(torch.empty(out_features, **given.placed)) if bias else None
        self.reset_parameters()
        self.weight = initial_weight(self.weight, recipe, self.module_kind, self.name)
        self._make_initial_states()

    def reset_parameters(self) -> None:
        """Makes the norm the identity, and the rest anew as `Linear` does."""
        self._reset_norm()
        self._draw("", self.init_method)

    def forward(
        self,
        input: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        inp: Tensor | None = None,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """norm(x) @ weight.T + bias.

        **Arguments:** as `Linear`'s forward; `fp8_grad` must be False. **Returns:** [..., N], or a tuple that begins
        with it: see the class.
        """
        absorb("LayerNormLinear", {"fp8_grad": fp8_grad}, of="LayerNormLinear.forward")
        parameters = (self.layer_norm_weight, self.layer_norm_bias, self.weight, self.bias)
        gamma, beta, weight, bias = [self._local(p) for p in parameters]
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
        if recipe is None and self.tp_size == 1:
            z = norm_verbs.layernorm(x, gamma, beta, self.norm)
            return self._returned(self.quantized_linear(z, weight, bias), z)
        if recipe is None:
            recipe, options = self._plain_run(weight)
        else:
            recipe = recipe.with_results(True, False) if fp8_output else recipe
            originals = Originals(self.save_original_input, self.save_original_weight)
            options = self._options_for(recipe, x, weight, "", originals, is_first_microbatch, skip_weight_update)
        with_z = self.return_layernorm_output
        operands = (gamma, beta, self.norm_constants, weight, bias, options.state.rng, with_z)
        made = run(layernorm_linear, x, recipe, (options,), *operands)
        return self._returned(*made[: 1 + with_z])

    def _returned(self, y: Tensor, z: Tensor | None = None) -> Any:
        """Returns the results that the module's options request. `z`: the norm's output."""
        bias = (self._local(self.bias),) if self.return_bias else ()
        parts = (y, *bias, *((z,) if self.return_layernorm_output else ()))
        return parts if len(parts) > 1 else y

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{sizes}{self._repr_cut()}{self._repr_norm()}"
