"""`grouped_dense`: its arithmetic against the oracle, what it computes and keeps, its states, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych.common import (
    ArgumentError,
    CustomRecipe,
    DelayedScaling,
    DTypeError,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    QuantizerRole,
    ShapeError,
    UnsupportedError,
)
from jax_frontend import tools
from jax_frontend.grouped_layers import (
    EVERY,
    GROUPS,
    PARTS,
    RNG,
    G,
    K,
    N,
    compiled,
    dtypes_for,
    given,
    operands,
    recipe_for,
    reference,
    run,
    same,
)

pytestmark = pytest.mark.sampled

MX = MXFP8BlockScaling()
DELAYED = DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize("where", GROUPS)
@pytest.mark.parametrize("name", EVERY)
def test_bits(name, where):
    """Eagerly and compiled; gradients of rows in no group count in scales, as rows of the input there do."""
    align = GROUPS[where][2]
    recipe = recipe_for(name, align)
    args = operands(where, dtypes_for(recipe, list(EVERY).index(name) + list(GROUPS).index(where)))
    want = reference(recipe, *args)
    got = compiled(recipe, *args, align=align)
    same(got, want)
    if where in ("empty", "unaligned"):
        same(run(recipe, *args, align=align), want)
    outside = np.ones(GROUPS[where][0], bool)
    outside[GROUPS[where][1][0] : GROUPS[where][1][-1]] = False
    assert not np.asarray(got["y"])[outside].any() and not np.asarray(got["dx"])[outside].any()


def test_leading_dimensions_and_no_bias():
    x, kernel, _, dy, offsets = operands("later")
    want = reference(MX, x, kernel, None, dy, offsets)
    for front in ((160,), (2, 80), (4, 5, 8)):
        got = run(MX, x.reshape(*front, K), kernel, None, dy.reshape(*front, N), offsets)
        assert got["y"].shape == (*front, N) and got["dx"].shape == (*front, K)
        same(got | {"y": got["y"].reshape(160, N), "dx": got["dx"].reshape(160, K)}, want)


def test_one_compiled_step_serves_all_offsets():
    x, kernel, bias, dy, _ = operands("even")
    step = jax.jit(lambda *args: run(MX, *args))
    for offsets in ((0, 0, 0, 0, 128), (5, 6, 77, 90, 101), (128, 128, 128, 128, 128)):
        args = (x, kernel, bias, dy, np.asarray(offsets, np.int32))
        same(step(*args), reference(MX, *args), offsets)
    assert step._cache_size() == 1


def test_without_a_recipe_it_is_a_loop_of_linears():
    for where in ("empty", "unaligned"):
        rows, at, _ = GROUPS[where]
        for dtypes in ("float32", ("bfloat16", "float32", "float32")):
            x, kernel, bias, dy, offsets = operands(where, dtypes)
            before = tools.calls("quantize")
            got = compiled(None, x, kernel, bias, dy, offsets)
            assert tools.calls("quantize") == before
            assert [got[part].dtype for part in PARTS] == [x.dtype, x.dtype, kernel.dtype, bias.dtype]
            wide = [np.asarray(v, np.float64) for v in (x, kernel.astype(x.dtype), bias, dy)]
            want = dict(
                zip(PARTS, (np.zeros((rows, N)), np.zeros((rows, K)), *map(np.zeros_like, wide[1:3])), strict=True)
            )
            for g, (a, b) in enumerate(itertools.pairwise(at)):
                want["y"][a:b] = wide[0][a:b] @ wide[1][g].T + wide[2][g]
                want["dx"][a:b] = wide[3][a:b] @ wide[1][g]
                want["dkernel"][g], want["dbias"][g] = wide[3][a:b].T @ wide[0][a:b], wide[3][a:b].sum(0)
            for key, value in want.items():
                error = np.linalg.norm(np.asarray(got[key], np.float64) - value)
                assert error <= (2e-2 if x.dtype != jnp.float32 else 1e-5) * np.linalg.norm(value), (key, where)
    assert dj.grouped_dense(x, kernel, bias, offsets, recipe=None, return_state=True)[1] == {}


def test_the_quantized_kernels_ran():
    args = operands("even")
    before = {op: tools.calls(op) for op in ("quantize", "grouped_gemm", "gemm", "grouped_bias_grad", "bias_grad")}
    jax.block_until_ready(run(MX, *args))
    ran = [tools.calls(op) - n for op, n in before.items()]
    assert ran == [2 + G, 3, 0, 1, 0]


def test_only_what_is_differentiated_is_computed():
    x, kernel, bias, dy, offsets = operands("even")

    def loss(x, kernel, bias):
        return (dj.grouped_dense(x, kernel, bias, offsets, recipe=MX) * dy).sum()

    for argnums, quantize, gemm in ((0, 2, 2), (1, 2, 2), (2, 1, 1), ((0, 1), 2, 3)):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums))(x, kernel, bias)
        found, stacks = (tools.eqns(jaxpr.jaxpr, f"diptych_{op}") for op in ("quantize", "quantize_stack"))
        assert (len(found), len(stacks)) == (quantize, 1), argnums
        assert len(tools.eqns(jaxpr.jaxpr, "diptych_grouped_gemm")) == gemm, argnums
        wants = (argnums in (0, (0, 1)), argnums in (1, (0, 1)))  # dx, dkernel
        columnwise = found[0].params["quantizer"].columnwise, stacks[0].params["quantizer"].columnwise
        assert columnwise == wants[::-1], argnums
        if quantize == 2:
            quantizer = found[1].params["quantizer"]
            assert (quantizer.rowwise, quantizer.columnwise) == wants


def test_backward_keeps_the_quantized_copies_and_offsets_alone():
    for name, each in (("mxfp8", 1), ("nvfp4", 0.5), ("fp8-delayed", 1)):
        recipe = EVERY[name]
        x, kernel, bias, _, offsets = operands("even", "bfloat16")
        options = given(recipe) | {"recipe": recipe, "align": 32}
        layer = functools.partial(dj.grouped_dense, offsets=offsets, record=False, **options)
        pull = jax.vjp(layer, x, kernel, bias)[1]
        leaves = jax.tree.leaves(pull)
        saved = sorted((v for v in leaves if v.dtype.itemsize == 1), key=lambda v: v.size)[-2:]
        assert not [v for v in leaves if v.size >= 1024 and v.dtype.itemsize > 1], name
        assert sum(v.nbytes for v in saved) == each * (x.size + kernel.size), name


@pytest.mark.parametrize("name", EVERY)
def test_keeping_the_input_changes_nothing(name):
    args = operands("later", dtypes_for(EVERY[name], 1))
    got = run(EVERY[name], *args, align=16, save_original_input=True)
    want = run(EVERY[name], *args, align=16)
    same(got, want)
    tools.same_tree(got.get("state"), want.get("state"))


# --- states ---


def test_delayed_scaling_has_one_scale_for_all_kernels():
    scales: dict[str, float] = {}
    states = dj.init_state(DELAYED, module="grouped_linear")
    assert states.keys() == {"input", "weight", "grad_output"}
    for i, where in enumerate(("even", "unaligned", "later")):
        x, kernel, bias, dy, offsets = operands(where)
        args = (x * (i + 1), kernel, bias, dy / (i + 1), offsets)
        states = dj.update_state(states, DELAYED)
        got = compiled(DELAYED, *args, state=states)
        same(got, reference(DELAYED, *args, scales), where)
        states = dj.overwrite_states(states, got["state"])
        for key, fp8_max, value in (("input", 448, args[0]), ("weight", 448, kernel), ("grad_output", 57344, args[3])):
            tools.same(states[key].amax_history[:1], jnp.abs(value).max().reshape(1), key)
            largest = np.float32(states[key].amax_history.max())
            scales[key] = float(np.float32(fp8_max) / largest)


@tools.WRAP
def test_ways_of_states(wrap):
    """Returned, as a gradient, and by reference, the amaxes are the same; not recorded, nothing changes."""
    x, kernel, bias, dy, offsets = operands("later")
    states = dj.init_state(DELAYED, module="grouped_linear")
    want = run(DELAYED, x, kernel, bias, dy, offsets)["state"]

    def layer(x, kernel, states, **options):
        return dj.grouped_dense(x, kernel, bias, offsets, recipe=DELAYED, state=states, **options)

    def loss(params, states):
        return (layer(*params, states) * dy).sum()

    tools.same_tree(wrap(dj.value_and_grad_with_state(loss))((x, kernel), states)[2], want)
    forward = wrap(lambda s: layer(x, kernel, s, return_state=True)[1])(states)
    for slot in ("input", "weight"):
        tools.same_tree(forward[slot], want[slot])
    tools.same_tree(forward["grad_output"], states["grad_output"])
    refs = dj.state_refs(states)
    wrap(jax.grad(lambda p: loss(p, refs)))((x, kernel))
    tools.same_tree(dj.read_states(refs), want)
    assert float(want["weight"].amax_history[0]) == float(jnp.abs(kernel).max())
    unrecorded = wrap(lambda s: layer(x, kernel, s, return_state=True, record=False)[1])(states)
    tools.same_tree(unrecorded, states)
    with pytest.raises(ValueError, match="would be lost"):
        jax.grad(lambda x: layer(x, kernel, states).sum())(x)


def test_amaxes_of_subnormal_kernels_are_kept():
    """XLA's own maximum would take them for zeros."""
    x, kernel, bias, dy, offsets = operands("later")
    tiny = np.abs(np.asarray(kernel)) * np.float32(2.0**-134) + np.float32(2.0**-149)
    got = compiled(DELAYED, x, tiny, bias, dy, offsets)["state"]["weight"].amax_history[0]
    assert 0 < np.float32(tiny.max()) < np.finfo(np.float32).tiny
    assert np.asarray(got).view(np.uint32) == tiny.max().view(np.uint32)


