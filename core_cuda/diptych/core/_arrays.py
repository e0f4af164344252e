"""The core's verbs on NumPy arrays: each allocates its outputs by the shared shape rules and calls the core."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, overload

import numpy as np

from diptych.common.byte_order import check_byte_order
from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.ops import quantize as rules
from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, require_dtype, require_high_precision, require_result_dtype
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.core import _core

Array = np.ndarray[Any, Any]

_CODES = _core.dtype_table()
# The NumPy dtypes of elements that NumPy has no dtype for: raw bits.
_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8, "float8_e8m0fnu": np.uint8}


_Operand = tuple[Array, int]  # how the core takes NumPy memory: a buffer and the code of its dtype


def _operand(x: Array, dtype: str) -> _Operand:
    if dtype in _BITS:  # a view of bits would hide the byte order from the core's own check
        check_byte_order("core", f"an array of {dtype}", x.dtype)
    return (x.view(_BITS[dtype]) if dtype in _BITS else x, _CODES[dtype])


_LINE, _LARGE = 64, 1 << 16  # bytes


def _empty(shape: shapes.Shape, dtype: str) -> Array:
    """Returns uninitialized memory. Large arrays are aligned to cache lines, not to 16 bytes: kernels write faster."""
    kind = np.dtype(_BITS.get(dtype, dtype))
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _LARGE:
        return np.empty(shape, kind)
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes].view(kind).reshape(shape)


def _high_precision(op: str, arg: str, x: Any) -> Array:
    x = _array(op, arg, x)
    require_high_precision(op, Operand(arg, x.dtype.name, x.shape))
    return x


def _out_dtype(op: str, dtype: Any) -> tuple[str, Any]:
    """Returns the name and the NumPy dtype of a high-precision result."""
    if dtype == "bfloat16":
        import ml_dtypes  # needed for bfloat16 only

        dtype = ml_dtypes.bfloat16
    dtype = np.dtype(dtype)
    require_result_dtype(op, dtype.name)
    check_byte_order(op, "the result's dtype", dtype)
    return dtype.name, dtype


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedCopies:
    """The copies that `quantize` makes of a tensor, or `quantize_stack` of several tensors, of logical `shape`."""

    quantizer: Quantizer
    shape: tuple[int, ...]
    rowwise_data: Array | None = None
    rowwise_scale_inv: Array | None = None
    columnwise_data: Array | None = None
    columnwise_scale_inv: Array | None = None
    amax: Array | None = None
    columnwise_amax: Array | None = None

    def copy_of(self, columnwise: bool) -> tuple[Array, Array]:
        """Returns (data, scale_inv) of one copy. **Raises** ValueError if the copy was not made."""
        side = "columnwise" if columnwise else "rowwise"
        data, scale = getattr(self, f"{side}_data"), getattr(self, f"{side}_scale_inv")
        if data is None or scale is None:
            raise ValueError(f"this product needs the {side} copy, and {self.quantizer} did not make one")
        return data, scale


class QuantizedArray(QuantizedCopies):
    """A quantized tensor of logical `shape` in NumPy memory.

    `rowwise_data` has the tensor's shape; `columnwise_data` is [K, M] if the format transposes it. E2M1 payloads hold
    two elements in a byte, which halves the last extent. Payloads, E8M0 scales and E4M3 scales are uint8; float32
    scales and amaxes are float32. Scales are row-major. The arrays of a copy that was not made are None. `amax` is the
    amax of a per-tensor format or of a two-level rowwise copy: [1], or [M] with one per row. `columnwise_amax` [1] is
    the amax of a two-level columnwise copy.
    """


def _array(op: str, arg: str, x: Any) -> Array:
    if not isinstance(x, np.ndarray):
        raise ArgumentError(f"{op}: {arg} must be a NumPy array, got {type(x).__name__}")
    check_byte_order(op, arg, x.dtype)
    return np.ascontiguousarray(x).reshape(x.shape)


def _typed(op: str, arg: str, x: Any, dtype: str) -> Array:
    x = _array(op, arg, x)
    require_dtype(op, Operand(arg, x.dtype.name, x.shape), dtype)
    return x


def _optional(x: Array | None, dtype: str) -> _Operand | None:
    return None if x is None else _operand(x, dtype)


def _copy_operands(q: QuantizedCopies, columnwise: bool) -> tuple[_Operand, _Operand, _Operand | None, int, bool]:
    """Returns data, scale_inv, amax, format and columnwise of one copy, as the core takes them."""
    fmt, (data, scale) = q.quantizer.copy_format(columnwise), q.copy_of(columnwise)
    amax = (q.columnwise_amax if columnwise else q.amax) if fmt.two_level else None
    return _operand(data, fmt.data), _operand(scale, fmt.scale), _optional(amax, "float32"), fmt.id, columnwise


@overload
def amax(x: Array, *, per_row: bool = False) -> Array: ...
@overload
def amax(x: Array, *, per_row: bool = False, rht: Literal[True], random_signs: bool = False) -> tuple[Array, Array]: ...


def amax(
    x: Array, *, per_row: bool = False, rht: bool = False, random_signs: bool = False
) -> Array | tuple[Array, Array]:
    """Returns the largest finite magnitude of `x`, or 0 if `x` has no finite element.

    **Arguments:** `x`: float32, bfloat16 (ml_dtypes) or float16. `per_row`: one amax for each row of [..., K]. `rht`:
    also computes the amax of the Hadamard-rotated tensor (bfloat16 only, rows in multiples of 16). `random_signs`: the
    transform uses random signs.

    **Returns:** float32 [1], or [M] with `per_row`; with `rht` a pair of that and the rotated tensor's amax [1].

    **Raises:** TypeError for other dtypes; ValueError for `rht` with a number of rows that is not a multiple of 16, or
    `random_signs` without `rht`.
    """
    x = _high_precision("amax", "x", x)
    out = np.empty(math.prod(x.shape[:-1]) if per_row else 1, np.float32)
    rotated = np.empty(1, np.float32) if rht else None
    flags = ROW_AMAX * per_row + RHT * rht + RHT_SIGNS * random_signs
    _core.amax(_operand(x, x.dtype.name), _operand(out, "float32"), _optional(rotated, "float32"), flags)
    return out if rotated is None else (out, rotated)


def quantize(
    x: Array,
    quantizer: Quantizer,
    *,
    amax: Array | None = None,
    columnwise_amax: Array | None = None,
    scale: Array | None = None,
    rng: Array | None = None,
) -> QuantizedArray:
    """Quantizes `x` by `quantizer`. Infinite elements become NaN, and NaN stays NaN.

    **Arguments:** `x`: [..., K] float32, bfloat16 (ml_dtypes) or float16. `amax`, `columnwise_amax`: float32,
    used instead of the tensor's own amax (per-tensor formats: `amax`; NVFP4: one for each copy that is made). `scale`:
    float32 [1], used as the scale (delayed scaling); the result's `amax` is still the tensor's own. `rng`: int32 [4],
    low and high words of seed and offset for stochastic rounding; a call uses two offsets and does not change `rng`. A
    part of a tensor has the whole tensor's random bits if its place follows, int32 [8]: row and column of its first
    element in the whole tensor, and the whole tensor's rows and columns, multiples of 16 where blocks run along them.

    **Returns:** a `QuantizedArray`.

    **Raises:** TypeError for other dtypes or a missing `scale` or `rng`; ValueError for a scalar, extents that the
    format does not support, or an argument that the quantizer does not use.
    """
    rules.require_quantizer("quantize", quantizer)
    state = _given_values(amax, columnwise_amax, scale, rng)
    if quantizer.custom:
        return quantizer.quantize_impl(x, functools.partial(quantize, **state))
    x = _high_precision("quantize", "x", x)
    shapes.check(shapes.quantize_constraints(x.shape, quantizer))
    buffers = shapes.quantize_buffers(x.shape, quantizer)
    return QuantizedArray(quantizer, x.shape, **_quantized("quantize", x, quantizer, buffers, state))


def _given_values(
    amax: Array | None, columnwise_amax: Array | None, scale: Array | None, rng: Array | None
) -> dict[str, Array]:
    """Returns those arguments of `quantize` that are not None, by name."""
    state = {"amax": amax, "columnwise_amax": columnwise_amax, "scale": scale, "rng": rng}
    return {name: held for name, held in state.items() if held is not None}


def _quantized(
    op: str,
    x: Array,
    quantizer: Quantizer,
    buffers: tuple[shapes.Buffer, ...],
    state: dict[str, Array],
    stack: bool = False,
    source: tuple[Any, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> dict[str, Array]:
    """Quantizes a tensor, a stack, or a source of `shape`; returns the results by the names of `buffers`."""
    state = {name: _array(op, name, held) for name, held in state.items()}
    encoded = (shape or x.shape)[stack:]
    named = {name: Operand(name, v.dtype.name, v.shape[stack:]) for name, v in state.items()}
    shapes.check(rules.quantize(op, Operand("x", x.dtype.name, x.shape[stack:]), quantizer, **named, encoded=encoded))
    fmt = quantizer.format
    out = {b.name: _empty(b.shape, b.dtype) for b in buffers}
    given = [name for name in ("amax", "columnwise_amax") if name in state]
    for name in given:
        if state[name].shape != out[name].shape:
            raise ShapeError(f"{op}: {name} must be {list(out[name].shape)}, got {list(state[name].shape)}")
        out[name][:] = state[name]
    dtypes = {"data": fmt.data, "scale_inv": fmt.scale, "amax": "float32"}

    def buffer(name: str) -> _Operand | None:
        return _optional(out.get(name), dtypes[name.removeprefix("rowwise_").removeprefix("columnwise_")])

    _core.quantize(
        _operand(x, x.dtype.name),
        *quantizer.spec,
        1 if given else 0,
        buffer("amax"),
        buffer("columnwise_amax"),
        _optional(state.get("scale"), "float32"),
        _optional(state.get("rng"), "int32"),
        buffer("rowwise_data"),
        buffer("rowwise_scale_inv"),
        buffer("columnwise_data"),
        buffer("columnwise_scale_inv"),
        source=source,  # type: ignore[arg-type]
        stack=stack,
    )
    return out


def scale_update(
    history: Array,
    scale: Array,
    *,
    reduced: Array | None = None,
    amax: Array | None = None,
    fp8_max: float = 448.0,
    margin: int = 0,
    most_recent: bool = False,
    seen: Array | None = None,
    step: Array | None = None,
) -> tuple[Array, Array]:
    """Updates histories and scales of n tensors that share an element, for delayed scaling (NUMERICS 2).

    **Arguments:** `history`: float32 [n, L], L >= 1; entry 0 holds the amax since the last update. `scale`: float32
    [n]. `reduced`: [n] amaxes after a reduction over a process group, used instead of entry 0 where not 0. `amax`: [n]
    amaxes that the caller's own algorithm chose, used where the latest amax is not 0. `fp8_max`: the element's largest
    value. `margin`: the scale is divided by 2^margin. `most_recent`: uses the latest amax, not the largest of the
    history. `seen`, `step`: int64 [1]; if they are equal nothing is updated. Neither is written.

    **Returns:** (history, scale) as new arrays, with the old content if `seen` equals `step`. A history of one entry
    holds 0 after each update.

    **Raises:** TypeError for other dtypes, ValueError for other shapes, `most_recent` with `amax`, or one of `seen` and
    `step` without the other.
    """

    def tensor(name: str, x: Array | None, dtype: str = "float32") -> _Operand | None:
        return None if x is None else _operand(_typed("scale_update", name, x, dtype), dtype)

    history, scale = _array("scale_update", "history", history), _array("scale_update", "scale", scale)
    inputs = tensor("history", history), tensor("scale", scale), tensor("reduced", reduced), tensor("amax", amax)
    out = np.empty(history.shape, np.float32), np.empty(scale.shape, np.float32)
    results = _operand(out[0], "float32"), _operand(out[1], "float32")
    steps = tensor("seen", seen, "int64"), tensor("step", step, "int64")
    _core.scale_update(*inputs, *results, fp8_max, margin, most_recent, *steps)
    return out


def dequantize(q: QuantizedArray, dtype: Any = np.float32) -> Array:
    """Returns the values of `q`, [..., K] in `dtype`, from its rowwise copy if there is one, else the columnwise copy.

    If the columnwise copy is Hadamard-rotated, the result is the rotated tensor. **Raises** TypeError for a `dtype`
    other than float32, bfloat16 and float16.
    """
    name, np_dtype = _out_dtype("dequantize", dtype)
    out = _empty(q.shape, name)
    _core.dequantize(*_copy_operands(q, q.rowwise_data is None), _operand(out, name))
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
    """Returns alpha * op(a) @ op(b) + bias + beta * c, accumulated in float32 (NUMERICS 7).

    **Arguments:** `a`, `b`: quantized tensors; `trans_a` and `trans_b` transpose their [rows, cols] form. An operand
    that is reduced over its rows is read from its columnwise copy. `bias`: [N] in high precision. `c`: [M, N] of
    `out_dtype`, needed if `beta` is not 0. `fast_accum`: Hopper's reduced-precision accumulation; per-tensor formats
    only.

    **Returns:** [M, N] of `out_dtype`, with a's leading dimensions unfolded.

    **Raises:** TypeError for dtypes; ValueError for missing copies, unequal reduced lengths or other shapes;
    NotImplementedError for a pair of formats without a kernel.
    """
    name, np_dtype = _out_dtype("gemm", out_dtype)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    fmt_a, fmt_b = a.quantizer.copy_format(side_a), b.quantizer.copy_format(side_b)
    data_a, data_b = a.copy_of(side_a)[0], b.copy_of(side_b)[0]
    m, n, _, constraints = shapes.gemm_shape(fmt_a, side_a, data_a.shape, fmt_b, side_b, data_b.shape)
    shapes.check(constraints)
    if bias is not None:
        bias = _high_precision("gemm", "bias", bias)
    if c is not None:
        c = _high_precision("gemm", "c", c)
        if c.shape != (m, n) or c.dtype.name != name:
            raise ShapeError(f"gemm: c must be {name}[{m}, {n}], got {c.dtype.name}{list(c.shape)}")
    out = _empty((m, n), name)
    _core.gemm(
        *_copy_operands(a, side_a),
        *_copy_operands(b, side_b),
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
    """Returns the sum of `dy` [..., N] over all leading dimensions, [N], accumulated in float32 in ascending row order.

    `dtype`: dtype of the result; None: dy's. **Raises** TypeError for dtypes, ValueError for a scalar.
    """
    dy = _high_precision("bias_grad", "dy", dy)
    if dy.ndim == 0:
        raise ShapeError("bias_grad: dy must have at least one dimension, got a scalar")
    name, np_dtype = _out_dtype("bias_grad", dy.dtype if dtype is None else dtype)
    out = _empty((dy.shape[-1],), name)
    _core.bias_grad(_operand(dy, dy.dtype.name), _operand(out, name), None)
    return out.view(np_dtype)
