"""The demo model as a JAX user writes it: a byte-level GPT of pure functions over a dictionary of parameters.

Every linear layer of a block calls an injected `linear(name, x, weight, bias, kept)`, usually `diptych.jax.dense` with
one recipe; `kept` holds the states of its quantizers. Embedding and head stay in high precision, as is usual.
`diptych/lab/torch/gpt.py` is the same model in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from diptych.common.recipes import Recipe
from diptych.jax.layers.linear import dense
from diptych.jax.state.scales import ScaleState

Array = jax.Array
Params = dict[str, Array]
States = dict[str, dict[str, ScaleState]]


class Kept(NamedTuple):
    """The quantizers' states by linear layer: delayed scales and random states, each empty if the recipe has none.

    `record`: whether amaxes are recorded, as the gradients of `scales`.
    """

    scales: States
    rngs: dict[str, Array]
    record: bool = True


NOTHING = Kept({}, {})
Linear = Callable[[str, Array, Array, Array, Kept], Array]


def quantized_linear(recipe: Recipe | None, dtype: Any = jnp.float32) -> Linear:
    """Returns a linear function that runs `dense` with `recipe` in `dtype`, and keeps the dtype of its input."""

    def linear(name: str, x: Array, weight: Array, bias: Array, kept: Kept) -> Array:
        state, rng = kept.scales.get(name), kept.rngs.get(name)
        with jax.named_scope(name):  # traces name its operations after the layer
            y = dense(x.astype(dtype), weight, bias, recipe=recipe, state=state, rng=rng, record=kept.record)
        return y.astype(x.dtype)

    return linear


def embedding(tokens: Array, embed: Array, position: Array) -> Array:
    x = checkpoint_name(embed[tokens], "embed")
    return x + jnp.broadcast_to(position[: tokens.shape[-1]], x.shape)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    weight, bias = (jnp.broadcast_to(p, x.shape) for p in (weight, bias))
    return (x - mean) * jax.lax.rsqrt(variance + eps) * weight + bias


def _heads(qkv: Array, heads: int) -> Array:
    """Returns q, k and v as [3, B, H, T, D / H] from qkv [B, T, 3 D]."""
    batch, seq, width = qkv.shape
    return qkv.reshape(batch, seq, 3, heads, width // (3 * heads)).transpose(2, 0, 3, 1, 4)


def attention_scores(qkv: Array, heads: int) -> Array:
    """Returns q @ k.T, scaled and causally masked, [B, H, T, T]."""
    q, k, _ = _heads(qkv, heads)
    scores = (q @ k.swapaxes(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.where(jnp.broadcast_to(causal, scores.shape), scores, -jnp.inf)


def attention_values(probabilities: Array, qkv: Array, heads: int) -> Array:
    """Returns probabilities @ v with the heads side by side, [B, T, D]."""
    y = probabilities @ _heads(qkv, heads)[2]
    batch, _, seq, _ = y.shape
    return y.swapaxes(1, 2).reshape(batch, seq, -1)


def gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Returns the mean cross entropy over all positions, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def block(p: Params, prefix: str, x: Array, heads: int, linear: Linear, kept: Kept) -> Array:
    """Returns the output of a pre-norm transformer block. Its activations have names, for remat policies and traces."""

    def name(suffix: str, value: Array) -> Array:
        return checkpoint_name(value, prefix + suffix)

    def project(suffix: str, value: Array) -> Array:
        layer = prefix + suffix
        return name(suffix, linear(layer, value, p[f"{layer}.weight"], p[f"{layer}.bias"], kept))

    y = name("norm1", layer_norm(x, p[f"{prefix}norm1.weight"], p[f"{prefix}norm1.bias"]))
    qkv = project("qkv", y)
    probabilities = name("softmax", jax.nn.softmax(name("scores", attention_scores(qkv, heads)), axis=-1))
    y = project("proj", name("attention", attention_values(probabilities, qkv, heads)))
    x = name("residual", x + y)
    y = name("norm2", layer_norm(x, p[f"{prefix}norm2.weight"], p[f"{prefix}norm2.bias"]))
    y = project("down", name("gelu", gelu(project("up", y))))
    return checkpoint_name(x + y, prefix.removesuffix("."))


def gpt(params: Params, tokens: Array, kept: Kept, *, layers: int, heads: int, linear: Linear) -> Array:
    """Returns logits [B, T, 256] for int32 tokens [B, T]."""
    x = checkpoint_name(embedding(tokens, params["embed.weight"], params["position.weight"]), "embedded")
    for i in range(layers):
        x = block(params, f"blocks.{i}.", x, heads, linear, kept)
    x = checkpoint_name(layer_norm(x, params["norm.weight"], params["norm.bias"]), "norm")
    return checkpoint_name(x @ params["head.weight"].T, "head")


def loss_fn(params: Params, batch: Array, kept: Kept = NOTHING, **model: Any) -> Array:
    """Returns the next-byte cross entropy of int32 tokens [B, T + 1]."""
    logits = gpt(params, batch[:, :-1], kept, **model)
    return checkpoint_name(cross_entropy(logits, batch[:, 1:]), "loss")
