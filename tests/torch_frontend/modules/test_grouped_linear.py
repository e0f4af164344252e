"""GroupedLinear: each group's bits are those of products of single groups, whatever the recipe and wherever it lies."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    QuantizerRole,
)
from diptych.core import reset_calls
from diptych.torch.primitives import grouped_matmul
from torch_frontend.grouped import GROUPS, K, N, input_for, layer, offsets_of, recipe_for, reference, run
from torch_frontend.layer_cases import NAMED, dtype_of, same_step
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MX = MXFP8BlockScaling()


def operands(name: str, where: str, device: str = "cpu") -> tuple[Any, ...]:
    """(layer, x, dy, offsets, align, recipe)"""
    rows, offsets, align = GROUPS[where]
    x, dy = input_for(name, rows, device=device), normal("grouped-dy", (rows, N), dtype_of(name), device)
    return layer(device=device), x, dy, offsets, align, recipe_for(name, align)


@pytest.mark.parametrize("where", GROUPS)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_step_is_the_products_of_its_groups(name, where):
    """Gradients of rows in no group count in scales, as rows of the input there do, and in nothing else."""
    model, x, dy, offsets, align, recipe = operands(name, where)
    got = run(model, model, x, recipe, dy, offsets=offsets_of(offsets), align=align)
    same_step(got, reference(recipe, model, x, dy, offsets))
    outside = torch.ones(x.shape[0], dtype=torch.bool)
    outside[offsets[0] : offsets[-1]] = False
    assert not got["y"][outside].any() and not got["dx"][outside].any()


def test_splits_are_offsets_from_row_0():
    model, x, dy, offsets, align, _ = operands("mxfp8", "empty")
    want = run(model, model, x, MX, dy, offsets=offsets_of(offsets), align=align)
    splits = offsets_of(offsets).diff()
    for given in (splits, splits.long(), splits.tolist(), tuple(splits.tolist())):
        same_step(run(model, model, x, MX, dy, m_splits=given, align=align), want)
    same_step(
        run(lambda v, m: model(v, m), model, x, MX, dy, m=splits), want
    )  # blocks of 32: no promise is needed here
    three = {"y": want["y"].view(2, 48, N), "dx": want["dx"].view(2, 48, K)}
    got = run(model, model, x.view(2, 48, K), MX, dy.view(2, 48, N), m_splits=splits)
    same_step(got, want | three)


def test_delayed_scaling_has_one_scale_for_all_weights():
    model, recipe = layer(), NAMED["fp8-delayed"]
    scales: dict[str, float] = {}
    for i in range(3):
        rows, offsets, align = GROUPS[("even", "unaligned", "later")[i]]
        x, dy = input_for("fp8-delayed", rows) * (i + 1), normal(f"dy{i}", (rows, N))
        got = run(model, model, x, recipe, dy, offsets=offsets_of(offsets), align=align)
        same_step(got, reference(recipe, model, x, dy, offsets, scales))
        slots = model.scale_states.slots()
        assert slots.keys() == {"input", "weight", "grad_output"}
        same(slots["weight"].amax_history[:1], model.weight.detach().abs().max().reshape(1))
        for key, fp8_max, t in (("input", 448, x), ("weight", 448, model.weight), ("grad_output", 57344, dy)):
            largest = max(slots[key].amax_history[1:].max().item(), t.detach().abs().max().item())
            scales[key] = (torch.tensor(float(fp8_max)) / torch.tensor(largest)).item()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_outside_of_regions_it_is_a_loop_of_linears(dtype):
    model = layer(dtype=getattr(torch, dtype))
    for rows, offsets, _ in GROUPS.values():
        x, dy = normal("x", (rows, K), dtype), normal("dy", (rows, N), dtype)
        got = run(model, model, x, None, dy, offsets=offsets_of(offsets))
        v, w, b = [t.detach().clone().requires_grad_() for t in (x, model.weight, model.bias)]
        y = torch.zeros(rows, N, dtype=x.dtype)
        for g, (first, last) in enumerate(itertools.pairwise(offsets)):
            y[first:last] = torch.nn.functional.linear(v[first:last], w[g], b[g])
        y.backward(dy)
        for key, want in (("y", y.detach()), ("dx", v.grad), ("weight", w.grad)):
            assert torch.equal(got[key], want), key
        torch.testing.assert_close(got["bias"], b.grad, rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=1e-3)
    model = layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(normal("x", (8, K)), [2, 2, 2, 2]).dtype == torch.bfloat16


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("native", (False, True))
def test_products_that_wait_for_no_size(native, monkeypatch):
    """The products that CUDA runs in high precision run here on the CPU: torch's grouped product, and a masked one for
    each group."""
    monkeypatch.setattr(grouped_matmul, "_native", lambda *_: native)
    dtype = "bfloat16" if native else "float32"
    w, bias = normal("w", (4, N, K), dtype), normal("b", (4, N), dtype)
    for rows, at, _ in GROUPS.values():
        offsets, x, dy = offsets_of(at), normal("x", (rows, K), dtype), normal("dy", (rows, N), dtype)
        for t in (x, dy):  # in no group
            t[: at[0]], t[at[-1] :] = float("nan"), float("inf")
        calls_ = (
            (x, w, bias, False, True),
            (x, w, None, False, True),
            (dy, w, None, False, False),
            (dy, x, None, True, True),
        )
        for a, b, c, depth, trans_b in calls_:
            got = grouped_matmul._grouped_matmul(a.as_subclass(OnGpu), b, offsets, c, depth, trans_b)
            want = grouped_matmul.grouped_matmul(a, b, offsets, c, depth, trans_b)
            torch.testing.assert_close(
                got.as_subclass(torch.Tensor), want, rtol=2e-2 if native else 1e-5, atol=0.1 if native else 1e-4
            )


def test_the_quantized_kernels_ran():
    model, x, dy, offsets, align, _ = operands("mxfp8", "even")
    reset_calls()
    run(model, model, x, MX, dy, offsets=offsets_of(offsets), align=align)
    assert (calls("quantize"), calls("grouped_gemm"), calls("gemm"), calls("grouped_bias_grad")) == (2 + 4, 3, 0, 1)


@pytest.mark.parametrize("frozen", ("weight", "bias", "x", "weight and bias", "x and weight"))
def test_frozen_parts_cost_nothing_and_change_nothing(frozen):
    model, x, dy, offsets, align, _ = operands("mxfp8", "even")
    whole = run(model, model, x, MX, dy, offsets=offsets_of(offsets), align=align)
    model.zero_grad(set_to_none=True)
    model.weight.requires_grad_("weight" not in frozen)
    model.bias.requires_grad_("bias" not in frozen)
    x = x.requires_grad_(not frozen.startswith("x"))
    reset_calls()
    with dt.autocast(recipe=MX):
        y = model(x, offsets=offsets_of(offsets), align=align)
    y.backward(dy)
    needed = x.requires_grad + model.weight.requires_grad
    assert (calls("grouped_gemm"), calls("quantize")) == (1 + needed, 1 + 4 + (needed > 0))
    for key, got in (("dx", x.grad), ("weight", model.weight.grad), ("bias", model.bias.grad)):
        assert got is None or same(got, whole[key], key) is None


def test_backward_keeps_the_quantized_copies_and_offsets_alone():
    model, x, _, offsets, align, _ = operands("mxfp8", "even")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), dt.autocast(recipe=MX):
        model(x.requires_grad_(), offsets=offsets_of(offsets), align=align)
    assert {t.dtype for t in saved} == {torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int32}
    assert sum(t.numel() for t in saved if t.dtype == torch.float8_e4m3fn) == x.numel() + model.weight.numel()


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_keeping_the_input_changes_nothing(name):
    model, x, dy, offsets, align, recipe = operands(name, "later")
    groups = {"offsets": offsets_of(offsets), "align": align}
    want = run(model, model, x, recipe, dy, **groups)
    model.reset_scale_states()
    model.save_original_input = True
    same_step(run(model, model, x, recipe, dy, **groups), want)


# --- other recipes ---------------------------------------------------------------------------------------------------


def _but(tensor: str, gemm: str) -> Any:
    """MXFP8 but for one role."""
    return lambda role: None if (role.tensor, role.gemm) == (tensor, gemm) else MXFP8Quantizer()


ROLES = [(t, g) for g, ts in QuantizerRole.GEMMS.items() for t in ts[:2]]


@pytest.mark.parametrize("role", ROLES, ids="-".join)
def test_one_operand_in_high_precision(role):
    """That product runs in high precision on what the other's copy stands for, as a loop of linear layers has it."""
    model, x, dy, offsets, _, _ = operands("mxfp8", "even")
    got = run(model, model, x, CustomRecipe(_but(*role)), dy, offsets=offsets_of(offsets))
    want = run(model, model, x, MX, dy, offsets=offsets_of(offsets))
    plain = run(model, model, x, None, dy, offsets=offsets_of(offsets))
    touched = {"fprop": "y", "dgrad": "dx", "wgrad": "weight"}[role[1]]
    for key in want:
        if key != touched:
            same(got[key], want[key], key)
    away = (got[touched] - plain[touched]).norm() / plain[touched].norm()
    assert 1e-3 < away < (want[touched] - plain[touched]).norm() / plain[touched].norm()


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_backward_overrides(name):
    model, x, dy, offsets, align, recipe = operands(name, "later")
    groups = {"offsets": offsets_of(offsets), "align": align}
    forward, plain = run(model, model, x, recipe, dy, **groups), run(model, model, x, None, dy, **groups)
    for override in ("high_precision", "dequantized"):
        model.reset_scale_states()
        got = run(model, model, x, recipe.replace(backward_override=override), dy, **groups)
        same(got["y"], forward["y"])
        for key in ("dx", "weight"):
            error = (got[key].float() - plain[key].float()).norm() / plain[key].float().norm()
            assert error == 0 if override == "high_precision" else 1e-3 < error < 0.2, (key, error)


