"""Weights that exist become held: with the bits of `quantized_model_init`, as the same parameters, or with a reason."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import diptych.torch as dt
from diptych.common import CustomRecipe, Float8CurrentScaling, MXFP8BlockScaling, MXFP8Quantizer, NVFP4BlockScaling
from diptych.common.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from torch_frontend.held import buffers, layer, requantized, same_buffers
from torch_frontend.layer_cases import NAMED, run, same_step, x_for
from torch_frontend.tools import RECIPE_NAMES, normal, same

MX = MXFP8BlockScaling()
pytestmark = pytest.mark.filterwarnings("ignore::diptych.common.LostUpdateWarning")
MODULES: dict[str, Any] = {
    "Linear": lambda: nn.Linear(96, 64),
    "dt.Linear": lambda: dt.Linear(96, 64),
    "LayerNormLinear": lambda: dt.LayerNormLinear(96, 64),
    "LayerNormMLP": lambda: dt.LayerNormMLP(96, 64),
    "GroupedLinear": lambda: dt.GroupedLinear(3, 96, 64),
}
WEIGHTS = {"weight", "fc1_weight", "fc2_weight"}


class Tied(nn.Module):
    """A head that shares its weight with an embedding, and two layers that share one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.first, self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 96, bias=False)
        self.second.weight, self.head.weight = self.first.weight, self.embed.weight

    def forward(self, tokens):
        return self.head(self.second(self.first(self.embed(tokens))))


def silent(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, verbose=False, **kwargs)


@pytest.mark.parametrize("inference", (False, True))
@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("module", MODULES)
def test_weights_are_those_of_quantized_model_init(module, name, inference):
    made = MODULES[module]()
    plain = {n: p.detach().clone() for n, p in made.named_parameters()}
    assert silent(dt.hold, made, NAMED[name], inference=inference) is made
    kind = "stack" if module == "GroupedLinear" else "tensor"
    with torch.set_grad_enabled(not inference):
        quantizer = layer(kind, NAMED[name]).weight.quantizer
    for n, p in made.named_parameters():
        assert isinstance(p, dt.QuantizedParameter) == (n in WEIGHTS)
        if n in WEIGHTS:
            assert p.quantizer == quantizer and p.requires_grad and isinstance(p, nn.Parameter)
            same_buffers(p, requantized(p, plain[n]))
        else:
            same(p, plain[n])


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_step_is_that_of_a_held_layer(name):
    """Without a region too, since the recipe becomes the layer's own."""
    recipe, x = NAMED[name], x_for(name)
    made = nn.Linear(96, 64, dtype=x.dtype)
    with dt.quantized_model_init(recipe=recipe):
        want = dt.Linear(96, 64, dtype=x.dtype)
    want.load_state_dict(made.state_dict())
    silent(dt.hold, made, recipe)
    same_step(run(made, made, x, recipe), run(want, want, x, recipe))
    with torch.no_grad():
        plain = made.eval()(x)
        with dt.autocast(recipe=recipe):
            same(plain, want.eval()(x))


def test_the_parameter_stays_the_same_object():
    """An optimizer made before, a tie, what was set on the weight, and whether it is frozen."""
    model = Tied()
    shared = model.first.weight
    shared.mark, model.second.bias.requires_grad = "mine", False
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.warns(dt.ConvertWarning, match="shares its weight with embed.weight, which reads it in high precision"):
        dt.hold(model, MX, verbose=False)
    assert model.first.weight is shared is model.second.weight and shared.mark == "mine"
    assert isinstance(shared, dt.QuantizedParameter) and shared.requires_grad
    assert type(model.embed.weight) is nn.Parameter and model.head.weight is model.embed.weight
    assert model.head.recipe == MX  # the layer quantizes all the same
    before = shared.dequantize()
    model(torch.arange(32)).sum().backward()
    assert type(shared.grad) is torch.Tensor
    grad = shared.grad.clone()
    optimizer.step()
    same_buffers(shared, requantized(shared, before - grad))
    frozen = nn.Linear(32, 32).requires_grad_(False)
    assert not silent(dt.hold, frozen, MX).weight.requires_grad


def test_convert_inside_of_quantized_model_init():
    """The region's recipe holds, as for new modules, unless `hold` or a region says otherwise."""
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    with dt.quantized_model_init(recipe=MX, preserve_high_precision_init_val=True):
        held, report = silent(dt.convert, copy.deepcopy(plain), return_report=True)
        off = silent(dt.convert, copy.deepcopy(plain), hold=False)
        other = silent(dt.convert, copy.deepcopy(plain), Float8CurrentScaling())
        with torch.no_grad():
            rows = silent(dt.convert, copy.deepcopy(plain))
        with dt.quantized_model_init(enabled=False):
            outside = silent(dt.convert, copy.deepcopy(plain))
    for i in (0, 1):
        same_buffers(held[i].weight, requantized(held[i].weight, plain[i].weight))
        same(held[i].weight.get_high_precision_init_val(), plain[i].weight)
        assert held[i].recipe is None and rows[i].weight.columnwise_data is None
        assert other[i].weight.quantizer.format.name == "fp8_e4m3_tensor"
        for m in (off, outside):
            assert type(m[i].weight) is nn.Parameter
    assert [m.held for m in report.modules] == ["mxfp8_e4m3"] * 2 and len(report.need_region) == 2
    sizes = [t.numel() * t.element_size() for m in held for t in buffers(m.weight).values()]
    assert report.held_bytes == sum(sizes) and f"in {sum(sizes):,} bytes" in str(report)


