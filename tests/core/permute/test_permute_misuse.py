"""Permutation with wrong maps, wrong arguments or concurrent calls: nothing out of bounds, errors, the same bits."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cases
from core import permute_runner as ops
from core import runner
from core.permute.test_permute import FLOATS, draw, routings, rows_of, top_k
from diptych import core
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.ops import permute as rules
from diptych.core import _core
from oracle import permute as oracle

T, SLOTS, ROWS, H = 40, 3, 50, 24


def lie(seed: str, tokens: int = T, slots: int = SLOTS, rows: int = ROWS) -> oracle.Map:
    """Rows out of range, rows named twice, and a source that fits none of it."""
    rng = cases.rng_for(f"lie-{seed}")
    wild = np.array([-1, -7, -(2**31), rows, rows + 1, 2**31 - 1, 0, rows - 1], np.int64)
    mostly = rng.integers(0, rows, (tokens, slots))
    to = np.where(rng.random((tokens, slots)) < 0.4, rng.choice(wild, (tokens, slots)), mostly)
    row_source = rng.choice(np.append(wild, np.arange(tokens * slots + 9)), rows)
    return oracle.Map(to.astype(np.int32), row_source.astype(np.int32), *2 * (np.zeros(1, np.int32),))


def test_maps_that_lie(device):
    """The runner's guards see any write out of bounds; sums are still those of the rows that exist."""
    be = runner.backend(device)
    for turn in range(8):
        slots = (3, 3, 1, 40, 300, 2, 0, 5)[turn]
        m = lie(f"{turn}", slots=slots)
        rng = cases.rng_for(f"lies-{turn}")
        there = (m.row_id_map >= 0) & (m.row_id_map < ROWS)
        honest = m._replace(row_id_map=np.where(there, m.row_id_map, -1).astype(np.int32))
        width = (H, 1500)[turn % 2]
        x, probs = rows_of(rng, T, width, "bfloat16"), rng.random((T, slots)).astype(np.float32)
        ops.permute(be, [(x, 0), (rows_of(rng, T, 3, "uint8"), 0)], m, probs, zero_prob_is_padding=turn % 2 == 0)
        ops.permute_columns(be, rows_of(rng, 9, T, "uint8"), m, offset=turn % 2)
        dy, moved = draw(f"lie-dy-{turn}", "normal", (T, width), "float32"), rng.random(ROWS).astype(np.float32)
        rows = draw(f"lie-x-{turn}", "normal", (ROWS, width), "float32")
        y, dprobs = ops.unpermute(be, rows, m, probs, moved)
        label = f"{turn} {cases.report_header()}"
        runner.same_bits(y, oracle.unpermute(rows, honest, probs), label)
        runner.same_bits(dprobs, oracle.gather_probs(moved, honest), label)
        _, dots = ops.unpermute_grad(be, dy, m, probs, rows)
        exact, allowed = oracle.unpermute_dprobs(dy, rows, honest)
        assert dots is not None and (np.abs(dots - exact) <= allowed + np.abs(exact) * 2.0**-23).all(), label


def test_a_row_that_only_its_source_names_is_filled():
    """On the CPU: the map does not send token 1 there, so no token does."""
    out, moved = np.full((4, 4), 7, np.float32), np.full(4, 7, np.float32)
    to = np.array([[0, -1], [-1, -1]], np.int32)
    number, index = runner.CODES["float32"], runner.CODES["int32"]
    plane = (np.ones((2, 4), np.float32), number), (out, number), 0
    maps = [(m, index) for m in (to, np.array([0, 3, -1, 9], np.int32))]
    probs = [(p, number) for p in (np.ones((2, 2), np.float32), moved)]
    _core.permute([plane], *maps, *probs)
    np.testing.assert_array_equal(out, np.array([[1.0], [0], [0], [0]], np.float32).repeat(4, 1))
    np.testing.assert_array_equal(moved, np.array([1.0, 0, 0, 0], np.float32))


