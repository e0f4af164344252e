"""Products over any axes against `dense` on operands that numpy moved into place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych.common import ArgumentError, DTypeError, ShapeError, UnsupportedError
from jax_frontend import tools

pytestmark = pytest.mark.sampled

RECIPE = pytest.mark.parametrize("recipe", tools.PLAIN_RECIPES.values(), ids=tools.PLAIN_RECIPES)
DELAYED = dj.DelayedScaling(amax_history_len=3)
NVFP4 = dj.NVFP4BlockScaling(disable_rht=True)
RNG = dj.rng_state(7, 0)

# equation, numbers, shapes; then equations that move operands into [B, ..., K] and [B, N, K], and the result back.
CASES = {
    "last": ("btk,kn->btn", (((2,), (0,)), ((), ())), (2, 16, 32), (32, 48), "btk->btk", "kn->nk"),
    "heads": ("btd,dhk->bthk", (((2,), (0,)), ((), ())), (2, 16, 32), (32, 2, 16), "btd->btd", "dhk->hkd"),
    "heads back": ("bthk,hkd->btd", (((2, 3), (0, 1)), ((), ())), (2, 16, 2, 16), (2, 16, 32), "bthk->bthk",
                   "hkd->dhk"),
    "first": ("kbt,nk->btn", (((0,), (1,)), ((), ())), (32, 2, 16), (48, 32), "kbt->btk", "nk->nk"),
}  # fmt: skip
EQUATION = {name: case[0] for name, case in CASES.items()}


def by_hand(recipe, case, x, kernel, bias, **options):
    _, numbers, _, _, of_x, of_kernel = case
    contracted = len(numbers[0][0])
    x, kernel = jnp.einsum(of_x, x), jnp.einsum(of_kernel, kernel)
    x = x.reshape(*x.shape[: x.ndim - contracted], -1)
    kept = kernel.shape[: kernel.ndim - contracted]
    bias = None if bias is None else bias.reshape(-1)
    y = dj.dense(x, kernel.reshape(np.prod(kept), -1), bias, recipe=recipe, **options)
    return y.reshape(*y.shape[:-1], *kept)


def kept_shape(case):
    _, ((_, right), _), _, kernel, *_ = case
    return tuple(n for a, n in enumerate(kernel) if a not in right)


@RECIPE
@pytest.mark.parametrize("name", CASES)
def test_both_forms_are_dense(recipe, name):
    case = CASES[name]
    equation, numbers, of_x, of_kernel, *_ = case
    x, kernel, bias = tools.normal("x", of_x), tools.normal("kernel", of_kernel), tools.normal("b", kept_shape(case))

    def run(f):
        y, pull = jax.vjp(f, x, kernel, bias)
        return y, *pull(tools.normal("dy", y.shape))

    want = run(lambda *a: by_hand(recipe, case, *a))
    for contraction in (equation, numbers):
        got = run(lambda *a, c=contraction: dj.dense_general(*a, contraction=c, recipe=recipe))
        for part, g, w in zip(("y", "dx", "dkernel", "dbias"), got, want, strict=True):
            tools.same(g, w, f"{contraction}: {part}")


@pytest.mark.parametrize("recipe", [dj.Float8CurrentScaling(), dj.MXFP8BlockScaling(), NVFP4, DELAYED], ids=str)
def test_elements_of_a_batch_are_products_of_their_own(recipe):
    """Heads with kernels of their own: each has its own scales and states, and all round by the same random numbers."""
    x, kernel, bias = tools.normal("x", (2, 16, 3, 32)), tools.normal("k", (3, 32, 16)), tools.normal("b", (3, 16))
    x = x * jnp.array([1.0, 10, 100])[:, None]
    dy = tools.normal("dy", (2, 16, 3, 16))
    given = {"recipe": recipe, "rng": RNG}

    def loss(x, kernel, bias, states):
        y = dj.dense_general(x, kernel, bias, contraction="bthk,hkn->bthn", state=states, **given)
        return (y * dy).sum(), y

    def of_head(x, kernel, bias, states, dy):
        y = dj.dense(x, kernel.T, bias, state=states, **given)
        return (y * dy).sum(), y

    args = (x, kernel, bias, dj.init_dense_general_state(recipe, (3,)))
    grads, y = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*args)
    for h in range(3):
        own = (x[:, :, h], kernel[h], bias[h], dj.init_state(recipe))
        want, of_y = jax.grad(of_head, (0, 1, 2, 3), has_aux=True)(*own, dy[:, :, h])
        got = (y[:, :, h], grads[0][:, :, h], grads[1][h], grads[2][h])
        for part, g, w in zip(("y", "dx", "dkernel", "dbias"), got, (of_y, *want[:3]), strict=True):
            tools.same(g, w, f"head {h}: {part}")
        tools.same_tree(jax.tree.map(lambda a, h=h: a[h], grads[3]), want[3], f"head {h}")


def test_two_batch_axes_and_a_returned_state():
    x, kernel = tools.normal("x", (16, 2, 3, 32)), tools.normal("k", (2, 3, 16, 32))
    states = dj.init_dense_general_state(DELAYED, (2, 3))
    assert states["input"].amax_history.shape == (2, 3, 3)
    call = {"recipe": DELAYED, "contraction": "tghk,ghnk->tghn", "return_state": True}
    y, news = dj.dense_general(x, kernel, state=states, **call)
    for g, h in np.ndindex(2, 3):
        want, own = dj.dense(x[:, g, h], kernel[g, h], recipe=DELAYED, state=dj.init_state(DELAYED), return_state=True)
        tools.same(y[:, g, h], want)
        tools.same_tree(jax.tree.map(lambda a, at=(g, h): a[at], news), own)
    updated = jax.vmap(jax.vmap(dj.update_state))(news)
    assert updated["weight"].scale.shape == (2, 3, 1)


EINSUMS = ["...k,kn->...n", "btk,...kn->bt...n", "a...k,nk...->n...a", "bk,bkn->nb", "k,kn->n", "b k , n k -> n b"]


@pytest.mark.parametrize("equation", EINSUMS)
def test_equations_are_those_of_einsum(equation):
    """With recipe None the product is einsum's; integers make the order of sums irrelevant."""
    shapes = {"...k,kn->...n": ((2, 3, 8), (8, 4)), "btk,...kn->bt...n": ((2, 3, 8), (5, 6, 8, 4)),
              "a...k,nk...->n...a": ((2, 3, 7, 8), (4, 8, 3, 7)), "bk,bkn->nb": ((3, 8), (3, 8, 4)),
              "k,kn->n": ((8,), (8, 4)), "b k , n k -> n b": ((3, 8), (4, 8))}[equation]  # fmt: skip
    x, kernel = (jnp.round(4 * tools.normal(f"{i}", s)) for i, s in enumerate(shapes))
    want = jnp.einsum(equation, x, kernel)
    tools.same(dj.dense_general(x, kernel, contraction=equation, recipe=None), want)
    close = dj.einsum(dj.Float8CurrentScaling())(equation, x, kernel)
    # Each E4M3 operand is off by 2^-4 of itself at most; these integers are no subnormals.
    assert (abs(close - want) <= ((1 + 2**-4) ** 2 - 1) * jnp.einsum(equation, abs(x), abs(kernel))).all()


