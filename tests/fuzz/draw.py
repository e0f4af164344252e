"""The random choices of one call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import cases

EXTENTS = (0, 1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128, 129, 130, 144, 255, 256, 257)


class Draw(random.Random):
    """Python's generator, and NumPy's beside it, seeded by numbers and names alone."""

    def __init__(self, *seed: object) -> None:
        super().__init__("/".join(map(str, seed)))
        self.numpy = np.random.default_rng(self.getrandbits(64))

    def maybe(self, chance: float) -> bool:
        return self.random() < chance

    def extent(self, step: int = 1, most: int = 257) -> int:
        """Mostly small, often an edge of a block; a multiple of `step`."""
        n = self.choice(EXTENTS) if self.maybe(0.5) else int(self.triangular(0, 80, 4))
        return min(n, most) // step * step

    def values(self, kind: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """One of `cases.VALUE_SETS`."""
        with np.errstate(all="ignore"):
            return cases.VALUE_SETS[kind](self.numpy, shape, cases.INPUT_DTYPES[dtype])

    def tensor(self, shape: tuple[int, ...], dtype: str | None = None) -> np.ndarray:
        return self.values(self.choice(list(cases.VALUE_SETS)), shape, dtype or self.dtype())

    def plain(self, shape: tuple[int, ...], dtype: str | None = None) -> np.ndarray:
        """Values whose sums have bounds."""
        return self.values("normal", shape, dtype or self.dtype())

    def dtype(self) -> str:
        return self.choice(list(cases.INPUT_DTYPES))

    def scalar(self) -> Any:
        """Returns a value for an argument that should be a number."""
        return self.choice((0, 1, 2, -1, 3, 7, 12, True, False, 0.5, -1.5, 1e300, float("nan"), float("inf"), 2**31,
                            -(2**31), 2**63, -(2**63), 2**70, None, "x", self.randrange(256)))  # fmt: skip
