"""The three products of a linear layer under a recipe, and `linear`, the function that differentiates them.

    y  = quantize(x)  @ quantize(w).T + bias      fprop  [M, K] @ [N, K].T
    dx = quantize(dy) @ quantize(w)               dgrad  [M, N] @ [N, K]
    dw = quantize(dy).T @ quantize(x)             wgrad  [M, N].T @ [M, K]
    db = bias_grad(dy)

Invariants:

- What is quantized how is `common.plan.linear_plan`'s to say; a `Schedule` is that plan cut down to what one call
  needs: a columnwise copy of x only where the weight is trained, one of w only where x needs a gradient.
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
from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.formats import FORMATS
from diptych.common.plan import LinearPlan, TensorPlan, linear_plan
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import Recipe
from diptych.torch import functional, primitives
from diptych.torch.quantized import QuantizedTensor
from diptych.torch.rules import Copy, describe, require_device, require_high_precision
from diptych.torch.state import ScaleStates, rng_at

Operand = Any  # Copy or Tensor: isinstance(Tensor) tells them apart
Copies = tuple[Copy | None, Copy | None]
Spec = tuple[int, bool, bool] | None

OFFSETS = 18  # of the random generator that one forward and backward of a linear consume: nine calls of two


class Call(NamedTuple):
    """One quantize call: with which quantizer, scale state and number of random draw, and what else it wants."""

    quantizer: Quantizer
    state: str
    number: int
    plain: bool  # nothing but the tensor is needed
    reducible: bool  # its amax may be reduced over a group
    needs_rng: bool


class Schedule(NamedTuple):
    """The calls of one forward and backward; see the module's docstring.

    `x_late`: the calls on the original x that backward makes. `x_kept`, `w_kept`: which operand backward reads,
    "columnwise", "rowwise", or "original"; empty: none.
    """

    plan: LinearPlan
    x: tuple[Call, ...]
    w: tuple[Call, ...]
    dy: tuple[Call, ...]
    x_late: tuple[Call, ...]
    x_kept: str
    w_kept: str
    results: tuple[Call | None, Call | None, Call | None]
    backward_rng: bool


class Options(NamedTuple):
    """How one call of `linear` departs from the plain case. Only the strings and the group are seen while compiling."""

    module: str = "linear"
    name: str = ""
    save_original_input: bool = False
    record: bool = True
    group: Any = None
    state: ScaleStates | None = None
    replay: dict[str, Tensor] | None = None
    weight_copies: Copies | None = None
    weight_grad: Any = None


# --- what to do ------------------------------------------------------------------------------------------------------


def _call(quantizer: Quantizer, state: str, number: int) -> Call:
    fmt = FORMATS[quantizer.spec.format_id]  # quantizer.format is no constant to Dynamo
    reducible = not state and (fmt.per_tensor or fmt.two_level)
    plain = not (quantizer.custom or state or quantizer.needs_rng)
    return Call(quantizer, state, number, plain, reducible, quantizer.needs_rng)


def _calls(plan: TensorPlan, number: int, rowwise: bool, columnwise: bool) -> tuple[Call, ...]:
    """A quantizer that serves both copies takes its tensor's first number."""
    second = 0 if plan.shared else 1
    calls = plan.calls(rowwise, columnwise)
    return tuple([_call(q, state, number + (0 if q.rowwise else second)) for q, state in calls])


