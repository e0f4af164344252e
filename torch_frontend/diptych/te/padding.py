"""`Fp8Padding` and `Fp8Unpadding`: rows of groups with zeros behind them, so that each group begins at a multiple.

`GroupedLinear` needs no padding to be right: it takes groups of any size, and groups at multiples of
`get_align_size_for_quantization` faster. `moe_permute_and_pad_with_probs` pads as it moves the rows, for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diptych.common import ShapeError
from diptych.te import absent
from diptych.te.quantization import get_align_size_for_quantization
from diptych.torch import get_autocast_recipe

__getattr__ = absent.attributes_of(__name__)


class _Aligned(nn.Module):
    """The base of both. **Arguments:** `num_gemms`: groups. `align_size`: rows to whose multiples each group is padded;
    None takes those of the recipe of the region around a call."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self._given = num_gemms, align_size

    @property
    def align_size(self) -> int:
        """Rows of which a padded group has a multiple. **Raises** ValueError outside of regions if it was not given."""
        if self._given is not None:
            return self._given
        recipe = get_autocast_recipe()
        if recipe is None:
            raise ValueError(f"{type(self).__name__}: give align_size, or call it in a region, whose recipe says it")
        return get_align_size_for_quantization(recipe)

    def _padded(self, inp: Tensor, m_splits: Sequence[int], padded: bool) -> tuple[Tensor, list[int]]:
        """Returns the rows of `inp`, and the sizes of padded groups. `padded`: whether `inp` has padded groups."""
        align, name = self.align_size, type(self).__name__
        sizes = [-(-m // align) * align for m in m_splits]
        rows, expected = inp.reshape(-1, inp.shape[-1]), sum(sizes if padded else m_splits)
        if len(sizes) != self.num_gemms or rows.shape[0] != expected:
            raise ShapeError(
                f"{name}: m_splits must have {self.num_gemms} sizes, which add up to {expected} rows with align_size="
                f"{align}, got {list(m_splits)} and {rows.shape[0]} rows"
            )
        return rows, sizes


class Fp8Padding(_Aligned):
    """Pads each group of rows by zeros. **Arguments:** `num_gemms`, `align_size`: see the class's base."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Returns `inp` [sum(m_splits), K] with padded groups, and their sizes. **Raises** ShapeError for other sizes,
        ValueError where no align_size is known."""
        rows, sizes = self._padded(inp, m_splits, padded=False)
        if sizes == list(m_splits):
            return inp, sizes
        parts = zip(rows.split(list(m_splits)), sizes, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, size - part.shape[0])) for part, size in parts]), sizes


class Fp8Unpadding(_Aligned):
    """Drops the rows that `Fp8Padding` has added. **Arguments:** as there."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """Returns the rows of `inp`, whose groups are padded, that are in groups of the sizes `m_splits`. **Raises** as
        `Fp8Padding`."""
        rows, sizes = self._padded(inp, m_splits, padded=True)
        if sizes == list(m_splits):
            return inp
        return torch.cat([part[:m] for part, m in zip(rows.split(sizes), m_splits, strict=True)])
