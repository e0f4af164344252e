"""`hold`: the weights of a model that exists, in memory or in safetensors files, become held quantized."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import nn

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.conversion import ConversionReport
from diptych.common.errors import ArgumentError
from diptych.common.recipes import Recipe
from diptych.torch.modules import filters, held_weights
from diptych.torch.modules.convert import converted
from diptych.torch.modules.held_checkpoint import Checkpoint

_Filter = filters.Kind | Callable[[nn.Module, str], bool]
_Device = torch.device | str | int
_Path = str | os.PathLike[str]


@overload
def hold(
    model: nn.Module, recipe: Recipe, filter: _Filter | None = None, *, checkpoint: _Path | None = None,
    rename: Callable[[str], str] | None = None, strict: bool = True, inference: bool | None = None,
    device: _Device | None = None, dtype: torch.dtype | None = None, verbose: bool = True,
    return_report: Literal[False] = False,
) -> nn.Module: ...  # fmt: skip
@overload
def hold(
    model: nn.Module, recipe: Recipe, filter: _Filter | None = None, *, checkpoint: _Path | None = None,
    rename: Callable[[str], str] | None = None, strict: bool = True, inference: bool | None = None,
    device: _Device | None = None, dtype: torch.dtype | None = None, verbose: bool = True,
    return_report: Literal[True],
) -> tuple[nn.Module, ConversionReport]: ...  # fmt: skip


def hold(
    model: nn.Module,
    recipe: Recipe,
    filter: _Filter | None = None,
    *,
    checkpoint: _Path | None = None,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
    inference: bool | None = None,
    device: _Device | None = None,
    dtype: torch.dtype | None = None,
    verbose: bool = True,
    return_report: bool = False,
) -> Any:
    """Holds the weights of a model's linear layers quantized and in no other precision, for inference or as the frozen
    base of adapters.

    The layers become quantized ones, as by `convert(model, recipe, filter)`, and their weights the
    `QuantizedParameter`s that `quantized_model_init` would make of the same values, one after the other. Weights of
    this package's layers become held too; such a layer keeps a recipe of its own. Parameters stay the same objects with
    `requires_grad` as it was, so that ties and optimizers stay valid; one that requires a gradient can be trained as
    any held weight, best with a float32 master (`weight.main_param`). Biases, norms, embeddings and layers that the
    filter leaves stay in high precision. So does a weight that another module reads in high precision, such as a tied
    embedding, and one that lies as [in, out]: a `ConvertWarning` names it, and its layer quantizes it in each call.

    With a `checkpoint` the weights come from safetensors files, and a model on the meta device never exists in high
    precision: tensors are read one after the other, those that are held in parts of 2 MiB, and quantized as they are
    read, with the bits of the whole. At the peak of loading, memory is that of the model as it will be, plus a few
    parts. Buffers that no checkpoint holds are computed by the model's `_init_weights` (transformers) if they are on
    meta. Files that `plain_state_dict` wrote, and published FP8 checkpoints, load with payload and scales unchanged
    where the recipe holds weights in their format.

    **Arguments:** `model`: changed in place. `recipe`: decides on the format, and becomes the recipe of layers without
    one. `filter`: as for `convert`. `checkpoint`: a safetensors file, an index of several (`*.safetensors.index.json`)
    or a folder with either. `rename`: returns the model's name of a tensor from its name in the files. `strict`: False
    leaves what the files lack as it is, and ignores what the model lacks. `inference`: True makes rowwise copies alone,
    about half the bytes, and a layer whose input needs a gradient then raises ValueError; False makes both; None makes
    both where gradients are enabled, as `quantized_model_init` does. `device`: of all tensors; None leaves them where
    they are, and those that a checkpoint fills on meta go to torch's default device. `dtype`: float32, bfloat16 or
    float16, for all floating-point parameters, of held ones the logical dtype; None is their own. Values are cast
    before they are quantized. `verbose`, `return_report`: as for `convert`.

    **Returns:** `model`; with `return_report` (model, `ConversionReport`). A model on meta without a checkpoint gets
    held weights on meta, which `load_state_dict(assign=True)` fills.

    **Raises**, before anything is changed: ArgumentError for arguments of other kinds; ValueError for a recipe that
    quantizes a weight in two ways or stochastically, a model without a weight that can be held, modules that would hold
    one weight in two ways, or a weight that is held otherwise already; ShapeError and DTypeError for one that the
    format does not take (leave it by the filter); UnsupportedError for DTensors, weights with hooks and
    those that `prepare_weights` serves; CheckpointError for files that are damaged or absent, or whose names and shapes
    are not the model's. Later: CheckpointError for payloads that cannot be read and for tensors that are still on meta
    at the end; UnsupportedError where a graph or a compiled function refers to a weight.
    """
    op = "hold"
    require_recipe(op, recipe, optional=False)
    require_switches(op, strict=strict, return_report=return_report)
    held_weights.require_dtype(op, dtype)
    to = None if device is None else torch.empty(0, device=device).device  # with its index, as those of tensors
    if to is not None and to.type == "meta":
        raise ArgumentError(f"{op}: device is meta, where tensors have no values")
    source = None
    if checkpoint is None:
        if rename is not None or not strict:
            raise ArgumentError(f"{op}: rename and strict are about a checkpoint; give checkpoint= too")
    elif not isinstance(checkpoint, str | os.PathLike):
        raise ArgumentError(f"{op}: checkpoint must be a path, got {type(checkpoint).__name__}")
    elif rename is not None and not callable(rename):
        raise ArgumentError(f"{op}: rename must be a function of a name, got {type(rename).__name__}")
    elif not isinstance(model, nn.Module):
        raise ArgumentError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")
    else:
        source = Checkpoint(op, model, os.fspath(checkpoint), rename, strict)
    model, report = converted(
        op, model, recipe, filter, hold=True, inference=inference, verbose=verbose, device=to, dtype=dtype
    )
    if source is not None:
        source.load(to, dtype)
    held_weights.place(op, model, to, dtype)
    return (model, report) if return_report else model
