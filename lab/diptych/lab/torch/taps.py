"""Taps: forward hooks that pass a module's outputs and their gradients to the recorder, in eager and compiled code.

In compiled code the hook is traced: an identity with a gradient of its own surrounds two ops, which are nodes of the
graph and call the recorder (`compiled.py`). In eager code the hook calls the recorder itself, and the identity is an
alias. Invariants:

- A module holds its keys, tensors, as attributes.
- `lab_forward` returns a ticket, which identifies the call; `lab_backward` gets the ticket of the call that its
  gradient belongs to.
- Guards of compiled code do not see hooks. `compiled.effective` therefore changes a global flag that they do see and
  that has no effect of its own, so that code with taps and code without are compiled separately, and both are kept.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from diptych.lab.torch import compiled
from diptych.lab.torch.compiled import ACTIVE, Caller
from diptych.lab.torch.structures import mapped, may_hold_tensors
from diptych.torch.primitives.register import traced_local
from diptych.torch.private.autograd import (
    backward_pass,
    current_node,
    forward_hooks,
    forward_pre_hooks,
    gradient_hooks,
    hooks_with_kwargs,
    node_number,
    nodes_made,
)
from diptych.torch.private.dispatch import tree_leaves
from diptych.torch.private.dynamo import comptime
from diptych.torch.private.graphs import COMPILED, variable

KEY, BACKWARD_KEY, CALLER, WANTED = [f"_diptych_lab_{name}" for name in ("key", "backward_key", "caller", "wanted")]


class Recorder(compiled.Recorder, Protocol):
    """The receiver of the tensors of modules, and of the other events that hooks report."""

    def enter(self, key: int) -> None:
        """Reports that a module begins in eager code."""

    def leave(self, key: int) -> None:
        """Reports that the module has ended."""

    def skip(self, key: int, kind: str, place: str, eager: bool) -> None:
        """Reports that a part of an output is an object of an unknown class, `kind`, which may hold tensors. Compiled
        code reports it while it is traced."""

    def wants(self, key: int) -> bool:
        """Returns whether a module's outputs are recorded."""
        ...

    def owns(self, key: int, module: nn.Module) -> bool:
        """Returns whether the key is that module's own. A copy of a module has the key of the original."""
        ...


class _Makers:
    """The modules that ran when autograd created its nodes."""

    def __init__(self) -> None:
        self._first: list[int] = []  # numbers of nodes, ascending
        self._paths: list[str | None] = []

    def now(self, path: str | None) -> None:
        """Notes the module that runs from now on, None for none."""
        self._first.append(nodes_made())  # type: ignore[attr-defined]
        self._paths.append(path)

    def of_current_node(self) -> str | None:
        """Returns the module that ran when the current node of the backward pass was created."""
        node: Any = current_node()
        at = 0 if node is None else bisect.bisect_right(self._first, node_number(node))
        return self._paths[at - 1] if at else None


class Modules:
    """The modules that run in eager code, by path."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._makers = _Makers(), _Makers()  # one for forward passes, one for recomputations in backward passes
        self._again: set[int] = set()  # tickets of recomputed outputs
        self._last: tuple[int, bool] | None = None  # the last gradient's backward pass, and whether it is in `_again`

    def enter(self, path: str) -> None:
        if compiled.recomputes():
            return
        if not compiled.in_backward():
            self._last = None
            if not path:
                self._stack.clear()  # an exception may have left modules of an earlier pass
        self._stack.append(path)
        self._makers[compiled.in_backward()].now(path)

    def leave(self, path: str) -> None:
        if path in self._stack and not compiled.recomputes():
            while self._stack.pop() != path:  # an exception may have left modules inside of this one
                pass
            self._makers[compiled.in_backward()].now(self._stack[-1] if self._stack else None)

    def output(self, ticket: int) -> None:
        """Notes that an output in eager code has this ticket."""
        if compiled.in_backward():
            self._again.add(ticket)

    def gradient(self, ticket: int) -> None:
        """Notes that the gradient of the output with this ticket has been computed."""
        self._last = backward_pass(), ticket in self._again

    def calls(self) -> str | None:
        """Returns the module that calls an op; in a backward pass, the module that called the op's forward. Returns
        None for ops outside of modules, and for ops that are repeated to recompute activations."""
        if not compiled.in_backward():
            return self._stack[-1] if self._stack else None
        if self._stack or compiled.recomputes():
            return None
        again = self._last is not None and self._last == (backward_pass(), True)
        return self._makers[again].of_current_node()

    def between(self) -> bool:
        """Returns whether no module runs, and no gradient was computed since the last module ran."""
        return not self._stack and self._last is None


# --- tensors ---


def held(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters in `before` that the model still has, by name. `now`: the model's present parameters.

    DTensors count as held: `fully_shard` replaces them while a module runs, and restores them afterwards.
    """
    return {n: p for n, p in before.items() if now.get(n) is p or hasattr(p, "to_local")}