def test_modules_keep_their_own_recipes():
    model = nn.ModuleDict({"own": dt.Linear(64, 64, recipe=Float8CurrentScaling()), "none": dt.Linear(64, 64)})
    silent(dt.hold, model, MX)
    assert [m.weight.quantizer.format.name for m in model.values()] == ["fp8_e4m3_tensor", "mxfp8_e4m3"]
    assert [m.recipe for m in model.values()] == [Float8CurrentScaling(), MX]
    assert "recipe=MXFP8BlockScaling(), held as mxfp8_e4m3)" in repr(model)
    silent(dt.hold, model, MX, inference=True)  # again: the columnwise copies go
    assert all(m.weight.columnwise_data is None for m in model.values())
    with pytest.raises(ValueError, match=r"own.weight is held by .* already, and .* is asked for; .*unhold"):
        silent(dt.hold, model, MX, inference=False)
    model["own"].recipe = None
    with pytest.raises(ValueError, match=r"own.weight is held by"):
        silent(dt.hold, model, NVFP4BlockScaling())


def _head_in_high_precision(role):
    return None if role.name == "head" else MXFP8Quantizer()


def _two_ways(role):
    return MXFP8Quantizer(fp8_dtype="float8_e5m2" if role.gemm == "dgrad" else "float8_e4m3fn")


