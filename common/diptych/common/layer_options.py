"""Options of linear layers that belong together, each a value that modules, layers and both panels pass on whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from diptych.common.errors import ArgumentError

COLUMN, ROW = "column", "row"


class Originals(NamedTuple):
    """Operands that backward keeps as they are and quantizes again, with the same bits, instead of keeping a copy."""

    input: bool = False
    weight: bool = False


NO_ORIGINALS = Originals()


class WeightGradientOptions(NamedTuple):
    """Where backward takes weight gradients. `fuse`: to `weight.main_grad`. `delay`: `backward_dw` does it."""

    fuse: bool = False
    delay: bool = False


class TensorParallel(NamedTuple):
    """How a module is cut over a tensor-parallel group. `group`: the process group, or None. `size`: the number of its
    ranks. `sequence`: activations outside of the cut layers are cut along tokens. `modes`: COLUMN, ROW or None, by
    layer."""

    group: Any = None
    size: int = 1
    sequence: bool = False
    modes: Mapping[str, str | None] = {}

    def require(self, op: str) -> None:
        """**Raises** ArgumentError and ValueError, in the words of a constructor's arguments."""
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ArgumentError(f"{op}: tp_size must be a positive int, got {self.size!r}")
        if not isinstance(self.sequence, bool):
            raise ArgumentError(f"{op}: sequence_parallel must be a bool, got {self.sequence!r}")
        for mode in self.modes.values():
            if mode not in (None, COLUMN, ROW):
                raise ValueError(f"{op}: parallel_mode must be 'column', 'row' or None, got {mode!r}")
