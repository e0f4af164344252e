"""Diptych's own guards, which run before each run of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.torch.private.graphs import variable


def before_each_call(
    context: Any, local: str, fits: Callable[[Any], bool], runs: Callable[[], object] | None = None
) -> None:
    """Adds a guard to the graph that is being traced. Before each run the guard calls `fits` on the object in the local
    variable `local`, and the graph may run if that returns True. Dynamo's own guards on the object's attributes follow.
    `runs`: called when all guards hold. If it returns None the graph runs next, otherwise Dynamo traces again."""
    source = variable(context, local).source
    if source is None:  # the traced code itself has made the object
        return
    from diptych.torch.private.dynamo import install_guard  # importing torch._dynamo takes a second

    def check(builder: Any, guard: Any) -> None:
        said = [f"{guard.name} can have what the graph reads of {local}"]
        builder.get_guard_manager(guard).add_lambda_guard(fits, said, guard.user_stack)
        if (noted := runs) is not None:
            after_all = builder.guard_manager.root.add_epilogue_lambda_guard
            after_all(lambda _: noted() is None, [f"noted for {guard.name}"], guard.user_stack)

    install_guard(source.make_guard(check))
