"""`QuantizedTensor`: one or two quantized copies of a tensor, and the quantizer that made them. `QuantizedStack`: the
same of several tensors.

Traceable wrapper subclasses: torch.compile sees their buffers, and they have the shape, dtype and device of the tensor
they stand for. They are **not** number types. What moves or copies one whole works (detach, clone, to(device), copy_,
save, pickle, deepcopy); every other operation raises NotImplementedError instead of dequantizing behind your back.

One that requires grad is the result of `quantize`, or of a module or an op of this package, or a `QuantizedParameter`.
Its gradient is a plain tensor of its shape and logical dtype, also where it enters or leaves a compiled region.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.quantizers import RHT, Quantizer
from diptych.torch import grouped_primitives, primitives
from diptych.torch.rules import TWO_LEVEL, Copy, require_no_tangent

aten = torch.ops.aten

BUFFERS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax",
    "columnwise_amax",
)


class QuantizedTensorBase(Tensor):
    """What a `QuantizedTensor` and a `QuantizedStack` have in common: all but what their buffers' shapes mean."""

    kind: type[QuantizedTensorBase]  # which of the two, whatever else a class is
    rowwise_data: Tensor | None
    rowwise_scale_inv: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale_inv: Tensor | None
    amax: Tensor | None
    columnwise_amax: Tensor | None
    quantizer: Quantizer

    def __new__(
        cls,
        quantizer: Quantizer,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rowwise_data: Tensor | None = None,
        rowwise_scale_inv: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        amax: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
    ) -> Self:
        data = columnwise_data if rowwise_data is None else rowwise_data
        if data is None:
            raise ValueError(f"a {cls.kind.__name__} holds a rowwise or a columnwise copy, and neither was given")
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device, requires_grad=False)
        self.quantizer = quantizer
        self.rowwise_data = rowwise_data
        self.rowwise_scale_inv = rowwise_scale_inv
        self.columnwise_data = columnwise_data
        self.columnwise_scale_inv = columnwise_scale_inv
        self.amax = amax
        self.columnwise_amax = columnwise_amax
        return self

    if TYPE_CHECKING:  # Tensor's own __init__ takes a device

        def __init__(
            self, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype, *args: Any, **buffers: Any
        ) -> None: ...

    def copy_of(self, columnwise: bool) -> Copy:
        """(data, scale_inv, amax or None, format id, columnwise) of one copy. **Raises** ValueError if not made."""
        data = self.columnwise_data if columnwise else self.rowwise_data
        scale_inv = self.columnwise_scale_inv if columnwise else self.rowwise_scale_inv
        if data is None or scale_inv is None:
            side = "columnwise" if columnwise else "rowwise"
            raise ValueError(
                f"this product needs the {side} copy, which {self.quantizer} does not make; "
                f"quantize with quantizer.with_usage({side}=True)"
            )
        format_id = self.quantizer.spec.format_id
        amax = (self.columnwise_amax if columnwise else self.amax) if TWO_LEVEL[format_id] else None
        return data, scale_inv, amax, format_id, columnwise

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """See `diptych.torch.dequantize`."""
        dtype = self.dtype if dtype is None else dtype
        require_no_tangent("dequantize", self)
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._values(dtype)

    def _values(self, dtype: torch.dtype) -> Tensor:
        """What the rowwise copy stands for, or the only one."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantizer, torch.dtype]]:
        return [name for name in BUFFERS if getattr(self, name) is not None], (self.quantizer, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[Quantizer, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensorBase:
        return cls(meta[0], outer_size, meta[1], **inner)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """The gradient that AOTAutograd plans for where one leaves a compiled region: a plain tensor.

        AOTAutograd, which expects another wrapper, takes that apart once; it has no parts.
        """
        data = self.rowwise_data if self.columnwise_data is None else self.columnwise_data
        tangent: Any = data.new_empty(self.shape, dtype=self.dtype)  # type: ignore[union-attr]

        def taken_apart() -> tuple[list[str], None]:
            del tangent.__tensor_flatten__
            return [], None

        tangent.__tensor_flatten__ = taken_apart
        return tangent

    def _stable_hash_for_caching(self) -> str:
        """The key that torch's compile caches know this kind of tensor by: layout and quantizer, no content."""
        buffers = [(n, str(t.dtype), str(t.shape)) for n in BUFFERS if (t := getattr(self, n)) is not None]
        q = self.quantizer
        # One that is compared by identity has no name that another process, or a later object, could not have too.
        quantizer = secrets.token_hex() if q._value_fields() is None else f"{type(q).__module__}.{q.fingerprint}"
        key = (self.kind.__name__, str(self.shape), str(self.dtype), str(self.device), quantizer, buffers)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        copies = [side for side in ("rowwise", "columnwise") if getattr(self, f"{side}_data") is not None]
        return (
            f"{self.kind.__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"format={self.quantizer.format.name}, copies={'+'.join(copies)}, quantizer={self.quantizer})"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        q = self.quantizer
        names = q._value_fields()
        # One that is compared by identity pickles itself; torch.load(weights_only=True) then asks for its class.
        made_of = (q, None) if names is None else (type(q), {name: getattr(q, name) for name in names})
        # As bytes: torch's legacy pickle format does not know FP8 storage.
        buffers = {name: t.view(torch.uint8) for name in BUFFERS if (t := getattr(self, name)) is not None}
        return _rebuild, (*made_of, tuple(self.shape), self.dtype, buffers, self.kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _map(torch.clone, self)
        return memo[id(self)]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None and func in TAKES_COTANGENTS:
            return func(*tree_map(_cotangent, args), **(kwargs or {}))
        if handler is None:
            raise UnsupportedError(f"{func} is not defined on a {cls.kind.__name__}; call dequantize() on it first")
        return handler(func, *args, **(kwargs or {}))


class QuantizedTensor(QuantizedTensorBase):
    """A quantized tensor of logical `shape` and `dtype`; made by `diptych.torch.quantize`.

    `rowwise_data` has the tensor's shape, `columnwise_data` too or, where the format transposes, [K, M] with leading
    dimensions folded into M. Payloads of E2M1 are uint8, two elements a byte (the even one in the low bits), which
    halves the last extent. Scales are logical row-major, in the orientation of their data. `amax` is float32 [1]:
    the tensor's in per-tensor formats; in two-level ones what the rowwise copy refers to (with row scales [M]), and
    `columnwise_amax` [1] what the columnwise copy does. A buffer that was not made is None.
    """

    def _values(self, dtype: torch.dtype) -> Tensor:
        return primitives.dequantize(self.copy_of(self.rowwise_data is None), dtype).reshape(self.shape)


class QuantizedStack(QuantizedTensorBase):
    """G quantized tensors of one shape, made by `quantize_stack`; `shape` is [G, ..., K], `dtype` the logical one.

    Its buffers are those of a `QuantizedTensor` behind a leading G, and what is [1] there is [G] here: scales of a
    whole tensor, amaxes. The tensors share nothing but their quantizer. `stack[g]` is tensor g, a view, and iterating
    gives them all.
    """

    def _values(self, dtype: torch.dtype) -> Tensor:
        return grouped_primitives.stack_values(self.copy_of(self.rowwise_data is None), dtype).reshape(self.shape)


QuantizedTensor.kind, QuantizedStack.kind = QuantizedTensor, QuantizedStack


TAKES_COTANGENTS: set[Any] = set()
"""Ops that get gradients of quantized tensors. While Dynamo traces, a cotangent has the type of its output; the one
that comes is a plain tensor (AOTAutograd's, and eager autograd's)."""


def _cotangent(t: Any) -> Any:
    if isinstance(t, QuantizedTensorBase):
        if not isinstance(t.rowwise_data if t.columnwise_data is None else t.columnwise_data, FakeTensor):
            raise ArgumentError("the gradient of a quantized tensor is a plain tensor, and a QuantizedTensor was given")
        return torch.empty(t.shape, dtype=t.dtype, device=t.device)
    return t


class _Dequantize(torch.autograd.Function):
    """Passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, q: QuantizedTensorBase, dtype: torch.dtype) -> Tensor:
        if q.rowwise_data is None and rotated(q.quantizer):
            raise UnsupportedError("dequantize: rotated values have no derivative; keep the rowwise copy")
        ctx.dtype = q.dtype
        return q._values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.to(ctx.dtype), None


def rotated(quantizer: Quantizer) -> bool:
    """Whether columnwise copies are of the Hadamard-rotated tensor."""
    return bool(quantizer.spec.flags & RHT)


def high_precision(op: str, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What a tensor that may be quantized stands for, differentiable; a plain one as it is. `dtype`: of the result.

    **Raises** ValueError where the only copy is of the Hadamard-rotated tensor.
    """
    if not isinstance(t, QuantizedTensorBase):
        return t
    if t.rowwise_data is None and rotated(t.quantizer):
        raise ValueError(
            f"{op}: high precision needs the rowwise copy, which {t.quantizer} does not make, and its columnwise copy "
            "is rotated; quantize with quantizer.with_usage(rowwise=True)"
        )
    return t.dequantize(dtype)


def from_buffers(
    x: Tensor, quantizer: Quantizer, buffers: list[Tensor], encoded: tuple[Any, ...] | None = None
) -> QuantizedTensor:
    """Wraps what `primitives.quantize` or `quantize_delayed` made of x. `encoded`: the shape of it, None is x's."""
    named: dict[str, Tensor] = {}
    copies = primitives.copies(quantizer, buffers)
    for side, copy in zip(("rowwise", "columnwise"), copies, strict=True):
        if copy is not None:
            named[f"{side}_data"], named[f"{side}_scale_inv"] = copy[:2]
            if copy[2] is not None:
                named["columnwise_amax" if copy[4] else "amax"] = copy[2]
    if len(buffers) > len(named):
        named["amax"] = buffers[-1]  # of a per-tensor format
    return QuantizedTensor(quantizer, x.shape if encoded is None else encoded, x.dtype, **named)


def _rebuild(
    made_of: type[Quantizer] | Quantizer,
    fields: dict[str, Any] | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    buffers: dict[str, Tensor],
    kind: type[QuantizedTensorBase] = QuantizedTensor,
) -> QuantizedTensorBase:
    quantizer: Any = made_of if fields is None else made_of._rebuild(**fields)
    dtypes = {"data": quantizer.format.data, "inv": quantizer.format.scale, "amax": "float32"}
    typed = {name: t.view(getattr(torch, dtypes[name.rsplit("_", 1)[-1]])) for name, t in buffers.items()}
    return kind(quantizer, shape, dtype, **typed)


# torch.load(weights_only=True) rebuilds from this function; `opaque.register` lists the quantizers themselves.
torch.serialization.add_safe_globals([_rebuild, QuantizedTensor, QuantizedStack])


# --- the operations that a quantized tensor has ----------------------------------------------------------------------


def _map(fn: Callable[[Tensor], Tensor], q: QuantizedTensorBase) -> QuantizedTensorBase:
    buffers = {name: fn(getattr(q, name)) for name in BUFFERS if getattr(q, name) is not None}
    return q.kind(q.quantizer, q.shape, q.dtype, **buffers)


def _same(func: Any, q: QuantizedTensorBase, memory_format: torch.memory_format | None = None) -> QuantizedTensorBase:
    _no_memory_format(func, memory_format)
    return _map(func, q)


def _no_memory_format(func: Any, memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise UnsupportedError(f"{func} on a quantized tensor: its buffers are row-major, not {memory_format}")


def _to(func: Any, q: QuantizedTensorBase, *, memory_format: Any = None, **kwargs: Any) -> QuantizedTensorBase:
    _no_memory_format(func, memory_format)
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, q.dtype):
        raise UnsupportedError(
            f"a {q.kind.__name__} of logical dtype {q.dtype} cannot become {dtype}; "
            f"call dequantize(dtype={dtype}) on it"
        )
    return _map(lambda t: func(t, **kwargs), q)


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
        raise UnsupportedError(f"{func} is defined on the first dimension of a QuantizedStack alone; got {stack!r}")
    parts = {}
    for name in stack.__tensor_flatten__()[0]:
        t = getattr(stack, name).select(0, g)
        whole = name.endswith("amax") or (stack.quantizer.format.per_tensor and name.endswith("scale_inv"))
        parts[name] = t.reshape(-1) if whole else t
    return QuantizedTensor(stack.quantizer, stack.shape[1:], stack.dtype, **parts)


def _unbind(func: Any, stack: Any, dim: int = 0) -> tuple[QuantizedTensor, ...]:
    return tuple([_select(func, stack, dim, g) for g in range(stack.shape[0])])


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _to,
    aten.copy_.default: _copy_,
    aten.equal.default: _equal,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
}
