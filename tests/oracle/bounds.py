"""Modules in float64, each value with a bound on the error that quantizing may have caused.

A `Near` is an exact value and an elementwise bound on |computed - exact|. The bounds start at a format's row and hold
for every input, not on average:

    an element      |q(x) - x| <= u max(|x|, m s)      u: half an ulp, the row's tolerance; twice it where rounding is
                                                       stochastic, a whole gap. m: the element's smallest normal value.
                                                       s: the block's scale, at most what its rule makes of the amax.
    a product       |A'B' - AB| <= |dA||B| + |A||dB| + |dA||dB|, where A' and B' are within dA and dB, and accumulation.
                    The transform H of wgrad's operands is orthogonal, (HA)^T (HB) = A^T B, so that what A and B bring
                    with them is bounded as without it, and only what quantizing adds to HA and HB meets |HA| and |HB|.
    an activation   |f(x') - f(x)| <= |f'(x)| d + sup|f''| d^2 / 2
    a linear map    the map of absolute values, applied to the bound
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from oracle import fused
from oracle.copies import spread
from oracle.formats import BF16, ELEMENT, FORMATS
from oracle.products import _cast_error
from oracle.scales import block_amax
from oracle.transform import LENGTH, SIGNS

U = 2.0**-24  # half an ulp of float32
# (largest, smallest normal) value of each element
RANGES = {name: (float(i.max), float(i.smallest_normal)) for name, i in ((n, ml_dtypes.finfo(d)) for n, d in
          {**ELEMENT, "e2m1": np.dtype(ml_dtypes.float4_e2m1fn)}.items())}  # fmt: skip


@dataclass(frozen=True)
class Near:
    """Exact float64 values, and how far what was computed may be from each."""

    value: np.ndarray
    error: np.ndarray

    @classmethod
    def exact(cls, x: np.ndarray) -> Near:
        value = np.asarray(x).astype(np.float64)
        return cls(value, np.zeros_like(value))

    @property
    def largest(self) -> np.ndarray:
        return np.abs(self.value) + self.error

    @property
    def T(self) -> Near:
        return Near(self.value.T, self.error.T)

    def wider(self, error: Any) -> Near:
        return Near(self.value, self.error + error)

    def cast(self, dtype: Any) -> Near:
        return self.wider(_cast_error(self.largest, dtype))

    def __add__(self, other: Near) -> Near:
        value, error = self.value + other.value, self.error + other.error
        return Near(value, error + U * (np.abs(value) + error))

    def __mul__(self, other: Near) -> Near:
        error = self.largest * other.largest - np.abs(self.value * other.value)
        return Near(self.value * other.value, error + U * self.largest * other.largest)

    def sum(self) -> Near:
        """The sum over the rows."""
        return Near(self.value.sum(0), self.error.sum(0) + len(self.value) * U * self.largest.sum(0))


@dataclass(frozen=True)
class Operand:
    """How one operand of one product is quantized. `tolerance`: the format row's. `scale`: where one is given."""

    format: str
    tolerance: float
    pow2: bool = False
    square: bool = False
    from_rows: bool = False
    row_amax: bool = False
    rht: bool = False
    rht_signs: bool = False
    stochastic: bool = False
    scale: float | None = None


Operands = Mapping[tuple[str, str], Operand]  # by tensor and product


def rotation(signs: bool) -> np.ndarray:
    """The matrix `[16, 16]` of the transform of 16 tokens: orthogonal, entries +-1/4."""
    h = np.ones((1, 1))
    while len(h) < LENGTH:
        h = np.block([[h, h], [h, -h]])
    return h / 4 * (SIGNS.astype(np.float64) if signs else 1.0)


def _rotated(t: Near, signs: bool) -> tuple[np.ndarray, np.ndarray]:
    """The largest that each rotated element may be, and its rounding: bfloat16 before and after, float32 in between."""
    h = rotation(signs)
    value, moved, size, first = (
        np.einsum("ij,bjk->bik", m, v.reshape(-1, LENGTH, v.shape[1])).reshape(v.shape)
        for m, v in (
            (h, t.value), (np.abs(h), t.error), (np.abs(h), t.largest), (np.abs(h), _cast_error(t.largest, BF16)),
        )
    )  # fmt: skip
    off = first + 5 * U * (size + first)
    largest = np.abs(value) + moved
    return largest, off + _cast_error(largest + off, BF16)