def added(model: nn.Module, before: set[nn.Module]) -> list[str]:
    """Returns the names of callable modules of a model that are not in `before`, without those inside of others.
    Wrappers of compiled modules do not count as callable, nor do diptych's states, which a step creates."""
    found: list[str] = []
    for name, module in model.named_modules():
        runs = type(module).forward is not nn.Module.forward and not hasattr(module, COMPILED)
        if runs and module not in before and not any([name.startswith(f"{outer}.") for outer in found]):
            found.append(name)
    return found


def local(x: Tensor) -> Tensor:
    """Returns the local shard of a DTensor, and any other tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[operator]


def hook_first(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Adds a hook that receives a parameter's accumulated gradient, before all present hooks, one of which may be an
    optimizer that changes the parameter and removes its gradient. Returns the hook's handle."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = gradient_hooks(parameter)
    others = {number: hooks.pop(number) for number in list(hooks) if number != handle.id}
    hooks.update(others)  # autograd runs hooks in the order of addition, which `move_to_end` does not change
    return handle


class _Identity(torch.autograd.Function):
    """The identity in traced code. Its clone is removed from the compiled code; in the graph it lets the caller write
    to the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, backward_key: Tensor, place: str) -> Tensor:
        ctx.save_for_backward(compiled.forward_op(local(x), key, place))
        ctx.key = backward_key  # autograd would refuse a saved key after the backward of a later call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        compiled.backward_op(local(gradient), ctx.key, *ctx.saved_tensors)
        return gradient, None, None, None


