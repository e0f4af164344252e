"""Taps: a module's outputs and their gradients become visible by forward hooks, in eager and in compiled code alike.

Two ops call the recorder with what they get: `lab_forward` with an output, `lab_backward` with its gradient. In
compiled code the hook is traced: an identity with a gradient of its own surrounds the ops, which are nodes of the
graph. In eager code the hook calls the recorder itself, and the identity is an alias. Invariants:

- A module holds its key, a tensor, as an attribute. The key is an operand of the ops, so that modules with common code
  have a common graph. The ops declare that they write to it: no compiler drops, merges or reorders them.
- `lab_forward` returns a ticket, which names the call; `lab_backward` gets the ticket of the call that its gradient
  belongs to.
- Guards of compiled code do not see hooks. `effective` therefore changes a global state that they do see and that has
  no effect of its own, so that code with taps and code without are compiled apart, and both are kept.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from diptych.common.errors import UnsupportedError
from diptych.lab import capture as rules
from diptych.lab.traces import Site
from diptych.lab.traces.schema import Kind, Operation

KEY, BACKWARD_KEY, WANTED = "_diptych_lab_key", "_diptych_lab_backward_key", "_diptych_lab_wanted"
_LIBRARY = torch.library.Library("diptych", "FRAGMENT")


class Recorder(Protocol):
    """What gets the tensors."""

    def enter(self, key: int) -> None:
        """A module begins in eager code."""

    def leave(self, key: int) -> None:
        """It ended."""

    def skip(self, key: int, value: Any, place: str) -> None:
        """Part of an output, in eager code, is an object that may hold tensors and is not known."""

    def forward(self, key: int, x: Tensor, place: str, eager: bool) -> int:
        """Records an output. `place`: where it is in the module's result. Returns the call's ticket."""
        ...

    def backward(self, key: int, gradient: Tensor, ticket: int) -> None:
        """Records the gradient of that call's output; in eager code also of modules that are not wanted."""

    def wants(self, key: int) -> bool:
        """Whether a module's outputs are recorded."""
        ...

    def owns(self, key: int, module: nn.Module) -> bool:
        """Whether the key is that module's own; a copy of a module has the key of the original."""
        ...


ACTIVE: dict[int, Recorder] = {}
"""The recorders of those modules that have taps now, by key. Calls with other keys record nothing."""


# --- whether a backward pass runs ---


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


def backward_pass() -> int:
    """Returns the number of the backward pass that runs in this thread, -1 if none does."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    return backward_pass() != -1


def recomputes() -> bool:
    """Whether checkpointing without reentry recomputes: under hooks for saved tensors. It may leave modules by an
    exception."""
    return in_backward() and bool(_saved_tensors_hooks(True))


# --- ops ---


def _forward(x: Tensor, key: Tensor, place: str) -> Tensor:
    number = int(key)
    recorder = ACTIVE.get(number)
    return torch.tensor([-1 if recorder is None else recorder.forward(number, x, place, False)], device="cpu")


def _backward(gradient: Tensor, key: Tensor, ticket: Tensor) -> None:
    number = int(key)
    if (recorder := ACTIVE.get(number)) is not None:
        recorder.backward(number, gradient, int(ticket))


def _define(name: str, signature: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # a CUDA graph would not call the functions again
    tags = (torch.Tag.pt2_compliant_tag,) if unsafe is None else (torch.Tag.pt2_compliant_tag, unsafe)
    _LIBRARY.define(f"{name}{signature}", tags=tags)
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diptych::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.diptych, name).default


def _ticket(x: Tensor, key: Tensor, place: str) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


_forward_op = _define("lab_forward", "(Tensor x, Tensor(a!) key, str place) -> Tensor", _forward, _ticket)
_backward_op = _define(
    "lab_backward", "(Tensor gradient, Tensor(a!) key, Tensor ticket) -> ()", _backward, lambda *_: None
)


def local(x: Tensor) -> Tensor:
    """Returns what this rank holds of a DTensor, other tensors as they are."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[operator]


class _Identity(torch.autograd.Function):
    """Only traced. The copy is none in the compiled code; in the graph it lets the caller write to the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, backward_key: Tensor, place: str) -> Tensor:
        ctx.save_for_backward(_forward_op(local(x), key, place))
        ctx.key = backward_key  # not saved, since autograd would refuse it after the backward of a later call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _backward_op(local(gradient), ctx.key, *ctx.saved_tensors)
        return gradient, None, None, None


class _Alias(torch.autograd.Function):
    """Only eager. The result has the same memory and version, and is no view to autograd: it can be modified."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: Recorder, key: int, ticket: int) -> Tensor:
        ctx.call = recorder, key, ticket
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        recorder, key, ticket = ctx.call
        recorder.backward(key, gradient, ticket)
        return gradient, None, None, None


# --- hooks ---


