"""Rows that are quantized as they move: torch bits == JAX bits, of the verb and of the grouped layer with a map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core.permute.test_permute import as_mask, top_k
from sweeps import others_slow

import cases
from diptych.common import RECIPES, Float8Quantizer, Recipe, linear_plan
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.state.scales import init_state, overwrite_states, state_dict
from diptych.jax.state.update import update_state
from parity.layers import PARTS, SEED, Step
from parity.panels import FIELDS, backends, cublaslt_mismatch, dj, dt, jax, same, to_jax, to_torch, torch, values
from parity.test_grouped_linear_parity import EVERY, GROUPS, MODULE, Arrays, compare, configurations
from quantizers import quantizer as quantizer_for

pytestmark = pytest.mark.sampled

ALIGN = 16
QUANTIZERS = {
    "-".join([fmt, *sorted(variant)]): quantizer_for(fmt, **dict.fromkeys(variant, True))
    for fmt in cases.FORMATS
    for variant in cases.variants_of(fmt)
} | {"delayed": Float8Quantizer()}


def needs_gpu(device: str) -> None:
    if device == "cuda" and not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")


@pytest.mark.parametrize("name", QUANTIZERS)
def test_permute_and_quantize(name, device):
    needs_gpu(device)
    quantizer, tokens = QUANTIZERS[name], 45
    label = f"{name} {device} {cases.report_header()}"
    x = cases.draw(f"verb-{name}", "normal", (tokens, 144), "bfloat16")
    probs = cases.draw(f"verb-probs-{name}", "normal", (tokens, GROUPS), "float32")
    mask = as_mask(top_k(cases.rng_for(f"verb-{name}"), tokens, GROUPS, 2), GROUPS)
    given = {"scale": np.full(1, 3.0, np.float32)} if quantizer.needs_scale else {}
    given |= {"rng": np.arange(4, dtype=np.int32)} if quantizer.needs_rng else {}
    for rows in (None, 64):
        made = []
        for panel, put in ((dt, to_torch), (dj, to_jax)):
            m = panel.moe_map(put(mask, device), num_out_tokens=rows, align_size=ALIGN)
            state = {k: put(v, device) for k, v in given.items()}
            out = panel.moe_permute_and_quantize(put(x, device), m, quantizer, probs=put(probs, device), **state)
            made.append(out)
        (mine, own), (theirs, other) = made
        same(other, own, f"probabilities {label}")
        assert tuple(mine.shape) == tuple(theirs.shape) and mine.quantizer == theirs.quantizer
        for field in FIELDS:
            a, b = getattr(mine, field), getattr(theirs, field)
            assert (a is None) == (b is None), f"{field} {label}"
            if a is not None:
                same(b, a, f"{field} {label}")


# --- the layer ---


ROWS = (None, 48, 400)  # as many as any routing needs, so few that some are dropped, some to spare


def drawn(label: str, shape: tuple[int, ...], n: int, dtypes: tuple[str, str, str]) -> list[Arrays]:
    """x, w, b, dy, each token's experts and how many rows there are, of several steps; one expert has no token."""
    tokens, k = int(np.prod(shape[:-1])), shape[-1]
    rng, steps = cases.rng_for(f"{label}-ids"), []
    for i, rows in enumerate(ROWS):
        ids = top_k(rng, tokens, GROUPS - 1, 2)
        ids[rng.random(ids.shape) < 0.125] = -1
        count = len(dj.moe_map(ids, GROUPS, map_type="index", num_out_tokens=rows, align_size=ALIGN).row_source)
        shapes = (shape, (GROUPS, n, k), (GROUPS, n), (count, n))
        arrays: Arrays = [
            (cases.draw(f"{label}-{i}-{j}", "normal", s, d) * 2**i).astype(cases.INPUT_DTYPES[d])
            for j, (s, d) in enumerate(zip(shapes, (*dtypes, dtypes[0]), strict=True))
        ]
        arrays[1] = (arrays[1] / GROUPS).astype(arrays[1].dtype)  # float16 overflows nowhere
        steps.append([*arrays, ids, rows])
    return steps


def draws(recipe: Recipe | None) -> bool:
    return recipe is not None and linear_plan(recipe, MODULE).needs_rng


