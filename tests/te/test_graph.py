"""`make_graphed_callables` with TransformerEngine's order of arguments."""

from __future__ import annotations

import pytest
import torch

import diptych.te as te
from diptych.common import RECIPES, UnsupportedError


def test_arguments_are_read_in_their_order_there(monkeypatch):
    seen = {}
    monkeypatch.setattr("diptych.torch.make_graphed_callables", lambda *a, **kw: seen.update(kw, given=a))
    layer, x = te.Linear(16, 16, device="cpu"), (torch.ones(16, 16),)
    te.make_graphed_callables(layer, x, 5, True, None, True, False, RECIPES["mxfp8"])
    assert seen["given"] == (layer, x) and seen["num_warmup_iters"] == 5 and seen["allow_unused_input"]
    assert seen["enabled"] is True and seen["fp8_recipe"] == RECIPES["mxfp8"] and seen["sample_kwargs"] is None
    te.make_graphed_callables(layer, x)
    assert seen["enabled"] is False, "as there, without fp8_enabled or enabled"
    with pytest.raises(ValueError, match="name the same thing"):
        te.make_graphed_callables(layer, x, enabled=True, fp8_enabled=False)


def test_refusals_come_from_diptych_torch():
    with pytest.raises(UnsupportedError, match="sample_kwargs must be None"):
        te.make_graphed_callables(te.Linear(16, 16, device="cpu"), (torch.ones(16, 16),), sample_kwargs={"a": 1})
