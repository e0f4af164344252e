"""CPU speed against NumPy and torch, two threads. A row that misses its goal is measured again before it counts: slow
code misses every time, load from other processes is temporary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

import diptych.torch as dt
from benchmarks.cases import Case
from benchmarks.quantizers import COPIES, Named, quantizers
from benchmarks.results import Row, misses
from benchmarks.room import wall_seconds
from diptych import core
from diptych.common import RECIPES
from diptych.core import _arrays, _core
from diptych.lab.job import linear_dtype

THREADS = 2
SLACK = 0.7  # of the goal: CI machines are shared
PAUSES = (1, 4, 16, 64)  # seconds before a miss is measured again
TINY = 5.4e-6  # seconds of an nn.Linear of 16x16 by 16x16 on the machine for which the goals were set

Measure = Callable[[], Row]


def paired(
    ours: Callable[[], object], peer: Callable[[], object], *, rounds: int, calls: int = 1
) -> tuple[float, float]:
    """Returns the median seconds of both calls, measured in turns."""
    found = wall_seconds({"ours": ours, "peer": peer}, rounds, calls)
    return found["ours"], found["peer"]


def compared(name: str, peer: str, ours_s: float, peer_s: float, *, goal: float, ratio: float | None = None,
             moved: float = 0, flops: float = 0) -> Row:  # fmt: skip
    """Returns a row: our time and the peer's, rates where work is counted, and the ratio that the goal bounds, of
    speeds unless it is given."""
    row: Row = {"name": name, "us": ours_s * 1e6, "peer": peer, "peer us": peer_s * 1e6}
    if moved or flops:
        row |= {"rate": (moved or flops) / ours_s / 1e9, "unit": "GB/s" if moved else "GFLOP/s"}
    return row | {"ratio": peer_s / ours_s if ratio is None else ratio, "goal": goal, "slack": SLACK}


def quantize(size: int = 4096) -> Iterator[Measure]:
    """quantize of [size, size] against a copy of as many bytes as quantize must read and write.

    Hadamard transforms and random numbers cost more than the memory traffic, so they have no goal.
    """
    x = np.random.default_rng(0).standard_normal((size, size), np.float32)

    def measure(named: Named, copies: str) -> Row:
        source = x.astype(ml_dtypes.bfloat16) if named.rotates else x
        call, written = core_call(named.with_copies(copies), source)
        moved = source.nbytes * named.reads + written
        origin = np.ones(moved // 2, np.uint8)
        target = np.zeros_like(origin)
        times = paired(call, lambda: np.copyto(target, origin), rounds=5)
        goal = 0.0 if named.rotates else 0.5
        return compared(f"{named.name} {copies}", "np.copyto", *times, goal=goal, moved=moved)

    return (partial(measure, named, copies) for named in quantizers().values() for copies in COPIES)


def core_call(named: Named, x: np.ndarray) -> tuple[Callable[[], None], int]:
    """Returns a quantize call into existing outputs, like np.copyto, and the number of bytes that it writes."""
    scale, rng = np.full(1, 64, np.float32), np.zeros(4, np.int32)
    made = core.quantize(x, named.quantizer, **named.state(scale, rng))
    written = sum(v.nbytes for v in vars(made).values() if isinstance(v, np.ndarray))
    source, arguments = _arrays._operand(x, x.dtype.name), named.arguments(made, _arrays._operand, scale, rng)
    return (lambda: _core.quantize(source, *arguments)), written


def gemm(size: int = 1024) -> Iterator[Measure]:
    """gemm of each format with itself, size cubed, against torch.mm in float32."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)

    def measure(named: Named, product: str, trans_a: bool, trans_b: bool) -> Row:
        qa, qb = core.quantize(a, named.quantizer), core.quantize(b, named.quantizer)
        call = partial(core.gemm, qa, qb, trans_a=trans_a, trans_b=trans_b)
        times = paired(call, lambda: torch.mm(ta, tb), rounds=5)
        return compared(f"{named.name} {product}", "torch.mm", *times, goal=0.4, flops=2.0 * size**3)

    products = (("fprop", False, True), ("dgrad", False, False), ("wgrad", True, False))
    plain = [named for named in quantizers().values() if named.plain]  # the options make the same payloads
    return (partial(measure, named, *product) for named in plain for product in products)


