"""The training surface of Linear: alternatives that must agree do so in bits, in one module and under every recipe."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    RecipeSwitchWarning,
)
from diptych.core import reset_calls
from diptych.torch.state import scales as scale_states
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import DELAYED, NAMED
from torch_frontend.layer_cases import all_same as _all_same
from torch_frontend.layer_cases import gelu_model as _model
from torch_frontend.layer_cases import train as _train
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MX = MXFP8BlockScaling()


# --- what is saved ---


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_save_original_input(name):
    recipe = NAMED[name]
    _all_same(_train(layers.layer(save_original_input=True), recipe), _train(layers.layer(), recipe))
    x, saved = layers.x_for(recipe, 16).requires_grad_(), []
    layer = layers.layer(save_original_input=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, dt.autocast(recipe=recipe):
        layer(x)
    assert any(t.data_ptr() == x.data_ptr() and t.dtype == x.dtype for t in saved)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_saved_tensors_go_to_the_host(name):
    """Through torch's hooks: all that backward needs is plain tensors, and it gives the same bits from copies."""
    recipe = NAMED[name]
    model, plain = _model(), _model()
    seen = []

    def pack(t):
        assert type(t) in (torch.Tensor, torch.nn.Parameter)
        seen.append(t)
        return t.clone()

    def hooked(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return model(x)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    want = _train(plain, recipe)
    _all_same(_train(model, recipe, fn=hooked), want)
    assert len(seen) > 3 * 4
    _all_same(_train(_reset(model), recipe, fn=offloaded), want)


def _reset(model):
    for m in model:
        if isinstance(m, dt.Linear):
            m.reset_scale_states()
    return model


# --- microbatches ---


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_weight_caching(name):
    """Three microbatches with one quantization of the weight are those with three."""
    recipe = NAMED[name]

    def step(layer, cached):
        layer.zero_grad(set_to_none=True)
        if layers.packed(recipe):
            layer.seed_rng(layers.SEED)
        out = []
        for i in range(6):  # two steps of three microbatches
            if i % 3 == 0:
                with torch.no_grad():
                    layer.weight.mul_(1.5)
                region = dt.autocast(recipe=recipe)
                region.__enter__()
            x = normal(f"x{i}", (16, 96), layers.dtype_of(recipe)).requires_grad_()
            y = layer(x, is_first_microbatch=(i % 3 == 0) if cached else None)
            y.square().sum().backward()
            out += [y.detach(), x.grad]
            if i % 3 == 2:
                region.__exit__(None, None, None)
        return [*out, layer.weight.grad]

    reset_calls()
    want = step(layers.layer(), False)
    plain = calls("quantize")
    reset_calls()
    _all_same(step(layers.layer(), True), want)
    assert calls("quantize") == plain - 4


@pytest.mark.parametrize("flag", ("is_first_microbatch", "skip_weight_update"))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_weight_kept_in_inference_mode_serves_training(name, flag):
    """A weight that the first microbatch keeps in inference mode serves training, as one kept under no_grad does: its
    copies are ordinary tensors, which autograd can save."""
    recipe, found = NAMED[name], []
    for off in (torch.inference_mode, torch.no_grad):
        layer, x = layers.layer(), layers.x_for(recipe, 16).requires_grad_()
        layer.seed_rng(layers.SEED)
        given = [i == 0 if flag == "is_first_microbatch" else torch.tensor([float(i)]) for i in range(2)]
        with off(), dt.autocast(recipe=recipe):
            layer(x, **{flag: given[0]})
            with torch.inference_mode(False), torch.no_grad():
                layer.weight.mul_(3)
        with dt.autocast(recipe=recipe):
            y = layer(x, **{flag: given[1]})
        y.square().sum().backward()
        found.append([y.detach(), x.grad, layer.weight.grad])
    _all_same(*found)


def test_weight_caching_in_bad_order():
    layer, x = layers.layer(), normal("x", (4, 96))
    with dt.autocast(recipe=MX):
        with pytest.raises(ValueError, match="the first microbatch passes True"):
            layer(x, is_first_microbatch=False)
        with pytest.raises(ValueError, match="give one"):
            layer(x, is_first_microbatch=True, skip_weight_update=torch.ones(1))
        layer(x, is_first_microbatch=True)
    scale_states._warned.clear()
    with dt.autocast(recipe=Float8BlockScaling()):
        with pytest.warns(RecipeSwitchWarning, match="quantized anew"):
            got = layer(x, is_first_microbatch=False)
        same(got, layer(x))
    layer.load_state_dict(layer.state_dict())
    with dt.autocast(recipe=MX), pytest.raises(ValueError, match="the first microbatch passes True"):
        layer(x, is_first_microbatch=False)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_the_flag_that_skips_on_the_device(name):
    recipe = NAMED[name]
    layer, x = layers.layer(), layers.x_for(recipe, 16)
    flag, outs = torch.zeros(1), []
    with dt.autocast(recipe=recipe):
        first = layer(x, skip_weight_update=flag)
        kept = [t.data_ptr() for t in layer._caches[""].copies[0][:2]]
        with torch.no_grad():
            layer.weight.mul_(3)
        flag.fill_(1)
        outs.append(layer(x, skip_weight_update=flag))
        flag.zero_()
        outs.append(layer(x, skip_weight_update=flag))
        want = layer(x)
        assert [t.data_ptr() for t in layer._caches[""].copies[0][:2]] == kept  # graphs hold these
    same(outs[0], first)
    same(outs[1], want)
    assert not torch.equal(first, want)


def test_the_flag_keeps_skipped_weights_out_of_the_history():
    layer, x = layers.layer(), normal("x", (4, 96))
    with dt.autocast(recipe=DELAYED):
        layer(x, skip_weight_update=torch.zeros(1))
        before = layer.scale_states.weight.amax_history.clone()
        with torch.no_grad():
            layer.weight.mul_(3)
        layer(x, skip_weight_update=torch.ones(1))
        same(layer.scale_states.weight.amax_history, before)
        layer(x, skip_weight_update=torch.zeros(1))
    same(layer.scale_states.weight.amax_history[:1], before[:1] * 3)


# --- weights held quantized ---


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_quantized_model_init(name):
    """A quantized weight gives the products of the plain weight that it was made of."""
    recipe = NAMED[name]
    torch.manual_seed(1)
    plain = dt.Linear(96, 64)
    torch.manual_seed(1)
    with dt.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = dt.Linear(96, 64)
    assert isinstance(layer.weight, torch.nn.Parameter) and isinstance(layer.weight, dt.QuantizedParameter)
    assert not isinstance(layer.bias, dt.QuantizedParameter)
    same(layer.weight.get_high_precision_init_val(), plain.weight)
    if name == "fp8-delayed":
        recipe = Float8CurrentScaling()  # the weight's scale is its own
    want = _train(plain, recipe, 2)
    reset_calls()
    got = _train(layer, recipe, 2)
    _all_same(got, want)
    assert calls("quantize") == 2 * 2  # x and dy: the weight is not quantized again
    same(
        layer(normal("x", (4, 96))),
        torch.nn.functional.linear(normal("x", (4, 96)), layer.weight.dequantize(), layer.bias),
    )
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_master_weights(name):
    """The optimizer steps a float32 master, and copy_ quantizes it again: the same run as with plain weights."""
    recipe = NAMED[name]
    recipe = Float8CurrentScaling() if name == "fp8-delayed" else recipe
    torch.manual_seed(1)
    plain = dt.Linear(96, 64, bias=False)
    torch.manual_seed(1)
    with dt.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = dt.Linear(96, 64, bias=False)
    master = layer.weight.get_high_precision_init_val().clone()
    optimizers = [torch.optim.AdamW([p], lr=0.05) for p in (plain.weight, master)]
    for m in (plain, layer):
        m.seed_rng(layers.SEED)
    for i in range(3):
        x = normal(f"x{i}", (16, 96), layers.dtype_of(recipe))
        for m, optimizer in zip((plain, layer), optimizers, strict=True):
            m.zero_grad(set_to_none=True)
            with dt.autocast(recipe=recipe):
                y = m(x)
            y.square().sum().backward()
            if m is layer:
                master.grad = m.weight.grad.float()
            optimizer.step()
        with torch.no_grad():
            layer.weight.copy_(master)
        same(master, plain.weight)
    with dt.autocast(recipe=recipe):
        same(layer(x), plain(x))


def test_a_quantized_weight_travels():
    with dt.quantized_model_init(recipe=MX):
        layer, other = dt.Linear(96, 64), dt.Linear(96, 64)
    x = normal("x", (4, 96))

    def run(m):
        with dt.autocast(recipe=MX):
            return m(x)

    want = run(layer)
    same(run(copy.deepcopy(layer)), want)
    assert copy.deepcopy(layer).weight.requires_grad
    other.load_state_dict(layer.state_dict())
    same(run(other), want)
    for whole in (False, True):
        file = io.BytesIO()
        torch.save(layer if whole else layer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=not whole)
        if not whole:
            other.load_state_dict(loaded)
            loaded = other
        same(run(loaded), want)
        assert loaded.weight.requires_grad
    high = torch.nn.Linear(96, 64)
    other.load_state_dict(high.state_dict())  # a checkpoint in high precision is quantized on its way in
    ours = dt.Linear(96, 64)
    ours.load_state_dict(high.state_dict())
    same(run(other), run(ours))


def test_a_quantized_weight_and_what_it_cannot():
    with dt.quantized_model_init(recipe=MX):
        layer = dt.Linear(96, 64)
        with dt.quantized_model_init(enabled=False):
            assert type(dt.Linear(4, 4).weight) is torch.nn.Parameter
    assert type(dt.Linear(4, 4).weight) is torch.nn.Parameter
    x = normal("x", (4, 96))
    with dt.autocast(recipe=Float8BlockScaling()), pytest.raises(ValueError, match="held as mxfp8_e4m3"):
        layer(x)
    with pytest.raises(ValueError, match="copy_ into a quantized parameter"), torch.no_grad():
        layer.weight.copy_(torch.zeros(96, 64))
    with pytest.raises(TypeError, match="recipe must be"):
        dt.quantized_model_init(recipe="mxfp8")


def test_second_step_of_plain_training_lowers_the_loss():
    """An end-to-end check that the pieces go together: all options at once, ten steps."""
    model = torch.nn.Sequential(
        layers.layer(96, 96, name="a", fuse_wgrad_accumulation=True, delay_wgrad_compute=True),
        torch.nn.GELU(),
        layers.layer(96, 96, name="b", save_original_input=True),
    )
    model[0].weight.main_grad = torch.zeros(96, 96)
    x, target = normal("x", (16, 96)), normal("t", (16, 96))
    losses = []
    for _ in range(10):
        model.zero_grad(set_to_none=True)
        model[0].weight.main_grad.zero_()
        with dt.autocast(recipe=DELAYED):
            loss = (dt.checkpoint(model, x) - target).square().mean()
        loss.backward()
        model[0].backward_dw()
        with torch.no_grad():
            model[0].weight -= 0.02 * model[0].weight.main_grad
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.02 * p.grad
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# --- under torch.compile ---


def _options():
    no = {"dtype": torch.float32}
    return {
        "first microbatch": (no, {"is_first_microbatch": True}),
        "held quantized": ({"init": True}, {}),
        "save_original_input": ({"save_original_input": True}, {}),
    }


@pytest.mark.sampled  # test_compiled_matrix.py has each module with each recipe
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("option", _options())
def test_options_compile(option, backend):
    made, called = _options()[option]
    results = []
    for compiled in (False, True):
        torch.manual_seed(1)
        with dt.quantized_model_init(enabled="init" in made, recipe=MX):
            layer = dt.Linear(96, 64, **{k: v for k, v in made.items() if k != "init"})
        torch._dynamo.reset()
        fn = torch.compile(layer, fullgraph=True, backend=backend) if compiled else layer
        results.append(_train(layer, MX, fn=lambda x, fn=fn: fn(x, **called)))
    _all_same(results[1], results[0])
