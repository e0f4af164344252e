"""Matches the sites of A with those of B: by the rules of a map, by names, by the bits of parameters, by order, and for
two frameworks by what operations compute (`operations`).

Each stage takes sites that the earlier stages left, and only pairs without an alternative. Sites that could be matched
in several ways are listed as ambiguous; nothing is guessed. Gradients are matched as the tensors that they belong to.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diptych.lab.capture import MODEL
from diptych.lab.diff import bits, layout, names, operations
from diptych.lab.diff.layout import Axes
from diptych.lab.diff.mapping import Rules
from diptych.lab.diff.order import unique_alignment
from diptych.lab.diff.result import Ambiguous, DiffError, Matched
from diptych.lab.traces import Observation, Site
from diptych.lab.traces.schema import Kind

_GRADS: Mapping[Kind, Kind] = {"activation_grad": "activation", "parameter_grad": "parameter"}


class Pair(NamedTuple):
    """Two matched sites. `axes`: the axes of b in the order of a's; None if both have the same order."""

    a: Site
    b: Site
    by: Matched
    axes: Axes | None


class Matching(NamedTuple):
    """The result of `match`. `pairs`: in the order of A. `unmatched_a`, `unmatched_b`: the other sites, including those
    with one name whose shapes differ. `differs`: whether some of these shapes are explained by no layout. `notes`:
    remarks for the user."""

    pairs: list[Pair]
    unmatched_a: list[Site]
    unmatched_b: list[Site]
    ambiguous: list[Ambiguous]
    notes: list[str]
    differs: bool


def match(
    a: Sequence[Observation], b: Sequence[Observation], frameworks: tuple[str, str], rules: Rules | None
) -> Matching:
    """Matches the sites of two traces.

    **Arguments:** `a`, `b`: one observation of each site, in the order of computation, from the first common step that
    recorded it; the bits of parameters are compared there. `frameworks`: A's and B's.

    **Raises** DiffError if rules contradict the traces.
    """
    found = _Matcher(a, b, frameworks[0] == frameworks[1])
    found.vote()
    for grads in (False, True):
        if grads:
            found.follow()
        if rules is not None:
            found.by_rules(rules, grads)
        if not grads:
            found.set_functions_aside()
        found.by_names("name", lambda site: names.split(site.name), grads)
        found.by_names("table", names.common, grads)
        if not grads:
            found.by_bits()
            found.by_modules()
            found.by_order()
            found.by_operations()
    return found.result()


