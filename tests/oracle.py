"""The bit-level reference: NumPy for the arithmetic, ml_dtypes for narrow casts, and nothing of diptych.

Every formula is written from the numerics contract (NUMERICS, cited by section), never from the C++. What holds here:

- All scale arithmetic is float32, each operation rounded, subnormals kept (`check_ieee` proves it before each use).
- An input of any rank is a matrix `[M, K]`: leading dimensions fold into rows.
- Scales are logical row-major, in the orientation of the data that they belong to.
"""

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


@dataclass(frozen=True)
class Fmt:
    """One format. A rowwise block is `block_rows` x `block_cols` elements; 0 x 0 is the whole tensor."""

    element: str  # e4m3 | e5m2
    scale: str  # float32 | e8m0
    block_rows: int
    block_cols: int
    rule: str  # divide | e8m0_ceil
    columnwise_transposed: bool

    @property
    def per_tensor(self) -> bool:
        return self.block_cols == 0

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
}


@dataclass(frozen=True)
class Copy:
    """One copy of a quantized tensor: bytes, their scales, and which of the two copies it is."""

    fmt: Fmt
    columnwise: bool
    data: np.ndarray  # uint8 [M, K], or [K, M] where columnwise and transposed
    scale_inv: np.ndarray  # float32 or uint8 E8M0 codes

    @property
    def transposed(self) -> bool:
        return self.columnwise and self.fmt.columnwise_transposed


@dataclass(frozen=True)
class Quantized:
    """What a quantize call has to give; a copy that was not asked for is None (else an array)."""

    fmt: Fmt
    rowwise_data: Any = None
    rowwise_scale_inv: Any = None
    columnwise_data: Any = None
    columnwise_scale_inv: Any = None
    amax: Any = None  # [1] float32, per-tensor formats only

    def copy(self, columnwise: bool = False) -> Copy:
        which = "columnwise" if columnwise else "rowwise"
        data, scale = getattr(self, f"{which}_data"), getattr(self, f"{which}_scale_inv")
        assert data is not None and scale is not None, "this copy was not asked for"
        return Copy(self.fmt, columnwise, data, scale)


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
    """Float32 values to FP8 bytes: nearest even, saturating, every NaN to 0x7F."""
    assert x.dtype == F32
    limit = FP8_MAX[element]
    with np.errstate(all="ignore"):
        data = np.minimum(np.maximum(x, -limit), limit).astype(ELEMENT[element]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(NAN_BYTE), data)


def decode(data: np.ndarray, element: str) -> np.ndarray:
    """FP8 bytes to float32, exactly."""
    return data.view(ELEMENT[element]).astype(np.float32)


def amax(x: np.ndarray) -> np.ndarray:
    """Max over the non-NaN |x| as float32 `[1]`; 0 where there is none."""
    return _block_amax(np.abs(fold(x).astype(np.float32)), 0, 0).reshape(1)


def scale_from_amax(
    amax: np.ndarray, fp8_max: np.float32, eps: float, pow2: bool, value_for_inf: np.float32
) -> np.ndarray:
    """NUMERICS 2, elementwise on float32 amaxes."""
    a = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        a = np.where(a < np.float32(eps), np.float32(eps), a)
        scale = np.float32(fp8_max) / a
    scale = np.where(np.isinf(scale), np.float32(value_for_inf), scale)
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    scale = np.where((a == 0) | ~np.isfinite(a), np.float32(1), scale)
    assert scale.dtype == F32
    return scale


def e8m0_from_amax(amax: np.ndarray, element: str) -> np.ndarray:
    """NUMERICS 4: the E8M0 code of a block, amax / max (as a product in float32) rounded up to a power of two."""
    return e8m0_code(np.asarray(amax, np.float32) * np.float32(1.0 / float(FP8_MAX[element])))


def e8m0_code(v: np.ndarray) -> np.ndarray:
    """The code of the smallest 2^(code - 127) that is not below float32 v; 254 where none is."""
    assert v.dtype == F32
    bits = v.view(np.uint32)
    e, m = (bits >> np.uint32(23)).astype(np.int64), bits & np.uint32(0x7FFFFF)
    up = (m > 0) & (e != 254) & ~((e == 0) & (m <= 0x400000))
    code = np.where(np.isinf(v), 254, np.where(v == 0, 0, e + up))
    return code.astype(np.uint8)


