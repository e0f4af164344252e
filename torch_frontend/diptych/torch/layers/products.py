"""The three products of a linear layer under a recipe.

    y  = quantize(x)  @ quantize(w).T + bias      fprop  [M, K] @ [N, K].T
    dx = quantize(dy) @ quantize(w)               dgrad  [M, N] @ [N, K]
    dw = quantize(dy).T @ quantize(x)             wgrad  [M, N].T @ [M, K]
    db = bias_grad(dy)

Invariants:

- `linear_plan` of `common.layers.plan` says which operand is quantized how, and a `Schedule` which of these copies one
  call needs: a columnwise copy of x only where the weight is trained, one of w only where x needs a gradient.
- Forward saves what backward reads through `save_for_backward`, as plain tensors, and nothing else.
- An operand is a `Copy`, or a tensor in high precision. Two copies multiply in the core; a product with any other
  operand runs in high precision on what a copy stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.common.layers.schedule import Schedule
from diptych.common.ops import shapes
from diptych.torch.layers.held import given_copies, held_copies
from diptych.torch.layers.options import Options
from diptych.torch.layers.quantize import quantize_calls, requantized_result
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.tensors.copies import Copies, Operand, pick, values
from diptych.torch.tensors.quantized import QuantizedTensor, high_precision

# --- operands and products -------------------------------------------------------------------------------------------


def product(gemm: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """op(a) @ op(b) + bias, [rows, cols] in dtype."""
    if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
        return gemm_ops.gemm(a, b, bias, 1.0, dtype, fast_accum)
    inner = a.dtype if isinstance(a, Tensor) else b.dtype
    left, right = values(a, inner), values(b, inner)
    with torch.amp.autocast(left.device.type, enabled=False):
        if gemm == "fprop":
            return F.linear(left, right, None if bias is None else bias.to(inner)).to(dtype)
        return ((left.t() if gemm == "wgrad" else left) @ right).to(dtype)


class WeightGradient(NamedTuple):
    """wgrad, ready to run: `compute` makes it, `accumulate` adds it to a float32 buffer."""

    dy: Operand
    x: Operand
    dtype: torch.dtype
    schedule: Schedule
    options: Options
    rng: Tensor | None

    def compute(self) -> Tensor:
        dw = product("wgrad", self.dy, self.x, None, self.dtype, self.schedule.plan.fast_accum[2])
        return requantized_result(dw, self.schedule.results[2], self.options, self.rng)

    def accumulate(self, acc: Tensor) -> None:
        if self.schedule.results[2] is not None or isinstance(self.dy, Tensor) or isinstance(self.x, Tensor):
            acc += self._replace(dtype=acc.dtype).compute().view(acc.shape)
        else:
            fast = self.schedule.plan.fast_accum[2]
            gemm_ops.gemm_into(acc, self.dy, self.x, None, 1.0, 1.0, fast)


# --- the layer -------------------------------------------------------------------------------------------------------


def fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, rng: Tensor | None, s: Schedule, options: Options, given: Any = None
) -> tuple[Tensor, Copies, Copies]:
    """y, and the copies of x and w. `given`: the input's copies, where x alone is not what is multiplied."""
    copies_x = given
    if isinstance(x, QuantizedTensor):
        copies_x = given_copies(x, s)
    elif given is None:
        copies_x = quantize_calls(x, s.x, options, rng, options.recomputed_scales)
    copies_w = options.weight_copies
    if isinstance(weight, QuantizedTensor):
        name = f"{options.module}: the weight"
        copies_w = held_copies(weight, s.w, name, "run it by the recipe of its quantized_model_init")
    elif copies_w is None:
        copies_w = quantize_calls(weight, s.w, options, rng, options.recomputed_scales)
    a = high_precision(options.module, x) if copies_x[0] is None else copies_x[0]
    b = pick("original", copies_w, weight) if s.plan.weight.rowwise is None else copies_w[0]
    y = product("fprop", a, b, bias, x.dtype, s.plan.fast_accum[0])
    if x.dim() != 2:
        y = y.view(shapes.gemm_out_shape(x.shape, y.shape[0], y.shape[1], False))
    return y, copies_x, copies_w
