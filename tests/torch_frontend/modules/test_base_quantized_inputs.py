"""Quantized tensors as inputs of modules: read as they are, dequantized by norms, refused where they do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
)
from diptych.core import reset_calls
from torch_frontend import composed
from torch_frontend import layer_cases as layers
from torch_frontend.modules.test_base_quantized_outputs import (
    DELAYED,
    MODES,
    MX,
    ROWS,
    K,
    N,
    compiled,
    input_quantizer,
    run,
    x_for,
)
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same


def quantized(x: torch.Tensor, quantizer: Quantizer, **usage: bool) -> Any:
    given = {"scale": torch.ones(1)} if quantizer.needs_scale else {}
    return dt.quantize(x, quantizer.with_usage(**usage), **given)


COMPILED = {("fp8-delayed", "training")}  # test_compiled_matrix.py has a quantized input with every recipe and module
READS = [(n, use, mode) for n in RECIPE_NAMES for use in ("inference", "training") for mode in MODES]
READS = [c if c[2] == "eager" or c[:2] in COMPILED else layers.slow(*c) for c in READS]


@pytest.mark.parametrize(("name", "use", "mode"), READS)
def test_linear_reads_the_copies(name, use, mode):
    """The same bits as from the plain tensor, which the module quantizes by the same quantizer (and scale, here 1).

    Compiled, training by each recipe is in `test_compiled_matrix` too.
    """
    training = use == "training"
    recipe, x, dy = RECIPES[name], x_for(name), normal("dy", (ROWS, N), layers.dtype_of(name))
    model, plain = layers.layer(), layers.layer()
    q = quantized(x, input_quantizer(name), columnwise=training)
    fn = compiled(model, mode)
    if training:
        want = run(plain, plain, x, recipe, dy)
        dt.seed_rng(model, layers.SEED)
        q.requires_grad_()
        reset_calls()
        with dt.autocast(recipe=recipe):
            y = fn(q)
        y.backward(dy)
        assert (calls("quantize"), calls("dequantize"), calls("gemm")) == (2, 0, 3)
        assert type(q.grad) is torch.Tensor and q.grad.dtype == x.dtype
        grads = {n: p.grad for n, p in model.named_parameters()}
        layers.same_step({"y": y.detach(), "dx": q.grad, **grads}, want)
    else:
        with torch.no_grad(), dt.autocast(recipe=recipe):
            same(fn(q), plain(x))
    for key, t in model.state_dict().items():
        if "input.amax_history" in key:
            assert not t.any()
    # the function, without a module
    if name not in DELAYED:
        with torch.no_grad():
            rng = dt.rng_state(1)
            same(*[dt.linear(t, model.weight, model.bias, recipe, rng=rng) for t in (q, x)])


@pytest.mark.parametrize("mode", MODES)
def test_of_a_quantized_input_only_the_copy_that_backward_reads_is_kept(mode):
    model = layers.layer()
    fn, q = compiled(model, mode), quantized(normal("x", (ROWS, K)), MXFP8Quantizer())
    seen = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t)
    with hooks, dt.autocast(recipe=MX):
        fn(q)
    assert {q.columnwise_data.data_ptr(), q.columnwise_scale_inv.data_ptr()} <= set(seen)
    assert not {q.rowwise_data.data_ptr(), q.rowwise_scale_inv.data_ptr()} & set(seen)


def _without(*roles: str) -> CustomRecipe:
    return CustomRecipe(Without(roles))


@dataclasses.dataclass(frozen=True)
class Without:
    """MXFP8, but for the named roles, "tensor.gemm"."""

    roles: tuple[str, ...]

    def __call__(self, role):
        return None if f"{role.tensor}.{role.gemm}" in self.roles else MXFP8Quantizer()


HIGH = {
    "fprop": _without("input.fprop"),
    "wgrad": _without("input.wgrad"),
    "no products": _without("input.fprop", "input.wgrad"),
    "high precision backward": MX.replace(backward_override="high_precision"),
    "dequantized backward": MX.replace(backward_override="dequantized"),
}


PRODUCTS = [(name, mode) for name in HIGH for mode in MODES]
PRODUCTS = [layers.slow(*c) if c[1] != "eager" and c[0] != "high precision backward" else c for c in PRODUCTS]


@pytest.mark.parametrize(("name", "mode"), PRODUCTS)
def test_products_in_high_precision_read_what_it_stands_for(name, mode):
    x, dy = normal("x", (ROWS, K)), normal("dy", (ROWS, N))
    model, plain = layers.layer(), layers.layer()
    q = dt.quantize(x, MXFP8Quantizer()).requires_grad_()
    # The values of an MXFP8 tensor quantize to themselves along its rows: the plain layer sees the same operands there.
    want = run(plain, plain, q.detach().dequantize(), HIGH[name], dy)
    with dt.autocast(recipe=HIGH[name]):
        y = compiled(model, mode)(q)
    y.backward(dy)
    got = {"y": y.detach(), "dx": q.grad, **{n: p.grad for n, p in model.named_parameters()}}
    if name == "fprop":  # wgrad multiplies the columnwise copy, which is of x itself
        plain = layers.layer()
        want["weight"] = run(plain, plain, x, HIGH[name], dy)["weight"]
    layers.same_step(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("original", (False, True))
def test_nothing_is_quantized_again(original, mode):
    """`save_original_input` keeps the copy: of a quantized input there is nothing else."""
    model, plain, dy = layers.layer(save_original_input=original), layers.layer(), normal("dy", (ROWS, N))
    x = normal("x", (ROWS, K))
    q = dt.quantize(x, MXFP8Quantizer()).requires_grad_()
    with dt.autocast(recipe=MX):
        y = compiled(model, mode)(q)
    y.backward(dy)
    want = run(plain, plain, x, MX, dy)
    layers.same_step({"y": y.detach(), "dx": q.grad, **{n: p.grad for n, p in model.named_parameters()}}, want)


def test_by_another_quantizer_of_the_format():
    """The copy's format counts, not how its scales were found."""
    q = dt.quantize(normal("x", (ROWS, K)), Float8CurrentScalingQuantizer(force_pow_2_scales=True))
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        model = layers.layer()
        with torch.no_grad(), dt.autocast(recipe=recipe):
            w = quantized(model.weight, recipe.quantizer(QuantizerRole("linear", "weight")))
            same(model(q), dt.gemm(q, w, bias=model.bias, fast_accum=recipe.fast_accum("fprop")))


