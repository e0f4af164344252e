"""Norm, linear layer, activation and linear layer as one op, with as little between them as the recipe allows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from diptych.common.layer_options import ROW
from diptych.common.layers.plan import fusable, input_fusable
from diptych.common.layers.schedule import Schedule
from diptych.common.ops.activation import ActivationOptions
from diptych.torch.functional import source as sources
from diptych.torch.functional.source import FusedInput
from diptych.torch.graph.custom_op import CustomOp
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.layernorm_linear import NormedArguments, normed_fprop
from diptych.torch.layers.options import Options
from diptych.torch.layers.products import finished, fprop, input_gradient, result_proto, weight_gradient
from diptych.torch.layers.quantize import (
    quantize_calls,
    quantize_operand,
    requantized_result,
    save_for_late,
    saved_for_late,
)
from diptych.torch.layers.tensor_parallel import (
    gradient_calls,
    require_whole_blocks,
    sum_over_tokens,
    whole_gradients,
    whole_input,
)
from diptych.torch.primitives import activation as activation_ops
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.tensors.copies import pick
from diptych.torch.tensors.quantized import QuantizedTensor


@dataclasses.dataclass
class _Arguments(NormedArguments):
    """One call. `activation`: the fields of `ActivationOptions`. The layers are fc1 and fc2; backward quantizes fc2's
    input again."""

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
        """Returns whether the gradient of fc1's output is needed."""
        return self.wants_dz(needs) or "weight1" in needs or "bias1" in needs

    def wanted(self, needs: tuple[str, ...]) -> tuple[tuple[bool, bool], ...]:
        return (self.wants_dz(needs), "weight1" in needs), (self.wants_dh(needs), "weight2" in needs)


def _activated(h: Tensor, activation: ActivationOptions, s2: Schedule, reads: str = "") -> Tensor | FusedInput:
    """Returns the input of fc2, as a source if it need not be stored. `reads`: the form in which wgrad reads it, as in
    `Schedule.x_kept`."""
    unstored = input_fusable(s2.plan) and reads != "original"
    return sources.activated(h, activation) if unstored else activation_ops.activation(h, activation)


