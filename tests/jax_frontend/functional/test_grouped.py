"""The verbs on stacks and on groups of rows: the oracle's bits, eagerly and compiled; what they are as pytrees."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.grouped.test_grouped_bias_grad import CASES as SUMS
from core.grouped_runner import ALIGNED, GROUPS, PRODUCTS, Case, grouped_cases
from core.quantize.test_quantize_stack import SHAPES
from sweeps import one_in

import cases
import diptych.jax as dj
import oracle
from diptych import core
from diptych.common import Float8Quantizer, ShapeError
from diptych.common.quantizers import NVFP4Quantizer
from diptych.jax.primitives import grouped as grouped_ops
from diptych.jax.primitives.checks import Copy
from diptych.jax.tensors.quantized import BUFFERS
from jax_frontend import tools
from oracle.grouped import Problem

quantize_stack = jax.jit(dj.quantize_stack, static_argnames=("quantizer", "as_bytes"))
grouped_bias_grad = jax.jit(dj.grouped_bias_grad, static_argnames="dtype")
WGRAD = {"trans_a": True, "trans_b": False}


def same_stack(got: dj.QuantizedStack, each: list[oracle.Quantized], label: Any) -> None:
    """A stack against the oracle's tensors, buffer by buffer."""
    for name in BUFFERS:
        array, wants = getattr(got, name), [getattr(want, name) for want in each]
        assert all((array is None) == (want is None) for want in wants), f"{label} {name}"
        for g, want in enumerate(wants):
            if want is not None:
                tools.same(np.asarray(array)[g].reshape(want.shape), want, f"{label} {name} of tensor {g}")


# --- stacks ---


