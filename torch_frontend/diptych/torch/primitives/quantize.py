"""quantize, dequantize, amax and transpose on raw buffers: kernel call and fake implementation, in `torch.ops.diptych`.

Invariants of all files of this room:

- Shapes come from `diptych.common.ops.shapes` and checks from `checks`, in the real and in the fake implementation.
- Ops are pure, except `gemm_into`, `quantize_delayed` and `scale_update`, which declare what they mutate.
- A plain eager call goes straight to the implementation (`register.direct`); everything else (tracing, fake and meta
  tensors, modes, subclasses) goes through the dispatcher to the same one.
- Operands are made contiguous here; the core refuses others. Outputs always are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from diptych.common.errors import DTypeError, ShapeError
from diptych.common.ops import shapes
from diptych.common.quantizers import FROM_ROWS, ROW_AMAX, SQUARE_OF, STOCHASTIC, Float8Quantizer, Quantizer
from diptych.core import _core
from diptych.torch.primitives import constants
from diptych.torch.primitives.checks import (
    HIGH_PRECISION,
    TWO_LEVEL,
    Copy,
    check_amax,
    check_copy,
    check_delayed,
    check_quantize,
    format_row,
    once,
    require_no_grad,
    require_out_dtype,
)
from diptych.torch.primitives.register import define, direct, fake_buffers, layout, new_buffers, run, wrote
from diptych.torch.private.graphs import run_eagerly

_COMPUTE, _GIVEN, _ACCUMULATE = 0, 1, 2  # AmaxMode in ops.h

# --- quantize --------------------------------------------------------------------------------------------------------


def _quantize(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
    encoded: tuple[int, ...] | None = None,
    source: tuple[Any, ...] = (),
) -> list[Tensor]:
    """`encoded`, `source`: the shape of what is encoded instead of x, and the core's arguments for it (`fused`)."""
    given = amax, columnwise_amax, scale, rng
    alone = amax is None and columnwise_amax is None and scale is None and rng is None
    if quantizer.needs_scale or quantizer.spec.flags & STOCHASTIC:
        alone = False
    if not alone or x.dtype not in HIGH_PRECISION:  # else the core asks what there is to ask
        check = functools.partial(check_quantize, x, quantizer, *given, encoded=encoded)
        once(check, x, type(quantizer), quantizer.spec, quantizer.rowwise, quantizer.columnwise, *given, encoded)
    places, out = new_buffers(layout(x.shape if encoded is None else encoded, quantizer, x.device))
    mode = _COMPUTE
    for place, given in ((0, amax), (1, columnwise_amax)):
        if given is not None:
            mode, t = _GIVEN, places[place]
            assert t is not None  # check_quantize
            t.copy_(given.reshape(t.shape))
    out_amax, out_columnwise_amax, rowwise, rowwise_scale, columnwise, columnwise_scale = places
    rng = None if rng is None else rng.contiguous()
    _core.quantize(
        x.contiguous(), *quantizer.spec, mode, out_amax, out_columnwise_amax, scale, rng,
        rowwise, rowwise_scale, columnwise, columnwise_scale, *source,
    )  # fmt: skip
    return out


