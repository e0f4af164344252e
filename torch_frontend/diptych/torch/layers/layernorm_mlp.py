"""Norm, linear layer, activation and linear layer as one op, with as little between them as the recipe allows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from diptych.common.layers.plan import fusable, input_fusable
from diptych.common.layers.schedule import Schedule
from diptych.common.ops.activation import ActivationOptions
from diptych.torch.functional import source as sources
from diptych.torch.functional.source import FusedInput
from diptych.torch.graph.custom_op import CustomOp
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.layernorm_linear import NormedArguments, input_gradient, normed_fprop
from diptych.torch.layers.options import Options
from diptych.torch.layers.products import finished, fprop, kept_spec, result_proto, weight_gradient
from diptych.torch.layers.quantize import (
    has_one_amax,
    quantize_calls,
    quantize_operand,
    record_late,
    requantized_result,
    scale_of,
)
from diptych.torch.primitives import activation as activation_ops
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.tensors.copies import pack, pick, unpack
from diptych.torch.tensors.quantized import QuantizedTensor


@dataclasses.dataclass
class _Arguments(NormedArguments):
    """`activation`: `ActivationOptions` as scalars. The layers are fc1 and fc2; backward quantizes fc2's input
    again."""

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
    """Returns the input of fc2, unstored if possible. `reads`: the operand that wgrad reads, as `Schedule.x_kept`."""
    unstored = input_fusable(s2.plan) and reads != "original"
    return sources.activated(h, activation) if unstored else activation_ops.activation(h, activation)


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
    h = requantized_result(h, s1.results[0], fc1, a.rng1)
    act = _activated(h, ActivationOptions(*a.activation), s2)
    encoded = quantize_operand(act, s2.x, fc2, a.rng2, fc2.recomputed_scales)
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
        saved += [scale_of(c, fc2, fc2.recomputed_scales)[0].clone() for c in s2.x_late if c.state]
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
        copies_a = quantize_operand(act, s2.x_late, fc2, a.rng2, scales, amax=amax).copies
        x2 = pick(s2.x_kept, copies_a, h if isinstance(act, FusedInput) else act)
        operand = dy if columnwise is None else columnwise
        made["weight2"] = weight_gradient(operand, x2, a.weight2.dtype, s2, fc2, a.rng2)
        del act, copies_a, x2, operand
    columnwise = None
    if "bias2" in needs:
        assert a.bias2 is not None
        made["bias2"] = gemm_ops.bias_grad(dy, a.bias2.dtype)
    if s2.w_kept:
        width = h.shape[-1] // 2 if activation.gated else h.shape[-1]
        of_bias = a.bias1.dtype if a.bias1 is not None and "bias1" in needs else None
        # The largest tensors of backward live from here on: each is dropped where it is read for the last time.
        da = input_gradient(dy if rowwise is None else rowwise, w2, h, s2, fc2, a.rng2, width)
        del rowwise, w2
        rowwise, columnwise, dh, made["bias1"] = _activation_gradient(da, h, activation, s1, fc1, a.rng1, of_bias)
        del da
        if s1.w_kept:
            dz = input_gradient(dh if rowwise is None else rowwise, w1, a.x, s1, fc1, a.rng1, a.x.shape[-1])
            del rowwise, w1
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
    """Computes h's gradient: (its two quantized copies, the gradient itself where it is stored, bias1's gradient)."""
    if not fusable(s1.plan.grad_output):
        dh = activation_ops.activation_grad(da, h, activation)
        copies = quantize_calls(dh, s1.dy, options, rng)
        return *copies, dh, None if bias_dtype is None else gemm_ops.bias_grad(dh, bias_dtype)
    if s1.dy:
        source = sources.activated_grad(da, h, activation)
        made = quantize_operand(source, s1.dy, options, rng, sum_dtype=bias_dtype)
        return *made.copies, None, made.column_sum
    # bias1 alone is trained: the same sum, of values that are not quantized
    assert bias_dtype is not None
    dh = activation_ops.activation_grad(da, h, activation, torch.float32)
    return None, None, dh, gemm_ops.bias_grad(dh, bias_dtype)


layernorm_mlp = CustomOp(
    "diptych::layernorm_mlp", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients,
)  # fmt: skip
