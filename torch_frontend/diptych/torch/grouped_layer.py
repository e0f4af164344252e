"""`grouped_linear`: a linear layer for each group of rows as one op, eagerly and as two nodes of a graph.

    y[r]  = quantize(x)[r]  @ quantize(w[g]).T + bias[g]      fprop  rows of group g, [R, K] @ [G, N, K].T
    dx[r] = quantize(dy)[r] @ quantize(w[g])                  dgrad  [R, N] @ [G, N, K]
    dw[g] = quantize(dy)[of g].T @ quantize(x)[of g]          wgrad  over the rows of group g
    db[g] = the sum of dy's rows in group g

x and dy are quantized whole, as a linear layer's are; w is quantized as G tensors, but that delayed scaling has one
scale for all of them, and one amax over all. Rows in no group are zeros in y and dx, and are not summed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common import shapes
from diptych.common.errors import DTypeError, ShapeError, UnsupportedError
from diptych.common.grouped import kernel_align
from diptych.common.quantizers import RHT
from diptych.common.recipes import CustomRecipe, Recipe
from diptych.common.schedule import Call, Schedule
from diptych.torch import grouped_primitives as primitives
from diptych.torch.custom_op import CustomOp
from diptych.torch.grouped import stack_values
from diptych.torch.grouped_matmul import grouped_matmul
from diptych.torch.layer_node import LayerArguments, finished, kept_spec, result_proto, run
from diptych.torch.operands import Copies, Operand, pack, pick, unpack, values
from diptych.torch.primitives import copies as copies_of
from diptych.torch.products import (
    Options,
    given_copies,
    quantize_calls,
    record_late,
    rounded,
    scale_of,
    schedule,
)
from diptych.torch.proto import TensorProto
from diptych.torch.quantized import QuantizedTensor, high_precision
from diptych.torch.rules import describe, require_device, require_high_precision, require_tensor
from diptych.torch.state import ScaleStates, record_amax


def _nothing(role: Any) -> None:
    """No quantizer for any role."""


HIGH_PRECISION = CustomRecipe(_nothing)
"""Under which the same op is the layer in high precision."""

# --- quantizing and products -----------------------------------------------------------------------------------------


def _quantize_weight(
    weight: Tensor, calls: tuple[Call, ...], options: Options, scales: dict[str, Tensor] | None
) -> Copies:
    """Copies of a stack [G, N, K]. `scales`: use these delayed scales and record nothing."""
    rowwise = columnwise = None
    for call in calls:
        if call.state:
            scale, history = scale_of(call, options, scales)
            each = scale.expand(weight.shape[0]).contiguous()
            buffers = primitives.quantize_stack(weight, call.quantizer, scale=each)
            if history is not None:
                record_amax(history, buffers[-1].amax(0, keepdim=True))
        else:
            buffers = primitives.quantize_stack(weight, call.quantizer)
        r, c = copies_of(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
    return rowwise, columnwise


def _require_supported(s: Schedule, options: Options) -> None:
    """**Raises** NotImplementedError for what a stack of weights has no kernel or rule for."""
    op = "grouped_linear"
    for call in (*s.w, s.results[2]):
        if call is None:
            continue
        if call.quantizer.implementation() is not None:
            raise UnsupportedError(f"{op}: a quantizer of the user's own for the weight, {call.quantizer}")
        if call.needs_rng:
            raise UnsupportedError(f"{op}: weights rounded stochastically, by {call.quantizer}")
        if options.group is not None and call.reducible:
            raise UnsupportedError(f"{op}: amaxes of weights reduced over a group (amax_group), by {call.quantizer}")


def _stack(t: Operand, dtype: torch.dtype) -> Tensor:
    """A stack in high precision."""
    return t.to(dtype) if isinstance(t, Tensor) else stack_values(t, dtype)


class _Groups(NamedTuple):
    offsets: Tensor
    align: int

    def product(
        self, trans_b: bool, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool
    ) -> Tensor:
        """a's rows times the stack b, [R, .] in dtype; in high precision where an operand is."""
        if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
            return primitives.grouped_gemm(a, b, self.offsets, bias, self.align, False, 1.0, dtype, fast_accum)
        inner = a.dtype if isinstance(a, Tensor) else b.dtype
        bias = None if bias is None else bias.to(inner)
        return grouped_matmul(values(a, inner), _stack(b, inner), self.offsets, bias, False, trans_b).to(dtype)


