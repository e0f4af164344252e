"""Rows quantized as they move: the bits of moving them first, eagerly, compiled and under transformations."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.permute.test_permute import top_k
from core.permute.test_permute_misuse import lie
from jax import export
from jax.sharding import PartitionSpec as P

import cases
import diptych.jax as dj
from diptych.common import (
    ArgumentError,
    DTypeError,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    ShapeError,
    UnsupportedError,
)
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX
from diptych.jax.functional import source as sources
from diptych.jax.primitives import quantize as quantize_ops
from jax_frontend import tools
from oracle import fused as fused_oracle

T, E, H = 37, 5, 144  # no whole blocks of tokens, and of columns in most formats
USAGES = ((True, True), (True, False), (False, True))
MX = MXFP8Quantizer()


def map_for(name, rows=None, tokens=T):
    """Each expert's region a multiple of 16, with absent rows in all and behind the last. `rows`: too few drop some."""
    ids = top_k(cases.rng_for(f"map-{name}"), tokens, E, 2)
    return dj.moe_map(ids, E, map_type="index", num_out_tokens=rows, align_size=16)


def two_steps(x, row_map, quantizer, **given):
    return dj.quantize(dj.moe_permute(x, row_map)[0], quantizer, **given)


def same_array(got, want, label=""):
    assert isinstance(got, dj.QuantizedArray) and (got.shape, got.dtype) == (want.shape, want.dtype), label
    tools.same_tree(got, want, label)


@pytest.mark.parametrize("rows", [None, 48], ids=["all rows", "dropped"])
@pytest.mark.parametrize("name", tools.KINDS)
def test_bits(name, rows, device):
    """Every format with every option; both copies, or one of them, in turns."""
    kind, m = tools.KINDS[name], map_for(name, rows)
    x, state = tools.normal(name, (T, H), kind.dtype), kind.state()
    for turn in range(1 if rows is None else 3):
        rowwise, columnwise = USAGES[turn]
        q = kind.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        want = two_steps(x, m, q, **state)
        fn = functools.partial(dj.moe_permute_and_quantize, quantizer=q)
        same_array(jax.jit(fn)(x, m, **state), want, f"{q} compiled")
        if turn == 0:
            same_array(fn(x, m, **state), want, f"{q} eager")
            if device == "cpu":
                moved = dj.moe_permute(x, m)[0]
                tools.same_quantized(want, kind.oracle(moved, state), str(q))


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_given_amaxes_dtypes_and_leading_dimensions(dtype):
    x, m = tools.normal("x", (3, 20, H), dtype), map_for("given", tokens=60)
    one, each = jnp.full(1, 7.0), jnp.asarray(cases.rng_for("each").random(len(m.row_source)) + 3, jnp.float32)
    for quantizer, given in (
        (Float8CurrentScalingQuantizer(), {"amax": one}),
        (Float8CurrentScalingQuantizer(), {"amax": 7.0}),
        (NVFP4Quantizer(), {"amax": one, "columnwise_amax": one * 2}),
        (NVFP4Quantizer(row_scaled_nvfp4=True), {"amax": each, "columnwise_amax": one}),
        (Float8Quantizer(), {"scale": one}),
    ):
        want = two_steps(x, m, quantizer, **given)
        same_array(dj.moe_permute_and_quantize(x, m, quantizer, **given), want, str(quantizer))
        host = dj.RowMap(*(np.asarray(part) for part in m))
        same_array(dj.moe_permute_and_quantize(np.asarray(x), host, quantizer, **given), want, str(quantizer))


