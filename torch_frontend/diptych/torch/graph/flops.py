"""Counts of floating-point operations of diptych's products, for `torch.utils.flop_counter` and its users.

A product of an [M, K] and a [K, N] matrix is 2 M N K operations, as torch counts its own; quantizing and the other ops
count as none, as torch's pointwise ones do. A grouped product counts all of its rows, also those in no group, because
only the device has the offsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from diptych.common.formats import FORMATS
from diptych.common.ops import shapes
from diptych.common.ops.grouped import grouped_shape
from diptych.torch.primitives import gemm, grouped_matmul  # these modules define the ops  # noqa: F401
from diptych.torch.private.dispatch import TorchDispatchMode, tree_map_only
from diptych.torch.private.graphs import FakeTensorMode, fake_mode

_Shape = tuple[int, ...]


def register(packet: Any, formula: Callable[..., int], raw: bool = False) -> None:
    """Registers an op's count. `formula`: gets the op's arguments and its result, with shapes in place of tensors
    unless `raw`."""
    flop_registry.pop(packet, None)  # an op of that name, whose library is gone, may have left its formula
    register_flop_formula(packet, get_raw=raw)(formula)


def _operands(given: tuple[Any, ...]) -> list[Any]:
    """Returns (format, columnwise or not, shape) of both operands one after the other, as rules of shapes take them.
    `given`: an op's arguments, which begin with both copies."""
    return [part for i in (0, 5) for part in (FORMATS[given[i + 3]], given[i + 4], given[i])]


def _gemm(*given: Any, **_: Any) -> int:
    shape = shapes.gemm_shape(*_operands(given))
    return 2 * shape.m * shape.n * shape.k


def _grouped_gemm(*given: Any, **_: Any) -> int:
    (groups,) = given[10]  # of the offsets
    shape = grouped_shape(groups - 1, *_operands(given))
    return 2 * shape.out[-2] * shape.n * shape.k  # a product over rows gives [G, M, N], and its K is all rows


def _grouped_matmul(a: _Shape, *_: Any, out_shape: _Shape, **__: Any) -> int:
    return 2 * math.prod(a) * out_shape[-1]


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _without_memory(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def register_node(node: Any, run: Callable[..., Any]) -> None:
    """Registers the count of a node, all of whose overloads must be defined: its implementation `run` is run on fake
    tensors, and its products are counted. Fake tensors keep their devices, which a node may make further tensors on."""

    def formula(*args: Any, out_val: Any = None) -> int:
        with fake_mode() or FakeTensorMode(allow_non_fake_inputs=True), _Count() as count:
            run(*tree_map_only(Tensor, _without_memory, args))
        return count.total

    register(node.overloadpacket, formula, raw=True)


register(torch.ops.diptych.gemm, _gemm)
register(torch.ops.diptych.gemm_into, lambda acc, *operands, **_: _gemm(*operands))
register(torch.ops.diptych.grouped_gemm, _grouped_gemm)
register(torch.ops.diptych.grouped_gemm_into, lambda acc, *operands, **_: _grouped_gemm(*operands))
register(torch.ops.diptych.grouped_matmul, _grouped_matmul)
