"""`prepare_weights`: an option that quantizes all weights of a model right after the optimizer's step, in few launches,
and updates delayed scales of all layers in one.

Invariant: a forward uses a prepared copy only if it would make the same bits itself: the weight is the same tensor in
the same memory, its version counter has not moved since, and the layer runs by the quantizers that made the copy.
Otherwise it makes its own. Prepared copies are no state: a copied, pickled or saved model has none.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError
from diptych.common.layers.schedule import Call
from diptych.common.ops import shapes
from diptych.common.ops.grouped import stack_buffers
from diptych.torch.layers.options import Options
from diptych.torch.layers.quantize import quantize_weight
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.state.scales import ScaleStates
from diptych.torch.state.update import update_jointly
from diptych.torch.tensors.copies import Copies


class PreparedLayer:
    """One layer's weight, the quantize calls of its last forward, and copies made since."""

    def __init__(self, weight: Tensor, calls: tuple[Call, ...], alone: tuple[Call, ...]) -> None:
        self.weight = weakref.ref(weight)
        self.calls, self.alone = calls, alone  # with the copy that backward reads, and without
        self.copies: Copies | None = None
        self.made_from = (0, 0)

    def hold(self, weight: Tensor, copies: Copies) -> None:
        self.copies, self.made_from = copies, (weight._version, weight.data_ptr())


class PreparedLayers:
    """The prepared copies of one module, by layer."""

    def __init__(self) -> None:
        self.by_layer: dict[str, PreparedLayer] = {}
        self.warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled module has none

    def get(self, layer: str, weight: Tensor, calls: tuple[Call, ...], alone: tuple[Call, ...]) -> Copies | None:
        """The copies that a forward may use in place of those that `calls` make, or None. In grad mode it remembers the
        calls for the next step."""
        one = self.by_layer.get(layer)
        if one is None or one.weight() is not weight or calls not in (one.calls, one.alone):
            if torch.is_grad_enabled() and type(weight) is nn.Parameter and not weight.is_inference():
                self.by_layer[layer] = PreparedLayer(weight, calls, alone)
            return None
        if one.copies is None or one.made_from != (weight._version, weight.data_ptr()):
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
    """What `prepare_weights` returns: `nbytes` of copies are held now; `remove` ends the preparation and frees them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._modules = [m for m in model.modules() if isinstance(m, QuantizedModule)]
        self._warned: set[Any] = set()
        for module in self._modules:
            module._prepared = PreparedLayers()
        self._hook = optimizer.register_step_post_hook(lambda *_: self._make())

    def remove(self) -> None:
        """Removes the hook and frees the copies."""
        self._hook.remove()
        for module in self._modules:
            module._prepared = None
        self._modules, self.nbytes = [], 0

    def _layers(self) -> Iterator[tuple[Tensor, PreparedLayer]]:
        """The layers whose weights can be quantized now. A weight that is no longer the module's is left alone, and so
        is one whose memory was given back, as sharding does."""
        for module in self._modules:
            for one in () if module._prepared is None else module._prepared.by_layer.values():
                weight = one.weight()
                if weight is None or not one.calls or not any([weight is p for p in module._parameters.values()]):
                    continue
                if weight.untyped_storage().nbytes() < weight.nbytes or not weight.numel():
                    continue
                yield weight, one

    @torch.no_grad()
    def _make(self) -> None:
        """Runs after the optimizer's step: drops the copies of the last step, and makes new ones up to `max_bytes`."""
        for module in self._modules:
            for one in () if module._prepared is None else module._prepared.by_layer.values():
                one.copies = None
        self.nbytes = 0
        if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._update_jointly()
        single: list[tuple[Tensor, PreparedLayer]] = []
        for weight, one in self._layers():
            size = 0 if any([not c.plain for c in one.calls]) else _nbytes(weight, one.calls)
            if not size:
                self._warn(one.calls)
            elif self.nbytes + size <= self.max_bytes:
                self.nbytes += size
                if weight.dim() == 3:
                    one.hold(weight, quantize_weight(weight.detach(), one.calls, Options(), None).copies)
                else:
                    single.append((weight, one))
        for (weight, one), copies in zip(single, _quantized_together(single), strict=True):
            one.hold(weight, copies)

    def _update_jointly(self) -> None:
        """The delayed scales of all layers are updated together where the first of them enters the next region."""
        recipe: Any = None
        layers: list[tuple[QuantizedModule, ScaleStates]] = []
        for module in self._modules:
            scaled = module._modules.get("scale_states")
            if scaled is None or module._last_region is None or module._last_groups:
                continue
            recipe = module._last_region if recipe is None else recipe
            if module._last_region == recipe:
                layers += [(module, part) for part in scaled.modules() if isinstance(part, ScaleStates)]
        if layers:
            update_jointly(layers, recipe)

    def _warn(self, calls: tuple[Call, ...]) -> None:
        if calls not in self._warned:
            self._warned.add(calls)
            warnings.warn(
                f"prepare_weights: {calls[0].quantizer} needs more than the weight (a delayed scale, random bits or "
                "the user's own code), so its weights are quantized in forward",
                stacklevel=2,
            )


def prepare_weights(model: nn.Module, optimizer: torch.optim.Optimizer, *, max_bytes: int) -> PreparedWeights:
    """After each `optimizer.step()`, quantizes the weights of a model's layers in few launches, for the forwards until
    the next step. In the first autocast region after a step, delayed scales of all layers are updated in one launch.

    Results have the same bits as without it. (There are two exceptions after the first layer has entered a region: an
    amax that the backward of an earlier region then records may reach a layer's scale one region later, and a `recipe`
    that a module is then given does not take part in this update of its scales.) Each layer's weight is quantized by
    the recipe that the layer ran by last in grad mode. A forward finds a stale copy by the weight's version counter,
    which every in-place operation of torch moves, and then quantizes the weight itself. A write that moves no counter,
    such as one through `weight.data` or by another library's kernel, must not happen between the optimizer's step and a
    forward.

    Compiled graphs quantize their weights themselves, with a warning, and so do layers whose weights need delayed
    scales (DelayedScaling), random bits or a quantizer of the user's own. Without a warning, so do calls while a CUDA
    graph is captured, calls with `is_first_microbatch`, and recipes with an `amax_group`. Weights that are held
    quantized are not touched.

    **Arguments:** `model`: its QuantizedModules at the time of this call take part. `optimizer`: the one whose steps
    change their weights. `max_bytes`: the most memory of all copies; weights whose copies do not fit into what is
    left are quantized in forward, earlier modules go first.

    **Returns:** a `PreparedWeights`, whose `remove()` ends it.

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
