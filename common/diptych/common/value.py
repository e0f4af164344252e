"""Value objects: frozen, compared by content, and rebuilt from plain scalars.

One object serves as `torch.compile`'s opaque constant (`__fx_repr__`), `jax.jit`'s static argument (hash and equality)
and the core's argument struct. A value object must **not** hold tensors, process groups or other mutable state: a
process group anywhere in it raises on every path that reads the value.

Comparison by value is opt-in through `_value_fields`. A class that returns None there is compared by identity, which is
right for classes that hold mutable state.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import secrets
import types
import weakref
from typing import Any

from diptych.common.errors import ArgumentError

_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLAIN = (*_SCALARS, enum.Enum, type, types.ModuleType)


class ValueMeta(type):
    """Metaclass of all value classes.

    It exists because torch 2.11 replaces the metaclass of opaque types, which Python does not allow for plain `type`.
    Every class gets `Value`'s equality in its own namespace, so that no dataclass decorator generates one without the
    check for process groups.
    """

    _cached: frozenset[str]  # names of the class's cached properties, which follow from an object's value

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        if "__eq__" not in namespace and "__hash__" not in namespace:
            namespace |= {"__eq__": _equal, "__hash__": _hash}
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        cls._cached = frozenset(
            n for c in cls.__mro__ for n, held in vars(c).items() if isinstance(held, functools.cached_property)
        )
        return cls

    def __setattr__(cls, name: str, held: Any) -> None:
        # Each frozen dataclass is given a `__setattr__` of its own, whose error does not say what to do instead.
        super().__setattr__(name, _telling(held) if name == "__setattr__" else held)


def _telling(assign: Any) -> Any:
    """Wraps the `__setattr__` of a frozen dataclass: its error says how to change a value."""

    @functools.wraps(assign)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        try:
            assign(self, name, value)
        except dataclasses.FrozenInstanceError:
            kind, fields = type(self).__name__, getattr(self, "__dataclass_fields__", {})
            change = f"make a changed one, dataclasses.replace(it, {name}=...)"
            raise dataclasses.FrozenInstanceError(
                f"{kind}.{name} cannot be assigned: a {kind} is a value, which plans and graphs share; "
                + (change if name in fields else f"pass {name} to the constructor")
            ) from None

    return __setattr__


def _equal(self: Any, other: Any) -> bool:
    if self is other:
        return True
    if type(self) is not type(other):
        return NotImplemented
    mine = self._value_key()
    return mine is not None and mine == other._value_key()


def _hash(self: Any) -> int:
    key = self._value_key()
    return object.__hash__(self) if key is None else hash(key)


class Value(metaclass=ValueMeta):
    """Base of quantizers, recipes and their parts, usually frozen dataclasses of scalars, enums, functions and values.

    A subclass may define `_value_fields` and `_init_derived`.
    """

    def _value_fields(self) -> tuple[str, ...] | None:
        """Names of the attributes that are the object's whole value; None: it is compared by identity."""
        return field_names(type(self)) if dataclasses.is_dataclass(self) else None

    def _init_derived(self) -> None:
        """Sets attributes that are derived from the value fields; called on an object made without `__init__`."""

    def _value_key(self) -> tuple[Any, ...] | None:
        """The key that equality and hash compare. **Raises** TypeError if the object holds a process group anywhere."""
        _refuse_groups(self)
        names = self._value_fields()
        if names is None:
            return None
        held = vars(self)
        return tuple([_key(held[name]) for name in names])

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Returns an expression that rebuilds the object, and the names in it (the form that torch.fx requires).

        Generated code evaluates the expression in each call, so it looks up an existing object, always the same one.

        **Raises** TypeError for an object that is compared by identity, or holds a process group.
        """
        names: dict[str, Any] = {}
        expression = _expression(self, names)
        mentioned = ", ".join(f"{name}={name}" for name in names)
        return f"{_name(value_of, names)}({expression!r}, {mentioned})", names

    @classmethod
    def _rebuild(cls, **fields: Any) -> Any:
        """Makes an object with these value fields. `__init__` does not run; `_init_derived` does."""
        self = object.__new__(cls)
        self.__setstate__(fields)
        self._init_derived()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled object. What a file of an earlier version does not have gets its default."""
        for name, value in state.items():
            object.__setattr__(self, name, value)
        for name in field_names(type(self)):
            if name not in state and hasattr(type(self), name):
                object.__setattr__(self, name, getattr(type(self), name))

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed. **Raises** TypeError for a field that does not exist."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def described(self) -> str:
        """`repr(self)`, for errors that are raised while torch traces: Dynamo calls methods of constants, and no
        `repr` (torch 2.14)."""
        return repr(self)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits, equal for equal values in every process and framework.

        With a lambda or local function among the fields, the fingerprint is valid in this process only.
        """
        return hashlib.sha256(_expression(self, None).encode()).hexdigest()[:12]


@functools.cache
def field_names(cls: type) -> tuple[str, ...]:
    """Names of a dataclass's fields, in order."""
    return tuple(f.name for f in dataclasses.fields(cls))


