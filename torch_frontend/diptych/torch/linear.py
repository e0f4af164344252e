"""`Linear`: nn.Linear whose three products run quantized inside `autocast`; `layer.py` says how."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diptych.common.arguments import require_recipe
from diptych.common.recipes import Recipe
from diptych.torch.fx import as_leaf
from diptych.torch.layer import linear as linear
from diptych.torch.module import QuantizedModule
from diptych.torch.weights import initial_weight


class Linear(QuantizedModule, nn.Linear):
    """nn.Linear that quantizes inside `autocast`, and is nn.Linear itself outside.

    **Arguments:** as nn.Linear, with the same initialization, attributes and state_dict. `recipe`: used instead of the
    region's wherever a region is enabled; None takes the region's. `name`: what roles call the module.
    `fuse_wgrad_accumulation`, `delay_wgrad_compute`: as `QuantizedModule`. `save_original_input`: backward keeps the
    input and quantizes it again, which costs a pass and saves a copy where the input is kept anyway.

    The input may be a QuantizedTensor, such as another module's output under a recipe that quantizes outputs; see
    `linear`. Outside of regions it is dequantized.

    **Raises:** TypeError if `recipe` is not a recipe; see `quantized_linear` for the forward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str = "",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        require_recipe("Linear", recipe)
        super().__init__(
            in_features, out_features, bias=bias, device=device, dtype=dtype,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self.recipe, self.name = recipe, name
        self.save_original_input = save_original_input
        self.weight = initial_weight(self.weight, recipe, self.module_kind, name)

    def forward(
        self, input: Tensor, is_first_microbatch: bool | None = None, skip_weight_update: Tensor | None = None
    ) -> Tensor:
        if not isinstance(input, Tensor):
            return as_leaf(self, input, is_first_microbatch, skip_weight_update)
        return self.quantized_linear(
            input,
            self.weight,
            self.bias,
            is_first_microbatch=is_first_microbatch,
            skip_weight_update=skip_weight_update,
            save_original_input=self.save_original_input,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + self._repr_recipe()
