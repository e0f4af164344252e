"""A Llama's sizes, as a Hugging Face `config.json` has them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np


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

    def frequencies(self) -> np.ndarray:
        """Returns the frequencies of the rotary embedding, float32 [head_dim / 2]."""
        freq = np.float32(self.rope_theta) ** -(np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim)
        if (s := self.rope_scaling) is None:
            return freq
        # Slow frequencies are divided by the factor, fast ones stay, those between are mixed.
        turns = s["original_max_position_embeddings"] * freq / (2 * math.pi)
        kept = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clip(0, 1)
        return (kept * freq + (1 - kept) * freq / s["factor"]).astype(np.float32)

    def flops_per_token(self, seq: int) -> float:
        """Returns the floating-point operations of forward and backward for one token of a sequence.

        The usual formula: 6 for each weight that a token is multiplied with, and in attention 12 times the sequence's
        length for each feature of the heads; its causal half is not taken off. Recomputation does not count.
        """
        wide = self.num_attention_heads * self.head_dim
        block = self.hidden_size * (sum(self.qkv_rows) + wide + 3 * self.intermediate_size)
        weights = self.num_hidden_layers * block + self.vocab_size * self.hidden_size
        return 6 * weights + 12 * self.num_hidden_layers * wide * seq
