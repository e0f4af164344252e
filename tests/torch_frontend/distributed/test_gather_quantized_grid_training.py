"""Models that are cut over a tensor-parallel group and sharded by FSDP2 with quantized gathers train with the bits of
the same cut models without FSDP2, whose gradients are added in the order of the ranks."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import diptych.torch as dt
import hardware
from diptych.common import DelayedScaling, Float8CurrentScalingQuantizer, QuantizerRole
from torch_frontend.distributed.gather_cases import RECIPES, flat, optimizer_of, seeded
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import normal

pytestmark = needs_gloo
WIDTH, TOKENS, STEPS = 256, 256, 2  # parts of weights, and shares of tokens, have whole blocks of every format


@dataclass(frozen=True)
class Case:
    """`mixed`: float32 where weights are sharded, bfloat16 gathered. `checkpointed`: blocks run again in backward.
    `over`: (replicas, parts of each); two replicas are HSDP."""

    recipe: str
    sequence: bool = False
    reshard: bool = True
    mixed: bool = False
    compiled: bool = False
    microbatches: int = 1
    checkpointed: bool = False
    over: tuple[int, int] = (1, 2)


CASES = {
    "fp8-current, resharded": Case("fp8-current", True),
    "fp8-current, kept, float32 masters": Case("fp8-current", reshard=False, mixed=True),
    "fp8-delayed, two microbatches": Case("fp8-delayed", True, microbatches=2),
    "fp8-delayed, checkpointed": Case("fp8-delayed", checkpointed=True),
    "fp8-block, float32 masters": Case("fp8-block", mixed=True),
    "fp8-block-1d, kept": Case("fp8-block-1d", True, reshard=False),
    "mxfp8, two microbatches, kept": Case("mxfp8", reshard=False, microbatches=2),
    "mxfp8, checkpointed": Case("mxfp8", True, checkpointed=True),
    "mxfp8-2d, compiled": Case("mxfp8-2d", True, compiled=True),
    "nvfp4, two microbatches": Case("nvfp4", True, microbatches=2),
    "nvfp4-1d, kept": Case("nvfp4-1d", reshard=False),
    "fp8-current, two replicas": Case("fp8-current", over=(2, 1)),
    "nvfp4-1d, two replicas of two parts": Case("nvfp4-1d", True, over=(2, 2)),
}


class Block(nn.Module):
    def __init__(self, case: Case, group: Any) -> None:
        super().__init__()
        cut: dict[str, Any] = {"tp_group": group, "sequence_parallel": case.sequence}
        cut["dtype"] = torch.float32 if case.mixed else torch.bfloat16
        self.project = dt.LayerNormLinear(WIDTH, 2 * WIDTH, parallel_mode="column", **cut)
        self.out = dt.Linear(2 * WIDTH, WIDTH, parallel_mode="row", **cut)
        self.mlp = dt.LayerNormMLP(WIDTH, WIDTH, activation="swiglu", set_parallel_mode=True, **cut)
        self.checkpointed = case.checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dt.checkpoint(self.run, x) if self.checkpointed else self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.project(x))
        return x + self.mlp(x)


def model(case: Case, mesh: Any) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(case, mesh["tp"].get_group()) for _ in range(2)])
    with torch.no_grad():  # all parts have unlike amaxes
        for p in net.parameters():
            for i, part in enumerate(p.chunk(2)):
                part.mul_((1 - 0.25 * i) * (1 + 0.5 * mesh.get_local_rank("tp") * (p.dim() == 2)))
    return net.to(here())


class CurrentWeights(DelayedScaling):
    """Delayed scaling as gathered weights have it."""

    def quantizer(self, role: QuantizerRole) -> Any:
        return Float8CurrentScalingQuantizer() if role.tensor == "weight" else super().quantizer(role)


def backward(net: nn.Module, case: Case, recipe: Any, mesh: Any, step: int, i: int) -> list[torch.Tensor]:
    """Returns the output and the input's gradient."""
    x = normal(f"x {step} {mesh.get_rank() // 2} {i}", (TOKENS, WIDTH), "bfloat16", here())
    if case.sequence:
        x = x.chunk(2)[mesh.get_local_rank("tp")].contiguous()
    x.requires_grad_()
    with dt.autocast(recipe=recipe):
        y = net(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def sharded(net: nn.Sequential, case: Case, recipe: Any, mesh: Any) -> nn.Sequential:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    given: dict[str, Any] = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.mixed else {}
    ways: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**given)}
    for i, block in enumerate(net):
        if case.compiled:
            net[i] = block = torch.compile(block, fullgraph=True, backend="aot_eager")
        fully_shard(block, reshard_after_forward=case.reshard, **ways)
    fully_shard(net, **ways)
    dt.parallel.prepare(net, mesh, recipe, recompute=case.checkpointed)
    return net


