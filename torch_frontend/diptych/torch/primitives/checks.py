"""The checks of ops' operands. Invariants:

- Checks read no memory, and enforce symbolic sizes with `torch._check`: they hold while tracing as they do eagerly.
- Ops write to nothing but what their schema declares. None has a derivative: a tensor that requires grad is refused
  while grad mode is on, so that no gradient is silently missing.

One copy of a quantized operand is passed as a `Copy`: (data, scale_inv, amax or None, format id, columnwise).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from diptych.common.errors import ArgumentError, DeviceError, ShapeError, UnsupportedError
from diptych.common.formats import FORMATS, FormatRow
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops import activation, gemm, norm, quantize, scale_update, shapes
from diptych.common.ops import operand as operands
from diptych.common.ops.operand import Operand
from diptych.common.ops.quantize import CopyOperands
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.torch.private.autograd import forward_level
from diptych.torch.private.dispatch import check
from diptych.torch.private.functorch import is_wrapped, without_interpreters

Copy = tuple[Tensor, Tensor, Tensor | None, int, bool]

# A column of the format table by id. Dynamo cannot trace a quantizer's `format`, which has no source for it, but it can
# trace the format's id.
TWO_LEVEL = tuple(row.two_level for row in FORMATS)
HIGH_PRECISION = frozenset(getattr(torch, name) for name in shapes.HIGH_PRECISION)


# --- checks of one argument ------------------------------------------------------------------------------------------


def describe(t: Tensor) -> str:
    return f"{dtype_name(t.dtype)}{list(t.shape)} on {t.device}"


def require_tensor(op: str, arg: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{op}: {arg} must be a torch.Tensor, got {type(t).__name__}")
    require_local(op, arg, t)


def require_local(op: str, arg: str, t: Any) -> None:
    """**Raises** NotImplementedError for a DTensor: run on its shards, an op would quantize each by its own amax."""
    if type(t).__name__ == "DTensor":  # importing the class takes long
        raise UnsupportedError(
            f"{op}: {arg} is a DTensor, and this runs on local tensors: call it inside of "
            "torch.distributed.tensor.experimental.local_map, with an amax_group where the tensor is cut, or cut "
            "modules by diptych.torch.parallel's styles or their tp_group"
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operand(name: str, t: Tensor) -> Operand:
    """A tensor as the rules of `diptych.common.ops` see it."""
    return Operand(name, dtype_name(t.dtype), tuple(t.shape), t.device)


def operand_or_none(name: str, t: Tensor | None) -> Operand | None:
    return None if t is None else operand(name, t)


def require_high_precision(op: str, arg: str, t: Tensor) -> None:
    require_local(op, arg, t)
    if t.dtype not in HIGH_PRECISION:
        operands.require_high_precision(op, operand(arg, t))


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
        quantize.require_quantizer(op, quantizer)


def require_out_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in HIGH_PRECISION:
        operands.require_result_dtype(op, dtype_name(dtype))


def require_no_grad(op: str, *tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for t in tensors:
        if t is not None and t.requires_grad:
            raise UnsupportedError(
                f"{op} has no derivative, and an argument requires grad: "
                "use diptych.torch.Linear to train, or detach() it, or call under torch.no_grad()"
            )


def wrapped(t: Any) -> bool:
    """Whether a tensor is one that a transform of torch.func shows to its function."""
    return isinstance(t, Tensor) and is_wrapped(t)


def outside_of_transforms(op: str, run: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Returns run(*args, **named), as if no transform of torch.func were active.

    **Raises** NotImplementedError where an argument is a tensor of a transform: it would take the class of a quantized
    tensor away.
    """
    if any([wrapped(t) for t in (*args, *named.values())]):
        raise UnsupportedError(
            f"{op}: an argument is a tensor of a transform of torch.func, in which quantized tensors have no place; "
            "use a layer there, such as diptych.torch.linear, or call this outside of the transform"
        )
    with without_interpreters():
        return run(*args, **named)


