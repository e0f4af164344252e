"""Activations: within a derived bound of float64, the same bits on every instruction set, and sane at the edges."""

from __future__ import annotations

import numpy as np
import pytest

import cases
from core import fused_runner, runner
from core.norm.test_norm import drawn, every_call, near
from diptych.core import _core
from oracle import fused

SHAPES = ((1, 2), (3, 14), (5, 2, 26), (33, 130), (7, 4100), (300, 512))


def test_table():
    assert tuple(fused_runner.ACTIVATIONS) == fused.ACTIVATIONS


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", fused.ACTIVATIONS)
def test_bound(kind, gated, device):
    names = list(cases.INPUT_DTYPES)
    for turn, shape in enumerate(SHAPES):
        x_dtype, out_dtype, dy_dtype = names[turn % 3], names[turn // 3 % 3], names[turn // 2 % 3]
        label = f"{kind} gated={gated} {x_dtype}{shape} {cases.report_header()}"
        x = drawn(f"{label}-x", shape, x_dtype)
        x = (x.astype(np.float32) * np.float32((1, 3, 20)[turn % 3])).astype(x.dtype)
        dy = drawn(f"{label}-dy", (*shape[:-1], shape[-1] // (1 + gated)), dy_dtype)
        got = every_call(
            device, x.size,
            lambda be, **more: {
                "y": fused_runner.activation(be, x, kind, gated, out_dtype, **more),  # noqa: B023
                "dx": fused_runner.activation_grad(be, dy, x, kind, gated, out_dtype, **more),  # noqa: B023
            },
            label,
        )  # fmt: skip
        dtype = cases.INPUT_DTYPES[out_dtype]
        near(got["y"], fused.activation(kind, x, gated, dtype), f"{label} y")
        near(got["dx"], fused.activation_grad(kind, dy, x, gated, dtype), f"{label} dx")


def test_every_exponent(device):
    """float32 of all magnitudes: silu, whose argument is x itself, shows the exponential's own error."""
    x = cases.draw("exponents", "random_bits", (64, 1024), "float32")
    x = np.where(np.isfinite(x), x, np.float32(1))
    for kind in fused.ACTIVATIONS:
        exact, allowed = fused.activation(kind, x, False)
        with np.errstate(over="ignore"):
            fits = np.isfinite(exact.astype(np.float32))  # a square may overflow
        y = fused_runner.activation(runner.backend(device), x, kind, False, "float32")
        error = np.abs(y.astype(np.float64) - exact)
        assert (error[fits] <= allowed[fits]).all(), kind
        slope = fused_runner.activation_grad(runner.backend(device), np.ones_like(x), x, kind, False, "float32")
        exact, allowed = fused.activation_grad(kind, np.ones_like(x), x, False)
        near(np.where(fits, slope, 0), (np.where(fits, exact, 0), np.where(fits, allowed, 0)), kind)
    near_zero = np.linspace(-80, 10, 1 << 16, dtype=np.float32).reshape(64, -1)
    y = fused_runner.activation(runner.backend(device), near_zero, "silu", False, "float32")
    exact, _ = fused.activation("silu", near_zero, False)
    ulps = np.abs(y.astype(np.float64) - exact) / (np.abs(exact) * 2.0**-23 + 2.0**-149)
    assert ulps.max() < 4, ulps.max()


def test_infinities_and_nan(device):
    be = runner.backend(device)
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, 3e38, -3e38]], np.float32)
    for kind in fused.ACTIVATIONS:
        y = fused_runner.activation(be, x, kind, False, "float32")[0]
        assert np.isinf(y[0]) and np.isnan(y[2]) and y[3] == 0 and y[5] == 0, (kind, y)
        assert (y[1] == 0) == (kind in ("relu", "srelu")), (kind, y)  # elsewhere inf * 0
        slope = fused_runner.activation_grad(be, np.ones_like(x), x, kind, False, "float32")[0]
        assert np.isnan(slope[2]) and slope[5] == 0 and (kind == "srelu" or slope[4] == 1), (kind, slope)


def test_refusals():
    be = runner.Numpy()
    x = fused_runner.put(be, np.ones((4, 7), np.float32))
    y = fused_runner.put(be, np.zeros((4, 7), np.float32))
    with pytest.raises(ValueError, match="halves the last dimension"):
        _core.activation(x, y, 0, True)
    with pytest.raises(ValueError, match="unknown activation 5"):
        _core.activation(x, y, 5, False)
    with pytest.raises(ValueError, match="an output overlaps an input"):
        _core.activation(x, x, 0, False)
    with pytest.raises(ValueError, match=r"dy must be \[4, 7\]"):
        _core.activation_grad(fused_runner.put(be, np.ones((4, 6), np.float32)), x, y, 0, False)
    with pytest.raises(TypeError, match="y must be float32"):
        _core.activation(x, fused_runner.put(be, np.zeros((4, 7), np.int32)), 0, False)


@pytest.mark.cuda
def test_the_cpu_and_cuda_agree_in_bits(cuda):
    x = np.stack([cases.draw("both", "random_bits", (1 << 16,), "float32"),
                  np.linspace(-110, 110, 1 << 16).astype(np.float32)])  # fmt: skip
    for kind in fused.ACTIVATIONS:
        for call in (fused_runner.activation, lambda be, *a: fused_runner.activation_grad(be, np.ones_like(x), *a)):
            want, got = (call(be, x, kind, False, "float32") for be in (runner.Numpy(), runner.Torch()))
            runner.same_bits(got, want, f"{kind} {cases.report_header()}", nan_free=True)
