"""What the torch tests share: quantizers by format name, NumPy to torch and back, bit comparison, call counts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
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
from diptych.torch.quantized import BUFFERS, QuantizedTensor
from quantizers import quantizer as quantizer

RECIPE_NAMES = tuple(RECIPES)
USAGES = ((True, True), (True, False), (False, True))


def role(recipe: Recipe, tensor: str) -> Quantizer:
    return recipe.quantizer(QuantizerRole(tensor=tensor))


def to_torch(x: np.ndarray, device: str = "cpu") -> torch.Tensor:
    x = np.ascontiguousarray(x).reshape(x.shape)
    if x.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """High-precision dtypes as ml_dtypes spell them, FP8 and E8M0 as bytes."""
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


def normal(name: str, shape: tuple[int, ...], dtype: str = "float32", device: str = "cpu") -> torch.Tensor:
    return to_torch(cases.draw(name, "normal", shape, dtype), device)


def oracle_of(quant: Quantizer, x: torch.Tensor) -> oracle.Quantized:
    format_id, pow2, eps = quant.spec
    return oracle.quantize(
        to_numpy(x), FORMATS[format_id].name, rowwise=quant.rowwise, columnwise=quant.columnwise, pow2=pow2, eps=eps
    )


def oracle_linear(recipe: Recipe, x, weight, bias, dy) -> dict[str, np.ndarray]:
    """y, dx, dw and db of a quantized linear layer on the CPU, from the oracle's pieces alone."""
    qx, qw, qdy = (oracle_of(role(recipe, t), v) for t, v in (("input", x), ("weight", weight), ("grad_output", dy)))
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
