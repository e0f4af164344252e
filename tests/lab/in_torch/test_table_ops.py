"""The framework's operations of the table, replayed in torch, against NumPy in float64."""

import functools
import inspect
import itertools
import math

import numpy as np
import pytest
import torch

from diptych.lab.replay import table
from diptych.lab.replay.judge import judged
from diptych.lab.replay.op import Bits, Op
from diptych.lab.torch.adapter import frontend
from diptych.lab.torch.table_ops import FUNCTIONS
from diptych.lab.traces import DTYPES

FLOATS = ("float32", "bfloat16", "float64", "float16")
ERF = np.vectorize(math.erf, [float])
RTOL = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}


def bits(values, dtype):
    """The bits of values that are rounded to a dtype, toward zero for bfloat16."""
    if dtype == "bfloat16":
        return Bits(dtype, (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16))
    return Bits.of(np.asarray(values).astype(dtype), dtype)


def values(b):
    return DTYPES[b.dtype].decode(b.data)


def draw(dtype, *shape, seed=0):
    return bits(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def replayed(kind, operands, **options):
    """The result of an operation, whose options are written to a trace and read again."""
    options = table.decoded(kind, table.encoded(kind, options))
    found = frontend.replay(Op(kind, operands, options, {"out": Bits("", np.empty(0))}), "cpu")
    assert list(found) == ["out"]
    return found["out"]


def near(found, want, dtype):
    want = np.asarray(want, np.float64)
    assert found.dtype == dtype and found.data.shape == want.shape
    scale = np.abs(want).max(initial=0) if want.size else 0
    np.testing.assert_allclose(values(found), want, rtol=RTOL[dtype], atol=RTOL[dtype] * scale)


def test_there_is_a_function_for_each_row_and_it_takes_its_arguments():
    rows = {name: row for name, row in table.TABLE.items() if not row.own}
    assert FUNCTIONS.keys() == rows.keys()
    for name, row in rows.items():
        parameters = inspect.signature(FUNCTIONS[name]).parameters
        absent = [p.name for p in parameters.values() if p.default is not p.empty]
        assert tuple(parameters) == (*row.operands, *row.optional, *row.options) and tuple(absent) == row.optional


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_source_text_of_a_function_stands_alone(name):
    scope = {}
    text = f"import torch\nimport torch.nn.functional as F\n{inspect.getsource(FUNCTIONS[name])}"
    exec(compile(text, name, "exec"), scope)
    code = [scope[name].__code__]
    while code:
        inner = code.pop()
        code += [c for c in inner.co_consts if inspect.iscode(c)]
        assert "diptych" not in inner.co_names


# --- products ---


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0, 7), (2, 0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype, shape, with_bias):
    x, weight, bias = draw(dtype, *shape), draw(dtype, 5, shape[-1]), draw(dtype, 5)
    given = {"x": x, "weight": weight} | ({"bias": bias} if with_bias else {})
    want = values(x) @ values(weight).T + (values(bias) if with_bias else 0)
    near(replayed("linear", given, dtype=dtype), want, dtype)


