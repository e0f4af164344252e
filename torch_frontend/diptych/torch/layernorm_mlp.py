"""`LayerNormMLP`: norm, linear layer, activation, linear layer, with as little stored between as their gradients allow.

    h = quantize(norm(x)) @ quantize(w1).T + bias1
    y = quantize(act(h)) @ quantize(w2).T + bias2

Backward keeps x, the norm's statistics and its quantized output, h, and the weights' copies. The activation is made
again from h as it is quantized for w2's gradient, with forward's scale; its gradient is quantized as it is computed,
and bias1's gradient is summed on the way. A tensor that a role leaves in high precision, or quantizes by a user's own
code, is stored instead (`layernorm_linear.fusable`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diptych.common.arguments import require_recipe
from diptych.common.fused import ActivationOptions, activation_options
from diptych.common.recipes import Recipe
from diptych.common.schedule import Schedule
from diptych.torch import fused, primitives
from diptych.torch.checkpoint import checkpoint
from diptych.torch.custom_op import CustomOp
from diptych.torch.fused import FusedInput
from diptych.torch.fx import as_leaf
from diptych.torch.layer_node import finished, kept_spec, result_proto, run, weight_gradient
from diptych.torch.layernorm_linear import (
    NormedArguments,
    NormedModule,
    fusable,
    input_for,
    input_fusable,
    input_gradient,
    normed_fprop,
    require_sizes,
)
from diptych.torch.model_init import initial_weight, initialize
from diptych.torch.operands import pack, pick, unpack
from diptych.torch.products import Options, encode, fprop, has_one_amax, quantize_calls, record_late, rounded, scale_of
from diptych.torch.proto import TensorProto
from diptych.torch.quantized import QuantizedTensor
from diptych.torch.te_arguments import absorb, dtype_of, one_input


@dataclasses.dataclass
class _Arguments(NormedArguments):
    """`activation`: `ActivationOptions` as scalars. Layers are fc1 and fc2, which makes its input's copy again."""

    weights: ClassVar[tuple[str, ...]] = ("weight1", "weight2")
    rngs: ClassVar[tuple[str, ...]] = ("rng1", "rng2")

    weight1: Tensor | QuantizedTensor
    bias1: Tensor | None
    weight2: Tensor | QuantizedTensor
    bias2: Tensor | None
    rng1: Tensor | None
    rng2: Tensor | None
    activation: tuple[Any, ...]

    def wants_dh(self, needs: tuple[str, ...]) -> bool:
        """Whether the gradient of fc1's output is needed."""
        return self.wants_dz(needs) or "weight1" in needs or "bias1" in needs

    def wanted(self, needs: tuple[str, ...]) -> tuple[tuple[bool, bool], ...]:
        return (self.wants_dz(needs), "weight1" in needs), (self.wants_dh(needs), "weight2" in needs)


def _activated(h: Tensor, activation: ActivationOptions, s2: Schedule, reads: str = "") -> Tensor | FusedInput:
    """The input of fc2, unstored where it may be. `reads`: what wgrad does of it."""
    unstored = input_fusable(s2.plan) and reads != "original"
    return fused.activated(h, activation) if unstored else fused.activation(h, activation)


def _keeps_amax(s2: Schedule) -> bool:
    """Whether quantizing the activation computes an amax that backward, which quantizes it again, needs too."""
    if not (s2.x_late and input_fusable(s2.plan)):
        return False
    return bool([c for c in s2.x if has_one_amax(c)])


