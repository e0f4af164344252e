"""Moves of tokens to experts and back, under TransformerEngine's names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import diptych.torch as dt
from diptych.te import absent
from diptych.torch import moe_permute as moe_permute
from diptych.torch import moe_sort_chunks_by_index as moe_sort_chunks_by_index
from diptych.torch import moe_sort_chunks_by_index_with_probs as moe_sort_chunks_by_index_with_probs
from diptych.torch import moe_unpermute as moe_unpermute

__getattr__ = absent.attributes_of(__name__)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """diptych.torch's `moe_permute_with_probs`. A probability of exactly 0 makes its row one of zeros."""
    return dt.moe_permute_with_probs(inp, probs, routing_map, num_out_tokens, zero_prob_is_padding=True)


def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor | Sequence[int],
    align_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """diptych.torch's `moe_permute_and_pad_with_probs`. A probability of exactly 0 makes its row one of zeros."""
    return dt.moe_permute_and_pad_with_probs(
        inp, probs, routing_map, tokens_per_expert, align_size, zero_prob_is_padding=True
    )
