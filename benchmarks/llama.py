"""A stack of Llama-3-8B-shaped blocks, compiled, forward and backward: tokens/s and memory against bfloat16 and
torchao's float8, in one run: `python -m benchmarks.llama [--small] [--recipes NAME ...] [--mode MODE] [--out FILE]`.

There is no embedding and no head. `fused`: LayerNormLinear and LayerNormMLP; `linears`: the peer's own model with its
linear layers converted (`diptych.torch.convert`). Each model must compile into one graph, or the run fails.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diptych.torch as dt
from benchmarks import common
from benchmarks.gpu import device_seconds
from diptych.common import RECIPES, Recipe

SIZES = {
    "llama-3-8b": {"width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "blocks": 4, "batch": 4, "length": 4096},
    "small": {"width": 64, "ffn": 192, "heads": 4, "kv_heads": 2, "blocks": 2, "batch": 2, "length": 32},
}


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embeddings, between its two linear layers."""

    def __init__(self, width: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.widths = (width, kv_heads * self.head, kv_heads * self.head)
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
    def __init__(self, width: int, ffn: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, kv_heads, length)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, sum(self.attention.widths), bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        a, b = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class FusedBlock(nn.Module):
    def __init__(self, width: int, ffn: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, kv_heads, length)
        self.qkv = dt.LayerNormLinear(width, sum(self.attention.widths), bias=False, normalization="RMSNorm")
        self.proj = dt.Linear(width, width, bias=False)
        self.mlp = dt.LayerNormMLP(width, ffn, bias=False, normalization="RMSNorm", activation="swiglu")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.qkv(x)))
        return x + self.mlp(x)


def stack(block: type[nn.Module], size: dict[str, int], device: str) -> nn.Module:
    shape = (size["width"], size["ffn"], size["heads"], size["kv_heads"], size["length"])
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[block(*shape) for _ in range(size["blocks"])]).to(torch.bfloat16)


def measured(model: nn.Module, recipe: Recipe | None, size: dict[str, int], device: str, mode: str) -> dict[str, Any]:
    """One compiled model: ms and tokens/s of a step, peak memory, graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dt.seed_rng(model, 0)
    compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
    x = torch.randn(size["batch"], size["length"], size["width"], device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    dy = torch.randn_like(x)

    def step() -> None:
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            y = compiled(x)
        y.backward(dy)
        model.zero_grad(set_to_none=False)

    for _ in range(3):
        step()
    row: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = device_seconds(step, repeat=9)
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        seconds = common.seconds(step, repeat=3)
    row |= {"ms": seconds * 1e3, "tokens/s": size["batch"] * size["length"] / seconds}
    stats = torch._dynamo.utils.counters
    row["graphs"] = stats["stats"]["unique_graphs"]
    row["skipped graph captures"] = stats["inductor"]["cudagraph_skips"]
    if stats["graph_break"]:
        raise RuntimeError(f"graph breaks: {dict(stats['graph_break'])}")
    return row


def contestants(size: dict[str, int], device: str, recipes: list[str]) -> list[tuple[str, Callable[[], Any]]]:
    """(name, () -> (model, recipe)), the peers first."""
    found: list[tuple[str, Callable[[], Any]]] = [("bf16", lambda: (stack(PlainBlock, size, device), None))]
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        print(f"without torchao: {error}", file=sys.stderr)
    else:
        for name in ("tensorwise", "rowwise"):

            def made(name: str = name) -> Any:
                config = Float8LinearConfig.from_recipe_name(name)
                return convert_to_float8_training(stack(PlainBlock, size, device), config=config), None

            found.append((f"torchao {name}", made))
    for name in recipes:
        found.append((f"{name} fused", lambda r=RECIPES[name]: (stack(FusedBlock, size, device), copy.deepcopy(r))))
        found.append(
            (
                f"{name} linears",
                lambda r=RECIPES[name]: (dt.convert(stack(PlainBlock, size, device), r), copy.deepcopy(r)),
            )
        )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a size that a CPU runs")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--mode", default="default", help="of torch.compile, such as reduce-overhead")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.small:
        print("benchmarks.llama: needs a GPU, or --small", file=sys.stderr)
        return 1
    size = SIZES["small" if args.small else "llama-3-8b"]
    rows: list[dict[str, Any]] = []
    for name, make in contestants(size, device, args.recipes):
        model, recipe = make()
        row = {"case": name, **measured(model, recipe, size, device, args.mode)}
        rows.append({**row, "of bf16": row["tokens/s"] / (rows[0]["tokens/s"] if rows else row["tokens/s"])})
        print(common.table(rows[-1:]), flush=True)
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print("\n" + common.table(rows))
    if args.out:
        common.save(args.out, rows, size=size, mode=args.mode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
