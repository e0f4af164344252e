"""The three products of a linear layer under a recipe, and the arguments that all layer ops share.

    y  = quantize(x)  @ quantize(w).T + bias      fprop  [M, K] @ [N, K].T
    dx = quantize(dy) @ quantize(w)               dgrad  [M, N] @ [N, K]
    dw = quantize(dy).T @ quantize(x)             wgrad  [M, N].T @ [M, K]
    db = bias_grad(dy)

Invariants:

- `linear_plan` of `common.layers.plan` decides how each operand is quantized, and a `Schedule` which of these copies
  one call needs: a columnwise copy of x only where the weight is trained, one of w only where x needs a gradient. A
  call makes its schedules once, in its forward; its backward finds them in its arguments.
- Forward saves what backward reads through `save_for_backward`, as plain tensors, and nothing else.
- An operand is a `Copy`, or a tensor in high precision. Two copies multiply in the core; a product with any other
  operand runs in high precision on what a copy stands for.
- Eagerly a layer's op gets the `Options` of each layer. In a traced call they cross into the node as tensors and
  constants, and the node rebuilds them. The states of delayed scaling belong to the caller. Eagerly, quantizing reads
  and writes them; a forward node is pure: it gets the scales and returns the amaxes, which the graph records; a
  backward node declares that it writes to the log of amaxes (`state/update.py`) and to the `main_grad`s.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.common.errors import ArgumentError
from diptych.common.gemm_options import GemmOptions
from diptych.common.layer_options import ROW, Originals
from diptych.common.layers.schedule import Call, Schedule
from diptych.common.recipes import Recipe
from diptych.torch.graph.custom_op import CustomOp, Group, Written
from diptych.torch.graph.eager_only import outside
from diptych.torch.graph.guards import before_each_call
from diptych.torch.graph.program import Replay
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.held import given_copies, held_copies
from diptych.torch.layers.options import CallState, LayerConstants, Options, draws, originals_of, schedule, state_names
from diptych.torch.layers.quantize import (
    Encoded,
    encode,
    kept_spec,
    quantize_general,
    quantize_weight,
    requantized_result,
    save_for_late,
    saved_for_late,
)
from diptych.torch.layers.tensor_parallel import Cut, Exchange, whole_input, whole_input_gradient, whole_output
from diptych.torch.layers.weight_gradients import Buffer
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives.register import direct, traced_local
from diptych.torch.private.dispatch import unsafe_view
from diptych.torch.private.functorch import transforms_active
from diptych.torch.state.scales import ScaleStates, StepScales
from diptych.torch.state.update import log_amax, record_pending
from diptych.torch.tensors.copies import Copies, Operand, Spec, pack, pick, spec_of, unpack, values
from diptych.torch.tensors.quantized import QuantizedTensor, QuantizedTensorBase, high_precision, rotated

# --- operands and products -------------------------------------------------------------------------------------------


def product(gemm: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, options: GemmOptions) -> Tensor:
    """Returns the product op(a) @ op(b) + bias, [rows, cols] in dtype."""
    if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
        return gemm_ops.gemm(a, b, bias, 1.0, dtype, options)
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

    def compute(self) -> Tensor:
        dw = product("wgrad", self.dy, self.x, None, self.dtype, self.schedule.plan.options[2])
        return requantized_result(dw, self.schedule.results[2], self.options)

    def accumulate(self, acc: Tensor) -> None:
        if self.schedule.results[2] is not None or isinstance(self.dy, Tensor) or isinstance(self.x, Tensor):
            acc += self._replace(dtype=acc.dtype).compute().view(acc.shape)
        else:
            gemm_ops.gemm_into(acc, self.dy, self.x, None, 1.0, 1.0, self.schedule.plan.options[2])


# --- the layer -------------------------------------------------------------------------------------------------------


def fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, s: Schedule, options: Options, given: Any = None
) -> tuple[Tensor, Encoded, Encoded]:
    """Returns y, x encoded, and w encoded. `given`: the encoded input, if the caller has made it from a source."""
    encoded_x = given
    if isinstance(x, QuantizedTensor):
        encoded_x = Encoded(given_copies(x, s))
    elif given is None:
        encoded_x = encode(x, s.x, options, options.state.recomputed)
    cut, leading = options.cut, x.shape[:-1]
    a = high_precision(options.module, x) if encoded_x.copies[0] is None else encoded_x.copies[0]
    whole_a = None if cut is None else whole_input(lambda: a, cut)
    encoded_w = fprop_weight(weight, s, options)
    b = pick("original", encoded_w.copies, weight) if s.plan.weight.rowwise is None else encoded_w.copies[0]
    if cut is None or whole_a is None:
        y = product("fprop", a, b, bias, x.dtype, s.plan.options[0])
    else:
        leading, added = (cut.out_rows(x.shape[0]), *x.shape[1:-1]), None if cut.mode == ROW else bias
        y = product("fprop", whole_a.finish(), b, added, x.dtype, s.plan.options[0])
        y = whole_output(y, bias, cut)
    if x.dim() != 2:
        # Autograd would refuse to change a view that an op returns in place.
        y = unsafe_view(y, (*leading, y.shape[1]))
    return y, encoded_x, encoded_w


def input_gradient(dy: Operand, w: Operand, x: Tensor, s: Schedule, options: Options, width: Any) -> Exchange[Tensor]:
    """Computes dgrad, [..., width] with x's leading dimensions, in x's dtype. Begins the sum over ranks, if any."""
    dx = product("dgrad", dy, w, None, x.dtype, s.plan.options[1])
    whole = whole_input_gradient(dx, options.cut)
    return whole.then(lambda dx: requantized_result(dx, s.results[1], options).view(*x.shape[:-1], width))


def fprop_weight(weight: Any, s: Schedule, options: Options) -> Encoded:
    """Returns the encoded weight, or stack of weights, made from the original or taken from where it is held or
    kept."""
    if isinstance(weight, QuantizedTensorBase):
        name = f"{options.module}: the weight"
        return Encoded(held_copies(weight, s.w, name, "run it by the recipe of its quantized_model_init"))
    if options.weight_copies is not None:
        return Encoded(options.weight_copies)
    return quantize_weight(weight, s.w, options, options.state.recomputed)


# --- arguments -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LayerArguments:
    """The fields that the ops of all linear layers share. In a traced call `options` is None, and the fields after it
    carry the same content; `copies` does in both: those of the weights that the caller passed.

    `layers`: the `LayerConstants` of each, as plain tuples; the lists are those of all layers, one after the other.
    """

    weights: ClassVar[tuple[str, ...]] = ("weight",)  # names of fields, by layer
    rngs: ClassVar[tuple[str, ...]] = ("rng",)
    _schedules = None  # type: tuple[Schedule, ...] | None  # of this call
    recordable: ClassVar[bool] = True  # forward runs only ops that a program can record, or calls `refuse`

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
        """Returns for each layer whether its input's gradient is needed, and whether its weight's is."""
        raise NotImplementedError

    def kept_operands(self, needs: tuple[str, ...], schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
        """Returns the fields that backward reads, other than the weights and those of this class."""
        raise NotImplementedError

    # --- what to do ---

    def schedules(self, needs: tuple[str, ...], asked: tuple[str, ...] | None = None) -> tuple[Schedule, ...]:
        """Returns the schedule of each layer. The first use makes them for the whole call, its backward included.
        `asked`: the part of `needs` that one backward computes, by fewer quantize calls; None stands for all."""
        if self._schedules is not None and asked is None:
            return self._schedules
        made = []
        for i, (need_dx, need_dw) in enumerate(self.wanted(needs if asked is None else asked)):
            given: Any = self.layers[i] if self.options is None else self.options[i]
            module, name, originals = given[:3]
            if self.options is None:
                originals = Originals(*originals)
            elif originals.weight:
                originals = originals_of(given, getattr(self, self.weights[i]))
            made.append(schedule(self.recipe, module, name, need_dx, need_dw, originals))
        if asked is None and not torch.compiler.is_compiling():
            self._schedules = tuple(made)
        return tuple(made)

    def keeps(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the fields that backward reads."""
        schedules = self.schedules(needs)
        found = ["scales", *self.kept_operands(needs, schedules)]
        for i, s in enumerate(schedules):
            if s.backward_rng:
                found.append(self.rngs[i])
            if s.w_kept and self._reads_weight(i, s):
                found.append(self.weights[i])
            elif s.w_kept and self.copy_specs(i):
                found.append("copies")
        return tuple(found)

    def gradients(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """Returns `needs` without the weights for which autograd gets no gradient."""
        elsewhere = []
        for i, name in enumerate(self.weights):
            gone = self._constants(i).how if self.options is None else _leaves(self.options[i])
            if gone:
                elsewhere.append(name)
        return tuple([n for n in needs if n not in elsewhere]) if elsewhere else needs

    def draws(self, needs: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Returns the fields of random states that a call draws from; see `CustomOp`."""
        return {} if self.options is None else draws(self.rngs, self.schedules(needs), self.options)

    # --- the options ---

    def _constants(self, i: int) -> LayerConstants:
        return LayerConstants(*self.layers[i])

    def cut(self, i: int) -> Cut | None:
        """Returns how layer i is cut over a tensor-parallel group; None if it is not cut."""
        if self.options is not None:
            return self.options[i].cut
        fields = self._constants(i).cut
        return Cut(*fields, group=self.group) if fields else None

    def _drawing(self, given: tuple[Options, ...]) -> tuple[Options, ...]:
        """Returns the options of an eager call with the random bits that its arguments hold: those of one example of a
        vmap, or in backward those that autograd saved."""
        for i, options in enumerate(given):
            rng = getattr(self, self.rngs[i])
            if rng is not options.state.rng:
                options = options._replace(state=options.state._replace(rng=rng))
                given = (*given[:i], options, *given[i + 1 :])
        return given

    def forward_options(self, needs: tuple[str, ...]) -> tuple[tuple[Options, ...], list[Tensor]]:
        """Returns the options of each layer's forward, and a list with the tensor of amaxes that the node returns. The
        list is empty if there is none. Quantizing by these options fills the tensor in."""
        if self.options is not None:
            return self._drawing(self.options), []
        amaxes = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in self.amax_protos(needs)]
        made = []
        scales, cells = _cells(self.scales), _cells(amaxes)
        for i, s in enumerate(self.schedules(needs)):
            module, name, originals, record = self._constants(i)[:4]
            states: Any = None
            if scales and s.plan.states:
                names = state_names(s)
                own = _taken(cells, len(names)) if record else [None] * len(names)
                states = StepScales(names, _taken(scales, len(names)), own)
            state, held = CallState(states, getattr(self, self.rngs[i])), self._kept_copies(i)
            made.append(Options(module, name, Originals(*originals), record, self.group, state, held, cut=self.cut(i)))
        return tuple(made), amaxes

    def backward_options(self, needs: tuple[str, ...]) -> tuple[Options, ...]:
        """Returns the options of each layer's backward, by which it writes to main_grad and keeps amaxes to log."""
        if self.options is not None:
            return self._drawing(self.options)
        scales, logs, buffers = _cells(self.scales), list(self.logs), list(self.main_grads)  # type: ignore[call-overload]
        self._recorded = []
        made = []
        for i, s in enumerate(self.schedules(needs)):
            module, name, originals, record, _, how, _ = self._constants(i)
            states: Any = None
            if scales and s.plan.states:
                names = state_names(s)
                amaxes = torch.zeros(len(names), dtype=torch.float32, device=self.scales[0].device)
                states = StepScales(names, _taken(scales, len(names)), _cells([amaxes]))
                if record:
                    self._recorded.append((amaxes, *_taken(logs, 2)))
            sink = Buffer(buffers.pop(0), how) if how else None
            state = CallState(states, getattr(self, self.rngs[i]))
            kept = Originals(*originals)
            made.append(Options(module, name, kept, record, self.group, state, None, sink, self.cut(i)))
        return tuple(made)

    def log_amaxes(self) -> None:
        """Ends a backward: enters the amaxes that this backward recorded into the log that the next update reads."""
        if self.options is None:
            for amaxes, log, written in self._recorded:
                log_amax(amaxes, log, written)

    def amax_protos(self, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
        """Returns the layout of the tensor of amaxes that a forward node returns; () if there are no amaxes."""
        if self.options is not None or not self.scales:
            return ()
        count = 0
        for i, s in enumerate(self.schedules(needs)):
            count += len(s.plan.states) if self._constants(i).record else 0
        return (TensorProto((count,), torch.float32, None, self.x.device),) if count else ()

    # --- the operands of dgrad ---

    def pack_weight(self, i: int, s: Schedule, options: Options, encoded: Encoded, saved: list[Tensor]) -> None:
        """Saves the tensors by which dgrad gets layer i's weight, except those that an argument holds."""
        if s.w_late:
            save_for_late(getattr(self, self.weights[i]), s.w, s.w_late, options, encoded.amax, saved)
        elif s.w_kept and not self.copy_specs(i) and not self._reads_weight(i, s):
            pack(pick(s.w_kept, encoded.copies, getattr(self, self.weights[i])), saved)

    def kept_weight(self, i: int, s: Schedule, options: Options, saved: list[Tensor], reads: bool = True) -> Any:
        """Returns the operand that dgrad reads for layer i's weight, made from the original if backward keeps that.
        `reads`: False if no dgrad runs; then the saved tensors are only removed from the list."""
        weight = getattr(self, self.weights[i])
        if s.w_late:
            scales, amax = saved_for_late(s.w, s.w_late, options, saved)
            if not reads:
                return None
            return pick(s.w_kept, quantize_weight(weight, s.w_late, options, scales, amax).copies, weight)
        if isinstance(weight, QuantizedTensorBase):
            columnwise = weight.rowwise_data is None if s.w_kept == "original" else s.w_kept == "columnwise"
            return weight.copy_of(columnwise)
        if isinstance(weight, Tensor):
            return weight
        if self.copy_specs(i):
            return pick(s.w_kept, self._kept_copies(i), weight)  # type: ignore[arg-type]
        return unpack(kept_spec(s.w_kept, s.plan.weight), saved)

    def _reads_weight(self, i: int, s: Schedule) -> bool:
        held = isinstance(getattr(self, self.weights[i]), QuantizedTensorBase)
        return s.w_kept == "original" or bool(s.w_late) or (s.w_kept != "" and held)

    def copy_specs(self, i: int) -> tuple[Spec, ...]:
        """Returns the specs of the copies of layer i's weight that the caller passed; () if it passed none."""
        if self.options is None:
            return self._constants(i).specs
        given = self.options[i].weight_copies
        return () if given is None else tuple([None if copy is None else spec_of(copy) for copy in given])

    def _kept_copies(self, i: int) -> Copies | None:
        """Returns the copies of layer i's weight that the caller passed, or None."""
        if not self.copy_specs(i):
            return None
        tensors, found = list(self.copies), None
        for j in range(i + 1):
            found = tuple([None if spec is None else unpack(spec, tensors) for spec in self.copy_specs(j)])
        return found  # type: ignore[return-value]


def _leaves(options: Options) -> bool:
    """Returns whether a weight's gradient goes elsewhere, so that autograd gets none."""
    return options.weight_grad is not None and not options.weight_grad.marks


def _cells(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the elements of vectors, each as a vector [1]."""
    return [t.narrow(0, i, 1) for t in tensors for i in range(t.shape[0])]


def _taken(tensors: list[Tensor], count: int) -> list[Tensor]:
    """Removes the first `count` tensors of a list and returns them."""
    found = tensors[:count]
    del tensors[:count]
    return found


# --- one call --------------------------------------------------------------------------------------------------------


def finished(y: Tensor, s: Schedule, options: Options) -> Tensor:
    """Returns the result of a forward, quantized if the recipe has a quantizer for it.

    If a user's own quantizer returns what another quantizer made, the result still carries the user's quantizer.
    **Raises** TypeError for another format.
    """
    call = s.results[0]
    if call is None:
        return y
    q, declared = quantize_general(y, call, options, None), call.quantizer
    if not declared.custom:
        return q
    if (q.quantizer.spec.format_id, rotated(q.quantizer)) != (declared.spec.format_id, rotated(declared)):
        said = f"{declared} has the format {declared.format.name}, and its quantize_impl made {q!r}"
        raise ArgumentError(f"{options.module}: {said}; return a tensor of that format and transform")
    return QuantizedTensor(declared, q.shape, q.dtype, **{n: getattr(q, n) for n in declared.buffer_names()})


def result_proto(x: Any, width: Any, s: Schedule, cut: Cut | None = None, first: Cut | None = None) -> TensorProto:
    """Returns the layout of a layer's result. `cut`, `first`: how the layer, and one in front of it, is cut."""
    quantizer = None if s.results[0] is None else s.results[0].quantizer
    leading = x.shape[:-1]
    for each in (first, cut):
        leading = leading if each is None else (each.out_rows(leading[0]), *leading[1:])
    return TensorProto((*leading, width), x.dtype, quantizer, x.device, True)


def weight_gradient(dy: Any, x: Any, dtype: torch.dtype, s: Schedule, options: Options) -> Any:
    """Computes wgrad, or passes it to the sink in `options`. Returns what autograd gets, None for no gradient."""
    wgrad = WeightGradient(dy, x, dtype, s, options)
    return wgrad.compute() if options.weight_grad is None else options.weight_grad.accept(wgrad)


def replay(
    key: tuple[Any, ...],
    s: Schedule,
    options: Options,
    calls: tuple[tuple[Call, ...], ...],
    rng: Tensor | None,
    inputs: list[Tensor],
) -> Replay | None:
    """Returns the `Replay` of an eager call of one layer, or None if a program cannot repeat it.

    **Arguments:** `key`: all that decides about the call, apart from the schedule and `options`. It contains the
    weight's shape, since layers of many shapes share a schedule and few programs are recorded for each key. `calls`:
    for each operand, the quantize calls that are made. `inputs`: the call's tensors, without those of the states.
    """
    states = options.state.states
    if options.group is not None or options.state.recomputed is not None:
        return None
    written = []
    for operand in calls:
        for call in operand:
            if call.state and states is None:
                return None
            if call.needs_rng:  # a program cannot compute each quantize call's random state from that of the layer
                if rng is None or rng.dim() != 2:
                    return None
                if not any([t is rng for t in inputs]):
                    inputs.append(rng)
            if call.state:
                scale, history = states.tensors(call.state)  # type: ignore[union-attr]
                inputs.append(scale)
                if options.record:
                    inputs.append(history)
                    written.append(history)
    if not direct(*inputs):
        return None
    # The type of the states decides whether forward saves its scales: updates overwrite those of some types.
    return Replay((id(s), options.record, type(states), key), s, inputs, written)


def run(op: CustomOp, x: Tensor, recipe: Recipe, options: tuple[Any, ...], *operands: Any) -> tuple[Tensor, ...]:
    """Runs an op whose arguments derive from `LayerArguments`. `operands`: the fields that the derived class adds."""
    make: Any = op.arguments
    if not torch.compiler.is_compiling():
        a = make(x, recipe, options, (), None, [], [], [], [], *operands)
        for i, layer in enumerate(options):
            if layer.weight_grad is not None:
                setattr(a, a.weights[i], layer.weight_grad.stand_in())
            for copy in layer.weight_copies or ():
                if copy is not None:
                    pack(copy, a.copies)
        return op.eager(a)
    if transforms_active():
        return outside(run, op, x, recipe, options, *operands)
    from diptych.torch.private.dynamo import comptime  # importing torch._dynamo takes a second

    a, layers, pending = make(x, recipe, None, (), options[0].group, [], [], [], [], *operands), [], []
    for i, given in enumerate(options):
        weight = getattr(a, a.weights[i])
        specs = tuple([None if copy is None else pack(copy, a.copies) for copy in given.weight_copies or ()])
        how = ""
        if given.weight_grad is not None and torch.is_grad_enabled() and weight.requires_grad:
            a.main_grads += given.weight_grad.buffers()
            how = given.weight_grad.how()
        state = given.state.states
        if state is not None:
            comptime(_prepared_while_tracing)
            names = state_names(schedule(recipe, given.module, given.name, False, False))
            updated = given.state.updated
            a.scales += [state.tensors(name)[0] for name in names] if updated is None else [updated]
            if given.record and len(names) > 0:
                a.logs += [state._buffers["log"], state._buffers["written"]]
                pending.append((state._buffers["pending"], len(names)))
        kept, cut = tuple(originals_of(given, weight)), () if given.cut is None else given.cut.constants()
        layers.append(tuple(LayerConstants(given.module, given.name, kept, given.record, specs, how, cut)))
    a.layers = tuple(layers)
    outputs = op(a)
    first = 0
    for cells, count in pending:
        record_pending(cells, outputs[-1].narrow(0, first, count))
        first += count
    return outputs[:-1] if len(pending) > 0 else outputs


def _prepared_while_tracing(context: Any) -> None:
    """Makes a user's states ready for graphs, while Dynamo traces `run` and before each run of the graph."""
    state_fits(traced_local(context, "state"))
    before_each_call(context, "state", state_fits)


def state_fits(states: Any) -> bool:
    """Makes the buffers in which graphs record, if `ScaleStates` lack them. Returns True, as a guard that holds."""
    if isinstance(states, ScaleStates) and not states.ready_for_graphs():
        with torch.inference_mode(False):
            states.prepare_for_graphs()
    return True
