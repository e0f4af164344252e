"""`QuantizedTensor`: one or two quantized copies of a tensor, and the quantizer that made them. `QuantizedStack`: the
same for several tensors of one shape.

Traceable wrapper subclasses: torch.compile sees their buffers, and they have the shape, dtype and device of the tensor
they stand for. They are **not** number types. Operators that move or copy one whole work (detach, clone, to(device or
dtype), empty_like, copy_, `.data =`, save, pickle, deepcopy); every other operation raises NotImplementedError instead
of dequantizing behind your back. Arithmetic is defined on a `QuantizedParameter` of the modules only.

Those that require grad are results of `quantize` or of this package's modules and ops, and `QuantizedParameter`s. The
gradient is a plain tensor of the same shape and logical dtype, also where it enters or leaves a compiled region.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError, DeviceError, ShapeError, UnsupportedError
from diptych.common.quantizers import RHT, Quantizer, copy_format_id
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import (
    TWO_LEVEL,
    Copy,
    describe,
    outside_of_transforms,
    require_local,
    require_no_tangent,
    wrapped,
)
from diptych.torch.private.dispatch import can_decompose, new_wrapper, no_torch_function, tree_map
from diptych.torch.private.functorch import transforms_active
from diptych.torch.private.graphs import FakeTensor

BUFFERS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax",
    "columnwise_amax",
)


class QuantizedTensorBase(Tensor):
    """The common base of `QuantizedTensor` and `QuantizedStack`, which differ in what the shapes of buffers mean."""

    kind: type[QuantizedTensorBase]  # QuantizedTensor or QuantizedStack, also in classes derived from them
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
        if transforms_active() and wrapped(data):
            raise UnsupportedError(
                f"a {cls.kind.__name__} of tensors of a transform of torch.func, which would take its class away: use "
                "a layer there, such as diptych.torch.linear, or quantize outside of the transform"
            )
        if data is None:
            raise ValueError(f"a {cls.kind.__name__} holds a rowwise or a columnwise copy, and neither was given")
        self = new_wrapper(cls, shape, dtype=dtype, device=data.device, requires_grad=False)
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
                f"this product needs the {side} copy, which {self.quantizer.described()} does not make; "
                f"quantize with quantizer.with_usage({side}=True)"
            )
        format_id = copy_format_id(self.quantizer.spec, columnwise)
        amax = (self.columnwise_amax if columnwise else self.amax) if TWO_LEVEL[format_id] else None
        return data, scale_inv, amax, format_id, columnwise

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """See `diptych.torch.dequantize`."""
        dtype = self.dtype if dtype is None else dtype
        require_no_tangent("dequantize", self)
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._values(dtype)
        if transforms_active() and not torch.compiler.is_compiling():
            return outside_of_transforms("dequantize", _Dequantize.apply, self, dtype)
        return _Dequantize.apply(self, dtype)

    def _values(self, dtype: torch.dtype) -> Tensor:
        """Returns the values of the rowwise copy, or of the only one."""
        raise NotImplementedError

    def quantize_(self, src: Tensor) -> Self:
        """Quantizes `src` by this tensor's quantizer, in place: every copy is written anew, storages stay.

        **Arguments:** `src`: a plain tensor of this one's shape. **Raises** ValueError for another shape.
        """
        if src.shape != self.shape:
            raise ShapeError(f"quantize_ of a {self.kind.__name__} {list(self.shape)}: got {describe(src)}")
        with torch.no_grad():
            return self.copy_(self._made_of(src).to(self.dtype))  # type: ignore[return-value]

    def _made_of(self, src: Tensor) -> Tensor:
        """Quantizes a plain tensor with this tensor's quantizer."""
        return QUANTIZE[self.kind](src.detach(), self.quantizer)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Frees the copies that are not wanted. None leaves a copy as it is.

        **Raises** ValueError for a copy that is wanted and was not made, which only the values in high precision could
        give, and where no copy would be left.
        """
        wanted = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        for side, want in wanted.items():
            if want and getattr(self, f"{side}_data") is None:
                raise ValueError(
                    f"update_usage: the {side} copy was not made, and no copy is made from another; quantize the "
                    f"tensor in high precision with quantizer.with_usage({side}=True)"
                )
        kept = [
            side for side, want in wanted.items() if want is not False and getattr(self, f"{side}_data") is not None
        ]
        self.quantizer = self.quantizer.with_usage(rowwise="rowwise" in kept, columnwise="columnwise" in kept)
        for name in set(BUFFERS) - set(self.quantizer.buffer_names()):
            setattr(self, name, None)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """This tensor without its history, sharing its buffers.

        A tensor that is assigned must have this one's shape. A plain one is quantized into the buffers by this tensor's
        quantizer; from a quantized one this tensor takes the buffers, quantizer, logical dtype and device.
        """
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:
        what = f"assigning .data of a {self.kind.__name__} {list(self.shape)}"
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{what}: a tensor is needed, got {type(value).__name__}")
        if value.shape != self.shape:
            raise ShapeError(f"{what}: got {describe(value)}; a quantized tensor keeps its shape")
        if not isinstance(value, QuantizedTensorBase):
            if value.device != self.device:
                raise DeviceError(f"{what} on {self.device}: got {describe(value)}; move the quantized tensor first")
            of: Any = self.detach()
            of.quantize_(value.detach())
            return
        if not isinstance(value, self.kind):
            raise ArgumentError(f"{what}: got a {value.kind.__name__}")
        if (value.dtype, value.device) != (self.dtype, self.device):
            like: Any = self.detach()
            like = type(like)(value.quantizer, value.shape, value.dtype, **parts_of(value))
            Tensor.data.__set__(self, like)  # type: ignore[attr-defined]
        self.quantizer = value.quantizer
        for name in BUFFERS:
            setattr(self, name, getattr(value, name))

    def storage(self) -> Any:
        """**Raises** TypeError: the bytes lie in several buffers."""
        raise ArgumentError(
            f"a {self.kind.__name__} has no storage of its own: what reads tensors' bytes, such as safetensors, takes "
            "the plain tensors of diptych.torch.plain_state_dict(model)"
        )

    def share_memory_(self) -> Self:
        """**Raises** NotImplementedError: shared memory would have to hold all buffers at once."""
        raise UnsupportedError(
            f"share_memory_: a {self.kind.__name__} has no memory of its own to share; share its buffers, which "
            "__tensor_flatten__ names, or dequantize() it"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantizer, torch.dtype]]:
        return [name for name in BUFFERS if getattr(self, name) is not None], (self.quantizer, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[Quantizer, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensorBase:
        return cls(meta[0], outer_size, meta[1], **inner)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """The gradient that AOTAutograd plans for where one leaves a compiled region: a plain tensor.

        AOTAutograd, which expects a wrapper here, calls `__tensor_flatten__` on it once; it has no parts.
        """
        data = self.rowwise_data if self.columnwise_data is None else self.columnwise_data
        tangent: Any = data.new_empty(self.shape, dtype=self.dtype)  # type: ignore[union-attr]

        def taken_apart() -> tuple[list[str], None]:
            del tangent.__tensor_flatten__
            return [], None

        tangent.__tensor_flatten__ = taken_apart
        return tangent

    def _stable_hash_for_caching(self) -> str:
        """Returns the key of this kind of tensor in torch's compile caches: layout and quantizer, no content."""
        buffers = [(n, str(t.dtype), str(t.shape)) for n in BUFFERS if (t := getattr(self, n)) is not None]
        q = self.quantizer
        # A quantizer compared by identity gets a random key: no name of its own is unique across processes and objects.
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
        # A quantizer compared by identity is pickled itself; torch.load(weights_only=True) then needs its class.
        made_of = (q, None) if names is None else (type(q), {name: getattr(q, name) for name in names})
        # As bytes: torch's legacy pickle format does not know FP8 storage.
        buffers = {name: t.view(torch.uint8) for name in BUFFERS if (t := getattr(self, name)) is not None}
        return _rebuild, (*made_of, tuple(self.shape), self.dtype, buffers, self.kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        if func in TAKES_COTANGENTS:
            return func(*tree_map(_cotangent, args), **(kwargs or {}))
        parts = in_parts(func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        raise UnsupportedError(f"{called(func)} is not defined on a {cls.kind.__name__}; call dequantize() on it first")


class QuantizedTensor(QuantizedTensorBase):
    """A quantized tensor of logical `shape` and `dtype`; made by `diptych.torch.quantize`.

    `rowwise_data` has the tensor's shape, `columnwise_data` too or, where the format transposes, [K, M] with leading
    dimensions folded into M. Payloads of E2M1 are uint8, two elements a byte (the even one in the low bits), which
    halves the last extent. Scales are logical row-major, in the orientation of their data. `amax` is float32 [1]: in
    per-tensor formats the tensor's amax, in two-level ones that of the rowwise copy ([M] with row scales);
    `columnwise_amax` [1] is that of the columnwise copy. A buffer that was not made is None.
    """

    def _values(self, dtype: torch.dtype) -> Tensor:
        return quantize_ops.dequantize(self.copy_of(self.rowwise_data is None), dtype).reshape(self.shape)


class QuantizedStack(QuantizedTensorBase):
    """G quantized tensors of one shape, made by `quantize_stack`; `shape` is [G, ..., K], `dtype` the logical one.

    Its buffers are those of a `QuantizedTensor` with a leading dimension G; scales of a whole tensor and amaxes are [G]
    instead of [1]. The tensors share nothing but their quantizer. `stack[g]` is a view of tensor g, and iterating gives
    all tensors.
    """

    def _values(self, dtype: torch.dtype) -> Tensor:
        return grouped_ops.stack_values(self.copy_of(self.rowwise_data is None), dtype).reshape(self.shape)


QuantizedTensor.kind, QuantizedStack.kind = QuantizedTensor, QuantizedStack


QUANTIZE: dict[type, Callable[..., Any]] = {}
"""The verb that makes tensors of each kind; the files of the verbs enter themselves."""

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""The operators that are defined on quantized tensors; `quantized_ops` enters them."""

TAKES_COTANGENTS: set[Any] = set()
"""Ops that get gradients of quantized tensors. While Dynamo traces, a cotangent has the type of its output; the one
that comes is a plain tensor (AOTAutograd's, and eager autograd's)."""


def _cotangent(t: Any) -> Any:
    if isinstance(t, QuantizedTensorBase):
        if not isinstance(t.rowwise_data if t.columnwise_data is None else t.columnwise_data, FakeTensor):
            raise ArgumentError("the gradient of a quantized tensor is a plain tensor, and a QuantizedTensor was given")
        return torch.empty(t.shape, dtype=t.dtype, device=t.device)
    return t


def called(func: Any) -> str:
    """Returns the name under which users call an operator."""
    name = func.overloadpacket.__name__
    return name if func.namespace == "aten" else f"{func.namespace}.{name}"


def in_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a composite operator as its parts, which inference mode does not do itself; returns NotImplemented for
    others."""
    return func.decompose(*args, **(kwargs or {})) if can_decompose(func) else NotImplemented


def outside_inference() -> Any:
    """Context for making one quantized tensor from another: inference tensors lack the version counter that detach
    copies."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def parts_of(q: QuantizedTensorBase) -> dict[str, Tensor]:
    """Returns the buffers that are not None, by name."""
    return {name: t for name in BUFFERS if (t := getattr(q, name)) is not None}


class _Dequantize(torch.autograd.Function):
    """Dequantizes; the gradient passes through, cast to the logical dtype."""

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
    """Whether a quantizer's columnwise copies are Hadamard-rotated."""
    return bool(quantizer.spec.flags & RHT)


def high_precision(op: str, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a quantized tensor dequantized to `dtype`, differentiable; a plain tensor as it is.

    **Raises** ValueError where the only copy is of the Hadamard-rotated tensor.
    """
    if not isinstance(t, QuantizedTensorBase):
        return t
    if t.rowwise_data is None and rotated(t.quantizer):
        raise ValueError(
            f"{op}: high precision needs the rowwise copy, which {t.quantizer.described()} does not make, "
            "and its columnwise copy is rotated; quantize with quantizer.with_usage(rowwise=True)"
        )
    return t.dequantize(dtype)


def from_buffers(
    x: Tensor, quantizer: Quantizer, buffers: list[Tensor], encoded: tuple[Any, ...] | None = None
) -> QuantizedTensor:
    """Wraps the buffers that `quantize` or `quantize_delayed` made from x. `encoded`: the shape that they encode; None
    takes x's."""
    named: dict[str, Tensor] = {}
    copies = quantize_ops.copies(quantizer, buffers)
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


def require_quantized(op: str, arg: str, q: Any) -> None:
    require_local(op, arg, q)
    if not isinstance(q, QuantizedTensor):
        raise ArgumentError(f"{op}: {arg} must be a QuantizedTensor, got {type(q).__name__}; quantize() makes one")
