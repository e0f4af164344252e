"""dt.Linear and dj.dense: forward, dx, dw and db with the same bits, for every recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import oracle
from diptych.common import RECIPES, QuantizerRole
from parity.panels import backends, cublaslt_mismatch, dj, dt, jax, same, to_jax, to_torch, torch

# (x's shape, N): ragged, leading dimensions, one element, several blocks
SHAPES = (((16, 32), 16), ((7, 33), 5), ((2, 3, 96), 20), ((1, 1), 1), ((130, 257), 129))
DTYPES = tuple((d, d, d) for d in cases.INPUT_DTYPES) + (("bfloat16", "float32", "float32"),)
PARTS = ("y", "dx", "dw", "db")


def tensors(label: str, shape: tuple[int, ...], n: int, dtypes: tuple[str, str, str]) -> list[np.ndarray]:
    """x, w, b and the gradient of y."""
    shapes = (shape, (n, shape[-1]), (n,), (*shape[:-1], n))
    kinds = (*dtypes, dtypes[0])
    return [cases.draw(f"{label}-{i}", "normal", s, d) for i, (s, d) in enumerate(zip(shapes, kinds, strict=True))]


def of_torch(recipe, arrays, device: str = "cpu", compiled: bool = False) -> list[Any]:
    x, w, b, dy = (to_torch(a, device) for a in arrays)
    layer = dt.Linear(w.shape[1], w.shape[0], device=device)
    layer.weight, layer.bias = torch.nn.Parameter(w), torch.nn.Parameter(b)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x.requires_grad_()
    with dt.autocast(enabled=True, recipe=recipe):
        y = run(x)
    y.backward(dy)
    return [y, x.grad, layer.weight.grad, layer.bias.grad]


def of_jax(recipe, arrays, device: str = "cpu") -> list[Any]:
    def both(x, w, b, dy):
        y, back = jax.vjp(lambda *a: dj.dense(*a, recipe=recipe), x, w, b)
        return [y, *back(dy)]

    return jax.jit(both)(*(to_jax(a, device) for a in arrays))


def of_oracle(recipe, arrays) -> list[np.ndarray]:
    """What both must compute on the CPU, from the oracle's parts."""
    x, w, b, dy = arrays
    copies = {}
    for tensor, value in (("input", x), ("weight", w), ("grad_output", dy)):
        quantizer = recipe.quantizer(QuantizerRole(module="linear", tensor=tensor))
        _, pow2, eps = quantizer.spec
        copies[tensor] = oracle.quantize(value, quantizer.format.name, pow2=pow2, eps=eps)
    qx, qw, qdy = copies.values()
    y = oracle.gemm_cpu(qx.copy(), qw.copy(), bias=b, out_dtype=x.dtype).reshape(dy.shape)
    dx = oracle.gemm_cpu(qdy.copy(), qw.copy(True), out_dtype=x.dtype).reshape(x.shape)
    dw = oracle.gemm_cpu(qdy.copy(True), qx.copy(True), out_dtype=w.dtype)
    return [y, dx, dw, oracle.bias_grad(dy, b.dtype)]


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("name", RECIPES)
def test_same_bits(name, dtypes):
    for shape, n in SHAPES:
        label = f"{name} {dtypes} {shape} {n} {cases.report_header()}"
        arrays = tensors(label, shape, n, dtypes)
        want = of_oracle(RECIPES[name], arrays)
        mine, theirs = of_torch(RECIPES[name], arrays), of_jax(RECIPES[name], arrays)
        for part, t, j, o in zip(PARTS, mine, theirs, want, strict=True):
            same(t, o, f"torch {part} {label}")
            same(j, o, f"jax {part} {label}")


@pytest.mark.parametrize("name", RECIPES)
def test_same_bits_compiled(name):
    """torch.compile(fullgraph=True) changes nothing."""
    torch.compiler.reset()
    for shape, n, dtypes in (((2, 3, 96), 20, ("bfloat16", "float32", "float32")), ((7, 33), 5, ("float32",) * 3)):
        label = f"{name} compiled {shape} {n} {cases.report_header()}"
        arrays = tensors(label, shape, n, dtypes)
        mine, theirs = of_torch(RECIPES[name], arrays, compiled=True), of_jax(RECIPES[name], arrays)
        for part, t, j in zip(PARTS, mine, theirs, strict=True):
            same(t, j, f"{part} {label}")


@pytest.mark.parametrize("name", RECIPES)
def test_adversarial_values(name):
    """Outliers, zero blocks and huge values; NaN and inf where they lead to them."""
    for values in ("outlier", "zero_blocks", "inf_nan_mix", "subnormal_input"):
        arrays = [
            cases.draw(f"linear-{name}-{values}-{i}", values, s, "float32")
            for i, s in enumerate(((33, 65), (20, 65), (20,), (33, 20)))
        ]
        want = of_oracle(RECIPES[name], arrays)
        mine, theirs = of_torch(RECIPES[name], arrays), of_jax(RECIPES[name], arrays)
        for part, t, j, o in zip(PARTS, mine, theirs, want, strict=True):
            same(t, o, f"torch {part} {name} {values}", nan_free=True)
            same(j, o, f"jax {part} {name} {values}", nan_free=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", RECIPES)
def test_same_bits_on_cuda(name, cuda):
    """One GPU, one cuBLASLt: torch and JAX agree in bits, whichever kernels the registry chose."""
    if not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")
    if reason := cublaslt_mismatch():
        pytest.skip(reason)
    for dtypes in DTYPES:
        for shape, n in (*SHAPES, ((4, 64, 256), 512)):
            label = f"cuda {name} {dtypes} {shape} {n} {cases.report_header()}"
            arrays = tensors(label, shape, n, dtypes)
            mine, theirs = of_torch(RECIPES[name], arrays, "cuda"), of_jax(RECIPES[name], arrays, "cuda")
            for part, t, j in zip(PARTS, mine, theirs, strict=True):
                same(t, j, f"{part} {label}")
