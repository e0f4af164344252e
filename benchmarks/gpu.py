"""GPU speed against ceilings and peers, in one run: `python -m benchmarks.gpu [--out FILE] [--only PART]`.

Ceilings: a device copy (read + write) and bfloat16 `torch.mm`. Peers: `torch._scaled_mm` (per-tensor FP8) and
`nn.Linear` in bfloat16. Random data, medians of CUDA-event timings over inputs larger than L2 where the shape allows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import diptych.torch as dt
from benchmarks import common
from diptych import core
from diptych.common import RECIPES, Quantizer, Recipe
from diptych.common.ops.activation import activation_options
from diptych.common.ops.norm import norm_options
from diptych.torch.functional import source as fused
from diptych.torch.primitives import activation as activation_ops
from diptych.torch.primitives import norm as norm_ops

QUANTIZE_SHAPES = ((4096, 4096), (8192, 8192), (16384, 7168))
GEMM_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 16384), (8192, 28672, 4096))
FUSED_ROWS, FUSED_WIDTH, FUSED_FFN = 16384, 4096, 14336
LINEAR_SHAPES = ((128, 256, 256), (16384, 4096, 4096), (8192, 8192, 8192))


def device_seconds_of_each(fns: Sequence[Callable[[], object]], repeat: int = 20) -> list[float]:
    """Median seconds of one call of each between CUDA events, with L2 flushed before it. They take turns, in an order
    drawn anew for every round: large products heat the chip, which then lowers its clock for whoever comes next."""
    # The flush takes the GPU 0.13 ms, in which the host launches the timed call, so host time is not measured.
    flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in fns]
    order = random.Random(0)
    for fn in fns:
        for _ in range(3):
            fn()
    for _ in range(repeat):
        for i in order.sample(range(len(fns)), len(fns)):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            fns[i]()
            end.record()
            end.synchronize()
            times[i].append(start.elapsed_time(end) / 1e3)
    return [statistics.median(t) for t in times]


def device_seconds(fn: Callable[[], object], repeat: int = 20) -> float:
    """Median seconds of one call alone."""
    return device_seconds_of_each([fn], repeat)[0]


def copy_rows() -> list[dict[str, Any]]:
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    t = device_seconds(lambda: target.copy_(source))
    return [{"op": "copy", "case": "4 GiB", "GB/s": 2 * source.numel() / t / 1e9}]


def quantize_rows(ceiling: float) -> list[dict[str, Any]]:
    """quantize into existing outputs; all bytes that the scale rule must read are counted."""
    rows = []
    scale = torch.full((1,), 64.0, device="cuda")
    rng = dt.rng_state(0, device="cuda")
    for shape in QUANTIZE_SHAPES:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for base in common.quantize_cases():
            for usage in (("rowwise",), ("rowwise", "columnwise")):
                case = base.with_usage(*usage)
                q = quantized(x, case.quantizer, scale, rng)
                arguments = case.arguments(q, lambda t, _: t, scale, rng)
                written = sum(t.numel() * t.element_size() for t in arguments if isinstance(t, torch.Tensor))
                moved = x.numel() * x.element_size() * case.reads + written
                t = device_seconds(lambda x=x, a=arguments: core._core.quantize(x, *a), repeat=11)
                rows.append(
                    {"op": "quantize", "case": f"{case.name} {'+'.join(usage)} {shape[0]}x{shape[1]}",
                     "GB/s": moved / t / 1e9, "of copy": moved / t / 1e9 / ceiling}
                )  # fmt: skip
    return rows


def state_of(quantizer: Quantizer, scale: torch.Tensor, rng: torch.Tensor) -> dict[str, Any]:
    """Returns the scale or random state that the quantizer needs."""
    return {"scale": scale} if quantizer.needs_scale else {"rng": rng} if quantizer.needs_rng else {}


def quantized(x: torch.Tensor, quantizer: Quantizer, scale: torch.Tensor, rng: torch.Tensor) -> dt.QuantizedTensor:
    """Quantizes with the scale or random state that the quantizer needs."""
    return dt.quantize(x, quantizer, **state_of(quantizer, scale, rng))


def gemm_rows() -> list[dict[str, Any]]:
    """fprop of each recipe whose formats differ from those of earlier recipes."""
    rows = []
    scale = torch.full((1,), 64.0, device="cuda")
    rng = dt.rng_state(0, device="cuda")
    for m, n, k in GEMM_SHAPES:
        a, b = (torch.randn(s, k, device="cuda", dtype=torch.bfloat16) for s in (m, n))
        flops = 2 * m * n * k / 1e12
        bf16 = flops / device_seconds(lambda a=a, b=b: a @ b.t(), repeat=11)
        one = torch.ones(1, device="cuda")
        fa, fb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

        def scaled_mm(fast: bool, x=fa, y=fb, one=one) -> torch.Tensor:
            return torch._scaled_mm(x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        lt = {fast: flops / device_seconds(lambda f=fast, mm=scaled_mm: mm(f), repeat=11) for fast in (False, True)}
        seen = set()
        for name, recipe in RECIPES.items():
            qa, qb = (
                quantized(t, q.with_usage(columnwise=False), scale, rng)
                for t, q in zip((a, b), recipe.operands("fprop"), strict=True)
                if q is not None
            )
            fast = recipe.fast_accum("fprop")
            formats = (qa.quantizer.format, qb.quantizer.format, fast)
            if formats in seen:
                continue
            seen.add(formats)
            core.reset_calls()
            dt.gemm(qa, qb, out_dtype=torch.bfloat16, fast_accum=fast)
            ran = next(r for r in core.kernel_table() if r["op"] == "gemm" and r["calls"])
            if ran["level"] == "emulated" and m * n * k > 4096**3 * 8:
                continue  # one large shape says enough
            t = device_seconds(
                lambda x=qa, y=qb, f=fast: dt.gemm(x, y, out_dtype=torch.bfloat16, fast_accum=f), repeat=11
            )
            rows.append(
                {
                    "op": "gemm",
                    "case": f"{name} fprop {m}x{n}x{k}",
                    "kernel": ran["kernel"],
                    "TFLOP/s": flops / t,
                    "bf16": bf16,
                    "torch._scaled_mm slow": lt[False],
                    "torch._scaled_mm fast": lt[True],
                }
            )
    return rows


def fused_cases(gemm: str) -> dict[str, Quantizer]:
    """The different quantizers of the recipes' first operands, making both copies."""
    cases: dict[str, Quantizer] = {}
    for name, recipe in RECIPES.items():
        quantizer = recipe.operands(gemm)[0]
        if quantizer is not None and (q := quantizer.with_usage(rowwise=True, columnwise=True)) not in cases.values():
            cases[name] = q
    return cases


