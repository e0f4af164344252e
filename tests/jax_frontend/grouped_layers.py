"""Helpers for tests of `grouped_dense`: groups, operands, a step, and the same step by the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cases
import diptych.jax as dj
import oracle
from diptych.common import RECIPES, DelayedScaling, QuantizerRole, Recipe, linear_plan
from diptych.common.quantizers import RHT
from jax_frontend import tools
from jax_frontend.layer_cases import rng_words
from oracle.grouped import Problem

K, N, G = 96, 64, 4
# rows, offsets, and what all of them are multiples of
GROUPS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "even": (128, (0, 32, 64, 96, 128), 32),
    "empty": (96, (0, 0, 48, 48, 80), 16),
    "one huge": (288, (0, 0, 256, 256, 256), 128),
    "later": (160, (16, 16, 64, 128, 144), 16),
    "unaligned": (80, (3, 8, 8, 41, 75), 1),
    "none": (32, (0, 0, 0, 0, 0), 128),
}
EVERY: dict[str, Recipe] = RECIPES | {"fp8-delayed": DelayedScaling(amax_history_len=4)}
RNG = oracle.rng_words(2**40 + 3, (1 << 32) - 3)  # the low word of the offset overflows on the way
PARTS = ("y", "dx", "dkernel", "dbias")


def recipe_for(name: str, align: int = 16) -> Recipe:
    """Returns the recipe called `name`, without a Hadamard transform if `align` is not a multiple of 16."""
    recipe = EVERY[name]
    return recipe.replace(disable_rht=True) if rotates(recipe) and align % 16 else recipe


def rotates(recipe: Recipe) -> bool:
    quantizer = linear_plan(recipe).input.columnwise
    return quantizer is not None and bool(quantizer.spec.flags & RHT)


def operands(where: str = "even", dtypes: tuple[str, str, str] | str = "float32", k: int = K, n: int = N) -> list[Any]:
    """x, kernel, bias, dy and offsets; experts differ in magnitude."""
    rows, offsets, _ = GROUPS[where]
    dtypes = (dtypes,) * 3 if isinstance(dtypes, str) else dtypes
    grow = jnp.arange(1, G + 1)
    x, dy = (tools.normal(f"grouped-{where}-{s}", s, dtypes[0]) for s in ((rows, k), (rows, n)))
    kernel, bias = tools.normal("kernel", (G, n, k), dtypes[1]), tools.normal("bias", (G, n), dtypes[2])
    kernel = kernel * grow[:, None, None].astype(kernel.dtype)
    return [x, kernel, bias * grow[:, None].astype(bias.dtype), dy, jnp.asarray(offsets, jnp.int32)]


def given(recipe: Recipe | None, states: Any = None) -> dict[str, Any]:
    """Returns the keyword arguments that a recipe needs: random state and scales."""
    if recipe is None:
        return {}
    plan = linear_plan(recipe, "grouped_linear")
    states = dj.init_state(recipe, module="grouped_linear") if states is None else states
    return ({"rng": RNG} if plan.needs_rng else {}) | ({"state": states} if plan.states else {})


def run(recipe: Recipe | None, x: Any, kernel: Any, bias: Any, dy: Any, offsets: Any, **options: Any) -> dict[str, Any]:
    """y, dx, dkernel and dbias, and the new "state" where there is one."""
    options = given(recipe) | options
    state = options.pop("state", None)

    def layer(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        return dj.grouped_dense(x, kernel, bias, offsets, recipe=recipe, state=state, **options)

    y, pull = jax.vjp(layer, x, kernel, bias, state)
    *grads, news = pull(dy)
    made = dict(zip(PARTS, (y, *grads), strict=True)) | ({"state": news} if state else {})
    return {name: v for name, v in made.items() if v is not None}


def compiled(recipe: Recipe | None, *args: Any, **options: Any) -> dict[str, Any]:
    return jax.jit(lambda *a: run(recipe, *a, **options))(*args)


def reference(
    recipe: Recipe, x: Any, kernel: Any, bias: Any, dy: Any, offsets: Any, scales: Any = None, held: Any = None
) -> dict[str, np.ndarray]:
    """The oracle's results of the same step. `scales`: delayed scales by tensor, 1 if absent. `held`: the quantizer of
    kernels that are held quantized."""
    x, kernel, dy = (np.asarray(v) for v in (x, kernel, dy))
    at = tuple(int(o) for o in np.asarray(offsets))

    def quantize(tensor: str, value: np.ndarray, number: int) -> oracle.Quantized:
        q = recipe.quantizer(QuantizerRole("grouped_linear", tensor))
        assert q is not None
        more: dict[str, Any] = {"scale": np.float32((scales or {}).get(tensor, 1.0))} if q.needs_scale else {}
        more |= {"rng": rng_words(RNG, 2 * number)} if q.needs_rng else {}
        return tools.oracle_of(q, oracle.fold(value), **more)

    def product(a: Any, b: Any, like: Any, dtype: Any, bias: Any = None) -> np.ndarray:
        return Problem(a, b, like, at, bias=bias, out_dtype=dtype).cpu()

    of_bias = None if bias is None else np.asarray(bias)
    qx, qdy = quantize("input", x, 0), quantize("grad_output", dy, 4)
    each = [quantize("weight", w, 2) if held is None else tools.oracle_of(held, w) for w in kernel]
    turned = [q.copy(columnwise=True) for q in each]
    last = qx.copy(columnwise=True)
    out = {
        "y": product(qx.copy(), [q.copy() for q in each], each[0].copy(), x.dtype, of_bias),
        "dx": product(qdy.copy(), turned, turned[0], x.dtype),
        "dkernel": product(qdy.copy(columnwise=True), last, last, kernel.dtype),
    }  # fmt: skip
    out = {name: v.reshape({"y": dy, "dx": x}.get(name, kernel).shape) for name, v in out.items()}
    if of_bias is not None:
        parts = [oracle.fold(dy)[a:b] for a, b in itertools.pairwise(at)]
        out["dbias"] = np.stack([tools.oracle_bias_grad(part, of_bias.dtype) for part in parts])
    return out


def same(got: dict[str, Any], want: dict[str, Any], label: Any = "") -> None:
    """Asserts that both steps have the same parts with equal bits; states are not compared."""
    assert got.keys() - {"state"} == want.keys() - {"state"}, label
    for name in want.keys() - {"state"}:
        tools.same(got[name], want[name], f"{label} {name}")


def dtypes_for(recipe: Recipe, turn: int) -> tuple[str, str, str]:
    """Returns the dtypes of x, kernel and bias that case number `turn` uses."""
    every = [*((d,) * 3 for d in cases.INPUT_DTYPES), ("bfloat16", "float32", "float16")]
    fit = [d for d in every if d[0] == "bfloat16"] if rotates(recipe) else every
    return fit[turn % len(fit)]
