"""Linear: the oracle's bits, compiled and eager alike, and everything around it that nn.Linear's users do."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import RECIPES, Float8CurrentScaling, MMParams, MXFP8BlockScaling
from diptych.core import kernel_table, reset_calls
from torch_frontend import layer_cases as layers
from torch_frontend import tools
from torch_frontend.layer_cases import STATELESS
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

pytestmark = pytest.mark.sampled

MX = MXFP8BlockScaling()
_layer, _run, _same_step = layers.layer, layers.run, layers.same_step


@pytest.mark.parametrize("dtypes", (("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_step_is_the_oracles(name, dtypes):
    """Forward and backward, x and parameters of differing dtypes."""
    x_dtype, p_dtype = dtypes
    recipe = RECIPES[name]
    if layers.packed(recipe):
        x_dtype = "bfloat16"
    for shape in layers.SHAPES[layers.packed(recipe)]:
        layer = _layer(dtype=getattr(torch, p_dtype))
        x, dy = normal("x", shape, x_dtype), normal("dy", (*shape[:-1], 64), x_dtype)
        got = _run(layer, layer, x, recipe, dy)
        _same_step(got, layers.oracle_step(recipe, x, layer.weight, layer.bias, dy))
        assert (got["y"].dtype, got["weight"].dtype) == (x.dtype, layer.weight.dtype)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_close_to_high_precision(name, device):
    layer, x = _layer(256, 128, device=device), layers.x_for(name, 64, 256, device=device)
    got, want = _run(layer, layer, x, RECIPES[name]), None
    with dt.autocast(enabled=False):
        want = torch.nn.functional.linear(x.float(), layer.weight, layer.bias)
    error = (got["y"].float() - want).norm() / want.norm()
    assert 1e-4 < error < (0.2 if layers.packed(name) else 0.06), error


BACKENDS = [(n, "aot_eager") for n in STATELESS]
BACKENDS += [(n, "inductor") if n in ("mxfp8", "nvfp4") else layers.slow(n, "inductor") for n in STATELESS]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_compiled_is_eager(name, backend, device):
    """Two layers, forward and backward, in one graph: the same bits under Inductor and aot_eager."""
    model = torch.nn.Sequential(
        _layer(96, 64, device=device), torch.nn.ReLU(), _layer(64, 32, bias=False, device=device)
    )
    x = normal("x", (2, 16, 96), layers.dtype_of(name), device=device)
    dy = torch.ones((), device=device, dtype=x.dtype).expand(2, 16, 32)  # a stride-0 gradient
    want = _run(model, model, x, RECIPES[name], dy)
    torch._dynamo.reset()
    _same_step(_run(torch.compile(model, fullgraph=True, backend=backend), model, x, RECIPES[name], dy), want)


@pytest.mark.parametrize("name", [n if n in ("fp8-current", "nvfp4") else layers.slow(n) for n in STATELESS])
def test_compiled_with_dynamic_shapes(name):
    layer = _layer(96, 64)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (144, 272, 208) if layers.packed(name) else (130, 257, 200):
        x = normal("x", (rows, 96), layers.dtype_of(name))
        _same_step(_run(compiled, layer, x, RECIPES[name]), _run(layer, layer, x, RECIPES[name]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_inductor_with_dynamic_shapes():
    layer = _layer(96, 64)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (130, 257):
        x = normal("x", (rows, 96))
        _same_step(_run(compiled, layer, x, MX), _run(layer, layer, x, MX))


def test_the_quantized_kernels_ran(device):
    layer, x = _layer(device=device), normal("x", (4, 96), device=device)
    reset_calls()
    with dt.autocast(recipe=MX):
        layer(x).sum().backward()
    assert (calls("quantize"), calls("gemm"), calls("bias_grad")) == (3, 2, 1)  # no dgrad: x needs no gradient
    assert {r["backend"] for r in kernel_table() if r["calls"]} == {device}
    reset_calls()
    with dt.autocast(recipe=MX), torch.no_grad():
        layer(x)
    assert (calls("quantize"), calls("gemm")) == (2, 1)
    reset_calls()
    layer(x).sum().backward()
    with dt.autocast(enabled=False):
        layer(x).sum().backward()
    assert not any(r["calls"] for r in kernel_table())


@pytest.mark.parametrize("frozen", ("weight", "bias", "x", "weight and bias", "x and weight"))
def test_frozen_parts_cost_nothing_and_change_nothing(frozen):
    layer, x = _layer(), normal("x", (5, 96))
    whole = _run(layer, layer, x, MX)
    layer.zero_grad(set_to_none=True)
    layer.weight.requires_grad_("weight" not in frozen)
    layer.bias.requires_grad_("bias" not in frozen)
    x = x.requires_grad_(not frozen.startswith("x"))
    reset_calls()
    with dt.autocast(recipe=MX):
        y = layer(x)
    y.backward(torch.ones_like(y))
    needed = x.requires_grad + layer.weight.requires_grad
    assert (calls("gemm"), calls("quantize")) == (1 + needed, 2 + (needed > 0))
    for key, got in (("dx", x.grad), ("weight", layer.weight.grad), ("bias", layer.bias.grad)):
        assert got is None or same(got, whole[key], key) is None
    assert (x.grad is None) == (not x.requires_grad)


def test_backward_keeps_the_quantized_copies_alone():
    layer, x = _layer(), normal("x", (5, 96)).requires_grad_()
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), dt.autocast(recipe=MX):
        layer(x)
    assert {t.dtype for t in saved} == {torch.float8_e4m3fn, torch.float8_e8m0fnu}
    assert sum(t.numel() for t in saved if t.dtype == torch.float8_e4m3fn) == x.numel() + layer.weight.numel()


def test_empty_batches(device):
    for shape in ((0, 96), (2, 0, 96)):
        for recipe in RECIPES.values():
            layer = _layer(device=device)
            x = torch.zeros(shape, device=device, dtype=getattr(torch, layers.dtype_of(recipe)))
            out = _run(layer, layer, x, recipe)
            assert out["y"].shape == (*shape[:-1], 64) and out["dx"].shape == shape
            assert not out["weight"].any() and not out["bias"].any()


def test_a_modules_recipe_goes_before_the_regions():
    layer, own, x = _layer(), _layer(recipe=MX), normal("x", (4, 96))
    with dt.autocast(recipe=MX):
        want = layer(x)
    with dt.autocast():
        same(own(x), want)
        assert not torch.equal(layer(x), want)
    same(own(x), want)  # as in a region that the call opens
    with dt.autocast(enabled=False):
        same(own(x), torch.nn.functional.linear(x, own.weight, own.bias))
    assert "recipe=MXFP8BlockScaling" in repr(own)


def test_is_an_nn_linear():
    torch.manual_seed(0)
    ours = dt.Linear(8, 4)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(8, 4)
    assert isinstance(ours, torch.nn.Linear)
    for (name, a), (other, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other
        same(a, b)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8)
    same(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)[:-1] + ", recipe=None: needs autocast)"
    assert dt.Linear(8, 4, bias=False, dtype=torch.bfloat16, device="meta").weight.device.type == "meta"
    with dt.autocast(recipe=MX):
        want = ours(x)
        same(copy.deepcopy(ours)(x), want)
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        same(torch.load(file, weights_only=False)(x), want)


def test_meta_and_fake_tensors_get_shapes():
    layer = dt.Linear(96, 64, device="meta")
    with dt.autocast(recipe=MX):
        y = layer(torch.zeros(2, 3, 96, device="meta", requires_grad=True))
        y.sum().backward()
    assert y.shape == (2, 3, 64) and layer.weight.grad.shape == (64, 96)


@pytest.mark.parametrize("amp", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_amp(name, amp, device):
    """x takes amp's dtype, and so does y; weights are quantized from their own."""
    recipe = RECIPES[name]
    if layers.packed(recipe):
        if amp == torch.float16:
            pytest.skip("the Hadamard transform is for bfloat16 alone")
        recipe = recipe.replace(disable_stochastic_rounding=True)
    x = normal("x", (16, 96), device=device)
    layer = _layer(device=device)
    want = _run(layer, layer, x.to(amp), recipe)
    layer = _layer(device=device)
    with torch.amp.autocast(device, amp):
        y = _run(layer, layer, x, recipe)
    assert y["y"].dtype == amp and y["dx"].dtype == torch.float32
    want["dx"] = want["dx"].float()
    _same_step(y, want)
    assert y["weight"].dtype == y["bias"].dtype == torch.float32


