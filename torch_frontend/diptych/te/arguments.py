"""Calls with arguments in TransformerEngine's order, by its table of signatures (`diptych.common.te_signatures`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from diptych.common.te_signatures import REQUIRED, SIGNATURES


def signature(name: str) -> inspect.Signature:
    """Returns the signature of a class or function there. `others`: keywords that diptych has in addition."""
    kind, empty = inspect.Parameter, inspect.Parameter.empty
    made = [
        kind(argument, kind.POSITIONAL_OR_KEYWORD, default=empty if default is REQUIRED else default)
        for argument, default in SIGNATURES[name].items()
    ]
    return inspect.Signature([*made, kind("others", kind.VAR_KEYWORD)])


def bound(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by their names. **Raises** TypeError for one that is missing or given twice."""
    try:
        given = signature(name).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    return given | given.pop("others", {})


def default_device() -> str | None:
    """Returns the device of parameters where none is given: the current GPU; torch's default device without a GPU."""
    return "cuda" if torch.cuda.is_available() else None