def test_no_rows_no_tokens_no_width(device):
    be = runner.backend(device)
    for tokens, slots, rows, width in ((0, 3, 5, 8), (5, 3, 0, 8), (0, 0, 0, 8), (5, 0, 7, 8), (5, 3, 7, 0)):
        routing = np.zeros((tokens, slots), np.int32)
        m = ops.row_map(be, routing, 2, rows)
        probs = np.ones((tokens, slots), np.float32)
        (out,), moved = ops.permute(be, [(np.ones((tokens, width), np.float32), 0)], m, probs)
        assert out.shape == (rows, width) and moved is not None and moved.shape == (rows,)
        runner.same_bits(out, oracle.permute(np.ones((tokens, width), np.float32), m), f"{tokens} {slots} {rows}")
        rows_in = np.ones((rows, width), np.float32)
        y, _ = ops.unpermute(be, rows_in, m, probs)
        runner.same_bits(y, oracle.unpermute(rows_in, m, probs), f"{tokens} {slots} {rows}")
        dx, dprobs = ops.unpermute_grad(be, y, m, probs, rows_in)
        assert dx.shape == (rows, width) and dprobs is not None and dprobs.shape == (tokens, slots)
        columns = np.ones((width, tokens), np.uint8)
        runner.same_bits(
            ops.permute_columns(be, columns, m), np.ascontiguousarray(oracle.permute_columns(columns, m)), "columns"
        )


class Good:
    """A correct call of each op, whose single arguments a test replaces, with poisoned outputs."""

    def __init__(self, be: Any):
        self.be, self.out = be, runner.Outputs(be)

    def buffer(self, *shape: int, dtype: str = "int32") -> Any:
        return self.out.new(str(len(self.out.held)), shape, dtype)

    def ones(self, *shape: int, dtype: str = "float32") -> Any:
        return self.be.put(np.ones(shape, runner.NUMPY[dtype]), dtype)

    def ints(self, *shape: int) -> Any:
        return self.ones(*shape, dtype="int32")

    def permute_map(self, **changes: Any) -> None:
        args = {"routing": self.ints(T, SLOTS), "kind": ops.KINDS["index"], "align": 1}
        args |= {"row_id_map": self.buffer(T, SLOTS), "tokens_per_expert": self.buffer(4)}
        args |= {"expert_offsets": self.buffer(5), "row_source": self.buffer(ROWS)}
        args["workspace"] = self.out.workspace(_core.permute_map_workspace_bytes(ops.KINDS["index"], T * SLOTS, 4))
        _core.permute_map(**{**args, **changes})

    def chunk_map(self, **changes: Any) -> None:
        args = {"split_sizes": self.ints(4), "order": self.ints(4)}
        args |= {"row_id_map": self.buffer(T, 1), "row_source": self.buffer(T)}
        _core.chunk_map(**{**args, **changes})

    def plane(self) -> tuple[Any, Any, int]:
        return self.ones(T, H), self.buffer(ROWS, H, dtype="float32"), 0

    def permute(self, **changes: Any) -> None:
        args = {"planes": [self.plane()], "row_id_map": self.ints(T, SLOTS), "row_source": self.ints(ROWS)}
        args |= {"probs": self.ones(T, SLOTS), "permuted_probs": self.buffer(ROWS, dtype="float32")}
        _core.permute(**{**args, **changes})

    def permute_columns(self, **changes: Any) -> None:
        args = {"x": self.ones(H, T, dtype="uint8"), "out": self.buffer(H, ROWS, dtype="uint8")}
        _core.permute_columns(**{**args, "row_source": self.ints(ROWS), "slots": SLOTS, **changes})

    def unpermute(self, **changes: Any) -> None:
        args = {"x": self.ones(ROWS, H), "row_id_map": self.ints(T, SLOTS), "probs": self.ones(T, SLOTS)}
        args |= {"y": self.buffer(T, H, dtype="float32"), "permuted_dprobs": self.ones(ROWS)}
        _core.unpermute(**{**args, "dprobs": self.buffer(T, SLOTS, dtype="float32"), **changes})

    def unpermute_grad(self, **changes: Any) -> None:
        args = {"dy": self.ones(T, H), "row_id_map": self.ints(T, SLOTS), "row_source": self.ints(ROWS)}
        args |= {"probs": self.ones(T, SLOTS), "dx": self.buffer(ROWS, H, dtype="float32"), "x": self.ones(ROWS, H)}
        _core.unpermute_grad(**{**args, "dprobs": self.buffer(T, SLOTS, dtype="float32"), **changes})