def test_amp_and_checkpoint_inside_of_one_graph():
    layer, x = _layer(96, 96), normal("x", (5, 96))

    def body(x):
        return checkpoint(layer, layer(x), use_reentrant=False)

    torch._dynamo.reset()
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    with torch.amp.autocast("cpu", torch.bfloat16):
        got, want = (_run(fn, layer, x, MX) for fn in (compiled, body))
    assert got["y"].dtype == torch.bfloat16
    _same_step(got, want)


def test_inference_mode():
    layer, x = _layer(), normal("x", (5, 96))
    with dt.autocast(recipe=MX):
        want = layer(x).detach()
        with torch.inference_mode():
            same(layer(x), want)


def test_grad_scaler(device):
    """A scaled loss gives scaled gradients; a step is taken, and skipped where one overflows."""
    layer, x = _layer(device=device), normal("x", (5, 96), device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for fn in (layer, compiled):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
        for factor, stepped in ((1.0, True), (float("inf"), False)):
            before = layer.weight.detach().clone()
            optimizer.zero_grad()
            with torch.amp.autocast(device, torch.float16), dt.autocast():
                loss = fn(x).float().pow(2).mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, layer.weight) != stepped
        assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("special", (float("inf"), -float("inf"), float("nan")))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_infinite_values_are_not_lost(name, special, device):
    """They come out as NaN where the product has them, and leave everything else as it is."""
    layer, x = _layer(device=device), layers.x_for(name, 32, 96, device)
    dy = normal("dy", (32, 64), layers.dtype_of(name), device)
    want = _run(layer, layer, x, RECIPES[name], dy)
    spoiled, x = dy.clone(), x.clone()
    spoiled[9, 3], x[20, 7] = special, special
    got = _run(layer, layer, x, RECIPES[name], spoiled)
    for key, rows, cols in (("y", [20], []), ("dx", [9], []), ("weight", [3], [7]), ("bias", [3], [])):
        nan = torch.zeros_like(want[key], dtype=torch.bool)
        nan[rows], nan[..., cols] = True, True
        assert not got[key][nan].isfinite().any() and got[key][~nan].isfinite().all(), key
        error = (got[key] - want[key])[~nan].float().norm() / want[key].float().norm()
        assert error < (0.35 if layers.packed(name) else 0.1), (key, error)