def train_sharded(net: nn.Sequential, case: Case, recipe: Any, mesh: Any) -> dict[str, Any]:
    optimizer, outs, grads = optimizer_of(net), [], []
    for step in range(STEPS):
        for i in range(case.microbatches):
            net.set_requires_gradient_sync(i == case.microbatches - 1)  # type: ignore[operator]
            outs += backward(net, case, recipe, mesh, step, i)
        grads.append([p.grad.full_tensor() for p in net.parameters()])  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {"outs": outs, "grads": grads, "ends": [p.full_tensor() for p in net.parameters()]}  # type: ignore[attr-defined]


def train_without(masters: nn.Sequential, case: Case, recipe: Any, mesh: Any) -> dict[str, Any]:
    """Adds gradients over the parts, and then over the replicas, as FSDP2 does."""
    net, dtype = copy.deepcopy(masters).bfloat16(), masters[0].out.weight.dtype
    optimizer, outs, grads = optimizer_of(masters), [], []
    for step in range(STEPS):
        with torch.no_grad():
            for p, master in zip(net.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
        added: list[Any] = [0] * len(list(net.parameters()))
        for i in range(case.microbatches):
            outs += backward(net, case, recipe, mesh, step, i)
            made: list[Any] = [p.grad for p in net.parameters()]
            added = [a + grad.to(dtype) for a, grad in zip(added, made, strict=True)]
            net.zero_grad()
        for p, grad in zip(masters.parameters(), added, strict=True):
            total = grad
            for dimension, size in (("dp", case.over[1]), ("replicate", case.over[0])):
                each = [torch.empty_like(grad) for _ in range(size)]
                dist.all_gather(each, total, group=mesh[dimension].get_group())
                total = sum(each)
            p.grad = total / math.prod(case.over)
        grads.append([p.grad for p in masters.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return {"outs": outs, "grads": grads, "ends": [p.detach() for p in masters.parameters()]}


def train(rank: int, groups: Any, case: Case) -> list[dict[str, Any]]:
    """Returns the results of the sharded model and of the other one."""
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    mesh = init_device_mesh(here(), (*case.over, 2), mesh_dim_names=("replicate", "dp", "tp"))
    over = mesh["dp"] if case.over[0] == 1 else mesh["replicate", "dp"]
    made = []
    for recipe in (RECIPES[case.recipe], CurrentWeights() if case.recipe == "fp8-delayed" else RECIPES[case.recipe]):
        net = model(case, mesh)
        dt.prepare(net, recipe)
        seeded(net, rank // 2)  # ranks that share a layer draw the same random bits
        if made:
            made.append(train_without(net, case, recipe, mesh))
        else:
            made.append(train_sharded(sharded(net, case, recipe, over), case, recipe, mesh))
    return made


RUN = ("fp8-current, kept, float32 masters", "fp8-delayed, two microbatches", "mxfp8, checkpointed")


@pytest.mark.parametrize("name", [n if n in RUN else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_same_bits_as_without_fsdp(name, on, pool, tmp_path):
    case = CASES[name]
    size = 2 * math.prod(case.over)
    if on == "cuda" and (reason := hardware.cuda_missing(size)):
        pytest.skip(reason)
    ranks = pool.run(f"{__name__}:train", case, size=size, device=on, into=tmp_path / "made")
    for rank, (made, want) in enumerate(ranks):
        for what in ("outs", "grads", "ends"):
            pairs = zip(flat(made[what]), flat(want[what]), strict=True)
            wrong = [i for i, (got, expected) in enumerate(pairs) if not torch.equal(got, expected)]
            assert not wrong, f"rank {rank}, {what} {wrong}"
