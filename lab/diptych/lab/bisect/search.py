"""Finds the first module of B that makes a difference when it is given A's values.

B runs, and the output of every matched module is replaced by A's once B has computed its own. B's own output is thus a
function of A's values alone, and differs from A's for one reason: the module, or the code between it and the modules
before it. Further passes, in which all fed values are moved by one ulp, measure how much rounding can contribute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from diptych.lab.bisect.forward import CODE_FAILS, BisectError, Feeder, Forward, Inputs, ModuleCall, Slot
from diptych.lab.diff import match, names
from diptych.lab.diff.layout import Axes
from diptych.lab.diff.mapping import Rules
from diptych.lab.diff.order import unique_alignment
from diptych.lab.diff.result import Ambiguous
from diptych.lab.traces import DTYPES, Observation, Tensor, Trace, tensor_distance
from diptych.lab.traces.dtypes import DType

PASSES = 4
"""The number of passes with values moved by one ulp."""
_NAMED = 8
FACTOR = 8.0
"""The largest ratio, between two implementations, of a difference to the effect of one ulp."""

PLAIN = (bool, int, float, str, type(None))
"""The types of arguments that `==` compares."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two models of a bisection, with its arguments.

    `name`: "A" or "B". `factory`: the factory as the user named it. `feeder`: runs the model. `folder`: its trace's
    folder.
    """

    name: str
    factory: str
    framework: str
    feeder: Feeder
    inputs: Inputs
    folder: pathlib.Path

    def capture(self) -> tuple[Trace, list[str]]:
        """Returns the trace of a forward pass, and module outputs that no trace can hold. **Raises** BisectError if it
        fails."""
        with self._named():
            unseen = self.feeder.capture(self.inputs, self.folder)
        return Trace.open(self.folder), unseen

    def run(
        self,
        fed: Mapping[str, Tensor],
        inside: Sequence[str] = (),
        inputs: Inputs | None = None,
        ops: str | None = None,
    ) -> Forward:
        """Returns a forward pass; see `Feeder`. **Raises** BisectError if the model fails."""
        with self._named():
            return self.feeder(inputs or self.inputs, fed, inside, ops)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except CODE_FAILS as e:
            raise BisectError(
                f"{self.name} ({self.factory}) cannot be run in {self.framework} on the inputs: {type(e).__name__}: {e}"
            ) from e


@dataclasses.dataclass(frozen=True)
class Site:
    """A pair of module outputs. `local`: the relative rms of the difference between A's output and B's output on A's
    values. `noise`: the largest such difference between B's outputs with moved values and without. `limit`: the largest
    difference that rounding explains."""

    pair: match.Pair
    local: float
    noise: float
    limit: float

    @property
    def differs(self) -> bool:
        return not self.local <= self.limit


class Input(NamedTuple):
    """A pair of inputs of the module. `relative`: the distance from A's input to B's, which B's code before the module
    computes from A's values."""

    a: str
    b: str
    relative: float
    differs: bool


class Found(NamedTuple):
    """The first site that makes a difference.

    `a`, `b`: the calls of the module, None if they are not known. `inputs`: the module's inputs. `others`: keys of B's
    inputs without a partner in A, which keep B's values. `itself`: whether the module differs on equal inputs, None if
    it could not be called on them; if it does not, the code between it and the modules before it makes the difference.
    `around`: the calls in A and B that contain this code: the innermost enclosing calls whose inputs agree; None if the
    module itself differs, or if no module contains the code. `calls`: the forward passes of A and B.
    """

    site: Site
    a: ModuleCall | None
    b: ModuleCall | None
    inputs: tuple[Input, ...]
    others: tuple[str, ...]
    itself: bool | None
    around: tuple[ModuleCall, ModuleCall] | None
    calls: tuple[Forward, Forward]


class Outcome(NamedTuple):
    """The result of `search`. `fed`: the values fed into B, by key. `sites`: in the order of A's computation.
    `unmatched_a`, `unmatched_b`: keys of outputs without a partner. `shapes`: whether some of these have one name and
    different shapes, a difference that feeding does not show."""

    sites: tuple[Site, ...]
    found: Found | None
    fed: Mapping[str, Tensor]
    unmatched_a: tuple[str, ...]
    unmatched_b: tuple[str, ...]
    ambiguous: tuple[Ambiguous, ...]
    notes: tuple[str, ...]
    shapes: bool = False


