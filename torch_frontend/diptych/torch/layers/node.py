"""Linear layers inside of a graph's node: what the ops of one or more of them take beside their operands.

Eagerly that is the `Options` of each layer. Where a call is traced they cross as tensors and constants, and are put
together again inside. The states of delayed scaling are the caller's: eagerly quantizing reads and writes them as it
goes; a forward node is pure, gets the scales and returns the amaxes of what it quantized, which the graph records; a
backward node declares that it writes to the log of amaxes, and to the `main_grad`s (`state/update.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.common.layers.plan import TensorPlan
from diptych.common.layers.schedule import Schedule
from diptych.common.recipes import Recipe
from diptych.torch.graph.custom_op import CustomOp, Group, Written
from diptych.torch.graph.guards import before_each_call
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.options import Options, schedule
from diptych.torch.layers.products import WeightGradient
from diptych.torch.layers.quantize import quantize_general
from diptych.torch.layers.weight_gradients import accumulate, overwrites
from diptych.torch.primitives.checks import TWO_LEVEL
from diptych.torch.primitives.register import traced_local
from diptych.torch.state.scales import ScaleStates, StepScales
from diptych.torch.state.update import log_amax, record_pending
from diptych.torch.tensors.copies import Copies, Spec, pack, pick, unpack
from diptych.torch.tensors.quantized import QuantizedTensor, QuantizedTensorBase, rotated

# --- states and copies -----------------------------------------------------------------------------------------------


class _Buffer:
    """Where a node adds a weight's gradient. `how`: "add" or "overwrite"."""

    marks = False

    def __init__(self, buffer: Tensor, how: str) -> None:
        self.buffer, self.how = buffer, how

    def accept(self, wgrad: Any) -> None:
        accumulate(wgrad, self.buffer, self.how == "overwrite")


def _state_names(s: Schedule) -> tuple[str, ...]:
    """Names of a plan's states, in its order."""
    return tuple([state.name for state in s.plan.states])


def kept_spec(kept: str, plan: TensorPlan) -> Spec:
    """How `pack` put the copy that backward reads."""
    if kept == "original":
        return None
    quantizer = plan.rowwise if kept == "rowwise" else plan.columnwise
    assert quantizer is not None
    format_id = quantizer.spec.format_id
    return format_id, kept == "columnwise", TWO_LEVEL[format_id]


_Decided = tuple[tuple[Schedule, ...], tuple[str, ...], tuple[str, ...]]
_recent: dict[tuple[Any, ...], tuple[Recipe, _Decided]] = {}