def copied(t: Near, op: Operand, columnwise: bool) -> tuple[np.ndarray, np.ndarray]:
    """One copy of a tensor within its bound, in the tensor's orientation, rotated where the copy is: the largest that
    each element may be, and how far from it the copy may lie."""
    if columnwise and op.from_rows:  # a row's element is rounded again where the block's scale makes it subnormal
        (largest, off), fmt = copied(t, op, False), FORMATS[op.format]
        square, (top, normal) = (fmt.block_cols, fmt.block_cols), RANGES[fmt.element]
        amax = spread(block_amax(largest, *square), square, largest.shape).astype(np.float64)
        return largest, off + op.tolerance * normal * (2 * amax / top)
    largest, rounded = _rotated(t, op.rht_signs) if columnwise and op.rht else (t.largest, np.zeros_like(t.value))
    fmt = FORMATS[op.format]
    top, normal = RANGES[fmt.element]
    turned = columnwise and fmt.columnwise_transposed
    size = (largest + rounded).T if turned else largest + rounded
    block = (fmt.block_cols, fmt.block_cols) if op.square else fmt.block(columnwise)
    amax = spread(block_amax(size, *block), block, size.shape).astype(np.float64)
    tensor = size.max(axis=1, initial=0, keepdims=True) if op.row_amax and not columnwise else size.max(initial=0)
    lost: Any = 0.0
    if op.scale is not None:
        scale = np.full_like(size, 1 / op.scale)
        lost = np.maximum(size - top * scale, 0)
    elif fmt.rule == "two_level":
        # The scale is amax / 6 rounded to E4M3, in units of tensor / 2688: off by a 16th or half a subnormal, 2^-10. So
        # may an amax saturate; a 16th of it is less than u.
        half = 2.0**-10 * tensor / 2688
        scale, lost = amax / top * (17 / 16) + half, top * half
    else:  # amax / top, rounded up to a power of two, or down as a factor
        scale = amax / top * (2 if op.pow2 or fmt.rule == "e8m0_ceil" else 1)
        scale = np.maximum(scale, 2.0**-127) if fmt.rule == "e8m0_ceil" else scale  # E8M0's smallest
    error = op.tolerance * (1 + op.stochastic) * np.maximum(size, normal * scale) + lost
    error = error + 8 * U * size  # scales are float32, and so are their products
    return largest, rounded + (error.T if turned else error)


def _product(a: Near, b: Near, coded_a: tuple[np.ndarray, np.ndarray], coded_b: tuple[np.ndarray, np.ndarray]) -> Near:
    """`[M, K]` @ `[K, N]` in float32 sums of any order: a rounding for each term, those of scales and the epilogue."""
    (size_a, off_a), (size_b, off_b) = coded_a, coded_b
    whole = (size_a + off_a) @ (size_b + off_b)
    brought = a.largest @ b.largest - np.abs(a.value) @ np.abs(b.value)
    sums = (1.5 * a.value.shape[1] + 8) * U * whole
    return Near(a.value @ b.value, brought + whole - size_a @ size_b + sums)


