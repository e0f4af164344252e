"""`grouped_linear`: a linear layer for each group of rows as one op, eagerly and as two nodes of a graph.

    y[r]  = quantize(x)[r]  @ quantize(w[g]).T + bias[g]      fprop  rows of group g, [R, K] @ [G, N, K].T
    dx[r] = quantize(dy)[r] @ quantize(w[g])                  dgrad  [R, N] @ [G, N, K]
    dw[g] = quantize(dy)[of g].T @ quantize(x)[of g]          wgrad  over the rows of group g
    db[g] = the sum of dy's rows in group g

x and dy are quantized whole, as a linear layer's are; w is quantized as G tensors; only delayed scaling has one scale
and one amax for all of them. Rows in no group are zeros in y and dx, and are not summed.

With a map of rows, x is in token order: its rows are quantized as they move to their experts, and dx is each token's
sum. The bits are those of permuting first.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.gemm_options import GemmOptions
from diptych.common.layer_options import Originals
from diptych.common.layers.checks import (
    other_kind,
    require_align,
    require_fit,
    require_groups_once,
    require_offset_count,
    require_stackable,
    require_whole_rotations,
)
from diptych.common.layers.groups import rotates_rows
from diptych.common.layers.schedule import Call, Schedule
from diptych.common.ops import shapes
from diptych.common.ops.grouped import align_of, kernel_align
from diptych.common.recipes import Recipe
from diptych.torch.functional import source as sources
from diptych.torch.functional.permute import RowMap, moe_permute, require_row_map
from diptych.torch.graph.custom_op import CustomOp
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.held import given_copies
from diptych.torch.layers.options import CallState, Options, schedule
from diptych.torch.layers.products import LayerArguments, finished, fprop_weight, result_proto, run
from diptych.torch.layers.quantize import (
    STACK,
    Encoded,
    kept_spec,
    quantize_calls,
    quantize_operand,
    quantize_weight,
    requantized_result,
    save_for_late,
    saved_for_late,
)
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives.checks import require_device, require_high_precision, require_local, require_tensor
from diptych.torch.primitives.grouped_matmul import grouped_matmul
from diptych.torch.primitives.permute import permute, unpermute
from diptych.torch.state.autocast import recording
from diptych.torch.state.scales import ScaleStates
from diptych.torch.tensors.copies import Operand, pack, pick, unpack, values
from diptych.torch.tensors.quantized import QuantizedStack, QuantizedTensor, high_precision

# --- quantizing and products -----------------------------------------------------------------------------------------


def _stack(t: Operand, dtype: torch.dtype) -> Tensor:
    """Returns the values of a stack in high precision."""
    return t.to(dtype) if isinstance(t, Tensor) else grouped_ops.stack_values(t, dtype)


class Groups(NamedTuple):
    offsets: Tensor
    align: int

    def product(
        self, trans_b: bool, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, options: GemmOptions
    ) -> Tensor:
        """Returns the product of a's rows and the stack b, [R, .] in dtype. It runs in high precision if an operand
        is."""
        if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
            return grouped_ops.grouped_gemm(a, b, self.offsets, bias, self.align, False, 1.0, dtype, options)
        inner = a.dtype if isinstance(a, Tensor) else b.dtype
        bias = None if bias is None else bias.to(inner)
        return grouped_matmul(values(a, inner), _stack(b, inner), self.offsets, bias, False, trans_b).to(dtype)


class GroupedWeightGradient(NamedTuple):
    """wgrad, ready to run: `compute` makes it, `accumulate` adds it to a float32 buffer."""

    dy: Operand
    x: Operand
    groups: Groups
    dtype: torch.dtype
    schedule: Schedule
    options: Options

    def compute(self) -> Tensor:
        dy, x, (offsets, align) = self.dy, self.x, self.groups
        if isinstance(dy, Tensor) or isinstance(x, Tensor):
            inner = dy.dtype if isinstance(dy, Tensor) else x.dtype
            dw = grouped_matmul(values(dy, inner), values(x, inner), offsets, depth=True).to(self.dtype)
        else:
            rotated, gemm_options = rotates_rows(self.schedule.plan), self.schedule.plan.options[2]
            dw = grouped_ops.grouped_gemm(dy, x, offsets, None, align, rotated, 1.0, self.dtype, gemm_options)
        call = self.schedule.results[2]
        if call is None:
            return dw
        single = call._replace(quantizer=call.quantizer.with_usage(rowwise=True, columnwise=False))
        copy = quantize_weight(dw, (single,), self.options).copies[0]
        assert copy is not None
        return grouped_ops.stack_values(copy, dw.dtype)

    def accumulate(self, acc: Tensor) -> None:
        if self.schedule.results[2] is not None or isinstance(self.dy, Tensor) or isinstance(self.x, Tensor):
            acc += self._replace(dtype=acc.dtype).compute()
        else:
            rotated, gemm_options = rotates_rows(self.schedule.plan), self.schedule.plan.options[2]
            grouped_ops.grouped_gemm_into(acc, self.dy, self.x, *self.groups, rotated, gemm_options)


# --- the op ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Arguments(LayerArguments):
    """One call. `x_copy`: if x is quantized, the tensors of the copy that backward reads. `align`: one of `ALIGNS`.
    `row_id_map`, `row_source`: those of the row map that permutes x, whose rows are tokens then; or None."""

    x: Tensor | QuantizedTensor
    weight: Tensor | QuantizedStack
    bias: Tensor | None
    rng: Tensor | None
    x_copy: list[Tensor]
    offsets: Tensor
    align: int
    row_id_map: Tensor | None
    row_source: Tensor | None

    def wanted(self, needs: tuple[str, ...]) -> tuple[tuple[bool, bool], ...]:
        return (("x" in needs, "weight" in needs),)

    def kept_operands(self, needs: tuple[str, ...], schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
        kept = ("x", "row_source") if _keeps_x(schedules[0]) else ("x_copy",)
        return ("offsets", "row_id_map", *kept)

    def groups(self) -> Groups:
        return Groups(self.offsets, self.align)

    def rows(self, calls: tuple[Call, ...]) -> Any:
        """Returns x in the order of its groups. `calls`: the quantize calls that read it. If all of them run in the
        core, permuted rows are not stored. () stands for other code, for which they are."""
        if self.row_id_map is None or self.row_source is None:
            return self.x
        if calls and not any([call.quantizer.custom for call in calls]):
            return sources.permuted(self.x, self.row_id_map, self.row_source)
        return permute([self.x], [0], self.row_id_map, self.row_source)[0]


def _keeps_x(s: Schedule) -> bool:
    return bool(s.x_late) or s.x_kept == "original"


def _forward(a: _Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    s = a.schedules(needs)[0]
    (options,), amaxes = a.forward_options(needs)
    x = a.rows(() if s.plan.input.rowwise is None else s.x)
    if isinstance(x, QuantizedTensor):
        encoded_x = Encoded(given_copies(x, s, "grouped_linear"))
    else:
        encoded_x = quantize_operand(x, s.x, options, options.state.recomputed)
    encoded_w = fprop_weight(a.weight, s, options)
    copies_x, copies_w = encoded_x.copies, encoded_w.copies
    left = high_precision("grouped_linear", x) if copies_x[0] is None else copies_x[0]
    right = pick("original", copies_w, a.weight) if s.plan.weight.rowwise is None else copies_w[0]
    y = a.groups().product(True, left, right, a.bias, a.x.dtype, s.plan.options[0])
    if a.row_source is None:
        y = y.view(shapes.gemm_out_shape(a.x.shape, y.shape[0], y.shape[1], False))
    saved: list[Tensor] = []
    a.pack_weight(0, s, options, encoded_w, saved)
    if s.x_late:
        save_for_late(x, s.x, s.x_late, options, encoded_x.amax, saved)
    elif "weight" in needs and not (_keeps_x(s) or a.x_copy):
        pack(pick(s.x_kept, copies_x, a.x), saved)
    return (finished(y, s, options), *amaxes), saved


def _layout(a: _Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    y = result_proto(a.x, a.weight.shape[1], a.schedules(needs)[0])
    if a.row_source is not None:
        y = y._replace(shape=(a.row_source.shape[0], y.shape[-1]))
    return (y, *a.amax_protos(needs))


def _backward(
    a: _Arguments,
    needs: tuple[str, ...],
    saved: list[Tensor],
    grads: list[Tensor | None],
    asked: tuple[str, ...] | None = None,
) -> list[Tensor]:
    s, options, dy = a.schedules(needs)[0], a.backward_options(needs)[0], grads[0]
    assert dy is not None
    now = needs if asked is None else asked
    rowwise, columnwise = quantize_calls(dy, a.schedules(needs, asked)[0].dy, options)
    made: dict[str, Any] = {}
    w = a.kept_weight(0, s, options, saved, "x" in now) if "x" in needs else None
    if "x" in now:
        left = dy if rowwise is None else rowwise
        dx = a.groups().product(False, left, w, None, a.x.dtype, s.plan.options[1])
        dx = requantized_result(dx, s.results[1], options)
        made["x"] = (dx if a.row_id_map is None else unpermute(dx, a.row_id_map)[0]).view(a.x.shape)
    if "weight" in now:
        if isinstance(a.x, Tensor):
            x: Any = a.rows(s.x_late)
            x = high_precision("grouped_linear", x) if isinstance(x, Tensor) else x
        else:
            x = unpack(kept_spec(s.x_kept, s.plan.input), list(a.x_copy) or saved)
        if s.x_late:
            scales, amax = saved_for_late(s.x, s.x_late, options, saved)
            x = pick(s.x_kept, quantize_operand(x, s.x_late, options, scales, amax=amax).copies, x)
        operand = dy if columnwise is None else columnwise
        wgrad = GroupedWeightGradient(operand, x, a.groups(), a.weight.dtype, s, options)
        sink = options.weight_grad
        made["weight"] = wgrad.compute() if sink is None else sink.accept(wgrad)
    if "bias" in now:
        assert a.bias is not None
        made["bias"] = grouped_ops.grouped_bias_grad(dy, a.offsets, a.bias.dtype)
    a.log_amaxes()
    return [made[name] for name in a.gradients(now)]


_grouped_linear = CustomOp(
    "diptych::grouped_linear", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients, draws=_Arguments.draws, parts=True,
)  # fmt: skip


# --- as users call it ------------------------------------------------------------------------------------------------


def _require_fit(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
    """Checks the operands of the three products before the first kernel runs."""
    op = "grouped_linear"
    require_tensor(op, "weight", weight)
    if isinstance(weight, QuantizedTensor):
        raise other_kind(STACK, weight, QuantizedStack)
    require_high_precision(op, "input", x)
    require_high_precision(op, "weight", weight)
    require_tensor(op, "offsets", offsets)
    grouped_ops.require_offsets(op, x, offsets)
    if bias is not None:
        require_high_precision(op, "bias", bias)
    require_fit(STACK, 3, x, weight, bias)
    require_offset_count(STACK, offsets, weight.shape[0])
    require_device(op, x, weight, "weight")
    require_device(op, x, bias, "bias")


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    recipe: Recipe,
    *,
    row_map: RowMap | None = None,
    align: int = 1,
    module: str = "grouped_linear",
    name: str = "",
    state: ScaleStates | None = None,
    rng: Tensor | None = None,
    amax_group: Any = None,
    record: bool = True,
    save_original_input: bool = False,
    save_original_weight: bool = False,
) -> Tensor:
    """Computes x[r] @ weight[g].T + bias[g] for the rows r of each group g, quantized as a recipe says. It can be
    differentiated once.

    **Arguments:** `x`: [..., K] with R rows; as for `linear`. Rows in no group enter no product, but count in amaxes of
    the whole tensor and in blocks of scales that they share with a group: keep zeros there, as `moe_permute` does.
    `weight`: [G, N, K], or a `QuantizedStack` with the copies that the recipe asks for. `bias`: [G, N]. `offsets`:
    int32 [G + 1]; group g is rows offsets[g] <= r < offsets[g + 1]. The CPU refuses offsets that descend or leave 0..R;
    CUDA does not wait for their values and takes each as at least the one before it and at most R. `row_map`: given
    instead of offsets, which are then its expert_offsets. x is in token order, [T, K] (or [..., K]), and the map
    permutes its rows: the result, the gradients and the states have the bits of `moe_permute` before this call, but
    permuted rows are not stored where they are quantized, and backward keeps x itself with `save_original_input` or for
    products in high precision. A quantized x is permuted first. `align`: a promise that every offset is a multiple of
    this number. Tensor cores need at least 32 in wgrad, 128 where scales stand for 128 rows, and other groups take a
    slower kernel; a Hadamard transform needs a multiple of 16. `amax_group`: as for `linear`; each weight's amax is
    reduced with that of the same weight on other ranks. All other arguments: as for `linear`.

    **Returns:** [..., N] in x's (or autocast's) dtype, with a `row_map` [rows, N] by expert. Rows in no group are +0.
    The result is a QuantizedTensor if the recipe quantizes the output.

    **Raises:** as `linear`; ValueError also for offsets, a map that does not fit, and a Hadamard transform without its
    promise, NotImplementedError for weights that are rounded stochastically or quantized by the user's own code.
    """
    require_local("grouped_linear", "rng", rng)
    originals = Originals(save_original_input, save_original_weight)
    options = Options(module, name, originals, record and recording(), amax_group, CallState(state, rng))
    return grouped_linear_with(x, weight, bias, offsets, align, recipe, options, row_map)


def grouped_linear_with(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    align: int,
    recipe: Recipe,
    options: Options,
    row_map: RowMap | None = None,
    sizes: tuple[Any, ...] | None = None,
) -> Tensor:
    """Runs `grouped_linear` with `Options`. `sizes`: each group's number of rows, if the host knows it."""
    require_tensor("grouped_linear", "input", x)
    device_type = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    require_groups_once("grouped_linear", offsets, row_map)
    if row_map is not None:
        require_row_map("grouped_linear", x, row_map, "input")
        offsets = row_map.expert_offsets
    assert offsets is not None
    _require_fit(x, weight, bias, offsets)
    require_align("grouped_linear", align)
    promise, train = kernel_align(align), torch.is_grad_enabled() and weight.requires_grad
    promise = promise if sizes is None else max(promise, align_of(sizes))
    quantized = isinstance(x, QuantizedTensor)
    if quantized and row_map is not None:
        x, row_map = moe_permute(x, row_map)[0], None
    if quantized:
        options = options._replace(originals=options.originals._replace(input=False))  # nothing to quantize again
    s = schedule(recipe, options.module, options.name, False, train, Originals(options.originals.input))
    require_stackable(STACK, (*(() if isinstance(weight, QuantizedStack) else s.w), s.results[2]))
    if train:
        require_whole_rotations(STACK, recipe, s.plan, promise, align, sizes)
    x_copy: list[Tensor] = []
    if quantized:
        copies = given_copies(x, s, "grouped_linear")  # type: ignore[arg-type]
        if s.x_kept not in ("", "original"):
            pack(pick(s.x_kept, copies, x), x_copy)
    maps = (None, None) if row_map is None else (row_map.row_id_map, row_map.row_source)
    return run(
        _grouped_linear, x, recipe, (options,), weight, bias, options.state.rng, x_copy, offsets, promise, *maps
    )[0]
