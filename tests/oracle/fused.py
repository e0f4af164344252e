"""Norms and activations in float64, each result with a bound on the error of float32 arithmetic.

The bounds are first order in u = 2^-24, half a float32 ulp: every operation adds u of its result, a sum of n terms
(depth + 1) u of the sum of their magnitudes. `depth` is how many additions one term may pass through: kernels keep at
least 32 partial sums of a row, and join them pairwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.formats import cast, fold
from oracle.products import _cast_error

U = 2.0**-24
SUM_CHUNK = 128  # rows that are summed before partial sums meet
ACTIVATIONS = ("gelu", "relu", "silu", "srelu", "qgelu")
GELU = 2 * np.sqrt(2 / np.pi), 0.044715

Bounded = tuple[np.ndarray, np.ndarray]  # exact, allowed |got - exact|


def bounded(exact: np.ndarray, error: np.ndarray, dtype: Any) -> Bounded:
    """The exact values, and the bound with the final cast in it."""
    error = 1.02 * error
    return exact, error + _cast_error(np.abs(exact) + error, dtype)


def _depth(k: int) -> int:
    return -(-k // 32) + 10


def norm(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray | None, eps: float, *, centered: bool, zero_centered: bool,
    dtype: Any = np.float32,
) -> dict[str, Bounded]:  # fmt: skip
    """`mu` (layernorm), `rsigma` [M] and `y` [M, K] of `[..., K]` with their bounds."""
    v, g = fold(x).astype(np.float64), gamma.astype(np.float64) + zero_centered
    depth = _depth(v.shape[1])
    mu = v.mean(1, keepdims=True) if centered else np.zeros((len(v), 1))
    mu_error = (depth + 2) * U * np.abs(v).mean(1, keepdims=True) if centered else 0 * mu
    d = v - mu
    variance = (d * d).mean(1, keepdims=True)
    spread = np.maximum(variance + np.float64(np.float32(eps)), 2.0**-149)
    # A mean that is off by e raises the mean square by e^2.
    relative = 0.5 * ((depth + 6) * U + mu_error**2 / spread) + 3 * U
    rsigma = 1 / np.sqrt(spread)
    y = d * rsigma * g
    error = np.abs(g) * rsigma * (mu_error + np.abs(d) * (relative + 5 * U))
    if beta is not None:
        y = y + beta.astype(np.float64)
        error = error + U * np.abs(y)
    out = {"rsigma": bounded(rsigma[:, 0], (rsigma * relative)[:, 0], np.float32), "y": bounded(y, error, dtype)}
    if centered:
        out["mu"] = bounded(mu[:, 0], mu_error[:, 0], np.float32)
    return out


def norm_grad(
    dy: np.ndarray, x: np.ndarray, gamma: np.ndarray, mu: np.ndarray | None, rsigma: np.ndarray, *,
    zero_centered: bool,
) -> dict[str, Bounded]:  # fmt: skip
    """`dx` of x's dtype, `dgamma` and (layernorm: `mu` is given) `dbeta` of gamma's, with their bounds."""
    v, d = fold(x).astype(np.float64), fold(dy).astype(np.float64)
    g, r = gamma.astype(np.float64) + zero_centered, rsigma.astype(np.float64)[:, None]
    m, depth = len(v), _depth(v.shape[1])
    xhat = (v - (0 if mu is None else mu.astype(np.float64)[:, None])) * r
    h = g * d
    mean, slope = h.mean(1, keepdims=True), (h * xhat).mean(1, keepdims=True)
    mean_error = (depth + 4) * U * np.abs(h).mean(1, keepdims=True)
    slope_error = (depth + 7) * U * np.abs(h * xhat).mean(1, keepdims=True)
    if mu is None:
        mean, mean_error = 0 * mean, 0 * mean_error
    dx = r * (h - mean - xhat * slope)
    size = np.abs(h) + np.abs(mean) + np.abs(xhat * slope)
    error = r * (mean_error + np.abs(xhat) * slope_error + 6 * U * size)
    rows = min(m, SUM_CHUNK) + -(-m // SUM_CHUNK) + 5
    product = d * xhat
    out = {
        "dx": bounded(dx, error, x.dtype),
        "dgamma": bounded(product.sum(0), rows * U * np.abs(product).sum(0), gamma.dtype),
    }
    if mu is not None:
        out["dbeta"] = bounded(d.sum(0), rows * U * np.abs(d).sum(0), gamma.dtype)
    return out


def _parts(kind: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """act(x), its bound, act'(x), its bound."""
    if kind in ("relu", "srelu"):
        r, one = np.where(x < 0, 0.0, x), np.where(x > 0, 1.0, 0.0)
        return (r, 0 * r, one, 0 * r) if kind == "relu" else (r * r, U * r * r, 2 * r, 0 * r)
    with np.errstate(over="ignore", under="ignore"):
        if kind == "gelu":
            line, cube = GELU[0], GELU[0] * GELU[1]
            z, steep = x * (line + cube * x * x), line + 3 * cube * x * x
        else:
            steep = np.full_like(x, np.float64(np.float32(1.702)) if kind == "qgelu" else 1.0)
            z = x * steep
        s, rest = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
        moved = 6 * U * np.abs(z)  # of z itself, absolute
        value, slope = x * s, s + x * steep * s * rest
        value_error = np.abs(x) * (s * rest * moved + 6 * U * s)
        slope_error = s * rest * (1 + np.abs(x * steep)) * moved + 12 * U * (s + np.abs(x * steep) * s * rest)
    # Below exp(-104) a float32 exponential is 0, and below exp(-87) it loses digits.
    lost = 2.0**-146
    with np.errstate(over="ignore"):
        much = np.minimum(np.abs(x * steep), 2.0**20)  # past that, both are 0 or exact
    return value, value_error + lost * (1 + np.abs(x)), slope, slope_error + lost * (1 + much)