def test_probabilities_move_beside(device):
    x, m = tools.normal("x", (T, H)), map_for("probs", 64)
    probs = jnp.asarray(cases.rng_for("probs").random((T, 2)), jnp.float32)
    dmoved = tools.normal("dmoved", (64,))
    want, moved, _ = dj.moe_permute_with_probs(x, probs, m)

    def fused(probs):
        return dj.moe_permute_and_quantize(x, m, MX, probs=probs)

    for wrap in (lambda f: f, jax.jit):
        q, permuted = wrap(fused)(probs)
        same_array(q, dj.quantize(want, MX))
        tools.same(permuted, moved)
    gradient = jax.grad(lambda p: (dj.moe_permute_with_probs(x, p, m)[1] * dmoved).sum())(probs)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        tools.same(wrap(jax.grad(lambda p: (fused(p)[1] * dmoved).sum()))(probs), gradient)

    def squares(p):
        return (fused(p)[1] ** 2).sum()

    with pytest.raises(UnsupportedError, match="no derivative"):
        jax.hessian(squares)(probs)


def test_permuted_rows_are_never_stored():
    x, m = tools.normal("x", (T, H)), map_for("calls")
    before = [tools.calls(op) for op in ("quantize", "permute")]
    jax.block_until_ready(dj.moe_permute_and_quantize(x, m, MX))
    assert [tools.calls(op) - n for op, n in zip(("quantize", "permute"), before, strict=True)] == [1, 0]
    text = tools.hlo(lambda x, m: dj.moe_permute_and_quantize(x, m, MX), x, m)
    assert tools.custom_calls(text) == ["diptych_quantize"]
    assert f"{len(m.row_source)}x{H}xf32" not in text and f"{len(m.row_source)}x{H}x" in text


def test_no_derivative_with_respect_to_tokens():
    x, m = tools.normal("x", (T, H)), map_for("gradient")

    def loss(x, scale):
        return dj.moe_permute_and_quantize(x, m, Float8Quantizer(), scale=scale).dequantize().sum()

    for argnum in (0, 1):
        with pytest.raises(UnsupportedError, match="diptych_quantize has no derivative"):
            jax.grad(loss, argnum)(x, jnp.ones(1))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Own(MXFP8Quantizer):
    def quantize_impl(self, x, quantize):
        return quantize(x * 2, MX)


def test_a_quantizer_of_ones_own():
    x, m = tools.normal("x", (2, T, H)), map_for("own", tokens=2 * T)
    probs = jnp.asarray(cases.rng_for("own").random((2 * T, 2)), jnp.float32)
    got, moved = dj.moe_permute_and_quantize(x, m, Own(), probs=probs)
    same_array(got, two_steps(x * 2, m, MX))
    same_array(dj.moe_permute_and_quantize(x, m, Own()), got)
    tools.same(moved, dj.moe_permute_with_probs(x, probs, m)[1])


# --- amaxes and sums of what moves ---


@pytest.mark.parametrize("flags", [0, ROW_AMAX, RHT, RHT | RHT_SIGNS | ROW_AMAX])
def test_amaxes(flags, device):
    x, m = tools.normal("amax", (T, H), "bfloat16") * 8, map_for("amax", 48)
    f = sources.permuted(x, m.row_id_map, m.row_source)
    got = quantize_ops.amax(x, flags, f.source, f.operands, columnwise=True)
    want = quantize_ops.amax(dj.moe_permute(x, m)[0], flags, columnwise=True)
    tools.same_tree(got, want)
    assert f.shape == (48, H) and float(want[0].max()) > 0


def test_amaxes_over_a_group():
    """Each example has tokens and a map of its own, and all share one scale."""
    xs = jnp.stack([tools.normal("group", (T, H)) * s for s in (1, 100)])
    maps = jax.tree.map(lambda *a: jnp.stack(a), map_for("group 0", 80), map_for("group 1", 80))
    for quantizer in (Float8CurrentScalingQuantizer(), NVFP4Quantizer(), NVFP4Quantizer(row_scaled_nvfp4=True)):

        def of_source(x, m, quantizer=quantizer):
            f = sources.permuted(x, m.row_id_map, m.row_source)
            return f.quantize(quantizer, amax_group="i")[0], f.with_amax("i").amax

        def of_rows(x, m, quantizer=quantizer):
            rows = dj.moe_permute(x, m)[0]
            return dj.quantize(rows, quantizer, amax_group="i"), jax.lax.pmax(dj.amax(rows), "i")

        got, want = (jax.vmap(fn, axis_name="i")(xs, maps) for fn in (of_source, of_rows))
        tools.same_tree(got, want, str(quantizer))


