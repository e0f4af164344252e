"""The ops on raw buffers, as JAX primitives over the XLA FFI handlers.

Here are shapes, types, batching and lowering; what users call is in `functional`. Invariants:

- Sizes and dtypes are checked while tracing, by the rules of `diptych.common.shapes`; nothing here branches on a size.
- A vmapped axis never copies an operand: the handlers walk it, and stand still on operands that lack it.
- A result varies over the mesh axes that its operands vary over, so that shard_map notices a forgotten `pmax`.
- A payload or scale of one byte may also be a uint8 array of its bytes, which nothing in JAX takes for numbers.
- A primitive is **not** differentiable; `diptych.jax.dense` defines what a derivative means here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, PartitionSpec

from diptych.common import shapes
from diptych.common.errors import DTypeError, ShapeError, UnsupportedError
from diptych.common.formats import format_by_name
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.jax import ffi
from diptych.jax.ffi import Batch

Array = jax.Array
Aval = Any  # jax.core.ShapedArray

ffi.load()


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype object for a name of the format table."""
    return jax.numpy.dtype(name)


def check_high_precision(op: str, arg: str, dtype: Any, shape: Any) -> None:
    """**Raises** DTypeError unless `dtype` is float32, bfloat16 or float16."""
    if np.dtype(dtype).name not in shapes.HIGH_PRECISION:
        raise DTypeError(f"{op}: {arg} must be float32, bfloat16 or float16, got {np.dtype(dtype).name}{list(shape)}")


def _check_dtype(op: str, arg: str, aval: Aval, name: str) -> None:
    if aval.dtype.name != name and not (aval.dtype.name == "uint8" and dtype_of(name).itemsize == 1):
        raise DTypeError(f"{op}: {arg} must be {name}, got {aval.dtype.name}{list(aval.shape)}")


def _check_shape(op: str, arg: str, shape: shapes.Shape, want: shapes.Shape) -> None:
    if tuple(shape) != tuple(want):
        raise ShapeError(f"{op}: {arg} must have shape {list(want)}, got {list(shape)}")


# --- batching: what lies in front of each operand's own shape ---


def _own_shape(aval: Aval, mask: int) -> shapes.Shape:
    return tuple(aval.shape[mask.bit_count() :])


def _batch_shape(avals: tuple[Aval, ...], batch: Batch) -> shapes.Shape:
    """Lengths of the batch axes, outermost first, each from the first operand that carries it."""
    out = []
    for bit in reversed(range(batch.rank)):
        for aval, mask in zip(avals, batch.axes, strict=True):
            if mask >> bit & 1:
                out.append(aval.shape[(mask >> (bit + 1)).bit_count()])
                break
    return tuple(out)


def _result(operands: tuple[Aval, ...], shape: shapes.Shape, dtype: str) -> Aval:
    """A result's type: varies over every manual mesh axis that one of `operands` varies over, sharded over none."""
    like = next((o for o in operands if not o.sharding.mesh.empty), operands[0])
    varying = frozenset().union(*(o.manual_axis_type.varying for o in operands))
    return like.update(
        shape=tuple(shape),
        dtype=dtype_of(dtype),
        weak_type=False,
        sharding=like.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
        manual_axis_type=ManualAxisType(varying=varying),
    )


# --- one primitive per op ---


