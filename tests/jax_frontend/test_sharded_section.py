"""The benchmarks' section of two GPUs, on two CPU devices: its results are those of one device."""

from __future__ import annotations

import itertools

import jax
import pytest

from benchmarks import room
from benchmarks.cases import Case
from benchmarks.sections import jax as one_gpu
from benchmarks.sections import sharded


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(room, "DEVICE", "cpu")
    monkeypatch.setattr(one_gpu, "BLOCKS", 1)


def test_every_layout_is_measured():
    rows = list(sharded.rows(Case("sharded", "stack", (2, 32, 512), ("fp8-current", "no recipe")), {}))
    assert [r["name"] for r in rows] == [
        "fp8-current one GPU",
        "fp8-current data parallel",
        "fp8-current FSDP",
        "no recipe",
    ]
    assert "no recipe" in rows[3]["failed"]
    for row in rows[1:3]:
        assert row["difference"] == 0 and row["gradients"] < 0.01 and row["us"] > 0 and row["GiB"] > 0


def test_other_results_are_a_failure(monkeypatch):
    calls = itertools.count(1)
    monkeypatch.setattr(sharded, "compact", lambda results: (jax.numpy.float32(next(calls)),) * 2)
    with pytest.raises(ValueError, match="two GPUs differ from one"):
        list(sharded.of_recipe(Case("sharded", "stack", (2, 32, 512), ("bf16",)), "bf16"))
