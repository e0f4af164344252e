"""Structures that modules return stay the objects that they are, and what is no structure is named."""

import collections
import dataclasses
import enum
import types
import warnings

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from diptych.lab.capture import CaptureWarning
from diptych.torch import lab
from in_torch.captured import observed


@dataclasses.dataclass
class State:
    x: torch.Tensor


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Memory(nn.Module):
    """Returns a structure that it keeps, in which the caller changes what it finds."""

    def __init__(self, made):
        super().__init__()
        self.linear, self.made = nn.Linear(4, 4), made

    def forward(self, x):
        y = self.linear(x)
        if isinstance(self.kept, list):
            self.kept.append(y + sum(self.kept))
        elif isinstance(self.kept, dict):
            self.kept["x"] = y + self.kept.get("x", 0)
        else:
            self.kept.x = y + self.kept.x
        return self.kept


class Caller(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.memory = Memory(made)

    def forward(self, x):
        self.memory.kept = kept = self.memory.made()
        for _ in range(3):
            found = self.memory(x)
            if isinstance(found, State):
                found.x = found.x * 2
            else:
                last = "x" if isinstance(found, dict) else -1
                found[last] = found[last] * 2
            kept = found
        return kept.x if isinstance(kept, State) else kept["x" if isinstance(kept, dict) else -1]


MADE = [list, dict, collections.OrderedDict, lambda: State(torch.zeros(()))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("made", MADE, ids=["list", "dict", "ordered", "dataclass"])
def test_callers_that_change_a_returned_structure(tmp_path, fresh, made, compiled):
    model, x = Caller(made), torch.randn(3, 4)
    run = torch.compile(model, backend="aot_eager") if compiled else model

    def step():
        loss = run(x).square().sum()
        loss.backward()
        return loss

    with lab.capture(model, out=tmp_path / "t") as t:
        assert t.check(step)
        step()
        t.step()
    assert any(key.startswith("activation_grad:memory[") for key in observed(tmp_path / "t"))


def test_structures_without_new_tensors_stay(tmp_path):
    model = Returns(lambda _: model.kept)
    x = torch.ones(1)
    given = [(torch.ones(2), {"a": torch.ones(2)}), State(torch.ones(2)), collections.deque([torch.ones(1)])]
    with lab.capture(model, out=tmp_path / "t") as t:
        for model.kept in given:
            assert model(x) is model.kept
        model.kept = [nn.Parameter(torch.ones(2))]
        found = model(x)
        assert isinstance(model.kept[0], nn.Parameter) and found[0].grad_fn is not None  # no alias outlives the step
        t.step()
    names = [key for key in observed(tmp_path / "t") if key.startswith("activation:")]
    assert names == [f"activation:(model){place}" for place in ("[0]", '[1]["a"]', '["x"]', "[0]#1", "[0]#2")]


HOLDERS = {
    "Slots": Slots,
    "set": lambda x: {x},
    "list_iterator": lambda x: iter([x]),
    "generator": lambda x: (y for y in [x]),
    "mappingproxy": lambda x: types.MappingProxyType({"x": x}),
    "dict_values": lambda x: {"x": x}.values(),
    "SimpleNamespace": lambda x: types.SimpleNamespace(x=x),
}


BUILTIN = ("list_iterator", "generator", "mappingproxy", "dict_values")
OLD = TorchVersion(torch.__version__) < "2.13"


class Returns(nn.Module):
    """A module that returns what `made` makes of a tensor."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return self.made(x * 2)


class Twice(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.parts = nn.ModuleList([Returns(made), Returns(made)])

    def forward(self, x):
        for part in (*self.parts, *self.parts):
            part(x)
        return x * 3


def warned(folder, model, compiled):
    """Runs a step. Returns the capture's warnings."""
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with warnings.catch_warnings(record=True) as caught, lab.capture(model, out=folder) as t:
        warnings.simplefilter("always")
        t.check(lambda: run(torch.ones(2)).sum())
        run(torch.ones(2))
        t.step()
    return [str(w.message) for w in caught if issubclass(w.category, CaptureWarning)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", HOLDERS)
def test_what_may_hold_tensors_is_named_once_for_each_module(tmp_path, fresh, name, compiled):
    if compiled and name == "SimpleNamespace":
        pytest.skip("Dynamo does not trace it")
    if compiled and name in BUILTIN and OLD:
        pytest.skip("Dynamo of torch before 2.13 does not trace hasattr of such classes")
    model = Twice(lambda x: (HOLDERS[name](x), Slots(x)))
    said = [message.split(",")[0] for message in warned(tmp_path / "t", model, compiled)]
    assert said == [f"capture: tensors in parts.{i}[0] are not recorded: {name} is no dataclass" for i in range(2)]


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("compiled", [False, True])
def test_values_without_tensors_are_no_warning(tmp_path, fresh, compiled):
    if compiled and OLD:
        pytest.skip("Dynamo of torch before 2.13 does not trace hasattr of such classes")
    model = Twice(lambda x: (x, {1, "a"}, frozenset(), range(3), b"", 1j, x.dtype, slice(1), x.device, Kind.ONE))
    assert warned(tmp_path / "t", model, compiled) == []
    assert warned(tmp_path / "u", Twice(lambda x: (x.numpy(), x)), False) == []
