"""Forward passes of a JAX model in which outputs and inputs of modules are recorded and replaced, for a bisection."""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.errors import UnsupportedError
from diptych.jax.jaxprs.arguments import Call, copied_nodes, is_node
from diptych.jax.jaxprs.bodies import Body, Compound
from diptych.jax.primitives.quantize import dtype_of
from diptych.lab import capture as rules
from diptych.lab.bisect.forward import Forward, Inputs, ModuleCall, Slot, within
from diptych.lab.jax.capture import capture
from diptych.lab.jax.compiled import unwrapped
from diptych.lab.jax.observe import Observer
from diptych.lab.jax.sites import unfolded
from diptych.lab.jax.structures import described
from diptych.lab.jax.taps import Tracing, is_site
from diptych.lab.replay.table import TABLE
from diptych.lab.traces import Site, Tensor, is_recorded

Array = jax.Array
_BUDGET = 2**61  # bytes, enough to keep all values whole


class Feeder:
    """A feeder of a JAX model; see `diptych.lab.bisect.forward.Feeder`. `model`: a function, or a linen, nnx or equinox
    module."""

    def __init__(self, model: Callable[..., Any], device: Any) -> None:
        self._fn, self._first = (_called, (model,)) if is_node(model) else (model, ())
        self._device = device
        self._programs: dict[tuple[frozenset[str], str | None], _Program] = {}

    def capture(self, inputs: Inputs, folder: pathlib.Path) -> list[str]:
        with (
            jax.default_device(self._device),
            capture(self._fn, folder, values="full", budget=_BUDGET, statistics=False, check=False) as run,
        ):
            # The model is copied, since a call changes its counts of random numbers and all passes need the same.
            run(*copied_nodes(list(self._first)), *inputs.args, **inputs.kwargs)
        with self._program(inputs, frozenset(), None) as (program, _):
            return list(program.unseen)

    def __call__(
        self, inputs: Inputs, fed: Mapping[str, Tensor], inside: Collection[str] = (), ops: str | None = None
    ) -> Forward:
        with self._program(inputs, frozenset(inside), ops) as (program, arrays):
            return program(arrays, fed)

    @contextlib.contextmanager
    def _program(
        self, inputs: Inputs, inside: frozenset[str], ops: str | None
    ) -> Iterator[tuple[_Program, Sequence[Any]]]:
        """Yields the traced model and its arrays."""
        args, kwargs = (*self._first, *inputs.args), dict(inputs.kwargs)
        with jax.default_device(self._device), Call(args, kwargs) as call:
            if (inside, ops) not in self._programs:
                self._programs[inside, ops] = _Program(self._fn, call, inside, ops)
            yield self._programs[inside, ops], call.arrays


