"""JAX's operations of the table, against float64 in NumPy. A tolerance is a multiple of the result's ulp, times the
magnitude of what is summed."""

from __future__ import annotations

import inspect
import itertools
import math

import jax
import ml_dtypes
import numpy as np
import pytest

from diptych.lab.jax import table_ops
from diptych.lab.jax.adapter import frontend
from diptych.lab.replay import table
from diptych.lab.replay.judge import judged
from diptych.lab.replay.op import Bits, Op

pytestmark = pytest.mark.sampled

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def draw(*shape, dtype=F32, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def wide(x):
    return np.asarray(x, np.float64)


def agrees(kind, operands, options, want, magnitude, ulps=8.0, dtype=None):
    """Whether a row that is replayed from bits has the wanted float64 values, in the wanted dtype."""
    table.check(kind, options)
    dtype = np.dtype(dtype or next(iter(operands.values())).dtype)
    found = frontend.replay(Op(kind, {k: Bits.of(x) for k, x in operands.items()}, options, {}), "cpu")
    assert found.keys() == {"out"} and (found["out"].data.shape, found["out"].dtype) == (want.shape, dtype.name)
    got = found["out"].data.view(dtype).astype(np.float64)
    error = ulps * float(ml_dtypes.finfo(dtype).eps) * (np.abs(magnitude) + 1e-30)
    assert np.all(np.abs(got - want) <= error), np.max(np.abs(got - want) / error, initial=0)


def test_rows():
    """Each row has one function, whose source stands alone."""
    assert table_ops.FUNCTIONS.keys() == {name for name, row in table.TABLE.items() if not row.own}
    for name, f in table_ops.FUNCTIONS.items():
        row, parameters = table.TABLE[name], inspect.signature(f).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == [*row.operands, *row.optional]
        assert [p.name for p in parameters if p.default is None] == list(row.optional)
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == row.options.keys()
        scope = {"jax": jax, "jnp": jax.numpy, "Array": jax.Array}
        exec(compile("from __future__ import annotations\n" + inspect.getsource(f), name, "exec"), scope)


@pytest.mark.parametrize("dtype, out", [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)], ids=str)
def test_linear(dtype, out):
    for rows, bias in itertools.product(((3, 5), (0,), ()), (True, False)):
        x, w, b = draw(*rows, 7, dtype=dtype), draw(4, 7, dtype=dtype, seed=1), draw(4, dtype=out, seed=2)
        rounded = [wide(v.astype(out)) for v in (x, w)]  # operands are rounded to a narrower dtype
        want, magnitude = rounded[0] @ rounded[1].T, np.abs(rounded[0]) @ np.abs(rounded[1]).T
        operands = {"x": x, "weight": w} | ({"bias": b} if bias else {})
        want, magnitude = (want + wide(b), magnitude + np.abs(wide(b))) if bias else (want, magnitude)
        agrees("linear", operands, {"dtype": out.name}, want, magnitude, 2 if out == BF16 else 8, out)


EQUATIONS = {
    "abc,dc->abd": ((2, 3, 5), (4, 5)),
    "abcd,abed->abce": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "ab,ab->": ((3, 5), (3, 5)),
    "a,b->ba": ((3,), (4,)),
    "ab,bc->ac": ((3, 0), (0, 4)),
    "abc,cd->dab": ((0, 2, 3), (3, 4)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_matmul(equation):
    shapes = EQUATIONS[equation]
    for dtype, other, out in ((F32, F32, F32), (BF16, BF16, BF16), (BF16, BF16, F32), (BF16, F32, F32)):
        a, b = draw(*shapes[0], dtype=dtype), draw(*shapes[1], dtype=other, seed=1)
        want, magnitude = (np.einsum(equation, f(wide(a)), f(wide(b))) for f in (np.asarray, np.abs))
        agrees("matmul", {"a": a, "b": b}, {"equation": equation, "dtype": out.name}, want, magnitude, dtype=out)


def test_matmul_of_fp8():
    a, b = draw(3, 5, dtype=ml_dtypes.float8_e4m3fn), draw(5, 4, dtype=ml_dtypes.float8_e5m2)
    options = {"equation": "ab,bc->ac", "dtype": "bfloat16"}
    agrees("matmul", {"a": a, "b": b}, options, wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b)), dtype=BF16)


@pytest.mark.parametrize("ids", [(3, 4), (0, 2), ()], ids=str)
@pytest.mark.parametrize("of_ids", ["int64", "int32", "uint8"])
def test_embedding(ids, of_ids):
    ids = np.random.default_rng(0).integers(0, 6, ids).astype(of_ids)
    for dtype in (F32, BF16, F64):
        rows = draw(6, 5, dtype=dtype)
        agrees("embedding", {"ids": ids, "table": rows}, {}, wide(rows)[ids], 0, dtype=dtype)