def test_a_quantized_kernel_is_in_the_layout_of_its_products():
    recipe, x, kernel = dj.MXFP8BlockScaling(), tools.normal("x", (2, 16, 2, 32)), tools.normal("k", (2, 32, 4, 16))
    q = dj.quantize(
        jnp.einsum("hkab->abhk", kernel).reshape(4, 16, 64), dj.MXFP8Quantizer(rowwise=True, columnwise=True)
    )
    want, pull = jax.vjp(lambda x: dj.dense_general(x, kernel, contraction="bthk,hkac->btac", recipe=recipe), x)
    numbers = (((2, 3), (-1,)), ((), ()))
    got, pull_held = jax.vjp(lambda x: dj.dense_general(x, q, contraction=numbers, recipe=recipe), x)
    tools.same(got, want)
    tools.same(pull_held(want)[0], pull(want)[0])


def test_precision_and_dtypes():
    x, kernel = tools.normal("x", (16, 32)), tools.normal("k", (32, 16), "bfloat16")
    call = {"contraction": "mk,kn->mn"}
    wide = dj.dense_general(x.astype(jnp.bfloat16), kernel, recipe=None, preferred_element_type=jnp.float32, **call)
    assert wide.dtype == jnp.float32
    assert dj.dense_general(x.astype(jnp.bfloat16), kernel, recipe=dj.MXFP8BlockScaling(), **call).dtype == jnp.bfloat16
    text = str(jax.make_jaxpr(lambda: dj.dense_general(x, kernel, recipe=None, precision="highest", **call))())
    assert "HIGHEST" in text
    bias = tools.normal("b", (16,))
    got = dj.dense_general(x, kernel, bias, recipe=dj.MXFP8BlockScaling(), **call)
    tools.same(got, dj.dense(x, kernel.T, bias, recipe=dj.MXFP8BlockScaling()))