class GroupedWeightGradient(NamedTuple):
    """wgrad, ready to run: `compute` makes it, `accumulate` adds it to a float32 buffer."""

    dy: Operand
    x: Operand
    groups: _Groups
    dtype: torch.dtype
    schedule: Schedule

    def compute(self) -> Tensor:
        dy, x, (offsets, align) = self.dy, self.x, self.groups
        if isinstance(dy, Tensor) or isinstance(x, Tensor):
            inner = dy.dtype if isinstance(dy, Tensor) else x.dtype
            dw = grouped_matmul(values(dy, inner), values(x, inner), offsets, depth=True).to(self.dtype)
        else:
            fast, rotated = self.schedule.plan.fast_accum[2], _rotated(self.schedule)
            dw = primitives.grouped_gemm(dy, x, offsets, None, align, rotated, 1.0, self.dtype, fast)
        call = self.schedule.results[2]
        if call is None:
            return dw
        quantizer = call.quantizer.with_usage(rowwise=True, columnwise=False)
        copy = copies_of(quantizer, primitives.quantize_stack(dw, quantizer))[0]
        assert copy is not None
        return stack_values(copy, dw.dtype)

    def accumulate(self, acc: Tensor) -> None:
        if self.schedule.results[2] is not None or isinstance(self.dy, Tensor) or isinstance(self.x, Tensor):
            acc += self._replace(dtype=acc.dtype).compute()
        else:
            fast, rotated = self.schedule.plan.fast_accum[2], _rotated(self.schedule)
            primitives.grouped_gemm_into(acc, self.dy, self.x, *self.groups, rotated, fast)


def _rotated(s: Schedule) -> bool:
    """Whether wgrad's operands are Hadamard-rotated, which they are both or not at all."""
    quantizer = s.plan.input.columnwise
    return quantizer is not None and bool(quantizer.spec.flags & RHT) and not s.plan.dequantized_backward


