"""`LayerNormMLP`: norm, linear layer, activation, linear layer, storing between them only what the gradients need.

    h = quantize(norm(x)) @ quantize(w1).T + bias1
    y = quantize(act(h)) @ quantize(w2).T + bias2

Backward keeps x, the norm's statistics and h. For the weights' gradients the norm's output is recomputed from x and the
activation from h, each quantized in the same pass, by forward's scale; the weights' columnwise copies are made from the
parameters. `save_original_input` or `save_original_weight` False keeps forward's copies of the norm's output or of the
weights instead. The activation's gradient is quantized in the pass that computes it, which also sums bias1's gradient.
A tensor that a role leaves in high precision, or quantizes by a user's own code, is stored instead (`fusable` in
`diptych.common.layers.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.layer_options import COLUMN, ROW, Originals, TensorParallel, WeightGradientOptions
from diptych.common.ops.activation import activation_options
from diptych.common.recipes import Recipe
from diptych.common.te_arguments import module_arguments, one_input, placed
from diptych.torch.functional import activation as activation_verbs
from diptych.torch.functional import norm as norm_verbs
from diptych.torch.layers.checks import input_for
from diptych.torch.layers.layernorm_mlp import layernorm_mlp
from diptych.torch.layers.products import run
from diptych.torch.modules.fx import as_leaf
from diptych.torch.modules.layernorm_linear import NormedModule, require_sizes
from diptych.torch.modules.model_init import initial_weight
from diptych.torch.state.checkpoint import checkpoint


class LayerNormMLP(NormedModule):
    """A norm and a two-layer perceptron; inside `autocast` neither the norm's nor the activation's output is stored.

    **Arguments:** `hidden_size`: of input and output. `ffn_hidden_size`: of the activation's output; a gated one has
    fc1 twice as wide. `bias`: of both layers. `activation`: "gelu" (the tanh form), "relu", "silu", "srelu" (relu
    squared), "qgelu" (x sigmoid(1.702 x)), or act(a) * b as "geglu", "reglu", "swiglu", "sreglu", "qgeglu", with a the
    first half of fc1's output. `eps`, `normalization`, `zero_centered_gamma`, `device`, `dtype`, `recipe`, `name`,
    `fuse_wgrad_accumulation`, `delay_wgrad_compute`, `save_original_input`, `save_original_weight`: as
    `LayerNormLinear`. `params_dtype`, arguments about parallelism: as `Linear`. `init_method`,
    `output_layer_init_method`: called with fc1's and with fc2's weight to fill it (None: as nn.Linear). `return_bias`:
    the call returns (y, fc2_bias), and y has none added. `checkpoint`: backward recomputes the module
    (`diptych.torch.checkpoint`).

    Parameters: `layer_norm_weight`, `layer_norm_bias` (None for RMSNorm), `fc1_weight` [F or 2F, K], `fc1_bias`,
    `fc2_weight` [K, F], `fc2_bias`. The module kind of roles is "layernorm_mlp", names end in "fc1" and "fc2".

    **Raises:** TypeError and ValueError for arguments of other kinds and values; see `QuantizedModule.quantized_linear`
    for the forward.
    """

    module_kind = "layernorm_mlp"
    _cut_extents: Mapping[str, str] = {COLUMN: "ffn_hidden_size"}
    layers = ("fc1", "fc2")
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    checkpoint = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str | None = "",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        checkpoint: bool = False,
        save_original_input: bool = True,
        save_original_weight: bool = True,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        set_parallel_mode: bool = False,
        **others: Any,
    ) -> None:
        modes = {"fc1": COLUMN, "fc2": ROW} if set_parallel_mode else {}
        given = module_arguments(
            "LayerNormMLP", others, recipe, name, placed("LayerNormMLP", device, dtype, params_dtype),
            originals=Originals(save_original_input, save_original_weight),
            weight_gradients=WeightGradientOptions(fuse_wgrad_accumulation, delay_wgrad_compute),
            parallel=TensorParallel(tp_group, tp_size, sequence_parallel, modes),
            init_method=init_method, return_bias=return_bias,
        )  # fmt: skip
        require_sizes("LayerNormMLP", hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        super().__init__()
        self._take(given, ffn_hidden_size=ffn_hidden_size)
        ffn_hidden_size //= self.tp_size
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.output_layer_init_method, self.checkpoint = output_layer_init_method, checkpoint
        self.activation, self.activation_options = activation, activation_options("LayerNormMLP", activation)
        self._make_norm(normalization, hidden_size, eps, zero_centered_gamma, **given.placed)
        wide = ffn_hidden_size * self._stacked("fc1")
        self.fc1_weight = nn.Parameter(torch.empty(wide, hidden_size, **given.placed))
        self.fc1_bias = nn.Parameter(torch.empty(wide, **given.placed)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, **given.placed))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, **given.placed)) if bias else None
        self.reset_parameters()
        self.fc1_weight = initial_weight(self.fc1_weight, recipe, self.module_kind, self._role_name("fc1"))
        self.fc2_weight = initial_weight(self.fc2_weight, recipe, self.module_kind, self._role_name("fc2"))
        self._make_initial_states()

    def reset_parameters(self) -> None:
        """Makes the norm the identity, and the rest anew as `Linear` does."""
        self._reset_norm()
        self._draw("fc1", self.init_method)
        self._draw("fc2", self.output_layer_init_method)

    def _stacked(self, layer: str) -> int:
        return 2 if layer == "fc1" and self.activation_options.gated else 1

    def forward(
        self,
        input: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        inp: Tensor | None = None,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """fc2(act(fc1(norm(x)))).

        **Arguments:** as `Linear`'s forward. **Returns:** [..., K]; with `return_bias` (that without fc2's bias,
        fc2_bias).
        """
        x = one_input("LayerNormMLP", input, inp)
        if not isinstance(x, Tensor):
            return as_leaf(self, x, is_first_microbatch, skip_weight_update=skip_weight_update)
        given = (x, is_first_microbatch, skip_weight_update)
        y = checkpoint(self._run, *given) if self.checkpoint and torch.is_grad_enabled() else self._run(*given)
        return (y, self._local(self.fc2_bias)) if self.return_bias else y

    def _run(self, input: Tensor, is_first_microbatch: bool | None, skip_weight_update: Tensor | None) -> Tensor:
        norm, act = (self.layer_norm_weight, self.layer_norm_bias), self.activation_options
        parameters = (*norm, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias)
        gamma, beta, w1, b1, w2, b2 = [self._local(p) for p in parameters]
        if self.return_bias:
            b2 = None
        x = input_for("LayerNormMLP", input, gamma, beta)
        if torch.compiler.is_compiling() and (outside := self._eager_only(w1, w2)) is not None:
            return outside.run(self._run, input, is_first_microbatch, skip_weight_update)
        recipe = self._active_recipe()
        if recipe is None and self.tp_size == 1:
            h = self.quantized_linear(norm_verbs.layernorm(x, gamma, beta, self.norm), w1, b1, "fc1")
            return self.quantized_linear(activation_verbs.activate(h, act), w2, b2, "fc2")
        given = (is_first_microbatch, skip_weight_update)
        if recipe is None:
            recipe, fc1, fc2 = *self._plain_run(w1, "fc1"), self._plain_run(w2, "fc2")[1]
        else:
            originals = Originals(self.save_original_input, self.save_original_weight)
            fc1 = self._options_for(recipe, x, w1, "fc1", originals, *given)
            fc2 = self._options_for(recipe, x, w2, "fc2", originals._replace(input=True), *given)
        rngs = fc1.state.rng, fc2.state.rng
        operands = (gamma, beta, self.norm_constants, w1, b1, w2, b2, *rngs, tuple(act))
        return run(layernorm_mlp, x, recipe, (fc1, fc2), *operands)[0]

    def extra_repr(self) -> str:
        sizes = f"{self.hidden_size}, {self.ffn_hidden_size}, bias={self.fc1_bias is not None}"
        return f"{sizes}, {self.activation}{self._repr_cut()}{self._repr_norm()}"
