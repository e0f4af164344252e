"""The hash of a tensor's bits: kernel call and fake implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.ops import hash as rules
from diptych.core import _core
from diptych.torch.primitives.checks import operand
from diptych.torch.primitives.register import define, empty_beside, run


def flat(x: Tensor) -> Tensor:
    """Returns the elements in row-major order, [n] with a stride of 1."""
    dense = x.contiguous()  # as_strided: a tensor of one element or none may have any strides
    return dense.as_strided((dense.numel(),), (1,))


def _hash(x: Tensor) -> Tensor:
    out = empty_beside(x, rules.hash(operand("x", x)), torch.int32)
    _core.hash(flat(x.resolve_conj()).view(torch.uint8), out)
    return out


def _hash_fake(x: Tensor) -> Tensor:
    return x.new_empty(rules.hash(operand("x", x)), dtype=torch.int32)


_hash_op = define("hash", "(Tensor x) -> Tensor", _hash, _hash_fake)


def hash(x: Tensor) -> Tensor:
    """The hash of the bits of x, int32 [4] on x's device. It has no derivative."""
    return run("hash", _hash, _hash_op, x)
