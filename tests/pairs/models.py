"""Pairs of one model in torch and Flax, as transformers wrote them: GPT-2, Llama and ViT, small and drawn from a seed.

Weights are drawn here and converted here, so that no code of transformers' says which of the parameters are the same.
Names of both frameworks are brought to one spelling by `canonical`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.pytorch_utils import Conv1D

NAMES = ("gpt2", "llama", "vit")
TORCH = {
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "vit": transformers.ViTForImageClassification,
}
FLAX = {
    "gpt2": transformers.FlaxGPT2LMHeadModel,
    "llama": transformers.FlaxLlamaForCausalLM,
    "vit": transformers.FlaxViTForImageClassification,
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model in both frameworks. `weights` by torch's names and `inputs` are the same arrays for both."""

    name: str
    config: Any
    weights: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray]
    places: Mapping[str, tuple[str, tuple[int, ...]]]
    """Flax's name of each of torch's parameters, and the permutation of its axes to Flax's order."""

    @property
    def vanishing(self) -> set[str]:
        """Flax's names of parameters without a gradient but for rounding: a softmax does not see what is added to all
        of its inputs, such as a query's product with a key's bias (which a rotary embedding would turn)."""
        return {name for name, _ in self.places.values() if name.endswith("attention/key/bias")}

    def torch(self, dtype: torch.dtype) -> torch.nn.Module:
        """Returns torch's model with the pair's weights."""
        model = TORCH[self.name](self.config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.from_numpy(self.weights[name]))
        return model.to(dtype)

    def torch_loss(self, model: torch.nn.Module, reduction: str = "mean") -> torch.Tensor:
        key, x = self._given()
        x = torch.from_numpy(x)
        logits = model(**{key: x.to(model.dtype) if x.is_floating_point() else x}).logits
        labels = torch.from_numpy(self.inputs["labels"])
        if key == "input_ids":
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        picked = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
        each = torch.logsumexp(logits, -1) - picked
        return each.mean() if reduction == "mean" else each.sum()

    def flax(self, dtype: Any) -> tuple[Any, dict[str, Any]]:
        """Returns Flax's model and its parameters. float64 needs `jax.enable_x64`."""
        params: dict[str, Any] = {}
        for name, (path, axes) in self.places.items():
            *folders, last = path.split("/")
            node = params
            for part in folders:
                node = node.setdefault(part, {})
            node[last] = jnp.asarray(self.weights[name].transpose(axes), dtype)
        return FLAX[self.name](self.config, dtype=dtype, _do_init=False), params

    def flax_logits(self, model: Any, params: Any) -> Any:
        """The model's own call, whose wrapper casts pixels to float32: they are float32 anyway."""
        return model(self._given()[1], params=params).logits

    def flax_loss(self, model: Any, reduction: str = "mean", logits: Callable | None = None) -> Callable:
        """Returns a function of parameters, to be differentiated."""
        key, _ = self._given()
        logits = logits or functools.partial(self.flax_logits, model)

        def loss(params: Any) -> Any:
            y, labels = logits(params), jnp.asarray(self.inputs["labels"])
            if key == "input_ids":
                y, labels = y[:, :-1], labels[:, 1:]
            y = y.astype(jnp.promote_types(y.dtype, jnp.float32))
            top = jax.lax.stop_gradient(y.max(-1, keepdims=True))
            picked = jnp.take_along_axis(y, labels[..., None], -1)[..., 0]
            each = jnp.log(jnp.exp(y - top).sum(-1)) + top[..., 0] - picked
            return each.mean() if reduction == "mean" else each.sum()

        return loss

    def _given(self) -> tuple[str, np.ndarray]:
        key = "pixel_values" if self.name == "vit" else "input_ids"
        return key, self.inputs[key]


def draw(name: str, seed: int, **given: Any) -> Pair:
    """Returns a pair whose sizes, activation, weights and inputs follow from the seed. `given`: of the config."""
    rng = np.random.default_rng([NAMES.index(name), seed])
    config = _CONFIGS[name](rng)
    for key, value in given.items():
        assert hasattr(config, key), key
        setattr(config, key, value)
    with torch.device("meta"):
        model = TORCH[name](config)
    weights = {key: _weight(rng, key, tuple(p.shape)) for key, p in model.named_parameters()}
    batch = int(rng.integers(2, 4))
    if name == "vit":
        inputs = {"pixel_values": _normal(rng, (batch, config.num_channels, *[config.image_size] * 2), 1)}
        inputs["labels"] = rng.integers(0, config.num_labels, batch)
    else:
        ids = rng.integers(0, config.vocab_size, (batch, int(rng.integers(7, 14))))
        inputs = {"input_ids": ids, "labels": ids}
    return Pair(name, config, weights, inputs, _places(model))


