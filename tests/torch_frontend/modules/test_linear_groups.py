"""Data parallel training: two gloo processes against one with all of the batch."""

from __future__ import annotations

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from torch_frontend import layer_cases as layers
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import normal, same

pytestmark = needs_gloo
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4, amax_group="data"),
    "current": Float8CurrentScaling(amax_group="data"),
    "nvfp4": NVFP4BlockScaling(amax_group="data", disable_stochastic_rounding=True),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "compiled current": Float8CurrentScaling(amax_group="data"),
    "delayed, the region's group": DelayedScaling(amax_history_len=4),
}
# Delayed states that exist before the model is wrapped, and whether DDP sends buffers from rank 0.
EARLY = {"early": False, "early, buffers sent": True, "late, buffers sent": True}
RECIPES |= dict.fromkeys(EARLY, RECIPES["delayed"])


def model(name: str = "") -> torch.nn.Sequential:
    """Its activations have few significant bits, so that sums over the batch are exact in any order."""
    net = torch.nn.Sequential(layers.layer(96, 96, name="a", bias=False), layers.layer(96, 64, name="b", bias=False))
    if name.startswith("early"):
        layers.run(net, net, normal("early", (256, 96)), RECIPES[name].replace(amax_group=""), normal("dy", (256, 64)))
    elif name.startswith("late"):
        net.register_buffer("sent", torch.ones(1))  # a model without buffers sends none, states made later neither
    net.zero_grad()
    return net


def train(net, recipe, rank: int, world: int, groups, compiled: bool = False):
    """Three steps on this rank's rows; returns each step's outputs and the state that it ends in."""
    dtype = layers.dtype_of(recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6 * world)  # DDP averages over ranks
    fn = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    outs = []
    for i in range(3):
        rows = slice(rank * 256 // world, (rank + 1) * 256 // world)
        x = (normal(f"x{i}", (256, 96), dtype) * 2**i)[rows]
        dy = normal(f"dy{i}", (256, 64), dtype)[rows]
        optimizer.zero_grad()
        region = (
            {"amax_groups": groups} if recipe.amax_group or groups is None else {"amax_reduction_group": groups["data"]}
        )
        with dt.autocast(recipe=recipe, **region):
            y = fn(x)
        (y * dy).sum().backward()
        optimizer.step()
        outs.append(y.detach())
    return outs, {k: v.detach() for k, v in net.state_dict().items()}


def on_rank(rank, groups):
    """Returns the final results of training on one of two ranks."""
    made = {}
    for name, recipe in RECIPES.items():
        torch._dynamo.reset()
        if "compiled" in name:
            outs, state = train(model(), recipe, rank, 2, groups, compiled=True)
        else:
            net = torch.nn.parallel.DistributedDataParallel(model(name), broadcast_buffers=EARLY.get(name, True))
            outs, state = train(net, recipe, rank, 2, groups)
        made[name] = outs, {k.removeprefix("module."): v for k, v in state.items()}
    made["held"] = train_held(rank)
    return made


def train_held(rank: int) -> list[dict[str, torch.Tensor]]:
    """The weights of a model that holds them, before it is wrapped, after, and after two steps."""
    with dt.quantized_model_init(recipe=RECIPES["mxfp8"]):
        net = torch.nn.Sequential(dt.Linear(96, 96), dt.Linear(96, 64, bias=False))
    with torch.no_grad():
        for i, layer in enumerate(net):
            layer.weight.copy_(normal(f"held {rank} {i}", tuple(layer.weight.shape)))  # ranks begin unlike

    def now() -> dict[str, torch.Tensor]:
        values = {f"values {i}": layer.weight.dequantize().detach() for i, layer in enumerate(net)}
        return values | {k: t.clone() for k, t in dt.plain_state_dict(net).items()}

    seen = [now()]
    wrapped = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for i in range(3):
        seen.append(now())
        with dt.autocast(recipe=RECIPES["mxfp8"]):
            wrapped(normal(f"x {rank} {i}", (32, 96))).square().mean().backward()
        optimizer.step()
    return seen


@pytest.mark.parametrize("name", [n for n in RECIPES if "compiled" not in n])
def test_two_processes_train_as_one(name, ranks):
    """Both ranks hold the same weights and states in bits; against one process, as close as float32 sums are."""
    (outs0, state0), (outs1, state1) = (r[name] for r in ranks)
    outs, state = train(model(name), RECIPES[name].replace(amax_group=""), 0, 1, None)
    for key, t in state.items():
        if "amax_history" in key:  # each rank's pending amax is its own; the largest is the whole batch's
            first = torch.maximum(state0[key][:1], state1[key][:1])
            state0[key][:1] = state1[key][:1] = first
        same(state0[key], state1[key], key)
        if "scale_states" in key and "input" in key and key.startswith("0."):
            same(state0[key], t, key)
    same(torch.cat([outs0[0], outs1[0]]), outs[0])  # the first forward: same weights, same amaxes, same bits
    for key in ("0.weight", "1.weight"):
        moved = (state[key] - dict(model().state_dict())[key]).norm()
        difference = (state0[key] - state[key]).norm()
        assert moved > 0 and difference < 2e-2 * moved, (float(difference), float(moved))


def test_without_a_group_ranks_scale_alone(ranks):
    """The reduction is what makes the first forward agree: without it, this rank's own amax counts."""
    x = normal("x0", (256, 96))
    halves = []
    for rows in (slice(0, 128), slice(128, 256)):
        with dt.autocast(recipe=Float8CurrentScaling()):
            halves.append(model()(x[rows]).detach())
    outs = [r["current"][0][0] for r in ranks]
    assert not all(torch.equal(a, b) for a, b in zip(halves, outs, strict=True))


def test_the_reduction_compiles(ranks):
    for r in ranks:
        same(r["compiled current"][0][0], r["current"][0][0])


def test_held_weights_are_sent_from_rank_0_and_step_alike(ranks):
    (before0, *after0), (before1, *after1) = (r["held"] for r in ranks)
    assert before0.keys() == before1.keys() == after0[0].keys()
    for key in before0:
        for a, b in zip(after0, after1, strict=True):
            same(a[key], b[key], key)
    for key in ("values 0", "values 1"):
        same(after0[0][key], before0[key], key)
        assert not torch.equal(before0[key], before1[key]) and not torch.equal(after0[2][key], after0[0][key])


def test_a_region_that_does_not_name_the_group():
    layer, x = layers.layer(), normal("x", (4, 96))
    for name in ("current", "delayed"):
        with (
            dt.autocast(recipe=RECIPES[name]),
            pytest.raises(ValueError, match="names no such group"),
        ):
            layer(x)
