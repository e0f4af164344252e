"""Ops in compiled graphs that call the recorder, and the assignment of diptych's ops in these graphs to modules.

Two ops pass tensors to the recorder: `lab_forward` a module's output, `lab_backward` its gradient (`taps.py`). An
observer records diptych's own ops where they run, as in eager code, but it does not know their module. So while a
module's code is traced, its `Caller` is on the stack of function modes. It replaces each of diptych's ops by a variant
with one more operand, which the op `lab_call` makes from the module's key. Invariants:

- A module's key is an operand, so that modules with common code have a common graph. `lab_call` declares that it writes
  to the key: no compiler drops, merges or reorders the calls of a module. The variant itself is as pure as the op.
- Forward and backward have a key each, since no graph may write to a tensor in both. Code is a backward if it is traced
  below a graph that is complete.
- In code that is not being traced a `Caller` does nothing.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diptych.common.errors import UnsupportedError
from diptych.lab.torch.own_ops import UNRECORDED
from diptych.torch.graph.program import Programs
from diptych.torch.primitives import constants
from diptych.torch.primitives.constants import Constants
from diptych.torch.private import graphs
from diptych.torch.private.autograd import backward_pass, saved_hooks
from diptych.torch.private.dispatch import (
    Operator,
    function_modes,
    pop_function_mode,
    pop_traced_mode,
    push_function_mode,
    push_traced_mode,
    schema,
)
from diptych.torch.private.dynamo import (
    assume_constant_result,
    comptime,
    current_tracer,
    patch_config,
    skip_code,
    visit,
)
from diptych.torch.tensors.quantized import TAKES_COTANGENTS

_LIBRARY = torch.library.Library("diptych", "FRAGMENT")


class Recorder(Protocol):
    """The receiver of the tensors of modules in compiled and eager code."""

    def forward(self, key: int, x: Tensor, place: str, eager: bool) -> int:
        """Records an output. `place`: its place in the module's result. Returns the call's ticket."""
        ...

    def backward(self, key: int, gradient: Tensor, ticket: int) -> None:
        """Records the gradient of the output with this ticket. Eager code calls it for all modules, wanted or not."""

    def call(self, key: int, backward: bool) -> int:
        """Reports that a module calls one of diptych's ops in compiled code. Returns the call's ticket, -1 in
        recomputation."""
        ...


ACTIVE: dict[int, Any] = {}
"""The recorders of all modules that have taps at present, by key. Calls with other keys record nothing."""


# --- backward passes -------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    return backward_pass() != -1


def recomputes() -> bool:
    """Returns whether non-reentrant checkpointing recomputes activations: hooks for saved tensors are then active in a
    backward pass. It may leave modules by an exception."""
    return in_backward() and bool(saved_hooks(True))


# --- ops -------------------------------------------------------------------------------------------------------------


def _forward(x: Tensor, key: Tensor, place: str) -> Tensor:
    number = int(key)
    recorder = ACTIVE.get(number)
    return torch.tensor([-1 if recorder is None else recorder.forward(number, x, place, False)], device="cpu")


def _backward(gradient: Tensor, key: Tensor, ticket: Tensor) -> None:
    number = int(key)
    if (recorder := ACTIVE.get(number)) is not None:
        recorder.backward(number, gradient, int(ticket))


def _call(key: Tensor, backward: bool) -> Tensor:
    number = int(key)
    recorder = ACTIVE.get(number)
    return torch.tensor([number, -1 if recorder is None else recorder.call(number, backward)], device="cpu")


def _define(name: str, signature: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # a CUDA graph would not call the functions again
    tags = (torch.Tag.pt2_compliant_tag,) if unsafe is None else (torch.Tag.pt2_compliant_tag, unsafe)
    _LIBRARY.define(f"{name}{signature}", tags=tags)
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diptych::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.diptych, name).default


def _ticket(x: Tensor, key: Tensor, place: str) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


forward_op = _define("lab_forward", "(Tensor x, Tensor(a!) key, str place) -> Tensor", _forward, _ticket)
backward_op = _define(
    "lab_backward", "(Tensor gradient, Tensor(a!) key, Tensor ticket) -> ()", _backward, lambda *_: None
)
_call_op = _define(
    "lab_call",
    "(Tensor(a!) key, bool backward) -> Tensor",
    _call,
    lambda *_: torch.empty(2, dtype=torch.int64, device="cpu"),
)


# --- variants of diptych's ops ---------------------------------------------------------------------------------------


class Running(NamedTuple):
    """The call of a variant that runs diptych's ops at present."""

    recorder: Any
    key: int
    ticket: int


