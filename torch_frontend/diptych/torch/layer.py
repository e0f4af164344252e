"""`linear`: the linear layer as one differentiable op, eagerly and as two nodes of a graph.

The states of delayed scaling are the caller's. Eagerly quantizing reads and writes them as it goes. A forward node is
pure: it gets the scales, and returns the amaxes of what it quantized, which the graph records (`record_amaxes`); a
backward node declares that it writes to the histories of what it quantizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import ShapeError
from diptych.common.recipes import Recipe
from diptych.common.schedule import Call, Schedule
from diptych.torch import primitives
from diptych.torch.custom_op import CustomOp, Group, Written
from diptych.torch.products import (
    Copies,
    Options,
    Spec,
    WeightGradient,
    fprop,
    pack,
    pick,
    product,
    quantize_calls,
    quantize_general,
    record_late,
    rounded,
    scale_of,
    schedule,
    unpack,
)
from diptych.torch.proto import TensorProto
from diptych.torch.quantized import QuantizedTensor
from diptych.torch.rules import TWO_LEVEL, describe, require_device, require_high_precision
from diptych.torch.state import ScaleStates, record_amax, record_amaxes

# --- states inside of a node -----------------------------------------------------------------------------------------


class States:
    """The states of delayed scaling as a node has them: a scale and a history by slot."""

    def __init__(self, slots: tuple[str, ...], scales: list[Tensor], histories: list[Any]) -> None:
        self._tensors = dict(zip(slots, zip(scales, histories, strict=True), strict=True))

    def tensors(self, slot: str) -> tuple[Tensor, Tensor]:
        """(scale, history) of a slot."""
        scale, history = self._tensors[slot]
        return scale, history

    def record(self, slot: str, amax: Tensor) -> None:
        """Enters an amax [1]."""
        record_amax(self._tensors[slot][1], amax)


def state_slots(s: Schedule) -> tuple[str, ...]:
    """Names of a plan's states, in its order."""
    return tuple([slot.name for slot in s.plan.states])


def forward_slots(s: Schedule, weight: bool) -> tuple[str, ...]:
    """The states that a forward records. `weight`: it quantizes the weight itself."""
    found: list[str] = []
    calls: tuple[Call, ...] = (*s.x, *s.w) if weight else s.x
    for name in [*[c.state for c in calls], *s.late_states()]:
        if name and name not in found:
            found.append(name)
    return tuple(found)


def kept_spec(kept: str, call_format: int) -> Spec:
    """How `pack` puts the copy that backward reads."""
    return None if kept == "original" else (call_format, kept == "columnwise", TWO_LEVEL[call_format])


# --- the op ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LinearArguments:
    """One call of a linear layer. `options`: where nothing is traced; else what follows it says the same in tensors."""

    x: Tensor
    weight: Tensor | QuantizedTensor
    bias: Tensor | None
    rng: Tensor | None
    recipe: Recipe
    module: str
    name: str
    original: bool
    record: bool
    options: Options | None
    group: Group = None  # type: ignore[assignment]
    copies: list[Tensor] = dataclasses.field(default_factory=list)
    copies_spec: tuple[Spec, ...] = ()
    scales: list[Tensor] = dataclasses.field(default_factory=list)
    histories: Written = dataclasses.field(default_factory=list)  # type: ignore[assignment]
    main_grad: Written = dataclasses.field(default_factory=list)  # type: ignore[assignment]

    def schedule(self, needs: tuple[str, ...]) -> Schedule:
        if torch.compiler.is_compiling():
            return schedule(self.recipe, self.module, self.name, "x" in needs, "weight" in needs, self.original)
        held = self.__dict__  # a call has one `needs`
        if "_schedule" not in held:
            held["_schedule"] = schedule(
                self.recipe, self.module, self.name, "x" in needs, "weight" in needs, self.original
            )
        return held["_schedule"]

    def own_weight(self) -> bool:
        """Whether this call quantizes the weight."""
        return not self.copies_spec and not isinstance(self.weight, QuantizedTensor)

    def weight_copies(self) -> Copies | None:
        tensors = list(self.copies)
        if not self.copies_spec:
            return None
        return tuple([None if spec is None else unpack(spec, tensors) for spec in self.copies_spec])  # type: ignore[return-value]


