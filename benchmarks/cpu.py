"""CPU speed against NumPy and torch, two threads: `python -m benchmarks.cpu [--check] [--out FILE]`.

`--check` fails where a ratio is worse than its goal by more than the slack that a shared machine needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

import diptych.torch as dt
from benchmarks import common
from benchmarks.common import QuantizeCase, quantize_cases
from diptych import core
from diptych.common import RECIPES
from diptych.lab.job import linear_dtype

THREADS = 2
SLACK = 0.7  # of the goal: CI machines are shared


def quantize_rows(size: int = 4096) -> list[dict[str, Any]]:
    """quantize of [size, size] against a copy of as many bytes: what the scale rule must read, and what it writes.

    Hadamard transforms and random numbers cost more than memory does: they have no goal.
    """
    x = np.random.default_rng(0).standard_normal((size, size), np.float32)
    rows = []
    for case in quantize_cases():
        source = x.astype(ml_dtypes.bfloat16) if case.bfloat16 else x
        for usage in common.usages():
            call, written = core_call(case.with_usage(*usage), source)
            moved = source.nbytes * case.reads + written
            origin = np.ones(moved // 2, np.uint8)
            target = np.zeros_like(origin)
            ours, copy = common.paired(call, lambda s=origin, t=target: np.copyto(t, s), rounds=5)
            rows.append(
                {"op": "quantize", "case": f"{case.name} {'+'.join(usage)}", "GB/s": moved / ours / 1e9,
                 "peer GB/s": moved / copy / 1e9, "ratio": copy / ours, "goal": 0.0 if case.bfloat16 else 0.5}
            )  # fmt: skip
    return rows


def core_call(case: QuantizeCase, x: np.ndarray) -> tuple[Callable[[], None], int]:
    """A quantize into outputs that exist, as np.copyto has them; and how many bytes it writes."""
    from diptych.core import _core, _numpy

    scale, rng = np.full(1, 64, np.float32), np.zeros(4, np.int32)
    needs = {"scale": case.quantizer.needs_scale, "rng": case.quantizer.needs_rng}
    given = {k: v for k, v in (("scale", scale), ("rng", rng)) if needs[k]}
    made = core.quantize(x, case.quantizer, **given)
    written = sum(v.nbytes for v in vars(made).values() if isinstance(v, np.ndarray))
    source, arguments = _numpy._operand(x, x.dtype.name), case.arguments(made, _numpy._operand, scale, rng)
    return (lambda: _core.quantize(source, *arguments)), written


def gemm_rows(size: int = 1024) -> list[dict[str, Any]]:
    """gemm of each format with itself, size cubed, against torch.mm in float32."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    rows = []
    for case in quantize_cases():
        if not case.plain:
            continue  # the same payloads
        qa, qb = core.quantize(a, case.quantizer), core.quantize(b, case.quantizer)
        for product, trans in (("fprop", (False, True)), ("dgrad", (False, False)), ("wgrad", (True, False))):
            ours, peer = common.paired(
                lambda qa=qa, qb=qb, t=trans: core.gemm(qa, qb, trans_a=t[0], trans_b=t[1]),
                lambda: torch.mm(ta, tb),
                rounds=5,
            )
            rows.append(
                {"op": "gemm", "case": f"{case.name} {product}", "GFLOP/s": 2 * size**3 / ours / 1e9,
                 "peer GFLOP/s": 2 * size**3 / peer / 1e9, "ratio": peer / ours, "goal": 0.4}
            )  # fmt: skip
    return rows


def linear_rows() -> list[dict[str, Any]]:
    """Eager Linear forward against nn.Linear: the added microseconds when tiny, the ratio of times when not."""
    rows = []
    for name, recipe in RECIPES.items():
        dtype = getattr(torch, linear_dtype(recipe))
        for m, k, n in ((16, 16, 16), (512, 1024, 1024)):
            ours, peer = dt.Linear(k, n), torch.nn.Linear(k, n)
            wide = torch.randn(m, k)
            x = wide.to(dtype)
            with dt.autocast(enabled=True, recipe=recipe):
                t, p = common.paired(
                    lambda x=x, f=ours: f(x), lambda x=wide, f=peer: f(x), rounds=21, calls=200 if m == 16 else 3
                )
            row = {"op": "linear", "case": f"{name} {m}x{k} by {k}x{n}", "us": t * 1e6, "peer us": p * 1e6}
            rows.append({**row, "ratio": 60e-6 / max(t - p, 1e-9) if m == 16 else 2 * p / t, "goal": 1.0})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a ratio is below {SLACK} x its goal")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", choices=("quantize", "gemm", "linear"), help="one of the parts")
    args = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    core.set_num_threads(THREADS)
    rows: list[dict[str, Any]] = []
    for name, part in (("quantize", quantize_rows), ("gemm", gemm_rows), ("linear", linear_rows)):
        if args.only in (None, name):
            rows.extend(fresh := part())
            print(common.table(fresh), end="\n\n")
    if args.out:
        common.save(args.out, rows)
    bad = [r for r in rows if r["ratio"] < SLACK * r["goal"]]
    for r in bad:
        print(f"too slow: {r['case']}: ratio {r['ratio']:.2f}, goal {r['goal']}", file=sys.stderr)
    return 1 if args.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
