"""Arguments that recipes have in TransformerEngine and not here: each is translated, or refused by name.

A recipe keeps no field for them, so that its value and its fingerprint are those of the recipe it is translated to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from diptych.common.errors import UnsupportedError

T = TypeVar("T", bound=type)
Translation = Callable[[str, Any], dict[str, Any]]


def takes(**translations: Translation) -> Callable[[T], T]:
    """Class decorator: the constructor takes further keyword arguments, each with the function that translates it.

    A translation is called with the argument's full name and the value that was given; it returns arguments of the
    constructor, or raises.
    """

    def decorate(cls: T) -> T:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in [n for n in kwargs if n in translations]:
                for field, value in translations[name](f"{cls.__name__}.{name}", kwargs.pop(name)).items():
                    if kwargs.setdefault(field, value) != value:
                        raise ValueError(
                            f"{cls.__name__}: {name} means {field}={value!r}, and {field}={kwargs[field]!r} is given"
                        )
            init(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def only(accepted: Any, instead: str) -> Translation:
    """A translation of an argument that changes nothing where it has the accepted value.

    The translation **raises** NotImplementedError for another value; `instead` ends the message.
    """

    def translate(argument: str, value: Any) -> dict[str, Any]:
        if type(value) is not type(accepted) or value != accepted:
            raise UnsupportedError(f"{argument} must be {accepted!r}, got {value!r}: {instead}")
        return {}

    return translate
