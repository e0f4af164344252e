"""quantize with a source: the bytes of quantizing the unfused op's float32 values, and their column sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import fused_runner, runner
from core.fused_runner import ACTIVATIONS, NORMS, SOURCES, put
from core.norm.test_norm import drawn
from core.quantize.test_quantize import calls_of
from diptych.core import _core
from oracle import fused

Source = tuple[Any, ...]
SHAPES = ((16, 32), (48, 80), (2, 24, 96), (144, 272), (256, 384))
RAGGED = ((1, 1), (7, 33), (31, 129), (130, 257), (300, 70))


def encoded(be: Any, name: str, turn: int, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, Source, np.ndarray]:
    """(x, source, the float32 values of the unfused op); `shape` is that of the values."""
    k, names = shape[-1], list(cases.INPUT_DTYPES)
    label = f"{name}-{turn}-{dtype}-{shape}"
    other, values = names[turn % 3], ("normal", "inf_places", "huge", "inf_nan_mix")[turn % 4]
    if name in NORMS:
        x, zero_centered = cases.draw(f"{label}-x", values, shape, dtype), turn % 2 == 1
        gamma = drawn(f"{label}-g", (k,), other)
        beta = drawn(f"{label}-b", (k,), other) if name == "layernorm" and turn % 3 else None
        got = fused_runner.norm(be, x, gamma, beta, kind=name, zero_centered=zero_centered)
        operands = [put(be, t) for t in (gamma, beta, got.get("mu"), got["rsigma"])]
        return x, (SOURCES["norm"], NORMS[name], zero_centered, *operands, None), got["y"]
    kind, gated, grad = list(ACTIVATIONS)[turn % 5], "gated" in name, "grad" in name
    if not grad:
        x = cases.draw(f"{label}-x", values, (*shape[:-1], k * (1 + gated)), dtype)
        y = fused_runner.activation(be, x, kind, gated, "float32")
        return x, (SOURCES["activation"], ACTIVATIONS[kind], gated, None, None, None, None, None), y
    x = cases.draw(f"{label}-x", values, shape, dtype)
    dy = drawn(f"{label}-dy", (*shape[:-1], k // (1 + gated)), other)
    dx = fused_runner.activation_grad(be, dy, x, kind, gated, "float32")
    return x, (SOURCES["activation_grad"], ACTIVATIONS[kind], gated, None, None, None, None, put(be, dy)), dx


NAMES = ("layernorm", "rmsnorm", "act", "gated", "act_grad", "gated_grad")


def options_of(fmt: str, shape: tuple[int, ...], dtype: str, turn: int) -> dict[str, Any]:
    """Options in turns: those that the dtype and the rows allow."""
    rule = cases.rule_of(fmt)
    whole = cases.has_columnwise(fmt, shape)
    usage = {} if whole else {"columnwise": False}
    if rule == "divide":
        return {"pow2": turn % 2 == 1, "eps": (0.0, 1e-3)[turn // 2 % 2]} | usage
    variants = [v for v in cases.VARIANTS[rule] if whole or not v & {"square", "rht"}]
    # Elsewhere the transform refuses the dtype.
    variants = [v for v in variants if dtype == "bfloat16" or "rht" not in v]
    variant = variants[turn % len(variants)]
    named: dict[str, Any] = {name: True for name in variant - {"stochastic"}}
    if "stochastic" in variant:
        named["rng"] = np.array([turn, 2, -3, 4], np.int32)
    return named | usage


def expected(be: Any, values: np.ndarray, fmt: str, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """The unfused call's results. The Hadamard transform takes values rounded to bfloat16, so it has its own call."""
    plain = {k: v for k, v in options.items() if k not in ("rht", "rht_signs")}
    want = runner.quantize(be, values, oracle.quantize(values, fmt, **plain), fmt, **plain)
    if not options.get("rht"):
        return want
    rounded = values.astype(oracle.BF16)
    turned: dict[str, Any] = {**options, "rowwise": False, "row_amax": False}
    other = runner.quantize(be, rounded, oracle.quantize(rounded, fmt, **turned), fmt, **turned)
    return want | {name: array for name, array in other.items() if name.startswith("columnwise")}


