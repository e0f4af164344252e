"""Operands and options of products, and the test cases made of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cases.quantizing import FORMATS, PACKED_BLOCK, PACKED_FORMATS
from cases.values import SEED, draw

# (M, N, K): empty, one element, ragged against every block, several blocks.
GEMM_SHAPES = (
    (0, 4, 8),
    (4, 0, 8),
    (4, 8, 0),
    (1, 1, 1),
    (1, 1, 3),
    (7, 5, 33),
    (16, 16, 128),
    (33, 65, 127),
    (64, 48, 129),
    (130, 20, 257),
    (128, 144, 384),
    (3, 2, 1000),
)
# What the CUDA tensor cores take (multiples of 16), several tiles included.
GEMM_SHAPES_ALIGNED = ((16, 16, 128), (64, 48, 256), (256, 128, 384), (128, 256, 1024))

# Operands of one family; elements mix (HYBRID), and so do 1x128 and 128x128.
GEMM_PAIRS = tuple(
    (a, b)
    for family in (("tensor",), ("1x128", "128x128"), ("mxfp8",), ("nvfp4",))
    for a, b in itertools.product([f for f in FORMATS if any(word in f.split("_") for word in family)], repeat=2)
)
# Products that Hopper decodes to bfloat16 for its tensor cores
_BFLOAT16 = [f for f in FORMATS if "1x128" not in f and "128x128" not in f]
DECODED_PAIRS = {
    (a, b) for a, b in itertools.product(_BFLOAT16, repeat=2) if not a.endswith("tensor") or not b.endswith("tensor")
}
# All others: the CPU and the emulated kernel take any two formats.
MIXED_PAIRS = tuple(pair for pair in itertools.product(FORMATS, repeat=2) if pair not in GEMM_PAIRS)
# (alpha, beta, bias dtype, out dtype), taking turns
GEMM_EPILOGUES = (
    (1.0, 0.0, None, "float32"),
    (1.0, 0.0, "bfloat16", "bfloat16"),
    (0.7, 0.0, "float32", "float16"),
    (-1.5, 1.0, None, "float32"),
    (1.0, 0.5, "float16", "bfloat16"),
    (1.0, 0.0, None, "bfloat16"),
    (0.7, 0.0, None, "float16"),
)


@dataclass(frozen=True)
class GemmCase:
    """One product; `a_columnwise` says that A is the columnwise copy of a [K, M] tensor, B alike of a [K, N] one."""

    a_format: str
    b_format: str
    mnk: tuple[int, int, int]
    a_columnwise: bool
    b_columnwise: bool
    alpha: float
    beta: float
    bias_dtype: str | None
    out_dtype: str
    values: str = "normal"

    @property
    def id(self) -> str:
        copies = "".join("c" if c else "r" for c in (self.a_columnwise, self.b_columnwise))
        epilogue = f"{self.alpha:g}-{self.beta:g}-{self.bias_dtype}-{self.out_dtype}"
        mnk = "x".join(map(str, self.mnk))
        return f"{self.a_format}-{self.b_format}-{mnk}-{copies}-{epilogue}-{self.values}"

    def __str__(self) -> str:
        return f"{self.id} (DIPTYCH_TEST_SEED={SEED})"

    def make(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Returns the unquantized tensors A and B, bias `[N]` and C `[M, N]`; the latter two may be None."""
        m, n, k = self.mnk
        a = draw(f"{self.id}-a", self.values, (k, m) if self.a_columnwise else (m, k), "float32")
        b = draw(f"{self.id}-b", self.values, (k, n) if self.b_columnwise else (n, k), "float32")
        bias = draw(f"{self.id}-bias", "normal", (n,), self.bias_dtype) if self.bias_dtype else None
        c = draw(f"{self.id}-c", "normal", (m, n), self.out_dtype) if self.beta else None
        return a, b, bias, c


def gemm_cases(
    pairs: Sequence[tuple[str, str]] = GEMM_PAIRS,
    shapes: Sequence[tuple[int, int, int]] = GEMM_SHAPES,
    values: Sequence[str] = ("normal",),
) -> Iterator[GemmCase]:
    """Every pair x shape x value set; copies and epilogues take turns so that each pair meets each of them.

    A packed operand's extents are rounded up to whole blocks, so that both copies of its tensor can be made.
    """
    copies = tuple(itertools.product((False, True), repeat=2))
    for pair_turn, (a, b) in enumerate(pairs):
        for turn, (mnk, value) in enumerate(itertools.product(shapes, values), start=pair_turn):
            (a_copy, b_copy), epilogue = copies[turn % len(copies)], GEMM_EPILOGUES[turn % len(GEMM_EPILOGUES)]
            packed = (a in PACKED_FORMATS, b in PACKED_FORMATS, {a, b} & {*PACKED_FORMATS})
            m, n, k = (-(-v // PACKED_BLOCK) * PACKED_BLOCK if p else v for v, p in zip(mnk, packed, strict=True))
            yield GemmCase(a, b, (m, n, k), a_copy, b_copy, *epilogue, values=value)
