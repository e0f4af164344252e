"""`convert`: makes the linear layers of an existing model quantize, and reports those that it left."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, overload

from torch import nn
from torch.nn.parameter import UninitializedParameter

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.conversion import ConversionReport, ConvertedModule, ConvertWarning, reason
from diptych.common.errors import ArgumentError
from diptych.common.recipes import Recipe
from diptych.torch.modules import filters
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.experts import TransposedLinear, become_experts, departs_from_experts, is_transposed_linear
from diptych.torch.modules.linear import Linear

# What a subclass of nn.Linear may define and be none other than nn.Linear once it is made.
_HARMLESS = {
    "__init__", "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__parameters__", "__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotate__",
    "__constants__", "reset_parameters",
}  # fmt: skip

# --- converting ------------------------------------------------------------------------------------------------------

_Filter = filters.Kind | Callable[[nn.Module, str], bool]


@overload
def convert(
    model: nn.Module, recipe: Recipe | None = None, filter: _Filter | None = None, *, verbose: bool = True,
    return_report: Literal[False] = False,
) -> nn.Module: ...  # fmt: skip
@overload
def convert(
    model: nn.Module, recipe: Recipe | None = None, filter: _Filter | None = None, *, verbose: bool = True,
    return_report: Literal[True],
) -> tuple[nn.Module, ConversionReport]: ...  # fmt: skip


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    filter: _Filter | None = None,
    *,
    verbose: bool = True,
    return_report: bool = False,
) -> Any:
    """Makes the linear layers of a model quantize by a recipe, or in `autocast` regions where no recipe is given.

    Without a `recipe`, a region is needed: outside of regions the layers then compute what they did before, and the
    report says so.

    nn.Linear becomes `Linear`; a Conv1D as Hugging Face's GPT-2 has it, and experts in stacks as transformers' mixtures
    have them (`gate_up_proj`, `down_proj`), become layers of `experts`, which permute tokens and multiply groups. The
    modules stay the same objects, with their parameters, tied ones too, hooks, mode and names in state dicts; only
    their class changes. Each gets its place in the model as `name`, for its roles. Other modules that multiply by
    matrices are left, with a `ConvertWarning` that names them: a subclass of nn.Linear or an instance with a `forward`
    or other methods of its own, the output projection of nn.MultiheadAttention, whose forward is never called, and
    stacks of matrices that another kind of module holds. Modules that are converted already and those of this package
    are left as they are.

    nn.TransformerEncoderLayer evaluates without its linear layers' forward where torch's fast path is on:
    `torch.backends.mha.set_fastpath_enabled(False)` turns that off.

    **Arguments:** `model`: changed in place. `recipe`: of every converted module; None takes the region's.
    `filter`: which layers to convert: a kind of `diptych.torch.filters`, such as `~filters.head`, or a function that is
    called with each layer that could be converted and its qualified name ("" for the model itself); False leaves it.
    Factors of adapters (LoRA) and layers with fewer than 16 features on a side are left, unless the filter names
    `filters.adapters`, `filters.small` or `filters.everything`, whatever a function answers. `verbose`: print the
    report. `return_report`: return it too.

    **Returns:** `model`; with `return_report` (model, `ConversionReport`), which says why a layer was left.

    **Raises:** ArgumentError, a TypeError, for arguments of other kinds, or a filter that returns no bool; ValueError
    for a filter that names a part which the model lacks. Nothing is converted then.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    require_recipe("convert", recipe)
    require_switches("convert", verbose=verbose, return_report=return_report)
    by_filter, by_default = filters.left_by(filter, model)
    skipped = uncalled(model)
    named, kinds = list(model.named_modules()), {id(m): type(m).__name__ for m in model.modules()}
    chosen: list[tuple[str, Any, Callable[[Any], str]]] = []
    why: dict[int, str] = {}
    for name, module in named:
        how, departs = offer(module, skipped)
        if how is None and not departs:
            continue
        if left := by_filter(module, name):
            why[id(module)] = left
        elif how is None:
            why[id(module)] = departs
            warnings.warn(_said(name, module, departs), ConvertWarning, stacklevel=2)
        elif left := by_default(module, name):
            why[id(module)] = left
        else:
            chosen.append((name, module, how))
    for name, module, how in chosen:
        departs = how(module)
        if departs:
            why[id(module)] = departs
            warnings.warn(_said(name, module, departs), ConvertWarning, stacklevel=2)
        else:
            module.recipe, module.name = recipe, name
            module.prepare_states()
    report = _report(named, kinds, why)
    if verbose:
        print(report)
    return (model, report) if return_report else model