def _traced(output: Any, key: Tensor, backward_key: Tensor) -> Any:
    def tap(x: Tensor, place: str) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Identity.apply(x, key, backward_key, place)
        _forward_op(local(x), key, place)
        return x

    return mapped(output, tap)


def _recorder(module: nn.Module) -> tuple[Recorder | None, int]:
    """Returns the recorder of a module and its key. Copies of a module have its hooks and no recorder."""
    key = int(getattr(module, KEY))
    recorder = ACTIVE.get(key)
    return (recorder if recorder is not None and recorder.owns(key, module) else None), key


def _shared(x: Tensor, given: list[Any]) -> bool:
    """Whether x is one of the given tensors, or has its memory as far as autograd knows."""
    base = x if x._base is None else x._base
    return any(isinstance(a, Tensor) and (a is base or a._base is base) for a in given)


@torch.compiler.disable
def _eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    recorder, key = _recorder(module)
    if recorder is None:
        return None
    given = pytree.tree_leaves((args, kwargs))
    replaced = False

    def tap(x: Tensor, place: str) -> Tensor:
        nonlocal replaced
        ticket = recorder.forward(key, x, place, True)
        if x.requires_grad and torch.is_grad_enabled():
            replaced = True
            if _shared(x, given):  # autograd must see what the caller writes to it
                x = x.view_as(x)
                x.register_hook(lambda gradient: recorder.backward(key, gradient, ticket))
            else:
                x = _Alias.apply(x, recorder, key, ticket)
            x.grad_fn.metadata[KEY] = ticket  # type: ignore[union-attr, index]
        return x

    output = mapped(output, tap, skip=lambda value, place: recorder.skip(key, value, place))
    recorder.leave(key)
    return output if replaced else None


def nearest(x: Tensor, known: Container[Any]) -> tuple[list[int], list[Tensor]] | None:
    """Returns the tickets in `known` and the leaves from which autograd computes a tensor, the first ones on each way;
    None if autograd does not know, because x requires no gradient or is computed by compiled code."""
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


