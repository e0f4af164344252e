"""Checks of arguments that most public functions of both panels share, with the same messages in both."""

from __future__ import annotations

from typing import Any

from diptych.common.errors import ArgumentError
from diptych.common.recipes import Recipe


def require_recipe(op: str, recipe: Any, optional: bool = True) -> None:
    """**Raises** ArgumentError if `recipe` is neither a recipe nor, where `optional`, None."""
    if isinstance(recipe, Recipe) or (recipe is None and optional):
        return
    also = " or None" if optional else ""
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise ArgumentError(
            f"{op}: recipe must be a diptych Recipe{also}, got the class {recipe.__name__} itself; make one of it: "
            f"{recipe.__name__}()"
        )
    raise ArgumentError(
        f"{op}: recipe must be a diptych Recipe{also}, got {type(recipe).__name__}; for instance Float8CurrentScaling()"
    )


def require_switches(op: str, **switches: Any) -> None:
    """**Raises** ArgumentError if a switch is not a bool; for a recipe the message says to pass it as `recipe=`."""
    for name, value in switches.items():
        if isinstance(value, bool):
            continue
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, Recipe):
            raise ArgumentError(
                f"{op}: {name} must be a bool, got {kind.__name__}, a recipe; pass it by its name: "
                f"recipe={kind.__name__}(...)"
            )
        raise ArgumentError(f"{op}: {name} must be a bool, got {type(value).__name__}")
