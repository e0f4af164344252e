"""The verbs on tensors: `quantize`, `dequantize`, `gemm`, `gemm_into`, `amax`, `bias_grad`, `scale_update`.

`quantize`, `dequantize` and `gemm` are differentiable, straight through: the gradient of a quantized tensor is a plain
tensor of its logical dtype, and that of what was quantized. The others have no derivative; an argument of theirs that
requires grad is refused while grad mode is on. No op has a forward-mode derivative, and a tangent is refused
(NotImplementedError). All of them trace under `torch.compile(fullgraph=True)`, with static and dynamic shapes.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch
from torch import Tensor

from diptych.common import shapes
from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.formats import FORMATS
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.torch.graph.custom_op import IN_HIGH_PRECISION
from diptych.torch.primitives import quantize as primitives
from diptych.torch.primitives.checks import (
    Copy,
    refuse_second_derivative,
    require_no_grad,
    require_no_tangent,
    require_quantizer,
    require_tensor,
)
from diptych.torch.tensors.copies import pack, unpack, values
from diptych.torch.tensors.quantized import QUANTIZE, QuantizedTensor, from_buffers, rotated


def _require_quantized(op: str, arg: str, q: Any) -> None:
    if not isinstance(q, QuantizedTensor):
        raise ArgumentError(f"{op}: {arg} must be a QuantizedTensor, got {type(q).__name__}; quantize() makes one")


@overload
def amax(x: Tensor, *, per_row: bool = False) -> Tensor: ...
@overload
def amax(
    x: Tensor, *, per_row: bool = False, rht: Literal[True], random_signs: bool = False
) -> tuple[Tensor, Tensor]: ...


def amax(
    x: Tensor, *, per_row: bool = False, rht: bool = False, random_signs: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Largest finite magnitude of a tensor; 0 where there is none.

    **Arguments:** `x`: any shape, float32, bfloat16 or float16. `per_row`: one per row of [..., K]. `rht`: also that of
    the Hadamard-rotated tensor (bfloat16 only, rows in multiples of 16), with `random_signs` or without.

    **Returns:** float32 [1], or [M] `per_row`; with `rht` a pair, whose second is the rotated tensor's [1].

    **Raises:** TypeError for other dtypes, ValueError for rows that the transform does not divide, or random signs
    without it.
    """
    require_tensor("amax", "x", x)
    flags = ROW_AMAX * per_row + RHT * rht + RHT_SIGNS * random_signs
    return primitives.amax(x, flags, columnwise=True) if rht else primitives.amax(x, flags)


def group_amaxes(
    x: Any, quantizer: Quantizer, group: Any, amaxes: Any = primitives.amax
) -> tuple[Tensor | None, Tensor | None]:
    """The `amax` and `columnwise_amax` that quantizing x needs, the largest over a group; a row's amax is its own.

    `amaxes`: the op that takes them: `fused.amax` of a FusedInput, `grouped_primitives.amaxes` of a stack, whose
    tensors each have theirs.
    """
    fmt, flags = FORMATS[quantizer.spec.format_id], quantizer.spec.flags
    if not torch.compiler.is_compiling() and quantizer.needs_scale:  # else the op asks for the scale
        raise ValueError(
            "quantize: amax_group does not apply to delayed scaling, whose scale is given; reduce the amax of the "
            "history and pass it to scale_update(reduced=...)"
        )
    if not (fmt.per_tensor or fmt.two_level):
        raise ValueError(f"quantize: amax_group is for formats with an amax of the tensor; {fmt.name} has none")
    columnwise = fmt.two_level and quantizer.columnwise
    amax, of_columns = amaxes(x, flags & (ROW_AMAX | RHT | RHT_SIGNS), columnwise=True)
    if flags & ROW_AMAX:
        return amax, (max_over(of_columns, group) if columnwise else None)
    if flags & RHT and quantizer.rowwise:
        amax, of_columns = max_over(torch.cat((amax, of_columns)), group).chunk(2)
    else:  # one number serves both copies
        amax = of_columns = max_over(of_columns, group)
    return (None if fmt.two_level and not quantizer.rowwise else amax), (of_columns if columnwise else None)


