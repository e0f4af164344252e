"""`convert`: makes the linear layers of an existing model quantize, holds their weights, and reports what it left."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.conversion import ConversionReport, ConvertedModule, ConvertWarning, reason
from diptych.common.errors import ArgumentError
from diptych.common.recipes import Recipe
from diptych.torch.modules import filters, held_weights
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.experts import (
    RoutedExperts,
    TransposedLinear,
    become_experts,
    departs_from_experts,
    is_transposed_linear,
)
from diptych.torch.modules.held_state import held_bytes
from diptych.torch.modules.held_weights import Holder
from diptych.torch.modules.linear import Linear
from diptych.torch.modules.model_init import initial_recipe

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
    model: nn.Module, recipe: Recipe | None = None, filter: _Filter | None = None, *, hold: bool | None = None,
    inference: bool | None = None, verbose: bool = True, return_report: Literal[False] = False,
) -> nn.Module: ...  # fmt: skip
@overload
def convert(
    model: nn.Module, recipe: Recipe | None = None, filter: _Filter | None = None, *, hold: bool | None = None,
    inference: bool | None = None, verbose: bool = True, return_report: Literal[True],
) -> tuple[nn.Module, ConversionReport]: ...  # fmt: skip


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    filter: _Filter | None = None,
    *,
    hold: bool | None = None,
    inference: bool | None = None,
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
    are left as they are, unless weights are held.

    nn.TransformerEncoderLayer evaluates without its linear layers' forward where torch's fast path is on:
    `torch.backends.mha.set_fastpath_enabled(False)` turns that off.

    **Arguments:** `model`: changed in place. `recipe`: of every converted module; None takes the region's.
    `filter`: which layers to convert: a kind of `diptych.torch.filters`, such as `~filters.head`, or a function that is
    called with each layer that could be converted and its qualified name ("" for the model itself); False leaves it.
    Factors of adapters (LoRA) and layers with fewer than 16 features on a side are left, unless the filter names
    `filters.adapters`, `filters.small` or `filters.everything`, whatever a function answers. `hold`: True holds the
    weights of these layers, and those of this package's layers that the filter does not leave, quantized and in no
    other precision, as `diptych.torch.hold` does: by the module's own recipe, or by `recipe`, which becomes the
    module's own; None does so inside of a `quantized_model_init` region alone, by that region's recipe where neither
    exists. `inference`: for weights that are held, as `hold` has it. `verbose`: print the report. `return_report`:
    return it too.

    **Returns:** `model`; with `return_report` (model, `ConversionReport`), which says why a layer was left.

    **Raises:** ArgumentError, a TypeError, for arguments of other kinds, a filter that returns no bool, or `hold`
    without a recipe; ValueError for a filter that names a part which the model lacks; what `hold` raises. Nothing is
    converted then.
    """
    require_switches("convert", return_report=return_report)
    model, report = converted("convert", model, recipe, filter, hold=hold, inference=inference, verbose=verbose)
    return (model, report) if return_report else model


