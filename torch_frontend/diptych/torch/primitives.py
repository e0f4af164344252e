"""The ops on raw buffers: schema, contract, kernel call and fake implementation of each, under `torch.ops.diptych`.

Invariants:

- Ops are pure, except `gemm_into`, which declares what it mutates. None has a derivative: a tensor that requires grad
  is refused while grad mode is on, so that no gradient is silently missing. `linear.py` composes them into one.
- Shapes come from `diptych.common.shapes`, in the real and in the fake implementation alike.
- A plain eager call goes straight to the implementation (`_direct`); everything else (tracing, fake and meta tensors,
  modes, subclasses) goes through the dispatcher to the same one.
- Operands are made contiguous here; the core refuses others. Outputs always are.

A quantized operand travels as `Copy`: (data, scale_inv, format id, columnwise).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from diptych.common import shapes
from diptych.common.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from diptych.common.formats import FORMATS, FormatRow
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.torch import opaque

Copy = tuple[Tensor, Tensor, int, bool]

_interpreter_stack = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
HIGH_PRECISION = frozenset(getattr(torch, name) for name in shapes.HIGH_PRECISION)

# Where each buffer of `quantize` stands in the core's argument list.
_SLOTS = {
    "rowwise_data": 0,
    "rowwise_scale_inv": 1,
    "columnwise_data": 2,
    "columnwise_scale_inv": 3,
    "amax": 4,
}


# --- contracts, checked before anything runs and at trace time too ---------------------------------------------------


def describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"


def require_tensor(op: str, arg: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise DTypeError(f"{op}: {arg} must be a torch.Tensor, got {type(t).__name__}")


def require_high_precision(op: str, arg: str, t: Tensor) -> None:
    if t.dtype not in HIGH_PRECISION:
        raise DTypeError(f"{op}: {arg} must be float32, bfloat16 or float16, got {describe(t)}; cast it first")


def require_device(op: str, first: Tensor, t: Tensor | None, arg: str) -> None:
    if t is not None and t.device != first.device:
        raise DeviceError(f"{op}: {arg} is on {t.device}, the other operands on {first.device}; move one of them")


def require_quantizer(op: str, quantizer: Any) -> None:
    # While Dynamo traces, the op's schema checks this: torch 2.11 shows an opaque value's wrapper to isinstance.
    if not torch.compiler.is_compiling() and not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"{op}: quantizer must be a diptych.common.Quantizer, got {type(quantizer).__name__}; "
            "recipe.quantizer(QuantizerRole(...)) makes one"
        )


def _require_out_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in HIGH_PRECISION:
        raise DTypeError(f"{op}: the result can be float32, bfloat16 or float16, not {dtype}")


def _require_no_grad(op: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedError(
            f"{op} has no derivative, and an argument requires grad: "
            "use diptych.torch.Linear to train, or detach() it, or call under torch.no_grad()"
        )


def _format(op: str, format_id: int) -> FormatRow:
    if not 0 <= format_id < len(FORMATS):
        raise ValueError(f"{op}: unknown format id {format_id}; known: 0 to {len(FORMATS) - 1}")
    return FORMATS[format_id]


def _static(*sizes: Any) -> bool:
    return all(type(s) is int for s in sizes)


def _enforce(constraints: tuple[shapes.Constraint, ...]) -> None:
    for c in constraints:
        if _static(c.lhs, c.rhs):
            shapes.check((c,))
        else:
            torch._check(c.lhs == c.rhs, lambda c=c: c.message)


def _check_copy(op: str, arg: str, data: Tensor, scale_inv: Tensor, format_id: int, columnwise: bool) -> FormatRow:
    fmt = _format(op, format_id)
    for part, t, want in (("data", data, fmt.element), ("scale_inv", scale_inv, fmt.scale)):
        if t.dtype != getattr(torch, want):
            raise DTypeError(f"{op} ({fmt.name}): {arg} {part} must be {want}, got {describe(t)}")
    require_device(op, data, scale_inv, f"{arg} scale_inv")
    rows, cols = shapes.rows_cols(data.shape)
    m, k = (cols, rows) if columnwise and fmt.columnwise == "transposed" else (rows, cols)
    want_shape, got = shapes.scale_shape(fmt, columnwise, m, k), tuple(scale_inv.shape)
    message = f"{op} ({fmt.name}): scales of {arg} {describe(data)} must be {list(want_shape)}, got {list(got)}"
    if len(got) != len(want_shape):
        raise ShapeError(message)
    _enforce(tuple(shapes.Constraint(g, w, message) for g, w in zip(got, want_shape, strict=True)))
    return fmt


def _check_gemm(a: Copy, b: Copy, bias: Tensor | None, alpha: float, beta: float, out: torch.dtype, fast: bool):
    fmt_a, fmt_b = _check_copy("gemm", "a", *a), _check_copy("gemm", "b", *b)
    pair = f"{fmt_a.name} x {fmt_b.name}"
    m, n, k, constraints = shapes.gemm_shape(fmt_a, a[3], a[0].shape, fmt_b, b[3], b[0].shape)
    _enforce(constraints)
    require_device("gemm", a[0], b[0], "b")
    require_device("gemm", a[0], bias, "bias")
    _require_out_dtype("gemm", out)
    if bias is not None:
        require_high_precision("gemm", "bias", bias)
        message = f"gemm ({pair}): bias must hold {n} elements, got {describe(bias)}"
        _enforce((shapes.Constraint(math.prod(bias.shape), n, message),))
    if not (math.isfinite(alpha) and math.isfinite(beta)):
        raise ValueError(f"gemm: alpha and beta must be finite, got {alpha} and {beta}")
    if fast and not (fmt_a.per_tensor and fmt_b.per_tensor):
        raise ValueError(f"gemm: fast_accum exists for per-tensor FP8 only, got {pair}")
    kind = a[0].device.type
    if kind in ("cpu", "cuda") and _static(m, n, k):
        _require_kernel(pair, a, b, (m, n, k), out, a[0].device)
    return m, n


def _require_kernel(pair: str, a: Copy, b: Copy, mnk: tuple[int, int, int], out: torch.dtype, device) -> None:
    """Asks the kernel table at trace time. A GPU that is only pretended (fake tensors) has none to ask."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return
    dtype = str(out).removeprefix("torch.")
    if _core.gemm_row(a[2], a[3], b[2], b[3], *mnk, dtype, device.type, device.index or 0) < 0:
        near = ", ".join(f"{r['kernel']} (sm_{r['min_arch']}+)" for r in _core.kernel_table() if r["op"] == "gemm")
        raise UnsupportedError(f"gemm: no kernel on {device} for {pair}, {list(mnk)}; nearest: {near}")