def test_calibration():
    x, kernel, bias, dy, offsets = operands("even")
    states = dj.init_state(DELAYED, module="grouped_linear")

    def step(x, kernel, bias, states, **options):
        return dj.grouped_dense(x, kernel, bias, offsets, state=states, **options)

    y, pull = jax.vjp(lambda *a: step(*a, recipe=DELAYED, calibrate=True), x, kernel, bias, states)
    plain, plain_pull = jax.vjp(lambda *a: step(*a, None, recipe=None), x, kernel, bias)
    *grads, news = pull(dy)
    tools.same_tree([y, *grads], [plain, *plain_pull(dy)])
    for slot, value in (("input", x), ("weight", kernel), ("grad_output", dy)):
        assert news[slot].amax_history[0] == jnp.abs(value).max(), slot


# --- other recipes ---


def _but(tensor: str, gemm: str) -> Any:
    """MXFP8 but for one role."""
    return lambda role: None if (role.tensor, role.gemm) == (tensor, gemm) else MXFP8Quantizer()


ROLES = [(t, g) for g, ts in QuantizerRole.GEMMS.items() for t in ts[:2]]


@pytest.mark.parametrize("role", ROLES, ids="-".join)
def test_one_operand_in_high_precision(role):
    """That product runs in high precision on what the other's copy stands for; the others do not change."""
    args = operands("later")
    got, want, plain = (compiled(r, *args) for r in (CustomRecipe(_but(*role)), MX, None))
    touched = {"fprop": "y", "dgrad": "dx", "wgrad": "dkernel"}[role[1]]
    for key in want:
        if key != touched:
            tools.same(got[key], want[key], key)
    away, quantized = (float(jnp.linalg.norm(v[touched] - plain[touched])) for v in (got, want))
    assert 1e-3 < away / float(jnp.linalg.norm(plain[touched])) < quantized / float(jnp.linalg.norm(plain[touched]))