_running = threading.local()


def running() -> Running | None:
    """Returns the variant's call that runs in this thread, None outside of variants."""
    return getattr(_running, "node", None)


def in_compiled_code() -> bool:
    """Returns whether a graph of torch.compile is among the callers of this function."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<eval_with_key>") or os.path.join("_functorch", "_aot_autograd") in file:
            return True
        frame = frame.f_back
    return False


def _is_own(op: Any) -> bool:
    namespace, _, name = schema(op).name.partition("::")
    if namespace == "diptych":
        return not name.startswith("lab_") and name not in UNRECORDED
    names = [a.name for a in schema(op).arguments]  # a `CustomOp` of the user's own
    return bool(names) and names[0] in ("tensors", "kept", "written") and names[-1] == "constants"


@functools.cache
def _variant(op: Any) -> str:
    """Returns the name of an op's variant that knows its module, "" if the op is not one of diptych's."""
    if not _is_own(op):
        return ""
    signature = str(schema(op))
    inputs, arrow, results = signature[signature.index("(") :].rpartition(") -> ")
    # A schema's text shows every opaque type as PyObject, and `define` takes the name of any opaque type for it.
    inputs = inputs.replace("PyObject", constants.schema_type(Constants))
    star = "" if any(a.kwarg_only for a in schema(op).arguments) else ", *"

    def real(*args: Any, lab_call: Tensor, **kwargs: Any) -> Any:
        key, ticket = lab_call.tolist()
        before = running()
        _running.node = Running(ACTIVE.get(key), key, ticket)
        try:
            return op(*args, **kwargs)
        finally:
            _running.node = before

    def fake(*args: Any, lab_call: Tensor, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    name = "lab_" + "_".join([schema(op).name.replace("::", "_"), *filter(None, [schema(op).overload_name])])
    made = _define(name, f"{inputs}{star}, Tensor lab_call{arrow}{results}", real, fake)
    if op in TAKES_COTANGENTS:
        TAKES_COTANGENTS.add(made)
    return name


# --- tracing ---------------------------------------------------------------------------------------------------------


@assume_constant_result
def _known(op: Any) -> str:
    return _variant(op)


@assume_constant_result
def in_part() -> bool:
    """Returns whether a subgraph, such as a checkpoint's, is being traced."""
    return current_tracer().parent is not None


@assume_constant_result
def _traces_backward() -> bool:
    tracer = current_tracer()
    while tracer.parent is not None:
        tracer = tracer.parent
        if any(node.op == "output" for node in tracer.graph.nodes):
            return True
    return False


_HOLDERS = {"TensorVariable", "UserDefinedObjectVariable", "LocalGeneratorObjectVariable"}
"""Names of Dynamo's classes for values that are or may hold tensors. Not every version of torch has all of them."""


def may_hold_tensors(value: Any) -> bool:
    """Returns whether an object may hold tensors. `value`: Dynamo's description of the object while it traces."""
    inside: list[Any] = []
    visit(inside.append, value)
    inside += [item.vt for v in inside for item in getattr(v, "set_items", ())]
    plain = [isinstance(getattr(v, "value", None), enum.Enum) for v in inside]
    kinds = [{kind.__name__ for kind in type(v).__mro__} for v in inside]
    return any([_HOLDERS & kind and not known for kind, known in zip(kinds, plain, strict=True)])