def _heads(rng: np.random.Generator) -> tuple[int, int]:
    """Heads and width. No two axes of a model have one size by accident of small numbers alone, but E = H x D."""
    heads = int(rng.choice([2, 4]))
    return heads, heads * int(rng.choice([6, 8, 10]))


def _gpt2(rng: np.random.Generator) -> Any:
    heads, width = _heads(rng)
    return transformers.GPT2Config(
        vocab_size=int(rng.integers(40, 70)),
        n_positions=32,
        n_embd=width,
        n_layer=int(rng.integers(2, 4)),
        n_head=heads,
        n_inner=int(rng.integers(30, 90)),
        activation_function=str(rng.choice(["gelu_new", "gelu", "relu", "silu"])),
        layer_norm_epsilon=float(rng.choice([1e-5, 1e-3])),
        tie_word_embeddings=bool(rng.integers(2)),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )


def _llama(rng: np.random.Generator) -> Any:
    """`rope_theta`, `head_dim`, `mlp_bias` and tied embeddings keep their defaults: Flax's Llama ignores them.

    It also cuts its table of sines to as many columns as there are positions, which then must be two heads wide.
    """
    heads, width = _heads(rng)
    return transformers.LlamaConfig(
        vocab_size=int(rng.integers(40, 70)),
        hidden_size=width,
        intermediate_size=int(rng.integers(30, 90)),
        num_hidden_layers=int(rng.integers(2, 4)),
        num_attention_heads=heads,
        num_key_value_heads=int(rng.choice([1, 2, heads])),
        max_position_embeddings=32,
        hidden_act=str(rng.choice(["silu", "gelu", "gelu_pytorch_tanh"])),
        rms_norm_eps=float(rng.choice([1e-6, 1e-5])),
        attention_bias=bool(rng.integers(2)),
        attention_dropout=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="eager",
    )


def _vit(rng: np.random.Generator) -> Any:
    heads, width = _heads(rng)
    patch = int(rng.choice([3, 4]))
    return transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=int(rng.integers(2, 4)),
        num_attention_heads=heads,
        intermediate_size=int(rng.integers(30, 90)),
        hidden_act=str(rng.choice(["gelu", "gelu_new", "relu"])),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=float(rng.choice([1e-12, 1e-6])),
        image_size=patch * int(rng.integers(2, 4)),
        patch_size=patch,
        num_channels=int(rng.integers(1, 4)),
        qkv_bias=bool(rng.integers(2)),
        num_labels=int(rng.integers(5, 12)),
        attn_implementation="eager",
    )


_CONFIGS = {"gpt2": _gpt2, "llama": _llama, "vit": _vit}


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights under which every part of the model shows in its loss: scales are not 1 and biases are not 0."""
    if name.endswith("bias"):
        return _normal(rng, shape, 0.3)
    if len(shape) == 1:
        return 1 + _normal(rng, shape, 0.3)
    return _normal(rng, shape, shape[-1] ** -0.5)


def _places(model: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """torch's parameter names -> Flax's, by the kind of the module that owns them."""
    places = {}
    for name, p in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner, axes = model.get_submodule(path), tuple(range(p.ndim))
        if leaf == "weight":
            match owner:
                case torch.nn.Embedding():
                    leaf = "embedding"
                case torch.nn.LayerNorm():
                    leaf = "scale"
                case torch.nn.Linear() | Conv1D():  # Flax's Conv1D keeps [out, in], torch's [in, out]
                    leaf, axes = "kernel", (1, 0)
                case torch.nn.Conv2d():
                    leaf, axes = "kernel", (2, 3, 1, 0)
        places[name] = (f"{path}.{leaf}".replace(".", "/"), axes)
    return places


def canonical(site: str) -> str:
    """One spelling for both frameworks: parts end at "/", and a tuple's first tensor has the tuple's name."""
    return site.replace(".", "/").removesuffix("[0]").removesuffix('["logits"]') or "(model)"
