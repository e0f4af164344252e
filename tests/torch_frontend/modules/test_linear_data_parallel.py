"""DistributedDataParallel on two ranks, against one process that runs each rank's batches and adds their gradients in
rank order: the same bits of outputs, gradients, weights and states."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from sweeps import others_slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diptych.torch as dt
from oracle.parallel import sum_gradients
from torch_frontend.layer_cases import NAMED
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import normal, to_numpy, to_torch

pytestmark = [needs_gloo, pytest.mark.sampled]
RANKS, STEPS, D = 2, 3, 128
COMPILED = ("eager", "compiled", "compiled around")  # the model, or the wrapper around it
WAYS = ("plain", "two microbatches", "held")
CASES = [", ".join(case) for case in itertools.product(NAMED, COMPILED, WAYS)]
# All eager ones, and compiled: each recipe once, and each way in both places.
NOW = [case for case in CASES if ", eager," in case] + [
    f"{name}, {how}, {way}" for name, (how, way) in zip(NAMED, itertools.product(COMPILED[1:], WAYS), strict=True)
]


def model(name: str, way: str, rank: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    with dt.quantized_model_init(enabled=way == "held", recipe=NAMED[name]):
        net = nn.Sequential(
            dt.LayerNormMLP(D, D, dtype=torch.bfloat16, normalization="RMSNorm", activation="swiglu", bias=False),
            dt.Linear(D, D, dtype=torch.bfloat16),
        ).to(device)
    dt.prepare(net, NAMED[name])
    for i, layer in enumerate(net):
        dt.seed_rng(layer, 10 * rank + i)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=2.0**-4)


def backward(net: nn.Module, name: str, step: int, rank: int, microbatch: int, device: str) -> list[torch.Tensor]:
    """Returns the output and the input's gradient."""
    x = normal(f"x {step} {rank} {microbatch}", (64, D), "bfloat16", device).requires_grad_()
    with dt.autocast(recipe=NAMED[name]):
        y = net(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


def end(net: nn.Module) -> dict[str, torch.Tensor]:
    state = dt.plain_state_dict(net)
    return {k.replace("_orig_mod.", "").removeprefix("module."): t.detach().clone() for k, t in state.items()}


def train(rank: int, groups: Any, case: str) -> dict[str, Any]:
    name, how, way = case.split(", ")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = model(name, way, rank, here())
    inner = torch.compile(net, fullgraph=True, backend="aot_eager") if how == "compiled" else net
    wrapped: Any = DistributedDataParallel(inner, broadcast_buffers=False)  # random states are each rank's own
    run = torch.compile(wrapped, backend="aot_eager") if how == "compiled around" else wrapped
    optimizer = optimizer_of(net)
    outs, grads, graphs = [], [], []
    count = 2 if way == "two microbatches" else 1
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(count):
            with contextlib.nullcontext() if i == count - 1 else wrapped.no_sync():
                outs += backward(run, name, step, rank, i, here())
        grads += [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {"outs": outs, "grads": grads, "end": end(net), "graphs": graphs}


def reference(name: str, way: str, device: str) -> list[dict[str, Any]]:
    """Returns the expected results of each rank."""
    nets = [model(name, way, rank, device) for rank in range(RANKS)]
    optimizers = [optimizer_of(net) for net in nets]
    made: list[dict[str, Any]] = [{"outs": [], "grads": []} for _ in nets]
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            optimizers[rank].zero_grad()
            for i in range(2 if way == "two microbatches" else 1):
                made[rank]["outs"] += backward(net, name, step, rank, i, device)
        for same in zip(*(net.parameters() for net in nets), strict=True):
            total = to_torch(sum_gradients([to_numpy(p.grad) for p in same]), device)
            for rank, p in enumerate(same):
                p.grad = total.clone()
                made[rank]["grads"].append(total)
        for optimizer in optimizers:
            optimizer.step()
    return [{**of_rank, "end": end(net)} for of_rank, net in zip(made, nets, strict=True)]


@pytest.mark.filterwarnings("ignore:.*held quantized and has no master")
@pytest.mark.parametrize("case", others_slow(CASES, NOW))
def test_same_bits_as_one_process(case, on, pool, tmp_path):
    name, how, way = case.split(", ")
    made = pool.run(f"{__name__}:train", case, into=tmp_path / "made", device=on)
    for rank, (got, want) in enumerate(zip(made, reference(name, way, on), strict=True)):
        for what in ("outs", "grads"):
            for i, (g, w) in enumerate(zip(got[what], want[what], strict=True)):
                assert torch.equal(g, w.cpu()), f"rank {rank}, {what} {i}: {(g.float() - w.cpu().float()).abs().max()}"
        assert got["end"].keys() == want["end"].keys()
        for key, t in want["end"].items():
            assert torch.equal(got["end"][key], t.cpu()), f"rank {rank}, {key}"
        first, *later = got["graphs"]
        assert (first > 0) == (how != "eager") and later == [first] * (STEPS - 1), "a step was compiled anew"
