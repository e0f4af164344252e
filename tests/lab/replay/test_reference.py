"""Bounds of operations: results of float32 and bfloat16 arithmetic in any order are within them, faults are not."""

import math

import ml_dtypes
import numpy as np
import pytest
from op_tools import op
from trace_tools import rng

from diptych.lab.replay.judge import _error
from diptych.lab.replay.reference import reference

F32, BF16 = np.float32, ml_dtypes.bfloat16
DTYPE = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])


def normal(*key, shape, dtype=F32, scale=1.0):
    return (rng(*key).standard_normal(shape) * scale).astype(dtype)


def error(made):
    """The largest error of an operation's result, in units of the bound."""
    return _error(made.outputs["out"], reference(made))


def rounded(x, dtype):
    return np.asarray(x, F32).astype(dtype)


@DTYPE
@pytest.mark.parametrize("k", [1, 7, 768, 4096])
def test_products(k, dtype):
    x, w = normal("x", k, shape=(5, k), dtype=dtype), normal("w", k, shape=(9, k), dtype=dtype)
    bias = normal("b", shape=9, dtype=dtype)
    total = np.zeros((5, 9), F32)
    for i in rng("order", k).permutation(k):  # any order
        total += x[:, i, None].astype(F32) * w[None, :, i].astype(F32)
    y = rounded(total + bias.astype(F32), dtype)
    assert error(op("linear", {"x": x, "weight": w, "bias": bias}, y, dtype="float32")) <= 1
    y = rounded(total, dtype)
    made = op("matmul", {"a": x, "b": w}, y, equation="mk,nk->mn", dtype="float32")
    assert error(made) <= 1
    if k > 1:
        y = rounded(total - x[:, :1].astype(F32) * w[None, :, 0].astype(F32), dtype)  # without a term
        assert error(op("matmul", {"a": x, "b": w}, y, equation="mk,nk->mn", dtype="float32")) > 1


@DTYPE
@pytest.mark.parametrize("axis", [-1, -2])
def test_softmax(axis, dtype):
    x = normal("softmax", shape=(6, 300), dtype=dtype, scale=4)
    x[0, :3] = -np.inf
    below = rounded(x.astype(F32) - x.astype(F32).max(axis, keepdims=True), dtype).astype(F32)
    e = rounded(np.exp(below), dtype).astype(F32)
    y = rounded(e / e.sum(axis, keepdims=True, dtype=F32), dtype)
    assert error(op("softmax", {"x": x}, y, axis=axis)) <= 1
    assert error(op("softmax", {"x": x}, y, axis=-3 - axis)) > 1
    log = rounded(below - np.log(e.sum(axis, keepdims=True, dtype=F32)), dtype)
    assert error(op("log_softmax", {"x": x}, log, axis=axis)) <= 1
    assert error(op("log_softmax", {"x": x}, rounded(log.astype(F32) + 0.1, dtype), axis=axis)) > 1


@DTYPE
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("fast", [False, True])
def test_norms(fast, mean, dtype):
    x = rounded(normal("norm", shape=(6, 768)) + mean, dtype)
    w, b = normal("w", shape=768, dtype=dtype), normal("b", shape=768, dtype=dtype)
    y, eps = x.astype(F32), F32(1e-5)
    m = y.mean(-1, keepdims=True, dtype=F32)
    variance = (y * y).mean(-1, keepdims=True) - m * m if fast else ((y - m) ** 2).mean(-1, keepdims=True)
    out = lambda e: rounded((y - m) / np.sqrt(variance + e) * w.astype(F32) + b.astype(F32), dtype)  # noqa: E731
    given = {"x": x, "weight": w, "bias": b}
    assert error(op("layer_norm", given, out(eps), axes=1, eps=1e-5)) <= 1
    assert error(op("layer_norm", {"x": x, "weight": w}, out(eps), axes=1, eps=1e-5)) > 1
    if dtype == F32 and not mean:
        assert error(op("layer_norm", given, out(F32(1e-3)), axes=1, eps=1e-5)) > 1
    root = rounded(y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * w.astype(F32), dtype)
    assert error(op("rms_norm", {"x": x, "weight": w}, root, axes=1, eps=1e-5)) <= 1
    assert error(op("rms_norm", {"x": x}, root, axes=1, eps=1e-5)) > 1


