"""`report`: says which recipe and kernels the layers of a model ran, from what each layer's last call has noted.

Modules note the recipe, input and gradients of each call in one slot, `QuantizedModule._calls`, which nothing but this
file reads; a graph's guards note it before each run of the graph. Kernels follow from that by the look-up that dispatch
makes itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, cuda, nn

from diptych.common.errors import ArgumentError
from diptych.common.layer_options import COLUMN, ROW
from diptych.common.layers.plan import LinearPlan
from diptych.common.run_report import HIGH, LayerRun, ProductRun, RunReport
from diptych.core import _kernels
from diptych.torch.layers.options import schedule
from diptych.torch.modules import filters
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.convert import offer, own_parameters, owners_of, reason_left, uncalled
from diptych.torch.modules.stateful import LastCall
from diptych.torch.primitives.checks import dtype_name

_NEVER = "it has not run since it was made, copied or loaded"


def report(model: nn.Module) -> RunReport:
    """Returns which recipe and kernels each layer's last call ran, natively or emulated, and what stayed in high
    precision and why. Call it after a step.

    Kernels are those that dispatch takes for the call's recipe, shapes and device; operands at addresses that are no
    multiple of 16, which run emulated on GPUs, are not seen. Grouped products, and products of which a graph does not
    know the number of rows, name the kernel that takes any operands, and those before it. dgrad and wgrad are listed if
    a backward of the call computes them. A layer whose last call was compiled is marked; a module that compiled code
    itself has made is not seen.

    **Arguments:** `model`: any module, also compiled or wrapped.

    **Returns:** a `RunReport`; `print` it, or read its `layers`.

    **Raises:** ArgumentError, a TypeError, for a model that is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"report: model must be a torch.nn.Module, got {type(model).__name__}")
    skipped, (_, by_default) = uncalled(model), filters.left_by(None, model)
    named, rows = list(model.named_modules()), []
    owners = owners_of([module for _, module in named])
    for name, module in named:
        own = own_parameters(module)
        count = sum([p.numel() for p in own if owners[id(p)] == id(module)])
        if isinstance(module, QuantizedModule):
            rows += _layers(name, module, count)
        elif own:
            why = _why_left(module, skipped, by_default(module, name))
            rows.append(LayerRun(name, type(module).__name__, count, why=why))
    return RunReport(tuple(rows))


def _why_left(module: nn.Module, skipped: set[int], default: str) -> str:
    """Returns why a module of another library runs in high precision. `default`: why convert leaves it by default."""
    how, departs = offer(module, skipped)
    if how is None:
        return f"convert leaves it: it {departs}" if departs else reason_left(module)
    return f"not converted: {default or 'a layer that diptych.torch.convert can take'}"


# --- the layers of a module ------------------------------------------------------------------------------------------


def _layers(path: str, module: Any, parameters: int) -> list[LayerRun]:
    """Returns a row for each layer of a module. Parameters that are no layer's weight count at the first one."""
    calls: dict[str, Any] = module._calls or {}
    layers = [layer for layer in module.layers if layer in calls or layer or not calls]
    layers += [layer for layer in calls if layer not in layers]
    weights = {layer: module._layer_weight(layer) for layer in layers}
    sizes = [0 if w is None else w.numel() for w in weights.values()]
    counts = [parameters - sum(sizes[1:]), *sizes[1:]] if parameters >= sum(sizes) else [parameters, *[0] * len(sizes)]
    rows = []
    for layer, count in zip(layers, counts, strict=False):
        name, call = ".".join([part for part in (path, layer) if part]), calls.get(layer, _NEVER)
        if isinstance(call, str):
            rows.append(LayerRun(name, type(module).__name__, count, why=call))
        else:
            rows.append(_ran(name, module, layer, count, LastCall(*call)))
    return rows


