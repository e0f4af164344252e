"""torch bits == JAX bits == oracle bits on the CPU, for every format and option; CUDA bits == CPU bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sweeps import in_turn

import cases
import oracle
from diptych.common import Float8Quantizer, format_by_name
from diptych.jax.primitives import quantize as jax_primitives
from diptych.torch.primitives import quantize as quantize_ops
from parity.panels import FIELDS, backends, dj, dt, jax, same, same_copies, to_jax, to_torch
from quantizers import of_case
from quantizers import quantizer as quantizer_for

pytestmark = pytest.mark.sampled

PARTS = 6


def signatures(fmt: str) -> list[cases.QuantizeCase]:
    """One case for each dtype and shape, options taking turns: JAX compiles each once, all value sets share it."""
    every: dict[tuple[str, tuple[int, ...]], list[cases.QuantizeCase]] = {}
    for case in cases.quantize_cases([fmt], values=["normal"], every_option=True, variants=True):
        every.setdefault((case.dtype, case.shape), []).append(case)
    return [asked[turn % len(asked)] for turn, asked in enumerate(every.values())]


def rounds(fmt: str, part: int):
    """(case, x, what the oracle makes of it)."""
    for asked in signatures(fmt)[part::PARTS]:
        for values in cases.VALUE_SETS:
            case = dataclasses.replace(asked, values=values)
            x = case.make()
            yield case, x, oracle.quantize(x, fmt, **case.options)


jitted = jax.jit(lambda x, quantizer, rng: dj.quantize(x, quantizer, rng=rng), static_argnums=1)
restored = jax.jit(lambda q: dj.dequantize(q))


def test_every_option_is_met():
    for fmt in cases.FORMATS:
        assert {case.variant for case in signatures(fmt)} == set(cases.variants_of(fmt)), fmt


@pytest.mark.parametrize(("fmt", "part"), in_turn([(fmt,) for fmt in cases.FORMATS], PARTS))
def test_torch_jax_and_oracle(fmt, part):
    for case, x, want in rounds(fmt, part):
        quantizer, rng = of_case(case), case.rng
        qt = dt.quantize(to_torch(x), quantizer, rng=to_torch(rng))
        qj = jitted(to_jax(x), quantizer, to_jax(rng))
        assert tuple(qt.shape) == tuple(qj.shape) == x.shape, str(case)
        same_copies(qt, want, f"torch {case}")
        same_copies(qj, want, f"jax {case}")
        back = oracle.dequantize(want.copy(), x.dtype).reshape(x.shape)
        same(dt.dequantize(qt), back, f"torch dequantize {case}", nan_free=True)
        same(restored(qj), back, f"jax dequantize {case}", nan_free=True)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_columnwise_only_and_eager_jax(fmt):
    """The copy that wgrad reads, alone; JAX op by op instead of jitted."""
    for dtype, shape in (("float32", (33, 65)), ("bfloat16", (2, 48, 96)), ("float16", (130, 257))):
        for variant in cases.variants_of(fmt):
            if "row_amax" in variant or ("rht" in variant and dtype != "bfloat16"):
                continue
            for values in ("inf_nan_mix", "outlier", "zeros"):
                case = cases.QuantizeCase(
                    fmt, dtype, cases.whole(fmt, shape), values, "from_rows" in variant, variant=variant
                )
                x, rng, quantizer = case.make(), case.rng, of_case(case, rowwise=False)
                want = oracle.quantize(x, fmt, **(case.options | {"rowwise": False}))
                qt = dt.quantize(to_torch(x), quantizer, rng=to_torch(rng))
                qj = dj.quantize(to_jax(x), quantizer, rng=to_jax(rng))
                same_copies(qt, want, f"torch {case}")
                same_copies(qj, want, f"jax {case}")
                back = oracle.dequantize(want.copy(True), np.float32).reshape(x.shape)
                same(qt.dequantize(to_torch(np.zeros(1, np.float32)).dtype), back, f"torch {case}", nan_free=True)
                same(dj.dequantize(qj, "float32"), back, f"jax {case}", nan_free=True)


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS + cases.PACKED_FORMATS)
def test_given_amax(fmt):
    x = cases.draw(f"parity-amax-{fmt}", "normal", cases.whole(fmt, (33, 65)), "float32")
    names = ("amax",) if fmt in cases.TENSOR_FORMATS else ("amax", "columnwise_amax")
    jitted = jax.jit(lambda x, given: dj.quantize(x, quantizer_for(fmt), **given))
    for turn, amax in enumerate(cases.GIVEN_AMAX):
        other = cases.GIVEN_AMAX[(turn + 3) % len(cases.GIVEN_AMAX)]
        given = {name: np.array([v], np.float32) for name, v in zip(names, (amax, other), strict=False)}
        want = oracle.quantize(x, fmt, **given)
        mine = dt.quantize(to_torch(x), quantizer_for(fmt), **{k: to_torch(v) for k, v in given.items()})
        same_copies(mine, want, f"torch {given}")
        same_copies(jitted(to_jax(x), {k: to_jax(v) for k, v in given.items()}), want, f"jax {given}")


# --- delayed scaling ---

SCALES = tuple(np.float32(v) for v in (1.0, 0.7, 448.0, 1e-38, 1e-45, 3e38))


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_scale(fmt):
    """The copies under a scale; the amax is x's own, or joined with a pending one."""
    quantizer = Float8Quantizer(fp8_dtype=format_by_name(fmt).element)
    jitted = jax.jit(lambda x, scale: dj.quantize(x, quantizer, scale=scale))
    delayed = jax.jit(lambda x, scale, history: jax_primitives.quantize_delayed(x, quantizer, scale, history))
    for turn, scale in enumerate(SCALES):
        dtype = tuple(cases.INPUT_DTYPES)[turn % 3]
        x = cases.draw(f"scale-{fmt}-{turn}", ("normal", "inf_nan_mix", "tiny")[turn // 3], (33, 65), dtype)
        given = np.array([scale], np.float32)
        want = oracle.quantize(x, fmt, scale=scale)
        label = f"{fmt} {dtype} scale={scale} {cases.report_header()}"
        same_copies(dt.quantize(to_torch(x), quantizer, scale=to_torch(given)), want, f"torch {label}")
        same_copies(jitted(to_jax(x), to_jax(given)), want, f"jax {label}")

        history = np.array([1.5 * turn, 7.0, 0.25], np.float32)
        pending = oracle.quantize(x, fmt, scale=scale, accumulate=history[0]).amax
        kept = to_torch(history)
        mine = quantize_ops.quantize_delayed(to_torch(x), quantizer, to_torch(given), kept)
        theirs, after = delayed(to_jax(x), to_jax(given), to_jax(history))
        new = np.concatenate([pending, history[1:]])
        same(kept, new, f"torch history {label}")
        same(after, new, f"jax history {label}")
        for name, buffer in zip(FIELDS[:4], mine, strict=True):
            same(buffer, getattr(want, name), f"torch {name} {label}")
            same(theirs[name], getattr(want, name), f"jax {name} {label}")


@pytest.mark.parametrize("length", (1, 2, 5))
def test_scale_update(length):
    """n histories at once: torch in place, JAX anew."""
    rng = cases.rng_for(f"parity-update-{length}")
    for turn in range(24):
        n = 1 + turn % 4
        history = rng.exponential(size=(n, length)).astype(np.float32) * np.float32(10.0 ** rng.integers(-42, 38))
        history[rng.random(history.shape) < 0.3] = 0
        if turn % 5 == 4:
            history[0, 0] = np.inf
        scale = rng.exponential(size=n).astype(np.float32)
        options = {"fp8_max": (448.0, 57344.0)[turn % 2], "margin": (0, 3, -2)[turn % 3]}
        given = {}
        if turn % 3 == 1:
            given["reduced"] = np.maximum(history[:, 0], np.float32(turn % 2))
        if turn % 4 == 3:
            given["amax"] = rng.exponential(size=n).astype(np.float32)
        elif turn % 2:
            options["most_recent"] = True
        want = oracle.scale_update(history, scale, **options, **given)
        mine = to_torch(history), to_torch(scale)
        dt.scale_update(*mine, **options, **{k: to_torch(v) for k, v in given.items()})
        theirs = dj.scale_update(to_jax(history), to_jax(scale), **options, **{k: to_jax(v) for k, v in given.items()})
        for name, t, j, o in zip(("history", "scale"), mine, theirs, want, strict=True):
            same(t, o, f"torch {name} {turn} {cases.report_header()}")
            same(j, o, f"jax {name} {turn} {cases.report_header()}")


# --- sums ---


def test_amax_and_bias_grad():
    for dtype, shape in [(d, s) for d in cases.INPUT_DTYPES for s in cases.SHAPES][::2]:
        for values in ("normal", "inf_nan_mix", "subnormal_input"):
            x = cases.draw(f"parity-sums-{dtype}-{shape}", values, shape, dtype)
            label = f"{dtype}{shape} {values} {cases.report_header()}"
            same(dt.amax(to_torch(x)), oracle.amax(x), f"torch amax {label}")
            same(dj.amax(to_jax(x)), oracle.amax(x), f"jax amax {label}")
            want = oracle.bias_grad(x, x.dtype)
            same(dt.bias_grad(to_torch(x)), want, f"torch bias_grad {label}", nan_free=True)
            same(dj.bias_grad(to_jax(x)), want, f"jax bias_grad {label}", nan_free=True)


def test_amax_of_rows_and_of_the_rotated_tensor():
    for values in ("normal", "inf_nan_mix", "huge"):
        x = cases.draw(f"parity-amaxes-{values}", values, (2, 24, 80), "bfloat16")
        rows = oracle.amax(x, row_amax=True)
        same(dt.amax(to_torch(x), per_row=True), rows, f"torch {values}")
        same(dj.amax(to_jax(x), per_row=True), rows, f"jax {values}")
        for signs in (False, True):
            want = oracle.amax(x), oracle.columnwise_amax(x, rht=True, rht_signs=signs)
            mine = dt.amax(to_torch(x), rht=True, random_signs=signs)
            theirs = dj.amax(to_jax(x), rht=True, random_signs=signs)
            for t, j, o in zip(mine, theirs, want, strict=True):
                same(t, o, f"torch rht {values} {signs}")
                same(j, o, f"jax rht {values} {signs}")


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_cuda_bits_are_cpu_bits(fmt, cuda):
    """torch on the GPU against torch on the CPU, for every case; JAX on the GPU where it has one."""
    for part in (0, 1):
        for case, x, want in rounds(fmt, part):
            quantizer, rng = of_case(case), case.rng
            q = dt.quantize(to_torch(x, "cuda"), quantizer, rng=to_torch(rng, "cuda"))
            same_copies(q, want, f"torch cuda {case}")
            here = dt.dequantize(dt.quantize(to_torch(x), quantizer, rng=to_torch(rng)))
            same(dt.dequantize(q), here, f"torch cuda dequantize {case}", nan_free=True)
            if part == 0 and backends("cuda"):
                same_copies(jitted(to_jax(x, "cuda"), quantizer, to_jax(rng, "cuda")), want, f"jax cuda {case}")