def _forward(a: _Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    s1, s2 = a.schedules(needs)
    (fc1, fc2), amaxes = a.forward_options(needs)
    if fc1.cut is not None and fc2.cut is not None:
        tokens = tuple(a.x.shape[:-1])
        require_whole_blocks(
            f"{fc1.module} fc1", s1, fc1.cut, tokens, a.weight1, 1 + ActivationOptions(*a.activation).gated
        )
        of_fc2 = (fc1.cut.out_rows(tokens[0]), *tokens[1:]) if tokens else tokens
        require_whole_blocks(f"{fc2.module} fc2", s2, fc2.cut, of_fc2, a.weight2)
    normed = normed_fprop(a.x, a.gamma, a.beta, a.weight1, a.bias1, s1, fc1, a.norm_options(), False)
    h = requantized_result(normed.y, s1.results[0], fc1)
    act = _activated(h, ActivationOptions(*a.activation), s2)
    encoded = quantize_operand(act, s2.x, fc2, fc2.state.recomputed)
    y, _, encoded_w2 = fprop(h if isinstance(act, FusedInput) else act, a.weight2, a.bias2, s2, fc2, encoded)
    saved: list[Tensor] = []  # backward reads these from the front
    if s2.w_kept or s2.x_kept:
        saved.append(h)
    if s2.x_kept:
        save_for_late(act, s2.x, s2.x_late, fc2, encoded.amax, saved)
    a.pack_weight(1, s2, fc2, encoded_w2, saved)
    a.pack_weight(0, s1, fc1, normed.encoded_w, saved)
    a.pack_normed(normed, s1, fc1, saved)
    return (finished(y, s2, fc2), *amaxes), saved


def _layout(a: _Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    y = result_proto(a.x, a.weight2.shape[0], a.schedules(needs)[1], a.cut(1), a.cut(0))
    return (y, *a.amax_protos(needs))


def _backward(
    a: _Arguments,
    needs: tuple[str, ...],
    saved: list[Tensor],
    grads: list[Tensor | None],
    asked: tuple[str, ...] | None = None,
) -> list[Tensor]:
    s1, s2 = a.schedules(needs)
    fc1, fc2 = a.backward_options(needs)
    cut1, cut2 = fc1.cut, fc2.cut
    now, (part1, part2) = needs if asked is None else asked, a.schedules(needs, asked)
    dy, activation = grads[0], ActivationOptions(*a.activation)
    assert dy is not None
    h: Any = saved.pop(0) if s2.w_kept or s2.x_kept else None
    copies = quantize_calls(dy, gradient_calls(part2.dy, cut2), fc2)
    of_dgrad, of_wgrad = whole_gradients(dy, copies, part2, cut2)
    del copies
    made: dict[str, Any] = {}
    scales, amax = saved_for_late(s2.x, s2.x_late, fc2, saved) if s2.x_kept else (None, None)
    if part2.x_kept:
        act = _activated(h, activation, s2, s2.x_kept)
        copies_a = quantize_operand(act, s2.x_late, fc2, scales, amax=amax).copies
        x2 = pick(s2.x_kept, copies_a, h if isinstance(act, FusedInput) else act)
        made["weight2"] = weight_gradient(of_wgrad.finish(), x2, a.weight2.dtype, s2, fc2)
        del act, copies_a, x2
    del of_wgrad
    if "bias2" in now:
        assert a.bias2 is not None
        made["bias2"] = sum_over_tokens(gemm_ops.bias_grad(dy, a.bias2.dtype), cut2, ROW)
    if part2.w_kept:
        width = h.shape[-1] // 2 if activation.gated else h.shape[-1]
        of_bias = a.bias1.dtype if a.bias1 is not None and "bias1" in now else None
        # The largest tensors of backward are made from here on. Each is deleted after its last use.
        w2 = a.kept_weight(1, s2, fc2, saved)
        da = input_gradient(of_dgrad.finish(), w2, h, s2, fc2, width).finish()
        del of_dgrad, w2
        rowwise, columnwise, dh, made["bias1"] = _activation_gradient(da, h, activation, part1, fc1, of_bias)
        del da
        w1 = a.kept_weight(0, s1, fc1, saved, part1.w_kept != "") if s1.w_kept else None
        stats = a.kept_stats(s1, saved)
        z = whole_input(lambda: a.kept_normed(s1, fc1, stats, saved), cut1) if part1.x_kept else None
        dz = None
        if part1.w_kept:
            dz = input_gradient(dh if rowwise is None else rowwise, w1, a.x, s1, fc1, a.x.shape[-1])
        del w1, rowwise
        if z is not None:
            operand = dh if columnwise is None else columnwise
            made["weight1"] = weight_gradient(operand, z.finish(), a.weight1.dtype, s1, fc1)
            del z, operand, columnwise, dh
        if dz is not None:
            made |= a.norm_gradients(dz.finish(), stats, fc1)
    a.log_amaxes()
    return [made[name] for name in a.gradients(now)]


def _activation_gradient(
    da: Tensor,
    h: Tensor,
    activation: ActivationOptions,
    s1: Schedule,
    options: Options,
    bias_dtype: torch.dtype | None,
) -> tuple[Any, Any, Any, Tensor | None]:
    """Computes h's gradient. Returns (its rowwise copy, its columnwise copy, the gradient itself if it is stored,
    bias1's gradient); each that is not made is None."""
    if not fusable(s1.plan.grad_output):
        dh = activation_ops.activation_grad(da, h, activation)
        copies = quantize_calls(dh, s1.dy, options)
        return *copies, dh, None if bias_dtype is None else gemm_ops.bias_grad(dh, bias_dtype)
    if s1.dy:
        source = sources.activated_grad(da, h, activation)
        made = quantize_operand(source, s1.dy, options, sum_dtype=bias_dtype)
        return *made.copies, None, made.column_sum
    # Only bias1 is trained: its gradient is the same sum, and nothing is quantized.
    assert bias_dtype is not None
    dh = activation_ops.activation_grad(da, h, activation, torch.float32)
    return None, None, dh, gemm_ops.bias_grad(dh, bias_dtype)


layernorm_mlp = CustomOp(
    "diptych::layernorm_mlp", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients, draws=_Arguments.draws, parts=True,
)  # fmt: skip
