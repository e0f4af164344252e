"""torch.fx.symbolic_trace: our modules are nodes, which quantize where the region says so when the graph runs."""

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import MXFP8BlockScaling
from torch_frontend.tools import normal

MX = MXFP8BlockScaling()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = dt.GroupedLinear(2, 64, 64)

    def forward(self, x, sizes):
        return self.experts(x, sizes, align=32)


@pytest.mark.parametrize("kind", ["linear", "normed", "mlp", "experts"])
@pytest.mark.parametrize("inside", [False, True])
def test_modules_are_leaves(kind, inside):
    torch.manual_seed(0)
    layers = {
        "linear": lambda: nn.Sequential(dt.Linear(64, 64), nn.ReLU(), dt.Linear(64, 64)),
        "normed": lambda: nn.Sequential(dt.LayerNormLinear(64, 64)),
        "mlp": lambda: nn.Sequential(dt.LayerNormMLP(64, 64)),
        "experts": Experts,
    }
    model = layers[kind]()
    args = (normal("x", (64, 64)), *((torch.tensor([32, 32]),) if kind == "experts" else ()))
    with dt.autocast(inside, recipe=MX):
        traced = torch.fx.symbolic_trace(model)
    assert any(node.op == "call_module" for node in traced.graph.nodes)
    for region in (False, True):
        with dt.autocast(region, recipe=MX):
            got, want = traced(*args), model(*args)
        assert torch.equal(got, want)
    assert not torch.equal(want, model(*args))


def test_what_cannot_be_a_leaf_says_so():
    class Own(dt.QuantizedModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x):
            return self.quantized_linear(x, self.weight, None)

    hidden = dt.Linear(64, 64)

    class Hidden(nn.Module):
        def forward(self, x):
            return hidden.forward(x)

    for model in (nn.Sequential(Own()), Hidden()):
        with pytest.raises(NotImplementedError, match=r"under torch.fx: .* is_leaf_module"):
            torch.fx.symbolic_trace(model)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, dt.QuantizedModule) or super().is_leaf_module(m, name)

    model, x = nn.Sequential(Own()), normal("x", (32, 64))
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    with dt.autocast(recipe=MX):
        assert torch.equal(traced(x), model(x))
    with pytest.raises(TypeError, match=r"Linear: input must be a torch.Tensor, got list"):
        hidden([1.0])
