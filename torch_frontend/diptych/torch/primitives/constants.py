"""Makes the value objects of `diptych.common` constants of torch.compile's graphs.

Torch calls them opaque value types: an op may take one as an argument, Dynamo guards on its equality, reads its
attributes and calls its methods while tracing, and the graph rebuilds it from `__fx_repr__`. Invariants:

- Every class whose objects are compared by value is registered: quantizers, recipes and their parts, and classes that a
  user derives from them, also after this import (`__init_subclass__`). A dataclass derived from `Value` itself needs
  `register(cls)`: Python calls `__init_subclass__` before it has fields.
- A quantizer of the user's own is compared by identity unless it says otherwise (`_value_fields`), and is no opaque
  type: Dynamo traces into it as into any object.
- The API is private to torch. Where it is missing, `AVAILABLE` is False: everything still runs eagerly, and quantizing
  ops break the graph instead of entering it.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from diptych.common.quantizers import Quantizer
from diptych.common.value import Value
from diptych.torch.private.opaque import (
    AVAILABLE,
    MemberType,
    OpaqueMeta,
    group_named,
    opaque_name,
    register_groups,
    register_opaque,
)

if not AVAILABLE:  # pragma: no cover - no supported torch lacks them
    warnings.warn(
        f"torch {torch.__version__} has no opaque types: diptych runs eagerly, and torch.compile breaks graphs at it",
        RuntimeWarning,
        stacklevel=2,
    )


def tree(cls: type) -> Iterator[type]:
    """`cls` and all its subclasses, parents first."""
    yield cls
    for sub in cls.__subclasses__():
        yield from tree(sub)


def by_value(cls: type[Value]) -> bool:
    """Whether a class has opted into being compared by value."""
    if issubclass(cls, Quantizer):
        return cls._value_fields is not Quantizer._value_fields
    return dataclasses.is_dataclass(cls) or cls._value_fields is not Value._value_fields


def members(cls: type) -> dict[str, Any]:
    """Returns what Dynamo may touch of an instance: each public attribute and method, evaluated with the real object.

    `quantize_impl` is left out, because it gets tensors and Dynamo must trace into it; so is `fingerprint`, because
    torch reads all members beforehand, and an object with hidden state has none.
    """
    names = {n for n in dir(cls) if not n.startswith("_")} - {"quantize_impl", "fingerprint"}
    names.add("__eq__")  # torch 2.11 needs it to compare two constants
    for base in cls.__mro__:  # a field without a default is no attribute of the class
        for name, kind in inspect.get_annotations(base).items():
            if not name.startswith("_") and not isinstance(kind, dataclasses.InitVar) and "InitVar" not in str(kind):
                names.add(name)
    return {n: MemberType.USE_REAL for n in sorted(names)}


def swap_metaclass(cls: type, meta: type) -> None:
    """Gives `cls` and all its subclasses a metaclass derived from `meta` and their own one.

    Torch 2.11 takes opaque types of its own metaclass only. Python allows the change because value classes have an own
    metaclass already (assigning over plain `type` is refused); it does not reach subclasses that exist, hence the walk.
    """
    swapped: dict[type, type] = {}  # one new metaclass per old one, or later subclasses of two of them would conflict
    for sub in tree(cls):
        own = type(sub)
        if not issubclass(own, meta):
            if own not in swapped:
                swapped[own] = type(f"Opaque{own.__name__}", (meta, own), {})
            sub.__class__ = swapped[own]


def register(cls: type[Value]) -> None:
    """Registers one value class with torch.compile, and its instances with `torch.load(weights_only=True)`."""
    torch.serialization.add_safe_globals([cls])
    if not AVAILABLE:
        return
    try:
        _register(cls)
    except TypeError:
        if isinstance(cls, OpaqueMeta):
            raise
        swap_metaclass(Value, OpaqueMeta)
        _register(cls)


def _register(cls: type[Value]) -> None:
    try:
        register_opaque(cls, members(cls))
    except RuntimeError as error:  # a class defined anew under its name, as in a notebook's cell
        if "already registered" not in str(error) or opaque_name(cls) is None:
            raise


def schema_type(cls: type[Value]) -> str:
    """The name of a registered class in an op's schema."""
    return opaque_name(cls)


@dataclasses.dataclass(frozen=True)
class Constants(Value):
    """The constants of a graph's node: nested tuples of scalars and values."""

    items: tuple[Any, ...]


class Group:
    """Annotation of an argument that is a process group or None."""


def _group_type() -> str:
    """Returns the type of a process group in schemas. Where torch has none (2.11), a group is passed by its name."""
    if register_groups is None or not (AVAILABLE and torch.distributed.is_available()):
        return "str"
    register_groups()
    return opaque_name(torch.distributed.ProcessGroup)


GROUP_TYPE = _group_type()


def group_argument(group: Any) -> Any:
    """Returns a process group in the form in which ops take it."""
    return group.group_name if group is not None and GROUP_TYPE == "str" else group


def group_of(argument: Any) -> Any:
    """Returns the process group from an op's argument."""
    if not isinstance(argument, str):
        return argument
    return group_named(argument)


def _on_new_subclass(cls: type[Value], **kwargs: Any) -> None:
    super(Value, cls).__init_subclass__(**kwargs)
    if by_value(cls):
        register(cls)


for _cls in tree(Value):
    if by_value(_cls):
        register(_cls)
Value.__init_subclass__ = classmethod(_on_new_subclass)  # type: ignore[method-assign,assignment]
