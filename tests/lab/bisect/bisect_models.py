"""One small transformer in PyTorch, linen, nnx and equinox, right and with faults, as factories: `torch_scale`, ..."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from torch import nn

WIDTH, HEADS, BLOCKS, TOKENS, LENGTH, BATCH = 8, 2, 2, 11, 6, 3
FAULTS = {
    "epsilon": ("h/1/ln", True), "gelu": ("h/1/act", True), "scale": ("h/1/attn/o", False),
    "mask": ("h/1/attn/o", False), "heads": ("h/1/attn/o", False), "bias": ("h/1/fc", True),
    "transposed": ("h/1/attn/v", True), "residual": ("h/1", True),
}  # fmt: skip
"""Faults of the last block: the site that makes a difference, and whether its module does."""


def weights() -> dict[str, np.ndarray]:
    """By the names that PyTorch gives them."""
    rng = np.random.default_rng(0)
    found = {"embed.weight": rng.standard_normal((TOKENS, WIDTH))}
    linears = {f"h.{i}.{name}": (4 * WIDTH if name == "fc" else WIDTH, 4 * WIDTH if name == "proj" else WIDTH)
               for i in range(BLOCKS) for name in ("attn.q", "attn.k", "attn.v", "attn.o", "fc", "proj")}  # fmt: skip
    for name, (out, given) in (linears | {"head": (TOKENS, WIDTH)}).items():
        found[f"{name}.weight"] = rng.standard_normal((out, given)) / math.sqrt(given)
        found[f"{name}.bias"] = rng.standard_normal(out) / 10
    for i in range(BLOCKS):
        found[f"h.{i}.ln.weight"] = 1 + rng.standard_normal(WIDTH) / 10
        found[f"h.{i}.ln.bias"] = rng.standard_normal(WIDTH) / 10
    return {name: x.astype(np.float32) for name, x in found.items()}


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, TOKENS, (BATCH, LENGTH))


def _mixed(q, k, v, fault, xp, softmax):
    """Attention without its products, over [..., length, width]."""
    size = WIDTH // HEADS

    def split(x, wrong=False):
        if wrong:
            return xp.moveaxis(x.reshape(*x.shape[:-1], size, HEADS), -1, -3)
        return xp.moveaxis(x.reshape(*x.shape[:-1], HEADS, size), -2, -3)

    q, k, v = split(q, fault == "heads"), split(k), split(v)
    scores = q @ xp.swapaxes(k, -1, -2) / (1 if fault == "scale" else math.sqrt(size))
    after = xp.triu(xp.ones((LENGTH, LENGTH)), 2 if fault == "mask" else 1) > 0
    scores = xp.where(after, -math.inf, scores)
    mixed = xp.moveaxis(softmax(scores) @ v, -3, -2)
    return mixed.reshape(*mixed.shape[:-2], WIDTH)


# --- PyTorch ---


class Attention(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fault = fault

    def forward(self, x):
        softmax = functools.partial(torch.softmax, dim=-1)
        return self.o(_mixed(self.q(x), self.k(x), self.v(x), self.fault, torch, softmax))


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH, eps=1e-4 if fault == "epsilon" else 1e-5)
        self.attn = Attention(fault)
        self.fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH, bias=fault != "bias"), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.GELU("tanh" if fault == "gelu" else "none")
        self.fault = fault

    def forward(self, x, *, factor=1.0):
        x = x + factor * self.attn(self.ln(x))
        x = x + self.proj(self.act(self.fc(x)))
        return 2 * x if self.fault == "residual" else x


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.h = nn.ModuleList([Block(fault if i == BLOCKS - 1 else "") for i in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, TOKENS)
        self.fault = fault

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, block in enumerate(self.h):
            x = block(x + x.flip(-1) if self.fault == "between" and i == BLOCKS - 1 else x, factor=1.0)
        return {"logits": self.head(x)}


def _torch(fault="", dtype=torch.float32):
    model = Model(fault)
    given = {name: torch.from_numpy(x) for name, x in weights().items()}
    if fault == "transposed":
        given["h.1.attn.v.weight"] = given["h.1.attn.v.weight"].T
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(given[name])
    return model.to(dtype)


# --- linen ---


class LinenAttention(linen.Module):
    fault: str

    @linen.compact
    def __call__(self, x):
        q, k, v = (linen.Dense(WIDTH, name=name)(x) for name in "qkv")
        return linen.Dense(WIDTH, name="o")(_mixed(q, k, v, self.fault, jnp, jax.nn.softmax))


class LinenBlock(linen.Module):
    fault: str = ""

    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm(1e-4 if self.fault == "epsilon" else 1e-5, name="ln")(x)
        x = x + LinenAttention(self.fault, name="attn")(y)
        y = linen.Dense(4 * WIDTH, use_bias=self.fault != "bias", name="fc")(x)
        x = x + linen.Dense(WIDTH, name="proj")(linen.gelu(y, approximate=self.fault == "gelu"))
        return 2 * x if self.fault == "residual" else x


class LinenModel(linen.Module):
    fault: str
    scanned: bool = False

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(TOKENS, WIDTH, name="embed")(tokens)
        if self.scanned:
            stack = linen.scan(_Scanned, variable_axes={"params": 0}, split_rngs={"params": True}, length=BLOCKS)
            x, _ = stack(self.fault, name="h")(x, None)
        else:
            for i in range(BLOCKS):
                x = LinenBlock(self.fault if i == BLOCKS - 1 else "", name=f"h_{i}")(x)
        return linen.Dense(TOKENS, name="head")(x)


class _Scanned(linen.Module):
    fault: str

    @linen.compact
    def __call__(self, x, _):
        return LinenBlock(self.fault, name="block")(x), None


_LEAVES = {"embed": "embedding", "ln": "scale"}


def _linen_variables(fault):
    params: dict = {}
    for name, x in weights().items():
        *path, leaf = name.split(".")
        path = [f"h_{path[1]}", *path[2:]] if path[0] == "h" else path
        node = params
        for part in path:
            node = node.setdefault(part, {})
        if leaf == "weight":
            leaf = _LEAVES.get(path[-1], "kernel")
            turned = leaf == "kernel" and not (fault == "transposed" and name == "h.1.attn.v.weight")
            x = x.T if turned else x
        node[leaf] = jnp.asarray(x)
    if fault == "bias":
        del params["h_1"]["fc"]["bias"]
    return {"params": params}


def _linen(fault=""):
    return functools.partial(LinenModel(fault).apply, _linen_variables(fault))


def _scanned(fault=""):
    params = dict(_linen_variables("")["params"])
    blocks = [params.pop(f"h_{i}") for i in range(BLOCKS)]
    if fault == "iteration":
        blocks[1]["fc"]["bias"] = blocks[1]["fc"]["bias"] * 1.01
    params["h"] = {"block": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}
    return functools.partial(LinenModel("", True).apply, {"params": params})


# --- nnx and equinox: what stands before the first product ---


class NnxMlp(nnx.Module):
    def __init__(self, fault):
        rngs = nnx.Rngs(0)
        self.ln = nnx.LayerNorm(WIDTH, epsilon=1e-4 if fault == "epsilon" else 1e-5, rngs=rngs)
        self.fc, self.proj = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        for name in ("fc", "proj"):
            getattr(self, name).kernel[...] = jnp.asarray(weights()[f"h.0.{name}.weight"].T)
            getattr(self, name).bias[...] = jnp.asarray(weights()[f"h.0.{name}.bias"])

    def __call__(self, x):
        return self.proj(nnx.gelu(self.fc(self.ln(x)), approximate=False))


class NnxNamed(NnxMlp):
    def __call__(self, model):
        return super().__call__(model)


class EquinoxMlp(equinox.Module):
    ln: equinox.nn.LayerNorm
    fc: equinox.nn.Linear
    proj: equinox.nn.Linear

    def __call__(self, x):
        return self.proj(jax.nn.gelu(self.fc(self.ln(x)), approximate=False))


class TorchMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.fc, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        with torch.no_grad():
            for name in ("fc", "proj"):
                for leaf in ("weight", "bias"):
                    getattr(getattr(self, name), leaf).copy_(torch.from_numpy(weights()[f"h.0.{name}.{leaf}"]))

    def forward(self, x):
        return self.proj(torch.nn.functional.gelu(self.fc(self.ln(x))))


def _equinox(fault=""):
    key = jax.random.key(0)
    model = EquinoxMlp(
        equinox.nn.LayerNorm(WIDTH, eps=1e-4 if fault == "epsilon" else 1e-5),
        equinox.nn.Linear(WIDTH, 4 * WIDTH, key=key),
        equinox.nn.Linear(4 * WIDTH, WIDTH, key=key),
    )
    for name in ("fc", "proj"):
        where = lambda m, name=name: (getattr(m, name).weight, getattr(m, name).bias)  # noqa: E731
        given = tuple(jnp.asarray(weights()[f"h.0.{name}.{leaf}"]) for leaf in ("weight", "bias"))
        model = equinox.tree_at(where, model, given)
    return model


class Mapped(equinox.Module):
    """Its model is given one row at a time."""

    mlp: EquinoxMlp

    def __call__(self, x):
        return jax.vmap(self.mlp)(x)


def rows() -> np.ndarray:
    return (np.random.default_rng(2).standard_normal((5, WIDTH)) * 3).astype(np.float32)


def equinox_right():
    return Mapped(_equinox())


def equinox_epsilon():
    return Mapped(_equinox("epsilon"))


def nnx_right():
    return NnxMlp("")


def nnx_epsilon():
    return NnxMlp("epsilon")


def nnx_named():
    return NnxNamed("")


torch_mlp = TorchMlp
torch_right, linen_right, scanned_right, scanned_iteration = _torch, _linen, _scanned, lambda: _scanned("iteration")
torch_between = functools.partial(_torch, "between")
torch_bfloat16 = functools.partial(_torch, dtype=torch.bfloat16)
for _fault in FAULTS:
    globals()[f"torch_{_fault}"] = functools.partial(_torch, _fault)
    globals()[f"linen_{_fault}"] = functools.partial(_linen, _fault)


# --- other modules of PyTorch ---


@dataclasses.dataclass
class Keyed:
    keys: torch.Tensor


class Logarithm(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return {"values": Keyed(self.factor * torch.log(x))}  # NaN of negative elements


class Odd(nn.Module):
    """A module whose name and output must be quoted in a script."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.parts = nn.ModuleDict({'a"b{c}\\N': Logarithm(factor)})

    def forward(self, x):
        return self.parts['a"b{c}\\N'](x)["values"].keys.nan_to_num(0)