def make_schedule(recipe: Recipe, module: str, name: str, need_dx: bool, need_dw: bool, original: bool) -> Schedule:
    """The schedule of one call; traced where it is part of a graph. `original`: keep the input, not its copy."""
    compiling = torch.compiler.is_compiling()
    plan = linear_plan.__wrapped__(recipe, module, name) if compiling else linear_plan(recipe, module, name)
    dequantized = plan.dequantized_backward
    kept = []
    for tensor, needed in ((plan.input, need_dw), (plan.weight, need_dx)):
        if not needed:
            kept.append("")
        elif dequantized:
            kept.append("original" if tensor.rowwise is None else "rowwise")
        else:
            kept.append("original" if tensor.columnwise is None else "columnwise")
    x_late: tuple[Call, ...] = ()
    if original and kept[0] not in ("", "original"):
        x_late = _calls(plan.input, 0, kept[0] == "rowwise", kept[0] == "columnwise")
    x = _calls(plan.input, 0, True, kept[0] == "columnwise" and not x_late)
    w = _calls(plan.weight, 2, True, kept[1] == "columnwise")
    dy = _calls(plan.grad_output, 4, need_dx, need_dw)
    results = [None if q is None else _call(q, "", 6 + i) for i, q in enumerate(plan.results)]
    backward_rng = False
    for call in (*dy, *x_late, results[1], results[2]):
        backward_rng = backward_rng or (call is not None and call.needs_rng)
    return Schedule(plan, x, w, dy, x_late, kept[0], kept[1], (results[0], results[1], results[2]), backward_rng)


_schedules: dict[tuple[Any, ...], tuple[Recipe, Schedule]] = {}  # by identity: hashing a recipe costs a microsecond