def test_column_sums(device):
    x, m = tools.normal("sums", (T, H), "bfloat16"), map_for("sums")
    q, total = sources.permuted(x, m.row_id_map, m.row_source).quantize(MX, column_sum="float32")
    moved = dj.moe_permute(x, m)[0]
    same_array(q, dj.quantize(moved, MX))
    tools.same(total, fused_oracle.column_sum(np.asarray(moved, np.float32), np.dtype(np.float32)))


# --- transformations ---


XS = np.stack([cases.draw("vmap", "normal", (T, H), "bfloat16") * s for s in (1, 8, 64)])
XS[:, ::5, 7] = -1e-30  # becomes -0
MAPS = jax.tree.map(lambda *a: np.stack(a), *(map_for(f"vmap {i}", 80) for i in range(3)))


KEYS = ("fp8_e4m3_tensor", "delayed", "fp8_e4m3_1x128", "nvfp4-rht-rht_signs-row_amax-stochastic")
AXES = ((0, 0, 0), (0, None, None), (None, 0, None), (0, 0, None), (None, None, 0))  # of x, the map and the state
CASES = [(name, axes) for name in KEYS for axes in AXES if tools.KINDS[name].state() or axes != AXES[-1]]


@pytest.mark.parametrize("name, axes", CASES, ids=str)
def test_vmap(name, axes):
    kind = tools.KINDS[name]
    given = [
        many if a == 0 else jax.tree.map(lambda v: v[0], many)
        for many, a in zip((XS, MAPS, kind.state((3,))), axes, strict=True)
    ]

    def fn(x, m, state):
        return dj.moe_permute_and_quantize(x, m, kind.quantizer, **state)

    got = jax.jit(jax.vmap(fn, axes))(*given)
    for i in range(3):
        x, m, state = (jax.tree.map(lambda v, i=i: v[i], g) if a == 0 else g for g, a in zip(given, axes, strict=True))
        tools.same_tree(jax.tree.map(lambda v, i=i: v[i], got), two_steps(x, m, kind.quantizer, **state), i)


def test_nested_vmap_and_scan():
    def fn(x, m):
        return dj.moe_permute_and_quantize(x, m, MX)

    got = jax.vmap(jax.vmap(fn, (0, None)), (None, 0))(XS, dj.RowMap(*MAPS))
    _, scanned = jax.lax.scan(lambda c, xm: (c, fn(*xm)), 0, (XS, dj.RowMap(*MAPS)))
    for i, j in itertools.product(range(3), range(3)):
        want = two_steps(XS[j], jax.tree.map(lambda v, i=i: jnp.asarray(v[i]), dj.RowMap(*MAPS)), MX)
        tools.same_tree(jax.tree.map(lambda v, i=i, j=j: v[i, j], got), want)
        if i == j:
            tools.same_tree(jax.tree.map(lambda v, i=i: v[i], scanned), want)


@pytest.mark.parametrize("specs", [(P("i"), P("i")), (P(), P("i")), (P("i"), P())], ids=str)
def test_shard_map(specs):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("i",))
    x, m = XS if specs[0] == P("i") else XS[:1], dj.RowMap(*MAPS)
    given = [v[:2] if s == P("i") else v[:1] for v, s in zip((x, m.row_id_map), specs, strict=True)]
    row_source = m.row_source[: len(given[1])]

    def local(x, row_id_map, row_source):
        row_map = dj.RowMap(row_id_map[0], m.tokens_per_expert[0], m.expert_offsets[0], row_source[0])
        return jax.tree.map(
            lambda v: v[None], dj.moe_permute_and_quantize(x[0], row_map, Float8CurrentScalingQuantizer())
        )

    f = jax.shard_map(local, mesh=mesh, in_specs=(*specs, specs[1]), out_specs=P("i"))
    # JAX indexes an axis that is sharded by a sum, in which -0 becomes 0: only copies on the host are indexed.
    got = jax.tree.map(np.asarray, jax.jit(f)(*given, row_source))
    for i in range(2):
        row_map = jax.tree.map(lambda v, i=i: jnp.asarray(v[i % len(row_source)]), m)
        want = two_steps(x[i % len(x)], row_map, Float8CurrentScalingQuantizer())
        tools.same_tree(jax.tree.map(lambda v, i=i: v[i], got), want)