X = normal("x", (ROWS, K), "bfloat16")
ROTATED = NVFP4Quantizer(with_rht=True)
BAD = {
    "another format": (
        lambda: dt.quantize(X, MXFP8Quantizer(fp8_dtype="float8_e5m2")),
        "mxfp8", r"input is held as .*e5m2.*, and the recipe asks for .*e4m3.*; quantize it by recipe.quantizer",
    ),
    "another block": (lambda: dt.quantize(X, MXFP8Quantizer()), "fp8-current", "input is held as .*asks for"),
    "no rowwise copy": (
        lambda: dt.quantize(X, MXFP8Quantizer(rowwise=False)), "mxfp8", r"rowwise copy.*with_usage\(rowwise=True\)",
    ),
    "no columnwise copy": (
        lambda: dt.quantize(X, MXFP8Quantizer(columnwise=False)), "mxfp8",
        r"columnwise copy.*with_usage\(columnwise=True\)",
    ),
    "not rotated": (
        lambda: dt.quantize(X, NVFP4Quantizer()), "nvfp4",
        r"input is held by NVFP4Quantizer\(.*asks for NVFP4Quantizer\(.*with_rht=True",
    ),
    "scaled by row": (
        lambda: dt.quantize(X, ROTATED.replace(row_scaled_nvfp4=True)), "nvfp4",
        r"held by NVFP4Quantizer\(.*row_scaled_nvfp4=True.*asks for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs(name):
    make, recipe, message = BAD[name]
    model, q = layers.layer(), make()
    with dt.autocast(recipe=RECIPES[recipe]):
        with pytest.raises(ValueError, match=message):
            model(q)
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(model, fullgraph=True, backend="aot_eager")(q)
        if "columnwise" in name or name == "not rotated":  # which inference and frozen weights do not read
            with torch.no_grad():
                model(q)
            model.weight.requires_grad_(False)
            model(q.requires_grad_()).sum().backward()
            assert type(q.grad) is torch.Tensor


def test_a_rotated_copy_alone_has_no_values():
    q = dt.quantize(X, ROTATED.with_usage(rowwise=False))
    for call in (lambda: layers.layer()(q), lambda: composed.linear(K, N)(q), lambda: composed.mlp(K, N)(q)):
        with pytest.raises(ValueError, match="needs the rowwise copy"):
            call()


@pytest.mark.parametrize("training", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("kind", ("linear", "mlp"))
def test_a_norm_takes_what_its_input_stands_for(kind, name, training):
    """Compiled: `test_compiled_matrix`."""
    make = {"linear": lambda: composed.linear(K, N), "mlp": lambda: composed.mlp(K, N)}[kind]
    model, plain, recipe = make(), make(), RECIPES[name]
    q = quantized(composed.input_for(recipe, (ROWS, K)), input_quantizer(name))
    if training:
        want = run(plain, plain, q.dequantize(), recipe)
        dt.seed_rng(model, layers.SEED)
        q.requires_grad_()
        with dt.autocast(recipe=recipe):
            y = model(q)
        y.backward(torch.ones_like(y))
        grads = {n: p.grad for n, p in model.named_parameters()}
        layers.same_step({"y": y.detach(), "dx": q.grad, **grads}, want)
    else:
        with torch.no_grad(), dt.autocast(recipe=recipe):
            same(model(q), plain(q.dequantize()))


@pytest.mark.parametrize("mode", MODES)
def test_outside_of_regions_a_quantized_input_is_dequantized(mode):
    for make in (layers.layer, lambda: composed.linear(K, N), lambda: composed.mlp(K, N)):
        model, x = make(), normal("x", (ROWS, K))
        q = dt.quantize(x, MXFP8Quantizer()).requires_grad_()
        v = q.detach().dequantize().requires_grad_()
        fn = compiled(model, mode)
        y, want = fn(q), model(v)
        same(y, want)
        y.sum().backward()
        want.sum().backward()
        same(q.grad, v.grad)


def test_amp():
    model, x = layers.layer(), normal("x", (ROWS, K))
    with torch.amp.autocast("cpu", dtype=torch.bfloat16), dt.autocast(recipe=MX):
        y = model(dt.quantize(x.bfloat16(), MXFP8Quantizer()))
        assert y.dtype == torch.bfloat16
        same(y, model(x.bfloat16()))
        q = dt.quantize(x, MXFP8Quantizer())  # its logical dtype alone changes
        same(model(q), model(q.to(torch.bfloat16)))
        norm, q = composed.linear(K, N), dt.quantize(x, MXFP8Quantizer())
        same(norm(q), norm(q.dequantize(torch.bfloat16)))


def test_calibration_with_a_quantized_input():
    model, q = layers.layer(), dt.quantize(normal("x", (ROWS, K)), MXFP8Quantizer())
    with dt.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        y = model(q)
    same(y, torch.nn.functional.linear(q.dequantize(), model.weight, model.bias))
