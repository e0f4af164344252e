"""Activation checkpointing that recomputes with the scales and the random bits of the forward.

A tape holds, for each call of a module with state in the order that the forward made them, the delayed scales and the
random generator as they were. The recomputation plays it back: it updates nothing, records nothing, draws nothing.
Checkpoints may nest: what an outer recomputation plays back is taped again for the inner ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from diptych.common.errors import UnsupportedError


class Entry(NamedTuple):
    """What one call used."""

    module: nn.Module | None
    layer: str
    scales: dict[str, Tensor]
    rng: Tensor | None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[_Recording | _Replaying] = []


_STACK = _Stack()


class _Recording(AbstractContextManager):  # type: ignore[type-arg]
    def __init__(self, tape: list[Entry]) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        self.tape.clear()
        _STACK.contexts.append(self)

    def __exit__(self, *error: Any) -> None:
        _STACK.contexts.remove(self)


class _Replaying(AbstractContextManager):  # type: ignore[type-arg]
    def __init__(self, tape: list[Entry]) -> None:
        self.tape, self.position = tape, 0

    def __enter__(self) -> None:
        self.position = 0
        _STACK.contexts.append(self)

    def __exit__(self, *error: Any) -> None:
        _STACK.contexts.remove(self)

    def next(self, module: nn.Module | None, layer: str) -> Entry:
        entry = self.tape[self.position] if self.position < len(self.tape) else None
        if entry is None or entry.module is not module or entry.layer != layer:
            ran = "none" if entry is None else type(entry.module).__name__
            raise UnsupportedError(
                f"checkpoint: the recomputation runs {type(module).__name__} as its call {self.position} with state, "
                f"and the forward ran {ran}; both must run the same"
            )
        self.position += 1
        return entry


def replayed(module: nn.Module | None, layer: str) -> Entry | None:
    """What a module is to use where it is being recomputed from a tape; None where it is not."""
    recorders = []
    for context in reversed(_STACK.contexts):
        if isinstance(context, _Replaying):
            entry = context.next(module, layer)
            for recorder in recorders:
                recorder.tape.append(entry)
            return entry
        recorders.append(context)
    return None


def recorded(module: nn.Module | None, layer: str, states: Any, rng: Tensor | None) -> None:
    """Puts a call on the tapes that are running. `states`: ScaleStates or None."""
    if not _STACK.contexts:
        return
    scales = {} if states is None else {name: scale.clone() for name, scale in states.forward_scales()}
    for context in _STACK.contexts:
        context.tape.append(Entry(module, layer, scales, rng))


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` for torch.utils.checkpoint (non-reentrant), directly or through another library's options."""
    tape: list[Entry] = []
    return _Recording(tape), _Replaying(tape)


class _Taped:
    """A function whose first call is taped; later calls, the recomputations, play the tape."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.contexts: tuple[AbstractContextManager[None], ...] = checkpoint_contexts()
        self.ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self.contexts[int(self.ran)]
        self.ran = True
        with context:
            return self.function(*args, **kwargs)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint for modules with state: their recomputation gives the forward's bits.

    **Arguments:** as torch's; `context_fn` of your own is wrapped around. Both kinds, `use_reentrant` False and True.

    **Returns:** what `function` returns.
    """
    taped = function if torch.compiler.is_compiling() else _Taped(function)
    return torch.utils.checkpoint.checkpoint(taped, *args, use_reentrant=use_reentrant, **kwargs)
