"""The inputs of a node for which the running backward pass asks a gradient, as autograd's engine knows them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from diptych.torch.private.autograd import will_run


class Parts:
    """The backward passes of this process that run now and were given `inputs`."""

    running = 0
    lock = threading.Lock()  # a pass may begin in any thread


def run_part(run: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Runs a backward pass that was given `inputs`."""
    with Parts.lock:
        Parts.running += 1
    try:
        return run(*args, **how)
    finally:
        with Parts.lock:
            Parts.running -= 1


def asked(ctx: Any, edges: Sequence[tuple[str, int]]) -> tuple[str, ...] | None:
    """Returns the names of a Function's inputs whose gradients this backward pass uses; None if it uses all of them.

    `autograd.grad(inputs=...)`, `backward(inputs=...)` and the halves of a zero-bubble schedule ask for some of the
    inputs that require one. A pass that calls the engine's own object, past `torch.autograd`, counts as one that asks
    for all. `ctx.needs_input_grad` does not tell, since torch sets it when the graph is made, before any pass.

    **Arguments:** `ctx`: the Function's context. `edges`: the names of the inputs that require grad, each with its
    place among the tensors that `apply` was given.
    """
    if not Parts.running:
        return None
    nodes = ctx.next_functions
    found = tuple([name for name, place in edges if _runs(nodes[place][0])])
    return None if len(found) == len(edges) else found


def _runs(node: Any) -> bool:
    try:
        return will_run(node)
    except RuntimeError:  # autograd.grad returns the gradient of this leaf; or no engine runs, and all is computed
        return True
