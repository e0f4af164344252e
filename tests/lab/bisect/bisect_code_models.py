"""Models that differ in the code between modules, in arguments of any structure, or in what no trace can hold."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
from bisect_models import WIDTH, rows
from flax import linen, struct
from torch import nn


class SelfAttention(nn.Module):
    """A model that gives `MultiheadAttention` one tensor as its three arguments, which the module tests for."""

    def __init__(self, heads, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.att = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, heads, batch_first=True)
        self.factor = factor

    def forward(self, x):
        x = self.first(x) * self.factor
        return self.att(x, x, x)[0]


class Shared(nn.Module):
    """Returns whether its arguments are one tensor."""

    def forward(self, a, b):
        return (a * (2 if a is b else 3), b)


class Sharing(nn.Module):
    def __init__(self, factor=1.0, copied=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(WIDTH, 4), Shared()
        self.factor, self.copied = factor, copied

    def forward(self, x):
        x = self.first(x) * self.factor
        return self.shared(x, x.clone() if self.copied else x)[0]


class Between(nn.Module):
    """The code between two modules, a product with a number, is no operation of the table."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.factor = nn.Linear(WIDTH, 4), nn.Linear(4, 4), factor

    def forward(self, x):
        return torch.softmax(self.head(self.first(x) * self.factor), -1)


class Transformed(nn.Module):
    """A model with a module that returns complex numbers. Traces have no dtype for these."""

    def __init__(self, bias=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(5, 3, dtype=torch.complex64)
        self.last = nn.Linear(3, 2)
        with torch.no_grad():
            self.mix.bias += bias

    def forward(self, x):
        return self.last(self.mix(torch.fft.rfft(self.first(x))).abs())


class LinenTransformed(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH, name="first")(x)
        return linen.Dense(2, name="last")(jnp.abs(linen.Dense(3, name="mix", dtype=jnp.complex64)(jnp.fft.rfft(x))))


def linen_transformed():
    model = LinenTransformed()
    return functools.partial(model.apply, model.init(jax.random.key(0), rows()))


class Cell(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.ih, self.hh, self.order = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False), order

    def forward(self, x, state, *, gated=True):
        gates = dict(zip(self.order, (self.ih(x) + self.hh(state["h"])).chunk(4, -1), strict=True))
        c = torch.sigmoid(gates["f"]) * state["c"] + torch.sigmoid(gates["i"]) * torch.tanh(gates["g"])
        return {"h": torch.sigmoid(gates["o"]) * torch.tanh(c) if gated else torch.tanh(c), "c": c}


class Steps(nn.Module):
    def __init__(self, order, gated, mask):
        super().__init__()
        self.cell, self.gated, self.mask = Cell(order), gated, mask

    def forward(self, xs, *, state, trail):
        for i, x in enumerate(xs):
            state = self.cell(x if self.mask != i else 0 * x, state, gated=self.gated)
            trail.append(state["h"])


class Recurrent(nn.Module):
    """A child called "model" gets a tuple, a dict, and a list to which it adds what follows reads."""

    def __init__(self, order="ifgo", gated=True, mask=None):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.out = Steps(order, gated, mask), nn.Linear(WIDTH, 3)

    def forward(self, x):
        state, trail = {"h": 1 + x[0], "c": x[1]}, []
        self.model((x[2], x[3]), state=state, trail=trail)
        return self.out(trail[-1])


class Masked(nn.Module):
    """The mask is an input of one model's module alone."""

    def forward(self, x, mask=None):
        return x.softmax(-1) if mask is None else (x * mask).softmax(-1)


class Masking(nn.Module):
    def __init__(self, factor=None):
        super().__init__()
        self.masked, self.factor = Masked(), factor

    def forward(self, x):
        return self.masked(x, *(() if self.factor is None else (self.factor * torch.ones(WIDTH),)))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Batch:
    pair: Pair
    size: int = 0


class Batched(nn.Module):
    def forward(self, batch):
        return batch.pair.x * batch.pair.y


class Batching(nn.Module):
    """Arrays are in fields of an argument."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.batched, self.factor = Batched(), factor

    def forward(self, x):
        return self.batched(Batch(Pair(x, self.factor * x.abs())))


@struct.dataclass
class LinenPair:
    x: jax.Array
    y: jax.Array


class LinenBatched(linen.Module):
    @linen.compact
    def __call__(self, z, pair):
        return z + pair.x * pair.y


class LinenBatching(linen.Module):
    factor: float = 1.0

    @linen.compact
    def __call__(self, x):
        return LinenBatched(name="batched")(x, LinenPair(x, self.factor * jnp.abs(x)))


def linen_batching(factor=1.0):
    return functools.partial(LinenBatching(factor).apply, {})


class Table(nn.Module):
    """Is given no array."""

    def __init__(self, first, inside):
        super().__init__()
        self.rows, self.first = nn.Embedding(9, WIDTH), first
        self.weight = None if inside else nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, count):
        at = torch.arange(count) + self.first
        return self.rows(at) if self.weight is None else self.weight[at]


class Positions(nn.Module):
    def __init__(self, first=0, inside=False, more=0):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.more = Table(first, inside), nn.Linear(WIDTH, 2), more

    def forward(self, x):
        return self.head(x + self.table(len(x) + self.more)[: len(x)])


def two_models(factor=1.0):
    """A function that runs two models, neither of which is the whole."""
    dense, norm = linen.Dense(WIDTH), linen.LayerNorm()
    variables = dense.init(jax.random.key(0), rows()), norm.init(jax.random.key(0), rows())
    return lambda x: norm.apply(variables[1], 1 + factor * jnp.abs(dense.apply(variables[0], x)) ** 3)


two_models_wrong = functools.partial(two_models, 0.01)
positions_right, positions_wrong = Positions, functools.partial(Positions, 1)
positions_inside, positions_more = functools.partial(Positions, 0, True), functools.partial(Positions, more=1)
positions_inside_wrong = functools.partial(Positions, 1, True)
linen_batching_wrong = functools.partial(linen_batching, 2.0)
batching_right, batching_wrong = Batching, functools.partial(Batching, 2.0)
attention_right, attention_heads = functools.partial(SelfAttention, 2), functools.partial(SelfAttention, 4)
attention_between = functools.partial(SelfAttention, 4, 1.5)
sharing_right, sharing_between = Sharing, functools.partial(Sharing, 1.5)
sharing_copied = functools.partial(Sharing, copied=True)
between_right, between_wrong = Between, functools.partial(Between, 1.5)
transformed_right, transformed_wrong = Transformed, functools.partial(Transformed, 1.0)
recurrent_right, recurrent_order = Recurrent, functools.partial(Recurrent, "igfo")
recurrent_gate, recurrent_second = functools.partial(Recurrent, gated=False), functools.partial(Recurrent, mask=1)
masking_right, masking_wrong, masking_ones = Masking, functools.partial(Masking, 2.0), functools.partial(Masking, 1.0)
