"""Activation checkpointing that recomputes with the scales and the random bits of the forward.

A tape holds, for each call of a module with state in the order that the forward made them, the delayed scales and the
random generator as they were. The recomputation plays it back: it updates nothing, records nothing, draws nothing.
Checkpoints may nest: what an outer recomputation plays back is taped again for the inner ones. A recomputation runs in
the `autocast` region of its forward. `adopt` gives torch's own checkpoints, of every kind, such tapes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from diptych.common.errors import UnsupportedError
from diptych.common.te_arguments import absorb
from diptych.torch.graph.engine import run_part
from diptych.torch.private.autograd import ENGINE, ENGINE_USERS
from diptych.torch.private.checkpointing import (
    COMPOSABLE,
    GENERATOR,
    OPTIONS_BY_NAME,
    CachedMode,
    CachingMode,
    debug_forced,
)
from diptych.torch.private.dispatch import mode_count, mode_stack, pop_mode, push_mode
from diptych.torch.private.functorch import hide_transforms, transforms_active
from diptych.torch.private.graphs import DYNAMO, fake_mode
from diptych.torch.state.autocast import (
    AT_ENTRY,
    STATE,
    autocast,
    dry_run,
    enter_region,
    outside_of_regions,
    recording,
    region,
)

T = TypeVar("T")


class Entry(NamedTuple):
    """The record of one call: the scales, random state and the like that the call used. `states`: the object that held
    the scales, in which backward finds the scales of gradients."""

    module: nn.Module | None
    layer: str
    scales: dict[str, Tensor]
    states: Any
    rng: Tensor | None
    record: bool = True
    seen: Tensor | None = None  # the step of the update that made the scales, if a graph made the call


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Taping | PlayingBack] = []
        self.saves = False  # whether the op that is traced into a graph is saved for its recomputation


_STACK = _Stack()


class _Tape(list[Entry]):
    """The entries of one checkpoint. A tape is made where its checkpoint is entered, since the grad mode there decides
    whether the checkpoint's calls record."""

    region: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.taped = recording()
        self.grad = torch.is_grad_enabled()


class Taping(AbstractContextManager):  # type: ignore[type-arg]
    def __init__(self, tape: _Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        self.tape.clear()
        self.outer = STATE.taped
        STATE.taped = self.tape.taped
        self.tape.region = region()
        _STACK.contexts.append(self)

    def __exit__(self, *error: Any) -> None:
        _STACK.contexts.remove(self)
        STATE.taped = self.outer


class PlayingBack(AbstractContextManager):  # type: ignore[type-arg]
    def __init__(self, tape: _Tape) -> None:
        self.tape, self.position = tape, 0

    def __enter__(self) -> None:
        self.position = 0
        self.outer = region()
        enter_region(self.tape.region)
        STATE.played = True
        _STACK.contexts.append(self)

    def __exit__(self, *error: Any) -> None:
        _STACK.contexts.remove(self)
        enter_region(self.outer)

    def next(self, module: nn.Module | None, layer: str, optional: bool) -> Entry | None:
        entry = self.tape[self.position] if self.position < len(self.tape) else None
        if entry is None or entry.module is not module or entry.layer != layer:
            if optional:
                return None
            ran = "none" if entry is None else type(entry.module).__name__
            raise UnsupportedError(
                f"checkpoint: the recomputation runs {type(module).__name__} as call {self.position} of a module with "
                f"state, and the forward ran {ran} there; both must run the same modules in the same order"
            )
        self.position += 1
        return entry


def backward_ahead() -> bool:
    """Returns whether a backward may follow a call that begins now. It may in grad mode, or in a checkpoint that was
    entered in grad mode."""
    return torch.is_grad_enabled() or any([context.tape.grad for context in _STACK.contexts])


def taping() -> bool:
    """Returns whether a tape is running, on which `tape_call` writes."""
    return bool(_STACK.contexts)


def taped_call(module: nn.Module | None, layer: str, optional: bool = False) -> Entry | None:
    """Returns the entry of the call that a module makes, if a recomputation plays a tape back, else None. `optional`:
    returns None, instead of raising, if the tape's next entry belongs to another call."""
    if not _STACK.contexts:
        return None
    recorders = []
    for context in reversed(_STACK.contexts):
        if isinstance(context, PlayingBack):
            entry = context.next(module, layer, optional)
            for recorder in recorders if entry is not None else ():
                recorder.tape.append(entry)
            return entry
        recorders.append(context)
    return None


def tape_call(
    module: nn.Module | None,
    layer: str,
    states: Any,
    used: Any,
    rng: Tensor | None,
    record: bool = True,
    seen: Tensor | None = None,
) -> None:
    """Writes a call onto the tapes that are running. `states`: the `ScaleStates` whose scales the tape copies, or None.
    `used`: the entry's `states`. `record`: whether the call records."""
    if not taping():
        return
    scales = {} if states is None else {name: scale.clone() for name, scale in states.forward_scales()}
    for context in _STACK.contexts:
        context.tape.append(Entry(module, layer, scales, used, rng, record, None if seen is None else seen.clone()))


# --- selective checkpoints, outside of graphs ------------------------------------------------------------------------
#
# torch's modes pair the ops of a recomputation with those of its forward, by their order. Ops that touch nothing but
# states run once, in the forward, so they are hidden from the modes.

_SELECTIVE = (CachingMode, CachedMode)


def selective() -> bool:
    """Returns whether a selective checkpoint sees the ops of this thread."""
    if torch.compiler.is_compiling() or not mode_count():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in mode_stack())