_TRACES_COPY = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile traces `copy.copy`. torch 2.11 does not; 2.12 was not tried."""


@torch.compiler.disable
def _enter(module: nn.Module) -> None:
    recorder, key = _recorder(module)
    if recorder is not None:
        recorder.enter(key)


def _before(module: nn.Module, args: tuple[Any, ...]) -> None:
    if not torch.compiler.is_compiling():
        _enter(module)


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _eager(module, args, kwargs, output)  # type: ignore[call-arg]
    if not getattr(module, WANTED):
        return None
    return _traced(output, getattr(module, KEY), getattr(module, BACKWARD_KEY))


def mapped(
    value: Any,
    tap: Callable[[Tensor, str], Tensor],
    place: str = "",
    skip: Callable[[Any, str], None] | None = None,
) -> Any:
    """Returns a structure with each tensor replaced by `tap(tensor, place)`, such as place '[0]["name"]'.

    Structures are those that torch's pytree knows, and dataclasses; anything else stays as it is, after
    `skip(value, place)` if it has attributes.
    """
    if isinstance(value, Tensor):
        return tap(value, place)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    children, spec = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    if len(children) == 1 and children[0] is value:
        if dataclasses.is_dataclass(value):
            return _mapped_fields(value, tap, place, skip)
        if skip is not None and hasattr(value, "__dict__") and not isinstance(value, (type, enum.Enum)):
            skip(value, place)
        return value
    at: Any = range(len(children))
    if isinstance(value, dict):
        at = value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        at = value._fields  # type: ignore[attr-defined]
    places = [place + (f'["{k}"]' if isinstance(k, str) else f"[{k}]") for k in at]
    children = [mapped(child, tap, where, skip) for child, where in zip(children, places, strict=True)]
    return pytree.tree_unflatten(children, spec)


def _mapped_fields(value: Any, tap: Any, place: str, skip: Any) -> Any:
    fields = [f for f in dataclasses.fields(value) if hasattr(value, f.name)]
    found = {f.name: mapped(getattr(value, f.name), tap, f'{place}["{f.name}"]', skip) for f in fields}
    if torch.compiler.is_compiling() and not _TRACES_COPY:
        return dataclasses.replace(value, **{f.name: found[f.name] for f in fields if f.init})
    made = copy.copy(value)
    for name, child in found.items():
        object.__setattr__(made, name, child)
    return made


def attach(modules: dict[int, nn.Module], recorder: Recorder) -> Callable[[], None]:
    """Gives modules their taps, by key. Returns the function that takes all of them away again."""
    handles = []

    def detach() -> None:
        for handle in handles:
            handle.remove()
        for key, module in modules.items():
            ACTIVE.pop(key, None)
            for name in (KEY, BACKWARD_KEY, WANTED):
                module.__dict__.pop(name, None)

    try:
        for key, module in modules.items():
            for name in (KEY, BACKWARD_KEY):
                with torch.inference_mode(False):  # compiled code writes to it
                    module.__dict__[name] = torch.tensor([key], device="cpu")
            module.__dict__[WANTED] = recorder.wants(key)
            ACTIVE[key] = recorder
            handles.append(module.register_forward_pre_hook(_before))
            handles.append(module.register_forward_hook(_after, with_kwargs=True))
    except BaseException:
        detach()
        raise
    return detach


@contextlib.contextmanager
def effective(compiled: bool) -> Iterator[None]:
    """Makes calls of compiled code run code that is compiled with the modules' present hooks.

    Compiled code checks whether deterministic algorithms warn or raise, also where neither is asked for. Where they
    are, the state stays, since it would have an effect.

    **Raises** NotImplementedError where deterministic algorithms are asked for and code with taps is `compiled`.
    """
    if torch.are_deterministic_algorithms_enabled():
        if compiled:
            raise UnsupportedError(
                "capture: steps of compiled models cannot be recorded under torch.use_deterministic_algorithms(True); "
                "switch it off, or capture the eager model"
            )
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    _warn_only(not warns)
    try:
        yield
    finally:
        _warn_only(warns)


def _warn_only(warns: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warns)


# --- from which others each tensor of a step is computed ---


@dataclasses.dataclass(eq=False)
class Seen:
    """A tensor of the present step, as far as the device has it.

    `origin`: the tickets and parameters that it is computed from, None if that is unknown. `inputs`: or their keys.
    `operation`: of a result, if it can be computed again. `errors`: of a quantized payload, see `statistics`.
    """

    kind: Kind
    name: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    hash: Tensor
    row: Tensor | None
    values: Tensor | None
    errors: Tensor | None = None
    origin: tuple[list[int], list[Tensor]] | None = None
    inputs: tuple[str, ...] | None = None
    operation: Operation | None = None

    @property
    def site(self) -> Site:
        name = rules.printable(self.name)
        return Site(name, self.kind, self.call, self.shape, self.dtype, self.inputs, self.operation)

    @property
    def key(self) -> str:
        return self.site.key


def match_recomputed(again: dict[int, Seen], seen: dict[Any, Seen]) -> None:
    """Finds the calls that gradients of recomputed activations belong to: those with the same bits.

    **Arguments:** `again`: recomputed activations, by ticket. `seen`: the others by ticket, and gradients by
    ("gradient", ticket). **Raises** NotImplementedError if no call has the bits.
    """
    done = {k[1] for k in seen if isinstance(k, tuple) and k[0] == "gradient" and k[1] in seen}
    for ticket in [t for t in again if ("gradient", t) in seen]:
        name = again[ticket].name
        calls = [t for t, s in seen.items() if isinstance(t, int) and s.name == name and t not in done]
        if len(calls) > 1:
            calls = [t for t in calls if torch.equal(seen[t].hash, again[ticket].hash)]
        if not calls:
            raise UnsupportedError(
                f"capture: {name} was recomputed in the backward pass with other bits, and it ran more than once in "
                "the step, so that its gradients cannot be matched"
            )
        done.add(calls[-1])  # recomputation runs from the last call to the first
        seen["gradient", ticket].call = seen[calls[-1]].call


def connect(every: list[Seen], by_ticket: Mapping[Any, Seen], names: Mapping[int, str]) -> None:
    """Fills in the keys of each site's inputs, where autograd knows them.

    **Arguments:** `every`: in the order of computation. `by_ticket`: outputs of modules. `names`: of parameters, by id.
    """
    parameters = {s.name: s for s in every if s.kind == "parameter"}
    consumers: dict[str, list[Seen]] = collections.defaultdict(list)
    by_key = {s.key: s for s in every}
    for seen in every:
        if seen.origin is not None:
            tickets, leaves = seen.origin
            found = [by_ticket[t] for t in tickets]
            found += [parameters[n] for p in leaves if (n := names.get(id(p))) in parameters]  # type: ignore[index]
            seen.inputs = tuple([s.key for s in found])
            for key in seen.inputs:
                consumers[key].append(seen)
    before: set[str] = set()
    for seen in every:
        if seen.kind in ("activation_grad", "parameter_grad"):
            kind: Any = seen.kind.removesuffix("_grad")
            of = by_key.get(dataclasses.replace(seen, kind=kind).key)
            if of is not None and (of.kind == "parameter" or of.inputs is not None):
                seen.inputs = _inputs_of_gradient(of, consumers, before)
        before.add(seen.key)


def _inputs_of_gradient(of: Seen, consumers: dict[str, list[Seen]], before: set[str]) -> tuple[str, ...]:
    """A gradient is computed from those of the sites that its tensor enters, and from what these are made of."""
    keys: dict[str, None] = {}
    for consumer in consumers[of.key]:
        keys[dataclasses.replace(consumer, kind="activation_grad").key] = None
        keys |= dict.fromkeys(consumer.inputs or ())
    keys |= {of.key: None}
    return tuple([key for key in keys if key in before])
