"""CPU speed against NumPy and torch, two threads: `python -m benchmarks.cpu [--check] [--out FILE]`.

`--check` fails where a ratio is worse than its goal by more than the slack that a shared machine needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import diptych.torch as dt
from benchmarks import common
from diptych import core
from diptych.common import (
    FORMATS,
    RECIPES,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
)

THREADS = 2
SLACK = 0.7  # of the goal: CI machines are shared


def quantizers() -> dict[str, Quantizer]:
    """One quantizer for each row of the format table."""
    found: dict[str, Quantizer] = {}
    for fp8 in ("float8_e4m3fn", "float8_e5m2"):
        for q in (
            Float8CurrentScalingQuantizer(fp8_dtype=fp8),
            Float8BlockQuantizer(fp8_dtype=fp8, block_scaling_dim=1),
            Float8BlockQuantizer(fp8_dtype=fp8, block_scaling_dim=2),
            MXFP8Quantizer(fp8_dtype=fp8),
        ):
            found[q.format.name] = q
    assert set(found) == {f.name for f in FORMATS}
    return found


def quantize_rows(size: int = 4096) -> list[dict[str, Any]]:
    """quantize of float32 [size, size] against a copy of as many bytes; current scaling counts its two reads."""
    x = np.random.default_rng(0).standard_normal((size, size), np.float32)
    rows = []
    for name, quantizer in quantizers().items():
        for usage in ({"columnwise": False}, {"rowwise": False}, {}):
            q = quantizer.with_usage(**usage)
            out = core.quantize(x, q)
            copies = [c for c in ("rowwise", "columnwise") if getattr(q, c)]
            written = sum(getattr(out, f"{c}_{part}").nbytes for c in copies for part in ("data", "scale_inv"))
            moved = x.nbytes * (2 if q.format.per_tensor else 1) + written
            source = np.ones(moved // 2, np.uint8)
            target = np.zeros_like(source)
            call = core_call(x, q)
            ours, copy = common.paired(call, lambda s=source, t=target: np.copyto(t, s), rounds=7)
            rows.append(
                {"op": "quantize", "case": f"{name} {'+'.join(copies)}", "GB/s": moved / ours / 1e9,
                 "peer GB/s": moved / copy / 1e9, "ratio": copy / ours, "goal": 0.5}
            )  # fmt: skip
    return rows


def core_call(x: np.ndarray, quantizer: Quantizer):
    """A quantize into outputs that exist, as np.copyto has them."""
    from diptych.core import _core, _numpy

    out = core.quantize(x, quantizer)
    fmt = quantizer.format
    parts = [
        None if (v := getattr(out, f"{c}_{p}")) is None else _numpy._operand(v, getattr(fmt, d))
        for c in ("rowwise", "columnwise")
        for p, d in (("data", "element"), ("scale_inv", "scale"))
    ]
    amax = None if out.amax is None else _numpy._operand(out.amax, "float32")
    source = _numpy._operand(x, "float32")
    return lambda: _core.quantize(source, *quantizer.spec, amax, False, *parts)


def gemm_rows(size: int = 1024) -> list[dict[str, Any]]:
    """gemm of each format with itself, size cubed, against torch.mm in float32."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    rows = []
    for name, quantizer in quantizers().items():
        qa, qb = core.quantize(a, quantizer), core.quantize(b, quantizer)
        for product, trans in (("fprop", (False, True)), ("dgrad", (False, False)), ("wgrad", (True, False))):
            ours, peer = common.paired(
                lambda qa=qa, qb=qb, t=trans: core.gemm(qa, qb, trans_a=t[0], trans_b=t[1]),
                lambda: torch.mm(ta, tb),
                rounds=5,
            )
            rows.append(
                {"op": "gemm", "case": f"{name} {product}", "GFLOP/s": 2 * size**3 / ours / 1e9,
                 "peer GFLOP/s": 2 * size**3 / peer / 1e9, "ratio": peer / ours, "goal": 0.4}
            )  # fmt: skip
    return rows


def linear_rows() -> list[dict[str, Any]]:
    """Eager Linear forward against nn.Linear: the added microseconds when tiny, the ratio of times when not."""
    rows = []
    for name, recipe in RECIPES.items():
        for m, k, n in ((1, 16, 16), (512, 1024, 1024)):
            x, ours, peer = torch.randn(m, k), dt.Linear(k, n), torch.nn.Linear(k, n)
            with dt.autocast(enabled=True, recipe=recipe):
                t, p = common.paired(
                    lambda x=x, f=ours: f(x), lambda x=x, f=peer: f(x), rounds=21, calls=200 if m == 1 else 3
                )
            row = {"op": "linear", "case": f"{name} {m}x{k} by {k}x{n}", "us": t * 1e6, "peer us": p * 1e6}
            rows.append({**row, "ratio": 60e-6 / max(t - p, 1e-9) if m == 1 else 2 * p / t, "goal": 1.0})
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
