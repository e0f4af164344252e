"""A mixture of experts in PyTorch, in low precision: `python examples/torch_moe.py --recipe mxfp8`.

A byte-level language model of two blocks learns this file. Tokens go to the experts of their two largest probabilities.
`moe_map` computes the rows of each token, in expert order, on the device, and the first product quantizes rows as they
move there. Nothing waits for counts, and shapes suffice for any routing. So a step compiles into one graph, and a CUDA
graph of it replays with other routings.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diptych.torch as dt
from diptych.common import RECIPES, Recipe, row_align


@dataclasses.dataclass
class Config:
    """`align`: each expert's rows begin at a multiple of it; `row_align(recipe)` returns the value for a recipe."""

    width: int = 64
    hidden: int = 128  # of an expert
    experts: int = 4
    top_k: int = 2
    align: int = 32
    balance: float = 0.01  # weight of the load-balancing loss
    heads: int = 4
    blocks: int = 2
    seq: int = 64
    dtype: torch.dtype = torch.bfloat16  # of what linear layers read


def swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


class Router(nn.Module):
    """Returns each token's experts [T, k], their probabilities [T, k], and the load-balancing loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.width, config.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        top, experts = probs.topk(self.config.top_k, dim=-1)
        used = (experts[..., None] == torch.arange(self.config.experts, device=x.device)).float().mean((0, 1))
        balance = self.config.experts * (used * probs.mean(0)).sum()  # 1 where all are used alike
        return experts, top / top.sum(-1, keepdim=True), balance


class MoE(nn.Module):
    """y = shared(x) + sum of p_e * expert_e(x) over each token's experts; SwiGLU inside of both."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, hidden, experts = config.width, config.hidden, config.experts
        self.router = Router(config)
        self.gate_up = dt.GroupedLinear(experts, width, 2 * hidden, bias=False)
        self.down = dt.GroupedLinear(experts, hidden, width, bias=False)
        self.shared_gate_up = dt.Linear(width, 2 * hidden, bias=False)
        self.shared_down = dt.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps x [T, width] to y [T, width] and the load-balancing loss."""
        config = self.config
        experts, probs, balance = self.router(x)
        rows = dt.moe_map(experts, config.experts, map_type="index", align_size=config.align)
        x = x.to(config.dtype)
        hidden = swiglu(self.gate_up(x, row_map=rows, align=config.align))
        routed = self.down(hidden, offsets=rows.expert_offsets, align=config.align)
        y = dt.moe_unpermute(routed, rows, merging_probs=probs)
        return y + self.shared_down(swiglu(self.shared_gate_up(x))), balance


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = dt.Linear(config.width, 3 * config.width, bias=False)
        self.proj = dt.Linear(config.width, config.width, bias=False)
        self.moe = MoE(config)

    def attention(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x.to(self.config.dtype)).view(batch, seq, 3, self.config.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x).flatten(0, 1))
        return x + y.view(x.shape), balance


class MoELanguageModel(nn.Module):
    """Logits [B, S, 256] of bytes [B, S], and the mean load-balancing loss of its blocks."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, config.width), nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, 256, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        balance = x.new_zeros(())
        for block in self.blocks:
            x, uneven = block(x)
            balance = balance + uneven / len(self.blocks)
        return self.head(self.norm(x)), balance


def loss_of(model: nn.Module, tokens: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Returns the cross entropy per byte, and the training loss, which also contains the load-balancing loss."""
    logits, balance = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    return loss, loss + config.balance * balance


def batches(config: Config, batch: int, path: Path = Path(__file__)) -> Iterator[np.ndarray]:
    """Yields random batches of a file's bytes, without end."""
    text, rng = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64), np.random.default_rng(1)
    while True:
        starts = rng.integers(len(text) - config.seq - 1, size=(batch, 1))
        yield text[starts + np.arange(config.seq + 1)]


def train(
    recipe: Recipe | None,
    steps: int,
    *,
    batch: int = 4,
    device: str = "cpu",
    backend: str | None = None,
    config: Config | None = None,
    path: Path = Path(__file__),
) -> list[float]:
    """Returns the loss of each step. `recipe`: None is high precision. `backend`: of torch.compile; None is eager."""
    torch.manual_seed(0)
    if config is None:
        config = Config(dtype=torch.float32) if recipe is None else Config(align=row_align(recipe))
    model = MoELanguageModel(config).to(device)
    dt.seed_rng(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            return loss_of(model, tokens, config)

    run = step if backend is None else torch.compile(step, fullgraph=True, backend=backend)
    losses: list[float] = []
    for tokens, _ in zip(batches(config, batch, path), range(steps), strict=False):
        loss, total = run(torch.from_numpy(tokens).to(device))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mxfp8", choices=(*RECIPES, "none"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="each step as one graph")
    args = parser.parse_args()
    recipe = RECIPES.get(args.recipe)
    losses = train(recipe, args.steps, device=args.device, backend="inductor" if args.compile else None)
    for i, loss in enumerate(losses):
        if i % 5 == 0 or i == len(losses) - 1:
            print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
