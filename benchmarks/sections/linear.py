"""A layer's step, forward and backward with quantizing, in eager calls: the device's time, beside peers."""

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
from benchmarks.room import Run, difference, measured, normal
from benchmarks.sections.gemm import CHECKED
from benchmarks.sections.grouped import ALIGN, checker, offsets_of
from diptych.common import RECIPES, Recipe

BOUND, PACKED = 0.08, 0.25  # of two quantized operands: FP8's and NVFP4's own errors, twice


def placed() -> dict[str, Any]:
    return {"device": room.DEVICE, "dtype": torch.bfloat16}


def bound_of(recipe: str) -> float:
    quantizer = RECIPES[recipe].operands("fprop")[0]
    return PACKED if quantizer is not None and quantizer.format.pack > 1 else BOUND


def stepping(
    layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: Recipe | None, forward: Any = None, **given: Any
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns a training step of one region, which returns the output and the gradients of x and of the weight."""

    def step() -> tuple[torch.Tensor, ...]:
        x.grad = layer.weight.grad = None
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y = (forward or layer)(x, **given)
        y.backward(dy)
        assert x.grad is not None and layer.weight.grad is not None
        return y.detach(), x.grad, layer.weight.grad

    return step


def linear(case: Case, peers: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    m, n, k = case.shape
    x, dy = normal(m, k).requires_grad_(), normal(m, n)
    plain = nn.Linear(k, n, bias=False, **placed())
    few = CHECKED
    w, high_x, high_dy = (t.detach().double() for t in (plain.weight, x[:few], dy[:few]))
    wants = high_x @ w.t(), high_dy @ w, dy[:, :few].double().t() @ x.detach().double()
    del w

    def check(made: tuple[torch.Tensor, ...]) -> float:
        found = [difference(got[:few], want) for got, want in zip(made, wants, strict=True)]
        return max(found) if all(f == f for f in found) else float("nan")

    flops = 6.0 * m * n * k

    def run(step: Callable[[], Any], bound: float) -> Run:
        return Run(step, flops, 2.0 * (3 * m * k + 3 * m * n + 3 * n * k), check, bound)

    yield "bf16", run(stepping(plain, x, dy, None), 8e-3)
    for recipe in case.names:
        layer = dt.Linear(k, n, bias=False, **placed())
        layer.weight.data.copy_(plain.weight.data)
        dt.seed_rng(layer, 0)
        yield recipe, run(stepping(layer, x, dy, copy.deepcopy(RECIPES[recipe])), bound_of(recipe))
    if "torchao" in peers:
        model = peers["torchao"](nn.Sequential(copy.deepcopy(plain)), "tensorwise")
        yield "torchao tensorwise compiled", run(stepping(model[0], x, dy, None, torch.compile(model)), BOUND)
    for recipe in ("fp8-current", "fp8-block") if "te" in peers else ():
        layer, forward = peers["te"](k, n, recipe)
        layer.weight.data.copy_(plain.weight.data)
        nn.init.zeros_(layer.bias)
        yield f"TE {recipe}", run(stepping(layer, x, dy, None, forward), BOUND)


def grouped(case: Case, peers: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    """Rows are in expert order, groups cut at random. "kept": an earlier microbatch quantized the weights."""
    groups, rows_each, n, k = case.shape
    offsets = offsets_of(groups, rows_each, "random")
    x, dy = normal(groups * rows_each, k).requires_grad_(), normal(groups * rows_each, n)

    def made(weight: torch.Tensor | None = None) -> dt.GroupedLinear:
        own = dt.GroupedLinear(groups, k, n, bias=False, **placed())
        if weight is not None:
            own.weight.data.copy_(weight)
        dt.seed_rng(own, 0)
        return own

    layer = made()
    check_y = checker("fprop", x.detach(), layer.weight.detach(), offsets)
    check_dw = checker("wgrad", dy, x.detach(), offsets)

    def run(step: Callable[[], Any], bound: float) -> Run:
        return Run(step, 6.0 * len(x) * n * k, 2.0 * (3 * x.numel() + 3 * dy.numel() + 3 * layer.weight.numel()),
                   lambda made: max(check_y(made[0]), check_dw(made[2])), bound)  # fmt: skip

    if torchs := peers.get("grouped_mm"):
        ends = offsets[1:]
        plain = stepping(layer, x, dy, None, lambda x: torchs.plain("fprop", x, layer.weight, ends))
        yield "bf16", run(plain, 1e-2)
    for recipe in case.names:
        given: dict[str, Any] = {"offsets": offsets, "align": ALIGN}
        yield recipe, run(stepping(made(layer.weight.data), x, dy, RECIPES[recipe], **given), bound_of(recipe))
        own = made(layer.weight.data)
        first = stepping(own, x, dy, RECIPES[recipe], is_first_microbatch=True, **given)
        for _ in range(2):  # delayed scales begin at 1; the second step's are those of the first one's amaxes
            first()
        later = stepping(own, x, dy, RECIPES[recipe], is_first_microbatch=False, **given)
        yield f"{recipe} kept", run(later, bound_of(recipe))


def rows(case: Case, peers: dict[str, Any]) -> Iterator[Row]:
    yield from measured(case, dict((linear if case.what == "Linear" else grouped)(case, peers)))
