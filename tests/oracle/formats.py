"""Formats, elements, and the parts of a quantized tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
FLT_MAX = np.float32(np.finfo(np.float32).max)
ELEMENT = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
FP8_MAX = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
NAN_BYTE = 0x7F
# Values of the codes 0..7; codes 8..15 are their negatives.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


@dataclass(frozen=True)
class Fmt:
    """One format. A rowwise block is `block_rows` x `block_cols` elements; 0 is the tensor's whole extent."""

    element: str  # e4m3 | e5m2 | e2m1
    scale: str  # float32 | e8m0 | e4m3
    block_rows: int
    block_cols: int
    rule: str  # divide | e8m0_ceil | two_level
    columnwise_transposed: bool

    @property
    def one_scale(self) -> bool:
        return self.block_rows == self.block_cols == 0

    @property
    def pack(self) -> int:
        """Elements in a byte."""
        return 2 if self.element == "e2m1" else 1

    def block(self, columnwise: bool) -> tuple[int, int]:
        """Block `(rows, cols)` in the orientation of that copy's data."""
        if columnwise and not self.columnwise_transposed:
            return self.block_cols, self.block_rows
        return self.block_rows, self.block_cols


FORMATS = {
    "fp8_e4m3_tensor": Fmt("e4m3", "float32", 0, 0, "divide", True),
    "fp8_e5m2_tensor": Fmt("e5m2", "float32", 0, 0, "divide", True),
    "fp8_e4m3_1x128": Fmt("e4m3", "float32", 1, 128, "divide", True),
    "fp8_e5m2_1x128": Fmt("e5m2", "float32", 1, 128, "divide", True),
    "fp8_e4m3_128x128": Fmt("e4m3", "float32", 128, 128, "divide", True),
    "fp8_e5m2_128x128": Fmt("e5m2", "float32", 128, 128, "divide", True),
    "mxfp8_e4m3": Fmt("e4m3", "e8m0", 1, 32, "e8m0_ceil", False),
    "mxfp8_e5m2": Fmt("e5m2", "e8m0", 1, 32, "e8m0_ceil", False),
    "nvfp4": Fmt("e2m1", "e4m3", 1, 16, "two_level", True),
}


@dataclass(frozen=True)
class Copy:
    """One copy of a quantized tensor: bytes, their scales, and which of the two copies it is."""

    fmt: Fmt
    columnwise: bool
    data: np.ndarray  # uint8 [M, K], or [K, M] where columnwise and transposed; the last extent halved if packed
    scale_inv: np.ndarray  # float32, uint8 E8M0 codes or uint8 E4M3
    amax: Any = None  # float32 of the two_level rule: [1], or [M] (one per row) in a rowwise copy

    @property
    def transposed(self) -> bool:
        return self.columnwise and self.fmt.columnwise_transposed

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the tensor in its own orientation."""
        rows, cols = self.data.shape[0], self.data.shape[1] * self.fmt.pack
        return (cols, rows) if self.transposed else (rows, cols)


@dataclass(frozen=True)
class Quantized:
    """The expected result of a quantize call; a copy that was not asked for is None (else an array)."""

    fmt: Fmt
    rowwise_data: Any = None
    rowwise_scale_inv: Any = None
    columnwise_data: Any = None
    columnwise_scale_inv: Any = None
    amax: Any = None  # float32 [1] of per-tensor formats; of two_level where the rowwise copy is wanted ([M]: per row)
    columnwise_amax: Any = None  # float32 [1] of two_level where the columnwise copy is wanted
    columnwise_fmt: Any = None  # the columnwise copy's format if it has one of its own

    def copy(self, columnwise: bool = False) -> Copy:
        which = "columnwise" if columnwise else "rowwise"
        data, scale = getattr(self, f"{which}_data"), getattr(self, f"{which}_scale_inv")
        assert data is not None and scale is not None, "this copy was not asked for"
        amax = (self.columnwise_amax if columnwise else self.amax) if self.fmt.rule == "two_level" else None
        fmt = self.columnwise_fmt if columnwise and self.columnwise_fmt else self.fmt
        return Copy(fmt, columnwise, data, scale, amax)


def check_ieee() -> None:
    """Raises where this thread's NumPy flushes subnormals or promotes to float64: the oracle would be wrong there."""
    small = np.full(64, 2.0**-126, np.float32)
    half = small * np.float32(0.5)
    if not (half.view(np.uint32) == 0x00400000).all() or not (half + half == small).all():
        raise RuntimeError("NumPy flushes float32 subnormals in this thread: the oracle cannot be trusted here")
    if (half * np.float32(2)).dtype != F32 or (np.float32(1) / np.float32(3)).dtype != F32:
        raise RuntimeError("NumPy promotes float32 arithmetic to float64: the oracle cannot be trusted here")