@pytest.mark.parametrize("name", EVERY)
def test_backward_overrides(name):
    recipe, args = EVERY[name], operands("later", "bfloat16")
    forward, plain = run(recipe, *args, align=16), run(None, *args)
    for override in ("high_precision", "dequantized"):
        other = recipe.replace(backward_override=override)
        got = run(other, *args, align=1)  # nothing is rotated
        tools.same(got["y"], forward["y"])
        tools.same(got["dbias"], forward["dbias"])
        for key in ("dx", "dkernel"):
            far = np.asarray(got[key], np.float32) - np.asarray(plain[key], np.float32)
            error = np.linalg.norm(far) / np.linalg.norm(np.asarray(plain[key], np.float32))
            assert error == 0 if override == "high_precision" else 1e-3 < error < 0.2, (key, error)


def _results(role: Any) -> Any:
    return Float8CurrentScalingQuantizer() if role.tensor == "output" else MXFP8Quantizer()


def test_quantized_results():
    """Each expert's gradient of the kernel is rounded by itself."""
    args = operands("even")
    got = compiled(CustomRecipe(_results, quantize_results=True), *args)
    plain = compiled(CustomRecipe(_results), *args)
    tools.same(got["y"], dj.quantize(plain["y"], Float8CurrentScalingQuantizer()).dequantize())
    tools.same(got["dx"], dj.quantize(plain["dx"], MXFP8Quantizer()).dequantize())
    rounded = [dj.quantize(w, MXFP8Quantizer()).dequantize() for w in plain["dkernel"]]
    tools.same(got["dkernel"], jnp.stack(rounded))
    assert (np.asarray(got["dkernel"]) != np.asarray(plain["dkernel"])).any()


