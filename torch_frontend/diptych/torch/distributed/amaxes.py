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
        self._versions: list[tuple[int, ...]] = []
        self._found: Tensor | None = None

    def place(self) -> int:
        """Returns the number of a new weight."""
        self._weights.append(None)
        return len(self._weights) - 1

    def set(self, number: int, weight: Any) -> None:
        self._weights[number] = weight

    def forget(self) -> None:
        """Makes the next gather reduce."""
        self._found = None

    def of(self, number: int, group: Any) -> Tensor:
        """Returns the amax of a whole weight, float32 [1]. Collective over the group where weights may have changed."""
        parts = [weight._local_tensor for weight in self._weights]
        # An operator on a DTensor moves the counter of the DTensor, and one on its local tensor the local one's.
        versions = [(w._version, p._version, p.data_ptr()) for w, p in zip(self._weights, parts, strict=True)]
        if self._found is None or versions != self._versions:
            self._found = max_over(torch.cat([quantize_ops.amax(part.detach()) for part in parts]), group)
            self._versions = versions
        return self._found[number : number + 1]
