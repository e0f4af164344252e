"""Ops made from a dataclass of arguments: forward and backward are one node of a graph each.

    linear = CustomOp("mylib::linear", Arguments, forward, layout, backward)
    y, = linear(Arguments(x, w, recipe))

A field's annotation says how it enters the graph:

    Tensor, Tensor | None, list[Tensor]          among the node's tensors
    Tensor | QuantizedTensor (| None)            flattened, and rebuilt inside; likewise QuantizedStack
    list[Tensor | QuantizedTensor | None]        likewise, each; lists have no gradient
    Size, tuple[Size, ...]                       among the node's sizes, which may be symbolic
    torch.dtype (| None)                         as it is
    Group                                        a process group or None
    Written                                      a list of tensors that backward writes to; forward does not see it
    anything else                                hashable (a recipe, any Value), part of one constant

Eagerly a call runs the functions as they stand, without the dispatcher. What is traced (torch.compile, torch.export,
fake tensors) runs them on fake tensors inside of the node: real and fake results are those of the same code.
Invariants:

- A node's results are new memory: forward must not return an argument, nor the same tensor twice. `keeps` names the
  arguments that backward reads; it gets the others as `TensorProto`s.
- What backward allocates besides its results is gone when the node returns.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.torch.graph import flops, functorch
from diptych.torch.graph.engine import Parts, asked
from diptych.torch.graph.fields import Size as Size
from diptych.torch.graph.fields import Written as Written
from diptych.torch.graph.fields import field_of, put, put_sizes, take, take_output, take_sizes
from diptych.torch.graph.program import EagerBackward, EagerForward, MakeReplay, Memo, Programs, memo_of
from diptych.torch.graph.proto import TensorProto
from diptych.torch.graph.traced import NoGrad, as_bytes, fixed, mark, new_memory, traced_function
from diptych.torch.primitives import constants as opaque
from diptych.torch.primitives.checks import refuse_second_derivative, require_local, require_no_tangent
from diptych.torch.primitives.constants import Constants
from diptych.torch.primitives.constants import Group as Group
from diptych.torch.primitives.register import direct
from diptych.torch.private.autograd import forward_level
from diptych.torch.private.functorch import transforms_active
from diptych.torch.tensors.quantized import TAKES_COTANGENTS, QuantizedStack, QuantizedTensorBase

# --- the op ----------------------------------------------------------------------------------------------------------


_OF_THEIR_OWN = ("dtype", "group")  # kinds of fields that are an input of their own in a node's schema
NO_DERIVATIVE = "; detach these arguments, or give the CustomOp a backward"
IN_HIGH_PRECISION = "; run this part in high precision, for instance under autocast(enabled=False)"


class CustomOp:
    """A differentiable op; see the module's docstring.

    **Arguments:** `name`: "namespace::name". `arguments`: a dataclass. `forward`: (arguments, needs) -> (outputs,
    saved): a tuple of tensors, plain or quantized, and the list of plain tensors that backward reads. `needs`: names of
    the fields whose gradient is wanted, in their order; empty if no backward follows. `layout`: (arguments, needs) ->
    the prototypes of the outputs; one with `requires_grad` is differentiable. It must not read memory. `backward`:
    (arguments, needs, saved, grads) -> a gradient for each field in `gradients`, in that order. `keeps`: (arguments,
    needs) -> the names of the fields that backward reads; None stands for no field. `gradients`: (arguments, needs) ->
    the names of the fields that get a gradient; None stands for all of `needs`. `remedy`: the end of the message that
    refuses a second derivative. `parts`: whether backward can compute a part of the gradients. It then gets a fifth
    argument, `asked`: the part of `needs` whose gradients this pass uses, as for `autograd.grad(inputs=...)`, or None
    for all of `needs`. `saved` follows from `needs`, and the results are those of `gradients(arguments, asked)`.
    `draws`: (arguments, needs) -> for each field with a random state, int32 [..., 4]: the number of offsets between two
    examples of a vmap, and the number that the op's earlier fields use in one example. `forward_replay`,
    `backward_replay`: functions of the arguments of forward and of backward, which return an eager call's `Replay`.

    **Raises:** TypeError for a dataclass with a field that cannot enter a graph.
    """

    def __init__(
        self,
        name: str,
        arguments: type,
        forward: Callable[..., tuple[tuple[Tensor, ...], list[Tensor]]],
        layout: Callable[..., tuple[TensorProto, ...]],
        backward: Callable[..., Sequence[Tensor]] | None = None,
        *,
        keeps: Callable[..., tuple[str, ...]] | None = None,
        gradients: Callable[..., tuple[str, ...]] | None = None,
        remedy: str = IN_HIGH_PRECISION,
        parts: bool = False,
        draws: Callable[..., dict[str, tuple[int, int]]] | None = None,
        forward_replay: MakeReplay | None = None,
        backward_replay: MakeReplay | None = None,
    ) -> None:
        if not dataclasses.is_dataclass(arguments):
            raise ArgumentError(f"CustomOp {name}: arguments must be a dataclass, got {arguments!r}")
        hints = typing.get_type_hints(arguments)
        self.name, self.arguments = name, arguments
        self.fields = tuple([field_of(f.name, hints[f.name]) for f in dataclasses.fields(arguments)])
        self.forward, self.layout, self.backward = forward, layout, backward
        self._keeps, self._gradients, self._draws, self.remedy, self.parts = keeps, gradients, draws, remedy, parts
        recordable = getattr(arguments, "recordable", False) and [f.kind for f in self.fields if f.schema] == ["group"]
        self._programs = Programs() if recordable else None
        self._backward_programs = (
            Programs() if recordable and getattr(arguments, "recordable_backward", False) else None
        )
        self.eager_forward = EagerForward(forward, forward_replay)
        self.eager_backward = EagerBackward(backward, backward_replay)
        self._form = ";".join([f"{f.name}:{f.kind}" for f in self.fields])  # a string: one guard of a graph
        self.differentiable = tuple([f.name for f in self.fields if f.kind in ("tensor", "quantizable")])
        self.lists = tuple([f.name for f in self.fields if f.kind in ("tensors", "quantizables")])
        self._has_written = any(f.kind == "written" for f in self.fields)
        self._plain = _eager_function(self)
        self._traced = traced_function(self)
        if not opaque.AVAILABLE:  # pragma: no cover - no supported torch
            return
        namespace, _, short = name.partition("::")
        self._library = torch.library.Library(namespace, "FRAGMENT")
        constants = f"{opaque.schema_type(Constants)} constants"
        inputs = ["Tensor[] tensors", "SymInt[] sizes", *[f.schema for f in self.fields if f.schema], constants]
        signature = f"({', '.join(inputs)}) -> Tensor[]"
        self._forward_node = self._define(short, signature, self._real_forward, self._fake_forward)
        flops.register_node(self._forward_node, self._fake_forward)
        self._backward_nodes: tuple[Any, ...] = ()
        if backward is not None:
            self._backward_nodes = self._define_backward(f"{short}_backward", constants)
            TAKES_COTANGENTS.update(self._backward_nodes)

    def _define(
        self, short: str, signature: str, real: Callable[..., Any], fake: Callable[..., Any] | None = None
    ) -> Any:
        self._library.define(f"{short}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
        plain = short.partition(".")[0]
        self._library.impl(short, real, "CompositeExplicitAutograd")
        namespace = self.name.partition("::")[0]
        torch.library.register_fake(f"{namespace}::{short}", real if fake is None else fake, lib=self._library)
        packet = getattr(getattr(torch.ops, namespace), plain)
        return getattr(packet, short.partition(".")[2] or "default")

    def _define_backward(self, short: str, constants: str) -> tuple[Any, ...]:
        """Returns the backward nodes: the pure one, then those that write, ordered by their number of results."""
        inputs = [f.schema for f in self.fields if f.schema]
        inputs = ["Tensor[] kept", "SymInt[] sizes", "Tensor[] saved", "Tensor[] grads", *inputs, constants]
        signature = f"({', '.join(inputs)}) -> Tensor[]"
        nodes = [self._define(short, signature, self._real_backward, self._pure_backward)]
        if self._has_written:
            # An op that writes to an operand cannot return a list: torch functionalizes fixed results only.
            for count in range(len(self.differentiable) + 1):
                results = ", ".join(["Tensor"] * count)
                signature = f"(Tensor(a!)[] written, {', '.join(inputs)}) -> ({results})"
                nodes.append(self._define(f"{short}_.r{count}", signature, fixed(self._run_backward)))
            flops.register_node(nodes[-1], self._run_backward)
        flops.register_node(nodes[0], self._pure_backward)
        return tuple(nodes)

    # --- calls ---

    def __call__(self, arguments: Any) -> tuple[Tensor, ...]:
        """Returns the outputs, which are differentiable if grad mode is on and an argument requires a gradient."""
        if forward_level() >= 0:
            self._refuse_tangents([getattr(arguments, name) for name, _ in self._kinds()])
        if transforms_active():
            return functorch.call(self, arguments)
        needs = self.needs(arguments)
        if not needs:
            return self.run(arguments, ())[0]
        if self.backward is None:
            raise UnsupportedError(f"{self.name} has no derivative, and {', '.join(needs)} require one{NO_DERIVATIVE}")
        values = [getattr(arguments, name) for name, _ in self._kinds()]
        if self.traced(values):
            return self._traced(needs, *values)
        return self._plain(arguments, needs, *[getattr(arguments, n) for n in self.differentiable])

    def eager(self, arguments: Any) -> tuple[Tensor, ...]:
        """Runs the op without making a node, for a caller that has checked that nothing traces."""
        held = arguments.__dict__
        if forward_level() >= 0:
            self._refuse_tangents(held.values())
        if transforms_active():
            return functorch.call(self, arguments)
        needs = []
        if torch.is_grad_enabled():
            for name in self.differentiable:
                t = held[name]
                if t is not None and t.requires_grad:
                    needs.append(name)
        if not needs:
            return self.eager_forward(arguments, ())[0]
        return self._plain(arguments, tuple(needs), *[held[name] for name in self.differentiable])

    def _refuse_tangents(self, values: Iterable[Any]) -> None:
        for value in values:
            require_no_tangent(self.name, *(value if isinstance(value, (list, tuple)) else (value,)))

    def needs(self, arguments: Any) -> tuple[str, ...]:
        """Returns the names of the fields whose gradient is wanted."""
        found: list[str] = []
        if torch.is_grad_enabled():
            for name, kind in self._kinds():
                if kind in ("tensor", "quantizable") and _requires_grad(getattr(arguments, name)):
                    found.append(name)
        return tuple(found)

    def _kinds(self) -> list[list[str]]:
        """Returns (name, kind) of each field."""
        return [part.split(":") for part in self._form.split(";")]

    def keeps(self, arguments: Any, needs: tuple[str, ...]) -> tuple[str, ...]:
        return () if self._keeps is None else self._keeps(arguments, needs)

    def gradients(self, arguments: Any, needs: tuple[str, ...]) -> tuple[str, ...]:
        return needs if self._gradients is None else self._gradients(arguments, needs)

    def draws(self, arguments: Any, needs: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        return {} if self._draws is None else self._draws(arguments, needs)

    def memo(self, arguments: Any, needs: tuple[str, ...]) -> Memo:
        return memo_of(self, arguments, needs)

    def traced(self, values: Sequence[Any]) -> bool:
        """Returns whether a call becomes a node."""
        if not opaque.AVAILABLE:
            return False
        if torch.compiler.is_compiling():
            return True
        plain = [t for t in values if isinstance(t, Tensor) and not isinstance(t, QuantizedTensorBase)]
        return not direct(*plain, unnamed=True)

    def run(self, arguments: Any, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Runs forward alone. Returns (outputs, saved)."""
        kinds = self._kinds()
        values = [getattr(arguments, name) for name, _ in kinds]
        if not self.traced(values):
            return self.forward(arguments, needs)
        for (name, _), value in zip(kinds, values, strict=True):
            require_local(self.name, name, value)
        protos = self.layout(arguments, needs)
        tensors: list[Tensor] = []
        sizes: list[Any] = []
        inputs, plain = [], []
        for (_, kind), value in zip(kinds, values, strict=True):
            if kind in ("tensor", "quantizable"):
                plain.append(put(value, tensors, sizes))
            elif kind in ("tensors", "quantizables"):
                plain.append(tuple([put(t, tensors, sizes) for t in value]))
            elif kind in ("size", "sizes"):
                plain.append(put_sizes(value, sizes))
            elif kind in _OF_THEIR_OWN:
                inputs.append(opaque.group_argument(value) if kind == "group" else value)
            elif kind == "plain":
                plain.append(value)
        made = list(self._forward_node(tensors, sizes, *inputs, Constants((needs, tuple(plain)))))
        outputs = []
        for proto in protos:
            outputs.append(take_output(proto, made))
        return tuple(outputs), made

    def run_backward(
        self,
        held: list[Any],
        kept: list[Tensor],
        sizes: list[Any],
        needs: tuple[str, ...],
        saved: list[Tensor],
        grads: list[Tensor | None],
        results: int,
    ) -> list[Tensor]:
        """Runs backward as a node. `held`: for each field, the spec of a tensor or the value itself."""
        written: list[Tensor] = []
        inputs, plain = [], []
        for (_, kind), value in zip(self._kinds(), held, strict=True):
            if kind == "written":
                plain.append(len(value))
                written += value
            elif kind in _OF_THEIR_OWN:
                inputs.append(opaque.group_argument(value) if kind == "group" else value)
            else:
                plain.append(value)
        present = tuple([g is not None for g in grads])
        given = [g for g in grads if g is not None]
        if not written:
            constants = Constants((needs, tuple(plain), present, ()))
            return list(self._backward_nodes[0](kept, sizes, saved, given, *inputs, constants))
        # Inductor skips nodes that write and have an operand of E8M0, so these operands are passed as bytes.
        bytewise = tuple([i for i, t in enumerate([*kept, *saved]) if t.dtype == torch.float8_e8m0fnu])
        kept, saved = [as_bytes(t) for t in kept], [as_bytes(t) for t in saved]
        constants = Constants((needs, tuple(plain), present, bytewise))
        made = self._backward_nodes[1 + results](written, kept, sizes, saved, given, *inputs, constants)
        return [made] if results == 1 else list(made or ())

    # --- inside of the nodes ---

    def _real_forward(self, tensors: list[Tensor], sizes: list[int], *inputs: Any) -> list[Tensor]:
        """Runs a node's forward, as a program if constants and the forms of tensors alone decide what forward does."""
        if self._programs is None or inputs[0] is not None:
            return self._run_forward((tensors, sizes, *inputs), False)
        call = (self._run_forward, (tensors, sizes, *inputs), False)
        return self._programs.run((id(inputs[-1]), *sizes), inputs[-1], tensors, None, *call)[0]

    def _fake_forward(self, *inputs: Any) -> list[Tensor]:
        """Runs the code of forward on fake tensors, for which its ops have fake implementations."""
        return self._run_forward(inputs, check=True)

    def _run_forward(self, inputs: tuple[Any, ...], check: bool) -> list[Tensor]:
        tensors, sizes, *given = [list(s) if isinstance(s, (list, tuple)) else s for s in inputs[:-1]]
        needs, plain = inputs[-1].items
        specs = list(plain)
        values: list[Any] = []
        for f in self.fields:
            if f.kind in ("tensor", "quantizable"):
                values.append(take(specs.pop(0), tensors, sizes))
            elif f.kind in ("tensors", "quantizables"):
                values.append([take(spec, tensors, sizes) for spec in specs.pop(0)])
            elif f.kind in ("size", "sizes"):
                values.append(take_sizes(specs.pop(0), sizes))
            elif f.schema:
                values.append(opaque.group_of(given.pop(0)) if f.kind == "group" else given.pop(0))
            else:
                values.append(specs.pop(0) if f.kind == "plain" else [])
        arguments = self.arguments(*values)
        with NoGrad():
            outputs, saved = self.forward(arguments, needs)
        made: list[Tensor] = []
        for t in outputs:
            put(t, made, [])
        made += saved
        if check:
            self._check(outputs, self.layout(arguments, needs))
            new_memory(self.name, made, list(inputs[0]))
        return made

    def _check(self, outputs: tuple[Tensor, ...], protos: tuple[TensorProto, ...]) -> None:
        """**Raises** NotImplementedError if outputs differ from their layout."""
        forms = [[(t.dtype, t.dim(), getattr(t, "quantizer", None), isinstance(t, QuantizedStack)) for t in outputs]]
        forms.append([(p.dtype, len(p.shape), p.quantizer, p.stack) for p in protos])
        if forms[0] != forms[1]:
            raise UnsupportedError(
                f"{self.name}: forward returned outputs (dtype, dimensions, quantizer, stack) {forms[0]}, and its "
                f"layout says {forms[1]}; make both agree"
            )
        for t in outputs:
            if isinstance(t, QuantizedTensorBase) and tuple(t.__tensor_flatten__()[0]) != t.quantizer.buffer_names():
                raise UnsupportedError(
                    f"{self.name}: the output {t!r} lacks buffers of its quantizer, {t.quantizer.buffer_names()}; give "
                    "it a quantizer with the usage of the copies that it has"
                )

    def _pure_backward(self, *inputs: Any) -> list[Tensor]:
        return self._run_backward([], *inputs)

    def _real_backward(self, kept: list[Tensor], sizes: list[int], saved: Any, grads: Any, *given: Any) -> list[Tensor]:
        """Runs a node's backward that writes to nothing, as `_real_forward` runs its forward."""
        inputs = (kept, sizes, saved, grads, *given)
        if self._backward_programs is None or given[0] is not None or not grads:
            return self._pure_backward(*inputs)
        key, tensors = (id(given[-1]), *sizes), [*grads, *kept, *saved]
        return self._backward_programs.run(key, given[-1], tensors, None, self._pure_backward, *inputs)[0]

    def _run_backward(self, written: list[Tensor], *inputs: Any) -> list[Tensor]:
        kept, sizes, saved, grads, *given = [list(s) if isinstance(s, (list, tuple)) else s for s in inputs[:-1]]
        needs, plain, present, bytewise = inputs[-1].items
        given_tensors = [*kept, *saved, *grads]
        for i in bytewise:
            held, at = (kept, i) if i < len(kept) else (saved, i - len(kept))
            held[at] = held[at].view(torch.float8_e8m0fnu)
        plain, written = list(plain), list(written)
        values = []
        for f in self.fields:
            if f.kind in ("tensor", "quantizable"):
                values.append(take(plain.pop(0), kept, sizes))
            elif f.kind == "quantizables":
                values.append([take(spec, kept, sizes) for spec in plain.pop(0)])
            elif f.kind in ("size", "sizes"):
                values.append(take_sizes(plain.pop(0), sizes))
            elif f.kind in ("tensors", "written"):
                source, count = (kept if f.kind == "tensors" else written), plain.pop(0)
                values.append(source[:count])
                del source[:count]
            elif f.schema:
                values.append(opaque.group_of(given.pop(0)) if f.kind == "group" else given.pop(0))
            else:
                values.append(plain.pop(0))
        all_grads = [grads.pop(0) if there else None for there in present]
        assert self.backward is not None
        with NoGrad():
            made = self.backward(self.arguments(*values), needs, saved, all_grads)
        return new_memory(f"{self.name}_backward", list(made), given_tensors)


