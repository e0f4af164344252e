"""A module's states as plain values, and each of its calls computed from them by the verbs `quantize` and `gemm`.

It follows docs/states.md and docs/numerics.md and shares no code with the modules: no region, no tape, no cache, no
graph node of a layer. Products, norms and activations are those of the verbs, which have tests of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import diptych.torch as dt
from diptych.common import CheckpointError, Quantizer, QuantizerRole, Recipe
from diptych.torch.functional import activation as activation_verbs
from diptych.torch.functional import norm as norm_verbs

OFFSETS = 18
"""Random offsets that a call of a linear layer uses up: nine calls of `quantize` with two each."""
TENSORS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""The products that read a tensor, rowwise and columnwise."""
regions = itertools.count(1)
"""Numbers of outermost regions, each a step to delayed scaling."""


@dataclasses.dataclass
class Slot:
    """The delayed scale of one tensor. `largest`: of the elements that it is for."""

    scale: Tensor
    history: Tensor
    largest: float

    @staticmethod
    def new(quantizer: Any) -> Slot:
        largest = torch.finfo(getattr(torch, quantizer.fp8_dtype)).max
        return Slot(torch.ones(1), torch.zeros(quantizer.amax_history_len), largest)

    def fits(self, quantizer: Any) -> bool:
        return self.largest == torch.finfo(getattr(torch, quantizer.fp8_dtype)).max

    def update(self, quantizer: Any) -> None:
        """NUMERICS 2."""
        h = self.history.numpy()
        if h[0] == 0:
            return
        amax = h[0] if quantizer.amax_compute_algo == "most_recent" else max(h[1:].max(initial=0), h[0])
        h[:] = np.concatenate([[0], h[2:], h[:1]]) if h.size > 1 else 0
        top = np.float32(self.largest * 2.0**-quantizer.margin)
        with np.errstate(over="ignore"):
            self.scale = torch.tensor([min(top / amax, np.finfo(np.float32).max)])


def record(history: Tensor, t: Tensor) -> None:
    history[:1].copy_(torch.maximum(history[:1], dt.amax(t.detach())))


def resized(history: Tensor, length: int) -> Tensor:
    """The pending amax, and of those before it the newest, at the end of a history of another length."""
    if history.numel() == length:
        return history
    rest = history[1:][-(length - 1) :] if length > 1 else history[:0]
    return torch.cat([history[:1], torch.zeros(length - 1 - rest.numel()), rest])


@dataclasses.dataclass
class Layer:
    """The states of one linear layer. `made`: whether it has had any. `bound`: the recipe that used them last; None
    for states that were loaded, until a recipe uses them. `kept`: the weight of the first microbatch."""

    slots: dict[str, Slot] = dataclasses.field(default_factory=dict)
    made: bool = False
    loaded: bool = False
    bound: Recipe | None = None
    region: int = 0
    kept: tuple[Any, ...] = ()


@dataclasses.dataclass
class Call:
    """The settings by which a module computes a call on its operands. `recipe`: the innermost region's, None in high
    precision. `region`: the number of the outermost region that quantizes, None outside of regions. `record`: whether
    the call may record. `first`: as `is_first_microbatch`. `grad`: whether grad mode is on."""

    recipe: Recipe | None
    region: int | None
    record: bool
    first: bool | None = None
    grad: bool = False


