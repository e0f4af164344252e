"""NumPy's face of the core. Allocates outputs by the shared shape rules and lets the core fill them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from diptych.common import shapes
from diptych.common.errors import DTypeError, ShapeError
from diptych.common.formats import FormatRow
from diptych.common.quantizers import Quantizer
from diptych.core import _core

Array = np.ndarray[Any, Any]

_CODES = _core.dtype_table()
# What NumPy memory holds an element: its own dtype where it has one, else raw bits.
_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8, "float8_e8m0fnu": np.uint8}


def _operand(x: Array, dtype: str) -> tuple[Array, int]:
    return (x.view(_BITS[dtype]) if dtype in _BITS else x, _CODES[dtype])


_LINE, _LARGE = 64, 1 << 16  # bytes


def _empty(shape: shapes.Shape, dtype: str) -> Array:
    """Uninitialized memory. NumPy aligns large arrays to 16 bytes only; on whole cache lines, kernels write faster."""
    kind = np.dtype(_BITS.get(dtype, dtype))
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _LARGE:
        return np.empty(shape, kind)
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes].view(kind).reshape(shape)


def _high_precision(op: str, arg: str, x: Any) -> Array:
    if not isinstance(x, np.ndarray):
        raise DTypeError(f"{op}: {arg} must be a NumPy array, got {type(x).__name__}")
    if x.dtype.name not in shapes.HIGH_PRECISION:
        raise DTypeError(f"{op}: {arg} must be float32, bfloat16 (ml_dtypes) or float16, got {x.dtype.name}{x.shape}")
    return np.ascontiguousarray(x).reshape(x.shape)


def _out_dtype(op: str, dtype: Any) -> tuple[str, Any]:
    """Name and NumPy dtype of a high-precision result; bfloat16 asks for ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes  # only who asks for bfloat16 needs it

        dtype = ml_dtypes.bfloat16
    dtype = np.dtype(dtype)
    if dtype.name not in shapes.HIGH_PRECISION:
        raise DTypeError(f"{op}: the result can be float32, bfloat16 or float16, not {dtype.name}")
    return dtype.name, dtype


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """A quantized tensor of logical `shape` in NumPy memory.

    `rowwise_data` has the tensor's shape, `columnwise_data` [K, M] where the format transposes; payloads and
    E8M0 scales are uint8, float32 scales and `amax` float32. Scales are logical row-major; a copy that was not
    made is None.
    """

    quantizer: Quantizer
    shape: tuple[int, ...]
    rowwise_data: Array | None = None
    rowwise_scale_inv: Array | None = None
    columnwise_data: Array | None = None
    columnwise_scale_inv: Array | None = None
    amax: Array | None = None

    def copy_of(self, columnwise: bool) -> tuple[Array, Array]:
        """(data, scale_inv) of one copy. **Raises** ValueError if it was not made."""
        side = "columnwise" if columnwise else "rowwise"
        data, scale = getattr(self, f"{side}_data"), getattr(self, f"{side}_scale_inv")
        if data is None or scale is None:
            raise ValueError(f"this product needs the {side} copy, and {self.quantizer} did not make one")
        return data, scale


def _copy_operands(fmt: FormatRow, data: Array, scale: Array) -> tuple[tuple[Array, int], tuple[Array, int]]:
    return _operand(data, fmt.element), _operand(scale, fmt.scale)


def amax(x: Array) -> Array:
    """Largest non-NaN magnitude of `x`, as a float32 array of shape [1]; 0 where there is none."""
    x = _high_precision("amax", "x", x)
    out = np.empty(1, np.float32)
    _core.amax(_operand(x, x.dtype.name), _operand(out, "float32"))
    return out


