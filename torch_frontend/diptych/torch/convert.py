"""`convert`: makes the nn.Linear modules of a model that is already built `diptych.torch.Linear`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from diptych.common.arguments import require_recipe
from diptych.common.recipes import Recipe
from diptych.torch.linear import Linear
from diptych.torch.module import QuantizedModule

# What a subclass of nn.Linear may define and be none other than nn.Linear once it is made.
_HARMLESS = {
    "__init__", "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__parameters__", "__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotate__",
    "__constants__", "reset_parameters",
}  # fmt: skip


class ConvertWarning(UserWarning):
    """A linear layer of the model that `convert` left as it is."""


def convert(
    model: nn.Module, recipe: Recipe | None = None, filter: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    """Makes each nn.Linear of a model a `Linear`, which quantizes inside `autocast` and is nn.Linear outside.

    The modules stay the same objects, with their parameters, tied ones too, hooks and mode; only their class changes.
    Each is told its place in the model as `name`, which roles carry. What is no plain nn.Linear is left, with a
    `ConvertWarning` that names it: a subclass or an instance with a `forward` or other methods of its own, and the
    output projection of nn.MultiheadAttention, whose forward is never called. Converted ones and the modules of this
    package are left as they are.

    nn.TransformerEncoderLayer evaluates without its linear layers' forward where torch's fast path is on:
    `torch.backends.mha.set_fastpath_enabled(False)` turns that off.

    **Arguments:** `model`: changed in place. `recipe`: of every converted module; None takes the region's.
    `filter`: called with each nn.Linear and its qualified name ("" for the model itself); False leaves it.

    **Returns:** `model`.

    **Raises:** TypeError for arguments of other kinds, or a filter that returns no bool; nothing is converted then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    require_recipe("convert", recipe)
    if filter is not None and not callable(filter):
        raise TypeError(f"convert: filter must be a function of (module, name), got {type(filter).__name__}")
    uncalled = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    chosen: list[tuple[str, nn.Linear]] = []
    left: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, QuantizedModule):
            continue
        if filter is not None and not _wanted(filter, module, name):
            continue
        why = "is called by nn.MultiheadAttention without its forward" if id(module) in uncalled else _departs(module)
        if why:
            left.append(f"{name or 'the model'} ({type(module).__name__}) {why}")
        else:
            chosen.append((name, module))
    for name, module in chosen:
        _adopt(module, recipe, name)
    for what in left:
        warnings.warn(f"convert: {what}; it is left as it is", ConvertWarning, stacklevel=2)
    return model


def _wanted(filter: Callable[[nn.Module, str], Any], module: nn.Module, name: str) -> bool:
    wanted = filter(module, name)
    if not isinstance(wanted, bool):
        raise TypeError(f"convert: filter returned {wanted!r} for {name!r}; it must return True or False")
    return wanted


def _departs(module: nn.Linear) -> str:
    """How a module departs from nn.Linear; empty where it does not."""
    if "forward" in vars(module):
        return "has a forward of its own"
    bases = type(module).__mro__
    own = {n for cls in bases[: bases.index(nn.Linear)] for n in vars(cls)} - _HARMLESS
    if not own:
        return ""
    return "overrides forward" if "forward" in own else f"is a subclass that defines {', '.join(sorted(own))}"


def _adopt(module: nn.Linear, recipe: Recipe | None, name: str) -> None:
    module.__class__ = Linear
    module.recipe, module.name = recipe, name  # type: ignore[attr-defined]
    module.save_original_input = False  # type: ignore[attr-defined]