def aside(fn: Callable[..., T], *args: Any) -> T:
    """Runs fn(*args) hidden from selective checkpoints and from transforms of torch.func."""
    if transforms_active():
        with hide_transforms():
            return fn(*args)
    if not selective():
        return fn(*args)
    modes: list[Any] = [pop_mode() for _ in range(mode_count())][::-1]
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE)]
    for mode in others:
        push_mode(mode)
    try:
        return fn(*args)
    finally:
        for _ in others:
            pop_mode()
        for mode in modes:
            push_mode(mode)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a checkpoint's forward and recomputation. Give this function to torch.utils.checkpoint
    (non-reentrant) as `context_fn`, directly or through another library's options."""
    if fake_mode() is not None:
        return _graph_contexts()
    tape = _Tape()
    return Taping(tape), PlayingBack(tape)


# --- inside of a graph -----------------------------------------------------------------------------------------------
#
# The partitioner recomputes the ops of a checkpoint in the backward graph, as if nothing had been written meanwhile.
# The results of ops on states are saved instead: updated scales and the random states that were taken.


class _Saving(CachingMode):
    """torch's mode that tags the nodes of a checkpoint. While it runs an op, `_STACK.saves` tells whether the graph
    saves the op's results."""

    @staticmethod
    def of(mode: Any) -> _Saving:
        made = _Saving.__new__(_Saving)
        made.__dict__.update(mode.__dict__)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = _STACK.saves
        # From torch 2.13 on, a checkpoint of torch's own inside of this one tags the node last, to be recomputed.
        own = getattr(self, "ac_graph_id", None)
        innermost = own is None or get_current_meta().get("ac_graph_id", own) == own
        _STACK.saves = func in SAVED and (held or innermost)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            _STACK.saves = held


SAVED: set[Any] = set()
"""The ops on states, whose results a graph's checkpoints save."""


def _graph_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    saving, reading = create_selective_checkpoint_contexts(list(SAVED))
    return _Saving.of(saving), reading


def require_saved(op: str) -> None:
    """Checks that a graph saves the results of an op in `SAVED`, whose fake implementation calls this.

    **Raises** NotImplementedError if the graph would recompute the op.
    """
    if get_current_meta().get("recompute") and not _STACK.saves:
        raise UnsupportedError(
            f"{op} cannot run inside of this compiled checkpoint: the recomputation would find other scales or random "
            "bits than the forward; use diptych.torch.checkpoint, or torch.utils.checkpoint with "
            "context_fn=diptych.torch.checkpoint_contexts"
        )


class Taped:
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


class _Tracked:
    """A function whose recomputation runs with the random states that the tracker had at its first call."""

    def __init__(self, function: Callable[..., Any], get_tracker: Callable[[], Any]) -> None:
        self.function, self.get_tracker = function, get_tracker
        self.states: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracker = self.get_tracker()
        if self.states is None:
            self.states = tracker.get_states()
            return self.function(*args, **kwargs)
        outer = tracker.get_states()
        tracker.set_states(self.states)
        try:
            return self.function(*args, **kwargs)
        finally:
            tracker.set_states(outer)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Runs a function as torch.utils.checkpoint.checkpoint does. The recomputation of modules with state gives the bits
    of the forward.

    **Arguments:** those of torch's function, with `use_reentrant` False or True. A `context_fn` of your own is entered
    around diptych's. Outside of compiled code a selective checkpoint's policy sees diptych's ops by name
    (`torch.ops.diptych.gemm.default`), but no op that touches nothing but states. Inside of compiled code the graph
    recomputes, and `use_reentrant` makes no difference; there a `context_fn` of your own replaces diptych's, so that
    only recipes without state work. If compiled code runs inside of the checkpoint, the region may lie outside of it.
    `get_rng_state_tracker`: returns an object with `get_states` and `set_states`, such as Megatron's tracker of CUDA
    random states, which is set for the recomputation as it was in the forward; not inside of compiled code.
    `distribute_saved_activations`: must be False. `tp_group`: accepted and ignored, as only that option reads it.

    **Returns:** what `function` returns.

    **Raises:** NotImplementedError from the recomputation if it runs other modules than the forward; around compiled
    code with delayed scaling, if a later region has updated the scales since.
    """
    absorb("checkpoint", {"distribute_saved_activations": distribute_saved_activations})
    if get_rng_state_tracker is not None:
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "checkpoint: get_rng_state_tracker cannot be used in compiled code; call checkpoint outside of it"
            )
        function = _Tracked(function, get_rng_state_tracker)
    if torch.compiler.is_compiling():
        kwargs.setdefault("context_fn", checkpoint_contexts)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch.utils.checkpoint.checkpoint(Taped(function), *args, use_reentrant=use_reentrant, **kwargs)


# --- torch's own checkpoints and backward passes ----------------------------------------------------------------------
#
# torch looks the replaced names up in each call, so a `checkpoint` or `backward` that was imported earlier is served
# too. A name that a version of torch lacks is left out: a module that is recomputed then finds no region, and raises an
# error if its forward ran in one (`QuantizedModule`).


class _Both(AbstractContextManager):  # type: ignore[type-arg]
    """Two contexts as one, the second inside of the first."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        try:
            self.inner.__enter__()
        except BaseException:
            self.outer.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> Any:
        try:
            return self.inner.__exit__(*error)
        finally:
            self.outer.__exit__(*error)


