"""scale_update_many: each of many updates gives the bits that it gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych.core import _core

LENGTHS = (1, 2, 16, 300, 1024, 5)


@pytest.mark.parametrize("count", [1, 3, 28, 29, 230])
def test_bits(device, count):
    """Histories of all lengths, with options of their own, some already updated in this step; some have a log."""
    torch, rng = runner.Torch(device).torch, cases.rng_for(f"update-many-{count}")
    words = torch.tensor([4, 5], device=device)
    held, calls = [], []
    for i in range(count):
        history = np.exp2(rng.uniform(-9, 9, LENGTHS[i % 6])).astype(np.float32)
        scale, margin, latest = np.array([i + 1.0], np.float32), i % 3, i % 4 == 1
        options: dict[str, Any] = {"fp8_max": (448.0, 57344.0)[i % 2], "margin": margin, "most_recent": latest}
        pending, log = np.array([rng.uniform(0, 900)], np.float32), rng.uniform(0, 900, 8).astype(np.float32)
        put = [torch.from_numpy(t.copy()).to(device) for t in (history, scale, pending, log, np.zeros(1, np.float32))]
        more: list[Any] = [None] * 4
        raised = history.copy()
        if i % 3 == 2:
            more = [put[2], put[3], torch.tensor([11], device=device), torch.tensor([9], device=device)]
            raised[0] = max(history[0], pending[0], log[1], log[2])
        steps = [words[:1], words[:1] if i % 5 == 4 else words[1:]]
        want = (raised[None], scale) if i % 5 == 4 else oracle.scale_update(raised[None], scale, **options)
        calls.append((put[0], put[1], None, None, *options.values(), *steps, *more, put[4]))
        held.append((put, more, want))
    _core.scale_update_many(calls)
    for i, (put, more, (history, scale)) in enumerate(held):
        runner.same_bits(put[0].cpu().numpy(), history[0], f"history {i}")
        for copy in (put[1], put[4]):
            runner.same_bits(copy.cpu().numpy(), scale, f"scale {i}")
        if more[0] is not None:
            assert more[0].item() == 0 and more[3].item() == 11, i


@pytest.mark.cuda
def test_one_call_runs_one_kernel(cuda):
    torch = runner.Torch().torch
    calls = [
        (torch.ones(4, device="cuda"), torch.ones(1, device="cuda"), None, None, 448.0, 0, False) for _ in range(84)
    ]
    before = runner.want_calls("cuda.scale_update_many")
    _core.scale_update_many([(*one, *[None] * 7) for one in calls])
    assert runner.want_calls("cuda.scale_update_many") == before + 1


def test_refuses():
    torch = runner.Torch("cpu").torch

    def update(history=None, scale=None):
        given = torch.ones(3) if history is None else history, torch.ones(1) if scale is None else scale
        return (*given, None, None, 448.0, 0, False, *[None] * 7)

    shared = torch.ones(3)
    given: Any
    for given, error, words in (
        ([], ValueError, "scale_update_many: give at least one call"),
        ([update(shared), update(shared)], ValueError, "calls 0 and 1 share memory that one of them writes"),
        (
            [update(), update(scale=torch.ones(2))],
            ValueError,
            r"scale_update_many: call 1: scale_update: scale must be",
        ),
        ([update()[:-1]], TypeError, "tuple of 14 entries"),
        ([[1.0]], TypeError, "tuple of 14 entries"),
    ):
        with pytest.raises(error, match=words):
            _core.scale_update_many(given)
    assert (shared == 1).all()