def search(a: Side, b: Side, rules: Rules | None) -> Outcome:
    """Feeds A's values into B and returns the outcome. **Raises** BisectError if a model fails, or if no output of A's
    modules is matched with one of B's."""
    (trace_a, unseen_a), (trace_b, unseen_b) = a.capture(), b.capture()
    seen = [_observations(trace) for trace in (trace_a, trace_b)]
    if rules is not None:
        rules.check(*([o.site for o in side] for side in seen))
    matching = match.match(seen[0], seen[1], (a.framework, b.framework), rules)
    pairs = [p for p in matching.pairs if p.a.kind == "activation" and _alike(p)]
    if not pairs:
        raise BisectError(
            f"no module output of {a.factory} was matched with one of {b.factory}; say by a file for --map which names "
            "are the same"
        )
    values = {o.site.key: o for o in seen[0]}
    of_a = {p.a.key: _values(values[p.a.key]) for p in pairs}
    silent = [key for key, x in of_a.items() if not _has_numbers(x)]
    if len(silent) == len(of_a):
        raise BisectError(
            "no module output of A has a finite element; give --inputs on which the model computes numbers"
        )
    fed = {p.b.key: _fed(of_a[p.a.key], p) for p in pairs}
    sites = _measured(b, pairs, of_a, fed)
    first = next((site for site in sites if site.differs), None)
    found = None if first is None else _narrowed(a, b, first, sites, of_a, fed)
    taken = {p.a.key for p in pairs}, {p.b.key for p in pairs}
    alone = [
        tuple(o.site.key for o in side if o.site.kind == "activation" and o.site.key not in keys)
        for side, keys in zip(seen, taken, strict=True)
    ]
    listed = {key for each in matching.ambiguous for key in (*each.a, *each.b)}
    alone = [tuple(key for key in keys if key not in listed) for keys in alone]
    notes = [*matching.notes, *_not_compared("A", unseen_a), *_not_compared("B", unseen_b)]
    if silent:
        notes.append(f"outputs of A without a finite element, which show no difference: {names.few(silent, _NAMED)}")
    shapes = matching.differs and bool(alone[0]) and bool(alone[1])
    return Outcome(tuple(sites), found, fed, alone[0], alone[1], tuple(matching.ambiguous), tuple(notes), shapes)


def _not_compared(side: str, unseen: Sequence[str]) -> list[str]:
    """Returns a note about module outputs that traces cannot hold."""
    said = "has outputs of modules that traces cannot hold; they are not compared, and count as code between others"
    return [f"{side} {said}: {names.few(unseen, _NAMED)}"] if unseen else []


def _observations(trace: Trace) -> list[Observation]:
    if not trace.steps:
        raise BisectError(f"{trace.folder}: nothing was recorded; the model must call modules")
    return [o for o in trace.ranks[0].step(trace.steps[0]) if o.site.kind in ("activation", "parameter")]


def _alike(pair: match.Pair) -> bool:
    """Returns whether both tensors are floats, or neither is."""
    return (DTYPES[pair.a.dtype].kind == "float") == (DTYPES[pair.b.dtype].kind == "float")


def _has_numbers(x: Tensor) -> bool:
    return bool(np.isfinite(array(x).astype(np.float64)).any())


def _values(o: Observation) -> Tensor:
    if o.values is None or not o.values.whole:
        raise BisectError(f"{o.site.key}: the trace could not keep all of its values; give smaller --inputs")
    return o.values.tensor


# --- differences and noise ---


def _measured(
    b: Side, pairs: Sequence[match.Pair], of_a: Mapping[str, Tensor], fed: Mapping[str, Tensor]
) -> list[Site]:
    local = b.run(fed).values
    noise = dict.fromkeys(fed, 0.0)
    for seed in range(PASSES):
        rng = np.random.default_rng(seed)
        moved_inputs = Inputs(
            tuple(_moved_array(x, rng) for x in b.inputs.args),
            {name: _moved_array(x, rng) for name, x in b.inputs.kwargs.items()},
        )
        again = b.run({p.b.key: _moved_fed(of_a[p.a.key], p, rng) for p in pairs}, inputs=moved_inputs).values
        for key in noise:
            if key in local:
                noise[key] = max(noise[key], distance(local[key], again[key]) if key in again else math.inf)
    return [_site(p, of_a[p.a.key], local.get(p.b.key), noise[p.b.key]) for p in pairs]


def _site(pair: match.Pair, a: Tensor, local: Tensor | None, noise: float) -> Site:
    rounding = max(DTYPES[pair.a.dtype].half_ulp, DTYPES[pair.b.dtype].half_ulp)
    return Site(pair, _local(pair, a, local), noise, FACTOR * max(noise, rounding))


def _local(pair: match.Pair, a: Tensor, b: Tensor | None) -> float:
    """Returns the distance from A's output to B's; inf if B did not compute it, because values decide which modules
    run."""
    return math.inf if b is None else distance(a, as_a(b, pair.a.shape, pair.axes))


