"""QuantizedArray, the result of `quantize`, and QuantizedStack, as pytrees.

Their arrays are leaves; the quantizer and the logical dtype are metadata. A QuantizedArray is **not** an array: it has
no operators, is not promoted, and is dequantized only by `dequantize`. Under `vmap` and `scan` every leaf gets the
mapped axis in front, and so does `shape`, which is computed from the leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, ClassVar

import jax
import numpy as np

from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.formats import FormatRow
from diptych.common.ops import shapes
from diptych.common.quantizers import Quantizer
from diptych.jax.primitives.checks import Copy, dtype_name
from diptych.jax.primitives.quantize import dequantize

Array = jax.Array

BUFFERS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax",
    "columnwise_amax",
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedCopies:
    """The copies of one tensor, or of a stack. `leading` and `dtype`: leading dimensions and dtype of a tensor that was
    quantized, without axes that transformations added."""

    quantizer: Quantizer
    leading: tuple[Any, ...]
    dtype: str
    rowwise_data: Array | None = None
    rowwise_scale_inv: Array | None = None
    columnwise_data: Array | None = None
    columnwise_scale_inv: Array | None = None
    amax: Array | None = None
    columnwise_amax: Array | None = None

    scale_rank: ClassVar[int] = 2
    """Dimensions that scales of blocks have; those of whole tensors have one."""

    @property
    def format(self) -> FormatRow:
        return self.quantizer.format

    @property
    def shape(self) -> tuple[Any, ...]:
        """Logical shape, with axes that transformations added in front."""
        if self.rowwise_data is not None:
            return shapes.tensor_shape(self.format, False, self.rowwise_data.shape)
        if self.columnwise_data is None:
            raise ValueError(f"this {type(self).__name__} holds no copy")
        data = self.columnwise_data.shape
        if self.quantizer.copy_format(True).columnwise != "transposed":
            return data
        return (*data[:-2], *self.leading, data[-2])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def copy_of(self, columnwise: bool, op: str) -> Copy:
        """Returns one copy in the form that primitives take.

        **Raises** ValueError if the copy was not made, ShapeError if its leaves have axes added by a `vmap` or `scan`.
        """
        side = "columnwise" if columnwise else "rowwise"
        data, scale = getattr(self, f"{side}_data"), getattr(self, f"{side}_scale_inv")
        amax = (self.columnwise_amax if columnwise else self.amax) if self.format.two_level else None
        if data is None or scale is None:
            raise ValueError(
                f"{op} needs the {side} copy of {self!r}, which was not made; quantize with "
                f"quantizer.with_usage({side}=True)"
            )
        added = scale.ndim - (1 if self.format.one_scale else self.scale_rank)
        if added:
            raise ShapeError(
                f"{op}: {self!r} carries {added} more axis(es) than when it was quantized, as vmap and scan add them; "
                "apply the op under jax.vmap"
            )
        return Copy(data, scale, amax, self.quantizer.copy_format(columnwise).name, columnwise)

    def __repr__(self) -> str:
        copies = [s for s in ("rowwise", "columnwise") if getattr(self, f"{s}_data") is not None]
        leaf = next((getattr(self, f"{s}_data") for s in copies), None)
        shape = list(self.shape) if hasattr(leaf, "shape") else "?"  # tree utilities put any object into leaves
        name = type(self).__name__
        return f"{name}({self.format.name}, shape={shape}, dtype={self.dtype}, copies={'+'.join(copies)})"


ABOUT = ("quantizer", "leading", "dtype")
register = functools.partial(jax.tree_util.register_dataclass, data_fields=BUFFERS, meta_fields=ABOUT)


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray(QuantizedCopies):
    """A quantized tensor of logical shape [*leading, K].

    `rowwise_data` has the tensor's shape; `columnwise_data` is [K, M] where the format transposes, M being the product
    of `leading`; E2M1 payloads are uint8 with two elements a byte, which halves the last extent. Scales are logical
    row-major, [1] for per-tensor formats. A copy that was not made is None. `amax`: float32 [1] of per-tensor formats
    and of NVFP4's rowwise copy (there also [M], one per row); `columnwise_amax`: [1] of NVFP4's columnwise copy.
    Payloads and one-byte scales may be uint8 arrays of their bytes (`quantize(as_bytes=True)`); every op takes both.
    """

    def dequantize(self, dtype: Any = None) -> Array:
        """The values; see `diptych.jax.dequantize`."""
        copy = self.copy_of(self.rowwise_data is None, "dequantize")
        return dequantize(copy, dtype_name("dequantize", dtype, self.dtype)).reshape(self.shape)


def from_buffers(buffers: dict[str, Array], quantizer: Quantizer, shape: shapes.Shape, dtype: Any) -> QuantizedArray:
    """Wraps what the primitive `quantize` filled for a tensor of `shape` and `dtype`."""
    return QuantizedArray(quantizer, tuple(shape[:-1]), np.dtype(dtype).name, **buffers)


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedStack(QuantizedCopies):
    """G quantized tensors of one shape [*leading, K], made by `quantize_stack`; `shape` is [G, *leading, K].

    Its arrays are those of a `QuantizedArray` with a leading G; scales and amaxes of a whole tensor, [1] there, are
    [G]. The tensors share only their quantizer. Like `QuantizedArray`, it is a pytree.
    """

    scale_rank: ClassVar[int] = 3

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, g: int) -> QuantizedArray:
        """Tensor g. **Raises** IndexError past the last."""
        self.copy_of(self.rowwise_data is None, "a stack's tensor")  # raises where axes were added
        if not -len(self) <= operator.index(g) < len(self):
            raise IndexError(f"tensor {g} of a stack of {len(self)}")
        parts = {}
        for name in BUFFERS:
            x = getattr(self, name)
            if x is not None:
                whole = name.endswith("amax") or (self.format.one_scale and name.endswith("scale_inv"))
                parts[name] = x[g].reshape(-1) if whole else x[g]
        return QuantizedArray(self.quantizer, self.leading, self.dtype, **parts)

    def dequantize(self, dtype: Any = None) -> Array:
        """Returns the dequantized stack, with the values of `diptych.jax.dequantize` for each tensor."""
        op = "dequantize"
        copy = self.copy_of(self.rowwise_data is None, op)
        return stack_values(copy, dtype_name(op, dtype, self.dtype)).reshape(self.shape)


def stack_values(stack: Copy, dtype: str) -> Array:
    """Returns the dequantized values of one copy of a stack, with a leading G."""

    def each(data: Array, scale_inv: Array, *amax: Array) -> Array:
        return dequantize(Copy(data, scale_inv, amax[0] if amax else None, stack.format, stack.columnwise), dtype)

    data, *whole = stack.operands("dequantize")
    return jax.vmap(each)(data, *(x[:, None] if x.ndim == 1 else x for x in whole))


def require_quantized(op: str, arg: str, q: Any) -> QuantizedArray:
    if not isinstance(q, QuantizedArray):
        raise ArgumentError(f"{op}: {arg} must be a QuantizedArray, got {type(q).__name__}; quantize it first")
    return q