def fold(x: np.ndarray) -> np.ndarray:
    """`[..., K]` as the matrix `[M, K]`; a scalar is `[1, 1]`."""
    k = x.shape[-1] if x.ndim else 1
    return x.reshape(math.prod(x.shape[:-1]), k)


def cast(x: np.ndarray, dtype: Any) -> np.ndarray:
    """IEEE cast of float32 values to a high-precision dtype: overflow gives inf, subnormals are kept."""
    assert x.dtype == F32
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def encode(x: np.ndarray, element: str) -> np.ndarray:
    """Float32 values to FP8 bytes or E2M1 codes: nearest even, saturating, every NaN to 0x7F (E2M1: +6).

    `quantize` has replaced infinite values before they are scaled: what is infinite here is a product that overflowed.
    """
    assert x.dtype == F32
    if element == "e2m1":
        # Midpoints of neighbours; a tie goes to the even code, so upwards where the lower code is odd.
        a, middle = np.abs(x), (E2M1[1:] + E2M1[:-1]) / np.float32(2)
        magnitude = sum(((a >= m) if code % 2 else (a > m)).astype(np.uint8) for code, m in enumerate(middle))
        return np.where(np.isnan(x), np.uint8(7), magnitude | _sign_bit(x)).astype(np.uint8)
    limit = FP8_MAX[element]
    with np.errstate(all="ignore"):
        data = np.minimum(np.maximum(x, -limit), limit).astype(ELEMENT[element]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(NAN_BYTE), data)


def encode_stochastic(x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Float32 values to E2M1 codes by a random byte each (NUMERICS 5)."""
    assert x.dtype == F32 and noise.dtype == np.uint8
    u = (noise.astype(np.float32) + np.float32(0.5)) / np.float32(256)
    a = np.abs(x)
    step = np.where(a >= 4, np.float32(2), np.where(a >= 2, np.float32(1), np.float32(0.5)))
    with np.errstate(all="ignore"):
        t = np.minimum(a + u * step, np.float32(6))
    assert t.dtype == F32
    code = np.searchsorted(E2M1, t, side="right").astype(np.uint8) - np.uint8(1)
    return np.where(np.isnan(x), np.uint8(7), code | _sign_bit(x)).astype(np.uint8)


def _sign_bit(x: np.ndarray) -> np.ndarray:
    return np.signbit(x).astype(np.uint8) << np.uint8(3)


def decode(data: np.ndarray, element: str) -> np.ndarray:
    """FP8 bytes or E2M1 codes to float32, exactly."""
    if element == "e2m1":
        return np.concatenate([E2M1, -E2M1])[data]
    return data.view(ELEMENT[element]).astype(np.float32)


def pack(codes: np.ndarray) -> np.ndarray:
    """E2M1 codes `[R, C]` to bytes `[R, C / 2]`: the low nibble is the even element."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def unpack(data: np.ndarray) -> np.ndarray:
    """Bytes `[R, C / 2]` to E2M1 codes `[R, C]`."""
    return np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1).reshape(data.shape[0], 2 * data.shape[1])
