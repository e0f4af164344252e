"""The checks of ops' operands. Invariants:

- Checks read no memory, and enforce symbolic sizes with `torch._check`: they hold while tracing as they do eagerly.
- Ops are pure but for what their schema declares. None has a derivative: a tensor that requires grad is refused while
  grad mode is on, so that no gradient is silently missing.

One copy of a quantized operand travels as `Copy`: (data, scale_inv, amax or None, format id, columnwise).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from diptych.common.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
from diptych.common.formats import FORMATS, FormatRow
from diptych.common.gemm_options import GemmOptions, check_gemm_options
from diptych.common.ops import shapes
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, STOCHASTIC, Quantizer
from diptych.core import _core

Copy = tuple[Tensor, Tensor, Tensor | None, int, bool]

# A column of the format table by id. Dynamo cannot hold a quantizer's `format` without a source, but its id it can.
TWO_LEVEL = tuple(row.two_level for row in FORMATS)
HIGH_PRECISION = frozenset(getattr(torch, name) for name in shapes.HIGH_PRECISION)


# --- checks of one argument ------------------------------------------------------------------------------------------


def describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"


def require_tensor(op: str, arg: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{op}: {arg} must be a torch.Tensor, got {type(t).__name__}")


def require_high_precision(op: str, arg: str, t: Tensor) -> None:
    if t.dtype not in HIGH_PRECISION:
        raise DTypeError(f"{op}: {arg} must be float32, bfloat16 or float16, got {describe(t)}; cast it first")


def require_device(op: str, first: Tensor, t: Tensor | None, arg: str) -> None:
    if t is not None and t.device != first.device:
        raise DeviceError(f"{op}: {arg} is on {t.device}, the other operands on {first.device}; move one of them")


def refuse_second_derivative(name: str, remedy: str = "") -> None:
    """Called in a backward. **Raises** NotImplementedError where its own derivative is recorded."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError(f"{name} has no second derivative (backward ran with create_graph=True){remedy}")


def require_quantizer(op: str, quantizer: Any) -> None:
    # While Dynamo traces, torch 2.11 shows an opaque value's wrapper to isinstance.
    compiling = torch.compiler.is_compiling()
    if not (hasattr(quantizer, "implementation") if compiling else isinstance(quantizer, Quantizer)):
        raise ArgumentError(
            f"{op}: quantizer must be a diptych.common.Quantizer, got {type(quantizer).__name__}; "
            "recipe.quantizer(QuantizerRole(...)) makes one"
        )


def require_out_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in HIGH_PRECISION:
        raise DTypeError(f"{op}: the result can be float32, bfloat16 or float16, not {dtype}")


