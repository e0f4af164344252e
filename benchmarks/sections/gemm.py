"""Dense products of a layer beside bfloat16, cuBLASLt and DeepGEMM, each compared with the float64 product first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import diptych.torch as dt
from benchmarks import room
from benchmarks.cases import DENSE, WGRAD, Case, width
from benchmarks.results import Row
from benchmarks.room import Call, Run, difference, measured, normal
from benchmarks.sections.quantize import quantized
from diptych import core
from diptych.common import RECIPES
from diptych.core import _core

CHECKED = 256  # rows of a result
DEEPGEMM = ("fprop", "dgrad", "wgrad added")
OWN, CUBLASLT = (
    tuple(r["kernel"] for r in core.kernel_table() if r["kernel"].startswith(name))
    for name in ("cuda.native", "cuda.cublaslt")
)
BOUND, ROTATED, FLOAT32, OTHER_ORDER = 4e-3, 0.2, 1e-3, 4e-3  # bfloat16 rounds to 2e-3; rotations cancel in the product


class Operands:
    """Holds A and B of a product D [m, n] with reduced length k, in bfloat16 and as copies that recipes quantize."""

    def __init__(self, product: str, shape: tuple[int, ...]) -> None:
        m, n, self.k = shape
        self.product = product
        self.flip_a, self.flip_b = product == "wgrad", product != "fprop"
        self.a = normal(*((self.k, m) if self.flip_a else (m, self.k)))
        self.b = normal(*((self.k, n) if self.flip_b else (n, self.k)))

    def rowwise(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views [m, k] and [n, k] of two operands."""
        return a.t() if self.flip_a else a, b.t() if self.flip_b else b

    def plain(self) -> torch.Tensor:
        a, b = self.rowwise(self.a, self.b)
        return torch.matmul(a, b.t())

    def quantized(self, recipe: str) -> tuple[Any, Any]:
        qa, qb = RECIPES[recipe].operands(self.product)
        assert qa is not None and qb is not None
        x = quantized(self.a, qa.with_usage(rowwise=not self.flip_a, columnwise=self.flip_a))
        return x, quantized(self.b, qb.with_usage(rowwise=not self.flip_b, columnwise=self.flip_b))

    def checker(self, a: torch.Tensor, b: torch.Tensor) -> Callable[[torch.Tensor], float]:
        """Returns the relative difference of a result's first rows from the float64 product of a and b."""
        left, right = self.rowwise(a, b)
        want = left[:CHECKED].double() @ right.t().double()
        return lambda got: difference(got[:CHECKED], want)


def ours(operands: Operands, recipe: str, what: str) -> Run:
    x, y = operands.quantized(recipe)
    trans: dict[str, Any] = {"trans_a": operands.flip_a, "trans_b": not operands.flip_b}
    options = RECIPES[recipe].gemm_options(operands.product)._asdict()
    rotated = operands.flip_a and getattr(x.quantizer, "with_rht", False)
    high = (operands.a, operands.b) if rotated else tuple(t.dequantize(torch.float32) for t in (x, y))
    check, bound = operands.checker(*high), ROTATED if rotated else BOUND
    if what == "wgrad added":
        d = torch.zeros(x.shape[1], y.shape[1], device=room.DEVICE)
        run = functools.partial(dt.gemm_into, d, x, y, beta=1.0, **trans, **options)
        return Run(run, check=check, bound=bound, reset=d.zero_)
    out_dtype = torch.float32 if what == "wgrad float32" else torch.bfloat16
    bound = FLOAT32 if out_dtype == torch.float32 and not rotated else bound
    return Run(functools.partial(dt.gemm, x, y, out_dtype=out_dtype, **trans, **options), check=check, bound=bound)


def switched(off: tuple[str, ...], call: Call) -> Call:
    """Returns a call with some kernels switched off."""

    def run() -> Any:
        for kernel in off:
            _core.switch_kernel(kernel, False)
        try:
            return call()
        finally:
            for kernel in off:
                _core.switch_kernel(kernel, True)

    return run


def on_cublaslt(run: Run) -> Run | None:
    """Returns the same product by cuBLASLt; None if it cannot run there."""
    call = switched(OWN, run.call)
    if "cuda.cublaslt" not in room.kernels_of(call):
        return None
    return dataclasses.replace(run, call=call, bound=max(run.bound, OTHER_ORDER))


def tensorwise(peer: Any, operands: Operands) -> Run:
    a, b = (t.contiguous().to(torch.float8_e4m3fn) for t in operands.rowwise(operands.a, operands.b))
    want = a[:CHECKED].double() @ b.t().double()
    return Run(lambda: peer.tensorwise(a, b), check=lambda got: difference(got[:CHECKED], want), bound=0.02)


def deepgemm(peer: Any, operands: Operands, what: str) -> Run:
    x, y = operands.quantized("fp8-block")
    sides = ("columnwise" if operands.flip_a else "rowwise", "columnwise" if operands.flip_b else "rowwise")
    (a, a_scale), (b, b_scale) = (
        (getattr(t, f"{side}_data"), getattr(t, f"{side}_scale_inv")) for t, side in zip((x, y), sides, strict=True)
    )
    check = operands.checker(*(t.dequantize(torch.float32) for t in (x, y)))
    a_scale = a_scale.t().contiguous()
    if what == "wgrad added":
        d = torch.zeros(len(a), len(b), device=room.DEVICE)
        added = peer.call("deepgemm_1d1d", a, a_scale, b, b_scale.t().contiguous(), d)
        return Run(added, check=check, bound=FLOAT32, reset=d.zero_)
    d = torch.empty(len(a), len(b), dtype=torch.bfloat16, device=room.DEVICE)
    return Run(peer.call("deepgemm_1d2d", a, a_scale, b, b_scale, d), check=check, bound=BOUND)


def contestants(case: Case, peers: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """Yields names, and functions that make a Run or None."""
    operands = Operands(case.what.split()[0], case.shape)
    yield "bf16", lambda: Run(operands.plain, check=operands.checker(operands.a, operands.b), bound=BOUND)
    for recipe in case.names:
        made = ours(operands, recipe, case.what)
        yield recipe, lambda made=made: made
        yield f"{recipe} cuBLASLt", lambda made=made: on_cublaslt(made)
    if case.what == "fprop" and "scaled_mm" in peers and not any(e % 16 for e in case.shape[1:]):
        yield "torch tensorwise", lambda: tensorwise(peers["scaled_mm"], operands)
    if "deepgemm" in peers and case.what in DEEPGEMM and case.shape in DENSE + WGRAD:
        yield "DeepGEMM", lambda: deepgemm(peers["deepgemm"], operands, case.what)


def rows(case: Case, peers: dict[str, Any]) -> Iterator[Row]:
    m, n, k = case.shape
    out = {"wgrad float32": 4, "wgrad added": 8}.get(case.what, 2)
    runs = {}
    for name, make in contestants(case, peers):
        if (run := make()) is not None:
            run.flops, run.bytes = 2.0 * m * n * k, width(name) * (m + n) * k + out * m * n
            runs[name] = run
    yield from measured(case, runs)
