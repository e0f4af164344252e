"""Amaxes of weights that are cut over ranks: those of the whole weights, of all weights in one reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.torch.functional.amax_group import max_over
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.private.sharding import local_tensor


class WholeAmaxes:
    """The amaxes of whole weights, each a DTensor of which this rank holds a part.

    Invariant: all ranks reduce at the same gathers. That is the first gather after the root's forward has begun, which
    finds writes that no version counter shows (`weight.data`), or after a version counter has moved, as it does on all
    ranks alike. Backward uses forward's amaxes.
    """

    def __init__(self) -> None:
        self._weights: list[Any] = []
        self._groups: list[Any] = []
        self._versions: list[tuple[int, ...]] = []
        self._found: dict[torch.dtype, list[Tensor]] = {}

    def place(self, tp_group: Any = None) -> int:
        """Returns the number of a new weight. `tp_group`: the group that the weight's module is cut over, whose ranks
        hold the other parts of the whole weight."""
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

        Where these weights may have changed it is collective over `group`, whose ranks FSDP2 shards over, and over the
        tensor-parallel groups of all weights: one call for each.
        """
        if not self._found or any([self._version(i) != self._versions[i] for i in numbers]):
            self._reduce(group)
        found = self._found.get(dtype)
        if found is None:  # rounding keeps the order of values, so the cast weight's amax is the amax cast
            whole = self._found[torch.float32]
            found = self._found[dtype] = list(torch.cat(whole).to(dtype).to(torch.float32).split(1))
        return [found[i] for i in numbers]

    def _version(self, number: int) -> tuple[int, ...]:
        """An operator on a DTensor moves the counter of the DTensor, and one on its local tensor the local one's."""
        weight = self._weights[number]
        part = local_tensor(weight)
        return weight._version, part._version, part.data_ptr()

    def _reduce(self, group: Any) -> None:
        found = [quantize_ops.amax(local_tensor(weight).detach()) for weight in self._weights]
        every = range(len(found))
        # Weights that a tensor-parallel group does not cut stay out of it: its ranks may hold unlike ones.
        cut = {of: [i for i in every if self._groups[i] is of] for of in self._groups if of is not None}
        for ranks, numbers in ((group, every), *cut.items()):
            whole = max_over(torch.cat([found[i] for i in numbers]), ranks).split(1)
            for i, amax in zip(numbers, whole, strict=True):
                found[i] = amax
        self._found = {torch.float32: found}
        self._versions = [self._version(i) for i in range(len(self._weights))]
