"""`Linear`: nn.Linear whose three products run quantized inside `autocast`; `layers/linear.py` has the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.layer_options import COLUMN, ROW, Originals, TensorParallel, WeightGradientOptions
from diptych.common.recipes import Recipe
from diptych.common.te_arguments import module_arguments, one_input, placed
from diptych.torch.layers.linear import linear as linear
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.fx import as_leaf
from diptych.torch.modules.model_init import initial_weight


class Linear(QuantizedModule, nn.Linear):
    """nn.Linear that quantizes inside `autocast`, and is nn.Linear itself outside.

    **Arguments:** as nn.Linear, with the same initialization, attributes and state_dict; `bias` is keyword-only.
    `recipe`: used instead of the region's wherever a region is enabled; None takes the region's. `name`: the module's
    name in roles. `params_dtype`: another name of `dtype`. `init_method`: called with the weight to fill it, instead of
    nn.Linear's initialization; the bias is then zero. `return_bias`: the call returns (x @ weight.T, bias), nothing
    added. `fuse_wgrad_accumulation`, `delay_wgrad_compute`: as `QuantizedModule`. `save_original_input`: backward keeps
    the input and quantizes it again, which costs a pass and saves a copy where the input is kept anyway.
    `save_original_weight`: likewise for the weight, which exists anyway; copies kept across microbatches are read as
    they are, and a change of the weight between forward and backward is an error, as for nn.Linear.
    `parallel_mode`, `tp_group`, `tp_size`: "column" or "row" cuts the weight's out_features or in_features, which are
    those of the whole layer, over the ranks of a process group. With `tp_size` alone the module is made on the meta
    device, and `set_tensor_parallel_group` names the group later. A column-parallel layer returns this rank's features,
    and a row-parallel one takes them and returns the sum over ranks. `sequence_parallel`: activations outside of such a
    pair of layers hold this rank's tokens, cut along dimension 0; every rank has the same number of them.
    TransformerEngine's other arguments about parallelism are accepted only with the values that request none.

    The input may be a QuantizedTensor, such as another module's output under a recipe that quantizes outputs; see
    `linear`. Outside of regions it is dequantized.

    **Raises:** TypeError if `recipe` is not a recipe or an argument is unknown, ShapeError for features that ranks
    cannot share, NotImplementedError for an argument of TransformerEngine's that asks for what diptych does not do; see
    `quantized_linear` for the forward.
    """

    _cut_extents: Mapping[str, str] = {COLUMN: "out_features", ROW: "in_features"}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str | None = "",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        save_original_weight: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        parallel_mode: str | None = None,
        **others: Any,
    ) -> None:
        given = module_arguments(
            "Linear", others, recipe, name, placed("Linear", device, dtype, params_dtype),
            originals=Originals(save_original_input, save_original_weight),
            weight_gradients=WeightGradientOptions(fuse_wgrad_accumulation, delay_wgrad_compute),
            parallel=TensorParallel(tp_group, tp_size, sequence_parallel, {"": parallel_mode}),
            init_method=init_method, return_bias=return_bias,
        )  # fmt: skip
        extents = {"out_features": out_features} if parallel_mode == COLUMN else {"in_features": in_features}
        self._take(given, **extents)  # before nn.Linear's __init__, which calls reset_parameters
        mode = self._modes.get("")
        in_features = in_features // self.tp_size if mode == ROW else in_features
        out_features = out_features // self.tp_size if mode == COLUMN else out_features
        super().__init__(in_features, out_features, bias=bias, **given.placed)
        self.weight = initial_weight(self.weight, recipe, self.module_kind, self.name)
        self._make_initial_states()

    def reset_parameters(self) -> None:
        """Makes the parameters anew: as nn.Linear, or by the `init_method`, which leaves the bias at zero."""
        if self.init_method is None and self.tp_size == 1:
            super().reset_parameters()
        else:
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
        """x @ weight.T + bias.

        **Arguments:** `input` or `inp`: [..., K]. `is_first_microbatch`, `skip_weight_update`: as `quantized_linear`.
        `fp8_output`: the recipe quantizes the output as it quantizes inputs, and the call returns a QuantizedTensor.
        `fp8_grad`: the gradient of the input is quantized as gradients are, and comes as its rounded values.

        **Returns:** [..., N]; with `return_bias` (x @ weight.T, bias). Outside of regions `fp8_output` and `fp8_grad`
        change nothing, as in TransformerEngine.
        """
        x = input if inp is None and input is not None else one_input("Linear", input, inp)
        if not isinstance(x, Tensor):
            return as_leaf(self, x, is_first_microbatch, skip_weight_update=skip_weight_update)
        held = self._parameters  # nn.Module finds parameters by a __getattr__ that costs a microsecond
        weight: Any = held["weight"] if "weight" in held else self.weight  # noqa: SIM401 - evaluated only where needed
        bias = held["bias"] if "bias" in held else self.bias  # noqa: SIM401
        if self._styled:
            weight, bias = self._local(weight), self._local(bias)
        y = self.quantized_linear(
            x,
            weight,
            None if self.return_bias else bias,
            is_first_microbatch=is_first_microbatch,
            skip_weight_update=skip_weight_update,
            save_original_input=self.save_original_input,
            save_original_weight=self.save_original_weight,
            quantize_output=fp8_output,
            quantize_grad_input=fp8_grad,
        )
        return (y, bias) if self.return_bias else y

    def extra_repr(self) -> str:
        return super().extra_repr() + self._repr_cut() + self._repr_recipe()
