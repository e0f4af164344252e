"""Every recipe, every module, both panels, against float64: within what the recipe's formats allow (`oracle.bounds`).

Values are of two kinds: "normal", and "aligned", whose products have terms of one sign, so that the bound is a fraction
of each result and no error of a whole factor passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cases
import oracle
from diptych.common import RECIPES, NVFP4BlockScaling, NVFP4Quantizer, QuantizerRole, Recipe
from diptych.common.ops.activation import ACTIVATIONS
from oracle import bounds
from parity import layers
from parity import test_modules_parity as modules
from parity.panels import dt, to_torch, torch
from quantizers import oracle_options

M, K, N = 32, 144, 80
PANELS = ("torch", "jax")
BOTH = pytest.mark.parametrize("panel", PANELS)
LINEAR = ("y", "x", "weight", "bias")
RHT, PLAIN = NVFP4BlockScaling(), NVFP4BlockScaling(disable_rht=True)


def operands(recipe: Recipe, kind: str) -> bounds.Operands:
    """How each operand of each product is quantized, from the recipe; delayed scales are the first step's, 1."""
    out = {}
    for gemm, (a, b, _) in QuantizerRole.GEMMS.items():
        for tensor in (a, b):
            q = recipe.quantizer(QuantizerRole(kind, tensor, gemm))
            assert q is not None
            options = {k: v for k, v in oracle_options(q).items() if k not in ("eps", "rowwise", "columnwise")}
            scale = 1.0 if q.needs_scale else None
            out[tensor, gemm] = bounds.Operand(
                q.format.name, q.format.tolerance, stochastic=q.needs_rng, scale=scale, **options
            )
    return out


class Case(NamedTuple):
    """A module in both panels and in float64. `run` and `reference` take (recipe, arrays); `sizes`: of the arrays."""

    kind: str
    names: tuple[str, ...]
    sizes: tuple[str, ...]
    run: Callable[[str, Recipe, list[np.ndarray]], dict[str, Any]]
    reference: Callable[[Recipe, list[np.ndarray]], dict[str, bounds.Near]]


def _linear(panel: str, recipe: Recipe, arrays: list[np.ndarray]) -> dict[str, Any]:
    (step,) = (layers.of_torch if panel == "torch" else layers.of_jax)(recipe, [arrays])
    return dict(zip(LINEAR, step.parts.values(), strict=True))


def _fused(module: modules.Module, reference: Callable[..., Any], *more: Any) -> Case:
    def run(panel: str, recipe: Recipe, arrays: list[np.ndarray]) -> dict[str, Any]:
        ((results, _),) = (modules.of_torch if panel == "torch" else modules.of_jax)(module, recipe, [arrays])
        return results

    gated = bool(more) and more[1]
    sizes = {"weight": "nk", "bias": "n", "fc1_weight": "gk" if gated else "nk", "fc1_bias": "g" if gated else "n",
             "fc2_weight": "kn", "fc2_bias": "k"}  # fmt: skip
    wanted = ("mk", *(sizes.get(name, "k") for name in module.names()), "mk" if more else "mn")
    return Case(module.kind, module.names(), wanted, run, lambda r, a: reference(*a, operands(r, module.kind), *more))


def _mlp(activation: str) -> Case:
    module = dataclasses.replace(modules.MLP, options={"activation": activation})
    return _fused(module, bounds.layernorm_mlp, *ACTIVATIONS[activation])


CASES = {
    "linear": Case(
        "linear", LINEAR[2:], ("mk", "nk", "n", "mn"), _linear, lambda r, a: bounds.linear(*a, operands(r, "linear"))
    ),
    "layernorm_linear": _fused(modules.LINEAR, bounds.layernorm_linear),
    "layernorm_mlp gelu": _mlp("gelu"),
    "layernorm_mlp swiglu": _mlp("swiglu"),
}


def arrays_for(case: Case, recipe: Recipe, values: str) -> list[np.ndarray]:
    """x, the parameters and dy. Aligned: every x and norm has the signs of its features, every weight those of its
    input's and output's, so that products add up; hidden features are positive, where an activation is steep."""
    extents, rng = {"m": M, "k": K, "n": N, "g": 2 * N}, cases.rng_for(f"bounds-{case.kind}-{values}")
    dtype = cases.INPUT_DTYPES["bfloat16" if layers.rotates(recipe) else "float32"]
    signs = {axis: rng.choice((-1.0, 1.0), size) for axis, size in extents.items()}
    if case.kind != "linear":
        signs["m"][:] = 1  # a norm has no sign of its own
    if case.kind == "layernorm_mlp":
        signs["n"][:] = signs["g"][:] = 1
    out = []
    for name, axes in zip(("x", *case.names, "dy"), case.sizes, strict=True):
        shape = [extents[a] for a in axes]
        x = rng.standard_normal(shape)
        if values == "aligned" and (name != "x" or case.kind == "linear"):
            x = rng.uniform(0.75, 1.25, shape)
            for i, axis in enumerate(axes if name != "layer_norm_weight" else ""):
                x *= signs[axis].reshape([-1 if j == i else 1 for j in range(len(axes))])
            x *= 1 / 8 if name == "layer_norm_weight" else 1
        x *= 2 / shape[1] if name in ("fc1_weight", "fc2_weight") and values == "aligned" else 1
        x *= shape[1] ** -0.5 if name in ("fc1_weight", "fc2_weight") and values == "normal" else 1
        out.append(x.astype(np.float32).astype(dtype))
    return out