def correlated(x, weight, o):
    """The definition, in canonical layouts: x [N, C, ...], weight [O, C / groups, ...]."""
    space, groups = x.ndim - 2, o["groups"]

    def dilated(v, factors):
        out = np.zeros((*v.shape[:2], *((n - 1) * f + 1 for n, f in zip(v.shape[2:], factors, strict=True))))
        out[(..., *(slice(None, None, f) for f in factors))] = v
        return out

    x = np.pad(dilated(x, o["input_dilation"]), ((0, 0), (0, 0), *o["padding"]))
    weight = dilated(weight, o["dilation"])
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], weight.shape[2:], o["strides"], strict=True)]
    out = np.zeros((x.shape[0], weight.shape[0], *sizes))
    per_in, per_out = x.shape[1] // groups, weight.shape[0] // groups
    for c in range(weight.shape[0]):
        g = c // per_out
        for at in np.ndindex(*sizes):
            window = tuple(slice(i * s, i * s + k) for i, s, k in zip(at, o["strides"], weight.shape[2:], strict=True))
            part = x[(slice(None), slice(g * per_in, (g + 1) * per_in), *window)]
            out[(slice(None), c, *at)] = (part * weight[c]).sum(tuple(range(1, 2 + space)))
    return out


CONVS = [
    ("NC01,OI01,NC01", (2, 4, 7, 5), (6, 2, 3, 2),
     {"strides": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "input_dilation": (1, 1), "groups": 2}),
    ("N01C,01IO,N01C", (2, 5, 6, 3), (3, 3, 3, 4),
     {"strides": (1, 2), "padding": ((1, 1), (0, 0)), "dilation": (1, 1), "input_dilation": (2, 1), "groups": 1}),
    ("0NC,I0O,C0N", (5, 2, 3), (3, 3, 4),
     {"strides": (1,), "padding": ((0, 2),), "dilation": (1,), "input_dilation": (1,), "groups": 1}),
    ("N10C,10OI,NC01", (1, 4, 5, 2), (3, 2, 3, 2),
     {"strides": (1, 2), "padding": ((0, 0), (1, 0)), "dilation": (1, 1), "input_dilation": (1, 1), "groups": 1}),
    ("NC0,OI0,NC0", (0, 2, 5), (4, 2, 3),
     {"strides": (1,), "padding": ((0, 0),), "dilation": (1,), "input_dilation": (1,), "groups": 1}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CONVS)))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_conv(case, dtype):
    layout, of_x, of_weight, o = CONVS[case]
    letters = layout.split(",")
    space = sorted(set(letters[0]) - set("NC"))
    x, w = draw(*of_x, dtype=dtype), draw(*of_weight, dtype=dtype, seed=1)
    b = draw(of_weight[letters[1].index("O")], dtype=dtype, seed=2)
    canonical = [
        np.transpose(wide(v), [of.index(c) for c in (*first, *space)])
        for v, of, first in ((x, letters[0], "NC"), (w, letters[1], "OI"))
    ]
    back = [(*"NC", *space).index(c) for c in letters[2]]
    of_bias = wide(b).reshape(-1, *[1] * len(space))
    for bias in (False, True):
        want, magnitude = (
            np.transpose(correlated(*map(f, canonical), o) + bias * f(of_bias), back) for f in (np.asarray, np.abs)
        )
        operands = {"x": x, "weight": w} | ({"bias": b} if bias else {})
        agrees("conv", operands, o | {"layout": layout}, want, magnitude)


def exps(x, axis):
    with np.errstate(invalid="ignore"):
        return np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))