def _forward(a: _Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    s1, s2 = a.schedules(needs)
    (fc1, fc2), amaxes = a.forward_options(needs)
    h, z, stats, copies_z, copies_w1 = normed_fprop(
        a.x, a.gamma, a.beta, a.weight1, a.bias1, a.rng1, s1, fc1, a.norm_options(), False
    )
    h = rounded(h, s1.results[0], fc1, a.rng1)
    act = _activated(h, ActivationOptions(*a.activation), s2)
    encoded = encode(act, s2.x, fc2, a.rng2, fc2.replay)
    y, _, copies_w2 = fprop(
        h if isinstance(act, FusedInput) else act, a.weight2, a.bias2, a.rng2, s2, fc2, encoded.copies
    )
    saved: list[Tensor] = []
    if s1.x_kept:
        pack(pick(s1.x_kept, copies_z, a.x if z is None else z), saved)
    a.pack_weight(0, s1, copies_w1, saved)
    a.pack_weight(1, s2, copies_w2, saved)
    if s2.w_kept or s2.x_kept:
        saved.append(h)
    if s2.x_kept:
        saved += [scale_of(c, fc2, fc2.replay)[0].clone() for c in s2.x_late if c.state]
        record_late(act, s2, fc2)
        if _keeps_amax(s2):
            assert encoded.amax is not None
            saved.append(encoded.amax)
    if s1.w_kept:
        saved += [t for t in stats if t is not None]
    return (finished(y, s2, fc2, a.rng2), *amaxes), saved


def _layout(a: _Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    return (result_proto(a.x, a.weight2.shape[0], a.schedules(needs)[1]), *a.amax_protos(needs))


def _backward(a: _Arguments, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
    s1, s2 = a.schedules(needs)
    fc1, fc2 = a.backward_options(needs)
    dy, activation = grads[0], ActivationOptions(*a.activation)
    assert dy is not None
    z = unpack(kept_spec(s1.x_kept, s1.plan.input), saved) if s1.x_kept else None
    w1 = a.kept_weight(0, s1, saved) if s1.w_kept else None
    w2 = a.kept_weight(1, s2, saved) if s2.w_kept else None
    h: Any = saved.pop(0) if s2.w_kept or s2.x_kept else None
    rowwise, columnwise = quantize_calls(dy, s2.dy, fc2, a.rng2)
    made: dict[str, Any] = {}
    if s2.x_kept:
        scales = {c.state: saved.pop(0) for c in s2.x_late if c.state}
        act = _activated(h, activation, s2, s2.x_kept)
        amax = saved.pop(0) if _keeps_amax(s2) else None
        copies_a = encode(act, s2.x_late, fc2, a.rng2, scales, amax=amax).copies
        x2 = pick(s2.x_kept, copies_a, h if isinstance(act, FusedInput) else act)
        operand = dy if columnwise is None else columnwise
        made["weight2"] = weight_gradient(operand, x2, a.weight2.dtype, s2, fc2, a.rng2)
        del act, copies_a, x2
    if "bias2" in needs:
        assert a.bias2 is not None
        made["bias2"] = primitives.bias_grad(dy, a.bias2.dtype)
    if s2.w_kept:
        width = h.shape[-1] // 2 if activation.gated else h.shape[-1]
        da = input_gradient(dy if rowwise is None else rowwise, w2, h, s2, fc2, a.rng2, width)
        of_bias = a.bias1.dtype if a.bias1 is not None and "bias1" in needs else None
        rowwise, columnwise, dh, made["bias1"] = _activation_gradient(da, h, activation, s1, fc1, a.rng1, of_bias)
        if s1.w_kept:
            dz = input_gradient(dh if rowwise is None else rowwise, w1, a.x, s1, fc1, a.rng1, a.x.shape[-1])
            made |= a.norm_gradients(dz, saved)
        if s1.x_kept:
            operand = dh if columnwise is None else columnwise
            made["weight1"] = weight_gradient(operand, z, a.weight1.dtype, s1, fc1, a.rng1)
    a.log_amaxes()
    return [made[name] for name in a.gradients(needs)]


def _activation_gradient(
    da: Tensor,
    h: Tensor,
    activation: ActivationOptions,
    s1: Schedule,
    options: Options,
    rng: Tensor | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Any, Any, Any, Tensor | None]:
    """Both copies of h's gradient, itself where it is stored, and bias1's gradient."""
    if not fusable(s1.plan.grad_output):
        dh = fused.activation_grad(da, h, activation)
        copies = quantize_calls(dh, s1.dy, options, rng)
        return *copies, dh, None if bias_dtype is None else primitives.bias_grad(dh, bias_dtype)
    if s1.dy:
        source = fused.activated_grad(da, h, activation)
        made = encode(source, s1.dy, options, rng, sum_dtype=bias_dtype)
        return *made.copies, None, made.column_sum
    # bias1 alone is trained: the same sum, of values that are not quantized
    assert bias_dtype is not None
    dh = fused.activation_grad(da, h, activation, torch.float32)
    return None, None, dh, primitives.bias_grad(dh, bias_dtype)


_layernorm_mlp = CustomOp(
    "diptych::layernorm_mlp", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients,
)  # fmt: skip


class LayerNormMLP(NormedModule):
    """A norm and a two-layer perceptron; inside `autocast` neither the norm's nor the activation's output is stored.

    **Arguments:** `hidden_size`: of input and output. `ffn_hidden_size`: of the activation's output; a gated one has
    fc1 twice as wide. `bias`: of both layers. `activation`: "gelu" (the tanh form), "relu", "silu", "srelu" (relu
    squared), "qgelu" (x sigmoid(1.702 x)), or act(a) * b as "geglu", "reglu", "swiglu", "sreglu", "qgeglu", with a the
    first half of fc1's output. `eps`, `normalization`, `zero_centered_gamma`, `device`, `dtype`, `recipe`, `name`,
    `fuse_wgrad_accumulation`, `delay_wgrad_compute`: as `LayerNormLinear`. `params_dtype`, arguments about
    parallelism: as `Linear`. `init_method`, `output_layer_init_method`: called with fc1's and with fc2's weight to fill
    it (None: as nn.Linear). `return_bias`: the call returns (y, fc2_bias), and y has none added. `checkpoint`: backward
    recomputes the module (`diptych.torch.checkpoint`).

    Parameters: `layer_norm_weight`, `layer_norm_bias` (None for RMSNorm), `fc1_weight` [F or 2F, K], `fc1_bias`,
    `fc2_weight` [K, F], `fc2_bias`. The module kind of roles is "layernorm_mlp", names end in "fc1" and "fc2".

    **Raises:** TypeError and ValueError for arguments of other kinds and values; see `QuantizedModule.quantized_linear`
    for the forward.
    """

    module_kind = "layernorm_mlp"
    layers = ("fc1", "fc2")

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
        **others: Any,
    ) -> None:
        absorb("LayerNormMLP", others)
        require_recipe("LayerNormMLP", recipe)
        require_sizes("LayerNormMLP", hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        super().__init__(fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        placed: dict[str, Any] = {"device": device, "dtype": dtype_of("LayerNormMLP", dtype, params_dtype)}
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.recipe, self.name, self.return_bias, self.checkpoint = recipe, name or "", return_bias, checkpoint
        self.init_method, self.output_layer_init_method = init_method, output_layer_init_method
        self.activation, self.activation_options = activation, activation_options("LayerNormMLP", activation)
        self._make_norm(normalization, hidden_size, eps, zero_centered_gamma, **placed)
        wide = ffn_hidden_size * (2 if self.activation_options.gated else 1)
        self.fc1_weight = nn.Parameter(torch.empty(wide, hidden_size, **placed))
        self.fc1_bias = nn.Parameter(torch.empty(wide, **placed)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, **placed))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, **placed)) if bias else None
        self.reset_parameters()
        self.fc1_weight = initial_weight(self.fc1_weight, recipe, self.module_kind, self._role_name("fc1"))
        self.fc2_weight = initial_weight(self.fc2_weight, recipe, self.module_kind, self._role_name("fc2"))
        self._make_initial_states()

    def reset_parameters(self) -> None:
        """Makes the norm the identity, and the rest anew as `Linear` does."""
        self._reset_norm()
        initialize(self.fc1_weight, self.fc1_bias, self.init_method)
        initialize(self.fc2_weight, self.fc2_bias, self.output_layer_init_method)

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
        return (y, self.fc2_bias) if self.return_bias else y

    def _run(self, input: Tensor, is_first_microbatch: bool | None, skip_weight_update: Tensor | None) -> Tensor:
        gamma, beta, act = self.layer_norm_weight, self.layer_norm_bias, self.activation_options
        w1, b1, w2, b2 = self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias
        if self.return_bias:
            b2 = None
        x = input_for("LayerNormMLP", input, gamma, beta)
        if torch.compiler.is_compiling() and (outside := self._eager_only(w1, w2)) is not None:
            return outside.run(self._run, input, is_first_microbatch, skip_weight_update)
        recipe = self._active_recipe()
        if recipe is None:
            h = self.quantized_linear(fused.layernorm(x, gamma, beta, self.norm), w1, b1, "fc1")
            return self.quantized_linear(fused.activate(h, act), w2, b2, "fc2")
        given = (is_first_microbatch, skip_weight_update)
        fc1, rng1 = self._options_for(recipe, x, w1, "fc1", *given)
        fc2, rng2 = self._options_for(recipe, x, w2, "fc2", *given, save_original_input=True)
        operands = (gamma, beta, self.norm_constants, w1, b1, w2, b2, rng1, rng2, tuple(act))
        return run(_layernorm_mlp, x, recipe, (fc1, fc2), *operands)[0]

    def extra_repr(self) -> str:
        sizes = f"{self.hidden_size}, {self.ffn_hidden_size}, bias={self.fc1_bias is not None}"
        return f"{sizes}, {self.activation}{self._repr_norm()}"
