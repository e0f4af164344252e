"""Captures of several processes: each rank records what it holds, with the values of one process that runs all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_frontend.ranks import here, needs_gloo

from diptych.lab.traces import Trace
from diptych.torch import lab

pytestmark = needs_gloo
STEPS, RATE = 2, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def made(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device)


def batch(rank: int, device: str) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)).to(device)


def on_rank(rank: int, groups: Any, way: str, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device = here()
    model, mesh = made(device), init_device_mesh(device, (2,))
    if way == "fsdp":
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif way == "tp":
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    train(model, folder, batch(0 if way == "tp" else rank, device))


def train(model: nn.Module, folder: str, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with lab.capture(model, out=folder, values="full", ops="all") as t:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            t.step()


def values(trace: Trace, rank: int, step: int) -> dict[str, np.ndarray]:
    found = {}
    for o in trace.ranks[rank].step(step):
        assert o.values is not None and o.values.whole
        found[o.site.key.replace("module.", "")] = o.values.tensor.bits.view(np.float32)
    return found


def near(got: np.ndarray, want: np.ndarray, label: str) -> None:
    assert got.shape == want.shape, label
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=label)


def shard(x: np.ndarray, rank: int, dim: int = 0) -> np.ndarray:
    return np.split(x, 2, dim)[rank]


@pytest.fixture
def run(pool, tmp_path, on):
    def run(way: str) -> Trace:
        function, folder = "lab.in_torch.test_capture_ranks:on_rank", str(tmp_path / way)
        pool.run(function, way, folder, into=tmp_path / "out", device=on)
        trace = Trace.open(tmp_path / way)
        assert trace.meta.ranks == 2 and trace.steps == list(range(STEPS)) and set(trace.ranks) == {0, 1}
        return trace

    return run


@pytest.fixture
def alone(tmp_path, on):
    """The first step of one process on each rank's batch."""
    found = []
    for rank in range(2):
        train(made(on), str(tmp_path / f"alone{rank}"), batch(rank, on))
        found.append(values(Trace.open(tmp_path / f"alone{rank}"), 0, 0))
    return found


def test_fully_shard(run, alone):
    """Activations are those of the rank's batch; parameters and their averaged gradients are shards."""
    trace = run("fsdp")
    for rank in range(2):
        got = values(trace, rank, 0)
        assert got.keys() == alone[rank].keys()
        for key, x in got.items():
            want = alone[rank][key]
            if key.startswith("parameter_grad:"):
                want = shard((alone[0][key] + alone[1][key]) / 2, rank)
            elif key.startswith("parameter:"):
                want = shard(want, rank)
            near(x, want, key)
        name = "0.up.weight"
        updated = got[f"parameter:{name}"] - RATE * got[f"parameter_grad:{name}"]
        near(values(trace, rank, 1)[f"parameter:{name}"], updated, name)


def test_data_parallel(run, alone):
    """Gradients of parameters are the rank's own, before they are averaged."""
    trace = run("ddp")
    for rank in range(2):
        for key, x in values(trace, rank, 0).items():
            if key.partition(":")[2] not in ("(model)", "module", ""):
                near(x, alone[rank][key], key)
        name = "1.down.weight"
        mean = (alone[0][f"parameter_grad:{name}"] + alone[1][f"parameter_grad:{name}"]) / 2
        near(values(trace, rank, 1)[f"parameter:{name}"], alone[rank][f"parameter:{name}"] - RATE * mean, name)


def test_tensor_parallel(run, alone):
    """Both ranks have the batch; cut weights, and what is between them, are shards."""
    trace = run("tp")
    for rank in range(2):
        got, one = values(trace, rank, 0), alone[0]
        for key, x in got.items():
            name = key.partition(":")[2]
            if ".up" in key or "gelu" in key:
                want = shard(one[key], rank, 0 if "parameter" in key else 1)
            elif name.endswith(".down.weight"):
                want = shard(one[key], rank, 1)
            else:
                want = one[key]
            near(x, want, key)
        assert {
            "activation:0.up",
            "activation_grad:1.down",
            "parameter_grad:0.up.bias",
            "activation:(model)",
        } <= got.keys()