# --- implementations -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], quantizer: Quantizer, device: torch.device
) -> tuple[tuple[int, tuple[int, ...], Callable[..., Tensor]], ...]:
    """(slot, shape, allocator) of each buffer. An empty tensor's new_empty is the fastest allocator from Python."""
    return tuple(
        (_SLOTS[b.name], b.shape, torch.empty(0, dtype=getattr(torch, b.dtype), device=device).new_empty)
        for b in shapes.quantize_buffers(shape, quantizer)
    )


def _workspace(nbytes: int, device: torch.device) -> Tensor | None:
    return torch.empty(nbytes, dtype=torch.uint8, device=device) if nbytes and device.type == "cuda" else None


def _check_quantize(x: Tensor, quantizer: Quantizer, amax: Tensor | None) -> None:
    require_high_precision("quantize", "x", x)
    if amax is not None:
        fmt = quantizer.format
        if not fmt.per_tensor:
            raise ValueError(f"quantize: amax is for per-tensor formats; {fmt.name} takes one per block")
        if amax.dtype != torch.float32:
            raise DTypeError(f"quantize ({fmt.name}): amax must be float32, got {describe(amax)}")
        if math.prod(amax.shape) != 1:
            raise ShapeError(f"quantize ({fmt.name}): amax must hold one element, got {describe(amax)}")
        require_device("quantize", x, amax, "amax")


