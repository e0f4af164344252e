"""Every verb against the oracle, eager and compiled, and its errors for bad input."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweeps import in_turn, one_in

import cases
import diptych.jax as dj
import oracle
from diptych.common import ArgumentError, NVFP4Quantizer
from diptych.jax.primitives import quantize as quantize_ops
from jax_frontend import tools

pytestmark = pytest.mark.sampled

EACH = [(f, d) for f in cases.FORMATS for d in cases.INPUT_DTYPES]
KIND = tools.KIND
SOME_VALUES = ("normal", "inf_nan_mix", "random_bits", "scale_edges", "zeros", "subnormal_input")
MX = tools.quantizer("mxfp8_e4m3")
quantize = jax.jit(dj.quantize, static_argnames="quantizer")
dequantize = jax.jit(dj.dequantize, static_argnames="dtype")


@pytest.mark.parametrize(("fmt", "dtype", "part"), in_turn(EACH, 3))
def test_quantize_bits(device, fmt, dtype, part):
    every = cases.quantize_cases([fmt], [dtype], values=["any"], variants=True)
    for turn, case in enumerate(itertools.islice(every, part, None, 3)):
        for values in (SOME_VALUES[turn % len(SOME_VALUES)], "random_bits"):
            case = dataclasses.replace(case, values=values)
            x = case.make()
            want = oracle.quantize(x, fmt, **case.options)
            q = (dj.quantize if turn % 2 else quantize)(jnp.asarray(x), tools.of_case(case), rng=case.rng)
            tools.same_quantized(q, want, case)
            assert (q.shape, q.dtype) == (case.shape, dtype)


@KIND
def test_one_copy_alone_has_the_same_bits(kind):
    x, state = kind.draw("alone"), kind.state()
    both = dj.quantize(x, kind.quantizer, **state)
    tools.same_quantized(both, kind.oracle(x, state))
    for side in ("rowwise", "columnwise"):
        one = dj.quantize(x, kind.quantizer.with_usage(**{s: s == side for s in ("rowwise", "columnwise")}), **state)
        tools.same(getattr(one, f"{side}_data"), getattr(both, f"{side}_data"))
        tools.same(getattr(one, f"{side}_scale_inv"), getattr(both, f"{side}_scale_inv"))
        assert sum(getattr(one, f"{s}_data") is None for s in ("rowwise", "columnwise")) == 1
        if kind.quantizer.format.two_level:
            tools.same(getattr(one, "amax" if side == "rowwise" else "columnwise_amax"),
                       getattr(both, "amax" if side == "rowwise" else "columnwise_amax"))  # fmt: skip
            assert (one.amax is None) == (side == "columnwise") and (one.columnwise_amax is None) == (side == "rowwise")


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_amax(device, fmt):
    x = cases.draw(f"given-{fmt}", "normal", (33, 65), "bfloat16")
    for amax in cases.GIVEN_AMAX:
        want = oracle.quantize(x, fmt, amax=amax)
        for given in (float(amax), np.float32(amax), jnp.asarray([amax])):
            tools.same_quantized(dj.quantize(jnp.asarray(x), tools.quantizer(fmt), amax=given), want, amax)
        tools.same_quantized(quantize(jnp.asarray(x), tools.quantizer(fmt), amax=jnp.asarray([amax])), want, amax)


@pytest.mark.parametrize("name", [n for n in tools.KINDS if n.startswith(cases.PACKED_FORMATS)])
def test_given_amaxes_of_each_copy(device, name):
    kind = tools.KINDS[name]
    x, state = kind.draw("given"), kind.state()
    rows = kind.shape[0] if "row_amax" in name else 1
    for amax in cases.GIVEN_AMAX:
        given = {"amax": np.full(rows, amax, np.float32), "columnwise_amax": np.full(1, amax / 2, np.float32)}
        want = kind.oracle(x, state, **given)
        tools.same_quantized(dj.quantize(x, kind.quantizer, **given, **state), want, amax)
        columnwise = kind.quantizer.with_usage(rowwise=False)
        got = quantize(x, columnwise, columnwise_amax=jnp.asarray(given["columnwise_amax"]), **state)
        tools.same(got.columnwise_data, want.columnwise_data, amax)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
def test_given_scale(device, element):
    """Delayed scaling: the payload follows the scale, the amax is the tensor's own or joined with a history's."""
    quantizer = dj.Float8Quantizer(fp8_dtype=element)
    fmt = quantizer.format.name
    delayed = jax.jit(quantize_ops.quantize_delayed, static_argnums=1)
    for values in ("normal", "inf_nan_mix", "subnormal_input", "huge"):
        x = cases.draw(f"delayed-{element}-{values}", values, (33, 65), "float32")
        for scale in (1.0, 0.3, 1e-39, 3e38):
            for given in (scale, np.full(1, scale, np.float32)):
                got = dj.quantize(jnp.asarray(x), quantizer, scale=given)
                tools.same_quantized(got, oracle.quantize(x, fmt, scale=np.float32(scale)), (values, scale))
        for pending in (0.0, 2.5, 1e-40, 3e38):
            history = jnp.asarray([pending, 7.0, 1e-41], jnp.float32)
            want = oracle.quantize(x, fmt, scale=np.float32(4), accumulate=np.float32(pending))
            for f in (quantize_ops.quantize_delayed, delayed):
                copies, joined = f(jnp.asarray(x), quantizer, jnp.full(1, 4, jnp.float32), history)
                tools.same(joined, np.append(want.amax, np.asarray(history)[1:]), (values, pending))
                for name, buffer in copies.items():
                    tools.same(buffer, getattr(want, name), (values, pending, name))


def test_scale_update(device):
    rng = cases.rng_for("scale_update")
    update = jax.jit(dj.scale_update, static_argnames=("fp8_max", "margin", "most_recent"))
    special = np.array([0, np.inf, np.nan, 1e-45, 3e38, 1e-39], np.float32)
    for n, length in ((1, 1), (3, 1), (4, 2), (5, 7), (64, 16)):
        history = rng.uniform(0, 10, (n, length)).astype(np.float32)
        history[rng.random((n, length)) < 0.3] = rng.choice(special)
        scale = rng.uniform(0.1, 10, n).astype(np.float32)
        reduced = np.where(rng.random(n) < 0.5, 0, rng.uniform(0, 9, n)).astype(np.float32)
        chosen = rng.uniform(0, 9, n).astype(np.float32)
        for options in (
            {},
            {"fp8_max": 57344.0, "margin": 3},
            {"most_recent": True, "margin": -2},
            {"reduced": reduced},
            {"reduced": reduced, "amax": chosen},
        ):
            want = oracle.scale_update(history, scale, **options)
            for f in (dj.scale_update, update):
                got = f(jnp.asarray(history), jnp.asarray(scale), **options)
                tools.same_tree(got, want, (n, length, options))
            if n == 1 and "reduced" not in options:
                flat = dj.scale_update(jnp.asarray(history[0]), jnp.asarray(scale), **options)
                tools.same_tree(flat, (want[0][0], want[1]))


def test_scale_update_reuses_donated_memory():
    history, scale = jnp.ones((3, 8)), jnp.ones(3)
    want = dj.scale_update(history, scale)
    tools.same_tree((history, scale), (np.ones((3, 8), np.float32), np.ones(3, np.float32)))
    step = jax.jit(dj.scale_update, donate_argnums=(0, 1))
    text = step.lower(history, scale).compile().as_text()
    assert "output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}" in text and "copy(" not in text, text
    address = history.unsafe_buffer_pointer()
    got = step(history, scale)
    tools.same_tree(got, want)
    assert history.is_deleted() and scale.is_deleted() and got[0].unsafe_buffer_pointer() == address


def test_rng_state():
    for seed, offset in ((0, 0), (1, 2), ((1 << 64) - 1, 1 << 63), (np.uint64(1 << 40), 0xFFFFFFFF)):
        tools.same(dj.rng_state(seed, offset), oracle.rng_words(int(seed), offset))
    tools.same(jax.jit(lambda step: dj.rng_state(5, step))(7), oracle.rng_words(5, 7))
    tools.same(jax.jit(lambda step: dj.rng_state(5, step))(jnp.uint32(0xFFFFFFFE)), oracle.rng_words(5, 0xFFFFFFFE))
    with jax.enable_x64(True):
        tools.same(dj.rng_state(5, jnp.asarray(1 << 40)), oracle.rng_words(5, 1 << 40))
        tools.same(dj.rng_state(3), oracle.rng_words(3, 0))
    key = jax.random.key(3)
    drawn = [dj.rng_state(k, 4) for k in (key, *jax.random.split(key))]
    assert len({tuple(np.asarray(d)) for d in drawn}) == 3 and all(tuple(d[2:]) == (4, 0) for d in drawn)
    tools.same(jax.jit(dj.rng_state)(key, 4), drawn[0])
    tools.same(jax.vmap(dj.rng_state)(jax.random.split(key))[0], dj.rng_state(jax.random.split(key)[0]))
    for bad, error in (((-1,), ValueError), ((1 << 64,), ValueError), ((0, -1), ValueError), ((1.0,), TypeError),
                       ((True,), TypeError), ((jnp.ones(2),), TypeError), ((0, jnp.ones(())), TypeError)):  # fmt: skip
        with pytest.raises(error, match=r"rng_state: (seed|offset) must"):
            dj.rng_state(*bad)


class Halved(dj.Quantizer):
    """Quantizes x / 2 as MXFP8; compared by identity."""

    @property
    def format(self):
        return MX.format

    def quantize_impl(self, x, quantize):
        return quantize(x * 0.5, MX.with_usage(rowwise=self.rowwise, columnwise=self.columnwise))


class Wrong(Halved):
    def quantize_impl(self, x, quantize):
        return x


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Clipped(NVFP4Quantizer):
    """Compared by value; passes what its call is given."""

    bound: float = 1.0

    def quantize_impl(self, x, quantize):
        plain = NVFP4Quantizer(**{f.name: getattr(self, f.name) for f in dataclasses.fields(NVFP4Quantizer)})
        return quantize(jnp.clip(x, -self.bound, self.bound), plain)


def test_a_quantizer_of_ones_own():
    x = tools.normal("own", (32, 64))
    for wrap in (lambda f: f, jax.jit):
        q = wrap(lambda x: dj.quantize(x, Halved(columnwise=False), as_bytes=True))(x)
        tools.same_tree(q, dj.quantize(x * 0.5, MX.with_usage(columnwise=False), as_bytes=True))
    own, plain = Clipped(stochastic_rounding=True, bound=0.5), NVFP4Quantizer(stochastic_rounding=True)
    rng = dj.rng_state(1, 2)
    tools.same_tree(dj.quantize(x, own, rng=rng), dj.quantize(jnp.clip(x, -0.5, 0.5), plain, rng=rng))
    with pytest.raises(TypeError, match="pass rng="):
        dj.quantize(x, own)
    with pytest.raises(ArgumentError, match=r"Wrong\.quantize_impl must return a QuantizedArray"):
        dj.quantize(x, Wrong())


@KIND
def test_dequantize_bits(device, kind):
    packed = kind.quantizer.format.name in cases.PACKED_FORMATS
    for shape in ((32, 48), (2, 16, 32), (0, 16)) if packed else ((33, 65), (2, 3, 96), (7,), (0, 16)):
        x = cases.draw(f"dequantize-{kind.quantizer}-{shape}", "random_bits", shape, kind.dtype)
        state = kind.state()
        want = kind.oracle(x, state)
        for side in ("rowwise", "columnwise"):
            quantizer = kind.quantizer.with_usage(**{s: s == side for s in ("rowwise", "columnwise")})
            q = dj.quantize(jnp.asarray(x), quantizer, **state)
            for dtype in (None, "float32", jnp.float16):
                out = x.dtype if dtype is None else np.dtype(jnp.dtype(dtype))
                expected = oracle.dequantize(want.copy(columnwise=side == "columnwise"), out).reshape(shape)
                tools.same(dj.dequantize(q, dtype), expected, (side, dtype))
                tools.same(dequantize(q, dtype), expected, (side, dtype))
            tools.same(q.dequantize(), dj.dequantize(q))
            raw = dj.quantize(jnp.asarray(x), quantizer, **state, as_bytes=True)
            assert {v.dtype for v in jax.tree.leaves(raw)} <= {np.dtype(np.uint8), np.dtype(np.float32)}
            tools.same(dj.dequantize(raw), dj.dequantize(q))


@pytest.mark.parametrize("pair", one_in(2, cases.GEMM_PAIRS), ids="-".join)
def test_gemm_bits(pair):
    shapes = [s for i, s in enumerate(cases.GEMM_SHAPES) if i % 2 == cases.GEMM_PAIRS.index(pair) % 2]
    for case in cases.gemm_cases([pair], shapes):
        a, b, bias, c = case.make()
        sides = {"trans_a": case.a_columnwise, "trans_b": not case.b_columnwise}
        qa, qb = (dj.quantize(jnp.asarray(v), tools.quantizer(f)) for v, f in ((a, pair[0]), (b, pair[1])))
        copies = (oracle.quantize(v, f).copy(s) for v, f, s in (
            (a, pair[0], case.a_columnwise), (b, pair[1], case.b_columnwise)))  # fmt: skip
        want = oracle.gemm_cpu(
            *copies, alpha=case.alpha, bias=bias, beta=case.beta, c=c, out_dtype=cases.INPUT_DTYPES[case.out_dtype]
        )
        bias = None if bias is None else jnp.asarray(bias)
        if c is None:
            got = dj.gemm(qa, qb, **sides, bias=bias, alpha=case.alpha, out_dtype=case.out_dtype)
        else:
            got = dj.gemm_into(jnp.asarray(c), qa, qb, **sides, bias=bias, alpha=case.alpha, beta=case.beta)
        tools.same(got, want, case)


@pytest.mark.parametrize("pair", cases.MIXED_PAIRS[:: len(cases.FORMATS)], ids="-".join)
def test_gemm_bits_of_unlike_formats(pair):
    for case in cases.gemm_cases([pair], cases.GEMM_SHAPES[5:9]):
        a, b, _, _ = case.make()
        qa, qb = (dj.quantize(jnp.asarray(v), tools.quantizer(f)) for v, f in ((a, pair[0]), (b, pair[1])))
        copies = (oracle.quantize(v, f).copy(s) for v, f, s in (
            (a, pair[0], case.a_columnwise), (b, pair[1], case.b_columnwise)))  # fmt: skip
        got = dj.gemm(qa, qb, trans_a=case.a_columnwise, trans_b=not case.b_columnwise)
        tools.same(got, oracle.gemm_cpu(*copies, out_dtype=np.dtype(np.float32)), case)


@pytest.mark.parametrize("name", [n for n in tools.KINDS if n.startswith(cases.PACKED_FORMATS)])
def test_gemm_of_two_level_operands(name):
    """Amaxes per row, and copies after a Hadamard transform, which cancels."""
    kind = tools.KINDS[name]
    x, state = kind.draw("gemm"), kind.state()
    q, want = dj.quantize(x, kind.quantizer, **state), kind.oracle(x, state)
    for side in (False, True):
        got = dj.gemm(q, q, trans_a=side, trans_b=not side, out_dtype="float32", alpha=0.7)
        tools.same(got, oracle.gemm_cpu(want.copy(side), want.copy(side), alpha=0.7, out_dtype=np.dtype(np.float32)))
        plain = np.asarray(x, np.float64)
        plain = 0.7 * (plain.T @ plain if side else plain @ plain.T)
        assert np.linalg.norm(got - plain) < 0.25 * np.linalg.norm(plain)
    broken = dataclasses.replace(q, amax=None)
    with pytest.raises(ValueError, match="needs an amax"):
        dj.gemm(broken, q)


def test_gemm_unfolds_leading_dimensions_and_defaults_to_the_dtype_of_a():
    x, w = tools.normal("x", (2, 3, 32), "bfloat16"), tools.normal("w", (5, 32))
    y = dj.gemm(dj.quantize(x, tools.quantizer("mxfp8_e4m3")), dj.quantize(w, tools.quantizer("mxfp8_e4m3")))
    assert (y.shape, y.dtype) == ((2, 3, 5), jnp.bfloat16)


def test_gemm_into_reuses_donated_memory():
    quantizer = tools.quantizer("mxfp8_e4m3")
    qa, qb = dj.quantize(tools.normal("a", (32, 64)), quantizer), dj.quantize(tools.normal("b", (48, 64)), quantizer)
    acc = jnp.ones((32, 48))
    want = dj.gemm_into(acc, qa, qb)
    tools.same(acc, np.ones((32, 48), np.float32))  # not donated: untouched
    step = jax.jit(dj.gemm_into, donate_argnums=0)
    text = step.lower(acc, qa, qb).compile().as_text()
    assert "output_to_operand_aliasing={{}: (4, {})}" in text and "copy(" not in text, text
    address = acc.unsafe_buffer_pointer()
    got = step(acc, qa, qb)
    tools.same(got, want)
    assert acc.is_deleted() and got.unsafe_buffer_pointer() == address


def test_alpha_keeps_the_sign_of_zero():
    q = dj.quantize(jnp.ones((1, 32)), tools.quantizer("mxfp8_e4m3"))
    plus, minus = (np.asarray(dj.gemm(q, q, alpha=alpha)) for alpha in (0.0, -0.0))
    assert not np.signbit(plus).any() and np.signbit(minus).all()


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_amax_and_bias_grad(device, dtype):
    for values in ("normal", "inf_nan_mix", "all_nan", "subnormal_input"):
        for shape in ((33, 65), (0, 16), (7,), (2, 3, 96)):
            x = cases.draw(f"amax-{values}-{shape}", values, shape, dtype)
            tools.same(dj.amax(jnp.asarray(x)), oracle.amax(x), (values, shape))
            tools.same(dj.amax(jnp.asarray(x), per_row=True), oracle.amax(x, row_amax=True), (values, shape))
        if dtype == "bfloat16":
            for signs in (False, True):
                x = cases.draw(f"rotated-{values}", values, (3, 16, 40), dtype)
                got = jax.jit(lambda x, s=signs: dj.amax(x, rht=True, random_signs=s))(x)
                tools.same_tree(got, (oracle.amax(x), oracle.columnwise_amax(x, rht=True, rht_signs=signs)))
    if device == "cpu":
        dy = cases.draw("dy", "normal", (3, 33, 65), dtype)
        for out in (None, "float32"):
            want = tools.oracle_bias_grad(dy, dy.dtype if out is None else np.float32)
            tools.same(dj.bias_grad(jnp.asarray(dy), out), want)
            tools.same(jax.jit(lambda v, out=out: dj.bias_grad(v, out))(dy), want)


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_gemm_on_a_gpu_is_near_the_exact_product(pair):
    with jax.default_device(tools.gpu()):
        for case in cases.gemm_cases([pair], cases.GEMM_SHAPES_ALIGNED):
            a, b, bias, c = case.make()
            copies = [oracle.quantize(v, f).copy(s) for v, f, s in (
                (a, pair[0], case.a_columnwise), (b, pair[1], case.b_columnwise))]  # fmt: skip
            options = {"alpha": case.alpha, "bias": bias, "beta": case.beta, "c": c}
            qa, qb = (dj.quantize(jnp.asarray(v), tools.quantizer(f)) for v, f in ((a, pair[0]), (b, pair[1])))
            sides = {"trans_a": case.a_columnwise, "trans_b": not case.b_columnwise}
            bias = None if bias is None else jnp.asarray(bias)
            if c is None:
                got = dj.gemm(qa, qb, **sides, bias=bias, alpha=case.alpha, out_dtype=case.out_dtype)
            else:
                got = dj.gemm_into(jnp.asarray(c), qa, qb, **sides, bias=bias, alpha=case.alpha, beta=case.beta)
            allowed = oracle.gemm_tolerance(
                *copies, **options, out_dtype=cases.INPUT_DTYPES[case.out_dtype], accumulator_bits=14, promote_every=128
            )
            error = np.abs(np.asarray(got).astype(np.float64) - oracle.gemm_float64(*copies, **options))
            assert (error <= allowed).all(), (case, float((error / allowed).max()))