class _Matcher:
    def __init__(self, a: Sequence[Observation], b: Sequence[Observation], same_framework: bool) -> None:
        self._all = {o.site.key: o for o in a}, {o.site.key: o for o in b}
        self._left = {k: o.site for k, o in self._all[0].items()}, {k: o.site for k, o in self._all[1].items()}
        self._same_framework = same_framework
        self._functions: tuple[dict[str, Site], ...] = ({}, {})
        if not same_framework:  # two frameworks' operations are matched by their kinds and operands, not by names
            for functions, left in zip(self._functions, self._left, strict=True):
                functions.update({k: s for k, s in left.items() if operations.is_function(s)})
        self._pairs: dict[str, Pair] = {}
        self._ambiguous: list[Ambiguous] = []
        self._votes: dict[Hashable, set[Hashable]] = collections.defaultdict(set)
        self._other_shapes: list[tuple[Site, Site]] = []
        self._flipped: dict[tuple[str, str], bool] = {}

    def result(self) -> Matching:
        order = {key: i for i, key in enumerate(self._all[0])}
        pairs = sorted(self._pairs.values(), key=lambda p: order[p.a.key])
        notes = []
        shown: dict[bool, list[str]] = {False: [], True: []}
        for a, b in self._other_shapes:
            otherwise = layout.held_otherwise(a, b) or self._is_flipped(a, b)
            shown[otherwise].append(f"{a.key} {list(a.shape)} and {list(b.shape)}")
        if shown[False]:
            notes.append(f"sites with the same name have other shapes, which is a finding: {names.few(shown[False])}")
        if shown[True]:
            notes.append(f"sites with the same name are held otherwise and not compared: {names.few(shown[True])}")
        apart = [{pair[i].key for pair in self._other_shapes} for i in range(2)]
        alone = [
            [o.site for key, o in side.items() if key in left or key in other]
            for side, left, other in zip(self._all, self._left, apart, strict=True)
        ]
        flat = [p.a.key for p in pairs if p.axes is None and _longer(p.a.shape) != _longer(p.b.shape)]
        if flat:
            notes.append(f"tensors whose axes are merged in one trace are compared flat: {names.few(flat)}")
        return Matching(pairs, alone[0], alone[1], self._ambiguous, notes, bool(shown[False]))

    def _sides(self, grads: bool) -> tuple[list[Site], list[Site]]:
        """Returns the unmatched sites of A and of B: the gradients, or all others."""
        a, b = ([s for s in left.values() if (s.kind in _GRADS) == grads] for left in self._left)
        return a, b

    def _parts_of_gradient(self, pair: Pair) -> tuple[list[Site], list[Site]] | None:
        """Returns further gradients of A and of B that belong to a pair. A module may return one tensor at several
        places, each with a gradient, while the other trace's module returns it once, with the sum of these gradients.
        Returns None otherwise."""
        places = [names.split(s.name).place for s in (pair.a, pair.b)]
        if pair.a.kind != "activation" or (places[0] == "") == (places[1] == ""):
            return None
        found: tuple[list[Site], list[Site]] = ([], [])
        i = int(places[0] == "")
        one = self._all[i][(pair.a, pair.b)[i].key]
        for o in self._all[i].values() if one.record.hash is not None else ():
            same = (o.site.kind, o.site.call, o.record.hash) == ("activation", one.site.call, one.record.hash)
            if same and o is not one and names.split(o.site.name).path == names.split(one.site.name).path:
                found[i].extend(filter(None, [self._left[i].get(_key("activation_grad", o.site))]))
        return found if found[i] else None

    # --- taking pairs ---

    def _take(self, a: Site, b: Site, by: Matched, axes: Axes | None) -> None:
        self._pairs[a.key] = Pair(a, b, by, axes)
        self._drop(a, b)

    def _drop(self, a: Site, b: Site) -> None:
        del self._left[0][a.key], self._left[1][b.key]

    def _list(self, a: Sequence[Site], b: Sequence[Site], why: str) -> None:
        """Lists sites as ambiguous, with their gradients."""
        keys: list[tuple[str, ...]] = []
        for left, sites in zip(self._left, (a, b), strict=True):
            grads = [_key(grad, s) for s in sites for grad, kind in _GRADS.items() if s.kind == kind]
            keys.append((*(s.key for s in sites), *(key for key in grads if key in left)))
            for key in keys[-1]:
                del left[key]
        self._ambiguous.append(Ambiguous(keys[0], keys[1], why))

    def _take_named(self, pairs: list[tuple[Site, Site]], by: Matched) -> None:
        """Takes pairs whose names are equal."""
        self._vote(pairs)
        for a, b in pairs:
            ways = layout.ways(a, b)
            if ways:
                self._take_one(a, b, by, ways)
            elif names.split(a.name).place == names.split(b.name).place:
                self._other_shapes.append((a, b))
                self._drop(a, b)

    def _vote(self, pairs: Iterable[tuple[Site, Site]]) -> None:
        """Counts the layouts of weights and images whose shapes allow one alone. They decide about square ones."""
        for a, b in pairs:
            if (about := layout.votes_on(a, b)) is not None and len(ways := layout.ways(a, b)) == 1:
                self._votes[about].add(_vote(a, ways[0]))

    def _take_one(self, a: Site, b: Site, by: Matched, ways: list[Axes | None]) -> None:
        """Takes a pair if votes, names or bits show which of several layouts it has; else lists it as ambiguous."""
        if self._is_flipped(a, b):
            self._other_shapes.append((a, b))
            self._drop(a, b)
            return
        if len(ways) > 1:
            votes, says = self._votes.get(layout.votes_on(a, b), set[Hashable]()), layout.by_names(a, b)
            if len(votes) == 1:
                ways = [axes for axes in ways if _vote(a, axes) in votes]
            elif not votes and says is not None:
                ways = [axes for axes in ways if (axes is not None) == says]
            elif self._same_framework and not names.is_parameter(a) and None in ways:
                ways = [None]
            elif len(held := [axes for axes in ways if self._equal(a, b, axes)]) == 1:
                ways = held
        if len(ways) == 1:
            self._take(a, b, by, ways[0])
        else:
            self._list([a], [b], _SQUARE if names.is_parameter(a) else _IMAGE)

    # --- stages ---

    def vote(self) -> None:
        """Counts votes before the first stage, so that every stage knows those of all sites that the table pairs."""
        a, b = ([s for k, s in left.items() if k not in self._functions[i]] for i, left in enumerate(self._left))
        self._vote(_unique(a, b, lambda s: (s.kind, names.common(s), s.call)))

    def set_functions_aside(self) -> None:
        """Hides the sites of two frameworks' functions, but for those that rules have matched, until
        `by_operations`."""
        for functions, left in zip(self._functions, self._left, strict=True):
            for key in functions.keys() - left.keys():
                del functions[key]
            for key in functions:
                del left[key]

    def follow(self) -> None:
        """Matches the gradients of matched tensors."""
        for pair in list(self._pairs.values()):
            for grad, kind in _GRADS.items():
                a, b = (self._left[i].get(_key(grad, s)) for i, s in enumerate((pair.a, pair.b)))
                if kind == pair.a.kind and a and b:
                    if parts := self._parts_of_gradient(pair):
                        self._list([a, *parts[0]], [b, *parts[1]], _PARTS)
                    elif pair.axes in layout.ways(a, b):
                        self._take(a, b, pair.by, pair.axes)
                    else:
                        self._other_shapes.append((a, b))
                        self._drop(a, b)

    def by_rules(self, rules: Rules, grads: bool) -> None:
        """Takes the pairs that a map names. **Raises** DiffError if B's tensor cannot hold A's."""
        b_names = {(s.kind, names.normal(s.name), s.call): s for s in self._left[1].values()}
        for a in self._sides(grads)[0]:
            if (found := rules.find(a.name)) is None:
                continue
            rule, name = found
            if (b := b_names.pop((a.kind, name, a.call), None)) is None:
                continue
            ways = layout.ways(a, b)
            if rule.transposed is not None and names.is_parameter(a):
                ways = [axes for axes in ways if (axes is not None) == rule.transposed]
            if not ways:
                raise DiffError(
                    f"{rules.path}: {rule.a[:200]!r}: {a.key} has shape {list(a.shape)}, and {b.key} of shape "
                    f"{list(b.shape)} does not hold it"
                    f"{'' if rule.transposed is None else f' with transposed {rule.transposed}'}; name another tensor"
                )
            self._take_one(a, b, "map", ways)

    def by_names(self, by: Matched, spelled: Callable[[Site], names.Name], grads: bool) -> None:
        """Takes pairs with equal names: first those with equal places, then a module's single output with the first
        output of the other module."""
        nested = self._other_structures(spelled)
        pairs = _unique(*self._sides(grads), lambda s: (s.kind, spelled(s), s.call))
        self._take_named([(x, y) for x, y in pairs if spelled(x).path not in nested], by)
        firsts = [_firsts((o.site for o in self._all[i].values()), spelled) for i in range(2)]
        a, b = ([s for s in side if s.key in first] for side, first in zip(self._sides(grads), firsts, strict=True))
        pairs = _unique(a, b, lambda s: (s.kind, spelled(s).path, s.call))
        self._take_named([(x, y) for x, y in pairs if "" in (spelled(x).place, spelled(y).place)], by)

    def _other_structures(self, spelled: Callable[[Site], names.Name]) -> set[str]:
        """Returns the modules that have a tensor at a place where the other trace has a nested structure, such as (h,
        c) and ((c, h), h): their places do not show which tensors correspond."""
        places: tuple[dict[str, set[str]], ...] = (collections.defaultdict(set), collections.defaultdict(set))
        for found, side in zip(places, self._all, strict=True):
            for o in side.values():
                if o.site.kind == "activation" and spelled(o.site).place:
                    found[spelled(o.site).path].add(spelled(o.site).place)
        a, b = places
        return {
            path for path in a.keys() & b.keys()
            if any(x != y and (x.startswith(y) or y.startswith(x)) for x in a[path] for y in b[path])
        }  # fmt: skip

    def by_bits(self) -> None:
        """Takes parameters whose bits no other parameter has. A constant, such as a bias of zeros, is no evidence."""
        groups: tuple[dict[Hashable, list[tuple[Site, Axes | None]]], ...] = ({}, {})
        for i, group in enumerate(groups):
            for site in self._left[i].values():
                if site.kind == "parameter" and not bits.constant(self._all[i][site.key]):
                    for token, axes in self._tokens(self._all[i][site.key], turned=i == 1):
                        group.setdefault(token, []).append((site, axes))
        found: dict[str, list[tuple[Site, Axes | None]]] = {}
        for token in groups[0].keys() & groups[1].keys():
            if len(groups[0][token]) == 1 and len({s.key for s, _ in groups[1][token]}) == 1:
                found.setdefault(groups[0][token][0][0].key, []).extend(groups[1][token])
        takers = collections.Counter(key for options in found.values() for key in {b.key for b, _ in options})
        for key, options in found.items():
            b, axes = min(options, key=lambda option: option[1] is not None)
            if len({other.key for other, _ in options}) == 1 and takers[b.key] == 1:
                self._take(self._left[0][key], b, "bits", axes)

    def by_modules(self) -> None:
        """Takes the other parameters and the outputs of two modules of which a parameter was matched by its bits."""
        modules = _unique_map((names.parent(p.a), names.parent(p.b)) for p in self._pairs.values() if p.by == "bits")

        def spelled(site: Site, ours: bool) -> Hashable:
            path = names.split(site.name).path
            module = names.parent(site)
            rest = names.common(site).path.rpartition("/")[2] if names.is_parameter(site) else path[len(module) :]
            return site.kind, modules.get(module) if ours else module, rest, names.split(site.name).place, site.call

        a = [s for s in self._left[0].values() if names.parent(s) in modules]
        b = [s for s in self._left[1].values() if names.parent(s) in set(modules.values())]
        self._take_named(_unique(a, b, lambda s: spelled(s, True), lambda s: spelled(s, False)), "bits")

    def by_order(self) -> None:
        """Takes sites between matched neighbours by the order of computation. Parameters of two frameworks have no
        common order: such a pair must be the only one of its shape."""
        if not self._same_framework:
            self._by_shape()
        for a, b in self._gaps():
            tokens_a, tokens_b = [_token(s) for s in a], [_token(s) for s in b]
            common = set(tokens_a) & set(tokens_b)
            if not common:
                continue
            pairs = unique_alignment(tokens_a, tokens_b)
            if pairs is None:
                self._list([s for s in a if _token(s) in common], [s for s in b if _token(s) in common], _ORDERS)
            for i, j in pairs or ():
                self._take_one(a[i], b[j], "order", layout.ways(a[i], b[j]))

    def by_operations(self) -> None:
        """Takes operands and results of operations of two frameworks, by the operations' meaning within matched
        modules."""
        modules = _unique_map(
            (names.split(p.a.name).path, names.split(p.b.name).path)
            for p in self._pairs.values() if p.a.kind == "activation"
        )  # fmt: skip
        for left, functions in zip(self._left, self._functions, strict=True):
            left.update(functions)
        parameters = {p.a.key: p.b.key for p in self._pairs.values() if p.a.kind == "parameter"}
        found = [
            [o for o in operations.nodes(list(side.values())) if o.out.key in left]
            for side, left in zip(self._all, self._left, strict=True)
        ]
        for a, b in operations.groups(found[0], found[1], modules, parameters):
            if len(a) != len(b):
                self._list([o.out for o in a], [o.out for o in b], _COUNTS)
                continue
            for x, y in zip(a, b, strict=True):
                same, in_either_order = operations.tensors(x, y, self._equal)
                if not same:
                    self._list([x.out], [y.out], _EITHER_ORDER if in_either_order else _NO_FIT)
                for pair in same:
                    if pair.a.key in self._left[0] and pair.b.key in self._left[1]:
                        self._take_one(pair.a, pair.b, "operation", pair.ways)

    def _by_shape(self) -> None:
        sides = [[s for s in left.values() if s.kind == "parameter"] for left in self._left]
        tokens = [collections.defaultdict(list) for _ in sides]
        for side, token in zip(sides, tokens, strict=True):
            for site in side:
                token[tuple(sorted(site.shape))].append(site)
        for shape in list(tokens[0]):
            a, b = tokens[0][shape], tokens[1][shape]
            if len(a) == len(b) == 1 and (ways := layout.ways(a[0], b[0])):
                self._take_one(a[0], b[0], "order", ways)
            elif a and b:
                self._list(a, b, _SHAPES)

    def _gaps(self) -> Iterable[tuple[list[Site], list[Site]]]:
        """Yields runs of unmatched sites of A and B, each between neighbouring pairs with the same order in both
        traces."""
        places = [{key: i for i, key in enumerate(side)} for side in self._all]
        pairs = sorted((places[0][p.a.key], places[1][p.b.key]) for p in self._pairs.values())
        b = [j for _, j in pairs]
        before = np.maximum.accumulate([-1, *b])[:-1]
        after = np.minimum.accumulate([*b, len(places[1])][::-1])[::-1][1:]
        anchors = [p for p, low, high in zip(pairs, before, after, strict=True) if low < p[1] < high]
        kept = [
            [(i, s) for i, k in enumerate(side) if (s := left.get(k)) and self._ordered(s)]
            for side, left in zip(self._all, self._left, strict=True)
        ]
        where = [[i for i, _ in side] for side in kept]
        for start, end in zip([(-1, -1), *anchors], [*anchors, (len(places[0]), len(places[1]))], strict=True):
            gap = [
                [s for _, s in side[bisect.bisect_right(at, start[n]) : bisect.bisect_left(at, end[n])]]
                for n, (side, at) in enumerate(zip(kept, where, strict=True))
            ]
            if gap[0] and gap[1]:
                yield gap[0], gap[1]

    def _ordered(self, site: Site) -> bool:
        return site.kind not in _GRADS and (self._same_framework or not names.is_parameter(site))

    # --- bits ---

    def _tokens(self, o: Observation, turned: bool) -> list[tuple[Hashable, Axes | None]]:
        """Returns tokens that are equal for parameters with equal bits, each with the axes in whose order the bits were
        read. `turned`: whether to read them with permuted axes too."""
        found: list[tuple[Hashable, Axes | None]] = []
        site = o.site
        if o.record.hash is not None:
            found.append(((site.dtype, site.shape, o.hash_name, o.record.hash), None))
        if o.record.values == "whole":
            found.append(((site.dtype, site.shape, bits.digest(o, None)), None))
            for axes in layout.turns_of_weights(len(site.shape)) if turned else ():
                found.append(((site.dtype, layout.moved(site.shape, axes), bits.digest(o, axes)), axes))
        return found

    def _is_flipped(self, a: Site, b: Site) -> bool:
        """Returns whether the parameters' bits show that two parameters, or their gradients, are the weight of a
        transposed convolution and flax's kernel, whose spatial axes are reversed."""
        if {names.leaf(a), names.leaf(b)} != {"weight", "kernel"} or not len(a.shape) == len(b.shape) > 2:
            return False
        keys = _key("parameter", a), _key("parameter", b)
        if keys not in self._flipped:
            found = [side.get(key) for side, key in zip(self._all, keys, strict=True)]
            weight, kernel = found if names.leaf(a) == "weight" else found[::-1]
            self._flipped[keys] = weight is not None and kernel is not None and bits.are_flipped(weight, kernel)
        return self._flipped[keys]

    def _equal(self, a: Site, b: Site, axes: Axes | None) -> bool:
        x, y = self._all[0][a.key], self._all[1][b.key]
        if a.dtype != b.dtype:
            return False
        if axes is None and x.record.hash is not None and (x.hash_name, x.record.hash) == (y.hash_name, y.record.hash):
            return True
        return x.record.values == y.record.values == "whole" and bits.digest(x, None) == bits.digest(y, axes)


