"""Permutation of rows: the oracle's bits on every device, whatever the routing, row width and alignment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from sweeps import others_slow

import cases
from core import permute_runner as ops
from core import runner
from diptych import core
from diptych.common import FORMATS, Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from oracle import permute as oracle

ALIGNS = (1, 16, 32, 128, 5)
# (tokens, experts, choices): one chunk and many, experts in one tile and several, odd counts
SIZES = ((0, 4, 2), (1, 1, 1), (7, 3, 2), (64, 8, 2), (300, 60, 4), (1000, 256, 8), (129, 300, 5), (20000, 7, 2))
FLOATS = {**cases.INPUT_DTYPES, "float64": np.dtype(np.float64)}


def top_k(rng: np.random.Generator, tokens: int, experts: int, k: int) -> np.ndarray:
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)


def as_mask(ids: np.ndarray, experts: int) -> np.ndarray:
    mask = np.zeros((len(ids), experts), bool)
    np.put_along_axis(mask, ids.astype(np.int64), True, axis=1)
    return mask


def routings(tokens: int, experts: int, k: int) -> Iterator[tuple[str, np.ndarray]]:
    """Routing tensors as routers make them, and as nobody should."""
    rng = cases.rng_for(f"routing-{tokens}-{experts}-{k}")
    ids = top_k(rng, tokens, experts, k)
    yield "mask", as_mask(ids, experts)
    yield "ids", ids
    yield "int64 ids", ids.astype(np.int64)
    dense = np.where(rng.random((tokens, experts)) < 0.7, rng.integers(1, 256, (tokens, experts)), 0).astype(np.uint8)
    yield "dense mask of any byte", dense
    yield "full mask", np.ones((tokens, experts), np.uint8)
    yield "empty mask", np.zeros((tokens, experts), bool)
    yield "all to one", np.full((tokens, k), experts - 1, np.int32)
    yield "all to none", np.full((tokens, k), -1, np.int32)
    yield "repeated ids", rng.integers(0, min(experts, 2), (tokens, k)).astype(np.int32)
    wild = np.array([-1, -2, experts, experts + 1, 2**31 - 1, -(2**31), 0, experts - 1], np.int64)
    yield "ids out of range", rng.choice(wild, (tokens, k)).astype(np.int32)
    yield "int64 ids that wrap", rng.choice(np.append(wild, [2**32, 2**32 + 1, -(2**63)]), (tokens, k))
    yield "no slots", np.zeros((tokens, 0), np.int32)


def maps(sizes=SIZES[1:6]) -> Iterator[tuple[str, oracle.Map]]:
    """Maps to move rows by: each kind, with rows to spare, as many as needed, and too few."""
    for turn, (tokens, experts, k) in enumerate(sizes):
        for name, routing in routings(tokens, experts, k):
            if name in ("int64 ids", "int64 ids that wrap") or ("mask" in name[1:] and routing.size > 20000):
                continue
            align = ALIGNS[turn % len(ALIGNS)]
            need = oracle.rows_needed(routing, experts, align)
            rows = (need, need + 9, need * 2 // 3)[(turn + len(name)) % 3]
            yield (
                f"{name} T={tokens} E={experts} align={align} {rows} of {need} rows",
                oracle.row_map(routing, experts, rows, align),
            )


def threads_of(device: str) -> tuple[int, ...]:
    return (1, 3) if device == "cpu" else (1,)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_maps(size, device):
    tokens, experts, k = size
    be = runner.backend(device)
    for turn, (name, routing) in enumerate(routings(tokens, experts, k)):
        for align in ALIGNS if tokens < 2000 else ALIGNS[turn % 5 :: 5]:
            need = oracle.rows_needed(routing, experts, align)
            for rows in {need, need + 1 + align, need // 2, 0, 1}:
                want = oracle.row_map(routing, experts, rows, align)
                for threads in threads_of(device):
                    with runner.setting(threads=threads):
                        got = ops.row_map(be, routing, experts, rows, align, offset=turn % 2)
                    for field, g, w in zip(want._fields, got, want, strict=True):
                        label = f"{field} of {name} {size} align={align} rows={rows} {cases.report_header()}"
                        runner.same_bits(g, w, label)


def test_maps_of_many_experts(device):
    be = runner.backend(device)
    for tokens, experts, k in ((70, 2048, 9), (3, 2047, 2), (40, 1025, 64)):
        for name, routing in routings(tokens, experts, k):
            rows = oracle.rows_needed(routing, experts, 16)
            want = oracle.row_map(routing, experts, rows, 16)
            for field, g, w in zip(want._fields, ops.row_map(be, routing, experts, rows, 16), want, strict=True):
                runner.same_bits(g, w, f"{field} of {name} E={experts} {cases.report_header()}")


@pytest.mark.sanitize
def test_maps_of_many_chunks(device):
    """CUDA's blocks take these sizes in several passes, with more blocks than one page of counts has room for."""
    be = runner.backend(device)
    for tokens, experts, k in ((17000, 64, 2), (16500, 320, 3), (16390, 36, 2), (4_200_000, 3, 1)):
        rng = cases.rng_for(f"many-chunks-{tokens}-{experts}")
        ids = rng.integers(-1, experts, (tokens, k)).astype(np.int32)
        mask = np.zeros((tokens, experts), bool)
        mask[np.arange(tokens)[:, None], np.maximum(ids, 0)] = True
        for turn, routing in enumerate((mask, ids)):
            rows = oracle.rows_needed(routing, experts, 8) - 5
            want = oracle.row_map(routing, experts, rows, 8)
            for field, g, w in zip(want._fields, ops.row_map(be, routing, experts, rows, 8), want, strict=True):
                runner.same_bits(g, w, f"{field} of {('mask', 'ids')[turn]} {tokens}x{experts} {cases.report_header()}")