def _results(role: Any) -> Any:
    return MXFP8Quantizer() if role.tensor in ("grad_input", "grad_weight") else Float8CurrentScalingQuantizer()


def test_quantized_results():
    model, x, dy, offsets, _, _ = operands("mxfp8", "even")
    recipe = CustomRecipe(_results, quantize_results=True)
    plain = run(model, model, x, CustomRecipe(_results), dy, offsets=offsets_of(offsets))
    with dt.autocast(recipe=recipe):
        v = x.clone().requires_grad_()
        y = model(v, offsets=offsets_of(offsets))
    assert isinstance(y, dt.QuantizedTensor)
    same(y.dequantize(), dt.quantize(plain["y"], Float8CurrentScalingQuantizer()).dequantize())
    model.zero_grad()
    y.backward(dy)
    assert v.grad is not None and model.weight.grad is not None
    same(v.grad, dt.quantize(plain["dx"], MXFP8Quantizer()).dequantize())
    same(model.weight.grad, torch.stack([dt.quantize(w, MXFP8Quantizer()).dequantize() for w in plain["weight"]]))


@pytest.mark.parametrize("name", ("fp8-current", "mxfp8"))
def test_a_quantized_input(name):
    model, x, dy, offsets, align, recipe = operands(name, "even")
    groups = {"offsets": offsets_of(offsets), "align": align}
    want = run(model, model, x, recipe, dy, **groups)
    model.zero_grad()
    v = x.clone().requires_grad_()
    q = dt.quantize(v, recipe.quantizer(QuantizerRole("grouped_linear", "input")))
    with dt.autocast(recipe=recipe):
        y = model(q, **groups)
    y.backward(dy)
    same_step({"y": y.detach(), "dx": v.grad, **{n: p.grad for n, p in model.named_parameters()}}, want)
    same(model(q.detach(), **groups), model(q.detach().dequantize(), **groups))


