"""The MoE permutation against its oracle, against plain indexing, and against what TransformerEngine documents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from core.permute.test_permute import CHUNKS, routings

import cases
import diptych.torch as dt
from diptych.common.errors import UnsupportedError
from diptych.common.ops.permute import padded_rows
from oracle import permute as oracle
from torch_frontend.tools import same, to_numpy, to_torch

DTYPES = ("float32", "bfloat16", "float16")
H = 24
SIZES = ((7, 3, 2), (64, 8, 2), (33, 5, 3))
NAMES = ("mask", "ids", "dense mask of any byte", "all to one", "repeated ids", "ids out of range", "all to none")


def draw(name: str, shape: tuple[int, ...], dtype: str = "float32", device: str = "cpu") -> torch.Tensor:
    return to_torch(cases.draw(name, "normal", shape, dtype), device)


def cases_of(sizes=SIZES, align: int = 1) -> Iterator[tuple[str, torch.Tensor, dict[str, Any], oracle.Map]]:
    """(name, routing, moe_map's arguments, the oracle's map) with every meaning of num_out_tokens in turn."""
    for tokens, experts, k in sizes:
        for turn, (name, routing) in enumerate(routings(tokens, experts, k)):
            if name not in NAMES:
                continue
            need = oracle.rows_needed(routing, experts, align)
            out = (None, need, max(1, need * 2 // 3), need + 5, -1, 0)[turn % 6]
            rows = padded_rows(routing.size, experts, align) if not out or out < 0 else out
            kind = "index" if routing.dtype.kind == "i" else "mask"
            given = {"num_experts": experts, "map_type": kind, "num_out_tokens": out, "align_size": align}
            want = oracle.row_map(routing, experts, rows, align)
            yield f"{name} T={tokens} E={experts} out={out} of {need}", torch.from_numpy(routing), given, want


def same_map(got: dt.RowMap, want: oracle.Map, label: str) -> None:
    for field in want._fields:
        same(getattr(got, field), getattr(want, field), f"{field} of {label}")


@pytest.mark.parametrize("align", [1, 16])
def test_maps(align, device):
    for label, routing, given, want in cases_of(align=align):
        same_map(dt.moe_map(routing.to(device), **given), want, label)
        if given["map_type"] == "mask":
            for dtype in (torch.int8, torch.int32, torch.int64):
                got = dt.moe_map((routing != 0).to(device, dtype), **given)
                same(got.row_id_map, want.row_id_map, f"{dtype} {label}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_oracle(dtype, device):
    """Every result and every gradient."""
    for turn, (label, routing, given, m) in enumerate(cases_of(align=(1, 4)[dtype == "float16"])):
        tokens, slots = m.row_id_map.shape
        prob_dtype = ("float32", dtype, "bfloat16")[turn % 3]
        x, probs = draw(label, (tokens, H), dtype, device), draw(f"p {label}", (tokens, slots), prob_dtype, device)
        for t in (x, probs):
            t.requires_grad_()
        row_map = dt.moe_map(routing.to(device), **given)
        y, moved, ids = dt.moe_permute_with_probs(x, probs, row_map)
        same(ids, m.row_id_map, label)
        same(y, oracle.permute(to_numpy(x), m), f"permuted {label}")
        same(moved, oracle.permute_probs(to_numpy(probs), m), f"probs {label}")
        dy, dmoved = draw(f"dy {label}", y.shape, dtype, device), draw(f"dp {label}", moved.shape, prob_dtype, device)
        torch.autograd.backward((y, moved), (dy, dmoved))
        same(x.grad, oracle.unpermute(to_numpy(dy), m), f"dx {label}")
        same(probs.grad, oracle.gather_probs(to_numpy(dmoved), m), f"dprobs {label}")

        y, factors = dy.clone().requires_grad_(), probs.detach().clone().requires_grad_()
        for which in (ids, row_map):  # known by its rows alone, and whole
            for merging in (None, factors):
                y.grad = factors.grad = None
                z = dt.moe_unpermute(y, which, merging, map_type=given["map_type"])
                p = None if merging is None else to_numpy(factors)
                same(z, oracle.unpermute(to_numpy(y), m, p), f"unpermuted {label}")
                dz = x.detach()
                z.backward(dz)
                ones = np.ones(m.row_id_map.shape, np.float32)
                same(y.grad, oracle.unpermute_dx(to_numpy(dz), m, ones if p is None else p), f"dy {label}")
                if merging is not None:
                    exact, allowed = oracle.unpermute_dprobs(to_numpy(dz), to_numpy(y), m)
                    eps = torch.finfo(factors.dtype).eps
                    error = np.abs(to_numpy(factors.grad).astype(np.float64) - exact)
                    assert (error <= allowed + eps * (np.abs(exact) + allowed) + 1e-7).all(), label


def test_plain_indexing_in_float64():
    for label, routing, given, m in cases_of():
        tokens, slots = m.row_id_map.shape
        token = torch.from_numpy(m.row_source.astype(np.int64) // max(1, slots))
        there, at = torch.from_numpy(m.row_source >= 0), torch.from_numpy(m.row_source.clip(0).astype(np.int64))
        x = draw(label, (tokens, H)).double().requires_grad_()
        probs = draw(f"p {label}", (tokens, slots)).double().requires_grad_()

        def permuted(x, probs, there=there, token=token, at=at):
            zero = torch.zeros((), dtype=torch.float64)
            rows = torch.where(there[:, None], x[token.clamp(0)], zero)
            return rows, torch.where(there, probs.reshape(-1)[at], zero)

        def back(rows, factors, x=x, there=there, token=token):
            return torch.zeros_like(x).index_add(0, token[there], (rows * factors[:, None])[there])

        def ours(x, probs, routing=routing, given=given):
            row_map = dt.moe_map(routing, **given)
            rows, moved, _ = dt.moe_permute_with_probs(x, probs, row_map)
            return rows, moved, dt.moe_unpermute(rows * 2, row_map, probs)

        rows, moved = permuted(x, probs)
        want = (rows, moved, back(rows * 2, moved))
        got = ours(x, probs)
        factors = [torch.randn_like(t) for t in want]
        grads = [torch.autograd.grad(out, (x, probs), factors) for out in (got, want)]
        for a, b in zip((*got, *grads[0]), (*want, *grads[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=label)


ROUTING = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("padding", [False, True])
def test_gradcheck(padding):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    sizes, index = torch.tensor([1, 0, 3]), torch.tensor([2, 0, 1])
    row_map = dt.moe_map(ROUTING, num_out_tokens=6, align_size=2)
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    line = torch.rand(4, dtype=torch.float64, requires_grad=True)
    option = {"zero_prob_is_padding": padding}
    checks: tuple[tuple[Callable[..., Any], tuple[torch.Tensor, ...]], ...] = (
        (lambda x: dt.moe_permute(x, ROUTING, 5)[0], (x,)),
        (lambda x, p: dt.moe_permute_with_probs(x, p, ROUTING, **option)[:2], (x, probs)),
        (lambda p: dt.moe_permute_with_probs(x.detach(), p, ROUTING, **option)[1], (probs,)),
        (lambda x, p: dt.moe_permute_and_pad_with_probs(x, p, ROUTING, None, 4, **option)[:2], (x, probs)),
        (lambda r, p: dt.moe_unpermute(r, row_map, p), (rows, probs)),
        (lambda r, p: dt.moe_unpermute(r, row_map.row_id_map, p, pad_offsets=torch.tensor([0, 1, 0])), (rows, probs)),
        (lambda r: dt.moe_unpermute(r, row_map.row_id_map), (rows,)),
        (lambda p: dt.moe_unpermute(rows.detach(), row_map, p), (probs,)),
        (lambda x, p: dt.moe_sort_chunks_by_index_with_probs(x, p, sizes, index), (x, line)),
        (lambda x: dt.moe_sort_chunks_by_index(x, [1, 0, 3], [2, 0, 1]), (x,)),
    )
    for fn, args in checks:
        assert torch.autograd.gradcheck(fn, args)


# --- what TransformerEngine documents --------------------------------------------------------------------------------


def test_the_documented_meaning():
    x = torch.arange(4.0)[:, None] * torch.ones(4, 2)
    probs = torch.arange(12.0).view(4, 3) / 16
    for wanted in (None, -1, 0):
        y, row_id_map = dt.moe_permute(x, ROUTING, wanted)
        assert y.shape == (12, 2) and row_id_map.dtype == torch.int32
        assert y[:, 0].tolist() == [0, 2, 2, 0, 1, *[0] * 7]
    y, row_id_map = dt.moe_permute(x, ROUTING, 5, max_token_num=100)
    assert y[:, 0].tolist() == [0, 2, 2, 0, 1]
    assert row_id_map.tolist() == [[0, -1, 3], [-1, -1, 4], [1, 2, -1], [-1, -1, -1]]
    y, moved, row_id_map = dt.moe_permute_with_probs(x, probs, ROUTING, 5)
    assert (moved * 16).tolist() == [0, 6, 7, 2, 5] and y[:, 0].tolist() == [0, 2, 2, 0, 1]
    assert dt.moe_permute_with_probs(x + 1, probs, ROUTING, 5)[0][0, 0] == 1
    assert dt.moe_permute_with_probs(x + 1, probs, ROUTING, 5, zero_prob_is_padding=True)[0][0, 0] == 0
    z = dt.moe_unpermute(y, row_id_map, probs, restore_shape=torch.Size((2, 2, 2)))
    assert (z[..., 0] * 16).tolist() == [[0, 5], [26, 0]]

    ids = torch.tensor([[1, 0], [1, 2], [2, 1]], dtype=torch.int32)  # a stable sort by expert
    y, row_id_map = dt.moe_permute(x[:3], ids, map_type="index")
    assert y[:, 0].tolist() == [0, 0, 1, 2, 1, 2] and row_id_map.tolist() == [[1, 0], [2, 4], [5, 3]]
    assert dt.moe_permute(x[:3], ids, 4, map_type="index", num_experts=3)[0][:, 0].tolist() == [0, 0, 1, 2]

    out = dt.moe_sort_chunks_by_index(x, torch.tensor([1, 3, 0]), torch.tensor([1, 2, 0]))
    assert out[:, 0].tolist() == [1, 2, 3, 0]
    out, line = dt.moe_sort_chunks_by_index_with_probs(x, probs[:, :1], [1, 3, 0], [1, 2, 0])
    assert out[:, 0].tolist() == [1, 2, 3, 0] and (line * 16).tolist() == [3, 6, 9, 0]


def test_padding(device):
    x, probs, mask = (t.to(device) for t in (torch.randn(4, 2), torch.rand(4, 3), ROUTING))
    y, moved, row_id_map, pad_offsets, target = dt.moe_permute_and_pad_with_probs(x, probs, mask, None, 4)
    assert y.shape == (padded_rows(12, 3, 4), 2) and pad_offsets is None
    assert target.tolist() == [4, 4, 4] and target.dtype == torch.int64
    assert row_id_map.tolist() == [[0, -1, 8], [-1, -1, 9], [1, 4, -1], [-1, -1, -1]]
    merged = dt.moe_unpermute(y, row_id_map, probs, pad_offsets=pad_offsets)
    plain, _, plain_map = dt.moe_permute_with_probs(x, probs, mask)
    assert torch.equal(merged, dt.moe_unpermute(plain, plain_map, probs))
    # counts of the caller's own, as a list and on the device
    for counts in ([2, 1, 2], mask.sum(0), mask.sum(0).int(), mask.sum(0).cpu()):
        again = dt.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4, num_out_tokens=12)
        for a, b in zip(again, (y[:12], moved[:12], row_id_map, None, target), strict=True):
            assert a is b is None or torch.equal(a, b)
    # others place the regions elsewhere, as TransformerEngine's offsets would
    *_, placed, _, target = dt.moe_permute_and_pad_with_probs(x, probs, mask, [3, 1, 2], 4, num_out_tokens=9)
    assert placed.tolist() == [[0, -1, 7], [-1, -1, 8], [1, 3, -1], [-1, -1, -1]]
    assert target.tolist() == [4, 4, 1]
    # offsets that are not in the map yet
    offsets = torch.tensor([0, 2, 5], device=device)
    padded = dt.moe_unpermute(y, plain_map, probs, pad_offsets=offsets)
    assert torch.equal(padded, merged)
    assert torch.equal(dt.moe_unpermute(y, plain_map, probs, pad_offsets=[0, 2, 5]), merged)
    grads = []
    for ids, more in ((row_id_map, None), (plain_map, offsets)):
        leaf = y.detach().clone().requires_grad_()
        dt.moe_unpermute(leaf, ids, probs, pad_offsets=more).backward(x)
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_the_deprecated_name_of_merging_probs():
    y, row_id_map = dt.moe_permute(torch.randn(4, 2), ROUTING)
    probs = torch.rand(4, 3)
    with pytest.warns(UserWarning, match="probs is deprecated, use merging_probs"):
        old = dt.moe_unpermute(y, row_id_map, probs=probs)
    assert torch.equal(old, dt.moe_unpermute(y, row_id_map, probs))
    with pytest.raises(ValueError, match="both given"):
        dt.moe_unpermute(y, row_id_map, probs, probs=probs)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name, device):
    sizes, order, tokens = CHUNKS[name]
    numbers = np.array(sizes, np.int32), np.array(order, np.int32)
    to, row_source = oracle.chunk_map(*numbers, tokens)
    m = oracle.Map(to, row_source, to, to)
    x, probs = draw(name, (tokens, H), "bfloat16", device).requires_grad_(), draw(f"p {name}", (tokens,)).to(device)
    for dtype in (torch.int32, torch.int64):
        given = [torch.from_numpy(n).to(device, dtype) for n in numbers]
        y, moved = dt.moe_sort_chunks_by_index_with_probs(x, probs, *given)
        same(y, oracle.permute(to_numpy(x), m), name)
        same(moved, oracle.permute_probs(to_numpy(probs)[:, None], m), name)
        x.grad = None
        y.backward(x.detach())
        same(x.grad, oracle.unpermute(to_numpy(x), m), name)


def test_wide_chunk_numbers_do_not_wrap():
    x, sizes = torch.ones(6, 2), torch.tensor([2**32 + 2, 3])
    assert torch.equal(dt.moe_sort_chunks_by_index(x, sizes, torch.tensor([1, 0])), x)
    assert not dt.moe_sort_chunks_by_index(x, sizes, torch.tensor([2**32, -(2**40)])).any()


# --- autograd --------------------------------------------------------------------------------------------------------


def ops_of(x: torch.Tensor, probs: torch.Tensor, device: str) -> dict[str, Callable[[], Any]]:
    mask = ROUTING.to(device)
    m = dt.moe_map(mask)
    rows = torch.cat([x, x, x])
    return {
        "permute": lambda: dt.moe_permute(x, m)[0],
        "with probs": lambda: dt.moe_permute_with_probs(x, probs, m)[0],
        "probs alone": lambda: dt.moe_permute_with_probs(x, probs, m)[1],
        "unpermute": lambda: dt.moe_unpermute(rows, m.row_id_map),
        "merging": lambda: dt.moe_unpermute(rows, m.row_id_map, probs),
        "chunks": lambda: dt.moe_sort_chunks_by_index(x, [3, 1], [1, 0]),
    }


@pytest.mark.parametrize("name", list(ops_of(torch.zeros(4, 2), torch.zeros(4, 3), "cpu")))
def test_graphs(name, device):
    """Retained graphs, gradients without strides, gradients of one operand, and no second derivative."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    probs = torch.rand(4, 3, device=device, requires_grad=True)
    y = ops_of(x, probs, device)[name]()
    leaf = probs if name == "probs alone" else x
    first = torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0]  # a gradient of stride 0
    for ones in (torch.ones_like(y), torch.ones_like(y.t()).t()):  # one that is dense, one that is transposed
        assert torch.equal(torch.autograd.grad(y, leaf, ones, retain_graph=True)[0], first)
    with pytest.raises(UnsupportedError, match=r"has no second derivative .*; detach\(\)"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)
    for need_x, need_probs in ((True, False), (False, True)):
        x.requires_grad_(need_x), probs.requires_grad_(need_probs)
        y = ops_of(x, probs, device)[name]()
        leaf, used = (probs, name in ("probs alone", "merging")) if need_probs else (x, name != "probs alone")
        assert y.requires_grad == used
        if used:
            again = torch.autograd.grad(y.sum(), leaf)[0]
            assert again.shape == leaf.shape
            if name != "merging" or need_x:
                assert torch.equal(again, first)