def _forward(a: LinearArguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    s = a.schedule(needs)
    options, amaxes = a.options, []
    if options is None:
        slots = forward_slots(s, a.own_weight()) if a.record else ()
        amaxes = [a.x.new_zeros(1, dtype=torch.float32) for _ in slots]
        cells = dict(zip(slots, amaxes, strict=True))
        names = state_slots(s)
        states: Any = States(names, a.scales, [cells.get(name) for name in names])
        options = Options(a.module, a.name, a.original, a.record, a.group, states, None, a.weight_copies())
    y, copies_x, copies_w = fprop(a.x, a.weight, a.bias, a.rng, s, options)
    saved: list[Tensor] = []
    kept = _keeps(a, needs)
    if "weight" in needs:
        if "x" not in kept:
            pack(pick(s.x_kept, copies_x, a.x), saved)
        saved += [scale_of(c, options, options.replay)[0].clone() for c in s.x_late if c.state]
        record_late(a.x, s, options)
    if "x" in needs and "weight" not in kept and not a.copies_spec:
        pack(pick(s.w_kept, copies_w, a.weight), saved)
    if not needs and s.results[0] is not None:
        return (quantize_general(y, s.results[0], options, a.rng, None), *amaxes), saved
    return (rounded(y, s.results[0], options, a.rng), *amaxes), saved


def _layout(a: LinearArguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    s = a.schedule(needs)
    shape, place = (*a.x.shape[:-1], a.weight.shape[0]), a.x.device
    quantizer = None if needs or s.results[0] is None else s.results[0].quantizer
    slots = forward_slots(s, a.own_weight()) if a.options is None and a.record else ()
    y = TensorProto(shape, a.x.dtype, quantizer, place, True)
    return (y, *[TensorProto((1,), torch.float32, None, place) for _ in slots])


def _keeps(a: LinearArguments, needs: tuple[str, ...]) -> tuple[str, ...]:
    s = a.schedule(needs)
    kept = ["scales"]
    if "weight" in needs and (s.x_late or s.x_kept == "original"):
        kept.append("x")
    if "x" in needs:
        if a.copies_spec:
            kept.append("copies")
        elif s.w_kept == "original" or isinstance(a.weight, QuantizedTensor):
            kept.append("weight")
    if s.backward_rng:
        kept.append("rng")
    return tuple(kept)


def _gradients(a: LinearArguments, needs: tuple[str, ...]) -> tuple[str, ...]:
    elsewhere = a.main_grad or (a.options is not None and a.options.weight_grad is not None)
    return tuple([n for n in needs if n != "weight"]) if elsewhere else needs


def _kept_weight(a: LinearArguments, s: Schedule, saved: list[Tensor]) -> Any:
    """The operand of dgrad."""
    weight: Any = a.weight
    if isinstance(weight, QuantizedTensor):
        columnwise = weight.rowwise_data is None if s.w_kept == "original" else s.w_kept == "columnwise"
        return weight.copy_of(columnwise)
    if isinstance(weight, Tensor):
        return weight
    if a.copies_spec:
        copies = a.weight_copies()
        assert copies is not None
        return pick(s.w_kept, copies, weight)
    quantizer = s.plan.weight.rowwise if s.w_kept == "rowwise" else s.plan.weight.columnwise
    assert quantizer is not None
    return unpack(kept_spec(s.w_kept, quantizer.spec.format_id), saved)


def _backward(
    a: LinearArguments, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]
) -> list[Tensor]:
    s = a.schedule(needs)
    options, dy = a.options, grads[0]
    assert dy is not None
    if options is None:
        states: Any = States(state_slots(s), a.scales, a.histories)  # type: ignore[arg-type]
        options = Options(a.module, a.name, a.original, a.record, a.group, states)
    x: Any = None
    scales = {}
    if "weight" in needs:
        if isinstance(a.x, Tensor):
            x = a.x
        else:
            quantizer = s.plan.input.rowwise if s.x_kept == "rowwise" else s.plan.input.columnwise
            assert quantizer is not None
            x = unpack(kept_spec(s.x_kept, quantizer.spec.format_id), saved)
        scales = {c.state: saved.pop(0) for c in s.x_late if c.state}
    w = _kept_weight(a, s, saved) if "x" in needs else None
    rowwise, columnwise = quantize_calls(dy, s.dy, options, a.rng)
    made: dict[str, Tensor] = {}
    if "x" in needs:
        dx = product("dgrad", dy if rowwise is None else rowwise, w, None, a.x.dtype, s.plan.fast_accum[1])
        made["x"] = rounded(dx, s.results[1], options, a.rng).view(a.x.shape)
    if "weight" in needs:
        if s.x_late:
            x = pick(s.x_kept, quantize_calls(x, s.x_late, options, a.rng, scales), x)
        wgrad = WeightGradient(dy if columnwise is None else columnwise, x, a.weight.dtype, s, options, a.rng)
        if a.main_grad:
            wgrad.accumulate(a.main_grad[0])  # type: ignore[index]
        elif options.weight_grad is not None:
            options.weight_grad.accept(wgrad)
        else:
            made["weight"] = wgrad.compute()
    if "bias" in needs:
        assert a.bias is not None
        made["bias"] = primitives.bias_grad(dy, a.bias.dtype)
    return [made[name] for name in _gradients(a, needs)]


_linear = CustomOp("diptych::linear", LinearArguments, _forward, _layout, _backward, keeps=_keeps, gradients=_gradients)


# --- as users call it ---


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
    module, name, original, record = options[:4]
    if not torch.compiler.is_compiling():
        a = LinearArguments(x, weight, bias, rng, recipe, module, name, original, record, options)
        return _linear.eager(a)[0]
    a = LinearArguments(x, weight, bias, rng, recipe, module, name, original, record, None, options.group)
    return with_states(_linear, a, options)


def with_states(op: CustomOp, a: LinearArguments, options: Options) -> Tensor:
    """A call that is traced: the options as tensors, and the amaxes recorded that the node returns."""
    states = options.state
    s = schedule(a.recipe, a.module, a.name, False, False)
    if options.weight_copies is not None:
        a.copies_spec = tuple([None if copy is None else pack(copy, a.copies) for copy in options.weight_copies])
    if options.weight_grad is not None:
        a.main_grad = options.weight_grad.buffers()
    if states is not None:
        pairs = [states.tensors(slot) for slot in state_slots(s)]
        a.scales, a.histories = [p[0] for p in pairs], [p[1] for p in pairs]  # type: ignore[assignment]
    y, *amaxes = op(a)
    if amaxes and states is not None:
        needs_w = torch.is_grad_enabled() and a.weight.requires_grad
        full = schedule(a.recipe, a.module, a.name, False, needs_w, a.original)
        slots = forward_slots(full, a.own_weight())
        record_amaxes([states.tensors(slot)[1] for slot in slots], amaxes)
    return y
