"""Recipes and switches: a class, a name, or a recipe in place of a switch is refused with diptych's message."""

import pytest

from diptych.common import ArgumentError, MXFP8BlockScaling, linear_plan
from diptych.common.arguments import require_recipe, require_switches


@pytest.mark.parametrize("given, said", [
    (MXFP8BlockScaling, r"recipe must be a diptych Recipe .*, got the class MXFP8BlockScaling itself; .*\(\)(?m:$)"),
    ("mxfp8", r"recipe must be a diptych Recipe or None, got str; for instance Float8CurrentScaling\(\)(?m:$)"),
    (int, ".* got type"),
])  # fmt: skip
def test_what_is_no_recipe(given, said):
    with pytest.raises(ArgumentError, match="^dense: " + said):
        require_recipe("dense", given)
    with pytest.raises(TypeError, match=r"^layernorm_mlp: recipe must be a diptych Recipe, got .*"):
        linear_plan(given, "layernorm_mlp")  # what every layer of both panels asks


def test_none_is_a_recipe_where_it_may_be():
    require_recipe("dense", None)
    with pytest.raises(ArgumentError, match="must be a diptych Recipe, got NoneType"):
        require_recipe("dense", None, optional=False)


@pytest.mark.parametrize("given, said", [
    (MXFP8BlockScaling(), r"got MXFP8BlockScaling, a recipe; pass it by its name: recipe=MXFP8Block.*\(...\)(?m:$)"),
    (MXFP8BlockScaling, "got MXFP8BlockScaling, a recipe; pass it by its name"),
    (None, "got NoneType(?m:$)"), (1, "got int(?m:$)"), ("yes", "got str(?m:$)"),
])  # fmt: skip
def test_what_is_no_switch(given, said):
    require_switches("autocast", enabled=True, calibrating=False)
    with pytest.raises(ArgumentError, match="^autocast: enabled must be a bool, " + said):
        require_switches("autocast", calibrating=True, enabled=given)