@DTYPE
def test_activations(dtype):
    x = normal("gelu", shape=(500,), dtype=dtype, scale=3)
    x[:6] = [0, -0.0, 20, -20, 1e-20, -1e-20]
    y = x.astype(F32)
    inner = np.tanh(F32(math.sqrt(2 / math.pi)) * (y + F32(0.044715) * y**3))
    tanh = rounded(F32(0.5) * y * (1 + inner), dtype)
    erf = rounded(F32(0.5) * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2)).astype(F32)), dtype)
    assert error(op("gelu", {"x": x}, tanh, approximate=True)) <= 1
    assert error(op("gelu", {"x": x}, erf, approximate=False)) <= 1
    if dtype == F32:  # the forms differ by 5e-4, less than bfloat16 shows
        assert error(op("gelu", {"x": x}, erf, approximate=True)) > 1
    silu = rounded(y / (1 + np.exp(-y)), dtype)
    assert error(op("silu", {"x": x}, silu)) <= 1
    assert error(op("silu", {"x": x}, erf)) > 1


@DTYPE
def test_elementwise_operations_round_once(dtype):
    a, b = normal("a", shape=(3, 1, 5), dtype=dtype), normal("b", shape=(4, 5), dtype=dtype)
    for kind, f in (("add", np.add), ("mul", np.multiply)):
        y = rounded(f(a.astype(F32), b.astype(F32)), dtype)
        assert error(op(kind, {"a": a, "b": b}, y)) <= 1
        up = np.nextafter(y, np.asarray(np.inf, dtype))
        assert error(op(kind, {"a": a, "b": b}, np.nextafter(up, np.asarray(np.inf, dtype)))) > 1


@DTYPE
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved, dtype):
    x = normal("rotary", shape=(2, 7, 8), dtype=dtype)
    angle = normal("angle", shape=(7, 8))
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    y = x.astype(F32)
    if interleaved:
        rotated = np.empty_like(y)
        rotated[..., ::2], rotated[..., 1::2] = -y[..., 1::2], y[..., ::2]
    else:
        rotated = np.concatenate([-y[..., 4:], y[..., :4]], -1)
    turned = rounded(rotated * sin.astype(F32), dtype).astype(F32)
    out = rounded(rounded(y * cos.astype(F32), dtype).astype(F32) + turned, dtype)
    given = {"x": x, "cos": cos, "sin": sin}
    assert error(op("rotary", given, out, interleaved=interleaved)) <= 1
    assert error(op("rotary", given, out, interleaved=not interleaved)) > 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [None, -100])
@pytest.mark.parametrize("axis", [-1, 1])
def test_cross_entropy(axis, ignore_index, reduction):
    logits = normal("logits", shape=(3, 11, 5), scale=3)
    rows = np.moveaxis(logits, axis, -1)
    targets = rng("targets").integers(0, rows.shape[-1], rows.shape[:-1])
    if ignore_index is not None:
        targets[0, :2] = ignore_index
    kept = targets != ignore_index
    log = rows - rows.max(-1, keepdims=True)
    log = log - np.log(np.exp(log).sum(-1, keepdims=True))
    each = -np.take_along_axis(log, np.where(kept, targets, 0)[..., None], -1)[..., 0] * kept
    found = {"mean": each.sum() / kept.sum(), "sum": each.sum(), "none": each}[reduction]
    given, options = {"logits": logits, "targets": targets}, {"axis": axis, "ignore_index": ignore_index}
    assert error(op("cross_entropy", given, F32(found), reduction=reduction, **options)) <= 1
    assert error(op("cross_entropy", given, F32(found * 1.01), reduction=reduction, **options)) > 1


