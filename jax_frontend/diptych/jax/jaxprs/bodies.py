"""The extra results of an evaluated program, as a tree of the equations that return them.

A body is one jaxpr. Its leaves are extra results of single equations; its compounds are equations with jaxprs of their
own. The leaves of a compound occur once, in each iteration of a scan, in the branch that ran, or on each shard. The
arrays of every leaf are among the program's extra results, with an additional first axis for each scan and shard_map
around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

Ref = Any
"""The origin of a value: an operand's position, a leaf, (compound, position of its result), or `Across`."""
Refs = frozenset[Ref]


class Across(NamedTuple):
    """The origin of a collective's result: the value at `ref` on every shard along the mesh axes `axes`."""

    ref: Ref
    axes: frozenset[str]


@dataclasses.dataclass(eq=False)
class Leaf:
    """Extra results of one equation. `refs`: the origins of the value that they describe. `number`: the leaf's number
    in the program. `start`: the position of its first array among the body's extra results. `axes`: the manual mesh
    axes over which the arrays vary."""

    refs: Refs
    number: int
    start: int = 0
    axes: frozenset[str] = frozenset()


@dataclasses.dataclass(eq=False)
class Compound:
    """An equation with bodies. `kind`: "call", "scan", "cond", "while" or "shard". `operands`: the origins of its
    operands. `start`: the position of its first extra result in the body that contains it. `first`: the position of
    each body's first extra result among the compound's own. `consts`: the number of operands of a scan or while loop
    that are equal in all iterations. `carry`, `length`, `reverse`: see `jax.lax.scan`. `mesh`: a shard_map's mesh axes
    with their sizes."""

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
        """Yields each leaf with the position of its first array among the extra results."""
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
        """Whether the leaves that occur depend on values."""
        compounds = [n for n in self.nodes if isinstance(n, Compound)]
        return any(n.kind in ("cond", "while") or any(b.conditional for b in n.bodies) for n in compounds)
