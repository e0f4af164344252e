"""Regions under TransformerEngine's names, and the ranks over which they reduce amaxes."""

from __future__ import annotations

import pytest
import torch

import diptych.te as te
import diptych.torch as dt
from diptych import common
from diptych.common import RECIPES, Float8CurrentScaling, MXFP8BlockScaling, UnsupportedError, row_align
from diptych.te import fp8, quantization
from diptych.te.common.recipe import CustomRecipe, DelayedScaling


def test_names_by_their_paths():
    for name in vars(fp8):
        if not name.startswith("_") and name != "absent":
            assert getattr(fp8, name) is getattr(quantization, name) is getattr(te, name)


def test_regions():
    for region in (te.autocast(True, False, MXFP8BlockScaling()), te.fp8_autocast(fp8_recipe=MXFP8BlockScaling())):
        with region:
            assert dt.get_autocast_recipe() == MXFP8BlockScaling()
    with te.autocast(enabled=False):
        assert dt.get_autocast_recipe() is None
    with pytest.raises(UnsupportedError, match="autocast: _graph must be False"):
        te.autocast(_graph=True)


def _nothing(role):
    return None


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ranks_of_delayed_scaling_without_ranks():
    named = te.autocast(recipe=DelayedScaling(), amax_reduction_group="group")
    assert named.amax_groups == {"": "group"} and te.autocast(recipe=DelayedScaling()).amax_groups is None
    own = te.autocast(recipe=common.DelayedScaling(), amax_reduction_group="group")
    assert own.amax_groups == {"": "group"}, "diptych's own value has no ranks of its own, and takes those given"
    assert te.autocast(recipe=DelayedScaling(reduce_amax=False), amax_reduction_group="group").amax_groups is None


def test_ranks_of_delayed_scaling(monkeypatch, one_rank):
    given, distributed = object(), torch.distributed
    group = lambda recipe, named=None: te.autocast(recipe=recipe, amax_reduction_group=named).amax_groups  # noqa: E731
    for ranks, everyone in ((1, None), (2, {"": distributed.group.WORLD})):
        monkeypatch.setattr(distributed, "get_world_size", lambda ranks=ranks: ranks)
        assert group(DelayedScaling()) == group(CustomRecipe(_nothing)) == everyone
        assert group(DelayedScaling(), given) == {"": given}
        for recipe in (DelayedScaling(reduce_amax=False), Float8CurrentScaling(), common.DelayedScaling(), None):
            assert group(recipe) is None


def test_rows_at_which_groups_should_begin():
    align = quantization.get_align_size_for_quantization
    for recipe in RECIPES.values():
        assert align(recipe) % row_align(recipe) == 0
    assert align(RECIPES["mxfp8"]) == 32 and align(RECIPES["nvfp4"]) == align(CustomRecipe(_nothing)) == 128
    assert align(RECIPES["fp8-block"]) == 128 and align(RECIPES["fp8-current"]) == 32
