"""Arguments that recipes have in TransformerEngine but not in diptych: each is translated, or refused by name.

A recipe has no field for them, so its value and fingerprint are those of the equivalent diptych arguments.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from diptych.common.errors import UnsupportedError

T = TypeVar("T", bound=type)
Translation = Callable[[str, Any], dict[str, Any]]


def takes(**translations: Translation) -> Callable[[T], T]:
    """Returns a class decorator by which the constructor takes more keyword arguments, each with its translation.

    A translation is a function of the argument's full name and its value; it returns arguments of the constructor, or
    raises.
    """

    def decorate(cls: T) -> T:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                _require_argument(cls, translations, name)
            for name in [n for n in kwargs if n in translations]:
                for field, value in translations[name](f"{cls.__name__}.{name}", kwargs.pop(name)).items():
                    if kwargs.setdefault(field, value) != value:
                        raise ValueError(
                            f"{cls.__name__}: {name} means {field}={value!r}, and {field}={kwargs[field]!r} is given"
                        )
            init(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[misc]
        _TRANSLATIONS[cls] = translations
        return cls

    return decorate


_TRANSLATIONS: dict[type, Mapping[str, Translation]] = {}


def also_takes(cls: type, *, without: str) -> Callable[[T], T]:
    """Returns a decorator of a class derived from `cls`, which then takes the same arguments but one."""
    return takes(**{name: translate for name, translate in _TRANSLATIONS[cls].items() if name != without})


def _require_argument(cls: type, translations: Mapping[str, Translation], name: str) -> None:
    own = sorted([f.name for f in dataclasses.fields(cls) if f.init], key=lambda own: own not in cls.__annotations__)
    if name in translations or name in own:
        return
    near = difflib.get_close_matches(name, [*own, *translations], 1)
    nearest = f" (nearest: {near[0]!r})" if near else ""
    raise TypeError(f"{cls.__name__} has no argument {name!r}{nearest}; it has {', '.join(own)}")


def only(accepted: Any, instead: str) -> Translation:
    """Returns a translation that accepts one value of an argument, which then has no effect.

    The translation **raises** NotImplementedError for another value; `instead` ends the message.
    """

    def translate(argument: str, value: Any) -> dict[str, Any]:
        if type(value) is not type(accepted) or value != accepted:
            raise UnsupportedError(f"{argument} must be {accepted!r}, got {value!r}: {instead}")
        return {}

    return translate


NO_ATTENTION = dict.fromkeys(("fp8_dpa", "fp8_mha"), only(False, "diptych has no attention in low precision"))
"""TransformerEngine's options of attention, which have one value here."""
_NO_4OVER6 = "diptych has no 4-over-6 scaling of NVFP4"
FOUR_OVER_SIX = {
    "nvfp4_4over6": only("none", _NO_4OVER6),
    "nvfp4_4over6_e4m3_use_256": only("all", _NO_4OVER6),
    "nvfp4_4over6_err_mode": only("MAE", _NO_4OVER6),
}
"""TransformerEngine's options of NVFP4 that have one value here."""