_SQUARE = "a square parameter does not show whether it is transposed; a map can say it"
_IMAGE = (
    "a tensor with equal axes does not show whether its channels are the second axis or the last; a map cannot say it"
)
_COUNTS = (
    "a module of one framework computes more operations of this kind and size than the same module of the other one"
)
_PARTS = "one module returns a tensor at several places with a gradient at each, the other one once, with their sum"
_EITHER_ORDER = "the operands of a product can be in either order"
_NO_FIT = "they compute the same by their kind and size, and their axes do not fit"
_ORDERS = "their kinds and shapes can be put in order in several ways; a map can say which"
_SHAPES = "parameters of two frameworks have no common order, and these have the same shape; a map can say which"


def _key(kind: Kind, site: Site) -> str:
    return Site(site.name, kind, site.call, site.shape, site.dtype).key


def _vote(site: Site, axes: Axes | None) -> Hashable:
    """Returns a pair's vote on the layout of others: whether a weight is transposed, or the order of image axes."""
    return axes is not None if names.is_parameter(site) else axes


def _token(site: Site) -> Hashable:
    """Returns the token that two sites must share to be matched by order. The output of a whole model does not share a
    token with the outputs of its layers."""
    return site.kind, site.shape, names.common(site).path == MODEL


def _longer(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without its axes of size 1."""
    return tuple(n for n in shape if n != 1)


def _unique(
    a: Sequence[Site],
    b: Sequence[Site],
    spelled: Callable[[Site], Hashable],
    spelled_b: Callable[[Site], Hashable] | None = None,
) -> list[tuple[Site, Site]]:
    """Returns the pairs of sites with one spelling that exactly one site on each side has."""
    sides = []
    for side, spell in ((a, spelled), (b, spelled_b or spelled)):
        found: dict[Hashable, list[Site]] = {}
        for site in side:
            found.setdefault(spell(site), []).append(site)
        sides.append(found)
    return [
        (sites[0], sides[1][name][0]) for name, sites in sides[0].items()
        if len(sites) == 1 and len(sides[1].get(name, ())) == 1
    ]  # fmt: skip


def _firsts(sites: Iterable[Site], spelled: Callable[[Site], names.Name]) -> set[str]:
    """Returns the key of the first tensor in each module's output, which may be a single tensor."""
    found: dict[Hashable, str] = {}
    for site in sites:
        found.setdefault((site.kind, spelled(site).path, site.call), site.key)
    return set(found.values())


def _unique_map(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the pairs x -> y in which x has no other partner than y, and y no other than x."""
    forward, back = collections.defaultdict(set), collections.defaultdict(set)
    for x, y in pairs:
        forward[x].add(y)
        back[y].add(x)
    return {x: next(iter(ys)) for x, ys in forward.items() if len(ys) == 1 and len(back[next(iter(ys))]) == 1}
