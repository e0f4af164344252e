"""`prepare_weights`: an option that quantizes all weights of a model right after the optimizer's step, in few launches,
and updates delayed scales of all layers in one.

Invariants: a forward uses a prepared copy only if it would make the same bits itself: the weight is the same tensor in
the same memory, its version counter has not moved since, and the layer runs by the quantizers that made the copy.
Otherwise it makes its own. Evaluations always make their own, since they often follow writes that no counter shows.
Prepared copies are no state: a copied, pickled or saved model has none.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from diptych.common.errors import ArgumentError
from diptych.common.layers.plan import LinearPlan
from diptych.common.layers.schedule import Call
from diptych.common.ops import shapes
from diptych.common.ops.grouped import stack_buffers
from diptych.common.recipes import Recipe
from diptych.torch.layers.options import Options, schedule
from diptych.torch.layers.quantize import quantize_weight
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.state.autocast import STATE, recording
from diptych.torch.state.checkpoint import backward_ahead
from diptych.torch.state.scales import ScaleStates
from diptych.torch.state.update import update_jointly
from diptych.torch.tensors.copies import Copies


class PreparedLayer:
    """One layer's weight, by the name of the module's parameter, the quantize calls of its last forward, and copies
    made since."""

    def __init__(self, name: str, calls: tuple[Call, ...], alone: tuple[Call, ...]) -> None:
        self.name = name
        self.calls, self.alone = calls, alone  # with the copy that backward reads, and without
        self.copies: Copies | None = None
        self.training = True  # whether the module was in training mode when the copies were made
        self.made_from: tuple[Any, ...] = ()

    def hold(self, module: nn.Module, weight: Tensor, copies: Copies) -> None:
        self.copies, self.training, self.made_from = copies, module.training, _content(weight)

    def drop(self) -> None:
        self.copies, self.made_from = None, ()


def _content(weight: Tensor) -> tuple[Any, ...]:
    """Returns a value that changes when torch writes into a weight or puts it into other memory.

    Holds no reference to the tensor, a weak one neither: `torch.utils.swap_tensors` refuses tensors that have one. The
    weak reference to the storage keeps its address from being used again, which an address alone would not.
    """
    return id(weight), weight._version, weight.data_ptr(), StorageWeakRef(weight.untyped_storage())


def _is_plain(weight: Any) -> bool:
    """Whether a parameter can be prepared: sharded and quantized ones are subclasses of Parameter."""
    return type(weight) is nn.Parameter and not weight.is_inference()


class PreparedLayers:
    """The prepared copies of one module, by layer."""

    def __init__(self) -> None:
        self.by_layer: dict[str, PreparedLayer] = {}
        self.warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled module has none

    def get(
        self, module: nn.Module, layer: str, weight: Tensor, calls: tuple[Call, ...], alone: tuple[Call, ...]
    ) -> Copies | None:
        """The copies that a forward of `module` may use in place of those that `calls` make, or None. Where a backward
        may follow it remembers the calls for the next step."""
        one = self.by_layer.get(layer)
        if one is None or module._parameters.get(one.name) is not weight or calls not in (one.calls, one.alone):
            names = [name for name, p in module._parameters.items() if p is weight]
            if backward_ahead() and names and _is_plain(weight):
                self.by_layer[layer] = PreparedLayer(names[0], calls, alone)
            return None
        if one.copies is None or one.training != module.training or not recording():
            return None
        if one.made_from != _content(weight):
            return None
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a replay would read memory that the next step frees
        return one.copies if calls == one.calls else (one.copies[0], None)

    def warn_of_graphs(self) -> None:
        """Called when a graph of the module is traced."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                "prepare_weights: a compiled graph cannot see version counters, so it quantizes its weights itself; "
                "prepared copies serve eager forwards alone",
                stacklevel=2,
            )


