"""Llama of diptych's fused modules for torch, described by a Hugging Face `config.json`, and its weights on ranks.

Embedding and head are not quantized, as is usual: few of the products are theirs, and the loss depends on them most.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

import diptych.torch as dt
from llama import weights
from llama.config import Config
from llama.torch_parallel import Cut, CutTokens, GatherTokens


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, B, ..., D], by angles of [T, 1, ..., D / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    """[T, B, hidden] to the same. `ways`: arguments that cut the layers over a tensor-parallel group; T is then this
    rank's part of the sequence if they cut it. `recompute`: backward computes the block again instead of keeping its
    activations."""

    def __init__(self, config: Config, recompute: bool, **ways: Any) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        width, rows = config.hidden_size, config.qkv_rows
        made = {"eps": config.rms_norm_eps, "bias": False, "normalization": "RMSNorm", **ways}
        # For each head of keys: its heads of queries, the keys, the values. So each rank has whole heads.
        self.qkv = dt.LayerNormLinear(width, sum(rows), parallel_mode="column", **made)
        # Attention keeps its output anyway, so the layer behind need not keep a copy of it.
        self.proj = dt.Linear(rows[0], width, bias=False, save_original_input=True, parallel_mode="row", **ways)
        self.mlp = dt.LayerNormMLP(width, config.intermediate_size, activation="swiglu", set_parallel_mode=True, **made)

    def attention(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shared = self.config.num_attention_heads // self.config.num_key_value_heads
        heads = qkv.unflatten(-1, (-1, shared + 2, self.config.head_dim))
        q, k, v = heads.split((shared, 1, 1), 3)
        turned = (rotated(q, cos, sin), rotated(k, cos, sin), v)
        q, k, v = (t.flatten(2, 3).permute(1, 2, 0, 3) for t in turned)  # [B, heads, T, D]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.qkv(x), cos, sin))
        return x + self.mlp(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return dt.checkpoint(self.run, x, cos, sin) if self.recompute else self.run(x, cos, sin)


class Llama(nn.Module):
    """Logits [B, T, vocab] of tokens [B, T]. `group`: the ranks that share each layer and read the same tokens.
    `sequence`: outside of attention and of the perceptrons they share the sequence, too."""

    def __init__(self, config: Config, recompute: bool = False, group: Any = None, sequence: bool = True) -> None:
        super().__init__()
        self.config, self.group, self.sequence = config, group, sequence and group is not None
        ways = {"tp_group": group, "sequence_parallel": self.sequence}
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, recompute, **ways) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("frequencies", torch.from_numpy(config.frequencies()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.frequencies)
        cos, sin = (t[:, None, None, None] for t in (angles.cos(), angles.sin()))
        x = self.embed(tokens.T)  # layers cut tokens along dimension 0
        x = CutTokens.apply(x, self.group) if self.sequence else x
        for block in self.blocks:
            x = block(x, cos, sin)
        x = (GatherTokens.apply(x, self.group) if self.sequence else x).transpose(0, 1)
        return F.linear(self.norm(x), self.embed.weight if self.head is None else self.head.weight)


@torch.no_grad()
def fill(model: Any, whole: Callable[[str], np.ndarray], cut: dict[str, Cut]) -> None:
    """Copies to each rank its part of every weight. Nothing is sent, and one whole weight is in memory at a time.
    `cut`: the weights that the model's `group` shares."""
    for name, p in model.named_parameters():
        value = torch.from_numpy(whole(name).astype(np.float32))
        value = (cut[name].part(value, model.group) if name in cut else value).to(p.device, p.dtype)
        if isinstance(p, DTensor):
            value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
        p.copy_(value)


@torch.no_grad()
def write(folder: Path, model: Any, cut: dict[str, Cut]) -> None:
    """Writes a folder as `weights.write`. Every rank calls it; the first one holds the whole model on the CPU."""
    first, tensors = dist.get_rank() == 0, {}
    for name, p in model.named_parameters():
        value = p.full_tensor() if isinstance(p, DTensor) else p
        value = cut[name].whole(value, model.group) if name in cut else value
        if first:
            tensors |= weights.split(value.cpu().numpy(), name, model.config)
    if first:
        weights.write(folder, tensors, model.config)