def float64(x: Any) -> np.ndarray:
    return np.asarray(x.detach().float() if isinstance(x, torch.Tensor) else x).astype(np.float64)


def excess(got: dict[str, Any], want: dict[str, bounds.Near]) -> dict[str, float]:
    """The largest error of each result in units of what is allowed there."""
    assert got.keys() == want.keys()
    return {n: float((np.abs(float64(got[n]) - w.value) / w.error).max()) for n, w in want.items()}


@pytest.mark.parametrize("values", ("normal", "aligned"))
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@BOTH
def test_within_the_bounds(panel, case, name, values):
    recipe = RECIPES[name]
    arrays = arrays_for(case, recipe, values)
    want, got = case.reference(recipe, arrays), case.run(panel, recipe, arrays)
    found = excess(got, want)
    assert max(found.values()) <= 1, (found, cases.report_header())
    for key, w in want.items():  # something was quantized, unless it is a plain sum of dy
        error = np.linalg.norm(float64(got[key]) - w.value)
        assert key in ("bias", "fc2_bias") or error > 2.0**-12 * np.linalg.norm(w.value), key


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_wrong_scale_is_outside_of_the_bounds(case, name):
    """A factor of 2 on the weight shows in y, one on dy in the weight's gradient. Behind two layers of NVFP4 the bound
    is wider than the result: a factor of 8."""
    recipe = RECIPES[name]
    arrays = arrays_for(case, recipe, "aligned")
    factor = 8 if case.kind == "layernorm_mlp" and layers.packed(recipe) else 2
    at = next(i for i, n in enumerate(case.names, 1) if n in ("weight", "fc2_weight"))
    wrong = [a * a.dtype.type(factor) if i in (at, len(arrays) - 1) else a for i, a in enumerate(arrays)]
    found = excess(case.run("torch", recipe, wrong), case.reference(recipe, arrays))
    assert min(found["y"], found[case.names[at - 1]]) > 1, (found, cases.report_header())


# --- the Hadamard transform of wgrad's operands ---


@pytest.mark.parametrize("values", ("normal", "aligned"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@BOTH
def test_a_rotation_changes_wgrad_by_no_more_than_the_formats_allow(panel, case, values):
    """With H on both operands (H dy)^T (H x) = dy^T x, and both recipes compute that product: one from copies of H dy
    and H x, one from copies of dy and x. So |dW_rht - dW| <= |dW_rht - dy^T x| + |dW - dy^T x|, each at most

        |e_dy|^T |x| + |dy|^T |e_x| + |e_dy|^T |e_x|,

    over the operands as they were quantized, with |e| <= u max(|value|, block scale) from the format's row (stochastic:
    2u) and bfloat16's half ulp where H rounds. Nothing else may differ: H is in no copy that y or dx is made from.
    """
    arrays = arrays_for(case, RHT, values)
    got, plain = (case.run(panel, recipe, arrays) for recipe in (RHT, PLAIN))
    want, without = (case.reference(recipe, arrays) for recipe in (RHT, PLAIN))
    for key in got:
        difference = np.abs(float64(got[key]) - float64(plain[key]))
        if key in ("weight", "fc1_weight", "fc2_weight"):
            assert (difference <= want[key].error + without[key].error).all(), (key, cases.report_header())
            assert difference.any(), key
        else:
            assert not difference.any(), key


def test_a_rotation_of_one_operand_is_outside_of_the_bounds():
    recipe = RHT.replace(disable_stochastic_rounding=True)
    x, *_, dy = arrays_for(CASES["linear"], recipe, "aligned")
    want = bounds.wgrad(bounds.Near.exact(dy), bounds.Near.exact(x), operands(recipe, "linear"))
    for both in (True, False):
        qdy, qx = (dt.quantize(to_torch(v), NVFP4Quantizer(with_rht=r)) for v, r in ((dy, True), (x, both)))
        got = float64(dt.gemm(qdy, qx, trans_a=True, trans_b=False, out_dtype=torch.float32))
        assert (np.abs(got - want.value) <= want.error).all() == both


@BOTH
def test_a_rotation_cancels_where_quantizing_costs_nothing(panel):
    """H x and H dy lie on the grid, a 6 in each block: all that is left of dW is float32 rounding."""
    rng, h = cases.rng_for("cancels"), bounds.rotation(signs=True)

    def on_the_grid(extent: int) -> np.ndarray:
        q = rng.choice(cases.GRIDS["e2m1"], (M // 16, 16, extent)) * rng.choice((-1.0, 1.0), (M // 16, 16, extent))
        np.put_along_axis(q, rng.integers(0, 16, (M // 16, 1, extent)), 6.0, axis=1)
        x = np.einsum("ji,bjk->bik", h, q).reshape(M, extent)
        assert (x == x.astype(oracle.BF16).astype(np.float64)).all()  # eighths up to 24
        return x.astype(oracle.BF16)

    x, dy = on_the_grid(K), on_the_grid(N)
    w, b = np.ones((N, K), np.float32), np.zeros(N, np.float32)
    exact = dy.astype(np.float64).T @ x.astype(np.float64)
    got = float64(_linear(panel, RHT, [x, w, b, dy])["weight"])
    assert (np.abs(got - exact) <= 8 * bounds.U * np.abs(exact)).all(), cases.report_header()
    plain = float64(_linear(panel, PLAIN, [x, w, b, dy])["weight"])
    assert np.linalg.norm(plain - exact) > 0.01 * np.linalg.norm(exact)  # off the grid without H