class PreparedWeights:
    """A preparation that `prepare_weights` has begun. `nbytes` of copies are held now; `drop` frees them until the next
    step; `remove` ends the preparation and frees them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._modules = [m for m in model.modules() if isinstance(m, QuantizedModule)]
        self._warned: set[Any] = set()
        for module in self._modules:
            module._prepared = PreparedLayers()
        self._hook = optimizer.register_step_post_hook(lambda *_: self._make())

    def drop(self) -> None:
        """Frees the copies; forwards quantize weights themselves until the optimizer's next step makes new ones.

        Call it after writes that move no version counter, such as through `weight.data` or by another library's kernel,
        if a training forward follows before the next step.
        """
        for _, one in self._each():
            one.drop()
        self.nbytes = 0

    def remove(self) -> None:
        """Removes the hook and frees the copies."""
        self._hook.remove()
        for module in self._modules:
            module._prepared = None
        self._modules, self.nbytes = [], 0

    def _each(self) -> Iterator[tuple[QuantizedModule, PreparedLayer]]:
        for module in self._modules:
            for one in () if module._prepared is None else module._prepared.by_layer.values():
                yield module, one

    def _layers(self) -> Iterator[tuple[QuantizedModule, Tensor, PreparedLayer]]:
        """The layers whose weights can be quantized now. A weight that is no plain parameter of the module's any more
        is left alone, and so is one whose memory was given back, as sharding does."""
        for module, one in self._each():
            weight = module._parameters.get(one.name)
            if weight is None or not _is_plain(weight) or not one.calls or not weight.numel():
                continue
            if weight.untyped_storage().nbytes() >= weight.nbytes:
                yield module, weight, one

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _make(self) -> None:
        """Runs after the optimizer's step: drops the copies of the last step, and makes new ones up to `max_bytes`."""
        self.drop()
        if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        update_jointly([found for module in self._modules for found in _scaled_layers(module)])
        single: list[tuple[QuantizedModule, Tensor, PreparedLayer]] = []
        for module, weight, one in self._layers():
            size = 0 if any([not c.plain for c in one.calls]) else _nbytes(weight, one.calls)
            if not size:
                self._warn(one.calls)
            elif self.nbytes + size <= self.max_bytes:
                self.nbytes += size
                if weight.dim() == 3:
                    one.hold(module, weight, quantize_weight(weight.detach(), one.calls, Options()).copies)
                else:
                    single.append((module, weight, one))
        made = _quantized_together([(weight, one) for _, weight, one in single])
        for (module, weight, one), copies in zip(single, made, strict=True):
            one.hold(module, weight, copies)

    def _warn(self, calls: tuple[Call, ...]) -> None:
        if calls not in self._warned:
            self._warned.add(calls)
            warnings.warn(
                f"prepare_weights: {calls[0].quantizer} needs more than the weight (a delayed scale, random bits or "
                "the user's own code), so its weights are quantized in forward",
                stacklevel=2,
            )


def _scaled_layers(module: QuantizedModule) -> list[tuple[ScaleStates, Any]]:
    """Returns the delayed states of a module's layers, each with a function of the region's recipe that gives the plan
    by which a training call would update them alone."""
    root: Any = module._modules.get("scale_states")
    if root is None:
        return []
    named = {name: part for name, part in root._modules.items() if isinstance(part, ScaleStates)}
    return [(part, functools.partial(_plan, module, name)) for name, part in {"": root, **named}.items()]


def _plan(module: QuantizedModule, layer: str, region: Recipe | None) -> LinearPlan | None:
    """Returns the plan by which a layer would run in the present region; None where a call would update no scales, or
    reduce amaxes over ranks."""
    recipe = region if module.recipe is None else module.recipe
    if recipe is None or not module.training or STATE.amax_groups or recipe.amax_group or module.tp_size > 1:
        return None
    return schedule(recipe, module.module_kind, module._role_name(layer), False, False).plan