# --- where gradients go, and what is recomputed ----------------------------------------------------------------------


@pytest.mark.parametrize("delay", (False, True))
def test_gradients_into_main_grad(delay):
    model, x, dy, offsets, align, recipe = operands("nvfp4", "later")
    groups = {"offsets": offsets_of(offsets), "align": align}
    want = run(model, model, x, recipe, dy, **groups)
    fused = layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    fused.weight.main_grad = torch.ones(fused.weight.shape)
    got = run(fused, fused, x, recipe, dy, **groups)
    if delay:
        assert (fused.weight.main_grad == 1).all()
        fused.backward_dw()
    torch.testing.assert_close(fused.weight.main_grad - 1, want["weight"], rtol=1e-4, atol=1e-4)
    same_step(got, {k: t for k, t in want.items() if k != "weight"})
    later = layer(delay_wgrad_compute=True)
    run(later, later, x, recipe, dy, **groups)
    assert later.weight.grad is None
    later.backward_dw()
    same(later.weight.grad, want["weight"])


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4", "fp8-block"))
def test_checkpoint(name, reentrant):
    def steps(model: Any, fn: Any) -> list[torch.Tensor]:
        made = []
        model.seed_rng(1)
        for where in ("even", "later"):
            _, x, dy, offsets, align, recipe = operands(name, where)
            with dt.autocast(recipe=recipe):
                v = x.requires_grad_()
                y = fn(v, offsets_of(offsets), align)
            y.backward(dy)
            made += [y.detach(), v.grad]
        return made + [p.grad for p in model.parameters()] + [t for k, t in model.state_dict().items() if "amax" in k]

    def plain(model: Any) -> Any:
        return lambda v, offsets, align: model(v, offsets=offsets, align=align)

    first, second = layer(), layer()
    want = steps(first, plain(first))
    call = plain(second)
    got = steps(second, lambda v, o, a: dt.checkpoint(call, v, o, a, use_reentrant=reentrant))
    for a, b in zip(got, want, strict=True):
        same(a, b)


