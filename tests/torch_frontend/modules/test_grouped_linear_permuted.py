"""GroupedLinear with a map of rows: the bits of permuting first, whatever the recipe, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.permute.test_permute import top_k
from core.permute.test_permute_misuse import lie
from sweeps import others_slow

import cases
import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from diptych.core import reset_calls
from torch_frontend.graph.test_custom_op import nodes
from torch_frontend.grouped import K, N, layer
from torch_frontend.layer_cases import NAMED, SEED, dtype_of, same_step, slow
from torch_frontend.modules.test_grouped_linear import ROLES, _but, _results
from torch_frontend.modules.test_grouped_linear_compiled import compiled, graphs
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same, values

pytestmark = pytest.mark.sampled

T, E, ALIGN = 52, 4, 16
MX = MXFP8BlockScaling()
ROWS = (None, 96, 160)  # as many as any routing needs; too few, so that some are dropped; some to spare


def map_for(name: str, rows: int | None = None, device: str = "cpu", tokens: int = T) -> dt.RowMap:
    """Returns a row map of two experts for each token, of which one in eight is absent."""
    rng = cases.rng_for(f"routing-{name}")
    ids = top_k(rng, tokens, E, 2)
    ids[rng.random(ids.shape) < 0.125] = -1
    return dt.moe_map(torch.from_numpy(ids).to(device), E, map_type="index", num_out_tokens=rows, align_size=ALIGN)


def composed(model: Any) -> Callable[..., torch.Tensor]:
    """Returns the composition that a row map stands for."""
    return lambda x, m: model(dt.moe_permute(x, m)[0], offsets=m.expert_offsets, align=ALIGN)


def permuting(model: Any) -> Callable[..., torch.Tensor]:
    return lambda x, m: model(x, row_map=m, align=ALIGN)


def step(fn: Any, model: Any, x: torch.Tensor, m: dt.RowMap, recipe: Recipe | None, dy: torch.Tensor) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    with dt.autocast(recipe=recipe, enabled=recipe is not None):
        y = fn(x, m)
    y.backward(dy)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"y": values(y).detach(), "dx": x.grad, **grads}


def steps(make: Any, model: Any, name: str, recipe: Recipe | None, wrap: Any = None, device: str = "cpu") -> Any:
    """Three training steps, each with another map, and the states that they leave."""
    model.reset_scale_states()
    if isinstance(recipe, NVFP4BlockScaling):
        model.seed_rng(SEED)
    fn = make(model) if wrap is None else wrap(make(model))
    made = {}
    for i, rows in enumerate(ROWS):
        m = map_for(f"{name}-{i}", rows, device)
        x = normal(f"x{i}", (T, K), dtype_of(name), device) * (i + 1)
        dy = normal(f"dy{i}", (len(m.row_source), N), dtype_of(name), device)
        made |= {f"{i} {k}": t for k, t in step(fn, model, x, m, recipe, dy).items()}
    return made | {k: t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k}


@pytest.mark.parametrize("keep", (False, True), ids=("copies", "original"))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_bits_of_permuting_first(name, keep, device):
    model = layer(K, N, E, device=device, save_original_input=keep)
    want = steps(composed, model, name, NAMED[name], device=device)
    same_step(steps(permuting, model, name, NAMED[name], device=device), want)


@pytest.mark.parametrize("name", others_slow(RECIPE_NAMES, ("fp8-delayed", "mxfp8", "nvfp4")))
def test_compiled_is_eager(name, device):
    for keep in (False, True) if name == "fp8-delayed" else (False,):
        model = layer(K, N, E, device=device, save_original_input=keep)
        want = steps(composed, model, name, NAMED[name], device=device)
        same_step(steps(permuting, model, name, NAMED[name], compiled, device), want)
        assert graphs() <= 2  # the second is for any count of rows


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_under_inductor(name, device):
    model = layer(K, N, E, device=device)
    want = steps(composed, model, name, NAMED[name], device=device)
    got = steps(permuting, model, name, NAMED[name], lambda fn: compiled(fn, backend="inductor"), device)
    same_step(got, want)


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4", "fp8-block"))
def test_forward_and_backward_are_one_node_each(name):
    for keep in (False, True):
        model, m = layer(K, N, E, save_original_input=keep), map_for("nodes")
        x = normal("x", (T, K), dtype_of(name)).requires_grad_()
        with dt.autocast(recipe=NAMED[name]):
            forward, backward = [
                [op.removeprefix("diptych.").partition(".")[0] for op in graph]
                for graph in nodes(permuting(model), x, m)
            ]
        assert [op for op in forward if op not in ("update_scales", "rng_take")] == ["grouped_linear"]
        assert [op.rstrip("_") for op in backward] == ["grouped_linear_backward"]


@pytest.mark.parametrize("name", ("fp8-current", slow("fp8-delayed"), slow("nvfp4")))
def test_one_graph_for_all_sizes(name):
    eager, model, recipe = layer(K, N, E), layer(K, N, E), NAMED[name]
    fn = compiled(permuting(model), dynamic=True)
    for tokens in (40, T, 96):
        m, x = map_for("dynamic", tokens=tokens), normal("x", (tokens, K), dtype_of(name))
        dy = normal("dy", (len(m.row_source), N), dtype_of(name))
        for each in (eager, model):
            if isinstance(recipe, NVFP4BlockScaling):
                each.seed_rng(SEED)
        same_step(step(fn, model, x, m, recipe, dy), step(composed(eager), eager, x, m, recipe, dy))
    assert graphs() == 1


def _own(role: Any) -> Any:
    class Own(MXFP8Quantizer):
        def quantize_impl(self, x: Any, quantize: Any) -> Any:
            return quantize(x, MXFP8Quantizer())

    return Own() if role.tensor == "input" else MXFP8Quantizer()


OTHERS: dict[str, Recipe | None] = {
    "outside of regions": None,
    **{"-".join(role): CustomRecipe(_but(*role)) for role in ROLES},
    "a quantizer of the user's own": CustomRecipe(_own),
    "results": CustomRecipe(_results, quantize_results=True),
    "high precision backward": MX.replace(backward_override="high_precision"),
    "dequantized backward": MX.replace(backward_override="dequantized"),
    "delayed, dequantized backward": NAMED["fp8-delayed"].replace(backward_override="dequantized"),
}


IN_GRAPHS = ("outside of regions", "input-fprop", "a quantizer of the user's own", "delayed, dequantized backward")
IN_TURN = [(n, False) if i % 2 == 0 else slow(n, False) for i, n in enumerate(OTHERS)]
IN_TURN += [(n, True) if n in IN_GRAPHS else slow(n, True) for n in OTHERS]


@pytest.mark.parametrize("name, in_graph", IN_TURN)
def test_roles_in_high_precision_and_other_recipes(name, in_graph):
    """The permuted rows are stored where a product, or the user's own code, reads them."""
    recipe = OTHERS[name]
    for keep in (True,) if in_graph else (False, True):
        model = layer(K, N, E, save_original_input=keep)
        want = steps(composed, model, "mxfp8", recipe)
        same_step(steps(permuting, model, "mxfp8", recipe, compiled if in_graph else None), want)


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_permuted_rows_are_never_stored():
    for keep in (False, True):
        model, m, x = layer(K, N, E, save_original_input=keep), map_for("calls"), normal("x", (T, K))
        reset_calls()
        step(permuting(model), model, x, m, MX, normal("dy", (len(m.row_source), N)))
        assert (calls("permute"), calls("unpermute"), calls("grouped_gemm"), calls("gemm")) == (0, 1, 3, 0)
        assert calls("quantize") == 1 + E + 1 + keep


