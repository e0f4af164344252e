"""Amaxes of weights that are cut over ranks: those of the whole weights, of all weights in one reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.torch.functional.quantize import max_over
from diptych.torch.primitives import quantize as quantize_ops


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
        self._found: list[Tensor] = []

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
        self._found = []

    def of(self, number: int, group: Any) -> Tensor:
        """Returns the amax of a whole weight, float32 [1]. Where weights may have changed it is collective over
        `group`, whose ranks FSDP2 shards over, and over the weights' tensor-parallel groups: one call for each."""
        parts = [weight._local_tensor for weight in self._weights]
        # An operator on a DTensor moves the counter of the DTensor, and one on its local tensor the local one's.
        versions = [(w._version, p._version, p.data_ptr()) for w, p in zip(self._weights, parts, strict=True)]
        if not self._found or versions != self._versions:
            found = max_over(torch.cat([quantize_ops.amax(part.detach()) for part in parts]), group).split(1)
            self._found = list(found)
            for tp_group in dict.fromkeys(self._groups):
                if tp_group is not None:  # weights that it does not cut stay out: its ranks may hold unlike ones
                    self._reduce([i for i, of in enumerate(self._groups) if of is tp_group], tp_group)
            self._versions = versions
        return self._found[number]

    def _reduce(self, numbers: list[int], group: Any) -> None:
        whole = max_over(torch.cat([self._found[i] for i in numbers]), group).split(1)
        for i, amax in zip(numbers, whole, strict=True):
            self._found[i] = amax
