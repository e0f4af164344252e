"""The demo model as a torch user writes it: a byte-level GPT, an `nn.Module` with `diptych.torch.Linear` in its blocks.

Embedding and head stay in high precision, as is usual. `diptych/lab/jax/gpt.py` is the same model in JAX.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from diptych.torch.modules.linear import Linear
from diptych.torch.state.autocast import autocast


class Projection(Linear):
    """A linear layer of a block that computes in `compute_dtype`; its input and output may have another dtype."""

    def __init__(self, in_features: int, out_features: int, compute_dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features)
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.to(self.compute_dtype)).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer block. Identity modules name activations that no other module outputs."""

    def __init__(self, width: int, heads: int, linear_dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = Projection(width, 3 * width, linear_dtype)
        self.scores = nn.Identity()
        self.softmax = nn.Softmax(dim=-1)
        self.attention = nn.Identity()
        self.proj = Projection(width, width, linear_dtype)
        self.residual = nn.Identity()
        self.norm2 = nn.LayerNorm(width)
        self.up = Projection(width, 4 * width, linear_dtype)
        self.gelu = nn.GELU()
        self.down = Projection(4 * width, width, linear_dtype)

    def attend(self, qkv: Tensor) -> Tensor:
        """Returns causal attention [B, T, D] for qkv [B, T, 3 D]."""
        q, k, _ = split_heads(qkv, self.heads)
        probabilities = self.softmax(self.scores(attention_scores(q, k)))
        return self.attention(attention_values(probabilities, qkv, self.heads))

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual(x + self.proj(self.attend(self.qkv(self.norm1(x)))))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A model from tokens [B, T] to logits [B, T, vocab]. The blocks' linear layers compute in `linear_dtype`; those of
    the last `high_blocks` blocks, which are not quantized, and all other layers compute in float32."""

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        seq: int,
        vocab: int = 256,
        high_blocks: int = 0,
        linear_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(seq, width)
        self.embedded = nn.Identity()
        self.quantized = layers - high_blocks
        dtypes = [linear_dtype] * self.quantized + [torch.float32] * high_blocks
        self.blocks = nn.ModuleList(Block(width, heads, dtype) for dtype in dtypes)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(self.embed(tokens) + self.position.weight[: tokens.shape[-1]])
        for block in self.blocks[: self.quantized]:
            x = block(x)
        with autocast(enabled=False):
            for block in self.blocks[self.quantized :]:
                x = block(x)
        return self.head(self.norm(x))


def split_heads(qkv: Tensor, heads: int) -> Tensor:
    """Returns q, k and v as [3, B, H, T, D / H] from qkv [B, T, 3 D]."""
    batch, seq, width = qkv.shape
    return qkv.reshape(batch, seq, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns q @ k.T, scaled and causally masked, [B, H, T, T]."""
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~causal, -math.inf)


def attention_values(probabilities: Tensor, qkv: Tensor, heads: int) -> Tensor:
    """Returns probabilities @ v with the heads side by side, [B, T, D]."""
    return (probabilities @ split_heads(qkv, heads)[2]).transpose(1, 2).flatten(2)
