"""Helpers of the JAX tests: quantizers by format name, bit comparison, readers of HLO and of the call counts."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweeps import named

import cases
import oracle
from diptych import core
from diptych.common import (
    RECIPES,
    Float8Quantizer,
    NVFP4BlockScaling,
    Quantizer,
    QuantizerRole,
    Recipe,
    linear_plan,
)
from hardware import cuda_missing
from quantizers import of_case as of_case
from quantizers import oracle_options
from quantizers import quantizer as quantizer

RECIPE_NAMES = tuple(RECIPES)
MET = (jax.errors.JaxRuntimeError, ValueError)  # what a handler refuses; jit's fast path makes the second of it
COPIES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax", "columnwise_amax")

# What `dense` runs on arrays alone, without a state beside them and in any dtype.
PLAIN_RECIPES = {k: r for k, r in RECIPES.items() if not (linear_plan(r).states or linear_plan(r).needs_rng)} | {
    "nvfp4 to nearest": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True)
}


class Kind(NamedTuple):
    """One way to quantize: a quantizer that makes both copies, and what its calls are given beside x."""

    quantizer: Quantizer
    dtype: str
    shape: tuple[int, int]

    def draw(self, name: str, front: tuple[int, ...] = ()) -> jax.Array:
        """Normal values [*front, *shape], each example of another magnitude."""
        x = normal(f"{name}-{self.quantizer}", (*front, *self.shape), self.dtype)
        return x * jnp.logspace(0, 2, front[0], dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)) if front else x

    def state(self, front: tuple[int, ...] = ()) -> dict[str, jax.Array]:
        """Keyword arguments of `quantize`: another scale and other random bits for each example."""
        rng = cases.rng_for(f"state-{self.quantizer}")
        if self.quantizer.needs_scale:
            return {"scale": jnp.asarray(rng.uniform(0.5, 8, (*front, 1)), jnp.float32)}
        if self.quantizer.needs_rng:
            return {"rng": jnp.asarray(rng.integers(0, 1 << 32, (*front, 4), np.uint32).view(np.int32))}
        return {}

    def oracle(self, x: Any, state: dict[str, Any], **usage: bool) -> oracle.Quantized:
        given = {name: np.asarray(value) for name, value in state.items()}
        given = {name: value[0] if name == "scale" else value for name, value in given.items()}
        return oracle_of(self.quantizer, x, **given, **usage)


KINDS = {
    "-".join([fmt, *sorted(variant)]): Kind(
        quantizer(fmt, **dict.fromkeys(variant, True)),
        "bfloat16" if "rht" in variant else "float32",
        (32, 48) if fmt in cases.PACKED_FORMATS else (33, 65),
    )
    for fmt in cases.FORMATS
    for variant in cases.variants_of(fmt)
} | {"delayed": Kind(Float8Quantizer(fp8_dtype="float8_e5m2"), "float32", (33, 65))}
# One of each family, and all options of two levels at once.
NOW = ("fp8_e4m3_tensor", "fp8_e5m2_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp8_e4m3-square", "nvfp4",
       "nvfp4-square", "nvfp4-rht-rht_signs-row_amax-stochastic", "delayed")  # fmt: skip
KIND = pytest.mark.parametrize("kind", named(KINDS, NOW))
# How a function is run; the second as jit does alone, but for long sweeps.
WRAP = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
WRAP_NOW_JIT = pytest.mark.parametrize(
    "wrap", [pytest.param(lambda f: f, marks=pytest.mark.slow, id="eager"), pytest.param(jax.jit, id="jit")]
)


def gpu() -> Any:
    """The first GPU that both JAX and this build can use; skips the test, saying why, where there is none."""
    if reason := cuda_missing():
        pytest.skip(reason)
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this jax has no CUDA backend: {error}")


def bits(x: Any) -> np.ndarray:
    """A NumPy array of unsigned integers with the bits of a JAX or NumPy array."""
    x = np.ascontiguousarray(np.asarray(x))
    return x.reshape(x.shape).view(np.dtype(f"u{x.dtype.itemsize}"))


def near(got: Any, want: Any, error: float, label: Any = "") -> None:
    """Equal shape and dtype, and a relative distance of at most `error`: XLA sums a product's terms in an order that
    depends on the program around it and on the threads that are free."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), label
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    assert np.linalg.norm(got - want) <= error * np.linalg.norm(want), label


