"""Plans: the quantizers and states of one module's tensors under a recipe.

`linear_plan` turns a recipe into the operands of the three products of a linear layer, for the modules of both panels.

    fprop  input       @ weight.T      rowwise copies
    dgrad  grad_output @ weight        rowwise, columnwise
    wgrad  grad_output.T @ input       columnwise copies

A tensor that enters two products with the same quantizer is quantized once, into two copies; else it is quantized
twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from diptych.common.arguments import require_recipe
from diptych.common.gemm_options import GemmOptions
from diptych.common.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer, QuantizerRole
from diptych.common.recipes import Recipe


class TensorPlan(NamedTuple):
    """The quantizers of one tensor: for the product that reads it rowwise, and for the one that reads it columnwise.

    None: that product runs in high precision. `states`: names of the two quantizers' delayed-scaling states, or "".
    """

    rowwise: Quantizer | None
    columnwise: Quantizer | None
    states: tuple[str, str] = ("", "")

    @property
    def shared(self) -> bool:
        """Returns whether one quantizer makes both copies."""
        return self.rowwise is not None and self.rowwise == self.columnwise

    def calls(self, rowwise: bool, columnwise: bool) -> tuple[tuple[Quantizer, str], ...]:
        """Returns (quantizer, state name) of each call that makes the requested copies."""
        if self.shared and self.rowwise is not None and (rowwise or columnwise):
            return ((self.rowwise.with_usage(rowwise=rowwise, columnwise=columnwise), self.states[0]),)
        calls = []
        if rowwise and self.rowwise is not None:
            calls.append((self.rowwise.with_usage(rowwise=True, columnwise=False), self.states[0]))
        if columnwise and self.columnwise is not None:
            calls.append((self.columnwise.with_usage(rowwise=False, columnwise=True), self.states[1]))
        return tuple(calls)


class StateSlot(NamedTuple):
    """One delayed-scaling state of a module: its name and the quantizer (both copies) that it serves."""

    name: str
    quantizer: Float8Quantizer


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """The operands of a linear layer under a recipe; see the module's docstring.

    `results`: quantizers of output, grad_input and grad_weight, or None. `options`: of fprop, dgrad and wgrad.
    `quantized`: whether both operands of fprop, dgrad and wgrad are quantized. `dequantized_backward`: dgrad and wgrad
    run in high precision on forward's dequantized copies. `needs_rng`: whether any quantizer rounds stochastically.
    """

    input: TensorPlan
    weight: TensorPlan
    grad_output: TensorPlan
    results: tuple[Quantizer | None, Quantizer | None, Quantizer | None]
    options: tuple[GemmOptions, GemmOptions, GemmOptions]
    quantized: tuple[bool, bool, bool]
    dequantized_backward: bool
    states: tuple[StateSlot, ...]
    needs_rng: bool


def fusable(tensor: TensorPlan) -> bool:
    """Returns whether a tensor need not be stored, because every use of it reads a copy that the core makes."""
    return all([q is not None and not q.custom for q in (tensor.rowwise, tensor.columnwise)])


def input_fusable(plan: LinearPlan) -> bool:
    """Returns whether forward may quantize a linear layer's input from a source that is never stored.

    Backward's needs do not change forward's bits: if wgrad reads the input itself, it is stored additionally.
    """
    forward, backward = plan.input.rowwise, plan.input.columnwise
    if forward is None or forward.custom:
        return False
    return backward is None or plan.dequantized_backward or not backward.custom


@functools.lru_cache(maxsize=1024)
def linear_plan(recipe: Recipe, module: str = "linear", name: str = "") -> LinearPlan:
    """Returns the plan of one module. **Raises** the errors of `recipe.quantizer`, ValueError for operands that cannot
    be multiplied, ArgumentError if `recipe` is not a recipe."""
    require_recipe(module, recipe, optional=False)
    return make_plan(recipe, module, name)


def make_plan(recipe: Recipe, module: str, name: str) -> LinearPlan:
    """`linear_plan` without its cache and its check of the recipe's type; torch traces this into its graphs."""
    x_f, w_f = recipe.operands("fprop", module, name)
    dy_d, w_d = dy_w, x_w = (None, None)
    if not recipe.backward_override:
        dy_d, w_d = recipe.operands("dgrad", module, name)
        dy_w, x_w = recipe.operands("wgrad", module, name)
    tensors, states = {}, []
    uses = {"input": (x_f, x_w), "weight": (w_f, w_d), "grad_output": (dy_d, dy_w)}
    gemms = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
    for tensor, (rowwise, columnwise) in uses.items():
        shared, names = TensorPlan(rowwise, columnwise).shared, []
        for quantizer, gemm in zip((rowwise, columnwise), gemms[tensor], strict=True):
            names.append((tensor if shared else f"{tensor}.{gemm}") if _delayed(quantizer) else "")
            if _delayed(quantizer) and all(slot.name != names[-1] for slot in states):
                states.append(StateSlot(names[-1], quantizer.with_usage(rowwise=True, columnwise=True)))  # type: ignore
        tensors[tensor] = TensorPlan(rowwise, columnwise, (names[0], names[1]))
    pairs = {"fprop": (x_f, w_f), "dgrad": (dy_d, w_d), "wgrad": (dy_w, x_w)}
    results = tuple(recipe.quantizer(QuantizerRole(module, t, name=name)) for t in QuantizerRole.RESULTS)
    if any(q is not None and q.needs_scale for q in results):
        raise ValueError(
            f"{type(recipe).__name__}: results cannot be quantized with delayed scaling, which has no state"
        )
    return LinearPlan(
        **tensors,
        results=results,  # type: ignore[arg-type]
        options=tuple(recipe.gemm_options(g) for g in pairs),  # type: ignore[arg-type]
        quantized=tuple(a is not None and b is not None for a, b in pairs.values()),  # type: ignore[arg-type]
        dequantized_backward=recipe.backward_override == "dequantized",
        states=tuple(states),
        needs_rng=any([q is not None and q.needs_rng for q in (x_f, w_f, dy_d, w_d, dy_w, x_w, *results)]),
    )


def _delayed(quantizer: Quantizer | None) -> bool:
    return quantizer is not None and quantizer.needs_scale


def held_quantizer(op: str, recipe: Recipe, module: str, name: str, tensor: str = "weight") -> Quantizer | None:
    """Returns the quantizer of a weight that is held quantized; None: it stays in high precision.

    Under delayed scaling the scale is computed from the weight itself. **Raises** ValueError for a recipe that
    quantizes the weight in two ways, or stochastically; `op` and `tensor` are names for the message.
    """
    plan = linear_plan(recipe, module, name).weight
    if plan.rowwise is None and plan.columnwise is None:
        return None
    if plan.rowwise is None or (plan.columnwise is not None and not plan.shared):
        raise ValueError(
            f"{op}: {type(recipe).__name__} quantizes the {tensor} as {plan.rowwise} for fprop and "
            f"{plan.columnwise} for dgrad; one that is held quantized is quantized once"
        )
    quantizer = plan.rowwise.with_usage(rowwise=True, columnwise=plan.shared and plan.rowwise.columnwise)
    if quantizer.needs_rng:
        raise ValueError(f"{op}: a {tensor} cannot be held by {quantizer.described()}, which rounds stochastically")
    if isinstance(quantizer, Float8Quantizer):
        return Float8CurrentScalingQuantizer(
            fp8_dtype=quantizer.fp8_dtype, rowwise=quantizer.rowwise, columnwise=quantizer.columnwise
        )
    return quantizer