def _taped_generator(generator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generator)
    def taped(
        fn: Any,
        preserve_rng_state: bool = True,
        context_fn: Any = torch.utils.checkpoint.noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        contexts = _contexts_of(fn, context_fn, debug)
        return generator(fn, preserve_rng_state, contexts, determinism_check, debug, *args, **kwargs)

    @functools.wraps(generator)
    def taped_since_2_14(
        fn: Any,
        args: Any,
        kwargs: Any,
        *,
        context_fn: Any = torch.utils.checkpoint.noop_context_fn,
        debug: bool = False,
        **how: Any,
    ) -> Any:
        return generator(fn, args, kwargs, context_fn=_contexts_of(fn, context_fn, debug), debug=debug, **how)

    return taped_since_2_14 if OPTIONS_BY_NAME else taped


def _contexts_of(fn: Any, given: Any, debug: bool) -> Any:
    """Returns the `context_fn` of a checkpoint that tapes its forward, within the contexts that it was given."""

    def contexts() -> Any:
        return [_Both(*pair) for pair in zip(checkpoint_contexts(), given(), strict=True)]

    # torch refuses contexts together with `debug`. In a graph, the graph itself recomputes and needs no contexts.
    forced = debug_forced()
    debugged = debug if forced is None else forced
    known = isinstance(fn, Taped) or given is checkpoint_contexts
    if debugged or known or fake_mode() is not None:
        return given
    return checkpoint_contexts if given is torch.utils.checkpoint.noop_context_fn else contexts


def _taped_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def taped(run_function: Any, *args: Any) -> Any:
        known = isinstance(run_function, Taped) or fake_mode() is not None
        return apply(run_function if known else Taped(run_function), *args)

    return taped


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces an attribute by `wrap(attribute)`, unless `wrap` has wrapped it already."""
    held = getattr(owner, name, None)
    by = getattr(held, "wrapped_by_diptych", ())
    if held is not None and wrap not in by:
        made = wrap(held)
        made.wrapped_by_diptych = (*by, wrap)
        _frames.append(made.__code__)
        setattr(owner, name, staticmethod(made) if isinstance(owner, type) else made)


def adopt() -> None:
    """Makes torch's checkpoints and backward passes carry regions. Repeating it has no effect."""
    _replace(torch.utils.checkpoint, GENERATOR, _taped_generator)
    _replace(torch.utils.checkpoint.CheckpointFunction, "apply", _taped_apply)
    for module in ENGINE_USERS:
        _replace(module, ENGINE, outside_of_regions)
    _adopt_composable()
    AT_ENTRY[COMPOSABLE] = _adopt_composable
    AT_ENTRY[DYNAMO] = _skip_frames


_CONTEXTS = (Taping, PlayingBack, _Both, autocast, dry_run)
_ENTERED = (
    region,
    enter_region,
    run_part,
    Taped.__call__,
    *[c.__enter__ for c in _CONTEXTS],
    *[c.__exit__ for c in _CONTEXTS],
)
_frames = [function.__code__ for function in _ENTERED]


def _skip_frames() -> None:
    """Keeps Dynamo from compiling the functions of regions, checkpoints and backward passes by themselves, as it does
    where a graph breaks inside of them: `STATE` would be wrong afterwards. Runs once Dynamo is imported."""
    from diptych.torch.private.dynamo import skip_code

    for code in _frames:
        skip_code(code)


def _adopt_composable() -> None:
    composable = sys.modules.get(COMPOSABLE)
    if composable is not None:
        setattr(composable, GENERATOR, getattr(torch.utils.checkpoint, GENERATOR))