def test_calibration():
    model, x, dy, offsets, _, recipe = operands("fp8-delayed", "even")
    with dt.autocast(enabled=False, calibrating=True, recipe=recipe):
        got = run(model, model, x, None, dy, offsets=offsets_of(offsets))  # an inner region, which does not calibrate
        assert "scale_states" not in model._modules
        y = model(x, offsets=offsets_of(offsets))
        y.backward(dy)
    same(y.detach(), got["y"])
    for key, t in (("input", x), ("weight", model.weight), ("grad_output", dy)):
        same(model.scale_states.slots()[key].amax_history[:1], t.detach().abs().max().reshape(1), key)


# --- saving, loading and misuse --------------------------------------------------------------------------------------


def test_state_dicts_of_transformer_engine():
    model = torch.nn.Sequential(layer(), layer(bias=False, n=K))
    theirs: dict[str, torch.Tensor] = {}
    for key, t in model.state_dict().items():
        theirs |= {f"{key}{g}": each.clone() for g, each in enumerate(t)}
    loaded = torch.nn.Sequential(dt.GroupedLinear(4, K, N), dt.GroupedLinear(4, K, K, bias=False))
    loaded.load_state_dict(theirs)
    before = theirs.keys()
    for key, t in model.state_dict().items():
        same(loaded.state_dict()[key], t)
    with torch.device("meta"):
        empty = torch.nn.Sequential(dt.GroupedLinear(4, K, N), dt.GroupedLinear(4, K, K, bias=False))
    empty.load_state_dict(theirs, assign=True)
    assert theirs.keys() == before
    same(empty[0].weight, model[0].weight)
    part = {k: t for k, t in theirs.items() if k != "0.weight2"}
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        loaded.load_state_dict(part)
    found = loaded.load_state_dict(part, strict=False)
    assert found.missing_keys == ["0.weight"] and "0.weight0" in found.unexpected_keys
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        loaded.load_state_dict({k: t[..., :5] if "0.weight" in k else t for k, t in theirs.items()})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight4"):
        loaded.load_state_dict(theirs | {"0.weight4": theirs["0.weight0"]})