def of_torch(recipe: Recipe | None, steps: list[Arrays], device: str = "cpu", **options: Any) -> list[Step]:
    groups, n, k = steps[0][1].shape
    layer = dt.GroupedLinear(groups, k, n, device=device, **options)
    layer.seed_rng(SEED)
    if not draws(recipe):
        del layer.rng_state
    out = []
    for *arrays, rows in steps:
        x, w, b, dy, ids = (to_torch(a, device) for a in arrays)
        layer.weight, layer.bias = torch.nn.Parameter(w), torch.nn.Parameter(b)
        m = dt.moe_map(ids, GROUPS, map_type="index", num_out_tokens=rows, align_size=ALIGN)
        x.requires_grad_()
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y = values(layer(x, row_map=m, align=ALIGN))
        y.backward(dy)
        parts = [y, x.grad, layer.weight.grad, layer.bias.grad]
        states = {k: v.clone() for k, v in layer.state_dict().items() if k not in ("weight", "bias")}
        out.append(Step(dict(zip(PARTS, parts, strict=True)), states))
    return out


def of_jax(recipe: Recipe | None, steps: list[Arrays], device: str = "cpu", **options: Any) -> list[Step]:
    def step(states: Any, rng: Any, x: Any, w: Any, b: Any, dy: Any, ids: Any, rows: Any) -> Any:
        states = update_state(states, recipe)
        m = dj.moe_map(ids, GROUPS, map_type="index", num_out_tokens=rows, align_size=ALIGN)

        def layer(x: Any, w: Any, b: Any, states: Any) -> Any:
            given = {"state": states, "rng": rng if draws(recipe) else None} if recipe is not None else {}
            return dj.grouped_dense(x, w, b, recipe=recipe, row_map=m, align=ALIGN, **given, **options)

        y, back = jax.vjp(layer, x, w, b, states)
        *grads, news = back(dy)
        return [y, *grads], overwrite_states(states, news), rng_at(rng, OFFSETS)

    run = jax.jit(step, static_argnames="rows")
    states, rng = {} if recipe is None else init_state(recipe, module=MODULE), dj.rng_state(SEED)
    out = []
    for *arrays, rows in steps:
        parts, states, rng = run(states, rng, *(to_jax(a, device) for a in arrays), rows=rows)
        kept = state_dict(states, rng=rng if draws(recipe) else None)
        out.append(Step(dict(zip(PARTS, parts, strict=True)), kept))
    return out


@pytest.mark.parametrize("name", others_slow(EVERY, (*RECIPES, "square")))
def test_the_layer_has_the_same_bits(name):
    recipe = EVERY[name]
    for turn, (shape, n, dtypes) in enumerate(configurations(recipe, list(EVERY).index(name) + 1)[:3]):
        label = f"permuted {name} {dtypes} {shape} {n} {cases.report_header()}"
        steps, keep = drawn(label, shape, n, dtypes), turn % 2 == 1
        mine = of_torch(recipe, steps, save_original_input=keep)
        compare(label, recipe, mine, of_jax(recipe, steps, save_original_input=keep))


def test_without_a_recipe():
    shape, n, dtypes = (2, 40, 96), 20, ("bfloat16", "float32", "float32")
    label = f"permuted plain {cases.report_header()}"
    steps = drawn(label, shape, n, dtypes)
    compare(label, None, of_torch(None, steps), of_jax(None, steps))


def test_no_tokens():
    steps = drawn("no tokens", (0, 32), 3, ("float32",) * 3)[2:]
    compare("no tokens", EVERY["mxfp8"], of_torch(EVERY["mxfp8"], steps), of_jax(EVERY["mxfp8"], steps))


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
def test_the_layer_has_the_same_bits_on_cuda(name, cuda):
    needs_gpu("cuda")
    if reason := cublaslt_mismatch():
        pytest.skip(reason)
    recipe = EVERY[name]
    for shape, n, dtypes in (*configurations(recipe, 2)[:3], ((4, 128, 256), 512, ("bfloat16",) * 3)):
        for keep in (False, True):
            label = f"cuda permuted {name} {dtypes} {shape} {n} {keep} {cases.report_header()}"
            steps = drawn(label, shape, n, dtypes)
            mine = of_torch(recipe, steps, "cuda", save_original_input=keep)
            compare(label, recipe, mine, of_jax(recipe, steps, "cuda", save_original_input=keep))
