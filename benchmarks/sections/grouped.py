"""Products of groups beside torch's in bfloat16 and FP8, and DeepGEMM's; groups are equal, or cut at random multiples
of 128. Each result is compared with the float64 products of the first groups' first rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import diptych.torch as dt
from benchmarks import room
from benchmarks.cases import Case, width
from benchmarks.quantizers import Named
from benchmarks.results import Row
from benchmarks.room import Run, difference, measured, normal
from benchmarks.sections.gemm import BOUND, CHECKED, ROTATED
from benchmarks.sections.quantize import quantized, state
from diptych.common import RECIPES

ALIGN = 128
CHECKED_GROUPS = 4


def offsets_of(groups: int, rows: int, cut: str = "equal") -> torch.Tensor:
    """Returns offsets int32 [groups + 1] that cut groups * rows rows."""
    if cut == "equal":
        return (torch.arange(groups + 1, device=room.DEVICE) * rows).int()
    cuts = torch.randint(0, groups * rows // ALIGN + 1, (groups - 1,), device=room.DEVICE).sort().values * ALIGN
    ends = torch.tensor([0, groups * rows], device=room.DEVICE)
    return torch.cat([ends[:1], cuts, ends[1:]]).int()


def operands(product: str, groups: int, rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both operands of a product: for wgrad two tensors of rows, else rows and a stack of weights."""
    total = groups * rows
    if product == "fprop":
        return normal(total, k), normal(groups, n, k)
    return normal(total, n), normal(groups, n, k) if product == "dgrad" else normal(total, k)


def checker(product: str, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> Callable[[torch.Tensor], float]:
    """Returns the relative difference of some groups' first rows of a result from the float64 products."""
    bounds = offsets.tolist()
    groups = [g for g in range(len(bounds) - 1) if bounds[g + 1] > bounds[g]][:CHECKED_GROUPS]
    parts = []
    for g in groups:
        first, last = bounds[g], bounds[g + 1]
        if product == "wgrad":
            parts.append(a[first:last, :CHECKED].double().t() @ b[first:last].double())
        else:
            w = b[g].double()
            parts.append(a[first : min(last, first + CHECKED)].double() @ (w.t() if product == "fprop" else w))
    want = torch.cat(parts)

    def check(got: torch.Tensor) -> float:
        if product == "wgrad":
            return difference(torch.cat([got[g][:CHECKED] for g in groups]), want)
        return difference(torch.cat([got[bounds[g] : min(bounds[g + 1], bounds[g] + CHECKED)] for g in groups]), want)

    return check


def copies(product: str, recipe: str, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, Any]:
    """Quantizes both operands, each to the copy that the product reads."""
    qa, qb = RECIPES[recipe].operands(product, "grouped_linear")
    assert qa is not None and qb is not None
    side = {"rowwise": product != "wgrad", "columnwise": product == "wgrad"}
    x = quantized(a, qa.with_usage(**side))
    if product == "wgrad":
        return x, quantized(b, qb.with_usage(**side))
    quantizer = qb.with_usage(rowwise=product == "fprop", columnwise=product == "dgrad")
    given = Named("", quantizer).state(*state())
    return x, dt.quantize_stack(b, quantizer, **{name: t.expand(len(b), -1).squeeze(-1) for name, t in given.items()})


def deepgemm(peer: Any, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> Run:
    x, y = copies("fprop", "fp8-block", a, b)
    rows = torch.arange(len(b), dtype=torch.int32, device=room.DEVICE).repeat_interleave(offsets.diff().long())
    d = torch.empty(len(a), b.shape[1], dtype=torch.bfloat16, device=room.DEVICE)
    scale = x.rowwise_scale_inv.t().contiguous()
    call = peer.call("deepgemm_1d2d", x.rowwise_data, scale, y.rowwise_data, y.rowwise_scale_inv, d, rows)
    check = checker("fprop", x.dequantize(torch.float32), y.dequantize(torch.float32), offsets)
    return Run(call, check=check, bound=BOUND)


def rows(case: Case, peers: dict[str, Any]) -> Iterator[Row]:
    product, *cut = case.what.split()
    groups, size, n, k = case.shape
    a, b = operands(product, *case.shape)
    offsets = offsets_of(groups, size, *cut)
    runs: dict[str, Run] = {}
    plain = checker(product, a, b, offsets)
    if torchs := peers.get("grouped_mm"):
        runs["bf16"] = Run(lambda: torchs.plain(product, a, b, offsets[1:]), check=plain, bound=BOUND)
        if by_row := torchs.by_row(product, a, b, offsets[1:]):
            runs["torch FP8 by row"] = Run(by_row, check=plain, bound=0.06)  # FP8's own error
    for recipe in case.names:
        x, y = copies(product, recipe, a, b)
        rotated = product == "wgrad" and getattr(x.quantizer, "with_rht", False)
        high = (a, b) if rotated else (x.dequantize(torch.float32), y.dequantize(torch.float32))
        run = functools.partial(
            dt.grouped_gemm, x, y, offsets, trans_a=product == "wgrad", trans_b=product == "fprop",
            out_dtype=torch.bfloat16, align=ALIGN, fast_accum=RECIPES[recipe].fast_accum(product),
        )  # fmt: skip
        runs[recipe] = Run(run, check=checker(product, *high, offsets), bound=ROTATED if rotated else 1e-2)
        del high
    if product == "fprop" and "deepgemm" in peers:
        runs["DeepGEMM"] = deepgemm(peers["deepgemm"], a, b, offsets)
    for name, run in runs.items():
        run.flops = 2.0 * groups * size * n * k
        run.bytes = width(name) * (a.numel() + b.numel()) + 2 * run.flops / (2 * (k if product != "dgrad" else n))
    yield from measured(case, runs)