def test_backward_keeps_what_it_keeps_of_permuted_rows_or_the_tokens():
    m, x = map_for("saved"), normal("x", (T, K)).requires_grad_()
    for keep, recipe in ((False, MX), (True, MX), (False, CustomRecipe(_but("input", "wgrad")))):
        model = layer(K, N, E, save_original_input=keep)
        found = []
        for fn in (composed(model), permuting(model)):
            saved: list[torch.Tensor] = []
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t)
            with hooks, dt.autocast(recipe=recipe):
                fn(x, m)
            maps = {t.data_ptr() for t in m}
            found.append(sorted([(str(t.dtype), t.numel()) for t in saved if t.data_ptr() not in maps]))
        plain, got = found
        if keep or recipe is not MX:
            rows = ("torch.float32", len(m.row_source) * K)
            plain[plain.index(rows)] = ("torch.float32", x.numel())
        assert got == sorted(plain)


@pytest.mark.parametrize("frozen", ("weight", "x", "x and weight"))
def test_frozen_parts(frozen):
    model, m, x = layer(K, N, E), map_for("frozen"), normal("x", (T, K))
    model.weight.requires_grad_("weight" not in frozen)
    results = []
    for fn in (composed(model), permuting(model), compiled(permuting(model))):
        model.zero_grad(set_to_none=True)
        v = x.clone().requires_grad_(not frozen.startswith("x"))
        with dt.autocast(recipe=MX):
            y = fn(v, m)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), v.grad, model.weight.grad, model.bias.grad))
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert (a is None) == (b is None)
            assert a is None or same(a, b) is None


