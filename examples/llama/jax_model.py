"""Llama of diptych's fused functions for JAX's nnx, and its weights on a mesh.

Parameters have the names, rows and columns of `weights.shapes`, those of blocks stacked: "blocks.qkv.weight" is
[layers, rows, columns], and one block is compiled for all layers (`nnx.scan`). Embedding and head are not quantized, as
is usual: few of the products are theirs, and the loss depends on them most.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
import diptych.jax.nnx as dnnx
from diptych.common import Recipe
from llama import weights
from llama.config import Config

BLOCKS = "blocks."
# The dimension that the mesh's axis "tp" cuts, and the one of hidden_size, which "data" cuts with --fsdp. Rows of qkv
# are whole heads; of the [2, rows, columns] of fc1, "tp" cuts gates and the values beside them alike.
CUTS = {
    "embed.weight": (None, 1), "head.weight": (None, 1), "blocks.qkv.weight": (0, 1), "blocks.proj.weight": (1, 0),
    "blocks.mlp.fc1_weight": (1, 2), "blocks.mlp.fc2_weight": (1, 0),
}  # fmt: skip

Make = Callable[[str, tuple[int, ...]], Any]


class Fused(nnx.Module):
    """A quantized layer of every block: what a recipe keeps between calls, stacked. `make`: initial states."""

    def __init__(self, recipe: Recipe | None, layers: int, make: Callable[[Recipe], Any], key: jax.Array) -> None:
        states = {} if recipe is None else make(recipe)
        self.recipe = recipe
        self.states = dnnx.ScaleStates(jax.tree.map(lambda x: jnp.stack([x] * layers), states))
        self.random = dnnx.RandomState(jax.random.bits(key, (layers, 4), jnp.uint32).astype(jnp.int32))

    def kept(self, offsets: int) -> dict[str, Any]:
        """Arguments of one call, which uses so many random offsets; the next call's begin behind them."""
        if self.recipe is None:
            return {}
        rng = self.random.get_value()
        self.random.set_value(dj.rng_at(rng, offsets))
        return {"state": self.states.get_value(), "rng": rng}


