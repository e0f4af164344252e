"""How a dataclass of arguments crosses into a graph: the op's schema, and tensors taken apart and rebuilt.

A spec tells `take` how to rebuild a tensor from the front of a list: "" stands for None, "plain" for a plain tensor,
(quantizer, dtype, names, stack or not, rank) for a quantized one, and ("proto", quantizer, dtype, device,
requires_grad, stack, rank) for a `TensorProto`.
"""

from __future__ import annotations

import types
import typing
from typing import Any, NewType

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.torch.graph.proto import TensorProto
from diptych.torch.primitives import constants
from diptych.torch.primitives.constants import Group
from diptych.torch.tensors.quantized import BUFFERS, QuantizedStack, QuantizedTensor, QuantizedTensorBase

Size = NewType("Size", int)
"""Annotates a size among the arguments of a `CustomOp`; it may be symbolic. `tuple[Size, ...]` annotates several."""

Written = NewType("Written", list)  # type: ignore[type-arg]
"""Annotates a list of tensors among the arguments of a `CustomOp` to which backward writes; forward sees none."""

_DTYPES = {d: str(d).removeprefix("torch.") for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


_QUANTIZABLE = {Tensor, QuantizedTensor, QuantizedStack}


class Field(typing.NamedTuple):
    name: str
    kind: str  # tensor, tensors, quantizable, quantizables, size, sizes, dtype, group, written, plain
    schema: str  # the schema of the field's own input of the node; empty if the field shares an input with others


def _alternatives(hint: Any) -> set[Any]:
    return set(typing.get_args(hint)) if typing.get_origin(hint) in (typing.Union, types.UnionType) else {hint}


def field_of(name: str, hint: Any) -> Field:
    parts = _alternatives(hint)
    optional = "?" if type(None) in parts else ""
    parts.discard(type(None))
    if parts == {Tensor}:
        return Field(name, "tensor", "")
    if parts <= _QUANTIZABLE:
        return Field(name, "quantizable", "")
    if parts == {list[Tensor]} and not optional:
        return Field(name, "tensors", "")
    if len(parts) == 1 and not optional and typing.get_origin(only := next(iter(parts))) is list:
        (inner,) = typing.get_args(only)
        if _alternatives(inner) <= {*_QUANTIZABLE, type(None)}:
            return Field(name, "quantizables", "")
    if parts == {Size} and not optional:
        return Field(name, "size", "")
    if parts == {tuple[Size, ...]} and not optional:
        return Field(name, "sizes", "")
    if parts == {torch.dtype}:
        return Field(name, "dtype", f"ScalarType{optional} {name}")
    if parts == {Group}:
        return Field(name, "group", f"{constants.GROUP_TYPE}? {name}")
    if parts == {Written}:
        return Field(name, "written", "")
    kinds = [p for p in parts if isinstance(p, type)]
    if any(issubclass(p, Tensor) for p in kinds):
        raise ArgumentError(
            f"CustomOp: cannot pass field {name}: {hint} through a graph; annotate it as Tensor, Tensor | None, "
            "Tensor | QuantizedTensor, a list of these, or as the docstring of diptych.torch.graph.custom_op shows"
        )
    return Field(name, "plain", "")


def put(t: Any, tensors: list[Tensor], sizes: list[Any]) -> Any:
    if t is None:
        return ""
    if not isinstance(t, QuantizedTensorBase):
        tensors.append(t)
        return "plain"
    names = tuple([n for n in BUFFERS if getattr(t, n) is not None])
    tensors += [getattr(t, n) for n in names]
    sizes += list(t.shape)
    return t.quantizer, _DTYPES[t.dtype], names, isinstance(t, QuantizedStack), len(t.shape)


def put_proto(t: Tensor, sizes: list[Any]) -> Any:
    sizes += list(t.shape)
    quantizer = t.quantizer if isinstance(t, QuantizedTensorBase) else None
    dtype, stack = str(t.dtype).removeprefix("torch."), isinstance(t, QuantizedStack)
    return "proto", quantizer, dtype, str(t.device), t.requires_grad, stack, len(t.shape)


def take(spec: Any, tensors: list[Tensor], sizes: list[Any]) -> Any:
    if spec == "":
        return None
    if spec == "plain":
        return tensors.pop(0)
    shape = tuple([sizes.pop(0) for _ in range(spec[-1])])
    if spec[0] == "proto":
        _, quantizer, dtype, device, requires_grad, stack, _ = spec
        return TensorProto(shape, getattr(torch, dtype), quantizer, torch.device(device), requires_grad, stack)
    quantizer, dtype, names, stack, _ = spec
    kind = QuantizedStack if stack else QuantizedTensor
    return kind(quantizer, shape, getattr(torch, dtype), **{n: tensors.pop(0) for n in names})


def put_sizes(value: Any, sizes: list[Any]) -> int | None:
    """Appends a size, or several. Returns how many there are, None for a single one."""
    if not isinstance(value, (tuple, list)):
        sizes.append(value)
        return None
    sizes += value
    return len(value)


def take_sizes(count: int | None, sizes: list[Any]) -> Any:
    return sizes.pop(0) if count is None else tuple([sizes.pop(0) for _ in range(count)])


def take_output(proto: TensorProto, made: list[Tensor]) -> Tensor:
    """Takes an output from the front of a node's results."""
    if proto.quantizer is None:
        return made.pop(0)
    q = proto.quantizer
    kind = QuantizedStack if proto.stack else QuantizedTensor
    return kind(q, proto.shape, proto.dtype, **{n: made.pop(0) for n in q.buffer_names()})
