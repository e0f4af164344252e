"""The settings in which the ranks of a process group must agree before an exchange, compared by a digest of 32 bytes.

Ranks that differ would send other bytes, or make other calls, than their peers expect: the transport ends the process,
waits for its time-out, or reads one format as another. A comparison raises the same error on every rank instead, before
anything else is sent. It sees neither a rank that does not take part in it nor what a rank changes later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.common.errors import RankMismatchError, UnsupportedError
from diptych.torch.private.dispatch import without_modes
from diptych.torch.private.functorch import hide_transforms


def described(value: Any) -> str:
    """Returns the text of a recipe or of quantizers. A user's own functions and classes in it have their qualified
    names, and no addresses, which differ between processes."""
    text = _text(value)
    own = [name for name in dict.fromkeys(_names(value)) if not name.startswith(("diptych.", "builtins."))]
    return f"{text} by {', '.join(own)}" if own else text


def _text(value: Any) -> str:
    """Returns a repr without addresses, and with the elements of sets sorted: each process has an order of its own."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted([_text(each) for each in value]))}}}"
    if type(value) is tuple:
        return f"({', '.join([_text(each) for each in value])})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f"{f.name}={_text(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.repr]
        return f"{type(value).__qualname__}({', '.join(fields)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _names(value: Any) -> Iterator[str]:
    """The qualified names of functions and of dataclasses in a structure of dataclasses and tuples."""
    named = value if isinstance(value, (type, FunctionType)) else type(value)
    held: Any = value if isinstance(value, tuple) else ()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if held or callable(value):
        yield f"{named.__module__}.{named.__qualname__}"
    for each in held:
        yield from _names(each)


def by_rank(values: Mapping[int, Any]) -> list[str]:
    """Each value that is not None, with the ranks that have it; without them if all have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        if value is not None:
            ranks.setdefault(str(value), []).append(rank)
    return [
        text if len(had) == len(values) else f"{text} (rank {', '.join(map(str, had))})" for text, had in ranks.items()
    ]


def require_alike(op: str, values: Mapping[str, str], groups: Sequence[Any], device: torch.device) -> None:
    """Compares values over the ranks of a process group, or of several, one for each dimension of a mesh.

    **Arguments:** `op`: what the error's message begins with. `values`: by what they are called. `device`: the one
    whose tensors the groups exchange.

    **Raises**, on every rank of the groups, RankMismatchError with the first value that differs, by ranks;
    NotImplementedError while a CUDA graph is captured.
    """
    groups = [group for group in groups if dist.get_backend(group) != "fake"]  # torch's stand-in exchanges nothing
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{op}: ranks are compared at a first call; run it once before capturing it into a graph"
        )
    digest = hashlib.sha256(repr(list(values.items())).encode()).digest()
    with without_modes(), hide_transforms(), torch.inference_mode(False), torch.no_grad():
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
        rows = _gathered(mine, groups).view(-1, len(digest))
        if bool((rows == mine).all()):
            return
        said = _gathered_objects({dist.get_rank(): dict(values)}, groups)
    for name in dict.fromkeys(name for of_rank in said.values() for name in of_rank):
        of_ranks = {rank: of_rank.get(name, "nothing") for rank, of_rank in sorted(said.items())}
        if len(set(of_ranks.values())) > 1:
            raise RankMismatchError(f"{op}: ranks differ in {name}: {', '.join(by_rank(of_ranks))}")
    raise RankMismatchError(f"{op}: ranks differ in the order of {', '.join(values)}")


def _gathered(t: Tensor, groups: Sequence[Any]) -> Tensor:
    for group in groups:
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, t, group)
        t = torch.cat(parts)
    return t


def _gathered_objects(said: dict[int, dict[str, str]], groups: Sequence[Any]) -> dict[int, dict[str, str]]:
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, said, group)
        said = {rank: values for part in parts for rank, values in part.items()}
    return said
