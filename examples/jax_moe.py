"""The same mixture of experts in JAX: `python examples/jax_moe.py --recipe mxfp8`.

Parameters are a dictionary with the names of the torch model's state dict. `moe_map` computes the rows of each token,
in expert order, on the device. Shapes suffice for any routing, so one compiled step serves all routings.

With `--devices 4` batches and experts are spread over devices (on the CPU over four of its own): the function that runs
the experts is the same, and `expert_parallel` calls it on each device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from diptych.common import RECIPES, Recipe, row_align
from diptych.common.layers.plan import linear_plan

Array = jax.Array
Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """`align`: each expert's rows begin at a multiple of it; `row_align(recipe)` returns the value for a recipe."""

    width: int = 64
    hidden: int = 128  # of an expert
    experts: int = 4
    top_k: int = 2
    align: int = 32
    balance: float = 0.01  # weight of the load-balancing loss
    heads: int = 4
    blocks: int = 2
    seq: int = 64
    dtype: Any = jnp.bfloat16  # of what linear layers read
    axis: str = ""  # of the context's mesh, over which batches and experts are spread

    def linears(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Module kind and weight shape of every quantized layer."""
        w, h, e = self.width, self.hidden, self.experts
        block = {
            "qkv": ("linear", (3 * w, w)),
            "proj": ("linear", (w, w)),
            "moe.gate_up": ("grouped_linear", (e, 2 * h, w)),
            "moe.down": ("grouped_linear", (e, w, h)),
            "moe.shared_gate_up": ("linear", (2 * h, w)),
            "moe.shared_down": ("linear", (w, h)),
        }
        return {f"blocks.{i}.{name}": kind for i in range(self.blocks) for name, kind in block.items()}


class Kept(NamedTuple):
    """The quantizers' states by layer: delayed scales, and random states of stochastic rounding."""

    states: dict[str, dict[str, dj.ScaleState]]
    rngs: dict[str, Array]


def kept_by(recipe: Recipe | None, config: Config) -> Kept:
    if recipe is None:
        return Kept({}, {})
    layers = {name: kind for name, (kind, _) in config.linears().items()}
    states = {name: dj.init_state(recipe, module=kind) for name, kind in layers.items()}
    random = {name: i for i, (name, kind) in enumerate(layers.items()) if linear_plan(recipe, kind).needs_rng}
    return Kept(states, {name: dj.rng_state(0, i << 40) for name, i in random.items()})  # stretches of one stream


def init(config: Config, key: Array) -> Params:
    params = {"norm.weight": jnp.ones(config.width)}
    shapes = {name + ".weight": shape for name, (_, shape) in config.linears().items()}
    shapes |= {f"blocks.{i}.moe.router.gate.weight": (config.experts, config.width) for i in range(config.blocks)}
    shapes |= {"head.weight": (256, config.width)}
    for i in range(config.blocks):
        params |= {f"blocks.{i}.{norm}.weight": jnp.ones(config.width) for norm in ("norm1", "norm2")}
    tables = {"embed.weight": (256, config.width), "position.weight": (config.seq, config.width)}
    for (name, shape), k in zip((shapes | tables).items(), jax.random.split(key, len(shapes | tables)), strict=True):
        bound = 1 / shape[-1] ** 0.5
        params[name] = (
            jax.random.normal(k, shape) if name in tables else jax.random.uniform(k, shape, None, -bound, bound)
        )
    return params


def rms_norm(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + jnp.finfo(x.dtype).eps) * weight


def swiglu(x: Array) -> Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(a) * b


def router(config: Config, gate: Array, x: Array) -> tuple[Array, Array, Array]:
    """Returns each token's experts [T, k], their probabilities [T, k], and the load-balancing loss."""
    probs = jax.nn.softmax(x.astype(jnp.float32) @ gate.T)
    top, experts = jax.lax.top_k(probs, config.top_k)
    used = (experts[..., None] == jnp.arange(config.experts)).mean((0, 1))
    balance = config.experts * (used * probs.mean(0)).sum()  # 1 where all are used alike
    return experts, top / top.sum(-1, keepdims=True), balance


class Model(NamedTuple):
    config: Config
    recipe: Recipe | None
    params: Params
    kept: Kept

    def linear(self, name: str, x: Array, **groups: Any) -> Array:
        layer = dj.grouped_dense if groups else dj.dense
        given = {"recipe": self.recipe, "state": self.kept.states.get(name), "rng": self.kept.rngs.get(name)}
        return layer(x, self.params[f"{name}.weight"], **given, **groups)

    def moe(self, name: str, x: Array) -> tuple[Array, Array]:
        """y = shared(x) + sum of p_e * expert_e(x) over each token's experts; SwiGLU inside of both. x: [T, width]."""
        config = self.config
        ids, probs, balance = router(config, self.params[f"{name}.router.gate.weight"], x)
        x = x.astype(config.dtype)
        own = {part: f"{name}.{part}" for part in ("gate_up", "down")}
        weights = {f"{part}.weight": self.params[f"{full}.weight"] for part, full in own.items()}
        states = {part: self.kept.states[full] for part, full in own.items() if full in self.kept.states}
        rngs = {part: self.kept.rngs[full] for part, full in own.items() if full in self.kept.rngs}
        kept = Kept(states, rngs)
        if config.axis:
            routed, _ = dj.expert_parallel(
                self.experts, weights, x, ids, probs, num_experts=config.experts, axis=config.axis, align=config.align,
                shared=kept,
            )  # fmt: skip
        else:
            rows = dj.moe_map(ids, config.experts, map_type="index", align_size=config.align)
            routed = dj.moe_unpermute(self.experts(weights, x, rows, kept), rows, probs)
        shared = self.linear(f"{name}.shared_down", swiglu(self.linear(f"{name}.shared_gate_up", x)))
        return routed + shared, balance

    def experts(self, params: Params, x: Array, rows: dj.RowMap, kept: Kept) -> Array:
        """Returns the experts' results for their rows of x, in the map's order."""
        experts = self._replace(params=params, kept=kept)
        options = {"align": self.config.align, "row_axes": self.config.axis or ()}
        hidden = swiglu(experts.linear("gate_up", x, row_map=rows, **options))
        return experts.linear("down", hidden, offsets=rows.expert_offsets, **options)

    def attention(self, name: str, x: Array) -> Array:
        batch, seq, width = x.shape
        qkv = self.linear(f"{name}.qkv", x.astype(self.config.dtype))
        q, k, v = jnp.moveaxis(qkv.reshape(batch, seq, 3, self.config.heads, -1), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.linear(f"{name}.proj", y.reshape(batch, seq, width))

    def block(self, name: str, x: Array) -> tuple[Array, Array]:
        x = x + self.attention(name, rms_norm(x, self.params[f"{name}.norm1.weight"]))
        y, balance = self.moe(f"{name}.moe", rms_norm(x, self.params[f"{name}.norm2.weight"]).reshape(-1, x.shape[-1]))
        return x + y.reshape(x.shape), balance

    def logits(self, tokens: Array) -> tuple[Array, Array]:
        """Logits [B, S, 256] of bytes [B, S], and the mean load-balancing loss of the blocks."""
        p, blocks = self.params, self.config.blocks
        x, balance = p["embed.weight"][tokens] + p["position.weight"][: tokens.shape[1]], jnp.zeros(())
        for i in range(blocks):
            x, uneven = self.block(f"blocks.{i}", x)
            balance = balance + uneven / blocks
        return rms_norm(x, p["norm.weight"]) @ p["head.weight"].T, balance


def loss_of(params: Params, states: Any, rngs: Any, tokens: Array, config: Config, recipe: Recipe | None) -> Any:
    """Returns the training loss, and the cross entropy per byte, which does not contain the load-balancing loss."""
    logits, balance = Model(config, recipe, params, Kept(states, rngs)).logits(tokens[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss + config.balance * balance, loss


optimizer = optax.adamw(3e-3, weight_decay=1e-2)


@functools.partial(jax.jit, static_argnames=("config", "recipe"), donate_argnums=(0, 1, 2))
def train_step(params: Params, kept: Kept, opt_state: Any, tokens: Array, *, config: Config, recipe: Recipe | None):
    states = dj.update_state(kept.states, recipe)  # once a step
    grad = dj.value_and_grad_with_state(loss_of, has_aux=True)
    (_, loss), grads, states = grad(params, states, kept.rngs, tokens, config, recipe)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    rngs = {name: dj.rng_at(rng, dj.OFFSETS) for name, rng in kept.rngs.items()}
    return optax.apply_updates(params, updates), Kept(states, rngs), opt_state, loss


def batches(config: Config, batch: int, path: Path = Path(__file__)) -> Iterator[np.ndarray]:
    """Yields random batches of a file's bytes, without end."""
    text, rng = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32), np.random.default_rng(1)
    while True:
        starts = rng.integers(len(text) - config.seq - 1, size=(batch, 1))
        yield text[starts + np.arange(config.seq + 1)]


def train(
    recipe: Recipe | None,
    steps: int,
    *,
    batch: int = 4,
    device: str = "cpu",
    config: Config | None = None,
    params: Mapping[str, Any] | None = None,
    path: Path = Path(__file__),
    devices: int = 1,
) -> list[float]:
    """Returns the loss of each step. `recipe`: None is high precision. `params`: initial ones; None draws them.
    `devices`: over which batches and experts are spread."""
    if config is None:
        config = Config(dtype=jnp.float32) if recipe is None else Config(align=row_align(recipe))
    losses: list[float] = []
    mesh = jax.make_mesh((devices,), ("d",), (AxisType.Auto,), devices=jax.devices(device)[:devices])
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
    config = dataclasses.replace(config, axis="d" if devices > 1 else "")
    with jax.default_device(jax.devices(device)[0]), jax.set_mesh(mesh):
        given = init(config, jax.random.key(0)) if params is None else {k: jnp.array(v) for k, v in params.items()}
        spread = {name for name, (kind, _) in config.linears().items() if kind == "grouped_linear"}
        shardings = {name: cut if name.removesuffix(".weight") in spread else whole for name in given}
        given = jax.device_put(given, shardings)
        state = given, kept_by(recipe, config), optimizer.init(given)
        for tokens, _ in zip(batches(config, batch, path), range(steps), strict=False):
            tokens = jax.device_put(tokens, cut)
            *state, loss = train_step(*state, tokens, config=config, recipe=recipe)
            losses.append(float(loss))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mxfp8", choices=(*RECIPES, "none"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)
    losses = train(RECIPES.get(args.recipe), args.steps, device=args.device, devices=args.devices)
    for i, loss in enumerate(losses):
        if i % 5 == 0 or i == len(losses) - 1:
            print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
