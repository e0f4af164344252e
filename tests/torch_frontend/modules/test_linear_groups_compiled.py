"""amax_group under torch.compile: a process group crosses into the nodes; each rank has its eager run's bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import diptych.torch as dt
from diptych.common import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from torch_frontend.ranks import Pool, needs_gloo

RECIPES = (
    Float8CurrentScaling(amax_group="data"),
    DelayedScaling(amax_group="data", amax_history_len=4),
    NVFP4BlockScaling(amax_group="data"),
)
MODULES = (dt.Linear, dt.LayerNormLinear, dt.LayerNormMLP)


def train(model: Any, fn: Any, recipe: Any, rank: int, groups: Any, device: str) -> list[torch.Tensor]:
    """Each step's output and gradients, of steps on rows of this rank's own."""
    seen = []
    for i in range(4):
        torch.manual_seed(10 * i + rank)
        with dt.autocast(recipe=copy.deepcopy(recipe), amax_groups=groups):
            x = (torch.randn(16, 32) * (1 + 9 * rank)).bfloat16().to(device).requires_grad_()
            y = fn(x)
            y.float().pow(2).mean().backward()
        seen += [y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]]
    return seen


def on_rank(rank: int, groups: Any, backend: str = "aot_eager", device: str = "cpu", every: str = "") -> int:
    """Holds compiled layers to eager ones and **returns** how many: each recipe with one module, which one rank
    compiles, in turn, or with every one, which both compile."""
    held = 0
    for i, recipe in enumerate(RECIPES):
        for make in MODULES if every else MODULES[i : i + 1]:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            torch.manual_seed(0)
            eager = make(32, 48).bfloat16().to(device)
            dt.seed_rng(eager, 1)
            compiled = copy.deepcopy(eager)
            want = train(eager, eager, recipe, rank, groups, device)
            graphs = int(bool(every) or i % 2 == rank)
            fn = torch.compile(compiled, fullgraph=True, backend=backend) if graphs else compiled
            got = train(compiled, fn, recipe, rank, groups, device)
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), (recipe, eager)
            a, b = eager.state_dict(), compiled.state_dict()
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
            with dt.autocast(recipe=recipe.replace(amax_group="")):
                assert eager(torch.ones(16, 32, dtype=torch.bfloat16, device=device)).isfinite().all()
            for scale in [v for k, v in b.items() if k.endswith("input.scale")]:
                both = [torch.empty_like(scale) for _ in range(2)]  # the same scale, from amaxes that differ
                dist.all_gather(both, scale)
                assert torch.equal(*both) and scale.item() != 1
            held += 1
    return held


@needs_gloo
def test_two_processes(ranks: list[int]) -> None:
    assert ranks == [len(RECIPES)] * 2


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "every"), [("aot_eager", "every module"), ("inductor", "")])
def test_two_processes_of_their_own(backend: str, every: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(f"{__name__}:on_rank", backend, "cpu", every, into=tmp_path / "made")


@pytest.mark.parametrize("on", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_gpus(on: str, backend: str, pool: Pool, tmp_path: Path) -> None:
    every = "every module" if backend == "aot_eager" else ""
    pool.run(f"{__name__}:on_rank", backend, on, every, into=tmp_path / "made", device=on)
