"""What autograd's engine asks of a node in the backward pass that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_will_run = torch._C._will_engine_execute_node


def asked(ctx: Any, edges: Sequence[tuple[str, int]]) -> tuple[str, ...] | None:
    """Returns the inputs of a Function whose gradients go anywhere in this pass: `autograd.grad(inputs=...)`,
    `backward(inputs=...)` and the halves of a zero-bubble schedule ask for some of those that require one. None: all
    are asked for.

    **Arguments:** `ctx`: the Function's. `edges`: the names of the inputs that require grad, each with its place among
    the tensors that `apply` was given. `ctx.needs_input_grad` is decided when the graph is made, and knows no pass.
    """
    nodes = ctx.next_functions
    try:  # without a call for each edge
        found = [name for name, place in edges if _will_run(nodes[place][0])]
    except RuntimeError:
        found = [name for name, place in edges if _runs(nodes[place][0])]
    return None if len(found) == len(edges) else tuple(found)


def _runs(node: Any) -> bool:
    try:
        return _will_run(node)
    except RuntimeError:  # the gradient of a leaf that autograd.grad returns; or no engine runs, and all is computed
        return True
