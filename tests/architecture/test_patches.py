"""The sources still hold what the mutants of test_variants.py change, which only slow tests build."""

from pathlib import Path

import pytest

from architecture.test_variants import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutants_text_stands_once_in_the_source(name):
    _, _, patch = MUTANTS[name]
    assert (ROOT / patch.path).read_text().count(patch.old) == 1, f"{patch.path}: update the patch {name}"