def test_roles_have_module_and_name():
    seen = set()

    def factory(role):
        seen.add((role.module, role.name))
        return MXFP8Quantizer()

    x, kernel, *_, offsets = operands("even")
    dj.grouped_dense(x, kernel, offsets=offsets, recipe=CustomRecipe(factory), name="up")
    assert ("grouped_linear", "up") in seen and ("linear", "up") not in seen


# --- what is refused ---


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Own(MXFP8Quantizer):
    def quantize_impl(self, x, quantize):
        return quantize(x, MXFP8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise))


def _own(tensor: str) -> CustomRecipe:
    return CustomRecipe(lambda role: Own() if role.tensor == tensor else MXFP8Quantizer())


def _noisy(tensor: str) -> CustomRecipe:
    quantizer = {True: NVFP4Quantizer(stochastic_rounding=True), False: NVFP4Quantizer()}
    return CustomRecipe(lambda role: quantizer[role.tensor == tensor], quantize_results=tensor == "grad_weight")


def test_a_quantizer_of_ones_own_for_the_input():
    args = operands("later")
    same(run(_own("input"), *args), run(MX, *args))


X, KERNEL = np.zeros((64, K), np.float32), np.zeros((G, N, K), np.float32)
BIAS, OFFSETS = np.zeros((G, N), np.float32), np.arange(5, dtype=np.int32) * 16
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "recipe": ({"recipe": "mxfp8"}, ArgumentError, "recipe must be .*got str"),
    "x": ({"x": [1.0]}, ArgumentError, "x must be a JAX or NumPy array"),
    "x's dtype": ({"x": X.astype(np.int32)}, DTypeError, "x must be float32.*int32"),
    "scalar": ({"x": X[0, 0, ...]}, ShapeError, r"do not fit: \[\] and"),
    "K": ({"x": X[:, :90]}, ShapeError, r"do not fit: \[64, 90\] and \[4, 64, 96\]"),
    "a matrix": ({"kernel": KERNEL[0]}, ShapeError, r"kernel \[G, N, K\] do not fit"),
    "kernel's dtype": ({"kernel": KERNEL.astype(np.float64)}, DTypeError, "kernel must be float32.*float64"),
    "bias": ({"bias": BIAS[0]}, ShapeError, r"bias must be \[4, 64\].*got \[64\]"),
    "bias's dtype": ({"bias": BIAS.astype(np.int8)}, DTypeError, "bias must be float32"),
    "no offsets": ({"offsets": None}, ValueError, "give the groups once, as offsets or by a row_map"),
    "a list": ({"offsets": [0, 16, 32, 48, 64]}, ArgumentError, "offsets must be .*got list"),
    "long offsets": ({"offsets": OFFSETS.astype(np.int64)}, DTypeError, r"offsets must be int32, got int64\[5\]"),
    "few offsets": ({"offsets": OFFSETS[1:]}, ShapeError, r"offsets must be \[5\], one more than kernels, got \[4\]"),
    "many offsets": ({"offsets": OFFSETS[None]}, ShapeError, r"offsets must be \[5\].*got \[1, 5\]"),
    "align": ({"align": 16.0}, ArgumentError, "align must be an int, got float"),
    "small align": ({"align": 0}, ValueError, "align must be at least 1"),
    "rng": ({"rng": np.zeros(3, np.int32)}, DTypeError, r"rng must be int32 \[4\]"),
}
# Made by their tests, so that importing this file starts no backend.
UNDER_A_RECIPE: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "no state": (lambda: {"recipe": DELAYED}, TypeError, "needs state="),
    "another state": (lambda: {"state": dj.init_state(DELAYED)}, ValueError, "another recipe's"),
    "no rng": (lambda: {"recipe": _noisy("input")}, TypeError, "needs rng="),
    "main_grad": (lambda: {"main_grad": 3}, ArgumentError, "main_grad must be a JAX array"),
    "main_grad's shape": (
        lambda: {"main_grad": jnp.zeros((N, K))},
        ShapeError,
        r"main_grad must be float32 \[4, 64, 96\]",
    ),
    "calibrating": (lambda: {"calibrate": True, "record": False}, ValueError, "calibrate runs in high precision"),
    "state alone": (
        lambda: {"recipe": None, "state": dj.init_state(DELAYED)},
        ValueError,
        "state given without a recipe",
    ),
    "own": (lambda: {"recipe": _own("weight")}, UnsupportedError, "user's own for the kernel"),
    "noisy kernel": (
        lambda: {"recipe": _noisy("weight"), "rng": RNG},
        UnsupportedError,
        "kernels rounded stochastically",
    ),
    "noisy result": (
        lambda: {"recipe": _noisy("grad_weight"), "rng": RNG},
        UnsupportedError,
        "kernels rounded stochastically",
    ),
    "no stack": (
        lambda: {"kernel": dj.quantize(KERNEL, MXFP8Quantizer())},
        ArgumentError,
        "grouped_dense: a kernel that is held quantized must be a QuantizedStack, got a QuantizedArray",
    ),
}