def require_no_tangent(op: str, *tensors: Any) -> None:
    """**Raises** NotImplementedError where an argument carries the tangent of forward-mode differentiation: an op would
    drop it, so that the derivative would be 0."""
    if forward_level() < 0 or torch.compiler.is_compiling():
        return
    for t in tensors:
        if isinstance(t, Tensor) and torch.autograd.forward_ad.unpack_dual(t).tangent is not None:
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


def enforce(constraints: Iterable[shapes.Constraint]) -> None:
    """`shapes.check` for sizes that may be symbolic."""
    for c in constraints:
        if c.relation == "<=":  # Dynamo shows symbolic sizes as ints, and comparing them would make a guard
            if certain(c.lhs > c.rhs):
                raise c.error(c.words())
        elif _static(c.lhs, c.rhs):
            shapes.check((c,))
        else:
            check(c.lhs == c.rhs, lambda c=c: c.words())


_PLAIN = (Tensor, Parameter)
_passed: set[Any] = set()


def once(check: Callable[[], None], *arguments: Any) -> None:
    """Runs a check unless it passed for such arguments before, which costs a plain call a lookup instead of the check.

    What is checked must depend on the arguments alone, and of tensors on shape, dtype, device and whether they require
    grad. Quantized and fake tensors are checked each time, and so is all while a program is traced.
    """
    if torch.compiler.is_compiling():
        return check()
    form: list[Any] = [torch.is_grad_enabled()]
    for a in arguments:
        if isinstance(a, Tensor):
            if type(a) not in _PLAIN:
                return check()
            form += (a.shape, a.dtype, a.device, a.requires_grad)
        else:
            form.append(a)
    key = tuple(form)
    if key not in _passed:
        check()
        if len(_passed) >= 4096:
            _passed.clear()
        _passed.add(key)


def certain(comparison: Any) -> bool:
    """Whether a constraint holds for all sizes of a traced program; asking makes no guard."""
    if isinstance(comparison, torch.SymBool) or torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # importing it takes a while

        return statically_known_true(comparison)
    return bool(comparison)


def require_size(found: Any, wanted: Any, message: Callable[[], str]) -> None:
    """Enforces a size; formats a message only on failure, since each eager call comes this way."""
    if not _static(found, wanted) or found != wanted:
        enforce((shapes.Constraint(found, wanted, message()),))


def _require_written(op: str, arg: str, t: Tensor) -> None:
    if not t.is_contiguous():
        raise ShapeError(f"{op}: {arg} {describe(t)} is not contiguous, and it is written in place")


# --- checks of one op's arguments ------------------------------------------------------------------------------------


_Encoded = tuple[Any, ...] | None  # shape of what an op encodes instead of x


def check_amax(x: Tensor, flags: int, columnwise: bool, encoded: _Encoded = None) -> None:
    enforce(quantize.amax(operand("x", x), flags, columnwise, encoded))


def check_quantize(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None,
    columnwise_amax: Tensor | None,
    scale: Tensor | None,
    rng: Tensor | None,
    *,
    encoded: _Encoded = None,
    op: str = "quantize",
) -> None:
    given = {"amax": amax, "columnwise_amax": columnwise_amax, "scale": scale, "rng": rng}
    enforce(
        quantize.quantize(
            op, operand("x", x), quantizer, **{n: operand_or_none(n, t) for n, t in given.items()}, encoded=encoded
        )
    )
    for name, t in given.items():
        require_device(op, x, t, name)


def check_delayed(x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor, encoded: _Encoded = None) -> None:
    named = operand("x", x), quantizer, operand("scale", scale), operand("history", history)
    enforce(quantize.quantize_delayed(*named, encoded))
    require_device("quantize_delayed", x, scale, "scale")
    require_device("quantize_delayed", x, history, "history")


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
    chosen = operand_or_none("reduced", reduced), operand_or_none("amax", amax)
    named = operand("history", history), operand("scale", scale), *chosen
    enforce(scale_update.scale_update(*named, fp8_max, margin, most_recent))
    for arg, t in (("scale", scale), ("reduced", reduced), ("amax", amax)):
        require_device(op, history, t, arg)
    _require_written(op, "history", history)
    _require_written(op, "scale", scale)


