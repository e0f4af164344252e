"""filters: which layers of a model `convert` takes, and what its report says of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import Float8CurrentScaling
from diptych.torch import filters


class Lora(nn.Module):
    """A layer with adapters as PEFT lays them out."""

    def __init__(self, rank):
        super().__init__()
        self.base_layer = nn.Linear(64, 96)
        self.down = nn.ModuleDict({"default": nn.Linear(64, rank, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(rank, 96, bias=False)})


class OwnWeight(nn.Module):
    """A layer that holds its weight beside its factors."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(96, 64))
        self.a, self.b = nn.Linear(64, rank), nn.Linear(rank, 96)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.output, self.lora_A = nn.Linear(32, 32), nn.Linear(32, 16)


class Model(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.value, self.head = nn.Linear(32, 1), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64))


def converted(model, filter=None):
    """Returns the names of the layers that are converted, and the reasons of all others."""
    _, report = dt.convert(model, Float8CurrentScaling(), filter, verbose=False, return_report=True)
    assert {m.name for m in report.modules if m.converted} == {
        name for name, m in model.named_modules() if isinstance(m, dt.Linear)
    }
    return [m.name for m in report.modules if m.converted], {m.name: m.why for m in report.modules if not m.converted}


OUTPUTS = [f"blocks.{i}.output" for i in range(4)]
FACTORS = [f"blocks.{i}.lora_A" for i in range(4)]


def test_adapters_and_small_layers_are_left_by_default():
    names, why = converted(Model())
    assert names == [*OUTPUTS, "head.1"]
    assert all("adapter's factor" in why[name] for name in FACTORS) and "fewer than 16" in why["value"]


@pytest.mark.parametrize("rank", [4, 16, 32])
@pytest.mark.parametrize("module", [Lora, OwnWeight])
def test_adapters_are_found_by_structure(module, rank):
    names, why = converted(nn.ModuleDict({"q": module(rank)}))
    assert names == (["q.base_layer"] if module is Lora else [])
    assert sum("adapter's factor" in said for said in why.values()) == 2


def test_low_rank_layers_of_a_model_are_no_adapters():
    names, _ = converted(nn.ModuleDict({"q_a": nn.Linear(64, 16), "q_b": nn.Linear(16, 96), "kv": nn.Linear(64, 96)}))
    assert names == ["q_a", "q_b", "kv"]


def test_a_filter_that_names_a_kind_decides_on_it():
    assert converted(Model(), filters.adapters)[0] == FACTORS
    assert len(converted(Model(), filters.everything)[0]) == 10
    assert converted(Model(), filters.small(2))[0] == ["value"]
    assert converted(Model(), ~filters.small(1))[0] == [*OUTPUTS, "value", "head.1"]  # adapters are left
    assert converted(Model(), ~filters.small(33) & filters.everything)[0] == []
    # A function that knows of no adapters does not ask for them.
    assert converted(Model(), lambda _, name: name != "head.1")[0] == OUTPUTS
    assert converted(Model(), filters.everything & (lambda _, name: name != "head.1"))[0] == [
        "blocks.0.output", "blocks.0.lora_A", "blocks.1.output", "blocks.1.lora_A", "blocks.2.output",
        "blocks.2.lora_A", "blocks.3.output", "blocks.3.lora_A", "value",
    ]  # fmt: skip


def test_combinations_and_their_reasons():
    names, why = converted(Model(), ~(filters.head | filters.first_and_last_blocks()))
    assert names == OUTPUTS[1:3]
    assert why["head.1"] == "the model's output layer (filters.head)"
    assert why["blocks.0.output"] == "in the first or last block (filters.first_and_last_blocks(1))"
    names, why = converted(Model(), ~filters.head & (lambda _, name: name != "blocks.2.output"))
    assert names == [*OUTPUTS[:2], OUTPUTS[3]] and why["blocks.2.output"] == "the filter left it"
    assert converted(Model(), (lambda _, name: False) | filters.head)[0] == ["head.1"]
    assert repr(~filters.head & filters.small(8)) == "(~filters.head & filters.small(8))"


def test_heads():
    tied = nn.ModuleDict({"embed": nn.Embedding(96, 32), "unembed": nn.Linear(32, 96), "body": nn.Linear(32, 32)})
    tied["unembed"].weight = tied["embed"].weight
    assert converted(tied, filters.head)[0] == ["unembed"]

    class Said(nn.Module):
        def __init__(self):
            super().__init__()
            self.predictions, self.body = nn.Linear(32, 96), nn.Linear(32, 32)

        def get_output_embeddings(self):
            return self.predictions

    assert converted(Said(), ~filters.head)[0] == ["body"]


def test_kinds_that_a_model_lacks_and_bad_input():
    plain = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    for kind, said in ((filters.head, "no output layer"), (filters.first_and_last_blocks(2), "no stack")):
        with pytest.raises(ValueError, match=said):
            dt.convert(plain, filter=~kind)
    with pytest.raises(TypeError, match="must be called first"):
        dt.convert(plain, filter=filters.small)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="filter must be one of"):
        _ = filters.head | "head"
    for make in (filters.small, filters.first_and_last_blocks):
        with pytest.raises(ValueError, match="must be an int of 1 or more"):
            make(0)
    assert not any(isinstance(m, dt.Linear) for m in plain.modules())