@pytest.mark.parametrize(
    "shape, axis", [((3, 7), -1), ((2, 5, 3), -2), ((0, 4), -1), ((4, 1), -1), ((6,), -1)], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_softmax(shape, axis, dtype):
    x = draw(*shape, dtype=dtype) * 3
    e = exps(wide(x), axis)
    want = e / e.sum(axis, keepdims=True)
    agrees("softmax", {"x": x}, {"axis": axis}, want, want * (1 + np.abs(wide(x))))
    log = wide(x) - wide(x).max(axis, keepdims=True, initial=-np.inf) - np.log(e.sum(axis, keepdims=True))
    agrees(
        "log_softmax", {"x": x}, {"axis": axis}, log, np.abs(log) + np.abs(wide(x)).max(axis, keepdims=True, initial=0)
    )


@pytest.mark.parametrize("shape, axes", [((4, 6), 1), ((3, 2, 5), 2), ((0, 5), 1), ((1, 7), 1)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_norms(shape, axes, dtype):
    over = tuple(range(-axes, 0))
    x, w, b = draw(*shape, dtype=dtype) + dtype.type(1), *(draw(*shape[-axes:], seed=s) for s in (1, 2))
    x = x.astype(dtype)
    for eps, operands in itertools.product((1e-5, 0.1), ({}, {"weight": w}, {"weight": w, "bias": b})):
        factor, shift = wide(operands.get("weight", 1)), wide(operands.get("bias", 0))
        mean = wide(x).mean(over, keepdims=True)
        for kind, centered in (("layer_norm", wide(x) - mean), ("rms_norm", wide(x))):
            if kind == "rms_norm" and "bias" in operands:
                continue
            normed = centered / np.sqrt((centered**2).mean(over, keepdims=True) + eps) * factor
            magnitude = np.abs(normed) + np.abs(factor) + np.abs(shift)
            options, given = {"axes": axes, "eps": eps}, {"x": x} | operands
            agrees(kind, given, options, normed + shift, magnitude)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(5, 9), (0, 3), ()], ids=str)
def test_elementwise(shape, dtype):
    x, y = np.asarray(draw(*shape) * 3).astype(dtype), np.asarray(draw(*shape, seed=1)).astype(dtype)
    v = wide(x)
    of_tanh = 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    agrees("gelu", {"x": x}, {"approximate": True}, of_tanh, np.abs(v))
    of_erf = 0.5 * v * (1 + np.vectorize(math.erf, otypes=[float])(v / math.sqrt(2)))
    agrees("gelu", {"x": x}, {"approximate": False}, of_erf, np.abs(v))
    agrees("silu", {"x": x}, {}, v / (1 + np.exp(-v)), np.abs(v))
    agrees("add", {"a": x, "b": y}, {}, v + wide(y), v + wide(y), 0.5)
    agrees("mul", {"a": x, "b": y}, {}, v * wide(y), v * wide(y), 0.5)


def test_broadcast():
    a, b = draw(3, 1, 4, dtype=BF16), draw(5, 1)
    agrees("add", {"a": a, "b": b}, {}, wide(a) + wide(b), np.abs(wide(a)) + np.abs(wide(b)), 0.5, F32)
    agrees("mul", {"a": a, "b": b}, {}, wide(a) * wide(b), np.abs(wide(a)) * np.abs(wide(b)), 0.5, F32)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved, dtype):
    for shape in ((2, 3, 5, 8), (0, 1, 2, 4)):
        x, angles = draw(*shape, dtype=dtype), draw(*shape[-2:], seed=1)
        cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
        half = shape[-1] // 2
        turned = np.zeros(shape)
        for i in range(half):  # by the definition: (x1, x2) -> (-x2, x1)
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
            turned[..., one], turned[..., two] = -wide(x)[..., two], wide(x)[..., one]
        terms = wide(x) * wide(cos), turned * wide(sin)
        operands = {"x": x, "cos": cos, "sin": sin}
        agrees("rotary", operands, {"interleaved": interleaved}, sum(terms), sum(map(np.abs, terms)), 2)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape, axis", [((6, 5), -1), ((3, 5, 4), 1), ((3, 4, 5), -1), ((0, 5), -1)], ids=str)
@pytest.mark.parametrize("ignored", [None, 2, -100])
def test_cross_entropy(shape, axis, ignored, dtype):
    logits = draw(*shape, dtype=dtype) * dtype.type(2)
    sizes = [n for i, n in enumerate(shape) if i != axis % len(shape)]
    targets = np.random.default_rng(1).integers(0, shape[axis], sizes).astype("int64" if dtype == F32 else "int32")
    kept = np.ones(sizes, bool)
    if ignored is not None:
        targets.reshape(-1)[::3] = ignored
        kept = targets != ignored
    moved, each = np.moveaxis(wide(logits), axis, -1), np.zeros(sizes)
    for at in np.ndindex(*sizes):
        if kept[at]:
            each[at] = np.log(np.exp(moved[at]).sum()) - moved[at][targets[at]]
    options, operands = {"axis": axis, "ignore_index": ignored}, {"logits": logits, "targets": targets}
    agrees("cross_entropy", operands, options | {"reduction": "none"}, each, np.abs(each) + 1)
    agrees("cross_entropy", operands, options | {"reduction": "sum"}, each.sum(), np.abs(each.sum()) + 1)
    op = Op("cross_entropy", {k: Bits.of(x) for k, x in operands.items()}, options | {"reduction": "mean"}, {})
    if kept.any():
        agrees(op.kind, operands, op.options, each.sum() / kept.sum(), np.abs(each.sum()) + 1)
    else:  # as in PyTorch
        assert np.isnan(frontend.replay(op, "cpu")["out"].data.view(dtype).astype(np.float64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "kind, options", [("silu", {}), ("gelu", {"approximate": True}), ("gelu", {"approximate": False})], ids=str
)
def test_activations_of_all_values_are_within_their_bounds(kind, options, dtype):
    """Inputs are at most half of the largest value, since a framework's gelu computes x + x, which may overflow."""
    x = np.arange(2**16, dtype=np.uint16)
    x = Bits(dtype, x[(x & 0x7FFF) < {"bfloat16": 0x7F00, "float16": 0x7800}[dtype]])
    out = frontend.replay(Op(kind, {"x": x}, options, {}), "cpu")
    (found,) = judged(Op(kind, {"x": x}, options, out), out, True)
    assert found.agrees, found