def distance(a: Tensor, b: Tensor) -> float:
    """Returns the rms of b - a divided by the rms of a; inf if an element is not finite in one of them and not equal in
    the other."""
    found = tensor_distance(a, b).relative
    return 0.0 if found is None else found  # tensors without elements have no distance


def moved(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Returns a tensor with each finite nonzero element moved one ulp up or down at random; integers are unchanged."""
    dtype, bits = x
    if dtype.kind != "float" or not dtype.signed:
        return x
    sign = np.array(1 << (8 * dtype.nbytes - 1), bits.dtype)
    magnitude = bits & ~sign
    up = rng.integers(0, 2, bits.shape, np.uint8).astype(bool)
    step = np.where(up & (magnitude < dtype.largest), magnitude + 1, magnitude - 1).astype(bits.dtype)
    movable = (magnitude > 0) & (magnitude <= dtype.largest)
    return Tensor(dtype, np.where(movable, step | (bits & sign), bits))


def _moved_array(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return moved(Tensor.of(x), rng).bits.view(x.dtype)


# --- A's values in B's layout, and the reverse ---


def as_a(b: Tensor, shape: tuple[int, ...], axes: Axes | None) -> Tensor:
    """Returns B's tensor in A's layout. `axes`: the axes of B's tensor in the order of A's, None for the same order."""
    bits = b.bits.reshape(shape) if axes is None else b.bits.transpose(axes)
    return Tensor(b.dtype, np.ascontiguousarray(bits).reshape(shape))


def as_b(a: Tensor, shape: tuple[int, ...], axes: Axes | None, dtype: DType) -> Tensor:
    """Returns A's tensor in B's layout and dtype."""
    bits = a.bits.reshape(shape) if axes is None else a.bits.transpose(np.argsort(axes))
    return cast(Tensor(a.dtype, np.ascontiguousarray(bits).reshape(shape)), dtype)


def _fed(a: Tensor, pair: match.Pair) -> Tensor:
    return as_b(a, pair.b.shape, pair.axes, DTYPES[pair.b.dtype])


def _moved_fed(a: Tensor, pair: match.Pair, rng: np.random.Generator) -> Tensor:
    """Returns A's tensor in B's layout and dtype, moved by one ulp of the coarser dtype, since a coarser A rounds
    inside of its modules too."""
    coarser = a.dtype.half_ulp > DTYPES[pair.b.dtype].half_ulp
    return _fed(moved(a, rng), pair) if coarser else moved(_fed(a, pair), rng)


def cast(x: Tensor, dtype: DType) -> Tensor:
    """Returns a tensor in another dtype, rounded to nearest."""
    if x.dtype == dtype:
        return x
    numbers = array(x)
    if dtype.kind == "float":
        numbers = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        return Tensor.of(numbers.astype(numpy_dtype(dtype)))


def array(x: Tensor) -> np.ndarray:
    """Returns a tensor as an array of numbers, with a dtype of ml_dtypes if NumPy has none."""
    return x.bits.view(numpy_dtype(x.dtype))


def numpy_dtype(dtype: DType) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype.name, dtype.name))


# --- the module that makes the difference ---


def _narrowed(
    a: Side, b: Side, first: Site, sites: Sequence[Site], of_a: Mapping[str, Tensor], fed: Mapping[str, Tensor]
) -> Found:
    """Returns the module of a site, and whether it makes the difference itself when its inputs are A's."""
    passes, calls = [], []
    for side, site, given in ((a, first.pair.a, {}), (b, first.pair.b, fed)):
        passes.append(side.run(given, enclosing(site.name)))
        calls.append(next((c for c in passes[-1].calls if site.key in c.outputs), None))
    call_a, call_b = calls
    runs = passes[0], passes[1]
    inputs: list[Input] = []
    others: list[str] = []
    itself = around = None
    if call_a is not None and call_b is not None:
        inputs, given = _compared(runs, (call_a, call_b), first)
        others = [s.key for s in slots(call_b) if s.key not in given]
        if given:
            again = b.run({**fed, **given}, enclosing(first.pair.b.name)).values.get(first.pair.b.key)
            differs = _local(first.pair, of_a[first.pair.a.key], again) > first.limit
            itself = None if differs and others else differs
        elif without_arrays(call_a, call_b):
            itself = True
        if itself is False:
            around = _around(runs, (call_a, call_b), first)
    return Found(first, call_a, call_b, tuple(inputs), tuple(others), itself, around, runs)


def _compared(
    runs: tuple[Forward, Forward], calls: tuple[ModuleCall, ModuleCall], first: Site
) -> tuple[list[Input], dict[str, Tensor]]:
    """Returns the matched inputs of a module, and A's values of them in B's layout and dtype, by B's keys."""
    pairs = paired_inputs(runs[0], calls[0], runs[1], calls[1], first.pair.axes)
    given = dict((y.key, x) for y, x in paired_values(runs, pairs, first.pair.axes))
    inputs = []
    for x, y in pairs:
        of_y = runs[1].values[y.key]
        relative = distance(given[y.key], of_y)
        rounding = max(runs[0].values[x.key].dtype.half_ulp, of_y.dtype.half_ulp)
        inputs.append(Input(x.key, y.key, relative, not relative <= max(first.limit, FACTOR * rounding)))
    return inputs, given


def _around(
    runs: tuple[Forward, Forward], calls: tuple[ModuleCall, ModuleCall], first: Site
) -> tuple[ModuleCall, ModuleCall] | None:
    """Returns the innermost enclosing calls in A and B whose inputs agree; at the outermost level the calls of the
    whole models. Returns None if there is no whole model, since in JAX a function may run several modules."""
    a, b = calls
    while a.parent is not None and b.parent is not None:
        a, b = runs[0].calls[a.parent], runs[1].calls[b.parent]
        inputs, _ = _compared(runs, (a, b), first)
        if without_arrays(a, b) or (inputs and not any(given.differs for given in inputs)):
            return a, b
    roots = [[c for c in run.calls if c.parent is None] for run in runs]
    whole = all(len(of) == 1 and not of[0].path for of in roots)
    return (roots[0][0], roots[1][0]) if whole else None


def without_arrays(a: ModuleCall, b: ModuleCall) -> bool:
    """Returns whether two calls have equal arguments without any arrays."""
    given = [(call.args, dict(call.kwargs)) for call in (a, b)]
    return all(map(_plain, given)) and given[0] == given[1]


def _plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    return all(map(_plain, value)) if type(value) in (tuple, list) else type(value) in PLAIN  # type: ignore[arg-type]


def enclosing(name: str) -> list[str]:
    """Returns the paths of modules around an output, from the whole model ("") to the module with the output `name`."""
    path = path_of(name)
    return ["", *(path[:i] for i, c in enumerate(path) if c in "./"), path]


def path_of(name: str) -> str:
    """Returns the path of the module that has the output `name`."""
    place = names.split(name).place
    return name[: len(name) - len(place)] if place else name


def slots(call: ModuleCall) -> list[Slot]:
    """Returns the slots of arrays in a call's arguments, in order."""
    found: list[Slot] = []

    def add(value: object) -> None:
        if isinstance(value, Slot):
            found.append(value)
        elif isinstance(value, Mapping):
            for x in value.values():
                add(x)
        elif isinstance(value, (tuple, list)):
            for x in value:
                add(x)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            add([getattr(value, f.name, None) for f in dataclasses.fields(value)])

    add(call.args)
    add(call.kwargs)
    return found


def paired_inputs(
    a: Forward, call_a: ModuleCall, b: Forward, call_b: ModuleCall, axes: Axes | None
) -> list[tuple[Slot, Slot]]:
    """Returns the pairs of a module's inputs in A and B that match by shape and order; none if there are several
    ways."""
    sides = [[s for s in slots(call) if s.key in run.values] for call, run in ((call_a, a), (call_b, b))]
    shapes = [[_shape(run.values[s.key], None) for s in side] for side, run in zip(sides, (a, b), strict=True)]
    pairs = unique_alignment(*shapes)
    if not pairs and axes is not None:  # the inputs may be images whose channels are on different axes
        turned = [_shape(b.values[s.key], axes) for s in sides[1]]
        pairs = unique_alignment(shapes[0], turned)
    return [(sides[0][i], sides[1][j]) for i, j in pairs or ()]


def paired_values(
    runs: tuple[Forward, Forward], pairs: Sequence[tuple[Slot, Slot]], axes: Axes | None
) -> Iterator[tuple[Slot, Tensor]]:
    """Yields B's slot of each pair with A's value in B's layout and dtype. `axes`: B's image axes in the order of
    A's."""
    for x, y in pairs:
        of_x, of_y = runs[0].values[x.key], runs[1].values[y.key]
        turned = None if of_x.bits.shape == of_y.bits.shape else axes
        yield y, as_b(of_x, of_y.bits.shape, turned, of_y.dtype)


def _shape(x: Tensor, axes: Axes | None) -> tuple[object, ...]:
    """Returns a token that two inputs must share to match. `axes`: the axes of an image in the order of A's."""
    shape = x.bits.shape
    shape = tuple(shape[i] for i in axes) if axes is not None and len(axes) == len(shape) else shape
    return (x.dtype.kind == "float", *shape)