class LayerNormLinear(Fused):
    def __init__(self, config: Config, recipe: Recipe | None, make: Make, key: jax.Array) -> None:
        layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.layer_norm_weight = nnx.Param(make("blocks.qkv.layer_norm_weight", (layers, config.hidden_size)))
        self.weight = nnx.Param(make("blocks.qkv.weight", (layers, sum(config.qkv_rows), config.hidden_size)))
        super().__init__(recipe, layers, lambda r: dj.init_state(r, module="layernorm_linear"), key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return dj.layernorm_dense(
            x, self.layer_norm_weight, None, self.weight, recipe=self.recipe, eps=self.eps, normalization="RMSNorm",
            **self.kept(dj.OFFSETS),
        )  # fmt: skip


class Linear(Fused):
    def __init__(self, config: Config, recipe: Recipe | None, make: Make, key: jax.Array) -> None:
        layers = config.num_hidden_layers
        self.weight = nnx.Param(make("blocks.proj.weight", (layers, config.hidden_size, config.qkv_rows[0])))
        super().__init__(recipe, layers, dj.init_state, key)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Attention keeps its output anyway, so the layer behind need not keep a copy of it.
        given = {} if self.recipe is None else {"save_original_input": True}
        return dj.dense(x, self.weight, recipe=self.recipe, **given, **self.kept(dj.OFFSETS))


class LayerNormMLP(Fused):
    """The gated perceptron. Where devices cut it, its activation is a function of its own in the compute dtype, since a
    fused gated activation takes whole rows."""

    def __init__(self, config: Config, recipe: Recipe | None, tp: int, make: Make, key: jax.Array) -> None:
        layers, width, wide = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        self.eps, self.tp = config.rms_norm_eps, tp
        self.layer_norm_weight = nnx.Param(make("blocks.mlp.layer_norm_weight", (layers, width)))
        self.fc1_weight = nnx.Param(make("blocks.mlp.fc1_weight", (layers, 2, wide, width)))
        self.fc2_weight = nnx.Param(make("blocks.mlp.fc2_weight", (layers, width, wide)))
        super().__init__(recipe, layers, dj.init_layernorm_mlp_state, key)

    def __call__(self, x: jax.Array) -> jax.Array:
        fc1, given = self.fc1_weight.get_value(), self.kept(dj.MLP_OFFSETS)
        norm = {"eps": self.eps, "normalization": "RMSNorm"}
        if self.tp == 1:
            return dj.layernorm_mlp(
                x, self.layer_norm_weight, None, fc1.reshape(-1, fc1.shape[-1]), None, self.fc2_weight, None,
                recipe=self.recipe, activation="swiglu", **norm, **given,
            )  # fmt: skip
        one, two = dict(given), dict(given)
        if given:
            one["state"], two["state"] = (given["state"][part] for part in ("fc1", "fc2"))
            two["rng"] = dj.rng_at(given["rng"], dj.OFFSETS)
        # The rows of each device lie together: its gates, then the values beside them.
        fc1 = jnp.swapaxes(fc1.reshape(2, self.tp, -1, fc1.shape[-1]), 0, 1).reshape(-1, fc1.shape[-1])
        names = {"recipe": self.recipe, "module": "layernorm_mlp"}
        h = dj.layernorm_dense(x, self.layer_norm_weight, None, fc1, name="fc1", **names, **norm, **one)
        h = h.reshape(*x.shape[:-1], self.tp, 2, -1)
        a = (jax.nn.silu(h[..., 0, :].astype(jnp.float32)) * h[..., 1, :]).astype(x.dtype)
        return dj.dense(a.reshape(*x.shape[:-1], -1), self.fc2_weight, name="fc2", **names, **two)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """[B, T, heads, D], by angles of [T, 1, D / 2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x.dtype)


class Block(nnx.Module):
    """[B, T, hidden] to the same."""

    def __init__(self, config: Config, recipe: Recipe | None, tp: int, make: Make, key: jax.Array) -> None:
        self.config, keys = nnx.static(config), jax.random.split(key, 3)
        self.qkv = LayerNormLinear(config, recipe, make, keys[0])
        self.proj = Linear(config, recipe, make, keys[1])
        self.mlp = LayerNormMLP(config, recipe, tp, make, keys[2])

    def attention(self, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        groups = self.config.num_key_value_heads
        shared = self.config.num_attention_heads // groups
        heads = qkv.reshape(*qkv.shape[:2], groups, shared + 2, self.config.head_dim)
        q, k, v = heads[..., :shared, :], heads[..., shared, :], heads[..., shared + 1, :]
        q = q.reshape(*qkv.shape[:2], groups * shared, -1)
        y = jax.nn.dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return y.reshape(*qkv.shape[:2], -1)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.proj(self.attention(self.qkv(x), cos, sin))
        return x + self.mlp(x)


class Llama(nnx.Module):
    """Logits [B, T, vocab] of tokens [B, T], in the dtype of the weights.

    `make`: makes each parameter, by its name and shape. `place`: the sharding of activations [B, T, hidden]; None where
    the program runs on one device. `tp`: the number of devices that cut each layer. `seed`: of stochastic rounding.
    """

    def __init__(
        self, config: Config, recipe: Recipe | None, make: Make, *, place: Any = None, tp: int = 1,
        recompute: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.recompute, self.place = nnx.static(config), recompute, nnx.static(place)
        embedding = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(make("embed.weight", embedding))
        self.blocks = Block(config, recipe, tp, make, jax.random.key(seed))
        self.norm = nnx.Param(make("norm.weight", (config.hidden_size,)))
        self.head = nnx.data(None if config.tie_word_embeddings else nnx.Param(make("head.weight", embedding)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        angles = jnp.outer(jnp.arange(tokens.shape[1], dtype=jnp.float32), self.config.frequencies())[:, None]
        place = (lambda x: x) if self.place is None else lambda x: jax.lax.with_sharding_constraint(x, self.place)

        def run(x: jax.Array, block: Block, cos: jax.Array, sin: jax.Array) -> jax.Array:
            return place(block(x, cos, sin))

        run = nnx.remat(run) if self.recompute else run
        over = nnx.scan(run, in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry)
        x = over(place(self.embed[tokens]), self.blocks, jnp.cos(angles), jnp.sin(angles))
        f = x.astype(jnp.float32)
        f = f * jax.lax.rsqrt(jnp.mean(jnp.square(f), -1, keepdims=True) + self.config.rms_norm_eps)
        head = self.embed if self.head is None else self.head
        return (f * self.norm).astype(x.dtype) @ head.T


# --- weights ---


def sharding(name: str, dims: int, mesh: jax.sharding.Mesh, fsdp: bool) -> NamedSharding:
    """How a parameter lies on a mesh with axes "data" and "tp"; `dims`: of the parameter, stacked."""
    spec: list[Any] = [None] * dims
    tp, data = CUTS.get(name, (None, None))
    first = int(name.startswith(BLOCKS))
    if tp is not None:
        spec[first + tp] = "tp"
    if data is not None and fsdp:
        spec[first + data] = "data"
    return NamedSharding(mesh, P(*spec))


def names_of(name: str, config: Config) -> list[str]:
    """The names in `weights.shapes` of what a parameter holds, one after the other."""
    inner = name.removeprefix(BLOCKS)
    return [name] if inner == name else [f"{BLOCKS}{i}.{inner}" for i in range(config.num_hidden_layers)]


def placed(config: Config, whole: Callable[[str], np.ndarray], mesh: jax.sharding.Mesh, fsdp: bool) -> Make:
    """Returns what makes parameters of whole weights, float32. Devices hold their parts alone, and of whole weights the
    host has one in memory at a time, beside those parts of one parameter."""

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        how, stacked = sharding(name, len(shape), mesh, fsdp), name.startswith(BLOCKS)
        index = how.addressable_devices_indices_map(shape)
        cuts = {str(at): at[1:] if stacked else at for at in index.values()}
        parts: dict[str, list[np.ndarray]] = {key: [] for key in cuts}
        for n in names_of(name, config):
            value = np.asarray(whole(n), np.float32).reshape(shape[1:] if stacked else shape)
            for key, cut in cuts.items():
                parts[key].append(value[cut].copy())
        joined = {key: np.stack(p) if stacked else p[0] for key, p in parts.items()}
        return jax.make_array_from_callback(shape, how, lambda at: joined[str(at)])

    return make


def write(folder: Path, params: Any, config: Config, mesh: jax.sharding.Mesh) -> None:
    """Writes a folder as `weights.write`. Every process calls it; the first one holds the whole model on its host.
    `params`: the `nnx.Param`s of a Llama."""
    everywhere = NamedSharding(mesh, P())
    own = {"embed": "embed.weight", "head": "head.weight", "norm": "norm.weight"}
    tensors = {}
    for path, param in nnx.to_flat_state(params):
        name, value = ".".join(path), param.get_value()
        names, sizes = names_of(own.get(name, name), config), weights.shapes(config)
        for i, n in enumerate(names):
            one = jax.device_put(value[i] if name.startswith(BLOCKS) else value, everywhere)
            if jax.process_index() == 0:
                tensors |= weights.split(np.asarray(one).reshape(sizes[n]), n, config)
    if jax.process_index() == 0:
        weights.write(folder, tensors, config)