@pytest.mark.parametrize("fmt", one_in(2, cases.FORMATS))
def test_each_tensor_of_a_stack_has_the_bits_that_it_has_alone(device, fmt):
    usages = ({}, {"columnwise": False}, {"rowwise": False})
    for turn, shape in enumerate(SHAPES):
        dtype = list(cases.INPUT_DTYPES)[turn % 3]
        for case in cases.quantize_cases([fmt], [dtype], [shape[1:]], ["normal"], every_option=True, variants=True):
            # Rows may allow no columnwise copy; some options are of one copy.
            both = "columnwise" not in case.options and not case.variant & {"rht", "row_amax", "from_rows"}
            usage = usages[turn // 3 % 3] if both else {}
            x = cases.draw(f"jax-stack-{case}", "outlier", (shape[0], *case.shape), dtype)
            rngs = np.stack([oracle.rng_words(7 + g, 40 * g) for g in range(len(x))])
            given = {"rng": rngs} if "rng" in case.options else {}
            want = [
                oracle.quantize(t, fmt, **case.options | usage | {k: v[g] for k, v in given.items()})
                for g, t in enumerate(x)
            ]
            q = quantize_stack(x, tools.of_case(case, **usage), **given)
            same_stack(q, want, f"{case} {usage}")
            assert (q.shape, q.dtype, len(q)) == (x.shape, dtype, len(x)), str(case)


@pytest.mark.sampled
@tools.KIND
def test_a_stack_is_its_tensors(kind):
    """Eagerly, compiled, as bytes, one by one, as values; and one of no tensors."""
    x, state = kind.draw("stack", (3,)), kind.state((3,))
    flat = {k: v[:, 0] if k == "scale" else v for k, v in state.items()}
    q = dj.quantize_stack(x, kind.quantizer, **flat)
    tools.same_tree(quantize_stack(x, kind.quantizer, **flat), q)
    raw = quantize_stack(x, kind.quantizer, **flat, as_bytes=True)
    for name, got in zip(BUFFERS, (getattr(raw, name) for name in BUFFERS), strict=True):
        want = getattr(q, name)
        assert (got is None) == (want is None) and (got is None or got.dtype in (jnp.uint8, jnp.float32))
        if got is not None:
            assert tools.bits(got).tobytes() == tools.bits(want).tobytes(), name
    each = [dj.quantize(x[g], kind.quantizer, **{k: v[g] for k, v in state.items()}) for g in range(3)]
    for g in (0, 1, 2, -1):
        tools.same_tree(q[g], each[g])
    tools.same_tree(list(q), each)
    for dtype in (None, "float16"):
        values = [e.dequantize(dtype) for e in each]
        for stack in (q, raw, dataclasses.replace(q, rowwise_data=None) if q.columnwise_data is not None else q):
            if stack.rowwise_data is None:
                values = [dataclasses.replace(e, rowwise_data=None).dequantize(dtype) for e in each]
            tools.same(stack.dequantize(dtype), jnp.stack(values))
            tools.same(jax.jit(lambda s, dtype=dtype: s.dequantize(dtype))(stack), jnp.stack(values))
    none = dj.quantize_stack(x[:0], kind.quantizer, **{k: v[:0] for k, v in flat.items()})
    assert (len(none), none.shape, list(none)) == (0, (0, *kind.shape), [])


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_scales_and_amaxes_of_each(device, fmt):
    x = cases.draw(f"jax-given-{fmt}", "outlier", (4, 33, 65), "bfloat16")
    delayed = Float8Quantizer(fp8_dtype=tools.quantizer(fmt).format.element)
    scale, amax = (np.array(v, np.float32) for v in ([1.0, 0.25, 300.0, 7.5], [0.0, 1e9, 0.5, 3.0]))
    got = quantize_stack(x, delayed, scale=scale)
    same_stack(got, [oracle.quantize(t, fmt, scale=s) for t, s in zip(x, scale, strict=True)], f"{fmt} scale")
    got = quantize_stack(x, tools.quantizer(fmt), amax=amax)
    same_stack(got, [oracle.quantize(t, fmt, amax=a) for t, a in zip(x, amax, strict=True)], f"{fmt} amax")


def test_given_amaxes_of_two_levels(device):
    x = cases.draw("jax-levels", "normal", (3, 16, 48), "float32")
    amax, other = np.array([1.0, 9.0, 0.0], np.float32), np.array([2.0, 8.0, 5.0], np.float32)
    each = [oracle.quantize(t, "nvfp4", amax=a, columnwise_amax=c) for t, a, c in zip(x, amax, other, strict=True)]
    same_stack(quantize_stack(x, NVFP4Quantizer(), amax=amax, columnwise_amax=other), each, "given")
    rows = np.abs(cases.draw("jax-levels-rows", "normal", (3, 16), "float32")) + 1
    each = [oracle.quantize(t, "nvfp4", row_amax=True, columnwise=False, amax=a) for t, a in zip(x, rows, strict=True)]
    quantizer = NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)
    same_stack(quantize_stack(x, quantizer, amax=rows), each, "one for each row")


def test_a_stack_is_a_pytree():
    x, quantizer = tools.normal("tree", (3, 2, 16, 32)), tools.quantizer("mxfp8_e4m3")
    q = dj.quantize_stack(x, quantizer)
    assert repr(q) == "QuantizedStack(mxfp8_e4m3, shape=[3, 2, 16, 32], dtype=float32, copies=rowwise+columnwise)"
    tools.same_tree(jax.jit(lambda q: q)(q), q)
    tools.same_tree(jax.tree.map(lambda v: v, q), q)
    assert jax.eval_shape(lambda x: dj.quantize_stack(x, quantizer), x).shape == x.shape
    for only in ({"columnwise": False}, {"rowwise": False}):
        one = dj.quantize_stack(x, quantizer.with_usage(**only))
        assert one.shape == x.shape and one[1].shape == x.shape[1:]
    turned = dj.quantize_stack(x, tools.quantizer("fp8_e4m3_tensor", rowwise=False))
    assert turned.columnwise_data.shape == (3, 32, 32) and turned.shape == x.shape
    with pytest.raises(IndexError, match="tensor 3 of a stack of 3"):
        q[3]
    mapped = jax.vmap(lambda x: dj.quantize_stack(x, quantizer))(x[None])
    assert mapped.shape == (1, *x.shape)
    for use in (lambda: mapped[0], mapped.dequantize, lambda: dj.grouped_gemm(q[0], mapped, np.zeros(4, np.int32))):
        with pytest.raises(ShapeError, match=r"carries 1 more axis.*jax\.vmap"):
            use()