def _said(name: str, module: nn.Module, departs: str) -> str:
    return f"convert: {name or 'the model'} ({type(module).__name__}) {departs}; it is left as it is"


def uncalled(model: nn.Module) -> set[int]:
    """Returns the ids of the layers whose forward nn.MultiheadAttention does not call."""
    return {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}


def offer(module: nn.Module, skipped: set[int]) -> tuple[Callable[[Any], str] | None, str]:
    """Returns the function that converts a module, or why it cannot be converted; neither for other kinds of
    modules. `skipped`: by `uncalled`."""
    if isinstance(module, QuantizedModule):
        return None, ""
    if isinstance(module, nn.Linear):
        why = "is called by nn.MultiheadAttention without its forward" if id(module) in skipped else _departs(module)
        return (None, why) if why else (_become_linear, "")
    if is_transposed_linear(module):
        return _become_transposed, ""
    if type(module).__module__.startswith("torch.") or not any([p.dim() == 3 for p in own_parameters(module)]):
        return None, ""
    why = departs_from_experts(module)
    return (None, why) if why else (become_experts, "")


def _departs(module: nn.Linear) -> str:
    """Returns how a module departs from nn.Linear; empty if it does not."""
    if "forward" in vars(module):
        return "has a forward of its own"
    bases = type(module).__mro__
    own = {n for cls in bases[: bases.index(nn.Linear)] for n in vars(cls)} - _HARMLESS
    if not own:
        return ""
    return "overrides forward" if "forward" in own else f"is a subclass that defines {', '.join(sorted(own))}"


def _become_linear(module: Any) -> str:
    module.__class__ = Linear
    module.save_original_input = False
    return ""


def _become_transposed(module: Any) -> str:
    module.__class__ = TransposedLinear
    return ""


def _report(named: list[tuple[str, nn.Module]], kinds: dict[int, str], why: dict[int, str]) -> ConversionReport:
    """Returns the parameter count of each module; tied parameters count once, at a module that quantizes if there is
    one."""
    owners = owners_of([module for _, module in named])
    rows = []
    for name, module in named:
        own = own_parameters(module)
        if own or id(module) in why:
            count = sum([p.numel() for p in own if owners[id(p)] == id(module)])
            converted = isinstance(module, QuantizedModule)
            left = "" if converted else why.get(id(module)) or reason_left(module)
            recipe = module.recipe if isinstance(module, QuantizedModule) else None
            rows.append(ConvertedModule(name, kinds[id(module)], count, converted, left, recipe))
    return ConversionReport(tuple(rows))


def owners_of(modules: list[nn.Module]) -> dict[int, int]:
    """Returns the id of the module at which a parameter counts, by the parameter's id: a module that quantizes if one
    holds it."""
    owners: dict[int, int] = {}
    for module in sorted(modules, key=lambda m: not isinstance(m, QuantizedModule)):
        for p in own_parameters(module):
            owners.setdefault(id(p), id(module))
    return owners


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that a module itself holds, without those that have no shape yet."""
    return [p for p in module.parameters(recurse=False) if not isinstance(p, UninitializedParameter)]


def reason_left(module: nn.Module) -> str:
    """Returns why a module is left that is no layer for `convert`."""
    return reason(isinstance(module, nn.Embedding | nn.EmbeddingBag), [p.dim() for p in own_parameters(module)])
