"""A stack of Llama-3-8B-shaped blocks in torch, compiled, forward and backward: the device's time and memory.

There is no embedding and no head. `fused`: LayerNormLinear and LayerNormMLP; `linears`: the peer's own model with its
linear layers converted (`diptych.torch.convert`). Every model has the same weights and must compile into one graph.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diptych.torch as dt
from benchmarks import room
from benchmarks.cases import PACKED, Case
from benchmarks.results import Row, failed
from benchmarks.room import device_seconds, difference
from diptych.common import RECIPES

BLOCKS, HEADS, KV_HEADS, FFN = 4, 32, 8, 3.5  # FFN: of the width
BOUND, PACKED_BOUND = 0.15, 0.4  # of what four blocks add: FP8 differs by 0.07 to 0.09, NVFP4 by 0.25


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embeddings, between its two linear layers."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.head = width // HEADS
        self.widths = (width, KV_HEADS * self.head, KV_HEADS * self.head)
        frequencies = 500000.0 ** (-torch.arange(0, self.head, 2) / self.head)
        angles = torch.outer(torch.arange(length), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head)) for t in qkv.split(self.widths, -1))
        q, k, v = (t.transpose(1, 2) for t in (self.rotated(q), self.rotated(k), v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class PlainBlock(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        ffn = int(FFN * width)
        self.attention = Attention(width, length)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, sum(self.attention.widths), bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        a, b = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class FusedBlock(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(width, length)
        self.qkv = dt.LayerNormLinear(width, sum(self.attention.widths), bias=False, normalization="RMSNorm")
        # Its input is kept anyway, as attention's output.
        self.proj = dt.Linear(width, width, bias=False, save_original_input=True, save_original_weight=True)
        self.mlp = dt.LayerNormMLP(width, int(FFN * width), bias=False, normalization="RMSNorm", activation="swiglu")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.qkv(x)))
        return x + self.mlp(x)

    def load(self, plain: PlainBlock) -> None:
        with torch.no_grad():
            self.qkv.weight.copy_(plain.qkv.weight)
            self.proj.weight.copy_(plain.proj.weight)
            self.mlp.fc1_weight.copy_(plain.up.weight)
            self.mlp.fc2_weight.copy_(plain.down.weight)


def stack(block: type[nn.Module], case: Case) -> nn.Sequential:
    _, length, width = case.shape
    torch.manual_seed(0)
    with torch.device(room.DEVICE):
        return nn.Sequential(*[block(width, length) for _ in range(BLOCKS)]).to(torch.bfloat16)


def fused(case: Case) -> nn.Sequential:
    made = stack(FusedBlock, case)
    for own, its in zip(made, stack(PlainBlock, case), strict=True):
        own.load(its)
    return made


def contestants(case: Case, peers: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields (name, a function that returns the model and its recipe), what matters most first."""
    yield "bf16", lambda: (stack(PlainBlock, case), None)

    def torchao(name: str) -> Callable[[], Any]:
        return lambda: (peers["torchao"](stack(PlainBlock, case), name), None)

    def ours(name: str) -> Callable[[], Any]:
        recipe_name, kind = name.split()
        recipe = copy.deepcopy(RECIPES[recipe_name])

        def make() -> Any:
            if kind == "linears":
                return dt.convert(stack(PlainBlock, case), recipe), recipe
            return fused(case), recipe

        return make

    if "torchao" in peers:
        yield "torchao tensorwise", torchao("tensorwise")
    for name in case.names:
        yield name, ours(name)
    if "torchao" in peers:
        yield "torchao rowwise", torchao("rowwise")


def prepared(case: Case, make: Callable[[], Any], x: Tensor, dy: Tensor) -> tuple[Callable[[], Tensor], Row]:
    """Compiles a model. **Returns** its step, and what its row says beside the time. **Raises** RuntimeError for graph
    breaks."""
    torch._dynamo.utils.counters.clear()
    start = time.perf_counter()
    gc.collect()
    before = torch.cuda.memory_allocated() if room.DEVICE == "cuda" else 0
    model, recipe = make()
    gc.collect()
    dt.seed_rng(model, 0)
    compiled = torch.compile(model, fullgraph=True)
    own = x.clone().requires_grad_()

    def step() -> Tensor:
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y = compiled(own)
        y.backward(dy)
        model.zero_grad(set_to_none=False)
        return y

    for _ in range(3):
        step()
    if breaks := torch._dynamo.utils.counters["graph_break"]:
        raise RuntimeError(f"graph breaks: {dict(breaks)}")
    more: Row = {}
    if room.DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        more["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return step, more | {"compile s": time.perf_counter() - start}


def rows(case: Case, peers: dict[str, Any]) -> Iterator[Row]:
    batch, length, width = case.shape
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # one function, compiled for each model
    x = room.normal(batch, length, width)
    dy = torch.randn_like(x)
    found: dict[str, Row] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    want = None
    for name, make in contestants(case, peers):
        try:
            room.require_time()
            step, more = prepared(case, make, x, dy)
            made = step().detach() - x  # what the blocks add
        except Exception as error:
            found[name] = failed(case, name, error)
            continue
        want = made if want is None else want
        apart = difference(made, want)
        bound = PACKED_BOUND if name.startswith(PACKED) else BOUND
        if not apart <= bound:
            found[name] = failed(case, name, f"differs by {apart:.3g} from bfloat16, at most {bound}")
            continue
        steps[name] = step
        found[name] = {"case": str(case), "name": name, "difference": apart, **more}
    times = device_seconds(steps, 5)
    for name, row in found.items():
        if name in times:
            row |= {"us": times[name] * 1e6, "rate": batch * length / times[name], "unit": "tokens/s"}
        elif name in steps:
            row["failed"] = "the host did not get ahead of the GPU"
        yield row