def activation(kind: str, x: np.ndarray, gated: bool, dtype: Any = np.float32) -> Bounded:
    """act(x) of `[M, F]`, or act(a) * b of `[M, 2F]` = (a | b)."""
    v = fold(x).astype(np.float64)
    if not gated:
        value, error, _, _ = _parts(kind, v)
        return bounded(value, error, dtype)
    a, b = np.split(v, 2, axis=1)
    value, error, _, _ = _parts(kind, a)
    return bounded(value * b, error * np.abs(b) + U * np.abs(value * b) + 2.0**-149, dtype)


def activation_grad(kind: str, dy: np.ndarray, x: np.ndarray, gated: bool, dtype: Any = np.float32) -> Bounded:
    """dy * act'(x), or (dy * b * act'(a) | dy * act(a))."""
    v, d = fold(x).astype(np.float64), fold(dy).astype(np.float64)
    a, b = np.split(v, 2, axis=1) if gated else (v, None)
    value, value_error, slope, slope_error = _parts(kind, a)
    by = d if b is None else d * b
    tiny = 2.0**-148
    exact, error = by * slope, np.abs(by) * slope_error + 2 * U * np.abs(by * slope) + tiny * (1 + np.abs(slope))
    if gated:
        exact = np.concatenate([exact, d * value], axis=1)
        error = np.concatenate([error, np.abs(d) * value_error + U * np.abs(d * value) + tiny], axis=1)
    return bounded(exact, error, dtype)


def column_sum(values: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Sums over the rows of float32 `[M, K]`, bit by bit: chunks of rows ascending, then the chunks ascending."""
    total = np.zeros(values.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(values), SUM_CHUNK):
            part = np.zeros(values.shape[1], np.float32)
            for row in values[start : start + SUM_CHUNK]:
                part = part + row
            total = total + part
    return cast(total, dtype)