def test_counts_on_the_host_make_the_rows_that_they_say(device):
    x, probs, mask = torch.randn(64, 4, device=device), torch.rand(64, 9, device=device), torch.zeros(64, 9)
    mask = mask.scatter(1, torch.rand(64, 8).topk(3).indices, 1).bool().to(device)  # nobody goes to the last expert
    counts = mask.sum(0).tolist()
    rows = sum(-(-n // 16) * 16 for n in counts)
    whole = dt.moe_permute_and_pad_with_probs(x, probs, mask, None, 16)
    assert whole[0].shape[0] == padded_rows(64 * 9, 9, 16) > rows
    for given in (counts, tuple(counts), torch.tensor(counts), torch.tensor(counts, dtype=torch.int32)):
        made = dt.moe_permute_and_pad_with_probs(x, probs, mask, given, 16)
        assert made[0].shape[0] == rows
        for a, b in zip(made, (whole[0][:rows], whole[1][:rows], *whole[2:]), strict=True):
            assert a is b is None or torch.equal(a, b)
        y = torch.compile(dt.moe_permute_and_pad_with_probs, backend="eager")(x, probs, mask, given, 16)[0]
        assert torch.equal(y[:rows], made[0]) and (isinstance(given, torch.Tensor) or len(y) == rows)
    if device == "cpu":
        counts[0] -= 16
        with pytest.raises(ValueError, match=r"tokens_per_expert .* leaves no room for tokens of the routing_map"):
            dt.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)
        assert dt.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16, num_out_tokens=64)[0].shape[0] == 64