class Reference:
    """One module as plain values. `draw`: returns the seed and the offset of a random state that a call makes."""

    def __init__(self, module: Any, draw: Callable[[], list[int]]) -> None:
        self.kind, self.layers = module.module_kind, {name: Layer() for name in module.layers}
        self.parameters = {k: p.detach().clone().requires_grad_() for k, p in module.named_parameters()}
        self.norm: Any = getattr(module, "norm", None)
        self.activation: Any = getattr(module, "activation_options", None)
        self.recipe: Recipe | None = module.recipe
        self.rng: list[int] | None = None
        self.prepared: Recipe | None = None
        self.draw, self.training = draw, True
        self.prepare(None)

    # --- states ---

    def quantizers(self, recipe: Recipe, layer: str, tensor: str) -> list[Any]:
        return [recipe.quantizer(QuantizerRole(self.kind, tensor, gemm, layer)) for gemm in TENSORS[tensor]]

    def slots_of(self, recipe: Recipe, layer: str) -> dict[str, Any]:
        """The delayed scales that a layer has under a recipe, each with its quantizer."""
        found = {}
        for tensor, gemms in TENSORS.items():
            row, column = self.quantizers(recipe, layer, tensor)
            for q, gemm in ((row, gemms[0]), (column, gemms[1])):
                if q.needs_scale:
                    found[tensor if row == column else f"{tensor}_{gemm}"] = q
        return found

    def draws(self, recipe: Recipe, layer: str) -> bool:
        return any(q.needs_rng for tensor in TENSORS for q in self.quantizers(recipe, layer, tensor))

    def refuse_others(self, name: str, wanted: dict[str, Any]) -> None:
        """States that were loaded are refused by another recipe's, until they are reset."""
        one = self.layers[name]
        if not (one.loaded and one.slots and wanted):
            return
        if one.slots.keys() != wanted.keys() or not all(s.fits(wanted[k]) for k, s in one.slots.items()):
            raise CheckpointError("another recipe's states")

    def adopt(self, name: str, recipe: Recipe) -> None:
        """Makes a layer's states those of a recipe."""
        one, wanted = self.layers[name], self.slots_of(recipe, name)
        if not (one.made or wanted) or one.bound == recipe:
            return
        self.refuse_others(name, wanted)
        kept = {k: s for k, s in one.slots.items() if k in wanted and s.fits(wanted[k])}
        one.slots = {k: kept.get(k) or Slot.new(q) for k, q in wanted.items()}
        for k, q in wanted.items():
            one.slots[k].history = resized(one.slots[k].history, q.amax_history_len)
        one.made, one.loaded, one.bound = True, False, recipe
        if self.prepared is not None:
            self.prepared = recipe

    def looks(self, name: str, recipe: Recipe) -> None:
        """A call that does not record: it makes states where there are none, and changes none."""
        one, wanted = self.layers[name], self.slots_of(recipe, name)
        if not (wanted or self.draws(recipe, name)):
            return
        same = one.slots.keys() == wanted.keys() and all(
            s.fits(wanted[k]) and s.history.numel() == wanted[k].amax_history_len for k, s in one.slots.items()
        )
        if not one.slots or same:
            self.adopt(name, recipe)
        else:
            self.refuse_others(name, wanted)

    def prepare(self, recipe: Recipe | None) -> None:
        own = self.recipe if self.recipe is not None else recipe
        if own is None:
            return
        self.prepared = own
        for name in self.layers:
            self.adopt(name, own)
            self.need_rng(own, name)

    def need_rng(self, recipe: Recipe, name: str) -> bool:
        needed = self.draws(recipe, name)
        if needed and self.rng is None:
            self.rng = self.draw()
        return needed

    def make_missing(self) -> None:
        """Before the module is saved or copied."""
        recipe = self.recipe if self.recipe is not None else self.prepared
        if recipe is None:
            return
        for name, one in self.layers.items():
            missing = bool(self.slots_of(recipe, name)) and not one.slots
            if missing or (self.draws(recipe, name) and self.rng is None):
                self.adopt(name, recipe)
                self.need_rng(recipe, name)

    def reset_states(self) -> None:
        self.layers = {name: Layer(kept=one.kept) for name, one in self.layers.items()}
        self.make_missing()

    # --- saving, loading, copying ---

    def states(self) -> dict[str, Tensor]:
        """The persistent buffers, by the keys of a state dict."""
        found = {}
        for name, one in self.layers.items():
            for key, slot in one.slots.items():
                prefix = ".".join(["scale_states", *filter(None, (name, key))])
                values = (slot.scale, slot.history, torch.tensor([slot.largest]))
                found |= {f"{prefix}.{b}": t for b, t in zip(("scale", "amax_history", "fp8_max"), values, strict=True)}
        if self.rng is not None:
            found["rng_state"] = dt.rng_state(*self.rng)
        return found

    def saved(self) -> Reference:
        """Returns a copy of this model, as a state dict keeps it."""
        self.make_missing()
        return copy.deepcopy(self)

    def load(self, saved: Reference, weights_alone: bool) -> None:
        """**Raises** CheckpointError, having changed nothing, for states of another recipe than the bound ones."""
        slots = {name: copy.deepcopy(one.slots) for name, one in saved.layers.items()}
        tree = any(slots.values()) and not weights_alone
        for name, one in self.layers.items():
            if tree and one.slots and not one.loaded:
                wrong = [
                    k for k in slots[name].keys() & one.slots.keys() if slots[name][k].largest != one.slots[k].largest
                ]
                if wrong or slots[name].keys() != one.slots.keys():
                    raise CheckpointError("another recipe's states")
        for name, one in self.layers.items():
            one.kept = ()
            if not tree:
                self.layers[name] = Layer()
                continue
            given = slots[name]
            if one.slots and not one.loaded:
                for key, slot in given.items():
                    slot.history = resized(slot.history, one.slots[key].history.numel())
                one.slots = given
            else:
                self.layers[name] = Layer(given, made=True, loaded=True, region=one.region)
        if saved.rng is not None and not weights_alone:
            self.rng = list(saved.rng)
        with torch.no_grad():
            for key, p in self.parameters.items():
                p.copy_(saved.parameters[key])

    def copied(self, prepared: bool) -> Reference:
        """A deep copy, or one by pickle, which does not know what the module was prepared for."""
        made = copy.deepcopy(self)
        for one in made.layers.values():
            one.kept, one.region, one.bound = (), 0, None
        if not prepared:
            made.prepared = None
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        made = copy.copy(self)
        made.parameters = {k: p.detach().clone().requires_grad_() for k, p in self.parameters.items()}
        made.layers = {
            k: dataclasses.replace(one, slots=copy.deepcopy(one.slots, memo)) for k, one in self.layers.items()
        }
        made.rng = None if self.rng is None else list(self.rng)
        return made

    def step(self, lr: float) -> None:
        with torch.no_grad():
            for p in self.parameters.values():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-lr)

    # --- calls ---

    def __call__(self, x: Tensor, call: Call) -> Tensor:
        p, call = self.parameters, dataclasses.replace(call, grad=torch.is_grad_enabled())
        if self.norm is not None:
            x = norm_verbs.layernorm(x, p["layer_norm_weight"], p.get("layer_norm_bias"), self.norm)
        begun = [self.begin(name, call) for name in self.layers]
        for name, one in zip(self.layers, begun, strict=True):
            given = p[f"{name}_weight" if name else "weight"], p.get(f"{name}_bias" if name else "bias")
            if name == "fc2":
                x = activation_verbs.activate(x, self.activation)
            x = F.linear(x, *given) if one is None else Product.apply(x, *given, one)
        return x

    def begin(self, name: str, call: Call) -> Begun | None:
        """Moves a layer's states on by a call. Returns what its products run by, None in high precision."""
        recipe, one = call.recipe, self.layers[name]
        if recipe is None:
            return None
        region = next(regions) if call.region is None else call.region
        (self.adopt if call.record else self.looks)(name, recipe)
        wanted = self.slots_of(recipe, name)
        if call.record and wanted and one.region != region:
            one.region = region
            for key, q in wanted.items():
                one.slots[key].update(q)
        scales = {}
        for key, q in wanted.items():
            slot = one.slots.get(key)
            scales[key] = slot.scale.clone() if slot is not None and slot.fits(q) else torch.ones(1)
        rng = None
        if self.need_rng(recipe, name):
            assert self.rng is not None
            rng = list(self.rng)
            self.rng[1] += OFFSETS * call.record
        histories = {key: one.slots[key].history for key in wanted} if call.record else {}
        return Begun(self, name, recipe, call, scales, histories, rng)


