"""Modules under `torch.fx.symbolic_trace`: one node of the graph each, which runs the module itself.

A tracer that entered a module would record the ops of the region that tracing runs in, which is none as a rule, so that
the graph would always run in high precision. `torch.compile` and `torch.export` do not use this file.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from diptych.common.errors import ArgumentError, UnsupportedError


def as_leaf(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Handles a call whose input is no tensor: where torch.fx traces it, makes a `call_module` node.

    **Raises** TypeError for other arguments; NotImplementedError where the traced root does not hold the module.
    """
    proxies = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.fx.Proxy)]
    kind = type(module).__name__
    if not proxies:
        raise ArgumentError(f"{kind}: input must be a torch.Tensor, got {type(args[0]).__name__}")
    tracer = proxies[0].tracer
    try:
        path = tracer.path_of_module(module)  # type: ignore[attr-defined]
    except (AttributeError, NameError):
        _refuse(kind)
    while args and args[-1] is None:
        args = args[:-1]
    return tracer.create_proxy("call_module", path, args, {k: v for k, v in kwargs.items() if v is not None})


def require_traceable(kind: str, x: Any) -> None:
    """Called inside of a module's forward, on an x that is no tensor. **Raises** NotImplementedError for a proxy of a
    tracer that entered the module, TypeError for anything else."""
    if not isinstance(x, torch.fx.Proxy):
        raise ArgumentError(f"{kind}: x must be a torch.Tensor, got {type(x).__name__}")
    _refuse(kind)


def _refuse(kind: str) -> NoReturn:
    raise UnsupportedError(
        f"{kind} under torch.fx: the graph would keep high precision for ever; trace with a torch.fx.Tracer whose "
        "is_leaf_module is true for every diptych.torch.QuantizedModule, or use torch.compile or torch.export"
    )
