"""Forward passes of a torch model in which outputs and inputs of modules are seen and replaced, for a bisection."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from diptych.common.errors import UnsupportedError
from diptych.lab import capture as rules
from diptych.lab.bisect.forward import Forward, Inputs, ModuleCall, Slot, within
from diptych.lab.traces import Site, Tensor
from diptych.lab.traces.schema import Kind, Operation
from diptych.torch.lab import functions, statistics, taps
from diptych.torch.lab.capture import capture, plain

_BUDGET = 2**61  # bytes: all values are whole


class Feeder:
    """See `diptych.lab.bisect.forward.Feeder`. Compiled parts of the model run eagerly."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model, self._device = model.to(device), torch.device(device)

    def capture(self, inputs: Inputs, folder: pathlib.Path) -> None:
        with _repeatable(self._device), capture(self._model, out=folder, values="full", budget=_BUDGET) as recording:
            self._run(inputs)  # with gradients, by which a trace knows from what each tensor is computed
            recording.step()

    @torch.no_grad()
    def __call__(
        self, inputs: Inputs, fed: Mapping[str, Tensor], inside: Collection[str] = (), ops: str | None = None
    ) -> Forward:
        seen = _Pass(fed, frozenset(inside), ops)
        with _repeatable(self._device), seen.attached(self._model):
            self._run(inputs)
        return Forward(seen.values, seen.calls, [r.site for r in seen.results if r.kind == "result"])

    def _run(self, inputs: Inputs) -> None:
        put = lambda x: torch.from_numpy(x.copy()).to(self._device)  # noqa: E731
        self._model(*map(put, inputs.args), **{name: put(x) for name, x in inputs.kwargs.items()})


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """All passes compute by the same code, from the same random numbers, and leave those of the process as they are.

    The fast path of torch's transformer layers calls no modules, and pads by nested tensors, which cannot be recorded.
    """
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@dataclasses.dataclass
class _Seen:
    """An operand or result of one of torch's functions, as `Functions` completes it."""

    kind: Kind
    plain: Site
    inputs: tuple[str, ...] | None = None
    operation: Operation | None = None

    @property
    def key(self) -> str:
        return self.plain.key

    @property
    def site(self) -> Site:
        return dataclasses.replace(self.plain, inputs=self.inputs, operation=self.operation)


class _Pass:
    def __init__(self, fed: Mapping[str, Tensor], inside: frozenset[str], ops: str | None) -> None:
        self.values: dict[str, Tensor] = {}
        self.calls: list[ModuleCall] = []
        self.results: list[_Seen] = []
        self._fed, self._inside, self._ops = fed, inside, ops
        self._numbers = rules.Calls()
        self._count: collections.Counter[str] = collections.Counter()
        self._open: list[int] = []  # positions of calls
        self._stack: list[str] = []  # paths of modules, if operations are seen

    @contextlib.contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, module in model.named_modules():
                if hasattr(module, "_orig_mod"):  # the wrapper of torch.compile: what it wraps has the same name
                    continue
                path, begins = plain(path), plain(path) in self._inside
                if self._ops is not None:
                    stack.callback(module.register_forward_pre_hook(functools.partial(self._enter, path)).remove)
                if begins:
                    before = lambda module, args, kwargs, path=path: self._begin(path, module, args, kwargs)  # noqa: E731
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                after = lambda module, args, out, path=path, begins=begins: self._end(path, begins, out)  # noqa: E731
                stack.callback(module.register_forward_hook(after).remove)
            if self._ops is not None:
                mode = functions.Functions(self._module, self._see_all)
                stack.enter_context(functions.recorded(model.modules(), mode))
            yield

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._stack.append(path)

    def _module(self) -> str | None:
        """Returns the name of the module that runs if its operations are wanted."""
        here = self._ops is not None and self._stack and within(self._stack[-1], self._ops)
        return rules.named(self._stack[-1]) if here else None

    def _see_all(self, kind: Kind, path: str, op: str, given: Mapping[str, torch.Tensor]) -> list[_Seen]:
        found = []
        for name, x in given.items():
            if (dtype := _recorded(x)) is not None:
                seen = _Seen(kind, self._numbers.site(kind, f"{path}/{op}.{name}", tuple(x.shape), dtype))
                self._see(seen.key, x)
                found.append(seen)
        self.results += found
        return found

    def _begin(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        number = self._count[path]
        self._count[path] += 1
        name = f"{rules.named(path)}/call:{number}"
        args, of_args = self._slots(name, args)
        kwargs, of_kwargs = self._slots(name, kwargs)
        parent = self._open[-1] if self._open else None
        self._open.append(len(self.calls))
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        self.calls.append(ModuleCall(path, number, kind, "torch", of_args, of_kwargs, parent))
        return args, kwargs

    def _slots(self, name: str, given: Any) -> Any:
        """Returns arguments, some of them replaced, and what they are, with slots."""

        def see(x: torch.Tensor, place: str) -> torch.Tensor:
            return self._see(f"operand:{rules.printable(name + place)}", x)

        # `mapped` maps any types: it makes structures of slots too.
        slots: Any = taps.mapped(given, lambda x, place: Slot(f"operand:{rules.printable(name + place)}"))  # type: ignore[arg-type, return-value]
        return taps.mapped(given, see), slots

    def _end(self, path: str, begins: bool, output: Any) -> Any:
        keys: list[str] = []

        def see(x: torch.Tensor, place: str) -> torch.Tensor:
            if (dtype := _recorded(x)) is None:
                return x
            site = self._numbers.site("activation", rules.named(path, place), tuple(x.shape), dtype)
            keys.append(site.key)
            return self._see(site.key, x)

        output = taps.mapped(output, see)
        if self._ops is not None:
            self._stack.pop()
        if begins:
            number = self._open.pop()
            self.calls[number] = self.calls[number]._replace(outputs=tuple(keys))
        return output

    def _see(self, key: str, x: torch.Tensor) -> torch.Tensor:
        if (dtype := _recorded(x)) is None:
            return x
        self.values[key] = Tensor.of(statistics.to_numpy(taps.local(x)).copy(), dtype)
        if (found := self._fed.get(key)) is None:
            return x
        if found.bits.shape != x.shape:
            raise UnsupportedError(f"bisect: {key} has other shapes in other passes: {list(found.bits.shape)} and "
                                   f"{list(x.shape)}, since values decide them")  # fmt: skip
        return torch.tensor(found.bits).view(x.dtype).view(x.shape).to(x.device)


def _recorded(x: torch.Tensor) -> str | None:
    """Returns the name of a tensor's dtype in traces, None for a tensor that is not recorded."""
    return statistics.dtype_name(x.dtype) if x.layout is torch.strided else None
