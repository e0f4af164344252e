"""Permuting rows between token order and expert order on a GPU, against a copy of as many bytes:
`python -m benchmarks.permute [--out FILE]`.

Before it is timed, each result is compared with torch's own indexing, and a fused permute and quantize with the two
separate ops. A permute is timed together with building its map. Rows are bfloat16 unless stated otherwise; at least
(1 + k) * T rows must be read and written, and padding in addition.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common
from benchmarks.gpu import device_seconds, quantized
from diptych import core
from diptych.core import _core

SHAPES = ((16384, 4096, 64, 4), (16384, 7168, 256, 8), (8192, 2048, 128, 8))  # tokens, width, experts, choices
GOALS = (0.85, 0.85, 0.75)  # of a copy
PAD_GOAL = 0.80
QUANTIZE_GOAL = 0.75  # of formats whose elements are bytes
KINDS = _core.moe_table()["routing_map"]
PERMUTED = _core.fused_table()["source"]["permuted"]
ONES = 0x3F800000  # float32 1.0: the scale of an absent row


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


class RowMap(NamedTuple):
    """A routing, and the buffers of its map."""

    kind: str
    routing: torch.Tensor
    align: int
    buffers: tuple[torch.Tensor, ...]  # as permute_map takes them
    workspace: torch.Tensor

    @staticmethod
    def new(kind: str, ids: torch.Tensor, experts: int, rows: int, align: int = 1) -> RowMap:
        tokens, k = ids.shape
        routing = ids
        if kind == "mask":
            routing = torch.zeros(tokens, experts, dtype=torch.uint8, device="cuda").scatter_(1, ids.long(), 1)
        buffers = empty(*routing.shape), empty(experts), empty(experts + 1), empty(rows)
        items = tokens if kind == "mask" else tokens * k
        scratch = _core.permute_map_workspace_bytes(KINDS[kind], items, experts)
        return RowMap(kind, routing, align, buffers, empty(scratch, dtype=torch.uint8))

    @property
    def to(self) -> torch.Tensor:
        return self.buffers[0]

    @property
    def row_source(self) -> torch.Tensor:
        return self.buffers[3]

    def build(self) -> None:
        to, counts, offsets, row_source = self.buffers
        _core.permute_map(self.routing, KINDS[self.kind], self.align, to, counts, offsets, row_source, self.workspace)


def expected_source(kind: str, ids: torch.Tensor, experts: int, rows: int, align: int) -> torch.Tensor:
    """Returns each row's token, or -1, computed by torch's stable sort."""
    tokens, k = ids.shape
    token = torch.arange(tokens, device="cuda").repeat_interleave(k)
    expert = ids.reshape(-1).long()
    order = torch.sort(expert, stable=True).indices
    counts = torch.bincount(expert, minlength=experts)
    starts = torch.cumsum((counts + align - 1) // align * align, 0) - (counts + align - 1) // align * align
    first = torch.cumsum(counts, 0) - counts
    row = starts[expert[order]] + torch.arange(len(order), device="cuda") - first[expert[order]]
    source = torch.full((rows,), -1, dtype=torch.long, device="cuda")
    source[row] = token[order]
    return source


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    a, b = (t.contiguous().view(torch.uint8) for t in (got, want))
    if not torch.equal(a, b):
        raise AssertionError(f"{what}: {int((a != b).sum())} of {a.numel()} bytes differ")


def rows_at(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.where(source[:, None] >= 0, x.index_select(0, source.clamp(min=0)), torch.zeros_like(x[:1]))


def summed(x: torch.Tensor, to: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    """Each token's rows in ascending order, float32, every operation rounded."""
    k = int((to >= 0).sum(1).max())
    big = torch.iinfo(torch.int32).max
    rows, slots = torch.where(to >= 0, to, big).sort(1)
    acc = torch.zeros(len(to), x.shape[1], device="cuda")
    for j in range(k):
        there = rows[:, j] < big
        term = x[rows[:, j].clamp(max=len(x) - 1).long()].float()
        if probs is not None:
            term = probs.gather(1, slots[:, j : j + 1]).float() * term
        acc = torch.where(there[:, None], acc + term, acc)
    return acc.to(x.dtype)


def copy_speed(nbytes: int) -> float:
    """Returns GB/s of a copy that reads half of this number of bytes and writes the other half."""
    origin = torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(origin)
    return nbytes / device_seconds(lambda: target.copy_(origin)) / 1e9


