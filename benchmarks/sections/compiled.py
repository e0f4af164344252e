"""A small compiled Linear beside compiled nn.Linear, forward and backward, in one mode of torch.compile: wall time.

The GPU's work is negligible. Gradients stay allocated between steps, as captured graphs require.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import diptych.torch as dt
from benchmarks import room
from benchmarks.cases import Case
from benchmarks.results import Row, failed
from benchmarks.room import difference, normal, wall_seconds
from benchmarks.sections.linear import bound_of, placed
from diptych.common import RECIPES

STEPS = 50  # of a turn


def stepping(layer: nn.Module, recipe: Any, mode: str, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], torch.Tensor]:
    compiled = torch.compile(layer, fullgraph=True, mode=None if mode == "default" else mode)
    x = x.clone().requires_grad_()
    for t in (x, *layer.parameters()):
        t.grad = torch.zeros_like(t)

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y = compiled(x)
        y.backward(dy)
        return y

    return step


def rows(case: Case, _: Any) -> Iterator[Row]:
    m, n, k = case.shape
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # one function, compiled for each layer
    x, dy = normal(m, k), normal(m, n)
    plain = nn.Linear(k, n, **placed())
    want = plain(x).detach()
    found: dict[str, Row] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name in ("nn.Linear", *case.names):
        torch._dynamo.utils.counters.clear()
        layer = plain
        try:
            room.require_time()
            if name in case.names:
                layer = dt.Linear(k, n, **placed())
                layer.load_state_dict(plain.state_dict(), strict=False)
                dt.seed_rng(layer, 0)
            step = stepping(layer, copy.deepcopy(RECIPES.get(name)), case.what, x, dy)
            for _ in range(3):
                apart = difference(step(), want)
        except Exception as error:
            found[name] = failed(case, name, error)
            continue
        counters = torch._dynamo.utils.counters
        skipped = counters["inductor"]["cudagraph_skips"]
        bound = bound_of(name) if name in case.names else 4e-3
        if counters["graph_break"] or not apart <= bound:
            found[name] = failed(case, name, f"{dict(counters['graph_break'])}, differs by {apart:.3g}")
            continue
        calls[name] = step
        found[name] = {"case": str(case), "name": name, "difference": apart, "skipped captures": skipped}
    wait = torch.cuda.synchronize if room.DEVICE == "cuda" else lambda: None
    times = wall_seconds(calls, 11, STEPS, lambda _: wait())
    for name, row in found.items():
        yield row | ({"us": times[name] * 1e6} if name in times else {})
