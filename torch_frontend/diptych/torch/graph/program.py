"""Programs: the core's ops of one call, recorded so that one call from Python repeats them on other tensors.

A node of a graph, and a layer in eager mode, is called again and again with the same constants and tensors of the same
forms, which decide all that it does. One such call is recorded while it runs as always. Invariants:

- A program runs for tensors of the recorded types, dtypes, shapes and devices alone, all dense.
- A program consists of the core's ops in their recorded order. A call gets no program if it runs another op that does
  more than allocate or view a tensor, or a user's own function (`refuse`).
- A call is recorded only when its constants come for the second time, and if no tensor is given twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.core import _core
from diptych.torch.graph.proto import proto_of
from diptych.torch.primitives.register import RECORDABLE, direct, wrote
from diptych.torch.private.autograd import saved_hooks
from diptych.torch.private.dispatch import TorchDispatchMode, current_mode, drop_mode, mode_count, unsafe_view

aten = torch.ops.aten

_UNSET = {aten.empty.memory_format, aten.new_empty.default}
_ZEROS = {aten.zeros.default, aten.new_zeros.default}

Run = Callable[[list[Tensor]], "list[Tensor] | None"]


def _is_view(view: Any, base: Tensor) -> bool:
    """Returns whether `view` is a contiguous tensor in the memory of `base`, which is contiguous too."""
    if not isinstance(view, Tensor):
        return False
    one = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    return one and view.is_contiguous() and base.is_contiguous()


class _Recorder(TorchDispatchMode):
    """Observes a call: the tensors that it makes, and whether a program can repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = True
        self.made: dict[int, tuple[Tensor, bool]] = {}  # each new tensor by its id, and whether it starts as zeros
        self.views: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        implementation = RECORDABLE.get(func)
        if implementation is not None:
            with self:  # the tensors that the implementation makes are recorded too
                return implementation(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in _UNSET or func in _ZEROS:
            self.made[id(out)] = out, func in _ZEROS
        elif (func.is_view or func is unsafe_view.default) and _is_view(out, args[0]):
            self.views.append((out, args[0]))
        else:
            self.whole = False
        return out

    def origin(self, t: Tensor) -> Tensor:
        for view, base in reversed(self.views):
            t = base if view is t else t
        return t


def refuse() -> None:
    """Makes the call that is being recorded, if there is one, get no program. Code that Python must run in each call
    calls this."""
    recorder = current_mode()
    if isinstance(recorder, _Recorder):
        recorder.whole = False


_ALIGN = 256  # alignment in bytes of each tensor in a block

# (offset, bytes, dtype, shape) of each tensor that lies in a block of bytes.
Layout = tuple[tuple[int, int, torch.dtype, tuple[int, ...]], ...]


def _layout(tensors: list[Tensor]) -> tuple[int, Layout]:
    """Returns the number of bytes of a block that holds such tensors, and the place of each one in it."""
    size, places = 0, []
    for t in tensors:
        places.append((size, t.nbytes, t.dtype, tuple(t.shape)))
        size += -(-t.nbytes // _ALIGN) * _ALIGN
    return size, tuple(places)


def split(block: Tensor, layout: Layout) -> list[Tensor]:
    """Returns the tensors that lie in a block."""
    return [block.narrow(0, at, size).view(dtype).view(shape) for at, size, dtype, shape in layout]


def record(
    call: Callable[[], list[Tensor]], inputs: list[Tensor], alone: int | None = None
) -> tuple[list[Tensor], Run | None, Layout]:
    """Returns the results of a call that reads `inputs`, the program that repeats it on other tensors, or None, and the
    layout of the program's block.

    `alone`: the number of results that the program allocates one by one. It allocates all others together, as a block
    of the returned layout, which it returns in their place. With None it allocates all of them one by one, and the
    layout is empty.
    """
    program, recorder, modes = _core.Program(), _Recorder(), mode_count()
    program.start()
    try:
        with recorder:
            results = call()
    finally:
        program.stop()
        while mode_count() > modes:  # an interrupt may have kept the recorder from leaving
            drop_mode(None)
    origins = [recorder.origin(t) for t in results]
    whole = recorder.whole and len({id(t) for t in origins}) == len(origins)
    for t, origin in zip(results, origins, strict=True):
        whole = whole and id(origin) in recorder.made and t.nbytes == origin.nbytes
    if not whole:
        return results, None, ()
    together = results[alone:] if alone is not None and len(results) > alone + 1 else []
    if any([recorder.made[id(origin)][1] for origin in origins[len(results) - len(together) :]]):
        together = []  # a tensor among them starts as zeros, which a block does not
    first = len(results) - len(together)
    makers = []
    for t, origin in zip(results[:first], origins[:first], strict=True):
        like = torch.empty(0, dtype=t.dtype, device=t.device)
        makers.append((like.new_zeros if recorder.made[id(origin)][1] else like.new_empty, tuple(t.shape)))
    size, layout = _layout(together)
    bytewise = torch.empty(0, dtype=torch.uint8, device=inputs[0].device)
    in_block = {id(origin): place[0] for origin, place in zip(origins[first:], layout, strict=True)}
    if together:
        makers.append((bytewise.new_empty, (size,)))
    views = [(origin, bytewise, in_block[id(origin)]) for origin in origins[first:]]
    for view, _ in recorder.views:
        origin = recorder.origin(view)
        at = view.data_ptr() - origin.data_ptr()
        inside = in_block.get(id(origin))
        views.append((view, origin, at) if inside is None else (view, bytewise, inside + at))
    scratch = [t for t, zeros in recorder.made.values() if not zeros]
    outputs = [*origins[:first], bytewise] if together else origins
    sealed = program.seal(inputs, outputs, scratch, views, makers, bytewise.new_empty)
    return results, program.run if sealed else None, layout


class Replay(NamedTuple):
    """Identifies an eager call whose ops a program can repeat.

    `key`: a hashable value that decides, together with the tensors' forms, what the call does. `held`: an object whose
    id is in the key. `inputs`: the tensors that the call reads or writes. `written`: the tensors that it writes.
    """

    key: Any
    held: Any
    inputs: list[Tensor]
    written: list[Tensor]


class Learned:
    """One program, the layout of its block, and what its caller derives from the first call that it repeats."""

    __slots__ = ("layout", "memo", "run")

    def __init__(self, run: Run, layout: Layout) -> None:
        self.run, self.layout = run, layout
        self.memo: Any = None


class _Known:
    """The programs of calls with the same constants, one for each set of forms, by the shape of the first input."""

    def __init__(self, constants: Any) -> None:
        self.constants = constants  # kept alive, so that no other object gets an id that the key contains
        self.runs: dict[torch.Size, list[Learned]] = {}
        self.left = 8  # programs that may still be recorded: batches may change their length in every call


class Programs:
    """The programs of one function. A call runs the program that fits, or else the function, which it records."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def __call__(
        self, constants: Any, inputs: list[Tensor], call: Callable[..., list[Tensor]], *args: Any
    ) -> list[Tensor]:
        """Returns call(*args), which must read `inputs` alone and depend on their forms and `constants` alone."""
        return self.run(id(constants), constants, inputs, None, call, *args)[0]

    def run(
        self,
        key: Any,
        constants: Any,
        inputs: list[Tensor],
        alone: int | None,
        call: Callable[..., list[Tensor]],
        *args: Any,
    ) -> tuple[list[Tensor], Learned | None]:
        """Returns call(*args), as `__call__` does, and the program that ran, or None. A program with a layout returns a
        block. `key`: equal constants share it; it may contain the id of `constants`. `alone`: as for `record`."""
        known = self._known.get(key)
        if known is None or mode_count():
            if known is None:
                if len(self._known) >= 4096:
                    self._known.pop(next(iter(self._known)), None)  # another thread may have removed the key
                self._known[key] = _Known(constants)
            return call(*args), None
        for learned in known.runs.get(inputs[0].shape, ()):
            made = learned.run(inputs)
            if made is not None:
                return made, learned
        # While a program is recorded, its inputs are told apart by the identity of the tensors.
        apart = len({id(t) for t in inputs}) == len(inputs)
        if not known.left or not apart or not direct(*inputs, unnamed=True) or not _repeatable(inputs):
            return call(*args), None
        results, run, layout = record(partial(call, *args), inputs, alone)
        known.left = 0 if run is None else known.left - 1
        if run is not None:
            known.runs.setdefault(inputs[0].shape, []).append(Learned(run, layout))
        return results, None

    def repeat(
        self, replay: Replay, alone: int | None, call: Callable[..., list[Tensor]], *args: Any, case: Any = None
    ) -> tuple[list[Tensor], Learned | None]:
        """Returns call(*args), an eager call, and the program that ran, or None. Moves the version counters of the
        tensors that the call writes, which programs do not. `case`: a hashable value that decides, together with the
        replay's key, what the call does."""
        done = self.run((replay.key, alone, case), replay.held, replay.inputs, alone, call, *args)
        if replay.written:
            wrote(*replay.written)
        return done


def _repeatable(inputs: list[Tensor]) -> bool:
    """Returns whether a program can take such tensors. Each run compares its tensors with the recorded forms."""
    return all([t.is_contiguous() and t.numel() > 0 for t in inputs])


# --- eager calls -----------------------------------------------------------------------------------------------------

# A function of a call's arguments, which returns None for a call that no program can repeat.
MakeReplay = Callable[..., "Replay | None"]


class EagerForward:
    """The eager forward of an op, (arguments, needs) -> (outputs, saved, the program that ran or None).

    A call that a program repeats has one output, a plain tensor, and no list of tensors among its arguments. What it
    saves lies in one block, which the layout of the program describes; under hooks on saved tensors it saves the single
    tensors, since a checkpoint refuses a recomputation that saves others than its forward.
    """

    def __init__(self, forward: Callable[..., Any], replay: MakeReplay | None) -> None:
        self._forward, self._replay, self._programs = forward, replay, Programs()

    def __call__(
        self, arguments: Any, needs: tuple[str, ...]
    ) -> tuple[tuple[Tensor, ...], list[Tensor], Learned | None]:
        replay = None if self._replay is None else self._replay(arguments, needs)
        if replay is None:
            return *self._forward(arguments, needs), None
        alone = 1 if needs and saved_hooks(True) is None else None
        made, learned = self._programs.repeat(replay, alone, self._flat, arguments, needs)
        return (made[0],), made[1:], learned

    def _flat(self, arguments: Any, needs: tuple[str, ...]) -> list[Tensor]:
        outputs, saved = self._forward(arguments, needs)
        return [*outputs, *saved]


class EagerBackward:
    """The eager backward of an op, (arguments, needs, saved, grads) -> gradients, which programs repeat too.

    `layout`: that of the block that forward saved, empty if it saved single tensors. `asked`: the part of `needs` that
    the engine asks for; None stands for all.
    """

    def __init__(self, backward: Callable[..., Any] | None, replay: MakeReplay | None) -> None:
        self._backward, self._replay, self._programs = backward, replay, Programs()

    def __call__(
        self,
        arguments: Any,
        needs: tuple[str, ...],
        saved: list[Tensor],
        grads: list[Tensor | None],
        layout: Layout = (),
        asked: tuple[str, ...] | None = None,
    ) -> Sequence[Tensor]:
        if self._replay is None:
            replay = None
        elif asked is None:
            replay = self._replay(arguments, needs, saved, grads)
        else:
            replay = self._replay(arguments, needs, saved, grads, asked)
        if replay is None:
            return self._split(arguments, needs, saved, grads, layout, asked)
        case = bool(layout), asked  # the key and the tensors' forms decide which layout it is, if there is one
        given = arguments, needs, saved, grads, layout, asked
        return self._programs.repeat(replay, None, self._split, *given, case=case)[0]

    def _split(
        self, arguments: Any, needs: Any, saved: list[Tensor], grads: Any, layout: Layout, asked: Any
    ) -> list[Tensor]:
        assert self._backward is not None
        saved = split(saved[0], layout) if layout else saved
        if asked is None:  # the backward of an op without `parts` takes no such argument
            return self._backward(arguments, needs, saved, grads)
        return self._backward(arguments, needs, saved, grads, asked)


class Memo(NamedTuple):
    """The part of a forward's arguments that an eager backward gets.

    `tensors`, `lists`: the names of the arguments that autograd keeps. `instead`: the values that replace all others.
    `gradients`: the names of the arguments that get a gradient. `edges`: the names of the arguments that require one,
    with their places among the node's edges, if the op has `parts`. `layout`: the layout of the saved tensors, if they
    lie in one block.
    """

    tensors: tuple[str, ...]
    lists: tuple[str, ...]
    instead: dict[str, Any]
    gradients: tuple[str, ...]
    edges: tuple[tuple[str, int], ...]
    layout: Layout = ()

    def take(self, arguments: type, bare: dict[str, Any], lengths: list[int], kept: list[Tensor]) -> Any:
        """Returns the arguments, rebuilt with tensors from the front of `kept`. `lengths`: the lengths of `lists`."""
        made = object.__new__(arguments)
        held = made.__dict__
        held.update(bare)
        for name in self.tensors:
            held[name] = kept.pop(0)
        for name, length in zip(self.lists, lengths, strict=True):
            held[name] = kept[:length]
            del kept[:length]
        return made


def memo_of(op: Any, arguments: Any, needs: tuple[str, ...]) -> Memo:
    keeps = op.keeps(arguments, needs)
    kept, instead = [], {}
    for name in op.differentiable:
        t = getattr(arguments, name)
        if t is not None:
            kept += [name] if name in keeps else []
            instead[name] = None if name in keeps else proto_of(t)
    instead.update({name: [] for name in op.lists})
    lists = [name for name in op.lists if name in keeps and getattr(arguments, name)]
    passed = [name for name in op.differentiable if name in instead]
    edges = tuple([(name, passed.index(name)) for name in needs]) if op.parts and len(needs) > 1 else ()
    return Memo(tuple(kept), tuple(lists), instead, op.gradients(arguments, needs), edges)
