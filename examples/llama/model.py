"""Llama of diptych's fused modules, described by a Hugging Face `config.json`.

Embedding and head are not quantized, as is usual: few of the products are theirs, and the loss depends on them most.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diptych.torch as dt
from llama.parallel import CutTokens, GatherTokens


class ConfigError(ValueError):
    """A config.json that cannot be read, or describes a model that this one is not."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of Hugging Face's LlamaConfig that the model reads, by their names there."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 2048

    @classmethod
    def read(cls, path: Path) -> Config:
        """**Raises** ConfigError, naming the field."""
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(f"{path}: cannot be read: {e}") from e
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: is no JSON object")
        try:
            return cls.of(given)
        except ConfigError as e:
            raise ConfigError(f"{path}: {e}") from e

    @classmethod
    def of(cls, given: dict[str, Any]) -> Config:
        for name, supported in (("model_type", "llama"), ("hidden_act", "silu")):
            if given.get(name, supported) != supported:
                raise ConfigError(f"{name}={given[name]!r} is not supported, only {supported!r}")
        for name in ("attention_bias", "mlp_bias", "attention_dropout", "quantization_config"):
            if given.get(name):
                raise ConfigError(f"{name}={given[name]!r} is not supported")
        fields = {f.name: given[f.name] for f in dataclasses.fields(cls) if given.get(f.name) is not None}
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in needed if name not in fields]:
            raise ConfigError(f"{', '.join(missing)} missing")
        sizes = (*needed, "num_key_value_heads", "head_dim", "max_position_embeddings")
        for name in sizes:
            if name in fields and (type(fields[name]) is not int or fields[name] < 1):
                raise ConfigError(f"{name}={fields[name]!r} is not a positive integer")
        heads = fields["num_attention_heads"]
        if "head_dim" not in fields and fields["hidden_size"] % heads:
            raise ConfigError(f"hidden_size={fields['hidden_size']} is no multiple of num_attention_heads={heads}")
        fields.setdefault("head_dim", fields["hidden_size"] // heads)
        fields.setdefault("num_key_value_heads", heads)
        fields.setdefault("rms_norm_eps", 1e-6)  # transformers' default
        if fields["head_dim"] % 2:
            raise ConfigError(f"head_dim={fields['head_dim']} is odd")
        if heads % fields["num_key_value_heads"]:
            raise ConfigError(f"num_attention_heads={heads} is no multiple of num_key_value_heads")
        for name in ("rope_parameters", "rope_scaling"):
            if not isinstance(given.get(name) or {}, dict):
                raise ConfigError(f"{name}={given[name]!r} is no JSON object")
        # transformers 5 puts both into rope_parameters
        rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
        fields["rope_theta"] = float(rope.pop("rope_theta", fields.get("rope_theta", 10000.0)))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ConfigError(f"rope_scaling of type {kind!r} is not supported, only 'llama3'")
        if kind == "llama3":
            parts = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            if missing := [name for name in parts if name not in rope]:
                raise ConfigError(f"rope_scaling lacks {', '.join(missing)}")
        fields["rope_scaling"] = rope if kind == "llama3" else None
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a Hugging Face config.json for this model."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32", **dataclasses.asdict(self),
        }  # fmt: skip

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        kv = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, kv, kv

    def frequencies(self) -> Tensor:
        """Returns the frequencies of the rotary embedding, float32 [head_dim / 2]."""
        freq = self.rope_theta ** -(torch.arange(0, self.head_dim, 2, device="cpu").float() / self.head_dim)
        if (s := self.rope_scaling) is None:
            return freq
        # Slow frequencies are divided by the factor, fast ones stay, those between are mixed.
        turns = s["original_max_position_embeddings"] * freq / (2 * math.pi)
        kept = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
        return kept * freq + (1 - kept) * freq / s["factor"]

    def flops_per_token(self, seq: int) -> float:
        """Returns the floating-point operations of forward and backward for one token of a sequence.

        The usual formula: 6 for each weight that a token is multiplied with, and in attention 12 times the sequence's
        length for each feature of the heads; its causal half is not taken off. Recomputation does not count.
        """
        wide = self.num_attention_heads * self.head_dim
        block = self.hidden_size * (sum(self.qkv_rows) + wide + 3 * self.intermediate_size)
        weights = self.num_hidden_layers * block + self.vocab_size * self.hidden_size
        return 6 * weights + 12 * self.num_hidden_layers * wide * seq


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
        self.register_buffer("frequencies", config.frequencies(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.frequencies)
        cos, sin = (t[:, None, None, None] for t in (angles.cos(), angles.sin()))
        x = self.embed(tokens.T)  # layers cut tokens along dimension 0
        x = CutTokens.apply(x, self.group) if self.sequence else x
        for block in self.blocks:
            x = block(x, cos, sin)
        x = (GatherTokens.apply(x, self.group) if self.sequence else x).transpose(0, 1)
        return F.linear(self.norm(x), self.embed.weight if self.head is None else self.head.weight)