def rows_of(rng: np.random.Generator, count: int, width: int, dtype: str) -> np.ndarray:
    raw = rng.integers(0, 256, (count, width * runner.NUMPY[dtype].itemsize), np.uint8)
    return raw.view(runner.NUMPY[dtype])


WIDTHS = ((1, "uint8"), (3, "bfloat16"), (4, "float32"), (33, "float16"), (96, "uint8"), (130, "uint8"),
          (520, "float64"), (2051, "uint8"), (2064, "bfloat16"), (9, "float32"))  # fmt: skip


def test_rows_move_as_bytes(device):
    be = runner.backend(device)
    for turn, (name, m) in enumerate(maps()):
        rng = cases.rng_for(f"bytes-{name}")
        tokens = len(m.row_id_map)
        width, dtype = WIDTHS[turn % len(WIDTHS)]
        x, scales = rows_of(rng, tokens, width, dtype), rows_of(rng, tokens, 2 + turn % 3, "float32")
        codes, single = rows_of(rng, tokens, 1 + turn % 5, "uint8"), rows_of(rng, tokens, 1, "float32")[:, 0]
        planes = [(x, 0), (scales, 0x3F800000), (codes, 0), (single, 0x40000000)][: 1 + turn % 4]
        fills = (0, np.float32(1), 0, np.float32(2))
        for threads in threads_of(device):
            with runner.setting(threads=threads):
                got, _ = ops.permute(be, planes, m, offset=turn % 2)
            for i, (g, (p, _)) in enumerate(zip(got, planes, strict=True)):
                runner.same_bits(g, oracle.permute(p, m, fills[i]), f"{name} plane {i} {cases.report_header()}")


def test_long_rows_past_the_caches(device):
    """A CPU writes these rows around the caches, and a GPU writes them in several pieces."""
    be = runner.backend(device)
    m = oracle.row_map(top_k(cases.rng_for("long"), 300, 6, 3), 6, 1500, 128)
    for width, offset in ((7168, 0), (9001, 1)):
        x = rows_of(cases.rng_for(f"long-{width}"), 300, width, "bfloat16")
        (got,), _ = ops.permute(be, [(x, 0)], m, offset=offset)
        runner.same_bits(got, oracle.permute(x, m), f"width {width} {cases.report_header()}")