def _turned(coded: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return coded[0].T, coded[1].T


def fprop(x: Near, w: Near, ops: Operands) -> Near:
    return _product(x, w.T, copied(x, ops["input", "fprop"], False), _turned(copied(w, ops["weight", "fprop"], False)))


def dgrad(dy: Near, w: Near, ops: Operands) -> Near:
    return _product(dy, w, copied(dy, ops["grad_output", "dgrad"], False), copied(w, ops["weight", "dgrad"], True))


def wgrad(dy: Near, x: Near, ops: Operands) -> Near:
    coded = _turned(copied(dy, ops["grad_output", "wgrad"], True))
    return _product(dy.T, x, coded, copied(x, ops["input", "wgrad"], True))


# --- modules: x, parameters and dy as they are; results by the parameters' names ---


def linear(x: Any, weight: Any, bias: Any, dy: Any, ops: Operands) -> dict[str, Near]:
    """`y`, `x` (its gradient), `weight` and `bias` of a layer; matrices all."""
    nx, nw, nb, ndy = (Near.exact(v) for v in (x, weight, bias, dy))
    return {
        "y": (fprop(nx, nw, ops) + nb).cast(x.dtype),
        "x": dgrad(ndy, nw, ops).cast(x.dtype),
        "weight": wgrad(ndy, nx, ops).cast(weight.dtype),
        "bias": ndy.sum().cast(bias.dtype),
    }


def _norm(x: Any, gamma: Any, beta: Any, eps: float) -> tuple[Near, dict[str, fused.Bounded]]:
    out = fused.norm(x, gamma, beta, eps, centered=True, zero_centered=False)
    return Near(*out["y"]), out


def _norm_grad(dz: Near, x: Any, gamma: Any, stats: dict[str, fused.Bounded]) -> dict[str, Near]:
    """Linear in dz. Statistics of float32 are taken to be within 2^-16 of theirs, relative to what they multiply."""
    mu, r = stats["mu"][0], stats["rsigma"][0]
    out = fused.norm_grad(dz.value, x, gamma, mu, r, zero_centered=False)
    g, xhat = np.abs(gamma.astype(np.float64)), np.abs(x.astype(np.float64) - mu[:, None]) * r[:, None]
    e = dz.error + 2.0**-16 * dz.largest
    h = g * e
    moved = {
        "dx": r[:, None] * (h + h.mean(1, keepdims=True) + xhat * (h * xhat).mean(1, keepdims=True)),
        "dgamma": (e * xhat).sum(0),
        "dbeta": e.sum(0),
    }
    names = {"dx": "x", "dgamma": "layer_norm_weight", "dbeta": "layer_norm_bias"}
    return {names[n]: Near(*out[n]).wider(e).cast(x.dtype) for n, e in moved.items()}


def layernorm_linear(x: Any, gamma: Any, beta: Any, weight: Any, bias: Any, dy: Any, ops: Operands, eps: float = 1e-5):
    """`y`, `x` and the parameters' gradients."""
    z, stats = _norm(x, gamma, beta, eps)
    nw, nb, ndy = (Near.exact(v) for v in (weight, bias, dy))
    return {
        "y": (fprop(z, nw, ops) + nb).cast(x.dtype),
        **_norm_grad(dgrad(ndy, nw, ops).cast(x.dtype), x, gamma, stats),
        "weight": wgrad(ndy, z, ops).cast(weight.dtype),
        "bias": ndy.sum().cast(bias.dtype),
    }


@functools.cache
def curvature(kind: str) -> float:
    """sup |act''|, by differences of a fine grid."""
    x = np.linspace(-12, 12, 48001)
    slope = fused._parts(kind, x)[2]
    return 1.01 * float(np.abs(np.diff(slope) / np.diff(x)).max())


def _activation(kind: str, h: Near) -> tuple[Near, Near]:
    """act(h) and act'(h)."""
    value, value_error, slope, slope_error = fused._parts(kind, h.value)
    bend = curvature(kind)
    moved = np.abs(slope) * h.error + 0.5 * bend * h.error**2
    return Near(value, 1.1 * value_error + moved), Near(slope, 1.1 * slope_error + bend * h.error)


def layernorm_mlp(
    x: Any, gamma: Any, beta: Any, w1: Any, b1: Any, w2: Any, b2: Any, dy: Any, ops: Operands,
    kind: str, gated: bool, eps: float = 1e-5,
) -> dict[str, Near]:  # fmt: skip
    """`y`, `x` and the parameters' gradients; `ops` are both layers'."""
    z, stats = _norm(x, gamma, beta, eps)
    n1, nb1, n2, nb2, ndy = (Near.exact(v) for v in (w1, b1, w2, b2, dy))
    h = (fprop(z, n1, ops) + nb1).cast(x.dtype)
    half = h.value.shape[1] // (1 + gated)
    left, right = (Near(h.value[:, s], h.error[:, s]) for s in (slice(half), slice(half, None)))
    value, slope = _activation(kind, left)
    a = value * right if gated else value
    da = dgrad(ndy, n2, ops).cast(x.dtype)
    dh = (da * right if gated else da) * slope
    if gated:
        other = da * value
        dh = Near(*(np.concatenate(p, axis=1) for p in ((dh.value, other.value), (dh.error, other.error))))
    dh = dh.cast(x.dtype)
    return {
        "y": (fprop(a, n2, ops) + nb2).cast(x.dtype),
        **_norm_grad(dgrad(dh, n1, ops).cast(x.dtype), x, gamma, stats),
        "fc1_weight": wgrad(dh, z, ops).cast(w1.dtype),
        "fc1_bias": dh.sum().cast(b1.dtype),
        "fc2_weight": wgrad(ndy, a, ops).cast(w2.dtype),
        "fc2_bias": ndy.sum().cast(b2.dtype),
    }
