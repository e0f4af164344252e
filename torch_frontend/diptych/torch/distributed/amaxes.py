"""Amaxes of whole weights that are sharded over ranks, reduced for all weights in one collective call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.torch.functional.amax_group import max_over
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.private.sharding import local_tensor


class WholeAmaxes:
    """The amaxes of whole weights, each a DTensor of which this rank holds a part.

    Invariant: all ranks reduce at the same gathers. A gather reduces if it is the first since the root's forward began,
    which covers writes that no version counter shows (`weight.data`), or if a version counter has moved, as it does on
    all ranks alike. Backward uses forward's amaxes.
    """

    def __init__(self) -> None:
        self._weights: list[Any] = []
        self._groups: list[Any] = []
        self._versions: list[tuple[int, ...]] = []
        self._found: dict[torch.dtype, list[Tensor]] = {}

    def place(self, tp_group: Any = None) -> int:
        """Returns the number of a new weight. `tp_group`: the tensor-parallel group whose ranks hold the other parts of
        the weight."""
        self._weights.append(None)
        self._groups.append(tp_group)
        return len(self._weights) - 1

    def set(self, number: int, weight: Any) -> None:
        self._weights[number] = weight

    def forget(self) -> None:
        """Makes the next gather reduce."""
        self._found = {}

    def of(self, numbers: list[int], group: Any, dtype: torch.dtype) -> list[Tensor]:
        """Returns the amaxes of some whole weights, each cast to `dtype`, float32 [1].

        If these weights may have changed, the call is collective over `group`, the ranks that FSDP2 shards over, and
        over the tensor-parallel groups of all weights, with one reduction for each group.
        """
        if not self._found or any([self._version(i) != self._versions[i] for i in numbers]):
            self._reduce(group)
        found = self._found.get(dtype)
        if found is None:  # rounding is monotonic: the amax of the cast weight is the cast amax
            whole = self._found[torch.float32]
            found = self._found[dtype] = list(torch.cat(whole).to(dtype).to(torch.float32).split(1))
        return [found[i] for i in numbers]

    def _version(self, number: int) -> tuple[int, ...]:
        """Returns a value that changes with every write to a weight. An operator on a DTensor moves the DTensor's
        version counter, an operator on its local tensor the local one's."""
        weight = self._weights[number]
        part = local_tensor(weight)
        return weight._version, part._version, part.data_ptr()

    def _reduce(self, group: Any) -> None:
        found = [quantize_ops.amax(local_tensor(weight).detach()) for weight in self._weights]
        every = range(len(found))
        # A tensor-parallel group reduces its own weights alone: its ranks may hold different values of others.
        cut = {of: [i for i in every if self._groups[i] is of] for of in self._groups if of is not None}
        for ranks, numbers in ((group, every), *cut.items()):
            whole = max_over(torch.cat([found[i] for i in numbers]), ranks).split(1)
            for i, amax in zip(numbers, whole, strict=True):
                found[i] = amax
        self._found = {torch.float32: found}
        self._versions = [self._version(i) for i in range(len(self._weights))]
