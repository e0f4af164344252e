"""Linear layers cut over ranks have the bits of the oracle's whole tensors, and send bytes that are quantized."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from torch_frontend.cut_layers import RECIPES, Case, Reference, dtypes_of, expected
from torch_frontend.ranks import Pool, needs_gloo
from torch_frontend.tools import same

pytestmark = needs_gloo
PLACES = tuple(itertools.product(("column", "row"), (False, True)))
VALUES = ("zero_blocks", "subnormal_input", "powers_of_two", "outlier", "inf_nan_mix", "huge")


def _cells() -> list[Any]:
    """Each recipe cut in every way, with dtypes in turn; a long sweep runs the others."""
    cells = []
    for row, recipe in enumerate(RECIPES):
        for column, (mode, sequence) in enumerate(PLACES):
            for turn, dtypes in enumerate(dtypes_of(recipe)):
                case = Case(recipe, mode, sequence, dtypes, steps=3 if recipe == "delayed" else 1)
                runs = turn == (row + column) % len(dtypes_of(recipe))
                cells.append(pytest.param(case, id=str(case), marks=() if runs else pytest.mark.slow))
    return cells


def require_oracles_bits(case: Case, pool: Pool, into: Path) -> None:
    ranks = pool.run("torch_frontend.cut_layers:steps", case, size=case.size, into=into / "made")
    reference = Reference(RECIPES[case.recipe])
    for i in range(case.steps):
        for rank, want in enumerate(expected(case, reference, i)):
            got = ranks[rank][i]
            assert got.keys() == want.keys()
            for name in want:
                same(got[name], want[name], f"{case}, step {i}, rank {rank}: {name}")


@pytest.mark.parametrize("case", _cells())
def test_oracles_bits(case, pool, tmp_path):
    require_oracles_bits(case, pool, tmp_path)


def _adversarial() -> list[Any]:
    cells = []
    for row, recipe in enumerate(RECIPES):
        for column, values in enumerate(VALUES):
            for turn, (mode, sequence) in enumerate(PLACES):
                dtypes = dtypes_of(recipe)[(row + column + turn) % len(dtypes_of(recipe))]
                case = Case(recipe, mode, sequence, dtypes, values, steps=2)
                runs = (row + column) % 3 == 0 and turn == (row + column) // 3 % 4
                cells.append(pytest.param(case, id=str(case), marks=() if runs else pytest.mark.slow))
    return cells


@pytest.mark.parametrize("case", _adversarial())
def test_zeros_subnormals_and_wide_ranges(case, pool, tmp_path):
    require_oracles_bits(case, pool, tmp_path)


def _four() -> list[Any]:
    cells = []
    for row, recipe in enumerate(RECIPES):
        for column, (mode, sequence) in enumerate(PLACES):
            case = Case(recipe, mode, sequence, dtypes_of(recipe)[row % 2], size=4, steps=2)
            runs = recipe in ("current", "nvfp4") and column == 2 * (row % 2) + 1
            cells.append(pytest.param(case, id=str(case), marks=() if runs else pytest.mark.slow))
    return cells


@pytest.mark.parametrize("case", _four())
def test_four_ranks(case, pool, tmp_path):
    require_oracles_bits(case, pool, tmp_path)