def converted(
    op: str,
    model: nn.Module,
    recipe: Recipe | None,
    filter: _Filter | None,
    *,
    hold: bool | None,
    inference: bool | None,
    verbose: bool,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """`convert` for the function called `op`. `device`, `dtype`: of the weights that become held, None for theirs."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")
    require_recipe(op, recipe)
    switches = {name: value for name, value in (("hold", hold), ("inference", inference)) if value is not None}
    require_switches(op, verbose=verbose, **switches)
    region = initial_recipe()
    holding = region is not None if hold is None else hold
    holds_by = region if recipe is None else recipe
    if holding and holds_by is None:
        raise ArgumentError(f"{op}: hold=True needs a recipe, which decides how weights are held: {op}(model, recipe)")
    if inference is not None and not holding:
        raise ArgumentError(f"{op}: inference says which copies of held weights are made; give hold=True too")
    named, kinds = list(model.named_modules()), {id(m): type(m).__name__ for m in model.modules()}
    choice = _choose(model, named, filter, holds_by if holding else None)
    plan = held_weights.plan(op, model, choice.holders, not torch.is_grad_enabled() if inference is None else inference)
    choice.unheld.update(plan.left)
    if hold and not plan.weights:
        raise ValueError(f"{op}: no weight of the model can be held: {_reasons(named, choice.why | choice.unheld)}")
    said = [(name, module, f"{choice.why[id(module)]}; it is left as it is") for name, module in choice.departing]
    for name, module, how in choice.layers:
        if departs := how(module):
            choice.why[id(module)] = departs
            choice.unheld.pop(id(module), None)
            said.append((name, module, f"{departs}; it is left as it is"))
        else:
            module.recipe, module.name = recipe, name
            module.prepare_states()
    for holder in choice.holders:
        module = holder.module
        if isinstance(module, QuantizedModule) and module.recipe is None and recipe is not None:
            module.recipe = recipe
            module.prepare_states()
        if id(module) in plan.lies_otherwise and id(module) not in choice.why:
            said.append((holder.path, module, f"is converted, and not held: {plan.left[id(module)]}"))
    held_weights.hold_weights(op, plan, device, dtype)
    for name, module, what in said:
        warnings.warn(f"{op}: {name or 'the model'} ({kinds[id(module)]}) {what}", ConvertWarning, stacklevel=3)
    report = _report(named, kinds, choice.why, choice.unheld)
    if verbose:
        print(report)
    return model, report


class _Choice(NamedTuple):
    """`layers`: those to convert, and how. `departing`: those that look like layers and cannot be converted. `holders`:
    the modules whose weights are to be held. `why`, `unheld`: the reason by which a module is left, or its weights are
    not held, by its id."""

    layers: list[tuple[str, Any, Callable[[Any], str]]]
    departing: list[tuple[str, nn.Module]]
    holders: list[Holder]
    why: dict[int, str]
    unheld: dict[int, str]


def _choose(
    model: nn.Module, named: list[tuple[str, nn.Module]], filter: _Filter | None, holds_by: Recipe | None
) -> _Choice:
    """Asks the filter about each layer. `holds_by`: the recipe by which weights are held; None: none are."""
    choice = _Choice([], [], [], {}, {})
    by_filter, by_default = filters.left_by(filter, model)
    skipped = uncalled(model)
    for name, module in named:
        how, departs = offer(module, skipped)
        if isinstance(module, QuantizedModule):
            if holds_by is None:
                continue
            if left := by_filter(module, name) or by_default(module, name):
                choice.unheld[id(module)] = left
            else:
                choice.holders.append(Holder(name, module, type(module), module.name, module.recipe or holds_by))
        elif how is None:
            if departs:
                left = by_filter(module, name)
                choice.why[id(module)] = left or departs
                if not left:
                    choice.departing.append((name, module))
        elif left := by_filter(module, name) or by_default(module, name):
            choice.why[id(module)] = left
        else:
            choice.layers.append((name, module, how))
            if holds_by is not None:
                choice.holders.append(Holder(name, module, _BECOMES[how], name, holds_by))
    return choice


def _reasons(named: list[tuple[str, nn.Module]], why: dict[int, str]) -> str:
    """Returns why modules are left, a few of them, in words."""
    found = [f"{name or 'the model'}: {why[id(m)]}" for name, m in named if id(m) in why]
    return "; ".join(found[:3]) + ("; ..." if len(found) > 3 else "") or "it has no linear layer"


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
    if type(module).__module__.startswith("torch.") or not _holds_stacks(module):
        return None, ""
    why = departs_from_experts(module)
    return (None, why) if why else (become_experts, "")


def _holds_stacks(module: nn.Module) -> bool:
    """Returns whether a module itself holds a stack of matrices. A parameter [1, N, K] is a table that is added to a
    batch, such as a vision transformer's positions, unless it has the name of an expert's weight."""
    expert = getattr(module, "gate_up_proj", None)
    return any([p.dim() == 3 and (len(p) > 1 or p is expert) for p in own_parameters(module)])


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


_BECOMES: dict[Any, type[QuantizedModule]] = {
    _become_linear: Linear, _become_transposed: TransposedLinear, become_experts: RoutedExperts,
}  # fmt: skip


def _report(
    named: list[tuple[str, nn.Module]], kinds: dict[int, str], why: dict[int, str], unheld: dict[int, str]
) -> ConversionReport:
    """Returns the parameter count of each module; tied parameters count once, at a module that quantizes if there is
    one."""
    owners = owners_of([module for _, module in named])
    rows = []
    for name, module in named:
        own = own_parameters(module)
        if own or id(module) in why:
            count = sum([p.numel() for p in own if owners[id(p)] == id(module)])
            held = held_bytes(module)
            formats = ", ".join(sorted({name for name, _ in held.values()}))
            nbytes = sum([n for p, (_, n) in held.items() if owners[p] == id(module)])
            converted = isinstance(module, QuantizedModule)
            left = "" if converted else why.get(id(module)) or reason_left(module)
            recipe = module.recipe if isinstance(module, QuantizedModule) else None
            not_held = unheld.get(id(module), "")
            row = ConvertedModule(name, kinds[id(module)], count, converted, left, recipe, formats, nbytes, not_held)
            rows.append(row)
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
