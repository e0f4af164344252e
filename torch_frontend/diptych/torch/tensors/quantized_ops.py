"""The operators that move, copy or compare quantized tensors whole, or select the tensors of a stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.torch.primitives.checks import HIGH_PRECISION
from diptych.torch.private.dispatch import pin_memory, to_copy
from diptych.torch.tensors.quantized import (
    HANDLERS,
    QuantizedStack,
    QuantizedTensor,
    QuantizedTensorBase,
    called,
    outside_inference,
    parts_of,
)

aten = torch.ops.aten


def mapped(
    fn: Callable[[Tensor], Tensor], q: QuantizedTensorBase, dtype: torch.dtype | None = None
) -> QuantizedTensorBase:
    with outside_inference():
        buffers = {name: fn(t) for name, t in parts_of(q).items()}
        return q.kind(q.quantizer, q.shape, q.dtype if dtype is None else dtype, **buffers)


def _same(func: Any, q: QuantizedTensorBase, memory_format: torch.memory_format | None = None) -> QuantizedTensorBase:
    _no_memory_format(func, memory_format)
    return mapped(func, q)


def _strided_whole(func: Any, q: QuantizedTensorBase, size: Any, stride: Any, offset: int = 0) -> QuantizedTensorBase:
    """A view of the whole tensor as it lies, which is how FSDP2 makes a gathered tensor a parameter."""
    if tuple(size) != tuple(q.shape) or tuple(stride) != tuple(q.stride()) or offset:
        raise UnsupportedError(f"{called(func)}: the buffers of a quantized tensor have no strides of its own shape")
    return mapped(aten.alias.default, q)


def _viewed_whole(func: Any, q: QuantizedTensorBase, size: Any) -> QuantizedTensorBase:
    """A view of the whole tensor, which is what DTensor's `to_local` makes of a rank's part."""
    if tuple(size) != tuple(q.shape):
        raise UnsupportedError(
            f"{called(func)}: the buffers of a quantized tensor have no other shapes; call dequantize() on it first"
        )
    return mapped(aten.alias.default, q)


def _no_memory_format(func: Any, memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise UnsupportedError(f"{called(func)} of a quantized tensor: its buffers are row-major, not {memory_format}")


def _to(func: Any, q: QuantizedTensorBase, *, memory_format: Any = None, **kwargs: Any) -> QuantizedTensorBase:
    """Moves to another device or logical dtype, which changes no copy. It serves empty_like too."""
    _no_memory_format(func, memory_format)
    dtype = kwargs.pop("dtype", None)
    if dtype is not None and dtype not in HIGH_PRECISION:
        raise UnsupportedError(
            f"a {q.kind.__name__} stands for float32, bfloat16 or float16 and cannot become {dtype}; call dequantize() "
            "on it first"
        )
    return mapped(lambda t: func(t, **kwargs), q, dtype)


def _in_all(func: Any, q: QuantizedTensorBase, *args: Any, **kwargs: Any) -> bool:
    return all([func(t, *args, **kwargs) for t in parts_of(q).values()])


def _pinned(func: Any, q: QuantizedTensorBase, *args: Any, **kwargs: Any) -> QuantizedTensorBase:
    return mapped(lambda t: func(t, *args, **kwargs), q)


def _record_stream(func: Any, q: QuantizedTensorBase, stream: Any) -> None:
    for t in parts_of(q).values():
        func(t, stream)


def _copy_(func: Any, q: Any, src: Any, non_blocking: bool = False) -> QuantizedTensorBase:
    for t, other, which, remedy in ((q, src, "into", "quantize it first"), (src, q, "out of", "dequantize it")):
        if isinstance(t, QuantizedTensorBase) and not isinstance(other, t.kind):
            raise ArgumentError(f"copy_ {which} a {t.kind.__name__} takes another {t.kind.__name__}; {remedy}")
    if (q.quantizer, q.dtype, q.shape) != (src.quantizer, src.dtype, src.shape):
        raise ValueError(f"copy_ between unlike quantized tensors: {src!r} into {q!r}")
    for name in q.__tensor_flatten__()[0]:
        getattr(q, name).copy_(getattr(src, name), non_blocking=non_blocking)
    return q


def _equal(func: Any, a: Any, b: Any) -> bool:
    if not (isinstance(a, QuantizedTensorBase) and isinstance(b, QuantizedTensorBase)):
        raise ArgumentError(
            "torch.equal compares a quantized tensor with another one only; call dequantize() on it first"
        )
    names = a.__tensor_flatten__()[0]
    forms = [(t.kind, t.quantizer, t.dtype, t.shape, t.__tensor_flatten__()[0]) for t in (a, b)]
    return forms[0] == forms[1] and all(
        torch.equal(getattr(a, name).view(torch.uint8), getattr(b, name).view(torch.uint8)) for name in names
    )


def _select(func: Any, stack: Any, dim: int, g: int) -> QuantizedTensor:
    if not isinstance(stack, QuantizedStack) or dim != 0:
        raise UnsupportedError(
            f"{called(func)} is defined on the first dimension of a QuantizedStack alone; got {stack!r}"
        )
    parts = {}
    for name in stack.__tensor_flatten__()[0]:
        t = getattr(stack, name).select(0, g)
        whole = name.endswith("amax") or (stack.quantizer.format.one_scale and name.endswith("scale_inv"))
        parts[name] = t.reshape(-1) if whole else t
    return QuantizedTensor(stack.quantizer, stack.shape[1:], stack.dtype, **parts)


def _unbind(func: Any, stack: Any, dim: int = 0) -> tuple[QuantizedTensor, ...]:
    return tuple([_select(func, stack, dim, g) for g in range(stack.shape[0])])


HANDLERS.update(
    {
        aten.detach.default: _same,
        aten.alias.default: _same,
        aten.as_strided.default: _strided_whole,
        aten.view.default: _viewed_whole,
        aten.clone.default: _same,
        to_copy: _to,
        aten.empty_like.default: _to,
        aten.is_pinned.default: _in_all,
        pin_memory: _pinned,
        aten.record_stream.default: _record_stream,
        aten.copy_.default: _copy_,
        aten.equal.default: _equal,
        aten.select.int: _select,
        aten.unbind.int: _unbind,
    }
)