def prepare_weights(model: nn.Module, optimizer: torch.optim.Optimizer, *, max_bytes: int) -> PreparedWeights:
    """After each `optimizer.step()`, quantizes the weights of a model's layers in few launches, for the forwards until
    the next step. In the first autocast region after a step, delayed scales of all layers are updated in one launch.

    Results have the same bits as without it. (There are two exceptions after the first layer has entered a region: an
    amax that the backward of an earlier region then records may reach a layer's scale one region later, and a `recipe`
    that a module is then given does not take part in this update of its scales.) Each layer's weight is quantized by
    the recipe that the layer ran by last in grad mode. A forward finds a stale copy by the weight's version counter,
    which every in-place operation of torch moves, and then quantizes the weight itself.

    A write that moves no counter, such as one through `weight.data` or by another library's kernel, is found by
    nothing. Averaged weights that are swapped in for an evaluation and adapters that are merged are written in this
    way, so evaluations quantize their weights themselves: calls without grad mode, and calls in another mode (training
    or evaluation) than the module was in when the step was made. Before a training forward that follows such a write,
    call `drop()` of the result.

    Compiled graphs quantize their weights themselves, with a warning, and so do layers whose weights need delayed
    scales (DelayedScaling), random bits or a quantizer of the user's own. Without a warning, so do calls while a CUDA
    graph is captured, calls with `is_first_microbatch`, and recipes with an `amax_group`. Weights that are held
    quantized are not touched.

    **Arguments:** `model`: its QuantizedModules at the time of this call take part. `optimizer`: the one whose steps
    change their weights. `max_bytes`: the most memory of all copies; weights whose copies do not fit into what is
    left are quantized in forward, earlier modules go first.

    **Returns:** a `PreparedWeights`, whose `drop()` throws the copies away until the next step, and whose `remove()`
    ends the preparation.

    **Raises:** ArgumentError, a TypeError, for arguments of other kinds; ValueError for a negative `max_bytes`, a model
    without such modules, or one that is prepared already.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"prepare_weights: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"prepare_weights: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
        raise ArgumentError(f"prepare_weights: max_bytes must be an int, got {type(max_bytes).__name__}")
    if max_bytes < 0:
        raise ValueError(f"prepare_weights: max_bytes must be 0 or more, got {max_bytes}")
    modules = [m for m in model.modules() if isinstance(m, QuantizedModule)]
    if not modules:
        raise ValueError("prepare_weights: the model has no module of diptych.torch; convert() it first")
    if any([m._prepared is not None for m in modules]):
        raise ValueError("prepare_weights: the model's weights are prepared already; remove() that first")
    return PreparedWeights(model, optimizer, max_bytes)


def _nbytes(weight: Tensor, calls: tuple[Call, ...]) -> int:
    """Returns the bytes of the copies that `calls` make of a weight."""
    total, shape = 0, tuple(weight.shape)
    for call in calls:
        buffers = (stack_buffers if weight.dim() == 3 else shapes.quantize_buffers)(shape, call.quantizer)
        for b in buffers:
            total += torch.Size(b.shape).numel() * getattr(torch, b.dtype).itemsize
    return total


def _quantized_together(layers: list[tuple[Tensor, PreparedLayer]]) -> list[Copies]:
    """Returns the copies of each layer's weight; those of one dtype and quantizer come from one call of the core."""
    made: list[list[Any]] = [[None, None] for _ in layers]
    groups: dict[Any, list[tuple[int, Call]]] = {}
    for i, (weight, one) in enumerate(layers):
        for call in one.calls:
            q = call.quantizer
            groups.setdefault((q.spec, q.rowwise, q.columnwise, weight.dtype, weight.device), []).append((i, call))
    for group in groups.values():
        quantizer = group[0][1].quantizer
        buffers = quantize_ops.quantize_many([layers[i][0].detach() for i, _ in group], quantizer)
        for (i, _), of_one in zip(group, buffers, strict=True):
            for side, copy in enumerate(quantize_ops.copies(quantizer, of_one)):
                made[i][side] = made[i][side] if copy is None else copy
    return [(row, column) for row, column in made]
