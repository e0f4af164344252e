"""Two GPUs of one host: the blocks of `llama` cut over a tensor-parallel group of two, forward and backward.

- A recipe's name alone: sequence parallelism; a GPU has half of the sequences between the cut pairs of layers, and
  gathers carry bytes and scales in the recipe's format.
- "tensor parallel": every GPU has all tokens there, and bfloat16 travels alone.
- "half, one GPU": the same modules and tokens with half of the heads and of the width, and nothing exchanged.

Both GPUs have the same tokens. The result is compared with that of whole blocks on one GPU.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import diptych.torch as dt
from benchmarks import ranks, room
from benchmarks.cases import ALONE, CUT, HALF, RANKS, SEQUENCE, Case
from benchmarks.results import Row, failed
from benchmarks.sections.llama import BOUND, FFN, Attention, PlainBlock, fused, stack
from diptych.common import RECIPES


class CutBlock(nn.Module):
    """A rank's part of a block. `ways`: the arguments of its modules about parallelism; empty: none is cut, and sizes
    are those of the part."""

    def __init__(self, width: int, length: int, ways: dict[str, Any]) -> None:
        super().__init__()
        self.attention = Attention(width, length)
        self.attention.widths = tuple(w // RANKS for w in self.attention.widths)  # type: ignore[assignment]
        parts = 1 if ways else RANKS
        mode = (lambda name: {"parallel_mode": name, **ways}) if ways else (lambda name: {})
        qkv = sum(self.attention.widths) * RANKS // parts
        self.qkv = dt.LayerNormLinear(width, qkv, bias=False, normalization="RMSNorm", **mode("column"))
        self.proj = dt.Linear(width // parts, width, bias=False, save_original_input=True, save_original_weight=True,
                              **mode("row"))  # fmt: skip
        both = {"set_parallel_mode": True, **ways} if ways else {}
        self.mlp = dt.LayerNormMLP(width, int(FFN * width) // parts, bias=False, normalization="RMSNorm",
                                   activation="swiglu", **both)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.qkv(x)))
        return x + self.mlp(x)

    def load(self, plain: PlainBlock, rank: int) -> None:
        def part(t: Tensor, dim: int) -> Tensor:
            return t.chunk(RANKS, dim)[rank]

        with torch.no_grad():
            split = plain.qkv.weight.split(plain.attention.widths)
            self.qkv.weight.copy_(torch.cat([part(w, 0) for w in split]))
            self.proj.weight.copy_(part(plain.proj.weight, 1))
            self.mlp.fc1_weight.copy_(torch.cat([part(w, 0) for w in plain.up.weight.chunk(2)]))
            self.mlp.fc2_weight.copy_(part(plain.down.weight, 1))


def made(case: Case, rank: int, kind: str) -> nn.Sequential:
    ways = {} if kind == HALF else {"tp_group": dist.group.WORLD, "sequence_parallel": kind == SEQUENCE}
    _, length, width = case.shape
    with torch.device(room.DEVICE):
        net = nn.Sequential(*[CutBlock(width, length, ways) for _ in stack(PlainBlock, case)]).to(torch.bfloat16)
    for own, its in zip(net, stack(PlainBlock, case), strict=True):
        own.load(its, rank)
    return net


def _compiled(
    case: Case, rank: int, kind: str, recipe: Any, backend: str, operands: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    """Returns a step of one kind of blocks, which returns their output. `operands`: input and output's gradient of all
    ranks."""
    net = fused(case) if kind == ALONE else made(case, rank, kind)
    x, grad = [t.chunk(RANKS)[rank] if kind == SEQUENCE else t for t in operands]
    own = x.clone().requires_grad_()
    for i, block in enumerate(net):
        net[i] = torch.compile(block, fullgraph=True, backend=backend)

    def step() -> Tensor:
        with dt.autocast(recipe=recipe):
            y = net(own)
        y.backward(grad)
        net.zero_grad()
        own.grad = None
        return y.detach()

    for _ in range(2):
        step()
    return step


def _difference(added: Tensor, whole: Tensor, rank: int, kind: str) -> float:
    """Returns how far the blocks of all ranks are from whole ones. **Raises** RuntimeError above `BOUND`."""
    want = whole.chunk(RANKS)[rank] if kind == SEQUENCE else whole
    difference = max(ranks.of_all(room.difference(added, want)))
    if not difference <= BOUND:
        raise RuntimeError(f"differs from one GPU by {difference}, at most {BOUND}")
    return difference


def rows(case: Case, rank: int, backend: str) -> Iterator[Row]:
    torch.manual_seed(0)
    x = room.normal(*case.shape)
    dy = torch.randn_like(x)
    found: list[tuple[str, Row]] = []
    calls: dict[str, Any] = {}
    whole: Tensor | None = None  # what whole blocks add to x
    for recipe_name, kind in itertools.product(case.names, (ALONE, HALF, CUT, SEQUENCE)):
        name = recipe_name if kind == SEQUENCE else f"{recipe_name} {kind}"
        start, error, row = time.perf_counter(), "", {}
        whole = None if kind == ALONE else whole
        try:
            if any(ranks.of_all(start > room.deadline)):  # together, or one rank would wait for the other
                raise TimeoutError("not measured: the section's time was over")
            calls[name] = _compiled(case, rank, kind, copy.deepcopy(RECIPES[recipe_name]), backend, (x, dy))
            row["compile s"] = time.perf_counter() - start
            added = calls[name]() - (x.chunk(RANKS)[rank] if kind == SEQUENCE else x)
            if kind == ALONE:
                whole = added
            elif kind != HALF and whole is not None:
                row["difference"] = _difference(added, whole, rank, kind)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        errors = [e for e in ranks.of_all(error) if e]
        if errors or kind == ALONE:
            calls.pop(name, None)
        if errors and kind == ALONE:
            whole = None  # of the other rank
        if kind != ALONE or errors:
            found.append((name, failed(case, name, errors[0]) if errors else {"case": str(case), "name": name, **row}))
        if rank == 0:
            print(f"{case}: {name}: {'; '.join(errors) or 'right'}, {time.perf_counter() - start:.1f} s", flush=True)
    times = ranks.device_seconds(calls, 7)
    walls = ranks.wall_seconds(calls, 3, 4) if room.DEVICE == "cuda" else times
    tokens = case.shape[0] * case.shape[1]
    for name, row in found:
        if name in calls:
            row["wall us"] = walls[name] * 1e6
            if name in times:
                row |= {"us": times[name] * 1e6, "rate": tokens / times[name], "unit": "tokens/s"}
            else:
                row["failed"] = "the hosts did not get ahead of the GPUs"
        yield row
