"""Late states: a forward makes them after the module was copied, wrapped or saved, so that the copy or keys lack them.

`state_dict`, a deep copy and DistributedDataParallel each leave a `Sighting` on the modules that they visit. The
modules of one call share it, so that each root is reported once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from diptych.common.errors import LateStateWarning
from diptych.torch.private.sharding import active_ddp


class Sighting:
    """One call that copied, wrapped or saved modules. `after`: the call, in the words of the warning."""

    def __init__(self, after: str) -> None:
        self.after, self.warned = after, False


_dict: tuple[Callable[[], Any], Sighting] | None = None  # the state dict that is being filled, by a weak reference
_wrappers: weakref.WeakKeyDictionary[nn.Module, Sighting] = weakref.WeakKeyDictionary()
_seen: weakref.WeakKeyDictionary[nn.Module, Sighting] = weakref.WeakKeyDictionary()


def by_state_dict(destination: Any) -> Sighting:
    """The sighting of the `state_dict()` that fills `destination`, which all modules of one call are given."""
    global _dict
    if _dict is None or _dict[0]() is not destination:
        try:
            _dict = weakref.ref(destination), Sighting("state_dict() was called")
        except TypeError:  # a plain dict of the caller's own
            return Sighting("state_dict() was called")
    return _dict[1]


def by_deepcopy(memo: dict[Any, Any]) -> Sighting:
    """The sighting of the deep copy whose memo this is."""
    key = id(Sighting)
    if key not in memo:
        memo[key] = Sighting("the model was deep-copied")
    return memo[key]


def see(module: nn.Module, sighting: Sighting) -> None:
    """Leaves a sighting on a module; the first one stays."""
    _seen.setdefault(module, sighting)


def forget(module: nn.Module) -> None:
    """Drops the sighting of a module whose states were reset."""
    _seen.pop(module, None)


def _by_wrapper() -> Sighting | None:
    """The sighting of the DistributedDataParallel whose forward is running."""
    wrapper = active_ddp()
    if wrapper is None:
        return None
    return _wrappers.setdefault(wrapper, Sighting("DistributedDataParallel wrapped the model"))


def announce(module: nn.Module, states: str, recipe: Any) -> None:
    """Warns of states that a forward made, once for each sighting; does nothing for a module without one."""
    sighting = _seen.get(module) or _by_wrapper()
    if sighting is None or sighting.warned:
        return
    sighting.warned = True
    warnings.warn(
        f"{type(module).__name__} made its {states} for {type(recipe).__name__} in a forward, after {sighting.after}: "
        "the copy or the saved keys lack them; call diptych.torch.prepare(model, recipe) before copying, saving, "
        "loading by keys or wrapping (reported once for each model)",
        LateStateWarning,
        stacklevel=4,
    )
