"""Making all states at once, wherever; who is warned of late ones; copies and files that then have the same keys."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import CustomRecipe, DelayedScaling, LateStateWarning, MXFP8BlockScaling, NVFP4BlockScaling
from torch_frontend.tools import normal, same

SHORT = DelayedScaling(amax_history_len=4)


def _both(role):
    """Delayed scales and a random generator."""
    return NVFP4BlockScaling(disable_rht=True).quantizer(role) if role.gemm == "wgrad" else SHORT.quantizer(role)


BOTH = CustomRecipe(_both)
KINDS = {
    "Linear": lambda **given: dt.Linear(32, 32, **given),
    "LayerNormLinear": lambda **given: dt.LayerNormLinear(32, 32, **given),
    "LayerNormMLP": lambda **given: dt.LayerNormMLP(32, 64, **given),
    "GroupedLinear": lambda **given: dt.GroupedLinear(2, 32, 32, **given),
}
RECIPES = {"delayed": SHORT, "random": NVFP4BlockScaling(disable_rht=True), "both": BOTH}


def _run(module, recipe, x=None):
    x = normal("x", (32, 32)) if x is None else x
    with dt.autocast(recipe=recipe):
        y = module(x, [16, 16]) if isinstance(module, dt.GroupedLinear) else module(x)
    if torch.is_grad_enabled():
        y.sum().backward()
    return y.detach()


def _keys(module):
    return set(module.state_dict())


def _same_dicts(a, b):
    assert list(a) == list(b)
    for key, t in a.items():
        plain = isinstance(t, dt.QuantizedTensor | dt.QuantizedStack)
        same(b[key].dequantize() if plain else b[key], t.dequantize() if plain else t, key)


@pytest.fixture(autouse=True)
def late_states_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LateStateWarning)
        yield


def _by_prepare(kind, recipe):
    module = KINDS[kind]()
    assert dt.prepare(module, recipe) is module
    return module


def _by_convert(kind, recipe):
    return dt.convert(nn.Linear(32, 32), recipe)


def _by_init(kind, recipe):
    with dt.quantized_model_init(recipe=recipe):
        return KINDS[kind]()


def _by_attribute(kind, recipe):
    module = KINDS[kind]()
    module.recipe = recipe
    return module


WAYS = {
    "prepare": _by_prepare,
    "recipe=": lambda kind, recipe: KINDS[kind](recipe=recipe),
    "attribute": _by_attribute,
    "convert": _by_convert,
    "quantized_model_init": _by_init,
}


WAY_CASES = [
    (way, kind, recipe)
    for way, kind, recipe in itertools.product(WAYS, KINDS, RECIPES)
    if (way != "convert" or kind == "Linear")  # it makes no other
    and (way != "quantized_model_init" or recipe == "delayed")  # others quantize a weight in two ways
]


@pytest.mark.parametrize(("way", "kind", "recipe"), WAY_CASES)
def test_every_way_makes_what_a_step_needs(way, kind, recipe):
    """Keys of a prepared module are those of one that ran, and its steps the same bits."""
    recipe = RECIPES[recipe]
    module = WAYS[way](kind, recipe)
    keys = _keys(module)
    assert keys > {name for name, _ in module.named_parameters()}
    held = way == "quantized_model_init"
    with dt.quantized_model_init(recipe=recipe) if held else contextlib.nullcontext():
        plain = KINDS[kind]()
    plain.load_state_dict(module.state_dict())
    for _ in range(3):
        same(_run(module, recipe), _run(plain, recipe))
    assert _keys(module) == keys
    _same_dicts(module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("recipe", RECIPES)
def test_preparing_in_inference_mode(recipe):
    module = KINDS["LayerNormMLP"]()
    with torch.inference_mode():
        dt.prepare(module, RECIPES[recipe])
        module.seed_rng(3)
    assert list(module.buffers()) and not any(t.is_inference() for t in module.buffers())


@pytest.mark.parametrize(
    ("what", "recipe"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[0] == "compile" and case[1] != "both" else ())
        for case in itertools.product(("load", "train", "compile", "deepcopy"), RECIPES)
    ],
)
def test_states_made_in_inference_mode_are_ordinary(what, recipe):
    recipe, module = RECIPES[recipe], dt.Linear(32, 32)
    with torch.inference_mode():
        _run(module, recipe)
    assert not any(t.is_inference() for t in module.buffers())
    if what == "load":
        module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()})
    elif what == "deepcopy":
        module = copy.deepcopy(module)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if what == "compile" else module
    torch._dynamo.reset()
    for _ in range(2):
        _run(run, recipe)
    loaded = dt.Linear(32, 32)
    with torch.inference_mode():
        loaded.load_state_dict(module.state_dict())
        dt.prepare(loaded, DelayedScaling(amax_history_len=9)) if recipe is SHORT else None
    assert not any(t.is_inference() for t in loaded.buffers())
    if recipe is not SHORT:
        same(_run(loaded, recipe), _run(module, recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_meta_modules_begin_as_they_should(recipe):
    recipe = RECIPES[recipe]
    with torch.device("meta"):
        module = dt.prepare(nn.Sequential(dt.Linear(32, 32), dt.LayerNormMLP(32, 64)), recipe)
    assert all(t.is_meta for t in module.buffers())
    keys = _keys(module)
    module.to_empty(device="cpu")
    for part in module:
        part.reset_parameters()
    fresh = dt.prepare(nn.Sequential(dt.Linear(32, 32), dt.LayerNormMLP(32, 64)), recipe)
    assert keys == _keys(module) == _keys(fresh)
    for (key, t), want in zip(module.named_buffers(), fresh.buffers(), strict=True):
        if key.endswith("rng_state"):
            assert t[:2].any() and not t[2:].any()
        else:
            same(t, want, key)
    fresh.load_state_dict(module.state_dict())
    for _ in range(2):
        same(_run(module, recipe), _run(fresh, recipe))


def test_modules_with_a_recipe_of_their_own_keep_it():
    model = nn.Sequential(dt.Linear(32, 32, recipe=MXFP8BlockScaling()), dt.Linear(32, 32), nn.Linear(32, 32))
    dt.prepare(model, SHORT)
    assert {k.split(".")[0] for k in model.state_dict() if "scale_states" in k} == {"1"}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        _run(model, SHORT)
    assert before.keys() == model.state_dict().keys()
    held = {k: v.clone() for k, v in model.state_dict().items()}
    _same_dicts(dt.prepare(model, SHORT).state_dict(), held)  # what fits is kept
    assert not [k for k in dt.prepare(dt.Linear(4, 4)).state_dict() if "scale" in k]


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"^prepare: model must be a torch\.nn\.Module, got DelayedScaling"):
        dt.prepare(SHORT, dt.Linear(4, 4))
    with pytest.raises(TypeError, match=r"^prepare: recipe must be a diptych\.common\.Recipe or None, got str"):
        dt.prepare(dt.Linear(4, 4), "delayed")


# --- copies ----------------------------------------------------------------------------------------------------------


def _model(n=3):
    torch.manual_seed(2)
    return nn.Sequential(*[dt.Linear(32, 32) for _ in range(n)])


def _seen_by(how, model):
    if how == "state_dict":
        model.state_dict()
    elif how == "deepcopy":
        copy.deepcopy(model)
    elif how == "AveragedModel":
        return torch.optim.swa_utils.AveragedModel(model)
    elif how == "part":
        model[1].state_dict()
    return None


@pytest.mark.parametrize("how", ("state_dict", "deepcopy", "AveragedModel", "part"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_late_states_warn_once_for_each_root(how, recipe):
    models = [_model(), _model()]
    for model in models:
        _seen_by(how, model)
    for model in models:
        with pytest.warns(LateStateWarning, match=r"call diptych\.torch\.prepare\(model, recipe\) before") as said:
            _run(model, RECIPES[recipe])
        assert len([w for w in said if w.category is LateStateWarning]) == 1
        _run(model, RECIPES[recipe])  # a second warning would be an error
    unseen = _model()
    _run(unseen, RECIPES[recipe])
    _seen_by(how, unseen)
    _run(unseen, RECIPES[recipe])
    clones = nn.Sequential(*[copy.deepcopy(dt.Linear(32, 32)) for _ in range(2)])  # a template is not its copies
    _run(clones, RECIPES[recipe])


def test_late_states_of_a_traced_forward_warn():
    model = _model(1)
    model.state_dict()
    torch._dynamo.reset()
    with pytest.warns(LateStateWarning, match="Linear made its delayed scales for DelayedScaling in a forward, after "):
        _run(torch.compile(model, backend="aot_eager", fullgraph=True), SHORT)


def test_starting_anew_is_not_late():
    model = _model()
    _run(model, SHORT)
    model.state_dict()
    model[0].reset_scale_states()
    _run(model, SHORT)
    prepared = dt.prepare(_model(), SHORT)
    keys = _keys(prepared)
    prepared.load_state_dict(_model().state_dict())  # weights alone: states start anew
    copied = copy.deepcopy(prepared)
    assert _keys(copied) == _keys(prepared) == keys
    _run(prepared, SHORT)


def test_wrapped_models(one_rank):
    wrapped = nn.parallel.DistributedDataParallel(_model())
    with pytest.warns(LateStateWarning, match="after DistributedDataParallel wrapped the model") as said:
        _run(wrapped, SHORT)
    assert len([w for w in said if w.category is LateStateWarning]) == 1
    _run(nn.parallel.DistributedDataParallel(dt.prepare(_model(), SHORT)), SHORT)


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
@pytest.mark.parametrize("use_buffers", (False, True))
@pytest.mark.parametrize("recipe", RECIPES)
def test_averaged_models(recipe, use_buffers, compiled):
    """Both copies have the same keys and buffers; weights are averaged with weights, and the copy evaluates."""
    recipe, model = RECIPES[recipe], dt.prepare(_model(), RECIPES[recipe])
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=use_buffers)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(3):
        _run(run, recipe)
        ema.update_parameters(model)
    assert list(ema.module.state_dict()) == list(model.state_dict())
    assert [n for n, _ in ema.module.named_buffers()] == [n for n, _ in model.named_buffers()]
    for e, v in zip(ema.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(e, v)
    with torch.no_grad(), dt.autocast(recipe=recipe):
        y = ema.module.eval()(normal("x", (32, 32)))
        torch.testing.assert_close(y, model.eval()(normal("x", (32, 32))), rtol=0.2, atol=0.2)


def test_zipped_state_dicts():
    model = dt.prepare(_model(), SHORT)
    ema = copy.deepcopy(model)
    for _ in range(3):
        _run(model, SHORT)
        with torch.no_grad():
            for e, v in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                e.copy_(0.9 * e + 0.1 * v)
    for i in range(3):
        torch.testing.assert_close(ema[i].weight, model[i].weight)
    scale = ema[0].scale_states.input.scale
    assert scale.isfinite().all() and (scale > 0).all()
    with torch.no_grad():
        ema[0].scale_states.input.fp8_max.mul_(1 - 1e-6)  # as a mean may be rounded
    loaded = _model()
    loaded.load_state_dict(ema.state_dict())
    assert loaded[0].scale_states.input.fp8_max.item() == 448.0
    same(_run(loaded, SHORT), _run(ema, SHORT))


@pytest.mark.parametrize("recipe", RECIPES)
def test_resuming_by_keys(recipe, tmp_path):
    """torch.distributed.checkpoint fills the keys that the state dict has, and says nothing of others."""
    import torch.distributed.checkpoint as dcp

    recipe, model = RECIPES[recipe], _model()
    for _ in range(3):
        _run(model, recipe)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    for prepared in (True, False):
        other = _model()
        held = dt.prepare(other, recipe).state_dict() if prepared else other.state_dict()
        dcp.load(held, checkpoint_id=tmp_path, no_dist=True)
        other.load_state_dict(held)
        assert (other.state_dict().keys() == model.state_dict().keys()) == prepared
        if prepared:
            _same_dicts(other.state_dict(), model.state_dict())
            same(_run(other, recipe), _run(copy.deepcopy(model), recipe))


MOMENTS = ("compiled", "inference_mode", "load", "deepcopy", "meta")
FIRST = list(itertools.product(KINDS, RECIPES, MOMENTS, (False, True)))


def _first(moment, module, recipe):
    """A module whose first call comes after `moment`, and how to call it."""
    if moment == "compiled":
        torch._dynamo.reset()
        return module, torch.compile(module, backend="aot_eager", fullgraph=True)
    if moment == "inference_mode":
        with torch.inference_mode():
            _run(module, recipe)
    elif moment == "load":
        other = copy.deepcopy(module)
        _run(dt.prepare(other, recipe), recipe)
        module.load_state_dict(dt.prepare(copy.deepcopy(module), recipe).state_dict())
    elif moment == "deepcopy":
        module = copy.deepcopy(module)
    else:
        held = module.state_dict()
        module = module.to("meta").to_empty(device="cpu")
        module.load_state_dict(held)
    return module, module


@pytest.mark.parametrize(
    ("kind", "recipe", "moment", "prepared"),
    [c if i % 12 == 3 else pytest.param(*c, marks=pytest.mark.slow) for i, c in enumerate(FIRST)],
)
def test_first_calls_everywhere(kind, recipe, moment, prepared):
    """However a module comes to its first call, it trains with the bits of one that simply ran."""
    recipe = RECIPES[recipe]
    torch.manual_seed(4)
    module = KINDS[kind]()
    if prepared:
        dt.prepare(module, recipe)
    plain = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LateStateWarning)
        module, call = _first(moment, module, recipe)
        for m in (module, plain):
            m.seed_rng(5)
        for _ in range(3):
            x = normal("x", (32, 32))
            with dt.autocast(recipe=recipe):
                y = call(x, [16, 16]) if kind == "GroupedLinear" else call(x)
            y.sum().backward()
            same(y, _run(plain, recipe, x))
    for got, want in zip(module.parameters(), plain.parameters(), strict=True):
        same(got.grad, want.grad)
    state = {k: v for k, v in plain.state_dict().items() if "scale" in k}
    for key, t in state.items():
        same(module.state_dict()[key], t, key)
