"""Dense FP8 products on Hopper: the kernel that runs, the other one, and bfloat16: `python -m benchmarks.dense
[--out FILE]`.

Large products run on the project's kernel and others on cuBLASLt, by a rule of shape, formats and options
(gemm_native_pays in cuda/grouped/native.cpp). The first part times layers' products on both, with `torch.matmul` of
bfloat16 tensors; the second times both kernels on a grid of shapes and shows how much time the rule costs over choosing
the faster one each time. Kernels take turns in the same run. Before it is timed, each result's first 256 rows are
compared with the float64 product of the decoded values.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import diptych.torch as dt
from benchmarks.decoded import CHECKED, compare
from benchmarks.gpu import device_seconds_of_each, quantized, run_parts
from benchmarks.grouped import PRODUCTS, normal
from diptych import core
from diptych.common import RECIPES
from diptych.core import _core

SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 7168, 2048),
    (4096, 4096, 7168),
    (4096, 7168, 16384),
    (4096, 24576, 1536),
    (8192, 28672, 4096),
    (8192, 4096, 14336),
    (16384, 8192, 8192),
)
SMALL = ((1, 4096, 4096), (16, 4096, 7168), (64, 7168, 2048), (128, 4096, 4096), (1001, 1531, 1024), (4097, 4097, 4096))
GRID = tuple(
    mnk
    for mnk in itertools.product(
        (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        (512, 1024, 2048, 4096, 8192, 16384),
        (256, 1024, 2048, 4096, 8192, 16384),
    )
    if 1e7 <= math.prod(mnk) <= 6e11
)
OURS, THEIRS = ("cuda.native", "cuda.native_rest"), ("cuda.cublaslt",)
CHOICES = {"chosen": (), "ours": ("cuda.native", *THEIRS), "cuBLASLt": OURS}  # by name: kernels that are switched off


class Kind(NamedTuple):
    """A layer's product: the recipe whose operands it multiplies, and the dtype of its result."""

    recipe: str
    product: str
    out_dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.recipe} {self.product}" + (" float32" if self.out_dtype == torch.float32 else "")


def kinds() -> Iterator[Kind]:
    """Every product of two recipes with float32 scales; wgrad also in float32."""
    for recipe in ("fp8-current", "fp8-block"):
        for product in PRODUCTS:
            yield Kind(recipe, product, torch.bfloat16)
        yield Kind(recipe, "wgrad", torch.float32)


def operands(kind: Kind, shape: tuple[int, int, int]) -> tuple[Any, Any, Callable[..., torch.Tensor]]:
    """Returns both quantized operands, and the product as a function of nothing."""
    m, n, k = shape
    flip_a, flip_b = kind.product == "wgrad", kind.product != "fprop"
    recipe = RECIPES[kind.recipe]
    qa, qb = recipe.operands(kind.product)
    assert qa is not None and qb is not None
    scale, rng = torch.full((1,), 64.0, device="cuda"), dt.rng_state(0, device="cuda")
    x = quantized(
        normal(*((k, m) if flip_a else (m, k))), qa.with_usage(rowwise=not flip_a, columnwise=flip_a), scale, rng
    )
    y = quantized(
        normal(*((k, n) if flip_b else (n, k))), qb.with_usage(rowwise=not flip_b, columnwise=flip_b), scale, rng
    )
    options = recipe.gemm_options(kind.product)._asdict()
    run = functools.partial(dt.gemm, x, y, trans_a=flip_a, trans_b=not flip_b, out_dtype=kind.out_dtype, **options)
    return x, y, run


def with_kernels(off: tuple[str, ...], run: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `run` with some kernels switched off."""

    def switched() -> Any:
        for kernel in off:
            _core.switch_kernel(kernel, False)
        try:
            return run()
        finally:
            for kernel in off:
                _core.switch_kernel(kernel, True)

    return switched


def kernel_of(run: Callable[[], object]) -> str:
    core.reset_calls()
    run()
    (kernel,) = (r["kernel"] for r in core.kernel_table() if r["calls"] and r["op"] == "gemm")
    return kernel


def layer_rows(shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    m, n, k = shape
    for kind in kinds():
        x, y, run = operands(kind, shape)
        runs = {name: with_kernels(off, run) for name, off in CHOICES.items()}
        flip_a, flip_b = kind.product == "wgrad", kind.product != "fprop"
        left, right = (t.dequantize(torch.float32) for t in (x, y))
        want = (left.t() if flip_a else left)[:CHECKED].double() @ (right if flip_b else right.t()).double()
        a, b = (left.t() if flip_a else left).bfloat16(), (right if flip_b else right.t()).bfloat16()
        del left, right
        kernels = {name: kernel_of(r) for name, r in runs.items()}
        if not kernels["cuBLASLt"].startswith("cuda.cublaslt"):  # it does not take the product
            del runs["cuBLASLt"]
        for name, r in runs.items():
            bound = 4e-3 if kind.out_dtype == torch.bfloat16 else 1e-3
            compare(f"{name} {kind} {shape}", r()[:CHECKED], want, bound)
        runs["bf16"] = functools.partial(torch.matmul, a, b)
        times = dict(zip(runs, device_seconds_of_each(list(runs.values()), repeat=15), strict=True))
        flops = 2 * m * n * k / 1e12
        speeds = {name: flops / times[name] if name in times else "–" for name in (*CHOICES, "bf16")}
        yield {"op": "gemm", "case": f"{kind} {m}x{n}x{k}", "kernel": kernels["chosen"], **speeds,
               "of bf16": times["bf16"] / times["chosen"]}  # fmt: skip


def microseconds(runs: dict[str, Callable[[], object]], flops: float) -> dict[str, float]:
    """Returns the median time of each in CUDA graphs that repeat it, so that the host's time does not count."""
    repeat, graphs, stream = max(2, min(20, int(2e11 / flops))), {}, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for name, run in runs.items():
            run()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for _ in range(repeat):
                    run()
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
        for _ in range(4):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: sorted(s.elapsed_time(e) for s, e in pairs[1:])[1] * 1e3 / repeat for name, pairs in events.items()}


def rule_rows(kind: Kind) -> Iterator[dict[str, Any]]:
    """The rule's cost on the grid: geometric means of the time over the faster kernel's time."""
    times: list[dict[str, float]] = []
    for m, n, k in GRID:
        _, _, run = operands(kind, (m, n, k))
        chosen = kernel_of(run)
        both = {name: with_kernels(CHOICES[name], run) for name in ("ours", "cuBLASLt")}
        t = microseconds(both, 2.0 * m * n * k)
        times.append(t | {"rule": t["ours" if chosen in OURS else "cuBLASLt"]})
    costs = {name: [t[name] / min(t["ours"], t["cuBLASLt"]) for t in times] for name in ("rule", "ours", "cuBLASLt")}
    yield {"op": "gemm rule", "case": f"{kind}, {len(times)} shapes",
           **{f"{name} / faster": math.exp(sum(map(math.log, c)) / len(c)) for name, c in costs.items()},
           "worst": max(costs["rule"])}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run_parts("benchmarks.dense", __doc__, [(layer_rows, SHAPES + SMALL), (rule_rows, tuple(kinds()))], argv)


if __name__ == "__main__":
    sys.exit(main())