def same(got: Any, want: Any, label: Any = "") -> None:
    """Equal shape and equal bits; any NaN equals any other in a high-precision result."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{label}: shape {got.shape}, must be {want.shape}"
    wrong = bits(got) != bits(want).reshape(want.shape)
    if got.dtype.itemsize > 1:
        assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, must be {want.dtype}"
        wrong &= ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    assert not wrong.any(), f"{label}: {wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0]}"


def same_tree(got: Any, want: Any, label: Any = "") -> None:
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree, f"{label}: {got_tree} is not {want_tree}"
    for g, w in zip(got_leaves, want_leaves, strict=True):
        same(g, w, label)


def same_quantized(q: Any, want: oracle.Quantized, label: Any = "") -> None:
    """A QuantizedArray against the oracle's; the oracle folds leading dimensions."""
    for name in COPIES:
        got, expected = getattr(q, name), getattr(want, name)
        assert (got is None) == (expected is None), f"{label}: {name} is {got}"
        if got is not None:
            same(np.asarray(got).reshape(expected.shape), expected, f"{label} {name}")


def normal(name: str, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    return jnp.asarray(cases.draw(name, "normal", shape, dtype))


def oracle_of(quant: Quantizer, x: Any, **options: Any) -> oracle.Quantized:
    return oracle.quantize(np.asarray(x), quant.format.name, **oracle_options(quant) | options)


def oracle_bias_grad(dy: np.ndarray, dtype: Any) -> np.ndarray:
    total = np.zeros(dy.shape[-1], np.float32)
    for row in oracle.fold(dy).astype(np.float32):
        total = total + row
    return oracle.cast(total, dtype)


def oracle_dense(recipe: Recipe, x: Any, kernel: Any, bias: Any, dy: Any) -> dict[str, np.ndarray]:
    """y, dx, dkernel and dbias of a quantized linear layer, from the oracle's pieces alone."""
    x, kernel, dy = (np.asarray(v) for v in (x, kernel, dy))
    qx, qk, qdy = (
        oracle_of(recipe.quantizer(QuantizerRole(tensor=role)), v)
        for role, v in (("input", x), ("weight", kernel), ("grad_output", dy))
    )
    bias = None if bias is None else np.asarray(bias)
    y = oracle.gemm_cpu(qx.copy(), qk.copy(), bias=bias, out_dtype=x.dtype)
    dx = oracle.gemm_cpu(qdy.copy(), qk.copy(columnwise=True), out_dtype=dy.dtype)
    dkernel = oracle.gemm_cpu(qdy.copy(columnwise=True), qx.copy(columnwise=True), out_dtype=kernel.dtype)
    out = {"y": y.reshape(dy.shape), "dx": dx.reshape(x.shape), "dkernel": dkernel}
    if bias is not None:
        out["dbias"] = oracle_bias_grad(dy, bias.dtype)
    return out


def calls(op: str, backend: str = "cpu") -> int:
    for array in jax.live_arrays():  # what is dispatched may not have run yet
        if not array.is_deleted():
            array.block_until_ready()
    return sum(r["calls"] for r in core.kernel_table() if r["op"] == op and r["backend"] == backend)


def custom_calls(text: str) -> list[str]:
    """Names of diptych's custom calls in StableHLO or compiled HLO text."""
    return [a or b for a, b in re.findall(r"custom_call @(diptych_\w+)|custom_call_target=\"(diptych_\w+)\"", text)]


def hlo(f: Any, *args: Any) -> str:
    """StableHLO of `f` for the CPU."""
    return jax.jit(f).lower(*args).as_text()


def eqns(jaxpr: Any, name: str) -> list[Any]:
    """All equations of one primitive, those of inner jaxprs included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found.append(eqn)
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += eqns(inner, name)
    return found