def check(be: Any, fmt: str, name: str, turn: int, shape: tuple[int, ...], dtype: str, offset: int = 0) -> None:
    """A fused call, on every instruction set and thread count, against the unfused one."""
    x, source, values = encoded(be, name, turn, shape, dtype)
    options = options_of(fmt, shape, dtype, turn + (dtype == "bfloat16"))
    sum_dtype = (None, "float32", "bfloat16")[turn % 3]
    want = expected(be, values, fmt, options)
    for isa, threads in calls_of(be.name, values.size):
        with runner.setting(isa, threads):
            got = fused_runner.quantize(be, x, source, want, fmt, sum_dtype=sum_dtype, offset=offset, **options)
        label = f"{fmt} {name} {dtype}{shape} {options} isa={isa} threads={threads} {cases.report_header()}"
        if sum_dtype:
            total = fused.column_sum(oracle.fold(values), cases.INPUT_DTYPES[sum_dtype])
            runner.same_bits(got.pop("column_sum"), total, f"{label} column_sum", nan_free=True)
        assert got.keys() == want.keys(), label
        for part, array in want.items():
            runner.same_bits(got[part], array, f"{label} {part}")


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gated", "gated_grad"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3_1x128", "mxfp8_e5m2"])
def test_more_tiles_than_run_at_once(fmt, name, cuda):
    """Thread blocks take several tiles of bfloat16, one after the other."""
    for turn, rows in ((37, 3000), (40, 3072)):  # SwiGLU with infinities, GeGLU
        check(runner.Torch(), fmt, name, turn, (rows, 6144), "bfloat16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bytes_of_the_unfused_values(fmt, name, device):
    be = runner.backend(device)
    shapes = SHAPES if fmt in cases.PACKED_FORMATS else SHAPES + RAGGED
    if fmt in cases.PACKED_FORMATS:
        shapes = (*shapes, *[s for s in cases.PACKED_SHAPES if 0 not in s and len(s) > 1])
    for turn, shape in enumerate(shapes):
        if "gated_grad" in name and shape[-1] % 2:
            shape = (*shape[:-1], shape[-1] + 1)
        for i, dtype in enumerate(cases.INPUT_DTYPES):
            if device != "cpu" or i == (turn + NAMES.index(name)) % 3:  # of the CPU's, which convert alike, in turn
                check(be, fmt, name, turn, shape, dtype, offset=turn % 2)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_every_cuda_kernel_on_small_shapes(fmt, cuda):
    """For compute-sanitizer; the norms and activations run on the way."""
    for turn, shape in enumerate([(16, 32), (48, 80)] if fmt in cases.PACKED_FORMATS else [(7, 34), (130, 144)]):
        for name in NAMES:
            for variant in range(8):
                check(runner.Torch(), fmt, name, variant, shape, "bfloat16", offset=turn)


@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "mxfp8_e4m3", "nvfp4"])
def test_sums_of_a_plain_input(fmt, device):
    be = runner.backend(device)
    for turn, shape in enumerate([(16, 32), (400, 528), (0, 32)]):
        for dtype in cases.INPUT_DTYPES:
            x = drawn(f"sum-{shape}", shape, dtype)
            want = runner.quantize(be, x, oracle.quantize(x, fmt), fmt)
            sum_dtype = list(cases.INPUT_DTYPES)[turn]
            got = fused_runner.quantize(be, x, None, want, fmt, sum_dtype=sum_dtype)
            total = fused.column_sum(oracle.fold(x).astype(np.float32), cases.INPUT_DTYPES[sum_dtype])
            runner.same_bits(got.pop("column_sum"), total, f"{fmt} {dtype}{shape}")
            for part, array in want.items():
                runner.same_bits(got[part], array, f"{fmt} {dtype}{shape} {part}")