# op, change (of a Good call), error, words that the message must hold
BAD: list[tuple[str, Callable[[Good], dict[str, Any]], type[Exception], list[str]]] = [
    ("permute_map", lambda g: {"routing": None}, TypeError, ["routing", "missing"]),
    ("permute_map", lambda g: {"routing": g.ints(T)}, ValueError, ["routing", "two dimensions", "int32[40]"]),
    ("permute_map", lambda g: {"routing": g.ones(T, SLOTS)}, TypeError, ["expert ids", "int64", "float32[40, 3]"]),
    ("permute_map", lambda g: {"kind": ops.KINDS["mask"]}, TypeError, ["mask", "uint8", "int32[40, 3]"]),
    ("permute_map", lambda g: {"kind": 7}, ValueError, ["unknown kind of map 7"]),
    ("permute_map", lambda g: {"kind": ops.KINDS["mask"], "routing": g.ones(T, SLOTS, dtype="uint8")}, ValueError,
     ["tokens_per_expert", "[3]", "[4]"]),
    ("permute_map", lambda g: {"align": 0}, ValueError, ["align", "0"]),
    ("permute_map", lambda g: {"align": 2**31 - 1}, ValueError, ["padding", "2147483647"]),
    ("permute_map", lambda g: {"row_id_map": g.buffer(T, 4)}, ValueError, ["row_id_map", "[40, 3]", "[40, 4]"]),
    ("permute_map", lambda g: {"row_id_map": g.ones(T, SLOTS)}, TypeError, ["row_id_map", "int32"]),
    ("permute_map", lambda g: {"tokens_per_expert": g.buffer(0)}, ValueError, ["at least one expert"]),
    ("permute_map", lambda g: {"tokens_per_expert": g.buffer(2049), "expert_offsets": g.buffer(2050)},
     NotImplementedError, ["2049 experts", "2048"]),
    ("permute_map", lambda g: {"expert_offsets": g.buffer(4)}, ValueError, ["expert_offsets", "[5]"]),
    ("permute_map", lambda g: {"row_source": None}, TypeError, ["row_source", "missing"]),
    ("chunk_map", lambda g: {"order": g.ints(3)}, ValueError, ["order", "[4]", "[3]"]),
    ("chunk_map", lambda g: {"split_sizes": g.ones(4)}, TypeError, ["split_sizes", "int32"]),
    ("chunk_map", lambda g: {"split_sizes": g.ints(2049), "order": g.ints(2049)}, NotImplementedError, ["2049 chunks"]),
    ("chunk_map", lambda g: {"row_id_map": g.buffer(T, 2)}, ValueError, ["[T, 1]", "[40, 2]"]),
    ("chunk_map", lambda g: {"row_source": g.buffer(T - 1)}, ValueError, ["row_source", "[40]"]),
    ("permute", lambda g: {"planes": []}, ValueError, ["1 to 4", "0"]),
    ("permute", lambda g: {"planes": [g.plane() for _ in range(5)]}, ValueError, ["1 to 4", "5"]),
    ("permute", lambda g: {"planes": [g.plane()[:2]]}, TypeError, ["planes", "fill"]),
    ("permute", lambda g: {"planes": [(g.ones(T + 1, H), *g.plane()[1:])]}, ValueError, ["input 0", "40", "[41, 24]"]),
    ("permute", lambda g: {"planes": [g.plane(), (g.ones(T, H), g.buffer(ROWS, 9, dtype="float32"), 0)]}, ValueError,
     ["output 1", "50 rows", "[40, 24]", "[50, 9]"]),
    ("permute", lambda g: {"planes": [(g.ones(T, H), g.buffer(ROWS, H), 0)]}, TypeError, ["output 0", "float32"]),
    ("permute", lambda g: {"planes": [(g.ones(T), g.buffer(ROWS, 1, dtype="float32"), 0)]}, ValueError, ["output 0"]),
    ("permute", lambda g: {"planes": [(g.ones(T, 6, dtype="uint8"), g.buffer(ROWS, 6, dtype="uint8"), 1)]}, ValueError,
     ["four bytes", "[40, 6]"]),
    ("permute", lambda g: {"row_id_map": g.ints(T)}, ValueError, ["row_id_map", "two dimensions"]),
    ("permute", lambda g: {"row_id_map": g.ints(T, 2049)}, NotImplementedError, ["2049 slots"]),
    ("permute", lambda g: {"row_source": g.ones(ROWS)}, TypeError, ["row_source", "int32"]),
    ("permute", lambda g: {"probs": g.ones(T, 4)}, ValueError, ["probs", "[40, 3]", "[40, 4]"]),
    ("permute", lambda g: {"probs": g.ints(T, SLOTS)}, TypeError, ["probs", "float16 or float64", "int32[40, 3]"]),
    ("permute", lambda g: {"permuted_probs": None}, TypeError, ["permuted_probs", "missing"]),
    ("permute", lambda g: {"probs": None}, ValueError, ["permuted_probs", "no probs"]),
    ("permute", lambda g: {"probs": None, "permuted_probs": None, "zero_prob_is_padding": True}, ValueError,
     ["zero_prob_is_padding"]),
    ("permute_columns", lambda g: {"x": g.ones(H, T)}, TypeError, ["one byte", "float32[24, 40]"]),
    ("permute_columns", lambda g: {"out": g.buffer(H, 9, dtype="uint8")}, ValueError, ["out", "[24, 50]", "[24, 9]"]),
    ("permute_columns", lambda g: {"slots": 0}, ValueError, ["slots", "0"]),
    ("permute_columns", lambda g: {"slots": 2**40}, NotImplementedError, ["slots", "2048"]),
    ("unpermute", lambda g: {"x": g.ints(ROWS, H)}, TypeError, ["x", "float64", "int32[50, 24]"]),
    ("unpermute", lambda g: {"y": g.buffer(T, H + 1, dtype="float32")}, ValueError, ["y", "[40, 24]", "[40, 25]"]),
    ("unpermute", lambda g: {"y": g.buffer(T, H, dtype="float16")}, TypeError, ["y", "float32", "float16"]),
    ("unpermute", lambda g: {"probs": g.ones(T, SLOTS, dtype="float64")}, TypeError, ["probs", "float64[40, 3]"]),
    ("unpermute", lambda g: {"permuted_dprobs": None}, ValueError, ["dprobs", "permuted_dprobs"]),
    ("unpermute", lambda g: {"permuted_dprobs": g.ones(ROWS + 1)}, ValueError, ["permuted_dprobs", "[50]", "[51]"]),
    ("unpermute", lambda g: {"dprobs": g.buffer(T, SLOTS)}, TypeError, ["dprobs", "float32"]),
    ("unpermute_grad", lambda g: {"probs": None}, TypeError, ["probs", "missing"]),
    ("unpermute_grad", lambda g: {"dy": g.ones(T + 1, H)}, ValueError, ["dy", "[40, 24]", "[41, 24]"]),
    ("unpermute_grad", lambda g: {"x": None}, TypeError, ["x", "missing"]),
    ("unpermute_grad", lambda g: {"dprobs": None}, ValueError, ["x", "dprobs"]),
    ("unpermute_grad", lambda g: {"x": g.ones(ROWS, H, dtype="float16")}, TypeError, ["x", "float32", "float16"]),
    ("unpermute_grad", lambda g: {"dx": g.buffer(ROWS + 1, H, dtype="float32")}, ValueError, ["dx", "[50, 24]"]),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda c: f"{c[0]}-{BAD.index(c)}")