class _Alias(torch.autograd.Function):
    """The identity in eager code. The result shares memory and version with x, but autograd does not treat it as a
    view, so that it can be modified."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: Recorder, key: int, ticket: int) -> Tensor:
        ctx.call = recorder, key, ticket
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        recorder, key, ticket = ctx.call
        recorder.backward(key, gradient, ticket)
        return gradient, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)  # an alias has an alias as its tangent


# --- hooks ---


def _skip_while_tracing(context: Any) -> None:
    """Reports an unknown object, when a compiler traces `_skip`."""
    recorder, key = _recorder(traced_local(context, "module"))
    value = variable(context, "value")
    if recorder is not None and compiled.may_hold_tensors(value):
        recorder.skip(key, value.python_type_name(), traced_local(context, "place"), False)


def _skip(module: nn.Module, value: Any, place: str) -> None:
    comptime(_skip_while_tracing)


def _traced(module: nn.Module, output: Any, key: Tensor, backward_key: Tensor) -> Any:
    def tap(x: Tensor, place: str) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Identity.apply(x, key, backward_key, place)
        compiled.forward_op(local(x), key, place)
        return x

    return mapped(output, tap, lambda value, place: _skip(module, value, place))


def _recorder(module: nn.Module) -> tuple[Recorder | None, int]:
    """Returns the recorder of a module, and its key. Copies of a module have its hooks, but no recorder."""
    key = int(getattr(module, KEY))
    recorder = ACTIVE.get(key)
    return (recorder if recorder is not None and recorder.owns(key, module) else None), key


def _shared(x: Tensor, given: list[Any]) -> bool:
    """Returns whether x is one of the given tensors, or shares memory with one as far as autograd knows."""
    base = x if x._base is None else x._base
    return any(isinstance(a, Tensor) and (a is base or a._base is base) for a in given)


def _hook_if_written(x: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Passes x's gradient to a hook if x is written in place before the gradient is computed. Autograd then forgets the
    nodes of x's views, and the gradient at x's own node is that of all uses of x."""
    base = x if x._base is None else x._base
    node = base.grad_fn
    if node is None or type(base) is not Tensor or base.layout is not torch.strided or x.dtype != base.dtype:
        return
    counter, number = base.detach(), base.output_nr
    counter.data = base.new_empty(0)  # `counter` shares x's version, but not its memory
    version, sizes = counter._version, (base.shape, base.stride())
    part = x.shape, x.stride(), x.storage_offset() - base.storage_offset()

    def come(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if counter._version != version and gradient is not None:
            hook(gradient.new_empty_strided(*sizes).copy_(gradient).as_strided(*part))

    node.register_prehook(come)


@torch.compiler.disable
def _eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    recorder, key = _recorder(module)
    if recorder is None:
        return None
    given = tree_leaves((args, kwargs))
    replaced = False

    def tap(x: Tensor, place: str) -> Tensor:
        nonlocal replaced
        ticket = recorder.forward(key, x, place, True)
        # Autograd functions do not take nested tensors, except jagged ones.
        if x.requires_grad and torch.is_grad_enabled() and not (x.is_nested and x.layout is torch.strided):
            replaced = True
            if _shared(x, given):  # x may be written by the caller, and autograd must see that
                hook = functools.partial(recorder.backward, key, ticket=ticket)
                _hook_if_written(x, hook)
                x = x.view_as(x)
                x.register_hook(hook)
            else:
                x = _Alias.apply(x, recorder, key, ticket)
            x.grad_fn.metadata[KEY] = ticket  # type: ignore[union-attr, index]
        return x

    def skip(value: Any, place: str) -> None:
        if may_hold_tensors(value):
            recorder.skip(key, type(value).__name__, place, True)

    output = mapped(output, tap, skip)
    recorder.leave(key)
    return output if replaced else None


def nearest(x: Tensor, known: Container[Any]) -> tuple[list[int], list[Tensor]] | None:
    """Returns the nearest tickets in `known` and the leaves from which autograd computes a tensor; None if autograd
    does not know them, because x requires no gradient or compiled code computes it."""
    tickets: dict[int, None] = {}
    leaves: dict[int, Tensor] = {}
    if x.grad_fn is None:
        return ([], [x]) if x.requires_grad else None
    left: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (ticket := node.metadata.get(KEY)) in known:
            tickets[ticket] = None
        elif hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        elif node.name().startswith("CompiledFunction"):
            return None
        else:
            left += [following for following, _ in node.next_functions]
    return list(tickets), list(leaves.values())


@torch.compiler.disable
def _enter(module: nn.Module) -> None:
    recorder, key = _recorder(module)
    if recorder is not None:
        recorder.enter(key)


def _before(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_dynamo_compiling():
        if getattr(module, CALLER) is not None:
            compiled.enter(getattr(module, CALLER))
    elif not torch.compiler.is_compiling():
        _enter(module)


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _eager(module, args, kwargs, output)  # type: ignore[call-arg]
    if torch.compiler.is_dynamo_compiling() and getattr(module, CALLER) is not None:
        compiled.leave()
    if not getattr(module, WANTED):
        return None
    return _traced(module, output, getattr(module, KEY), getattr(module, BACKWARD_KEY))


def _may_call(module: nn.Module) -> bool:
    """Returns whether a module's own code may call diptych's ops. Others get no `Caller`, which makes tracing
    slower."""
    file = type(module).__module__
    # torch's transformers call functions of users.
    of_torch = file.startswith("torch.nn.modules.") and not file.endswith(".transformer")
    return not of_torch or bool(forward_hooks(module) or forward_pre_hooks(module))


def attach(modules: dict[int, nn.Module], recorder: Recorder, ops: bool) -> Callable[[], None]:
    """Gives modules their taps, by key. Returns a function that removes all of them.

    **Arguments:** `ops`: whether diptych's ops in compiled code are assigned to their modules.
    """
    handles = []

    def detach() -> None:
        compiled.forget()
        for handle in handles:
            handle.remove()
        for key, module in modules.items():
            ACTIVE.pop(key, None)
            for name in (KEY, BACKWARD_KEY, CALLER, WANTED):
                module.__dict__.pop(name, None)

    try:
        for key, module in modules.items():
            for name in (KEY, BACKWARD_KEY):
                with torch.inference_mode(False):  # compiled code writes to the keys
                    module.__dict__[name] = torch.tensor([key], device="cpu")
            keys = module.__dict__[KEY], module.__dict__[BACKWARD_KEY]
            module.__dict__[CALLER] = Caller(*keys) if ops and _may_call(module) else None
            module.__dict__[WANTED] = recorder.wants(key)
            _remove_hooks(module)
            ACTIVE[key] = recorder
            handles.append(module.register_forward_pre_hook(_before))
            handles.append(module.register_forward_hook(_after, with_kwargs=True))
    except BaseException:
        detach()
        raise
    return detach


def _remove_hooks(module: nn.Module) -> None:
    """Removes the taps that a copy of a module has from the capture in which it was made."""
    for hooks, own in ((forward_pre_hooks(module), _before), (forward_hooks(module), _after)):
        for number in [number for number, hook in hooks.items() if hook is own]:
            del hooks[number]
            hooks_with_kwargs(module).pop(number, None)


def renew_key(module: nn.Module) -> None:
    """Gives a module a new tensor with its key. A graph with a checkpoint saves the key for its backward, and autograd
    refuses a saved tensor to which a later forward has written."""
    key = module.__dict__[KEY] = module.__dict__[KEY].data
    if module.__dict__[CALLER] is not None:
        module.__dict__[CALLER].key = key