# --- products ---


def to_copy(copy: oracle.Copy, fmt: str) -> Copy:
    amax = None if copy.amax is None else jnp.asarray(np.reshape(copy.amax, -1), jnp.float32)
    return Copy(jnp.asarray(copy.data), jnp.asarray(copy.scale_inv), amax, fmt, copy.columnwise)


def to_stack(copies: list[oracle.Copy], like: oracle.Copy, fmt: str) -> Copy:
    def together(name: str, whole: bool) -> jax.Array:
        one = np.asarray(getattr(like, name))
        arrays = np.array([getattr(c, name) for c in copies], one.dtype)
        return jnp.asarray(arrays.reshape(len(copies), *(() if whole else one.shape)))

    amax = None if like.amax is None else together("amax", np.size(like.amax) == 1)
    return Copy(together("data", False), together("scale_inv", like.fmt.one_scale), amax, fmt, like.columnwise)


def added(case: Case) -> Case:
    """A case whose C, if it has one, is added as it is, and which has no bias then."""
    return dataclasses.replace(case, beta=1.0, bias_dtype=None) if case.beta else case


def product(case: Case, p: Problem, **options: Any) -> jax.Array:
    """The primitive of a case; its C is added."""
    b = to_stack(p.b, p.like, case.b_format) if isinstance(p.b, list) else to_copy(p.b, case.b_format)
    return grouped_ops.grouped_gemm(
        to_copy(p.a, case.a_format),
        b,
        jnp.asarray(p.offsets, jnp.int32),
        None if p.bias is None else jnp.asarray(p.bias),
        alpha=float(np.float32(p.alpha)),
        out_dtype=np.dtype(p.out_dtype).name,
        acc=None if p.c is None else jnp.asarray(p.c),
        **options,
    )


@pytest.mark.parametrize("pair", one_in(3, cases.GEMM_PAIRS), ids="-".join)
def test_bits_of_products(pair):
    """Every grouping; products, extents and epilogues take turns."""
    for turn, case in enumerate(grouped_cases([pair])):
        case = added(case)
        problem = case.make()
        got = product(case, problem, align=case.align if turn % 2 else 1)
        tools.same(got, problem.cpu(), str(case))


@pytest.mark.parametrize("pair", cases.MIXED_PAIRS[::5], ids="-".join)
def test_bits_of_any_two_formats(pair):
    for name in PRODUCTS:
        for case in grouped_cases([pair], GROUPS[1:2], [(48, 33)], ["inf_nan_mix"], [name]):
            case = added(case)
            problem = case.make()
            tools.same(product(case, problem), problem.cpu(), str(case))


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_products_on_a_gpu_are_near_the_exact_ones(pair):
    aligned = [(rows, at) for rows, at in GROUPS if rows % 16 == 0]
    with jax.default_device(tools.gpu()):
        for name in PRODUCTS:
            for case in grouped_cases([pair], aligned, ALIGNED, products=[name]):
                case = added(case)
                problem = case.make()
                got = np.asarray(product(case, problem, align=case.align)).astype(np.float64)
                allowed = problem.tolerance(accumulator_bits=14, promote_every=128)
                assert (np.abs(got - problem.float64()) <= allowed).all(), str(case)


