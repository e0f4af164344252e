"""Computes operations of the frameworks in float64 with NumPy, and bounds the errors of their rounding.

A bound is made of two relative rounding errors: u_out, half of the distance from 1 to the next value of the result's
dtype, for each elementary operation; and u, that of float32 or of a wider result, for sums. The error of a sum of k
terms in any order is at most about sqrt(k) * u * (the sum of their magnitudes): the k roundings are nearly independent,
and the factor of 4 in `_Units.sum` is exceeded with a probability below 1e-3 (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019, theorem 2.4: 2 exp(-4^2 / 2)). Magnitudes are those before cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from diptych.lab.replay.op import Op
from diptych.lab.traces import DTYPES, DType

Array = np.ndarray
_FLOAT32 = DTYPES["float32"].half_ulp
TF32 = 2.0**-11
"""Half of the distance from 1 to the next value of TF32, which has 10 bits of mantissa."""


class Reference(NamedTuple):
    """The exact `value` of a result and the `bound` of its error: float64 arrays of the result's shape. `products`: the
    sums of the magnitudes of a product's terms, by which the error of rounded operands is bounded; None for other
    operations."""

    value: Array
    bound: Array
    products: Array | None = None


class _Units(NamedTuple):
    """Relative errors of rounding to the result's dtype (`out`) and of a sum's terms (`sums`). `lost`: magnitudes below
    it may become zero, and so may quotients whose divisors are too large for the dtype."""

    out: float
    sums: float
    lost: float

    def sum(self, terms: int) -> float:
        """Returns the relative error of a sum of so many terms."""
        return (4 * math.sqrt(terms) + 2) * self.sums if terms > 1 else self.sums


def reference(op: Op) -> Reference:
    """Returns the exact result of `op`, a row of the table that is not diptych's own, and its bound.

    **Raises** ValueError or IndexError if the operands do not fit.
    """
    dtype = DTYPES[op.outputs["out"].dtype]
    given = {name: DTYPES[bits.dtype].decode(bits.data) for name, bits in op.inputs.items()}
    with np.errstate(all="ignore"):
        floor = _floor(dtype)
        lost = max(floor, 1 / float(dtype.decode(np.asarray(dtype.largest, dtype.bits))))
        found = _ROWS[op.kind](_Units(dtype.half_ulp, min(_FLOAT32, dtype.half_ulp), lost), given, op.options)
        return found._replace(bound=found.bound + dtype.half_ulp * np.abs(found.value) + floor)


def _floor(dtype: DType) -> float:
    """Returns the absolute error that a subnormal result may have.

    A framework may flush subnormal results to zero. Subnormal float16 results, which are normal in float32, are rounded
    a few times instead.
    """
    if dtype.smallest_normal <= DTYPES["float32"].smallest_normal:
        return dtype.smallest_normal
    return 4 * dtype.smallest_normal * dtype.half_ulp


def _product(units: _Units, value: Array, magnitude: Array, terms: int) -> Reference:
    return Reference(value, units.sum(terms) * magnitude, magnitude)


def _linear(units: _Units, given: Mapping[str, Array], _: Any) -> Reference:
    x, weight = given["x"], given["weight"]
    bias = given.get("bias", np.zeros(1))
    magnitude = np.abs(x) @ np.abs(weight.T)
    found = _product(units, x @ weight.T + bias, magnitude, x.shape[-1])
    return found._replace(bound=found.bound + units.out * (magnitude + np.abs(bias)))


def _matmul(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    a, b, equation = given["a"], given["b"], options["equation"]
    left, out = equation.split("->")
    letters = left.split(",")
    sizes = dict(zip(letters[0], a.shape, strict=True)) | dict(zip(letters[1], b.shape, strict=True))
    terms = math.prod(size for letter, size in sizes.items() if letter not in out)
    value, magnitude = (np.einsum(equation, f(a), f(b), optimize=True) for f in (np.asarray, np.abs))
    return _product(units, value, magnitude, terms)


def _embedding(_: _Units, given: Mapping[str, Array], __: Any) -> Reference:
    value = given["table"][given["ids"].astype(np.int64)]
    return Reference(value, np.zeros(value.shape))


def _conv(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    of_x, of_weight, of_out = options["layout"].split(",")
    space = sorted(set(of_x) - set("NC"))
    x = _dilated(_transposed(given["x"], of_x, "NC", space), options["input_dilation"])
    weight = _dilated(_transposed(given["weight"], of_weight, "OI", space), options["dilation"])
    x = np.pad(x, ((0, 0), (0, 0), *((max(lo, 0), max(hi, 0)) for lo, hi in options["padding"])))
    cut = (slice(max(-lo, 0), n - max(-hi, 0)) for (lo, hi), n in zip(options["padding"], x.shape[2:], strict=True))
    x = x[(slice(None), slice(None), *cut)]
    groups = options["groups"]
    value, magnitude = (_correlated(f(x), f(weight), options["strides"], groups) for f in (np.asarray, np.abs))
    found = _product(units, value, magnitude, math.prod(given["weight"].shape) // max(weight.shape[0], 1))
    if "bias" in given:
        bias = given["bias"].reshape(-1, *[1] * len(space))
        found = Reference(value + bias, found.bound + units.out * (magnitude + np.abs(bias)), magnitude)
    order = ["NC".find(c) if c in "NC" else 2 + space.index(c) for c in of_out]
    return Reference(*(np.transpose(v, order) for v in found if v is not None))


def _transposed(x: Array, layout: str, first: str, space: list[str]) -> Array:
    return np.transpose(x, [layout.index(c) for c in (*first, *space)])


def _dilated(x: Array, factors: tuple[int, ...]) -> Array:
    """Returns x [., ., spatial...] with factor - 1 zeros between neighbouring elements."""
    out = np.zeros((*x.shape[:2], *((n - 1) * f + 1 if n else 0 for n, f in zip(x.shape[2:], factors, strict=True))))
    out[(slice(None), slice(None), *(slice(None, None, f) for f in factors))] = x
    return out


def _correlated(x: Array, weight: Array, strides: tuple[int, ...], groups: int) -> Array:
    """Returns the cross-correlation [N, O, ...] of x [N, C, ...] with weight [O, C / groups, ...]."""
    sizes = [max((n - k) // s + 1, 0) for n, k, s in zip(x.shape[2:], weight.shape[2:], strides, strict=True)]
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    weight = weight.reshape(groups, -1, *weight.shape[1:])
    out = np.zeros((x.shape[0], groups, weight.shape[1], *sizes))
    for place in np.ndindex(*weight.shape[3:]):
        window = (slice(p, p + s * (n - 1) + 1, s) for p, s, n in zip(place, strides, sizes, strict=True))
        if all(sizes):
            out += np.einsum("ngc...,goc->ngo...", x[(..., *window)], weight[(..., *place)])
    return out.reshape(x.shape[0], -1, *sizes)


def _softmax(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    value = np.exp(_log_probabilities(given["x"], options["axis"])[0])
    return Reference(value, value * sum(_relative(units, given["x"], value, options["axis"])))


def _relative(units: _Units, x: Array, value: Array, axis: int) -> tuple[Array, Array]:
    """Returns the relative errors of exp(x - max) and of its sum. The difference is rounded, which exp amplifies."""
    below = np.abs(x - x.max(axis, keepdims=True, initial=-np.inf))
    grown = np.expm1(np.minimum(units.out * np.where(np.isfinite(below), below, 0), 700))
    return grown, 4 * units.out + (value * grown).sum(axis, keepdims=True) + units.sum(x.shape[axis])


def _log_probabilities(x: Array, axis: int) -> tuple[Array, Array]:
    """Returns log_softmax(x), and the sum of the magnitudes of its two terms."""
    below = x - x.max(axis, keepdims=True, initial=-np.inf)
    log = np.log(np.exp(below).sum(axis, keepdims=True))
    return below - log, np.abs(below) + np.abs(log)


def _log_softmax(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    value, magnitude = _log_probabilities(given["x"], options["axis"])
    error = _relative(units, given["x"], np.exp(value), options["axis"])[1]
    return Reference(value, error + 3 * units.out * magnitude)


def _layer_norm(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    return _norm(units, given, options, True)


def _rms_norm(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    return _norm(units, given, options, False)


def _norm(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any], centered: bool) -> Reference:
    x, weight, bias = given["x"], given.get("weight", np.ones(1)), given.get("bias", np.zeros(1))
    axes = tuple(range(-options["axes"], 0))
    error = units.sum(math.prod(x.shape[a] for a in axes))
    of = lambda v: v.mean(axes, keepdims=True)  # noqa: E731
    mean = of(x) if centered else np.zeros(1)
    variance = of((x - mean) ** 2)
    factor = 1 / np.sqrt(variance + options["eps"])
    # A framework may compute the variance as mean(x^2) - mean(x)^2, which can cancel to zero.
    least = np.maximum(variance - error * (of(x**2) + mean**2), 0)
    of_factor = np.sqrt((variance + options["eps"]) / (least + options["eps"])) - 1 + 2 * units.sums
    normed = (x - mean) * factor
    of_normed = factor * (1 + of_factor) * (error * of(np.abs(x)) * centered + units.sums * (np.abs(x) + np.abs(mean)))
    bound = np.abs(weight) * (of_normed + np.abs(normed) * (of_factor + 3 * units.out)) + units.out * np.abs(bias)
    return Reference(normed * weight + bias, bound)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    x = given["x"]
    if options["approximate"]:
        inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        inner = _erf(x / math.sqrt(2))
    return Reference(0.5 * x * (1 + inner), 8 * units.out * np.abs(x))


def _silu(units: _Units, given: Mapping[str, Array], _: Any) -> Reference:
    x = given["x"]
    value = x / (1 + np.exp(-x))
    lost = np.minimum(np.abs(value), np.abs(x) * units.lost)  # the factor 1 / (1 + exp(-x)) may become zero
    return Reference(value, units.out * np.abs(value) * (6 + np.abs(x)) + lost)


def _add(_: _Units, given: Mapping[str, Array], __: Any) -> Reference:
    value = given["a"] + given["b"]
    return Reference(value, np.zeros(value.shape))


def _mul(_: _Units, given: Mapping[str, Array], __: Any) -> Reference:
    value = given["a"] * given["b"]
    return Reference(value, np.zeros(value.shape))


def _rotary(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    x, cos, sin = given["x"], given["cos"], given["sin"]
    if options["interleaved"]:
        rotated = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    else:
        rotated = np.concatenate([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    value, magnitude = x * cos + rotated * sin, np.abs(x * cos) + np.abs(rotated * sin)
    return Reference(value, 2 * units.out * magnitude)


def _cross_entropy(units: _Units, given: Mapping[str, Array], options: Mapping[str, Any]) -> Reference:
    logits, targets = np.moveaxis(given["logits"], options["axis"], -1), given["targets"].astype(np.int64)
    log, below = _log_probabilities(logits, -1)
    largest = np.abs(logits.max(-1, keepdims=True, initial=-np.inf))
    # A framework may complete log(sum(exp)) before it subtracts the logit; both are large if all logits are.
    magnitude = below + np.minimum(np.abs(logits), largest)
    errors = _relative(units, logits, np.exp(log), -1)[1] + 3 * units.out * magnitude
    kept = targets != options["ignore_index"] if options["ignore_index"] is not None else np.ones(targets.shape, bool)
    pick = lambda v: np.take_along_axis(v, np.where(kept, targets, 0)[..., None], -1)[..., 0] * kept  # noqa: E731
    each, of_each = -pick(log), pick(errors)
    if options["reduction"] == "none":
        return Reference(each, of_each)
    count = kept.sum() if options["reduction"] == "mean" else 1
    error = units.sum(each.size) * np.abs(each).sum() + of_each.sum()
    return Reference(np.asarray(each.sum() / count), np.asarray(error / count))


_ROWS: dict[str, Callable[[_Units, Mapping[str, Array], Mapping[str, Any]], Reference]] = {
    "linear": _linear, "matmul": _matmul, "embedding": _embedding, "conv": _conv, "softmax": _softmax,
    "log_softmax": _log_softmax, "layer_norm": _layer_norm, "rms_norm": _rms_norm, "gelu": _gelu, "silu": _silu,
    "add": _add, "mul": _mul, "rotary": _rotary, "cross_entropy": _cross_entropy,
}  # fmt: skip