def copy_operands(op: str, arg: str, copy: Copy) -> CopyOperands:
    """Returns one copy as the rules see it. **Raises** DeviceError for parts on different devices."""
    data, scale_inv, amax, format_id, columnwise = copy
    require_device(op, data, scale_inv, f"{arg} scale_inv")
    require_device(op, data, amax, f"{arg} amax")
    named = operand("data", data), operand("scale_inv", scale_inv), operand_or_none("amax", amax)
    return CopyOperands(format_row(op, format_id), columnwise, *named)


def check_copy(op: str, arg: str, copy: Copy) -> FormatRow:
    named = copy_operands(op, arg, copy)
    enforce(quantize.copy(op, arg, named))
    return named.format


def check_gemm(
    a: Copy, b: Copy, bias: Tensor | None, alpha: float, beta: float, out: torch.dtype, options: GemmOptions
):
    op = "gemm"
    require_device(op, a[0], b[0], "b")
    require_device(op, a[0], bias, "bias")
    copies = copy_operands(op, "a", a), copy_operands(op, "b", b)
    *mnk, constraints = gemm.gemm(*copies, operand_or_none("bias", bias), dtype_name(out), options)
    enforce(constraints)
    gemm.require_factors(op, alpha=alpha, beta=beta)
    if a[0].device.type in ("cpu", "cuda") and _static(*mnk):
        _require_kernel(" x ".join(c.format.name for c in copies), a, b, tuple(mnk), out, a[0].device)
    return mnk[0], mnk[1]


def _require_kernel(pair: str, a: Copy, b: Copy, mnk: tuple[int, int, int], out: torch.dtype, device) -> None:
    """Asks the kernel table at trace time. Skipped for fake tensors of a GPU that this machine lacks."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return
    if _core.gemm_row(a[3], a[4], b[3], b[4], *mnk, dtype_name(out), device.type, device.index or 0) < 0:
        rows = [r for r in _core.kernel_table() if r["op"] == "gemm"]
        later = ["" if r["max_arch"] == r["min_arch"] else "+" for r in rows]
        near = ", ".join(f"{r['kernel']} (sm_{r['min_arch']}{more})" for r, more in zip(rows, later, strict=True))
        raise UnsupportedError(f"gemm: no kernel on {device} for {pair}, {list(mnk)}; nearest: {near}")


def check_acc(acc: Tensor, m: Any, n: Any) -> None:
    op = "gemm_into"
    require_high_precision(op, "acc", acc)
    enforce(operands.folded(op, operand("acc", acc), m, n))
    _require_written(op, "acc", acc)


_TABLE = _core.fused_table()


NORM_IDS, ACTIVATION_IDS = _TABLE["norm"], _TABLE["activation"]


FROM_NORM, FROM_ACTIVATION, FROM_ACTIVATION_GRAD, FROM_ROWS = (
    _TABLE["source"][n] for n in ("norm", "activation", "activation_grad", "permuted")
)


LAYERNORM, RMSNORM = NORM_IDS["layernorm"], NORM_IDS["rmsnorm"]


_NORM_NAMES = {number: name for name, number in NORM_IDS.items()}


def check_norm(op: str, x: Tensor, which: int, **given: Tensor | None) -> None:
    """gamma, beta [K] and mu, rsigma [M], against x; those that an op reads or writes."""
    if which not in _NORM_NAMES:
        raise ValueError(f"{op}: unknown norm {which}")
    named = {name: operand_or_none(name, t) for name, t in given.items()}
    enforce(norm.norm(op, _NORM_NAMES[which], operand("x", x), **named))
    for name, t in given.items():
        require_device(op, x, t, name)


def check_dy(op: str, dy: Tensor, x: Tensor, shape: tuple[Any, ...]) -> None:
    require_high_precision(op, "dy", dy)
    require_device(op, x, dy, "dy")
    enforce(operands.folded(op, operand("dy", dy), *shapes.rows_cols(shape)))


def halved(op: str, x: Tensor, gated: bool) -> tuple[Any, ...]:
    """Returns the shape of an activation of x."""
    shape, constraints = activation.activation(op, operand("x", x), gated)
    enforce(constraints)
    return shape
