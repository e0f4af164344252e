"""Structures of tensors that modules return, and the replacement of the tensors in them by taps.

A caller may know a structure by its identity, for example one that the module keeps and changes later. So a structure
remains the same object, and taps write to the lists, dicts and dataclasses in it, unless the change would be visible
after the step.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from diptych.lab.torch import compiled
from diptych.torch.private.dispatch import tree_flatten, tree_leaves, tree_unflatten

Tap = Callable[[Tensor, str], Tensor]
Skip = Callable[[Any, str], None]

_TRACES_COPY = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile traces `copy.copy`. torch 2.11 does not; 2.12 was not tried."""
WRITABLE = (list, dict, collections.OrderedDict, collections.defaultdict, collections.deque)


def parts(value: Any, place: str) -> tuple[list[Any], Any, list[str], Any] | None:
    """Returns the direct contents of a structure that torch's pytree knows: children, the pytree's spec, the children's
    places and their keys; None for any other object."""
    children, spec = tree_flatten(value, is_leaf=lambda v: v is not value)
    if len(children) == 1 and children[0] is value:
        return None
    at: Any = range(len(children))
    if isinstance(value, dict):
        at = list(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        at = value._fields  # type: ignore[attr-defined]
    return children, spec, [place + (f'["{k}"]' if isinstance(k, str) else f"[{k}]") for k in at], at


def mapped(value: Any, tap: Tap, skip: Skip = lambda value, place: None, place: str = "") -> Any:
    """Replaces each tensor of a structure by `tap(tensor, place)`, with places such as '[0]["name"]'. Returns the
    structure, or a new one if it cannot be written to.

    Structures are those that torch's pytree knows, and dataclasses. Any other object is passed to `skip(value, place)`
    and left unchanged.
    """
    return _mapped(value, tap, skip, place)[0]


def _mapped(value: Any, tap: Tap, skip: Skip, place: str) -> tuple[Any, bool]:
    """Returns the result of `mapped`, and whether it is a new object. (Compilers cannot compare all objects by
    `is`.)"""
    if isinstance(value, Tensor):
        tapped = tap(value, place)
        return tapped, tapped is not value
    if value is None or isinstance(value, (bool, int, float, str, torch.Size)):
        return value, False
    found = parts(value, place)
    if found is None:
        if dataclasses.is_dataclass(value):
            return _mapped_fields(value, tap, skip, place)
        skip(value, place)
        return value, False
    children, spec, places, at = found
    made = [_mapped(child, tap, skip, where) for child, where in zip(children, places, strict=True)]
    if not any([other for _, other in made]):
        return value, False
    if type(value) not in WRITABLE or not _may_write(children):
        return tree_unflatten([child for child, _ in made], spec), True
    for key, (child, _) in zip(at, made, strict=True):
        value[key] = child  # type: ignore[index]
    return value, False


def _mapped_fields(value: Any, tap: Tap, skip: Skip, place: str) -> tuple[Any, bool]:
    fields = [f for f in dataclasses.fields(value) if hasattr(value, f.name)]
    held = [getattr(value, f.name) for f in fields]
    made = [_mapped(x, tap, skip, f'{place}["{f.name}"]') for x, f in zip(held, fields, strict=True)]
    if not any([other for _, other in made]):
        return value, False
    copied = not _may_write(held)
    if copied and torch.compiler.is_compiling() and not _TRACES_COPY:
        given = zip(fields, made, strict=True)
        return dataclasses.replace(value, **{f.name: x for f, (x, _) in given if f.init}), True
    value = copy.copy(value) if copied else value
    for f, (x, _) in zip(fields, made, strict=True):
        object.__setattr__(value, f.name, x)
    return value, copied


def _may_write(held: list[Any]) -> bool:
    """Returns whether the tensors in a structure may be replaced in place. They may not if they are parameters, since a
    module that keeps them in a list would hold aliases of them after the step; nor in a subgraph, which may have no
    effect outside of itself."""
    if torch.compiler.is_compiling() and compiled.in_part():
        return False
    return not any([isinstance(t, Tensor) and t.is_leaf and t.requires_grad for t in tree_leaves(held)])


def may_hold_tensors(value: Any, depth: int = 3) -> bool:
    """Returns whether an object may hold tensors. Tensors in sets, iterators, views and slots are found by the garbage
    collector's references."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (type, enum.Enum, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return False
    return hasattr(value, "__dict__") or (
        depth > 0 and any([may_hold_tensors(held, depth - 1) for held in gc.get_referents(value)])
    )