def test_zero_probabilities_pad():
    """Such rows are zeros; inp gets no gradient from them, and their probability keeps its own."""
    x = torch.randn(4, 2, requires_grad=True)
    probs = torch.tensor([[0.0, 1, 2], [1, 1, -0.0], [3, 0, 1], [1, 1, 1]], requires_grad=True)
    y, moved, _ = dt.moe_permute_with_probs(x, probs, ROUTING, 5, zero_prob_is_padding=True)
    assert y.abs().sum(1).ne(0).tolist() == [False, True, False, True, False]
    torch.autograd.backward((y, moved), (torch.ones_like(y), torch.arange(1.0, 6)))
    assert x.grad[:, 0].tolist() == [1, 0, 1, 0]
    assert probs.grad.tolist() == [[1, 0, 4], [0, 0, 5], [2, 3, 0], [0, 0, 0]]


@pytest.mark.parametrize("kind", ["mask", "index"])
@pytest.mark.parametrize("tokens, experts, k", [(0, 4, 2), (0, 1, 1), (1, 1, 1), (3, 1, 1), (5, 2, 0)])
def test_small(tokens, experts, k, kind, device):
    x = torch.randn(tokens, H, device=device, requires_grad=True)
    if kind == "mask":
        routing = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
        routing[:, :k] = True
    else:
        routing = torch.arange(k, device=device).expand(tokens, k)
    m = dt.moe_map(routing, experts, map_type=kind)
    y, ids = dt.moe_permute(x, m)
    z = dt.moe_unpermute(y, ids)
    assert torch.equal(z, x * k) and y.shape[0] == routing.numel()
    z.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, k))


