"""GroupedLinear across microbatches and ranks: weights quantized once, and amaxes of each that a group reduces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sweeps import in_turn

import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
    RecipeSwitchWarning,
)
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX
from diptych.core import reset_calls
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.state import scales
from torch_frontend.grouped import K, N, layer, offsets_of, run
from torch_frontend.layer_cases import NAMED, SEED, dtype_of, same_step, slow
from torch_frontend.modules.test_grouped_linear import _noisy, _own
from torch_frontend.modules.test_grouped_linear_compiled import compiled, graphs
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

pytestmark = pytest.mark.sampled

G, R = 4, 96
MX = MXFP8BlockScaling()
CUTS = ((0, 32, 32, 64, 96), (16, 48, 64, 64, 80), (0, 0, 96, 96, 96))  # of each microbatch

# --- microbatches ----------------------------------------------------------------------------------------------------


def microbatches(model: Any, fn: Any, recipe: Any, firsts: tuple[Any, ...], permuted: bool = False) -> dict[str, Any]:
    """Two steps of three microbatches, with other groups each and the weight changed between steps."""
    model.reset_scale_states()
    model.seed_rng(SEED)
    dtype, made = dtype_of(recipe), {}
    for step in range(2):
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            model.weight.copy_(normal("kept-w", (G, N, K)) * (step + 1) * torch.arange(1, G + 1).view(G, 1, 1))
            if hasattr(model.weight, "main_grad"):
                model.weight.main_grad.zero_()
        with dt.autocast(recipe=recipe):
            for i, first in enumerate(firsts):
                at = f"{step} {i}"
                if permuted:
                    ids = (torch.arange(R // 2)[:, None] * (i + 1) + torch.arange(2)) % G
                    groups: Any = {"row_map": dt.moe_map(ids, G, map_type="index", align_size=16)}
                else:
                    groups = {"offsets": offsets_of(CUTS[i])}
                rows = R // 2 if permuted else R
                x = (normal(f"x{at}", (rows, K), dtype) * (i + 1)).requires_grad_()
                y = fn(x, is_first_microbatch=first, align=16, **groups)
                y.backward(normal(f"dy{at}", tuple(y.shape), dtype))
                made |= {f"{at} y": y.detach(), f"{at} dx": x.grad}
        given = model.weight.main_grad if model.weight.grad is None else model.weight.grad
        made |= {f"{step} weight": given.clone(), f"{step} bias": model.bias.grad}
    return made | {k: t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k}


def fused_layer() -> Any:
    model: Any = layer(fuse_wgrad_accumulation=True)
    model.weight.main_grad = torch.zeros(model.weight.shape)
    return model


FIRST, NONE = (True, False, False), (None, None, None)


@pytest.mark.parametrize("permuted", (False, True), ids=("offsets", "row_map"))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_kept_weights(name, permuted):
    """Quantized once in a step, they give the bits of quantizing them in each microbatch."""
    plain, model, recipe = layer(), layer(), NAMED[name]
    reset_calls()
    want = microbatches(plain, plain, recipe, NONE, permuted)
    each = calls("quantize")
    reset_calls()
    same_step(microbatches(model, model, recipe, FIRST, permuted), want)
    assert calls("quantize") == each - 2 * 2 * G


@pytest.mark.parametrize(("name", "permuted"), in_turn([(name,) for name in RECIPE_NAMES], 2))
def test_kept_weights_in_graphs(name, permuted):
    plain, model, recipe = fused_layer(), fused_layer(), NAMED[name]
    want = microbatches(plain, plain, recipe, NONE, permuted)
    fn = compiled(model)
    same_step(microbatches(model, fn, recipe, FIRST, permuted), want)
    assert graphs() == 2
    kept = [t for copy in model._caches[""].copies for t in (copy or ())[:3] if t is not None]
    assert kept and all(t.shape[0] == G for t in kept)


@pytest.mark.parametrize("name", ("fp8-delayed", *[slow(n) for n in ("nvfp4", "mxfp8")]))
def test_kept_weights_through_inductor(name):
    plain, model = layer(), layer()
    want = microbatches(plain, plain, NAMED[name], NONE)
    same_step(microbatches(model, compiled(model, backend="inductor"), NAMED[name], FIRST), want)


@pytest.mark.parametrize("override", ("high_precision", "dequantized"))
def test_kept_weights_and_another_backward(override):
    recipe, model = MX.replace(backward_override=override), layer()
    want = microbatches(model, model, recipe, NONE)
    for fn in (model, compiled(model)):
        same_step(microbatches(model, fn, recipe, FIRST), want)


@pytest.mark.parametrize("name", ("fp8-delayed", "fp8-block"))
def test_kept_weights_under_a_checkpoint(name):
    plain, model = layer(), layer()
    want = microbatches(plain, plain, NAMED[name], NONE)

    def checkpointed(x: Any, **kw: Any) -> Any:
        return dt.checkpoint(model, x, use_reentrant=False, **kw)

    for fn in (checkpointed, compiled(checkpointed)):
        same_step(microbatches(model, fn, NAMED[name], FIRST), want)


@pytest.mark.parametrize("graph", (False, True), ids=("eager", "compiled"))
def test_what_is_kept_is_what_is_used(graph):
    """Later microbatches see no change of the weight, None does, and the next first one replaces it."""
    model, x, groups = layer(), normal("x", (64, K)), {"m_splits": torch.tensor([16] * G)}
    fn = compiled(model) if graph else model
    with dt.autocast(recipe=MX), torch.no_grad():
        before = fn(x, is_first_microbatch=True, **groups)
        model.weight.mul_(3)
        same(fn(x, is_first_microbatch=False, **groups), before)
        after = fn(x, **groups)
        assert not torch.equal(before, after)
        same(fn(x, is_first_microbatch=False, **groups), before)
        same(fn(x, is_first_microbatch=True, **groups), after)
        same(fn(x, is_first_microbatch=False, **groups), after)


def test_microbatches_in_bad_order():
    model, x, splits = layer(), normal("x", (64, K)), [16] * G
    with dt.autocast(recipe=MX):
        with pytest.raises(ValueError, match="the first microbatch passes True"):
            model(x, splits, False)
        model(x, splits, True)
    scales._warned.clear()
    with dt.autocast(recipe=Float8BlockScaling()):
        with pytest.warns(RecipeSwitchWarning, match="quantized anew"):
            got = model(x, splits, is_first_microbatch=False)
        same(got, model(x, splits))
    model.load_state_dict(model.state_dict())
    with dt.autocast(recipe=MX):
        with pytest.raises(ValueError, match="the first microbatch passes True"):
            model(x, splits, False)
        with pytest.raises(Exception, match="the first microbatch passes True"):
            compiled(model)(x, splits, False)
    for factory, match in ((_own, "user's own"), (_noisy, "stochastically")):
        with dt.autocast(recipe=CustomRecipe(factory)), pytest.raises(NotImplementedError, match=match):
            model(x, splits, True, align=16)
    with dt.autocast(recipe=CustomRecipe(_noisy)), pytest.raises(Exception, match="stochastically"):
        compiled(model)(x, splits, True, align=16)
    same(model(x, splits, True), model(x, splits))  # outside of regions there is nothing to keep


# --- amaxes over a group ---------------------------------------------------------------------------------------------

FLAGS = (0, ROW_AMAX, RHT, RHT | RHT_SIGNS, ROW_AMAX | RHT)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("shape", ((3, 32, 48), (1, 16, 16), (2, 3, 16, 20), (3, 0, 16), (3, 16, 0), (0, 16, 16)))
def test_amaxes_of_a_stack(shape, flags, device):
    """Those of each tensor, NaN ignored, where one has nothing else or what a flush to zero would lose too."""
    w = normal("amaxes", shape, "bfloat16", device)
    if w.numel() and shape[0] > 1:
        w[0], w[1] = float("nan"), w[1] * 2.0**-130
        w[-1].view(-1)[-1] = float("nan")
    got = grouped_ops.amaxes(w, flags, columnwise=True)
    assert [len(t) for t in got] == [shape[0]] * 2
    for g in range(shape[0]):
        for part, alone in zip(got, quantize_ops.amax(w[g], flags, columnwise=True), strict=True):
            same(part[g], alone)


GROUPED = {
    "fp8-current": Float8CurrentScaling(amax_group="data"),
    "nvfp4": NVFP4BlockScaling(amax_group="data"),
    "fp8-delayed": NAMED["fp8-delayed"].replace(amax_group="data"),
}


def _rounded_gradients(role: Any) -> Any:
    if role.tensor == "grad_weight":
        return Float8CurrentScalingQuantizer()
    return MXFP8Quantizer() if role.tensor not in role.RESULTS else None


ROUNDED = CustomRecipe(_rounded_gradients, quantize_results=True, amax_group="data")


def rank_layer(rank: int) -> Any:
    """Experts whose weights, and their order by magnitude, differ between ranks."""
    model = layer()
    with torch.no_grad():
        model.weight.copy_(normal(f"rank {rank}", (G, N, K)) * torch.tensor([1.0, 8.0] * 2).roll(rank).view(G, 1, 1))
    return model


def rank_input(recipe: Any, rank: int, rows: int = R) -> torch.Tensor:
    return normal(f"rank x {rank}", (rows, K), dtype_of(recipe)) * (rank + 1)


def rank_step(name: str, rank: int, fn: Any, model: Any, groups: Any) -> dict[str, Any]:
    """y and gradients: on rows by expert, and on tokens with weights that are kept."""
    recipe = GROUPED.get(name, ROUNDED)
    model.reset_scale_states()
    model.seed_rng(SEED)
    made = {}
    ids = (torch.arange(R)[:, None] + torch.arange(2)) % G
    forms: Any = ({"offsets": offsets_of(CUTS[0])}, {"row_map": dt.moe_map(ids, G, map_type="index", align_size=16)})
    for i, first in enumerate((None, True, False)):
        model.zero_grad(set_to_none=True)
        x = rank_input(recipe, rank).requires_grad_()
        with dt.autocast(recipe=recipe, amax_groups=groups):
            y = fn(x, align=16, is_first_microbatch=first, **forms[i > 0])
        y.backward(normal(f"rank dy {rank}", tuple(y.shape), dtype_of(recipe)))
        made |= {f"{i} y": y.detach(), f"{i} dx": x.grad, f"{i} weight": model.weight.grad}
    return made


def on_rank(rank, groups):
    """Each recipe's step eagerly, and again with one of both ranks compiled, in turn: it reduces with an eager one."""
    made = {}
    for i, name in enumerate((*GROUPED, "rounded")):
        torch._dynamo.reset()
        model = rank_layer(rank)
        made[name] = rank_step(name, rank, model, model, groups)
        model = rank_layer(rank)
        fn = compiled(model) if i % 2 == rank else model
        made["compiled " + name] = rank_step(name, rank, fn, model, groups)
    return made