def _primitive(op: str, abstract_eval: Any, attributes: Any, finish: Any = None) -> Primitive:
    """A primitive with every rule that JAX asks for.

    **Arguments:** `abstract_eval(*avals, batch, **params)` returns the results' types; `attributes(avals, batch,
    **params)` the handler's attributes; `finish(ctx, platform, batch, **params)` what else the lowering needs:
    (aliases {operand: result}, bytes of a workspace or None).
    """
    name = ffi.target(op)
    prim = Primitive(name)
    prim.multiple_results = True
    prim.def_abstract_eval(abstract_eval)

    @functools.partial(jax.jit, static_argnames=("params",))
    def run(*args: Array, params: tuple[tuple[str, Any], ...]) -> Any:
        return prim.bind(*args, **dict(params))

    prim.def_impl(lambda *args, **params: run(*args, params=tuple(sorted(params.items()))))

    def batcher(args: Any, dims: Any, *, batch: Batch, **params: Any) -> Any:
        args = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        outs = prim.bind(*args, batch=batch.outer([d is not None for d in dims]), **params)
        return outs, [0] * len(outs)

    batching.primitive_batchers[prim] = batcher

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"{name} has no derivative: rounding to a few bits has none. Use diptych.jax.dense, which defines the "
            "three products of training, or wrap the inputs in jax.lax.stop_gradient"
        )

    ad.primitive_jvps[prim] = refuse
    ad.primitive_transposes[prim] = refuse

    def lower(platform: str, ctx: Any, *operands: Any, batch: Batch, **params: Any) -> Any:
        aliases, workspace = finish(ctx, platform, batch, **params) if finish else ({}, None)
        results = len(ctx.avals_out)
        if workspace is not None:
            scratch = _result(tuple(ctx.avals_out), (workspace,), "uint8")
            ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
        rule = jax.ffi.ffi_lowering(name, operand_output_aliases=aliases)
        return rule(ctx, *operands, attributes=attributes(ctx.avals_in, batch, **params))[:results]

    for platform in ffi.PLATFORMS:
        mlir.register_lowering(prim, functools.partial(lower, platform), platform=platform)
    return prim


def _workspace(op: str, platform: str, sizes: tuple[Any, ...], rule: Any) -> int | None:
    """Bytes of the extra result that CUDA's lowering asks XLA for; None on the CPU, which needs none."""
    if platform != "cuda":
        return None
    if not all(isinstance(s, int) for s in sizes):
        raise UnsupportedError(
            f"{op}: symbolic sizes {sizes} cannot be lowered for CUDA, whose workspace follows from the concrete sizes"
        )
    return rule(*sizes)


# --- amax ---


def _amax_abstract(x: Aval, *, batch: Batch) -> Any:
    check_high_precision("amax", "x", x.dtype, _own_shape(x, batch.axes[0]))
    return [_result((x,), (*_batch_shape((x,), batch), 1), "float32")]


amax_p = _primitive("amax", _amax_abstract, lambda avals, batch: ffi.amax_attributes(batch))


def amax(x: Array) -> Array:
    """Largest non-NaN magnitude of `x`: float32 [1]."""
    return amax_p.bind(x, batch=Batch.none(1))[0]


# --- quantize ---


def _quantize_abstract(*avals: Aval, batch: Batch, quantizer: Quantizer, as_bytes: bool) -> Any:
    x, fmt = avals[0], quantizer.format
    shape = _own_shape(x, batch.axes[0])
    check_high_precision(f"quantize ({fmt.name})", "x", x.dtype, shape)
    if len(avals) == 2:
        if not fmt.per_tensor:
            raise ShapeError(f"quantize: amax is for per-tensor formats; {fmt.name} takes one per block")
        _check_dtype("quantize", "amax", avals[1], "float32")
        _check_shape("quantize", "amax", _own_shape(avals[1], batch.axes[1]), (1,))
    front = _batch_shape(avals, batch)
    outs = []
    for buffer in shapes.quantize_buffers(shape, quantizer):
        if buffer.name == "amax" and len(avals) == 2:
            continue
        # A given amax fixes the scales by itself: reduced over a mesh axis, they no longer vary there.
        sources = avals[1:] if len(avals) == 2 and not buffer.name.endswith("data") else avals
        dtype = "uint8" if as_bytes and dtype_of(buffer.dtype).itemsize == 1 else buffer.dtype
        outs.append(_result(sources, (*front, *buffer.shape), dtype))
    return outs


def _quantize_attributes(avals: Any, batch: Batch, quantizer: Quantizer, as_bytes: bool) -> Any:
    return ffi.quantize_attributes(batch, quantizer.spec, len(avals) == 2, quantizer.rowwise, quantizer.columnwise)


