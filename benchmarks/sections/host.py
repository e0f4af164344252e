"""Host time of eager torch calls on small tensors, in turns. Each case is called often without waiting for the device;
its figure is the least time of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import diptych.torch as dt
from benchmarks import room
from benchmarks.cases import Case
from benchmarks.results import Row
from benchmarks.room import Run, checked, difference, host_seconds
from benchmarks.sections.linear import bound_of, placed
from diptych.common import RECIPES, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from diptych.common import QuantizerRole as Role

TURNS = 5


def verbs(case: Case) -> dict[str, Run]:
    rows, width = case.shape
    device, role = room.DEVICE, Role(module="linear", tensor="input")
    current, mx = Float8CurrentScaling().quantizer(role), MXFP8BlockScaling().quantizer(role)
    delayed = DelayedScaling().quantizer(role)
    x, one = torch.randn(rows, width, device=device), torch.ones(1, device=device)
    a, b = dt.quantize(x, current), dt.quantize(x, current)
    tokens, mask = torch.randn(8, width, device=device), torch.rand(8, 4, device=device) < 0.5
    probs, row_map = torch.rand(8, 4, device=device), dt.moe_map(mask)
    moved = dt.moe_permute(tokens, row_map)[0]
    stack = torch.randn(2, 16, width, device=device)
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    q_stack, q_rows = dt.quantize_stack(stack, mx), dt.quantize(x, mx)
    calls: dict[str, Callable[[], Any]] = {
        "quantize, current": lambda: dt.quantize(x, current),
        "quantize, delayed": lambda: dt.quantize(x, delayed, scale=one),
        "quantize, mxfp8": lambda: dt.quantize(x, mx),
        "quantize, given amax": lambda: dt.quantize(x, current, amax=one),
        "dequantize": lambda: dt.dequantize(a),
        "gemm": lambda: dt.gemm(a, b),
        "quantize_stack": lambda: dt.quantize_stack(stack, mx),
        "grouped_gemm": lambda: dt.grouped_gemm(q_rows, q_stack, offsets),
        "moe_map": lambda: dt.moe_map(mask),
        "moe_permute": lambda: dt.moe_permute(tokens, row_map),
        "moe_permute_with_probs": lambda: dt.moe_permute_with_probs(tokens, probs, row_map),
        "moe_unpermute": lambda: dt.moe_unpermute(moved, row_map, probs),
        "moe_sort_chunks": lambda: dt.moe_sort_chunks_by_index(tokens, [4, 4], [1, 0]),
    }
    return {name: Run(call) for name, call in calls.items()}


def layers(case: Case) -> dict[str, Run]:
    m, n, k = case.shape
    x = torch.randn(m, k, **placed())
    plain = nn.Linear(k, n, **placed())
    want = plain(x).detach()
    runs = {}
    for name in ("nn.Linear", *case.names):
        recipe = copy.deepcopy(RECIPES.get(name))
        layer = dt.Linear(k, n, **placed()) if recipe else plain
        if recipe:
            layer.load_state_dict(plain.state_dict(), strict=False)
            dt.seed_rng(layer, 0)

        def forward(layer: nn.Module = layer, recipe: Any = recipe) -> Any:
            if recipe is None:
                return layer(x)
            with dt.autocast(recipe=recipe):
                return layer(x)

        def step(forward: Callable[[], Any] = forward) -> None:
            forward().sum().backward()

        check = lambda made, forward=forward: difference(forward(), want)  # noqa: E731
        runs[name] = Run(forward if case.what == "forward" else step, check=check,
                         bound=bound_of(name) if recipe else 0.0)  # fmt: skip
    return runs


def rows(case: Case, _: Any) -> Iterator[Row]:
    runs = verbs(case) if case.what == "verbs" else layers(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {name: checked(case, name, run) for name, run in runs.items()}
        calls = {name: runs[name].call for name, row in found.items() if "failed" not in row}
        done = torch.cuda.synchronize if room.DEVICE == "cuda" else lambda: None
        times = host_seconds(calls, done, TURNS)
    finally:
        torch.set_num_threads(threads)
    for name, row in found.items():
        yield row | ({"us": times[name] * 1e6} if name in times else {})
