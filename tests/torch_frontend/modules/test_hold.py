"""hold: a frozen base in low precision under adapters that train, eager and compiled, saved, merged and loaded."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import diptych.torch as dt
from diptych.common import RECIPES, MXFP8BlockScaling
from diptych.common.errors import LostUpdateWarning
from diptych.torch.modules import quantized_parameter
from torch_frontend.held import buffers, requantized, same_buffers
from torch_frontend.layer_cases import STATELESS, dtype_of
from torch_frontend.tools import RECIPE_NAMES, normal, same

MX = MXFP8BlockScaling()


class Lora(nn.Module):
    """A layer and an adapter beside it, as PEFT builds them."""

    def __init__(self, base: nn.Linear, rank: int = 8):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    def delta(self) -> torch.Tensor:
        return self.lora_B["default"].weight @ self.lora_A["default"].weight


def base(dtype: Any = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64)).to(dtype)


def adapted(model: nn.Sequential) -> nn.Sequential:
    """Freezes a model and puts adapters beside its layers."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    for i in (0, 2):
        model[i] = Lora(model[i]).to(model[3].weight.dtype)
    return model


def train(model: nn.Module, run: Any, steps: int = 2) -> list[torch.Tensor]:
    """Trains what is not frozen. Returns the losses, the input's gradient and the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    x, target = (normal(n, (32, 64), str(trained[0].dtype)[6:]) for n in ("x", "target"))
    x.requires_grad_()
    losses = []
    dt.seed_rng(model, 5)
    for _ in range(steps):
        loss = (run(x) - target).float().square().sum()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert x.grad is not None
    return [*losses, x.grad, *[p.detach() for p in trained]]


@pytest.mark.parametrize("name", STATELESS)
def test_adapters_train_as_over_weights_that_each_call_quantizes(name):
    """The held base gives the bits that quantizing its weights in each call gives, and stays what it is."""
    dtype = getattr(torch, dtype_of(name))
    held = adapted(dt.hold(base(dtype), RECIPES[name], verbose=False))
    plain = adapted(dt.convert(base(dtype), RECIPES[name], verbose=False))
    kept = [buffers(copy.deepcopy(held[i].base_layer.weight)) for i in (0, 2)]
    for got, want in zip(train(held, held), train(plain, plain), strict=True):
        same(got, want)
    for i, before in zip((0, 2), kept, strict=True):
        same_buffers(held[i].base_layer.weight, before)
        assert held[i].base_layer.weight.grad is None


@pytest.mark.parametrize("name", [n if n == "mxfp8" else pytest.param(n, marks=pytest.mark.slow) for n in RECIPE_NAMES])
def test_compiled(name):
    """Training in one graph has the bits of eager training."""
    dtype = getattr(torch, dtype_of(name))
    eager, compiled = (adapted(dt.hold(base(dtype), RECIPES[name], verbose=False)) for _ in range(2))
    got = train(compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True))
    for a, b in zip(got, train(eager, eager), strict=True):
        same(a, b)
    assert isinstance(compiled[0].base_layer.weight, dt.QuantizedParameter)


def test_hold_leaves_adapters_that_are_there():
    model = adapted(base())
    _, report = dt.hold(model, MX, verbose=False, return_report=True)
    assert [m.name for m in report.modules if m.held] == ["0.base_layer", "2.base_layer"]
    same(train(model, model)[0], train(m := adapted(dt.hold(base(), MX, verbose=False)), m)[0])


def test_a_merge_quantizes_the_sum_or_stays_in_high_precision(monkeypatch):
    """`weight += delta` is dequantized, added to and quantized; after `unhold` nothing is rounded to the format."""
    monkeypatch.setattr(quantized_parameter, "_warned", False)
    model = adapted(dt.hold(base(), MX, verbose=False))
    train(model, model)
    exact = dt.unhold(copy.deepcopy(model))
    with pytest.warns(LostUpdateWarning, match=r"to merge adapters without this loss, call .*unhold\(model\) before"):
        for i in (0, 2):
            weight, values = model[i].base_layer.weight, model[i].base_layer.weight.dequantize()
            delta = model[i].delta().detach()
            weight.data += delta
            same_buffers(weight, requantized(weight, values + delta))
            exact[i].base_layer.weight.data += delta
            same(exact[i].base_layer.weight, values + delta)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_saved_model_comes_back_bit_by_bit(name, tmp_path):
    """By state_dict, torch.save of the model, deepcopy, and safetensors with adapters in place."""
    dtype = getattr(torch, dtype_of(name))
    model = adapted(dt.hold(base(dtype), RECIPES[name], verbose=False))
    train(model, model)
    save_file(dt.plain_state_dict(model), tmp_path / "model.safetensors")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    fresh = adapted(dt.hold(base(dtype), RECIPES[name], verbose=False))
    fresh.load_state_dict(model.state_dict())
    with torch.device("meta"):
        meta = adapted(base(dtype))
    filled = dt.hold(meta, RECIPES[name], checkpoint=tmp_path, verbose=False)
    x = normal("x", (32, 64), dtype_of(name))
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), fresh, filled):
        for (n, t), (other_n, u) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
            assert n == other_n
            same_buffers(u, buffers(t)) if isinstance(t, dt.QuantizedTensor) else same(u, t, n)
        with torch.no_grad():
            same(other(x), model(x))
