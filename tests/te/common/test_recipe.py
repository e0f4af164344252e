"""Recipes under TransformerEngine's path: arguments as Megatron-LM spells them, and what the values are."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

import diptych.te as te
from diptych import common
from diptych.te.common import recipe


def test_recipes_are_diptych_commons():
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "Format"):
        assert getattr(recipe, name) is getattr(common, name)
    spelled = recipe.DelayedScaling(
        margin=0, fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max", reduce_amax=True,
        scaling_factor_compute_algo=None, fp8_dpa=False, fp8_mha=False, backward_override=None,
    )  # fmt: skip
    assert spelled == recipe.DelayedScaling(amax_history_len=16) and spelled.reduce_amax and spelled.delayed()
    assert pickle.loads(pickle.dumps(spelled)) == spelled != recipe.DelayedScaling(reduce_amax=False)
    assert isinstance(spelled, common.DelayedScaling)
    with pytest.raises(common.UnsupportedError, match=r"DelayedScaling\.fp8_dpa must be False"):
        recipe.DelayedScaling(fp8_dpa=True)
    with pytest.raises(TypeError, match="DelayedScaling has no argument 'nonsense'"):
        recipe.DelayedScaling(nonsense=1)
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses\.replace\(it, reduce_amax=\.\.\.\)"):
        spelled.reduce_amax = False


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_under_delayed_scaling(compiled):
    grads = []
    for r in (recipe.DelayedScaling(), common.DelayedScaling()):
        torch.manual_seed(0)
        layer = te.Linear(32, 32, device="cpu")
        torch._dynamo.reset()

        def forward(x, layer=layer, r=r):
            with te.autocast(recipe=r):
                return layer(x)

        call = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
        for _ in range(2):
            call(torch.ones(16, 32).cumsum(1)).square().sum().backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)
