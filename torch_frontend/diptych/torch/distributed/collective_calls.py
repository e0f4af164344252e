"""Collective calls of a process group's ranks: an error on one rank is raised on all, so that no rank waits for one
that has failed. Without torch.distributed there is one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from diptych.common.errors import CheckpointError
from diptych.torch.modules.agreement import by_rank

T = TypeVar("T")


def place(group: Any = None) -> tuple[int, int]:
    """Returns (this process's rank in a group, the group's size). **Raises** ValueError outside of the group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group that it was given")
    return rank, dist.get_world_size(group)


def members(group: Any = None) -> set[int]:
    """Returns the global ranks of a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return {0}
    return set(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def each(work: Callable[[], T], group: Any = None) -> T:
    """Runs `work` on every rank. Returns its result. **Raises** CheckpointError on all ranks if it raises on one."""
    return _run(work, group)[0]


def once(work: Callable[[], T], group: Any = None) -> T:
    """Runs `work` on rank 0. Returns its result on all ranks. **Raises** CheckpointError on all ranks if it raises."""
    rank, _ = place(group)
    return _run(work if rank == 0 else _nothing, group, share=True)[1][0]


def agree(what: str, value: Any, group: Any = None) -> None:
    """**Raises** CheckpointError on all ranks if their values differ."""
    values = _run(lambda: value, group, share=True)[1]
    if any(other != values[0] for other in values):
        raise CheckpointError(f"ranks differ in {what}: {', '.join(by_rank(dict(enumerate(values))))}")


def _nothing() -> Any:
    return None


def _run(work: Callable[[], Any], group: Any, share: bool = False) -> tuple[Any, list[Any]]:
    """Returns (own result, the results of all ranks if they are shared)."""
    result, error = None, None
    try:
        result = work()
    except Exception as e:  # the other ranks must learn of every error
        error = e
    said = None if error is None else str(error) or type(error).__name__
    _, size = place(group)
    found: list[Any] = [(said, result)]
    if size > 1:
        found = [None] * size
        dist.all_gather_object(found, (said, result if share else None), group)
    problems = [problem for problem, _ in found]
    if any(problems):
        raise CheckpointError("; ".join(by_rank(dict(enumerate(problems))))) from error
    return result, [value for _, value in found]
