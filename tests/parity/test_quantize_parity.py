"""torch bits == JAX bits == oracle bits on the CPU; CUDA bits == CPU bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cases
import oracle
from parity.panels import backends, dj, dt, jax, same, same_copies, to_jax, to_torch
from quantizers import quantizer as quantizer_for

# Every jit signature compiles once: options turn from one (dtype, shape) to the next, all value sets share them.
ROUNDS = list(itertools.product(cases.INPUT_DTYPES, cases.SHAPES))


def options_of(fmt: str, turn: int) -> tuple[bool, float]:
    return cases.OPTIONS[turn % len(cases.OPTIONS)] if fmt in cases.DIVIDE_FORMATS else (False, 0.0)


def rounds(fmt: str, part: int):
    """(case, x, quantizer, what the oracle makes of it), grouped by jit signature."""
    for turn, (dtype, shape) in enumerate(ROUNDS):
        if turn % 2 != part:
            continue
        pow2, eps = options_of(fmt, turn)
        for values in cases.VALUE_SETS:
            case = cases.QuantizeCase(fmt, dtype, shape, values, pow2, eps)
            x = case.make()
            yield case, x, quantizer_for(fmt, pow2, eps), oracle.quantize(x, fmt, pow2=pow2, eps=eps)


@pytest.mark.parametrize("part", (0, 1))
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_torch_jax_and_oracle(fmt, part):
    jitted = jax.jit(dj.quantize, static_argnums=1)
    restored = jax.jit(lambda q: dj.dequantize(q))
    for case, x, quantizer, want in rounds(fmt, part):
        qt, qj = dt.quantize(to_torch(x), quantizer), jitted(to_jax(x), quantizer)
        assert tuple(qt.shape) == tuple(qj.shape) == x.shape, str(case)
        same_copies(qt, want, f"torch {case}")
        same_copies(qj, want, f"jax {case}")
        back = oracle.dequantize(want.copy(), x.dtype).reshape(x.shape)
        same(dt.dequantize(qt), back, f"torch dequantize {case}", nan_free=True)
        same(restored(qj), back, f"jax dequantize {case}", nan_free=True)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_columnwise_only_and_eager_jax(fmt):
    """The copy that wgrad reads, alone; JAX op by op instead of jitted."""
    for dtype, shape in (("float32", (33, 65)), ("bfloat16", (2, 3, 96)), ("float16", (130, 257))):
        quantizer = quantizer_for(fmt).with_usage(rowwise=False)
        for values in ("inf_nan_mix", "outlier", "zeros"):
            case = cases.QuantizeCase(fmt, dtype, shape, values)
            x = case.make()
            want = oracle.quantize(x, fmt, rowwise=False)
            qt, qj = dt.quantize(to_torch(x), quantizer), dj.quantize(to_jax(x), quantizer)
            same_copies(qt, want, f"torch {case}")
            same_copies(qj, want, f"jax {case}")
            back = oracle.dequantize(want.copy(True), np.float32).reshape(x.shape)
            same(qt.dequantize(to_torch(np.zeros(1, np.float32)).dtype), back, f"torch {case}", nan_free=True)
            same(dj.dequantize(qj, "float32"), back, f"jax {case}", nan_free=True)


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_amax(fmt):
    x = cases.draw(f"parity-amax-{fmt}", "normal", (33, 65), "float32")
    jitted = jax.jit(lambda x, amax: dj.quantize(x, quantizer_for(fmt), amax=amax))
    for amax in cases.GIVEN_AMAX:
        given = np.array([amax], np.float32)
        want = oracle.quantize(x, fmt, amax=amax)
        same_copies(dt.quantize(to_torch(x), quantizer_for(fmt), amax=to_torch(given)), want, f"torch amax={amax}")
        same_copies(jitted(to_jax(x), to_jax(given)), want, f"jax amax={amax}")


def test_amax_and_bias_grad():
    for dtype, shape in ROUNDS[::2]:
        for values in ("normal", "inf_nan_mix", "subnormal_input"):
            x = cases.draw(f"parity-sums-{dtype}-{shape}", values, shape, dtype)
            label = f"{dtype}{shape} {values} {cases.report_header()}"
            same(dt.amax(to_torch(x)), oracle.amax(x), f"torch amax {label}")
            same(dj.amax(to_jax(x)), oracle.amax(x), f"jax amax {label}")
            want = oracle.bias_grad(x, x.dtype)
            same(dt.bias_grad(to_torch(x)), want, f"torch bias_grad {label}", nan_free=True)
            same(dj.bias_grad(to_jax(x)), want, f"jax bias_grad {label}", nan_free=True)


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_cuda_bits_are_cpu_bits(fmt, cuda):
    """torch on the GPU against torch on the CPU, for every case; JAX on the GPU where it has one."""
    jitted = jax.jit(dj.quantize, static_argnums=1)
    for part in (0, 1):
        for case, x, quantizer, want in rounds(fmt, part):
            q = dt.quantize(to_torch(x, "cuda"), quantizer)
            same_copies(q, want, f"torch cuda {case}")
            here = dt.dequantize(dt.quantize(to_torch(x), quantizer))
            same(dt.dequantize(q), here, f"torch cuda dequantize {case}", nan_free=True)
            if part == 0 and backends("cuda"):
                same_copies(jitted(to_jax(x, "cuda"), quantizer), want, f"jax cuda {case}")
