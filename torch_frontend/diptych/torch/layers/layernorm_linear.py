"""A norm and the linear layer behind it as one op, whose input is quantized as the norm makes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from diptych.common.layers.plan import input_fusable
from diptych.common.layers.schedule import Schedule
from diptych.common.ops.norm import NORMS, NormOptions
from diptych.torch.functional import source as sources
from diptych.torch.graph.custom_op import CustomOp
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.options import Options
from diptych.torch.layers.products import (
    LayerArguments,
    finished,
    fprop,
    kept_spec,
    product,
    result_proto,
    weight_gradient,
)
from diptych.torch.layers.quantize import quantize_calls, quantize_operand, requantized_result
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives import norm as norm_ops
from diptych.torch.primitives.constants import Constants
from diptych.torch.tensors.copies import Copies, Operand, pack, pick, unpack
from diptych.torch.tensors.quantized import QuantizedTensor


def input_gradient(
    dy: Operand, w: Operand, x: Tensor, s: Schedule, options: Options, rng: Tensor | None, width: int
) -> Tensor:
    """Computes dgrad, [..., width] with x's leading dimensions, in x's dtype."""
    dx = product("dgrad", dy, w, None, x.dtype, s.plan.options[1])
    return requantized_result(dx, s.results[1], options, rng).view(*x.shape[:-1], width)


def normed_fprop(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None, rng: Tensor | None,
    s: Schedule, options: Options, norm: NormOptions, with_z: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, Tensor], Copies, Copies]:  # fmt: skip
    """Returns y, the norm's output z if it is stored, (mu, rsigma), and the copies of z and of the weight."""
    fuse = input_fusable(s.plan)
    needs_z = with_z or not fuse or s.x_kept == "original"
    mu, rsigma, z = norm_ops.norm(x, gamma if needs_z else None, beta if needs_z else None, norm)
    operand = sources.normalized(x, gamma, beta, mu, rsigma, norm) if fuse else z
    assert operand is not None
    copies_z = quantize_operand(operand, s.x, options, rng, options.recomputed_scales).copies
    y, _, copies_w = fprop(x if fuse or z is None else z, weight, bias, rng, s, options, copies_z)
    return y, z, (mu, rsigma), copies_z, copies_w


@dataclasses.dataclass
class NormedArguments(LayerArguments):
    """The arguments of an op that begins with a norm. `norm`: its `NormOptions`."""

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
        """The gradients of the norm's operands. Removes the norm's statistics from the front of `saved`."""
        options = self.norm_options()
        mu = saved.pop(0) if options.which == NORMS["LayerNorm"] else None
        made = norm_ops.norm_grad(dz, self.x, self.gamma, mu, saved.pop(0), options, self.beta is not None)
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
        made["bias"] = gemm_ops.bias_grad(dy, a.bias.dtype)
    a.log_amaxes()
    return [made[name] for name in a.gradients(needs)]


layernorm_linear = CustomOp(
    "diptych::layernorm_linear", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients,
)  # fmt: skip
