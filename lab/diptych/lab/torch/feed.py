"""Forward passes of a torch model in which outputs and inputs of modules are recorded and replaced, for a bisection."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from diptych.common.errors import UnsupportedError
from diptych.lab import capture as rules
from diptych.lab.bisect.forward import Forward, Inputs, ModuleCall, Slot, Unwritable, within
from diptych.lab.torch import functions, plain_bits, statistics, taps
from diptych.lab.torch.capture import capture, plain
from diptych.lab.torch.structures import mapped, parts
from diptych.lab.traces import Site, Tensor
from diptych.lab.traces.schema import Kind, Operation
from diptych.torch.private.dispatch import tree_unflatten
from diptych.torch.private.graphs import COMPILED

_BUDGET = 2**61  # bytes, enough to keep all values whole


class Feeder:
    """A feeder of a torch model; see `diptych.lab.bisect.forward.Feeder`. Compiled parts of the model run eagerly."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model, self._device = model.to(device), torch.device(device)

    def capture(self, inputs: Inputs, folder: pathlib.Path) -> list[str]:
        with (
            self._repeatable(),
            capture(self._model, out=folder, values="full", budget=_BUDGET) as recording,
            _unseen(self._model) as unseen,
        ):
            self._run(inputs)  # gradients stay on, since autograd's graph shows from which tensors each one is computed
            recording.step()
        return list(unseen)

    @torch.no_grad()
    def __call__(
        self, inputs: Inputs, fed: Mapping[str, Tensor], inside: Collection[str] = (), ops: str | None = None
    ) -> Forward:
        seen = _Pass(fed, frozenset(inside), ops)
        with self._repeatable(), seen.attached(self._model):
            self._run(inputs)
        return Forward(seen.values, seen.calls, [r.site for r in seen.results if r.kind == "result"])

    @contextlib.contextmanager
    def _repeatable(self) -> Iterator[None]:
        """Makes all passes run the same code from the same states and random numbers, and restores these at the end.

        The fast path of torch's transformer layers is disabled: it calls no modules, and pads with nested tensors,
        which cannot be recorded.
        """
        devices = [torch.cuda.current_device()] if self._device.type == "cuda" else []
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                torch.random.fork_rng(devices),
                plain_bits.set_back(self._model),
            ):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def _run(self, inputs: Inputs) -> None:
        put = lambda x: torch.from_numpy(x.copy()).to(self._device)  # noqa: E731
        self._model(*map(put, inputs.args), **{name: put(x) for name, x in inputs.kwargs.items()})


@contextlib.contextmanager
def _unseen(model: nn.Module) -> Iterator[dict[str, None]]:
    """Yields a dict whose keys are the module outputs in this context that traces cannot hold, with their dtypes."""
    found: dict[str, None] = {}

    def note(path: str, module: nn.Module, args: Any, output: Any) -> None:
        def see(x: torch.Tensor, place: str) -> torch.Tensor:
            if _recorded(x) is None:
                layout = "" if x.layout is torch.strided else f", {x.layout}"
                found[f"{rules.named(path, place)} ({str(x.dtype).removeprefix('torch.')}{layout})"] = None
            return x

        mapped(output, see)

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_hook(functools.partial(note, plain(path))).remove)
        yield found


@dataclasses.dataclass
class _Seen:
    """An operand or result of a torch function. `Functions` sets its `inputs` and `operation`."""

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
        self._stack: list[str] = []  # paths of running modules, if operations are recorded

    @contextlib.contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, module in model.named_modules():
                if hasattr(module, COMPILED):  # torch.compile's wrapper has the name of the module inside of it
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
        """Returns the name of the running module, None if its operations are not wanted."""
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
        first: dict[int, str] = {}
        made: _Made = {}

        def given(value: Any, place: str) -> tuple[Any, Any]:
            """Returns an argument with replaced tensors, and its description with slots."""
            key = lambda place: f"operand:{rules.printable(name + place)}"  # noqa: E731
            slot = lambda x, place: Slot(key(place), array=first.setdefault(id(x), key(place)))  # noqa: E731
            slots = _described(value, slot, place)  # the description comes first, since `mapped` may change the value
            return mapped(value, lambda x, place: self._see(key(place), x, made), place=place), slots

        of_args = [given(x, f"[{i}]") for i, x in enumerate(args)]
        of_kwargs = {k: given(x, f'["{k}"]') for k, x in kwargs.items()}
        parent = self._open[-1] if self._open else None
        self._open.append(len(self.calls))
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        slots = tuple(s for _, s in of_args), {k: s for k, (_, s) in of_kwargs.items()}
        self.calls.append(ModuleCall(path, number, kind, "torch", *slots, parent))
        return tuple(x for x, _ in of_args), {k: x for k, (x, _) in of_kwargs.items()}

    def _end(self, path: str, begins: bool, output: Any) -> Any:
        keys: list[str] = []
        made: _Made = {}

        def see(x: torch.Tensor, place: str) -> torch.Tensor:
            if (dtype := _recorded(x)) is None:
                return x
            site = self._numbers.site("activation", rules.named(path, place), tuple(x.shape), dtype)
            keys.append(site.key)
            return self._see(site.key, x, made)

        output = mapped(output, see)
        if self._ops is not None:
            self._stack.pop()
        if begins:
            number = self._open.pop()
            self.calls[number] = self.calls[number]._replace(outputs=tuple(keys))
        return output

    def _see(self, key: str, x: torch.Tensor, made: _Made | None = None) -> torch.Tensor:
        """Records a tensor's values. Returns the tensor that the model gets in its place, which is `x` itself if the
        values are equal. `made`: the replacements among the same arguments or outputs so far."""
        if (dtype := _recorded(x)) is None:
            return x
        self.values[key] = Tensor.of(statistics.to_numpy(taps.local(x)).copy(), dtype)
        if (found := self._fed.get(key)) is None:
            return x
        if found.bits.shape != x.shape:
            raise UnsupportedError(
                f"bisect: {key} has shape {list(found.bits.shape)} in one pass and {list(x.shape)} in another, since "
                "values decide it; such a model cannot be bisected"
            )
        bits = found.bits.tobytes()
        if bits == self.values[key].bits.tobytes():
            return x
        made = {} if made is None else made
        if (id(x), bits) not in made:
            made[id(x), bits] = torch.tensor(found.bits).view(x.dtype).view(x.shape).to(x.device)
        return made[id(x), bits]


_Made = dict[tuple[int, bytes], torch.Tensor]
"""The replacements in a call, by the id of the replaced tensor and the new bits. One tensor at several places is thus
replaced by one tensor, since a module may test whether its arguments are identical."""


def _described(value: Any, slot: Callable[[torch.Tensor, str], Slot], place: str) -> Any:
    """Returns a copy of a structure with slots in place of tensors. The structure is not modified. For places see
    `mapped`."""
    if isinstance(value, torch.Tensor):
        return slot(value, place)
    found = parts(value, place)
    if found is None:
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        made = copy.copy(value)
        for name in [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]:
            object.__setattr__(made, name, _described(getattr(value, name), slot, f'{place}["{name}"]'))
        return made
    children, spec, places, _ = found
    described = [_described(x, slot, p) for x, p in zip(children, places, strict=True)]
    try:
        return tree_unflatten(described, spec)
    except Exception:  # constructors of classes such as PackedSequence use their tensors, and fail with slots
        return Unwritable(type(value).__name__, described)


def _recorded(x: torch.Tensor) -> str | None:
    """Returns the name of a tensor's dtype in traces, None if traces cannot hold the tensor."""
    return statistics.dtype_name(x.dtype) if x.layout is torch.strided else None
