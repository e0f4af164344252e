"""Calls that cannot be compiled. They run eagerly between graphs, and a warning names each once, with its remedy; under
`fullgraph=True` Dynamo's error has the same words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from diptych.common.errors import EagerWarning, UnsupportedError


class EagerOnly:
    """Runs a function outside of graphs. `reason`: what cannot be compiled, why, and what to do instead.

    **Raises** NotImplementedError where something else than Dynamo traces, such as `torch.export` with strict=False: no
    graph can be left there.
    """

    def __init__(self, reason: str) -> None:
        self.reason, self.warned = reason, False

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls fn; `set_runs`, which Dynamo alone runs, replaces this by `outside`, which Dynamo does not trace."""
        raise UnsupportedError(self.reason)

    def outside(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # fn finds that it is traced, and would call this function again
            raise UnsupportedError(self.reason)
        self.warn()
        return fn(*args, **kwargs)

    def warn(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(f"{self.reason}; until then it runs eagerly", EagerWarning, stacklevel=3)


DELAYED_WGRAD = EagerOnly(
    "delay_wgrad_compute under torch.compile: what waits for backward_dw would leave the graph by a way that it does "
    "not know; leave this module out of it (torch.compiler.disable)"
)
MARKED_WGRAD = EagerOnly(
    "a weight with grad_added_to_main_grad under torch.compile: a graph's backward sets no attribute of a parameter; "
    "leave this module out of it (torch.compiler.disable), or take the attribute away"
)
CALIBRATING = EagerOnly(
    "autocast(calibrating=True) under torch.compile: a graph collects no amaxes in high precision; calibrate eagerly, "
    "then compile"
)


TRANSFORMS = EagerOnly(
    "transforms of torch.func (grad, vjp, jacrev, vmap) around diptych's layers and regions under torch.compile: the "
    "nodes of a graph have no rules for them; leave the transform out of it (torch.compiler.disable)"
)


def set_runs() -> None:
    """Sets `run` of each `EagerOnly`, which Dynamo reads later while it traces. This is not done at import, because
    importing torch._dynamo takes a second."""
    for part in (DELAYED_WGRAD, MARKED_WGRAD, CALIBRATING, TRANSFORMS):
        if "run" not in part.__dict__:
            part.run = torch.compiler.disable(part.outside, reason=part.reason)


def outside(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs fn eagerly where traced code calls it inside of a transform of torch.func. With most backends Dynamo then
    runs the whole transform eagerly. Warns once. **Raises** what `EagerOnly` raises."""
    from diptych.torch.private.dynamo import comptime  # importing torch._dynamo takes a second

    comptime(before_leaving)
    return TRANSFORMS.run(fn, *args, **kwargs)


def before_leaving(context: Any) -> None:
    """Warns while Dynamo traces a transform that it will run eagerly, since Dynamo may run none of this code later."""
    set_runs()
    TRANSFORMS.warn()
