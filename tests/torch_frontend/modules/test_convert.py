"""convert: models that are already built, and a Hugging Face Llama trained under every recipe."""

from __future__ import annotations

import copy
import functools
import io
import warnings

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import CustomRecipe, Float8CurrentScaling, MXFP8BlockScaling
from diptych.core import reset_calls
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MX = MXFP8BlockScaling()


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Handy(nn.Linear):
    def doubled(self, x):
        return self(2 * x)


class Named(nn.Linear):
    """Nothing but another constructor."""

    def __init__(self, n):
        super().__init__(n, n)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def _silent(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error", dt.ConvertWarning)
        return dt.convert(*args, **kwargs)


def test_converts_in_place_and_keeps_what_is_there():
    model = Tied()
    before = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
    seen = []
    model.body[0].register_forward_hook(lambda *_: seen.append(1))
    model.body[2].eval()
    tokens = torch.arange(16)
    want = model(tokens)
    assert _silent(model) is model
    for name, module in model.named_modules():
        assert module is before[0][name]
    for name, p in model.named_parameters(remove_duplicate=False):
        assert p is before[1][name]
    assert model.head.weight is model.embed.weight
    assert [type(m).__name__ for m in (model.body[0], model.body[2], model.head)] == ["Linear"] * 3
    assert [m.name for m in model.modules() if isinstance(m, dt.Linear)] == ["body.0", "body.2", "head"]
    assert model.body[0].training and not model.body[2].training
    assert list(model.state_dict()) == list(before[2])
    same(model(tokens), want)
    reset_calls()
    with dt.autocast(recipe=MX):
        model(tokens).sum().backward()
    assert calls("gemm") == 9 and len(seen) == 3 and model.embed.weight.grad is not None


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_has_the_bits_of_linear(name):
    recipe = NAMED[name]
    ours = layers.layer(96, 64)
    plain = nn.Linear(96, 64)
    plain.load_state_dict(ours.state_dict())
    assert _silent(plain) is plain
    x = layers.x_for(recipe, 16)
    layers.same_step(layers.run(plain, plain, x, recipe), layers.run(ours, ours, x, recipe))
    assert repr(plain) == repr(ours)


def test_converted_modules_copy_pickle_and_compile():
    model = dt.convert(nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = normal("x", (4, 96))
    with dt.autocast(recipe=MX):
        want = model(x)
        same(torch.load(file, weights_only=False)(x), want)
        same(copy.deepcopy(model)(x), want)
        torch._dynamo.reset()
        same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), want)


