"""Inserts taps into a function while JAX traces it: on modules' outputs, on differentiated arguments, and on losses.

The function is not changed. While it is traced, flax's interceptors, `__call__` of nnx and equinox modules and JAX's
`vjp` call the hooks in this file. A library is hooked only if the user has imported it. A capture traces in a context
of its own, so that functions under `jax.jit` that were compiled before are traced again, and keep their compiled code.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.errors import UnsupportedError
from diptych.lab.bisect.forward import ModuleCall, Slot
from diptych.lab.capture import named, printable, wanted
from diptych.lab.jax import functions
from diptych.lab.jax.structures import described, placed
from diptych.lab.jax.tap_primitives import NUMBERS, ROW, SCOPE, called, tap
from diptych.lab.traces import is_recorded

PATH = "_diptych_path"
"""The attribute of an nnx module that holds its path. Flax passes it to the copies that its transformations make."""

_context = jax.make_user_context(None)
_tracing: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("diptych_tracing", default=None)
_numbers = itertools.count(1)
_lock = threading.RLock()


@dataclasses.dataclass
class _Frame:
    """A running module. `inner`: whether another module with the same path has run inside of it; that module's outputs
    are recorded. `number`: the position of its call in `Tracing.calls`."""

    owner: Any
    path: str
    inner: bool = False
    number: int | None = None


class Tracing:
    """The state of one capture's traces.

    `watched`: the paths of modules whose inputs get taps. `functions`: whether modules' operations are recorded.
    `calls`: the calls of watched modules in the last trace. `outputs`: the numbers of the taps on a call's outputs, by
    the call's position. JAX may trace a module more often than the module runs; taps of such calls are in no program.
    """

    def __init__(self, sites: str, functions: bool = False, watched: Collection[str] = ()) -> None:
        self.sites, self.functions, self.watched = sites, functions, watched
        self.number = next(_numbers)
        self.modules = False  # whether a module has run, also in a trace that JAX uses again later
        self._begin()

    def _begin(self) -> None:
        self._frames: list[_Frame] = []
        self._differentiated = 0
        self._parameters: set[str] = set()
        self._marked: list[Any] = []
        self.calls: list[ModuleCall] = []
        self.outputs: dict[int, list[int]] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inserts taps into everything that is traced in this context."""
        with _lock, contextlib.ExitStack() as stack:
            self._begin()
            token = _tracing.set(self)
            stack.callback(_tracing.reset, token)
            stack.callback(self.unmark)
            stack.enter_context(_context((self.number, "")))
            for hook in (_hook_vjp, _hook_linen, _hook_nnx, _hook_equinox):
                hook(stack)
            yield

    # --- modules ---

    def module(self, owner: Any, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module and returns its output with taps."""
        top = self._frames[-1] if self._frames else None
        if top is not None and top.owner is owner:  # the module itself calls its base class's `__call__`
            return run(*args, **kwargs)
        if top is not None and top.path == path:
            top.inner = True
        self.modules = True
        frame = _Frame(owner, path)
        if path in self.watched:
            args, kwargs = self._inputs(frame, args, kwargs)
        self._frames.append(frame)
        try:
            with jax.named_scope(SCOPE + named(path)), _context((self.number, path)):
                norm = functions.norm(owner, args, kwargs) if self.functions else None
                call = functools.partial(run, *args, **kwargs)
                out = call() if norm is None else self._called(norm, call)
        finally:
            self._frames.pop()
        return out if frame.inner else self._output(out, frame)

    def _called(self, norm: functions.Norm, run: Callable[[], Any]) -> Any:
        with jax.named_scope(ROW):
            out = run()
        operation, operands = norm.operands(out)
        return called(out, norm.row, operation, operands)

    def _output(self, out: Any, frame: _Frame) -> Any:
        leaves, tree = placed(out)
        numbers = [next(NUMBERS) for _ in leaves]
        if frame.number is not None:
            self.outputs[frame.number] = numbers
        return tree.unflatten(
            [
                self._tap(x, named(frame.path, place), "activation", "activation_grad", number)
                for (place, x), number in zip(leaves, numbers, strict=True)
            ]
        )

    def _tap(self, x: Any, name: str, kind: str, grad: str = "", number: int | None = None) -> Any:
        of_forward = self.functions and _inexact(x)  # a tap that is no site still marks the forward pass
        site = isinstance(x, jax.Array) and (of_forward or is_site(self.sites, name, str(x.dtype)))
        return tap(x, name, kind, grad, number) if site else x

    def _inputs(self, frame: _Frame, args: Any, kwargs: Any) -> Any:
        """Returns a module's arguments with taps, and appends its call to `calls`."""
        frame.number = len(self.calls)
        prefix = f"{named(frame.path)}/call:{frame.number}"

        def tapped(value: Any, place: str) -> tuple[Any, Slot] | None:
            if not isinstance(value, jax.Array) or not is_recorded(str(value.dtype)):
                return None
            name = printable(prefix + place)
            return tap(value, name, "operand"), Slot(f"operand:{name}", value.ndim)

        (args, of_args), (kwargs, of_kwargs) = described(tuple(args), tapped), described(dict(kwargs), tapped)
        parent = next((f.number for f in reversed(self._frames) if f.number is not None), None)
        of = type(frame.owner)
        how = "linen" if any(c.__module__.startswith("flax.linen") for c in of.__mro__) else "object"
        kind = f"{of.__module__}.{of.__qualname__}"
        self.calls.append(ModuleCall(frame.path, 0, kind, how, of_args, of_kwargs, parent))
        return args, kwargs

    @property
    def outermost(self) -> bool:
        return not self._frames and not self._differentiated

    # --- parameters ---

    def held(self, named_parameters: Iterator[tuple[str, Any]]) -> None:
        """Records the parameters of a model that is not differentiated, each once."""
        for name, x in named_parameters:
            if name not in self._parameters:
                self._parameters.add(name)
                self._tap(x, name, "parameter")

    def differentiated(self, fun: Callable[..., Any], primals: Any, has_aux: bool) -> Callable[..., Any]:
        """Returns `fun` with taps on its arguments, which are parameters, and on a scalar result, which is the loss."""
        names = names_of(primals)
        self._parameters.update(names)

        @functools.wraps(fun, updated=())
        def run(*primals: Any) -> Any:
            leaves, tree = jax.tree.flatten(primals)
            tapped = [
                self._tap(x, name, "parameter", "parameter_grad") if _inexact(x) else x
                for x, name in zip(leaves, names, strict=True)
            ]
            with self.inside():
                out = fun(*tree.unflatten(tapped))
            loss, *aux = out if has_aux else (out,)
            if isinstance(loss, jax.Array) and not loss.shape and _inexact(loss):
                loss = self._tap(loss, "loss", "result")
            return (loss, *aux) if has_aux else loss

        return run

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Returns a context in which arguments of nested differentiations are not taken for parameters."""
        self._differentiated += 1
        try:
            yield
        finally:
            self._differentiated -= 1

    # --- paths of nnx modules ---

    def path(self, module: Any) -> str:
        """Returns the path of an nnx module. A module without a mark is a model of its own, or a new child of a running
        one."""
        if PATH not in vars(module):
            parent = "/".join(filter(None, (self._frames[-1].path, type(module).__name__))) if self._frames else ""
            self.mark(module, parent)
        return vars(module)[PATH]

    def mark(self, root: Any, prefix: str) -> None:
        """Marks the modules of a graph with their paths."""
        for path, module in _nnx().iter_modules(root):
            if PATH not in vars(module):
                vars(module)[PATH] = "/".join(map(str, filter(None, (prefix, *map(str, path)))))
                self._marked.append(module)

    def path_in_parent(self, module: Any) -> str:
        """Returns the path of an equinox module, from its place in the fields of the running module."""
        if not self._frames:
            return ""
        parent = self._frames[-1]
        held = jax.tree_util.tree_flatten_with_path(parent.owner, is_leaf=lambda x: x is module)[0]
        found = next((_parts(keys) for keys, x in held if x is module), [type(module).__name__])
        return "/".join(filter(None, (parent.path, *found)))

    def unmark(self, *roots: Any) -> None:
        """Removes all marks, including those of modules in these graphs."""
        for root in roots:
            self._marked += [module for _, module in _nnx().iter_modules(root)]
        for module in self._marked:
            vars(module).pop(PATH, None)
        self._marked = []


def is_site(sites: str, name: str, dtype: str) -> bool:
    """Returns whether a pattern of sites matches a name, and traces can hold the array's dtype."""
    return is_recorded(dtype) and wanted(sites, name)


def _inexact(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)


def names_of(primals: Any) -> list[str]:
    """Returns a name for each leaf of differentiated arguments: its path within its argument, preceded by the
    argument's position if the names would not be unique otherwise."""
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(primals)[0]]
    names = ["/".join(_parts(path[1:])) for path in keys]
    if len(set(names)) == len(names) and all(names):
        return names
    return ["/".join(filter(None, (str(path[0].idx), name))) for path, name in zip(keys, names, strict=True)]