@pytest.mark.parametrize("name", [n for n in RECIPE_NAMES if not layers.packed(n)])
def test_grad_scaler_sees_an_overflown_gradient(name, device):
    """One that float16 autocast makes between two layers, which scales of its own would have made finite."""
    model = torch.nn.Sequential(_layer(bias=False, device=device), torch.nn.ReLU(), _layer(64, 48, device=device))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    with torch.autocast(device, torch.float16), dt.autocast(recipe=RECIPES[name]):
        loss = model(normal("x", (32, 96), device=device)).float().square().sum()
    scaler.scale(loss).backward()
    assert not model[0].weight.grad.isfinite().all() and not model[2].weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**29 and torch.equal(model[0].weight, before)


@pytest.mark.parametrize("region", ("outside", "inside", "in the block"))
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint(reentrant, region, device):
    """Recomputed with the recipe of the forward, wherever backward stands."""
    a, b = _layer(name="a", device=device), _layer(64, 96, name="b", device=device)
    model = torch.nn.Sequential(a, torch.nn.GELU(), b)
    x = normal("x", (5, 96), device=device)

    def block(v):
        with dt.autocast(enabled=True, recipe=MX):
            return model(v)

    def step(checkpointed):
        model.zero_grad(set_to_none=True)
        xx = x.clone().requires_grad_()
        body = block if region == "in the block" else model
        with dt.autocast(recipe=MX):
            y = checkpoint(body, xx, use_reentrant=reentrant) if checkpointed else body(xx)
            if region == "inside":
                y.sum().backward()
        if region != "inside":
            y.sum().backward()
        return [y.detach(), xx.grad, *(p.grad for p in model.parameters())]

    reset_calls()
    want = step(False)
    plain = calls("gemm")
    for got, expected in zip(step(True), want, strict=True):
        same(got, expected)
    assert calls("gemm") == plain + plain + 2  # the recomputed forward
    model(x)  # evaluation outside of a region stays in high precision
    assert calls("gemm") == 2 * plain + 2


