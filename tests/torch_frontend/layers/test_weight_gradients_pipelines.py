"""Weight gradients that go elsewhere, in torch's pipelines: right, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import DelayedScaling
from diptych.common.errors import UnsupportedError
from torch_frontend.layers.test_weight_gradients_reduced import CURRENT, D, layer_of
from torch_frontend.tools import STAGES_OF_ONE_RANK, normal, same


class Part(nn.Module):
    """A stage's module, whose inference runs on numbers that training does not know."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.full_like(x, 1e30) if self.calls == 1 else x
        with dt.autocast(recipe=DelayedScaling()):
            return self.layer(x)


def _piped(schedule: str, scale: bool | None = None, **options: Any) -> list[Any]:
    """Two stages of one rank, after one step of four microbatches."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    layers = [layer_of(**options) for _ in range(2)]
    stages = [pipelining.PipelineStage(Part(layer), i, 2, torch.device("cpu")) for i, layer in enumerate(layers)]
    given = {} if scale is None else {"scale_grads": scale}
    made = getattr(pipelining, schedule)(stages, 4, loss_fn=nn.functional.mse_loss, **given)
    made.step(normal("x", (64, D)), target=normal("t", (64, D)))
    assert all(stage.submod.calls == 5 for stage in stages)
    return layers


@STAGES_OF_ONE_RANK
def test_main_grad_in_pipelines(one_rank):
    """With scale_grads=False it is the sum over microbatches; nothing of the inference is in it."""
    fused = _piped("ScheduleInterleaved1F1B", False, fuse_wgrad_accumulation=True)
    for layer, usual in zip(fused, _piped("ScheduleInterleaved1F1B", False), strict=True):
        assert layer.weight.grad is None
        torch.testing.assert_close(layer.weight.main_grad, usual.weight.grad, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match=r"scale_grads=True: .* by 4, .*main_grad of layer \(Linear\)"):
        _piped("ScheduleInterleaved1F1B", fuse_wgrad_accumulation=True)


@STAGES_OF_ONE_RANK
@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_what_waits_is_refused_in_pipelines(one_rank, schedule):
    with pytest.raises(UnsupportedError, match=r"pipelining: layer \(Linear\) would compute .* zero-bubble schedule"):
        _piped(schedule, delay_wgrad_compute=True)


def test_a_pipeline_without_backward_runs_what_waits(one_rank):
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    layer = layer_of(delay_wgrad_compute=True)
    schedule = pipelining.ScheduleGPipe(pipelining.PipelineStage(layer, 0, 1, torch.device("cpu")), 2)
    with torch.no_grad(), dt.autocast(recipe=CURRENT):
        y = schedule.step(normal("x", (64, D)))
        want = torch.cat([layer(x) for x in normal("x", (64, D)).chunk(2)])
    same(y, want)
