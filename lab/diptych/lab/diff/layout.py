"""Layouts of one tensor in two traces: which shapes can hold the same tensor, and how B's axes are permuted against
A's.

A linear layer's weight is [out, in] in PyTorch and [in, out] in flax; a convolution's weight is [out, in, ...] and
[..., in, out]; an image's channels are its second axis in PyTorch and its last in flax.
"""

from __future__ import annotations

import itertools
import operator

from diptych.lab.diff import names
from diptych.lab.traces import Site

Axes = tuple[int, ...]


def merged(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Returns whether two shapes differ by merged neighbouring axes alone, so that the flat tensors are equal."""
    ends_a, ends_b = (set(itertools.accumulate(shape, operator.mul, initial=1)) for shape in (a, b))
    nested = ends_a <= ends_b or ends_b <= ends_a
    return a == b or (nested and 0 not in ends_a | ends_b and max(ends_a) == max(ends_b))


def moved(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    return tuple(shape[i] for i in axes)


def holds(shape: tuple[int, ...], held: tuple[int, ...], axes: Axes | None) -> bool:
    """Returns whether a tensor of shape `held`, permuted by `axes` (see `ways`), has the shape `shape`."""
    return merged(shape, held) if axes is None else len(axes) == len(held) and moved(held, axes) == shape


def ways(a: Site, b: Site) -> list[Axes | None]:
    """Returns the possible layouts of a's tensor in b, judged by shapes and parameter names. A layout is None for the
    same order, or the axes of b in the order of a's."""
    found: list[Axes | None] = [None] if merged(a.shape, b.shape) else []
    rank = len(a.shape)
    if len(b.shape) != rank:  # a weight and a kernel are transposed, so they differ even if both are flattened
        return [] if {names.leaf(a), names.leaf(b)} == {"weight", "kernel"} else found
    found += [axes for axes in _turns(a, b, rank) if moved(b.shape, axes) == a.shape]
    return found


def held_otherwise(a: Site, b: Site) -> bool:
    """Returns whether two sites with incomparable shapes may belong to models that compute the same. Either one of two
    activations has leading axes of 1, which are broadcast; or flax's kernel has axes that are merged or split against
    torch's weight, or those of a transposed convolution, which flax also reverses."""
    if {names.leaf(a), names.leaf(b)} == {"weight", "kernel"}:
        rank = len(a.shape)
        return a.size == b.size and (rank != len(b.shape) or (rank > 2 and sorted(a.shape) == sorted(b.shape)))
    apart = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
    if names.is_parameter(a) or len(a.shape) != len(b.shape) or not apart:
        return False
    return any(set(shape[: apart[-1] + 1]) == {1} for shape in (a.shape, b.shape))


def _turns(a: Site, b: Site, rank: int) -> list[Axes]:
    if names.is_parameter(a):
        turns = turns_of_weights(rank)
        if rank > 2 and {names.leaf(a), names.leaf(b)} == {"weight", "kernel"}:
            return [turns[0] if names.leaf(b) == "kernel" else turns[-1]]
        return turns if rank == 2 else []
    last, first = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
    # Sequences of vectors have three axes as well: only different shapes show that their channels are on another axis.
    return list(dict.fromkeys((last, first))) if rank > 3 or (rank == 3 and a.shape != b.shape) else []


def turns_of_weights(rank: int) -> list[Axes]:
    """Returns permutations between PyTorch's weight and flax's kernel of `rank` axes, in both directions: one if both
    are equal, none for fewer than two axes."""
    to_torch, to_flax = (rank - 1, rank - 2, *range(rank - 2)), (*range(2, rank), 1, 0)
    return list(dict.fromkeys((to_torch, to_flax))) if rank > 1 else []


def votes_on(a: Site, b: Site) -> tuple[str, int] | None:
    """Returns which other tensors a pair's layout is evidence for, if it is the only possible one: ("weights", rank) or
    ("images", rank) for all weights or images of so many axes; None if it is evidence for none."""
    rank = len(a.shape)
    if rank != len(b.shape):
        return None
    if {names.leaf(a), names.leaf(b)} == {"weight", "kernel"} and rank > 1:
        return "weights", rank
    return ("images", rank) if rank > 3 and not names.is_parameter(a) else None


def by_names(a: Site, b: Site) -> bool | None:
    """Returns whether the names of two parameters show that one of them is transposed, None if they show nothing."""
    leaves = {names.leaf(a), names.leaf(b)}
    if not names.is_parameter(a):
        return None
    if leaves == {"weight", "kernel"}:
        return True
    return False if len(leaves) == 1 or leaves & {"embedding", "scale"} else None