@pytest.mark.parametrize("name", NAMES)
def test_amax_of_a_source(name, device):
    be = runner.backend(device)
    for turn, shape in enumerate((*RAGGED, *SHAPES, (64, 5120))):
        shape = (*shape[:-1], shape[-1] + shape[-1] % 2)
        x, source, values = encoded(be, name, turn, shape, "bfloat16")
        rows, rotated = len(oracle.fold(values)), len(oracle.fold(values)) % 16 == 0
        for row_amax in (False, True):
            out = runner.Outputs(be)
            first = out.new("out", (rows if row_amax else 1,), "float32")
            second = out.new("turned", (1,), "float32")
            options = {"row_amax": row_amax, "rht": rotated, "rht_signs": rotated and turn % 2 == 1}
            _core.amax(put(be, x), first, second, runner.flags(options), source)
            read = out.read()
            want = oracle.amax(oracle.fold(values), row_amax=row_amax)
            runner.same_bits(read["out"], want.reshape(-1), f"{name}{shape} {options}")
            turned = oracle.fold(values)
            if rotated:
                turned = oracle.hadamard(turned.astype(oracle.BF16), options["rht_signs"]).astype(np.float32)
            runner.same_bits(read["turned"], oracle.amax(turned).reshape(-1), f"{name}{shape} {options} turned")


def test_given_scale_joins_the_amax(device):
    be = runner.backend(device)
    for turn, name in enumerate(NAMES):
        x, source, values = encoded(be, name, turn, (96, 160), "bfloat16")
        scale = np.array([3.5], np.float32)
        want = runner.quantize(be, values, oracle.quantize(values, "fp8_e4m3_tensor", scale=scale), "fp8_e4m3_tensor",
                               scale=scale)  # fmt: skip
        got = fused_runner.quantize(be, x, source, want, "fp8_e4m3_tensor", scale=scale)
        for part, array in want.items():
            runner.same_bits(got[part], array, f"{name} {part}")


def test_refusals():
    be = runner.Numpy()
    x, f = np.ones((16, 32), np.float32), np.zeros(32, np.float32)
    stats = np.ones(16, np.float32)

    def call(error, match, source, values=x, fmt="fp8_e4m3_tensor", **more):
        like = runner.quantize(be, values, oracle.quantize(values, fmt), fmt)
        operands = (*source[:3], *(put(be, t) if isinstance(t, np.ndarray) else t for t in source[3:]))
        with pytest.raises(error, match=match):
            fused_runner.quantize(be, more.pop("x", x), operands, like, fmt, **more)

    norm = (1, 0, False, f, None, stats, stats, None)
    call(ValueError, "unknown source 5", (5, 0, False, None, None, None, None, None))
    call(TypeError, "gamma is missing", (1, 0, False, None, None, stats, stats, None))
    call(ValueError, "rmsnorm takes no mean", (1, 1, False, f, None, stats, stats, None))
    call(ValueError, r"rsigma must be \[16\]", (1, 0, False, f, None, stats, stats[:5], None))
    call(ValueError, "a norm has no dy", (*norm[:7], x))
    call(ValueError, "activations have no parameters", (2, 0, False, f, None, None, None, None))
    call(TypeError, "dy is missing", (3, 0, False, None, None, None, None, None))
    call(ValueError, r"dy must be \[16, 32\]", (3, 0, False, None, None, None, None, x[:, :16].copy()))
    call(ValueError, "unknown activation 9", (2, 9, False, None, None, None, None, None))
    call(ValueError, "halves the last dimension", (2, 0, True, None, None, None, None, None),
         values=np.ones((16, 16), np.float32), x=np.ones((16, 33), np.float32))  # fmt: skip
    call(ValueError, r"rowwise data \(fp8_e4m3_tensor\) must be \[16, 16\]", (2, 0, True, None, None, None, None, None))
    call(TypeError, "must be None or a tuple", (1, 0, False))