@dataclasses.dataclass
class Begun:
    """A call of a layer whose states have moved on."""

    of: Reference
    layer: str
    recipe: Recipe
    call: Call
    scales: dict[str, Tensor]
    histories: dict[str, Tensor]
    rng: list[int] | None

    def quantized(self, tensor: str, t: Tensor, columnwise: bool = True) -> tuple[Any, Any]:
        """The copies for the product that reads a tensor rowwise, and for the one that reads it columnwise."""
        row, column = self.of.quantizers(self.recipe, self.layer, tensor)
        first, gemms = 2 * list(TENSORS).index(tensor), TENSORS[tensor]
        if row == column:
            both = self.quantize(row.with_usage(rowwise=True, columnwise=columnwise), t, tensor, first)
            return both, both
        made = self.quantize(row.with_usage(rowwise=True, columnwise=False), t, f"{tensor}_{gemms[0]}", first)
        if not columnwise:
            return made, None
        q = column.with_usage(rowwise=False, columnwise=True)
        return made, self.quantize(q, t, f"{tensor}_{gemms[1]}", first + 1)

    def quantize(self, q: Quantizer, t: Tensor, state: str, number: int) -> Any:
        given: dict[str, Any] = {}
        if q.needs_scale:
            given["scale"] = self.scales[state]
            if state in self.histories:
                record(self.histories[state], t)
        if q.needs_rng:
            assert self.rng is not None
            given["rng"] = dt.rng_state(self.rng[0], self.rng[1] + 2 * number)
        return dt.quantize(t.detach(), q, **given)

    def weight(self, w: Tensor) -> tuple[Any, Any]:
        """The weight's copies, kept or made, and then kept if the call says so."""
        first, one = self.call.first, self.of.layers[self.layer]
        if first is None:
            return self.quantized("weight", w)
        columnwise = self.of.training or self.call.grad
        specs = [(q.spec, q.needs_scale) for q in self.of.quantizers(self.recipe, self.layer, "weight")]
        key = (specs, columnwise)
        if first or not one.kept or one.kept[0] != key:
            one.kept = key, self.quantized("weight", w, columnwise)
        return one.kept[1]


class Product(torch.autograd.Function):
    """x @ w.T + b of quantized operands, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, begun: Begun) -> Tensor:
        ctx.begun, ctx.dtypes = begun, (x.dtype, w.dtype, None if b is None else b.dtype)
        qx, qw = begun.quantized("input", x), begun.weight(w)
        ctx.qx, ctx.qw = qx[1], qw[1]
        return dt.gemm(qx[0], qw[0], bias=b, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dx = dw = None
        if need_x or need_w:
            rowwise, columnwise = ctx.begun.quantized("grad_output", dy)
            if need_x:
                dx = dt.gemm(rowwise, ctx.qw, trans_b=False, out_dtype=ctx.dtypes[0])
            if need_w:
                dw = dt.gemm(columnwise, ctx.qx, trans_a=True, trans_b=False, out_dtype=ctx.dtypes[1])
        return dx, dw, dt.bias_grad(dy.contiguous(), ctx.dtypes[2]) if need_b else None, None