class Skipping(nn.Module):
    """A model that leaves out its last module in one forward pass. Its counter of passes is an iterator, which a
    bisection does not set back between passes, as it does with buffers and numbers."""

    def __init__(self, skipped=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.skipped = nn.Linear(WIDTH, 4), nn.Linear(4, 4), skipped
        self.passes = itertools.count()

    def forward(self, x):
        x = self.first(x)
        return x if next(self.passes) == self.skipped else self.last(x)


def random(active=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(), nn.Linear(4, 4)).train(active)


def masked(norm_first=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=not norm_first).eval()


class Queue(nn.Module):
    """A model whose forward pass writes to a buffer that the next forward pass adds to its output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, 4)
        self.register_buffer("queue", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        out = y + self.queue
        self.queue.copy_(y.detach().mean(0))
        return out


class Packed(nn.Module):
    def __init__(self, moved=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.lstm = nn.Linear(WIDTH, 4), nn.LSTM(4, 3, batch_first=True)
        self.lstm.weight_hh_l0.data += moved

    def forward(self, x):
        lengths = torch.tensor([3, 2])
        packed = nn.utils.rnn.pack_padded_sequence(self.linear(x[:, None].repeat(1, 3, 1)), lengths, batch_first=True)
        return self.lstm(packed)[0].data


packed_moved = functools.partial(Packed, 0.1)
odd_right, odd_wrong = Odd, functools.partial(Odd, 1.01)
skipping_fed, skipping_moved = functools.partial(Skipping, 1), functools.partial(Skipping, 2)
random_off = functools.partial(random, False)


# --- what cannot be bisected ---


def without_modules():
    return lambda x: x + 1


def conditional():
    model = _linen()
    return lambda tokens: jax.lax.cond(tokens.sum() > 0, model, model, tokens)


number = 3


def failing():
    raise RuntimeError("no weights here")


def exits():
    sys.exit(0)


class Exits(nn.Module):
    def forward(self, x):
        sys.exit(0)


def returns_number():
    return 3
