"""The sites of a step: a program's observations are unfolded into entries, whose calls are numbered and whose inputs
are the entries that they are computed from."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from diptych.jax.jaxprs.bodies import Across, Body, Compound, Leaf, Ref, Refs
from diptych.lab import capture as common
from diptych.lab.traces import Site


@dataclasses.dataclass(eq=False, kw_only=True)
class Observed(Leaf):
    """An observed array. `tap`: the number of its tap, which its gradient shares. `operation`: the operation that
    computed it from the leaves in `refs`, as a trace records it, or None."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    tap: int | None = None
    operation: Any = None


class Found(NamedTuple):
    """An entry. Its arrays begin at position `start` of the extra results; `at`: its indices in the axes of scans,
    shards."""

    site: Site
    start: int
    at: tuple[int, ...]


def unfolded(
    body: Body, flags: Callable[[int], np.ndarray] | None, numbers: list[tuple[Site, int]] | None = None
) -> list[Found]:
    """Returns the entries of a body in order. `numbers`: receives each site with its leaf's number, in the same
    order."""
    emitted, ancestors, calls, open_ = [], [], common.Calls(), collections.defaultdict(list)

    def emit(leaf: Observed, start: int, at: tuple[int, ...], suffix: str, deps: Deps) -> Deps:
        site = calls.site(leaf.kind, leaf.name + suffix, leaf.shape, leaf.dtype, ())  # type: ignore[arg-type]
        if leaf.kind.endswith("_grad"):  # a gradient has the number of the call that made its array
            if not (of := open_[leaf.tap, at, suffix]):
                what = "JAX has moved its activation out of the loop around it, or differentiates twice"
                message = f"capture: leaves out a gradient of {leaf.name}: {what}"
                warnings.warn(message, common.CaptureWarning, stacklevel=2)
                return deps
            site = dataclasses.replace(site, call=of.pop())
        else:
            site = dataclasses.replace(site, operation=leaf.operation)
            open_[leaf.tap, at, suffix].append(site.call)
        emitted.append((Found(site, start, at), leaf.number))
        ancestors.append(deps)
        return frozenset([len(emitted) - 1])

    unfold(body, emit, flags)
    found = []
    for i, inputs in ordered(ancestors):
        entry, number = emitted[i]
        site = dataclasses.replace(entry.site, inputs=tuple(emitted[j][0].site.key for j in inputs))
        found.append((entry._replace(site=site), number))
    found = _parameter_gradients_last(found)
    if numbers is not None:
        numbers += [(f.site, number) for f, number in found]
    return [f for f, _ in found]


def _parameter_gradients_last(found: list[tuple[Found, int]]) -> list[tuple[Found, int]]:
    """Returns the entries with parameters' gradients last, in the parameters' order, unless other sites depend on
    them."""
    ours = {f.site.key for f, _ in found if f.site.kind == "parameter_grad"}
    rest = [x for x in found if x[0].site.key not in ours]
    if any(ours & set(f.site.inputs or ()) for f, _ in found):
        return found
    order = {f.site.name: i for i, (f, _) in reversed(list(enumerate(rest))) if f.site.kind == "parameter"}
    grads = [x for x in found if x[0].site.key in ours]
    return rest + sorted(grads, key=lambda x: (x[0].site.call, order.get(x[0].site.name, len(rest))))


# --- unfolding ---


@dataclasses.dataclass(eq=False)
class Met:
    """The ancestors of one value on several shards. Shards are unfolded in turn; each adds its ancestors to `deps`."""

    deps: set[Any] = dataclasses.field(default_factory=set)


Deps = frozenset[Any]
"""The nearest recorded ancestors of a value: numbers of entries, and a `Met` to which other shards may still add."""


class Stacked(list[Any]):
    """The ancestors of an array with one item for each iteration of a scan."""


Emit = Callable[[Observed, int, tuple[int, ...], str, Deps], Deps]
"""(leaf, position of its arrays, indices into them, suffix of its name, ancestors) -> the set of its entry's number, or
the ancestors if it has no entry."""