def quantize(x: Array, quantizer: Quantizer, *, amax: Array | None = None) -> QuantizedArray:
    """Quantizes `x` as `quantizer` says.

    **Arguments:** `x`: [..., K] float32, bfloat16 (ml_dtypes) or float16. `amax`: float32 [1] to use instead of the
    tensor's own (per-tensor formats).

    **Returns:** a `QuantizedArray`.

    **Raises:** TypeError for other dtypes, ValueError for a scalar or an `amax` that the format does not take.
    """
    x = _high_precision("quantize", "x", x)
    fmt = quantizer.format
    out = {b.name: _empty(b.shape, b.dtype) for b in shapes.quantize_buffers(x.shape, quantizer)}
    if amax is not None:
        if not fmt.per_tensor:
            raise ValueError(f"quantize: amax is for per-tensor formats; {fmt.name} takes one per block")
        out["amax"][:] = amax
    pair = {k: _operand(v, fmt.element if k.endswith("data") else fmt.scale) for k, v in out.items() if k != "amax"}
    _core.quantize(
        _operand(x, x.dtype.name),
        *quantizer.spec,
        _operand(out["amax"], "float32") if fmt.per_tensor else None,
        amax is not None,
        pair.get("rowwise_data"),
        pair.get("rowwise_scale_inv"),
        pair.get("columnwise_data"),
        pair.get("columnwise_scale_inv"),
    )
    return QuantizedArray(quantizer, x.shape, **out)


def dequantize(q: QuantizedArray, dtype: Any = np.float32) -> Array:
    """The values of `q`, [..., K] in `dtype`, from its rowwise copy if it has one, else from its columnwise copy."""
    name, np_dtype = _out_dtype("dequantize", dtype)
    columnwise = q.rowwise_data is None
    data, scale = _copy_operands(q.quantizer.format, *q.copy_of(columnwise))
    out = _empty(q.shape, name)
    _core.dequantize(data, scale, q.quantizer.format.id, columnwise, _operand(out, name))
    return out.view(np_dtype)


def gemm(
    a: QuantizedArray,
    b: QuantizedArray,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array | None = None,
    out_dtype: Any = np.float32,
    fast_accum: bool = False,
) -> Array:
    """alpha * op(a) @ op(b) + bias + beta * c in float32 accumulation (NUMERICS 7).

    **Arguments:** `a`, `b`: quantized tensors; op transposes their [rows, cols] form. An operand whose rows are reduced
    is read from its columnwise copy. `bias`: [N]. `c`: [M, N] of `out_dtype`, needed if `beta` is not 0.

    **Returns:** [M, N] of `out_dtype`, with a's leading dimensions unfolded.

    **Raises:** ValueError for missing copies or unequal reduced lengths, NotImplementedError for a pair of
    formats without a kernel.
    """
    name, np_dtype = _out_dtype("gemm", out_dtype)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    fmt_a, fmt_b = a.quantizer.format, b.quantizer.format
    copy_a, copy_b = a.copy_of(side_a), b.copy_of(side_b)
    m, n, _, constraints = shapes.gemm_shape(fmt_a, side_a, copy_a[0].shape, fmt_b, side_b, copy_b[0].shape)
    shapes.check(constraints)
    if bias is not None:
        bias = _high_precision("gemm", "bias", bias)
    if c is not None:
        c = _high_precision("gemm", "c", c)
        if c.shape != (m, n) or c.dtype.name != name:
            raise ShapeError(f"gemm: c must be {name}[{m}, {n}], got {c.dtype.name}{list(c.shape)}")
    out = _empty((m, n), name)
    _core.gemm(
        *_copy_operands(fmt_a, *copy_a),
        fmt_a.id,
        side_a,
        *_copy_operands(fmt_b, *copy_b),
        fmt_b.id,
        side_b,
        _operand(out, name),
        None if c is None else _operand(c, name),
        None if bias is None else _operand(bias, bias.dtype.name),
        None,
        alpha,
        beta,
        fast_accum,
    )
    return out.view(np_dtype).reshape(shapes.gemm_out_shape(a.shape, m, n, trans_a))


def bias_grad(dy: Array, dtype: Any = None) -> Array:
    """Sum of `dy` [..., N] over all leading dimensions, [N], accumulated in float32 in ascending row order."""
    dy = _high_precision("bias_grad", "dy", dy)
    if dy.ndim == 0:
        raise ShapeError("bias_grad: dy must have at least one dimension, got a scalar")
    name, np_dtype = _out_dtype("bias_grad", dy.dtype if dtype is None else dtype)
    out = _empty((dy.shape[-1],), name)
    _core.bias_grad(_operand(dy, dy.dtype.name), _operand(out, name), None)
    return out.view(np_dtype)