def _requires_grad(t: Any) -> bool:
    return t is not None and t.requires_grad


# --- autograd --------------------------------------------------------------------------------------------------------


def _eager_function(op: CustomOp) -> Callable[..., Any]:
    """Returns the `apply` of an autograd function that runs an op's functions directly. This `apply` saves the
    microseconds that torch's own spends on transforms of torch.func, in which `functorch` runs the op."""

    class Calls:
        @staticmethod
        def forward(ctx: Any, arguments: Any, needs: tuple[str, ...], *tensors: Any) -> tuple[Tensor, ...]:
            outputs, saved, learned = op.eager_forward(arguments, needs)
            memo: Memo = None if learned is None else learned.memo  # type: ignore[assignment]
            if memo is None:
                memo = memo_of(op, arguments, needs)
                if len(outputs) > 1:  # a single output is always differentiable
                    mark(ctx, op, arguments, needs, outputs)
                if learned is not None:
                    memo = learned.memo = memo._replace(layout=learned.layout)
            given = arguments.__dict__
            kept = [given[name] for name in memo.tensors]
            lengths = []
            for name in memo.lists:
                kept += given[name]
                lengths.append(len(given[name]))
            ctx.save_for_backward(*kept, *saved)
            ctx.call = ({**given, **memo.instead}, needs, memo, lengths)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            refuse_second_derivative(op.name, op.remedy)
            bare, needs, memo, lengths = ctx.call
            saved = list(ctx.saved_tensors)
            now, gradients = None, memo.gradients
            # Few passes are asked for a part of the gradients: the first test saves all other passes a call.
            if Parts.running and memo.edges and (now := asked(ctx, memo.edges)) is not None:
                gradients = tuple([name for name in gradients if name in now])
            if functorch.mapped(*grads):
                made = functorch.Backward(op, bare, needs, memo, lengths, now).below(saved, grads)
            else:
                arguments = memo.take(op.arguments, bare, lengths, saved)
                made = op.eager_backward(arguments, needs, saved, list(grads), memo.layout, now)
            by_name = dict(zip(gradients, made, strict=True))
            return None, None, *[by_name.get(name) for name in op.differentiable]

    # Profilers show forward under this name, and backward under this name with "Backward" behind it.
    function: Any = type(op.name, (Calls, torch.autograd.Function), {})
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]