@needs_gloo
@pytest.mark.parametrize("name", (*GROUPED, "rounded"))
def test_graphs_reduce_as_eager_does(name, ranks):
    """With an eager partner. So do kept weights, where the other operands' bits are those of the microbatch before."""
    for r in ranks:
        same_step(r[f"compiled {name}"], r[name])
        for part in ("y", "dx", "weight") if name in ("fp8-current", "rounded") else ():
            same(r[name][f"1 {part}"], r[name][f"2 {part}"])


@needs_gloo
@pytest.mark.parametrize("name", ("fp8-current", "nvfp4"))
def test_amaxes_of_weights_are_those_of_both_ranks(name, ranks):
    """Each expert's, not all experts': quantized by them by hand, a forward has the same bits."""
    recipe, models = GROUPED[name], [rank_layer(rank) for rank in range(2)]
    quantizer = {t: recipe.quantizer(QuantizerRole("grouped_linear", t)) for t in ("input", "weight")}
    amaxes = [torch.cat([dt.amax(w) for w in model.weight.detach()]) for model in models]
    assert [bool(a > b) for a, b in zip(*amaxes, strict=True)] == [False, True, False, True]
    amax, of_x = torch.maximum(*amaxes), torch.maximum(*[dt.amax(rank_input(recipe, rank)) for rank in range(2)])
    for rank, model in enumerate(models):
        x = dt.quantize(rank_input(recipe, rank), quantizer["input"].with_usage(columnwise=False), amax=of_x)
        rest = {"bias": model.bias.detach(), "align": 16, "fast_accum": recipe.fast_accum("fprop")}
        made = []
        for each in (amax, amaxes[rank]):
            given = {"columnwise_amax": each} if name == "nvfp4" else {}
            w = dt.quantize_stack(model.weight.detach(), quantizer["weight"], amax=each, **given)
            made.append(dt.grouped_gemm(x, w, offsets_of(CUTS[0]), **rest))
        same(ranks[rank][name]["0 y"], made[0])
        assert not torch.equal(*made)


@needs_gloo
def test_amaxes_of_gradients_are_those_of_both_ranks(ranks):
    """A recipe that quantizes the weights' gradients quantizes each expert's by what both ranks have of it."""
    offsets, plain = offsets_of(CUTS[0]), []
    for rank in range(2):
        dy = normal(f"rank dy {rank}", (R, N))
        model = rank_layer(rank)
        plain.append(run(model, model, rank_input(MX, rank), MX, dy, offsets=offsets, align=16)["weight"])
    amax = torch.maximum(*[torch.cat([dt.amax(w) for w in dw]) for dw in plain])
    for rank, dw in enumerate(plain):
        q = dt.quantize_stack(dw, Float8CurrentScalingQuantizer(columnwise=False), amax=amax)
        same(ranks[rank]["rounded"]["0 weight"], q.dequantize())


def test_a_region_that_does_not_name_the_group():
    model = layer()
    for first in (None, True):
        with dt.autocast(recipe=GROUPED["fp8-current"]), pytest.raises(ValueError, match="names no such group"):
            model(normal("x", (64, K)), [16] * G, first)
