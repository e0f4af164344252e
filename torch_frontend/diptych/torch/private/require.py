"""How this room takes names of torch's private API: its functions look a name up where a file of the room is imported,
and say in diptych's words what torch lacks. `BORROWED` lists every name, and what it is needed for.

Invariants:

- Every name was seen in torch 2.11, 2.13 and 2.14, unless `known` says in which of them.
- A caller pays nothing: what `need` and `later` return is torch's own function or class, which torch.compile knows by
  its identity, and what `flag` returns is a C function.
- Where torch lacks a name, `need` raises at import, `later` and the others where it is first used, and `known` never.
- Importing the files of this room imports no module of torch that `import torch` has not. Only `dynamo.py` imports
  torch._dynamo, which takes a second: import that file inside of functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import torch

from diptych.common.errors import FrameworkVersionError

SUPPORTED = "2.11 to 2.14"


class Borrowed(NamedTuple):
    """A row of `BORROWED`. `names`: one of them must exist. `use`: completes "which diptych needs ...". `seen`: the
    versions that have it, where not all do, or where diptych does without it."""

    names: tuple[str, ...]
    use: str
    seen: tuple[str, ...] = ()


BORROWED: dict[str, Borrowed] = {}
"""All names that were looked up, by the first of each row."""

_MISSING = object()


def missing(names: tuple[str, ...], use: str) -> FrameworkVersionError:
    """Returns the error that says what this torch lacks."""
    said = f"torch {torch.__version__} lacks {' and '.join(names)}, which diptych needs {use}"
    return FrameworkVersionError(f"{said}; it supports torch {SUPPORTED}")


def lacks(use: str, owner: str, *names: str) -> FrameworkVersionError:
    """Returns the error of a row of `declare`."""
    return missing(tuple([f"{owner}.{name}" for name in names]), use)


def found(name: str) -> Any:
    """Returns the object of a dotted name, or `_MISSING`."""
    held: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(held, part):
            try:
                import_module(".".join(parts[:i]))
            except ImportError:  # a torch that was built without torch.distributed raises it too
                return _MISSING
        held = getattr(held, part, _MISSING)
    return held


def _first(names: tuple[str, ...], use: str, seen: tuple[str, ...] = ()) -> Any:
    BORROWED[names[0]] = Borrowed(names, use, seen)
    held = (found(name) for name in names)
    return next((one for one in held if one is not _MISSING), _MISSING)


def need(use: str, *names: str) -> Any:
    """Returns the first of `names` that exists. **Raises** FrameworkVersionError, an ImportError, where none does."""
    held = _first(names, use)
    if held is _MISSING:
        raise missing(names, use)
    return held


def later(use: str, *names: str) -> Any:
    """Returns what `need` returns or, where it would raise, a function that raises the same when it is called."""
    held = _first(names, use)
    return partial(_raise, names, use) if held is _MISSING else held


def _raise(names: tuple[str, ...], use: str, *_: Any, **__: Any) -> NoReturn:
    raise missing(names, use)


def known(use: str, name: str, *seen: str) -> Any:
    """Returns what has the name, or None where torch lacks it and the caller does without it. `seen`: the versions that
    have it."""
    held = _first((name,), use, seen)
    return None if held is _MISSING else held


def flag(use: str, name: str) -> Callable[[], Any]:
    """Returns a function of the value that a variable of torch's has at the time; it raises as that of `later`."""
    owner, _, attribute = name.rpartition(".")
    held = _first((name,), use)
    return partial(_raise, (name,), use) if held is _MISSING else partial(getattr, found(owner), attribute)


def attribute(use: str, owner: str, *names: str) -> Callable[[Any], Any]:
    """Returns a function of an attribute that objects of a class of torch have, whose module is not imported for it: of
    the first of `names` that the object has. The function raises as that of `later`."""
    full = declare(use, owner, *names)

    def value(held: Any) -> Any:
        for name in names:
            if hasattr(held, name):
                return getattr(held, name)
        raise missing(full, use)

    return value


def declare(use: str, owner: str, *names: str) -> tuple[str, ...]:
    """Lists names of `owner`, a class or module of torch, that are looked up in it later. Returns them with it."""
    full = tuple([f"{owner}.{name}" for name in names])
    BORROWED[full[0]] = Borrowed(full, use)
    return full