def max_over(amax: Tensor, group: Any) -> Tensor:
    """The elementwise maximum of amaxes over a process group.

    As integers: amaxes are never negative or NaN, so their bits are ordered as they are, and no flush-to-zero counts.
    """
    from torch.distributed import _functional_collectives as collectives  # a torch may be built without distributed

    out = collectives.all_reduce(amax.view(torch.int32), "max", group)
    if isinstance(out, collectives.AsyncCollectiveTensor):
        out = out.wait()
    return out.view(torch.float32)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
    amax_group: Any = None,
) -> QuantizedTensor:
    """Quantizes a tensor as `quantizer` says (NUMERICS 1-5). An infinite element becomes NaN, as one that is NaN.

    **Arguments:** `x`: [..., K] float32, bfloat16 or float16. `quantizer`: from `recipe.quantizer(role)` or your own.
    `amax`, `columnwise_amax`: float32 to use instead of x's own: `amax` [1] in per-tensor formats; in NVFP4 one for
    each copy that is made. `scale`: float32 [1] to use (delayed scaling); the result's `amax` is still x's own. `rng`:
    int32 [4] from `rng_state` (stochastic rounding); a call uses two offsets and leaves it as it is. `amax_group`: a
    process group, over whose ranks the amaxes of the tensor are reduced by max first; those per row stay.

    **Returns:** a `QuantizedTensor` with x's shape, dtype and device, and the copies that `quantizer` wants. Where x
    requires grad and grad mode is on, so does it; its gradient, a plain tensor of x's dtype, is x's (straight through).

    **Raises:** TypeError for other dtypes, no quantizer, or a missing `scale` or `rng`; ValueError for a scalar,
    extents or an argument that the format does not take, or mixed devices; NotImplementedError where no kernel fits,
    or an amax or scale requires grad.
    """
    require_tensor("quantize", "x", x)
    require_no_tangent("quantize", x, amax, columnwise_amax, scale)
    require_quantizer("quantize", quantizer)
    implementation = quantizer.implementation()
    if implementation is not None:
        given = {"amax": amax, "columnwise_amax": columnwise_amax, "scale": scale, "rng": rng, "amax_group": amax_group}
        given = {name: value for name, value in given.items() if value is not None}
        q = implementation(quantizer, x, functools.partial(quantize, **given))
        if not isinstance(q, QuantizedTensor):
            raise ArgumentError(
                f"{type(quantizer).__name__}.quantize_impl returned {type(q).__name__}; "
                "it must return what the quantize function that it is given returned"
            )
        return q
    if amax_group is not None:
        if amax is not None or columnwise_amax is not None or scale is not None:
            raise ValueError("quantize: amax_group reduces x's own amax, and an amax or a scale was given too")
        amax, columnwise_amax = group_amaxes(x.detach(), quantizer, amax_group)
    if torch.is_grad_enabled() and x.requires_grad:
        require_no_grad("quantize (its amaxes and scale)", amax, columnwise_amax, scale)
        return _Quantize.apply(x, quantizer, amax, columnwise_amax, scale, rng)
    return from_buffers(x, quantizer, primitives.quantize(x, quantizer, amax, columnwise_amax, scale, rng))


class _Quantize(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, *given: Tensor | None) -> QuantizedTensor:
        return from_buffers(x, quantizer, primitives.quantize(x, quantizer, *given))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad, None, None, None, None, None


def rng_state(seed: int, offset: int = 0, device: torch.device | str | int | None = None) -> Tensor:
    """The state that stochastic rounding reads: int32 [4], low and high words of seed and offset.

    Each `quantize` uses two offsets: give the next call `offset + 2`, and other ranks other seeds or offsets.

    **Raises:** ValueError for a seed or offset outside of 0..2^64-1, TypeError for anything but an int.
    """
    words = []
    for name, value in (("seed", seed), ("offset", offset)):
        if not isinstance(value, int):
            raise ArgumentError(f"rng_state: {name} must be an int, got {type(value).__name__}")
        if not 0 <= value < 1 << 64:
            raise ValueError(f"rng_state: {name} must lie in 0..2^64-1, got {value}")
        for word in (value & 0xFFFFFFFF, value >> 32):
            words.append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(words, dtype=torch.int32, device=device)


