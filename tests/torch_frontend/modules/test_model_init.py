"""Where weights that are held quantized are made: at once, on meta, in inference mode, and with one copy alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import CustomRecipe, MXFP8BlockScaling, MXFP8Quantizer
from torch_frontend.held import KINDS, buffers, layer, requantized, same_buffers
from torch_frontend.layer_cases import NAMED
from torch_frontend.tools import RECIPE_NAMES, normal, same

MX = MXFP8BlockScaling()
pytestmark = pytest.mark.filterwarnings("ignore::diptych.common.LostUpdateWarning")


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_in_inference_mode(name):
    """Everything that moves a weight, and weights that are made there."""
    ours, x = layer("tensor", NAMED[name]), normal("x", (16, 96), "bfloat16")
    with torch.inference_mode():
        made = layer("tensor", NAMED[name])
        for m in (ours, made):
            for other in (m.state_dict()["weight"], copy.deepcopy(m).weight, m.weight.detach(), m.weight.clone()):
                same_buffers(other, buffers(m.weight))
            same_buffers(m.to("cpu").weight, buffers(m.weight))
            assert m.to(torch.bfloat16).weight.dtype == torch.bfloat16 and m.weight.isfinite().all()
            with dt.autocast(recipe=NAMED[name]):
                m.eval()(x)
    assert not (ours.weight.is_inference() or made.weight.is_inference())
    with torch.no_grad():
        same_buffers(made.weight.mul_(2), requantized(made.weight, made.weight.dequantize()))


MODULES: dict[str, Any] = {
    "Linear": lambda **kw: dt.Linear(96, 64, **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(96, 64, **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(96, 64, **kw),
    "GroupedLinear": lambda **kw: dt.GroupedLinear(3, 96, 64, **kw),
}


@pytest.mark.parametrize("inside", (True, False))
@pytest.mark.parametrize("module", MODULES)
def test_made_on_meta(module, inside):
    """Weights that are filled later equal those that are made at once."""
    region = dt.quantized_model_init(recipe=MX, preserve_high_precision_init_val=True)
    torch.manual_seed(3)
    with region:
        want, late = MODULES[module](), MODULES[module](device="meta")
    with dt.quantized_model_init(enabled=inside, recipe=MX):
        late.to_empty(device="cpu")
        torch.manual_seed(3)
        late.reset_parameters()
    for name, p in want.named_parameters():
        got = late.get_parameter(name)
        assert type(got) is type(p) and got.requires_grad
        if isinstance(p, dt.QuantizedParameter):
            same_buffers(got, buffers(p))
            same(got.get_high_precision_init_val(), p.get_high_precision_init_val())
    for state in (want.state_dict(), dt.plain_state_dict(want)):
        with region:
            late = MODULES[module](device="meta")
        late.load_state_dict(state, assign=True)
        for name, p in want.named_parameters():
            got = late.get_parameter(name)
            assert type(got) is type(p) and not got.is_meta and got.requires_grad
            if isinstance(p, dt.QuantizedParameter):
                same_buffers(got, buffers(p))
    with dt.quantized_model_init(enabled=False):
        plain = MODULES[module]()
    late.load_state_dict(plain.state_dict(), assign=True)  # in high precision
    for name, p in late.named_parameters():
        if isinstance(p, dt.QuantizedParameter):
            same_buffers(p, requantized(p, plain.get_parameter(name)))
    assert any(isinstance(p, dt.QuantizedParameter) for p in late.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_reset_parameters(kind):
    ours = layer(kind)
    plain = dt.GroupedLinear(3, 96, 64, bias=False) if kind == "stack" else dt.Linear(96, 64, bias=False)
    for m in (ours, plain):
        torch.manual_seed(5)
        m.reset_parameters()
    same_buffers(ours.weight, requantized(ours.weight, plain.weight))


def _rows(role: Any) -> MXFP8Quantizer:
    return MXFP8Quantizer(columnwise=False)


@pytest.mark.parametrize("name", [*RECIPE_NAMES, "custom"])
def test_for_inference_one_copy_is_held(name):
    recipe = CustomRecipe(_rows) if name == "custom" else NAMED[name]
    x = normal("x", (32, 96), "bfloat16")
    both = layer("tensor", recipe)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            ours = layer("tensor", recipe).eval()
        held = sum(t.numel() * t.element_size() for t in buffers(ours.weight).values()) / ours.weight.numel()
        assert ours.weight.columnwise_data is None and held < (0.6 if name == "nvfp4" else 1.05)
        ours.load_state_dict(both.state_dict())
        results = []
        for m in (ours, both):
            with torch.no_grad(), dt.autocast(recipe=recipe):
                results.append(m.eval()(x))
        same(*results)
        with dt.autocast(recipe=recipe):
            ours(x).sum().backward()  # the weight's gradient reads no copy of it
        with (
            dt.autocast(recipe=recipe),
            pytest.raises(ValueError, match="which is held without: quantized_model_init makes that copy outside of"),
        ):
            ours(x.clone().requires_grad_()).sum().backward()
    assert (both.weight.columnwise_data is None) == (name == "custom")
