"""Layers of other libraries that `convert` makes quantized, in place: their parameters, and their names, stay.

- `TransposedLinear`: a linear layer whose weight is stored as [in, out], as in Hugging Face's Conv1D (GPT-2).
- `RoutedExperts`: gated experts that lie in two stacks and route tokens in their forward, as transformers keeps those
  of Mixtral, Qwen, DeepSeek, gpt-oss and others.

Both are known by what they hold, not by an import. Experts are also tried: a few tokens must come out the same.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError
from diptych.common.layers.groups import HIGH_PRECISION, plan_align
from diptych.torch.functional.permute import RowMap, moe_map, moe_permute, moe_unpermute
from diptych.torch.layers.grouped_linear import grouped_linear_with
from diptych.torch.layers.options import Options, schedule
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.state.autocast import STATE, autocast

# --- a transposed weight ---------------------------------------------------------------------------------------------


class TransposedLinear(QuantizedModule):
    """x @ weight + bias with a weight [in, out], quantized inside `autocast` as a `Linear` of its transpose is.

    `convert` makes it from a Conv1D, whose `weight` and `bias` it keeps.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_linear(x, self._layer_weight(""), self.bias)

    def _weight_name(self, layer: str) -> str:
        return ""

    def _layer_weight(self, layer: str) -> Tensor:
        return self.weight.t()

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[0]}, out_features={self.weight.shape[1]}{self._repr_recipe()}"


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is a Conv1D of Hugging Face's form."""
    if type(module).__name__ != "Conv1D" or "forward" in vars(module):
        return False
    held = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
    nx, nf = getattr(module, "nx", None), getattr(module, "nf", None)
    return held == {"weight": (nx, nf), "bias": (nf,)} and not list(module.children())


# --- experts in stacks -----------------------------------------------------------------------------------------------


class RoutedExperts(QuantizedModule):
    """Experts of a gated MLP, act(gate) * up, whose two products are grouped ones and quantize inside `autocast`.

    `convert` makes it from a module with `gate_up_proj` and `down_proj`, and it is called in the same way:
    (hidden [T, H], expert ids [T, k], weights [T, k]) -> [T, H], each token's weighted sum of its experts in float32.
    Ids outside of 0..E-1 name no expert. Module kind and layers of roles: "grouped_linear", "gate_up" and "down".
    """

    module_kind = "grouped_linear"
    layers = ("gate_up", "down")
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    apply_gate: Any  # what the class that this was gates by: (module, [rows, 2 I]) -> [rows, I]
    argument_names: tuple[str, ...] = ("hidden_states", "top_k_index", "top_k_weights")

    def forward(self, *args: Any, **named: Any) -> Tensor:
        x, ids, weights = (*args, *[named.pop(n) for n in self.argument_names[len(args) :]])
        if named:
            raise ArgumentError(f"RoutedExperts: takes {', '.join(self.argument_names)}, got also {', '.join(named)}")
        return self._routed(x, ids, weights)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and (outside := self._eager_only()) is not None:
            return outside.run(self._routed, x, ids, weights)
        recipe = self._active_recipe()
        align = 1
        if recipe is not None:
            for layer in self.layers:
                plan = schedule(recipe, self.module_kind, self._role_name(layer), False, False).plan
                align = max(align, plan_align(plan))
        rows = moe_map(ids, self.gate_up_proj.shape[0], map_type="index", align_size=align)
        h = self._product("gate_up", x, rows, align, recipe, True)
        y = self._product("down", self.apply_gate(self, h), rows, align, recipe, False)
        return moe_unpermute(y, rows, weights).view(x.shape)

    def _product(self, layer: str, x: Tensor, rows: RowMap, align: int, recipe: Any, permutes: bool) -> Tensor:
        """Runs one grouped layer, on tokens that it permutes or on rows."""
        weight, bias = self._layer_weight(layer), getattr(self, f"{layer}_proj_bias", None)
        if recipe is not None:
            options = self._options_for(recipe, x, weight, layer)
            offsets, row_map = (None, rows) if permutes else (rows.expert_offsets, None)
            return grouped_linear_with(x, weight, bias, offsets, align, recipe, options, row_map)
        self._note_plain(layer)
        x = moe_permute(x, rows)[0] if permutes else x
        plain = functools.partial(_in_high_precision, rows.expert_offsets)
        if STATE.calibrating is not None:
            return self._calibrate(x, weight, bias, layer, STATE.calibrating, plain)
        return plain(x, weight, bias)

    def _weight_name(self, layer: str) -> str:
        return "" if are_transposed(self) else f"{layer}_proj"

    def _layer_weight(self, layer: str) -> Tensor:
        weight = getattr(self, f"{layer}_proj")
        return weight.transpose(1, 2) if are_transposed(self) else weight

    def extra_repr(self) -> str:
        experts, hidden = self.gate_up_proj.shape[0], self.down_proj.shape[2 if are_transposed(self) else 1]
        return f"experts={experts}, hidden={hidden}, inner={self.down_proj[0].numel() // hidden}{self._repr_recipe()}"


