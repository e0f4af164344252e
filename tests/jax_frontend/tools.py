"""What the JAX tests share: quantizers by format name, bit comparison, readers of HLO and of the call counts."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracle
from diptych import core
from diptych.common import (
    RECIPES,
    Quantizer,
    QuantizerRole,
    Recipe,
)
from hardware import cuda_missing
from quantizers import quantizer as quantizer

RECIPE_NAMES = tuple(RECIPES)
COPIES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax")


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


def oracle_of(quant: Quantizer, x: Any, **usage: bool) -> oracle.Quantized:
    _, pow2, eps = quant.spec
    return oracle.quantize(np.asarray(x), quant.format.name, pow2=pow2, eps=eps, **usage)


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