# --- arguments -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LayerArguments:
    """The fields that all ops of linear layers begin with. Where `options` is None, what follows it says the same.

    `layers`: (module, name, save_original_input, record, specs of kept copies, how a main_grad is written or "") of
    each; the lists are those of all layers, one after the other.
    """

    weights: ClassVar[tuple[str, ...]] = ("weight",)  # names of fields, by layer
    rngs: ClassVar[tuple[str, ...]] = ("rng",)
    recordable: ClassVar[bool] = True  # a forward does only what a program records or is told that it cannot

    x: Tensor
    recipe: Recipe
    options: tuple[Options, ...] | None
    layers: tuple[tuple[Any, ...], ...]
    group: Group
    copies: list[Tensor]
    scales: list[Tensor]
    logs: Written
    main_grads: Written

    def wanted(self, needs: tuple[str, ...]) -> tuple[tuple[bool, bool], ...]:
        """For each layer, whether the gradient of its input is needed, and whether that of its weight is."""
        raise NotImplementedError

    def kept_operands(self, needs: tuple[str, ...], schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
        """The fields besides weights and what this class has that backward reads."""
        raise NotImplementedError

    # --- what to do ---

    def schedules(self, needs: tuple[str, ...]) -> tuple[Schedule, ...]:
        """The schedule of each layer."""
        return self._schedules_for(needs) if torch.compiler.is_compiling() else self._decided(needs)[0]

    def keeps(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """The fields that backward reads."""
        return self._keeps_for(needs) if torch.compiler.is_compiling() else self._decided(needs)[1]

    def gradients(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """`needs` but for the weights whose gradients go elsewhere."""
        return self._gradients_for(needs) if torch.compiler.is_compiling() else self._decided(needs)[2]

    def _decided(self, needs: tuple[str, ...]) -> _Decided:
        """All three outside of graphs, where they are made once for each recipe object."""
        held = self.__dict__  # a call has one `needs`
        if "_known" in held:
            return held["_known"]
        key: list[Any] = [type(self), id(self.recipe), needs]
        if self.options is None:
            key += self.layers
        else:
            for options in self.options:
                key += (options[0], options[1], options[2], _leaves(options))
        for name in self.weights:
            key.append(isinstance(held[name], QuantizedTensorBase))
        known = _recent.get(tuple(key))
        if known is None:
            made = (self._schedules_for(needs), self._keeps_for(needs), self._gradients_for(needs))
            if len(_recent) >= 1024:
                del _recent[next(iter(_recent))]
            known = _recent[tuple(key)] = (self.recipe, made)  # the id stays its own as long as the entry does
        held["_known"] = known[1]
        return known[1]

    def _schedules_for(self, needs: tuple[str, ...]) -> tuple[Schedule, ...]:
        made = []
        layers: Any = self.layers if self.options is None else self.options
        for layer, (need_dx, need_dw) in zip(layers, self.wanted(needs), strict=True):
            made.append(schedule(self.recipe, layer[0], layer[1], need_dx, need_dw, layer[2]))
        return tuple(made)

    def _keeps_for(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        schedules = self._schedules_for(needs)
        found = ["scales", *self.kept_operands(needs, schedules)]
        for i, s in enumerate(schedules):
            if s.backward_rng:
                found.append(self.rngs[i])
            if self._reads_weight(i, s):
                found.append(self.weights[i])
            elif s.w_kept and self._specs(i):
                found.append("copies")
        return tuple(found)

    def _gradients_for(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        elsewhere = []
        for i, name in enumerate(self.weights):
            gone = self.layers[i][5] if self.options is None else _leaves(self.options[i])
            if gone:
                elsewhere.append(name)
        return tuple([n for n in needs if n not in elsewhere])

    # --- the options ---

    def forward_options(self, needs: tuple[str, ...]) -> tuple[tuple[Options, ...], list[Tensor]]:
        """The options of each layer's forward, and one tensor for the amaxes that the node returns: quantizing by these
        options fills it in."""
        if self.options is not None:
            return self.options, []
        amaxes = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in self.amax_protos(needs)]
        made = []
        scales, cells = _cells(self.scales), _cells(amaxes)
        for i, s in enumerate(self.schedules(needs)):
            module, name, original, record = self.layers[i][:4]
            states: Any = None
            if scales and s.plan.states:
                names = _state_names(s)
                own = _taken(cells, len(names)) if record else [None] * len(names)
                states = StepScales(names, _taken(scales, len(names)), own)
            made.append(Options(module, name, original, record, self.group, states, None, self._kept_copies(i)))
        return tuple(made), amaxes

    def backward_options(self, needs: tuple[str, ...]) -> tuple[Options, ...]:
        """The options of each layer's backward. They write to the caller's main_grad; `log_amaxes` logs the amaxes."""
        if self.options is not None:
            return self.options
        scales, logs, buffers = _cells(self.scales), list(self.logs), list(self.main_grads)  # type: ignore[call-overload]
        self._recorded = []
        made = []
        for layer, s in zip(self.layers, self.schedules(needs), strict=True):
            module, name, original, record, _, how = layer
            states: Any = None
            if scales and s.plan.states:
                names = _state_names(s)
                amaxes = torch.zeros(len(names), dtype=torch.float32, device=self.scales[0].device)
                states = StepScales(names, _taken(scales, len(names)), _cells([amaxes]))
                if record:
                    self._recorded.append((amaxes, *_taken(logs, 2)))
            sink = _Buffer(buffers.pop(0), how) if how else None
            made.append(Options(module, name, original, record, self.group, states, None, None, sink))
        return tuple(made)

    def log_amaxes(self) -> None:
        """Ends a backward."""
        if self.options is None:
            for amaxes, log, written in self._recorded:
                log_amax(amaxes, log, written)

    def amax_protos(self, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
        """The layout of that tensor; none where there are no amaxes."""
        if self.options is not None or not self.scales:
            return ()
        count = 0
        for layer, s in zip(self.layers, self.schedules(needs), strict=True):
            count += len(s.plan.states) if layer[3] else 0
        return (TensorProto((count,), torch.float32, None, self.x.device),) if count else ()

    # --- the operands of dgrad ---

    def pack_weight(self, i: int, s: Schedule, copies: Copies, saved: list[Tensor]) -> None:
        """Saves a layer's where it is no argument."""
        if s.w_kept and not self._specs(i) and not self._reads_weight(i, s):
            pack(pick(s.w_kept, copies, getattr(self, self.weights[i])), saved)

    def kept_weight(self, i: int, s: Schedule, saved: list[Tensor]) -> Any:
        """A layer's."""
        weight = getattr(self, self.weights[i])
        if isinstance(weight, QuantizedTensorBase):
            columnwise = weight.rowwise_data is None if s.w_kept == "original" else s.w_kept == "columnwise"
            return weight.copy_of(columnwise)
        if isinstance(weight, Tensor):
            return weight
        if self._specs(i):
            return pick(s.w_kept, self._kept_copies(i), weight)  # type: ignore[arg-type]
        return unpack(kept_spec(s.w_kept, s.plan.weight), saved)

    def _reads_weight(self, i: int, s: Schedule) -> bool:
        held = isinstance(getattr(self, self.weights[i]), QuantizedTensorBase)
        return s.w_kept == "original" or (s.w_kept != "" and held)

    def _specs(self, i: int) -> tuple[Spec, ...]:
        return self.layers[i][4] if self.options is None else ()

    def _kept_copies(self, i: int) -> Copies | None:
        """The copies of a layer's weight that were given."""
        if not self._specs(i):
            return None
        tensors, found = list(self.copies), None
        for j in range(i + 1):
            found = tuple([None if spec is None else unpack(spec, tensors) for spec in self._specs(j)])
        return found  # type: ignore[return-value]


def _leaves(options: Options) -> bool:
    """Whether autograd gets no gradient of a layer's weight."""
    return options.weight_grad is not None and not options.weight_grad.marks


def _cells(tensors: list[Tensor]) -> list[Tensor]:
    """The elements of vectors, each a vector."""
    return [t.narrow(0, i, 1) for t in tensors for i in range(t.shape[0])]


def _taken(tensors: list[Tensor], count: int) -> list[Tensor]:
    """Removes the first `count` tensors of a list and returns them."""
    found = tensors[:count]
    del tensors[:count]
    return found


# --- one call --------------------------------------------------------------------------------------------------------


def finished(y: Tensor, s: Schedule, options: Options, rng: Tensor | None) -> Tensor:
    """The result of a forward, quantized where the recipe has a quantizer for it.

    What a quantizer of the user's own made of it by another bears its name. **Raises** TypeError for another format.
    """
    call = s.results[0]
    if call is None:
        return y
    q, declared = quantize_general(y, call, options, rng, None), call.quantizer
    if not declared.custom:
        return q
    if (q.quantizer.spec.format_id, rotated(q.quantizer)) != (declared.spec.format_id, rotated(declared)):
        raise ArgumentError(f"{declared} has the format {declared.format.name}, and its quantize_impl made {q!r}")
    return QuantizedTensor(declared, q.shape, q.dtype, **{n: getattr(q, n) for n in declared.buffer_names()})


def result_proto(x: Any, width: Any, s: Schedule) -> TensorProto:
    """The layout of a layer's result, quantized where the recipe has a quantizer for it."""
    quantizer = None if s.results[0] is None else s.results[0].quantizer
    return TensorProto((*x.shape[:-1], width), x.dtype, quantizer, x.device, True)


def weight_gradient(dy: Any, x: Any, dtype: torch.dtype, s: Schedule, options: Options, rng: Tensor | None) -> Any:
    """wgrad; None where the options take it elsewhere."""
    wgrad = WeightGradient(dy, x, dtype, s, options, rng)
    return wgrad.compute() if options.weight_grad is None else options.weight_grad.accept(wgrad)


def run(op: CustomOp, x: Tensor, recipe: Recipe, options: tuple[Any, ...], *operands: Any) -> tuple[Tensor, ...]:
    """The outputs of an op whose arguments derive from `LayerArguments`; `operands`: its other fields."""
    make: Any = op.arguments
    if not torch.compiler.is_compiling():
        return op.eager(make(x, recipe, options, (), None, [], [], [], [], *operands))
    from torch._dynamo.comptime import comptime  # importing it takes a second

    a = make(x, recipe, None, (), options[0].group, [], [], [], [], *operands)
    layers, pending = [], []
    for i, given in enumerate(options):
        weight = getattr(a, a.weights[i])
        specs: tuple[Spec, ...] = ()
        if given.weight_copies is not None:
            specs = tuple([None if copy is None else pack(copy, a.copies) for copy in given.weight_copies])
        how = ""
        if given.weight_grad is not None and torch.is_grad_enabled() and weight.requires_grad:
            a.main_grads += given.weight_grad.buffers()
            how = "overwrite" if overwrites(weight) else "add"
        state = given.state
        if state is not None:
            comptime(_prepared_while_tracing)
            names = _state_names(schedule(recipe, given.module, given.name, False, False))
            a.scales += [state.tensors(name)[0] for name in names] if given.scales is None else [given.scales]
            if given.record and len(names) > 0:
                a.logs += [state._buffers["log"], state._buffers["written"]]
                pending.append((state._buffers["pending"], len(names)))
        layers.append((given.module, given.name, given.save_original_input, given.record, specs, how))
    a.layers = tuple(layers)
    outputs = op(a)
    if len(pending) == 0:
        return outputs
    first = 0
    for cells, count in pending:
        record_pending(cells, outputs[-1].narrow(0, first, count))
        first += count
    return outputs[:-1]


def _prepared_while_tracing(context: Any) -> None:
    """Runs where Dynamo traces `run`, on the real objects: states that a user holds may have met no graph before."""
    state_fits(traced_local(context, "state"))
    before_each_call(context, "state", state_fits)


def state_fits(states: Any) -> bool:
    """The guard of `ScaleStates` that a user holds: what graphs record in lies beside them afterwards."""
    if isinstance(states, ScaleStates) and not states.ready_for_graphs():
        with torch.inference_mode(False):
            states.prepare_for_graphs()
    return True