def test_hooks_and_shared_weights():
    layer, x = _layer(96, 96), normal("x", (5, 96))
    seen = []
    layer.register_full_backward_hook(lambda module, dx, dy: seen.append(tuple(dy[0].shape)))
    layer.weight.register_hook(lambda g: g * 2)
    with dt.autocast(recipe=MX):
        layer(layer(x)).sum().backward()
    assert seen == [(5, 96), (5, 96)]
    assert layer.weight.grad is not None


def test_a_second_derivative_is_an_error():
    layer, x = _layer(), normal("x", (5, 96)).requires_grad_()
    with dt.autocast(recipe=MX):
        y = layer(x)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y.sum().backward()  # the first one is still there


def test_backward_twice_with_a_retained_graph():
    layer, x = _layer(), normal("x", (5, 96))
    with dt.autocast(recipe=MX):
        y = layer(x).sum()
    y.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    y.backward()
    same(layer.weight.grad, once * 2)


def test_fast_accumulation_reaches_the_gemm(monkeypatch):
    from diptych.torch.graph.program import Programs
    from diptych.torch.layers.linear import _linear
    from diptych.torch.primitives import quantize as quantize_ops

    for call in (_linear.eager_forward, _linear.eager_backward):  # programs of earlier tests would not call gemm
        monkeypatch.setattr(call, "_programs", Programs())
    seen = []
    real = quantize_ops._core.gemm
    monkeypatch.setattr(quantize_ops._core, "gemm", lambda *args: (seen.append(args[-1]), real(*args))[1])
    layer, x = _layer(), normal("x", (5, 96))
    params = MMParams(use_split_accumulator=False)
    for recipe, want in (
        (Float8CurrentScaling(), [True, False, False]),
        (Float8CurrentScaling(fp8_gemm_fprop=MMParams(), fp8_gemm_wgrad=params), [False, False, True]),
        (Float8CurrentScaling(fp8_gemm_dgrad=params), [True, True, False]),
        (MX, [False, False, False]),
    ):
        seen.clear()
        _run(layer, layer, x, recipe)
        assert seen == want


QUANTIZED = dt.quantize(torch.zeros(4, 96), tools.role(RECIPES["fp8-current"], "input"))
BAD = {
    "features": (lambda layer: layer(torch.zeros(4, 95)), ValueError, r"do not fit: \[4, 95\]"),
    "scalar": (lambda layer: layer(torch.tensor(1.0)), ValueError, "do not fit"),
    "float64": (lambda layer: layer(torch.zeros(4, 96).double()), TypeError, "input must be float32"),
    "int": (lambda layer: layer(torch.zeros(4, 96).int()), TypeError, "input must be float32"),
    "weight": (lambda layer: layer.double()(torch.zeros(4, 96)), TypeError, "weight must be float32"),
    "device": (lambda layer: layer(torch.zeros(4, 96, device="meta")), ValueError, "weight is on cpu"),
    "quantized": (
        lambda layer: layer(QUANTIZED),
        ValueError,
        "the input is held as .*, and the recipe asks for",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """Refused before any kernel starts, and at trace time where compiled."""
    call, error, message = BAD[name]
    layer = _layer()
    reset_calls()
    with dt.autocast(recipe=MX):
        with pytest.raises(error, match=message):
            call(layer)
        assert not any(r["calls"] for r in kernel_table())
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            call(torch.compile(_layer(), fullgraph=True, backend="aot_eager"))
    assert not any(r["calls"] for r in kernel_table())


def test_importing_is_quick_and_loads_no_cuda():
    """diptych.torch, once its bytecode is written, adds under 0.35 s of one core to `import torch`, or 0.2 of its time
    on a slower machine, and neither Dynamo nor a CUDA library."""
    code = """
import time
begun = time.process_time()
import torch, sys
before = set(sys.modules)
start = time.process_time()
import diptych.torch
print((time.process_time() - start) / max(0.35, 0.2 * (start - begun)))
new = set(sys.modules) - before
assert not any(m.startswith(("torch._dynamo", "torch._inductor", "jax")) for m in new), new
maps = open("/proc/self/maps").read()
assert torch.version.cuda or "libcuda" not in maps and "libcublas" not in maps
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times = []
    while len(times) < 3 and min(times, default=1) >= 1:  # the fastest of three: the first may write bytecode
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        times.append(float(done.stdout))
    assert min(times) < 1, times
