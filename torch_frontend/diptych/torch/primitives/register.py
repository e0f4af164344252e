"""How an op of the core becomes a torch op: its buffers, its registration, and when a call bypasses the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.ops import shapes
from diptych.common.quantizers import Quantizer
from diptych.torch.primitives.checks import Copy, enforce, require_local, require_no_grad, require_no_tangent
from diptych.torch.private.autograd import forward_level, increment_version, profiled
from diptych.torch.private.dispatch import below_autograd as autograd_passed
from diptych.torch.private.dispatch import jit_traces, mode_count, schema, tree_map
from diptych.torch.private.functorch import interpreter_stack
from diptych.torch.private.graphs import FakeScriptObject, variable

# Where each buffer of `quantize` stands in the core's argument list.
_PLACES = {
    "amax": 0,
    "columnwise_amax": 1,
    "rowwise_data": 2,
    "rowwise_scale_inv": 3,
    "columnwise_data": 4,
    "columnwise_scale_inv": 5,
}


_Layout = tuple[tuple[int, tuple[int, ...], Callable[..., Tensor]], ...]


_layouts: dict[Any, _Layout] = {}


@functools.cache
def allocator(dtype: str, device: torch.device) -> Callable[..., Tensor]:
    """Returns the new_empty of an empty tensor, the fastest allocator from Python. One serves all shapes: a tensor kept
    for each shape would lie between large buffers in the C heap, whose pages could not be merged or freed."""
    return torch.empty(0, dtype=getattr(torch, dtype), device=device).new_empty


def layout(shape: tuple[int, ...], quantizer: Quantizer, device: torch.device) -> _Layout:
    """(place, shape, allocator) of each buffer."""
    key = (shape, quantizer.spec, quantizer.rowwise, quantizer.columnwise, device)  # hashes faster than a quantizer
    found = _layouts.get(key)
    if found is None:
        shapes.check(shapes.quantize_constraints(shape, quantizer))
        found = tuple(
            (_PLACES[b.name], b.shape, allocator(b.dtype, device)) for b in shapes.quantize_buffers(shape, quantizer)
        )
        if len(_layouts) >= 4096:
            _layouts.clear()
        _layouts[key] = found
    return found


def new_buffers(buffers: _Layout) -> tuple[list[Tensor | None], list[Tensor]]:
    """Returns new buffers by place, with None where there is none, and in the order of `buffers`."""
    places: list[Tensor | None] = [None] * len(_PLACES)
    made = []
    for place, shape, new in buffers:
        places[place] = t = new(*shape)
        made.append(t)
    return places, made


def fake_buffers(x: Tensor, quantizer: Quantizer) -> list[Tensor]:
    """The buffers that `quantize` makes of x, unfilled; they are fake where x is."""
    shape = tuple(x.shape)
    enforce(shapes.quantize_constraints(shape, quantizer))
    return [x.new_empty(b.shape, dtype=getattr(torch, b.dtype)) for b in shapes.quantize_buffers(shape, quantizer)]


def workspace(nbytes: int, device: torch.device) -> Tensor | None:
    return torch.empty(nbytes, dtype=torch.uint8, device=device) if nbytes and device.type == "cuda" else None


def contiguous(copy: Copy) -> Copy:
    data, scale_inv, amax, format_id, columnwise = copy
    amax = None if amax is None else amax.contiguous()
    return data.contiguous(), scale_inv.contiguous(), amax, format_id, columnwise


_LIBRARY = torch.library.Library("diptych", "DEF")


RECORDABLE: dict[Any, Callable[..., Any]] = {}
"""Implementations of the ops that programs may record, by overload."""

OBSERVERS: list[Callable[[str, list[str], Callable[..., Any], Any, Any], Any]] = []
"""The last one runs the ops instead: it is called with an op's name, its arguments' names, its implementation, and the
positional and named arguments. While there is one, no call bypasses the dispatcher."""


def define(
    name: str,
    signature: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    backends: tuple[str, ...] = ("CPU", "CUDA"),
    buffers: bool = False,
    recordable: bool = False,
) -> Any:
    """Makes `torch.ops.diptych.<name>`: `real` for CPU and CUDA tensors, `fake` for shapes, no derivative.

    `buffers`: no argument can require grad, so that check is left out. `recordable`: `real` allocates and calls the
    core, and does nothing else, so that programs may record it.
    """
    _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))

    def observed(*args: Any, **kwargs: Any) -> Any:
        return OBSERVERS[-1](name, names, real, args, kwargs) if OBSERVERS else real(*args, **kwargs)

    for backend in backends:
        _LIBRARY.impl(name, observed, backend)
    torch.library.register_fake(f"diptych::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.diptych, name).default
    torch.library.register_vmap(overload, _rule_of_vmap(overload), lib=_LIBRARY)
    names = [a.name for a in schema(overload).arguments]
    if recordable:
        RECORDABLE[overload] = real
    if buffers:
        return overload

    def below_autograd(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        for argument, t in zip(schema(overload).arguments, args, strict=False):
            require_local(f"diptych::{name}", argument.name, t)
        require_no_grad(f"diptych::{name}", *(t for t in given if isinstance(t, Tensor)))
        require_no_tangent(
            f"diptych::{name}", *(t for a in given for t in (a if isinstance(a, (list, tuple)) else (a,)))
        )
        with autograd_passed():
            return overload(*args, **kwargs)

    _LIBRARY.impl(name, below_autograd, "Autograd")
    return overload


def _rule_of_vmap(op: Any) -> Callable[..., Any]:
    """Returns the rule of an op under torch.func.vmap: it runs once for each example, with the bits of separate
    calls."""

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        if schema(op).is_mutable:
            raise UnsupportedError(f"{schema(op).name} writes to an argument, and has no rule for torch.func.vmap")
        if info.batch_size == 0:
            raise ShapeError(f"{schema(op).name}: vmap over a dimension of size 0, which has no example to run")
        made = []
        for i in range(info.batch_size):
            made.append(op(*tree_map(lambda t, d, i=i: t if d is None else t.select(d, i), list(args), list(in_dims))))
        if isinstance(made[0], Tensor):
            return stacked(made), 0
        results = [stacked(each) for each in zip(*made, strict=True)]
        return type(made[0])(results), type(made[0])([0] * len(results))

    return rule


def stacked(each: Sequence[Tensor]) -> Tensor:
    """Stacks tensors along a new first dimension; torch's function does not take all 8-bit floats."""
    if each[0].element_size() > 1 or each[0].dtype in (torch.uint8, torch.bool):
        return torch.stack(list(each))
    return torch.stack([t.view(torch.uint8) for t in each]).view(each[0].dtype)


