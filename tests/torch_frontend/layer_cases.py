"""Helpers for tests of layers: a seeded layer, one step of it, and the oracle's step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import diptych.torch as dt
import oracle
from diptych.common import RECIPES, DelayedScaling, NVFP4BlockScaling, Quantizer, QuantizerRole, Recipe
from quantizers import oracle_options
from torch_frontend.tools import normal, same, to_numpy, values

SEED = 2**40 + 3
DELAYED = DelayedScaling(amax_history_len=4)
NAMED = {**RECIPES, "fp8-delayed": DELAYED}  # a history short enough to wrap around
STATELESS = tuple(n for n, r in RECIPES.items() if not isinstance(r, DelayedScaling))
SHAPES = {
    True: ((16, 96), (2, 16, 96)),
    False: ((5, 96), (2, 3, 96), (96,), (1, 96)),
}  # packed formats take whole blocks


def layer(k=96, n=64, *, bias=True, device="cpu", dtype: Any = torch.float32, name="layer", **kw: Any) -> dt.Linear:
    """A Linear whose parameters and random state are fixed by its name."""
    made = dt.Linear(k, n, bias=bias, device=device, dtype=dtype, **kw)
    with torch.no_grad():
        for key, p in made.named_parameters():
            p.copy_(normal(f"{name}-{key}", tuple(p.shape), device=device))
    return made


def packed(recipe: Recipe | str) -> bool:
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return isinstance(recipe, NVFP4BlockScaling)


def dtype_of(recipe: Recipe | str) -> str:
    """The dtype of activations that a recipe takes: the Hadamard transform is for bfloat16 alone."""
    return "bfloat16" if packed(recipe) else "float32"


def one_of_each_kind(turn: int) -> list[Any]:
    """RECIPES' names as parameters: one with states, one with random bits and one with neither; the others are slow.

    Graphs differ between these kinds, and `test_compiled_matrix` lets each recipe meet each use of it. `turn`: which
    one has neither.
    """
    plain = [n for n in STATELESS if not packed(n)]
    kept = {plain[turn % len(plain)], *[n for n in RECIPES if n not in plain]}
    return [n if n in kept else slow(n) for n in RECIPES]


def slow(*values: Any) -> Any:
    """A parameter set that waits for the long sweep."""
    return pytest.param(*values, marks=pytest.mark.slow)


def x_for(recipe: Recipe | str, rows: int = 5, k: int = 96, device: str = "cpu") -> torch.Tensor:
    return normal("x", (16 * -(-rows // 16) if packed(recipe) else rows, k), dtype_of(recipe), device)


def run(fn, model, x, recipe, dy=None, **region) -> dict[str, torch.Tensor]:
    """y, dx and the parameters' gradients of one step from a fresh random state."""
    model.zero_grad(set_to_none=True)
    if recipe is not None and packed(recipe):
        dt.seed_rng(model, SEED)
    x = x.clone().requires_grad_()
    with dt.autocast(recipe=recipe, enabled=recipe is not None, **region):
        y = values(fn(x))
    y.backward(torch.ones_like(y) if dy is None else dy)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def same_step(got, want) -> None:
    assert got.keys() == want.keys()
    for key in want:
        same(got[key], want[key], key)


# The calls of one forward and backward in the order of their random offsets.
CALLS = (
    ("input", "fprop"),
    ("input", "wgrad"),
    ("weight", "fprop"),
    ("weight", "dgrad"),
    ("grad_output", "dgrad"),
    ("grad_output", "wgrad"),
)


def oracle_step(recipe: Recipe, x, weight, bias, dy, scales: dict[str, float] | None = None, offset: int = 0):
    """y, dx, weight's and bias's gradient of a quantized linear layer on the CPU, from the oracle's pieces alone.

    `scales`: of delayed scaling, by tensor; 1 where there is none. `offset`: of the random state `SEED`.
    """
    tensors = {"input": to_numpy(x), "weight": to_numpy(weight), "grad_output": to_numpy(dy)}

    def quantized(tensor: str, gemm: str) -> oracle.Quantized:
        q: Quantizer | None = recipe.quantizer(QuantizerRole("linear", tensor, gemm))
        assert q is not None
        given = {}
        if q.needs_scale:
            given["scale"] = np.float32((scales or {}).get(tensor, 1.0))
        if q.needs_rng:
            first = next(i for i, (t, _) in enumerate(CALLS) if t == tensor)  # one quantizer makes both copies
            given["rng"] = oracle.rng_words(SEED, offset + 2 * first)
        return oracle.quantize(tensors[tensor], q.format.name, **oracle_options(q), **given)

    def product(gemm: str, a_columnwise: bool, b_columnwise: bool, dtype, np_bias=None) -> np.ndarray:
        a, b = (quantized(t, gemm) for t in QuantizerRole.GEMMS[gemm][:2])
        return oracle.gemm_cpu(
            a.copy(columnwise=a_columnwise), b.copy(columnwise=b_columnwise), bias=np_bias, out_dtype=dtype
        )

    np_bias = None if bias is None else to_numpy(bias)
    x_dtype, w_dtype = tensors["input"].dtype, tensors["weight"].dtype
    out = {
        "y": product("fprop", False, False, x_dtype, np_bias).reshape(dy.shape),
        "dx": product("dgrad", False, True, x_dtype).reshape(x.shape),
        "weight": product("wgrad", True, True, w_dtype),
    }
    if np_bias is not None:
        out["bias"] = oracle.bias_grad(tensors["grad_output"], np_bias.dtype)
    return out


def train(model, recipe, steps=3, fn=None, rows=16):
    """Every step's results, and the states at the end; two regions before each backward would be two steps."""
    model.zero_grad(set_to_none=True)
    if packed(recipe):
        dt.seed_rng(model, SEED)
    out = []
    for i in range(steps):
        x = (normal(f"x{i}", (rows, 96), dtype_of(recipe)) * (i + 1)).requires_grad_()
        with dt.autocast(recipe=recipe):
            y = (fn or model)(x)
        y.square().sum().backward()
        out += [y.detach(), x.grad]
    out += [p.grad for p in model.parameters()]
    return out + [t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k]


def all_same(got, want):
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        same(a, b, i)


def gelu_model():
    return torch.nn.Sequential(layer(96, 96, name="a"), torch.nn.GELU(), layer(96, 96, name="b"))