def test_export_with_symbolic_sizes():
    """Once for any number of tokens and rows, and for CUDA, which needs no workspace."""
    for quantizer in (MX, Float8CurrentScalingQuantizer()):
        f = jax.jit(functools.partial(dj.moe_permute_and_quantize, quantizer=quantizer))
        t, r = export.symbolic_shape("t, r")
        maps = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((t, 2), (E,), (E + 1,), (r,))]
        args = jax.ShapeDtypeStruct((t, H), jnp.float32), dj.RowMap(*maps)
        exported = export.export(f, platforms=["cpu", "cuda"], disabled_checks=dj.export_safety_checks())(*args)
        for tokens in (T, 60):
            x, m = tools.normal("export", (tokens, H)), map_for("export", tokens=tokens)
            tools.same_tree(jax.tree.leaves(exported.call(x, m)), jax.tree.leaves(two_steps(x, m, quantizer)))
        with pytest.raises(ShapeError, match=r"t \+ 1"):
            jax.eval_shape(f, jax.ShapeDtypeStruct((t + 1, H), jnp.float32), args[1])


# --- maps and sizes at the edge ---


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "delayed", "fp8_e4m3_128x128", "mxfp8_e4m3", "nvfp4"])
def test_maps_that_lie(name, device):
    """Entries that name no row or no token are absent; where both halves contradict each other, nothing breaks."""
    kind, m = tools.KINDS[name], map_for("wild", 48)
    x, state = tools.normal("x", (T, H), kind.dtype), kind.state()
    wild = np.array([-7, 48, 2**31 - 1, -(2**31)], np.int32)[np.arange(T * 2).reshape(T, 2) % 4]
    to = jnp.where(m.row_id_map < 0, wild, m.row_id_map)
    assert (to != m.row_id_map).any()
    got = dj.moe_permute_and_quantize(x, m._replace(row_id_map=to), kind.quantizer, **state)
    same_array(got, two_steps(x, m, kind.quantizer, **state))
    for turn in range(4):
        liar = lie(f"jax-{turn}", tokens=T, slots=(3, 1, 40, 300)[turn], rows=48)
        both = m._replace(row_id_map=liar.row_id_map, row_source=liar.row_source)
        out = jax.block_until_ready(dj.moe_permute_and_quantize(x, both, kind.quantizer, **state))
        assert out.shape == (48, H)


@pytest.mark.parametrize("tokens, rows, width", [(0, 16, 32), (5, 16, 0), (16, 16, 32)])
def test_nothing_to_move(tokens, rows, width):
    m = dj.moe_map(np.full((tokens, 2), -1, np.int32), E, map_type="index", num_out_tokens=rows)
    x = tools.normal("nothing", (tokens, width))
    for quantizer in (MX, Float8CurrentScalingQuantizer(), NVFP4Quantizer()):
        want = dj.quantize(jnp.zeros((rows, width)), quantizer)
        same_array(dj.moe_permute_and_quantize(x, m, quantizer), want, str(quantizer))