def require_no_grad(op: str, *tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for t in tensors:
        if t is not None and t.requires_grad:
            raise UnsupportedError(
                f"{op} has no derivative, and an argument requires grad: "
                "use diptych.torch.Linear to train, or detach() it, or call under torch.no_grad()"
            )


def require_no_tangent(op: str, *tensors: Any) -> None:
    """**Raises** NotImplementedError where an argument carries the tangent of forward-mode differentiation: an op would
    drop it, and a derivative of 0 would follow."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for t in tensors:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise UnsupportedError(
                f"{op} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad), and an argument has "
                "a tangent: differentiate in reverse mode, or pass the primal alone"
            )


def format_row(op: str, format_id: int) -> FormatRow:
    if not 0 <= format_id < len(FORMATS):
        raise ValueError(f"{op}: unknown format id {format_id}; known: 0 to {len(FORMATS) - 1}")
    return FORMATS[format_id]


def _static(*sizes: Any) -> bool:
    return all(type(s) is int for s in sizes)


def enforce(constraints: tuple[shapes.Constraint, ...]) -> None:
    """`shapes.check` for sizes that may be symbolic."""
    for c in constraints:
        if _static(c.lhs, c.rhs):
            shapes.check((c,))
        else:
            torch._check(c.lhs == c.rhs, lambda c=c: c.message)


def require_size(found: Any, wanted: Any, message: Callable[[], str]) -> None:
    """Enforces a size; makes no message in vain, since this is on the way of each eager call."""
    if not _static(found, wanted) or found != wanted:
        enforce((shapes.Constraint(found, wanted, message()),))


def _require_numel(op: str, arg: str, t: Tensor, numel: Any) -> None:
    def message() -> str:
        count = "one element" if _static(numel) and numel == 1 else f"{numel} elements"
        return f"{op}: {arg} must hold {count}, got {describe(t)}"

    require_size(t.numel(), numel, message)


def _require_floats(op: str, arg: str, t: Tensor, first: Tensor, numel: Any) -> None:
    """A float32 tensor of `numel` elements beside `first`."""
    if t.dtype != torch.float32:
        raise DTypeError(f"{op}: {arg} must be float32, got {describe(t)}")
    require_device(op, first, t, arg)
    _require_numel(op, arg, t, numel)


def _require_written(op: str, arg: str, t: Tensor) -> None:
    if not t.is_contiguous():
        raise ShapeError(f"{op}: {arg} {describe(t)} is not contiguous, and it is written in place")


# --- checks of one op's arguments ------------------------------------------------------------------------------------


_Encoded = tuple[Any, ...] | None  # shape of what an op encodes instead of x


def check_amax(x: Tensor, flags: int, columnwise: bool, encoded: _Encoded = None) -> None:
    require_high_precision("amax", "x", x)
    if flags & ~(ROW_AMAX | RHT | RHT_SIGNS):
        raise ValueError(f"amax: flags {flags} hold an option that it does not know")
    if flags & RHT_SIGNS and not flags & RHT:
        raise ValueError("amax: random signs belong to the Hadamard transform, which was not asked for")
    if flags & RHT:
        _check_rotation("amax", x, encoded)
        if not columnwise:
            raise ValueError("amax: the Hadamard transform is for the columnwise amax, which was not asked for")


def _check_rotation(op: str, x: Tensor, encoded: _Encoded) -> None:
    """What the Hadamard transform of 16 consecutive rows asks of its input."""
    if x.dtype != torch.bfloat16:
        raise DTypeError(f"{op}: the Hadamard transform takes bfloat16 alone, got {describe(x)}")
    m, _ = shapes.rows_cols(x.shape if encoded is None else encoded)
    require_size(
        m // 16 * 16,
        m,
        lambda: f"{op}: the Hadamard transform takes rows in multiples of 16, got {m} for {describe(x)}",
    )


def check_quantize(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None,
    columnwise_amax: Tensor | None,
    scale: Tensor | None,
    rng: Tensor | None,
    *,
    encoded: _Encoded = None,
) -> None:
    """All but what the shape of x must satisfy, which `shapes.quantize_constraints` says."""
    require_high_precision("quantize", "x", x)
    flags = quantizer.spec.flags
    if flags & RHT:
        _check_rotation("quantize", x, encoded)
    if scale is None and quantizer.needs_scale:
        raise ArgumentError(f"quantize: {type(quantizer).__name__} takes its scale from the caller; pass scale=")
    if rng is None and flags & STOCHASTIC:
        raise ArgumentError(f"quantize: {type(quantizer).__name__} rounds stochastically; pass rng=, see rng_state()")
    if rng is not None:
        if not flags & STOCHASTIC:
            raise ValueError("quantize: rng is for stochastic rounding, which was not asked for")
        if rng.dtype != torch.int32:
            raise DTypeError(f"quantize: rng must be int32, got {describe(rng)}")
        require_device("quantize", x, rng, "rng")
        _require_numel("quantize", "rng", rng, 4)
    if scale is not None:
        _check_scale(x, quantizer, scale)
    if amax is not None or columnwise_amax is not None:
        _check_given_amaxes(x, quantizer, {"amax": amax, "columnwise_amax": columnwise_amax}, scale, encoded)


def _check_scale(x: Tensor, quantizer: Quantizer, scale: Tensor) -> None:
    fmt = quantizer.format
    if not fmt.per_tensor:
        raise ValueError(f"quantize: scale is for per-tensor formats, not {fmt.name}")
    if quantizer.spec.flags or quantizer.spec.eps:
        raise ValueError(f"quantize: scale was given; the options of {quantizer} do not apply")
    _require_floats(f"quantize ({fmt.name})", "scale", scale, x, 1)


def _check_given_amaxes(
    x: Tensor, quantizer: Quantizer, given: dict[str, Tensor | None], scale: Tensor | None, encoded: _Encoded
) -> None:
    fmt = quantizer.format
    if scale is not None:
        raise ValueError("quantize: scale and amax were both given; the scale alone decides")
    if not (fmt.per_tensor or fmt.two_level):
        raise ValueError(f"quantize: amax is for per-tensor and two-level formats; {fmt.name} takes one per block")
    shape = x.shape if encoded is None else encoded
    wanted = {b.name: b.shape[0] for b in shapes.quantize_buffers(shape, quantizer) if b.name in given}
    for name, t in given.items():
        if t is None and name in wanted:
            raise ValueError(
                f"quantize ({fmt.name}): both copies are wanted, and {name} was not given beside the other"
            )
        if t is not None and name not in wanted:
            raise ValueError(f"quantize ({fmt.name}): {name} is not read by {quantizer}")
        if t is not None:
            _require_floats(f"quantize ({fmt.name})", name, t, x, wanted[name])


def check_delayed(x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor, encoded: _Encoded = None) -> None:
    check_quantize(x, quantizer, None, None, scale, None, encoded=encoded)
    op = f"quantize_delayed ({quantizer.format.name})"
    if history.dtype != torch.float32:
        raise DTypeError(f"{op}: history must be float32, got {describe(history)}")
    require_device(op, x, history, "history")
    if history.dim() != 1 or (_static(history.shape[0]) and history.shape[0] < 1):
        raise ShapeError(f"{op}: history must be [L] with at least one entry, got {describe(history)}")


def check_scale_update(
    history: Tensor,
    scale: Tensor,
    reduced: Tensor | None,
    amax: Tensor | None,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> None:
    op = "scale_update"
    if history.dtype != torch.float32:
        raise DTypeError(f"{op}: history must be float32, got {describe(history)}")
    if history.dim() == 0 or (_static(history.shape[-1]) and history.shape[-1] < 1):
        raise ShapeError(f"{op}: history must be [n, L] or [L] with L >= 1, got {describe(history)}")
    n, _ = shapes.rows_cols(history.shape)
    for arg, t in (("scale", scale), ("reduced", reduced), ("amax", amax)):
        if t is not None:
            _require_floats(op, arg, t, history, n)
    _require_written(op, "history", history)
    _require_written(op, "scale", scale)
    if not (math.isfinite(fp8_max) and fp8_max > 0):
        raise ValueError(f"{op}: fp8_max must be finite and > 0, got {fp8_max}")
    if not -126 <= margin <= 126:
        raise ValueError(f"{op}: margin must lie in -126..126, got {margin}")
    if most_recent and amax is not None:
        raise ValueError(f"{op}: amax was given; most_recent does not apply")


def check_copy(op: str, arg: str, copy: Copy) -> FormatRow:
    data, scale_inv, _, format_id, columnwise = copy
    fmt = format_row(op, format_id)
    for part, t, want in (("data", data, fmt.data), ("scale_inv", scale_inv, fmt.scale)):
        if t.dtype != getattr(torch, want):
            raise DTypeError(f"{op} ({fmt.name}): {arg} {part} must be {want}, got {describe(t)}")
    require_device(op, data, scale_inv, f"{arg} scale_inv")
    m, k = shapes.copy_extents(fmt, columnwise, data.shape)
    want_shape, got = shapes.scale_shape(fmt, columnwise, m, k), tuple(scale_inv.shape)
    message = f"{op} ({fmt.name}): scales of {arg} {describe(data)} must be {list(want_shape)}, got {list(got)}"
    if len(got) != len(want_shape):
        raise ShapeError(message)
    enforce(tuple(shapes.Constraint(g, w, message) for g, w in zip(got, want_shape, strict=True)))
    _check_copy_amax(f"{op} ({fmt.name})", arg, copy, fmt, m)
    return fmt


def _check_copy_amax(op: str, arg: str, copy: Copy, fmt: FormatRow, rows: Any) -> None:
    amax = copy[2]
    if not fmt.two_level:
        if amax is not None:
            raise ValueError(f"{op}: {arg} amax is not read by this format")
        return
    if amax is None:
        raise ArgumentError(f"{op}: {arg} amax is missing")
    numel = math.prod(amax.shape)
    each_row = not copy[4] and not (_static(numel) and numel == 1)
    _require_floats(op, f"{arg} amax", amax, copy[0], rows if each_row else 1)


def check_gemm(
    a: Copy, b: Copy, bias: Tensor | None, alpha: float, beta: float, out: torch.dtype, options: GemmOptions
):
    fmt_a, fmt_b = check_copy("gemm", "a", a), check_copy("gemm", "b", b)
    pair = f"{fmt_a.name} x {fmt_b.name}"
    m, n, k, constraints = shapes.gemm_shape(fmt_a, a[4], a[0].shape, fmt_b, b[4], b[0].shape)
    enforce(constraints)
    require_device("gemm", a[0], b[0], "b")
    require_device("gemm", a[0], bias, "bias")
    require_out_dtype("gemm", out)
    if bias is not None:
        require_high_precision("gemm", "bias", bias)
        _require_numel(f"gemm ({pair})", "bias", bias, n)
    if not (math.isfinite(alpha) and math.isfinite(beta)):
        raise ValueError(f"gemm: alpha and beta must be finite, got {alpha} and {beta}")
    check_gemm_options("gemm", options, fmt_a, fmt_b)
    kind = a[0].device.type
    if kind in ("cpu", "cuda") and _static(m, n, k):
        _require_kernel(pair, a, b, (m, n, k), out, a[0].device)
    return m, n


def _require_kernel(pair: str, a: Copy, b: Copy, mnk: tuple[int, int, int], out: torch.dtype, device) -> None:
    """Asks the kernel table at trace time. A GPU that is only pretended (fake tensors) has none to ask."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return
    dtype = str(out).removeprefix("torch.")
    if _core.gemm_row(a[3], a[4], b[3], b[4], *mnk, dtype, device.type, device.index or 0) < 0:
        near = ", ".join(f"{r['kernel']} (sm_{r['min_arch']}+)" for r in _core.kernel_table() if r["op"] == "gemm")
        raise UnsupportedError(f"gemm: no kernel on {device} for {pair}, {list(mnk)}; nearest: {near}")


def check_acc(acc: Tensor, m: Any, n: Any) -> None:
    require_high_precision("gemm_into", "acc", acc)
    rows, cols = shapes.rows_cols(acc.shape)
    for found, wanted in ((rows, m), (cols, n)):
        require_size(found, wanted, lambda: f"gemm_into: acc must be [{m}, {n}], got {describe(acc)}")
    _require_written("gemm_into", "acc", acc)


# --- registration ----------------------------------------------------------------------------------------------------


_TABLE = _core.fused_table()


NORM_IDS, ACTIVATION_IDS = _TABLE["norm"], _TABLE["activation"]


FROM_NORM, FROM_ACTIVATION, FROM_ACTIVATION_GRAD, FROM_ROWS = (
    _TABLE["source"][n] for n in ("norm", "activation", "activation_grad", "permuted")
)


LAYERNORM, RMSNORM = NORM_IDS["layernorm"], NORM_IDS["rmsnorm"]


def _check_vector(op: str, arg: str, t: Tensor | None, x: Tensor, numel: Any, *, statistic: bool = False) -> None:
    if t is None:
        return
    require_device(op, x, t, arg)
    if statistic and t.dtype != torch.float32:
        raise DTypeError(f"{op}: {arg} must be float32, got {describe(t)}")
    require_high_precision(op, arg, t)
    say = f"{op}: {arg} must hold {{}} elements for x {{}}, got {{}}"
    require_size(math.prod(t.shape), numel, lambda: say.format(numel, describe(x), describe(t)))


def check_norm(op: str, x: Tensor, which: int, **operands: Tensor | None) -> None:
    """gamma, beta [K] and mu, rsigma [M], against x; those that an op reads or writes."""
    require_high_precision(op, "x", x)
    m, k = shapes.rows_cols(x.shape)
    if which not in (LAYERNORM, RMSNORM):
        raise ValueError(f"{op}: unknown norm {which}")
    for arg, t in operands.items():
        statistic = arg in ("mu", "rsigma")
        if t is not None and which == RMSNORM and arg in ("mu", "beta"):
            raise ValueError(f"{op}: RMSNorm has no {arg}, and one was given")
        if t is None and (arg in ("gamma", "rsigma") or (arg == "mu" and which == LAYERNORM)):
            raise ArgumentError(f"{op}: {arg} is missing")
        _check_vector(op, arg, t, x, m if statistic else k, statistic=statistic)


def check_dy(op: str, dy: Tensor, x: Tensor, shape: tuple[Any, ...]) -> None:
    require_high_precision(op, "dy", dy)
    require_device(op, x, dy, "dy")
    message = f"{op}: dy must be {list(shape)} for x {describe(x)}, got {describe(dy)}"
    pairs = zip(shapes.rows_cols(dy.shape), shapes.rows_cols(shape), strict=True)
    enforce(tuple(shapes.Constraint(a, b, message) for a, b in pairs))


def halved(op: str, x: Tensor, gated: bool) -> tuple[Any, ...]:
    """Shape of an activation of x."""
    require_high_precision(op, "x", x)
    shape, constraints = shapes.activation_shape(op, tuple(x.shape), gated)
    enforce(constraints)
    return shape