quantize_p = _primitive("quantize", _quantize_abstract, _quantize_attributes)


def quantize(x: Array, amax: Array | None, quantizer: Quantizer, as_bytes: bool = False) -> dict[str, Array]:
    """The buffers of `shapes.quantize_buffers` by name; `amax` is the given one where one is given."""
    args = (x,) if amax is None else (x, amax)
    outs = quantize_p.bind(*args, batch=Batch.none(len(args)), quantizer=quantizer, as_bytes=as_bytes)
    names = [b.name for b in shapes.quantize_buffers(x.shape, quantizer)]
    return dict(zip(names, outs if amax is None else [*outs, amax], strict=True))


# --- dequantize ---


def _check_copy(op: str, arg: str, data: Aval, scale: Aval, masks: tuple[int, int], fmt: str, columnwise: bool) -> None:
    """One copy's data and scales against its format row."""
    row = format_by_name(fmt)
    _check_dtype(op, f"{arg} data ({fmt})", data, row.element)
    _check_dtype(op, f"{arg} scale_inv ({fmt})", scale, row.scale)
    rows, cols = shapes.rows_cols(_own_shape(data, masks[0]))
    m, k = (cols, rows) if columnwise and row.columnwise == "transposed" else (rows, cols)
    want = shapes.scale_shape(row, columnwise, m, k)
    _check_shape(op, f"{arg} scale_inv ({fmt})", _own_shape(scale, masks[1]), want)


def _dequantize_abstract(data: Aval, scale: Aval, *, batch: Batch, format: str, columnwise: bool, dtype: str) -> Any:
    _check_copy("dequantize", "q", data, scale, (batch.axes[0], batch.axes[1]), format, columnwise)
    check_high_precision("dequantize", "the result", dtype_of(dtype), data.shape)
    own = _own_shape(data, batch.axes[0])
    if columnwise and format_by_name(format).columnwise == "transposed":
        own = shapes.rows_cols(own)[::-1]
    return [_result((data, scale), (*_batch_shape((data, scale), batch), *own), dtype)]


def _dequantize_attributes(_: Any, batch: Batch, format: str, columnwise: bool, dtype: str) -> Any:
    return ffi.dequantize_attributes(batch, format_by_name(format).id, columnwise)


dequantize_p = _primitive("dequantize", _dequantize_abstract, _dequantize_attributes)


def dequantize(data: Array, scale_inv: Array, format: str, columnwise: bool, dtype: str) -> Array:
    """Values of one copy in the tensor's own orientation; of a transposed copy [M, K]."""
    return dequantize_p.bind(data, scale_inv, batch=Batch.none(2), format=format, columnwise=columnwise, dtype=dtype)[0]


# --- gemm ---


def _gemm_sizes(avals: Any, batch: Batch, a: tuple[str, bool], b: tuple[str, bool]) -> shapes.GemmShape:
    a_data, b_data = _own_shape(avals[0], batch.axes[0]), _own_shape(avals[2], batch.axes[2])
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
    for side, at, (fmt, columnwise) in (("a", 0, a), ("b", 2, b)):
        masks = (batch.axes[at], batch.axes[at + 1])
        _check_copy("gemm", side, avals[at], avals[at + 1], masks, fmt, columnwise)
    check_high_precision("gemm", "out_dtype", dtype_of(out_dtype), ())
    size = _gemm_sizes(avals, batch, a, b)
    shapes.check(size.constraints)
    if has_bias:
        bias, own = avals[4], _own_shape(avals[4], batch.axes[4])
        check_high_precision("gemm", "bias", bias.dtype, own)
        _check_shape("gemm", "bias", own, (size.n,))
    if has_c:
        _check_dtype("gemm", "c", avals[-1], out_dtype)
        _check_shape("gemm", "c", _own_shape(avals[-1], batch.axes[-1]), (size.m, size.n))
    if fast_accum and not (format_by_name(a[0]).per_tensor and format_by_name(b[0]).per_tensor):
        raise ValueError(f"gemm: fast_accum exists for per-tensor FP8 only, got {a[0]} x {b[0]}")
    return [_result(avals, (*_batch_shape(avals, batch), size.m, size.n), out_dtype)]


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
    a_id, b_id = ((format_by_name(fmt).id, columnwise) for fmt, columnwise in (a, b))
    scales = float.fromhex(alpha), float.fromhex(beta)
    return ffi.gemm_attributes(batch, a_id, b_id, has_bias, has_c, *scales, fast_accum)


