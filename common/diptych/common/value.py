"""Value objects: frozen, compared by content, and rebuilt from plain scalars.

One object serves as `torch.compile`'s opaque constant (`__fx_repr__`), `jax.jit`'s static argument (hash and equality)
and the core's argument struct. A value object is **not** a place for tensors, process groups or anything that lives.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Any


class ValueMeta(type):
    """Metaclass of all value classes.

    It adds nothing itself: a class can only change its metaclass if that was not plain `type`, and torch 2.11 asks a
    metaclass of its own from opaque types.
    """


class Value(metaclass=ValueMeta):
    """Base of quantizers, recipes and their parts. Subclasses are frozen dataclasses of scalars, enums and values."""

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Expression that rebuilds the object, and the classes that it names (the form that torch.fx asks for)."""
        classes: dict[str, type] = {}
        return _expression(self, classes), classes

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed. **Raises** TypeError for a field that does not exist."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that are equal for equal values, in every process and framework."""
        return hashlib.sha256(_expression(self, {}).encode()).hexdigest()[:12]


def _expression(value: Any, classes: dict[str, type]) -> str:
    if isinstance(value, enum.Enum):
        classes[type(value).__name__] = type(value)
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Value):
        classes[type(value).__name__] = type(value)
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        parts = (f"{f.name}={_expression(_canonical(f, getattr(value, f.name)), classes)}" for f in fields)
        return f"{type(value).__name__}({', '.join(parts)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise TypeError(f"a value object holds scalars, enums and values, not {type(value).__name__}: {value!r}")


def _canonical(field: dataclasses.Field[Any], value: Any) -> Any:
    """One spelling of what compares equal: 1 and 1.0, -0.0 and 0.0, 1 and True."""
    if field.type in ("float", float):
        return float(value) + 0.0
    return bool(value) if field.type in ("bool", bool) else value
