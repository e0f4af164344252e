"""Norms and SwiGLU with their gradients, quantized on the way or in bfloat16, beside a copy.

An operand counts once for each pass that must read it (an amax of the whole tensor is one, a norm's statistics are
another), a result once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

import diptych.torch as dt
from benchmarks.cases import Case
from benchmarks.quantizers import Named
from benchmarks.results import Row
from benchmarks.room import Run, copy_run, difference, measured, normal, tensors_of
from benchmarks.sections.quantize import COPY, rotated, state
from diptych.common import RECIPES
from diptych.common.ops.activation import activation_options
from diptych.common.ops.norm import norm_options
from diptych.torch.functional import source as fused
from diptych.torch.primitives import activation as activation_ops
from diptych.torch.primitives import norm as norm_ops
from diptych.torch.primitives import quantize as quantize_ops

NORM, ACTIVATION = norm_options("bench", "RMSNorm", 1e-5, False), activation_options("bench", "swiglu")
BOUND = 4e-3  # bfloat16


def size(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def rows(case: Case, _: Any) -> Iterator[Row]:
    runs = {"copy": copy_run(COPY)} | {"norm": norm, "swiglu": swiglu, "gradient of swiglu": swiglu_grad,
                                       "gradient of norm": norm_grad}[case.what](case)  # fmt: skip
    yield from measured(case, runs)


def plain(call: Callable[[], Any], read: int, want: torch.Tensor) -> Run:
    """Returns the run of an op in bfloat16, whose first result is compared."""

    def check(made: Any) -> float:
        return difference(tensors_of(made)[0].reshape(want.shape), want)

    return Run(call, bytes=read + size(*tensors_of(call())), check=check, bound=BOUND)


def quantizing(
    case: Case, gemm: str, source: Any, want: torch.Tensor, before: Callable[[], Any] | None = None, read: int = 0
) -> dict[str, Run]:
    """Returns a run for each recipe: both copies of a fused input. `before` runs ahead and reads `read` bytes."""
    found = {}
    for recipe in case.names:
        quantizer = RECIPES[recipe].operands(gemm)[0]
        assert quantizer is not None
        named = Named(recipe, quantizer.with_usage(rowwise=True, columnwise=True))
        given = named.state(*state())

        def call(named: Named = named, given: dict[str, Any] = given) -> Any:
            if before:
                before()
            return fused.quantize(source, named.quantizer, **given)

        def check(buffers: list[torch.Tensor], named: Named = named) -> float:
            fields = dict(zip(named.quantizer.buffer_names(), buffers, strict=True))
            made = dt.QuantizedTensor(named.quantizer, want.shape, want.dtype, **fields)
            worst = 0.0
            for side in (False, True):
                got = quantize_ops.dequantize(made.copy_of(side), torch.float32)
                there = rotated(want) if side and named.rotates else want
                found = difference(got.reshape(there.shape), there)
                worst = found if not found <= worst else worst
            return worst

        moved = size(*source) * named.reads + read + size(*call())
        found[recipe] = Run(call, bytes=moved, check=check, bound=named.bound)
    return found


def norm(case: Case) -> dict[str, Run]:
    x, gamma = normal(*case.shape), normal(case.shape[1])
    mu, rsigma, _ = norm_ops.norm(x, None, None, NORM)
    want = F.rms_norm(x.float(), case.shape[1:], gamma.float(), 1e-5).bfloat16()
    source = fused.normalized(x, gamma, None, mu, rsigma, NORM)
    found = quantizing(case, "fprop", source, want, lambda: norm_ops.norm(x, None, None, NORM), size(x))
    whole = Run(lambda: norm_ops.norm(x, gamma, None, NORM), bytes=2 * size(x) + size(gamma),
                check=lambda made: difference(made[2], want), bound=BOUND)  # fmt: skip
    return {"bf16": whole, **found}


def norm_grad(case: Case) -> dict[str, Run]:
    x, dy, gamma = normal(*case.shape), normal(*case.shape), normal(case.shape[1])
    mu, rsigma, _ = norm_ops.norm(x, None, None, NORM)
    leaf = x[:256].double().requires_grad_()
    F.rms_norm(leaf, case.shape[1:], gamma.double(), 1e-5).backward(dy[:256].double())
    want = leaf.grad
    assert want is not None

    def call() -> Any:
        return norm_ops.norm_grad(dy, x, gamma, mu, rsigma, NORM, False)

    def check(made: Any) -> float:
        return difference(tensors_of(made)[0][:256], want)

    return {"bf16": Run(call, bytes=size(dy, x, gamma, rsigma) + size(x), check=check, bound=BOUND)}


def swiglu(case: Case) -> dict[str, Run]:
    h = normal(*case.shape)
    a, b = h.float().chunk(2, -1)
    want = (F.silu(a) * b).bfloat16()
    found = quantizing(case, "fprop", fused.activated(h, ACTIVATION), want)
    return {"bf16": plain(lambda: activation_ops.activation(h, ACTIVATION), size(h), want), **found}


def swiglu_grad(case: Case) -> dict[str, Run]:
    h, da = normal(*case.shape), normal(case.shape[0], case.shape[1] // 2)
    leaf = h.float().requires_grad_()
    a, b = leaf.chunk(2, -1)
    (F.silu(a) * b).backward(da.float())
    assert leaf.grad is not None
    want = leaf.grad.bfloat16()
    found = quantizing(case, "dgrad", fused.activated_grad(da, h, ACTIVATION), want)
    whole = plain(lambda: activation_ops.activation_grad(da, h, ACTIVATION), size(h, da), want)
    return {"bf16": whole, **found}
