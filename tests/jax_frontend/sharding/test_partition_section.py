"""The benchmarks' section of two GPUs, on two CPU devices: its results are those of one device."""

from __future__ import annotations

import functools
import itertools

import jax
import pytest
from sweeps import others_slow

from benchmarks import room
from benchmarks.cases import Case
from benchmarks.sections import jax as one_gpu
from benchmarks.sections import sharded


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(room, "DEVICE", "cpu")
    monkeypatch.setattr(one_gpu, "parameters", functools.partial(one_gpu.parameters, blocks=1))
    sharded.alone.cache_clear()


def case(layout: str, *names: str) -> Case:
    return Case("sharded", layout, (2, 32, 512), names)


@pytest.mark.parametrize("layout", others_slow(sharded.LAYOUTS, ("FSDP",)))
def test_every_layout_is_measured(layout):
    alone, spread, missing = sharded.rows(case(layout, "fp8-current", "no recipe"), {})
    assert (alone["name"], spread["name"]) == ("fp8-current one GPU", "fp8-current")
    assert missing["name"] == "no recipe" and "no recipe" in missing["failed"]
    assert spread["difference"] == 0 and spread["gradients"] < 0.01
    assert min(alone["us"], spread["us"], spread["GiB"]) > 0


@pytest.mark.slow
def test_other_results_are_a_failure(monkeypatch):
    calls = itertools.count(1)
    monkeypatch.setattr(sharded, "compact", lambda results: (jax.numpy.float32(next(calls)),) * 2)
    with pytest.raises(ValueError, match="two GPUs differ from one"):
        list(sharded.of_recipe(case("FSDP", "bf16"), "bf16"))