def _quantize(x: Tensor, quantizer: Quantizer, amax: Tensor | None) -> list[Tensor]:
    _check_quantize(x, quantizer, amax)
    slots: list[Tensor | None] = [None, None, None, None, None]
    out = []
    for slot, shape, new in _layout(x.shape, quantizer, x.device):
        slots[slot] = t = new(*shape)
        out.append(t)
    if amax is not None:
        out[-1].copy_(amax.reshape(1))
    format_id, pow2, eps = quantizer.spec
    rowwise, rowwise_scale, columnwise, columnwise_scale, amax_slot = slots
    _core.quantize(
        x.contiguous(), format_id, pow2, eps, amax_slot, amax is not None,
        rowwise, rowwise_scale, columnwise, columnwise_scale,
    )  # fmt: skip
    return out


def _quantize_fake(x: Tensor, quantizer: Quantizer, amax: Tensor | None) -> list[Tensor]:
    _check_quantize(x, quantizer, amax)
    buffers = shapes.quantize_buffers(tuple(x.shape), quantizer)
    return [x.new_empty(b.shape, dtype=getattr(torch, b.dtype)) for b in buffers]


def _amax(x: Tensor) -> Tensor:
    require_high_precision("amax", "x", x)
    out = torch.empty(1, dtype=torch.float32, device=x.device)
    _core.amax(x.contiguous(), out)
    return out


def _amax_fake(x: Tensor) -> Tensor:
    require_high_precision("amax", "x", x)
    return x.new_empty(1, dtype=torch.float32)


def _dequantize_shape(data: Tensor, format_id: int, columnwise: bool) -> tuple[Any, ...]:
    fmt = _format("dequantize", format_id)
    if columnwise and fmt.columnwise == "transposed":
        k, m = shapes.rows_cols(data.shape)
        return (m, k)
    return tuple(data.shape)


def _dequantize(data: Tensor, scale_inv: Tensor, format: int, columnwise: bool, dtype: torch.dtype) -> Tensor:
    _require_out_dtype("dequantize", dtype)
    out = torch.empty(_dequantize_shape(data, format, columnwise), dtype=dtype, device=data.device)
    _core.dequantize(data.contiguous(), scale_inv.contiguous(), format, columnwise, out)
    return out


def _dequantize_fake(data: Tensor, scale_inv: Tensor, format: int, columnwise: bool, dtype: torch.dtype) -> Tensor:
    _require_out_dtype("dequantize", dtype)
    _check_copy("dequantize", "q", data, scale_inv, format, columnwise)
    return data.new_empty(_dequantize_shape(data, format, columnwise), dtype=dtype)


