"""Models for tests of captures, and what plain hooks see of them."""

import dataclasses
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from diptych.lab.traces import Trace, statistics_of
from oracle.hash import hash_bits


@dataclasses.dataclass
class Output(OrderedDict):
    """A result like those of transformers: fields that are also items, known to pytree without names."""

    logits: torch.Tensor | None = None
    states: tuple | None = None
    length: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))


pytree.register_pytree_node(
    Output, lambda o: (list(o.values()), list(o)), lambda values, keys: Output(**dict(zip(keys, values, strict=True)))
)


@dataclasses.dataclass
class Pair:
    """A result that pytree does not know."""

    left: torch.Tensor
    right: torch.Tensor


class Split(nn.Module):
    def forward(self, x):
        return Pair(*x.chunk(2, -1))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Linear(2 * width, width), nn.Dropout(0.0))

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """A small language model. Its last block runs twice; the head has the embedding's weight."""

    def __init__(self, width=8, vocab=11):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.split = Split()
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        halves = self.split(x)
        x = torch.cat([halves.right, halves.left], -1)
        return Output(logits=self.head(x), states=(x, tokens), length=tokens.shape[-1])


def model_and_step(make=Model):
    """Returns a model and a function of the callable that runs it: forward, loss and backward."""
    torch.manual_seed(1)
    model = make()
    tokens = torch.randint(0, 11, (2, 6))

    def step(run=model):
        loss = F.cross_entropy(run(tokens).logits.flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        return loss

    return model, step


class Plain:
    """Copies of a step's outputs and gradients in the order of computation, by plain hooks of eager modules."""

    def __init__(self, model):
        self.values, self.calls = {}, {}
        for name, module in model.named_modules():
            module.register_forward_hook(lambda m, i, o, name=name: self._output(name, o))
        self.values |= {f"parameter:{n}": p.detach().clone() for n, p in model.named_parameters()}

    def _output(self, name, output):
        found = {"": output}
        if isinstance(output, Output):
            found = {'["logits"]': output.logits, '["states"][0]': output.states[0], '["states"][1]': output.states[1]}
        elif isinstance(output, Pair):
            found = {'["left"]': output.left, '["right"]': output.right}
        for place, x in found.items():
            key = f"activation:{name or '(model)'}{place}"
            call = self.calls[key] = self.calls.get(key, -1) + 1
            key += f"#{call}" if call else ""
            self.values[key] = x.detach().clone()
            if x.requires_grad:
                x.register_hook(lambda g, key=key: self._gradient(key.replace(":", "_grad:", 1), g))

    def _gradient(self, key, gradient):
        self.values[key] = gradient.clone()


def observed(folder, step=0, rank=0):
    """The observations of a step by key, in order."""
    return {o.site.key: o for o in Trace.open(folder).ranks[rank].step(step)}


def hashes(folder, step=0, rank=0):
    return {key: o.record.hash for key, o in observed(folder, step, rank).items()}


def assert_is_of(observation, x):
    """Asserts that hash and statistics are those of a tensor."""
    array = x.detach().view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.detach().numpy()
    bits = array.view(f"u{array.itemsize}")
    assert observation.record.hash == hash_bits(bits).astype("<i4").tobytes().hex(), observation.site
    name = str(x.dtype).removeprefix("torch.")
    assert (observation.site.shape, observation.site.dtype) == (tuple(x.shape), name)
    want, have = statistics_of(bits, name), observation.record.statistics
    for field in ("amax", "mean", "rms", "zero", "nan", "inf", "subnormal"):
        scale = 1e-6 * (want.amax or 0)
        np.testing.assert_allclose(getattr(have, field), getattr(want, field), rtol=1e-5, atol=scale, err_msg=field)
