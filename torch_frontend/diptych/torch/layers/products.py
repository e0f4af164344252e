"""The three products of a linear layer under a recipe, and `linear`, the function that differentiates them.

    y  = quantize(x)  @ quantize(w).T + bias      fprop  [M, K] @ [N, K].T
    dx = quantize(dy) @ quantize(w)               dgrad  [M, N] @ [N, K]
    dw = quantize(dy).T @ quantize(x)             wgrad  [M, N].T @ [M, K]
    db = bias_grad(dy)

Invariants:

- What is quantized how is `common.plan.linear_plan`'s to say, and which of it one call needs `common.schedule`'s: a
  columnwise copy of x only where the weight is trained, one of w only where x needs a gradient.
- Forward saves what backward reads through `save_for_backward`, as plain tensors, and nothing else.
- An operand is a `Copy`, or a tensor in high precision. Two copies multiply in the core; a product with any other
  operand runs in high precision on what a copy stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.common import shapes
from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.formats import FORMATS
from diptych.common.plan import linear_plan, make_plan
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX
from diptych.common.recipes import Recipe
from diptych.common.schedule import Call, Schedule, make_schedule
from diptych.torch.functional import quantize as functional
from diptych.torch.functional import source as fused
from diptych.torch.functional.source import FusedInput
from diptych.torch.graph import program as replay
from diptych.torch.primitives import grouped as grouped_primitives
from diptych.torch.primitives import quantize as primitives
from diptych.torch.state.checkpoint import aside, selective
from diptych.torch.state.scales import ScaleStates, States, record_amax, rng_at
from diptych.torch.tensors.copies import Copies, Operand, pick, values
from diptych.torch.tensors.quantized import QuantizedTensor, QuantizedTensorBase, high_precision


class Options(NamedTuple):
    """How one call of `linear` departs from the plain case. `layer_node` takes them into graphs."""

    module: str = "linear"
    name: str = ""
    save_original_input: bool = False
    record: bool = True
    group: Any = None
    state: ScaleStates | States | None = None
    replay: dict[str, Tensor] | None = None
    weight_copies: Copies | None = None
    weight_grad: Any = None
    scales: Tensor | None = None  # [n], those of `state` by the plan's order, as a graph's update gave them


# --- what to do ------------------------------------------------------------------------------------------------------


_schedules: dict[tuple[Any, ...], Schedule] = {}
_recent: dict[tuple[Any, ...], tuple[Recipe, Schedule]] = {}  # by identity: hashing a recipe costs microseconds


def schedule(recipe: Recipe, module: str, name: str, need_dx: bool, need_dw: bool, original: bool = False) -> Schedule:
    """What one call does; kept outside of graphs, by the recipe's value. `original`: keep the input, not its copy."""
    if torch.compiler.is_compiling():
        return make_schedule(make_plan(recipe, module, name), need_dx, need_dw, original)
    key = (id(recipe), module, name, need_dx, need_dw, original)
    known = _recent.get(key)
    if known is None:
        by_value = (recipe, *key[1:])
        if by_value not in _schedules:
            if len(_schedules) >= 4096:
                _schedules.clear()
            _schedules[by_value] = make_schedule(linear_plan(recipe, module, name), need_dx, need_dw, original)
        if len(_recent) >= 1024:
            del _recent[next(iter(_recent))]
        known = _recent[key] = (recipe, _schedules[by_value])
    return known[1]  # the entry keeps its recipe alive, so that the id stays its own


# --- quantizing ------------------------------------------------------------------------------------------------------