def scale_update(
    history: Tensor,
    scale: Tensor,
    *,
    reduced: Tensor | None = None,
    amax: Tensor | None = None,
    fp8_max: float = 448.0,
    margin: int = 0,
    most_recent: bool = False,
) -> None:
    """Delayed scaling's update (NUMERICS 2) of n tensors that share an element, in place.

    **Arguments:** `history`: contiguous float32 [n, L] (or [L]), L >= 1; entry 0 holds the amax since the last update.
    `scale`: contiguous float32 [n]. `reduced`: [n] amaxes after a reduction over a group, used instead of entry 0 where
    not 0. `amax`: [n] chosen by an algorithm of the caller's own, used where there was an amax at all. `fp8_max`: the
    element's largest value. `margin`: the scale is divided by 2^margin. `most_recent`: take the latest amax, not the
    largest of the history.

    A history of one entry holds 0 after each update.

    **Raises:** TypeError for other dtypes, ValueError for other shapes, mixed devices, or `most_recent` with `amax`.
    """
    for name, t in (("history", history), ("scale", scale), ("reduced", reduced), ("amax", amax)):
        if t is not None or name in ("history", "scale"):
            require_tensor("scale_update", name, t)
    primitives.scale_update(history, scale, reduced, amax, float(fp8_max), margin, most_recent)


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values that a quantized tensor stands for: payload times scale in float32, rounded once to `dtype`.

    **Arguments:** `dtype`: float32, bfloat16 or float16; None is q's logical dtype.

    **Returns:** a tensor of q's shape, from the rowwise copy if there is one, else from the columnwise copy; where that
    is of the Hadamard-rotated tensor, the rotated values. Its gradient is q's.

    **Raises:** TypeError for another dtype or for a tensor that is not quantized, NotImplementedError for rotated
    values where q requires grad.
    """
    _require_quantized("dequantize", "q", q)
    return q.dequantize(dtype)


def gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """alpha * op(a) @ op(b) + bias, accumulated in float32 (NUMERICS 7).

    **Arguments:** `a`, `b`: quantized tensors; op transposes their [rows, cols] form. An operand whose rows are reduced
    is read from its columnwise copy: fprop `gemm(x, w)`, dgrad `gemm(dy, w, trans_b=False)`, wgrad
    `gemm(dy, x, trans_a=True, trans_b=False)`. `bias`: [N] float32, bfloat16 or float16. `out_dtype`: None is a's
    logical dtype. `fast_accum`: Hopper's reduced accumulation, per-tensor formats only.

    **Returns:** [M, N] in `out_dtype`; a's leading dimensions unfold unless `trans_a`. Differentiable once: the
    gradients of a and b are products in `out_dtype` of dy and the values of the copy that was multiplied (of the
    rowwise one where that is Hadamard-rotated), plain tensors in their logical dtypes; the bias gets `bias_grad`.

    **Raises:** ValueError for unequal reduced lengths, a copy that was not made, mixed devices or an option that the
    formats do not take, TypeError for dtypes, NotImplementedError where no kernel fits, for a second derivative, or one
    that needs a rowwise copy that was not made.
    """
    _require_quantized("gemm", "a", a)
    _require_quantized("gemm", "b", b)
    require_no_tangent("gemm", a, b, bias)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    dtype = a.dtype if out_dtype is None else out_dtype
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        return _Gemm.apply(a, b, bias, trans_a, trans_b, alpha, dtype, fast_accum)
    d = primitives.gemm(a.copy_of(side_a), b.copy_of(side_b), bias, alpha, dtype, fast_accum)
    return d.view(shapes.gemm_out_shape(a.shape, d.shape[0], d.shape[1], trans_a))


def _copy_for_gradient(arg: str, q: QuantizedTensor, columnwise: bool) -> Copy:
    """The copy of one operand that the other's gradient is a product with: the one that was multiplied."""
    if columnwise and rotated(q.quantizer):
        if q.rowwise_data is None:
            raise UnsupportedError(f"gemm: the derivative needs the rowwise copy of {arg}, whose columns are rotated")
        columnwise = False
    return q.copy_of(columnwise)


