"""Capture of a torch model's training steps as a trace."""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.lab import capture as rules
from diptych.lab.capture import CaptureWarning
from diptych.lab.diff.names import few
from diptych.lab.torch import compiled, functions, own_ops, plain_bits, statistics, taps
from diptych.lab.torch.sites import Seen, connect, match_recomputed, number_calls
from diptych.lab.traces import SAMPLES, Entry, Meta, Site, Writer
from diptych.lab.traces.schema import Kind
from diptych.torch.primitives import hash as hash_ops
from diptych.torch.primitives import register
from diptych.torch.primitives import statistics as statistics_ops
from diptych.torch.private import dispatch, functorch, graphs
from diptych.torch.state.autocast import get_autocast_recipe

_KEYS, _TICKETS = itertools.count(), itertools.count()
_CAPTURED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_RECORDING: list[Capture] = []  # captures whose models have taps at present


def capture(
    model: nn.Module,
    *,
    out: str | os.PathLike[str],
    sites: str = "**",
    every: int = 1,
    values: str = "hash",
    budget: float = 2**30,
    ops: str = "own",
    statistics: bool = True,
) -> Capture:
    """Returns a context in which a model's training steps are recorded as a trace (docs/captures.md).

        with lab.capture(model, out="trace") as t:
            for batch in batches:
                ...  # forward, backward, update
                t.step()

    **Arguments:** `model`: any module, unmodified, eager or compiled, whole or in parts. `out`: the trace's folder, one
    for all ranks. `sites`: a pattern of names of modules, parameters, and operands such as "h.0.fc/quantize.x",
    compared part by part as in `convert`. `every`: the interval between recorded steps; others run as without a
    capture. `values`: "hash" keeps none; "sample" up to 1024 elements of each tensor; "full" whole tensors, up to half
    of the budget. `budget`: bytes of values in the whole trace. `ops`: "own" records operands and results of diptych's
    ops; "all", in eager code, also those of torch's functions in the forward pass; "none" leaves both out.
    `statistics`: False records hashes alone.

    **Raises** TypeError or ValueError for bad arguments; on entry, TraceError if `out` has a trace of this rank,
    FileError if it cannot be written, and NotImplementedError for a model with parts in TorchScript or in another
    capture.
    """
    return Capture(model, out, rules.options(sites, every, values, budget, ops), statistics)