# --- beside the layer's other ways -----------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", (False, True))
def test_gradients_into_main_grad(delay):
    results = []
    for make in (composed, permuting):
        model = layer(K, N, E, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
        model.weight.main_grad = torch.ones(model.weight.shape)
        made = steps(make, model, "nvfp4", NAMED["nvfp4"])
        for _ in ROWS if delay else ():
            model.backward_dw()
        results.append(made | {"main": model.weight.main_grad})
    same_step(results[1], results[0])


@pytest.mark.parametrize("name", ("fp8-current", "mxfp8"))
def test_a_quantized_input(name):
    """Its rows move as they are."""
    recipe, m = NAMED[name], map_for("quantized")
    quantizer = recipe.quantizer(QuantizerRole("grouped_linear", "input"))
    if not quantizer.format.one_scale:  # blocks of a columnwise copy would part
        quantizer = quantizer.with_usage(columnwise=False)
        recipe = recipe.replace(backward_override="dequantized")
    model, x = layer(K, N, E), normal("x", (T, K))
    dy = normal("dy", (len(m.row_source), N))
    results = []
    for fn in (composed(model), permuting(model)):
        results.append(step(lambda v, m, fn=fn: fn(dt.quantize(v, quantizer), m), model, x, m, recipe, dy))
    same_step(results[1], results[0])
    q = dt.quantize(x, quantizer)
    same(model(q, row_map=m), model(dt.moe_permute(q.dequantize(), m)[0], offsets=m.expert_offsets))


def test_under_torchs_autocast():
    """Tokens are cast before their rows move, and sums of dx are rounded to that dtype."""
    model, m, x = layer(K, N, E), map_for("amp", tokens=60), normal("x", (3, 20, K))
    dy, results = normal("dy", (len(m.row_source), N), "bfloat16"), []
    for fn in (lambda v, m: composed(model)(v.bfloat16(), m), permuting(model)):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(fn, model, x, m, MX, dy))
    assert results[1]["y"].dtype == torch.bfloat16 and results[1]["dx"].shape == x.shape
    same_step(results[1], results[0])


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4"))
def test_checkpoint(name):
    def checkpointed(model: Any) -> Any:
        fn = permuting(model)
        return lambda x, m: dt.checkpoint(fn, x, m, use_reentrant=False)

    model = layer(K, N, E)
    want = steps(composed, model, name, NAMED[name])
    same_step(steps(checkpointed, model, name, NAMED[name]), want)


def test_calibration():
    recipe, m, x = NAMED["fp8-delayed"], map_for("calibration", 96), normal("x", (T, K))
    histories = []
    for make in (composed, permuting):
        model = layer(K, N, E)
        with dt.autocast(enabled=False, calibrating=True, recipe=recipe):
            make(model)(x, m).sum().backward()
        slots = model.scale_states.slots()
        histories.append({k: slot.amax_history for k, slot in slots.items()} | {"weight.grad": model.weight.grad})
    same_step(histories[1], histories[0])
    same(histories[0]["input"][:1], dt.moe_permute(x, m)[0].abs().max().reshape(1))


