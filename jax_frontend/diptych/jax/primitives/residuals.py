"""What forward rules save, in a form that does not depend on which gradients are wanted.

A custom_vjp with symbolic zeros may save less where less is differentiated. JAX (0.10.2) keeps one description of what
was saved for each *traced* call, though. A compiled function that is called twice (a layer under `jax.jit` or flax's
`nn.jit`, first on data and then on activations) is traced once and differentiated twice: backward of the first call
would read what it saved as the second call's. So each call saves as many arrays, some of them empty, and the last one
says by its shape, (0, number), which structure they have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_EMPTY = np.zeros(0, np.uint8)
_NUMBERS: dict[Any, int] = {}  # of structures, in the order of _STRUCTURES
_STRUCTURES: list[Any] = []


def defvjp(f: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """`f.defvjp(forward, backward, symbolic_zeros=True)` for rules that may save anything."""

    @functools.wraps(forward)
    def forward_rule(*args: Any) -> Any:
        out, saved = forward(*args)
        return out, _packed(saved, 12 + 3 * len(jax.tree.leaves(args)))

    @functools.wraps(backward)
    def backward_rule(*args: Any) -> Any:
        *static, saved, grads = args
        return backward(*static, _unpacked(saved), grads)

    f.defvjp(forward_rule, backward_rule, symbolic_zeros=True)


def _packed(saved: Any, room: int) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(saved)
    assert len(leaves) <= room, f"{len(leaves)} arrays are saved, and there is room for {room}"
    number = _NUMBERS.setdefault(structure, len(_STRUCTURES))
    if number == len(_STRUCTURES):
        _STRUCTURES.append(structure)
    return (*leaves, *[_EMPTY] * (room - len(leaves)), np.zeros((0, number), np.uint8))


def _unpacked(packed: tuple[Any, ...]) -> Any:
    structure = _STRUCTURES[packed[-1].shape[1]]
    return structure.unflatten(packed[: structure.num_leaves])