def quantize_calls(
    t: Tensor, calls: tuple[Call, ...], options: Options, rng: Tensor | None, scales: dict[str, Tensor] | None = None
) -> Copies:
    """The copies of one tensor. `scales`: use these delayed scales and record nothing."""
    rowwise = columnwise = None
    for call in calls:
        if call.plain and (options.group is None or not call.reducible):
            buffers = primitives.quantize(t, call.quantizer)
        elif call.state and not call.quantizer.custom:
            buffers = _quantize_delayed(t, call, options, scales)
        elif call.quantizer.custom or options.group is not None:
            q = quantize_general(t, call, options, rng, scales)
            rowwise = q.copy_of(False) if q.rowwise_data is not None else rowwise
            columnwise = q.copy_of(True) if q.columnwise_data is not None else columnwise
            continue
        else:
            buffers = primitives.quantize(t, call.quantizer, rng=rng_of(call, options, rng))
        r, c = primitives.copies(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
    return rowwise, columnwise


def require_stackable(calls: tuple[Call | None, ...]) -> None:
    """**Raises** NotImplementedError for what a stack of weights has no kernel or rule for."""
    for call in calls:
        if call is not None and call.quantizer.implementation() is not None:
            raise UnsupportedError(f"grouped_linear: a quantizer of the user's own for the weight, {call.quantizer}")
        if call is not None and call.needs_rng:
            raise UnsupportedError(f"grouped_linear: weights rounded stochastically, by {call.quantizer}")


def quantize_weight(
    weight: Tensor,
    calls: tuple[Call, ...],
    options: Options,
    rng: Tensor | None,
    scales: dict[str, Tensor] | None = None,
) -> Copies:
    """`quantize_calls` of a weight, or of a stack of them [G, N, K]: each has scales and amaxes of its own, but that
    all share a delayed scale, which gets the largest amax."""
    if weight.dim() != 3:
        return quantize_calls(weight, calls, options, rng, scales)
    require_stackable(calls)
    rowwise = columnwise = None
    for call in calls:
        each = history = None
        given: tuple[Tensor | None, Tensor | None] = (None, None)
        if call.state:
            scale, history = scale_of(call, options, scales)
            each = scale.expand(weight.shape[0]).contiguous()
        elif options.group is not None and call.reducible:
            given = functional.group_amaxes(weight, call.quantizer, options.group, grouped_primitives.amaxes)
        buffers = grouped_primitives.quantize_stack(weight, call.quantizer, *given, each)
        if history is not None:
            record_amax(history, buffers[-1].amax(0, keepdim=True))
        r, c = primitives.copies(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
    return rowwise, columnwise


def rng_of(call: Call, options: Options, rng: Tensor | None) -> Tensor | None:
    if not call.needs_rng:
        return None
    if rng is None:
        raise ArgumentError(
            f"{options.module}: {call.quantizer} rounds stochastically and needs rng=, an int32 [4] tensor; "
            "diptych.torch.rng_state(seed) makes one"
        )
    return rng_at(rng, 2 * call.number)


def scale_of(call: Call, options: Options, scales: dict[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """The delayed scale, and the history to record in or None. Under a selective checkpoint a recomputation runs the
    same ops as its forward, and what they record is dropped."""
    if scales is not None:
        scale = scales[call.state]
        same = scales is options.replay and options.record and selective()
        return scale, aside(torch.zeros_like, scale) if same else None
    if options.state is None:
        raise ArgumentError(
            f"{options.module}: {call.quantizer} scales by earlier steps' amaxes and needs state=, a "
            "diptych.torch.ScaleStates; diptych.torch.Linear holds one"
        )
    scale, history = options.state.tensors(call.state)
    return scale, history if options.record else None


def _quantize_delayed(t: Tensor, call: Call, options: Options, scales: dict[str, Tensor] | None) -> list[Tensor]:
    scale, history = scale_of(call, options, scales)
    if history is None:
        return primitives.quantize(t, call.quantizer, scale=scale)
    return primitives.quantize_delayed(t, call.quantizer, scale, history)


def quantize_general(
    t: Tensor, call: Call, options: Options, rng: Tensor | None, scales: dict[str, Tensor] | None
) -> QuantizedTensor:
    """Through `quantize`: a quantizer of the user's own, or an amax that is reduced over a group."""
    if call.quantizer.custom:
        replay.refuse()
    given: dict[str, Any] = {}
    history = None
    if call.state:
        given["scale"], history = scale_of(call, options, scales)
    if call.needs_rng:
        given["rng"] = rng_of(call, options, rng)
    if options.group is not None and call.reducible:
        given["amax_group"] = options.group
    q = functional.quantize(t.detach(), call.quantizer, **given)
    wanted = call.quantizer
    if not isinstance(q, QuantizedTensor) or any(
        want and getattr(q, f"{side}_data") is None
        for side, want in (("rowwise", wanted.rowwise), ("columnwise", wanted.columnwise))
    ):
        raise ArgumentError(
            f"{type(wanted).__name__}.quantize_impl must return what `quantize` made for {wanted}, got {q!r}"
        )
    if history is not None and q.amax is not None:
        record_amax(history, q.amax)
    return q


def has_one_amax(call: Call) -> bool:
    """Whether quantizing computes an amax of the whole tensor, and no other."""
    return call.reducible and not primitives.TWO_LEVEL[call.quantizer.spec.format_id]


class Encoded(NamedTuple):
    """The copies of a tensor; its amax [1] where one was computed for a format of one scale; its sum over the rows."""

    copies: Copies
    amax: Tensor | None = None
    column_sum: Tensor | None = None


def encode(
    t: Tensor | FusedInput,
    calls: tuple[Call, ...],
    options: Options,
    rng: Tensor | None,
    scales: dict[str, Tensor] | None = None,
    *,
    amax: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
) -> Encoded:
    """`quantize_calls` of a tensor or a FusedInput; of the latter `amax` is used where a format has one for the tensor,
    and `sum_dtype` asks for the column sum."""
    if isinstance(t, Tensor):
        return Encoded(quantize_calls(t, calls, options, rng, scales))
    rowwise = columnwise = found = total = None
    for call in calls:
        one_amax = has_one_amax(call)
        wanted = sum_dtype if total is None else None
        scale = history = None
        given: tuple[Tensor | None, Tensor | None] = (amax if one_amax else None, None)
        if call.state:
            scale, history = scale_of(call, options, scales)
        elif options.group is not None and call.reducible and given[0] is None:
            given = functional.group_amaxes(t, call.quantizer, options.group, fused.amax)
        if history is not None and scale is not None:
            buffers = fused.quantize_delayed(t, call.quantizer, scale, history, wanted)
        else:
            buffers = fused.quantize(t, call.quantizer, *given, scale, rng_of(call, options, rng), wanted)
        if wanted is not None:
            total, buffers = buffers[-1], buffers[:-1]
        r, c = primitives.copies(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
        if one_amax:
            found = buffers[-1]
    return Encoded((rowwise, columnwise), found, total)


def rounded(t: Tensor, call: Call | None, options: Options, rng: Tensor | None) -> Tensor:
    """A result as its quantized copy stands for it."""
    if call is None:
        return t
    single = call._replace(quantizer=call.quantizer.with_usage(rowwise=True, columnwise=False))
    copy = quantize_calls(t, (single,), options, rng)[0]
    assert copy is not None
    return primitives.dequantize(copy, t.dtype).reshape(t.shape)


# --- operands and products -------------------------------------------------------------------------------------------


def product(gemm: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """op(a) @ op(b) + bias, [rows, cols] in dtype."""
    if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
        return primitives.gemm(a, b, bias, 1.0, dtype, fast_accum)
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
        return rounded(dw, self.schedule.results[2], self.options, self.rng)

    def accumulate(self, acc: Tensor) -> None:
        if self.schedule.results[2] is not None or isinstance(self.dy, Tensor) or isinstance(self.x, Tensor):
            acc += self._replace(dtype=acc.dtype).compute().view(acc.shape)
        else:
            fast = self.schedule.plan.fast_accum[2]
            primitives.gemm_into(acc, self.dy, self.x, None, 1.0, 1.0, fast)


def dequantized_weight(weight: Tensor) -> Tensor:
    """A weight for a product in high precision; its gradient is the parameter's."""
    return weight.dequantize() if isinstance(weight, QuantizedTensorBase) else weight


# --- the layer -------------------------------------------------------------------------------------------------------


def held_copies(q: QuantizedTensorBase, calls: tuple[Call, ...], what: str, remedy: str) -> Copies:
    """The copies that calls would make, of what is quantized already; `what` and `remedy` are for what it raises.

    **Raises** ValueError for a copy that was not made, or of another format or transform.
    """
    rowwise = columnwise = None
    for call in calls:
        asked = call.quantizer
        held_format, asked_format = FORMATS[q.quantizer.spec.format_id].name, FORMATS[asked.spec.format_id].name
        if held_format != asked_format:
            raise ValueError(f"{what} is held as {held_format}, and the recipe asks for {asked_format}; {remedy}")
        rowwise = q.copy_of(False) if asked.rowwise else rowwise
        columnwise = q.copy_of(True) if asked.columnwise else columnwise
        counts = ROW_AMAX * asked.rowwise | (RHT | RHT_SIGNS) * asked.columnwise
        if (q.quantizer.spec.flags ^ asked.spec.flags) & counts:
            raise ValueError(f"{what} is held by {q.quantizer}, and the recipe asks for {asked}; {remedy}")
    return rowwise, columnwise


def given_copies(x: QuantizedTensor, s: Schedule, op: str = "linear") -> Copies:
    """The copies that forward would make of an input that comes quantized."""
    return held_copies(x, s.x, f"{op}: the input", "quantize it by recipe.quantizer(QuantizerRole(module, 'input'))")


def fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, rng: Tensor | None, s: Schedule, options: Options, given: Any = None
) -> tuple[Tensor, Copies, Copies]:
    """y, and the copies of x and w. `given`: the input's copies, where x alone is not what is multiplied."""
    copies_x = given
    if isinstance(x, QuantizedTensor):
        copies_x = given_copies(x, s)
    elif given is None:
        copies_x = quantize_calls(x, s.x, options, rng, options.replay)
    copies_w = options.weight_copies
    if isinstance(weight, QuantizedTensor):
        name = f"{options.module}: the weight"
        copies_w = held_copies(weight, s.w, name, "run it by the recipe of its quantized_model_init")
    elif copies_w is None:
        copies_w = quantize_calls(weight, s.w, options, rng, options.replay)
    a = high_precision(options.module, x) if copies_x[0] is None else copies_x[0]
    b = pick("original", copies_w, weight) if s.plan.weight.rowwise is None else copies_w[0]
    y = product("fprop", a, b, bias, x.dtype, s.plan.fast_accum[0])
    if x.dim() != 2:
        y = y.view(shapes.gemm_out_shape(x.shape, y.shape[0], y.shape[1], False))
    return y, copies_x, copies_w


def record_late(t: Tensor | FusedInput, s: Schedule, options: Options) -> None:
    """Records a layer's input for the delayed states that only backward's quantizing reads."""
    if options.state is not None and options.record and options.replay is None:
        for slot in s.late_states():
            aside(_record_late, slot, t, options.state)


def _record_late(slot: str, t: Tensor | FusedInput, state: ScaleStates | States) -> None:
    state.record(slot, primitives.amax(t) if isinstance(t, Tensor) else fused.amax(t))
