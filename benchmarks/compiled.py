"""A small compiled Linear beside compiled nn.Linear on a GPU, forward and backward, in one run and the same mode:
`python -m benchmarks.compiled [--modes MODE ...] [--recipes NAME ...] [--out FILE]`.

128 rows, 256 by 256, bfloat16: what a step costs where the GPU's work is negligible. Wall time, medians of rounds in
turns; gradients stay allocated between steps, as captured graphs ask for.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diptych.torch as dt
from benchmarks import common
from diptych.common import RECIPES

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
ROWS, K, N = 128, 256, 256
GOAL = 1.3  # of nn.Linear's wall time under reduce-overhead


def stepping(layer: nn.Module, recipe: Any, mode: str) -> Callable[[], None]:
    """One training step of a compiled layer."""
    compiled = torch.compile(layer, fullgraph=True, mode=None if mode == "default" else mode)
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(ROWS, N, device="cuda", dtype=torch.bfloat16)
    for t in (x, *layer.parameters()):
        t.grad = torch.zeros_like(t)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y = compiled(x)
        y.backward(dy)

    return step


def wall(step: Callable[[], None], calls: int = 50) -> float:
    """Seconds of a step, the GPU's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def row(name: str, mode: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    placed = {"device": "cuda", "dtype": torch.bfloat16}
    ours = dt.Linear(K, N, **placed)
    dt.seed_rng(ours, 0)
    steps = [stepping(ours, copy.deepcopy(RECIPES[name]), mode), stepping(nn.Linear(K, N, **placed), None, mode)]
    for step in steps:
        for _ in range(10):
            step()
    times: list[list[float]] = [[], []]
    for _ in range(15):
        for step, found in zip(steps, times, strict=True):
            found.append(wall(step))
    ours_s, peer_s = (statistics.median(t) for t in times)
    counters = torch._dynamo.utils.counters
    if counters["graph_break"]:
        raise RuntimeError(f"graph breaks: {dict(counters['graph_break'])}")
    return {
        "case": f"{name} {ROWS}x{K} by {N}x{K}, {mode}",
        "us": ours_s * 1e6,
        "nn.Linear us": peer_s * 1e6,
        "of nn.Linear": ours_s / peer_s,
        "skipped graph captures": counters["inductor"]["cudagraph_skips"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.compiled: needs a GPU", file=sys.stderr)
        return 1
    rows = [row(name, mode) for mode in args.modes for name in args.recipes]
    print(common.table(rows))
    if args.out:
        common.save(args.out, rows)
    missed = [r["case"] for r in rows if "reduce-overhead" in r["case"] and r["of nn.Linear"] > GOAL]
    print(f"above {GOAL} of nn.Linear: {', '.join(missed) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