def test_reduced_amaxes():
    """The group's amax is that of the rows which move."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        recipe = CustomRecipe(_current_but_weights, amax_group="data")
        model, m, x = layer(K, N, E), map_for("reduced", 96), normal("x", (T, K))
        dy = normal("dy", (96, N))
        results = []
        for fn in (composed(model), permuting(model)):
            with dt.autocast(recipe=recipe, amax_groups={"data": dist.group.WORLD}):
                v = x.clone().requires_grad_()
                y = fn(v, m)
            y.backward(dy)
            results.append({"y": y.detach(), "dx": v.grad})
        same_step(results[1], results[0])
    finally:
        dist.destroy_process_group()


def _current_but_weights(role: Any) -> Any:
    return MXFP8Quantizer() if role.tensor == "weight" else Float8CurrentScalingQuantizer()


def test_the_function():
    model, m, x = layer(K, N, E), map_for("function"), normal("x", (T, K))
    weight, bias = model.weight.detach(), model.bias.detach()
    want = dt.grouped_linear(dt.moe_permute(x, m)[0], weight, bias, m.expert_offsets, MX)
    same(dt.grouped_linear(x, weight, bias, None, MX, row_map=m), want)
    for offsets, row_map in ((None, None), (m.expert_offsets, m)):
        with pytest.raises(ValueError, match="give the groups once, as offsets or by a row_map"):
            dt.grouped_linear(x, weight, bias, offsets, MX, row_map=row_map)
    with pytest.raises(TypeError, match=r"^grouped_linear: .* needs state="):
        dt.grouped_linear(x, weight, bias, None, DelayedScaling(), row_map=m)


def test_bad_input():
    model, m, x = layer(K, N, E), map_for("bad"), normal("x", (T, K))
    longs, other = m._replace(row_source=m.row_source.long()), map_for("bad", tokens=T + 1)
    fewer = m._replace(expert_offsets=m.expert_offsets[1:])
    outside = m._replace(expert_offsets=m.expert_offsets + 4096)
    each: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"row_map": m, "offsets": m.expert_offsets}, ValueError, "give the groups once"),
        ({"row_map": m, "m_splits": m.tokens_per_expert}, ValueError, "give the groups once"),
        ({"row_map": m.row_id_map}, TypeError, "row_map must be a RowMap, got Tensor; moe_map"),
        ({"row_map": longs}, TypeError, "row_source must be int32"),
        ({"row_map": other}, ValueError, "must have a row for each of row_map's tokens, 53"),
        ({"row_map": fewer}, ValueError, r"offsets must be \[5\]"),
        ({"row_map": outside, "align": 16}, ValueError, "outside of the tensor's|rows 4096 to"),
    )
    for recipe in (MX, None):
        for given, error, match in each:
            with pytest.raises(error, match=match), dt.autocast(recipe=recipe, enabled=recipe is not None):
                model(x, **given)
                pytest.fail(match)
    with dt.autocast(recipe=MX):
        with pytest.raises(ValueError, match="do not fit"):
            model(x[:, :64], row_map=m)
        with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
            model(x.double(), row_map=m)
    with dt.autocast(recipe=NAMED["nvfp4"]):
        with pytest.raises(ValueError, match="rotates 16 rows"):
            model(x.bfloat16(), row_map=m)
        odd = dt.moe_map(torch.zeros(T, 1, dtype=torch.int32), E, map_type="index", num_out_tokens=T, align_size=16)
        with pytest.raises(ValueError, match="multiple"):
            model(x.bfloat16(), row_map=odd, align=16)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_maps_that_lie(name, device):
    """Whatever stands in row_id_map and row_source, nothing breaks; dx is the sum of the rows that a token names."""
    model, m, recipe = layer(K, N, E, device=device), map_for("lie", 96, device), NAMED[name]
    x, dy = normal("x", (T, K), dtype_of(name), device), normal("dy", (96, N), dtype_of(name), device)
    given = {"offsets": m.expert_offsets, "align": ALIGN}
    honest = step(lambda v, _: model(v, **given), model, dt.moe_permute(x, m)[0], m, recipe, dy)
    for turn in range(3):
        liar = lie(f"layer-{turn}", tokens=T, slots=(3, 1, 40)[turn], rows=96)
        maps = [torch.from_numpy(t).to(device) for t in (liar.row_id_map, liar.row_source)]
        model.reset_scale_states()
        model.seed_rng(SEED)
        got = step(permuting(model), model, x, m._replace(row_id_map=maps[0], row_source=maps[1]), recipe, dy)
        assert got["y"].shape == (96, N)
        # CPUs ask `row_source` where a row comes from. GPUs ask row_id_map where it goes: rows may be left out then.
        assert device == "cuda" or torch.isfinite(got["y"]).all()
        if not isinstance(recipe, NVFP4BlockScaling):  # whose gradients are rounded at random
            same(got["dx"], dt.moe_unpermute(honest["dx"], maps[0]))


def test_second_derivatives_are_refused():
    model, m, x = layer(K, N, E), map_for("second"), normal("x", (T, K)).requires_grad_()
    with dt.autocast(recipe=MX):
        y = model(x, row_map=m)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_nobody_waits_for_the_device(name, cuda):
    model, m = layer(K, N, E, device=cuda), map_for("wait", 160, cuda)
    x, dy = normal("x", (T, K), dtype_of(name), cuda), normal("dy", (160, N), dtype_of(name), cuda)
    step(permuting(model), model, x, m, NAMED[name], dy)  # makes states
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(permuting(model), model, x, m, NAMED[name], dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
