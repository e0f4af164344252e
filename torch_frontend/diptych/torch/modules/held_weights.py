"""Weights that exist become held: which weights of a model can be held quantized, and their exchange for those.

Invariants:

- A plan is made, and everything is refused that can be, before anything changes.
- The parameter stays the same object, with its name, `requires_grad` and attributes, and its contents are exchanged
  (`torch.utils.swap_tensors`): modules that share it, and an optimizer that was made before, have the held weight.
- Each weight is exchanged before the next one is quantized, so that one weight at a time exists in both forms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from diptych.common.layers.plan import held_quantizer
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import Recipe
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.model_init import empty_held, held_parameter
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.primitives.checks import HIGH_PRECISION, describe
from diptych.torch.private.autograd import gradient_hooks, value_hooks
from diptych.torch.tensors.quantized import BUFFERS

# What belongs to a held weight, and not to the parameter that it is.
_OF_HELD = {*BUFFERS, "quantizer", "main_param", "_high_precision_init_val", "_awaits_init", "_is_param"}


class Holder(NamedTuple):
    """A module whose weights are to be held. `kind`: the class that it has or will have, `name`: its name in roles."""

    path: str
    module: Any
    kind: type[QuantizedModule]
    name: str
    recipe: Recipe


class _Weight(NamedTuple):
    name: str
    param: nn.Parameter
    quantizer: Quantizer
    holder: nn.Module


class Plan(NamedTuple):
    """`weights`: those to hold. `left`: why a weight of a module is not held, by the module's id; `lies_otherwise`: the
    ids of those where the weight's layout, or another module that reads it, is the reason."""

    weights: list[_Weight]
    left: dict[int, str]
    lies_otherwise: set[int]


def plan(op: str, model: nn.Module, holders: list[Holder], inference: bool) -> Plan:
    """Chooses the weights of modules that are held, each with its quantizer. `inference`: rowwise copies alone.

    **Raises**, naming the weight: ValueError for a recipe that quantizes it in two ways or stochastically, for one that
    two modules would hold in two ways, and for one that is held otherwise already; ShapeError, DTypeError for one that
    the format does not take; UnsupportedError for a DTensor, for one with hooks, and under `prepare_weights`.
    """
    made = Plan([], {}, set())
    users = _users(model)
    asked = {(id(h.module), h.kind._weight_name(h.module, layer)) for h in holders for layer in h.kind.layers}
    chosen: dict[int, _Weight] = {}
    for h in holders:
        if getattr(h.module, "_prepared", None) is not None:
            raise UnsupportedError(
                f"{op}: {h.path} has copies that prepare_weights made, and held weights need none: call remove() on "
                "what it returned before"
            )
        for layer in h.kind.layers:
            attribute = h.kind._weight_name(h.module, layer)
            param = h.module._parameters.get(attribute)
            why = _lies_otherwise(h, attribute, param, users, asked)
            if why:
                made.left[id(h.module)] = why
                made.lies_otherwise.add(id(h.module))
                continue
            role = f"{h.name}.{layer}" if h.name and layer else h.name or layer
            quantizer = held_quantizer(op, h.recipe, h.kind.module_kind, role)
            if quantizer is None:
                made.left[id(h.module)] = "its recipe leaves the weight in high precision"
                continue
            quantizer = quantizer.with_usage(columnwise=quantizer.columnwise and not inference)
            weight = _Weight(f"{h.path}.{attribute}".lstrip("."), param, quantizer, h.module)
            _require_holdable(op, weight, chosen.get(id(param)))
            chosen.setdefault(id(param), weight)
    made.weights.extend(chosen.values())
    return made


def _users(model: nn.Module) -> dict[int, list[tuple[str, int, str]]]:
    """Returns (qualified name, id of the module, attribute) of each use of a parameter, by the parameter's id."""
    users: dict[int, list[tuple[str, int, str]]] = {}
    for path, module in model.named_modules():
        for attribute, p in module._parameters.items():
            if p is not None:
                users.setdefault(id(p), []).append((f"{path}.{attribute}".lstrip("."), id(module), attribute))
    return users


def _lies_otherwise(h: Holder, attribute: str, param: Any, users: Any, asked: set[tuple[int, str]]) -> str:
    """Returns why a weight cannot be held that a recipe could; "" if it can."""
    if not attribute:
        return "its weight lies transposed, as [in, out]"
    if param is None:
        return f"has no parameter {attribute!r} (a parametrization computes it, or another name has it)"
    others = [name for name, module, inside in users[id(param)] if (module, inside) not in asked]
    return f"shares its weight with {others[0]}, which reads it in high precision" if others else ""