class Conv1D(nn.Module):
    """A linear layer with its weight as [in, out], as transformers' GPT-2 has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_each_weight_that_is_not_held_has_its_reason():
    model = nn.ModuleDict({
        "body": nn.Linear(64, 64), "head": nn.Linear(64, 64), "conv": Conv1D(64, 64), "left": dt.Linear(64, 64),
        "computed": parametrizations.orthogonal(dt.Linear(64, 64)), "small": nn.Linear(64, 8),
    })  # fmt: skip
    recipe = CustomRecipe(_head_in_high_precision)
    with pytest.warns(dt.ConvertWarning) as said:
        _, report = dt.hold(model, recipe, lambda module, name: name != "left", verbose=False, return_report=True)
    rows = {m.name: m for m in report.modules}
    assert rows["body"].held == "mxfp8_e4m3" and not rows["body"].unheld
    assert {n: m.unheld for n, m in rows.items() if m.unheld} == {
        "head": "its recipe leaves the weight in high precision",
        "conv": "its weight lies transposed, as [in, out]",
        "left": "the filter left it",
        "computed": "has no parameter 'weight' (a parametrization computes it, or another name has it)",
    }
    assert rows["small"].why and not rows["small"].held
    words = [str(w.message) for w in said]
    assert len(words) == 2 and all("is converted, and not held" in w for w in words)  # conv and computed
    assert "not held: its weight lies transposed" in str(report) and "weights of 1 are held quantized" in str(report)


@pytest.mark.parametrize(
    ("model", "recipe", "error", "said"),
    (
        (lambda: nn.Linear(40, 32), NVFP4BlockScaling(), ShapeError, "hold: 0.weight cannot be held: quantize .nvfp4."),
        (
            lambda: nn.Linear(32, 32, dtype=torch.float64),
            MX,
            DTypeError,
            "0.weight must be float32, bfloat16 or float16",
        ),
        (
            lambda: nn.Linear(32, 32),
            CustomRecipe(_two_ways),
            ValueError,
            "for fprop and .* for dgrad; one that is held",
        ),
        (
            lambda: nn.Linear(32, 32),
            CustomRecipe(lambda role: None),
            ValueError,
            "no weight of the model can be held: 0",
        ),
        (lambda: nn.LayerNorm(32), MX, ValueError, "no weight of the model can be held: it has no linear layer"),
        (lambda: Conv1D(32, 32), MX, ValueError, "can be held: 0: its weight lies transposed"),
    ),
)
def test_what_cannot_be_held_is_refused_before_anything_changes(model, recipe, error, said):
    made = nn.Sequential(model(), nn.LayerNorm(32))
    classes, tensors = [type(m) for m in made.modules()], [p.detach().clone() for p in made.parameters()]
    with pytest.raises(error, match=said):
        silent(dt.hold, made, recipe)
    assert classes == [type(m) for m in made.modules()]
    for p, want in zip(made.parameters(), tensors, strict=True):
        assert type(p) is nn.Parameter
        same(p.float(), want.float())


def test_wrong_arguments_are_refused():
    m = nn.Linear(32, 32)
    for args, said in (
        ({"recipe": None}, "hold: recipe must be a diptych Recipe"),
        ({"recipe": MX, "inference": 1}, "hold: inference must be a bool"),
        ({"recipe": MX, "rename": str}, "rename and strict are about a checkpoint"),
        ({"recipe": MX, "checkpoint": 3}, "checkpoint must be a path, got int"),
        ({"recipe": MX, "checkpoint": "x", "rename": {}}, "rename must be a function of a name, got dict"),
        ({"recipe": MX, "device": "meta"}, "device is meta, where tensors have no values"),
    ):
        with pytest.raises(ArgumentError, match=said):
            dt.hold(m, **args)
    with pytest.raises(DTypeError, match="hold: dtype must be float32"):
        dt.hold(m, MX, dtype=torch.int8)
    with pytest.raises(ArgumentError, match=r"hold: model must be a torch.nn.Module, got list"):
        dt.hold([m], MX)
    with pytest.raises(ArgumentError, match="convert: hold=True needs a recipe"):
        dt.convert(m, hold=True)
    with pytest.raises(ArgumentError, match="convert: inference says which copies"):
        dt.convert(m, MX, inference=True)
    for function in (dt.convert, dt.hold):
        with pytest.raises(ArgumentError, match="return_report must be a bool"):
            function(m, MX, return_report=3)
    assert type(m) is nn.Linear
    with pytest.raises(ArgumentError, match="unhold: model must be"):
        dt.unhold(m.weight)


def test_a_weight_that_something_refers_to_is_refused():
    m = nn.Linear(32, 32)
    graph = m(normal("x", (4, 32)).requires_grad_())  # it saves the weight
    with pytest.raises(UnsupportedError, match="hold: weight cannot be replaced, since something refers to it"):
        silent(dt.hold, m, MX)
    graph.sum().backward()
    del graph
    grad = m.weight.grad.clone()
    silent(dt.hold, m, MX)
    same(m.weight.grad, grad)
    m.zero_grad()
    m(normal("x", (32, 32))).sum().backward()
    assert m.weight.grad is not None
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        m = nn.Linear(32, 32)
        getattr(m.weight, register)(lambda g: None)
        with pytest.raises(UnsupportedError, match="hold: weight has hooks"):
            silent(dt.hold, m, MX)
    m = nn.Sequential(dt.Linear(32, 32))
    prepared = dt.prepare_weights(m, torch.optim.SGD(m.parameters(), lr=0.1), max_bytes=1 << 20)
    with pytest.raises(UnsupportedError, match=r"hold: 0 has copies that prepare_weights made.*call remove\(\)"):
        silent(dt.hold, m, MX)
    prepared.remove()
    silent(dt.hold, m, MX)


def _shared_otherwise(role):
    return MXFP8Quantizer(fp8_dtype="float8_e5m2") if role.name == "second" else MXFP8Quantizer()


def test_a_shared_weight_is_held_in_one_way():
    model = Tied()
    with pytest.raises(ValueError, match=r"first.weight and second.weight are one parameter, which"):
        dt.hold(model, CustomRecipe(_shared_otherwise), verbose=False)
    assert type(model.first.weight) is nn.Parameter


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode))
def test_modes(mode):
    """Without gradients the rowwise copy alone is made; no weight is an inference tensor."""
    with mode():
        m = silent(dt.hold, nn.Linear(64, 32), MX)
        weight = m.weight
    assert (weight.columnwise_data is None) == (mode is not torch.enable_grad) and not weight.is_inference()


def test_unhold():
    """Values, masters, dtypes; the parameters stay the same objects, and layers go on to quantize."""
    for module in MODULES:
        made = silent(dt.hold, MODULES[module](), MX)
        before = {n: (p, p.dequantize() if n in WEIGHTS else p.detach().clone()) for n, p in made.named_parameters()}
        assert dt.unhold(made) is made
        for n, p in made.named_parameters():
            assert p is before[n][0] and type(p) is nn.Parameter and p.requires_grad
            same(p, before[n][1])
    m = silent(dt.hold, nn.Linear(64, 32), MX)
    master = m.weight.main_param = torch.randn(32, 64)
    dt.unhold(m, torch.bfloat16)
    same(m.weight, master.bfloat16())
    with dt.autocast(recipe=MX):
        m.bfloat16()(normal("x", (16, 64), "bfloat16")).sum().backward()
    silent(dt.hold, m, NVFP4BlockScaling())  # the layer keeps the recipe that it has
    assert m.weight.quantizer.format.name == "mxfp8_e4m3"
    with pytest.raises(DTypeError, match="unhold: dtype must be"):
        dt.unhold(m, torch.float64)
