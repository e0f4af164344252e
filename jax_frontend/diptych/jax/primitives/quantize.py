"""The ops on raw buffers, as JAX primitives over the XLA FFI handlers; what users call is in `functional`.

Sizes and dtypes are checked while tracing, by the rules of `diptych.common.shapes`; nothing here branches on a size.
What a primitive is, and what it does under transformations, is in `rules`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax

from diptych.common import shapes
from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.formats import format_by_name
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import (
    Aval,
    Copy,
    batch_shape,
    check_buffer,
    check_copy,
    check_dtype,
    check_high_precision,
    check_options,
    check_rotatable,
    check_shape,
    copy_length,
    dtype_of,
    encoded,
    enforce,
    given_amaxes,
    in_place,
    own_shape,
    primitive,
    result,
    source_length,
    workspace_bytes,
)
from diptych.jax.primitives.ffi import Batch, Source

Array = jax.Array
Operands = tuple[Array, ...]  # of a source, behind all others

COMPUTE, GIVEN, ACCUMULATE = 0, 1, 2
"""How quantize treats its amaxes, as `AmaxMode` in ops.h numbers it: x's own, used, joined with x's own."""


# --- amax ---


def _amax_abstract(*avals: Aval, batch: Batch, flags: int, columnwise: bool, source: Source | None = None) -> Any:
    x, shape = avals[0], own_shape(avals[0], batch.axes[0])
    check_high_precision("amax", "x", x.dtype, shape)
    shape = encoded("amax", source, shape, avals[1:], batch.axes[1:])
    if flags & RHT_SIGNS and not flags & RHT:
        raise ValueError("amax: random signs belong to the Hadamard transform, which was not asked for")
    if flags & RHT:
        check_rotatable("amax", x, shape)
        if not columnwise:
            raise ValueError("amax: the Hadamard transform is for the columnwise copy, which was not asked for")
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
    """Largest finite magnitude of `x`, float32 [1] ([M] with ROW_AMAX); `columnwise`: and that of what a columnwise
    copy encodes, [1]. `source`, `operands`: of what a source makes of x."""
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
    x, fmt, op = avals[0], quantizer.format, f"quantize ({quantizer.format.name})"
    shape = own_shape(x, batch.axes[0])
    check_high_precision(op, "x", x.dtype, shape)
    own = len(avals) - source_length(source)
    of_source = avals[own:]
    shape = encoded(op, source, shape, of_source, batch.axes[own:])
    check_options("quantize", x, shape, quantizer, mode == GIVEN, has_scale, has_rng)
    enforce(shapes.quantize_constraints(shape, quantizer))
    want = {name: (b.dtype, b.shape) for name, b in _amaxes(shape, quantizer).items()} if mode != COMPUTE else {}
    want |= {"scale": ("float32", (1,))} if has_scale else {}
    want |= {"rng": ("int32", (4,))} if has_rng else {}
    given = dict(zip(want, avals[1:own], strict=True))
    for name, mask in zip(want, batch.axes[1:own], strict=True):
        check_buffer("quantize", name, given[name], mask, *want[name])
    front = batch_shape(avals, batch)
    # What a result depends on is what it varies with: reduced over a mesh axis, an amax no longer varies there.
    amaxes = [a for name, a in given.items() if name.endswith("amax")]
    fixed = [given["scale"]] if has_scale else amaxes if mode == GIVEN and fmt.per_tensor else []
    read = (x, *of_source)
    sources = {"data": avals, "inv": tuple(fixed or [*read, *amaxes]), "amax": (*read, *amaxes)}
    outs = []
    for buffer in shapes.quantize_buffers(shape, quantizer):
        if mode == GIVEN and buffer.name.endswith("amax"):
            continue
        dtype = "uint8" if as_bytes and dtype_of(buffer.dtype).itemsize == 1 else buffer.dtype
        outs.append(result(sources[buffer.name.rsplit("_", 1)[-1]], (*front, *buffer.shape), dtype))
    if column_sum:
        check_high_precision(op, "the column sum", dtype_of(column_sum), ())
        outs.append(result(read, (*front, shape[-1]), column_sum))
    return outs


def _encoded_shape(avals: Any, batch: Batch, source: Source | None) -> shapes.Shape:
    at = len(avals) - source_length(source)
    return encoded("quantize", source, own_shape(avals[0], batch.axes[0]), avals[at:], batch.axes[at:])


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
    """The buffers of `shapes.quantize_buffers` by name; amaxes that are given come back as they are.

    `source`, `operands`: what is encoded instead of x. `column_sum`: the dtype of one more result of that name, the sum
    over the rows of what is encoded, [K].
    """
    given = given_amaxes("quantize", quantizer, _amaxes(x.shape, quantizer), amax=amax, columnwise_amax=columnwise_amax)
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


# --- scale_update ---


def _scale_update_abstract(
    history: Aval,
    scale: Aval,
    *chosen: Aval,
    batch: Batch,
    has_reduced: bool,
    has_amax: bool,
    fp8_max: str,
    margin: int,
    most_recent: bool,
) -> Any:
    check_dtype("scale_update", "history", history, "float32")
    n, length = shapes.rows_cols(own_shape(history, batch.axes[0]))
    if length == 0:
        raise ShapeError(f"scale_update: history {list(history.shape)} has no entry")
    names = ["scale", *["reduced"] * has_reduced, *["amax"] * has_amax]
    for name, aval, mask in zip(names, (scale, *chosen), batch.axes[1:], strict=True):
        check_buffer("scale_update", name, aval, mask, "float32", (n,))
    if most_recent and has_amax:
        raise ValueError("scale_update: amax was given; most_recent does not apply")
    operands = (history, scale, *chosen)
    front = batch_shape(operands, batch)
    updated = (history, *chosen[:1]) if has_reduced else (history,)
    return [
        result(updated, (*front, *own_shape(history, batch.axes[0])), "float32"),
        result(operands, (*front, n), "float32"),
    ]


def _scale_update_attributes(_: Any, batch: Batch, fp8_max: str, **params: Any) -> Any:
    return ffi.scale_update_attributes(batch, fp8_max=float.fromhex(fp8_max), **params)


scale_update_p = primitive(
    "scale_update",
    _scale_update_abstract,
    _scale_update_attributes,
    lambda ctx, platform, batch, **_: (in_place(batch, {0: 0, 1: 1}), None),
)


def scale_update(
    history: Array,
    scale: Array,
    reduced: Array | None,
    amax: Array | None,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> tuple[Array, Array]:
    """The new history [n, L] or [L] and scale [n], in place of the old ones where XLA may give their memory away."""
    args = [history, scale, *(x for x in (reduced, amax) if x is not None)]
    outs = scale_update_p.bind(
        *args,
        batch=Batch.none(len(args)),
        has_reduced=reduced is not None,
        has_amax=amax is not None,
        fp8_max=float(fp8_max).hex(),
        margin=margin,
        most_recent=most_recent,
    )
    return outs[0], outs[1]


# --- dequantize ---


def _dequantize_abstract(*avals: Aval, batch: Batch, format: str, columnwise: bool, dtype: str) -> Any:
    row = check_copy("dequantize", "q", avals, batch.axes, format, columnwise)
    check_high_precision("dequantize", "the result", dtype_of(dtype), avals[0].shape)
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


# --- gemm ---


def _gemm_sizes(avals: Any, batch: Batch, a: tuple[str, bool], b: tuple[str, bool]) -> shapes.GemmShape:
    at = copy_length(a[0])
    a_data, b_data = own_shape(avals[0], batch.axes[0]), own_shape(avals[at], batch.axes[at])
    return shapes.gemm_shape(format_by_name(a[0]), a[1], a_data, format_by_name(b[0]), b[1], b_data)


def _gemm_abstract(
    *avals: Aval,
    batch: Batch,
    a: tuple[str, bool],
    b: tuple[str, bool],
    has_bias: bool,
    has_c: bool,
    alpha: str,
    beta: str,
    out_dtype: str,
    fast_accum: bool,
) -> Any:
    at = 0
    for side, (fmt, columnwise) in (("a", a), ("b", b)):
        end = at + copy_length(fmt)
        check_copy("gemm", side, avals[at:end], batch.axes[at:end], fmt, columnwise)
        at = end
    check_high_precision("gemm", "out_dtype", dtype_of(out_dtype), ())
    size = _gemm_sizes(avals, batch, a, b)
    enforce(size.constraints)
    if has_bias:
        own = own_shape(avals[at], batch.axes[at])
        check_high_precision("gemm", "bias", avals[at].dtype, own)
        check_shape("gemm", "bias", own, (size.n,))
    if has_c:
        check_buffer("gemm", "c", avals[-1], batch.axes[-1], out_dtype, (size.m, size.n))
    if fast_accum and not (format_by_name(a[0]).per_tensor and format_by_name(b[0]).per_tensor):
        raise ValueError(f"gemm: fast_accum exists for per-tensor FP8 only, got {a[0]} x {b[0]}")
    return [result(avals, (*batch_shape(avals, batch), size.m, size.n), out_dtype)]


def _gemm_attributes(
    _: Any,
    batch: Batch,
    a: tuple[str, bool],
    b: tuple[str, bool],
    has_bias: bool,
    has_c: bool,
    alpha: str,
    beta: str,
    out_dtype: str,
    fast_accum: bool,
) -> Any:
    rows = ((format_by_name(fmt), columnwise) for fmt, columnwise in (a, b))
    a_copy, b_copy = ((row.id, columnwise, row.two_level) for row, columnwise in rows)
    factors = float.fromhex(alpha), float.fromhex(beta)
    return ffi.gemm_attributes(batch, a_copy, b_copy, has_bias, has_c, *factors, fast_accum)


def _gemm_finish(ctx: Any, platform: str, batch: Batch, **params: Any) -> Any:
    a, b, out_dtype = params["a"], params["b"], params["out_dtype"]
    m, n, k = sizes = _gemm_sizes(ctx.avals_in, batch, a, b)[:3]
    (a_id, a_copy), (b_id, b_copy) = ((format_by_name(fmt).id, columnwise) for fmt, columnwise in (a, b))
    # The CPU's rows depend on nothing but the formats; a GPU's are chosen where the tensors are, when they are.
    if platform == "cpu" and _core.gemm_row(a_id, a_copy, b_id, b_copy, 16, 16, 16, out_dtype, "cpu", 0) < 0:
        rows = "; ".join(
            f"{r['kernel']}: {', '.join(r['formats'])}"
            for r in _core.kernel_table()
            if r["op"] == "gemm" and r["backend"] == "cpu"
        )
        raise UnsupportedError(f"gemm: no CPU kernel for {a[0]} x {b[0]} [{m}, {n}, {k}]; nearest: {rows}")
    epilogue = params["has_bias"] or float.fromhex(params["beta"]) != 0.0
    aliases = in_place(batch, {len(ctx.avals_in) - 1: 0}) if params["has_c"] else {}
    return aliases, workspace_bytes("gemm", platform, (*sizes, epilogue), _core.gemm_workspace_bytes)


gemm_p = primitive("gemm", _gemm_abstract, _gemm_attributes, _gemm_finish)


def gemm(
    a: Copy,
    b: Copy,
    bias: Array | None,
    c: Array | None,
    *,
    alpha: float,
    beta: float,
    out_dtype: str,
    fast_accum: bool,
) -> Array:
    """alpha * op(a) @ op(b) + bias + beta * c, [M, N]; in place of `c` where XLA may give its memory away."""
    operands = [*a.operands("gemm: a"), *b.operands("gemm: b"), *(x for x in (bias, c) if x is not None)]
    return gemm_p.bind(
        *operands,
        batch=Batch.none(len(operands)),
        a=(a.format, a.columnwise),
        b=(b.format, b.columnwise),
        has_bias=bias is not None,
        has_c=c is not None,
        # Hexadecimal text, because 0.0 and -0.0 are equal keys of a compilation cache and not equal factors.
        alpha=alpha.hex(),
        beta=beta.hex(),
        out_dtype=out_dtype,
        fast_accum=fast_accum,
    )[0]


# --- bias_grad ---


def _bias_grad_abstract(dy: Aval, *, batch: Batch, dtype: str) -> Any:
    shape = own_shape(dy, batch.axes[0])
    check_high_precision("bias_grad", "dy", dy.dtype, shape)
    check_high_precision("bias_grad", "the result", dtype_of(dtype), ())
    return [result((dy,), (*batch_shape((dy,), batch), shapes.rows_cols(shape)[1]), dtype)]


def _bias_grad_finish(ctx: Any, platform: str, batch: Batch, dtype: str) -> Any:
    sizes = shapes.rows_cols(own_shape(ctx.avals_in[0], batch.axes[0]))
    return {}, workspace_bytes("bias_grad", platform, sizes, _core.bias_grad_workspace_bytes)


bias_grad_p = primitive(
    "bias_grad", _bias_grad_abstract, lambda avals, batch, dtype: ffi.bias_grad_attributes(batch), _bias_grad_finish
)


def bias_grad(dy: Array, dtype: str) -> Array:
    """Sum of `dy` [..., N] over its leading dimensions, [N] in `dtype`."""
    return bias_grad_p.bind(dy, batch=Batch.none(1), dtype=dtype)[0]
