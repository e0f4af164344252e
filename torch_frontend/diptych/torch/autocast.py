"""`autocast`: the region in which `diptych.torch.Linear` runs in low precision.

The state is thread-local, as that of `torch.amp.autocast`: a region entered in one thread is not seen by another. It is
one object that lives as long as the process, so that a compiled function guards on the recipe's value alone: a recipe
that is built anew each step and equals the last one compiles nothing anew.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from diptych.common.recipes import DEFAULT_RECIPE, Recipe
from diptych.torch import opaque  # recipes must be registered before one is traced  # noqa: F401

F = TypeVar("F", bound=Callable[..., Any])


class _State(threading.local):
    # Set per thread in __init__: torch 2.11 does not guard on a class attribute that a thread's own value shadows.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None


STATE = _State()


def is_autocast_enabled() -> bool:
    """Whether this thread is inside an enabled `autocast` region."""
    return STATE.recipe is not None


def get_autocast_recipe() -> Recipe | None:
    """The recipe of this thread's innermost region; None outside of regions and in a disabled one."""
    return STATE.recipe


class autocast:
    """Region whose `Linear` modules quantize by a recipe; a context manager and a decorator, free to nest.

    **Arguments:** `enabled`: False runs the region in high precision, also inside an enabled one. `recipe`: None is
    `DEFAULT_RECIPE`, Float8CurrentScaling(). A recipe given to a module itself goes before that of the region.

    **Raises:** TypeError if `recipe` is not a recipe, or if what is decorated is a generator or a coroutine, whose body
    would run outside of the region.

    What runs in backward is fixed when forward runs, so `backward()` may stand inside or outside of the region. Under
    `torch.utils.checkpoint` an eager `Linear` is recomputed with the recipe of its last forward. A *compiled* function
    under an eager checkpoint has no such memory: enter the region inside of the checkpointed function.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None) -> None:
        # While Dynamo traces, torch 2.11 shows an opaque value's wrapper to isinstance; `Linear` would fail on it.
        if recipe is not None and not torch.compiler.is_compiling() and not isinstance(recipe, Recipe):
            raise TypeError(
                f"autocast: recipe must be a diptych.common.Recipe or None, got {type(recipe).__name__}; "
                "for instance Float8CurrentScaling()"
            )
        self.enabled = bool(enabled)
        self.recipe = DEFAULT_RECIPE if recipe is None else recipe
        self._outer: list[Recipe | None] = []

    def __enter__(self) -> autocast:
        self._outer.append(STATE.recipe)
        STATE.recipe = self.recipe if self.enabled else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        STATE.recipe = self._outer.pop()

    def __call__(self, fn: F) -> F:
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"autocast cannot decorate the generator or coroutine {getattr(fn, '__name__', fn)!r}: its body runs "
                "after the region has ended; enter the region inside of it"
            )
        enabled, recipe = self.enabled, self.recipe

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with autocast(enabled, recipe):  # a region of its own per call: calls may recurse and run in threads
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]
