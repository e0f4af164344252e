"""The extra results of an evaluated program, as a tree of the equations that return them.

A body is one jaxpr. Its leaves are extra results of single equations; its compounds are equations with jaxprs of their
own, whose leaves occur once, in each iteration of a scan, in the branch that ran, or on each shard. The arrays of every
leaf are among the program's extra results, with an axis in front for each scan and shard_map around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

Ref = Any
"""Where a value comes from: an operand's position, a leaf, (compound, position of its result), or `Across`."""
Refs = frozenset[Ref]


class Across(NamedTuple):
    """Where the result of a collective comes from: the value at `ref` on every shard along the mesh axes `axes`."""

    ref: Ref
    axes: frozenset[str]


@dataclasses.dataclass(eq=False)
class Leaf:
    """Extra results of one equation. `refs`: where the value that they show comes from. `number`: of the leaf in the
    program. `start`: of its arrays among the body's extra results. `axes`: the manual mesh axes over which they vary.
    """

    refs: Refs
    number: int
    start: int = 0
    axes: frozenset[str] = frozenset()


@dataclasses.dataclass(eq=False)
class Compound:
    """An equation with bodies. `kind`: "call", "scan", "cond", "while" or "shard". `operands`: where its operands come
    from. `start`: of its extra results in the body that contains it. `first`: of each body's extra results among its
    own. `consts`: how many operands of a scan or while loop are the same in each iteration. Other fields are a scan's,
    or a shard_map's mesh axes with their lengths."""

    kind: str
    bodies: list[Body]
    operands: list[Refs]
    start: int = 0
    first: list[int] = dataclasses.field(default_factory=lambda: [0])
    consts: int = 0
    carry: int = 0
    length: int = 0
    reverse: bool = False
    mesh: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(eq=False)
class Body:
    nodes: list[Leaf | Compound]
    outs: list[Refs]
    extras: int

    def positions(self, start: int = 0) -> Iterator[tuple[Any, int]]:
        """Yields each leaf, with the position of its arrays among the extra results."""
        for node in self.nodes:
            if isinstance(node, Leaf):
                yield node, start + node.start
            else:
                for body, first in zip(node.bodies, node.first, strict=True):
                    yield from body.positions(start + node.start + first)

    def leaves(self) -> list[Any]:
        return [leaf for leaf, _ in self.positions()]

    @property
    def conditional(self) -> bool:
        """Whether it depends on values which leaves occur."""
        compounds = [n for n in self.nodes if isinstance(n, Compound)]
        return any(n.kind in ("cond", "while") or any(b.conditional for b in n.bodies) for n in compounds)