def fused_rows(ceiling: float) -> list[dict[str, Any]]:
    """Norms and SwiGLU with their gradients, quantized on the way or in bfloat16: forward inputs, gradients of outputs.

    An operand counts once for each pass that must read it (an amax of the whole tensor is one, a norm's statistics are
    another), a result once.
    """
    rows: list[dict[str, Any]] = []
    norm, act = norm_options("bench", "RMSNorm", 1e-5, False), activation_options("bench", "swiglu")
    scale, rng = torch.full((1,), 64.0, device="cuda"), dt.rng_state(0, device="cuda")

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def size(tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def measure(case: str, fn: Callable[[], Any], read: int) -> None:
        made = fn()
        moved = read + size([made] if isinstance(made, torch.Tensor) else made)
        del made
        t = device_seconds(fn, repeat=11)
        rows.append(
            {"op": "fused", "case": case, "ms": t * 1e3, "GB/s": moved / t / 1e9, "of copy": moved / t / 1e9 / ceiling}
        )

    def sources(what: str, source: fused.FusedInput, gemm: str, before: Callable[[], Any], read_before: int) -> None:
        """Returns the sources to quantize. `before` runs ahead of each quantize and reads that many bytes."""
        read = size(source)
        measure(f"amax of {what}", lambda: fused.amax(source), read)
        for name, q in fused_cases(gemm).items():

            def run(q: Quantizer = q) -> Any:
                before()
                return fused.quantize(source, q, **state_of(q, scale, rng))

            measure(f"{name} {what}", run, read * common.QuantizeCase(name, q).reads + read_before)

    x, dy, gamma = new(FUSED_ROWS, FUSED_WIDTH), new(FUSED_ROWS, FUSED_WIDTH), new(FUSED_WIDTH)
    at = f"{FUSED_ROWS}x{FUSED_WIDTH}"
    mu, rsigma, _ = norm_ops.norm(x, None, None, norm)
    sources(
        f"rmsnorm {at}", fused.normalized(x, gamma, None, mu, rsigma, norm), "fprop",
        lambda: norm_ops.norm(x, None, None, norm), size([x]),
    )  # fmt: skip
    measure(f"bfloat16 rmsnorm {at}", lambda: norm_ops.norm(x, gamma, None, norm), size([x, gamma]))
    measure(
        f"bfloat16 gradient of rmsnorm {at}",
        lambda: norm_ops.norm_grad(dy, x, gamma, mu, rsigma, norm, False), size([dy, x, gamma, rsigma]),
    )  # fmt: skip

    h, da = new(FUSED_ROWS, 2 * FUSED_FFN), new(FUSED_ROWS, FUSED_FFN)
    at = f"{FUSED_ROWS}x(2*{FUSED_FFN})"
    sources(f"swiglu {at}", fused.activated(h, act), "fprop", lambda: None, 0)
    measure(f"bfloat16 swiglu {at}", lambda: activation_ops.activation(h, act), size([h]))
    sources(f"gradient of swiglu {at}", fused.activated_grad(da, h, act), "dgrad", lambda: None, 0)
    measure(f"bfloat16 gradient of swiglu {at}", lambda: activation_ops.activation_grad(da, h, act), size([h, da]))
    return rows


def linear_rows() -> list[dict[str, Any]]:
    """Forward + backward, device time for large shapes and wall time for the small one (host-bound)."""
    rows = []
    for m, k, n in LINEAR_SHAPES:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        peer = torch.nn.Linear(k, n, device="cuda", dtype=torch.bfloat16)
        small = m * k * n < 1e9

        def step(layer: torch.nn.Module, recipe: Recipe | None = None, x=x, dy=dy) -> None:
            with dt.autocast(enabled=recipe is not None, recipe=recipe):  # one region a step, as in training
                y = layer(x)
            y.backward(dy)

        def measure(fn: Callable[[], object], small=small) -> float:
            if not small:
                return device_seconds(fn, repeat=9)

            def synced() -> None:
                fn()
                torch.cuda.synchronize()

            return common.seconds(synced, repeat=30)

        base = measure(lambda f=peer, s=step: s(f))
        for name, recipe in RECIPES.items():
            ours = dt.Linear(k, n, device="cuda", dtype=torch.bfloat16)
            t = measure(lambda f=ours, r=recipe, s=step: s(f, r))
            rows.append(
                {"op": "linear fwd+bwd", "case": f"{name} {m}x{k} by {k}x{n}", "ms": t * 1e3, "bf16 ms": base * 1e3,
                 "speedup": base / t}
            )  # fmt: skip
    return rows


def run_parts(
    name: str,
    doc: str | None,
    parts: Sequence[tuple[Callable[..., Iterable[dict[str, Any]]], Sequence[Any]]],
    argv: list[str] | None,
) -> int:
    """Runs a benchmark whose parts give rows for each of their shapes, and returns its exit status.

    **Arguments:** `name`: the benchmark's module. `parts`: (function of a shape, shapes), in order.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=doc)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    if not (core.build_info()["cuda"] and torch.cuda.is_available()):
        print(f"{name}: needs a GPU and a build with CUDA; see `diptych doctor`", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for part, shapes in parts:
        for shape in shapes:
            fresh = list(part(shape))
            print(common.table(fresh), end="\n\n", flush=True)
            rows += fresh
            torch.cuda.empty_cache()
    if args.out:
        common.save(args.out, rows, gpu=torch.cuda.get_device_name(0), cuda=dict(core.cuda_info()))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", choices=("quantize", "fused", "gemm", "linear"), help="one of the parts")
    args = parser.parse_args(argv)
    if not (core.build_info()["cuda"] and torch.cuda.is_available()):
        print("benchmarks.gpu: needs a GPU and a build with CUDA; see `diptych doctor`", file=sys.stderr)
        return 1
    rows = copy_rows()
    ceiling = rows[0]["GB/s"]
    print(common.table(rows), end="\n\n")
    parts = {
        "quantize": lambda: quantize_rows(ceiling),
        "fused": lambda: fused_rows(ceiling),
        "gemm": gemm_rows,
        "linear": linear_rows,
    }
    for name, part in parts.items():
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
