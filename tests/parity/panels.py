"""Converts NumPy arrays to both panels' tensors and back, bit for bit, without a cast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oracle

torch = pytest.importorskip("torch", reason="parity compares both frameworks, and torch is not installed")
jax = pytest.importorskip("jax", reason="parity compares both frameworks, and jax is not installed")

import diptych.jax as dj  # noqa: E402
import diptych.torch as dt  # noqa: E402
from diptych import core  # noqa: E402

FIELDS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax", "columnwise_amax")


def to_torch(x: np.ndarray | None, device: str = "cpu") -> Any:
    """A tensor with the same bits; `requires_grad` is off."""
    if x is None:
        return None
    out = torch.empty(x.shape, dtype=getattr(torch, x.dtype.name))
    if x.size:
        out.view(-1).view(torch.uint8).copy_(torch.from_numpy(np.frombuffer(x.tobytes(), np.uint8).copy()))
    return out.to(device)


def to_jax(x: np.ndarray | None, device: str = "cpu") -> Any:
    if x is None:
        return None
    return jax.device_put(x, jax.devices("gpu" if device == "cuda" else "cpu")[0])


def values(t: Any) -> Any:
    """Returns a tensor dequantized if it is quantized, as JAX's modules return it."""
    return t.dequantize() if isinstance(t, dt.QuantizedTensor) else t


def bits(x: Any) -> np.ndarray:
    """Raw unsigned integers of a torch tensor, a JAX array or a NumPy array."""
    if isinstance(x, torch.Tensor):
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        host = x.detach().contiguous().view(width).cpu().numpy()
    else:
        host = np.ascontiguousarray(np.asarray(x))
    return host.view(np.dtype(f"u{host.dtype.itemsize}")).reshape(np.shape(x))


def nan_of(x: Any) -> np.ndarray:
    """Where a high-precision result is NaN."""
    if isinstance(x, torch.Tensor):
        return torch.isnan(x.detach()).cpu().numpy()
    return np.isnan(np.asarray(x).astype(np.float32))


def same(got: Any, want: Any, label: Any, nan_free: bool = False) -> None:
    """Equal bits; `nan_free`: any NaN equals any other."""
    g, w = bits(got), bits(want)
    assert g.shape == w.shape and g.dtype == w.dtype, f"{label}: {g.dtype}{g.shape}, {w.dtype}{w.shape}"
    wrong = g != w
    if nan_free and wrong.any():
        wrong &= ~(nan_of(got) & nan_of(want))
    if wrong.any():
        at = tuple(int(v) for v in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{label}: {wrong.sum()} of {w.size} differ, first at {at}: {g[at]:#x}, must be {w[at]:#x}"
        )


def same_copies(got: Any, want: oracle.Quantized, label: Any) -> None:
    """A QuantizedTensor or QuantizedArray against the oracle's, leading dimensions folded."""
    for name in FIELDS:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None), f"{label} {name}"
        if mine is not None:
            folded = bits(mine)
            if name == "rowwise_data" or folded.ndim != theirs.ndim:
                folded = oracle.fold(folded)
            same(folded, bits(theirs), f"{label} {name}")


def cublaslt_mismatch() -> str:
    """Why products of the two frameworks cannot be compared on this GPU, or an empty string.

    Both call the core of this one process, so the library is one; what differs is which framework brought it first.
    """
    version = core.cuda_info()["cublaslt"]
    return "" if version else "no cuBLASLt could be opened, so that no native product runs"


def backends(device: str) -> list[str]:
    """Where the JAX side of a comparison on `device` can run."""
    if device == "cpu":
        return ["cpu"]
    try:
        jax.devices("gpu")
    except RuntimeError:
        return []
    return ["cuda"]


__all__ = ["FIELDS", "dj", "dt", "jax", "same", "same_copies", "to_jax", "to_torch", "torch"]