def _require_holdable(op: str, weight: _Weight, before: _Weight | None) -> None:
    name, param, quantizer, _ = weight
    if before is not None and before.quantizer != quantizer:
        raise ValueError(
            f"{op}: {before.name} and {name} are one parameter, which {before.quantizer} and {quantizer} would hold: "
            "give both modules one recipe, or leave one by the filter"
        )
    if type(param).__name__ == "DTensor":  # importing the class takes long
        raise UnsupportedError(f"{op}: {name} is a DTensor: hold weights before fully_shard or parallelize_module")
    if value_hooks(param) or gradient_hooks(param):
        raise UnsupportedError(f"{op}: {name} has hooks, which a held weight would not keep: register them afterwards")
    if isinstance(param, QuantizedParameter):
        both = param.quantizer.with_usage(rowwise=True, columnwise=True)
        if both != quantizer.with_usage(rowwise=True, columnwise=True) or (
            quantizer.columnwise and param.columnwise_data is None
        ):
            raise ValueError(
                f"{op}: {name} is held by {param.quantizer} already, and {quantizer} is asked for; "
                "diptych.torch.unhold gives weights in high precision, from which any copy can be made"
            )
    elif param.dtype not in HIGH_PRECISION:
        raise DTypeError(f"{op}: {name} must be float32, bfloat16 or float16 to be held, got {describe(param)}")
    else:
        try:
            empty_held(param.shape, param.dtype, quantizer, torch.device("meta"))
        except ShapeError as e:
            raise ShapeError(f"{op}: {name} cannot be held: {e}; leave its module by the filter") from e


def hold_weights(op: str, made: Plan, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Exchanges the weights of a plan for held ones, one after the other, whose modules are quantized ones now.
    `device`, `dtype`: of the held weights; None: their own."""
    for name, param, quantizer, holder in made.weights:
        if not isinstance(holder, QuantizedModule):  # experts that turned out to compute something else
            continue
        if isinstance(param, QuantizedParameter):
            param.update_usage(columnwise_usage=None if quantizer.columnwise else False)
            exchange(op, name, param, param.detach().to(param.device if device is None else device, dtype))
            continue
        moves = device is not None and not param.is_meta
        values = param.detach().to(device if moves else param.device, dtype)
        exchange(op, name, param, held_parameter(values, quantizer))


def exchange(op: str, name: str, old: Tensor, new: Tensor) -> None:
    """Gives the tensor object `old` the contents and the class of `new`; a parameter keeps `requires_grad`, its
    gradient and what was set on it.

    **Raises** UnsupportedError where torch cannot, because a graph or a compiled function refers to the tensor.
    """
    if new is old:
        return
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(old, nn.Parameter):
            if not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            new.requires_grad_(old.requires_grad)
            if old.grad is not None:
                new.grad = old.grad.to(new.device, new.dtype)
        kept = {key: value for key, value in vars(old).items() if key not in vars(new) and key not in _OF_HELD}
        vars(new).update(kept)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError as e:
            raise UnsupportedError(
                f"{op}: {name} cannot be replaced, since something refers to it: {e}; call this before the model is "
                "compiled, wrapped by DistributedDataParallel or run with a graph that still exists"
            ) from e


def place(op: str, model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    """Moves what is not there yet to a device, and gives floating-point parameters a dtype; None leaves each."""
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        to = t.device if device is None or t.is_meta else device
        wanted = dtype if dtype is not None and isinstance(t, nn.Parameter) and t.is_floating_point() else t.dtype
        if (to, wanted) != (t.device, t.dtype):
            exchange(op, name, t, t.detach().to(to, wanted))


def unhold(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Gives a model's held weights back in high precision: the values that they stand for, or their float32 masters.

    The layers stay quantized ones, which from now on quantize these weights in each call. Use it before weights change
    in high precision, such as by a merge of adapters.

    **Arguments:** `model`: changed in place, one weight after the other; the parameters stay the same objects.
    `dtype`: float32, bfloat16 or float16; None is each weight's logical dtype.

    **Returns:** `model`. **Raises:** ArgumentError for anything but a module, DTypeError for another dtype,
    UnsupportedError where a graph or a compiled function refers to a weight.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"unhold: model must be a torch.nn.Module, got {type(model).__name__}")
    require_dtype("unhold", dtype)
    for name, p in model.named_parameters():
        if isinstance(p, QuantizedParameter):
            made = p.dtype if dtype is None else dtype
            if p.is_meta:
                values = torch.empty(p.shape, dtype=made, device=p.device)
            else:
                values = p._values(made) if p.main_param is None else p.main_param.detach().to(made, copy=True)
            exchange("unhold", name, p, nn.Parameter(values, p.requires_grad))
    return model


def require_dtype(op: str, dtype: Any) -> None:
    """**Raises** DTypeError for anything but None and a dtype in high precision."""
    if dtype is not None and dtype not in HIGH_PRECISION:
        raise DTypeError(f"{op}: dtype must be float32, bfloat16 or float16, or None, got {dtype}")
