"""The verbs `quantize`, `dequantize`, `amax` and `rng_state`; `gemm` and `scale_update` have files of their own.

`quantize`, `dequantize` and `gemm` are differentiable, straight through: a quantized tensor's gradient is a plain
tensor of its logical dtype, and is passed unchanged to the tensor that was quantized. The other verbs have no
derivative and refuse arguments that require grad while grad mode is on. No op has a forward-mode derivative, and a
tangent is refused (NotImplementedError). All of them trace under `torch.compile(fullgraph=True)`, with static and
dynamic shapes.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.torch.functional.amax_group import group_amaxes
from diptych.torch.graph import functorch
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import require_no_grad, require_no_tangent, require_quantizer, require_tensor
from diptych.torch.private.functorch import transforms_active
from diptych.torch.tensors.quantized import QUANTIZE, QuantizedTensor, from_buffers, require_quantized


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
    return quantize_ops.amax(x, flags, columnwise=True) if rht else quantize_ops.amax(x, flags)


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
    """Quantizes a tensor by `quantizer` (NUMERICS 1-5). Infinite elements become NaN; NaN stays NaN.

    **Arguments:** `x`: [..., K] float32, bfloat16 or float16. `quantizer`: from `recipe.quantizer(role)` or your own.
    `amax`, `columnwise_amax`: float32 to use instead of x's own: `amax` [1] in per-tensor formats; in NVFP4 one for
    each copy that is made. `scale`: float32 [1] to use (delayed scaling); the result's `amax` is still x's own. `rng`:
    int32 [4] from `rng_state` (stochastic rounding); a call uses two offsets and leaves it as it is. A part of a tensor
    has the whole tensor's random bits if its place follows, int32 [8]: row and column of its first element in the whole
    tensor, and the whole tensor's rows and columns, multiples of 16. `amax_group`: a process group, over whose ranks
    the amaxes of the tensor are reduced by max first; those per row stay.

    **Returns:** a `QuantizedTensor` with x's shape, dtype and device, and the copies that `quantizer` wants. Where x
    requires grad and grad mode is on, so does it; its gradient, a plain tensor of x's dtype, is x's (straight through).

    **Raises:** TypeError for other dtypes, no quantizer, or a missing `scale` or `rng`; ValueError for a scalar,
    extents or an argument that the format does not take, or mixed devices; NotImplementedError where no kernel fits,
    or an amax or scale requires grad.
    """
    require_tensor("quantize", "x", x)
    require_no_tangent("quantize", x, amax, columnwise_amax, scale)
    require_quantizer("quantize", quantizer)
    if transforms_active():
        return functorch.outside(
            "quantize", quantize, x, quantizer, amax=amax, columnwise_amax=columnwise_amax, scale=scale, rng=rng,
            amax_group=amax_group,
        )  # fmt: skip
    asked = torch.compiler.is_compiling() or quantizer.custom  # Dynamo can only call methods of a graph's constant
    implementation = quantizer.implementation() if asked else None
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
    return from_buffers(x, quantizer, quantize_ops.quantize(x, quantizer, amax, columnwise_amax, scale, rng))


class _Quantize(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, *given: Tensor | None) -> QuantizedTensor:
        return from_buffers(x, quantizer, quantize_ops.quantize(x, quantizer, *given))

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


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the values of a quantized tensor: payload times scale in float32, rounded once to `dtype`.

    **Arguments:** `dtype`: float32, bfloat16 or float16; None is q's logical dtype.

    **Returns:** a tensor of q's shape, from the rowwise copy if there is one, else from the columnwise copy; where that
    is of the Hadamard-rotated tensor, the rotated values. Its gradient is q's.

    **Raises:** TypeError for another dtype or for a tensor that is not quantized, NotImplementedError for rotated
    values where q requires grad.
    """
    require_quantized("dequantize", "q", q)
    return q.dequantize(dtype)


QUANTIZE[QuantizedTensor] = quantize
