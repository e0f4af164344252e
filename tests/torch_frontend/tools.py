"""Helpers of the torch tests: quantizers by format name, NumPy to torch and back, bit comparison, call counts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cases
import oracle
from diptych import core
from diptych.common import (
    FORMATS,
    RECIPES,
    Quantizer,
    QuantizerRole,
    Recipe,
)
from diptych.torch import rng_state
from diptych.torch.tensors.quantized import BUFFERS, QuantizedTensor
from quantizers import of_case as of_case
from quantizers import oracle_options
from quantizers import quantizer as quantizer

RECIPE_NAMES = tuple(RECIPES)
USAGES = ((True, True), (True, False), (False, True))


def role(recipe: Recipe, tensor: str) -> Quantizer:
    return recipe.quantizer(QuantizerRole(tensor=tensor))


STAGES_OF_ONE_RANK = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 sends shapes from a rank's stage to its next one through gloo, which refuses to",
)


def to_torch(x: np.ndarray, device: str = "cpu") -> torch.Tensor:
    x = np.ascontiguousarray(x).reshape(x.shape)
    if x.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """High-precision dtypes as ml_dtypes spell them, integers as they are, FP8 and E8M0 as bytes."""
    t = t.detach().cpu().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return t.view(torch.uint8).numpy() if t.dtype.itemsize == 1 else t.numpy()


def bits(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x).reshape(x.shape)
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def same(got: Any, want: Any, label: Any = "") -> None:
    """Equal shape, dtype and bits; any NaN equals any other in a high-precision result."""
    got = to_numpy(got) if isinstance(got, torch.Tensor) else np.asarray(got)
    want = to_numpy(want) if isinstance(want, torch.Tensor) else np.asarray(want)
    assert got.shape == want.shape, f"{label}: shape {got.shape}, must be {want.shape}"
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, must be {want.dtype}"
    wrong = bits(got) != bits(want)
    if got.dtype.itemsize > 1:
        wrong &= ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    assert not wrong.any(), f"{label}: {wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0]}"


def same_quantized(q: QuantizedTensor, want: oracle.Quantized, label: Any = "") -> None:
    """A QuantizedTensor against the oracle's; the oracle folds leading dimensions."""
    for name in BUFFERS:
        got, expected = getattr(q, name), getattr(want, name, None)
        assert (got is None) == (expected is None), f"{label}: {name} is {got}"
        if got is not None:
            same(to_numpy(got).reshape(expected.shape), expected, f"{label} {name}")


def values(t: torch.Tensor) -> torch.Tensor:
    """Returns the dequantized values of a quantized tensor, and any other tensor itself."""
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def normal(name: str, shape: tuple[int, ...], dtype: str = "float32", device: str = "cpu") -> torch.Tensor:
    return to_torch(cases.draw(name, "normal", shape, dtype), device)


def variants(fmt: str, dtype: str = "bfloat16") -> list[dict[str, bool]]:
    """The options of a format beside the plain one, as keyword arguments of `quantizer`."""
    every = cases.variants_of(fmt)
    return [dict.fromkeys(v, True) for v in every if dtype == "bfloat16" or "rht" not in v]


ALL = (*cases.FORMATS, *(f"{f} {'+'.join(sorted(v))}" for f in cases.FORMATS for v in variants(f) if v))
"""Every format, and every format with each of its options: names for `named`."""


def named(name: str, **usage: bool) -> Quantizer:
    """The quantizer of a name in `ALL`."""
    fmt, _, options = name.partition(" ")
    return quantizer(fmt, **dict.fromkeys(options.split("+"), True) if options else {}, **usage)


def delayed(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and a history with something pending."""
    return torch.full((1,), 3.0, device=device), torch.tensor([0.5, 2.0, 1.0], device=device)


def rng_for(quant: Quantizer, device: str = "cpu", seed: int = 7, offset: int = 40) -> torch.Tensor | None:
    """A generator's state where the quantizer takes one."""
    return rng_state(seed, offset, device) if quant.needs_rng else None


def oracle_of(quant: Quantizer, x: torch.Tensor, **given: Any) -> oracle.Quantized:
    """The oracle's copies; `given`: amaxes, scale, accumulate and rng of the call, as tensors, arrays or numbers."""
    given = {k: to_numpy(v) if isinstance(v, torch.Tensor) else v for k, v in given.items() if v is not None}
    return oracle.quantize(to_numpy(x), FORMATS[quant.spec.format_id].name, **oracle_options(quant), **given)


def oracle_linear(recipe: Recipe, x, weight, bias, dy, rng: tuple[int, int] = (0, 0)) -> dict[str, np.ndarray]:
    """y, dx, dw and db of a quantized linear layer on the CPU, from the oracle's pieces alone.

    Delayed scales are those of the first step. `rng`: seed and offset of the step, where the recipe takes them. Recipes
    whose products share a quantizer for each tensor only.
    """
    copies = []
    for number, tensor, v in ((0, "input", x), (2, "weight", weight), (4, "grad_output", dy)):
        quant = role(recipe, tensor)
        state = oracle.rng_words(rng[0], rng[1] + 2 * number) if quant.needs_rng else None
        copies.append(oracle_of(quant, v, scale=1.0 if quant.needs_scale else None, rng=state))
    qx, qw, qdy = copies
    np_bias = None if bias is None else to_numpy(bias)
    x_dtype, w_dtype = to_numpy(x).dtype, to_numpy(weight).dtype
    out = {
        "y": oracle.gemm_cpu(qx.copy(), qw.copy(), bias=np_bias, out_dtype=x_dtype).reshape(dy.shape),
        "dx": oracle.gemm_cpu(qdy.copy(), qw.copy(columnwise=True), out_dtype=x_dtype).reshape(x.shape),
        "dw": oracle.gemm_cpu(qdy.copy(columnwise=True), qx.copy(columnwise=True), out_dtype=w_dtype),
    }
    if np_bias is not None:
        out["db"] = oracle.bias_grad(to_numpy(dy), np_bias.dtype)
    return out


def calls(op: str) -> int:
    return sum(r["calls"] for r in core.kernel_table() if r["op"] == op)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """A buffer whose content shows any write."""
    return torch.full(shape, -123.0, dtype=dtype, device=device)
