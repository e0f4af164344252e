"""`Pieces`: a rank's part of a tensor as rectangles of the whole, which torch.distributed.checkpoint (DCP) writes and
reads under the whole tensor's name and shape.

DCP describes a rank's part of a DTensor by one rectangle. That does not suffice for a weight that stacks gate and
value, each of which is cut; nor for a parameter that is cut over a tensor-parallel group and then by FSDP2, whose
DTensor does not describe the first cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.common.errors import CheckpointError
from diptych.torch.modules.tensor_parallel import ParameterCut
from diptych.torch.private.dispatch import new_wrapper

Run = tuple[int, int]  # neighbouring indices of a dimension: (the first, their number)


class ModuleCut(NamedTuple):
    """A module's cut of a parameter over a process group."""

    how: ParameterCut
    group: Any


class Pieces(Tensor):
    """A tensor with the whole tensor's shape, dtype and device, and no memory. `part`: the tensor that this rank holds.
    `views`: rectangles of the part by their offsets in the whole tensor, none on a rank that holds nothing. `over`: the
    global ranks that together hold the whole tensor."""

    part: Any
    views: dict[tuple[int, ...], Tensor]
    over: set[int]

    @staticmethod
    def of(name: str, part: Any, shape: list[int], runs: list[list[Run]], over: set[int]) -> Pieces:
        """Returns the pieces of a part. **Arguments:** `shape`: the whole tensor's shape. `runs`: for each dimension,
        the indices of the whole tensor that the part has, in the part's order.

        **Raises** CheckpointError if the part's shape does not match `runs`.
        """
        local = (part.to_local() if is_sharded(part) else part).detach()
        extents = [sum([number for _, number in of_dim]) for of_dim in runs]
        if list(local.shape) != extents:
            raise CheckpointError(
                f"{name} {shape}: this rank holds a part {list(local.shape)}, its cuts say that the part is {extents}"
            )
        made: Any = new_wrapper(Pieces, shape, dtype=local.dtype, device=local.device)
        made.part, made.over = part, over
        made.views = dict(_views(local, runs))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of Pieces is not supported: they only say where a rank's part lies")

    # --- methods that DCP calls ---

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=view.shape) for offsets, view in self.views.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.views[tuple(index.offset)]

    # --- exporting ---

    def gathered(self, group: Any) -> Tensor:
        """Returns the whole tensor on every rank of a group, whose ranks together have all of it and all call this."""
        device = self.part.device_mesh.device_type if is_sharded(self.part) else self.device  # a part may be offloaded
        whole = torch.zeros(self.shape, dtype=self.dtype, device=device)
        for offsets, view in self.views.items():
            whole[tuple([slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True)])] = view.to(device)
        # Other ranks' bytes are zero or the same. A sum of values would lose the signs of zeros.
        dist.all_reduce(whole.flatten().view(torch.uint8), dist.ReduceOp.MAX, group)
        return whole


def described(name: str, t: Any, cut: ModuleCut | None) -> Any:
    """Returns a tensor as DCP takes it: the tensor itself if ranks hold it whole, or if DCP can locate its DTensor's
    part; else `Pieces`. `cut`: the cut of the parameter that the tensor is or belongs to, None if no module cuts it.

    **Raises** CheckpointError with the tensor's `name` if its cuts do not describe the part.
    """
    placed = _placements(t) if is_sharded(t) else []
    if cut is None:
        dims = [how.dim for how, _, _ in placed]
        if len(set(dims)) == len(dims) and all([how.parts == 1 for how, _, _ in placed]):
            return t
    shape, over = list(t.shape), set(t.device_mesh.mesh.flatten().tolist()) if is_sharded(t) else set()
    if cut is not None:
        # FSDP2 cuts the module's part. The DTensor shows both cuts by a strided placement, or has the part's shape.
        ranks = dist.get_process_group_ranks(cut.group)
        others = [(how._replace(parts=1), rank, of) for how, rank, of in placed if set(of) != set(ranks)]
        if len(others) == len(placed):
            shape[cut.how.dim] *= len(ranks)
        placed, over = [(cut.how, dist.get_rank(cut.group), ranks), *others], over | set(ranks)
    runs = [[(0, n)] for n in shape]
    for (dim, parts), rank, ranks in placed:
        runs[dim] = _kept(runs[dim], parts, rank, len(ranks))
    return Pieces.of(name, t, shape, runs, over)


def _placements(t: Any) -> list[tuple[ParameterCut, int, list[int]]]:
    """Returns the cuts of a DTensor in the order in which its placements apply: (how, this rank's index in it, its
    ranks)."""
    mesh, at = t.device_mesh, t.device_mesh.get_coordinate()
    if at is None:  # a rank outside of the mesh, which holds nothing
        return []
    return [
        (ParameterCut(p.dim, getattr(p, "split_factor", 1)), at[i], dist.get_process_group_ranks(mesh.get_group(i)))
        for i, p in enumerate(t.placements)
        if hasattr(p, "dim")
    ]


def part_of(t: Any) -> Any:
    """Returns the tensor that a rank holds, from the result of `described`."""
    return t.part if isinstance(t, Pieces) else t


def is_sharded(t: Any) -> bool:
    """Returns whether a tensor is a DTensor."""
    return hasattr(t, "placements")


def _kept(runs: list[Run], parts: int, rank: int, ranks: int) -> list[Run]:
    """Returns the indices of `runs` that a rank keeps. `runs` stack `parts` equal parts, each of which is cut as
    torch.chunk cuts."""
    kept, extent = [], sum([number for _, number in runs])
    for part in range(parts):
        begin, end = _chunk(0, extent, part, parts)
        begin, end = _chunk(begin, end, rank, ranks)
        for first, number in runs:
            low, high = max(begin, 0), min(end, number)
            if low < high:
                kept.append((first + low, high - low))
            begin, end = begin - number, end - number
    return kept


def _chunk(begin: int, end: int, rank: int, ranks: int) -> tuple[int, int]:
    each = -(-(end - begin) // ranks)
    return min(begin + rank * each, end), min(begin + (rank + 1) * each, end)


def _views(local: Tensor, runs: list[list[Run]]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields the rectangles of a part by their offsets in the whole tensor."""
    placed = []
    for of_dim in runs:
        ends = itertools.accumulate([number for _, number in of_dim], initial=0)
        placed.append([(first, begin, number) for (first, number), begin in zip(of_dim, ends, strict=False)])
    for rectangle in itertools.product(*placed):
        view = local
        for dim, (_, begin, number) in enumerate(rectangle):
            view = view.narrow(dim, begin, number)
        yield tuple([first for first, _, _ in rectangle]), view