def e8m0_inverse(code: np.ndarray) -> np.ndarray:
    """2^(127 - code) as float32, the factor that quantize multiplies by."""
    c = code.astype(np.uint32)
    bits = np.where(c == 254, np.uint32(0x00400000), (np.uint32(254) - c) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def e8m0_decode(code: np.ndarray) -> np.ndarray:
    """2^(code - 127) as float32: code 0 is a subnormal, 255 is NaN."""
    c = code.astype(np.uint32)
    bits = np.where(c == 0, np.uint32(0x00400000), np.where(c == 255, np.uint32(0x7FC00000), c << np.uint32(23)))
    return bits.astype(np.uint32).view(np.float32)


def _block_amax(ax: np.ndarray, block_rows: int, block_cols: int) -> np.ndarray:
    """Amax of each block of `|x|` `[R, C]`: `[ceil(R/br), ceil(C/bc)]`, NaN ignored; 0 x 0 gives `[1, 1]`."""
    ax = np.where(np.isnan(ax), np.float32(0), ax)
    if block_cols == 0:
        return ax.max(initial=np.float32(0)).reshape(1, 1).astype(np.float32)
    r, c = -(-ax.shape[0] // block_rows), -(-ax.shape[1] // block_cols)
    full = np.zeros((r * block_rows, c * block_cols), np.float32)
    full[: ax.shape[0], : ax.shape[1]] = ax
    return full.reshape(r, block_rows, c, block_cols).max(axis=(1, 3), initial=np.float32(0))


def _spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One scale per element."""
    if block[1] == 0:
        return np.broadcast_to(scale.reshape(1, 1), shape)
    return scale.repeat(block[0], axis=0).repeat(block[1], axis=1)[: shape[0], : shape[1]]


def quantize(
    x: np.ndarray,
    fmt: Fmt | str,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = False,
    eps: float = 0.0,
    amax: np.ndarray | float | None = None,
) -> Quantized:
    """Quantizes a tensor, both copies from the high-precision values.

    **Arguments**
    - `x`: `[..., K]` float32 | bfloat16 | float16.
    - `pow2`, `eps`: of the `divide` rule; the E8M0 rule has neither.
    - `amax`: a given (for instance reduced) amax of per-tensor formats instead of x's own.

    **Returns** a `Quantized`: data `[M, K]` (`[K, M]` transposed), scales `[1]` or one per block.
    """
    check_ieee()
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    if fmt.rule != "divide" and (pow2 or eps):
        raise ValueError("the E8M0 rule has no pow2 and no eps")
    if amax is not None and not fmt.per_tensor:
        raise ValueError("only a per-tensor format takes an amax")
    limit = FP8_MAX[fmt.element]
    # A block's scale may not leave the input's own dtype; a tensor's may.
    value_for_inf = FLT_MAX if fmt.per_tensor else np.float32(ml_dtypes.finfo(x.dtype).max)
    x32 = fold(x).astype(np.float32)
    out: dict[str, np.ndarray] = {}
    for name, columns in (("rowwise", False), ("columnwise", True)):
        if not (columnwise if columns else rowwise):
            continue
        y = x32.T if columns and fmt.columnwise_transposed else x32
        block = fmt.block(columns)
        own = amax is None
        block_amax = _block_amax(np.abs(y), *block) if own else np.asarray(amax, np.float32).reshape(1, 1)
        if fmt.rule == "e8m0_ceil":
            scale_inv = e8m0_from_amax(block_amax, fmt.element)
            scale = e8m0_inverse(scale_inv)
        else:
            # An empty tensor's own amax says nothing, so eps does not act on it: scale 1.
            empty = fmt.per_tensor and own and x.size == 0
            scale = scale_from_amax(block_amax, limit, 0.0 if empty else eps, pow2, value_for_inf)
            with np.errstate(all="ignore"):
                scale_inv = np.float32(1) / scale
            assert scale_inv.dtype == F32
        with np.errstate(all="ignore"):
            scaled = y * _spread(scale, block, y.shape)
        out[f"{name}_data"] = encode(scaled, fmt.element)
        out[f"{name}_scale_inv"] = scale_inv.reshape(1) if fmt.per_tensor else scale_inv
        if fmt.per_tensor:
            out["amax"] = block_amax.reshape(1)
    return Quantized(fmt, **out)


def _scale32(copy: Copy) -> np.ndarray:
    return e8m0_decode(copy.scale_inv) if copy.fmt.scale == "e8m0" else np.asarray(copy.scale_inv, np.float32)


def dequantize(copy: Copy, dtype: Any = np.float32) -> np.ndarray:
    """One copy back to `[M, K]` in the tensor's own orientation: a float32 product, then one cast."""
    check_ieee()
    with np.errstate(all="ignore"):
        y = decode(copy.data, copy.fmt.element)
        y = y * _spread(_scale32(copy), copy.fmt.block(copy.columnwise), y.shape)
    return cast(y.T if copy.transposed else y, dtype)


def _operand(copy: Copy) -> tuple[np.ndarray, np.ndarray, int]:
    """Values `[outer, K]`, scales `[outer, blocks]` and the block length along K (the reduced axis) of one operand.

    A rowwise copy reduces over its columns; a columnwise copy over its tensor's rows.
    """
    data, scale = decode(copy.data, copy.fmt.element), _scale32(copy)
    if copy.columnwise and not copy.fmt.columnwise_transposed:
        data, scale = data.T, scale.T
    outer, k = data.shape
    if copy.fmt.per_tensor:
        return data, np.broadcast_to(scale.reshape(1, 1), (outer, 1)), max(k, 1)
    scale = scale.repeat(copy.fmt.block_rows, axis=0)[:outer]
    return data, scale, copy.fmt.block_cols


def gemm_cpu(a: Copy, b: Copy, *, alpha=1.0, bias=None, beta=0.0, c=None, out_dtype: Any = np.float32) -> np.ndarray:
    """The CPU's `[M, N]` product, bit for bit (NUMERICS 7).

    A product of two FP8 values is exact in float32 (8 significant bits), so fma(a, b, p) is p + a * b.
    """
    check_ieee()
    av, sa, block_a = _operand(a)
    bv, sb, block_b = _operand(b)
    k = av.shape[1]
    assert k == bv.shape[1], f"reduced axes differ: {k} and {bv.shape[1]}"
    step = min(block_a, block_b)
    acc = np.zeros((av.shape[0], bv.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, k, step):
            p = np.zeros_like(acc)
            for i in range(start, min(start + step, k)):
                p = p + av[:, i, None] * bv[None, :, i]
            acc = acc + p * (sa[:, start // block_a, None] * sb[None, :, start // block_b])
        r = np.float32(alpha) * acc
        if bias is not None:
            r = r + np.asarray(bias).astype(np.float32)
        if beta != 0:
            r = r + np.float32(beta) * np.asarray(c).astype(np.float32)
    return cast(r, out_dtype)


def _operand64(copy: Copy) -> np.ndarray:
    """The decoded operand `[outer, K]`, scales included, exactly in float64 (4 + 24 significant bits)."""
    data, scale, block = _operand(copy)
    spread = scale.astype(np.float64).repeat(block, axis=1)[:, : data.shape[1]]
    return data.astype(np.float64) * spread


def gemm_float64(a: Copy, b: Copy, *, alpha=1.0, bias=None, beta=0.0, c=None) -> np.ndarray:
    """The same product of the decoded operands in float64."""
    r = float(np.float32(alpha)) * (_operand64(a) @ _operand64(b).T)
    if bias is not None:
        r = r + np.asarray(bias).astype(np.float64)
    if beta != 0:
        r = r + float(np.float32(beta)) * np.asarray(c).astype(np.float64)
    return r


def _cast_error(magnitude: np.ndarray, dtype: Any) -> np.ndarray:
    """Half an ulp of an IEEE cast, subnormals included."""
    info = ml_dtypes.finfo(dtype)
    return magnitude * 2.0 ** -(info.nmant + 1) + 0.5 * float(info.smallest_subnormal)


def gemm_tolerance(
    a: Copy, b: Copy, *, alpha=1.0, bias=None, beta=0.0, c=None, out_dtype: Any = np.float32,
    accumulator_bits: int = 24, promote_every: int | None = None, worst_case: bool = True,
) -> np.ndarray:  # fmt: skip
    """Elementwise bound `[M, N]` on |device - gemm_float64| for finite, not overflowing operands.

    **Arguments**
    - `accumulator_bits`: significant bits: 24 for float32 FMA and bfloat16 tensor cores, 14 for Hopper's FP8 ones
      ("around 14 bits", DeepSeek-V3, arXiv:2412.19437, 3.3.2).
    - `promote_every`: products per chain before it joins the float32 sum: 128, or None for the whole K (fast_accum).
    - `worst_case`: False adds the roundings in quadrature, six sigma: far sharper, for products of random signs only.

    The model: every addend of a 32-product step is cut at 2^(1 - bits) of the step's largest value, which is at most
    |chain so far| + sum of |products|; up to 1.25 addends per product (steps of 4 products or more, plus their carry).
    A cut is uniform in [0, 1) units, mean square 1/3. A chain then joins the sum with three float32 roundings. Twice
    that covers split-K (its partial sums are differences of two such prefixes) and second-order terms. MXFP8 decoded to
    bfloat16 is covered only where that is exact (codes 3..246 for E4M3, 10..239 for E5M2).
    """
    av, bv = _operand64(a), _operand64(b)
    k = av.shape[1]
    chain_length = promote_every or max(k, 1)
    total = np.zeros((av.shape[0], bv.shape[0]))
    error, variance = np.zeros_like(total), np.zeros_like(total)
    unit = 2.0**-24
    for start in range(0, k, chain_length):
        chain = np.zeros_like(total)
        stop = min(start + chain_length, k)
        for i in range(start, stop, 32):
            x, y = av[:, i : min(i + 32, stop)], bv[:, i : min(i + 32, stop)].T
            cut = 2.0 ** (1 - accumulator_bits) * (np.abs(chain) + np.abs(x) @ np.abs(y))
            if worst_case:
                error += 1.25 * x.shape[1] * cut
            variance += 1.25 * x.shape[1] * cut**2 / 3
            chain += x @ y
        total += chain
        error += unit * (2 * np.abs(chain) + np.abs(total))
    # Scales may multiply in the subnormal range, once per block.
    error = 2 * (error if worst_case else error + 6 * np.sqrt(variance)) + (k / 32 + 2) * 2.0**-149
    alpha = abs(float(np.float32(alpha)))
    r = alpha * np.abs(total)
    error = alpha * error + unit * r
    for addend, factor in ((bias, 1.0), (c if beta != 0 else None, abs(float(np.float32(beta))))):
        if addend is not None:
            term = factor * np.abs(np.asarray(addend).astype(np.float64))
            r = r + term
            error = error + unit * (term + r)
    return error + _cast_error(r + error, out_dtype)


def bias_grad(dy: np.ndarray, out_dtype: Any = np.float32) -> np.ndarray:
    """Column sums `[N]` of `[..., N]` on the CPU: +0, float32 adds in ascending row order, one cast."""
    check_ieee()
    rows = fold(dy).astype(np.float32)
    acc = np.zeros(rows.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for row in rows:
            acc = acc + row
    return cast(acc, out_dtype)


def bias_grad_tolerance(dy: np.ndarray, out_dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The float64 column sums and a bound on |device - them|: any order of float32 adds, each half an ulp."""
    rows = fold(dy).astype(np.float64)
    exact, magnitude = rows.sum(axis=0), np.abs(rows).sum(axis=0)
    error = 1.01 * rows.shape[0] * 2.0**-24 * magnitude
    return exact, error + _cast_error(np.abs(exact) + error, out_dtype)
