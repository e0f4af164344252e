"""Factories by TransformerEngine's names: each is the recipe of its name, role by role."""

from __future__ import annotations

import pytest

from diptych.common import RECIPES, QuantizerRole
from diptych.te.common.recipe import CustomRecipe
from diptych.te.custom_recipes import quantizer_factories as factories

NAMES = {
    "delayed_scaling": "fp8-delayed", "current_scaling": "fp8-current", "float8_block_scaling": "fp8-block",
    "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_is_its_recipe(name):
    recipe = CustomRecipe(getattr(factories, f"{name}_factory"))
    for gemm, tensors in QuantizerRole.GEMMS.items():
        for tensor in tensors:
            role = QuantizerRole("linear", tensor, gemm)
            assert recipe.quantizer(role) == RECIPES[NAMES[name]].quantizer(role)
            assert factories.high_precision_factory(role) is None
