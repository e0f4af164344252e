"""dt.GroupedLinear and dj.grouped_dense over several steps: results, gradients and states with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sweeps import others_slow

import cases
from diptych.common import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    Recipe,
    linear_plan,
)
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.state.scales import init_state, overwrite_states, state_dict
from diptych.jax.state.update import update_state
from parity.layers import MIXTURES, PARTS, SEED, Step, packed, rotates
from parity.panels import backends, cublaslt_mismatch, dj, dt, jax, same, to_jax, to_torch, torch, values

pytestmark = pytest.mark.sampled

MODULE, GROUPS, STEPS = "grouped_linear", 5, 3
DTYPES = tuple((d, d, d) for d in cases.INPUT_DTYPES) + (("bfloat16", "float32", "float32"),)
# x's shape and N; packed formats take whole blocks
SHAPES = (((48, 32), 16), ((75, 33), 5), ((2, 40, 96), 20), ((0, 8), 3), ((130, 65), 1))
PACKED_SHAPES = (((48, 32), 16), ((2, 80, 96), 32), ((288, 64), 48))


def _rotated(role: QuantizerRole) -> Quantizer:
    """A rotation where rows are summed, two formats for the weight, and draws wherever a draw may be."""
    if role.gemm == "wgrad":
        return NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    if role.tensor == "weight":
        return MXFP8Quantizer() if role.gemm == "fprop" else NVFP4Quantizer(with_2d_quantization=True)
    return MXFP8Quantizer() if role.gemm == "fprop" else NVFP4Quantizer(stochastic_rounding=True)


def _results(role: QuantizerRole) -> Quantizer:
    if role.tensor in role.RESULTS:
        return {"output": MXFP8Quantizer(), "grad_input": NVFP4Quantizer(stochastic_rounding=True),
                "grad_weight": Float8CurrentScalingQuantizer()}[role.tensor]  # fmt: skip
    return Float8BlockQuantizer(fp8_dtype="float8_e5m2" if role.tensor == "grad_output" else "float8_e4m3fn")


EVERY: dict[str, Recipe] = {
    **RECIPES,
    "square": RECIPES["fp8-block"].replace(wgrad_input_square=True),
    "delayed, short, newest": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1),
    "nvfp4 by row": NVFP4BlockScaling(row_scaled_activation=True, rht_random_signs=False),
    "nvfp4 plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "by_tensor": MIXTURES["by_tensor"],
    "partly": MIXTURES["partly"],
    "rotated": CustomRecipe(_rotated),
    "results": CustomRecipe(_results, quantize_results=True),
    "high precision backward": RECIPES["fp8-current"].replace(backward_override="high_precision"),
    "dequantized backward": RECIPES["mxfp8"].replace(backward_override="dequantized"),
}


def configurations(recipe: Recipe, turn: int) -> list[tuple[tuple[int, ...], int, tuple[str, str, str]]]:
    """(x's shape, N, dtypes) that a recipe takes."""
    shapes = PACKED_SHAPES if packed(recipe) else SHAPES
    dtypes = [d for d in DTYPES if d[0] == "bfloat16"] if rotates(recipe) else DTYPES
    return [(shape, n, dtypes[(turn + i) % len(dtypes)]) for i, (shape, n) in enumerate(shapes)]


def offsets_for(label: str, rows: int, unit: int) -> list[np.ndarray]:
    """Returns the offsets of each step: at random, with the last group alone, and with all groups empty."""
    rng = cases.rng_for(f"{label}-offsets")
    ragged = np.sort(rng.integers(0, rows // unit + 1, GROUPS + 1)) * unit
    ragged[2] = ragged[1]  # one that is empty
    last = [rows // unit // 2 * unit] * GROUPS + [rows // unit * unit]
    return [np.asarray(o, np.int32) for o in (ragged, last, [ragged[1]] * (GROUPS + 1))]


Arrays = list[Any]  # x, w, b or None, dy and offsets


def drawn(label: str, shape: tuple[int, ...], n: int, dtypes: tuple[str, str, str], unit: int, bias: bool = True):
    """The arrays of several steps; values grow, so that delayed scales follow, and groups differ."""
    rows, k = int(np.prod(shape[:-1])), shape[-1]
    steps: list[Arrays] = []
    for i, offsets in enumerate(offsets_for(label, rows, unit)):
        shapes = (shape, (GROUPS, n, k), (GROUPS, n), (*shape[:-1], n))
        arrays: Arrays = [
            (cases.draw(f"{label}-{i}-{j}", "normal", s, d) * 2**i).astype(cases.INPUT_DTYPES[d])
            for j, (s, d) in enumerate(zip(shapes, (*dtypes, dtypes[0]), strict=True))
        ]
        grow = np.arange(1, GROUPS + 1)[:, None, None] / GROUPS  # float16 overflows nowhere
        arrays[1] = (arrays[1] * grow).astype(arrays[1].dtype)
        arrays[2] = arrays[2] if bias else None
        steps.append([*arrays, offsets])
    return steps


# --- the panels ---


def of_torch(recipe: Recipe | None, steps: list[Arrays], align: int, device: str = "cpu", **options: Any) -> list[Step]:
    groups, n, k = steps[0][1].shape
    layer = dt.GroupedLinear(groups, k, n, bias=steps[0][2] is not None, device=device, **options)
    layer.seed_rng(SEED)
    if recipe is None or not linear_plan(recipe, MODULE).needs_rng:
        del layer.rng_state
    out = []
    for arrays in steps:
        x, w, b, dy, offsets = (to_torch(a, device) for a in arrays)
        layer.weight = torch.nn.Parameter(w)
        if b is not None:
            layer.bias = torch.nn.Parameter(b)
        x.requires_grad_()
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y = values(layer(x, offsets=offsets, align=align))
        y.backward(dy)
        parts = [y, x.grad, *[p.grad for p in (layer.weight, layer.bias) if p is not None]]
        states = {k: v.clone() for k, v in layer.state_dict().items() if k not in ("weight", "bias")}
        out.append(Step(dict(zip(PARTS, parts, strict=False)), states))
    return out


def of_jax(recipe: Recipe | None, steps: list[Arrays], align: int, device: str = "cpu", **options: Any) -> list[Step]:
    needs_rng = recipe is not None and linear_plan(recipe, MODULE).needs_rng

    def step(states, rng, x, w, b, dy, offsets):
        states = update_state(states, recipe)

        def layer(x, w, b, states):
            given = {"state": states, "rng": rng if needs_rng else None} if recipe is not None else {}
            return dj.grouped_dense(x, w, b, offsets, recipe=recipe, align=align, **given, **options)

        y, back = jax.vjp(layer, x, w, b, states)
        *grads, news = back(dy)
        return [y, *grads], overwrite_states(states, news), rng_at(rng, OFFSETS)

    run = jax.jit(step)
    states, rng = {} if recipe is None else init_state(recipe, module=MODULE), dj.rng_state(SEED)
    out = []
    for arrays in steps:
        parts, states, rng = run(states, rng, *(to_jax(a, device) for a in arrays))
        kept = state_dict(states, rng=rng if needs_rng else None)
        out.append(Step({p: v for p, v in zip(PARTS, parts, strict=True) if v is not None}, kept))
    return out


def compare(label: str, recipe: Recipe | None, mine: list[Step], theirs: list[Step]) -> None:
    """Bits but for products by the frameworks themselves, which may sum in another order."""
    plan = None if recipe is None else linear_plan(recipe, MODULE)
    near = {p for p, exact in zip(PARTS, (False,) * 3 if plan is None else plan.quantized, strict=False) if not exact}
    for i, (t, j) in enumerate(zip(mine, theirs, strict=True)):
        assert t.parts.keys() == j.parts.keys() and t.states.keys() == j.states.keys(), label
        for name, want in (t.parts | t.states).items():
            got = (j.parts | j.states)[name]
            if name not in near:
                same(got, want, f"step {i} {name}: {label}")
                continue
            a, b = (np.asarray(v.detach().float().cpu() if isinstance(v, torch.Tensor) else v, np.float64)
                    for v in (want, got))  # fmt: skip
            assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(a), (name, label)


def align_of(recipe: Recipe | None) -> int:
    return 16 if recipe is not None and rotates(recipe) else 1


@pytest.mark.parametrize(
    "name", others_slow(EVERY, (*RECIPES, "square", "nvfp4 by row", "by_tensor", "rotated", "results"))
)
def test_same_bits(name):
    recipe = EVERY[name]
    align = align_of(recipe)
    for turn, (shape, n, dtypes) in enumerate(configurations(recipe, list(EVERY).index(name))):
        label = f"grouped {name} {dtypes} {shape} {n} {cases.report_header()}"
        steps = drawn(label, shape, n, dtypes, align, bias=turn != 1)
        if 0 in shape:
            steps = steps[:1]
        compare(label, recipe, of_torch(recipe, steps, align), of_jax(recipe, steps, align))


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4", "fp8-block"))
def test_keeping_the_input(name):
    recipe = EVERY[name]
    shape, n, dtypes = configurations(recipe, 2)[1]
    align = 32 if name == "nvfp4" else 1
    label = f"grouped {name} {dtypes} original input {cases.report_header()}"
    steps = drawn(label, shape, n, dtypes, align)
    mine = of_torch(recipe, steps, align, save_original_input=True)
    compare(label, recipe, mine, of_jax(recipe, steps, align, save_original_input=True))
    compare(label, recipe, mine, of_jax(recipe, steps, align))


@pytest.mark.parametrize("name", RECIPES)
def test_held_weights(name):
    """Weights that exist in no other precision, and their gradients in an accumulator."""
    recipe, align = EVERY[name], align_of(EVERY[name])
    shape, n, dtypes = configurations(recipe, list(EVERY).index(name))[1]
    label = f"grouped {name} {dtypes} held {cases.report_header()}"
    x, w, b, dy, offsets = drawn(label, shape, n, dtypes, align)[0]
    with dt.quantized_model_init(recipe=recipe):
        layer = dt.GroupedLinear(GROUPS, shape[-1], n, fuse_wgrad_accumulation=True)
    layer.seed_rng(SEED)
    layer.bias = torch.nn.Parameter(to_torch(b))
    with torch.no_grad():
        layer.weight.copy_(to_torch(w))
    layer.weight.main_grad = torch.ones(layer.weight.shape)
    tokens = to_torch(x).requires_grad_()
    with dt.autocast(recipe=recipe):
        y = layer(tokens, offsets=to_torch(offsets), align=align)
    y.backward(to_torch(dy))
    q = dj.quantize_params({"experts": to_jax(w)}, recipe, lambda *_: True, module=MODULE)["experts"]
    for part in layer.weight.__tensor_flatten__()[0]:
        same(getattr(q, part), getattr(layer.weight, part), f"{part}: {label}")
    rng = dj.rng_state(SEED) if linear_plan(recipe, MODULE).needs_rng else None

    def held(x: Any, acc: Any, b: Any, state: Any) -> Any:
        return dj.grouped_dense(
            x, q, b, to_jax(offsets), recipe=recipe, align=align, main_grad=acc, state=state, rng=rng
        )

    result, back = jax.vjp(held, to_jax(x), jax.numpy.zeros(w.shape), to_jax(b), init_state(recipe, module=MODULE))
    dx, dw, db, _ = back(to_jax(dy))
    for got, want, part in (
        (result, y, "y"),
        (dx, tokens.grad, "dx"),
        (dw + 1, layer.weight.main_grad, "dw"),
        (db, layer.bias.grad, "db"),
    ):
        same(got, want, f"{part}: {label}")


@pytest.mark.slow
def test_without_a_recipe():
    """The frameworks' own products, and the same sums."""
    for shape, n, dtypes in configurations(RECIPES["mxfp8"], 0):
        label = f"grouped plain {dtypes} {shape} {n} {cases.report_header()}"
        steps = drawn(label, shape, n, dtypes, 1)
        if 0 not in shape:
            compare(label, None, of_torch(None, steps, 1), of_jax(None, steps, 1))


@pytest.mark.parametrize("name", RECIPES)
def test_adversarial_values(name):
    """Outliers, zeros and what is not finite, in groups and between them."""
    recipe = RECIPES[name]
    align, shape, n = (16, (64, 64), 48) if packed(recipe) else (1, (45, 65), 20)
    dtypes = ("bfloat16", "float32", "float32") if rotates(recipe) else ("float32",) * 3
    for kind in ("outlier", "zero_blocks", "inf_nan_mix", "subnormal_input"):
        label = f"grouped {name} {kind} {cases.report_header()}"
        steps = drawn(label, shape, n, dtypes, align)[:2]
        for i, arrays in enumerate(steps):
            arrays[:4] = [cases.draw(f"{label}-{i}-{j}", kind, a.shape, a.dtype.name) for j, a in enumerate(arrays[:4])]
        for i, (t, j) in enumerate(zip(of_torch(recipe, steps, align), of_jax(recipe, steps, align), strict=True)):
            for part, want in (t.parts | t.states).items():
                same((j.parts | j.states)[part], want, f"step {i} {part}: {label}", nan_free=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
def test_same_bits_on_cuda(name, cuda):
    """One GPU: torch and JAX agree in bits, whichever kernels the registry chose, with a promise and without."""
    if not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")
    if reason := cublaslt_mismatch():
        pytest.skip(reason)
    recipe = EVERY[name]
    for shape, n, dtypes in (*configurations(recipe, 3), ((4, 128, 256), 512, ("bfloat16",) * 3)):
        for align in {align_of(recipe), 32, 128}:
            if 0 in shape:
                continue
            label = f"cuda grouped {name} {dtypes} {shape} {n} {align} {cases.report_header()}"
            steps = drawn(label, shape, n, dtypes, align)
            compare(label, recipe, of_torch(recipe, steps, align, "cuda"), of_jax(recipe, steps, align, "cuda"))