def _parts(path: Any) -> list[str]:
    """Returns the parts of a path, without those that flax adds for its containers."""
    parts, flax = list(path), "flax" in sys.modules
    if flax and len(parts) > 1 and getattr(parts[0], "name", "") == "states":  # nnx: .states[0]
        parts = parts[2:]
    if flax and len(parts) > 1 and getattr(parts[-1], "name", "") in ("value", "raw_value"):  # variables and boxes
        parts = parts[:-1]
    words = [str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in parts]
    return words[1:] if len(words) > 1 and words[0] == "params" else words


# --- hooks ---


def _hook_vjp(stack: contextlib.ExitStack) -> None:
    """Replaces `jax.vjp`, and `vjp` in the module of `jax.grad` and `jax.value_and_grad`, which call it by that
    name."""
    inside = inspect.unwrap(jax.value_and_grad).__globals__
    found = inside.get("vjp")
    if not callable(found):
        raise UnsupportedError(
            f"capture: JAX {jax.__version__} has no function vjp in the module of jax.value_and_grad, by which "
            "captures see gradients; use a version of JAX that diptych supports"
        )
    of_grad, of_user = _hooked(found, True), _hooked(jax.vjp, False)
    inside["vjp"], jax.vjp, user = of_grad, of_user, jax.vjp  # type: ignore[assignment]

    def restore() -> None:
        inside["vjp"], jax.vjp = found, user  # type: ignore[assignment]

    stack.callback(restore)