def test_one_module_in_two_places_is_converted_once():
    shared = nn.Linear(16, 16)
    model = dt.convert(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert model["a"] is model["b"][0] is shared and shared.name == "a"


def test_filter_and_recipe():
    asked = []

    def wanted(module, name):
        asked.append(name)
        return name != "head"

    model = _silent(Tied(), recipe=MX, filter=wanted)
    assert asked == ["body.0", "body.2", "head"]
    assert type(model.head) is nn.Linear and model.body[0].recipe == MX
    _silent(model, recipe=Float8CurrentScaling())  # what was converted stays as it was
    assert model.body[0].recipe == MX and model.head.recipe == Float8CurrentScaling()
    names = []

    def factory(role):
        names.append(role.name)
        return MX.quantizer(role)

    model = _silent(Tied())
    with dt.autocast(recipe=CustomRecipe(factory)):
        model(torch.arange(4))
    assert set(names) - {""} == {"body.0", "body.2", "head"}


def test_what_departs_from_nn_linear_is_left_and_named():
    changed = nn.Linear(16, 16)
    changed.forward = lambda x: x
    parametrized = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
    parts = {
        "a": Doubled(16, 16), "b": Handy(16, 16), "c": changed, "d": parametrized, "e": nn.LazyLinear(16),
        "f": nn.MultiheadAttention(16, 2), "g": Named(16), "h": dt.LayerNormLinear(16, 16),
    }  # fmt: skip
    model = nn.ModuleDict(parts)
    kept = {name: type(m) for name, m in model.named_modules()}
    with pytest.warns(dt.ConvertWarning) as said:
        dt.convert(model)
    messages = [str(w.message) for w in said]
    assert len(messages) == 6 and all("left as it is" in m for m in messages)
    for name, why in (
        ("a (Doubled)", "overrides forward"),
        ("b (Handy)", "defines doubled"),
        ("c (Linear)", "has a forward of its own"),
        ("d (ParametrizedLinear)", "defines"),
        ("e (LazyLinear)", "defines"),
        ("f.out_proj (NonDynamicallyQuantizableLinear)", "without its forward"),
    ):
        assert any(f"convert: {name}" in m and why in m for m in messages), (name, messages)
    for name, module in model.named_modules():
        assert type(module) is (dt.Linear if name == "g" else kept[name]), name


def test_report_and_print_say_that_a_region_is_needed():
    model, report = dt.convert(Tied(), return_report=True, verbose=False)
    assert [m.name for m in report.need_region] == ["body.0", "body.2", "head"]
    assert "a region is still needed" in str(report) and "in regions alone" in str(report)
    assert str(model).count("recipe=None: needs autocast") == 3
    model, report = dt.convert(Tied(), MX, return_report=True, verbose=False)
    assert not report.need_region and "region" not in str(report) and "needs autocast" not in str(model)
    assert [m.recipe for m in report.modules if m.converted] == [MX] * 3


def test_bad_input():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        dt.convert("model")
    with pytest.raises(TypeError, match="recipe must be"):
        dt.convert(Tied(), recipe="mxfp8")
    with pytest.raises(TypeError, match="filter must be"):
        dt.convert(Tied(), filter="head")
    model = Tied()
    with pytest.raises(TypeError, match="filter returned None for 'head'"):
        dt.convert(model, filter=lambda _, name: None if name == "head" else True)
    assert type(model.body[0]) is nn.Linear


TOKENS = torch.arange(64).reshape(2, 32) * 7 % 96


@functools.cache
def _trained(name, tied):
    """Losses of a few steps on one batch, and the model; converted if a recipe is named."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    if name:
        assert dt.convert(model) is model
        dt.seed_rng(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = []
    for _ in range(6):
        with dt.autocast(recipe=NAMED[name or "mxfp8"], enabled=bool(name)):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out, model


LLAMAS = [
    pytest.param(name, tied, marks=() if i % 2 == tied else pytest.mark.slow)
    for i, name in enumerate(RECIPE_NAMES)
    for tied in (False, True)
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "tied"), LLAMAS)
def test_a_hugging_face_llama_trains(name, tied):
    """The loss falls as it does in high precision, and a state dict goes into another converted model."""
    want, _ = _trained("", tied)
    reset_calls()
    got, model = _trained(name, tied)
    assert calls("gemm") == 6 * 3 * (2 * 7 + 1)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert max(got[-1] / got[0], want[-1] / want[0]) < 0.85, (got, want)
    assert abs(got[-1] - want[-1]) < 0.15 * want[0], (got, want)
    other = dt.convert(type(model)(model.config).bfloat16())
    other.load_state_dict(model.state_dict())
    for m in (model, other):
        m.eval()
    with torch.no_grad(), dt.autocast(recipe=NAMED[name]):
        same(other(TOKENS).logits, model(TOKENS).logits)


def test_tables_of_positions_are_no_stacks():
    """Tokens and positions [1, N, K] are added to a batch, so nothing is said of them."""

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 4, 16))
            self.head = nn.Linear(16, 16)

    with warnings.catch_warnings():
        warnings.simplefilter("error", dt.ConvertWarning)
        _, report = dt.convert(Vision(), verbose=False, return_report=True)
    assert [(m.name, m.converted, m.why) for m in report.modules] == [
        ("", False, "no layer that convert knows"), ("head", True, "")
    ]  # fmt: skip
