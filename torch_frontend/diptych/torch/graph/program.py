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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from diptych.core import _core
from diptych.torch.primitives.register import RECORDABLE, direct, wrote

aten = torch.ops.aten

_UNSET = {aten.empty.memory_format, aten.new_empty.default}
_ZEROS = {aten.zeros.default, aten.new_zeros.default}

Run = Callable[[list[Tensor]], "list[Tensor] | None"]


def _is_view(view: Any, base: Tensor) -> bool:
    """Whether a result is a tensor that lies in one piece in another."""
    if not isinstance(view, Tensor):
        return False
    one = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    return one and view.is_contiguous() and base.is_contiguous()


class _Recorder(TorchDispatchMode):
    """Observes a call: the tensors that it makes, and whether a program can repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = True
        self.made: dict[int, tuple[Tensor, bool]] = {}  # by id; whether it starts as zeros
        self.views: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        implementation = RECORDABLE.get(func)
        if implementation is not None:
            with self:  # also what it does itself
                return implementation(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in _UNSET or func in _ZEROS:
            self.made[id(out)] = out, func in _ZEROS
        elif (func.is_view or func is aten._unsafe_view.default) and _is_view(out, args[0]):
            self.views.append((out, args[0]))
        else:
            self.whole = False
        return out

    def origin(self, t: Tensor) -> Tensor:
        for view, base in reversed(self.views):
            t = base if view is t else t
        return t


def refuse() -> None:
    """Called by code that Python must run in each call: the call that is being recorded, if any, gets no program."""
    recorder = _get_current_dispatch_mode()
    if isinstance(recorder, _Recorder):
        recorder.whole = False


def record(call: Callable[[], list[Tensor]], inputs: list[Tensor]) -> tuple[list[Tensor], Run | None]:
    """Returns the results of a call that reads `inputs`, and the program that repeats it on others, or None."""
    program, recorder, modes = _core.Program(), _Recorder(), torch._C._len_torch_dispatch_stack()
    program.start()
    try:
        with recorder:
            results = call()
    finally:
        program.stop()
        while torch._C._len_torch_dispatch_stack() > modes:  # an interrupt may have ended the recorder's own end
            torch._C._pop_torch_dispatch_stack(None)
    origins = [recorder.origin(t) for t in results]
    whole = recorder.whole and len({id(t) for t in origins}) == len(origins)
    for t, origin in zip(results, origins, strict=True):
        whole = whole and id(origin) in recorder.made and t.nbytes == origin.nbytes
    if not whole:
        return results, None
    makers = []
    for t, origin in zip(results, origins, strict=True):
        like = torch.empty(0, dtype=t.dtype, device=t.device)
        makers.append((like.new_zeros if recorder.made[id(origin)][1] else like.new_empty, tuple(t.shape)))
    views = []
    for view, _ in recorder.views:
        origin = recorder.origin(view)
        views.append((view, origin, view.data_ptr() - origin.data_ptr()))
    scratch = [t for t, zeros in recorder.made.values() if not zeros]
    workspace = torch.empty(0, dtype=torch.uint8, device=inputs[0].device).new_empty
    return results, program.run if program.seal(inputs, origins, scratch, views, makers, workspace) else None


class Replay(NamedTuple):
    """Identifies an eager call whose ops a program can repeat.

    `key`: hashable, decides together with the tensors' forms what the call does. `held`: an object whose id is in the
    key. `inputs`: the tensors that the call reads or writes. `written`: those that it writes.
    """

    key: Any
    held: Any
    inputs: list[Tensor]
    written: list[Tensor]


class _Known:
    """The programs of calls with the same constants, one for each set of forms, by the shape of the first input."""

    def __init__(self, constants: Any) -> None:
        self.constants = constants  # an id in the key is their own as long as this lives
        self.runs: dict[torch.Size, list[Run]] = {}
        self.left = 8  # to record: batches may change their length in every call


class Programs:
    """The programs of one function. A call runs the program that fits, or else the function, which it records."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def __call__(
        self, constants: Any, inputs: list[Tensor], call: Callable[..., list[Tensor]], *args: Any
    ) -> list[Tensor]:
        """Returns call(*args), which must read `inputs` alone and depend on their forms and `constants` alone."""
        return self.run(id(constants), constants, inputs, call, *args)

    def run(
        self, key: Any, constants: Any, inputs: list[Tensor], call: Callable[..., list[Tensor]], *args: Any
    ) -> list[Tensor]:
        """Returns call(*args), as above, with a key that equal constants share. It may hold the id of `constants`."""
        known = self._known.get(key)
        if known is None or torch._C._len_torch_dispatch_stack():
            if known is None:
                if len(self._known) >= 4096:
                    del self._known[next(iter(self._known))]
                self._known[key] = _Known(constants)
            return call(*args)
        for run in known.runs.get(inputs[0].shape, ()):
            made = run(inputs)
            if made is not None:
                return made
        # A program knows its inputs apart by the objects that were there when it was recorded.
        apart = len({id(t) for t in inputs}) == len(inputs)
        if not known.left or not apart or not direct(*inputs, unnamed=True):
            return call(*args)
        results, learned = record(partial(call, *args), inputs)
        known.left = 0 if learned is None else known.left - 1
        if learned is not None:
            known.runs.setdefault(inputs[0].shape, []).append(learned)
        return results

    def repeat(self, replay: Replay, call: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
        """Returns call(*args), an eager call, and counts its writes, which no program counts."""
        made = self.run(replay.key, replay.held, replay.inputs, call, *args)
        if replay.written:
            wrote(*replay.written)
        return made


# --- eager calls -----------------------------------------------------------------------------------------------------

# Gets a call's arguments. Returns None for a call that no program can repeat.
MakeReplay = Callable[..., "Replay | None"]


class EagerForward:
    """The eager forward of an op, (arguments, needs) -> (outputs, saved), as a program where one can repeat it.

    Such a call has one output, a plain tensor.
    """

    def __init__(self, forward: Callable[..., Any], replay: MakeReplay | None) -> None:
        self._forward, self._replay, self._programs = forward, replay, Programs()

    def __call__(self, arguments: Any, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        replay = None if self._replay is None else self._replay(arguments, needs)
        if replay is None:
            return self._forward(arguments, needs)
        made = self._programs.repeat(replay, self._flat, arguments, needs)
        return (made[0],), made[1:]

    def _flat(self, arguments: Any, needs: tuple[str, ...]) -> list[Tensor]:
        outputs, saved = self._forward(arguments, needs)
        return [*outputs, *saved]


class EagerBackward:
    """The eager backward of an op, (arguments, needs, saved, grads) -> gradients, likewise."""

    def __init__(self, backward: Callable[..., Any] | None, replay: MakeReplay | None) -> None:
        self._backward, self._replay, self._programs = backward, replay, Programs()

    def __call__(self, *call: Any) -> Sequence[Tensor]:
        assert self._backward is not None
        replay = None if self._replay is None else self._replay(*call)
        if replay is None:
            return self._backward(*call)
        return self._programs.repeat(replay, self._backward, *call)