def test_bad_calls(case, device):
    op, change, error, words = case
    good = Good(runner.backend(device))
    with pytest.raises(error) as caught:
        getattr(good, op)(**change(good))
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert good.out.untouched()


def test_good_calls_pass(device):
    good = Good(runner.backend(device))
    for op in ("permute_map", "chunk_map", "permute", "permute_columns", "unpermute", "unpermute_grad"):
        getattr(good, op)()
    good.out.read()


def test_overlaps_are_refused():
    memory = np.full(1 << 16, runner.POISON, np.uint8)

    def at(byte: int, *shape: int, dtype: str = "float32") -> Any:
        size = int(np.prod(shape)) * runner.NUMPY[dtype].itemsize
        return runner.Numpy._pair(memory[byte : byte + size], shape, dtype)

    good = Good(runner.Numpy())
    x, rows = at(0, T, H), at(4 * T * H - 4, ROWS, H)
    overlapping = {
        "permute_map": {"row_id_map": at(0, T, SLOTS, dtype="int32"), "row_source": at(40, ROWS, dtype="int32")},
        "chunk_map": {"row_id_map": at(0, T, 1, dtype="int32"), "row_source": at(0, T, dtype="int32")},
        "permute": {"planes": [(x, rows, 0)]},
        "permute_columns": {"x": at(0, H, T, dtype="uint8"), "out": at(H * T - 1, H, ROWS, dtype="uint8")},
        "unpermute": {"y": x, "x": rows},
        "unpermute_grad": {"dx": rows, "dy": x},
    }
    for op, changes in overlapping.items():
        with pytest.raises(ValueError, match=f"{op}: .*overlaps"):
            getattr(good, op)(**changes)
    assert good.out.untouched() and (memory == runner.POISON).all()