class Capture:
    """A capture of a torch model; see `capture`."""

    def __init__(self, model: nn.Module, out: Any, options: Any, statistics: bool) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"capture: model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(statistics, bool):
            raise ArgumentError(f"capture: statistics must be bool, got {type(statistics).__name__}")
        if not isinstance(out, (str, os.PathLike)):
            raise ArgumentError(f"capture: out must be a path, got {type(out).__name__}")
        self._model, self._out = getattr(model, graphs.COMPILED, model), os.fspath(out)
        self.options, self._with_statistics = options, statistics
        self._writer: Writer | None = None
        self._steps = 0
        self._compiled = model is not self._model  # whether code with taps is compiled
        self._armed, self._quiet = contextlib.ExitStack(), False
        self._warned: set[str] = set()
        self._skipped: set[int] = set()  # keys of modules that returned objects with tensors

    # --- the context ---

    def __enter__(self) -> Capture:
        if self._writer is not None:
            raise RuntimeError("capture: a capture cannot be entered twice; make a new one by capture(...)")
        self._paths: dict[int, str] = {}
        self._modules: dict[int, nn.Module] = {}
        for path, module in self._model.named_modules():
            self._check(path, module)
            wrapper = hasattr(module, graphs.COMPILED)
            self._compiled |= wrapper or graphs.compiled_call(module) is not None
            if not wrapper:  # torch.compile's wrapper has the name of the module inside of it
                key = next(_KEYS)
                self._modules[key], self._paths[key] = module, plain(path)
        self._wanted = {k: rules.wanted(self.options.sites, rules.named(p)) for k, p in self._paths.items()}
        named = [(plain(n), p) for n, p in self._model.named_parameters()]
        self._parameters = {n: p for n, p in named if rules.wanted(self.options.sites, n)}
        self._names = {id(p): n for n, p in self._parameters.items()}
        rank, ranks = _rank()
        self._writer = Writer(self._out, self._meta(ranks), rank)
        _CAPTURED.update(self._modules.values())
        try:
            if self._compiled:
                self._warn_of_functions()
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        assert self._writer is not None
        if error is None and self._began and self._steps == 0:
            self._warn("nothing is recorded, since step() was not called")
        self._armed.close()
        self._forget()
        for module in self._modules.values():
            _CAPTURED.discard(module)
        self._writer.close()

    def step(self) -> None:
        """Ends a training step and writes its records. The host waits for the device.

        **Raises** RuntimeError outside of the `with` block, or if no module ran in a recorded step; TraceError and
        FileError as the trace's writer does; NotImplementedError if recomputed activations match no call.
        """
        if self._writer is None or self._writer.closed:
            raise RuntimeError("capture: step() is called outside of the capture's with block")
        recorded = self._recorded
        self._armed.close()
        try:
            if recorded:
                if not self._began:
                    raise RuntimeError(
                        f"capture: no module of the model ran in step {self._steps}, or it ran in another process or "
                        "thread, or in code that torch.compile had exported or packaged; call step() behind each run"
                    )
                self._warn_of_gradients()
                entries = self._entries()
                if not entries:
                    self._warn(f"step {self._steps} records nothing, since no site matches {self.options.sites!r}")
                self._writer.step(self._steps, entries)
        finally:
            self._steps += 1
            self._begin()

    def check(self, run: Callable[[], Any]) -> bool:
        """Runs a step without and with taps, and notes in the trace whether both have the same bits.

        **Arguments:** `run`: computes loss and gradients, updates nothing, and returns the loss or None. It is called
        twice. Afterwards modules' attributes, gradients and torch's random state are restored each time.

        **Raises** RuntimeError outside of the `with` block, if the present step has begun, if `run` changes the values
        of parameters, or if it runs no module of the model.

        **Returns** whether the loss, all gradients of parameters and all buffers had the same bits, on all ranks.
        """
        if self._writer is None or self._writer.closed:
            raise RuntimeError("capture: check() is called outside of the capture's with block")
        if self._began:
            raise RuntimeError(
                "capture: check() is called within a step; call it before the model runs, or after step()"
            )
        self._armed.close()
        self._quiet = True
        try:
            plain = plain_bits.bits(self._model, run)
            with self._attached():
                same = plain_bits.bits(self._model, run) == plain
                if not self._began:
                    raise RuntimeError("capture: check() ran no module of the model; give it a function that runs it")
        finally:
            self._quiet = False
            self._begin()
        if (ranks := _rank()[1]) > 1:
            found: list[Any] = [None] * ranks
            torch.distributed.all_gather_object(found, same)
            same = all(found)
        self._writer.note(plain_bits=same)
        return same

    # --- the state of a step ---

    def _begin(self) -> None:
        """Prepares the next step: gives the model its taps if the step is recorded."""
        self._forget()
        self._recorded = self._steps % self.options.every == 0
        if self._recorded:
            self._armed.enter_context(self._attached())

    def _forget(self) -> None:
        self._began = False
        self._calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self._seen: dict[Any, Seen] = {}  # tensors of modules and ops, in the order of computation
        self._first: list[Seen] = []  # parameters
        self._last: dict[str, Seen] = {}  # gradients of parameters
        self._trained = False  # whether a parameter got a gradient, recorded or not
        self._again: dict[int, Seen] = {}  # recomputed activations, by ticket
        self._plans: dict[str, Any] = {}
        self._running = taps.Modules()
        self._unused: dict[int, int] = {}  # keys of modules by the tickets of calls that have run no op yet

    @contextlib.contextmanager
    def _attached(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(compiled.effective(self._compiled))
            _RECORDING.append(self)
            stack.callback(_RECORDING.remove, self)
            ops = self.options.ops != "none"
            stack.callback(taps.attach(self._modules, self, ops))
            for name, p in self._parameters.items():
                if p.requires_grad:
                    stack.callback(taps.hook_first(p, lambda p, name=name: self._parameter_grad(name, p)).remove)
            if ops:
                observer = own_ops.Observer(self._place_of_op, self._see_all, self._warn, self._with_statistics)
                register.OBSERVERS.append(observer)
                stack.callback(register.OBSERVERS.remove, observer)
                stack.enter_context(compiled.without_programs())
            if not self._compiled and self.options.ops == "all":
                mode = functions.Functions(self._module_of_function, self._see_all)
                stack.enter_context(functions.recorded(self._modules.values(), mode))
            yield

    def _check(self, path: str, module: nn.Module) -> None:
        where = f"capture: the module {rules.named(path)!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(f"{where} is TorchScript, which runs no hooks; capture the module it is made from")
        if any(nn.parameter.is_lazy(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise UnsupportedError(f"{where} has parameters that are not initialized; run the model once before")
        if module in _CAPTURED:
            raise UnsupportedError(f"{where} is in another capture; end that one first")

    def _meta(self, ranks: int) -> Meta:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "diptych")}
        versions |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
        device = next((p.device.type for p in self._model.parameters()), "cpu")
        return Meta("torch", versions, device, ranks, None, rules.HASH, True, None, self.options)

    # --- the recorder's methods, which taps call ---

    def wants(self, key: int) -> bool:
        return self._wanted[key] or not any(self._wanted.values())  # taps also report that a step begins

    def owns(self, key: int, module: nn.Module) -> bool:
        return self._modules[key] is module

    def enter(self, key: int) -> None:
        self._running.enter(self._paths[key])

    def leave(self, key: int) -> None:
        self._running.leave(self._paths[key])

    def skip(self, key: int, kind: str, place: str, eager: bool) -> None:
        if eager:
            self._start()
        if self._wanted[key] and key not in self._skipped:
            self._skipped.add(key)
            name = rules.named(self._paths[key], place)
            self._warn(f"tensors in {name} are not recorded: {kind} is no dataclass, nor known to torch's pytree")

    def forward(self, key: int, x: Tensor, place: str, eager: bool) -> int:
        if functorch.is_wrapped(x):
            raise UnsupportedError(
                f"capture: {rules.named(self._paths[key])} runs in a transform of torch.func, whose tensors cannot be "
                "recorded; use backward(), or end the capture before"
            )
        self._start()
        ticket, recomputed = next(_TICKETS), compiled.in_backward()
        if eager:
            self._running.output(ticket)
        elif not recomputed:
            taps.renew_key(self._modules[key])
        if not self._wanted[key] or self._quiet:
            return ticket
        name = rules.printable(rules.named(self._paths[key], place))
        call = self._calls["activation", name]
        seen = self._see("activation", name, call, x, keep=not recomputed)
        if seen is None:
            return ticket
        if recomputed:
            self._again[ticket] = seen
            return ticket
        self._calls["activation", name] += 1
        self._seen[ticket] = seen
        self._note_compiled(not eager)
        if not self._compiled:
            seen.origin = taps.nearest(x, self._seen)
        return ticket

    def backward(self, key: int, gradient: Tensor | None, ticket: int) -> None:
        self._running.gradient(ticket)
        of = self._seen.get(ticket) or self._again.get(ticket)
        if of is not None and gradient is not None:
            self._seen.pop(("gradient", ticket), None)  # an earlier backward pass may have left its gradient
            seen = self._see("activation_grad", of.name, of.call, gradient)
            if seen is not None:
                self._seen["gradient", ticket] = seen

    def _parameter_grad(self, name: str, p: Tensor) -> None:
        if self._quiet:
            return
        gradient = p.main_grad if getattr(p, "grad_added_to_main_grad", False) else p.grad  # type: ignore[attr-defined]
        self._trained |= gradient is not None
        if gradient is not None and (seen := self._see("parameter_grad", name, 0, gradient)) is not None:
            self._last[name] = seen

    def call(self, key: int, backward: bool) -> int:
        if not backward and compiled.in_backward():  # the call is a recomputation
            return -1
        self._start()
        if not backward:
            taps.renew_key(self._modules[key])
        ticket = next(_TICKETS)
        self._unused[ticket] = key
        return ticket

    # --- operations ---

    def _place_of_op(self) -> tuple[str, int] | None:
        """Returns the name of the module that runs an op and the call's ticket; None for ops outside of modules, and
        for ops that are repeated to recompute activations."""
        if self._quiet:
            return None
        node = compiled.running()
        if node is not None:
            self._unused.pop(node.ticket, None)
            path = self._paths[node.key] if node.recorder is self and node.ticket != -1 else None
            return None if path is None else (rules.named(path), node.ticket)
        if compiled.in_compiled_code():
            self._warn(
                "ops of diptych in compiled code that no module of the model calls, as in functions that are compiled "
                "alone and in arithmetic on quantized tensors, are not recorded"
            )
            return None
        path = self._running.calls()
        return None if path is None else (rules.named(path), next(_TICKETS))

    def _see_all(self, kind: Kind, path: str, op: str, given: dict[str, Any], ticket: int = -1) -> list[Seen]:
        self._start()
        found = []
        for name, value in given.items():
            several = isinstance(value, (list, tuple))
            for i, t in enumerate(value if several else [value]):
                full = rules.printable(f"{path}/{op}.{name}" + (f"[{i}]" if several else ""))
                if not isinstance(t, Tensor) or not self._wants_op(path, full):
                    continue
                call = self._calls[kind, full]
                self._calls[kind, full] += 1
                if (seen := self._see(kind, full, call, t)) is not None:
                    seen.ticket = ticket
                    self._seen[kind, full, call] = seen
                    found.append(seen)
        return found

    def _wants_op(self, path: str, full: str) -> bool:
        return rules.wanted(self.options.sites, path) or rules.wanted(self.options.sites, full)

    def _module_of_function(self) -> str | None:
        """Returns the name of the module that calls a torch function; "loss" between the forward and the backward pass;
        None if the function is not recorded, such as one that the model of another capture calls."""
        if self._quiet or self._compiled or compiled.in_backward():
            return None
        path = self._running.calls()
        if path is not None:
            return rules.named(path)
        elsewhere = any([other._running.calls() is not None for other in _RECORDING])
        return "loss" if self._began and self._running.between() and not elsewhere else None

    def _start(self) -> None:
        """Begins the step, if it has not begun: records the parameters. The step's first module or op calls this."""
        begins, self._began = not self._began, True
        if not begins or self._quiet:
            return
        assert self._writer is not None
        self._budget = self._writer.budget()
        if (recipe := get_autocast_recipe()) is not None and self._writer.meta.recipe is None:
            self._writer.note(recipe=repr(recipe))
        held = taps.held({plain(n): p for n, p in self._model.named_parameters()}, self._parameters)
        if gone := [name for name in self._parameters if name not in held]:
            self._warn(f"parameters that others replace are not recorded, nor their gradients: {few(gone)}")
        if others := taps.added(self._model, set(self._modules.values())):
            self._warn(f"modules that came after the capture began are not recorded: {few([plain(n) for n in others])}")
        seen = [self._see("parameter", name, 0, p) for name, p in held.items()]
        self._first = [s for s in seen if s is not None]

    def _note_compiled(self, compiled: bool) -> None:
        if compiled and not self._compiled:
            self._compiled = True
            self._warn_of_functions()
            for key in [k for k, s in self._seen.items() if s.kind in ("operand", "result") and s.ticket == -1]:
                del self._seen[key]

    def _warn_of_functions(self) -> None:
        if self.options.ops == "all":
            self._warn("calls of functions of torch are not recorded, since parts of the model are compiled")

    def _warn_of_unused(self) -> None:
        if self._unused:
            names = ", ".join(sorted({rules.named(self._paths[key]) for key in self._unused.values()}))
            self._warn(f"compiled code leaves out ops of {names} whose results nothing uses; later calls count without")

    # --- tensors ---

    def _see(self, kind: Kind, name: str, call: int, x: Tensor, keep: bool = True) -> Seen | None:
        """Returns a tensor's hash, statistics and values on its device; None, with a warning, if traces cannot hold
        it."""
        if self._quiet:
            return None
        with torch.no_grad():
            x = _dense(taps.local(x.detach()))
            dtype = statistics.dtype_name(x.dtype)
            plain_layout = x.layout is torch.strided and not x.is_nested
            if dtype is None or type(x) not in (Tensor, nn.Parameter) or not plain_layout:
                kind_of = "nested tensor" if x.is_nested else f"{type(x).__name__}, {x.layout}"
                what = str(x.dtype) if dtype is None else f"a {kind_of}"
                self._warn(f"{kind} {name} is not recorded: traces cannot hold {what}")
                return None
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"capture: {kind} {name} is computed in a CUDA graph, which records nothing when it is replayed; "
                    "compile without CUDA graphs"
                )
            with dispatch.without_function_modes():  # the lab's own functions are not recorded
                seen = Seen(kind, name, call, tuple(x.shape), dtype, hash_ops.hash(x), None, None)
                if keep:
                    seen.row = statistics_ops.statistics(x) if self._with_statistics else None
                    seen.values = None if self.options.values == "hash" else self._keep(seen.site, x)
        return seen

    def _keep(self, site: Site, x: Tensor) -> Tensor:
        """Returns the values that the step may keep. The trace's plan is made once all sites of the step are known, and
        predicted until then, in the order of computation. If a prediction is wrong, the plan gets a sample."""
        if site.key not in self._plans:
            (plan,) = self._budget.plan([site])
            self._budget.take([site], [plan])
            self._plans[site.key] = plan
        count = min(SAMPLES, site.size)
        if self._plans[site.key].values == "whole":
            return statistics.copied(x)
        return statistics.sample(x, count) if count < site.size else statistics.copied(x)

    def _entries(self) -> list[Entry]:
        """Returns the step's entries in the order of computation. The host waits for the device."""
        last = [self._last[name] for name in self._parameters if name in self._last]
        self._warn_of_unused()
        statistics.synchronize([s.hash for s in [*self._first, *self._seen.values(), *last]])
        match_recomputed(self._again, self._seen)
        happens = statistics.moved_field(self._seen.values(), "happens")
        self._seen = {k: s for k, s in self._seen.items() if happens.get(id(s), True)}
        number_calls(self._seen.values())
        every = [*self._first, *self._seen.values(), *last]
        if not self._compiled:
            connect(every, self._seen, self._names)
        hashes = statistics.moved([s.hash for s in every])
        rows = statistics.moved([s.row for s in every]) if self._with_statistics else [None] * len(every)
        of_payloads = statistics.moved_field(every, "errors")
        entries = []
        for seen, row, words in zip(every, rows, hashes, strict=True):
            site = seen.site
            errors = of_payloads.get(id(seen))
            errors = None if errors is None else errors.tolist()
            found = None if row is None else statistics.statistics(row.tolist(), site, errors)
            held = None if seen.values is None else statistics.to_numpy(seen.values)
            entries.append(Entry(site, found, rules.digits(words), held))
        return entries

    def _warn_of_gradients(self) -> None:
        recorded = [self._parameters[s.site.name] for s in self._first if s.site.name in self._parameters]
        trains = any(p.requires_grad and not hasattr(p, "main_grad") for p in recorded)
        if trains and not self._trained and any(s.kind == "activation_grad" for s in self._seen.values()):
            why = "torch.autograd.grad runs no hooks of parameters; use backward()"
            self._warn(f"gradients of activations came, and none of a parameter that is recorded: {why}")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"capture: {message}", CaptureWarning, stacklevel=2)


def plain(path: str) -> str:
    """Returns a module's path without the wrappers of torch.compile."""
    return ".".join([part for part in path.split(".") if part != graphs.COMPILED])


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _dense(x: Tensor) -> Tensor:
    return x.wait() if type(x).__name__ == "AsyncCollectiveTensor" else x  # type: ignore[operator]