def _run_gemm(
    a: Copy,
    b: Copy,
    d: Tensor,
    bias: Tensor | None,
    mnk: tuple[int, int, int],
    alpha: float,
    beta: float,
    fast_accum: bool,
) -> None:
    epilogue = bias is not None or beta != 0.0
    workspace = _workspace(_core.gemm_workspace_bytes(*mnk, epilogue), d.device) if d.is_cuda else None
    if bias is not None:
        bias = bias.contiguous()
    c = d if beta != 0.0 else None
    data, scale, format_id, side = a
    data_b, scale_b, format_b, side_b = b
    _core.gemm(
        data.contiguous(), scale.contiguous(), format_id, side,
        data_b.contiguous(), scale_b.contiguous(), format_b, side_b,
        d, c, bias, workspace, alpha, beta, fast_accum,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _gemm_mnk(a_format: int, a_side: bool, a: tuple[int, ...], b_format: int, b_side: bool, b: tuple[int, ...]):
    shape = shapes.gemm_shape(_format("gemm", a_format), a_side, a, _format("gemm", b_format), b_side, b)
    shapes.check(shape.constraints)
    return shape.m, shape.n, shape.k


def _gemm(
    a_data: Tensor, a_scale_inv: Tensor, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, out_dtype: torch.dtype, fast_accum: bool,
) -> Tensor:  # fmt: skip
    _require_out_dtype("gemm", out_dtype)
    mnk = _gemm_mnk(a_format, a_columnwise, a_data.shape, b_format, b_columnwise, b_data.shape)
    d = torch.empty(mnk[0], mnk[1], dtype=out_dtype, device=a_data.device)
    a, b = (a_data, a_scale_inv, a_format, a_columnwise), (b_data, b_scale_inv, b_format, b_columnwise)
    _run_gemm(a, b, d, bias, mnk, alpha, 0.0, fast_accum)
    return d


def _gemm_fake(
    a_data: Tensor, a_scale_inv: Tensor, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, out_dtype: torch.dtype, fast_accum: bool,
) -> Tensor:  # fmt: skip
    a, b = (a_data, a_scale_inv, a_format, a_columnwise), (b_data, b_scale_inv, b_format, b_columnwise)
    m, n = _check_gemm(a, b, bias, alpha, 0.0, out_dtype, fast_accum)
    return a_data.new_empty((m, n), dtype=out_dtype)


def _check_acc(acc: Tensor, m: Any, n: Any) -> None:
    require_high_precision("gemm_into", "acc", acc)
    rows, cols = shapes.rows_cols(acc.shape)
    message = f"gemm_into: acc must be [{m}, {n}], got {describe(acc)}"
    _enforce((shapes.Constraint(rows, m, message), shapes.Constraint(cols, n, message)))
    if not acc.is_contiguous():
        raise ShapeError(f"gemm_into: acc {describe(acc)} is not contiguous, and it is written in place")


def _gemm_into(
    acc: Tensor,
    a_data: Tensor, a_scale_inv: Tensor, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, beta: float, fast_accum: bool,
) -> None:  # fmt: skip
    mnk = _gemm_mnk(a_format, a_columnwise, a_data.shape, b_format, b_columnwise, b_data.shape)
    _check_acc(acc, mnk[0], mnk[1])
    a, b = (a_data, a_scale_inv, a_format, a_columnwise), (b_data, b_scale_inv, b_format, b_columnwise)
    _run_gemm(a, b, acc, bias, mnk, alpha, beta, fast_accum)
    if not acc.is_inference():
        torch.autograd.graph.increment_version(acc)  # so that autograd notices if acc was saved for a backward


def _gemm_into_fake(
    acc: Tensor,
    a_data: Tensor, a_scale_inv: Tensor, a_format: int, a_columnwise: bool,
    b_data: Tensor, b_scale_inv: Tensor, b_format: int, b_columnwise: bool,
    bias: Tensor | None, alpha: float, beta: float, fast_accum: bool,
) -> None:  # fmt: skip
    a, b = (a_data, a_scale_inv, a_format, a_columnwise), (b_data, b_scale_inv, b_format, b_columnwise)
    require_high_precision("gemm_into", "acc", acc)
    m, n = _check_gemm(a, b, bias, alpha, beta, acc.dtype, fast_accum)
    require_device("gemm_into", a_data, acc, "acc")
    _check_acc(acc, m, n)


def _bias_grad(dy: Tensor, dtype: torch.dtype) -> Tensor:
    require_high_precision("bias_grad", "dy", dy)
    _require_out_dtype("bias_grad", dtype)
    m, n = shapes.rows_cols(dy.shape)
    out = torch.empty(n, dtype=dtype, device=dy.device)
    workspace = _workspace(_core.bias_grad_workspace_bytes(m, n), dy.device) if dy.is_cuda else None
    _core.bias_grad(dy.contiguous(), out, workspace)
    return out


def _bias_grad_fake(dy: Tensor, dtype: torch.dtype) -> Tensor:
    require_high_precision("bias_grad", "dy", dy)
    _require_out_dtype("bias_grad", dtype)
    return dy.new_empty(shapes.rows_cols(dy.shape)[1], dtype=dtype)


# --- registration ----------------------------------------------------------------------------------------------------

_COPIES = ", ".join(f"Tensor {s}_data, Tensor {s}_scale_inv, int {s}_format, bool {s}_columnwise" for s in "ab")
_LIBRARY = torch.library.Library("diptych", "DEF")


def _define(name: str, signature: str, real: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    for backend in ("CPU", "CUDA"):
        _LIBRARY.impl(name, real, backend)
    torch.library.register_fake(f"diptych::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.diptych, name).default

    def below_autograd(*args: Any, **kwargs: Any) -> Any:
        _require_no_grad(f"diptych::{name}", *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)))
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    _LIBRARY.impl(name, below_autograd, "Autograd")
    return overload


_amax_op = _define("amax", "(Tensor x) -> Tensor", _amax, _amax_fake)
_dequantize_op = _define(
    "dequantize",
    "(Tensor data, Tensor scale_inv, int format, bool columnwise, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
_gemm_op = _define(
    "gemm",
    f"({_COPIES}, Tensor? bias, float alpha, ScalarType out_dtype, bool fast_accum) -> Tensor",
    _gemm,
    _gemm_fake,
)
_gemm_into_op = _define(
    "gemm_into",
    f"(Tensor(a!) acc, {_COPIES}, Tensor? bias, float alpha, float beta, bool fast_accum) -> ()",
    _gemm_into,
    _gemm_into_fake,
)
_bias_grad_op = _define("bias_grad", "(Tensor dy, ScalarType dtype) -> Tensor", _bias_grad, _bias_grad_fake)
if opaque.AVAILABLE:
    _quantize_op: Callable[..., list[Tensor]] = _define(
        "quantize",
        f"(Tensor x, {opaque.schema_type(Quantizer)} quantizer, Tensor? amax) -> Tensor[]",
        _quantize,
        _quantize_fake,
    )
else:  # pragma: no cover - no supported torch
    _quantize_op = torch._disable_dynamo(_quantize)  # type: ignore[attr-defined]


# --- the ops as the rest of this package calls them ------------------------------------------------------------------


def _direct(*tensors: Tensor | None) -> bool:
    """Whether nothing but the kernel would see this call: plain dense tensors, and nothing traces or interposes."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or _interpreter_stack() is not None:
        return False
    for t in tensors:
        if t is None:
            continue
        if type(t) is not Tensor and type(t) is not Parameter:
            return False
        if t.is_meta or t.is_neg() or t.layout is not torch.strided:
            return False
    return not torch._C._is_tracing()


def amax(x: Tensor) -> Tensor:
    """Largest non-NaN magnitude of x as float32 [1]; 0 where there is none."""
    if _direct(x):
        _require_no_grad("diptych::amax", x)
        return _amax(x)
    return _amax_op(x)


def quantize(x: Tensor, quantizer: Quantizer, amax: Tensor | None = None) -> list[Tensor]:
    """The buffers of `shapes.quantize_buffers`, in its order, for x [..., K]."""
    if _direct(x, amax):
        _require_no_grad("diptych::quantize", x, amax)
        return _quantize(x, quantizer, amax)
    return _quantize_op(x, quantizer, amax)


def dequantize(q: Copy, dtype: torch.dtype) -> Tensor:
    """The values of one copy: data's shape, or [M, K] where data is the transposed [K, M]."""
    if _direct(q[0], q[1]):
        return _dequantize(*q, dtype)
    return _dequantize_op(*q, dtype)


def gemm(a: Copy, b: Copy, bias: Tensor | None, alpha: float, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """alpha * op(a) @ op(b) + bias, [M, N] in out_dtype."""
    if _direct(a[0], a[1], b[0], b[1], bias):
        _require_no_grad("diptych::gemm", bias)
        return _gemm(*a, *b, bias, alpha, out_dtype, fast_accum)
    return _gemm_op(*a, *b, bias, alpha, out_dtype, fast_accum)


def gemm_into(acc: Tensor, a: Copy, b: Copy, bias: Tensor | None, alpha: float, beta: float, fast_accum: bool) -> None:
    """acc [M, N] = alpha * op(a) @ op(b) + bias + beta * acc, in place."""
    if _direct(acc, a[0], a[1], b[0], b[1], bias):
        _require_no_grad("diptych::gemm_into", acc, bias)
        _gemm_into(acc, *a, *b, bias, alpha, beta, fast_accum)
    else:
        _gemm_into_op(acc, *a, *b, bias, alpha, beta, fast_accum)


def bias_grad(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of dy [..., N] over its leading dimensions, [N] in dtype."""
    if _direct(dy):
        _require_no_grad("diptych::bias_grad", dy)
        return _bias_grad(dy, dtype)
    return _bias_grad_op(dy, dtype)