def test_more_rows_than_int32_numbers_are_refused():
    """The sizes alone are asked."""
    good = Good(runner.Numpy())
    with pytest.raises(ValueError, match=r"padding.*2147483647"):
        good.permute_map(align=1 << 30)
    assert good.out.untouched()


def test_numpy_face_errors():
    ids, x = np.zeros((4, 2), np.int32), np.ones((4, 8), np.float32)
    m = core.permute_map(ids, experts=3)
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (DTypeError, "routing.*float32", lambda: core.permute_map(x)),
        (ArgumentError, "routing.*list", lambda: core.permute_map([[1]])),  # type: ignore[arg-type]
        (ShapeError, r"routing.*\[4\]", lambda: core.permute_map(ids[:, 0], experts=3)),
        (ValueError, "experts=", lambda: core.permute_map(ids)),
        (ValueError, "rows=", lambda: core.permute_map(ids.astype(bool))),
        (ShapeError, "2 experts, not 3", lambda: core.permute_map(ids.astype(bool), experts=3, rows=4)),
        (DTypeError, "order.*int64", lambda: core.chunk_map(ids[0], np.zeros(2, np.int64), 4)),
        (DTypeError, "x must.*complex64", lambda: core.permute(x.astype(np.complex64), m)),
        (ValueError, "input 0.*4 tokens", lambda: core.permute(x[:3], m)),
        (ValueError, "zero_prob_is_padding", lambda: core.permute(x, m, zero_prob_is_padding=True)),  # type: ignore
        (ArgumentError, "probs", lambda: core.permute(x, m, probs=[1.0])),  # type: ignore[arg-type]
        (TypeError, "unpermute: x", lambda: core.unpermute(ids, m)),
    ]
    for error, match, call in bad:
        with pytest.raises(error, match=match):
            call()


def whole_round(be: Any, turn: int, want: dict[str, Any] | None) -> dict[str, Any]:
    """A map, a permute and an unpermute of their own; compared with `want` where it is given."""
    rng = np.random.default_rng(turn)
    ids = top_k(rng, 300, 8, 2)
    x, probs = rows_of(rng, 300, 600, "uint8"), rng.random((300, 2)).astype(np.float32)
    m = ops.row_map(be, ids, 8, 800, 16)
    (moved,), p = ops.permute(be, [(x, 0)], m, probs)
    y, _ = ops.unpermute(be, moved[:, :64].astype(np.float32), m, probs)
    got = {**m._asdict(), "moved": moved, "probs": p, "y": y}
    for name, array in (want or {}).items():
        runner.same_bits(got[name], array, f"{name} of {turn}")
    return got


def test_threads_at_once(device):
    """No buffer is shared between calls; on a GPU each thread has a stream of its own."""
    be = runner.backend(device)
    want = {turn: whole_round(runner.Numpy(), turn, None) for turn in range(2)}

    def work(turn: int) -> None:
        if device == "cpu":
            for _ in range(10):
                whole_round(be, turn, want[turn])
            return
        with be.torch.cuda.stream(be.torch.cuda.Stream()):
            for _ in range(10):
                whole_round(be, turn, want[turn])

    with runner.setting(threads=3), concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