def refused(case: dict[str, Any], error: type[Exception], match: str, recipe: Any, wrap: Any) -> None:
    options = {"x": X, "kernel": KERNEL, "bias": BIAS, "offsets": OFFSETS, "recipe": recipe} | case
    traced = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in options.items() if k not in traced}
    before = tools.calls("quantize") + tools.calls("grouped_gemm")
    with pytest.raises(error, match=match):
        wrap(lambda arrays: dj.grouped_dense(**arrays, **rest))(traced)
    assert tools.calls("quantize") + tools.calls("grouped_gemm") == before


@pytest.mark.parametrize("recipe", [None, MX], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, recipe):
    refused(*BAD[name], recipe, lambda f: f)
    if name not in ("kernel's dtype", "long offsets"):  # jit itself rounds 64 bits to 32
        refused(*BAD[name], recipe, jax.jit)


@pytest.mark.parametrize("name", UNDER_A_RECIPE)
def test_what_a_stack_of_kernels_does_not_take(name):
    make, error, match = UNDER_A_RECIPE[name]
    refused(make(), error, match, MX, lambda f: f)


@pytest.mark.parametrize("name", EVERY)
def test_kept_copies_change_no_bit(name):
    """A stack's kept copies, like those of `dense`, are quantized once, with the amax recorded then, and not again."""
    recipe = EVERY[name]
    x, kernel, bias, dy, offsets = operands("even", "bfloat16")
    options = given(recipe) | {"align": 16}
    states = options.pop("state", None)
    made = {"module": "grouped_linear", "rng": options.get("rng")} | ({"state": states} if states else {})
    copies, kept = dj.quantize_kernel(kernel, recipe, return_state=True, **made)
    assert all(len(c) == len(kernel) for c in copies if c is not None)
    want = run(recipe, x, kernel, bias, dy, offsets, align=16)
    stale = kernel * 100  # nobody looks at it
    before = tools.calls("quantize")
    got = run(recipe, x, stale, bias, dy, offsets, align=16, copies=copies)
    assert tools.calls("quantize") - before == 2  # of x and dy
    same(got, want)
    if states:
        assert float(kept["weight"].amax_history[0]) == float(jnp.abs(kernel.astype(jnp.float32)).max())


