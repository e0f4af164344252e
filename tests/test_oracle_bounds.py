"""The bounds of `oracle.bounds` against the oracle's own copies: they hold for every format, with little to spare."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from sweeps import one_in

import cases
import oracle
from diptych.common import format_by_name
from oracle import bounds, fused

# Finite, and no block so small that its scale is at the end of float32 (as "level_edges" has them).
VALUES = ("normal", "zeros", "zero_blocks", "subnormal_result", "outlier", "ties_e4m3", "ties_e2m1")


def operand(fmt: str, options: dict) -> bounds.Operand:
    taken = {f.name for f in dataclasses.fields(bounds.Operand)}
    named = {k: v for k, v in options.items() if k in taken}
    return bounds.Operand(fmt, format_by_name(fmt).tolerance, stochastic="rng" in options, **named)


def rotated(x: np.ndarray, op: bounds.Operand, columnwise: bool) -> np.ndarray:
    if not (columnwise and op.rht):
        return x
    h = bounds.rotation(op.rht_signs)
    return np.einsum("ij,bjk->bik", h, x.reshape(-1, 16, x.shape[1])).reshape(x.shape)


@pytest.mark.parametrize("fmt", one_in(2, cases.FORMATS))
def test_each_element_is_within_its_bound(fmt):
    closest = 0.0
    for case in cases.quantize_cases([fmt], values=VALUES, every_option=True, variants=True):
        if case.eps > 0 or not all(case.shape):
            continue  # an epsilon lifts scales past what a bound from the amax knows
        x, op = case.make(), operand(fmt, case.options)
        q, x64 = oracle.quantize(x, fmt, **case.options), oracle.fold(x).astype(np.float64)
        for columnwise in (False, True):
            if columnwise and q.columnwise_data is None:
                continue
            largest, off = bounds.copied(bounds.Near.exact(x64), op, columnwise)
            exact = rotated(x64, op, columnwise)
            np.testing.assert_allclose(largest, np.abs(exact))
            error = np.abs(oracle.dequantize(q.copy(columnwise)).astype(np.float64) - exact)
            assert (error <= off).all(), f"{case} columnwise={columnwise}"
            closest = max(closest, float((error / np.maximum(off, 1e-300)).max()))
    assert closest > 0.85  # little looser than the worst element: of normal values it is 1 / (1 + u), 8/9 for E5M2


@pytest.mark.parametrize("scale", (0.25, 1.0, 300.0))
def test_a_given_scale_saturates(scale):
    x = cases.draw("given-scale", "outlier", (32, 64), "float32")
    q = oracle.quantize(x, "fp8_e4m3_tensor", scale=scale)
    op = dataclasses.replace(operand("fp8_e4m3_tensor", {}), scale=scale)
    largest, off = bounds.copied(bounds.Near.exact(x), op, False)
    error = np.abs(oracle.dequantize(q.copy()).astype(np.float64) - x)
    assert (error <= off).all() and (off[largest > 448 / scale] > 0).all()


def test_tolerances_are_half_an_ulp():
    for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2),
                        ("e2m1", ml_dtypes.float4_e2m1fn)):  # fmt: skip
        rows = [format_by_name(f) for f in cases.FORMATS if oracle.FORMATS[f].element == name]
        assert rows and all(row.tolerance == float(ml_dtypes.finfo(dtype).eps) / 2 for row in rows)


@pytest.mark.parametrize("signs", (False, True))
def test_the_transform_is_orthogonal(signs):
    h = bounds.rotation(signs)
    assert (h @ h.T == np.eye(16)).all()
    columns = oracle.hadamard(np.eye(16, dtype=np.float32).astype(oracle.BF16), signs)
    np.testing.assert_array_equal(columns.astype(np.float64), h)


@pytest.mark.parametrize("kind", ("gelu", "silu", "qgelu"))
def test_an_activation_moves_by_no_more_than_its_bound(kind):
    rng = cases.rng_for(f"moved-{kind}")
    h = bounds.Near(rng.normal(size=4000) * 3, rng.uniform(0, 2, 4000))
    moved = h.value + h.error * rng.uniform(-1, 1, 4000)
    for at, near in zip((0, 2), bounds._activation(kind, h), strict=True):
        exact = fused._parts(kind, moved)[at]
        assert (np.abs(exact - near.value) <= near.error).all()