def permute() -> Iterator[Measure]:
    """permute of bfloat16 rows by an existing index map, against numpy.take of the same rows."""

    def measure(tokens: int, width: int, experts: int, k: int) -> Row:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((tokens, width), np.float32).astype(ml_dtypes.bfloat16)
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
        m = core.permute_map(ids, experts=experts)
        out, taken, index = core.permute(x, m), np.empty((m.rows, width), np.uint16), m.row_source // np.int32(k)
        planes = [(_arrays._operand(x, "bfloat16"), _arrays._operand(out, "bfloat16"), 0)]
        maps = [_arrays._operand(t, "int32") for t in (m.row_id_map, m.row_source)]
        raw = x.view(np.uint16)
        times = paired(
            lambda: _core.permute(planes, *maps), lambda: np.take(raw, index, axis=0, out=taken, mode="clip"), rounds=7
        )
        if not np.array_equal(out.view(np.uint16), taken):
            raise AssertionError("permute differs from np.take")
        return compared(f"{tokens}x{width} E{experts} k{k}", "np.take", *times, goal=0.5, moved=(1 + k) * x.nbytes)

    return (partial(measure, *case) for case in ((4096, 2048, 64, 4), (2048, 7168, 64, 8), (512, 512, 8, 2)))


def packed(name: str) -> bool:
    """Returns whether a recipe packs elements; such recipes also draw random numbers and have two levels of scales."""
    quantizer = RECIPES[name].operands("fprop")[0]
    return quantizer is not None and quantizer.format.pack > 1


def slowness(tiny: float) -> float:
    """Returns the time of small calls on a machine with this TINY relative to the reference machine, at least 1."""
    return max(1.0, tiny / TINY)


def linear() -> Iterator[Measure]:
    """Eager Linear forward against nn.Linear. Small shapes: a limit of 60 us, or more on a slower machine, over the
    time beyond nn.Linear's. Large shapes: nn.Linear's time over half of Linear's."""

    def measure(name: str, m: int, k: int, n: int) -> Row:
        ours, peer = dt.Linear(k, n), torch.nn.Linear(k, n)
        wide = torch.randn(m, k)
        x = wide.to(getattr(torch, linear_dtype(RECIPES[name])))
        small = m == 16
        with dt.autocast(enabled=True, recipe=RECIPES[name]):
            t, p = paired(lambda: ours(x), lambda: peer(wide), rounds=21, calls=200 if small else 3)
        ratio = 60e-6 * slowness(p) / max(t - p, 1e-9) if small else 2 * p / t
        goal = (0.6 if packed(name) else 0.72) if small else 1.0
        return compared(f"{name} {m}x{k} by {k}x{n}", "nn.Linear", t, p, goal=goal, ratio=ratio)

    return (partial(measure, name, *size) for name in RECIPES for size in ((16, 16, 16), (512, 1024, 1024)))


def compiled() -> Iterator[Measure]:
    """Compiled Linear forward, in training and in inference: time beyond compiled nn.Linear's.

    One row by 16x16, packed formats 16 rows.
    """

    def measure(name: str, graded: bool) -> Row:
        torch._dynamo.reset()
        ours, peer = dt.Linear(16, 16), torch.nn.Linear(16, 16)
        dt.seed_rng(ours, 0)
        ours.train(graded)
        quantizer = RECIPES[name].operands("fprop")[0]
        rows = 16 if packed(name) else 1
        wide = torch.randn(rows, 16)
        x = wide.to(getattr(torch, linear_dtype(RECIPES[name])))
        f, g = torch.compile(ours, fullgraph=True), torch.compile(peer, fullgraph=True)
        eager, square = torch.nn.Linear(16, 16), torch.randn(16, 16)
        calls = {"ours": lambda: f(x), "peer": lambda: g(wide), "tiny": lambda: eager(square)}
        with dt.autocast(recipe=RECIPES[name]), torch.set_grad_enabled(graded):
            found = wall_seconds(calls, 21, 200)  # in turns, so that load from other processes slows down all of them
        t, p = found["ours"], found["peer"]
        # Of 40 us, or more on a slower machine. In training delayed scales take a node and nine tensors more; packed
        # formats draw random numbers, in inference too.
        delayed = quantizer is not None and quantizer.needs_scale
        goal = 0.6 if packed(name) else 1.0
        if graded:
            goal = 0.45 if delayed else 0.5 if packed(name) else 0.6
        ratio = 40e-6 * slowness(found["tiny"]) / max(t - p, 1e-9)
        case = f"{name} {rows}x16 by 16x16{'' if graded else ', inference'}"
        return compared(case, "compiled nn.Linear", t, p, goal=goal, ratio=ratio)

    return (partial(measure, name, graded) for name in RECIPES for graded in (True, False))


def settled(measure: Measure) -> Row:
    """Returns a row that does not miss its goal, or the last of several."""
    row = measure()
    for pause in PAUSES:
        if not misses(row):
            break
        print(f"measured again: {row['name']}: ratio {row['ratio']:.2f}, goal {row['goal']}", file=sys.stderr)
        time.sleep(pause)
        row = measure()
    return row


PARTS = {"quantize": quantize, "gemm": gemm, "permute": permute, "linear": linear, "compiled": compiled}


def rows(case: Case, _: Any) -> Iterator[Row]:
    torch.set_num_threads(THREADS)
    core.set_num_threads(THREADS)
    for measure in PARTS[case.what]():
        yield {"case": str(case), **settled(measure)}