def _ran(name: str, module: Any, layer: str, parameters: int, call: LastCall) -> LayerRun:
    """Returns the row of a layer that a recipe ran."""
    plan = schedule(call.recipe, module.module_kind, module._role_name(layer), False, False).plan
    weight = module._layer_weight(layer)
    shape, rows = _local_shape(module, layer, weight), _rows(module, layer, call)
    asked = (True, call.grad and _needs_dx(module, layer, call), call.grad and (weight is None or weight.requires_grad))
    products = [
        _product(i, plan, _device(call, weight), rows, shape, call.dtype if i < 2 or weight is None else weight.dtype)
        for i, wanted in enumerate(asked)
        if wanted
    ]
    why = "" if any([p.kernel for p in products]) else "the recipe leaves its products in high precision"
    device, kind = str(_device(call, weight)), type(module).__name__
    ran = (call.recipe, call.compiled, device, rows, shape or (), tuple(products), why)
    return LayerRun(name, kind, parameters, *ran)


def _device(call: LastCall, weight: Tensor | None) -> torch.device:
    """Returns where a call ran. Offloading may have moved the weight since."""
    if call.cuda:
        return weight.device if weight is not None and weight.is_cuda else torch.device("cuda", cuda.current_device())
    return weight.device if weight is not None and weight.is_meta else torch.device("cpu")


def _local_shape(module: Any, layer: str, weight: Tensor | None) -> tuple[int, ...] | None:
    """Returns the shape [..., N, K] of the part of a weight that this rank multiplies by."""
    if weight is None:
        return None
    *groups, n, k = weight.shape
    mode = module._modes.get(layer) if module._styled else None  # else the parameter is the part already
    return (*groups, n // module.tp_size if mode == COLUMN else n, k // module.tp_size if mode == ROW else k)


def _rows(module: Any, layer: str, call: LastCall) -> int | None:
    """Returns the rows of a layer's input, with those that other ranks send."""
    rows = 1
    for extent in call.shape[:-1]:
        if extent is None:
            return None
        rows *= extent
    read = module.layers[0] if module.module_kind.startswith("layernorm") else layer  # all layers have its rows
    return rows * module.tp_size if module.sequence_parallel and module._modes.get(read) == COLUMN else rows


def _needs_dx(module: Any, layer: str, call: LastCall) -> bool:
    """Whether a layer's input needs a gradient: by itself, or for a norm or layer of the module before this one."""
    if call.needs_dx or not module.module_kind.startswith("layernorm"):
        return call.needs_dx
    later = module.layers[module.layers.index(layer) :]
    prefixes = tuple([f"{each}_" for each in later if each])
    before = [p for n, p in module.named_parameters(recurse=False) if n not in ("weight", "bias")
              and not (prefixes and n.startswith(prefixes))]  # fmt: skip
    return any([p.requires_grad for p in before])


def _product(
    index: int,
    plan: LinearPlan,
    device: torch.device,
    rows: int | None,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype,
) -> ProductRun:
    """Returns how one product ran. `rows`, `shape`: of input and weight; `dtype`: of the result."""
    gemm, x, w, dy = _kernels.PRODUCTS[index], plan.input, plan.weight, plan.grad_output
    operands = ((x.rowwise, w.rowwise), (dy.rowwise, w.columnwise), (dy.columnwise, x.columnwise))[index]
    sides = ((False, False), (False, True), (True, True))[index]
    if not plan.quantized[index]:
        why = "on dequantized copies" if index and plan.dequantized_backward else "as the recipe says"
        return ProductRun(gemm, HIGH, note=why)
    made = zip(operands, sides, strict=True)
    formats = tuple([q.copy_format(columnwise).name for q, columnwise in made if q is not None])
    backend, number = device.type, device.index or 0
    if backend not in ("cpu", "cuda"):
        return ProductRun(gemm, "missing", formats=formats, note=f"no kernel runs on {backend}")
    if shape is None or len(shape) > 2 or rows is None:
        op = "grouped_gemm" if shape is not None and len(shape) > 2 else "gemm"
        found = _kernels.any_shape(op, formats, backend, _kernels.arch_of(backend, number))
    else:
        (n, k), m = list(shape), rows
        mnk = ((m, n, k), (m, k, n), (n, k, m))[index]
        found = _kernels.product(gemm, operands, mnk, dtype_name(dtype), backend, number, plan.options[index])
    return ProductRun(gemm, found["level"], found["kernel"], formats, found["note"])