def test_leading_dimensions_and_strides(device):
    x = torch.randn(2, 2, H, device=device).transpose(0, 1).requires_grad_()
    probs, mask = torch.rand(3, 4, device=device).t(), ROUTING.t().contiguous().t().to(device)
    y, moved, ids = dt.moe_permute_with_probs(x, probs, mask)
    flat = dt.moe_permute_with_probs(x.detach().reshape(4, H), probs.contiguous(), mask.contiguous())
    for a, b in zip((y, moved, ids), flat, strict=True):
        assert torch.equal(a, b)
    y.sum().backward()
    assert torch.equal(x.grad, mask.sum(1).float()[:, None].expand(4, H).reshape(2, 2, H))


# --- hostile maps, threads, streams ----------------------------------------------------------------------------------


def test_hostile_maps(device):
    """Whatever a row_id_map holds: out of range is absent, and of several slots the last one has the gradient."""
    rng = cases.rng_for("hostile")
    for tokens, slots, rows in ((6, 3, 4), (40, 7, 50), (3, 2, 0), (1, 5, 1)):
        edges = np.array([-1, -7, rows, rows + 1, 2**31 - 1, -(2**31), 0, 1])
        ids = rng.choice(np.concatenate([edges, np.arange(rows)]), (tokens, slots)).astype(np.int32)
        known = np.where((ids >= 0) & (ids < rows), ids, -1)
        row_source = np.full(rows, -1, np.int32)
        row_source[known.reshape(-1)[known.reshape(-1) >= 0]] = np.flatnonzero(known.reshape(-1) >= 0)
        m = oracle.Map(known, row_source, row_source, row_source)
        x, probs = draw("x", (rows, H), "float32", device), draw("p", (tokens, slots), "float32", device)
        given = torch.from_numpy(ids).to(device)
        for p in (None, probs):
            leaf = x.clone().requires_grad_()
            y = dt.moe_unpermute(leaf, given, p)
            same(y, oracle.unpermute(to_numpy(x), m, None if p is None else to_numpy(p)), "y")
            grads = [torch.autograd.grad(y, leaf, y.detach(), retain_graph=True)[0] for _ in range(3)]
            factors = np.ones((tokens, slots), np.float32) if p is None else to_numpy(p)
            for g in grads:
                same(g, oracle.unpermute_dx(to_numpy(y), m, factors), "dx")
        offsets = torch.from_numpy(rng.choice([0, 1, -1, 2**31 - 1, -(2**31), 2**62], slots)).to(device)
        leaf = x.clone().requires_grad_()
        dt.moe_unpermute(leaf, given, probs, pad_offsets=offsets).sum().backward()
        assert leaf.grad.isfinite().all()