def test_saved_with_its_states():
    model, x, dy, offsets, align, recipe = operands("fp8-delayed", "even")
    groups = {"offsets": offsets_of(offsets), "align": align}
    run(model, model, x, recipe, dy, **groups)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded, copied = layer(), copy.deepcopy(model)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    want = run(model, model, x, recipe, dy, **groups)
    for other in (loaded, copied):
        same_step(run(other, other, x, recipe, dy, **groups), want)
    assert "GroupedLinear(4, 96, 64, bias=True, recipe=None: needs autocast)" in repr(model)


@pytest.mark.parametrize("sizes", [(16, 32, 0, 16), (32, 32, 32, 0)], ids=str)
def test_sizes_on_the_host_are_their_own_promise(sizes):
    """No align= where the sizes can be read: a Hadamard transform of 16 rows runs, to the bits of the promise."""
    recipe, offsets = NAMED["nvfp4"], (0, *itertools.accumulate(sizes))
    x, dy = (normal(n, (sum(sizes), c), "bfloat16") for n, c in (("x", K), ("dy", N)))
    want = run(*[layer(dtype=torch.bfloat16)] * 2, x, recipe, dy, offsets=offsets_of(offsets), align=16)
    for given in (list(sizes), sizes, torch.tensor(sizes)):
        same_step(run(*[layer(dtype=torch.bfloat16)] * 2, x, recipe, dy, m_splits=given), want)
    model = layer(dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same_step(run(compiled, model, x, recipe, dy, m_splits=list(sizes)), want)


def _own(role: Any) -> Any:
    class Own(MXFP8Quantizer):
        def quantize_impl(self, x: Any, quantize: Any) -> Any:
            return quantize(x, MXFP8Quantizer())

    return Own() if role.tensor == "weight" else MXFP8Quantizer()


def _noisy(role: Any) -> Any:
    return NVFP4Quantizer(stochastic_rounding=role.tensor == "weight")


def test_bad_input():
    model, x, nv = layer(), normal("x", (64, K)), NVFP4BlockScaling()
    splits, offsets = torch.tensor([16, 16, 16, 16]), offsets_of((0, 16, 32, 48, 64))
    cases: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({}, ValueError, "once, as m_splits, as offsets or by a row_map"),
        ({"m_splits": splits, "offsets": offsets}, ValueError, "give the groups once"),
        ({"m_splits": splits.float()}, TypeError, "m_splits must be int32 or int64"),
        ({"m_splits": splits[None]}, ValueError, r"m_splits must be \[4\]"),
        ({"m_splits": splits[:3]}, ValueError, "must hold 4 sizes"),
        ({"m_splits": [16, 16]}, ValueError, "must hold 4 sizes"),
        ({"m_splits": [16, 16, 16, 17]}, ValueError, "add up to 65, and inp has 64"),
        ({"m_splits": [16, 16, -16, 16]}, ValueError, "ints of 0 or more"),
        ({"m_splits": [16, 16, 8, 16], "align": 16}, ValueError, "multiples of align=16"),
        ({"m_splits": "16"}, TypeError, "a tensor or a sequence"),
        ({"m_splits": splits * 2}, ValueError, "outside of the tensor's 64 rows"),
        ({"m_splits": -splits}, ValueError, "outside of the tensor's|less than"),
        ({"offsets": offsets.long()}, TypeError, "offsets must be int32"),
        ({"offsets": offsets[1:]}, ValueError, r"offsets must be \[5\]"),
        ({"offsets": offsets, "align": 128}, ValueError, "no multiple of align"),
        ({"offsets": offsets, "align": 0}, ValueError, "align must be at least 1"),
        ({"offsets": offsets, "align": 16.0}, TypeError, "align must be an int"),
    )
    for given, error, match in cases:
        with pytest.raises(error, match=match), dt.autocast(recipe=MX):
            model(x, **given)
    with dt.autocast(recipe=MX):
        with pytest.raises(ValueError, match="do not fit"):
            model(x[:, :90], splits)
        with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
            model(x.double(), splits)
    with pytest.raises(ValueError, match=r"rows 48 to 64 of 60|rows 32 to 48 of 40"):
        model(x[:60], splits)
    with dt.autocast(recipe=nv), pytest.raises(ValueError, match=r"rotates 16 rows .* align=1(?m:$)"):
        model(x.bfloat16(), offsets=torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int32), align=1)
    for given in ([16, 8, 8, 16], torch.tensor([16, 8, 8, 16])):
        with dt.autocast(recipe=nv), pytest.raises(ValueError, match=r"16 rows .* pad each .*\[16, 8, 8, 16\](?m:$)"):
            model(x.bfloat16(), given)
    with dt.autocast(recipe=nv), torch.no_grad():
        model(x.bfloat16(), splits)  # nothing is rotated without weights' gradients
    unsupported = ((_own, "user's own"), (_noisy, "stochastically"))
    for factory, match in unsupported:
        with dt.autocast(recipe=CustomRecipe(factory)), pytest.raises(NotImplementedError, match=match):
            model(x, splits, align=16)
    for make, error, match in (
        (lambda: dt.GroupedLinear(0, K, N), ValueError, "num_gemms must be"),
        (lambda: dt.GroupedLinear(2, K, 1.5), ValueError, "out_features must be"),  # type: ignore[arg-type]
        (lambda: dt.GroupedLinear(2, K, N, recipe="mxfp8"), TypeError, "recipe must be"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=match):
            make()


def test_the_function_asks_for_what_the_recipe_needs():
    model, x, offsets = layer(), normal("x", (64, K)), offsets_of((0, 16, 32, 48, 64))
    weight, bias = model.weight, model.bias
    want = run(model, model, x, MX, torch.ones(64, N), offsets=offsets)["y"]
    same(dt.grouped_linear(x, weight, bias, offsets, MX).detach(), want)
    with pytest.raises(TypeError, match="state="):
        dt.grouped_linear(x, weight, bias, offsets, DelayedScaling())
    for bad, error in (
        ((x, weight[0], bias), ValueError),
        ((x, weight, bias[0]), ValueError),
        ((x, 3, bias), TypeError),
        ((3, weight, bias), TypeError),
    ):
        with pytest.raises(error, match="grouped_linear"):
            dt.grouped_linear(*bad, offsets, MX)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="QuantizedStack, got a QuantizedTensor"):
        dt.grouped_linear(x, dt.quantize(weight.detach(), MXFP8Quantizer()), bias, offsets, MX)


def test_second_derivatives_are_refused():
    model, x = layer(), normal("x", (64, K)).requires_grad_()
    with dt.autocast(recipe=MX):
        y = model(x, [16] * 4)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_many_groups(name):
    """Sizes at random, among them many that are empty; one group, and one for each row."""
    generator = torch.Generator().manual_seed(5)
    for groups, rows in ((1, 48), (37, 160), (130, 288), (96, 96)):
        for align in (1, 16):
            cuts = torch.randint(0, rows // align + 1, (groups + 1,), generator=generator).sort().values * align
            offsets = tuple(int(n) for n in cuts)
            model, recipe = layer(64, 32, groups), recipe_for(name, align)
            x, dy = input_for(name, rows, 64), normal("dy", (rows, 32), dtype_of(name))
            got = run(model, model, x, recipe, dy, offsets=offsets_of(offsets), align=align)
            same_step(got, reference(recipe, model, x, dy, offsets))
