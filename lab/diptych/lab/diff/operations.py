"""Matches operations of two frameworks by what they compute, within matched modules.

Frameworks divide a computation differently: a linear layer is one operation in PyTorch, and a product and an addition
in JAX; products have their operands in another order or with other axes. So names do not show which operands
correspond. An operation's options do: they name the axes of the operands of a product or convolution.
"""

from __future__ import annotations

import collections
import dataclasses
import string
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diptych.lab.diff import layout, names
from diptych.lab.diff.layout import Axes
from diptych.lab.replay import table
from diptych.lab.replay.recorded import argument
from diptych.lab.traces import Observation, Site

Role = tuple[str, int]

_CALLED = {"linear": {"x": "a", "weight": "b"}}
"""New names of operands, by the row of their operation: a linear layer is read as a product of `a` and `b`."""
_SWAPPED = {"a": "b", "b": "a"}


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation in a step. `kind`: a row of the table, or "product" for the rows linear and matmul. `path`: the
    module's path. `axes`: letters for the axes of the operands and of `out`, empty except for products and
    convolutions; the same letter stands for the same axis. `sources`: the keys of the parameters and results that the
    operands are, as far as known. `weight`: the operand of a product that is known to be the only parameter, else
    None."""

    kind: str
    path: str
    operands: Mapping[str, Site]
    out: Site
    axes: Mapping[str, str]
    sources: Mapping[str, str]
    weight: str | None

    @property
    def token(self) -> Hashable:
        """A value that is equal for the same operation in both frameworks, however axes are ordered and merged."""
        sizes = sorted(self.operands[k].size for k in ("a", "b") if k in self.operands) if self.axes else ()
        return self.kind, self.out.size, "bias" in self.operands, *sizes

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset(key for key in self.sources.values() if key.startswith("parameter:"))


class Same(NamedTuple):
    """A pair of corresponding sites. `ways`: the possible layouts of a's tensor in b (see `layout.ways`)."""

    a: Site
    b: Site
    ways: list[Axes | None]


def is_function(site: Site) -> bool:
    """Returns whether a site is an operand or result of a framework's operation."""
    row = table.TABLE.get(site.name.rpartition("/")[2].partition(".")[0])
    return site.kind in ("operand", "result") and row is not None and not row.own


def nodes(observations: Sequence[Observation]) -> list[Node]:
    """Returns the operations of a framework in a step, in the order of computation. A product or convolution followed
    by the addition of a parameter with one element for each channel is one operation with a bias."""
    by_key = {o.site.key: o for o in observations}
    by_bits: dict[Hashable, str | None] = {}
    found: dict[str, Node] = {}
    for o in observations:
        site = o.site
        if is_function(site) and site.operation is not None and site.inputs is not None:
            operands = {argument(key): by_key[key] for key in site.inputs if key.startswith("operand:")}
            node = _node(site, operands, by_bits)
            if (product := next((k for k in _SWAPPED if _is_bias(node, k, found)), None)) is not None:
                before = found.pop(node.sources[product])
                bias = _SWAPPED[product]
                node = dataclasses.replace(
                    before,
                    out=site,
                    operands={**before.operands, "bias": node.operands[bias]},
                    sources={**before.sources, "bias": node.sources[bias]},
                )
            found[site.key] = node
        if site.kind in ("parameter", "result") and o.record.hash is not None:
            bits = _bits(o)
            by_bits[bits] = None if site.kind == "parameter" and bits in by_bits else site.key
    return list(found.values())


def _bits(o: Observation) -> Hashable:
    return o.site.dtype, o.site.shape, o.hash_name, o.record.hash


