"""A small compiled Linear against compiled nn.Linear on a GPU, forward and backward, in one run and the same mode:
`python -m benchmarks.compiled [--modes MODE ...] [--recipes NAME ...] [--out FILE]`.

128 rows, 256 by 256, bfloat16: the GPU's work is negligible, so this measures the host. Wall time, medians of rounds in
turns; gradients stay allocated between steps, as captured graphs require.
"""

from __future__ import annotations

import argparse
import copy
import sys
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
STEPS = 50  # of a round
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


def batch(step: Callable[[], None]) -> Callable[[], None]:
    """Many steps, the GPU's work included."""

    def run() -> None:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()

    return run


def row(name: str, mode: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    placed = {"device": "cuda", "dtype": torch.bfloat16}
    ours = dt.Linear(K, N, **placed)
    dt.seed_rng(ours, 0)
    steps = [stepping(ours, copy.deepcopy(RECIPES[name]), mode), stepping(nn.Linear(K, N, **placed), None, mode)]
    ours_s, peer_s = (t / STEPS for t in common.paired(*[batch(step) for step in steps]))
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