def are_transposed(module: Any) -> bool:
    """Whether the stacks of a module of experts are stored as [E, in, out]."""
    return module.gate_up_proj.shape[1] == module.down_proj.shape[2]


def _in_high_precision(offsets: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    options = Options(RoutedExperts.module_kind)
    return grouped_linear_with(x, weight, bias, offsets, 1, HIGH_PRECISION, options)


def _default_gate(module: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up


_TRIED = 2  # tokens

_WANTED = {
    "has_gate": (True, "has no gate"),
    "has_post_expert_norm": (False, "has a norm behind each expert"),
    "_is_expert_parallel": (False, "is one rank's part of the experts"),
}


def departs_from_experts(module: nn.Module) -> str:
    """Returns why a module that holds stacks of matrices cannot become `RoutedExperts`; empty if it can."""
    held = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
    biases = {"gate_up_proj_bias", "down_proj_bias"} & held.keys()
    if held.keys() - biases != {"gate_up_proj", "down_proj"} or len(biases) == 1:
        return f"holds {', '.join(sorted(held))}, not gate_up_proj and down_proj"
    if len(held["gate_up_proj"]) != 3 or len(held["down_proj"]) != 3:
        return "holds no stacks of matrices"
    (e, a, b), (f, c, d) = held["gate_up_proj"], held["down_proj"]
    if e != f or ((a, b) != (2 * d, c) and (b, a) != (2 * c, d)):
        return f"has stacks that do not follow each other, {list((e, a, b))} and {list((f, c, d))}"
    for name, (wanted, why) in _WANTED.items():
        if getattr(module, name, wanted) != wanted:
            return why
    if "forward" in vars(module):
        return "has a forward of its own"
    if len(_arguments(module)) != 3:
        return f"is called with {', '.join(_arguments(module))}, not with tokens, expert ids and weights"
    if not hasattr(module, "_apply_gate") and not callable(getattr(module, "act_fn", None)):
        return "has neither an act_fn nor an _apply_gate"
    return ""


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def become_experts(module: Any) -> str:
    """Turns a module of fitting form into `RoutedExperts`, if both compute the same. **Returns** why not, or ""."""
    before, kept = type(module), dict(vars(module))
    gate, names = getattr(before, "_apply_gate", _default_gate), _arguments(module)
    sample = _sample(module)
    want = None if sample is None else _tried(module, sample)
    module.__class__ = RoutedExperts
    module.apply_gate, module.argument_names = gate, names
    why = ""
    if sample is None:  # the attribute that transformers' decorator sets tells what it computes
        why = "" if hasattr(module, "is_transposed") else "lies on meta, where what it computes cannot be tried"
    elif isinstance(want, Exception):
        why = f"raises {want!r} for {_TRIED} tokens"
    elif not isinstance(want, Tensor) or not _close(_tried(module, sample), want):
        why = "computes something else than gated experts"
    if why:
        module.__class__ = before
        vars(module).clear()
        vars(module).update(kept)
    return why


def _sample(module: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns a few tokens with experts and weights, to compare both forms on; None for a module on meta."""
    w = module.gate_up_proj
    if w.is_meta:
        return None
    hidden = module.down_proj.shape[2 if are_transposed(module) else 1]
    generator: Any = torch.Generator("cpu").manual_seed(0)
    experts, k, here = w.shape[0], min(2, w.shape[0]), {"generator": generator, "device": "cpu"}
    x = torch.randn(_TRIED, hidden, dtype=torch.float32, **here)
    ids = torch.stack([torch.randperm(experts, **here)[:k] for _ in range(_TRIED)])
    weights = torch.rand(_TRIED, k, dtype=torch.float32, **here)
    return x.to(w.device, w.dtype), ids.to(w.device), weights.to(w.device, w.dtype)


def _tried(module: Any, sample: tuple[Tensor, Tensor, Tensor]) -> Any:
    with torch.no_grad(), autocast(enabled=False):
        try:
            return module.forward(*[t.clone() for t in sample])
        except (TypeError, ValueError, RuntimeError) as error:
            return error


def _close(got: Any, want: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.double(), want.double()
    scale = want.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(got, want, rtol=2.0**-5, atol=2.0**-5 * scale, equal_nan=True)
