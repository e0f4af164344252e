"""GPU speed beside its ceilings and peers, in one run: `python -m benchmarks.gpu [--out FILE] [--only PART]`.

Ceilings: a device copy (read + write) and bfloat16 `torch.mm`. Peers: `torch._scaled_mm` (per-tensor FP8) and
`nn.Linear` in bfloat16. Random data, medians of CUDA-event timings over inputs larger than L2 where the shape allows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import diptych.torch as dt
from benchmarks import common
from diptych import core
from diptych.common import RECIPES, QuantizerRole

QUANTIZE_SHAPES = ((4096, 4096), (8192, 8192), (16384, 7168), (32768, 4096))
GEMM_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 16384), (8192, 28672, 4096))
LINEAR_SHAPES = ((128, 256, 256), (16384, 4096, 4096), (8192, 8192, 8192))


def device_seconds(fn: Callable[[], object], repeat: int = 20) -> float:
    """Median seconds of one call between CUDA events, with L2 flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        fn()
    times = []
    for _ in range(repeat):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_rows() -> list[dict[str, Any]]:
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    t = device_seconds(lambda: target.copy_(source))
    return [{"op": "copy", "case": "4 GiB", "GB/s": 2 * source.numel() / t / 1e9}]


def quantize_rows(ceiling: float) -> list[dict[str, Any]]:
    rows = []
    seen = set()
    for recipe in RECIPES.values():
        for tensor in QuantizerRole.TENSORS:
            base = recipe.quantizer(QuantizerRole(tensor=tensor))
            if base.format.name in seen:
                continue
            seen.add(base.format.name)
            for usage in ("rowwise", "rowwise+columnwise"):
                quantizer = base.with_usage(columnwise=usage != "rowwise")
                for shape in QUANTIZE_SHAPES:
                    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                    q = dt.quantize(x, quantizer)
                    out = [
                        t
                        for n in ("rowwise", "columnwise")
                        for t in (getattr(q, f"{n}_data"), getattr(q, f"{n}_scale_inv"))
                    ]
                    written = sum(t.numel() * t.element_size() for t in out if t is not None)
                    moved = x.numel() * 2 * (2 if base.format.per_tensor else 1) + written
                    amax = q.amax
                    t = device_seconds(
                        lambda x=x, z=quantizer, a=amax, o=out: core._core.quantize(x, *z.spec, a, False, *o)
                    )
                    rows.append(
                        {"op": "quantize", "case": f"{base.format.name} {usage} {shape[0]}x{shape[1]}",
                         "GB/s": moved / t / 1e9, "of copy": moved / t / 1e9 / ceiling}
                    )  # fmt: skip
    return rows


def gemm_rows() -> list[dict[str, Any]]:
    rows = []
    for m, n, k in GEMM_SHAPES:
        a, b = (torch.randn(s, k, device="cuda", dtype=torch.bfloat16) for s in (m, n))
        flops = 2 * m * n * k / 1e12
        bf16 = flops / device_seconds(lambda a=a, b=b: a @ b.t())
        one = torch.ones(1, device="cuda")
        fa, fb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

        def scaled_mm(fast: bool, x=fa, y=fb, one=one) -> torch.Tensor:
            return torch._scaled_mm(x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        lt = {fast: flops / device_seconds(lambda f=fast, mm=scaled_mm: mm(f)) for fast in (False, True)}
        for name, recipe in RECIPES.items():
            if name == "mxfp8" and m * n * k > 4096**3 * 8:
                continue  # emulated: one large shape says enough
            q = {t: recipe.quantizer(QuantizerRole(tensor=t)) for t in QuantizerRole.TENSORS}
            qa, qb = dt.quantize(a, q["input"]), dt.quantize(b, q["weight"])
            fast = recipe.fast_accum("fprop")
            core.reset_calls()
            t = device_seconds(lambda x=qa, y=qb, f=fast: dt.gemm(x, y, out_dtype=torch.bfloat16, fast_accum=f))
            kernel = next(r["kernel"] for r in core.kernel_table() if r["op"] == "gemm" and r["calls"])
            rows.append(
                {
                    "op": "gemm",
                    "case": f"{name} fprop {m}x{n}x{k}",
                    "kernel": kernel,
                    "TFLOP/s": flops / t,
                    "bf16": bf16,
                    "torch._scaled_mm slow": lt[False],
                    "torch._scaled_mm fast": lt[True],
                }
            )
    return rows


def linear_rows() -> list[dict[str, Any]]:
    """Forward + backward, device time for large shapes and wall time for the small one (host-bound)."""
    rows = []
    for m, k, n in LINEAR_SHAPES:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        peer = torch.nn.Linear(k, n, device="cuda", dtype=torch.bfloat16)
        ours = dt.Linear(k, n, device="cuda", dtype=torch.bfloat16)

        def step(layer: torch.nn.Module, x=x, dy=dy) -> None:
            layer(x).backward(dy)

        small = m * k * n < 1e9

        def measure(fn: Callable[[], object], small=small) -> float:
            if not small:
                return device_seconds(fn)

            def synced() -> None:
                fn()
                torch.cuda.synchronize()

            return common.seconds(synced, repeat=30)

        base = measure(lambda f=peer: step(f))
        for name, recipe in RECIPES.items():
            with dt.autocast(enabled=True, recipe=recipe):
                t = measure(lambda f=ours: step(f))
            rows.append(
                {"op": "linear fwd+bwd", "case": f"{name} {m}x{k} by {k}x{n}", "ms": t * 1e3, "bf16 ms": base * 1e3,
                 "speedup": base / t}
            )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", choices=("quantize", "gemm", "linear"), help="one of the parts")
    args = parser.parse_args(argv)
    if not (core.build_info()["cuda"] and torch.cuda.is_available()):
        print("benchmarks.gpu: needs a GPU and a build with CUDA; see `diptych doctor`", file=sys.stderr)
        return 1
    rows = copy_rows()
    ceiling = rows[0]["GB/s"]
    print(common.table(rows), end="\n\n")
    for name, part in (("quantize", lambda: quantize_rows(ceiling)), ("gemm", gemm_rows), ("linear", linear_rows)):
        if args.only in (None, name):
            fresh = part()
            print(common.table(fresh), end="\n\n", flush=True)
            rows.extend(fresh)
    if args.out:
        info = dict(core.cuda_info())
        common.save(args.out, rows, gpu=torch.cuda.get_device_name(0), cuda=info, driver=torch.version.cuda)
    return 0


if __name__ == "__main__":
    sys.exit(main())