# (tokens, experts, choices, alignment) and the planes' (width, dtype, fill); 132 SMs of an H200 have 226 KB of shared
# memory each, and keep 128 KB in registers
FULL = {
    "one launch": (2102, 8, 3, 1, ((7168, "bfloat16", 0x40A00000),)),
    "registers keep five tokens a block": (2700, 8, 3, 1, ((7168, "bfloat16", 0x40A00000),)),
    "a token for each block of the second": (5900, 32, 2, 128, ((4096, "bfloat16", 0x40A00000),)),
    "a third of what fits in the second": (4300, 8, 2, 16, ((7168, "bfloat16", 0),)),
    "a map looked through in two goes": (7400, 256, 4, 1, ((2048, "bfloat16", 0x40A00000),)),
    "one row each": (5000, 60, 1, 5, ((4096, "float16", 0),)),
    "short rows": (70000, 9, 2, 16, ((64, "bfloat16", 0x40A00000),)),
    "planes": (5000, 40, 4, 128, ((7168, "uint8", 0), (56, "float32", 0x3F800000), (448, "uint8", 0x7F7F7F7F))),
    "planes, the first one short": (4500, 70, 2, 1, ((56, "float32", 0x3F800000), (4096, "uint8", 0))),
    "planes alike": (4700, 8, 4, 1, ((4096, "uint8", 0), (4096, "uint8", 0))),
}


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("case", FULL)
def test_tokens_that_fill_all_of_shared_memory(case, cuda):
    """Few or several launches' worth, with rows to spare and too few."""
    be, (tokens, experts, k, align, planes) = runner.Torch(), FULL[case]
    rng = cases.rng_for(f"slices-{case}")
    ids, data = top_k(rng, tokens, experts, k), [rows_of(rng, tokens, width, dtype) for width, dtype, _ in planes]
    for turn, (routing, more) in enumerate(itertools.product((ids, as_mask(ids, experts)), (500, -700))):
        m = oracle.row_map(routing, experts, oracle.rows_needed(routing, experts, align) + more, align)
        probs = rows_of(rng, *m.row_id_map.shape, tuple(FLOATS)[turn]) if turn != 1 else None
        given = [(x, fill) for x, (_, _, fill) in zip(data, planes, strict=True)]
        got, permuted = ops.permute(be, given, m, probs, probs_offset=turn % 3)
        label = f"{case}: {('ids', 'mask')[turn // 2]} {more} {cases.report_header()}"
        for g, x, (_, _, fill) in zip(got, data, planes, strict=True):
            absent = np.full(x[0].nbytes // 4, fill, np.uint32).view(x.dtype)
            runner.same_bits(g, oracle.permute(x, m, absent), f"{label} {x.shape}")
        if probs is not None:
            runner.same_bits(permuted, oracle.permute_probs(probs, m), label)


@pytest.mark.parametrize("dtype", FLOATS)
def test_probs_move_with_their_rows(dtype, device):
    be = runner.backend(device)
    for turn, (name, m) in enumerate(maps()):
        rng = cases.rng_for(f"probs-{name}-{dtype}")
        probs = rows_of(rng, *m.row_id_map.shape, dtype)
        zero = rng.random(probs.shape) < 0.3
        probs[zero] = np.where(rng.random(probs.shape) < 0.5, -0.0, 0.0).astype(probs.dtype)[zero]
        x = rows_of(rng, len(probs), 5 + turn % 2 * 600, "bfloat16")
        for padding in (False, True):
            (got,), permuted = ops.permute(be, [(x, 0)], m, probs, zero_prob_is_padding=padding, offset=turn % 2)
            want = oracle.permute(x, m)
            moved = oracle.permute_probs(probs, m)
            if padding:
                want[(moved.view(f"u{moved.itemsize}") << 1) == 0] = 0
            label = f"{name} {dtype} zero_prob_is_padding={padding} {cases.report_header()}"
            runner.same_bits(got, want, label)
            assert permuted is not None
            runner.same_bits(permuted, moved, label)


VALUES = ("normal", "random_bits", "subnormal_input", "huge", "inf_nan_mix")


def draw(name: str, values: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "float64":
        return cases.rng_for(name).standard_normal(shape)
    return cases.draw(name, values, shape, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_unpermute(dtype, device):
    if device == "cuda" and dtype == "float64":
        pytest.skip("float64 rows are summed on the CPU only")
    be = runner.backend(device)
    for turn, (name, m) in enumerate(maps()):
        width, values = (1, 7, 8, 64, 130, 1100)[turn % 6], VALUES[turn % 5]
        x = draw(f"unpermute-{name}-{dtype}", values, (m.rows, width), dtype)
        tokens, slots = m.row_id_map.shape
        for prob_dtype in (None, *itertools.islice(itertools.cycle(FLOATS), turn % 4, turn % 4 + 2)):
            if prob_dtype == "float64" != dtype:
                continue
            probs = None if prob_dtype is None else draw(f"p-{name}", values, (tokens, slots), prob_dtype)
            grads = draw(f"g-{name}", "normal", (m.rows,), prob_dtype or "float32")
            for threads in threads_of(device):
                with runner.setting(threads=threads):
                    y, dprobs = ops.unpermute(be, x, m, probs, grads if turn % 2 else None, offset=turn % 3)
                label = f"{name} {dtype}[{width}] {values} probs {prob_dtype} {cases.report_header()}"
                runner.same_bits(y, oracle.unpermute(x, m, probs), label, nan_free=True)
                if dprobs is not None:
                    runner.same_bits(dprobs, oracle.gather_probs(grads, m), label)


@pytest.mark.parametrize("dtype", others_slow(FLOATS, ("float32", "bfloat16")))
def test_unpermute_gradients(dtype, device):
    if device == "cuda" and dtype == "float64":
        pytest.skip("float64 rows are summed on the CPU only")
    be = runner.backend(device)
    for turn, (name, m) in enumerate(maps()):
        width, values = (1, 7, 8, 64, 130, 1100, 0)[turn % 7], VALUES[turn % 4]
        tokens, slots = m.row_id_map.shape
        prob_dtype = dtype if dtype == "float64" else list(cases.INPUT_DTYPES)[turn % 3]
        dy, x = draw(f"dy-{name}", values, (tokens, width), dtype), draw(f"x-{name}", "normal", (m.rows, width), dtype)
        probs = draw(f"dyp-{name}", values, (tokens, slots), prob_dtype)
        label = f"{name} {dtype}[{width}] {values} probs {prob_dtype} {cases.report_header()}"
        dx, dprobs = ops.unpermute_grad(be, dy, m, probs, x, offset=turn % 2)
        runner.same_bits(dx, oracle.unpermute_dx(dy, m, probs), label, nan_free=True)
        alone, none = ops.unpermute_grad(be, dy, m, probs, None)
        runner.same_bits(alone, dx, f"without dprobs: {label}", nan_free=True)
        assert none is None and dprobs is not None
        exact, allowed = oracle.unpermute_dprobs(dy, x, m)
        info = ml_dtypes.finfo(probs.dtype)
        with np.errstate(all="ignore"):
            allowed += (np.abs(exact) + allowed) * float(info.eps) + float(info.smallest_subnormal)
            error = np.abs(dprobs.astype(np.float64) - exact)
            known = np.isfinite(exact) & np.isfinite(allowed) & (np.abs(exact) + allowed < float(info.max))
        assert (error <= allowed)[known].all(), label
        for threads, offset in ((1, 1), (3, 0)):  # the bits of a sum follow from the shape alone
            with runner.setting(threads=threads):
                _, again = ops.unpermute_grad(be, dy, m, probs, x, offset=offset, poison=0x5A)
            assert again is not None
            runner.same_bits(again, dprobs, f"again: {label}", nan_free=True)


def test_columns(device):
    be = runner.backend(device)
    for turn, (name, m) in enumerate(maps(((7, 3, 2), (64, 8, 2), (300, 60, 4), (1000, 16, 8)))):
        x = rows_of(cases.rng_for(f"columns-{name}"), (1, 2, 5, 8, 33)[turn % 5], len(m.row_id_map), "uint8")
        got = ops.permute_columns(be, x, m, offset=turn % 2)
        runner.same_bits(got, np.ascontiguousarray(oracle.permute_columns(x, m)), f"{name} {cases.report_header()}")


CHUNKS = {
    "in order": ([3, 0, 5, 2], [0, 1, 2, 3], 10),
    "turned": ([3, 0, 5, 2], [3, 1, 0, 2], 10),
    "no chunks": ([], [], 4),
    "no rows": ([0, 0], [1, 0], 0),
    "below zero": ([-4, 6, -(2**31), 4], [3, 2, 1, 0], 10),
    "more than there are": ([4, 2**31 - 1, 2**31 - 1, 3], [2, 1, 3, 0], 10),
    "fewer than there are": ([2, 3], [1, 0], 10),
    "out of range": ([3, 3, 4], [-1, 3, 2**31 - 1], 10),
    "named twice": ([3, 3, 4], [2, 2, 0], 10),
}


def test_chunks(device):
    be = runner.backend(device)
    some = dict(CHUNKS)
    for count in (1, 64, 300, 2048):
        rng = cases.rng_for(f"chunks-{count}")
        sizes = rng.integers(0, 40, count)
        some[f"{count} chunks"] = (sizes, rng.permutation(count), int(sizes.sum()))
        some[f"{count} wild chunks"] = (rng.integers(-9, 40, count), rng.integers(-2, count + 2, count), 9 * count)
    for name, (sizes, order, tokens) in some.items():
        numbers = np.array(sizes, np.int32), np.array(order, np.int32)
        for g, w in zip(ops.chunk_map(be, *numbers, tokens), oracle.chunk_map(*numbers, tokens), strict=True):
            runner.same_bits(g, w, f"{name} {cases.report_header()}")


def test_numpy_face():
    rng = cases.rng_for("face")
    ids = top_k(rng, 50, 6, 2)
    mask, probs = as_mask(ids, 6), rng.random((50, 6)).astype(np.float32)
    m = core.permute_map(mask, rows=100, align=1)
    want = oracle.row_map(mask, 6, 100)
    for name in want._fields:
        runner.same_bits(getattr(m, name), getattr(want, name), name)
    assert core.permute_map(ids, experts=6, align=16).rows == (100 + 6 * 15) // 16 * 16
    x = cases.draw("face-x", "normal", (5, 10, 40), "bfloat16")
    flat = x.reshape(50, 40)
    y, moved = core.permute(x, m, probs=probs)
    runner.same_bits(y, oracle.permute(flat, want), "permute")
    runner.same_bits(moved, oracle.permute_probs(probs, want), "probs")
    runner.same_bits(core.permute(x, m), y, "without probs")
    back, grads = core.unpermute(y, m, probs=probs, permuted_dprobs=moved)
    runner.same_bits(back, oracle.unpermute(y, want, probs), "unpermute")
    runner.same_bits(grads, oracle.gather_probs(moved, want), "gathered")
    dx, _ = core.unpermute_grad(flat, m, probs, y)
    runner.same_bits(dx, oracle.unpermute_dx(flat, want, probs), "dx")
    chunks = core.chunk_map(np.array([20, 30], np.int32), np.array([1, 0], np.int32), 50)
    runner.same_bits(core.permute(flat, chunks), np.concatenate([flat[20:], flat[:20]]), "chunks")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_quantized_rows(fmt):
    """Permuting a quantized tensor gives what quantizing the permuted tensor gives, where rows are scaled alone."""
    x = cases.draw(f"quantized-{fmt.name}", "normal", (48, 256), "float32")
    m = core.permute_map(top_k(cases.rng_for(f"quantized-{fmt.name}"), 48, 5, 2), experts=5, align=16)
    fp8 = {} if fmt.pack == 2 else {"fp8_dtype": fmt.element}
    quantizers = {
        "tensor": [Float8CurrentScalingQuantizer],
        "e8m0_ceil": [MXFP8Quantizer],
        "divide": [lambda **k: Float8BlockQuantizer(block_scaling_dim=1 if fmt.block_rows == 1 else 2, **k)],
        "two_level": [NVFP4Quantizer, lambda: NVFP4Quantizer(row_scaled_nvfp4=True)],
    }["tensor" if fmt.one_scale else fmt.rule]
    for make in quantizers:
        q = core.quantize(x, make(**fp8))
        if fmt.block_rows > 1:
            with pytest.raises(ValueError, match="span 128 rows"):
                core.permute(q, m)
            continue
        got = core.permute(q, m)
        assert got.shape == (m.rows, 256) and got.quantizer.columnwise == fmt.one_scale
        own = {"amax": q.amax} if q.amax is not None and q.amax.size == 1 else {}
        want = core.quantize(core.permute(x, m), q.quantizer.with_usage(columnwise=fmt.one_scale), **own)
        for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
            if getattr(want, name) is not None:
                runner.same_bits(getattr(got, name), getattr(want, name), f"{name} of {fmt.name}")