def _gemm_finish(ctx: Any, platform: str, batch: Batch, **params: Any) -> Any:
    a, b, out_dtype = params["a"], params["b"], params["out_dtype"]
    m, n, k = sizes = _gemm_sizes(ctx.avals_in, batch, a, b)[:3]
    (a_id, a_copy), (b_id, b_copy) = ((format_by_name(fmt).id, columnwise) for fmt, columnwise in (a, b))
    # The CPU's rows depend on nothing but the formats; a GPU's are chosen where the tensors are, when they are.
    if platform == "cpu" and _core.gemm_row(a_id, a_copy, b_id, b_copy, 1, 1, 1, out_dtype, "cpu", 0) < 0:
        rows = "; ".join(
            f"{r['kernel']}: {', '.join(r['formats'])}"
            for r in _core.kernel_table()
            if r["op"] == "gemm" and r["backend"] == "cpu"
        )
        raise UnsupportedError(f"gemm: no CPU kernel for {a[0]} x {b[0]} [{m}, {n}, {k}]; nearest: {rows}")
    epilogue = params["has_bias"] or float.fromhex(params["beta"]) != 0.0
    last = len(ctx.avals_in) - 1
    in_place = params["has_c"] and batch.axes[last] == (1 << batch.rank) - 1
    return ({last: 0} if in_place else {}), _workspace("gemm", platform, (*sizes, epilogue), _core.gemm_workspace_bytes)


gemm_p = _primitive("gemm", _gemm_abstract, _gemm_attributes, _gemm_finish)


def gemm(
    a: tuple[Array, Array],
    b: tuple[Array, Array],
    bias: Array | None,
    c: Array | None,
    *,
    a_copy: tuple[str, bool],
    b_copy: tuple[str, bool],
    alpha: float,
    beta: float,
    out_dtype: str,
    fast_accum: bool,
) -> Array:
    """alpha * op(a) @ op(b) + bias + beta * c, [M, N]; in place of `c` where XLA may give its memory away.

    **Arguments:** `a`, `b`: (data, scale_inv); `a_copy`, `b_copy`: (format name, columnwise) of each.
    """
    operands = [*a, *b, *(x for x in (bias, c) if x is not None)]
    return gemm_p.bind(
        *operands,
        batch=Batch.none(len(operands)),
        a=a_copy,
        b=b_copy,
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
    shape = _own_shape(dy, batch.axes[0])
    check_high_precision("bias_grad", "dy", dy.dtype, shape)
    check_high_precision("bias_grad", "the result", dtype_of(dtype), ())
    return [_result((dy,), (*_batch_shape((dy,), batch), shapes.rows_cols(shape)[1]), dtype)]


def _bias_grad_finish(ctx: Any, platform: str, batch: Batch, dtype: str) -> Any:
    sizes = shapes.rows_cols(_own_shape(ctx.avals_in[0], batch.axes[0]))
    return {}, _workspace("bias_grad", platform, sizes, _core.bias_grad_workspace_bytes)


bias_grad_p = _primitive(
    "bias_grad", _bias_grad_abstract, lambda avals, batch, dtype: ffi.bias_grad_attributes(batch), _bias_grad_finish
)


def bias_grad(dy: Array, dtype: str) -> Array:
    """Sum of `dy` [..., N] over its leading dimensions, [N] in `dtype`."""
    return bias_grad_p.bind(dy, batch=Batch.none(1), dtype=dtype)[0]
