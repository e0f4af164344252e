"""Models in flax's nnx as its guides write them, without a trace of this library: a language model and a mixer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

BF16 = jnp.bfloat16


class Perceptron(nnx.Module):
    """Two linear layers."""

    def __init__(self, features: int, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(features, width, dtype=BF16, rngs=rngs)
        self.down = nnx.Linear(width, features, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """A layer of a transformer: causal attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, dtype=BF16, decode=False, rngs=rngs)
        self.mlp = Perceptron(width, 4 * width, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=BF16, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.norms[1](x))


class Language(nnx.Module):
    """A decoder over tokens."""

    def __init__(self, vocabulary: int = 96, width: int = 64, heads: int = 2, depth: int = 2, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, width, dtype=BF16, rngs=rngs)
        self.place = nnx.Param(jax.random.normal(rngs.params(), (64, width)) * 0.02)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, dtype=BF16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]].astype(BF16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


class MixerBlock(nnx.Module):
    """Mixes places, then channels."""

    def __init__(self, places: int, features: int, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(features, dtype=BF16, rngs=rngs) for _ in range(2)])
        self.places = Perceptron(places, 32, rngs=rngs)
        self.channels = Perceptron(features, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + jnp.swapaxes(self.places(jnp.swapaxes(self.norms[0](x), 1, 2)), 1, 2)
        return self.dropout(x + self.channels(self.norms[1](x)))


class Mixer(nnx.Module):
    """An MLP-Mixer of images with 64 places."""

    def __init__(self, classes: int = 10, width: int = 64, depth: int = 2, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, width, (4, 4), strides=(4, 4), rngs=rngs)
        self.blocks = nnx.List([MixerBlock(64, width, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]).astype(BF16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