def shape_rows(shape: tuple[int, int, int, int], goal: float) -> list[dict[str, Any]]:
    tokens, width, experts, k = shape
    case = f"{tokens}x{width} E{experts} k{k}"
    ids = torch.rand(tokens, experts, device="cuda").topk(k, dim=1).indices.int()
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    moved = (1 + k) * tokens * width * 2
    out: list[dict[str, Any]] = []
    copy = copy_speed(moved)

    def measure(op: str, fn: Callable[[], object], nbytes: int = moved, goal: float = 0.0) -> None:
        t = device_seconds(fn)
        out.append({"op": op, "case": case, "us": t * 1e6, "GB/s": nbytes / t / 1e9, "of copy": nbytes / t / 1e9 / copy,
                    "goal": goal})  # fmt: skip

    out.append({"op": "copy", "case": case, "us": moved / copy / 1e3, "GB/s": copy, "of copy": 1.0, "goal": 0.0})
    for kind in KINDS:
        m = RowMap.new(kind, ids, experts, tokens * k)
        y, back = empty(tokens * k, width, dtype=x.dtype), torch.empty_like(x)

        def permute(m: RowMap = m, y: torch.Tensor = y) -> None:
            m.build()
            _core.permute([(x, y, 0)], m.to, m.row_source)

        y.view(torch.uint8).fill_(0xA5)
        permute()
        source = expected_source(kind, ids, experts, tokens * k, 1)
        same(m.row_source.long() // m.to.shape[1], source, f"{kind} source")
        same(y, rows_at(x, source), f"{kind} permute")
        probs = torch.rand(m.to.shape, device="cuda")
        dprobs, moved_dprobs = torch.empty_like(probs), torch.rand(tokens * k, device="cuda")
        dx = torch.empty_like(y)

        def unpermute(m: RowMap = m, y: torch.Tensor = y, p: torch.Tensor = probs, b: torch.Tensor = back) -> None:
            _core.unpermute(y, m.to, p, b)

        def permute_grad(m: RowMap = m, y=y, b=back, g=moved_dprobs, d=dprobs) -> None:
            _core.unpermute(y, m.to, None, b, g, d)

        def unpermute_grad(m: RowMap = m, y=y, p=probs, dx=dx, d=dprobs) -> None:
            _core.unpermute_grad(x, m.to, m.row_source, p, dx, y, d)

        unpermute()
        same(back, summed(y, m.to, probs), f"{kind} unpermute")
        unpermute_grad()
        there = m.to.reshape(-1)[m.row_source.long()] >= 0  # every row exists
        assert bool(there.all())
        p = probs.reshape(-1)[m.row_source.long()]
        same(dx, (p[:, None] * rows_at(x, source).float()).bfloat16(), f"{kind} unpermute_grad")
        dots = (y.float() * rows_at(x, source).float()).sum(1)
        error = (dprobs.reshape(-1)[m.row_source.long()] - dots).abs().max() / dots.abs().max()
        assert float(error) < 1e-4, f"{kind} dprobs: {float(error)}"
        permute_grad()
        same(back, summed(y, m.to, None), f"{kind} gradient of permute")
        measure(f"{kind} map", m.build, m.to.numel() * 4 + m.routing.numel() * m.routing.element_size())
        measure(f"{kind} permute", permute, goal=goal)
        measure(f"{kind} permute without its map", lambda m=m, y=y: _core.permute([(x, y, 0)], m.to, m.row_source))
        measure(f"{kind} unpermute with probs", unpermute, goal=goal)
        measure(f"{kind} gradient of permute", permute_grad, goal=goal)
        measure(f"{kind} gradient of unpermute", unpermute_grad, (1 + 2 * k) * tokens * width * 2)
        del y, back, dx

        for name, rows in (("exact", None), ("worst case", tokens * k + experts * 127)):
            exact = int(((torch.bincount(ids.reshape(-1).long(), minlength=experts) + 127) // 128 * 128).sum())
            count = exact if rows is None else rows // 128 * 128
            padded = RowMap.new(kind, ids, experts, count, 128)
            y, moved_probs = empty(count, width, dtype=x.dtype), empty(count, dtype=probs.dtype)

            def pad(m: RowMap = padded, y=y, q=moved_probs, p=probs) -> None:
                m.build()
                _core.permute([(x, y, 0)], m.to, m.row_source, p, q)

            y.view(torch.uint8).fill_(0xA5)
            pad()
            source = expected_source(kind, ids, experts, count, 128)
            same(y, rows_at(x, source), f"{kind} padded permute")
            # all that is written, and the probabilities; the goal is for what must move
            measure(f"{kind} permute pad128 probs, {name} rows", pad, goal=PAD_GOAL if rows is None else 0.0)
            measure(f"{kind} the same, padding counted", pad, (tokens + count) * width * 2)
            del y, padded
    out += quantized_rows(shape, ids, copy)
    out += permuted_quantize_rows(shape, ids, x)
    return out


def quantized_rows(shape: tuple[int, int, int, int], ids: torch.Tensor, copy: float) -> list[dict[str, Any]]:
    """FP8 payloads with float32 scales of 128 elements beside them, and the columnwise copy of a per-tensor one."""
    tokens, width, experts, k = shape
    data = torch.randint(0, 255, (tokens, width), dtype=torch.uint8, device="cuda")
    scales = torch.rand(tokens, width // 128, device="cuda")
    m = RowMap.new("index", ids, experts, tokens * k)
    to_data, to_scales = empty(tokens * k, width, dtype=data.dtype), empty(tokens * k, width // 128, dtype=scales.dtype)
    columns, to_columns = data.t().contiguous(), empty(width, tokens * k, dtype=data.dtype)

    def rows() -> None:
        m.build()
        _core.permute([(data, to_data, 0), (scales, to_scales, ONES)], m.to, m.row_source)

    def transposed() -> None:
        _core.permute_columns(columns, to_columns, m.row_source, k)

    rows()
    transposed()
    source = expected_source("index", ids, experts, tokens * k, 1)
    same(to_data, rows_at(data, source), "quantized rows")
    same(to_scales, rows_at(scales, source), "scales")
    same(to_columns, to_data.t(), "columns")
    out = []
    for op, fn, nbytes in (
        ("FP8 rows and scales, with the map", rows, (1 + k) * tokens * (width + width // 32)),
        ("FP8 columns", transposed, (1 + k) * tokens * width),
    ):
        t = device_seconds(fn)
        out.append({"op": op, "case": f"{tokens}x{width} E{experts} k{k}", "us": t * 1e6, "GB/s": nbytes / t / 1e9,
                    "of copy": nbytes / t / 1e9 / copy, "goal": 0.0})  # fmt: skip
    return out


def distinct_cases() -> list[common.QuantizeCase]:
    """Returns a case for each scale rule and each origin of the scale; other options do not change the cost here."""
    kept: dict[tuple[Any, ...], common.QuantizeCase] = {}
    for case in common.quantize_cases():
        fmt, state = case.quantizer.format, (case.quantizer.needs_scale, case.quantizer.spec.flags)
        kept.setdefault((fmt.block_rows, fmt.block_cols, fmt.rule, fmt.pack, *state), case)
    return [case for case in kept.values() if case.plain or case.quantizer.needs_scale]


def permuted_quantize_rows(
    shape: tuple[int, int, int, int], ids: torch.Tensor, x: torch.Tensor
) -> list[dict[str, Any]]:
    """The fused quantize of permuted rows, against permute and then quantize. Bytes: x, as often as the scale rule
    reads it, and the outputs."""
    tokens, width, experts, k = shape
    m = RowMap.new("index", ids, experts, tokens * k)
    m.build()
    moved = empty(tokens * k, width, dtype=x.dtype)
    scale, rng = torch.full((1,), 64.0, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    out = []
    for base in distinct_cases():
        for usage in (("rowwise",), ("rowwise", "columnwise")):
            case = base.with_usage(*usage)

            def prepared(case: common.QuantizeCase = case) -> list[Any]:
                made = quantized(torch.zeros_like(moved), case.quantizer, scale, rng)
                return case.arguments(made, lambda tensor, _: tensor, scale, rng)

            fused, apart = prepared(), prepared()

            def one(a: list[Any] = fused) -> None:
                _core.quantize(x, *a, source=(PERMUTED, m.to, m.row_source))

            def two(a: list[Any] = apart) -> None:
                _core.permute([(x, moved, 0)], m.to, m.row_source)
                _core.quantize(moved, *a)

            one()
            two()
            tensors = [(f, a) for f, a in zip(fused, apart, strict=True) if isinstance(f, torch.Tensor)]
            for got, want in tensors:
                same(got, want, f"{case.name} {'+'.join(usage)}")
            written = sum(t.numel() * t.element_size() for t, _ in tensors)
            nbytes = x.numel() * x.element_size() * case.reads + written
            copy = copy_speed(nbytes)
            goal = QUANTIZE_GOAL if base.quantizer.format.pack == 1 else 0.0
            for op, fn in ((f"permute + quantize {case.name} {'+'.join(usage)}", one), ("the same, apart", two)):
                t = device_seconds(fn)
                out.append({"op": op, "case": f"{tokens}x{width} E{experts} k{k}", "us": t * 1e6,
                            "GB/s": nbytes / t / 1e9, "of copy": nbytes / t / 1e9 / copy,
                            "goal": goal if fn is one else 0.0})  # fmt: skip
            del fused, apart
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.permute", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    if not (core.build_info()["cuda"] and torch.cuda.is_available()):
        print("benchmarks.permute: needs a GPU and a build with CUDA; see `diptych doctor`", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for shape, goal in zip(SHAPES, GOALS, strict=True):
        fresh = shape_rows(shape, goal)
        print(common.table(fresh), end="\n\n", flush=True)
        rows += fresh
    if args.out:
        common.save(args.out, rows, gpu=torch.cuda.get_device_name(0), cuda=dict(core.cuda_info()))
    for row in rows:
        if row["of copy"] < row["goal"]:
            print(f"below its goal: {row['op']} {row['case']}: {row['of copy']:.2f} of a copy, goal {row['goal']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