def test_cross_entropy_of_large_logits():
    """optax rounds log(sum(exp)) before it subtracts the logit at the target, so that the size of the logits counts."""
    logits, targets = normal("large", shape=(4096, 5)) + F32(1000), rng("of large").integers(0, 5, 4096)
    largest = logits.max(-1)
    total = F32(np.log(np.exp(logits - largest[:, None]).sum(-1, dtype=F32))) + largest
    at = np.take_along_axis(logits, targets[:, None], -1)[:, 0]
    given, options = {"logits": logits, "targets": targets}, {"axis": -1, "reduction": "none", "ignore_index": None}
    assert error(op("cross_entropy", given, total - at, **options)) <= 1
    assert error(op("cross_entropy", given, total - at + F32(1e-3), **options)) > 1


def test_embedding_is_exact():
    table, ids = normal("table", shape=(7, 3)), rng("ids").integers(0, 7, (2, 5))
    assert error(op("embedding", {"ids": ids, "table": table}, table[ids])) == 0
    assert error(op("embedding", {"ids": ids, "table": table}, np.nextafter(table[ids], F32(9)))) > 1


@pytest.mark.parametrize("layout", ["NC01,OI01,NC01", "N01C,01IO,N01C", "C0N,O0I,0NC"])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups, layout):
    """Against a sum over all places, written as loops."""
    of_x, of_weight, of_out = layout.split(",")
    space = len(of_x) - 2
    shapes = {"N": 2, "C": 4, "0": 7, "1": 6}, {"O": 6, "I": 4 // groups, "0": 3, "1": 2}
    x = normal("x", layout, shape=[shapes[0][c] for c in of_x])
    weight = normal("weight", layout, shape=[shapes[1][c] for c in of_weight])
    bias = normal("bias", shape=6)
    strides, dilation, spread = (2, 1)[:space], (1, 2)[:space], (1, 2)[:space]
    padding = ((1, 0), (2, -1))[:space]
    plain_x = np.transpose(x, [of_x.index(c) for c in "NC01"[: 2 + space]])
    plain_weight = np.transpose(weight, [of_weight.index(c) for c in "OI01"[: 2 + space]])
    sizes = [
        ((n - 1) * e + 1 + lo + hi - ((k - 1) * d + 1)) // s + 1
        for n, e, (lo, hi), k, d, s in zip(
            plain_x.shape[2:], spread, padding, plain_weight.shape[2:], dilation, strides, strict=True
        )
    ]
    out = np.zeros((2, 6, *sizes), F32)
    for place in np.ndindex(*sizes):
        for tap in np.ndindex(*plain_weight.shape[2:]):
            at = [
                p * s + t * d - lo for p, s, t, d, (lo, _) in zip(place, strides, tap, dilation, padding, strict=True)
            ]
            inside = all(
                a % e == 0 and 0 <= a // e < n and a < (n - 1) * e + 1 + min(hi, 0)
                for a, e, n, (_, hi) in zip(at, spread, plain_x.shape[2:], padding, strict=True)
            )
            if inside:
                column = plain_x[(slice(None), slice(None), *(a // e for a, e in zip(at, spread, strict=True)))]
                column = column.reshape(2, groups, -1)
                kernel = plain_weight[(..., *tap)].reshape(groups, 6 // groups, -1)
                out[(..., *place)] += np.einsum("ngc,goc->ngo", column, kernel).reshape(2, 6)
    out += bias.reshape(-1, *[1] * space)
    y = np.transpose(out, ["NC01".index(c) for c in of_out])
    given = {"x": x, "weight": weight, "bias": bias}
    options = {
        "layout": layout, "strides": strides, "padding": padding, "dilation": dilation, "input_dilation": spread,
        "groups": groups,
    }  # fmt: skip
    assert error(op("conv", given, y, **options)) <= 1
    assert error(op("conv", {"x": x, "weight": weight}, y, **options)) > 1


def test_values_that_are_not_finite():
    x = np.array([np.inf, -np.inf, np.nan, 3e38, 1.0], F32)
    given = {"a": x, "b": x}
    right = np.array([np.inf, -np.inf, np.nan, np.inf, 2.0], F32)
    assert error(op("add", given, right)) <= 1
    for i, wrong in ((0, 1.0), (1, np.inf), (2, 0.0), (3, -np.inf), (4, np.inf), (4, np.nan)):
        y = right.copy()
        y[i] = wrong
        assert error(op("add", given, y)) == math.inf


@pytest.mark.parametrize("kind", ["linear", "softmax", "layer_norm", "cross_entropy"])
def test_empty_tensors(kind):
    x = np.zeros((0, 4), F32)
    inputs = {
        "linear": {"x": x, "weight": np.ones((3, 4), F32)},
        "softmax": {"x": x},
        "layer_norm": {"x": x},
        "cross_entropy": {"logits": x, "targets": np.zeros(0, np.int64)},
    }[kind]
    options = {
        "linear": {"dtype": "float32"},
        "softmax": {"axis": -1},
        "layer_norm": {"axes": 1, "eps": 1e-5},
        "cross_entropy": {"axis": -1, "reduction": "none", "ignore_index": None},
    }[kind]
    out = {"linear": np.zeros((0, 3), F32), "cross_entropy": np.zeros(0, F32)}.get(kind, x)
    assert error(op(kind, inputs, out, **options)) == 0


@pytest.mark.parametrize("dtype", [F32, BF16, np.float16], ids=["float32", "bfloat16", "float16"])
def test_silu_where_the_exponential_is_too_large(dtype):
    """x / (1 + exp(-x)) is zero from where exp(-x) is infinite, though the exact value is no subnormal number."""
    x = np.linspace(-130, 0, 4001).astype(dtype)
    with np.errstate(over="ignore"):
        y = (x.astype(F32) / rounded(1 + rounded(np.exp(-x.astype(F32)), dtype).astype(F32), dtype)).astype(dtype)
    lost = (y == 0) & (x < -10)
    assert lost.any() and error(op("silu", {"x": x}, y)) <= 1
    assert error(op("silu", {"x": x}, np.where(x > -8, np.zeros_like(y), y))) > 1


def test_softmax_of_bfloat16_that_is_far_below_the_largest():
    """The difference of 67 and more is rounded to a multiple of 0.5, which exp turns into a factor of up to 1.28."""
    x = np.r_[0.25, np.linspace(-67, -63, 200)].astype(BF16)
    below = rounded(x.astype(F32) - F32(0.25), BF16).astype(F32)
    y = rounded(np.exp(below) / np.exp(below).sum(), BF16)
    exact = np.exp(x.astype(float) - 0.25)
    assert (y.astype(float) / exact).max() > 1.27
    assert error(op("softmax", {"x": x}, y, axis=-1)) <= 1


def test_small_numbers_of_float16_are_no_rounding_errors():
    """Probabilities of a large vocabulary are subnormal in float16, and frameworks do not flush these to zero."""
    x = normal("vocabulary", shape=(2, 50_000), dtype=np.float16)
    e = np.exp(x.astype(F32))
    y = (e / e.sum(-1, keepdims=True)).astype(np.float16)
    assert error(op("softmax", {"x": x}, y, axis=-1)) <= 1
    assert error(op("softmax", {"x": x}, np.zeros_like(y), axis=-1)) > 1
    assert error(op("softmax", {"x": x}, y * np.float16(1.25), axis=-1)) > 1


@pytest.mark.parametrize("least", [False, True])
def test_a_norm_whose_variance_is_lost(least):
    """The mean of x^2 less the mean's square may leave nothing of a variance that is small beside them."""
    x = (1000 + 0.3 * rng("lost").standard_normal((4, 256))).astype(F32)
    wide = x.astype(float)
    m, error_of_mean = wide.mean(-1, keepdims=True), 2.0**-24 * 2e6 * 10
    variance = ((wide - m) ** 2).mean(-1, keepdims=True) + (-error_of_mean if least else error_of_mean)
    y = rounded((wide - m) / np.sqrt(np.maximum(variance, 0) + 1e-2), F32)
    assert error(op("layer_norm", {"x": x}, y, axes=1, eps=1e-2)) <= 1
