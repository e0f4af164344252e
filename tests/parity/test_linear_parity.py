"""dt.Linear and dj.dense over several steps: forward, dx, dw, db and states with the same bits, for every recipe."""

from __future__ import annotations

import numpy as np
import pytest
from sweeps import others_slow

import cases
from diptych.common import RECIPES, DelayedScaling, NVFP4BlockScaling, linear_plan
from parity.layers import MIXTURES, Step, of_jax, of_oracle, of_torch, packed, rotates, tensors
from parity.panels import backends, cublaslt_mismatch, same, torch

pytestmark = pytest.mark.sampled

# (x's shape, N): ragged, leading dimensions, one element, several blocks
SHAPES = (((16, 32), 16), ((7, 33), 5), ((2, 3, 96), 20), ((1, 1), 1), ((130, 257), 129))
PACKED_SHAPES = (((16, 32), 16), ((2, 24, 96), 32), ((128, 256), 144))
DTYPES = tuple((d, d, d) for d in cases.INPUT_DTYPES) + (("bfloat16", "float32", "float32"),)
EVERY = {
    **RECIPES,
    "square": RECIPES["fp8-block"].replace(wgrad_input_square=True),
    "delayed, short, newest": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1),
    "nvfp4 by row": NVFP4BlockScaling(row_scaled_activation=True, rht_random_signs=False),
    "nvfp4 plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    **MIXTURES,
}
STEPS = 3


def shapes_for(recipe):
    return PACKED_SHAPES if packed(recipe) else SHAPES


def dtypes_for(recipe):
    return [d for d in DTYPES if d[0] == "bfloat16"] if rotates(recipe) else DTYPES


def drawn(label, recipe, shape, n, dtypes, steps=STEPS):
    """The arrays of several steps; values grow, so that delayed scales follow."""
    every = [tensors(f"{label}-{i}", shape, n, dtypes) for i in range(steps)]
    return [[(a * 4**i).astype(a.dtype) for a in arrays] for i, arrays in enumerate(every)]


def compare(label: str, got: list[Step], want: list[Step], **tolerant) -> None:
    """Everything that `want` has: parts and states, step by step."""
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for kind in ("parts", "states"):
            for name, value in getattr(theirs, kind).items():
                same(getattr(mine, kind)[name], value, f"step {i} {name}: {label}", **tolerant)


@pytest.mark.parametrize(
    "name", others_slow(EVERY, [n for n in (*RECIPES, "square", "by_tensor", "results") if n != "mxfp8-2d"])
)
def test_same_bits(name):
    recipe = EVERY[name]
    exact = all(linear_plan(recipe).quantized)
    for turn, (shape, n) in enumerate(shapes_for(recipe)):
        for dtypes in dtypes_for(recipe)[turn % 2 :: 2]:
            label = f"{name} {dtypes} {shape} {n} {cases.report_header()}"
            arrays = drawn(label, recipe, shape, n, dtypes)
            mine, theirs = of_torch(recipe, arrays), of_jax(recipe, arrays)
            assert [s.states.keys() for s in mine] == [s.states.keys() for s in theirs], label
            if not any(linear_plan(recipe).results):
                want = of_oracle(recipe, arrays)
                compare(f"torch {label}", mine, want)
                compare(f"jax {label}", theirs, want)
            if exact:
                compare(f"torch and jax {label}", mine, theirs)
            for t, j in zip(mine, theirs, strict=True):
                for part in t.parts:  # products by the frameworks themselves may sum in another order
                    a, b = (np.asarray(v.detach().float() if isinstance(v, torch.Tensor) else v, np.float64)
                            for v in (t.parts[part], j.parts[part]))  # fmt: skip
                    assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(a), (part, label)


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if not linear_plan(r).states])
def test_same_bits_compiled(name):
    """torch.compile(fullgraph=True) changes nothing."""
    torch.compiler.reset()
    recipe = RECIPES[name]
    for shape, n in shapes_for(recipe)[1:3]:
        dtypes = dtypes_for(recipe)[-1]
        label = f"{name} compiled {shape} {n} {cases.report_header()}"
        arrays = drawn(label, recipe, shape, n, dtypes, steps=2)
        compare(label, of_torch(recipe, arrays, compiled=True), of_jax(recipe, arrays))


@pytest.mark.parametrize("name", RECIPES)
def test_adversarial_values(name):
    """Outliers, zero blocks and huge values; NaN and inf where they lead to them."""
    recipe = RECIPES[name]
    dtypes = ("bfloat16", "float32", "float32") if rotates(recipe) else ("float32",) * 3
    for values in ("outlier", "zero_blocks", "inf_nan_mix", "subnormal_input"):
        label = f"linear-{name}-{values}"
        shape, n = ((32, 64), 48) if packed(recipe) else ((33, 65), 20)
        arrays = [tensors(f"{label}-{i}", shape, n, dtypes, values) for i in range(2)]
        want = of_oracle(recipe, arrays)
        compare(f"torch {label}", of_torch(recipe, arrays), want, nan_free=True)
        compare(f"jax {label}", of_jax(recipe, arrays), want, nan_free=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
def test_same_bits_on_cuda(name, cuda):
    """One GPU, one cuBLASLt: torch and JAX agree in bits, whichever kernels the registry chose."""
    if not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")
    if reason := cublaslt_mismatch():
        pytest.skip(reason)
    recipe = EVERY[name]
    if not all(linear_plan(recipe).quantized):
        pytest.skip("some products are the frameworks' own")
    for dtypes in dtypes_for(recipe):
        for shape, n in (*shapes_for(recipe), ((4, 64, 256), 512)):
            label = f"cuda {name} {dtypes} {shape} {n} {cases.report_header()}"
            arrays = drawn(label, recipe, shape, n, dtypes)
            compare(label, of_torch(recipe, arrays, "cuda"), of_jax(recipe, arrays, "cuda"))