@pytest.mark.cuda
def test_captured_in_a_graph(cuda):
    """No op waits for the device: a graph of them runs again on another routing, with the same sizes."""
    import torch

    tokens, experts, k, width = 300, 8, 2, 256
    rng = cases.rng_for("graph")
    routing = torch.zeros((tokens, k), dtype=torch.int32, device="cuda")
    x = torch.from_numpy(rng.standard_normal((tokens, width)).astype(np.float32)).cuda()
    rows = tokens * k + experts * 15

    def new(*shape: int, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    m = new(tokens, k), new(experts), new(experts + 1), new(rows)
    space = new(_core.permute_map_workspace_bytes(ops.KINDS["index"], tokens * k, experts), dtype=torch.uint8)
    moved, y = new(rows, width, dtype=torch.float32), new(tokens, width, dtype=torch.float32)

    def every_op() -> None:
        _core.permute_map(routing, ops.KINDS["index"], 16, *m, space)
        _core.permute([(x, moved, 0)], m[0], m[3])
        _core.unpermute(moved, m[0], None, y)

    every_op()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every_op()
    for turn in range(3):
        ids = top_k(np.random.default_rng(turn), tokens, experts, k)
        routing.copy_(torch.from_numpy(ids))
        graph.replay()
        want = oracle.row_map(ids, experts, rows, 16)
        runner.same_bits(m[3].cpu().numpy(), want.row_source, "row_source")
        runner.same_bits(moved.cpu().numpy(), oracle.permute(x.cpu().numpy(), want), "permute")
        runner.same_bits(y.cpu().numpy(), oracle.unpermute(oracle.permute(x.cpu().numpy(), want), want), "unpermute")


@pytest.mark.cuda
@pytest.mark.sanitize
def test_every_kernel_on_tiny_shapes(cuda):
    be = runner.Torch()
    for tokens, experts, k in ((1, 1, 1), (70, 5, 2), (40, 260, 3)):
        for turn, (name, routing) in enumerate(routings(tokens, experts, k)):
            m = oracle.row_map(routing, experts, oracle.rows_needed(routing, experts, 16) * (3 - turn % 2) // 3, 16)
            for field, g, w in zip(m._fields, ops.row_map(be, routing, experts, m.rows, 16), m, strict=True):
                runner.same_bits(g, w, f"{field} of {name}")
            for width in (3, 40, 1100):
                rng = cases.rng_for(f"sanitize-{name}-{width}")
                probs, x = rng.random(m.row_id_map.shape).astype(np.float32), rows_of(rng, tokens, width, "bfloat16")
                (moved,), _ = ops.permute(be, [(x, 0)], m, probs, offset=turn % 2)
                runner.same_bits(moved, oracle.permute(x, m), name)
                for dtype in [d for d in FLOATS if d != "float64"]:
                    rows, dy = (draw(f"{s}-{name}", "normal", (n, width), dtype)
                                for s, n in (("x", m.rows), ("dy", tokens)))  # fmt: skip
                    y, _ = ops.unpermute(be, rows, m, probs, probs.reshape(-1)[:1].repeat(m.rows), offset=turn % 2)
                    runner.same_bits(y, oracle.unpermute(rows, m, probs), name)
                    dx, _ = ops.unpermute_grad(be, dy, m, probs, rows, offset=turn % 2)
                    runner.same_bits(dx, oracle.unpermute_dx(dy, m, probs), name)
            columns = rows_of(cases.rng_for(name), 6, tokens, "uint8")
            got = ops.permute_columns(be, columns, m)
            runner.same_bits(got, np.ascontiguousarray(oracle.permute_columns(columns, m)), name)
        sizes, order = np.array([tokens, 0, 2], np.int32), np.array([2, 0, 1], np.int32)
        for g, w in zip(ops.chunk_map(be, sizes, order, tokens), oracle.chunk_map(sizes, order, tokens), strict=True):
            runner.same_bits(g, w, "chunks")


def test_the_rules_know_the_kernels_limit():
    assert _core.moe_table()["max_slots"] == rules.MAX_SLOTS
