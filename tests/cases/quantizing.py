"""Formats, shapes and options of quantize calls, and the test cases made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cases.values import INPUT_DTYPES, SEED, VALUE_SETS, draw, rng_for

FORMATS = (
    "fp8_e4m3_tensor",
    "fp8_e5m2_tensor",
    "fp8_e4m3_1x128",
    "fp8_e5m2_1x128",
    "fp8_e4m3_128x128",
    "fp8_e5m2_128x128",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "nvfp4",
)
DIVIDE_FORMATS = tuple(name for name in FORMATS if name.startswith("fp8"))
TENSOR_FORMATS = tuple(name for name in FORMATS if name.endswith("_tensor"))
# Two elements a byte: extents in multiples of this, rows only where a columnwise copy or square blocks are wanted.
PACKED_FORMATS, PACKED_BLOCK = ("nvfp4",), 16

SHAPES: tuple[tuple[int, ...], ...] = (
    (0, 16),
    (16, 0),
    (0,),
    (2, 0, 48),
    (1, 1),
    (1,),
    (7,),
    (1, 200),
    (200, 1),
    (32, 32),
    (33, 65),
    (31, 129),
    (2, 3, 96),
    (128, 128),
    (130, 257),
    (256, 384),
)

# Instead of the ragged ones, for packed formats. The last ones have rows for a rowwise copy only.
PACKED_SHAPES: tuple[tuple[int, ...], ...] = (
    (0, 16),
    (16, 0),
    (2, 0, 48),
    (16, 16),
    (32, 32),
    (16, 208),
    (208, 16),
    (2, 24, 96),
    (48, 80),
    (128, 128),
    (144, 272),
    (256, 384),
    (0,),
    (16,),
    (1, 208),
    (7, 32),
    (33, 64),
    (3, 5, 48),
)

# (pow2, eps) of the divide rule; the others have neither. A large eps lifts whole blocks; the last is subnormal.
OPTIONS = ((False, 0.0), (True, 0.0), (False, 2.0**-10), (True, 1e-12), (False, 1e-40))

# Options of the other rules.
VARIANTS: dict[str, tuple[frozenset[str], ...]] = {
    "divide": (frozenset(),),
    "e8m0_ceil": (frozenset(), frozenset({"square"})),
    "two_level": (
        frozenset(),
        frozenset({"square"}),
        frozenset({"row_amax"}),
        frozenset({"rht"}),
        frozenset({"rht", "rht_signs"}),
        frozenset({"stochastic"}),
        frozenset({"row_amax", "rht", "rht_signs", "stochastic"}),
    ),
}

# A reduced amax that a per-tensor quantize may be given, the corner cases of NUMERICS 2 included.
GIVEN_AMAX = tuple(
    np.float32(v) for v in (0.0, 1.5, 448.0, 1e-45, 1e-38, 1.3e-36, 2.0**-126, 3.4028235e38, math.inf, math.nan)
)


def rule_of(fmt: str) -> str:
    """The scale rule of a format."""
    return "two_level" if fmt in PACKED_FORMATS else "divide" if fmt in DIVIDE_FORMATS else "e8m0_ceil"


def has_columnwise(fmt: str, shape: tuple[int, ...]) -> bool:
    """Returns whether the rows of this shape allow a columnwise copy, square blocks and a Hadamard transform."""
    return fmt not in PACKED_FORMATS or math.prod(shape[:-1]) % PACKED_BLOCK == 0


def whole(fmt: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape; for a packed format with its last two extents rounded up to whole blocks."""
    if fmt not in PACKED_FORMATS:
        return shape
    return (*shape[:-2], *(-(-extent // PACKED_BLOCK) * PACKED_BLOCK for extent in shape[-2:]))


def shapes_of(fmt: str, columnwise: bool = True) -> tuple[tuple[int, ...], ...]:
    """The table's shapes that a format takes: those of which both copies can be made, or every one."""
    every = PACKED_SHAPES if fmt in PACKED_FORMATS else SHAPES
    return tuple(s for s in every if has_columnwise(fmt, s) or not columnwise)


@dataclass(frozen=True)
class QuantizeCase:
    """One quantize call: its input and options."""

    format: str
    dtype: str
    shape: tuple[int, ...]
    values: str
    pow2: bool = False
    eps: float = 0.0
    variant: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        shape = "x".join(map(str, self.shape))
        options = f"-{'pow2' if self.pow2 else 'exact'}-{self.eps:g}" if self.format in DIVIDE_FORMATS else ""
        return "-".join([f"{self.format}-{self.dtype}-{shape}-{self.values}{options}", *sorted(self.variant)])

    @property
    def rng(self) -> np.ndarray | None:
        """The generator's state where the call rounds stochastically: int32 [4], any bits."""
        words = rng_for(f"{self.id}-rng").integers(0, 1 << 32, 4, np.uint32)
        return words.view(np.int32) if "stochastic" in self.variant else None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `oracle.quantize`, the usage included where the rows allow no columnwise copy."""
        named: dict[str, Any] = {"pow2": self.pow2, "eps": self.eps} if self.format in DIVIDE_FORMATS else {}
        named |= {name: True for name in self.variant - {"stochastic"}}
        named |= {"rng": self.rng} if "stochastic" in self.variant else {}
        return named if has_columnwise(self.format, self.shape) else {**named, "columnwise": False}

    def __str__(self) -> str:
        return f"{self.id} (DIPTYCH_TEST_SEED={SEED})"

    def make(self) -> np.ndarray:
        return draw(self.id, self.values, self.shape, self.dtype)


def variants_of(fmt: str) -> tuple[frozenset[str], ...]:
    """The options of a format beside those of the divide rule, in all combinations that are tried."""
    of_rule = VARIANTS[rule_of(fmt)]
    return (*of_rule, frozenset({"from_rows"})) if fmt.endswith("_1x128") else of_rule


def _variants(fmt: str, dtype: str, shape: tuple[int, ...]) -> list[frozenset[str]]:
    """Returns the variants that an input of this dtype and shape allows."""
    rows = has_columnwise(fmt, shape)
    return [
        v
        for v in variants_of(fmt)
        if ("rht" not in v or (dtype == "bfloat16" and rows)) and ("square" not in v or rows)
    ]


def quantize_cases(
    formats: Sequence[str] = FORMATS,
    dtypes: Sequence[str] = tuple(INPUT_DTYPES),
    shapes: Sequence[tuple[int, ...]] | None = None,
    values: Sequence[str] = tuple(VALUE_SETS),
    every_option: bool = False,
    variants: bool = False,
) -> Iterator[QuantizeCase]:
    """Every format x dtype x shape (None: all that the format takes; else made `whole`) x value set.

    Options of the divide rule take turns unless all are asked for; those of the other rules join with `variants`.
    """
    for fmt in formats:
        wanted = shapes_of(fmt, columnwise=not variants) if shapes is None else [whole(fmt, s) for s in shapes]
        for turn, (dtype, shape, value) in enumerate(itertools.product(dtypes, wanted, values)):
            plain = OPTIONS if fmt in DIVIDE_FORMATS else OPTIONS[:1]
            more = _variants(fmt, dtype, shape) if variants else [frozenset()]
            both = list(itertools.product(plain, more))
            for (pow2, eps), variant in both if every_option else (both[turn % len(both)],):
                yield QuantizeCase(fmt, dtype, shape, value, pow2 or "from_rows" in variant, eps, variant)