def test_copies_of_other_kernels_are_refused():
    with pytest.raises(ValueError, match="copies given without a recipe"):
        dj.grouped_dense(X, KERNEL, BIAS, OFFSETS, recipe=None, copies=dj.quantize_kernel(KERNEL, MX))
    with pytest.raises(ShapeError, match=r"\[N, K\], or a stack \[G, N, K\]"):
        dj.quantize_kernel(KERNEL[None], MX, module="grouped_linear")
    with pytest.raises(UnsupportedError, match="kernels rounded stochastically"):
        dj.quantize_kernel(KERNEL, _noisy("weight"), module="grouped_linear", rng=RNG)


def test_delayed_amaxes_may_be_reduced():
    recipe = DELAYED.replace(amax_group="data")
    options = {"recipe": recipe, "state": dj.init_state(recipe, module="grouped_linear")}
    assert dj.grouped_dense(X, KERNEL, BIAS, OFFSETS, **options).shape == (64, N)


def test_a_rotation_needs_its_promise():
    recipe = NVFP4BlockScaling()
    x, kernel, bias, dy, offsets = operands("even", "bfloat16")
    with pytest.raises(ValueError, match=r"rotates 16 rows .* align=1\b"):
        run(recipe, x, kernel, bias, dy, offsets)
    with pytest.raises(ValueError, match="rotates 16 rows"):
        run(recipe, x, kernel, bias, dy, offsets, align=8)
    y = dj.grouped_dense(x, kernel, bias, offsets, recipe=recipe, rng=RNG)  # nothing is rotated without a gradient
    grad = jax.grad(lambda x: (dj.grouped_dense(x, kernel, bias, offsets, recipe=recipe, rng=RNG) * dy).sum())(x)
    want = run(recipe, x, kernel, bias, dy, offsets, align=32)
    tools.same_tree((y, grad), (want["y"], want["dx"]))
    tools.same_tree(run(recipe, x, kernel, bias, dy, np.asarray(offsets)), want)  # what the host knows promises itself


def test_offsets_that_lie_are_refused_when_the_cpu_meets_them():
    x, kernel, bias, _, _ = operands("even")
    step = jax.jit(lambda offsets: dj.grouped_dense(x, kernel, bias, offsets, recipe=MX))
    for offsets in ((0, 16, 8, 48, 64), (0, 16, 32, 48, 129), (-1, 16, 32, 48, 64)):
        with pytest.raises(tools.MET, match=r"grouped_gemm: offsets|outside of the tensor's"):
            jax.block_until_ready(step(np.asarray(offsets, np.int32)))