def direct(*tensors: Tensor | None, unnamed: bool = False, watched: bool = False) -> bool:
    """Whether a call may bypass the dispatcher: its tensors are plain and dense, and nothing traces, intercepts or
    profiles.

    `unnamed`: a profiler does not prevent it, because the ops that the call runs have names of their own. `watched`:
    dispatch modes do not prevent it either, because seeing those ops is enough for them.
    """
    if torch.compiler.is_compiling() or interpreter_stack() is not None:
        return False
    if forward_level() >= 0:
        return False
    if not (unnamed or watched) and profiled():
        return False
    if not watched and (OBSERVERS or mode_count()):
        return False
    for t in tensors:
        if t is None:
            continue
        if type(t) is not Tensor and type(t) is not Parameter:
            return False
        if t.is_meta or t.is_neg() or t.layout is not torch.strided:
            return False
    return not jit_traces()


def wrote(*tensors: Tensor) -> None:
    """Increments version counters, so that autograd notices a write to a tensor that was saved for backward."""
    increment_version([t for t in tensors if not t.is_inference()])


def traced_local(context: Any, name: str) -> Any:
    """Returns the real object of a local of traced code, for code that runs through `comptime`."""
    tracked = variable(context, name)
    value = tracked.value if hasattr(tracked, "value") else tracked.as_python_constant()
    return value.real_obj if isinstance(value, FakeScriptObject) else value  # torch 2.11 wraps constants


def empty_beside(x: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def contiguous_or_none(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def run(name: str, real: Callable[..., Any], op: Callable[..., Any], *args: Any) -> Any:
    tensors = [t for t in args if isinstance(t, Tensor)]
    if not direct(*tensors):
        return op(*args)
    require_no_grad(f"diptych::{name}", *tensors)
    return real(*args)
