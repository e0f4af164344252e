"""amax_group under torch.compile: a process group crosses into the nodes; each rank has its eager run's bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import copy
import sys

import torch
import torch.distributed as dist

import diptych.torch as dt
from diptych.common import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling

rank, file, backend, device, every = int(sys.argv[1]), *sys.argv[2:6]
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group(
    "nccl" if device == "cuda" else "gloo", init_method=f"file://{file}", rank=rank, world_size=2,
    device_id=torch.device("cuda", rank) if device == "cuda" else None,
)
groups = {"data": dist.group.WORLD}
RECIPES = (
    Float8CurrentScaling(amax_group="data"),
    DelayedScaling(amax_group="data", amax_history_len=4),
    NVFP4BlockScaling(amax_group="data"),
)
MODULES = (lambda: dt.Linear(32, 48), lambda: dt.LayerNormLinear(32, 48), lambda: dt.LayerNormMLP(32, 48))


def train(model, fn, recipe):
    seen = []
    for i in range(4):
        torch.manual_seed(10 * i + rank)
        with dt.autocast(recipe=copy.deepcopy(recipe), amax_groups=groups):
            x = (torch.randn(16, 32) * (1 + 9 * rank)).bfloat16().to(device).requires_grad_()
            y = fn(x)
            y.float().pow(2).mean().backward()
        seen += [y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]]
    return seen


for i, recipe in enumerate(RECIPES):
    for make in MODULES if every else MODULES[i : i + 1]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        eager = make().bfloat16().to(device)
        dt.seed_rng(eager, 1)
        compiled = copy.deepcopy(eager)
        want = train(eager, eager, recipe)
        graphs = int(bool(every) or i % 2 == rank)
        fn = torch.compile(compiled, fullgraph=True, backend=backend) if graphs else compiled
        got = train(compiled, fn, recipe)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), (recipe, eager)
        a, b = eager.state_dict(), compiled.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        with dt.autocast(recipe=recipe.replace(amax_group="")):
            x = torch.ones(16, 32, dtype=torch.bfloat16, device=device)
            alone = eager(x)
        assert alone.isfinite().all()
        scales = [v for k, v in b.items() if k.endswith("input.scale")]
        for scale in scales:  # both ranks came to the same scale, from amaxes that differ
            both = [torch.empty_like(scale) for _ in range(2)]
            dist.all_gather(both, scale)
            assert torch.equal(*both) and scale.item() != 1
dist.barrier()
dist.destroy_process_group()
print("both ranks agree")
"""


def agree(tmp_path: Path, *given: str) -> None:
    command = [sys.executable, "-c", SCRIPT]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), *given],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [p.communicate(timeout=300)[0] for p in running]
    for p, text in zip(running, said, strict=True):
        assert p.returncode == 0 and "both ranks agree" in text, text


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch has no gloo"
)
@pytest.mark.parametrize(
    ("backend", "every"),
    [
        ("aot_eager", ""),
        pytest.param("aot_eager", "every module", marks=pytest.mark.slow),
        pytest.param("inductor", "", marks=pytest.mark.slow),
    ],
)
def test_two_processes(backend: str, every: str, tmp_path: Path) -> None:
    """Each recipe with one module, which one rank compiles, in turn, or with every one, which both compile."""
    agree(tmp_path, backend, "cpu", every)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes two GPUs")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_gpus(backend: str, tmp_path: Path) -> None:
    agree(tmp_path, backend, "cuda", "every module" if backend == "aot_eager" else "")
