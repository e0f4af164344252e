"""The target `modules` finds planted faults in what modules remember, and makes sequences that show them simpler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cases
from diptych.torch.modules import base, weight_cache
from diptych.torch.modules.stateful import StatefulModule
from diptych.torch.state import checkpoint
from fuzz import modules
from fuzz.draw import Draw


def states_dropped(monkeypatch: Any) -> None:
    """An evaluation by another recipe replaces the states that do not fit."""
    real: Any = StatefulModule._bound_states

    def bound(self: Any, *args: Any, record: bool = True, **options: Any) -> Any:
        return real(self, *args, **options)

    monkeypatch.setattr(StatefulModule, "_bound_states", bound)


def evaluation_recorded(monkeypatch: Any) -> None:
    """A call in training mode without grad mode records amaxes and uses up random offsets."""
    monkeypatch.setattr(base, "recording", lambda: True)


def another_region(monkeypatch: Any) -> None:
    """A recomputation runs in the region around backward."""
    monkeypatch.setattr(checkpoint, "enter_region", lambda held: None)


def kept_again(monkeypatch: Any) -> None:
    """A recomputation reads and writes the weight that is kept across microbatches."""

    def kept(module: Any, layer: str, weight: Any, recipe: Any, options: Any, *given: Any) -> Any:
        weight_cache._make(module, (layer,))
        return module._caches[layer].get(weight, recipe, options, True, *given)

    monkeypatch.setattr(base, "kept_weight", kept)


def seed_lost(monkeypatch: Any) -> None:
    """Loading drops the random state."""
    real: Any = StatefulModule._load_from_state_dict

    def load(self: Any, state_dict: Any, *args: Any) -> None:
        real(self, state_dict, *args)
        if "rng_state" not in state_dict:
            self._buffers.pop("rng_state", None)

    monkeypatch.setattr(StatefulModule, "_load_from_state_dict", load)


def test_nothing_is_found():
    for number in range(50):
        modules.run(Draw(cases.SEED, "modules", number), lambda _: None)


@pytest.mark.parametrize("fault", (states_dropped, evaluation_recorded, another_region, kept_again, seed_lost))
def test_a_planted_fault_is_found_and_made_simpler(monkeypatch, fault):
    fault(monkeypatch)
    for number in range(200):
        d = Draw(7, "modules", number)
        given = modules.config(d)
        ops = modules.sequence(d, given["dtype"])
        found = modules.failure(given, ops)
        if found is not None:
            break
    else:
        raise AssertionError("200 sequences find nothing")
    fewer, error = modules.simplest(given, *found)
    assert len(fewer) <= 3 and type(error) is type(found[1]), fewer
    again = modules.failure(given, fewer)
    assert again is not None and str(again[1]) == str(error)
    monkeypatch.setattr(modules, "SHRINK", 0.0)
    with pytest.raises(AssertionError, match=f"{type(error).__name__} .*'kind': '{given['kind']}'"):
        modules.run(Draw(7, "modules", number), lambda _: None)
    monkeypatch.undo()
    assert modules.failure(given, fewer) is None and modules.failure(given, ops) is None


def test_a_round_is_a_function_of_its_number():
    """A round has the same operations each time, and the same results whatever ran before."""
    made = [[str(op) for op in modules.sequence(Draw(5, "modules", n), "float32")] for n in (3, 4, 3)]
    assert made[0] == made[2] != made[1]
    states = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        d = Draw(5, "modules", 3)
        given = modules.config(d)
        world = modules.World(given)
        for op in modules.sequence(d, given["dtype"]):
            world.run(op)
        states.append(world.real.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(t, states[1][key]) for key, t in states[0].items())
