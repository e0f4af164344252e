"""Quantized copies of weights, kept across microbatches. Held weights are in `quantized_parameter.py`."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.errors import UnsupportedError
from diptych.common.layers.schedule import Call
from diptych.common.recipes import Recipe
from diptych.torch.graph.guards import before_each_call
from diptych.torch.layers.options import Options, schedule
from diptych.torch.layers.quantize import quantize_weight
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.register import define, traced_local
from diptych.torch.state.checkpoint import aside, backward_ahead, tape_call, taped_call, taping
from diptych.torch.state.scales import warn_once
from diptych.torch.tensors.copies import Copies, with_scales

# --- copies kept across microbatches ---------------------------------------------------------------------------------


class WeightCache:
    """The quantized copies of one weight, or of a stack of them, from the first microbatch of a step to its last.

    Graphs write them in place, into buffers that are made while Dynamo traces: a captured graph's own memory is
    overwritten when it runs again. In these buffers E8M0 scales are stored as bytes, which all of Inductor's backends
    support.
    """

    def __init__(self) -> None:
        self.key: tuple[Any, ...] = ()
        self.copies: Any = None  # Copies, or the buffers that graphs write
        self.bound = False  # whether graphs know the buffers
        self.content = "none"  # "none", "stale" (made for another key) or "kept"
        self.valid: Tensor | None = None  # whether content is kept, for graphs that skip on the device: a boolean [1]

    def get(
        self,
        weight: Tensor,
        recipe: Recipe,
        options: Options,
        need_columnwise: bool,
        first: bool | None,
        skip: Tensor | None,
    ) -> Copies:
        """The copies to use; see `QuantizedModule.quantized_linear` for `first` and `skip`.

        **Raises** ValueError for a later microbatch without a first one, or both arguments at once.
        """
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # a later microbatch saves the copies for its backward
                return self.get(weight, recipe, options, need_columnwise, first, skip)
        module, name = options.module, options.name
        calls = schedule(recipe, module, name, need_columnwise, False).w
        key = _key(calls, weight.shape, weight.device)
        weight = weight.detach()
        if skip is not None and first is not None:
            raise ValueError(
                "is_first_microbatch says on the host what skip_weight_update says on the device: give one"
            )
        compiling = torch.compiler.is_compiling()
        if compiling:
            from diptych.torch.private.dynamo import comptime  # importing it takes a second

            skips = skip is not None  # noqa: F841 - read below
            comptime(_bound_while_tracing)
            if self.key != key:
                raise UnsupportedError("a compiled region that keeps one weight for two recipes: give each its own")
        if skip is not None:
            if compiling or (self.content == "kept" and self.key == key):
                return self._select(weight, calls, options, skip)
        elif not first:
            if self.content == "none":
                raise ValueError("is_first_microbatch=False, but no weight is kept: the first microbatch passes True")
            if self.content == "kept" and self.key == key:
                return self._copies(compiling)
            warn_once(
                (self.key, key, name),
                f"{type(recipe).__name__} cannot use the weight kept from the first microbatch; it is quantized anew",
            )
        made = quantize_weight(weight, calls, options, options.state.recomputed).copies
        if self.bound and self.key == key:
            for old, t in _pairs(self.copies, made):
                old.copy_(_storable(t))
            if self.valid is not None:
                self.valid.fill_(True)
        else:
            self.copies, self.bound, self.key = made, False, key
        if not compiling:
            self.content = "kept"  # compiled code sets it while tracing: a graph has no side effects
        return made

    def bind(self, calls: tuple[Call, ...], shape: tuple[int, ...], device: torch.device) -> None:
        """Makes buffers for graphs to write, unless there are some for these calls."""
        key = _key(calls, shape, device)
        if self.bound and self.key == key:
            return
        buffers: list[Any] = [None, None]
        empty = grouped_ops.empty_stack if len(shape) == 3 else quantize_ops.empty
        for call in calls:
            copies = quantize_ops.copies(call.quantizer, empty(shape, call.quantizer, device))
            for side, copy in enumerate(copies):
                if copy is not None:
                    buffers[side] = (copy[0], _storable(copy[1]), *copy[2:])
        before = self.copies if self.key == key else None
        from diptych.torch.private.dynamo import static_address  # importing it takes a second

        self.key, self.copies, self.bound = key, tuple(buffers), True
        for copy in self.copies:
            for t in (copy or ())[:3]:
                if t is not None:
                    static_address(t, guard=False)
        self.valid = None
        if before is not None:
            for old, t in _pairs(self.copies, before):
                old.copy_(_storable(t))
        elif self.content == "kept":
            self.content = "stale"

    def _copies(self, compiling: bool) -> Copies:
        return self.copies if compiling else tuple([copy and with_scales(copy) for copy in self.copies])  # type: ignore[return-value]

    def _select(self, weight: Tensor, calls: tuple[Call, ...], options: Options, skip: Tensor) -> Copies:
        """Overwrites the kept copies where `skip` is 0, which the device decides without a synchronization."""
        keep = skip.reshape(1) != 0
        if self.valid is not None:
            keep = keep & self.valid
            self.valid.fill_(True)
        states, _, recomputed, _ = options.state
        scales = {c.state: states.tensors(c.state)[0] for c in calls if c.state and states is not None}
        new = quantize_weight(weight, calls, options, recomputed or scales).copies
        for old, t in _pairs(self.copies, new):
            bits = old.view(torch.uint8)
            bits.copy_(torch.where(keep, bits, _storable(t).view(torch.uint8)))
        if options.record and recomputed is None and states is not None:
            amax = torch.where(keep, 0.0, quantize_ops.amax(weight))
            for call in calls:
                if call.state:
                    states.record(call.state, amax)
        return self._copies(torch.compiler.is_compiling())


class Kept(NamedTuple):
    """The copies that a call used, on the tape of a checkpoint. `versions`: those of their tensors at that time."""

    held: Copies
    versions: list[int]

    @staticmethod
    def of(copies: Copies) -> Kept:
        return Kept(copies, _versions(copies))

    def copies(self, name: str) -> Copies:
        """**Raises** NotImplementedError where they were overwritten since, as graphs and `skip_weight_update` do."""
        if _versions(self.held) != self.versions:
            raise UnsupportedError(
                f"{name}: a recomputation needs the weight that its forward kept or used, and a later first microbatch "
                "has overwritten it: run backward before that"
            )
        return self.held


def _versions(copies: Copies) -> list[int]:
    return [t._version for t, _ in _pairs(copies, copies)]


def _pairs(into: Any, made: Copies) -> list[tuple[Tensor, Tensor]]:
    """Returns each tensor of the kept copies with its counterpart in the new ones."""
    found = []
    for old, new in zip(into, made, strict=True):
        for a, b in zip((old or ())[:3], (new or ())[:3], strict=True):
            if a is not None and b is not None:
                found.append((a, b))
    return found


def _storable(t: Tensor) -> Tensor:
    """Returns a tensor of a copy in the dtype of its buffer: E8M0 scales as bytes."""
    if t.dtype != torch.float8_e8m0fnu:
        return t
    return _bytes_op(t) if torch.compiler.is_compiling() else t.view(torch.uint8)


_bytes_op = define(
    "scale_bytes",
    "(Tensor scale_inv) -> Tensor",
    lambda scale_inv: scale_inv.view(torch.uint8).clone(),
    lambda scale_inv: torch.empty_like(scale_inv, dtype=torch.uint8),
)


class _Bound:
    """A graph's guard on the cache that it runs with: gives the cache the buffers that the graph reads or writes.

    A cache that keeps a weight for other calls does not fit, because the guard cannot tell which call comes next.
    """

    def __init__(self, calls: tuple[Call, ...], shape: tuple[int, ...], device: torch.device, skips: bool) -> None:
        self.calls, self.shape, self.device, self.skips = calls, shape, device, skips
        self.key = _key(calls, shape, device)
        self.checked = threading.local()  # `cache`: weak reference to what this thread has checked last

    def bind(self, cache: WeightCache) -> None:
        from diptych.torch.private.dynamo import static_address  # importing it takes a second

        with torch.inference_mode(False), torch.no_grad():
            cache.bind(self.calls, self.shape, self.device)
            if self.skips and cache.valid is None:
                cache.valid = torch.full((1,), cache.content == "kept", device=self.device)
                static_address(cache.valid, guard=False)

    def __call__(self, cache: Any) -> bool:
        """Returns whether a graph that was traced under this guard may run."""
        if isinstance(cache, WeightCache):
            if cache.key != self.key and cache.content == "kept":
                return False
            if cache.key != self.key or not cache.bound or (self.skips and cache.valid is None):
                self.bind(cache)
            self.checked.cache = weakref.ref(cache)
        return True

    def runs(self) -> None:
        """Called when the checked graph runs: marks the weight as kept, because a graph has no side effects."""
        self.checked.cache().content = "kept"


def _bound_while_tracing(context: Any) -> None:
    """Runs where Dynamo traces `WeightCache.get`, on the real objects: a graph cannot make buffers."""
    cache, recipe, module, name, columnwise, skips, first = (
        traced_local(context, local)
        for local in ("self", "recipe", "module", "name", "need_columnwise", "skips", "first")
    )
    fake = context.get_local("weight").as_fake()
    calls = schedule(recipe, module, name, columnwise, False).w
    bound = _Bound(calls, tuple([int(n) for n in fake.shape]), fake.device, skips)
    bound.bind(cache)
    writes = skips or bool(first)
    if writes:
        cache.content = "kept"
    before_each_call(context, "self", bound, bound.runs if writes else None)


def _key(calls: tuple[Call, ...], shape: tuple[int, ...], device: torch.device) -> tuple[Any, ...]:
    """Returns the key of copies, made of scalars: torch 2.11 keeps no constant of a graph beyond the graph."""
    return (
        str(device),
        *shape,
        *tuple(
            [
                (
                    *tuple(c.quantizer.spec),
                    c.quantizer.rowwise,
                    c.quantizer.columnwise,
                    c.state,
                    None if c.quantizer.implementation() is None else c.quantizer,
                )
                for c in calls
            ]
        ),
    )


# --- of modules ------------------------------------------------------------------------------------------------------


def kept_weight(module: Any, layer: str, weight: Tensor, recipe: Recipe, options: Options, *given: Any) -> Copies:
    """Returns the copies of a module's weight that is kept across microbatches. A recomputation takes those of its
    forward, and keeps none. `given`: the last arguments of `WeightCache.get`."""
    if torch.compiler.is_compiling():
        from diptych.torch.private.dynamo import comptime  # importing it takes a second

        comptime(_made_while_tracing)
        # A norm before the layer needs dgrad, whether x does or not.
        columnwise = module.training or torch.is_grad_enabled()
        return module._caches[layer].get(weight, recipe, options, columnwise, *given)
    call = f"kept weight {layer}"
    taped = taped_call(module, call)
    if taped is None:
        _make(module, (layer,))
        columnwise = module.training or backward_ahead()
        copies = aside(module._caches[layer].get, weight, recipe, options, columnwise, *given)
        if taping():
            tape_call(module, call, None, Kept.of(copies), None)
        return copies
    return taped.states.copies(type(module).__name__)


def _make(module: Any, layers: tuple[str, ...]) -> None:
    if module._caches is None:
        module._caches = {}
    for layer in layers:
        if layer not in module._caches:
            module._caches[layer] = WeightCache()


def _made_while_tracing(context: Any) -> None:
    """Makes the caches of all layers, so that a first call's graph serves later calls and other modules too: Dynamo
    does not look again at what it has seen."""
    module = traced_local(context, "module")
    layers = tuple(dict.fromkeys((*module.layers, traced_local(context, "layer"))))

    def make(module: Any) -> bool:
        if hasattr(module, "_caches"):
            _make(module, layers)
        return True

    make(module)
    before_each_call(context, "module", make)
