"""Bad calls of the MoE permutation raise by the function's and the argument's name, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.core import kernel_table, reset_calls

T, E, H = 6, 5, 8
X, MASK, PROBS = torch.randn(T, H), torch.ones(T, E, dtype=torch.bool), torch.rand(T, E)
ROWS, LINE = torch.randn(T * E, H), torch.rand(T)
NUMBERS = torch.arange(E)
MAP = dt.moe_map(MASK)
IDS = MAP.row_id_map

Case = tuple[Callable[[], Any], type[Exception], str]


def _permute(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: dt.moe_permute(*args, **kwargs)


def _probs(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: dt.moe_permute_with_probs(*args, **kwargs)


def _pad(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: dt.moe_permute_and_pad_with_probs(*args, **kwargs)


def _unpermute(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: dt.moe_unpermute(*args, **kwargs)


def _sort(*args: Any) -> Callable[[], Any]:
    return lambda: dt.moe_sort_chunks_by_index(*args)


FP8 = X.to(torch.float8_e4m3fn).requires_grad_()
CASES: list[Case] = [
    (_permute(3, MASK), TypeError, "moe_permute: inp must be a torch.Tensor, got int"),
    (_permute(FP8, MASK), TypeError, "moe_permute: inp, which requires grad, must be float32, .* float8_e4m3fn"),
    (_permute(X.to("meta"), MASK), ValueError, "moe_permute: routing_map is on cpu"),
    (_permute(X, [1]), TypeError, "moe_permute: routing_map must be a torch.Tensor, got list"),
    (_permute(X, MASK, MASK.sum()), TypeError, "num_out_tokens must be an int, got Tensor; .* waited for"),
    (_permute(X, MASK, max_token_num="3"), TypeError, "moe_permute: max_token_num must be an int, got str"),
    (_permute(X, MAP._replace(row_id_map=IDS.long())), TypeError, "row_id_map must be int32, got int64"),
    (_probs(X, None, MASK), TypeError, "moe_permute_with_probs: probs must be a torch.Tensor, got NoneType"),
    (_probs(X, PROBS.to("meta"), MASK), ValueError, "moe_permute_with_probs: probs is on meta"),
    (_pad(X, PROBS, MAP), TypeError, "moe_permute_and_pad_with_probs: routing_map must be a torch.Tensor, got RowMap"),
    (_pad(X, PROBS, MASK, 3), TypeError, "tokens_per_expert must be a tensor or a sequence of ints, got int"),
    (_unpermute(None, IDS), TypeError, "moe_unpermute: inp must be a torch.Tensor, got NoneType"),
    (_unpermute(ROWS, IDS.long()), TypeError, "moe_unpermute: row_id_map must be int32, got int64"),
    (_unpermute(ROWS.to("meta"), IDS), ValueError, "moe_unpermute: row_id_map is on cpu"),
    (_unpermute(ROWS, IDS, PROBS.double()), TypeError, "merging_probs must be .* unless the rows are float64"),
    (_unpermute(ROWS, IDS, pad_offsets=PROBS[0]), TypeError, "moe_unpermute: pad_offsets must be int32 or int64"),
    (_sort(X[0], [3, 3], [0, 1]), ValueError, "moe_sort_chunks_by_index: inp must be"),
    (_sort(X, NUMBERS, [0]), ValueError, "split_sizes has 5 chunks, and sorted_index names 1"),
    (_sort(X, 3, [0]), TypeError, "split_sizes must be a tensor or a sequence of ints, got int"),
    (_sort(X, [3.0, 3.0], [0, 1]), TypeError, "each of split_sizes must be an int, got float"),
    (_sort(X, [0] * 2048 + [6], list(range(2049))), NotImplementedError, "2049 chunks, .* at most 2048"),
]  # fmt: skip


def test_bad_calls():
    reset_calls()
    for call, error, words in CASES:
        with pytest.raises(error, match=words):
            call()
    moved = {r["op"] for r in kernel_table() if r["calls"]}
    assert moved <= {"permute_map"}, "a map of what was good may have been made, and nothing was moved"


@pytest.mark.cuda
def test_operands_on_two_devices(cuda):
    for call, words in (
        (_permute(X.to(cuda), MASK), "moe_permute: routing_map is on cpu"),
        (_probs(X.to(cuda), PROBS, MASK.to(cuda)), "moe_permute_with_probs: probs is on cpu"),
        (_unpermute(ROWS.to(cuda), IDS), "moe_unpermute: row_id_map is on cpu"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    wide = X.to(cuda).double()
    assert torch.equal(dt.moe_permute(wide, MASK.to(cuda), T)[0], wide)
    with pytest.raises(TypeError, match="float64 rows are summed on the CPU alone"):
        dt.moe_permute(wide.requires_grad_(), MASK.to(cuda))
    # chunks may be described anywhere
    y = dt.moe_sort_chunks_by_index(X.to(cuda), torch.tensor([2, 4]), torch.tensor([1, 0]))
    assert torch.equal(y.cpu(), torch.cat([X[2:], X[:2]]))