X, MAP = np.ones((T, H), np.float32), map_for("misuse")
LONG = dj.RowMap(*(np.asarray(part, np.int64) for part in MAP))
verb = dj.moe_permute_and_quantize
BAD = {
    "a list": (
        lambda: verb([1.0], MAP, MX),
        ArgumentError,
        "moe_permute_and_quantize: inp must be a JAX or NumPy array",
    ),
    "quantizer": (
        lambda: verb(X, MAP, 3),
        ArgumentError,
        "moe_permute_and_quantize: quantizer must be a diptych.common.Quant",
    ),
    "no RowMap": (lambda: verb(X, MAP.row_id_map, MX), ArgumentError, "row_map must be a RowMap, got .*; moe_map"),
    "long map": (lambda: verb(X, LONG, MX), DTypeError, "row_id_map must be int32, got int64"),
    "long row_source": (
        lambda: verb(X, MAP._replace(row_source=LONG.row_source), MX),
        DTypeError,
        "row_source must be int32, got int6",
    ),
    "map's rank": (
        lambda: verb(X, MAP._replace(row_id_map=MAP.row_source), MX),
        ShapeError,
        r"row_id_map must be \[T, slots\]",
    ),
    "row_source's rank": (
        lambda: verb(X, MAP._replace(row_source=MAP.row_id_map), MX),
        ShapeError,
        r"row_source must be \[rows\]",
    ),
    "no row_source": (
        lambda: verb(X, MAP._replace(row_source=None), MX),
        ArgumentError,
        "row_source must be a JAX or NumPy array",
    ),
    "tokens": (lambda: verb(X[1:], MAP, MX), ShapeError, "inp must have a row for each of row_map's tokens, 37"),
    "one token": (lambda: verb(X[0], MAP, MX), ShapeError, r"inp must be \[\.\.\., H\]"),
    "float64": (lambda: verb(X.astype(np.float64), MAP, MX), DTypeError, "inp must be float32, bfloat16 or float16"),
    "quantized": (lambda: verb(dj.quantize(X, MX), MAP, MX), ArgumentError, "inp is quantized; moe_permute moves it"),
    "no scale": (lambda: verb(X, MAP, Float8Quantizer()), TypeError, "pass scale="),
    "rng": (lambda: verb(X, MAP, MX, rng=dj.rng_state(0)), ValueError, "rng is for stochastic rounding"),
    "amax": (lambda: verb(X, MAP, MX, amax=1.0), ValueError, "takes one per block"),
    "one amax": (lambda: verb(X, MAP, NVFP4Quantizer(), amax=1.0), ValueError, "columnwise_amax .* is missing"),
    "float32 rotated": (lambda: verb(X, MAP, NVFP4Quantizer(with_rht=True)), DTypeError, "takes bfloat16 alone"),
    "odd rows": (
        lambda: verb(jnp.asarray(X, "bfloat16"), dj.moe_map(np.ones((T, 1), bool)), NVFP4Quantizer(with_rht=True)),
        ShapeError,
        r"rows in multiples of 16, got \[37",
    ),
    "packed": (lambda: verb(X[:, :40], MAP, NVFP4Quantizer()), ShapeError, "16"),
    "slots": (
        lambda: verb(X, MAP._replace(row_id_map=np.zeros((T, 2049), np.int32)), MX),
        UnsupportedError,
        "at most 2048",
    ),
    "probs' shape": (lambda: verb(X, MAP, MX, probs=X), ShapeError, r"probs must be \[37, 2\]"),
    "probs' dtype": (lambda: verb(X, MAP, MX, probs=MAP.row_id_map), DTypeError, "probs must be float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    call, error, match = BAD[name]
    before = tools.calls("permute")
    with pytest.raises(error, match=match):
        call()
    assert tools.calls("permute") == before


def test_the_primitive_names_what_does_not_fit():
    f = sources.permuted(jnp.asarray(X), MAP.row_id_map, MAP.row_source)
    with pytest.raises(ShapeError, match=r"quantize: x must have a row for each of the map's tokens, 37"):
        quantize_ops.quantize(f.x[1:], MX, source=f.source, operands=f.operands)
    with pytest.raises(DTypeError, match="amax: row_source must be int32"):
        quantize_ops.amax(f.x, 0, f.source, (MAP.row_id_map, MAP.row_source.astype("float32")), columnwise=True)


def test_block_quantizers_of_both_dimensions_on_views():
    """Rows of 128 x 128 are cut from permuted rows, not from tokens."""
    x, m = tools.normal("blocks", (200, 256)), map_for("blocks", tokens=200)
    for dim in (1, 2):
        quantizer = Float8BlockQuantizer(block_scaling_dim=dim)
        same_array(dj.moe_permute_and_quantize(x, m, quantizer), two_steps(x, m, quantizer))