def _hooked(vjp: Any, wrapped: bool) -> Any:
    """Returns `vjp` with taps. `wrapped`: whether the pullback may be replaced by a plain function."""

    @functools.wraps(vjp)
    def hooked(fun: Any, *primals: Any, **options: Any) -> Any:
        tracing = _tracing.get()
        if tracing is None or not tracing.outermost:
            return vjp(fun, *primals, **options)
        run = tracing.differentiated(fun, primals, options.get("has_aux", False))
        out, pullback, *aux = vjp(run, *primals, **options)

        def guarded(*cotangents: Any) -> Any:
            with tracing.inside():
                return pullback(*cotangents)

        return out, guarded if wrapped else pullback, *aux

    return hooked


def _hook_linen(stack: contextlib.ExitStack) -> None:
    if "flax.linen" in sys.modules:
        stack.enter_context(sys.modules["flax.linen"].intercept_methods(_linen_call))


def _linen_call(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module, tracing = context.module, _tracing.get()
    if tracing is None or context.method_name != "__call__" or module.scope is None or module.is_initializing():
        return run(*args, **kwargs)
    path = "/".join(module.path)
    if tracing.outermost:
        params = jax.tree_util.tree_flatten_with_path(module.variables.get("params", {}))[0]
        tracing.held(("/".join([path] * bool(path) + _parts(keys)), x) for keys, x in params)
    return tracing.module(module, path, run, args, kwargs)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _hook_nnx(stack: contextlib.ExitStack) -> None:
    if "flax.nnx" not in sys.modules:
        return
    nnx = _nnx()

    def run(tracing: Tracing, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = tracing.path(module)
        if tracing.outermost:
            found = ((keys, x) for keys, x in nnx.iter_graph(module) if isinstance(x, nnx.Param))
            tracing.held(("/".join([path] * bool(path) + list(map(str, keys))), x.get_value()) for keys, x in found)
        return tracing.module(module, path, call, args, kwargs)

    _hook_calls(stack, nnx.Module, run)


def _hook_equinox(stack: contextlib.ExitStack) -> None:
    """Hooks equinox modules. They are found by identity in the fields of the running module; others are whole
    models."""
    if "equinox" not in sys.modules:
        return

    def run(tracing: Tracing, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        room = type(module).__module__
        if room.startswith("equinox.") and not room.startswith("equinox.nn."):  # equinox's wrappers of functions
            return call(*args, **kwargs)
        return tracing.module(module, tracing.path_in_parent(module), call, args, kwargs)

    _hook_calls(stack, sys.modules["equinox"].Module, run)


def _hook_calls(stack: contextlib.ExitStack, base: type, run: Callable[..., Any]) -> None:
    """Replaces `__call__` of all classes that derive from `base`."""
    for cls in _subclasses(base):
        if (call := vars(cls).get("__call__")) is not None:
            type.__setattr__(cls, "__call__", _call_hook(call, run))
            stack.callback(type.__setattr__, cls, "__call__", call)


def _call_hook(call: Any, run: Any) -> Any:
    @functools.wraps(call)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = _tracing.get()
        bound = call.__get__(self, type(self)) if hasattr(call, "__get__") else functools.partial(call, self)
        if tracing is None:
            return bound(*args, **kwargs)
        return run(tracing, self, bound, args, kwargs)

    return hooked


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_subclasses(c) for c in type.__subclasses__(cls)))