@pytest.mark.parametrize(
    ("operands", "result"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float8_e4m3fn", "float32"), ("float16", "float64")],
)
@pytest.mark.parametrize("kind", ["linear", "matmul"])
def test_products_in_another_dtype_round_once(kind, operands, result):
    made = "float32" if operands.startswith("float8") else operands
    a, b = draw(made, 4, 96), draw(made, 6, 96)
    if operands.startswith("float8"):
        a, b = (Bits(operands, (np.abs(values(t)) * 40).astype(np.uint8)) for t in (a, b))
    if kind == "linear":
        found = replayed("linear", {"x": a, "weight": b}, dtype=result)
    else:
        found = replayed("matmul", {"a": a, "b": b}, equation="mk,nk->mn", dtype=result)
    want = values(a) @ values(b).T
    assert found.dtype == result
    error = np.abs(values(found) - want) / np.abs(values(a)).__matmul__(np.abs(values(b)).T)
    assert error.max() < (2**-7 if result == "bfloat16" else 2**-20)


EQUATIONS = [
    ("mk,kn->mn", (3, 5), (5, 4)),
    ("mk,nk->mn", (3, 5), (4, 5)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("qbhd,bkhd->bhqk", (4, 2, 3, 5), (2, 6, 3, 5)),
    ("aqd,bdk->bqk", (1, 4, 5), (2, 5, 6)),
    ("mk,k->m", (3, 5), (5,)),
    ("abk,k->ab", (2, 3, 5), (5,)),
    ("k,k->", (5,), (5,)),
    ("i,j->ij", (3,), (4,)),
    ("ij,kl->k", (3, 4), (5, 2)),
    ("ab,ab->ab", (3, 4), (3, 4)),
    ("mk,kn->mn", (0, 5), (5, 4)),
    ("mk,kn->mn", (3, 0), (0, 4)),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int64", "uint8", "uint32"])
@pytest.mark.parametrize(("equation", "one", "other"), EQUATIONS)
def test_matmul(equation, one, other, dtype):
    if dtype in FLOATS:
        a, b = draw(dtype, *one), draw(dtype, *other, seed=1)
        near(replayed("matmul", {"a": a, "b": b}, equation=equation, dtype=dtype), _summed(equation, a, b), dtype)
        return
    rng = np.random.default_rng(0)
    a, b = (bits(rng.integers(0, 5, shape), dtype) for shape in (one, other))
    found = replayed("matmul", {"a": a, "b": b}, equation=equation, dtype=dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(values(found), _summed(equation, a, b))


def _summed(equation, a, b):
    return np.einsum(equation, values(a), values(b))


def test_a_linear_of_integers():
    x, weight = (bits(np.random.default_rng(i).integers(-9, 9, (3, 4)), "int8") for i in range(2))
    found = replayed("linear", {"x": x, "weight": weight}, dtype="int32")
    assert found.dtype == "int32"
    np.testing.assert_array_equal(values(found), values(x) @ values(weight).T)


# --- convolutions ---


def convolved(x, weight, bias, layout, strides, padding, input_dilation, dilation, groups):
    """The cross-correlation, position by position."""
    of_x, of_weight, of_out = layout.split(",")
    axes = "".join(c for c in of_out if c.isdigit())
    x = np.einsum(f"{_letters(of_x)}->{_letters('NC' + axes)}", x)
    weight = np.einsum(f"{_letters(of_weight)}->{_letters('OI' + axes)}", weight)
    spread = np.zeros(
        x.shape[:2] + tuple(max((n - 1) * d + 1, 0) for n, d in zip(x.shape[2:], input_dilation, strict=True))
    )
    spread[(slice(None), slice(None), *[slice(None, None, d) for d in input_dilation])] = x
    spread = np.pad(spread, [(0, 0), (0, 0), *[(max(a, 0), max(b, 0)) for a, b in padding]])
    cut = [slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(spread.shape[2:], padding, strict=True)]
    x = spread[(slice(None), slice(None), *cut)]
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(x.shape[2:], weight.shape[2:], strides, dilation, strict=True)
    ]
    out = np.zeros((x.shape[0], weight.shape[0], *sizes))
    per_group, inputs = weight.shape[0] // groups, weight.shape[1]
    for at in itertools.product(*map(range, sizes)):
        for tap in itertools.product(*map(range, weight.shape[2:])):
            place = tuple(i * s + j * d for i, s, j, d in zip(at, strides, tap, dilation, strict=True))
            for o in range(weight.shape[0]):
                group = slice(o // per_group * inputs, (o // per_group + 1) * inputs)
                out[(slice(None), o, *at)] += x[(slice(None), group, *place)] @ weight[(o, slice(None), *tap)]
    if bias is not None:
        out += bias.reshape(1, -1, *[1] * len(axes))
    return np.einsum(f"{_letters('NC' + axes)}->{_letters(of_out)}", out)


def _letters(layout):
    return layout.lower().replace("0", "x").replace("1", "y").replace("2", "z")


CONVOLUTIONS = [
    # layout, size of spatial axes, of the kernel's, strides, padding, input_dilation, dilation, groups
    ("NC0,OI0,NC0", (9,), (3,), (1,), ((0, 0),), (1,), (1,), 1),
    ("N0C,0IO,N0C", (9,), (3,), (2,), ((2, 1),), (1,), (2,), 2),
    ("NC01,OI01,NC01", (6, 5), (3, 2), (1, 1), ((1, 1), (0, 1)), (1, 1), (1, 1), 1),
    ("N01C,01IO,N01C", (6, 5), (3, 2), (2, 1), ((2, 0), (1, 1)), (1, 1), (1, 2), 4),
    ("10CN,I0O1,0NC1", (6, 5), (3, 2), (1, 1), ((-1, 2), (0, -1)), (2, 3), (1, 1), 2),
    ("NC012,OI012,NC012", (4, 3, 5), (2, 2, 3), (1, 2, 1), ((1, 1), (0, 0), (1, 1)), (1, 1, 1), (1, 1, 1), 1),
    ("N012C,012IO,N012C", (4, 3, 5), (2, 2, 3), (1, 1, 2), ((1, 2), (0, 1), (1, 0)), (1, 2, 1), (1, 1, 2), 2),
]


@functools.cache
def torch_convolves_wrongly():
    """Whether torch's own grouped convolution over three axes differs from the same one in float64, or is NaN."""
    gen = np.random.default_rng(0)
    x, weight = (
        torch.from_numpy(gen.standard_normal(shape)).bfloat16() for shape in ((2, 4, 5, 6, 6), (8, 2, 2, 2, 3))
    )
    options = {"stride": (1, 1, 2), "padding": (1, 0, 0), "dilation": (1, 1, 2), "groups": 2}
    turned = weight.permute(2, 3, 4, 1, 0).contiguous().permute(4, 3, 0, 1, 2)
    found = [torch.nn.functional.conv3d(x, w, **options).double() for w in (weight, turned) for _ in range(3)]
    want = torch.nn.functional.conv3d(x.double(), weight.double(), **options)
    return any(not torch.allclose(f, want, rtol=0.02, atol=0.1) for f in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=[c[0] + str(i) for i, c in enumerate(CONVOLUTIONS)])
def test_conv(case, dtype, batch, with_bias):
    if case == CONVOLUTIONS[-1] and dtype == "bfloat16" and torch_convolves_wrongly():
        pytest.skip("on this CPU, torch itself computes such a convolution in bfloat16 wrongly")
    layout, size, kernel, strides, padding, input_dilation, dilation, groups = case
    axes = {"N": batch, "C": 4, "O": 8, "I": 4 // groups}
    of_x, of_weight, _ = layout.split(",")
    x = draw(dtype, *[axes[c] if c in axes else size[int(c)] for c in of_x])
    weight = draw(dtype, *[axes[c] if c in axes else kernel[int(c)] for c in of_weight])
    bias = draw(dtype, 8) if with_bias else None
    options = {
        "strides": strides, "padding": padding, "input_dilation": input_dilation, "dilation": dilation,
        "groups": groups,
    }  # fmt: skip
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    want = convolved(values(x), values(weight), None if bias is None else values(bias), layout, *options.values())
    near(replayed("conv", given, layout=layout, **options), want, dtype)


# --- rows of a table ---


@pytest.mark.parametrize("integers", ["int64", "int32", "int16", "int8", "uint8", "uint32", "uint64"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)])
def test_embedding(integers, shape):
    ids = bits(np.random.default_rng(0).integers(0, 7, shape), integers)
    for dtype in ("float32", "bfloat16", "float8_e5m2"):
        held = Bits(dtype, np.random.default_rng(1).integers(0, 100, (7, 3)).astype(DTYPES[dtype].bits))
        found = replayed("embedding", {"ids": ids, "table": held})
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.data, held.data[ids.data.astype(int)])


# --- along axes ---


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "axis"), [((3, 5), -1), ((3, 5), -2), ((2, 3, 4), -3), ((0, 4), -1), ((), -1)])
def test_softmax_and_its_logarithm(dtype, shape, axis):
    x = bits(3 * values(draw(dtype, *shape)), dtype)
    v = values(x).reshape(shape or (1,))
    raised = np.exp(v - v.max(axis, keepdims=True)) if v.size else v
    want = raised / raised.sum(axis, keepdims=True)
    near(replayed("softmax", {"x": x}, axis=axis), want.reshape(shape), dtype)
    near(replayed("log_softmax", {"x": x}, axis=axis), np.log(want).reshape(shape), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("of_weight", ["the same", "float32", None])
@pytest.mark.parametrize(("shape", "axes"), [((3, 8), 1), ((2, 3, 8), 2), ((8,), 1), ((0, 8), 1)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_norms(dtype, of_weight, shape, axes, eps):
    held = dtype if of_weight == "the same" else of_weight
    x, over = draw(dtype, *shape), tuple(range(-axes, 0))
    given = {} if held is None else {"weight": draw(held, *shape[-axes:]), "bias": draw(held, *shape[-axes:], seed=1)}
    v, weight, bias = values(x), *[values(given[k]) if given else d for k, d in (("weight", 1), ("bias", 0))]
    centered = v - v.mean(over, keepdims=True) if v.size else v
    variance = np.square(centered).mean(over, keepdims=True)
    want = centered / np.sqrt(variance + eps) * weight + bias
    near(replayed("layer_norm", {"x": x, **given}, axes=axes, eps=eps), want, dtype)
    want = v / np.sqrt(np.square(v).mean(over, keepdims=True) + eps) * weight
    given.pop("bias", None)
    near(replayed("rms_norm", {"x": x, **given}, axes=axes, eps=eps), want, dtype)


def test_a_layer_norm_with_bias_alone():
    x, bias = draw("float32", 3, 8), draw("float32", 8)
    v = values(x)
    want = (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-5) + values(bias)
    near(replayed("layer_norm", {"x": x, "bias": bias}, axes=1, eps=1e-5), want, "float32")


# --- elementwise ---


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (7,), (3, 130), (0, 2)])
def test_gelu_and_silu(dtype, shape):
    x = bits(3 * values(draw(dtype, *shape)), dtype)
    v = values(x)
    near(replayed("silu", {"x": x}), v / (1 + np.exp(-v)), dtype)
    near(replayed("gelu", {"x": x}, approximate=False), v / 2 * (1 + ERF(v / 2**0.5)), dtype)
    inner = (2 / math.pi) ** 0.5 * (v + 0.044715 * v**3)
    near(replayed("gelu", {"x": x}, approximate=True), v / 2 * (1 + np.tanh(inner)), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("one", "other"), [((3, 4), (3, 4)), ((2, 1, 4), (3, 1)), ((3,), ()), ((0, 4), (4,))])
def test_add_and_mul(dtype, one, other):
    a, b = draw(dtype, *one), draw(dtype, *other, seed=1)
    near(replayed("add", {"a": a, "b": b}), values(a) + values(b), dtype)
    near(replayed("mul", {"a": a, "b": b}), values(a) * values(b), dtype)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"])
def test_add_and_mul_of_integers_wrap(dtype):
    rng, of = np.random.default_rng(0), np.iinfo(dtype)
    a, b = (rng.integers(of.min, of.max, shape, dtype, endpoint=True) for shape in ((5, 3), (3,)))
    given = {"a": Bits.of(a), "b": Bits.of(b)}
    for kind, want in (("add", a + b), ("mul", a * b)):
        found = replayed(kind, given)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.data, Bits.of(want).data)


def test_add_and_mul_of_booleans():
    a, b = np.array([[0], [1]], bool), np.array([0, 1], bool)
    for kind, want in (("add", a | b), ("mul", a & b)):
        found = replayed(kind, {"a": Bits.of(a), "b": Bits.of(b)})
        assert found.dtype == "bool"
        np.testing.assert_array_equal(found.data, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (4, 2), (2, 3, 0, 8)])