QUANTIZERS = (
    ("fp8_e4m3_tensor", {}, "fp8_e5m2_tensor", {}, "float32"),
    ("fp8_e4m3_1x128", {}, "fp8_e4m3_128x128", {}, "float32"),
    ("mxfp8_e5m2", {}, "mxfp8_e4m3", {"square": True}, "float16"),
    ("nvfp4", {"rht": True}, "nvfp4", {"square": True}, "bfloat16"),
    ("nvfp4", {"row_amax": True}, "nvfp4", {}, "float32"),
)


@pytest.mark.parametrize("kind", QUANTIZERS, ids=lambda k: "-".join([k[0], *k[1], k[2], *k[3]]))
@pytest.mark.parametrize("wrap", [lambda f, **_: f, jax.jit], ids=["eager", "jit"])
def test_verbs_have_the_bits_of_the_numpy_face(kind, wrap):
    """fprop, dgrad and wgrad as a user writes them; what is optional as torch's defaults say."""
    fmt_x, more_x, fmt_w, more_w, dtype = kind
    qx, qw = tools.quantizer(fmt_x, **more_x), tools.quantizer(fmt_w, **more_w)
    groups, n, k = 4, 48, 96
    offsets = np.array([0, 128, 128, 384, 512], np.int32)
    x, dy = (cases.draw(f"jax-face-{kind}-{v}", "normal", (2, 272, v), dtype) for v in (k, n))
    w = cases.draw(f"jax-face-w-{kind}", "normal", (groups, n, k), "float32")
    bias = cases.draw(f"jax-face-b-{kind}", "normal", (groups, n), "bfloat16")
    cx, cdy, cw = core.quantize(x, qx), core.quantize(dy, qx), core.quantize_stack(w, qw)

    @functools.partial(wrap, static_argnames="alpha")
    def run(x, dy, w, bias, offsets, alpha=1.0):
        mine, theirs, weights = dj.quantize(x, qx), dj.quantize(dy, qx), dj.quantize_stack(w, qw)
        return (
            dj.grouped_gemm(mine, weights, offsets, bias=bias, alpha=alpha),
            dj.grouped_gemm(theirs, weights, offsets, trans_b=False, out_dtype="float16", align=256),
            dj.grouped_gemm(theirs, mine, offsets, **WGRAD, out_dtype=jnp.float32, align=128),
            dj.grouped_bias_grad(dy, offsets, bias.dtype),
        )

    for alpha in (1.0, -0.7):
        want = (
            core.grouped_gemm(cx, cw, offsets, bias=bias, alpha=alpha, out_dtype=dtype),
            core.grouped_gemm(cdy, cw, offsets, trans_b=False, out_dtype="float16", align=128),
            core.grouped_gemm(cdy, cx, offsets, **WGRAD, align=128),
            core.grouped_bias_grad(dy, offsets, "bfloat16"),
        )
        for label, g, v in zip(("fprop", "dgrad", "wgrad", "bias"), run(x, dy, w, bias, offsets, alpha=alpha), want,
                               strict=True):  # fmt: skip
            tools.same(g, v, f"{label} {kind} {cases.report_header()}")


def test_options_that_the_cpu_does_not_heed_reach_the_call():
    """It accumulates in float32 whatever fast_accum says, and rotated copies of whole groups are its columns."""
    x, w, offsets = (
        tools.normal("fast-x", (48, 32)),
        tools.normal("fast-w", (2, 16, 32)),
        np.array([0, 16, 48], np.int32),
    )
    quantizer = tools.quantizer("fp8_e4m3_tensor")
    q, stack = dj.quantize(x, quantizer), dj.quantize_stack(w, quantizer)
    turned = dj.quantize(x.astype(jnp.bfloat16), tools.quantizer("nvfp4", rht=True))
    for attribute, given, options in (
        ("fast_accum = 0", (q, stack, offsets), {}),
        ("rotated = 0", (q, stack, offsets), {}),
        ("fast_accum = 1", (q, stack, offsets), {"fast_accum": True}),
        ("rotated = 1", (turned, turned, offsets), {**WGRAD, "align": 48}),
        ("align = 16", (turned, turned, offsets), {**WGRAD, "align": 48}),
    ):
        assert attribute in tools.hlo(functools.partial(dj.grouped_gemm, **options), *given)
    tools.same(dj.grouped_gemm(q, stack, offsets, fast_accum=True), dj.grouped_gemm(q, stack, offsets))