def check_types(value: Any) -> None:
    """Checks the scalar fields of a dataclass against their annotations. **Raises** ArgumentError with the field."""
    accepted = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
    for field in dataclasses.fields(value):
        kinds = accepted.get(str(field.type))
        held = getattr(value, field.name)
        if kinds and (not isinstance(held, kinds) or (isinstance(held, bool) and bool not in kinds)):
            raise ArgumentError(f"{type(value).__name__}.{field.name} must be {field.type}, got {held!r}")


def check_parts(value: Any, *kinds: type) -> None:
    """Checks the fields of a dataclass whose annotations name one of `kinds`, which are enums and classes of values.
    **Raises** ArgumentError with the field and what it may be."""
    by_name = {kind.__name__: kind for kind in kinds}
    for field in dataclasses.fields(value):
        kind, held = by_name.get(str(field.type)), getattr(value, field.name)
        if kind is None or isinstance(held, kind):
            continue
        allowed = f"a diptych.common.{kind.__name__}"
        if issubclass(kind, enum.Enum):
            allowed = f"one of {', '.join(f'{kind.__name__}.{member.name}' for member in kind)}"
        raise ArgumentError(f"{type(value).__name__}.{field.name} must be {allowed}, got {held!r}")


def _key(value: Any) -> Any:
    """Returns a key for comparison: equal keys for -0.0 and 0.0, different keys for True and 1."""
    kind = type(value)
    if kind is bool:
        return "yes" if value else "no"
    if kind is float:
        return value + 0.0
    return tuple(map(_key, value)) if kind is list or kind is tuple else value


def _refuse_groups(owner: Any) -> None:
    for name, held in vars(owner).items():
        if type(held) not in _SCALARS and name not in owner._cached and _holds_group(held, set()):
            raise TypeError(
                f"{type(owner).__name__}.{name} holds a process group, which is no part of a value: a graph compiled "
                "for one group would serve another. Pass the group to the quantize call instead"
            )


def _holds_group(value: Any, seen: set[int]) -> bool:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return False
    if any(c.__name__ == "ProcessGroup" for c in type(value).__mro__):
        return True
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts += value
    elif isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        parts += [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, types.MethodType):
        parts.append(value.__self__)
    elif hasattr(value, "__dict__"):
        parts += vars(value).values()
    return any(_holds_group(part, seen) for part in parts)


def _expression(value: Any, names: dict[str, Any] | None) -> str:
    """Returns Python source of a value. `names` collects the objects in it; None: full names, for a fingerprint."""
    if isinstance(value, enum.Enum):
        return f"{_name(type(value), names)}.{value.name}"
    if isinstance(value, Value) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        if isinstance(value, Value):
            _refuse_groups(value)
            fields = value._value_fields()
            if fields is None:
                raise TypeError(
                    f"{type(value).__name__} is compared by identity and cannot be rebuilt from a value; "
                    "define _value_fields() to opt in"
                )
        else:
            fields = field_names(type(value))
        maker = "._rebuild" if isinstance(value, Value) and names is not None else ""
        parts = (f"{n}={_expression(_canonical(value, n), names)}" for n in fields)
        return f"{_name(type(value), names)}{maker}({', '.join(parts)})"
    if isinstance(value, (tuple, list)):
        return "(" + "".join(_expression(v, names) + ", " for v in value) + ")"
    if names is not None and isinstance(value, types.FunctionType) and "<" in value.__qualname__:
        return f"{_name(held, names)}({_token(value)!r})"
    if isinstance(value, (types.FunctionType, type)):
        return _name(value, names)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise TypeError(f"a value object holds scalars, enums, functions and values, not {type(value).__name__}: {value!r}")


_MADE: dict[Any, Any] = {}


def value_of(expression: str, /, **names: Any) -> Any:
    """Returns the value object of an expression of `__fx_repr__`; equal expressions give the same object."""
    key = (expression, *names.values())
    made = _MADE.get(key)
    if made is None:
        if len(_MADE) >= 4096:
            _MADE.clear()
        made = _MADE[key] = eval(expression, dict(names))
    return made


_HELD: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_TOKENS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _token(thing: Any) -> str:
    """Returns a name for an object that cannot be imported by name; no other object in any process has this name."""
    if thing not in _TOKENS:
        _TOKENS[thing] = secrets.token_hex(8)
        _HELD[_TOKENS[thing]] = thing
    return _TOKENS[thing]


def held(token: str) -> Any:
    """Returns the lambda or local function of a token. **Raises** KeyError for a token of another process."""
    return _HELD[token]


def _name(thing: Any, names: dict[str, Any] | None) -> str:
    if names is None:
        local = "<" in thing.__qualname__
        return thing.__qualname__ + (f"@{thing.__module__}:{id(thing):x}" if local else "")
    name, i = thing.__name__ if thing.__name__.isidentifier() else "anonymous", 0
    while names.setdefault(name if not i else f"{name}_{i}", thing) is not thing:
        i += 1
    return name if not i else f"{name}_{i}"


def _canonical(owner: Any, name: str) -> Any:
    """A float field always prints as one: 1 and 1.0, -0.0 and 0.0."""
    value = getattr(owner, name)
    for field in dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ():
        if field.name == name and field.type in ("float", float):
            return float(value) + 0.0
    return value
