"""Products and the bias gradient as JAX primitives."""

from __future__ import annotations

import functools
from typing import Any

import jax

from diptych.common.errors import UnsupportedError
from diptych.common.formats import format_by_name
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops import gemm as rules
from diptych.common.ops import shapes
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import (
    Aval,
    Copy,
    check_buffer,
    check_result,
    check_shape,
    copy_length,
    copy_operands,
    enforce,
    operand,
    own_shape,
)
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.register import batch_shape, in_place, primitive, result, workspace_bytes

Array = jax.Array


def gemm_sizes(avals: Any, batch: Batch, a: tuple[str, bool], b: tuple[str, bool]) -> shapes.GemmShape:
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
    options: GemmOptions,
) -> Any:
    at = copy_length(a[0])
    end = at + copy_length(b[0])
    copies = copy_operands(avals[:at], batch.axes[:at], *a), copy_operands(avals[at:end], batch.axes[at:end], *b)
    bias = operand("bias", avals[end], batch.axes[end]) if has_bias else None
    size = rules.gemm(*copies, bias, out_dtype, options)
    enforce(size.constraints)
    if bias is not None:  # its gradient has its shape
        check_shape("gemm", "bias", avals[end], batch.axes[end], (size.n,))
    if has_c:
        check_buffer("gemm", "c", avals[-1], batch.axes[-1], out_dtype, (size.m, size.n))
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
    options: GemmOptions,
) -> Any:
    rows = ((format_by_name(fmt), columnwise) for fmt, columnwise in (a, b))
    a_copy, b_copy = ((row.id, columnwise, row.two_level) for row, columnwise in rows)
    factors = float.fromhex(alpha), float.fromhex(beta)
    return ffi.gemm_attributes(batch, a_copy, b_copy, has_bias, has_c, *factors, options)


def _gemm_finish(ctx: Any, platform: str, batch: Batch, **params: Any) -> Any:
    a, b, out_dtype = params["a"], params["b"], params["out_dtype"]
    m, n, k = sizes = gemm_sizes(ctx.avals_in, batch, a, b)[:3]
    (a_id, a_copy), (b_id, b_copy) = ((format_by_name(fmt).id, columnwise) for fmt, columnwise in (a, b))
    # The CPU's rows depend on formats only, so they can be checked here; a GPU's are chosen when the call runs.
    if platform == "cpu" and _core.gemm_row(a_id, a_copy, b_id, b_copy, 16, 16, 16, out_dtype, "cpu", 0) < 0:
        rows = "; ".join(
            f"{r['kernel']}: {', '.join(r['formats'])}"
            for r in _core.kernel_table()
            if r["op"] == "gemm" and r["backend"] == "cpu"
        )
        raise UnsupportedError(f"gemm: no CPU kernel for {a[0]} x {b[0]} [{m}, {n}, {k}]; nearest: {rows}")
    epilogue = params["has_bias"] or float.fromhex(params["beta"]) != 0.0
    aliases = in_place(batch, {len(ctx.avals_in) - 1: 0}) if params["has_c"] else {}
    rule = functools.partial(_core.gemm_workspace_bytes, a_id, b_id)
    return aliases, workspace_bytes("gemm", platform, (*sizes, epilogue), rule)


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
    options: GemmOptions,
) -> Array:
    """alpha * op(a) @ op(b) + bias + beta * c, [M, N]; in the memory of `c` if XLA may reuse it."""
    operands = [*a.operands("gemm: a"), *b.operands("gemm: b"), *(x for x in (bias, c) if x is not None)]
    return gemm_p.bind(
        *operands,
        batch=Batch.none(len(operands)),
        a=(a.format, a.columnwise),
        b=(b.format, b.columnwise),
        has_bias=bias is not None,
        has_c=c is not None,
        # As hexadecimal text, because 0.0 and -0.0 are equal keys of a compilation cache but different factors.
        alpha=alpha.hex(),
        beta=beta.hex(),
        out_dtype=out_dtype,
        options=options,
    )[0]


def _bias_grad_abstract(dy: Aval, *, batch: Batch, dtype: str) -> Any:
    rules.bias_grad(operand("dy", dy, batch.axes[0]))
    check_result("bias_grad", dtype)
    return [result((dy,), (*batch_shape((dy,), batch), own_shape(dy, batch.axes[0])[-1]), dtype)]


def _bias_grad_finish(ctx: Any, platform: str, batch: Batch, dtype: str) -> Any:
    sizes = shapes.rows_cols(own_shape(ctx.avals_in[0], batch.axes[0]))
    return {}, workspace_bytes("bias_grad", platform, sizes, _core.bias_grad_workspace_bytes)


bias_grad_p = primitive(
    "bias_grad", _bias_grad_abstract, lambda avals, batch, dtype: ffi.bias_grad_attributes(batch), _bias_grad_finish
)


def bias_grad(dy: Array, dtype: str) -> Array:
    """Sum of `dy` [..., N] over its leading dimensions, [N] in `dtype`."""
    return bias_grad_p.bind(dy, batch=Batch.none(1), dtype=dtype)[0]