def _quantize_fake(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> list[Tensor]:
    check_quantize(x, quantizer, amax, columnwise_amax, scale, rng)
    return fake_buffers(x, quantizer)


def _quantize_delayed(
    x: Tensor,
    quantizer: Quantizer,
    scale: Tensor,
    history: Tensor,
    encoded: tuple[int, ...] | None = None,
    source: tuple[Any, ...] = (),
) -> list[Tensor]:
    check = functools.partial(check_delayed, x, quantizer, scale, history, encoded)
    once(check, x, quantizer.spec, quantizer.rowwise, quantizer.columnwise, scale, history, encoded)
    buffers = layout(x.shape if encoded is None else encoded, quantizer, x.device)
    places, out = new_buffers(buffers[:-1])  # the last is the amax, which goes to the history
    rowwise, rowwise_scale, columnwise, columnwise_scale = places[2:]
    _core.quantize(
        x.contiguous(), *quantizer.spec, _ACCUMULATE, history.narrow(0, 0, 1), None, scale, None,
        rowwise, rowwise_scale, columnwise, columnwise_scale, *source,
    )  # fmt: skip
    wrote(history)
    return out


def _quantize_delayed_fake(x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor) -> list[Tensor]:
    check_delayed(x, quantizer, scale, history)
    return fake_buffers(x, quantizer)[:-1]


def _quantize_again(x: Tensor, quantizer: Quantizer, amax: Tensor) -> list[Tensor]:
    check = functools.partial(check_quantize, x, quantizer, amax, None, None, None)
    once(check, x, quantizer.spec, quantizer.rowwise, quantizer.columnwise, amax)
    places, out = new_buffers(layout(x.shape, quantizer, x.device)[:-1])  # the last is the amax
    rowwise, rowwise_scale, columnwise, columnwise_scale = places[2:]
    _core.quantize(
        x.contiguous(), *quantizer.spec, _GIVEN, amax.contiguous(), None, None, None,
        rowwise, rowwise_scale, columnwise, columnwise_scale,
    )  # fmt: skip
    return out


def _quantize_again_fake(x: Tensor, quantizer: Quantizer, amax: Tensor) -> list[Tensor]:
    check_quantize(x, quantizer, amax, None, None, None)
    return fake_buffers(x, quantizer)[:-1]


def _both(implementation: Callable[..., list[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wraps an op so that it returns both copies always, with empty tensors for the buffers of a copy that is not made.

    An op that writes to an operand cannot return a list: torch functionalizes fixed results only.
    """

    def padded(x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor) -> tuple[Tensor, ...]:
        made = implementation(x, quantizer, scale, history)
        empty = [x.new_empty(0) for _ in range(4 - len(made))]
        return tuple(made + empty) if quantizer.rowwise else tuple(empty + made)

    return padded


def _empty(shape: tuple[int, ...], quantizer: Quantizer, device: torch.device | str) -> list[Tensor]:
    return fake_buffers(torch.empty((), device=device).expand(shape), quantizer)


# --- amax and scales -------------------------------------------------------------------------------------------------


def _amax_lengths(x: Tensor, flags: int, columnwise: bool) -> list[Any]:
    check_amax(x, flags, columnwise)
    rows = shapes.rows_cols(x.shape)[0] if flags & ROW_AMAX else 1
    return [rows, 1] if columnwise else [rows]


def _amax(x: Tensor, flags: int = 0, columnwise: bool = False) -> list[Tensor]:
    out = [torch.empty(n, dtype=torch.float32, device=x.device) for n in _amax_lengths(x, flags, columnwise)]
    _core.amax(x.contiguous(), out[0], out[1] if columnwise else None, flags)
    return out


def _amax_fake(x: Tensor, flags: int = 0, columnwise: bool = False) -> list[Tensor]:
    return [x.new_empty(n, dtype=torch.float32) for n in _amax_lengths(x, flags, columnwise)]


# --- dequantize ------------------------------------------------------------------------------------------------------


def _dequantize(
    data: Tensor, scale_inv: Tensor, amax: Tensor | None, format: int, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    require_out_dtype("dequantize", dtype)
    shape = shapes.tensor_shape(format_row("dequantize", format), columnwise, data.shape)
    out = torch.empty(shape, dtype=dtype, device=data.device)
    amax = None if amax is None else amax.contiguous()
    _core.dequantize(data.contiguous(), scale_inv.contiguous(), amax, format, columnwise, out)
    return out


def _dequantize_fake(
    data: Tensor, scale_inv: Tensor, amax: Tensor | None, format: int, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    require_out_dtype("dequantize", dtype)
    fmt = check_copy("dequantize", "q", (data, scale_inv, amax, format, columnwise))
    return data.new_empty(shapes.tensor_shape(fmt, columnwise, data.shape), dtype=dtype)


# --- transpose -------------------------------------------------------------------------------------------------------


def _turned_shape(x: Tensor) -> tuple[int, ...]:
    """The result's shape. **Raises** ShapeError, DTypeError for a tensor that is no matrices of bytes."""
    if x.dim() < 2:
        raise ShapeError(f"transpose: x must have two dimensions or more, got {list(x.shape)}")
    if x.element_size() != 1:
        raise DTypeError(f"transpose: x must have elements of one byte, got {x.dtype}")
    return (*x.shape[:-2], x.shape[-1], x.shape[-2])


def _transpose(x: Tensor) -> Tensor:
    out = x.new_empty(_turned_shape(x))
    transpose_into(x, out)
    return out


def _transpose_fake(x: Tensor) -> Tensor:
    return x.new_empty(_turned_shape(x))


# --- registration ----------------------------------------------------------------------------------------------------


_amax_op = define(
    "amax", "(Tensor x, int flags=0, bool columnwise=False) -> Tensor[]", _amax, _amax_fake, recordable=True
)
_dequantize_op = define(
    "dequantize",
    "(Tensor data, Tensor scale_inv, Tensor? amax, int format, bool columnwise, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
    recordable=True,
)
_quantize_op: Callable[..., list[Tensor]]
_quantize_delayed_op: Callable[..., tuple[Tensor, ...]]
_quantize_again_op: Callable[..., list[Tensor]]
_empty_op: Callable[..., list[Tensor]]
if constants.AVAILABLE:
    _QUANTIZER = constants.schema_type(Float8Quantizer)  # torch checks the name only, and takes every value class
    _quantize_op = define(
        "quantize",
        f"(Tensor x, {_QUANTIZER} quantizer, Tensor? amax=None, Tensor? columnwise_amax=None, Tensor? scale=None, "
        "Tensor? rng=None) -> Tensor[]",
        _quantize,
        _quantize_fake,
        recordable=True,
    )
    _quantize_again_op = define(
        "quantize_again",
        f"(Tensor x, {_QUANTIZER} quantizer, Tensor amax) -> Tensor[]",
        _quantize_again,
        _quantize_again_fake,
        recordable=True,
    )
    _quantize_delayed_op = define(
        "quantize_delayed",
        f"(Tensor x, {_QUANTIZER} quantizer, Tensor scale, Tensor(a!) history) -> (Tensor, Tensor, Tensor, Tensor)",
        _both(_quantize_delayed),
        _both(_quantize_delayed_fake),
        recordable=True,
    )
    # No tensor argument tells the dispatcher the backend.
    _EVERY = ("CompositeExplicitAutograd",)
    _empty_op = define(
        "empty", f"(SymInt[] shape, {_QUANTIZER} quantizer, Device device) -> Tensor[]", _empty, _empty, _EVERY
    )
else:  # pragma: no cover - no supported torch
    _empty_op = run_eagerly(_empty)
    _quantize_op = run_eagerly(_quantize)
    _quantize_again_op = run_eagerly(_quantize_again)
    _quantize_delayed_op = run_eagerly(_both(_quantize_delayed))


_transpose_op = define("transpose", "(Tensor x) -> Tensor", _transpose, _transpose_fake)

# --- the ops as the rest of this package calls them ------------------------------------------------------------------


@overload
def amax(x: Tensor, flags: int = 0) -> Tensor: ...
@overload
def amax(x: Tensor, flags: int = 0, *, columnwise: Literal[True]) -> tuple[Tensor, Tensor]: ...


def amax(x: Tensor, flags: int = 0, *, columnwise: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The amax of x, float32 [1]; with `columnwise` also that of what a two-level columnwise copy encodes.

    **Arguments:** `flags`: of ROW_AMAX (the first is [M]), RHT (the second is the rotated tensor's) and RHT_SIGNS.
    """
    if direct(x):
        require_no_grad("diptych::amax", x)
        out = _amax(x, flags, columnwise)
    else:
        out = _amax_op(x, flags, columnwise)
    return (out[0], out[1]) if columnwise else out[0]


def empty(shape: tuple[int, ...], quantizer: Quantizer, device: torch.device | str) -> list[Tensor]:
    """The buffers that `quantize` fills for a tensor of this shape, uninitialized."""
    return _empty_op(shape, quantizer, torch.device(device))


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> list[Tensor]:
    """The buffers of `shapes.quantize_buffers`, in its order, for x [..., K].

    `amax`, `columnwise_amax`: used instead of x's own, for every copy that is wanted. `scale`: used instead of one from
    an amax; the amax that returns is still x's own. `rng`: int32 [4], or [8] for a part of a
    tensor, read alone.
    """
    if direct(x, amax, columnwise_amax, scale, rng):
        require_no_grad("diptych::quantize", x, amax, columnwise_amax, scale)
        return _quantize(x, quantizer, amax, columnwise_amax, scale, rng)
    return _quantize_op(x, quantizer, amax, columnwise_amax, scale, rng)


def quantize_many(xs: list[Tensor], quantizer: Quantizer, amaxes: list[Tensor] | None = None) -> list[list[Tensor]]:
    """`quantize` of each of many tensors of one dtype and device, by one call of the core.

    `amaxes`: one float32 [1] for each tensor, used instead of its own for every copy, and returned as it is.
    """
    two_level = quantizer.format.two_level
    sides = quantizer.rowwise or not two_level, quantizer.columnwise and two_level  # the amaxes that copies have
    given = [tuple([a if side else None for side in sides]) for a in amaxes or [None] * len(xs)]
    if not direct(*xs, *(amaxes or ())):
        return [quantize(x, quantizer, *both) for x, both in zip(xs, given, strict=True)]
    require_no_grad("diptych::quantize_many", *xs)
    calls, made = [], []
    for x, both in zip(xs, given, strict=True):
        check = functools.partial(check_quantize, x, quantizer, *both, None, None)
        once(check, x, type(quantizer), quantizer.spec, quantizer.rowwise, quantizer.columnwise, *both)
        buffers = layout(x.shape, quantizer, x.device)
        places, out = new_buffers(buffers)
        if amaxes is not None:
            for i, (place, _, _) in enumerate(buffers):
                if place < 2:
                    known = both[place]
                    assert known is not None  # else the check raised
                    places[place] = out[i] = known
        calls.append((x.contiguous(), *places[:2], None, None, *places[2:]))
        made.append(out)
    _core.quantize_many(calls, *quantizer.spec, _COMPUTE if amaxes is None else _GIVEN)
    return made


def quantize_again(x: Tensor, quantizer: Quantizer, amax: Tensor) -> list[Tensor]:
    """The copies' buffers for x [..., K] in a per-tensor format by an amax that is known, which is read alone."""
    if direct(x, amax):
        require_no_grad("diptych::quantize_again", x, amax)
        return _quantize_again(x, quantizer, amax)
    return _quantize_again_op(x, quantizer, amax)


def quantize_delayed(x: Tensor, quantizer: Quantizer, scale: Tensor, history: Tensor) -> list[Tensor]:
    """The copies' buffers for x [..., K] under `scale`, without an amax: history[0] = max(history[0], amax(x))."""
    if direct(x, scale, history):
        require_no_grad("diptych::quantize_delayed", x, scale, history)
        return _quantize_delayed(x, quantizer, scale, history)
    buffers = _quantize_delayed_op(x, quantizer, scale, history)
    return [*(buffers[:2] if quantizer.rowwise else ()), *(buffers[2:] if quantizer.columnwise else ())]


def copies(quantizer: Quantizer, buffers: list[Tensor]) -> tuple[Copy | None, Copy | None]:
    """The rowwise and the columnwise copy among the results of `quantize` or `quantize_delayed`."""
    fmt_id, both = quantizer.spec.format_id, quantizer.rowwise and quantizer.columnwise
    two_level = TWO_LEVEL[fmt_id]
    rowwise = columnwise = None
    if quantizer.rowwise:
        rowwise = (buffers[0], buffers[1], buffers[4 if both else 2] if two_level else None, fmt_id, False)
    if quantizer.columnwise:
        first = 2 if both else 0
        columns_id = SQUARE_OF[fmt_id] if quantizer.spec.flags & FROM_ROWS else fmt_id
        columnwise = (buffers[first], buffers[first + 1], buffers[-1] if two_level else None, columns_id, True)
    return rowwise, columnwise


def dequantize(q: Copy, dtype: torch.dtype) -> Tensor:
    """Returns the values of one copy, in the tensor's shape, or [M, K] if its data is transposed."""
    if direct(q[0], q[1], q[2]):
        return _dequantize(*q, dtype)
    return _dequantize_op(*q, dtype)


def transpose(x: Tensor) -> Tensor:
    """Returns [..., C, R] of a tensor [..., R, C] whose elements are one byte. It has no derivative."""
    return run("transpose", _transpose, _transpose_op, x)


def transpose_into(x: Tensor, out: Tensor) -> None:
    """Writes a dense tensor [..., R, C] of bytes to `out` [..., C, R] of equally large elements."""
    _core.transpose(x.contiguous().view(torch.uint8), out.view(torch.uint8))
