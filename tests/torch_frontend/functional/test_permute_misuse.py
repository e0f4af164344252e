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


def _line(*args: Any) -> Callable[[], Any]:
    return lambda: dt.moe_sort_chunks_by_index_with_probs(*args)


FP8 = X.to(torch.float8_e4m3fn).requires_grad_()
CASES: list[Case] = [
    (_permute(3, MASK), TypeError, "moe_permute: inp must be a torch.Tensor, got int"),
    (_permute(X[0], MASK), ValueError, "moe_permute: inp must be .*, got float32.8. on cpu"),
    (_permute(X[:3], MASK), ValueError, "moe_permute: inp must have a row for each of routing_map's tokens, 6"),
    (_permute(X.to(torch.complex64), MASK), TypeError, "moe_permute: inp must be .*, got complex64"),
    (_permute(FP8, MASK), TypeError, "moe_permute: inp, which requires grad, must be float32, .* float8_e4m3fn"),
    (_permute(X.to("meta"), MASK), ValueError, "moe_permute: routing_map is on cpu"),
    (_permute(X, [1]), TypeError, "moe_permute: routing_map must be a torch.Tensor, got list"),
    (_permute(X, MASK[0]), ValueError, "moe_permute: routing_map must be .T, E., got bool.5. on cpu"),
    (_permute(X, MASK.float()), TypeError, "moe_permute: routing_map .a mask. must be .*, got float32"),
    (_permute(X, MASK, map_type="index"), TypeError, "routing_map .expert ids. must be int32 or int64, got bool"),
    (_permute(X, MASK, map_type="x"), ValueError, "moe_permute: map_type must be 'mask' or 'index', got 'x'"),
    (_permute(X, MASK[:, :0]), ValueError, "moe_permute: num_experts must be at least 1, got 0"),
    (_permute(X, MASK, num_experts=4), ValueError, "moe_permute: a mask .* has 5 experts, not 4"),
    (_permute(X, MASK[:, :1].expand(T, 2049)), NotImplementedError, "moe_permute: 2049 slots .* at most 2048"),
    (_permute(X, NUMBERS.expand(T, E), num_experts=2049, map_type="index"), NotImplementedError, "2049 experts"),
    (_permute(X, MASK, -2), ValueError, "moe_permute: num_out_tokens must be at least -1, got -2"),
    (_permute(X, MASK, 2**31), ValueError, "moe_permute: rows are 2147483648, and a map numbers at most 2147483647"),
    (_permute(X, MASK, MASK.sum()), TypeError, "num_out_tokens must be an int, got Tensor; .* waited for"),
    (_permute(X, MASK, True), TypeError, "num_out_tokens must be an int, got bool"),
    (_permute(X, MASK, max_token_num="3"), TypeError, "moe_permute: max_token_num must be an int, got str"),
    (_permute(X, MASK, max_token_num=-2), ValueError, "moe_permute: max_token_num must be at least -1, got -2"),
    (_permute(X, MAP, 7), ValueError, "moe_permute: num_out_tokens was given beside a RowMap"),
    (_permute(X, MAP, map_type="index"), ValueError, "moe_permute: map_type was given beside a RowMap"),
    (_permute(X, MAP._replace(row_id_map=IDS.long())), TypeError, "row_id_map must be int32, got int64"),
    (_probs(X, None, MASK), TypeError, "moe_permute_with_probs: probs must be a torch.Tensor, got NoneType"),
    (_probs(X, PROBS[:3], MASK), ValueError, "moe_permute_with_probs: probs must be .6, 5. as row_id_map is"),
    (_probs(X, PROBS.int(), MASK), TypeError, "moe_permute_with_probs: probs must be float32, .*, got int32"),
    (_probs(X, PROBS.to("meta"), MASK), ValueError, "moe_permute_with_probs: probs is on meta"),
    (_pad(X, PROBS, MAP), TypeError, "moe_permute_and_pad_with_probs: routing_map must be a torch.Tensor, got RowMap"),
    (_pad(X, PROBS, MASK, align_size=0), ValueError, "align_size must be at least 1, got 0"),
    (_pad(X, PROBS, MASK, [1, 2]), ValueError, "tokens_per_expert must be .5., got int32.2."),
    (_pad(X, PROBS, MASK, [1, 2, 3, 4, -1]), ValueError, "each of tokens_per_expert must be at least 0, got -1"),
    (_pad(X, PROBS, MASK, PROBS[0]), TypeError, "tokens_per_expert must be int32 or int64, got float32"),
    (_pad(X, PROBS, MASK, 3), TypeError, "tokens_per_expert must be a tensor or a sequence of ints, got int"),
    (lambda: dt.moe_map(NUMBERS[None], map_type="index"), ValueError, "moe_map: expert ids need num_experts"),
    (lambda: dt.moe_map(MASK, align_size=2**30), ValueError, "moe_map: rows.* at most 2147483647"),
    (_unpermute(None, IDS), TypeError, "moe_unpermute: inp must be a torch.Tensor, got NoneType"),
    (_unpermute(ROWS.int(), IDS), TypeError, "moe_unpermute: inp must be float32, bfloat16 or float16 to be summed"),
    (_unpermute(ROWS[0], IDS), ValueError, "moe_unpermute: inp must be .rows, H., got float32.8."),
    (_unpermute(ROWS, IDS.long()), TypeError, "moe_unpermute: row_id_map must be int32, got int64"),
    (_unpermute(ROWS, IDS[0]), ValueError, "moe_unpermute: row_id_map must be .T, slots."),
    (_unpermute(ROWS.to("meta"), IDS), ValueError, "moe_unpermute: row_id_map is on cpu"),
    (_unpermute(ROWS[:4], MAP), ValueError, "moe_unpermute: inp must have a row for each of the map's rows, 30"),
    (_unpermute(ROWS, IDS, PROBS.double()), TypeError, "merging_probs must be .* beside such rows, got float64"),
    (_unpermute(ROWS, IDS, PROBS[:2]), ValueError, "moe_unpermute: merging_probs must be .6, 5."),
    (_unpermute(ROWS, IDS, PROBS, probs=PROBS), ValueError, "merging_probs and probs, .*, were both given"),
    (_unpermute(ROWS, IDS, map_type="rows"), ValueError, "moe_unpermute: map_type must be"),
    (_unpermute(ROWS, IDS, restore_shape=(3, H)), ValueError, "restore_shape .3, 8. does not hold the .6, 8."),
    (_unpermute(ROWS, IDS, restore_shape=(T * H,)), ValueError, "moe_unpermute: restore_shape must be"),
    (_unpermute(ROWS, IDS, pad_offsets=NUMBERS[:4]), ValueError, "moe_unpermute: pad_offsets must be .5."),
    (_unpermute(ROWS, IDS, pad_offsets=PROBS[0]), TypeError, "moe_unpermute: pad_offsets must be int32 or int64"),
    (_unpermute(ROWS, IDS, map_type="index", pad_offsets=NUMBERS), ValueError, "pad_offsets belong to experts"),
    (_sort(X[0], [3, 3], [0, 1]), ValueError, "moe_sort_chunks_by_index: inp must be"),
    (_sort(X, [1, 2], [0, 1]), ValueError, "moe_sort_chunks_by_index: split_sizes add up to 3, and inp has 6 rows"),
    (_sort(X, [9, -3], [0, 1]), ValueError, "each of split_sizes must be at least 0, got -3"),
    (_sort(X, [3, 3], [0, 0]), ValueError, "sorted_index must name each of 2 chunks once"),
    (_sort(X, [3, 3], [0]), ValueError, "split_sizes has 2 chunks, and sorted_index names 1"),
    (_sort(X, NUMBERS, [0]), ValueError, "split_sizes has 5 chunks, and sorted_index names 1"),
    (_sort(X, 3, [0]), TypeError, "split_sizes must be a tensor or a sequence of ints, got int"),
    (_sort(X, [3.0, 3.0], [0, 1]), TypeError, "each of split_sizes must be an int, got float"),
    (_sort(X, PROBS[0], NUMBERS), TypeError, "split_sizes must be int32 or int64, got float32"),
    (_sort(X, MAP.row_id_map, NUMBERS), ValueError, "split_sizes must be .C."),
    (_sort(X, [0] * 2048 + [6], list(range(2049))), NotImplementedError, "2049 chunks, .* at most 2048"),
    (_line(X, PROBS, [3, 3], [0, 1]), ValueError, "moe_sort_chunks_by_index_with_probs: probs must be .T. or .T, 1."),
    (_line(X, LINE[:3], [3, 3], [0, 1]), ValueError, "moe_sort_chunks_by_index_with_probs: probs must be .6."),
    (_line(X, LINE.int(), [3, 3], [0, 1]), TypeError, "moe_sort_chunks_by_index_with_probs: probs must be float32"),
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
