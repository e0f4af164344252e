"""Forward-mode differentiation is refused by name, by every op: none drops a tangent, which would read as 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import diptych.torch as dt
from diptych.common import RECIPES, UnsupportedError
from diptych.common.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer

CURRENT, MX = Float8CurrentScalingQuantizer(), MXFP8Quantizer()
GEN = torch.Generator().manual_seed(0)
X, W = torch.randn(32, 32, generator=GEN), torch.randn(32, 32, generator=GEN)
QX, QW = dt.quantize(X, CURRENT), dt.quantize(W, CURRENT)
MAP = dt.moe_map(torch.randint(0, 4, (32, 1), dtype=torch.int32, generator=GEN), 4, map_type="index")
STACK, OFFSETS = dt.quantize_stack(torch.randn(2, 32, 32), CURRENT), torch.tensor([0, 16, 32], dtype=torch.int32)


def layer(kind: Callable[..., torch.nn.Module], sizes: tuple[int, int], recipe: str | None) -> Callable[..., Any]:
    module = kind(*sizes)

    def call(x: torch.Tensor) -> torch.Tensor:
        with dt.autocast(enabled=recipe is not None, recipe=None if recipe is None else RECIPES[recipe]):
            return module(x)

    return call


VERBS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantize": lambda x: dt.dequantize(dt.quantize(x, CURRENT)),
    "quantize's scale": lambda x: dt.quantize(W, Float8Quantizer(), scale=x[0, :1]),
    "amax": dt.amax,
    "bias_grad": dt.bias_grad,
    "gemm": lambda x: dt.gemm(QX, QW, bias=x[0]),
    "gemm_into": lambda x: dt.gemm_into(x, QX, QW),
    "quantize_stack": lambda x: dt.quantize_stack(x.view(2, 16, 32), MX),
    "grouped_gemm": lambda x: dt.grouped_gemm(QX, STACK, OFFSETS, bias=x[:2]),
    "moe_permute": lambda x: dt.moe_permute(x, MAP),
    "moe_permute's probs": lambda x: dt.moe_permute_with_probs(W, x[:, :1], MAP),
    "Linear": layer(dt.Linear, (32, 32), "mxfp8"),
    "LayerNormLinear": layer(dt.LayerNormLinear, (32, 32), "fp8-current"),
    "LayerNormLinear in high precision": layer(dt.LayerNormLinear, (32, 32), None),
    "LayerNormMLP": layer(dt.LayerNormMLP, (32, 64), "fp8-delayed"),
}
MESSAGE = r"has no forward-mode derivative \(torch.func.jvp, torch.autograd.forward_ad\), and an argument has a tangent"


@pytest.mark.parametrize("verb", VERBS)
def test_dual_tensors_are_refused(verb):
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=MESSAGE):
        VERBS[verb](forward_ad.make_dual(X.clone(), torch.ones_like(X)))


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("gemm", "grouped_gemm")])
def test_jvp_is_refused(verb):
    # What is quantized outside of a jvp does not enter it; torch itself says so of those two.
    with pytest.raises(UnsupportedError, match=MESSAGE):
        torch.func.jvp(VERBS[verb], (X,), (torch.ones_like(X),))


def test_jacfwd_and_dual_tensors_that_require_grad_are_refused():
    with pytest.raises(UnsupportedError, match=MESSAGE):
        torch.func.jacfwd(lambda x: dt.dequantize(dt.quantize(x, CURRENT)))(X)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=MESSAGE):
        dt.quantize(forward_ad.make_dual(X.clone().requires_grad_(), torch.ones_like(X)), CURRENT)


def test_what_has_no_tangent_is_the_same_in_a_dual_level():
    linear = layer(dt.Linear, (32, 32), "mxfp8")
    want = dt.dequantize(QX), linear(X)
    with forward_ad.dual_level():
        for found, wanted in zip((dt.dequantize(dt.quantize(X, CURRENT)), linear(X)), want, strict=True):
            assert torch.equal(found, wanted)


def test_reverse_mode_around_a_refused_one():
    x = X.clone().requires_grad_()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError):
        dt.quantize(forward_ad.make_dual(x, torch.ones_like(x)), CURRENT)
    dt.dequantize(dt.quantize(x, CURRENT)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))