def schedule(recipe: Recipe, module: str, name: str, need_dx: bool, need_dw: bool, original: bool = False) -> Schedule:
    """`make_schedule`, kept for each recipe object outside of graphs."""
    if torch.compiler.is_compiling():
        return make_schedule(recipe, module, name, need_dx, need_dw, original)
    key = (id(recipe), module, name, need_dx, need_dw, original)
    known = _schedules.get(key)
    if known is None:
        if len(_schedules) > 1000:
            _schedules.clear()
        known = _schedules[key] = (recipe, make_schedule(recipe, module, name, need_dx, need_dw, original))
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
            q = _quantize_general(t, call, options, rng, scales)
            rowwise = q.copy_of(False) if q.rowwise_data is not None else rowwise
            columnwise = q.copy_of(True) if q.columnwise_data is not None else columnwise
            continue
        else:
            buffers = primitives.quantize(t, call.quantizer, rng=_rng_of(call, rng))
        r, c = primitives.copies(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
    return rowwise, columnwise


def _rng_of(call: Call, rng: Tensor | None) -> Tensor | None:
    if not call.needs_rng:
        return None
    if rng is None:
        raise TypeError(
            f"linear: {call.quantizer} rounds stochastically and needs rng=, an int32 [4] tensor; "
            "diptych.torch.rng_state(seed) makes one"
        )
    return rng_at(rng, 2 * call.number)


def _scale_of(call: Call, options: Options, scales: dict[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """The delayed scale, and the history to record in or None."""
    if scales is not None:
        return scales[call.state], None
    if options.state is None:
        raise TypeError(
            f"linear: {call.quantizer} scales by earlier steps' amaxes and needs state=, a diptych.torch.ScaleStates; "
            "diptych.torch.Linear holds one"
        )
    scale, history = options.state.tensors(call.state)
    return scale, history if options.record else None


def _quantize_delayed(t: Tensor, call: Call, options: Options, scales: dict[str, Tensor] | None) -> list[Tensor]:
    scale, history = _scale_of(call, options, scales)
    if history is None:
        return primitives.quantize(t, call.quantizer, scale=scale)
    return primitives.quantize_delayed(t, call.quantizer, scale, history)


def _quantize_general(
    t: Tensor, call: Call, options: Options, rng: Tensor | None, scales: dict[str, Tensor] | None
) -> QuantizedTensor:
    """Through `quantize`: a quantizer of the user's own, or an amax that is reduced over a group."""
    given: dict[str, Any] = {}
    history = None
    if call.state:
        given["scale"], history = _scale_of(call, options, scales)
    if call.needs_rng:
        given["rng"] = _rng_of(call, rng)
    if options.group is not None and call.reducible:
        given["amax_group"] = options.group
    q = functional.quantize(t.detach(), call.quantizer, **given)
    wanted = call.quantizer
    if not isinstance(q, QuantizedTensor) or any(
        want and getattr(q, f"{side}_data") is None
        for side, want in (("rowwise", wanted.rowwise), ("columnwise", wanted.columnwise))
    ):
        raise TypeError(
            f"{type(wanted).__name__}.quantize_impl must return what `quantize` made for {wanted}, got {q!r}"
        )
    if history is not None and q.amax is not None:
        record_amax(history, q.amax)
    return q


def record_amax(history: Tensor, amax: Tensor) -> None:
    """history[0] = max(history[0], amax)."""
    pending = history[:1]
    torch.maximum(pending, amax, out=pending)


def _rounded(t: Tensor, call: Call | None, options: Options, rng: Tensor | None) -> Tensor:
    """A result as its quantized copy stands for it."""
    if call is None:
        return t
    single = call._replace(quantizer=call.quantizer.with_usage(rowwise=True, columnwise=False))
    copy = quantize_calls(t, (single,), options, rng)[0]
    assert copy is not None
    return primitives.dequantize(copy, t.dtype).reshape(t.shape)


# --- operands and products -------------------------------------------------------------------------------------------


def _pick(kept: str, copies: Copies, original: Tensor) -> Operand:
    if kept == "original":
        quantized = isinstance(original, QuantizedTensor)
        return original.copy_of(original.rowwise_data is None) if quantized else original
    return copies[1 if kept == "columnwise" else 0]  # torch 2.11 indexes by no bool


def _pack(operand: Operand, tensors: list[Tensor]) -> Spec:
    """Appends an operand's tensors, for `save_for_backward`."""
    if isinstance(operand, Tensor):
        tensors.append(operand)
        return None
    data, scale_inv, amax, format_id, columnwise = operand
    tensors += (data, scale_inv) if amax is None else (data, scale_inv, amax)
    return format_id, columnwise, amax is not None


def _unpack(spec: Spec, tensors: list[Tensor]) -> Operand:
    """Takes an operand's tensors off the front."""
    if spec is None:
        return tensors.pop(0)
    format_id, columnwise, has_amax = spec
    data, scale_inv = tensors.pop(0), tensors.pop(0)
    return data, scale_inv, tensors.pop(0) if has_amax else None, format_id, columnwise


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """An operand in high precision, as a matrix."""
    t = operand.to(dtype) if isinstance(operand, Tensor) else primitives.dequantize(operand, dtype)
    return t.reshape(shapes.rows_cols(t.shape))


def _product(gemm: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """op(a) @ op(b) + bias, [rows, cols] in dtype."""
    if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
        return primitives.gemm(a, b, bias, 1.0, dtype, fast_accum)
    inner = a.dtype if isinstance(a, Tensor) else b.dtype
    left, right = _values(a, inner), _values(b, inner)
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
        dw = _product("wgrad", self.dy, self.x, None, self.dtype, self.schedule.plan.fast_accum[2])
        return _rounded(dw, self.schedule.results[2], self.options, self.rng)

    def accumulate(self, acc: Tensor) -> None:
        if self.schedule.results[2] is not None or isinstance(self.dy, Tensor) or isinstance(self.x, Tensor):
            acc += self._replace(dtype=acc.dtype).compute().view(acc.shape)
        else:
            fast = self.schedule.plan.fast_accum[2]
            primitives.gemm_into(acc, self.dy, self.x, None, 1.0, 1.0, fast)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: QuantizedTensor) -> Tensor:
        return weight.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def dequantized_weight(weight: Tensor) -> Tensor:
    """A weight for a product in high precision; its gradient is the parameter's."""
    return _Dequantize.apply(weight) if isinstance(weight, QuantizedTensor) else weight


# --- the layer -------------------------------------------------------------------------------------------------------


def _held_copies(weight: QuantizedTensor, calls: tuple[Call, ...]) -> Copies:
    """The copies that calls would make, of a weight that is held quantized."""
    rowwise = columnwise = None
    for quantizer in [c.quantizer for c in calls]:
        held, asked = (FORMATS[q.spec.format_id] for q in (weight.quantizer, quantizer))
        if held.id != asked.id:
            raise ValueError(
                f"linear: the weight is held as {held.name}, and the recipe asks for {asked.name}; "
                "run it by the recipe of its quantized_model_init"
            )
        rowwise = weight.copy_of(False) if quantizer.rowwise else rowwise
        columnwise = weight.copy_of(True) if quantizer.columnwise else columnwise
    return rowwise, columnwise


def _fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, rng: Tensor | None, s: Schedule, options: Options, given: Any = None
) -> tuple[Tensor, Copies, Copies]:
    """y, and the copies of x and w. `given`: the input's copies, where x alone is not what is multiplied."""
    copies_x = quantize_calls(x, s.x, options, rng, options.replay) if given is None else given
    copies_w = options.weight_copies
    if isinstance(weight, QuantizedTensor):
        copies_w = _held_copies(weight, s.w)
    elif copies_w is None:
        copies_w = quantize_calls(weight, s.w, options, rng, options.replay)
    a = x if copies_x[0] is None else copies_x[0]
    b = _pick("original", copies_w, weight) if s.plan.weight.rowwise is None else copies_w[0]
    y = _product("fprop", a, b, bias, x.dtype, s.plan.fast_accum[0])
    if x.dim() != 2:
        y = y.view(shapes.gemm_out_shape(x.shape, y.shape[0], y.shape[1], False))
    return y, copies_x, copies_w


def _record_late(x: Tensor, s: Schedule, options: Options) -> None:
    """Records x for the delayed states that only backward's quantizing reads."""
    for slot in {c.state for c in s.x_late if c.state} - {c.state for c in s.x}:
        if options.state is not None and options.record and options.replay is None:
            options.state.record(slot, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rng: Tensor | None,
        recipe: Recipe,
        options: Options,
        need_dx: bool,
        need_dw: bool,
    ) -> Tensor:
        s = schedule(recipe, options.module, options.name, need_dx, need_dw, options.save_original_input)
        y, copies_x, copies_w = _fprop(x, weight, bias, rng, s, options)
        saved: list[Tensor] = []
        spec_x = spec_w = None
        if need_dw:
            spec_x = _pack(x if s.x_late else _pick(s.x_kept, copies_x, x), saved)
            saved += [_scale_of(c, options, options.replay)[0].clone() for c in s.x_late if c.state]
            _record_late(x, s, options)
        if need_dx:
            spec_w = _pack(_pick(s.w_kept, copies_w, weight), saved)
        if s.backward_rng and rng is not None:
            saved.append(rng)
        ctx.save_for_backward(*saved)
        bias_dtype = None if bias is None else bias.dtype
        ctx.call = (recipe, options, need_dx, need_dw, spec_x, spec_w, x.shape, x.dtype, weight.dtype, bias_dtype)
        return _rounded(y, s.results[0], options, rng)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError(
                "diptych.torch.Linear has no second derivative (backward ran with create_graph=True); "
                "run this part under autocast(enabled=False)"
            )
        recipe, options, need_dx, need_dw, spec_x, spec_w, x_shape, x_dtype, w_dtype, bias_dtype = ctx.call
        s = schedule(recipe, options.module, options.name, need_dx, need_dw, options.save_original_input)
        saved = list(ctx.saved_tensors)
        x: Any = None
        w = dx = dw = db = None
        scales = {}
        if need_dw:
            x = _unpack(spec_x, saved)
            scales = {c.state: saved.pop(0) for c in s.x_late if c.state}
        if need_dx:
            w = _unpack(spec_w, saved)
        rng = saved.pop(0) if saved else None
        rowwise, columnwise = quantize_calls(dy, s.dy, options, rng)
        if need_dx:
            dx = _product("dgrad", dy if rowwise is None else rowwise, w, None, x_dtype, s.plan.fast_accum[1])
            dx = _rounded(dx, s.results[1], options, rng).view(x_shape)
        if need_dw:
            if s.x_late:
                x = _pick(s.x_kept, quantize_calls(x, s.x_late, options, rng, scales), x)
            wgrad = WeightGradient(dy if columnwise is None else columnwise, x, w_dtype, s, options, rng)
            dw = wgrad.compute() if options.weight_grad is None else options.weight_grad.accept(wgrad)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = primitives.bias_grad(dy, bias_dtype)
        return dx, dw, db, None, None, None, None, None


def _require_fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Everything that the three products ask for, before the first kernel."""
    require_high_precision("linear", "input", x)
    require_high_precision("linear", "weight", weight)
    if x.dim() == 0 or weight.dim() != 2 or x.size(-1) != weight.size(1):
        raise ShapeError(f"linear: input [..., K] and weight [N, K] do not fit: {describe(x)}, {describe(weight)}")
    if bias is not None:
        require_high_precision("linear", "bias", bias)
        if bias.dim() != 1 or bias.size(0) != weight.size(0):
            raise ShapeError(f"linear: bias [N] and weight [N, K] do not fit: {describe(bias)}, {describe(weight)}")
    require_device("linear", x, weight, "weight")
    require_device("linear", x, bias, "bias")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    module: str = "linear",
    name: str = "",
    state: ScaleStates | None = None,
    rng: Tensor | None = None,
    amax_group: Any = None,
    record: bool = True,
    save_original_input: bool = False,
) -> Tensor:
    """x @ weight.T + bias with operands quantized as a recipe says, differentiable once.

    **Arguments:** `x`: [..., K]; under `torch.amp.autocast` it is cast to its dtype first. `weight`: [N, K], quantized
    from its own dtype, or a QuantizedTensor with the copies that are needed. `bias`: [N]. All float32, bfloat16 or
    float16, in any mixture. `module`, `name`: the roles that the recipe is asked about. `state`: scales of delayed
    scaling, whose histories record the amaxes unless `record=False`. `rng`: int32 [4], state of the random generator
    of stochastic rounding (`rng_state`); 18 offsets are used from there on, and advancing it is the caller's.
    `amax_group`: process group over which amaxes are reduced. `save_original_input`: backward keeps x and quantizes
    it again, instead of keeping a copy.

    **Returns:** [..., N] in x's (or autocast's) dtype; where the recipe quantizes the output, those values, and as a
    QuantizedTensor where no gradient is needed.

    **Raises:** TypeError for dtypes or a missing `state` or `rng`, ValueError for shapes, mixed devices or a recipe
    whose operands do not fit, NotImplementedError for a second derivative.
    """
    options = Options(module, name, save_original_input, record, amax_group, state)
    return linear_with(x, weight, bias, rng, recipe, options)


def linear_with(
    x: Tensor, weight: Tensor, bias: Tensor | None, rng: Tensor | None, recipe: Recipe, options: Options
) -> Tensor:
    """`linear`, its options gathered."""
    device_type = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    _require_fit(x, weight, bias)
    if torch.is_grad_enabled():
        need_dx, need_dw = x.requires_grad, weight.requires_grad
        if need_dx or need_dw or (bias is not None and bias.requires_grad):
            return _Linear.apply(x, weight, bias, rng, recipe, options, need_dx, need_dw)
    s = schedule(recipe, options.module, options.name, False, False)
    y = _fprop(x, weight, bias, rng, s, options)[0]
    if s.results[0] is None:
        return y
    return _quantize_general(y, s.results[0], options, rng, None)
