"""CUDA graphs of modules that are cut over ranks: the collectives of both passes are captured with the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import diptych.torch as dt
import hardware
from torch_frontend.cut_layers import RECIPES
from torch_frontend.tools import same

pytestmark = pytest.mark.cuda
STEPS = 3


def captured(rank: int, groups: Any, recipe: str, sequence: bool) -> bool:
    """Replays of one captured step against eager steps, on new inputs and weights."""
    ways = {"tp_group": groups["data"], "sequence_parallel": sequence, "device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    net = nn.Sequential(
        dt.LayerNormLinear(256, 512, parallel_mode="column", **ways),
        dt.Linear(512, 256, parallel_mode="row", **ways),
        dt.LayerNormMLP(256, 512, activation="swiglu", set_parallel_mode=True, **ways),
    )
    x = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameters = list(net.parameters())

    def step() -> tuple[torch.Tensor, ...]:
        with dt.autocast(recipe=RECIPES[recipe]):
            y = net(x)
        return y, *torch.autograd.grad(y.float().square().mean(), [x, *parameters])

    def change(number: int) -> None:
        with torch.no_grad():
            torch.manual_seed(number)
            x.copy_(torch.randn(512, 256).chunk(2)[rank if sequence else 0] * 2**number)
            for p in parameters:
                p.mul_(1.25)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = step()
    for number in range(STEPS):
        change(number)
        want = [t.clone() for t in step()]
        graph.replay()
        torch.cuda.synchronize()
        for i, (a, b) in enumerate(zip(made, want, strict=True)):
            same(a.detach().cpu(), b.detach().cpu(), f"{recipe}, step {number}: {i}")
    return True


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_replays_have_eagers_bits(recipe, sequence, pool, tmp_path):
    if reason := hardware.cuda_missing(2):
        pytest.skip(reason)
    given = recipe, sequence
    assert pool.run(f"{__name__}:captured", *given, into=tmp_path / "made", device="cuda") == [True, True]