def test_calibration_and_options_of_dense_pass_through():
    x, kernel, states = tools.normal("x", (16, 32)), tools.normal("k", (32, 16)), dj.init_state(DELAYED)
    call = {"recipe": DELAYED, "state": states, "return_state": True, "calibrate": True}
    y, news = dj.dense_general(x, kernel, contraction="mk,kn->mn", **call)
    want, wanted = dj.dense(x, kernel.T, **call)
    tools.same(y, want)
    tools.same_tree(news, wanted)


def test_misuse_is_named():
    x, kernel, mx = jnp.ones((2, 16, 32)), jnp.ones((32, 16)), dj.MXFP8BlockScaling()
    held = dj.quantize(jnp.ones((32, 32)), dj.MXFP8Quantizer())

    def f(contraction, x=x, kernel=kernel, *bias, recipe=mx, **options):
        return dj.dense_general(x, kernel, *bias, contraction=contraction, recipe=recipe, **options)

    batched = ("btk,bkn->btn", x, jnp.ones((2, 32, 16)))
    delayed, refs = {"recipe": DELAYED, "return_state": True}, dj.state_refs(dj.init_state(DELAYED))
    bad = {
        "name its result": (ValueError, lambda: f("btk,kn")),
        "two operands": (ValueError, lambda: f("btk,kn,n->bt")),
        "neither operand": (ValueError, lambda: f("btk,kn->btz")),
        "sums an axis": (UnsupportedError, lambda: f("btk,kn->bt")),
        "takes a diagonal": (UnsupportedError, lambda: f("ttk,kn->tn")),
        "letters": (ValueError, lambda: f("bt1,1n->btn")),
        "with 3 axes": (ShapeError, lambda: f("tk,kn->tn")),
        "do not fit": (ShapeError, lambda: f("btk,nk->btn")),
        "contracts nothing": (UnsupportedError, lambda: f("btk,mn->btkmn")),
        "different axes": (ShapeError, lambda: f((((5,), (0,)), ((), ())))),
        "an einsum equation or dimension numbers": (ArgumentError, lambda: f(3)),
        "precision=highest": (ValueError, lambda: f("btk,kn->btn", precision="highest")),
        "for both operands": (ValueError, lambda: f("btk,kn->btn", precision=("highest", "default"))),
        "int32": (DTypeError, lambda: f("btk,kn->btn", preferred_element_type=jnp.int32)),
        "bias must be": (ShapeError, lambda: f("btk,kn->btn", x, kernel, jnp.ones(5))),
        "x is float64|x must be float32": (DTypeError, lambda: f("btk,kn->btn", np.ones((2, 16, 32)))),
        "last axis alone": (UnsupportedError, lambda: f("btk,kn->btn", x, held)),
        "needs state=": (ArgumentError, lambda: f("btk,kn->btn", recipe=DELAYED)),
        "must be a diptych Recipe": (ArgumentError, lambda: f("btk,kn->btn", recipe="mxfp8")),
        "has its own scales": (ShapeError, lambda: f(*batched, state=dj.init_state(DELAYED), **delayed)),
        "mapping of state names": (ArgumentError, lambda: f(*batched, state=3, **delayed)),
        "must be arrays; take": (ArgumentError, lambda: f(*batched, state=refs, **delayed)),
    }  # fmt: skip
    for message, (error, call) in bad.items():
        with pytest.raises(error, match=message):
            call()