class Caller(TorchFunctionMode):
    """The function mode of a module while its code is traced. `key`, `backward_key`: the module's keys. A copy or
    pickle of it is None."""

    def __init__(self, key: Tensor, backward_key: Tensor) -> None:
        super().__init__()
        self.key, self.backward_key = key, backward_key

    def __reduce__(self) -> Any:
        return type(None), ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Compilers trace the next line for each torch function, so it must be cheap.
        name = _known(func) if isinstance(func, Operator) and torch.compiler.is_dynamo_compiling() else ""
        if not name:
            return func(*args, **kwargs)
        backward = _traces_backward()
        call = _call_op(self.backward_key if backward else self.key, backward)
        return getattr(torch.ops.diptych, name).default(*args, **kwargs, lab_call=call)


# Where a graph breaks, functions of the model run as eager code with a caller on the stack. If Dynamo then compiled
# this method as a function of its own, its guards would take one getter of tensors, such as `shape`, for another.
skip_code(Caller.__torch_function__.__code__)


def _push(context: Any) -> None:
    graphs.push_mode(context, "caller")


def enter(caller: Caller) -> None:
    """Begins a module in traced code. The code itself changes the stack of modes; in a subgraph only the tracer's stack
    changes, since a subgraph may have no effect outside of itself."""
    if in_part():
        comptime(_push)
    else:
        push_traced_mode(caller)


def leave() -> None:
    """Ends the module that `enter` began last."""
    if in_part():
        comptime(graphs.pop_mode)
    else:
        pop_traced_mode()


def forget() -> None:
    """Removes callers that exceptions left on the stack of modes."""
    modes = function_modes()
    if any(isinstance(mode, Caller) for mode in modes):
        for _ in modes:
            pop_function_mode()
        for mode in modes:
            if not isinstance(mode, Caller):
                push_function_mode(mode)


# --- contexts of recorded steps --------------------------------------------------------------------------------------


def shared(make: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], Any]:
    """Returns a context that is entered with its first user and left with its last one, since captures that overlap
    begin and end their steps in any order."""
    users, left = 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def used() -> Iterator[None]:
        nonlocal users
        if not users:
            left.enter_context(make())
        users += 1
        try:
            yield
        finally:
            users -= 1
            if not users:
                left.close()

    return used


@contextlib.contextmanager
def effective(compiled: bool) -> Iterator[None]:
    """Makes calls of compiled code run code that was compiled with the modules' present hooks.

    Compiled code is guarded by the warn-only flag of deterministic algorithms, which has no effect while these are off.
    The flag is changed in recorded steps, so that code with taps and code without are compiled separately.

    **Raises** NotImplementedError if deterministic algorithms are on and code with taps is `compiled`.
    """
    if torch.are_deterministic_algorithms_enabled():
        if compiled:
            raise UnsupportedError(
                "capture: steps of compiled models cannot be recorded under torch.use_deterministic_algorithms(True); "
                "switch it off, or capture the eager model"
            )
        yield
        return
    with _guarded():
        yield


@shared
@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    _warn_only(not warns)
    try:
        # Code that is compiled for a module without taps must not run for a module with taps.
        with patch_config(skip_nnmodule_hook_guards=False):
            yield
    finally:
        _warn_only(warns)


def _warn_only(warns: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warns)


_run_program = Programs.run


def _run_ops(self: Programs, key: Any, held: Any, inputs: Any, alone: Any, call: Any, *args: Any) -> Any:
    return call(*args), None


@shared
@contextlib.contextmanager
def without_programs() -> Iterator[None]:
    """Makes nodes run their ops one by one, so that observers see them. A node would otherwise run a program that an
    earlier step recorded."""
    Programs.run = _run_ops  # type: ignore[method-assign]
    try:
        yield
    finally:
        Programs.run = _run_program  # type: ignore[method-assign]
