"""quantize, dequantize and amax on raw buffers, as JAX primitives over the XLA FFI handlers. Users call `functional`.

Sizes and dtypes are checked while tracing, by the rules of `diptych.common.shapes`; nothing here branches on a size.
`register.py` defines primitives and their behaviour under transformations.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax

from diptych.common.formats import format_by_name
from diptych.common.ops import quantize as rules
from diptych.common.ops import shapes
from diptych.common.quantizers import ROW_AMAX, Quantizer
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import (
    Aval,
    Copy,
    check_buffer,
    check_copy,
    check_result,
    dtype_of,
    encoded,
    enforce,
    given_amaxes,
    operand,
    own_shape,
    source_length,
)
from diptych.jax.primitives.ffi import Batch, Source
from diptych.jax.primitives.register import batch_shape, in_place, primitive, result, workspace_bytes

Array = jax.Array
Operands = tuple[Array, ...]  # of a source, behind all others

COMPUTE, GIVEN, ACCUMULATE = 0, 1, 2
"""Modes of quantize's amax operand, numbered as `AmaxMode` in ops.h: x's own amax, a given one, the maximum of both."""


# --- amax ---


def _amax_abstract(*avals: Aval, batch: Batch, flags: int, columnwise: bool, source: Source | None = None) -> Any:
    x = operand("x", avals[0], batch.axes[0])
    shape = encoded("amax", source, x, avals[1:], batch.axes[1:])
    enforce(rules.amax(x, flags, columnwise, shape))
    count = shapes.rows_cols(shape)[0] if flags & ROW_AMAX else 1
    front = batch_shape(avals, batch)
    return [result(avals, (*front, n), "float32") for n in (count, 1)[: 1 + columnwise]]


amax_p = primitive("amax", _amax_abstract, lambda avals, batch, **params: ffi.amax_attributes(batch, **params))


@overload
def amax(x: Array, flags: int = 0) -> Array: ...
@overload
def amax(
    x: Array, flags: int = 0, source: Source | None = None, operands: Operands = (), *, columnwise: Literal[True]
) -> tuple[Array, Array]: ...


def amax(
    x: Array, flags: int = 0, source: Source | None = None, operands: Operands = (), *, columnwise: bool = False
) -> Array | tuple[Array, Array]:
    """Largest finite magnitude of `x`, float32 [1] ([M] with ROW_AMAX); with `columnwise` also that of the columnwise
    copy, [1]. `source`, `operands`: a source computed from x, which is read instead."""
    batch = Batch.none(1 + len(operands))
    outs = amax_p.bind(x, *operands, batch=batch, flags=flags, columnwise=columnwise, source=source)
    return (outs[0], outs[1]) if columnwise else outs[0]


# --- quantize ---


def _amaxes(shape: shapes.Shape, quantizer: Quantizer) -> dict[str, shapes.Buffer]:
    return {b.name: b for b in shapes.quantize_buffers(shape, quantizer) if b.name.endswith("amax")}


def _quantize_abstract(
    *avals: Aval,
    batch: Batch,
    quantizer: Quantizer,
    mode: int,
    has_scale: bool,
    has_rng: bool,
    as_bytes: bool,
    source: Source | None,
    column_sum: str,
) -> Any:
    x, fmt = avals[0], quantizer.format
    own = len(avals) - source_length(source)
    of_source, named = avals[own:], operand("x", x, batch.axes[0])
    shape = encoded("quantize", source, named, of_source, batch.axes[own:])
    want = {name: (b.dtype, b.shape) for name, b in _amaxes(shape, quantizer).items()} if mode != COMPUTE else {}
    want |= {"scale": ("float32", (1,))} if has_scale else {}
    if has_rng:
        words = own_shape(avals[own - 1], batch.axes[own - 1])
        want["rng"] = ("int32", (8,) if words == (8,) else (4,))
    given = dict(zip(want, avals[1:own], strict=True))
    state = {n: operand(n, given[n], mask) for n, mask in zip(want, batch.axes[1:own], strict=True)}
    if mode == ACCUMULATE:  # records x's amax, and is not used to quantize
        state.pop("amax")
    enforce(rules.quantize("quantize", named, quantizer, **state, encoded=shape))
    for name, mask in zip(want, batch.axes[1:own], strict=True):
        check_buffer("quantize", f"{name} ({fmt.name})", given[name], mask, *want[name])
    front = batch_shape(avals, batch)
    # A result varies over the mesh axes of operands it depends on; an amax reduced over an axis no longer varies there.
    amaxes = [a for name, a in given.items() if name.endswith("amax")]
    fixed = [given["scale"]] if has_scale else amaxes if mode == GIVEN and fmt.one_scale else []
    read = (x, *of_source)
    sources = {"data": avals, "inv": tuple(fixed or [*read, *amaxes]), "amax": (*read, *amaxes)}
    outs = []
    for buffer in shapes.quantize_buffers(shape, quantizer):
        if mode == GIVEN and buffer.name.endswith("amax"):
            continue
        dtype = "uint8" if as_bytes and dtype_of(buffer.dtype).itemsize == 1 else buffer.dtype
        outs.append(result(sources[buffer.name.rsplit("_", 1)[-1]], (*front, *buffer.shape), dtype))
    if column_sum:
        check_result("quantize", column_sum)
        outs.append(result(read, (*front, shape[-1]), column_sum))
    return outs


def _encoded_shape(avals: Any, batch: Batch, source: Source | None) -> shapes.Shape:
    at = len(avals) - source_length(source)
    return encoded("quantize", source, operand("x", avals[0], batch.axes[0]), avals[at:], batch.axes[at:])


def _quantize_attributes(
    avals: Any,
    batch: Batch,
    quantizer: Quantizer,
    mode: int,
    source: Any,
    column_sum: str,
    as_bytes: bool,
    **there: bool,
) -> Any:
    amaxes = _amaxes(_encoded_shape(avals, batch, source), quantizer)
    return ffi.quantize_attributes(
        batch,
        quantizer.spec,
        mode,
        source,
        bool(column_sum),
        has_amax="amax" in amaxes,
        has_columnwise_amax="columnwise_amax" in amaxes,
        rowwise=quantizer.rowwise,
        columnwise=quantizer.columnwise,
        **there,
    )


def _quantize_finish(ctx: Any, platform: str, batch: Batch, mode: int, source: Any, column_sum: str, **_: Any) -> Any:
    workspace = None
    if column_sum:
        sizes = shapes.rows_cols(_encoded_shape(ctx.avals_in, batch, source))
        workspace = workspace_bytes("quantize", platform, sizes, _core.column_sum_workspace_bytes)
    at = len(ctx.avals_out) - 1 - bool(column_sum)
    return (in_place(batch, {1: at}) if mode == ACCUMULATE else {}), workspace


quantize_p = primitive(
    "quantize",
    _quantize_abstract,
    _quantize_attributes,
    _quantize_finish,
    updated=lambda mode, **_: (1,) if mode == ACCUMULATE else (),
)


def _quantize(
    x: Array,
    quantizer: Quantizer,
    mode: int,
    amaxes: dict[str, Array],
    scale: Array | None,
    rng: Array | None,
    as_bytes: bool,
    source: Source | None,
    operands: Operands,
    column_sum: str,
) -> dict[str, Array]:
    args = [x, *amaxes.values(), *(v for v in (scale, rng) if v is not None), *operands]
    outs = quantize_p.bind(
        *args,
        batch=Batch.none(len(args)),
        quantizer=quantizer,
        mode=mode,
        has_scale=scale is not None,
        has_rng=rng is not None,
        as_bytes=as_bytes,
        source=source,
        column_sum=column_sum,
    )
    names = [b.name for b in shapes.quantize_buffers(x.shape, quantizer)]
    names = [n for n in names if not (mode == GIVEN and n in amaxes)] + ["column_sum"] * bool(column_sum)
    return dict(zip(names, outs, strict=True)) | (amaxes if mode == GIVEN else {})


def quantize(
    x: Array,
    quantizer: Quantizer,
    amax: Array | None = None,
    columnwise_amax: Array | None = None,
    scale: Array | None = None,
    rng: Array | None = None,
    as_bytes: bool = False,
    source: Source | None = None,
    operands: Operands = (),
    column_sum: str = "",
) -> dict[str, Array]:
    """Returns the buffers of `shapes.quantize_buffers` by name; amaxes that are passed are returned.

    `source`, `operands`: a source computed from x, which is quantized instead. `column_sum`: the dtype of one more
    result of that name, the sum over the rows of the quantized tensor's unquantized values, [K].
    """
    given = given_amaxes("quantize", quantizer, amax=amax, columnwise_amax=columnwise_amax)
    mode = GIVEN if given else COMPUTE
    return _quantize(x, quantizer, mode, given, scale, rng, as_bytes, source, operands, column_sum)


def quantize_delayed(
    x: Array, quantizer: Quantizer, scale: Array, history: Array, as_bytes: bool = False
) -> tuple[dict[str, Array], Array]:
    """The copies under a given scale, and the history [L] with history[0] = max(history[0], amax(x)).

    The core takes that maximum: XLA's own flushes subnormals on the CPU.
    """
    buffers = _quantize(x, quantizer, ACCUMULATE, {"amax": history[:1]}, scale, None, as_bytes, None, (), "")
    return buffers, history.at[:1].set(buffers.pop("amax"))


# --- dequantize ---


def _dequantize_abstract(*avals: Aval, batch: Batch, format: str, columnwise: bool, dtype: str) -> Any:
    row = check_copy("dequantize", "q", avals, batch.axes, format, columnwise)
    check_result("dequantize", dtype)
    shape = shapes.tensor_shape(row, columnwise, own_shape(avals[0], batch.axes[0]))
    return [result(avals, (*batch_shape(avals, batch), *shape), dtype)]


def _dequantize_attributes(avals: Any, batch: Batch, format: str, columnwise: bool, dtype: str) -> Any:
    return ffi.dequantize_attributes(batch, format_by_name(format).id, columnwise, len(avals) == 3)


dequantize_p = primitive("dequantize", _dequantize_abstract, _dequantize_attributes)


def dequantize(q: Copy, dtype: str) -> Array:
    """Values of one copy in the tensor's own orientation; of a transposed copy [M, K]."""
    args = q.operands("dequantize")
    batch = Batch.none(len(args))
    return dequantize_p.bind(*args, batch=batch, format=q.format, columnwise=q.columnwise, dtype=dtype)[0]