def test_two_threads_at_once(device):
    jobs = []
    for seed in range(2):
        torch.manual_seed(seed)
        x, mask = torch.randn(300 + seed, 64, device=device), torch.rand(300 + seed, 9, device=device) < 0.3
        y, ids = dt.moe_permute(x, mask)
        jobs.append((x, mask, y, dt.moe_unpermute(y, ids)))
    wrong = []

    def run(x, mask, want_y, want_z):
        leaf = x.clone().requires_grad_()
        for _ in range(20):
            y, ids = dt.moe_permute(leaf, mask)
            z = dt.moe_unpermute(y, ids)
            (grad,) = torch.autograd.grad(z, leaf, torch.ones_like(z))
            if not (torch.equal(y, want_y) and torch.equal(z, want_z) and torch.equal(grad[:, 0], mask.sum(1).float())):
                wrong.append(len(x))

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.cuda
def test_nothing_waits_for_the_device(cuda):
    x = torch.randn(64, H, device=cuda, requires_grad=True)
    mask, probs = torch.rand(64, 8, device=cuda) < 0.3, torch.rand(64, 8, device=cuda, requires_grad=True)
    counts, order = mask.sum(0), torch.arange(8, device=cuda).flip(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [
            dt.moe_permute_with_probs(x, probs, mask)[0],
            dt.moe_permute_and_pad_with_probs(x, probs, mask)[0],
            dt.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)[0],
            dt.moe_unpermute(torch.cat([x] * 8), dt.moe_map(mask), probs, pad_offsets=order),
            dt.moe_sort_chunks_by_index(x, torch.full_like(order, 8), order),
            dt.moe_sort_chunks_by_index(x, [8] * 8, list(range(8))),
        ]
        for y in outs:
            y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
