"""Weights by Hugging Face's names, as NumPy arrays: read from safetensors files, drawn, and written back.

A fused weight is several of theirs; `parts` says which. They lie one below the other, the heads' weights for each head
of keys, so that a rank's part of the fused weight is its heads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # by which NumPy, and so safetensors, knows bfloat16
import numpy as np

from diptych.common.files import replacing
from llama.config import Config


class WeightsError(ValueError):
    """Weights that are missing, cannot be read, or are not the config's."""


def parts(name: str, config: Config) -> dict[str, int]:
    """Hugging Face's names of what a parameter of `Llama` holds, with the rows of each."""
    whole = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    whole |= {"head.weight": "lm_head.weight"}
    if name in whole:
        return {whole[name]: config.hidden_size if name == "norm.weight" else config.vocab_size}
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    assert found is not None, name
    width, wide = config.hidden_size, config.intermediate_size
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    inner = {
        "qkv.layer_norm_weight": {"input_layernorm": width},
        "qkv.weight": dict(zip(qkv, config.qkv_rows, strict=True)),
        "proj.weight": {"self_attn.o_proj": width},
        "mlp.layer_norm_weight": {"post_attention_layernorm": width},
        "mlp.fc1_weight": {"mlp.gate_proj": wide, "mlp.up_proj": wide},
        "mlp.fc2_weight": {"mlp.down_proj": width},
    }
    return {f"model.layers.{found[1]}.{theirs}.weight": rows for theirs, rows in inner[found[2]].items()}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters of `Llama`, by their names."""
    width, wide, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    inner = {
        "qkv.layer_norm_weight": (width,), "qkv.weight": (sum(config.qkv_rows), width),
        "proj.weight": (width, config.qkv_rows[0]), "mlp.layer_norm_weight": (width,),
        "mlp.fc1_weight": (2 * wide, width), "mlp.fc2_weight": (width, wide),
    }  # fmt: skip
    blocks = {f"blocks.{i}.{name}": s for i in range(config.num_hidden_layers) for name, s in inner.items()}
    head = {} if config.tie_word_embeddings else {"head.weight": (vocab, width)}
    return {"embed.weight": (vocab, width), **blocks, "norm.weight": (width,), **head}


def joined(tensors: list[np.ndarray], name: str, config: Config) -> np.ndarray:
    """The fused weight of theirs."""
    groups = config.num_key_value_heads if name.endswith("qkv.weight") else 1
    whole = np.concatenate([t.reshape(groups, -1, *t.shape[1:]) for t in tensors], 1)
    return whole.reshape(-1, *whole.shape[2:])


def split(value: np.ndarray, name: str, config: Config) -> dict[str, np.ndarray]:
    """Their tensors of a fused weight, by their names."""
    theirs = parts(name, config)
    groups = config.num_key_value_heads if name.endswith("qkv.weight") else 1
    ends = np.cumsum([rows // groups for rows in theirs.values()])[:-1]
    pieces = np.split(value.reshape(groups, -1, *value.shape[1:]), ends, 1)
    return {n: np.ascontiguousarray(t.reshape(-1, *t.shape[2:])) for n, t in zip(theirs, pieces, strict=True)}


def safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as e:
        raise WeightsError("reading and writing weights needs the package safetensors: pip install safetensors") from e
    return safetensors


class Files:
    """The tensors of a safetensors file, or of a folder with one or with several and their index."""

    def __init__(self, path: Path, config: Config) -> None:
        """**Raises** WeightsError if a tensor of the model is missing, has another shape, or is not the model's."""
        self.config, self.open = config, {}
        for file in self._files(path):
            try:
                opened = safetensors().safe_open(file, framework="np")
            except Exception as e:  # safetensors raises its own class for damaged files
                raise WeightsError(f"{file}: cannot be read: {e}") from e
            self.open |= dict.fromkeys(opened.keys(), opened)
        unread = {n for n in self.open if not n.endswith("rotary_emb.inv_freq")}
        if config.tie_word_embeddings:
            unread.discard("lm_head.weight")
        for name, shape in shapes(config).items():
            for theirs, rows in parts(name, config).items():
                if theirs not in self.open:
                    raise WeightsError(f"{path}: {theirs} is missing")
                found, wanted = self.open[theirs].get_slice(theirs).get_shape(), [rows, *shape[1:]]
                if found != wanted:
                    raise WeightsError(f"{path}: {theirs} is {found}, and the config makes it {wanted}")
                unread.discard(theirs)
        if unread:
            raise WeightsError(f"{path}: {', '.join(sorted(unread)[:3])}: the config's model has none of these")

    @staticmethod
    def _files(path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.is_file():
            try:
                files = sorted(path / f for f in set(json.loads(index.read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as e:
                raise WeightsError(f"{index}: cannot be read: {e!r}") from e
        else:
            files = [single]
        if missing := [f for f in files if not f.is_file()]:
            raise WeightsError(f"{missing[0]}: no such file")
        return files

    def whole(self, name: str) -> np.ndarray:
        tensors = [self.open[n].get_tensor(n) for n in parts(name, self.config)]
        return joined(tensors, name, self.config)


def drawn(config: Config, seed: int) -> Callable[[str], np.ndarray]:
    """Initial weights: a function of a parameter's name and the seed, so the number of ranks changes nothing."""
    sizes = shapes(config)
    places = {name: i for i, name in enumerate(sizes)}

    def whole(name: str) -> np.ndarray:
        if name.endswith("norm_weight") or name == "norm.weight":
            return np.ones(sizes[name], np.float32)
        generator = np.random.default_rng([seed, places[name]])
        return config.initializer_range * generator.standard_normal(sizes[name], np.float32)

    return whole


def write(folder: Path, tensors: dict[str, np.ndarray], config: Config) -> None:
    """Writes model.safetensors and config.json, which transformers' `from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as f:
        f.write(safetensors().numpy.save(tensors, metadata={"format": "pt"}))
    with replacing(folder / "config.json") as f:
        f.write(json.dumps(config.to_hf(), indent=2).encode())
