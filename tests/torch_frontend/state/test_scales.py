"""Delayed scaling's states and the random generator: when they change, what survives, and what is refused."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import pytest
import torch

import diptych.torch as dt
import oracle
from diptych.common import (
    CheckpointError,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    RecipeSwitchWarning,
    linear_plan,
)
from diptych.torch.layers.quantize import rng_at, rng_take
from diptych.torch.state import scales as state
from diptych.torch.state.scales import ScaleSlot, resize_history
from torch_frontend import layer_cases as layers
from torch_frontend.tools import normal, same

SHORT = DelayedScaling(amax_history_len=4)
SLOTS = ("input", "weight", "grad_output")
TOP = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def _step(layer, x, recipe=SHORT, dy=None, **region):
    """One region, forward and backward; the gradient of the output is dy."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with dt.autocast(recipe=recipe, **region):
        y = layer(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return {"y": y.detach(), "dx": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


def _states(layer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in layer.state_dict().items() if "scale_states" in k or k == "rng_state"}


def _amax(t) -> float:
    return float(dt.amax(t.detach()))


@pytest.mark.parametrize("algo", ("max", "most_recent", "callable"))
def test_steps_are_the_oracles(algo):
    """Scales, histories and results of six steps, with growing and shrinking inputs."""

    def second(history, last):
        assert history.shape == (1, 4) and last.shape == (1,)
        history.zero_()  # a copy: the state's own is not to be had
        return last * 2

    recipe = DelayedScaling(amax_history_len=4, margin=1, amax_compute_algo=second if algo == "callable" else algo)
    layer = layers.layer()
    history = {s: np.zeros((1, 4), np.float32) for s in SLOTS}
    scale = {s: np.ones(1, np.float32) for s in SLOTS}
    for i, factor in enumerate((1.0, 8.0, 0.25, 1.0, 0.0, 2.0)):
        x, dy = normal(f"x{i}", (5, 96)) * factor, normal(f"dy{i}", (5, 64)) * factor
        for s in SLOTS:
            pending = history[s][:, 0]
            amax = pending * 2 if algo == "callable" else None
            history[s], scale[s] = oracle.scale_update(
                history[s], scale[s], fp8_max=TOP[s], margin=1, most_recent=algo == "most_recent", amax=amax
            )
        got = _step(layer, x, recipe, dy)
        want = layers.oracle_step(recipe, x, layer.weight, layer.bias, dy, {s: scale[s][0] for s in SLOTS})
        layers.same_step(got, want)
        for s, t in (("input", x), ("weight", layer.weight), ("grad_output", dy)):
            history[s][0, 0] = max(history[s][0, 0], _amax(t))
            slot = layer.scale_states.get_submodule(s)
            same(slot.amax_history, history[s][0], (i, s))
            same(slot.scale, scale[s], (i, s))
            assert slot.fp8_max.item() == TOP[s]


def test_a_region_is_one_step():
    """Shared weights and microbatches inside of one region join by max; the next region updates once."""
    layer, small, big = layers.layer(96, 96), normal("a", (4, 96)), normal("b", (4, 96)) * 3
    with dt.autocast(recipe=SHORT):
        layer(big)
        with dt.autocast(recipe=SHORT):  # nested: no step of its own
            layer(small)
        with dt.autocast(enabled=False), dt.autocast(recipe=SHORT):
            layer(small)
        assert layer.scale_states.input.scale.item() == 1.0
    history = layer.scale_states.input.amax_history
    same(history, torch.tensor([_amax(big), 0, 0, 0]))
    with dt.autocast(enabled=False):  # what stands around all steps is no step
        for _ in range(2):
            with dt.autocast(recipe=SHORT):
                layer(small)
    same(layer.scale_states.input.amax_history, torch.tensor([_amax(small), 0, _amax(big), _amax(small)]))
    same(layer.scale_states.input.scale, torch.tensor([448.0]) / _amax(big))


def test_evaluation_reads_and_records_nothing():
    layer, x = layers.layer(), normal("x", (4, 96))
    _step(layer, x)
    _step(layer, x * 2)
    before = _states(layer)
    layer.eval()
    got = _step(layer, x * 5)
    scales = {s: layer.scale_states.get_submodule(s).scale.item() for s in SLOTS}
    layers.same_step(got, layers.oracle_step(SHORT, x * 5, layer.weight, layer.bias, torch.ones(4, 64), scales))
    assert scales["input"] != 1.0
    for key, t in _states(layer).items():
        same(t, before[key], key)


def test_a_backward_after_the_next_forward_uses_the_present_scale():
    """Two forwards, then two backwards: nothing that autograd saved was written over."""
    layer, a, b = layers.layer(), normal("a", (4, 96)), normal("b", (4, 96)) * 4
    _step(layer, a)
    outs = []
    for x in (a, b):
        with dt.autocast(recipe=SHORT):
            outs.append(layer(x))
    for y in outs:
        y.sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("where", ("deepcopy", "pickle", "state dict", "weights only", "safetensors"))
def test_states_travel(where, tmp_path):
    """A copy or a restored module goes on with the same bits, delayed states and random state alike."""
    x = normal("x", (16, 96), "bfloat16")
    recipe = CustomRecipe(_mixed)
    layer = layers.layer(dtype=torch.bfloat16)
    layer.seed_rng(5)
    for i in range(3):
        _step(layer, x * (i + 1), recipe)
    if where == "deepcopy":
        other = copy.deepcopy(layer)
    elif where == "pickle":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        state = layer.state_dict()
        if where == "weights only":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        elif where == "safetensors":
            st = pytest.importorskip("safetensors.torch")
            st.save_file(state, tmp_path / "state.safetensors")
            state = st.load_file(tmp_path / "state.safetensors")
        other = dt.Linear(96, 64, dtype=torch.bfloat16)
        assert other.load_state_dict(state).missing_keys == []
    for key, t in layer.state_dict().items():
        same(other.state_dict()[key], t, key)
    for _ in range(2):
        layers.same_step(_step(other, x, recipe), _step(layer, x, recipe))


def _mixed(role):
    """Delayed operands going forward, stochastic NVFP4 gradients."""
    if role.tensor == "grad_output":
        return NVFP4BlockScaling(disable_rht=True).quantizer(role)
    return SHORT.quantizer(role) if role.gemm != "wgrad" else NVFP4BlockScaling(disable_rht=True).quantizer(role)


def test_keys_are_stable_and_plain_until_used():
    layer = dt.Linear(8, 4)
    assert list(layer.state_dict()) == ["weight", "bias"]
    _step(layer, torch.ones(2, 8))
    want = [f"scale_states.{s}.{b}" for s in SLOTS for b in ("scale", "amax_history", "fp8_max")]
    assert list(layer.state_dict())[2:] == want
    layer.load_state_dict(torch.nn.Linear(8, 4).state_dict())  # a dict of before the first use
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_history_lengths():
    history = torch.tensor([9.0, 1, 2, 3, 4])
    same(resize_history(history, 3), torch.tensor([9.0, 3, 4]))
    same(resize_history(history, 7), torch.tensor([9.0, 0, 0, 1, 2, 3, 4]))
    same(resize_history(history, 1), torch.tensor([9.0]))
    same(resize_history(torch.tensor([9.0]), 3), torch.tensor([9.0, 0, 0]))


@pytest.mark.parametrize("length", (1, 2, 9))
@pytest.mark.parametrize("used", (False, True))
def test_a_changed_history_length(length, used):
    """Through a state dict, into a fresh module and into one that has states, and by a recipe in mid-run. A call that
    does not record reads the scales and leaves the histories; the first one that records resizes them."""
    layer, x = layers.layer(), normal("x", (4, 96))
    for i in range(4):
        _step(layer, x * (i + 1))
    other_recipe = DelayedScaling(amax_history_len=length)
    other = layers.layer()
    if used:
        _step(other, x, other_recipe)
    other.load_state_dict(layer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (layer, other):
            before = {k: t.clone() for k, t in module.state_dict().items()}
            with dt.autocast(recipe=other_recipe):
                module.eval()(x)
            for key, t in module.state_dict().items():
                same(t, before[key], key)
            module.train()
        got, want = _step(other, x, other_recipe), _step(layer, x, other_recipe)
    layers.same_step(got, want)
    assert layer.scale_states.input.amax_history.numel() == length


def test_casts_and_moves_leave_the_states_float32():
    layer = layers.layer()
    _step(layer, normal("x", (4, 96)))
    want = _states(layer)
    for cast in (layer.to(torch.bfloat16), layer.half(), layer.double(), layer.to(torch.float32)):
        for key, t in _states(cast).items():
            same(t, want[key], key)
    assert layer.to("meta").scale_states.input.scale.device.type == "meta"


def _spoiled(state, key, value):
    return {**state, f"scale_states.{key}": value}


BAD_STATES = {
    "element": (lambda s: _spoiled(s, "input.fp8_max", torch.tensor([57344.0])), "up to 57344"),
    "shape": (lambda s: _spoiled(s, "input.scale", torch.ones(2)), r"input.scale must be float32 \[1\]"),
    "dtype": (lambda s: _spoiled(s, "weight.scale", torch.ones(1).half()), r"weight.scale must be float32"),
    "history": (lambda s: _spoiled(s, "weight.amax_history", torch.ones(2, 4)), r"must be float32 \[L\]"),
    "empty": (lambda s: _spoiled(s, "weight.amax_history", torch.ones(0)), r"must be float32 \[L\]"),
    "missing": (lambda s: {k: v for k, v in s.items() if k != "scale_states.input.scale"}, "must hold"),
    "slots": (
        lambda s: {k.replace("states.input", "states.input_fprop"): v for k, v in s.items()},
        "another recipe",
    ),
    "zero scale": (lambda s: _spoiled(s, "input.scale", torch.zeros(1)), r"input\.scale must be finite and greater"),
    "negative scale": (lambda s: _spoiled(s, "weight.scale", -torch.ones(1)), r"weight\.scale must be .*, got -1\b"),
    "NaN scale": (lambda s: _spoiled(s, "weight.scale", torch.full((1,), torch.nan)), r"weight\.scale .*, got nan\b"),
    "inf scale": (lambda s: _spoiled(s, "weight.scale", torch.full((1,), torch.inf)), r"weight\.scale .*, got inf\b"),
    "negative amax": (
        lambda s: _spoiled(s, "input.amax_history", torch.tensor([0, 1.0, -2.0, 1.0])),
        r"input\.amax_history must hold finite amaxes of 0 or more, got -2(?m:$)",
    ),
    "NaN amax": (
        lambda s: _spoiled(s, "input.amax_history", torch.tensor([torch.nan, 1.0, 2.0, 1.0])),
        r"input\.amax_history must hold finite amaxes of 0 or more, got nan(?m:$)",
    ),
    "fp8_max": (lambda s: _spoiled(s, "input.fp8_max", torch.tensor([7.0])), r"input\.fp8_max must be .*, got 7(?m:$)"),
    "rng": (lambda s: {**s, "rng_state": torch.zeros(3, dtype=torch.int32)}, r"rng_state must be int32 \[4\]"),
}


@pytest.mark.parametrize("name", BAD_STATES)
@pytest.mark.parametrize("used", (False, True))
def test_a_state_that_does_not_fit(name, used):
    """Refused when it is loaded, or at the first use where only that tells; nothing is overwritten."""
    spoil, message = BAD_STATES[name]
    source, x = layers.layer(name="source"), normal("x", (4, 96))
    _step(source, x)
    layer = layers.layer()
    if used:
        _step(layer, x * 3)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    late = not used and name in ("element", "slots")
    if late:
        layer.load_state_dict(spoil(source.state_dict()))
        with pytest.raises(CheckpointError, match="another recipe; call reset_scale_states"):
            _step(layer, x)
        layer.reset_scale_states()
        _step(layer, x)
        return
    with pytest.raises(CheckpointError, match=message):
        layer.load_state_dict(spoil(source.state_dict()))
    assert before.keys() == layer.state_dict().keys()
    for key, t in layer.state_dict().items():
        same(t, before[key], key)


def _e5m2_input(role):
    return DelayedScaling(amax_history_len=4, fp8_format=Format.E5M2).quantizer(role)


def test_switching_rebuilds_what_must_be_and_warns_once():
    """HYBRID -> E5M2: the gradient's state stays, the others start anew."""
    model = torch.nn.Sequential(layers.layer(96, 96), layers.layer(96, 64))
    x = normal("x", (4, 96))
    for _ in range(2):
        layers.run(model, model, x, SHORT)
    e5m2 = CustomRecipe(_e5m2_input)
    state._warned.clear()
    with pytest.warns(RecipeSwitchWarning, match="scales of input, weight were") as seen:
        layers.run(model, model, x, e5m2)
    assert len(seen) == 1
    after = _states(model)
    for i in "01":
        same(after[f"{i}.scale_states.input.scale"], torch.ones(1))
        same(after[f"{i}.scale_states.input.fp8_max"], torch.tensor([57344.0]))
        assert (after[f"{i}.scale_states.grad_output.amax_history"] > 0).sum() == 3  # two kept, one pending
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.run(model, model, x, CustomRecipe(_e5m2_input))  # equal by value


def test_to_a_recipe_without_states_and_back():
    layer, x = layers.layer(), normal("x", (4, 96))
    _step(layer, x)
    layer.eval()
    _step(layer, x, Float8BlockScaling())  # evaluated by another recipe: the states stay
    assert "scale_states.input.scale" in layer.state_dict()
    layer.train()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        got = _step(layer, x, Float8BlockScaling())
    layers.same_step(got, _step(layers.layer(), x, Float8BlockScaling()))
    assert "scale_states.input.scale" not in layer.state_dict()
    layers.same_step(_step(layer, x), _step(layers.layer(), x))


def test_states_that_are_loaded_after_a_recipe_without_states():
    """Whatever a module ran by before, states that are loaded meet the next recipe as in a fresh module."""
    trained, x, found = layers.layer(), normal("x", (4, 96)), []
    _step(trained, x)
    saved = _states(trained) | dict(trained.named_parameters())
    for used in (False, True):
        layer = layers.layer()
        if used:
            _step(layer, x)
            _step(layer, x, Float8BlockScaling())
        layer.load_state_dict(saved)
        assert _states(layer).keys() == _states(trained).keys()
        _step(layer, x, Float8BlockScaling())
        found.append(_states(layer))
    assert found == [{}, {}]


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "compiled"])
def test_a_dict_of_other_modules_leaves_states(graphed):
    """Trainers load adapters alone, or one part of a model after another."""
    net = torch.nn.Sequential(layers.layer(), torch.nn.Linear(4, 4))
    dt.prepare(net, DelayedScaling(amax_history_len=4))
    run = torch.compile(net[0], backend="aot_eager") if graphed else net[0]
    for scale in (1.0, 2.0):
        with dt.autocast(recipe=DelayedScaling(amax_history_len=4)):
            run(normal("x", (4, 96)) * scale).sum().backward()
    saved = _states(net[0])
    net.load_state_dict({f"1.{key}": t for key, t in net[1].state_dict().items()}, strict=False)
    assert _states(net[0]).keys() == saved.keys()
    for key, t in saved.items():
        same(_states(net[0])[key], t, key)
    net.load_state_dict({"0.weight": net[0].weight}, strict=False)  # its weights without states: these start anew
    assert _states(net[0])["scale_states.input.scale"] == 1.0


def test_margin_and_algorithm_change_without_a_rebuild():
    layer, x = layers.layer(), normal("x", (4, 96))
    _step(layer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(layer, x, DelayedScaling(amax_history_len=4, margin=2))
    same(layer.scale_states.input.scale, torch.tensor([112.0]) / _amax(x))


BAD_ALGORITHMS = {
    "number": (lambda history, last: 1.0, TypeError, "returned float"),
    "shape": (lambda history, last: history, ValueError, r"must return float32\[1\]"),
    "dtype": (lambda history, last: last.half(), ValueError, r"must return float32\[1\]"),
}


@pytest.mark.parametrize("name", BAD_ALGORITHMS)
def test_an_algorithm_that_returns_the_wrong_thing(name):
    algo, error, message = BAD_ALGORITHMS[name]
    layer, x = layers.layer(), normal("x", (4, 96))
    _step(layer, x)
    before = _states(layer)
    with pytest.raises(error, match=message):
        _step(layer, x, DelayedScaling(amax_history_len=4, amax_compute_algo=algo))
    for key, t in _states(layer).items():
        same(t, before[key], key)


def test_calibration():
    """Amaxes collected in high precision give the scales that a quantized run's would have given."""
    x, dy = normal("x", (4, 96)), normal("dy", (4, 64))
    layer, plain = layers.layer(), layers.layer()
    for factor in (1.0, 2.0):
        with dt.autocast(enabled=False, calibrating=True, recipe=SHORT):
            xx = (x * factor).requires_grad_()
            y = layer(xx)
        same(y, torch.nn.functional.linear(xx, layer.weight, layer.bias))
        y.backward(dy * factor)
        _step(plain, x * factor, SHORT, dy * factor)
    for key, t in _states(plain).items():
        same(_states(layer)[key], t, key)
    layers.same_step(_step(layer, x, SHORT, dy), _step(plain, x, SHORT, dy))
    with dt.autocast(enabled=False, calibrating=True, recipe=MXFP8BlockScaling()):
        dt.Linear(96, 4)(x)  # nothing to collect


def test_the_function_needs_what_the_module_holds():
    x, w = normal("x", (16, 96), "bfloat16"), normal("w", (64, 96), "bfloat16").requires_grad_()
    with pytest.raises(TypeError, match=r"^linear: .* needs state="):
        dt.linear(x, w, None, SHORT)
    y = dt.linear(x, w, None, NVFP4BlockScaling())  # its forward rounds to nearest
    with pytest.raises(TypeError, match=r"^linear: .* needs rng="):
        y.sum().backward()
    states = dt.ScaleStates(linear_plan(SHORT))
    for i in range(3):
        states.update()
        dt.linear(x * (i + 1), w, None, SHORT, state=states).sum().backward()
    same(states.input.scale, torch.tensor([448.0]) / _amax(x * 2))
    assert isinstance(states.input, ScaleSlot)


class _Scaled(Float8Quantizer):
    """A delayed quantizer of the user's own: it halves what it quantizes."""

    def quantize_impl(self, x, quantize):
        return quantize(x / 2, Float8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise))


def test_a_custom_delayed_quantizer_records():
    quantizer = _Scaled(amax_history_len=4)
    recipe = CustomRecipe(lambda role: quantizer if role.tensor == "input" else _plain(role))
    layer, x = layers.layer(), normal("x", (4, 96))
    got = _step(layer, x, recipe)
    assert layer.scale_states.input.amax_history[0].item() == _amax(x / 2)
    half = CustomRecipe(lambda role: SHORT.quantizer(role) if role.tensor == "input" else _plain(role))
    same(got["y"], _step(layers.layer(), x / 2, half)["y"])


def _plain(role):
    return Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2" if role.tensor == "grad_output" else "float8_e4m3fn")


# --- the random generator ---


def test_offsets_carry_into_the_high_word():
    rng = dt.rng_state(7, 2**32 - 4)
    taken = rng_take(rng, 18)
    assert taken.shape == (9, 4)
    for call in range(9):
        same(taken[call], dt.rng_state(7, 2**32 - 4 + 2 * call))
    same(rng, dt.rng_state(7, 2**32 + 14))
    same(rng_at(rng, 2**33), dt.rng_state(7, 2**32 + 14 + 2**33))


def test_each_step_and_each_layer_has_its_own_bits():
    recipe = NVFP4BlockScaling()
    x, dy = normal("x", (16, 96), "bfloat16"), normal("dy", (16, 96), "bfloat16")
    model = torch.nn.ModuleList([layers.layer(96, 96, dtype=torch.bfloat16) for _ in range(2)])
    dt.seed_rng(model, layers.SEED)
    assert [m.rng_state.tolist()[2:] for m in model] == [[0, 0], [0, 256]]
    first, other = (_step(m, x, recipe, dy) for m in model)
    want = layers.oracle_step(recipe, x, model[0].weight, model[0].bias, dy)
    layers.same_step(first, want)
    layers.same_step(other, layers.oracle_step(recipe, x, model[1].weight, model[1].bias, dy, offset=2**40))
    again = _step(model[0], x, recipe, dy)
    layers.same_step(again, layers.oracle_step(recipe, x, model[0].weight, model[0].bias, dy, offset=18))
    assert not torch.equal(first["dx"], again["dx"]) and not torch.equal(first["dx"], other["dx"])
    same(first["y"], again["y"])


def test_an_unseeded_generator_follows_torchs():
    def run():
        torch.manual_seed(3)
        layer = dt.Linear(32, 32, dtype=torch.bfloat16)
        with dt.autocast(recipe=NVFP4BlockScaling()):
            layer(torch.ones(16, 32, dtype=torch.bfloat16))
        return layer.rng_state

    same(run(), run())
    assert run()[2:].tolist() == [18, 0] and len(set(run()[:2].tolist())) == 2


@pytest.mark.parametrize("seed", (-1, 2**64))
def test_a_seed_out_of_range(seed):
    layer = layers.layer()
    with pytest.raises(ValueError, match="seed"):
        layer.seed_rng(seed)
    assert "rng_state" not in layer.state_dict()