def _called(model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `model`. An object of nnx must be an argument, since functions may not change objects that they close
    over."""
    return model(*args, **kwargs)


class _Entry(NamedTuple):
    """A site, the numbers of its leaf and tap, the position of its array among the observations, and the index in
    it."""

    site: Site
    number: int
    tap: int | None
    start: int
    at: tuple[int, ...]


class _Tracing(Tracing):
    """The tracing of a model. `unseen`: the module outputs that no trace can hold, each with its dtype."""

    def __init__(self, inside: frozenset[str], functions: bool) -> None:
        super().__init__("**", functions, inside)
        self.unseen: dict[str, None] = {}

    def _tap(self, x: Any, name: str, kind: str, grad: str = "", number: int | None = None) -> Any:
        if kind == "activation" and isinstance(x, jax.Array) and not is_recorded(str(x.dtype)):
            self.unseen[f"{name} ({x.dtype})"] = None
        return super()._tap(x, name, kind, grad, number)

    def _inputs(self, frame: Any, args: Any, kwargs: Any) -> Any:
        tapped = super()._inputs(frame, args, kwargs)
        call, key = self.calls[-1], f"operand:{rules.named(frame.path)}/call:{frame.number}"

        def unseen(value: Any, place: str) -> tuple[Any, Slot] | None:
            """Returns a slot without a value for a random key or an object with arrays in its fields, else None."""
            held = not isinstance(value, Slot) and any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))
            return (value, Slot(rules.printable(key + place))) if held else None

        slots = described(call.args, unseen)[1], described(call.kwargs, unseen)[1]
        self.calls[-1] = call._replace(args=slots[0], kwargs=slots[1])
        return tapped


class _Program:
    """One traced model. `unseen`: the module outputs that no trace can hold, each with its dtype."""

    def __init__(self, fn: Callable[..., Any], call: Call, inside: frozenset[str], ops: str | None) -> None:
        tracing = _Tracing(inside, ops is not None)
        self._ops = ops
        with tracing():
            closed = jax.jit(call.flat(fn, tracing, lambda _: None)).trace(*call.arrays).jaxpr
        self._closed, self._picked, _ = unwrapped(closed)
        self._calls, self._outputs, self.unseen = tracing.calls, tracing.outputs, tracing.unseen
        self._run = jax.jit(self._instrumented)
        jax.eval_shape(self._instrumented, call.arrays, {})

    def __call__(self, arrays: Sequence[Any], fed: Mapping[str, Tensor]) -> Forward:
        if fed and (found := next((kind for kind in _kinds(self._body) if kind in _UNFED), None)):
            raise UnsupportedError(
                f"bisect: activations inside of {_UNFED[found]} cannot be replaced; call the modules outside of it"
            )
        observed = [np.asarray(x) for x in self._run(list(arrays), self._stacks(fed))]
        entries = self._entries(lambda position: observed[position])
        values = {e.site.key: _tensor(observed[e.start][e.at]) for e in entries}
        kept = {key: x for key, x in values.items() if not key.startswith("parameter:")}
        results = [e.site for e in entries if e.site.kind == "result"]
        return Forward(kept, _calls(self._calls, self._outputs, entries), results)

    def _instrumented(self, arrays: Sequence[Any], given: Mapping[int, tuple[Array, Array]]) -> list[Array]:
        """Returns the observed arrays. `given`: the iterations of replacements and their values, by the numbers of
        leaves."""

        def replace(x: Array, number: int, at: tuple[Array, ...]) -> Array:
            if number not in given:
                return x
            where, values = given[number]
            return jnp.where(where[at], values[at], x)

        args = [arrays[i] if i is not None else value for i, value in self._picked]
        of_jax = self._ops is not None
        observer = Observer(self._is_site, lambda x, *_: [x], False, rules.operation, of_jax, replace)
        _, extras, self._body = observer.program(self._closed, args)
        return extras

    def _is_site(self, name: str, dtype: str) -> bool:
        """Returns whether an array is observed. Of all operations, only those in the module `self._ops` are
        observed."""
        path, _, what = name.rpartition("/")
        op, dot, _ = what.partition(".")
        here = self._ops is not None and within(path, self._ops)
        return is_site("**", name, dtype) and (here or not dot or op not in TABLE)

    def _entries(self, flags: Callable[[int], np.ndarray] | None) -> list[_Entry]:
        numbers: list[tuple[Site, int]] = []
        found = unfolded(self._body, flags, numbers)
        taps = {leaf.number: leaf.tap for leaf in self._body.leaves()}
        return [_Entry(f.site, n, taps[n], f.start, f.at) for f, (_, n) in zip(found, numbers, strict=True)]

    def _stacks(self, fed: Mapping[str, Tensor]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Returns `given` for `_instrumented`. It has an item for every leaf, so that the program is compiled once."""
        by_leaf: dict[int, list[_Entry]] = collections.defaultdict(list)
        for entry in self._entries(None):
            by_leaf[entry.number].append(entry)
        stacks = {}
        for number, entries in by_leaf.items():
            dims = tuple(1 + max(places) for places in zip(*(e.at for e in entries), strict=True))
            where = np.zeros(dims, bool)
            values = np.zeros((*dims, *entries[0].site.shape), dtype_of(entries[0].site.dtype))
            for e in entries:
                if e.site.key in fed:
                    where[e.at], values[e.at] = True, fed[e.site.key].bits.view(values.dtype)
            stacks[number] = where, values
        return stacks


_UNFED = {"cond": "cond", "while": "a while loop", "shard": "shard_map"}


def _kinds(body: Body) -> set[str]:
    """Returns the kinds of equations whose bodies contain sites."""
    compounds = [n for n in body.nodes if isinstance(n, Compound)]
    return {c.kind for c in compounds}.union(*(_kinds(b) for c in compounds for b in c.bodies))


def _tensor(x: np.ndarray) -> Tensor:
    return Tensor.of(np.ascontiguousarray(x).reshape(x.shape))


def _calls(
    traced: Sequence[ModuleCall], outputs: Mapping[int, Sequence[int]], entries: Sequence[_Entry]
) -> list[ModuleCall]:
    """Returns the calls that are part of the program: those with an observed array.

    **Arguments:** `outputs`: the numbers of the taps on a call's outputs, by the position of the call.
    """
    sites = {e.site.key: e for e in entries}
    by_tap: dict[int | None, list[_Entry]] = collections.defaultdict(list)
    for entry in entries:
        by_tap[entry.tap].append(entry)
    count: collections.Counter[str] = collections.Counter()
    position: dict[int, int] = {}
    found: list[ModuleCall] = []
    for number, call in enumerate(traced):
        given = [sites[s.key] for s in _slots((call.args, call.kwargs)) if s.key in sites]
        returned = [e for tap in outputs.get(number, ()) for e in by_tap[tap]]
        if not given and not returned:
            continue
        position[number] = len(found)
        slots = {s.key: s for s in _slots((call.args, call.kwargs))}
        mapped = {e.site.key: Slot(e.site.key, len(e.site.shape) - slots[e.site.key].mapped) for e in given}
        args, kwargs = _with((call.args, call.kwargs), mapped)
        found.append(
            call._replace(
                call=count[call.path],
                args=args,
                kwargs=kwargs,
                parent=None if call.parent is None else position.get(call.parent),
                outputs=tuple(e.site.key for e in returned),
                repeats=any(e.at for e in (*given, *returned)),
            )
        )
        count[call.path] += 1
    return found


def _slots(value: Any) -> list[Slot]:
    if isinstance(value, Slot):
        return [value]
    inner = value.values() if type(value) is dict else value if type(value) in (tuple, list) else ()
    return [slot for x in inner for slot in _slots(x)]


def _with(value: Any, slots: Mapping[str, Slot]) -> Any:
    if isinstance(value, Slot):
        return slots.get(value.key, value)
    if type(value) is dict:
        return {k: _with(x, slots) for k, x in value.items()}
    return type(value)(_with(x, slots) for x in value) if type(value) in (tuple, list) else value
