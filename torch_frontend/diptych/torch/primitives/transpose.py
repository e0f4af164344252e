"""`transpose`: matrices of bytes, as columnwise payloads are made from rowwise ones. It has no derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.errors import DTypeError, ShapeError
from diptych.core import _core
from diptych.torch.primitives.register import define, run


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


_transpose_op = define("transpose", "(Tensor x) -> Tensor", _transpose, _transpose_fake)


def transpose(x: Tensor) -> Tensor:
    """Returns [..., C, R] of a tensor [..., R, C] whose elements are one byte."""
    return run("transpose", _transpose, _transpose_op, x)


def transpose_into(x: Tensor, out: Tensor) -> None:
    """Writes a dense tensor [..., R, C] of bytes to `out` [..., C, R] of equally large elements."""
    _core.transpose(x.contiguous().view(torch.uint8), out.view(torch.uint8))