def _node(out: Site, operands: Mapping[str, Observation], by_bits: Mapping[Hashable, str | None]) -> Node:
    assert out.operation is not None
    row, path = out.operation.name, names.caller(out.name)
    called = {_CALLED.get(row, {}).get(k, k): o for k, o in operands.items()}
    sites = {k: o.site for k, o in called.items()}
    sources = {}
    for k, o in called.items():
        known = o.site.inputs
        source = by_bits.get(_bits(o)) if known is None else known[0] if len(known) == 1 else None
        if source is not None:
            sources[k] = source
    try:
        axes = _axes(row, table.decoded(row, out.operation.options), len(out.shape))
    except ValueError:  # another version had other options: the operands are matched by their names alone
        axes = {}
    ranks = {k: len(s.shape) for k, s in {**sites, "out": out}.items()}
    if any(len(set(letters)) != len(letters) or ranks.get(k, 0) != len(letters) for k, letters in axes.items()):
        axes = {}
    kind = "product" if row in ("linear", "matmul") else row
    weights = ["b"] if row == "linear" else [k for k in _SWAPPED if sources.get(k, "").startswith("parameter:")]
    return Node(kind, path, sites, out, axes, sources, weights[0] if len(weights) == 1 else None)


def _axes(row: str, options: Mapping[str, Any], rank: int) -> dict[str, str]:
    if row == "linear":
        rows = string.ascii_lowercase[: rank - 1]
        return {"a": rows + "I", "b": "OI", "out": rows + "O"}
    if row == "matmul":
        a, b, out = options["equation"].replace("->", ",").split(",")
        return {"a": a, "b": b, "out": out}
    return dict(zip(("x", "weight", "out"), options["layout"].split(","), strict=True)) if row == "conv" else {}


def _is_bias(add: Node, of: str, before: Mapping[str, Node]) -> bool:
    """Returns whether an addition adds a bias to the result of an operation, which is its operand `of`."""
    if add.kind != "add" or add.operands.keys() != set(_SWAPPED):
        return False
    bias, made = _SWAPPED[of], before.get(add.sources.get(of, ""))
    if made is None or not made.axes.get("out") or "bias" in made.operands:
        return False
    if not add.sources.get(bias, "").startswith("parameter:") or made.out.shape != add.out.shape:
        return False
    shape = [1] * len(add.out.shape)
    channel = made.axes["out"].index("C") if made.kind == "conv" else -1
    shape[channel] = add.out.shape[channel]
    return layout.merged(add.operands[bias].shape, tuple(shape))


def groups(
    a: Sequence[Node], b: Sequence[Node], modules: Mapping[str, str], parameters: Mapping[str, str]
) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yields the operations of A and those of B that have one token, belong to corresponding modules and read the same
    parameters, as far as these are known.

    **Arguments:** `modules`: B's module for some of A's. Other modules correspond if the table of names says so. In
    PyTorch, operations outside of all modules have the path "loss"; in JAX, only where the user's scopes say so.
    `parameters`: B's key for each of A's parameters.
    """
    outside = "loss" if modules else ""  # without modules the whole model has an empty path in JAX
    taken, unique = set(modules.values()), collections.defaultdict(set)
    for o in b:
        if o.path not in taken:
            unique[names.module(o.path or outside)].add(o.path)
    by_table = {name: next(iter(paths)) for name, paths in unique.items() if len(paths) == 1}
    grouped: tuple[dict[Hashable, list[Node]], ...] = ({}, {})
    for o in a:
        path = modules[o.path] if o.path in modules else by_table.get(names.module(o.path or outside))
        grouped[0].setdefault((path, o.token), []).append(o)
    for o in b:
        grouped[1].setdefault((o.path, o.token), []).append(o)
    for key, found in grouped[0].items():
        yield from _by_parameters(found, grouped[1].get(key, []), parameters)


def _by_parameters(
    a: list[Node], b: list[Node], parameters: Mapping[str, str]
) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yields operations that read a common parameter, then those whose parameters are not known."""
    readers: dict[str, list[int]] = collections.defaultdict(list)
    for j, other in enumerate(b):
        for key in other.parameters:
            readers[key].append(j)
    by_partners: dict[frozenset[str], list[Node]] = collections.defaultdict(list)
    for o in a:
        by_partners[frozenset(parameters.get(key, "") for key in o.parameters)].append(o)
    shared: dict[tuple[int, ...], list[Node]] = collections.defaultdict(list)
    for partners, some in by_partners.items():
        shared[tuple(sorted({j for key in partners for j in readers.get(key, ())}))] += some
    rest_a, count = shared.pop((), []), collections.Counter(j for some in shared for j in some)
    for js, some in shared.items():
        if all(count[j] == 1 for j in js):
            yield some, [b[j] for j in js]
    rest_b = [o for j, o in enumerate(b) if not count[j]]
    if rest_a and rest_b and not all(any(o.parameters for o in side) for side in (rest_a, rest_b)):
        yield rest_a, rest_b


