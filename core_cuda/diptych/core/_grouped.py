"""Stacks and products of groups (the experts of a layer) on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.ops import grouped, shapes
from diptych.common.ops.operand import Operand
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.core._arrays import (
    Array,
    QuantizedArray,
    QuantizedCopies,
    _array,
    _copy_operands,
    _empty,
    _given_values,
    _high_precision,
    _operand,
    _optional,
    _out_dtype,
    _quantized,
)

_KINDS: dict[str, int] = _core.group_kinds()


class QuantizedStack(QuantizedCopies):
    """G quantized tensors of one shape; `shape` is [G, ..., K].

    Each array has the shape that it has in a `QuantizedArray`, with a leading G; per-tensor scales and amaxes, which
    are [1] there, are [G] here. Each tensor has scales of its own.
    """

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, g: int) -> QuantizedArray:
        """Returns tensor g as a view. **Raises** IndexError if there is no tensor g."""
        if not -len(self) <= g < len(self):
            raise IndexError(f"tensor {g} of a stack of {len(self)}")
        g %= len(self)
        each = {
            b.name: getattr(self, b.name)[g].reshape(b.shape)
            for b in shapes.quantize_buffers(self.shape[1:], self.quantizer)
        }
        return QuantizedArray(self.quantizer, self.shape[1:], **each)


def quantize_stack(
    x: Array,
    quantizer: Quantizer,
    *,
    amax: Array | None = None,
    columnwise_amax: Array | None = None,
    scale: Array | None = None,
    rng: Array | None = None,
) -> QuantizedStack:
    """Quantizes each tensor of `x` [G, ..., K] in one call, with the bits that `quantize` gives for it alone.

    **Arguments:** those of `quantize`, with a leading G: `amax`, `columnwise_amax`, `scale` [G], `rng` [G, 4] or
    [G, 8].

    **Returns:** a `QuantizedStack`.

    **Raises:** the errors of `quantize`, and TypeError for a quantizer with its own `quantize_impl`.
    """
    op = "quantize_stack"
    grouped.require_stackable(op, quantizer)
    x = _high_precision(op, "x", x)
    shapes.check(shapes.quantize_constraints(grouped.stack_shape(x.shape), quantizer))
    buffers = grouped.stack_buffers(x.shape, quantizer)
    made = _quantized(op, x, quantizer, buffers, _given_values(amax, columnwise_amax, scale, rng), stack=True)
    return QuantizedStack(quantizer, x.shape, **made)


def _offsets(op: str, offsets: Array) -> Array:
    offsets = _array(op, "offsets", offsets)
    shapes.check(grouped.offsets_of(op, Operand("offsets", offsets.dtype.name, offsets.shape))[1])
    return offsets


def grouped_gemm(
    a: QuantizedArray,
    b: QuantizedStack | QuantizedArray,
    offsets: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array | None = None,
    out_dtype: Any = np.float32,
    align: int = 1,
    fast_accum: bool = False,
) -> Array:
    """Multiplies each group of consecutive rows; group g is the rows offsets[g] <= r < offsets[g + 1] of R.

        fprop   grouped_gemm(x, w, offsets)                                 x [R, K], w [G, N, K] -> [R, N]
        dgrad   grouped_gemm(dy, w, offsets, trans_b=False)                 dy [R, N] -> [R, K]
        wgrad   grouped_gemm(dy, x, offsets, trans_a=True, trans_b=False)   over the rows of a group -> [G, N, K]

    Each group's product has the bits that `gemm` gives for it alone, with blocks of scales placed as in the whole
    tensor. Rows in no group, and products over groups without rows, are +0, plus beta * c.

    **Arguments:** `a`: [..., K] with R rows. `b`: a stack of G tensors; for wgrad a tensor with as many rows as `a`.
    `offsets`: int32 [G + 1], ascending, within 0..R. `bias`: [G, N], not for wgrad. `c`: of the result's shape and
    `out_dtype`, needed if `beta` is not 0. `align`: 1, 16, 32 or 128; every offset must be a multiple of
    it. Hadamard-rotated copies need 16 or more. `alpha`, `fast_accum`: as in `gemm`.

    **Returns:** the result in `out_dtype`; for fprop and dgrad with a's leading dimensions unfolded.

    **Raises:** TypeError for dtypes; ValueError for missing copies, shapes, offsets, only one Hadamard-rotated operand,
    or arguments that do not apply; NotImplementedError for a pair of formats without a kernel.
    """
    op = "grouped_gemm"
    name, np_dtype = _out_dtype(op, out_dtype)
    side_a, side_b = shapes.gemm_copies(trans_a, trans_b)
    if isinstance(b, QuantizedStack) is trans_a:
        raise ArgumentError(
            f"{op}: b must be a {'QuantizedArray' if trans_a else 'QuantizedStack'}, got {type(b).__name__}"
        )
    offsets = _offsets(op, offsets)
    rotated = grouped.rotated_alike(op, a.quantizer, b.quantizer, trans_a)
    formats = a.quantizer.copy_format(side_a), b.quantizer.copy_format(side_b)
    data_a, data_b = a.copy_of(side_a)[0].shape, b.copy_of(side_b)[0].shape
    shape = grouped.grouped_shape(len(offsets) - 1, formats[0], side_a, data_a, formats[1], side_b, data_b)
    shapes.check(shape.constraints)
    if bias is not None:
        bias = _high_precision(op, "bias", bias)
    if c is not None:
        c = _high_precision(op, "c", c)
        if c.shape != shape.out or c.dtype.name != name:
            raise ShapeError(f"{op}: c must be {name}{list(shape.out)}, got {c.dtype.name}{list(c.shape)}")
    out = _empty(shape.out, name)
    _core.grouped_gemm(
        *_copy_operands(a, side_a),
        *_copy_operands(b, side_b),
        _operand(offsets, "int32"),
        _operand(out, name),
        _optional(c, name),
        None if bias is None else _operand(bias, bias.dtype.name),
        None,
        _KINDS[shape.kind],
        align,
        rotated,
        alpha,
        beta,
        fast_accum,
    )
    return out.view(np_dtype) if trans_a else out.view(np_dtype).reshape(*a.shape[:-1], shape.n)


def grouped_bias_grad(dy: Array, offsets: Array, dtype: Any = None) -> Array:
    """Returns the sums [G, N] of groups of `dy` [..., N]; group g is the rows offsets[g] <= r < offsets[g + 1] of R.

    Each group's sum has the bits that `bias_grad` gives for its rows alone; a group without rows gives +0.

    **Arguments:** `offsets`: int32 [G + 1], ascending, within 0..R. `dtype`: dtype of the result; None: dy's.

    **Raises:** TypeError for dtypes, ValueError for shapes and offsets.
    """
    op = "grouped_bias_grad"
    dy, offsets = _high_precision(op, "dy", dy), _array(op, "offsets", offsets)
    named = [Operand(arg, x.dtype.name, x.shape) for arg, x in (("dy", dy), ("offsets", offsets))]
    shapes.check(grouped.grouped_bias_grad(*named)[1])
    name, np_dtype = _out_dtype(op, dy.dtype if dtype is None else dtype)
    out = _empty((len(offsets) - 1, dy.shape[-1]), name)
    _core.grouped_bias_grad(_operand(dy, dy.dtype.name), _operand(offsets, "int32"), _operand(out, name), None)
    return out.view(np_dtype)
