"""`LayerNormMLP`: norm, linear layer, activation, linear layer, with as little stored between as their gradients allow.

    h = quantize(norm(x)) @ quantize(w1).T + bias1
    y = quantize(act(h)) @ quantize(w2).T + bias2

Backward keeps x, the norm's statistics and its quantized output, h, and the weights' copies. The activation is made
again from h as it is quantized for w2's gradient, with forward's scale; its gradient is quantized as it is computed,
and bias1's gradient is summed on the way. A tensor that a role leaves in high precision, or quantizes by a user's own
code, is stored instead (`layernorm_linear.fusable`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diptych.common.fused import ActivationOptions, NormOptions, activation_options
from diptych.common.recipes import Recipe
from diptych.common.schedule import Schedule
from diptych.torch import fused, primitives
from diptych.torch.fused import FusedInput
from diptych.torch.layernorm_linear import (
    NormedModule,
    encode,
    fusable,
    input_for,
    input_fusable,
    input_gradient,
    normed_fprop,
    require_recipe,
    require_sizes,
    reset_linear,
    result,
    weight_gradient,
)
from diptych.torch.products import (
    Options,
    fprop,
    pack,
    pick,
    quantize_calls,
    record_late,
    rounded,
    scale_of,
    schedule,
    unpack,
)
from diptych.torch.weights import initial_weight


class _Call(NamedTuple):
    """What one forward and backward are of. `need_*`: whose gradients are wanted."""

    recipe: Recipe
    fc1: Options
    fc2: Options
    norm: NormOptions
    activation: ActivationOptions
    need_dz: bool
    need_dw1: bool
    need_dh: bool
    need_dw2: bool

    def schedules(self) -> tuple[Schedule, Schedule]:
        """Of fc1 and of fc2, whose input's columnwise copy is backward's to make."""
        return (
            schedule(self.recipe, self.fc1.module, self.fc1.name, self.need_dz, self.need_dw1),
            schedule(self.recipe, self.fc2.module, self.fc2.name, self.need_dh, self.need_dw2, True),
        )


def _activated(h: Tensor, activation: ActivationOptions, s2: Schedule) -> Tensor | FusedInput:
    """The input of fc2, unstored where it may be."""
    return fused.activated(h, activation) if input_fusable(s2.plan) else fused.activation(h, activation)


class _LayerNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        rng1: Tensor | None,
        rng2: Tensor | None,
        call: _Call,
    ) -> Tensor:
        fc1, fc2 = call.fc1, call.fc2
        s1, s2 = call.schedules()
        h, z, stats, copies_z, copies_w1 = normed_fprop(x, gamma, beta, w1, b1, rng1, s1, fc1, call.norm, False)
        h = rounded(h, s1.results[0], fc1, rng1)
        a = _activated(h, call.activation, s2)
        encoded = encode(a, s2.x, fc2, rng2, fc2.replay)
        y, _, copies_w2 = fprop(h if isinstance(a, FusedInput) else a, w2, b2, rng2, s2, fc2, encoded.copies)
        saved: list[Tensor] = []
        spec_z = spec_w1 = spec_w2 = None
        late_amax = None
        if call.need_dw1:
            spec_z = pack(pick(s1.x_kept, copies_z, x if z is None else z), saved)
        if call.need_dz:
            spec_w1 = pack(pick(s1.w_kept, copies_w1, w1), saved)
            saved += [x, gamma, *[t for t in stats if t is not None]]
        if call.need_dh:
            spec_w2 = pack(pick(s2.w_kept, copies_w2, w2), saved)
        if call.need_dh or call.need_dw2:
            saved.append(h)
        if call.need_dw2:
            saved += [scale_of(c, fc2, fc2.replay)[0].clone() for c in s2.x_late if c.state]
            record_late(a, s2, fc2, fused.amax if isinstance(a, FusedInput) else primitives.amax)
            late_amax = encoded.amax
        optional = (late_amax, rng1 if s1.backward_rng else None, rng2 if s2.backward_rng else None)
        saved += [t for t in optional if t is not None]
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.specs = (
            spec_z,
            spec_w1,
            spec_w2,
            stats[0] is not None,
            beta is not None,
            [t is not None for t in optional],
        )
        ctx.dtypes = (w1.dtype, w2.dtype, None if b1 is None else b1.dtype, None if b2 is None else b2.dtype)
        return rounded(y, s2.results[0], fc2, rng2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        fused.refuse_second_derivative("diptych.torch.LayerNormMLP")
        call: _Call = ctx.call
        fc1, fc2 = call.fc1, call.fc2
        s1, s2 = call.schedules()
        spec_z, spec_w1, spec_w2, has_mu, has_beta, has_optional = ctx.specs
        w1_dtype, w2_dtype, b1_dtype, b2_dtype = ctx.dtypes
        saved = list(ctx.saved_tensors)
        w1 = w2 = x = gamma = rsigma = mu = h = dx = dgamma = dbeta = dw1 = db1 = dw2 = db2 = None
        z = unpack(spec_z, saved) if call.need_dw1 else None
        if call.need_dz:
            w1 = unpack(spec_w1, saved)
            x, gamma = saved.pop(0), saved.pop(0)
            mu, rsigma = saved.pop(0) if has_mu else None, saved.pop(0)
        if call.need_dh:
            w2 = unpack(spec_w2, saved)
        if call.need_dh or call.need_dw2:
            h = saved.pop(0)
        scales = {c.state: saved.pop(0) for c in s2.x_late if c.state} if call.need_dw2 else {}
        amax, rng1, rng2 = [saved.pop(0) if has else None for has in has_optional]

        rowwise, columnwise = quantize_calls(dy, s2.dy, fc2, rng2)
        if h is not None and call.need_dw2:
            a = _activated(h, call.activation, s2)
            copies_a = encode(a, s2.x_late, fc2, rng2, scales, amax=amax).copies
            operand = pick(s2.x_kept, copies_a, h if isinstance(a, FusedInput) else a)
            dw2 = weight_gradient(dy if columnwise is None else columnwise, operand, w2_dtype, s2, fc2, rng2)
        if b2_dtype is not None and ctx.needs_input_grad[6]:
            db2 = primitives.bias_grad(dy, b2_dtype)
        if h is not None and call.need_dh:
            width = h.size(-1) // 2 if call.activation.gated else h.size(-1)
            da = input_gradient(dy if rowwise is None else rowwise, w2, h, s2, fc2, rng2, width)
            of_bias = b1_dtype if ctx.needs_input_grad[4] else None
            rowwise, columnwise, dh, db1 = _activation_gradient(da, h, call, s1, rng1, of_bias)
            if x is not None and gamma is not None and rsigma is not None:
                dz = input_gradient(dh if rowwise is None else rowwise, w1, x, s1, fc1, rng1, x.size(-1))
                dx, dgamma, dbeta = fused.norm_grad(dz, x, gamma, mu, rsigma, call.norm, has_beta)
            if call.need_dw1:
                dw1 = weight_gradient(dh if columnwise is None else columnwise, z, w1_dtype, s1, fc1, rng1)
        return dx, dgamma, dbeta, dw1, db1, dw2, db2, None, None, None


def _activation_gradient(
    da: Tensor, h: Tensor, call: _Call, s1: Schedule, rng: Tensor | None, bias_dtype: torch.dtype | None
) -> tuple[Any, Any, Any, Tensor | None]:
    """Both copies of h's gradient, itself where it is stored, and bias1's gradient."""
    if not fusable(s1.plan.grad_output):
        dh = fused.activation_grad(da, h, call.activation)
        copies = quantize_calls(dh, s1.dy, call.fc1, rng)
        return *copies, dh, None if bias_dtype is None else primitives.bias_grad(dh, bias_dtype)
    if s1.dy:
        source = fused.activated_grad(da, h, call.activation)
        made = encode(source, s1.dy, call.fc1, rng, sum_dtype=bias_dtype)
        return *made.copies, None, made.column_sum
    # bias1 alone is trained: the same sum, of values that are not quantized
    assert bias_dtype is not None
    dh = fused.activation_grad(da, h, call.activation, torch.float32)
    return None, None, dh, primitives.bias_grad(dh, bias_dtype)


class LayerNormMLP(NormedModule):
    """A norm and a two-layer perceptron; inside `autocast` neither the norm's nor the activation's output is stored.

    **Arguments:** `hidden_size`: of input and output. `ffn_hidden_size`: of the activation's output; a gated one has
    fc1 twice as wide. `bias`: of both layers. `activation`: "gelu" (the tanh form), "relu", "silu", "srelu" (relu
    squared), "qgelu" (x sigmoid(1.702 x)), or act(a) * b as "geglu", "reglu", "swiglu", "sreglu", "qgeglu", with a the
    first half of fc1's output. `eps`, `normalization`, `zero_centered_gamma`, `device`, `dtype`, `recipe`, `name`,
    `fuse_wgrad_accumulation`, `delay_wgrad_compute`: as `LayerNormLinear`.

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
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str = "",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        require_recipe("LayerNormMLP", recipe)
        require_sizes("LayerNormMLP", hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        super().__init__(fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.recipe, self.name = recipe, name
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

    def reset_parameters(self) -> None:
        """The norm to the identity, the rest as nn.Linear."""
        self._reset_norm()
        reset_linear(self.fc1_weight, self.fc1_bias)
        reset_linear(self.fc2_weight, self.fc2_bias)

    def forward(
        self, input: Tensor, is_first_microbatch: bool | None = None, skip_weight_update: Tensor | None = None
    ) -> Tensor:
        gamma, beta, act = self.layer_norm_weight, self.layer_norm_bias, self.activation_options
        w1, b1, w2, b2 = self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias
        x = input_for("LayerNormMLP", input, gamma, beta)
        recipe = self._active_recipe()
        if recipe is None:
            h = self.quantized_linear(fused.layernorm(x, gamma, beta, self.norm), w1, b1, "fc1")
            return self.quantized_linear(fused.activate(h, act), w2, b2, "fc2")
        fc1, rng1 = self._options_for(recipe, x, w1, "fc1", is_first_microbatch, skip_weight_update)
        fc2, rng2 = self._options_for(recipe, x, w2, "fc2", is_first_microbatch, skip_weight_update)
        if torch.is_grad_enabled():
            need_dz = x.requires_grad or gamma.requires_grad or (beta is not None and beta.requires_grad)
            need_dh = need_dz or w1.requires_grad or (b1 is not None and b1.requires_grad)
            if need_dh or w2.requires_grad or (b2 is not None and b2.requires_grad):
                needs = (need_dz, w1.requires_grad, need_dh, w2.requires_grad)
                call = _Call(recipe, fc1, fc2, self.norm, act, *needs)
                return _LayerNormMLP.apply(x, gamma, beta, w1, b1, w2, b2, rng1, rng2, call)
        s1, s2 = _Call(recipe, fc1, fc2, self.norm, act, False, False, False, False).schedules()
        h = normed_fprop(x, gamma, beta, w1, b1, rng1, s1, fc1, self.norm, False)[0]
        h = rounded(h, s1.results[0], fc1, rng1)
        a = _activated(h, act, s2)
        copies_a = encode(a, s2.x, fc2, rng2, fc2.replay).copies
        y = fprop(h if isinstance(a, FusedInput) else a, w2, b2, rng2, s2, fc2, copies_a)[0]
        return result(y, s2, fc2, rng2)

    def extra_repr(self) -> str:
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        return f"{sizes}, bias={self.fc1_bias is not None}, activation={self.activation!r}, {self._repr_norm()}"