def test_rotary(dtype, interleaved, shape):
    x, cos, sin = draw(dtype, *shape), draw(dtype, *shape[-2:], seed=1), draw(dtype, *shape[-2:], seed=2)
    v, half = values(x), shape[-1] // 2
    turned = np.empty_like(v)
    for i in range(half):
        low, high = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned[..., low], turned[..., high] = -v[..., high], v[..., low]
    want = v * values(cos) + turned * values(sin)
    near(replayed("rotary", {"x": x, "cos": cos, "sin": sin}, interleaved=interleaved), want, dtype)


# --- loss ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [None, -100, 2])
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 5), -1), ((2, 5, 3), -2), ((2, 3, 4, 5), -1), ((5, 4), -2), ((5,), -1)]
)
@pytest.mark.parametrize("integers", ["int64", "uint8"])
def test_cross_entropy(dtype, reduction, ignore_index, shape, axis, integers):
    logits = draw(dtype, *shape)
    rest = shape[:axis] + (shape[axis + 1 :] if axis != -1 else ())
    held = np.random.default_rng(0).integers(0, 5, rest)
    held.flat[0] = 2
    want = _losses(values(logits), held, axis)
    if ignore_index == -100 and integers == "int64":
        held.flat[-1] = ignore_index
    kept = held != ignore_index if ignore_index is not None else np.ones_like(held, bool)
    want = np.where(kept, want, 0)
    want = {"none": want, "sum": want.sum(), "mean": want.sum() / max(kept.sum(), 1)}[reduction]
    if reduction == "mean" and not kept.any():
        want = np.nan
    found = replayed(
        "cross_entropy", {"logits": logits, "targets": bits(held, integers)},
        axis=axis, reduction=reduction, ignore_index=ignore_index,
    )  # fmt: skip
    near(found, want, dtype)


def _losses(v, targets, axis):
    v = np.moveaxis(v, axis, -1)
    normal = v - v.max(-1, keepdims=True)
    normal = normal - np.log(np.exp(normal).sum(-1, keepdims=True))
    return -np.take_along_axis(normal, targets[..., None], -1)[..., 0]


@pytest.mark.parametrize(("reduction", "want"), [("none", np.empty(0)), ("sum", 0.0), ("mean", np.nan)])
def test_cross_entropy_of_nothing(reduction, want):
    given = {"logits": draw("float32", 0, 5), "targets": bits(np.empty(0), "int64")}
    near(replayed("cross_entropy", given, axis=-1, reduction=reduction, ignore_index=-100), want, "float32")


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
