"""Operations of two frameworks that are the same: within modules that are the same, by what they compute.

Frameworks cut a computation otherwise: a linear layer is one operation in PyTorch, a product and an addition in JAX,
and products have their operands in another order or with other axes. So neither names nor the order of sites say which
operands are the same; an operation's options do, which name the axes of a product's or convolution's operands.
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
from diptych.lab.traces import Site

Role = tuple[str, int]

_OPERANDS = {"linear": {"x": "a", "weight": "b"}}
"""What a linear layer's operands are called in the product that it is."""
_SWAPPED = {"a": "b", "b": "a"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """`kind`: a row of the table; "product" for the rows linear and matmul. `path`: of its module. `axes`: letters for
    the axes of a product's or convolution's operands and of `out`; the same letter is the same axis. Other operations
    have none. `weight`: which operand of a product is known to be the only parameter, None if none is."""

    kind: str
    path: str
    operands: Mapping[str, Site]
    out: Site
    axes: Mapping[str, str]
    weight: str | None

    @property
    def token(self) -> Hashable:
        """Returns what the same operation has in both frameworks, however axes are ordered and merged."""
        sizes = sorted(self.operands[k].size for k in ("a", "b") if k in self.operands) if self.axes else ()
        return self.kind, self.out.size, "bias" in self.operands, *sizes


class Same(NamedTuple):
    """A pair of sites. `ways`: in which b may hold the tensor of a, as `layout.ways` has them."""

    a: Site
    b: Site
    ways: list[Axes | None]


def is_function(site: Site) -> bool:
    """Returns whether a site is an operand or result of a framework's operation."""
    row = table.TABLE.get(site.name.rpartition("/")[2].partition(".")[0])
    return site.kind in ("operand", "result") and row is not None and not row.own


def operations(sites: Sequence[Site]) -> list[Operation]:
    """Returns the operations of a framework in a trace's step, in the order of computation. A product or convolution
    whose result a parameter is added to, an element for each channel, is one operation with a bias."""
    by_key = {s.key: s for s in sites}
    found: dict[str, Operation] = {}
    for site in sites:
        if is_function(site) and site.operation is not None and site.inputs is not None:
            operands = {argument(key): by_key[key] for key in site.inputs if key in by_key}
            made = _operation(site, operands)
            product = next((p for k in _SWAPPED if (p := _biased(made, k, found)) is not None), None)
            if product is not None:
                del found[product.out.key]
                bias = next(x for x in operands.values() if x.inputs != (product.out.key,))
                made = dataclasses.replace(product, out=site, operands={**product.operands, "bias": bias})
            found[site.key] = made
    return list(found.values())


def _operation(out: Site, operands: dict[str, Site]) -> Operation:
    assert out.operation is not None
    row, path = out.operation.name, names.split(out.name.rpartition("/")[0]).path
    try:
        options = table.decoded(row, out.operation.options)
    except ValueError:  # of a version with other options: its operands are matched by their names alone
        options = None
    called = {_OPERANDS.get(row, {}).get(k, k): s for k, s in operands.items()}
    axes = {} if options is None else _axes(row, options, len(out.shape))
    if any(len(axes[k]) != len(s.shape) for k, s in {**called, "out": out}.items() if k in axes):
        axes = {}
    kind = "product" if row in ("linear", "matmul") else row
    weights = ["b"] if row == "linear" else [k for k in _SWAPPED if k in called and _is_parameter(called[k])]
    return Operation(kind, path, called, out, axes, weights[0] if len(weights) == 1 else None)


def _axes(row: str, options: Mapping[str, Any], rank: int) -> dict[str, str]:
    if row == "linear":
        rows = string.ascii_lowercase[: rank - 1]
        return {"a": rows + "I", "b": "OI", "out": rows + "O"}
    if row == "matmul":
        a, b, out = options["equation"].replace("->", ",").split(",")
        return {"a": a, "b": b, "out": out}
    return dict(zip(("x", "weight", "out"), options["layout"].split(","), strict=True)) if row == "conv" else {}


def _biased(add: Operation, product: str, before: Mapping[str, Operation]) -> Operation | None:
    """Returns the operation whose result is the operand `product` of an addition, if the other one is its bias."""
    if add.kind != "add" or add.operands.keys() != set(_SWAPPED):
        return None
    of, bias = add.operands[product].inputs or (), add.operands[_SWAPPED[product]]
    made = before.get(of[0]) if len(of) == 1 else None
    if made is None or not made.axes or "bias" in made.operands or not _is_parameter(bias):
        return None
    channel = made.axes["out"].find("C" if made.kind == "conv" else made.axes["out"][-1:])
    shape = [1] * len(add.out.shape)
    shape[channel] = add.out.shape[channel]
    return made if layout.merged(bias.shape, tuple(shape)) else None


def _is_parameter(operand: Site) -> bool:
    return bool(operand.inputs) and all(key.startswith("parameter:") for key in operand.inputs or ())


def groups(
    a: Sequence[Operation], b: Sequence[Operation], modules: Mapping[str, str]
) -> Iterator[tuple[list[Operation], list[Operation]]]:
    """Yields the operations of A and those of B that have one token and belong to modules that are the same.

    **Arguments:** `modules`: B's module of some of A's. Others are the same if the table of names says so, and what
    no module computes is "loss" in PyTorch, and in JAX what the user's scopes say.
    """
    by_table = {names.module(o.path or "loss"): o.path for o in b if o.path not in modules.values()}
    grouped: tuple[dict[Hashable, list[Operation]], ...] = ({}, {})
    for o in a:
        path = modules[o.path] if o.path in modules else by_table.get(names.module(o.path or "loss"))
        grouped[0].setdefault((path, o.token), []).append(o)
    for o in b:
        grouped[1].setdefault((o.path, o.token), []).append(o)
    yield from ((found, grouped[1][key]) for key, found in grouped[0].items() if key in grouped[1])


def sites(a: Operation, b: Operation, equal: Callable[[Site, Site, Axes | None], bool]) -> list[Same]:
    """Returns the result and operands of two operations with one token, in pairs: none if the operands of a product
    can be in either order, and the result alone if those of a sum can. An operand that is broadcast in one framework
    alone has no pair.

    **Arguments:** `equal`: whether two sites are known to have the same bits, b's with its axes moved.
    """
    orders = [{k: k for k in a.operands}]
    if a.kind in ("product", "add", "mul"):
        orders.append(orders[0] | _SWAPPED)
        if a.weight and b.weight:
            orders = [order for order in orders if order[a.weight] == b.weight]
    found = [_paired(a, b, order) for order in orders]
    found = [f for f in found if f and (not a.axes or len(f) == 1 + len(a.operands.keys() & b.operands.keys()))]
    found = [f for f in found if len(f) == max(map(len, found))]
    if len(found) > 1:
        found = [f for f in found if all(any(equal(s.a, s.b, way) for way in s.ways) for s in f[1:])] or found
    if len(found) == 1:
        return found[0]
    return found[0][:1] if found and not a.axes else []


def _paired(a: Operation, b: Operation, order: Mapping[str, str]) -> list[Same]:
    """Returns the result and those operands in pairs whose shapes fit; nothing if the results' do not. `order`: which
    operand of b each of a's is."""
    roles = _roles(a.axes, {}), _roles(b.axes, order)
    found = [Same(a.out, b.out, _ways(a, b, "out", "out", roles))]
    found += [
        Same(site, other, _ways(a, b, k, order[k], roles))
        for k, site in a.operands.items()
        if (other := b.operands.get(order[k])) is not None
    ]
    return [same for same in found if same.ways] if found[0].ways else []


def _ways(a: Operation, b: Operation, k: str, of_b: str, roles: tuple[Mapping[str, Role], ...]) -> list[Axes | None]:
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
    """Returns what each letter means, in words that another operation with the same token has too: for a product
    whether both operands have the axis, only one, or whether it is summed over, and the axis's number among such; for
    a convolution the letter itself. `order`: what `axes` calls the operands "a" and "b"."""
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
