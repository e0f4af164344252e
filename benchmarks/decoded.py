"""MXFP8 and NVFP4 products beside bfloat16 ones of the same sizes: `python -m benchmarks.decoded [--out FILE]`.

Hopper has no tensor cores for these formats; its kernel decodes them to bfloat16 (docs/decisions/kernels.md). Peers:
`torch.matmul` and, in groups, `torch.nn.functional.grouped_mm`, on bfloat16 tensors. Products take turns with their
peer in the same run. Before it is timed, each dense result's first 256 rows are compared with the float64 product of
the decoded values (of the inputs, where copies are rotated); `benchmarks.grouped` checks products of groups.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import diptych.torch as dt
from benchmarks.gpu import device_seconds_of_each, quantized, run_parts
from benchmarks.grouped import ALIGN, PRODUCTS, grouped, normal, plain, tensors
from diptych import core
from diptych.common import RECIPES, Recipe

DENSE = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 7168, 16384),
    (8192, 28672, 4096),
    (16384, 4096, 4096),
    (4096, 24576, 1536),
)
GROUPED = ((8, 4096, 4096, 7168), (64, 512, 2816, 2048))  # groups, rows of each, N, K
CHECKED = 256  # rows


def recipes() -> dict[str, Recipe]:
    """The first recipe of each format whose scales are no float32, by name."""
    found: dict[str, str] = {}
    for name, recipe in RECIPES.items():
        quantizer = recipe.operands("fprop")[0]
        if quantizer is not None and quantizer.format.scale != "float32":
            found.setdefault(quantizer.format.name, name)
    return {name: RECIPES[name] for name in found.values()}


def compare(what: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    error = float((got.double() - want).norm() / want.norm())
    if not error < bound:
        raise AssertionError(f"{what}: {error:.3g} from the float64 product")


def dense_rows(shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """D [m, n] of reduced length k as each of a layer's products; wgrad also in float32."""
    m, n, k = shape
    scale, rng = torch.full((1,), 64.0, device="cuda"), dt.rng_state(0, device="cuda")
    for product in PRODUCTS:
        flip_a, flip_b = product == "wgrad", product != "fprop"
        a, b = normal(*((k, m) if flip_a else (m, k))), normal(*((k, n) if flip_b else (n, k)))
        runs: dict[str, Callable[[], object]] = {
            "bf16": lambda a=a, b=b, fa=flip_a, fb=flip_b: (a.t() if fa else a) @ (b if fb else b.t())
        }
        for name, recipe in recipes().items():
            qa, qb = recipe.operands(product)
            assert qa is not None and qb is not None
            x = quantized(a, qa.with_usage(rowwise=not flip_a, columnwise=flip_a), scale, rng)
            y = quantized(b, qb.with_usage(rowwise=not flip_b, columnwise=flip_b), scale, rng)
            run = functools.partial(dt.gemm, x, y, trans_a=flip_a, trans_b=not flip_b)
            rotated = flip_a and getattr(qa, "with_rht", False)  # rotations cancel in the product alone
            left, right = (a, b) if rotated else (t.dequantize(torch.float32) for t in (x, y))
            want = (left.t() if flip_a else left)[:CHECKED].double() @ (right if flip_b else right.t()).double()
            bound = 0.2 if rotated else 4e-3  # NVFP4's own error; bfloat16 rounds to 2e-3
            compare(f"{name} {product} {shape}", run(out_dtype=torch.bfloat16)[:CHECKED], want, bound)
            runs[name] = functools.partial(run, out_dtype=torch.bfloat16)
            if product == "wgrad":
                runs[f"{name} float32"] = functools.partial(run, out_dtype=torch.float32)
        yield from speeds(f"{product} {m}x{n}x{k}", 2 * m * n * k / 1e12, runs)


def grouped_rows(shape: tuple[int, int, int, int]) -> Iterator[dict[str, Any]]:
    groups, rows, n, k = shape
    offsets = (torch.arange(groups + 1, device="cuda") * rows).int()
    for product in PRODUCTS:
        a, b = tensors(product, *shape)
        runs: dict[str, Callable[[], object]] = {"bf16": functools.partial(plain, product, a, b, offsets[1:])}
        for name, recipe in recipes().items():
            made = grouped(product, recipe, a, b)
            assert made is not None
            _, x, y = made
            runs[name] = functools.partial(
                dt.grouped_gemm, x, y, offsets, trans_a=product == "wgrad", trans_b=product == "fprop",
                out_dtype=torch.bfloat16, align=ALIGN,
            )  # fmt: skip
        yield from speeds(f"{product} {groups}x{rows}x{n}x{k}", 2 * groups * rows * n * k / 1e12, runs)


def speeds(case: str, flops: float, runs: dict[str, Callable[[], object]]) -> Iterator[dict[str, Any]]:
    core.reset_calls()
    for run in runs.values():
        run()
    kernels = {r["kernel"] for r in core.kernel_table() if r["calls"] and r["op"] in ("gemm", "grouped_gemm")}
    times = dict(zip(runs, device_seconds_of_each(list(runs.values()), repeat=15), strict=True))
    for name, t in times.items():
        if name != "bf16":
            yield {"op": "gemm", "case": f"{name} {case}", "kernel": " ".join(sorted(kernels)), "TFLOP/s": flops / t,
                   "bf16": flops / times["bf16"], "of bf16": times["bf16"] / t}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run_parts("benchmarks.decoded", __doc__, [(dense_rows, DENSE), (grouped_rows, GROUPED)], argv)


if __name__ == "__main__":
    sys.exit(main())