@dataclasses.dataclass
class Unfolding:
    """The unfolding of a program. `flags`: returns, by position, the extra results that hold the branch that ran or the
    number of iterations; None unfolds every branch."""

    emit: Emit
    flags: Callable[[int], np.ndarray] | None

    def body(self, body: Body, operands: Sequence[Any], start: int, at: tuple[int, ...], place: _Place) -> list[Any]:
        """Emits all leaves of a body in order. Returns the ancestors of its results."""
        known: dict[Any, Any] = {}

        def one(ref: Ref) -> Any:
            if isinstance(ref, Across):
                return place.met((body, ref), ref.axes, at, _flat(one(ref.ref)))
            return operands[ref] if isinstance(ref, int) else known[ref]

        def of(refs: Refs) -> Any:
            found = [one(r) for r in refs]
            return found[0] if len(found) == 1 else frozenset().union(*map(_flat, found))

        for node in body.nodes:
            if isinstance(node, Observed):
                shared = place.where.keys() - node.axes
                deps, key = place.met(node, shared, at, _flat(of(node.refs))), place.key(node, shared, at)
                if key not in place.emitted:
                    place.emitted[key] = self.emit(node, start + node.start, at, place.suffix(node), deps)
                known[node] = place.emitted[key]
            elif isinstance(node, Compound):
                outs = getattr(self, f"_{node.kind}")(
                    node, [of(r) for r in node.operands], start + node.start, at, place
                )
                known |= {(node, i): out for i, out in enumerate(outs)}
        return [of(refs) for refs in body.outs]

    def _call(self, node: Compound, operands: list[Any], start: int, at: Any, place: _Place) -> list[Any]:
        return self.body(node.bodies[0], operands, start, at, place)

    def _scan(self, node: Compound, operands: list[Any], start: int, at: Any, place: _Place) -> list[Any]:
        (body,), split = node.bodies, node.consts + node.carry
        consts, carry, xs = operands[: node.consts], operands[node.consts : split], operands[split:]
        stacks = [Stacked([frozenset()] * node.length) for _ in body.outs[node.carry :]]
        for i in reversed(range(node.length)) if node.reverse else range(node.length):
            items = [x[i] if isinstance(x, Stacked) and len(x) == node.length else x for x in xs]
            outs = self.body(body, [*consts, *carry, *items], start, (*at, i), place)
            carry = outs[: node.carry]
            for stack, out in zip(stacks, outs[node.carry :], strict=True):
                stack[i] = out
        return [*carry, *stacks]

    def _cond(self, node: Compound, operands: list[Any], start: int, at: Any, place: _Place) -> list[Any]:
        chosen = range(len(node.bodies)) if self.flags is None else [int(self.flags(start)[at])]
        outs = [self.body(node.bodies[b], operands, start + node.first[b], at, place) for b in chosen]
        return [frozenset().union(*map(_flat, of_branches)) for of_branches in zip(*outs, strict=True)]

    def _while(self, node: Compound, operands: list[Any], start: int, at: Any, place: _Place) -> list[Any]:
        """Unfolds the last iteration. Values of earlier iterations have all of the loop's operands as ancestors."""
        consts, state = operands[: node.consts], operands[node.consts :]
        if self.flags is not None and not self.flags(start)[at]:
            return state
        earlier = frozenset().union(*map(_flat, operands))
        outs = self.body(node.bodies[0], [*consts, *[earlier] * len(state)], start + node.first[0], at, place)
        return [earlier | _flat(out) for out in outs]

    def _shard(self, node: Compound, operands: list[Any], start: int, at: Any, place: _Place) -> list[Any]:
        emitted, meetings, outs = {}, {}, []
        for number, where in enumerate(itertools.product(*(range(size) for _, size in node.mesh))):
            names = [axis for axis, _ in node.mesh]
            inner = _Place({**place.where, **dict(zip(names, where, strict=True))}, emitted, meetings, len(at) + 1)
            outs.append(self.body(node.bodies[0], operands, start, (*at, number), inner))
        return [frozenset().union(*map(_flat, of_shards)) for of_shards in zip(*outs, strict=True)]


@dataclasses.dataclass
class _Place:
    """The shard that is being unfolded: `where` has its index by mesh axis. `emitted`: the results of `emit`.
    `meetings`: ancestors to which several shards add. `depth`: the number of a leaf's leading indices up to the shard's
    own."""

    where: dict[str, int]
    emitted: dict[Any, Deps]
    meetings: dict[Any, Met]
    depth: int = 0

    def key(self, what: Any, shared: Iterable[str], at: tuple[int, ...]) -> Any:
        """Returns a key of the value `what`, equal for all shards along the axes `shared`."""
        return what, at[self.depth :], tuple((axis, i) for axis, i in self.where.items() if axis not in shared)

    def met(self, what: Any, shared: Set[str], at: tuple[int, ...], deps: Deps) -> Deps:
        """Adds `deps`, this shard's ancestors of the value `what`, to those of the shards along the axes `shared`.
        Returns all of them, or `deps` if there are no such axes."""
        if shared.isdisjoint(self.where):
            return deps
        found = self.meetings.setdefault(self.key(what, shared, at), Met())
        found.deps |= deps
        return frozenset([found])

    def suffix(self, leaf: Observed) -> str:
        found = ",".join(f"{axis}={i}" for axis, i in self.where.items() if axis in leaf.axes)
        return f"@{found}" if found else ""


def unfold(body: Body, emit: Emit, flags: Callable[[int], np.ndarray] | None) -> None:
    """Emits a program's leaves in the order of computation, one shard after the other."""
    nothing: Deps = frozenset()
    operands = [nothing] * (1 + max((r for b in [body] for r in _operands(b)), default=-1))
    Unfolding(emit, flags).body(body, operands, 0, (), _Place({}, {}, {}))


def ordered(deps: Sequence[Deps]) -> Iterator[tuple[int, list[int]]]:
    """Yields each entry's number and its ancestors' numbers. Every entry follows its ancestors; otherwise the order is
    that of numbers.

    **Arguments:** `deps`: the ancestors of each entry, by its number.
    """
    ancestors, done = [_numbers(d) for d in deps], {}
    for number in range(len(deps)):
        todo = [number]
        while todo:
            if missing := [] if todo[-1] in done else [a for a in ancestors[todo[-1]] if a not in done]:
                todo += sorted(missing, reverse=True)
            elif (n := todo.pop()) not in done:
                done[n] = len(done)
                yield n, sorted(ancestors[n], key=done.__getitem__)


def _numbers(deps: Deps) -> set[int]:
    """Returns the numbers of entries among ancestors, including those that other shards have added."""
    found, seen, todo = set(), set(), list(deps)
    while todo:
        if not isinstance(one := todo.pop(), Met):
            found.add(one)
        elif one not in seen:
            seen.add(one)
            todo += one.deps
    return found


def _operands(body: Body) -> list[int]:
    refs = [n.refs for n in body.nodes if isinstance(n, Leaf)]
    refs += [r for n in body.nodes if isinstance(n, Compound) for r in n.operands]
    origins = (r.ref if isinstance(r, Across) else r for some in (*refs, *body.outs) for r in some)
    return [r for r in origins if isinstance(r, int)]


def _flat(deps: Any) -> Deps:
    return frozenset().union(*map(_flat, deps)) if isinstance(deps, Stacked) else deps
