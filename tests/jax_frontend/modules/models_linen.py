"""Models in flax's linen as its guides write them, without a trace of this library: a language model and a mixer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    """A layer of a transformer: causal attention and a perceptron, each behind a norm."""

    width: int
    heads: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=self.dtype, name="attention")(h, mask=mask)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(h))
        return x + nn.Dense(self.width, dtype=self.dtype)(h)


class Language(nn.Module):
    """A decoder over tokens, whose layers are made in setup."""

    vocabulary: int = 96
    width: int = 64
    heads: int = 2
    depth: int = 2

    def setup(self):
        self.embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        self.place = self.param("place", nn.initializers.normal(0.02), (64, self.width))
        self.blocks = [Block(self.width, self.heads) for _ in range(self.depth)]
        self.norm = nn.LayerNorm(dtype=jnp.bfloat16)
        self.head = nn.Dense(self.vocabulary, dtype=jnp.bfloat16)

    def encode(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]].astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, tokens):
        return self.head(self.encode(tokens)).astype(jnp.float32)


class Perceptron(nn.Module):
    """Two linear layers."""

    width: int

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(self.width, dtype=jnp.bfloat16)(x))
        return nn.Dense(x.shape[-1], dtype=jnp.bfloat16)(h)


class MixerBlock(nn.Module):
    """Mixes places, then channels."""

    places_width: int
    channels_width: int

    @nn.compact
    def __call__(self, x):
        h = jnp.swapaxes(nn.LayerNorm(dtype=jnp.bfloat16)(x), 1, 2)
        x = x + jnp.swapaxes(Perceptron(self.places_width, name="places")(h), 1, 2)
        return x + Perceptron(self.channels_width, name="channels")(nn.LayerNorm(dtype=jnp.bfloat16)(x))


class Mixer(nn.Module):
    """An MLP-Mixer of images; `train` is static, as flax's examples have it."""

    classes: int = 10
    width: int = 64
    depth: int = 2

    @nn.compact
    def __call__(self, images, train: bool = True):
        x = nn.Conv(self.width, (4, 4), strides=(4, 4), name="stem")(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]).astype(jnp.bfloat16)
        for _ in range(self.depth):
            x = MixerBlock(32, 128)(x)
            x = nn.Dropout(0.1, deterministic=not train)(x)
        x = nn.LayerNorm()(x).mean(1)
        return nn.Dense(self.classes, name="head")(x)


class Scanned(nn.Module):
    """Blocks under nn.scan and nn.remat, as long models have them. `axes`: of other collections than parameters."""

    depth: int = 2
    width: int = 64
    axes: tuple = ()
    streams: tuple = ()

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Step), variable_axes={"params": 0} | dict.fromkeys(self.axes, 0), length=self.depth,
            split_rngs={"params": True} | dict.fromkeys(self.streams, True),
        )  # fmt: skip
        return scan(self.width)(x, None)[0]


class Step(nn.Module):
    """One step of the scan."""

    width: int

    @nn.compact
    def __call__(self, x, _):
        return x + Perceptron(self.width)(x), None
