"""Runs a linear layer over several steps in each panel and in the oracle, and returns results and final states."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cases
import oracle
from diptych.common import (
    CustomRecipe,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    LinearPlan,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    Recipe,
    linear_plan,
)
from diptych.common.quantizers import RHT
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.state.scales import init_state, overwrite_states, state_dict
from diptych.jax.state.update import update_state
from parity.panels import dj, dt, jax, to_jax, to_torch, torch, values
from quantizers import oracle_options

PARTS = ("y", "dx", "dw", "db")
SEED = 2**40 + 3


class Step(NamedTuple):
    """The results of one step, by part, and the states after it, by their key in a state dict."""

    parts: dict[str, Any]
    states: dict[str, Any]


def quantizers_of(plan: LinearPlan) -> list[Quantizer]:
    found = [q for t in (plan.input, plan.weight, plan.grad_output) for q in (t.rowwise, t.columnwise)]
    return [q for q in [*found, *plan.results] if q is not None]


def packed(recipe: Recipe) -> bool:
    """Whether extents must be whole blocks."""
    return any(q.format.pack > 1 for q in quantizers_of(linear_plan(recipe)))


def rotates(recipe: Recipe) -> bool:
    """Whether activations must be bfloat16."""
    return any(q.spec.flags & RHT for q in quantizers_of(linear_plan(recipe)))


def tensors(label: str, shape: tuple[int, ...], n: int, dtypes: tuple[str, str, str], values="normal"):
    """x, w, b and the gradient of y."""
    shapes = (shape, (n, shape[-1]), (n,), (*shape[:-1], n))
    kinds = (*dtypes, dtypes[0])
    return [cases.draw(f"{label}-{i}", values, s, d) for i, (s, d) in enumerate(zip(shapes, kinds, strict=True))]


# --- the panels ---


def of_torch(recipe: Recipe, steps: list[list[np.ndarray]], device: str = "cpu", compiled: bool = False) -> list[Step]:
    layer = dt.Linear(steps[0][1].shape[1], steps[0][1].shape[0], device=device)
    layer.seed_rng(SEED)
    if not linear_plan(recipe).needs_rng:
        del layer.rng_state
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    out = []
    for arrays in steps:
        x, w, b, dy = (to_torch(a, device) for a in arrays)
        layer.weight, layer.bias = torch.nn.Parameter(w), torch.nn.Parameter(b)
        x.requires_grad_()
        with dt.autocast(enabled=True, recipe=recipe):
            y = values(run(x))
        y.backward(dy)
        states = {k: v.clone() for k, v in layer.state_dict().items() if k not in ("weight", "bias")}
        out.append(Step(dict(zip(PARTS, (y, x.grad, layer.weight.grad, layer.bias.grad), strict=True)), states))
    return out


def of_jax(recipe: Recipe, steps: list[list[np.ndarray]], device: str = "cpu") -> list[Step]:
    needs_rng = linear_plan(recipe).needs_rng

    def step(states, rng, x, w, b, dy):
        states = update_state(states, recipe)

        def layer(x, w, b, states):
            return dj.dense(x, w, b, recipe=recipe, state=states, rng=rng if needs_rng else None)

        y, back = jax.vjp(layer, x, w, b, states)
        *grads, news = back(dy)
        return [y, *grads], overwrite_states(states, news), rng_at(rng, OFFSETS)

    run = jax.jit(step)
    states, rng = init_state(recipe), dj.rng_state(SEED)
    out = []
    for arrays in steps:
        parts, states, rng = run(states, rng, *(to_jax(a, device) for a in arrays))
        kept = state_dict(states, rng=rng if needs_rng else None)
        out.append(Step(dict(zip(PARTS, parts, strict=True)), kept))
    return out


# --- the oracle ---


class Oracle:
    """A quantized layer in NumPy: delayed histories, random offsets and all, from the recipe alone."""

    CALLS = ("input", "input.wgrad", "weight", "weight.dgrad", "grad_output", "grad_output.wgrad")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.plan, self.offset = recipe, linear_plan(recipe), 0
        self.histories = {s.name: np.zeros((1, s.quantizer.amax_history_len), np.float32) for s in self.plan.states}
        self.scales = {s.name: np.ones(1, np.float32) for s in self.plan.states}

    def copy(self, tensor: str, value: np.ndarray, columnwise: bool) -> oracle.Copy:
        """One copy of a tensor, its amax recorded."""
        plan = getattr(self.plan, tensor)
        quantizer, state = ((plan.rowwise, plan.columnwise)[columnwise], plan.states[columnwise])
        assert quantizer is not None
        given: dict[str, Any] = {}
        if state:
            given["scale"] = self.scales[state]
        if quantizer.needs_rng:
            first = self.CALLS.index(tensor) + (columnwise and not plan.shared)
            given["rng"] = oracle.rng_words(SEED, self.offset + 2 * first)
        q = oracle.quantize(value, quantizer.format.name, **oracle_options(quantizer), **given)
        if state:
            pending = self.histories[state][:, :1]
            pending[:] = np.maximum(pending, q.amax)
        return q.copy(columnwise)

    def update(self) -> None:
        for slot in self.plan.states:
            q, name = slot.quantizer, slot.name
            self.histories[name], self.scales[name] = oracle.scale_update(
                self.histories[name],
                self.scales[name],
                fp8_max=float(oracle.FP8_MAX[oracle.FORMATS[q.format.name].element]),
                margin=q.margin,
                most_recent=q.amax_compute_algo == "most_recent",
            )

    def step(self, arrays: list[np.ndarray]) -> Step:
        self.update()
        x, w, b, dy = arrays
        values = {"input": x, "weight": w, "grad_output": dy}
        results = {}
        for gemm, quantized, sides, dtype in zip(
            ("fprop", "dgrad", "wgrad"), self.plan.quantized, ((0, 0), (0, 1), (1, 1)), (x, x, w), strict=True
        ):
            names = QuantizerRole.GEMMS[gemm][:2]
            sources = [getattr(self.plan, n) for n in names]
            wanted = [(s.rowwise, s.columnwise)[side] is not None for s, side in zip(sources, sides, strict=True)]
            made = [
                self.copy(n, values[n], bool(side)) if want else None
                for n, side, want in zip(names, sides, wanted, strict=True)
            ]
            if quantized:
                bias = b if gemm == "fprop" else None
                results[gemm] = oracle.gemm_cpu(*made, bias=bias, out_dtype=dtype.dtype)
        self.offset += OFFSETS
        parts = {"db": oracle.bias_grad(dy, b.dtype)}
        for part, gemm, like in (("y", "fprop", dy), ("dx", "dgrad", x), ("dw", "wgrad", w)):
            if gemm in results:
                parts[part] = results[gemm].reshape(like.shape)
        states = {}
        for slot in self.plan.states:
            key = f"scale_states.{slot.name.replace('.', '_')}"
            states[f"{key}.scale"], states[f"{key}.amax_history"] = self.scales[slot.name], self.histories[slot.name][0]
        return Step(parts, {k: v.copy() for k, v in states.items()})


def of_oracle(recipe: Recipe, steps: list[list[np.ndarray]]) -> list[Step]:
    """Returns the expected results of both frameworks on the CPU, without products that have an unquantized operand."""
    reference = Oracle(recipe)
    return [reference.step(arrays) for arrays in steps]


# --- mixtures ---


def _by_tensor(role: QuantizerRole) -> Quantizer | None:
    """Three families in one layer, results quantized too."""
    return {
        "input": Float8CurrentScalingQuantizer(amax_epsilon=2.0**-10),
        "weight": Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
        "grad_output": MXFP8Quantizer(fp8_dtype="float8_e5m2"),
    }[role.tensor]


def _by_product(role: QuantizerRole) -> Quantizer | None:
    """Another format for each product, so that each tensor is quantized twice; two states for one tensor."""
    if role.gemm == "fprop":
        return NVFP4Quantizer(row_scaled_nvfp4=role.tensor == "input", stochastic_rounding=role.tensor == "weight")
    if role.gemm == "dgrad":
        return Float8Quantizer(fp8_dtype="float8_e5m2", amax_history_len=2 + (role.tensor == "weight"))
    return NVFP4Quantizer(with_rht=True, stochastic_rounding=True)


def _partly(role: QuantizerRole) -> Quantizer | None:
    """wgrad in high precision, dgrad with one operand quantized, all delayed with the newest amax."""
    if role.gemm == "wgrad" or (role.gemm == "dgrad" and role.tensor == "grad_output"):
        return None
    return Float8Quantizer(amax_history_len=1 + (role.tensor == "weight"), amax_compute_algo="most_recent", margin=2)


def _results(role: QuantizerRole) -> Quantizer | None:
    """Results too are rounded."""
    if role.tensor in role.RESULTS:
        return {"output": Float8CurrentScalingQuantizer(), "grad_input": MXFP8Quantizer(),
                "grad_weight": NVFP4Quantizer(stochastic_rounding=True)}[role.tensor]  # fmt: skip
    return Float8BlockQuantizer(fp8_dtype="float8_e5m2" if role.tensor == "grad_output" else "float8_e4m3fn")


MIXTURES = {
    "by_tensor": CustomRecipe(_by_tensor),
    "by_product": CustomRecipe(_by_product),
    "partly": CustomRecipe(_partly),
    "results": CustomRecipe(_results, quantize_results=True),
}
