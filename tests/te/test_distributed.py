"""`checkpoint` with TransformerEngine's default."""

from __future__ import annotations

import torch

import diptych.te as te
from diptych.te.common.recipe import DelayedScaling


def test_checkpoint_gives_the_bits_of_a_plain_call():
    layer, made = te.Linear(32, 32, device="cpu"), []
    x = torch.randn(16, 32, requires_grad=True)
    for options in (None, {}, {"use_reentrant": False}):
        layer.zero_grad()
        layer._modules.pop("scale_states", None)
        with te.autocast(recipe=DelayedScaling()):
            y = layer(x) if options is None else te.checkpoint(layer, x, **options)
            assert options is None or ("Checkpoint" in type(y.grad_fn).__name__) is (options == {})
            y.square().sum().backward()
        made.append(layer.weight.grad.clone())
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
