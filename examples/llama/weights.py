"""Weights by Hugging Face's names: filling a sharded model from safetensors files, and writing it back.

A fused weight is several of theirs; `parts` says which. They lie one below the other, the heads' weights for each head
of keys, so that a rank's part of the fused weight is its heads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from diptych.common.files import replacing
from llama.model import Config
from llama.parallel import Cut


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


def joined(tensors: list[Tensor], name: str, config: Config) -> Tensor:
    """The fused weight of theirs."""
    groups = config.num_key_value_heads if name.endswith("qkv.weight") else 1
    return torch.cat([t.unflatten(0, (groups, -1)) for t in tensors], 1).flatten(0, 1)


def split(value: Tensor, name: str, config: Config) -> dict[str, Tensor]:
    """Their tensors of a fused weight, by their names."""
    theirs = parts(name, config)
    groups = config.num_key_value_heads if name.endswith("qkv.weight") else 1
    pieces = value.unflatten(0, (groups, -1)).split([rows // groups for rows in theirs.values()], 1)
    return {n: t.flatten(0, 1).contiguous() for n, t in zip(theirs, pieces, strict=True)}


def safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as e:
        raise WeightsError("reading and writing weights needs the package safetensors: pip install safetensors") from e
    return safetensors


class Files:
    """The tensors of a safetensors file, or of a folder with one or with several and their index."""

    def __init__(self, path: Path, config: Config, shapes: dict[str, torch.Size]) -> None:
        """**Raises** WeightsError if a tensor of the model is missing, has another shape, or is not the model's."""
        self.config, self.open = config, {}
        for file in self._files(path):
            try:
                opened = safetensors().safe_open(file, framework="pt")
            except Exception as e:  # safetensors raises its own class for damaged files
                raise WeightsError(f"{file}: cannot be read: {e}") from e
            self.open |= dict.fromkeys(opened.keys(), opened)
        unread = {n for n in self.open if not n.endswith("rotary_emb.inv_freq")}
        if config.tie_word_embeddings:
            unread.discard("lm_head.weight")
        for name, shape in shapes.items():
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

    def whole(self, name: str) -> Tensor:
        tensors = [self.open[n].get_tensor(n) for n in parts(name, self.config)]
        return joined(tensors, name, self.config)


def drawn(config: Config, seed: int, shapes: dict[str, torch.Size]) -> Callable[[str], Tensor]:
    """Initial weights: a function of a parameter's name and the seed, so the number of ranks changes nothing."""
    places = {name: i for i, name in enumerate(shapes)}

    def whole(name: str) -> Tensor:
        if name.endswith("norm_weight") or name == "norm.weight":
            return torch.ones(shapes[name])
        generator = torch.Generator().manual_seed((seed << 20) + places[name])
        return torch.empty(shapes[name]).normal_(0, config.initializer_range, generator=generator)

    return whole


@torch.no_grad()
def fill(model: Any, whole: Callable[[str], Tensor], cut: dict[str, Cut]) -> None:
    """Copies to each rank its part of every weight. Nothing is sent, and one whole weight is in memory at a time.
    `cut`: the weights that the model's `group` shares."""
    for name, p in model.named_parameters():
        value = cut[name].part(whole(name), model.group) if name in cut else whole(name)
        value = value.to(p.device, p.dtype)
        if isinstance(p, DTensor):
            value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
        p.copy_(value)


@torch.no_grad()
def write(folder: Path, model: Any, cut: dict[str, Cut]) -> None:
    """Writes model.safetensors and config.json, which transformers' `from_pretrained` reads. Every rank calls it; the
    first one holds the whole model on the CPU."""
    first, tensors = dist.get_rank() == 0, {}
    for name, p in model.named_parameters():
        value = p.full_tensor() if isinstance(p, DTensor) else p
        value = cut[name].whole(value, model.group) if name in cut else value
        if first:
            tensors |= split(value.cpu(), name, model.config)
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "model.safetensors") as f:
            f.write(safetensors().torch.save(tensors, metadata={"format": "pt"}))
        with replacing(folder / "config.json") as f:
            f.write(json.dumps(model.config.to_hf(), indent=2).encode())
