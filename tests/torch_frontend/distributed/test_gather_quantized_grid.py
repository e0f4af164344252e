"""Every recipe sharded by FSDP2, cut over a tensor-parallel group, and both at once on four ranks, against the
oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from torch_frontend.cut_layers import RECIPES, dtypes_of
from torch_frontend.distributed.grid_cases import WAYS, Grid, check
from torch_frontend.ranks import needs_gloo

pytestmark = [needs_gloo, pytest.mark.sampled]


def _cells() -> list[Any]:
    """Returns cells of FSDP2 x TP: each recipe each way eagerly, and some compiled; modes and dtypes take turns. A long
    sweep runs the others."""
    cells = []
    numbers = itertools.product(enumerate(RECIPES), enumerate(WAYS), enumerate(("column", "row")), (False, True))
    for (i, recipe), (j, way), (k, mode), compiled in numbers:
        dp, tp, sequence = WAYS[way]
        dtypes = dtypes_of(recipe)[(i + j + k) % len(dtypes_of(recipe))]
        case = Grid(recipe, mode, sequence, dtypes, size=tp, dp=dp, compiled=compiled)
        runs = dp == tp and k == (i + j) % 2 and (not compiled or (i % 4 == 0 and (i // 4 + j) % 2 == 1))
        name = f"{way}-{case}{'-compiled' if compiled else ''}"
        cells.append(pytest.param(case, id=name, marks=() if runs else pytest.mark.slow))
    return cells


@pytest.mark.parametrize("case", _cells())
def test_oracles_bits(case, pool, tmp_path):
    check(case, pool.run("torch_frontend.distributed.grid_cases:steps", case, size=4, into=tmp_path / "made"))