def test_adding_to_a_result_reuses_donated_memory():
    quantizer, offsets = tools.quantizer("mxfp8_e4m3"), jnp.asarray([0, 32, 96], jnp.int32)
    q = dj.quantize(tools.normal("acc-x", (96, 32)), quantizer, as_bytes=True)
    copy, acc = q.copy_of(True, "test"), jnp.ones((2, 32, 32))

    def add(acc, data, scale_inv):
        both = copy._replace(data=data, scale_inv=scale_inv)
        return grouped_ops.grouped_gemm(both, both, offsets, out_dtype="float32", align=32, acc=acc)

    want = add(acc, *copy[:2])
    tools.same(acc, np.ones((2, 32, 32), np.float32))  # not donated: untouched
    alone = grouped_ops.grouped_gemm(copy, copy, offsets, out_dtype="float32", align=32)
    np.testing.assert_allclose(want, np.asarray(alone) + 1, rtol=1e-6, atol=1e-6)
    step = jax.jit(add, donate_argnums=0)
    text = step.lower(acc, *copy[:2]).compile().as_text()
    assert "output_to_operand_aliasing={{}: (5, {})}" in text, text
    address = acc.unsafe_buffer_pointer()
    got = step(acc, *copy[:2])
    tools.same(got, want)
    assert acc.is_deleted() and got.unsafe_buffer_pointer() == address


def test_alpha_keeps_the_sign_of_zero():
    q, stack = (f(jnp.ones(s), tools.quantizer("mxfp8_e4m3")) for f, s in ((dj.quantize, (1, 32)),
                                                                        (dj.quantize_stack, (1, 1, 32))))  # fmt: skip
    offsets = np.array([0, 1], np.int32)
    plus, minus = (np.asarray(dj.grouped_gemm(q, stack, offsets, alpha=alpha)) for alpha in (0.0, -0.0))
    assert not np.signbit(plus).any() and np.signbit(minus).all()


# --- sums ---


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_bits_of_sums(device, dtype):
    """On the CPU the oracle's; on a GPU those of bias_grad of each group's rows alone."""
    for turn, (rows, n, offsets) in enumerate(SUMS):
        for values in ("normal", "inf_nan_mix"):
            dy = cases.draw(f"jax-sum-{dtype}-{rows}x{n}-{values}", values, (rows, n), dtype)
            out = list(cases.INPUT_DTYPES)[turn % 3]
            groups = [dy[a:b] for a, b in itertools.pairwise(offsets)]
            if device == "cpu":
                sums = [oracle.bias_grad(g, cases.INPUT_DTYPES[out]) for g in groups]
            else:
                sums = [np.asarray(dj.bias_grad(g, out)) for g in groups]
            want = np.stack(sums) if sums else np.zeros((0, n), cases.INPUT_DTYPES[out])
            for f in (dj.grouped_bias_grad, grouped_bias_grad):
                got = f(dy, np.array(offsets, np.int32), dtype=out)
                tools.same(got, want, f"{dtype}[{rows}, {n}] {values} -> {out} {cases.report_header()}")


def test_leading_dimensions_of_sums_fold_and_the_dtype_is_theirs():
    dy, offsets = tools.normal("fold", (2, 9, 40), "bfloat16"), np.array([1, 6, 18], np.int32)
    got = dj.grouped_bias_grad(dy, offsets)
    tools.same(got, core.grouped_bias_grad(np.asarray(dy), offsets))
    assert got.dtype == jnp.bfloat16