class _Gemm(torch.autograd.Function):
    """What it saves are the buffers of the copies that backward reads."""

    @staticmethod
    def forward(
        ctx: Any,
        a: QuantizedTensor,
        b: QuantizedTensor,
        bias: Tensor | None,
        trans_a: bool,
        trans_b: bool,
        alpha: float,
        dtype: torch.dtype,
        fast_accum: bool,
    ) -> Tensor:
        side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
        saved: list[Tensor] = []
        specs = []
        for arg, q, side, wanted in (("a", a, side_a, b.requires_grad), ("b", b, side_b, a.requires_grad)):
            if wanted:
                specs.append(pack(_copy_for_gradient(arg, q, side), saved))
            else:
                specs.append(None)
        ctx.save_for_backward(*saved)
        ctx.specs, ctx.options = specs, (trans_a, trans_b, alpha)
        ctx.forms = ((a.shape, a.dtype), (b.shape, b.dtype), None if bias is None else bias.dtype)
        d = primitives.gemm(a.copy_of(side_a), b.copy_of(side_b), bias, alpha, dtype, fast_accum)
        return d.view(shapes.gemm_out_shape(a.shape, d.shape[0], d.shape[1], trans_a))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if not torch.compiler.is_compiling():
            refuse_second_derivative("gemm", IN_HIGH_PRECISION)
        saved = list(ctx.saved_tensors)
        trans_a, trans_b, alpha = ctx.options
        (a_shape, a_dtype), (b_shape, b_dtype), bias_dtype = ctx.forms
        a, b = [None if spec is None else values(unpack(spec, saved), dy.dtype) for spec in ctx.specs]
        da = db = dbias = None
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            dbias = primitives.bias_grad(dy, bias_dtype)
        dy = dy.reshape(shapes.rows_cols(dy.shape))
        with torch.amp.autocast(dy.device.type, enabled=False):
            if b is not None:
                op_b = b if trans_b else b.t()  # transposed: [N, K]
                da = _scaled(op_b.t() @ dy.t() if trans_a else dy @ op_b, alpha).to(a_dtype).view(a_shape)
            if a is not None:
                op_a = a.t() if trans_a else a  # [M, K]
                db = _scaled(dy.t() @ op_a if trans_b else op_a.t() @ dy, alpha).to(b_dtype).view(b_shape)
        return da, db, dbias, None, None, None, None, None


def _scaled(t: Tensor, alpha: float) -> Tensor:
    return t if alpha == 1.0 else t * alpha


def gemm_into(
    acc: Tensor,
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    fast_accum: bool = False,
) -> Tensor:
    """alpha * op(a) @ op(b) + bias + beta * acc, written into `acc`.

    **Arguments:** as `gemm`. `acc`: contiguous [M, N] (or a's leading dimensions and N), float32, bfloat16 or float16.
    With `beta=0` its old content is not read.

    **Returns:** `acc`.

    **Raises:** as `gemm`, before `acc` is touched; ValueError also where `acc` is not contiguous or of another shape,
    NotImplementedError where anything requires grad.
    """
    require_tensor("gemm_into", "acc", acc)
    _require_quantized("gemm_into", "a", a)
    _require_quantized("gemm_into", "b", b)
    require_no_grad("gemm_into", acc, a, b, bias)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    primitives.gemm_into(acc, a.copy_of(side_a), b.copy_of(side_b), bias, alpha, beta, fast_accum)
    return acc


def bias_grad(dy: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over all leading dimensions, in float32 and in an order that the shape alone fixes.

    **Arguments:** `dy`: [..., N] float32, bfloat16 or float16. `dtype`: of the result; None is dy's.

    **Returns:** [N] in `dtype`. **Raises:** TypeError for other dtypes, ValueError for a scalar.
    """
    require_tensor("bias_grad", "dy", dy)
    return primitives.bias_grad(dy, dy.dtype if dtype is None else dtype)


QUANTIZE[QuantizedTensor] = quantize
