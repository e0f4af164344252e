"""A norm and the linear layer behind it as one op, whose input is quantized as the norm makes it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from diptych.common.layer_options import COLUMN, ROW
from diptych.common.layers.plan import input_fusable
from diptych.common.layers.schedule import Schedule
from diptych.common.ops.norm import NORMS, NormOptions
from diptych.torch.functional import source as sources
from diptych.torch.functional.source import FusedInput
from diptych.torch.graph.custom_op import CustomOp
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.options import Options
from diptych.torch.layers.products import (
    LayerArguments,
    finished,
    fprop,
    input_gradient,
    result_proto,
    weight_gradient,
)
from diptych.torch.layers.quantize import (
    Encoded,
    kept_spec,
    quantize_calls,
    quantize_operand,
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
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives import norm as norm_ops
from diptych.torch.primitives.constants import Constants
from diptych.torch.tensors.copies import Operand, pack, pick, unpack
from diptych.torch.tensors.quantized import QuantizedTensor


class Normed(NamedTuple):
    """The results of a norm and a linear layer. `z`: the norm's output, None if it is not stored. `operand`: the object
    that the linear layer quantizes, z or a source that computes it."""

    y: Tensor
    z: Tensor | None
    stats: list[Tensor]
    operand: Tensor | FusedInput
    encoded_z: Encoded
    encoded_w: Encoded


def normed_fprop(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None, s: Schedule, options: Options,
    norm: NormOptions, with_z: bool,
) -> Normed:  # fmt: skip
    fuse = input_fusable(s.plan)
    needs_z = with_z or not fuse or (s.x_kept == "original" and not options.originals.input)
    mu, rsigma, z = norm_ops.norm(x, gamma if needs_z else None, beta if needs_z else None, norm)
    operand = sources.normalized(x, gamma, beta, mu, rsigma, norm) if fuse else z
    assert operand is not None
    encoded_z = quantize_operand(operand, s.x, options, options.state.recomputed)
    y, _, encoded_w = fprop(x if fuse or z is None else z, weight, bias, s, options, encoded_z)
    stats = [rsigma] if mu is None else [mu, rsigma]
    return Normed(y, z, stats, operand, encoded_z, encoded_w)


@dataclasses.dataclass
class NormedArguments(LayerArguments):
    """The arguments of an op that begins with a norm. `norm`: its `NormOptions`."""

    gamma: Tensor
    beta: Tensor | None
    norm: Constants

    @staticmethod
    def wants_dz(needs: tuple[str, ...]) -> bool:
        """Returns whether the gradient of the norm's output is needed."""
        return "x" in needs or "gamma" in needs or "beta" in needs

    def kept_operands(self, needs: tuple[str, ...], schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
        again = self._normed_again(schedules[0])
        return ("x", "gamma", "beta") if again else ("x", "gamma") if self.wants_dz(needs) else ()

    def _normed_again(self, s: Schedule) -> bool:
        """Returns whether backward computes the norm's output again for wgrad."""
        originals = self.layers[0][2] if self.options is None else self.options[0].originals
        return s.x_kept != "" and originals[0]

    def norm_options(self) -> NormOptions:
        held = self.norm.items  # a graph rebuilds `NormOptions` as a plain tuple
        return held if isinstance(held, NormOptions) else NormOptions(*held)

    def pack_normed(
        self, made: Normed, s: Schedule, options: Options, saved: list[Tensor], returns_z: bool = False
    ) -> None:
        """Saves the tensors that `kept_stats` and `kept_normed` take."""
        again = self._normed_again(s)
        if s.w_kept or again:
            saved += made.stats
        if s.x_late:
            save_for_late(made.operand, s.x, s.x_late, options, made.encoded_z.amax, saved)
        elif s.x_kept and not again:
            operand = pick(s.x_kept, made.encoded_z.copies, self.x if made.z is None else made.z)
            result = returns_z and operand is made.z and self.options is None  # a node returns no tensor twice
            pack(operand.clone() if result else operand, saved)

    def kept_stats(self, s: Schedule, saved: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Takes (mu, rsigma) from the front of `saved`. Either is None if backward does not read it."""
        if not (s.w_kept or self._normed_again(s)):
            return None, None
        mu = saved.pop(0) if self.norm_options().which == NORMS["LayerNorm"] else None
        return mu, saved.pop(0)

    def kept_normed(self, s: Schedule, options: Options, stats: tuple[Any, Any], saved: list[Tensor]) -> Operand:
        """Returns the operand that wgrad reads for the norm's output, made from x if backward keeps only x."""
        if not self._normed_again(s):
            return unpack(kept_spec(s.x_kept, s.plan.input), saved)
        norm = self.norm_options()
        if input_fusable(s.plan) and s.x_late:
            z: Any = sources.normalized(self.x, self.gamma, self.beta, *stats, norm)
        else:
            z = norm_ops.norm(self.x, self.gamma, self.beta, norm)[2]
        scales, amax = saved_for_late(s.x, s.x_late, options, saved)
        return pick(s.x_kept, quantize_operand(z, s.x_late, options, scales, amax=amax).copies, z)

    def norm_gradients(self, dz: Tensor, stats: tuple[Any, Any], options: Options) -> dict[str, Any]:
        """Returns the gradients of the norm's operands. `options`: those of the layer behind the norm."""
        dx, *of_norm = norm_ops.norm_grad(dz, self.x, self.gamma, *stats, self.norm_options(), self.beta is not None)
        summed = [None if t is None else sum_over_tokens(t, options.cut, COLUMN) for t in of_norm]
        return dict(zip(("x", "gamma", "beta"), (dx, *summed), strict=True))


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
    if options.cut is not None:
        require_whole_blocks(options.module, s, options.cut, tuple(a.x.shape[:-1]), a.weight)
    normed = normed_fprop(a.x, a.gamma, a.beta, a.weight, a.bias, s, options, a.norm_options(), a.with_z)
    saved: list[Tensor] = []
    a.pack_weight(0, s, options, normed.encoded_w, saved)
    a.pack_normed(normed, s, options, saved, a.with_z)
    y, z = finished(normed.y, s, options), normed.z
    return (y, z, *amaxes) if a.with_z and z is not None else (y, *amaxes), saved


def _layout(a: _Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    y = result_proto(a.x, a.weight.shape[0], a.schedules(needs)[0], a.cut(0))
    z = TensorProto(a.x.shape, a.x.dtype, None, a.x.device, True)
    return (y, z, *a.amax_protos(needs)) if a.with_z else (y, *a.amax_protos(needs))


def _backward(
    a: _Arguments,
    needs: tuple[str, ...],
    saved: list[Tensor],
    grads: list[Tensor | None],
    asked: tuple[str, ...] | None = None,
) -> list[Tensor]:
    s, options, dy = a.schedules(needs)[0], a.backward_options(needs)[0], grads[0]
    assert dy is not None
    cut, now = options.cut, needs if asked is None else asked
    part = a.schedules(needs, asked)[0]
    copies = quantize_calls(dy, gradient_calls(part.dy, cut), options)
    of_dgrad, of_wgrad = whole_gradients(dy, copies, part, cut)
    made: dict[str, Any] = {}
    w = a.kept_weight(0, s, options, saved, part.w_kept != "") if s.w_kept else None
    stats = a.kept_stats(s, saved)
    needs_dw = "weight" in now
    z = whole_input(lambda: a.kept_normed(s, options, stats, saved), cut) if needs_dw else None
    dz = None
    if part.w_kept:
        dz = input_gradient(of_dgrad.finish(), w, a.x, s, options, a.x.shape[-1])
        del w
    if z is not None:
        made["weight"] = weight_gradient(of_wgrad.finish(), z.finish(), a.weight.dtype, s, options)
        del z
    if dz is not None:
        dz_out = grads[1] if a.with_z else None
        whole = dz.finish() if dz_out is None else dz.finish() + dz_out
        made |= a.norm_gradients(whole, stats, options)
    if "bias" in now:
        assert a.bias is not None
        made["bias"] = sum_over_tokens(gemm_ops.bias_grad(dy, a.bias.dtype), cut, ROW)
    a.log_amaxes()
    return [made[name] for name in a.gradients(now)]


layernorm_linear = CustomOp(
    "diptych::layernorm_linear", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients, draws=_Arguments.draws, parts=True,
)  # fmt: skip