# --- the op ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Arguments(LayerArguments):
    """One call. `x_copy`: the tensors of the copy of a quantized x that backward reads. `align`: of `ALIGNS`."""

    x: Tensor | QuantizedTensor
    weight: Tensor
    bias: Tensor | None
    rng: Tensor | None
    x_copy: list[Tensor]
    offsets: Tensor
    align: int

    def wanted(self, needs: tuple[str, ...]) -> tuple[tuple[bool, bool], ...]:
        return (("x" in needs, "weight" in needs),)

    def kept_operands(self, needs: tuple[str, ...], schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
        return ("offsets", "x" if _keeps_x(schedules[0]) else "x_copy")

    def groups(self) -> _Groups:
        return _Groups(self.offsets, self.align)


def _keeps_x(s: Schedule) -> bool:
    return bool(s.x_late) or s.x_kept == "original"


def _forward(a: _Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    s = a.schedules(needs)[0]
    (options,), amaxes = a.forward_options(needs)
    if isinstance(a.x, QuantizedTensor):
        copies_x = given_copies(a.x, s)
    else:
        copies_x = quantize_calls(a.x, s.x, options, a.rng, options.replay)
    copies_w = _quantize_weight(a.weight, s.w, options, options.replay)
    left = high_precision("grouped_linear", a.x) if copies_x[0] is None else copies_x[0]
    right = a.weight if s.plan.weight.rowwise is None else copies_w[0]
    y = a.groups().product(True, left, right, a.bias, a.x.dtype, s.plan.fast_accum[0])
    y = y.view(shapes.gemm_out_shape(a.x.shape, y.shape[0], y.shape[1], False))
    saved: list[Tensor] = []
    if "weight" in needs:
        if not (_keeps_x(s) or a.x_copy):
            pack(pick(s.x_kept, copies_x, a.x), saved)
        saved += [scale_of(c, options, options.replay)[0].clone() for c in s.x_late if c.state]
        record_late(a.x, s, options)
    a.pack_weight(0, s, copies_w, saved)
    return (finished(y, s, options, a.rng), *amaxes), saved


def _layout(a: _Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    return (result_proto(a.x, a.weight.shape[1], a.schedules(needs)[0]), *a.amax_protos(needs))


def _backward(a: _Arguments, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
    s, options, dy = a.schedules(needs)[0], a.backward_options(needs)[0], grads[0]
    assert dy is not None
    x: Any = None
    scales = {}
    if "weight" in needs:
        if isinstance(a.x, Tensor):
            x = high_precision("grouped_linear", a.x)
        else:
            x = unpack(kept_spec(s.x_kept, s.plan.input), list(a.x_copy) or saved)
        scales = {c.state: saved.pop(0) for c in s.x_late if c.state}
    w = a.kept_weight(0, s, saved) if "x" in needs else None
    rowwise, columnwise = quantize_calls(dy, s.dy, options, a.rng)
    made: dict[str, Any] = {}
    if "x" in needs:
        left = dy if rowwise is None else rowwise
        dx = a.groups().product(False, left, w, None, a.x.dtype, s.plan.fast_accum[1])
        made["x"] = rounded(dx, s.results[1], options, a.rng).view(a.x.shape)
    if "weight" in needs:
        if s.x_late:
            x = pick(s.x_kept, quantize_calls(x, s.x_late, options, a.rng, scales), x)
        operand = dy if columnwise is None else columnwise
        wgrad = GroupedWeightGradient(operand, x, a.groups(), a.weight.dtype, s)
        sink = options.weight_grad
        made["weight"] = wgrad.compute() if sink is None else sink.accept(wgrad)
    if "bias" in needs:
        assert a.bias is not None
        made["bias"] = primitives.grouped_bias_grad(dy, a.offsets, a.bias.dtype)
    a.log_amaxes()
    return [made[name] for name in a.gradients(needs)]


_grouped_linear = CustomOp(
    "diptych::grouped_linear", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients,
)  # fmt: skip


# --- as users call it ------------------------------------------------------------------------------------------------


def _require_fit(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
    """Everything that the three products ask for, before the first kernel."""
    op = "grouped_linear"
    require_tensor(op, "weight", weight)
    require_high_precision(op, "input", x)
    require_high_precision(op, "weight", weight)
    if isinstance(weight, QuantizedTensor):
        raise UnsupportedError(f"{op}: weights that are held quantized; pass them in high precision")
    require_tensor(op, "offsets", offsets)
    primitives.require_offsets(op, x, offsets)
    if x.dim() == 0 or weight.dim() != 3 or x.size(-1) != weight.size(2):
        raise ShapeError(f"{op}: input [..., K] and weight [G, N, K] do not fit: {describe(x)}, {describe(weight)}")
    if offsets.size(0) != weight.size(0) + 1:
        raise ShapeError(
            f"{op}: offsets must be [{weight.size(0) + 1}], one more than weights, got {describe(offsets)}"
        )
    if bias is not None:
        require_high_precision(op, "bias", bias)
        if bias.dim() != 2 or bias.size(0) != weight.size(0) or bias.size(1) != weight.size(1):
            raise ShapeError(f"{op}: bias [G, N] and weight [G, N, K] do not fit: {describe(bias)}, {describe(weight)}")
    require_device(op, x, weight, "weight")
    require_device(op, x, bias, "bias")


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    recipe: Recipe,
    *,
    align: int = 1,
    module: str = "grouped_linear",
    name: str = "",
    state: ScaleStates | None = None,
    rng: Tensor | None = None,
    amax_group: Any = None,
    record: bool = True,
    save_original_input: bool = False,
) -> Tensor:
    """x[r] @ weight[g].T + bias[g] for the rows r of each group g, quantized as a recipe says, differentiable once.

    **Arguments:** `x`: [..., K] with R rows; as for `linear`. Rows in no group enter no product, but count in amaxes of
    the whole tensor and in blocks of scales that they share with a group: keep zeros there, as `moe_permute` does.
    `weight`: [G, N, K]. `bias`: [G, N]. `offsets`: int32 [G + 1]; group g is rows offsets[g] <= r < offsets[g + 1].
    The CPU refuses offsets that descend or leave 0..R; CUDA, which does not wait for them, takes each as at least the
    one before it and at most R. `align`: a promise that every offset is a multiple of it: tensor cores need at least 32
    in wgrad, 128 where scales stand for 128 rows, and other groups take a slower kernel; a Hadamard transform needs a
    multiple of 16. `amax_group`: for delayed scaling alone. The others as for `linear`.

    **Returns:** [..., N] in x's (or autocast's) dtype, rows in no group +0; a QuantizedTensor where the recipe
    quantizes the output.

    **Raises:** as `linear`; ValueError also for offsets and for a Hadamard transform without its promise,
    NotImplementedError for weights that are held quantized, rounded stochastically, quantized by the user's own code,
    or whose amaxes are reduced over a group.
    """
    options = Options(module, name, save_original_input, record, amax_group, state)
    return grouped_linear_with(x, weight, bias, offsets, align, rng, recipe, options)


def grouped_linear_with(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    align: int,
    rng: Tensor | None,
    recipe: Recipe,
    options: Options,
) -> Tensor:
    """`grouped_linear`, its options gathered."""
    require_tensor("grouped_linear", "input", x)
    device_type = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    _require_fit(x, weight, bias, offsets)
    if not isinstance(align, int):
        raise DTypeError(f"grouped_linear: align must be an int, got {type(align).__name__}")
    promise, train = kernel_align(align), torch.is_grad_enabled() and weight.requires_grad
    quantized = isinstance(x, QuantizedTensor)
    if quantized:
        options = options._replace(save_original_input=False)  # there is nothing to quantize again
    s = schedule(recipe, options.module, options.name, False, train, options.save_original_input)
    _require_supported(s, options)
    if train and _rotated(s) and promise % 16 != 0:
        raise ValueError(
            f"grouped_linear: {type(recipe).__name__} rotates 16 rows at a time for the weights' gradients, so that "
            f"groups must begin at multiples of 16; promise it with align=16 (or 32, 128), got align={align}"
        )
    x_copy: list[Tensor] = []
    if quantized:
        copies = given_copies(x, s)  # type: ignore[arg-type]
        if s.x_kept not in ("", "original"):
            pack(pick(s.x_kept, copies, x), x_copy)
    return run(_grouped_linear, x, recipe, (options,), weight, bias, rng, x_copy, offsets, promise)[0]