def tensors(a: Node, b: Node, equal: Callable[[Site, Site, Axes | None], bool]) -> tuple[list[Same], bool]:
    """Returns the pairs of results and operands of two operations with one token, and whether the operands can be in
    either order. In that case a sum has the pair of its results alone, and a product none. An operand whose shape does
    not fit has no pair.

    **Arguments:** `equal`: returns whether two sites are known to have the same bits, with b's axes permuted.
    """
    orders = [{k: k for k in a.operands}]
    if a.kind in ("product", "add", "mul"):
        orders.append(orders[0] | _SWAPPED)
        if a.weight and b.weight:
            orders = [order for order in orders if order[a.weight] == b.weight]
    found = [f for f in (_paired(a, b, order) for order in orders) if f]
    if a.kind == "product" and len(orders) > 1:
        found = [f for f in found if len(f) == 1 + len(a.operands.keys() & b.operands.keys())]
    found = [f for f in found if len(f) == max(map(len, found))]
    if len(found) > 1:
        found = [f for f in found if all(any(equal(s.a, s.b, way) for way in s.ways) for s in f[1:])] or found
    if len(found) > 1:
        return ([] if a.kind == "product" else found[0][:1]), True
    return (found[0] if found else []), False


def _paired(a: Node, b: Node, order: Mapping[str, str]) -> list[Same]:
    """Returns the pairs of results and operands whose shapes fit; none if the results do not fit. `order`: b's operand
    for each of a's."""
    roles = _roles(a.axes, {}), _roles(b.axes, order)
    found = [Same(a.out, b.out, _ways(a, b, "out", "out", roles))]
    found += [
        Same(site, other, _ways(a, b, k, order[k], roles))
        for k, site in a.operands.items()
        if (other := b.operands.get(order[k])) is not None
    ]
    return [same for same in found if same.ways] if found[0].ways else []


def _ways(a: Node, b: Node, k: str, of_b: str, roles: tuple[Mapping[str, Role], ...]) -> list[Axes | None]:
    x, y = (a.out, b.out) if k == "out" else (a.operands[k], b.operands[of_b])
    if k not in a.axes or of_b not in b.axes:
        return layout.ways(x, y)
    mine, theirs = [roles[0][c] for c in a.axes[k]], [roles[1][c] for c in b.axes[of_b]]
    if sorted(mine) == sorted(theirs):
        axes = tuple(theirs.index(role) for role in mine)
        found: list[Axes | None] = [None if axes == tuple(range(len(axes))) else axes]
        return found if layout.moved(y.shape, axes) == x.shape else []
    kinds = [list(dict.fromkeys(kind for kind, _ in side)) for side in (mine, theirs)]
    if kinds[0] != kinds[1] or not layout.merged(x.shape, y.shape):
        return []
    in_order = all(side == sorted(side, key=lambda role: (kinds[0].index(role[0]), role[1])) for side in (mine, theirs))
    return [None] if in_order else []


def _roles(axes: Mapping[str, str], order: Mapping[str, str]) -> dict[str, Role]:
    """Returns the meaning of each letter in terms that are equal for two operations with one token. In a product that
    is whether both operands have the axis, only one has it, or it is summed over, and its number among such axes; in a
    convolution it is the letter itself. `order`: the names of the operands "a" and "b" in `axes`."""
    if "out" not in axes or "x" in axes:
        return {c: (c, 0) for letters in axes.values() for c in letters}
    first, second, out = (axes[order.get(k, k)] for k in ("a", "b", "out"))
    count = collections.Counter[str]()
    found: dict[str, Role] = {}
    for c in dict.fromkeys(out + first + second):
        kind = ("both" if c in out else "inner") if c in first and c in second else "a" if c in first else "b"
        found[c] = kind, count[kind]
        count[kind] += 1
    return found
